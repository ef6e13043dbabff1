"""Runs of parameters that lie side by side in a flat shard, to be stepped as one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._errors import StateError
from ._group import ParameterGroup
from ._parameters import ShardedParameter
from ._torch import base_of


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
        return self.owner.wrap(held.view(local.shape))

    @property
    def gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient."""
        gradient = self.parameter.grad
        return None if gradient is None else self.owner.part(gradient)


class Segment:
    """Trainable neighbours in one flat shard. ``flat`` is their memory, as a parameter."""

    def __init__(self, group: ParameterGroup, members: Sequence[int]) -> None:
        """Take the parameters of ``group`` at ``members``, in the order of the flat shard."""
        spans = [group.layout.spans[i] for i in members]
        first, end = spans[0][0], spans[-1][1]
        self._group = group
        self._shard = group.layout.shard
        self.pieces = [
            Piece(group.parameters[i], start - first)
            for i, (start, _) in zip(members, spans, strict=True)
        ]
        self.flat = nn.Parameter(self._shard[first:end])

    def take_gradients(self) -> None:
        """Give ``flat`` the gradients of the pieces, without a copy where they lie side by side.

        Where no piece has one, neither has ``flat``. Raises `StateError` if only some have, or the
        group was laid out anew.
        """
        if self._group.layout.shard is not self._shard:
            raise StateError(
                "parameters were converted or moved after the optimizer was made; make it anew"
            )
        found = [piece.gradient for piece in self.pieces]
        if all(gradient is None for gradient in found):
            self.flat.grad = None
            return
        missing = [p.owner.name for p, g in zip(self.pieces, found, strict=True) if g is None]
        if missing:
            raise StateError(
                f"{missing} have no gradient, and others that lie beside them have; step all of "
                "them, or make the optimizer anew after freezing some"
            )
        gradients = [gradient for gradient in found if gradient is not None]
        side_by_side = self._side_by_side(gradients)
        self.flat.grad = self._packed(gradients) if side_by_side is None else side_by_side

    def _side_by_side(self, gradients: Sequence[Tensor]) -> Tensor | None:
        base = base_of(gradients[0])
        if base is None:
            return None
        first = gradients[0].storage_offset()
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            apart = gradient.storage_offset() - first != piece.start
            if base_of(gradient) is not base or (apart and gradient.numel()):
                return None
        if first + len(self.flat) > base.numel():
            return None
        return base[first : first + len(self.flat)]

    def _packed(self, gradients: Sequence[Tensor]) -> Tensor:
        out = torch.zeros_like(self.flat)
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            out[piece.start : piece.start + gradient.numel()].copy_(gradient.view(-1))
        return out


def segments_of(group: ParameterGroup) -> list[Segment]:
    """Return the segments of a group: cut where a frozen parameter or alignment comes between."""
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
