"""The interface between the plan of a layout and the code that uses it."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from torch import Tensor

from hp_dtensor import RaggedShard

from ._offsets import GradientRows, ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan(Protocol):
    """Offsets of tensors in the flat input and the flat output of one all-gather.

    Every rank has a flat shard with its part of each tensor. It sends slices of the flat shard. The
    slice ``(start, numel)`` of all ranks arrives, rank by rank, at the elements
    ``[degree * start, degree * (start + numel))`` of the flat output. Then `copy_out` copies the
    tensors that did not arrive in one piece to another offset of the output.

    Attributes:
        degree: Number of ranks.
        specs: Shape of each unsharded tensor, and how it is sharded.
        output_starts: Offset of each unsharded tensor in the output, after `copy_out`.
        shard_numel: Number of elements of the flat shard, padding included.
        output_numel: Number of elements of the output.
        slices: The slices that a rank sends, as ``(start, numel)``.
        tag_numel: Number of elements at the end of the last slice that hold the unit's tag.
    """

    degree: int
    specs: tuple[ShardSpec, ...]
    output_starts: tuple[int, ...]
    shard_numel: int
    output_numel: int
    slices: tuple[tuple[int, int], ...]
    tag_numel: int = 0

    @abstractmethod
    def shard_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the elements ``[start, end)`` of the flat shard of ``rank`` for each tensor."""

    def unsharded(self, output: Tensor) -> list[Tensor]:
        """Return the unsharded tensors as views of ``output``. Valid after `copy_out`."""
        pairs = zip(self.output_starts, self.specs, strict=True)
        return [output[start : start + spec.numel].view(spec.shape) for start, spec in pairs]

    def copy_out(self, output: Tensor) -> Callable[[], object] | None:
        """Return a function that completes ``output`` after each all-gather.

        None if every tensor arrives in one piece.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPlan(GatherPlan, Protocol):
    """Offsets of the parameters and gradients of one group: what a layout decides.

    Equal on all ranks. Ranks compare ``str(plan)`` if their collectives do not match.

    Attributes:
        kind: Name of the layout.
        itemsize: Bytes per element for which the offsets are aligned.
        direct: Whether each parameter arrives in one piece, without `copy_out`.
    """

    kind: ClassVar[str]
    itemsize: int
    direct: tuple[bool, ...]

    @property
    def parameter_bytes(self) -> int:
        """Return the number of bytes of the parameters, without padding."""
        return sum(spec.numel for spec in self.specs) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the number of bytes of padding in each all-gather."""
        sent = sum(numel for _, numel in self.slices)
        return self.degree * sent * self.itemsize - self.parameter_bytes

    @abstractmethod
    def part(self, position: int, unsharded: Tensor, rank: int) -> Tensor:
        """Return the part of an unsharded parameter that ``rank`` holds, as a view."""

    @abstractmethod
    def rows_per_rank(self, position: int) -> int:
        """Return the largest number of rows of a parameter on any rank."""

    @abstractmethod
    def gradient_rows(self, chosen: Sequence[int], rank: int, itemsize: int) -> GradientRows:
        """Return the offsets of the packed gradients of the parameters at ``chosen``.

        ``itemsize`` is the number of bytes per element of the gradients.
        """

    @abstractmethod
    def with_itemsize(self, itemsize: int, direct_bytes: float) -> Self:
        """Return the plan of the same parameters for elements of ``itemsize`` bytes.

        Every rank keeps its part of each parameter.
        """

    def ragged_shard(self, position: int) -> RaggedShard | None:
        """Return the placement of a `RaggedTensor`. None if the sharded parameter is a DTensor."""
        return None
