"""One rank's transfer: one uneven all-to-all on a mesh, point to point between meshes."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from torch import Tensor

from ..collectives._interface import Collectives
from ..layouts._boxes import Box, extent, volume
from ..layouts._intervals import ravel
from ..plans._steps import Step
from ..plans._transfer import plan_transfer
from ._frames import Frame
from ._pieces import Change, equal_parts, fills, joiner, packer, shaped, unpacker
from ._stages import Finish, Fold, Stage

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
