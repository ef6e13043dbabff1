"""Configurations to draw from."""

from math import prod
from typing import Any

from hypothesis import strategies as st

from hp_mesh import DEFAULT_ORDER, ParallelDims

BASE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def axes_of(degrees: dict[str, Any]) -> tuple[str, ...]:
    """Return the names whose degrees multiply to the world."""
    return (*BASE, "ep") if degrees.get("ep_mode") == "peer" else BASE


@st.composite
def fields(draw: st.DrawFn, *, max_world: int = 256) -> dict[str, Any]:
    """Give legal degrees of a world of at most ``max_world`` ranks, without the world's size."""
    degrees: dict[str, Any] = {"ep_mode": draw(st.sampled_from(["folded", "peer"]))}
    axes = axes_of(degrees)
    degrees |= dict.fromkeys(axes, 1)
    for name in draw(st.permutations(axes)):
        room = max_world // prod(degrees[axis] for axis in axes)
        degrees[name] = draw(st.integers(1, min(room, 6)))
    free = draw(st.booleans())
    block = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    folded = degrees["ep_mode"] == "folded"
    etp = draw(st.sampled_from(divisors(block) if free and folded else [1, degrees["tp"]]))
    if folded:
        degrees["ep"] = draw(st.sampled_from(divisors(block // etp)))
    ulysses = draw(st.none() | st.sampled_from(divisors(degrees["cp"])))
    folds = draw(st.booleans())
    others = {"etp": etp, "ulysses_degree": ulysses, "fsdp_folds_cp": folds, "free_etp": free}
    return degrees | others


def world_of(degrees: dict[str, Any]) -> int:
    return prod(int(degrees[name]) for name in axes_of(degrees))


orders = st.permutations(DEFAULT_ORDER).map(tuple)


@st.composite
def dims(draw: st.DrawFn, *, max_world: int = 256, any_order: bool = True) -> ParallelDims:
    """Give a resolved configuration, in any order of the axes unless the default is asked for."""
    degrees = draw(fields(max_world=max_world))
    order = draw(orders) if any_order else DEFAULT_ORDER
    return ParallelDims(**degrees, order=order, world_size=world_of(degrees))
