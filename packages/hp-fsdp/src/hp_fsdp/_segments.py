"""Runs of parameters that lie side by side in a flat shard, to be stepped as one tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from ._buffers import in_own_storage
from ._errors import StateError
from ._group import ParameterGroup
from ._parameters import ShardedParameter


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's part of a segment, from element ``start`` on."""

    owner: ShardedParameter
    start: int

    @property
    def parameter(self) -> nn.Parameter:
        """Return the sharded parameter."""
        return self.owner.sharded

    def cut(self, flat: Tensor) -> Tensor:
        """Return this parameter's view of a tensor that is laid out like the segment."""
        local = self.owner.part(self.parameter)
        held = flat[self.start : self.start + local.numel()]
        return self.owner.wrap(in_own_storage(held.view(local.shape)))


class Segment:
    """Trainable neighbours in one flat shard. ``flat`` is their memory, as a parameter."""

    def __init__(self, group: ParameterGroup, members: Sequence[int]) -> None:
        """Take the parameters of ``group`` at ``members``, in the order of the flat shard."""
        spans = [group.layout.spans[i] for i in members]
        first, end = spans[0][0], spans[-1][1]
        self._group = group
        self._members = tuple(members)
        self._shard = group.layout.shard
        self.pieces = [
            Piece(group.parameters[i], start - first)
            for i, (start, _) in zip(members, spans, strict=True)
        ]
        # Where shards are uneven, many of a rank's parts may be empty.
        self._filled = [
            (position, piece)
            for position, (piece, i) in enumerate(zip(self.pieces, members, strict=True))
            if group.layout.shards[i].numel()
        ]
        self.flat = nn.Parameter(self._shard[first:end])

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Give ``flat`` the gradients of the pieces, without a copy where they lie side by side.

        Where no piece has one, neither has ``flat``; return False where only some have: `split`
        then. Raises `StateError` if the group was laid out anew.
        """
        if self._group.layout.shard is not self._shard or self._group.moved:
            raise StateError(
                "parameters were converted or moved after the optimizer was made; make it anew"
            )
        found = [piece.owner.sharded.grad for piece in self.pieces]
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            self.flat.grad = None
            return not gradients
        parts = [(p.start, p.owner.part(gradients[i])) for i, p in self._filled]
        side_by_side = self._side_by_side(parts)
        self.flat.grad = self._packed(parts) if side_by_side is None else side_by_side
        return True

    def split(self, key: Callable[[Piece], object]) -> "list[Segment]":
        """Return the runs of neighbours of one ``key``: this segment alone where all have the same.

        The new segments have the same memory.
        """
        pairs = zip(self._members, map(key, self.pieces), strict=True)
        runs = [[i for i, _ in run] for _, run in groupby(pairs, lambda pair: pair[1])]
        return [self] if len(runs) == 1 else [Segment(self._group, run) for run in runs]

    def cut(self, part: "Segment", value: Tensor) -> Tensor:
        """Return the view, of a tensor that is laid out like this segment, of a part of it."""
        start = part.flat.storage_offset() - self.flat.storage_offset()
        return value[start : start + len(part.flat)]

    def _side_by_side(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor | None:
        if not parts:
            return None
        start, first = parts[0]
        storage, begin = first.untyped_storage(), first.storage_offset() - start
        memory = storage.data_ptr()
        for start, part in parts:
            inside = part.untyped_storage().data_ptr() == memory and part.is_contiguous()
            if not inside or part.storage_offset() - start != begin:
                return None
        end = (begin + len(self.flat)) * first.element_size()
        if begin < 0 or end > storage.nbytes():
            return None
        return first.as_strided((len(self.flat),), (1,), begin)

    def _packed(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        out = torch.zeros_like(self.flat)
        for start, part in parts:
            out[start : start + part.numel()].copy_(part.reshape(-1))
        return out


def segments_of(group: ParameterGroup) -> list[Segment]:
    """Return the segments of a group: cut where a frozen parameter or alignment comes between.

    None where shards do not lie in one buffer.
    """
    if not group.flat:
        return []
    spans = group.layout.spans
    runs: list[list[int]] = []
    last = -1
    for i in group.order:
        if not group.parameters[i].sharded.requires_grad:
            continue
        if spans[i][0] != last:
            runs.append([])
        runs[-1].append(i)
        last = spans[i][1]
    return [Segment(group, run) for run in runs]
