"""One rank's transfer as one uneven all-to-all."""

from torch import Tensor

from ._layout import Box, ravel, volume
from ._pieces import (
    Change,
    equal_parts,
    extent,
    fills,
    joiner,
    packer,
    shaped,
    taken,
    unpacker,
    within,
)
from ._stages import Finish, Fold, Stage
from ._steps import Step
from ._transfer import plan_transfer
from .collectives._interface import Collectives


def exchange_stage(step: Step, shape: tuple[int, ...], rank: int, fold: Fold) -> Stage:
    """Return what carries out a direct step: pack, one all-to-all in the group of ``fold``, unpack.

    Splits are in elements, pieces in group order. The rank's own piece travels along where what
    arrives is then the result itself, or one copy away from it.
    """
    source, target = step.source, step.target
    transfer = plan_transfer(source, target, shape, rank)
    coordinate = source.coordinate(rank)
    held = source.box_at(shape, coordinate)
    needed = target.box_at(shape, coordinate)
    degrees = [source.mesh_shape[axis] for axis in step.axes]

    def index(peer: int) -> int:
        position = source.coordinate(peer)
        return fold.members[ravel([position[axis] for axis in step.axes], degrees)]

    mine = index(rank)
    sends = sorted((index(peer), box) for peer, box in transfer.sends)
    receives = sorted((index(peer), box) for peer, box in transfer.recvs)
    kept = [(mine, box) for box in transfer.local]
    arriving = [box for _, box in sorted(receives + kept)]
    whole = fills(arriving, needed)
    dim = None if whole else equal_parts(arriving, needed)
    if whole or dim is not None:
        sends, receives = sorted(sends + kept), sorted(receives + kept)
        kept = []
    splits = _splits(sends, fold.size), _splits(receives, fold.size)
    pack = packer([box for _, box in sends], held)
    result = extent(needed)
    find = fold.find
    arranged: Change | None = None
    if whole:
        arranged = shaped(result)
    elif dim is not None:
        arranged = joiner(extent(receives[0][1]), dim, len(receives))
    unpack = unpacker([box for _, box in receives], needed)
    own = [(within(box, held), within(box, needed)) for _, box in kept]

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.all_to_all(find(), pack(x), *splits)
        if arranged is not None:
            return lambda: arranged(work.wait()[0])
        out = x.new_empty(result)
        for here, there in own:
            taken(out, there).copy_(taken(x, here))

        def finish() -> Tensor:
            unpack(work.wait()[0], out)
            return out

        return finish

    return begin


def _splits(pieces: list[tuple[int, Box]], size: int) -> list[int]:
    splits = [0] * size
    for index, box in pieces:
        splits[index] += volume(box)
    return splits
