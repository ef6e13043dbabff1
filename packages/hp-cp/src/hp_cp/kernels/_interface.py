"""The interface of kernels: `AttentionBackend` and the options that it receives."""

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
    """How a kernel turns the products of queries and keys into attention weights.

    Attributes:
        scale: Factor of the products. None means ``head_size ** -0.5``, with the head size of
            queries and keys.
        softcap: Bound of the scaled scores: ``softcap * tanh(scores / softcap)``. None means no
            bound.
        dropout: Rate and seed of the dropout. None means no dropout.
        window: ``(left, right)``: number of keys that a query sees to the left and to the right of
            the diagonal. The diagonal ends at the last query and the last key. A side is None if it
            is unbounded. None means no window.
        mask_mod: Mask function as in `MaskSpec`, called with the positions in ``places``. A query
            without visible keys has the output 0 and the log-sum-exp minus infinity. None means
            that all keys are visible.
        places: Positions in the whole attention of the queries and keys of one kernel call. Given
            only if there is ``dropout`` or ``mask_mod``. None outside a kernel call.

    Raises:
        InputError: ``scale`` is not a finite number, or ``softcap`` is not a finite number above 0.

    Examples:
        >>> options = ScoreOptions(softcap=30.0)
        >>> options.scale_of(head_size=64)
        0.125
        >>> options.lack("scale")
        'it has no softcap, got 30.0'
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
        """Return the factor by which a kernel multiplies the products of queries and keys.

        Args:
            head_size: Head size of queries and keys.

        Returns:
            ``scale``, or ``head_size ** -0.5`` if it is None.
        """
        return 1 / math.sqrt(max(head_size, 1)) if self.scale is None else self.scale

    def band(self, causal: bool, rows: int, keys: int) -> Band:
        """Return bounds of ``j - i`` between which query ``i`` of a block sees key ``j``.

        Args:
            causal: True if the block is a causal square.
            rows: Number of queries of the block.
            keys: Number of keys of the block.

        Returns:
            ``(smallest, largest)``. A bound is None if there is no limit on this side.
        """
        window = (None, 0) if causal else self.window
        return (None, None) if window is None else band_of(window, keys - rows)

    @property
    def placed(self) -> bool:
        """Whether the kernel needs positions in the whole sequence.

        True with a mask function, or with dropout, which draws the same mask however the sequence
        is sharded.
        """
        return self.dropout is not None or self.mask_mod is not None

    def at(self, places: Places) -> "ScoreOptions":
        """Return a copy of these options with the positions of one kernel call.

        Args:
            places: Positions of the queries and keys of the call in the whole attention.

        Returns:
            A copy with ``places``.
        """
        return replace(self, places=places)

    def lack(self, *known: str) -> str | None:
        """Return why a kernel that supports only some options cannot compute these options.

        Options that later versions add count as unsupported, so that the kernel refuses them.

        Args:
            known: Names of the options that the kernel supports.

        Returns:
            The reason, which names the unsupported option; None if the kernel supports all of them.
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
    """Protocol of a kernel that computes one block of attention, forward and backward.

    A block is ``full`` (each query sees each key) or a ``causal`` square. Tensors have the dims of
    ``scaled_dot_product_attention``:

    | tensor | shape |
    |---|---|
    | ``q`` | ``[batch, q_heads, rows, head_size]``; ``q_heads`` is a multiple of ``kv_heads`` |
    | ``k`` | ``[batch, kv_heads, keys, head_size]`` |
    | ``v`` | ``[batch, kv_heads, keys, value_size]`` |
    | ``out`` | ``[batch, q_heads, rows, value_size]`` |
    | ``lse`` | ``[batch, q_heads, rows]``, float32, or float64 for float64 inputs |

    Inputs may be views with a dense last dim, mostly in the memory order
    ``[batch, rows, heads, size]``. Results in this order need no copy. ``batch`` is at most 65,535.
    Backend objects have to be hashable. If a backend also has the methods ``forward_packed`` and
    ``backward_packed``, they are called with many blocks of one kind at once.

    Attributes:
        name: Name under which `register_backend` registers the backend.
        supports: Returns why the backend cannot compute a kind of block, or None if it can.
        forward: Computes the output and the log-sum-exp of one block.
        backward: Computes the gradients of one block.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class MyBackend:
        ...     name: str = "mine"
        ...     def supports(self, kernel, device, dtype, head_size, value_size, options):
        ...         return options.lack("scale")  # supports no other option
        ...     def forward(self, q, k, v, *, causal, options):
        ...         return my_forward(q, k, v, causal, options.scale)
        ...     def backward(self, grad, q, k, v, out, lse, *, causal, options):
        ...         return my_backward(grad, q, k, v, out, lse, causal, options.scale)
        >>> isinstance(MyBackend(), AttentionBackend)
        True
    """

    @property
    def name(self) -> str:
        """Name under which `register_backend` registers the backend."""
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
        """Return why the backend cannot compute a kind of block, or None if it can.

        The result must be the same on every rank, because either all ranks or no ranks accept a
        plan.

        Args:
            kernel: ``"full"`` or ``"causal"``.
            device: Device of the tensors.
            dtype: Dtype of the tensors.
            head_size: Head size of queries and keys.
            value_size: Head size of values and outputs.
            options: Options of the scores. A kernel that supports only ``scale`` returns
                ``options.lack("scale")``.

        Returns:
            The reason in a few words; None if the backend supports the block.
        """
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sum-exp of a block.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            causal: True for a causal square, False for a full block.
            options: Options of the scores.

        Returns:
            ``(out, lse)``, both new tensors.
        """
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
        """Compute the gradients of attention between one block of queries and one of keys.

        Args:
            grad: Gradient of ``out``.
            q: Queries of the forward.
            k: Keys of the forward.
            v: Values of the forward.
            out: Output of the queries over all keys that they see, not only the keys of this block.
            lse: Log-sum-exp of the queries over all keys that they see.
            causal: True for a causal square, False for a full block.
            options: Options of the scores.

        Returns:
            The gradients ``(dq, dk, dv)`` from this block alone, as new tensors. The caller adds
            the gradients from other blocks to them in place.
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
