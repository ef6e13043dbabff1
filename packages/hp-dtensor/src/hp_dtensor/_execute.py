"""Carry out a plan on one rank's part of a tensor; decides nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._layout import Box, ravel
from ._placements import Partial, Shard
from ._plan import Plan
from ._steps import Step
from ._transfer import plan_transfer
from .collectives._interface import Axis, Collectives, ReduceOp

Slices: TypeAlias = tuple[slice, ...]
Finish: TypeAlias = Callable[[], Tensor]


class Fold(NamedTuple):
    """A process group that spans several mesh axes, and where their positions are in it.

    ``members[i]`` is the group index of the rank at row-major position ``i`` on the axes.
    """

    axis: Axis
    members: tuple[int, ...]


def start(
    plan: Plan, local: Tensor, fold: Callable[[tuple[int, ...]], Fold], collectives: Collectives
) -> Finish:
    """Start the plan's first collective and return what finishes the plan and gives the result.

    ``fold`` finds the group of a step's axes. The result shares memory with ``local`` only if the
    plan has no steps. Until the end ``local`` must stay untouched.
    """
    result = local.detach()
    for number, step in enumerate(plan.steps):
        pending = _begin(step, plan, result, fold, collectives)
        if step.kind == "slice":
            result = pending()
            continue
        return _Rest(plan, number + 1, pending, fold, collectives)
    return lambda: result


class _Rest:
    """The steps after the one under way."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        pending: Finish,
        fold: Callable[[tuple[int, ...]], Fold],
        collectives: Collectives,
    ) -> None:
        self._state = (plan, number, fold, collectives)
        self._pending = pending

    def __call__(self) -> Tensor:
        plan, number, fold, collectives = self._state
        result = self._pending()
        for step in plan.steps[number:]:
            result = _begin(step, plan, result, fold, collectives)()
        return result


def _begin(
    step: Step,
    plan: Plan,
    x: Tensor,
    fold: Callable[[tuple[int, ...]], Fold],
    collectives: Collectives,
) -> Finish:
    shape = plan.shape
    if 0 in shape:
        empty = x.new_empty(step.target.local_shape(shape, plan.rank))
        return lambda: empty
    if step.kind == "slice":
        part = x[_kept(step, shape, plan.rank)].clone(memory_format=torch.contiguous_format)
        return lambda: part
    axis, members = fold(step.axes)
    if step.kind == "direct":
        exchange = _exchange(step, shape, plan.rank, axis.size, members)
        return _direct(exchange, axis, x, collectives)
    recipe = _recipe(step, shape)
    if step.kind == "all_gather":
        return _all_gather(recipe, axis, x, collectives)
    if step.kind == "all_to_all":
        return _all_to_all(recipe, axis, x, collectives)
    if step.kind == "all_reduce":
        work = collectives.all_reduce(
            axis, [x.clone(memory_format=torch.contiguous_format)], recipe.op
        )
        return lambda: work.wait()[0]
    return _reduce_scatter(recipe, axis, x, collectives)


class _Recipe(NamedTuple):
    """What a single-axis collective needs to know of its step."""

    old_dim: int
    new_dim: int
    op: ReduceOp
    even: bool


@lru_cache(maxsize=1024)
def _recipe(step: Step, shape: tuple[int, ...]) -> _Recipe:
    old = step.source.placements[step.axes[0]]
    new = step.target.placements[step.axes[0]]
    return _Recipe(
        old_dim=old.dim if isinstance(old, Shard) else -1,
        new_dim=new.dim if isinstance(new, Shard) else -1,
        op=old.op if isinstance(old, Partial) else "sum",
        even=step.source.is_even(shape) and step.target.is_even(shape),
    )


def _all_gather(recipe: _Recipe, axis: Axis, x: Tensor, collectives: Collectives) -> Finish:
    dim = recipe.old_dim
    work = collectives.all_gather(axis, [x])

    def finish() -> Tensor:
        (whole,) = work.wait()
        if dim == 0:
            return whole
        return _joined(whole.view(axis.size, *x.shape), dim)

    return finish


def _all_to_all(recipe: _Recipe, axis: Axis, x: Tensor, collectives: Collectives) -> Finish:
    work = collectives.all_to_all(axis, _parted(x, recipe.new_dim, axis.size))
    return lambda: _joined(work.wait()[0], recipe.old_dim)


