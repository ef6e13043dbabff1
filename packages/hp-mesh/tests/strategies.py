"""Configurations to draw from."""

from math import prod
from typing import Any

from hypothesis import strategies as st

from hp_mesh import DEFAULT_ORDER, ParallelDims

BASE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def fields(draw: st.DrawFn, *, max_world: int = 256) -> dict[str, Any]:
    """Give legal degrees of a world of at most ``max_world`` ranks, without the world's size."""
    degrees: dict[str, Any] = dict.fromkeys(BASE, 1)
    for name in draw(st.permutations(BASE)):
        room = max_world // prod(degrees.values())
        degrees[name] = draw(st.integers(1, min(room, 6)))
    etp = draw(st.sampled_from(sorted({1, degrees["tp"]})))
    block = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from(divisors(block // etp)))
    ulysses = draw(st.none() | st.sampled_from(divisors(degrees["cp"])))
    return {**degrees, "ep": ep, "etp": etp, "ulysses_degree": ulysses}


def world_of(degrees: dict[str, Any]) -> int:
    return prod(int(degrees[name]) for name in BASE)


orders = st.permutations(DEFAULT_ORDER).map(tuple)


@st.composite
def dims(draw: st.DrawFn, *, max_world: int = 256, any_order: bool = True) -> ParallelDims:
    """Give a resolved configuration, in any order of the axes unless the default is asked for."""
    degrees = draw(fields(max_world=max_world))
    order = draw(orders) if any_order else DEFAULT_ORDER
    return ParallelDims(**degrees, order=order, world_size=world_of(degrees))
