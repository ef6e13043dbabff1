"""Interfaces of plans: the offsets in the buffers of an all-gather, and in a group's flat buffers.

`GatherPlan` is enough for one all-gather. `FlatPlan` also has the parameters and gradients.
"""

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

    Every rank has a flat shard with its shard of each tensor, and sends slices of this flat shard.
    For a slice ``(start, numel)``, the elements ``[degree * start, degree * (start + numel))`` of
    the flat output receive the slices of all ranks, in the order of the ranks. If a tensor is not
    contiguous there, `copy_out` then copies it to another offset of the output.

    Attributes:
        degree: Number of ranks.
        specs: Shape and sharding of each tensor.
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
        """Return the elements ``(start, end)`` of each tensor in the flat shard of ``rank``."""

    def unsharded(self, output: Tensor) -> list[Tensor]:
        """Return the unsharded tensors as views of ``output``. Valid after `copy_out`."""
        pairs = zip(self.output_starts, self.specs, strict=True)
        return [output[start : start + spec.numel].view(spec.shape) for start, spec in pairs]

    def copy_out(self, output: Tensor) -> Callable[[], object] | None:
        """Return a function that makes all tensors in ``output`` contiguous after an all-gather.

        None if every tensor is contiguous already.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPlan(GatherPlan, Protocol):
    """Offsets of the parameters and gradients of one group.

    The plan is equal on all ranks. If the collectives of ranks do not match, the ranks compare
    ``str(plan)``.

    Attributes:
        kind: Name of the layout.
        itemsize: Bytes per element for which the offsets are aligned.
        direct: One bool per parameter: whether it is contiguous in the output without `copy_out`.
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
        """Return the shard of ``rank`` of an unsharded parameter, as a view."""

    @abstractmethod
    def rows_per_rank(self, position: int) -> int:
        """Return the size of the largest shard of a parameter along its sharded dim."""

    @abstractmethod
    def gradient_rows(self, chosen: Sequence[int], rank: int, itemsize: int) -> GradientRows:
        """Return the layout of the packed gradients, with the offset of each gradient.

        ``chosen``: indices of the parameters with a gradient. ``itemsize``: bytes per element of
        the gradients.
        """

    @abstractmethod
    def with_itemsize(self, itemsize: int, direct_bytes: float) -> Self:
        """Return the plan of the same parameters for elements of ``itemsize`` bytes.

        Every rank keeps the same shard of each parameter.
        """

    def ragged_shard(self, position: int) -> RaggedShard | None:
        """Return the placement of a sharded parameter that is a `RaggedTensor`.

        None if the sharded parameter is a DTensor.
        """
        return None
