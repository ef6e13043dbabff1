"""The collectives of a plan's steps on one rank's part of a tensor, ready to be started."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._boxes import Box, chunk, extent, ravel, unravel, volume
from ._local_view import Change, Frame, equal_parts, fills, joiner, packer, parter, shaped, unpacker
from ._placements import Partial, Shard
from ._planner import Plan
from ._shard_order import replicated
from ._steps import Step
from ._transfer import plan_transfer
from .collectives._interface import Axis, Collectives, ReduceOp

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


Pieces: TypeAlias = list[tuple[int, Box]]  # (group index of the peer, global box)


def exchange_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return what carries out a direct step: pack, one all-to-all in the group of ``fold``, unpack.

    Splits are in elements, pieces in group order. The rank's own piece travels along where what
    arrives is then the result itself, or one copy away from it.
    """
    source, target = step.source, step.target
    transfer = plan_transfer(source, target, shape, rank)
    coordinate = source.coordinate(rank)
    held, needed = (Frame(layout, shape, coordinate) for layout in (source, target))
    degrees = [source.mesh_shape[axis] for axis in step.axes]

    def index(peer: int) -> int:
        position = source.coordinate(peer)
        return fold.members[ravel([position[axis] for axis in step.axes], degrees)]

    mine = index(rank)
    sends = sorted((index(peer), box) for peer, box in transfer.sends)
    receives = sorted((index(peer), box) for peer, box in transfer.recvs)
    kept = [(mine, box) for box in transfer.local]
    arranged = _arranged([box for _, box in sorted(receives + kept)], needed)
    if arranged is not None:
        sends, receives = sorted(sends + kept), sorted(receives + kept)
        kept = []
    splits = _splits(sends, fold.size), _splits(receives, fold.size)
    pack = packer([box for _, box in sends], held.box, held.view)
    unpack = unpacker([box for _, box in receives], needed.view)
    own = [(held.view(box), needed.view(box)) for _, box in kept]
    find, result = fold.find, needed.shape

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.all_to_all(find(), pack(x), *splits)
        if arranged is not None:
            return lambda: arranged(work.wait()[0])
        out = x.new_empty(result)
        for here, there in own:
            there(out).copy_(here(x))

        def finish() -> Tensor:
            unpack(work.wait()[0], out)
            return out

        return finish

    return begin


