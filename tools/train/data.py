"""Batches of text: one seeded order of samples, whatever the degrees are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SEED_STRIDE

IGNORED = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's samples ``[batch, seq]``: tokens, labels not yet shifted, and samples consumed."""

    tokens: Tensor
    labels: Tensor
    consumed: int


class Samples:
    """The text cut into samples of ``seq_len`` bytes, in a new seeded order every pass."""

    def __init__(self, text: bytes, seq_len: int, seed: int) -> None:
        self._rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._rows = self._rows[: len(text) // seq_len * seq_len].view(-1, seq_len)
        self._seed = seed
        self._order: tuple[int, Tensor] | None = None
        if not len(self._rows):
            raise ValueError(f"a text of {len(text)} bytes holds no sample of {seq_len} bytes")

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, consumed: int, size: int) -> Batch:
        """Return the ``size`` samples after the first ``consumed``, and the count after them.

        The state of the reader is this one number. A pass over the text ends with a batch that may
        be partial: its last rows are zeros with ignored labels and count as not consumed.
        """
        index, offset = divmod(consumed, len(self))
        rows = self._rows[self._permutation(index)[offset : offset + size]].long()
        padding = (size - len(rows), rows.shape[1])
        return Batch(
            tokens=torch.cat([rows, rows.new_zeros(padding)]),
            labels=torch.cat([rows, rows.new_full(padding, IGNORED)]),
            consumed=consumed + len(rows),
        )

    def _permutation(self, index: int) -> Tensor:
        if self._order is None or self._order[0] != index:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + index)
            self._order = (index, torch.randperm(len(self), generator=generator))
        return self._order[1]
