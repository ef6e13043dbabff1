"""The collectives of a plan's steps on one rank's part of a tensor, ready to be started."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..collectives._interface import Axis, Collectives, ReduceOp
from ..layouts._intervals import chunk, unravel
from ..layouts._placements import Partial, Shard
from ..plans._steps import Step
from ..plans._transfer import plan_transfer
from ._frames import Frame
from ._pieces import joiner, parter

Finish: TypeAlias = Callable[[], Tensor]
# Starts a step's collective, or does a step that needs none.
Stage: TypeAlias = Callable[[Tensor, Collectives], Finish | Tensor]


class Fold(NamedTuple):
    """A process group that spans some mesh axes, and where their positions are in it.

    ``find`` looks the group up at each call, so that what is kept never outlives a group.
    ``members[i]`` is the group index of the rank at row-major position ``i`` on the axes, between
    meshes of the rank ``i``; ``size`` the number of ranks in the group.
    """

    find: Callable[[], Axis]
    members: Sequence[int] | Mapping[int, int]
    size: int

    @property
    def in_mesh_order(self) -> bool:
        """Return whether the group's ranks are those along the axes, in the same order."""
        return tuple(self.members) == tuple(range(self.size))  # of axes, not between meshes


def empty_stage(step: Step, shape: tuple[int, ...], rank: int) -> Stage:
    """Return what makes the rank's part of a tensor without elements."""
    result = step.target.local_shape(shape, rank) if step.target.holds(rank) else (0,)
    return lambda x, collectives: x.new_empty(result)


def slice_stage(step: Step, shape: tuple[int, ...], rank: int) -> Stage:
    """Return what copies the part to keep."""
    coordinate = step.source.coordinate(rank)
    held = Frame(step.source, shape, coordinate)
    kept = Frame(step.target, shape, coordinate)
    if kept.box is not None and held.box is not None:
        look = held.view(kept.box)
        return lambda x, collectives: look(x).clone(memory_format=torch.contiguous_format)
    local = plan_transfer(step.source, step.target, shape, rank).local
    views = [(held.view(box), kept.view(box)) for box in local]

    def copy(x: Tensor, collectives: Collectives) -> Tensor:
        out = x.new_empty(kept.shape)
        for here, there in views:
            there(out).copy_(here(x))
        return out

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
    (op, terms), find = _op(step), fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        own = x.clone(memory_format=torch.contiguous_format)
        work = collectives.all_reduce(find(), [own], op)
        return lambda: _averaged(work.wait()[0], terms)

    return begin


def reduce_scatter_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return one reduce-scatter; one all-to-all and a sum where parts differ or change order."""
    even = step.source.is_even(shape) and step.target.is_even(shape)
    if not (even and fold.in_mesh_order):
        return _scatter_by_exchange(step, fold)
    dim = _sharded(step)[1]
    parted = parter(step.source.local_shape(shape, rank), dim, fold.size)
    result = step.target.local_shape(shape, rank)
    (op, terms), find = _op(step), fold.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.reduce_scatter(find(), [parted(x)], op=op)
        return lambda: _averaged(work.wait()[0].view(result), terms)

    return begin


def _scatter_by_exchange(step: Step, fold: Fold) -> Stage:
    dim = _sharded(step)[1]
    degrees = [step.target.mesh_shape[axis] for axis in step.axes]
    (op, terms), find, size = _op(step), fold.find, fold.size
    positions = sorted(range(size), key=fold.members.__getitem__)

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        axis = find()
        cuts = [chunk(x.shape[dim], degrees, unravel(i, degrees)) for i in range(size)]
        chunks = [x.narrow(dim, lo, hi - lo) for lo, hi in cuts]
        parts = [chunks[position] for position in positions]
        sizes = [part.numel() for part in parts]
        packed = x.new_empty(x.numel())
        for space, part in zip(packed.split(sizes), parts, strict=True):
            space.view(part.shape).copy_(part)
        mine = parts[axis.index]
        work = collectives.all_to_all(axis, packed, sizes, [mine.numel()] * size)
        return lambda: _averaged(_reduced(work.wait()[0].view(size, *mine.shape), op), terms)

    return begin


def _sharded(step: Step) -> tuple[int, int]:
    """Return the dims that the step's axes shard before and after; -1 where they shard none."""
    old, new = (layout.placements[step.axes[0]] for layout in (step.source, step.target))
    return old.dim if isinstance(old, Shard) else -1, new.dim if isinstance(new, Shard) else -1


def _op(step: Step) -> tuple[ReduceOp, int]:
    """Return the reduction, and by how many terms the result is then to be divided.

    Averages over some of the axes and sums over the others are one sum.
    """
    found: dict[ReduceOp, int] = {}
    for axis in step.axes:
        old = step.source.placements[axis]
        if isinstance(old, Partial):
            found[old.op] = found.get(old.op, 1) * step.source.mesh_shape[axis]
    if len(found) > 1:
        return "sum", found["avg"]
    return next(iter(found), "sum"), 1


def _averaged(total: Tensor, terms: int) -> Tensor:
    return total if terms == 1 else total.div_(terms)


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
