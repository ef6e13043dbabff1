"""Packs the gradients of one group into the rows that a reduce-scatter sends."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ._buffers import Buffers
from ._offsets import GradientRows
from ._torch import pack_rank_major

_dtype_of = attrgetter("dtype")
# Up to so many elements one more copy costs less than a second tensor to reduce.
COPIED_NUMEL = 2**16


class Packing:
    """How gradients, those of the parameters that ``rows`` has, are packed in every step.

    ``has_flags``: with columns for the flags of `GradientRows`. Otherwise they are a tensor of
    their own, `flags`, to be reduced together with the rows.
    """

    def __init__(
        self, rows: GradientRows, dtype: torch.dtype, device: torch.device, buffers: Buffers
    ) -> None:
        """Pack as ``dtype`` on ``device``, in memory of ``buffers``."""
        self.has_flags = not rows.flags_apart or rows.numel <= COPIED_NUMEL
        self._rows, self._dtype, self._device, self._buffers = rows, dtype, device, buffers
        self._ranks = rows.numel // rows.flags if rows.flags_apart else rows.degree
        self._gaps = rows.gaps[::-1]  # so that what is put there moves no other
        self._rearranged = [(i, e.spec) for i, e in enumerate(rows.extents) if e.spec.dim]
        self._has_empty = any(not extent.spec.numel for extent in rows.extents)
        self._known: dict[tuple[object, torch.dtype], Tensor] = {}

    def pack(self, gradients: list[Tensor], used: Sequence[bool]) -> Tensor:
        """Return the rows, flat; contiguous ``gradients`` are zeros where they are not ``used``."""
        rows, pieces = self._rows, gradients
        for i, spec in self._rearranged:
            pieces[i] = spec.by_rank(pieces[i]).contiguous()
        if len(set(map(_dtype_of, pieces))) > 1:
            pieces = [piece.to(self._dtype) for piece in pieces]
        dtype = pieces[0].dtype
        for i, start, end in self._gaps:
            pieces.insert(i, self._gap(start, end, used, dtype))
        if self._has_empty:
            pieces = [piece for piece in pieces if piece.numel()]
        flat = self._buffers.take(rows.numel, self._dtype, self._device)
        if pieces:
            pack_rank_major(pieces, rows.degree, flat.view(rows.degree, rows.width))
        if rows.flags_apart and self.has_flags:
            shares = flat.view(self._ranks, rows.flags)
            flat = torch.cat((shares, self.flags(used, self._dtype)), 1).view(-1)
        return flat

    def flags(self, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return ``[ranks, parameters]``: in each row 1 for what this rank ``used``, else 0."""
        return self._made("flags", (self._ranks, len(used)), 0, used, dtype)

    def _gap(self, start: int, end: int, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return the columns of no parameter from ``start`` to ``end``: zeros, or flags in them."""
        shape, flags = (self._rows.degree, end - start), self._rows.flags
        if self._rows.flags_apart or not start <= flags < end:
            return self._made(start, shape, 0, (), dtype)
        return self._made(start, shape, flags - start, used, dtype)

    def _made(
        self,
        what: object,
        shape: tuple[int, int],
        first: int,
        used: Sequence[bool],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return zeros with the flags of what was ``used`` from column ``first`` on.

        What all steps that use everything need is made once.
        """
        known = self._known.get((what, dtype)) if all(used) else None
        if known is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():
            made = torch.zeros(shape, dtype=dtype, device=self._device)
            made[:, first : first + len(used)] = 1
            for i in (i for i, is_used in enumerate(used) if not is_used):
                made[:, first + i] = 0
        if all(used) and made.numel() <= COPIED_NUMEL:
            self._known[what, dtype] = made
        return made
