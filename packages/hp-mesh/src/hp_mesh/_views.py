"""The ways to cut the world into axes, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

ALIASES = {"batch": "dp", "dp_ep": "dp", "dp_cp": "loss", "ep_shard": "ep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Base axes ``parts`` folded into one and cut again into ``axes``, outermost first.

    Parts fold in rank order; ``outside`` keeps the first part outermost all the same.
    """

    parts: tuple[str, ...]
    axes: tuple[str, ...]
    outside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """What decides the views besides the order of ranks: resolved degrees and how they fold."""

    degrees: Mapping[str, int]
    ulysses_degree: int | None
    peer: bool
    fsdp_folds_cp: bool

    @property
    def sharding(self) -> tuple[str, ...]:
        """Return the base axes whose ranks see other samples and share a dense replica."""
        return ("dp_shard", "ep") if self.peer else ("dp_shard",)


def _same(name: str) -> Cut:
    return Cut(parts=(name,), axes=(name,))


_PP, _REPLICATE, _EP, _CP, _TP = map(_same, ("pp", "dp_replicate", "ep", "cp", "tp"))


def view_cuts(cutting: Cutting) -> dict[str, tuple[Cut, ...]]:
    """Return each view as its cuts, in the order in which names are looked up.

    Dense comes first so that ``tp`` and ``fsdp`` are axes of one torch mesh, which is what FSDP
    with tensor parallel needs whatever the rank order; sparse next, for ``efsdp`` and ``ep``.
    """
    samples = tuple(map(_same, cutting.sharding))
    data = ("dp_replicate", *cutting.sharding)
    views = {
        "dense": (_PP, *_dense_cuts(cutting), _TP),
        "sparse": (_PP, _REPLICATE, *_expert_cuts(cutting)),
        "base": (_PP, _REPLICATE, *samples, _CP, _TP),
        "data": (_PP, Cut(parts=data, axes=("dp",)), _CP, _TP),
        "loss": (_PP, Cut(parts=(*data, "cp"), axes=("loss",)), _TP),
        "expert": (_PP, *_replicated_expert_cuts(cutting)),
    }
    if cutting.ulysses_degree is not None:
        inner = Cut(parts=("cp",), axes=("cp_outer", "ulysses"))
        views["sequence"] = (_PP, _REPLICATE, *samples, inner, _TP)
    return views


def _dense_cuts(cutting: Cutting) -> tuple[Cut, ...]:
    if cutting.fsdp_folds_cp:
        return _REPLICATE, Cut(parts=(*cutting.sharding, "cp"), axes=("fsdp",))
    replicate = Cut(parts=("dp_replicate", "cp"), axes=("replicate",))
    return replicate, Cut(parts=cutting.sharding, axes=("fsdp",))


def _expert_cuts(cutting: Cutting) -> tuple[Cut, ...]:
    if cutting.peer:
        return _peer_cuts(cutting, (), "efsdp")
    etp = cutting.degrees["etp"]
    if etp == 1 or etp != cutting.degrees["tp"]:
        return (Cut(parts=("dp_shard", "cp", "tp"), axes=("efsdp", "ep", "etp")),)
    # A weight that is cut over etp meets activations that are cut over tp: the same ranks.
    return Cut(parts=("dp_shard", "cp"), axes=("efsdp", "ep")), Cut(parts=("tp",), axes=("etp",))


def _replicated_expert_cuts(cutting: Cutting) -> tuple[Cut, ...]:
    if cutting.peer:
        return _peer_cuts(cutting, ("dp_replicate",), "ep_replicate")
    block, *rest = _expert_cuts(cutting)
    parts, axes = ("dp_replicate", *block.parts), ("ep_replicate", *block.axes[1:])
    return Cut(parts=parts, axes=axes, outside=True), *rest


def _peer_cuts(cutting: Cutting, replicas: tuple[str, ...], name: str) -> tuple[Cut, ...]:
    whole = cutting.degrees["etp"] == 1  # then tp ranks hold other experts or other shards of one
    shards = ("dp_shard", "cp", "tp") if whole else ("dp_shard", "cp")
    etp = Cut(parts=() if whole else ("tp",), axes=("etp",))
    return Cut(parts=(*replicas, *shards), axes=(name,)), _EP, etp


def axis_sizes(cutting: Cutting) -> dict[str, int]:
    """Return the size of every axis of every view."""
    degrees = cutting.degrees
    replicate, shard, cp, tp = (degrees[n] for n in ("dp_replicate", "dp_shard", "cp", "tp"))
    ep, etp = degrees["ep"], degrees["etp"]
    sharding = prod(degrees[name] for name in cutting.sharding)
    efsdp = shard * cp * tp // etp if cutting.peer else shard * cp * tp // (ep * etp)
    sizes = {n: degrees[n] for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")}
    sizes |= {"dp": replicate * sharding, "loss": replicate * sharding * cp}
    sizes |= {"efsdp": efsdp, "ep_replicate": replicate * efsdp}
    if cutting.fsdp_folds_cp:
        sizes |= {"fsdp": sharding * cp}
    else:
        sizes |= {"fsdp": sharding, "replicate": replicate * cp}
    if cutting.ulysses_degree is not None:
        sizes |= {"cp_outer": cp // cutting.ulysses_degree, "ulysses": cutting.ulysses_degree}
    return sizes


def aliases(cutting: Cutting) -> dict[str, str]:
    """Return the names that stand for an axis of another name."""
    return {**ALIASES, "replicate": "dp_replicate"} if cutting.fsdp_folds_cp else ALIASES
