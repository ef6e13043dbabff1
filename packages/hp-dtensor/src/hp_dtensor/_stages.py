"""The collectives of a plan's steps on one rank's part of a tensor, ready to be started."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._pieces import joiner, parter, taken, within
from ._placements import Partial, Shard
from ._steps import Step
from .collectives._interface import Axis, Collectives, ReduceOp

Finish: TypeAlias = Callable[[], Tensor]
# Starts a step's collective, or does a step that needs none.
Stage: TypeAlias = Callable[[Tensor, Collectives], Finish | Tensor]


class Fold(NamedTuple):
    """A process group that spans some mesh axes, and where their positions are in it.

    ``find`` looks the group up at each call, so that what is kept never outlives a group.
    ``members[i]`` is the group index of the rank at row-major position ``i`` on the axes; ``size``
    the number of ranks in the group.
    """

    find: Callable[[], Axis]
    members: tuple[int, ...]
    size: int

    @property
    def in_mesh_order(self) -> bool:
        """Return whether the group's ranks are those along the axes, in the same order."""
        return self.members == tuple(range(self.size))


def empty_stage(step: Step, shape: tuple[int, ...], rank: int) -> Stage:
    """Return what makes the rank's part of a tensor without elements."""
    result = step.target.local_shape(shape, rank)
    return lambda x, collectives: x.new_empty(result)


def slice_stage(step: Step, shape: tuple[int, ...], rank: int) -> Stage:
    """Return what copies the part to keep."""
    coordinate = step.source.coordinate(rank)
    held = step.source.box_at(shape, coordinate)
    cut = within(step.target.box_at(shape, coordinate), held)

    def copy(x: Tensor, collectives: Collectives) -> Tensor:
        return taken(x, cut).clone(memory_format=torch.contiguous_format)

    return copy


def all_gather_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return one all-gather of equal parts of a dim."""
    part = step.source.local_shape(shape, rank)
    join = joiner(part, _sharded(step)[0], fold.size)
    find = fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.all_gather(find(), [x])
        return lambda: join(work.wait()[0])

    return begin


def all_to_all_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return one all-to-all that gathers one dim and splits another, equally."""
    old, new = _sharded(step)
    held = step.source.local_shape(shape, rank)
    piece = list(held)
    piece[new] //= fold.size
    parted = parter(held, new, fold.size)
    join = joiner(tuple(piece), old, fold.size)
    find = fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.all_to_all(find(), parted(x))
        return lambda: join(work.wait()[0])

    return begin


def all_reduce_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return one all-reduce of a copy."""
    op, find = _op(step), fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        own = x.clone(memory_format=torch.contiguous_format)
        work = collectives.all_reduce(find(), [own], op)
        return lambda: work.wait()[0]

    return begin


def reduce_scatter_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return one reduce-scatter; one all-to-all and a sum where parts differ or change order."""
    even = step.source.is_even(shape) and step.target.is_even(shape)
    if not (even and fold.in_mesh_order):
        return _scatter_by_exchange(step, fold)
    _, dim = _sharded(step)
    parted = parter(step.source.local_shape(shape, rank), dim, fold.size)
    result = step.target.local_shape(shape, rank)
    op, find = _op(step), fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.reduce_scatter(find(), [parted(x)], op=op)
        return lambda: work.wait()[0].view(result)

    return begin


def _scatter_by_exchange(step: Step, fold: Fold) -> Stage:
    _, dim = _sharded(step)
    op, find, size = _op(step), fold.find, fold.size
    positions = sorted(range(size), key=fold.members.__getitem__)

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        axis = find()
        longest = -(-x.shape[dim] // size)
        cuts = [min(longest * i, x.shape[dim]) for i in range(size + 1)]
        chunks = [x.narrow(dim, lo, hi - lo) for lo, hi in pairwise(cuts)]
        parts = [chunks[position] for position in positions]
        mine = parts[axis.index]
        work = collectives.all_to_all(
            axis,
            torch.cat([part.reshape(-1) for part in parts]),
            [part.numel() for part in parts],
            [mine.numel()] * size,
        )
        return lambda: _reduced(work.wait()[0].view(size, *mine.shape), op)

    return begin


def _sharded(step: Step) -> tuple[int, int]:
    """Return the dims that the step's axis shards before and after; -1 where it shards none."""
    (axis,) = step.axes
    old, new = step.source.placements[axis], step.target.placements[axis]
    return old.dim if isinstance(old, Shard) else -1, new.dim if isinstance(new, Shard) else -1


def _op(step: Step) -> ReduceOp:
    old = step.source.placements[step.axes[0]]
    return old.op if isinstance(old, Partial) else "sum"


def _reduced(parts: Tensor, op: ReduceOp) -> Tensor:
    if op == "sum":
        return parts.sum(0, dtype=parts.dtype)
    if op == "avg":
        return parts.sum(0, dtype=parts.dtype) / parts.shape[0]
    if op == "max":
        return parts.amax(0)
    if op == "min":
        return parts.amin(0)
    return parts.prod(0, dtype=parts.dtype)
