"""The degrees of one configuration, and the groups that they make in rank order."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from .._dims import ParallelDims


class Group(NamedTuple):
    """``size`` ranks, ``stride`` apart: on the links, all that matters of an axis."""

    size: int
    stride: int


class Point(NamedTuple):
    """Resolved degrees, with experts folded into the dense ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        """Return how many ranks see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return over how many ranks dense parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Return over how many ranks the parameters of experts are sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def dims(self) -> ParallelDims:
        """Return the degrees as they are built."""
        return ParallelDims(**self._asdict(), world_size=self.world)


def point_of(dims: ParallelDims) -> Point:
    """Return the degrees of a resolved configuration.

    Experts on ranks of their own are data-parallel ranks to the dense layers, which is what folding
    them into more ``dp_shard`` says too.
    """
    layout = dims.layout()
    own = dims.ep if dims.ep_mode == "peer" else 1
    return Point(
        pp=dims.pp,
        dp_replicate=dims.dp_replicate,
        dp_shard=layout.size("dp_shard") * own,
        cp=dims.cp,
        tp=dims.tp,
        ep=dims.ep,
        etp=dims.etp,
    )


def groups_of(point: Point, order: Sequence[str]) -> dict[str, Group]:
    """Return the group of every axis that communicates, for an order of axes, outermost first.

    ``fsdp`` folds ``dp_shard`` and ``cp``; where the order separates them its stride is the smaller
    one. The sparse axes are innermost, ``etp`` before ``ep``.
    """
    base = [name for name in order if name != "ep"]
    sizes = point._asdict()
    strides = {name: prod(sizes[n] for n in base[i + 1 :]) for i, name in enumerate(base)}
    parts = [strides[name] for name in ("dp_shard", "cp") if sizes[name] > 1]
    return {
        "tp": Group(point.tp, strides["tp"]),
        "cp": Group(point.cp, strides["cp"]),
        "fsdp": Group(point.fsdp, min(parts, default=1)),
        "dp_replicate": Group(point.dp_replicate, strides["dp_replicate"]),
        "pp": Group(point.pp, strides["pp"]),
        "ep": Group(point.ep, point.etp),
        "efsdp": Group(point.efsdp, point.ep * point.etp),
    }
