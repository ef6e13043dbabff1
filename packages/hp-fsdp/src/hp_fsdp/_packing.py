"""Where the gradients of a group lie while they are packed, and this rank's part once reduced.

Each row also has one flag per parameter, nonzero from ranks that used the parameter. A reduction
sums the flags like gradients, so that every rank learns which parameters no rank used.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cut import Cut
from ._plan import Slot, plan_gradients
from ._sink import SinkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """A row split in pieces of ``widths``, all of it.

    Piece ``positions[i]`` is what the rank holds of parameter ``i``, to be viewed as ``shapes[i]``
    (None: as it is); the others are padding.
    """

    widths: tuple[int, ...]
    positions: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]

    def views(self, row: Tensor) -> list[Tensor]:
        """Return the parts that lie in ``row``, in one split: it runs in every step."""
        pieces = torch.split_with_sizes(row, self.widths)
        return [
            pieces[i] if shape is None else pieces[i].view(shape)
            for i, shape in zip(self.positions, self.shapes, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The packed gradients of some parameters, and how a reduced ``row`` of them splits.

    The flags of the parameters are the columns from ``flags`` on, of which each row of the sink
    has its own, or, if ``apart``, a second tensor that is reduced together with the sink.
    ``rearranged`` are those that do not lie there in the order of their elements.
    """

    sink: SinkPlan
    row: RowPlan
    flags: int
    apart: bool = False
    rearranged: tuple[tuple[int, Cut], ...] = ()


def pack_by_rank(
    slots: Sequence[Slot], cuts: Sequence[Cut], held: Sequence[tuple[int, ...]], itemsize: int
) -> Packing:
    """Return the packing in one row for each rank, densely and in order.

    ``held`` are the shapes of this rank's parts.
    """
    plan = plan_gradients(slots, itemsize, len(slots))
    ends = list(itertools.accumulate((slot.shard_numel for slot in slots), initial=0))
    widths: list[int] = []
    positions = []
    for slot, shape in zip(slots, held, strict=True):
        positions.append(len(widths))
        numel = math.prod(shape)
        widths += [numel, slot.shard_numel - numel] if numel < slot.shard_numel else [numel]
    return Packing(
        sink=SinkPlan.of(slots, cuts, ends[:-1], cuts[0].degree, plan.shard_numel),
        row=RowPlan(
            widths=(*widths, plan.shard_numel - ends[-1]),
            positions=tuple(positions),
            shapes=tuple(None if len(shape) == 1 else shape for shape in held),
        ),
        flags=ends[-1],
        rearranged=tuple((i, cut) for i, cut in enumerate(cuts) if cut.dim),
    )