def _reduce_scatter(recipe: _Recipe, axis: Axis, x: Tensor, collectives: Collectives) -> Finish:
    dim = recipe.new_dim
    if recipe.even:
        work = collectives.reduce_scatter(
            axis, [x if dim == 0 else _parted(x, dim, axis.size)], op=recipe.op
        )
        return lambda: work.wait()[0] if dim == 0 else work.wait()[0].squeeze(0)
    step = -(-x.shape[dim] // axis.size)
    cuts = [min(step * i, x.shape[dim]) for i in range(axis.size + 1)]
    parts = [x.narrow(dim, lo, hi - lo) for lo, hi in pairwise(cuts)]
    mine = parts[axis.index]
    work = collectives.all_to_all(
        axis,
        torch.cat([part.reshape(-1) for part in parts]),
        [part.numel() for part in parts],
        [mine.numel()] * axis.size,
    )
    return lambda: _reduced(work.wait()[0].view(axis.size, *mine.shape), recipe.op)


def _parted(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return ``[parts, ...]``, contiguous: the equal parts of ``dim``, one after another."""
    split: Tensor = x.unflatten(dim, (parts, x.shape[dim] // parts))
    return split.movedim(dim, 0).contiguous()


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Return the parts ``[parts, ...]`` laid end to end along ``dim``; inverse of `_parted`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A transfer of one rank as an all-to-all: splits in elements, pieces in group order.

    ``whole_input`` and ``whole_output``: the pieces are the tensor itself in memory order, so it
    serves as buffer. The rank's own piece travels along where that makes the output whole.
    """

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    sends: tuple[Slices, ...]
    receives: tuple[tuple[Slices, tuple[int, ...]], ...]
    own: tuple[Slices, Slices] | None
    whole_input: bool
    whole_output: bool
    result: tuple[int, ...]


@lru_cache(maxsize=1024)
def _exchange(
    step: Step, shape: tuple[int, ...], rank: int, group_size: int, members: tuple[int, ...]
) -> _Exchange:
    source, target = step.source, step.target
    transfer = plan_transfer(source, target, shape, rank)
    coordinate = source.coordinate(rank)
    held = source.box_at(shape, coordinate)
    needed = target.box_at(shape, coordinate)
    degrees = [source.mesh_shape[axis] for axis in step.axes]

    def index(peer: int) -> int:
        position = source.coordinate(peer)
        return members[ravel([position[axis] for axis in step.axes], degrees)]

    mine = index(rank)
    sends = sorted((index(peer), box) for peer, box in transfer.sends)
    receives = sorted((index(peer), box) for peer, box in transfer.recvs)
    kept = [(mine, box) for box in transfer.local]
    with_own = sorted(receives + kept)
    if whole_output := _fills([box for _, box in with_own], needed):
        sends, receives = sorted(sends + kept), with_own
        kept = []
    return _Exchange(
        send_splits=_splits(sends, group_size),
        receive_splits=_splits(receives, group_size),
        sends=tuple(_within(box, held) for _, box in sends),
        receives=tuple(
            (_within(box, needed), tuple(hi - lo for lo, hi in box)) for _, box in receives
        ),
        own=(_within(kept[0][1], held), _within(kept[0][1], needed)) if kept else None,
        whole_input=_fills([box for _, box in sends], held),
        whole_output=whole_output,
        result=tuple(hi - lo for lo, hi in needed),
    )


def _direct(exchange: _Exchange, axis: Axis, x: Tensor, collectives: Collectives) -> Finish:
    if exchange.whole_input:
        packed = x.reshape(-1)
    elif exchange.sends:
        packed = torch.cat([x[slices].reshape(-1) for slices in exchange.sends])
    else:
        packed = x.new_empty(0)
    result = x.new_empty(exchange.result)
    work = collectives.all_to_all(
        axis,
        packed,
        exchange.send_splits,
        exchange.receive_splits,
        result.view(-1) if exchange.whole_output else None,
    )
    if exchange.own is not None:
        source, target = exchange.own
        result[target].copy_(x[source])

    def finish() -> Tensor:
        (received,) = work.wait()
        if not exchange.whole_output and exchange.receives:
            sizes = [size for size in exchange.receive_splits if size]
            pieces = received.split(sizes)
            for (slices, shape), piece in zip(exchange.receives, pieces, strict=True):
                result[slices].copy_(piece.view(shape))
        return result

    return finish


@lru_cache(maxsize=1024)
def _kept(step: Step, shape: tuple[int, ...], rank: int) -> Slices:
    coordinate = step.source.coordinate(rank)
    return _within(step.target.box_at(shape, coordinate), step.source.box_at(shape, coordinate))


def _within(box: Box, frame: Box) -> Slices:
    return tuple(
        slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, frame, strict=True)
    )


def _splits(pieces: list[tuple[int, Box]], size: int) -> tuple[int, ...]:
    splits = [0] * size
    for index, box in pieces:
        elements = 1
        for lo, hi in box:
            elements *= hi - lo
        splits[index] += elements
    return tuple(splits)


def _fills(boxes: list[Box], frame: Box) -> bool:
    """Return whether the boxes, in order, are consecutive rows that make up the whole frame."""
    if not boxes or not frame or any(box[1:] != frame[1:] for box in boxes):
        return False
    position = frame[0][0]
    for box in boxes:
        if box[0][0] != position:
            return False
        position = box[0][1]
    return position == frame[0][1]
