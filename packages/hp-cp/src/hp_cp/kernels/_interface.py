"""What a plan asks of a kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from .._errors import InputError, described
from .._masks import MaskMod
from .._ranges import Band, Kernel, Ranges, Window, band_of
from .._torch import has_values

GRID = 65_535  # places of a CUDA grid's later dims, over one of which kernels lay the batch


class Places(NamedTuple):
    """Where the queries and keys of a kernel's call are in the whole attention, as int64.

    Attributes:
        batch: Row of the batch of every query, ``[batch, 1, rows]``.
        rows: Position of every query, ``[batch, 1, rows]``.
        keys: Position of every key, ``[batch, 1, keys]``.
        heads: Number of every query head, ``[q_heads]``.
    """

    batch: Tensor
    rows: Tensor
    keys: Tensor
    heads: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Weights become zero at random, the others grow so that the mean stays.

    Whether a weight does depends on the seed and on where it is in the whole attention alone, so
    that it is the same on any number of ranks.

    Attributes:
        rate: Probability that a weight becomes zero.
        seed: Which random numbers are taken.

    Raises:
        InputError: The rate is no probability below 1, or the seed no int that 63 bits hold.
    """

    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not _is_finite(self.rate) or not 0 <= self.rate < 1:
            raise InputError(
                f"dropout_p={described(self.rate)} is no probability below 1; pass a float of at "
                f"least 0.0 and less than 1.0"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise InputError(
                f"dropout_p={self.rate} needs a seed that all ranks share, got dropout_seed="
                f"{described(self.seed)}; pass an int from 0 to 2**63 - 1, another one for every "
                f"layer and step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How the scores of queries and keys become weights.

    Attributes:
        scale: Factor of the products of queries and keys; ``None`` means ``head_size ** -0.5``,
            with the head size of queries and keys.
        softcap: Bound of the scaled scores: ``softcap * tanh(scores / softcap)``; ``None`` means
            no bound.
        dropout: Which weights become zero; ``None`` means none.
        window: How many keys a query sees left and right of the diagonal that ends in the last
            query and the last key, each ``None`` where all; ``None`` means no window.
        mask_mod: Mask function of FlexAttention: of the row of the batch, the head and the
            positions of query and key, as ``places`` has them, whether the query sees the key. The
            output of a query without keys is 0, its log-sum-exp minus infinity. ``None`` means
            that all keys are seen.
        places: Where the weights of a kernel's call are, with ``dropout`` or ``mask_mod``; ``None``
            before there is a call.

    Raises:
        InputError: A value is no number of its kind.
    """

    scale: float | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    window: Window | None = None
    mask_mod: MaskMod | None = None
    places: Places | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not _is_finite(self.scale):
            raise InputError(
                f"scale={described(self.scale)} is no finite number, and no gradient goes to it; "
                f"pass a float, or None for head_size ** -0.5"
            )
        if self.softcap is not None and not (_is_finite(self.softcap) and self.softcap > 0):
            raise InputError(
                f"softcap={described(self.softcap)} is no finite number above 0; pass a float, or "
                f"None for scores without a bound"
            )

    def scale_of(self, head_size: int) -> float:
        """Return the factor for queries and keys of this head size."""
        return 1 / math.sqrt(max(head_size, 1)) if self.scale is None else self.scale

    def band(self, causal: bool, rows: int, keys: int) -> Band:
        """Return the least and the greatest ``j - i`` that row ``i`` of a call sees, where any."""
        window = (None, 0) if causal else self.window
        return (None, None) if window is None else band_of(window, keys - rows)

    @property
    def placed(self) -> bool:
        """Return whether it matters where the weights are in the whole attention."""
        return self.dropout is not None or self.mask_mod is not None

    def at(self, places: Places) -> "ScoreOptions":
        """Return the options for the weights at ``places``."""
        return replace(self, places=places)

    def lack(self, *known: str) -> str | None:
        """Return why a kernel that has only the ``known`` options cannot serve, or None.

        Options that a later version adds are refused by a kernel that does not list them.
        """
        for name in self.__slots__:
            if name not in (*known, "places") and getattr(self, name) is not None:
                return f"it has no {name}, got {getattr(self, name)!r}"
        return None


PLAIN = ScoreOptions()


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@runtime_checkable
class AttentionBackend(Protocol):
    """One block of attention, forward and backward: ``full``, or a ``causal`` square.

    Shapes: q ``[batch, q_heads, rows, head_size]``, k ``[batch, kv_heads, keys, head_size]``, v
    ``[batch, kv_heads, keys, value_size]`` with ``q_heads`` a multiple of ``kv_heads``, out
    ``[batch, q_heads, rows, value_size]``, lse ``[batch, q_heads, rows]`` in natural logarithms and
    in the accumulator's dtype: the dims of ``scaled_dot_product_attention``. Tensors may be views
    with a dense last dim: memory is mostly in the order ``[batch, rows, heads, size]``, and results
    in that order are not copied on their way. ``causal`` blocks are square. No batch has more than
    65,535 rows.
    """

    @property
    def name(self) -> str:
        """Return what configurations call it."""
        ...

    def supports(
        self,
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        options: ScoreOptions,
    ) -> str | None:
        """Return why blocks of this kind cannot be computed, or None where they can.

        ``options.lack("scale")`` is the reason for a kernel that knows of ``scale`` alone. The
        answer must not depend on the rank: a plan is refused on all of them or on none.
        """
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp; both new tensors."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv; all new tensors, to which others are added.

        ``out`` and ``lse`` are those of the rows over *all* their keys, not of this block alone.
        """
        ...


def packs(backend: AttentionBackend) -> "TypeGuard[PackedBackend]":
    """Return whether a backend is a `PackedBackend`, which isinstance takes long to tell."""
    return hasattr(backend, "forward_packed") and hasattr(backend, "backward_packed")


class PackedBackend(AttentionBackend, Protocol):
    """A backend that also computes many blocks of one kind in one call.

    Block ``i`` is the ``i``-th stretch of ``rows[i]`` queries against the ``i``-th stretch of
    ``keys[i]`` keys; stretches follow each other, so that tensors have the shapes that
    `AttentionBackend` says with the sums of rows and of keys. Its rows see no other stretch.
    """

    def forward_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp; both new tensors."""
        ...

    def backward_packed(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the blocks' shares of dq, dk, dv; ``out`` and ``lse`` are over all keys."""
        ...


def ints_on(values: tuple[int, ...] | Ranges, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return integers, or those of ranges, as a tensor on the device of ``like``.

    The last ones are kept, of each device and stream: layers and steps of one mask have the same.
    """
    if not has_values(like):
        return torch.empty(_count(values), dtype=dtype, device=like.device)
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    return _ints_on(values, dtype, like.device, stream)


@lru_cache(maxsize=64)
def _ints_on(
    values: tuple[int, ...] | Ranges, dtype: torch.dtype, device: torch.device, stream: int
) -> Tensor:
    flat = [i for x in values for i in (x if isinstance(x, range) else (x,))]
    # Pinned, so that the host need not wait for the device to take them.
    made = torch.tensor(flat, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def _count(values: tuple[int, ...] | Ranges) -> int:
    return sum(len(x) if isinstance(x, range) else 1 for x in values)