def transfer_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return what carries out a transfer: one message to and from each peer, over ``fold``.

    ``fold.members`` are the group indices of the ranks of both meshes, by rank. A rank that is not
    in the source's mesh gives an empty tensor, one that is not in the target's gets one.
    """
    source, target = step.source, step.target
    transfer = plan_transfer(source, target, shape, rank)
    held = Frame(source, shape, source.coordinate(rank)) if source.holds(rank) else None
    needed = Frame(target, shape, target.coordinate(rank)) if target.holds(rank) else None
    outgoing = _messages([(fold.members[peer], box) for peer, box in transfer.sends])
    incoming = _messages([(fold.members[peer], box) for peer, box in transfer.recvs])
    # Peers that get the same boxes are sent the same buffer.
    parts = list(dict.fromkeys(outgoing.values()))
    sizes = [_size(boxes) for boxes in parts]
    pack = packer([b for boxes in parts for b in boxes], held.box, held.view) if held else None
    arrive = [_size(boxes) for boxes in incoming.values()]
    boxes = [box for boxes in incoming.values() for box in boxes]
    unpack = unpacker(boxes, needed.view) if needed else None
    own = [(held.view(b), needed.view(b)) for b in transfer.local] if held and needed else []
    find, result = fold.find, needed.shape if needed else (0,)

    def begin(x: Tensor, collectives: Collectives) -> Finish | Tensor:
        out = x.new_empty(result)
        for here, there in own:
            there(out).copy_(here(x))
        if not outgoing and not incoming:
            return out
        packed = dict(zip(parts, pack(x).split(sizes), strict=True)) if pack and parts else {}
        arriving = x.new_empty(sum(arrive))
        work = collectives.exchange(
            find(),
            {peer: packed[boxes] for peer, boxes in outgoing.items()},
            dict(zip(incoming, arriving.split(arrive), strict=True)),
        )

        def finish() -> Tensor:
            work.wait()
            if unpack:
                unpack(arriving, out)
            return out

        return finish

    return begin


def _arranged(arriving: Sequence[Box], needed: Frame) -> Change | None:
    """Return what makes the result of all pieces in a row; None if they are to be placed singly."""
    if needed.box is None:
        return None
    if fills(arriving, needed.box):
        return shaped(needed.shape)
    dim = equal_parts(arriving, needed.box)
    return None if dim is None else joiner(extent(arriving[0]), dim, len(arriving))


def _splits(pieces: Pieces, size: int) -> list[int]:
    splits = [0] * size
    for index, box in pieces:
        splits[index] += volume(box)
    return splits


def _messages(pieces: Pieces) -> dict[int, tuple[Box, ...]]:
    """Return the boxes that go to or come from each peer; in ascending order."""
    return {
        peer: tuple(box for _, box in group)
        for peer, group in groupby(sorted(pieces), key=lambda piece: piece[0])
    }


def _size(boxes: Sequence[Box]) -> int:
    return sum(volume(box) for box in boxes)


_STAGES = {
    "all_gather": all_gather_stage,
    "all_reduce": all_reduce_stage,
    "all_to_all": all_to_all_stage,
    "direct": exchange_stage,
    "reduce_scatter": reduce_scatter_stage,
    "transfer": transfer_stage,
}


def prepare(plan: Plan, fold: Callable[[Step], Fold]) -> tuple[Stage, ...]:
    """Return the steps of a plan that its rank takes part in, ready to run.

    All that follows from shapes is worked out. ``fold`` says how to find the group of a step.
    Stages keep no tensor and no group.
    """
    rank = plan.rank
    stages = [
        _stage(step, plan, fold)
        for step in plan.steps
        if step.source.holds(rank) or step.target.holds(rank)
    ]
    # Plans take an axis of degree one as replicated, where ragged runs would flatten dims.
    source, target = replicated(plan.source), replicated(plan.target)
    if plan.source.ragged != source.ragged and source.holds(rank):
        stages.insert(0, _viewed(source.local_shape(plan.shape, rank)))
    if plan.target.ragged != target.ragged and target.holds(rank):
        stages.append(_viewed(plan.target.local_shape(plan.shape, rank)))
    return tuple(stages)


def _viewed(shape: tuple[int, ...]) -> Stage:
    return lambda x, collectives: x.reshape(shape)


def start(stages: Sequence[Stage], local: Tensor, collectives: Collectives) -> Finish:
    """Start the first collective and return what finishes the stages and gives the result.

    The result shares memory with ``local`` only if there are no stages. Until the end ``local``
    must stay untouched.
    """
    # What is sent are bytes: they must be those of the values, not of their conjugates.
    result = local.detach().resolve_conj().resolve_neg()
    del local  # what later stages start from is not kept beside what they make
    for number, stage in enumerate(stages, 1):
        started = stage(result, collectives)
        if isinstance(started, Tensor):
            result = started
        elif number == len(stages):
            return started
        else:
            return _Rest(stages[number:], started, collectives)
    return lambda: result


class _Rest:
    """The stages after the one under way."""

    def __init__(self, stages: Sequence[Stage], pending: Finish, collectives: Collectives) -> None:
        self._stages, self._pending, self._collectives = stages, [pending], collectives

    def __call__(self) -> Tensor:
        return start(self._stages, self._pending.pop()(), self._collectives)()


def _stage(step: Step, plan: Plan, fold: Callable[[Step], Fold]) -> Stage:
    if 0 in plan.shape:
        return empty_stage(step, plan.shape, plan.rank)
    if step.kind == "slice":
        return slice_stage(step, plan.shape, plan.rank)
    found = fold(step)
    # Native collectives lay parts in group order; where that is not the mesh's, pieces are placed
    # one by one. All ranks of the group see the same order.
    moves = step.kind in ("all_gather", "all_to_all") and not found.in_mesh_order
    return _STAGES["direct" if moves else step.kind](step, plan.shape, plan.rank, found)
