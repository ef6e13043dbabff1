"""Batches of tokens in one seeded order, which does not depend on the degrees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .config import SEED_STRIDE, held_out_samples
from .text import TextError

if TYPE_CHECKING:
    from .text import Part

IGNORED = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step: tokens and unshifted labels ``[batch, seq]``, and samples consumed."""

    tokens: Tensor
    labels: Tensor
    consumed: int


class Samples:
    """Samples of equal length, in a new seeded order for each pass over the text.

    A batch with a token of ``vocab_size`` or more raises `TextError` on all ranks, since each reads
    the whole batch.

    Args:
        text: Bytes, each a token, or arrays of tokens. Ends that fill no sample are left out.
        seq_len: Tokens per sample.
        seed: Seed of the order.
        held_out: Reserve the last samples (see `held_out_samples`) for evaluation.
        vocab_size: Vocabulary size of the model, if tokens are to be checked.
    """

    def __init__(
        self,
        text: "bytes | Sequence[Part]",
        seq_len: int,
        seed: int,
        *,
        held_out: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        parts = [np.frombuffer(text, np.uint8)] if isinstance(text, bytes) else text
        rows = [len(part) // seq_len for part in parts]
        self._parts = [
            part[: count * seq_len].reshape(-1, seq_len)
            for part, count in zip(parts, rows, strict=True)
        ]
        self._ends = np.cumsum(rows)
        self._held_out = held_out_samples(int(self._ends[-1])) if held_out else 0
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._order: tuple[int, Tensor] | None = None
        if not len(self):
            tokens = sum(map(len, parts))
            raise ValueError(f"a text of {tokens} tokens holds no sample of {seq_len} tokens")

    def __len__(self) -> int:
        return int(self._ends[-1]) - self._held_out

    def batch(self, consumed: int, size: int) -> Batch:
        """Return the ``size`` samples after the first ``consumed``, and the count after them.

        The state of the reader is this one number. A pass over the text ends with a batch that may
        be partial: its last rows are zeros with ignored labels and count as not consumed.
        """
        index, offset = divmod(consumed, len(self))
        rows = self._permutation(index)[offset : offset + size]
        return self._padded(rows.tolist(), size, consumed)

    def held_out(self, size: int) -> Iterator[Batch]:
        """Yield batches of held-out samples in the order of the text."""
        every = range(len(self), len(self) + self._held_out)
        for start in range(0, len(every), size):
            yield self._padded(every[start : start + size], size, start)

    def _padded(self, samples: Sequence[int], size: int, consumed: int) -> Batch:
        rows = torch.stack([self._row(sample) for sample in samples])
        if self._vocab_size is not None and int(rows.max()) >= self._vocab_size:
            raise TextError(
                f"data has the token {int(rows.max())}, but the model has vocab-size="
                f"{self._vocab_size}; give a larger one, or the tokenizer of the data"
            )
        padding = (size - len(rows), self._seq_len)
        return Batch(
            tokens=torch.cat([rows, rows.new_zeros(padding)]),
            labels=torch.cat([rows, rows.new_full(padding, IGNORED)]),
            consumed=consumed + len(rows),
        )

    def _row(self, sample: int) -> Tensor:
        part = int(np.searchsorted(self._ends, sample, side="right"))
        first = 0 if part == 0 else int(self._ends[part - 1])
        return torch.from_numpy(self._parts[part][sample - first].astype(np.int64))

    def _permutation(self, index: int) -> Tensor:
        if self._order is None or self._order[0] != index:
            generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + index)
            self._order = (index, torch.randperm(len(self), generator=generator))
        return self._order[1]
