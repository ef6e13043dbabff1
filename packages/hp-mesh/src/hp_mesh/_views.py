"""The ways to cut the world into axes, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ALIASES = {"batch": "dp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Adjacent base axes ``parts`` folded into one and cut again into ``axes``, outermost first."""

    parts: tuple[str, ...]
    axes: tuple[str, ...]


def _same(name: str) -> Cut:
    return Cut(parts=(name,), axes=(name,))


_PP, _REPLICATE, _SHARD, _CP, _TP = map(_same, ("pp", "dp_replicate", "dp_shard", "cp", "tp"))


def view_cuts(degrees: Mapping[str, int], ulysses_degree: int | None) -> dict[str, tuple[Cut, ...]]:
    """Return each view as its cuts, in the order in which names are looked up.

    Dense comes first so that ``tp`` and ``fsdp`` are axes of one torch mesh, which is what FSDP
    with tensor parallel needs whatever the rank order.
    """
    views = {
        "dense": (_PP, _REPLICATE, Cut(parts=("dp_shard", "cp"), axes=("fsdp",)), _TP),
        "base": (_PP, _REPLICATE, _SHARD, _CP, _TP),
        "data": (_PP, Cut(parts=("dp_replicate", "dp_shard"), axes=("dp",)), _CP, _TP),
        "loss": (_PP, Cut(parts=("dp_replicate", "dp_shard", "cp"), axes=("loss",)), _TP),
        "sparse": (_PP, _REPLICATE, *_expert_cuts(degrees["etp"])),
    }
    if ulysses_degree is not None:
        inner = Cut(parts=("cp",), axes=("cp_outer", "ulysses"))
        views["sequence"] = (_PP, _REPLICATE, _SHARD, inner, _TP)
    return views


def _expert_cuts(etp: int) -> tuple[Cut, ...]:
    if etp == 1:
        return (Cut(parts=("dp_shard", "cp", "tp"), axes=("efsdp", "ep", "etp")),)
    # A weight that is cut over etp meets activations that are cut over tp: the same ranks.
    return Cut(parts=("dp_shard", "cp"), axes=("efsdp", "ep")), Cut(parts=("tp",), axes=("etp",))


def axis_sizes(degrees: Mapping[str, int], ulysses_degree: int | None) -> dict[str, int]:
    """Return the size of every axis of every view from the resolved degrees."""
    replicate, shard, cp, tp = (degrees[n] for n in ("dp_replicate", "dp_shard", "cp", "tp"))
    sizes = {name: degrees[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    sizes |= {"dp": replicate * shard, "fsdp": shard * cp, "loss": replicate * shard * cp}
    experts = degrees["ep"] * degrees["etp"]
    sizes |= {"efsdp": prod((shard, cp, tp)) // experts, "ep": degrees["ep"], "etp": degrees["etp"]}
    if ulysses_degree is not None:
        sizes |= {"cp_outer": cp // ulysses_degree, "ulysses": ulysses_degree}
    return sizes
