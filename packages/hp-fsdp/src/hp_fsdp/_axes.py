"""The mesh axes that a group communicates over."""

from dataclasses import dataclass

import torch.distributed as dist

from hp_dtensor import Axis

from ._errors import MeshError


class Alone:
    """A group of this rank only, over which nothing is ever communicated."""

    def rank(self) -> int:
        """Return 0."""
        return 0

    def size(self) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The axes that gradients are reduced over: scattered over one, summed over the others."""

    shard: Axis
    replicate: tuple[Axis, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks that gradients are reduced over."""
        size = self.shard.size
        for axis in self.replicate:
            size *= axis.size
        return size

    @property
    def named(self) -> tuple[Axis, ...]:
        """Return all axes of the mesh, outermost first."""
        own = () if isinstance(self.shard.group, Alone) else (self.shard,)
        return (*self.replicate, *own)

    def replicated(self) -> "DataAxes":
        """Return the axes of parameters that every rank keeps whole."""
        rank = self.shard.ranks[self.shard.index]
        return DataAxes(Axis("alone", Alone(), (rank,)), (*self.replicate, self.shard))


def split_axis(axis: Axis, size: int) -> Axis:
    """Return the block of ``size`` neighbours on ``axis`` that this rank is in.

    Makes a process group, for which all ranks of the block wait.
    """
    start = axis.index // size * size
    return new_axis(axis, axis.ranks[start : start + size], f"{axis.name}[{size}]")


def new_axis(axis: Axis, ranks: tuple[int, ...], name: str) -> Axis:
    """Return an axis over some ranks of ``axis``, with a process group of its own.

    All of these ranks wait for it. Raises `MeshError` for an axis without process group.
    """
    if not isinstance(axis.group, dist.ProcessGroup):
        raise MeshError(
            f"axis {axis.name!r} has no process group, so none like it can be made; leave "
            "reshard_after_forward a bool, and reductions on the mesh's groups"
        )
    group = dist.new_group(
        list(ranks), backend=dist.get_backend(axis.group), use_local_synchronization=True
    )
    return Axis(name, group, ranks)
