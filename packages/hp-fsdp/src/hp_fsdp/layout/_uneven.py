"""Plan of an all-gather in which ranks send different sizes, for all-gather extensions."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ._offsets import ALIGNMENT, ShardSpec, round_up
from ._plan import GatherPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPlan(GatherPlan):
    """Offsets of 1-D tensors that have shards of different sizes on different ranks.

    Each rank sends one slice: its shards of all tensors, then padding. `copy_out` concatenates the
    shards of each tensor in the order of the ranks.

    Attributes:
        sizes: ``sizes[i][r]`` is the number of elements of tensor i that rank r sends.
    """

    sizes: tuple[tuple[int, ...], ...]

    def shard_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the elements ``(start, end)`` of each tensor in the flat shard of ``rank``."""
        ends = itertools.accumulate((each[rank] for each in self.sizes), initial=0)
        return list(itertools.pairwise(ends))

    def copy_out(self, output: Tensor) -> Callable[[], None]:
        """Return a function that concatenates the gathered shards of each tensor."""
        gathered = output[: self.degree * self.shard_numel].view(self.degree, self.shard_numel)
        tensors = zip(self.unsharded(output), self.sizes, strict=True)
        targets = [tensor.split(sizes) for tensor, sizes in tensors]
        copies = [
            (parts[rank], gathered[rank, start:end])
            for rank in range(self.degree)
            for (start, end), parts in zip(self.shard_ranges(rank), targets, strict=True)
            if end > start
        ]

        def copy_out() -> None:
            for target, part in copies:
                target.copy_(part)

        return copy_out


def plan_uneven(sizes: Sequence[tuple[int, ...]]) -> UnevenPlan:
    """Plan the all-gather of 1-D tensors of bytes.

    ``sizes[i][r]`` is the number of bytes of tensor i that rank r sends.
    """
    degree = len(sizes[0])
    shard_numel = max(map(sum, zip(*sizes, strict=True)))
    totals = list(map(sum, sizes))
    lengths = (round_up(each, ALIGNMENT) for each in (degree * shard_numel, *totals))
    *starts, end = itertools.accumulate(lengths)
    return UnevenPlan(
        degree=degree,
        specs=tuple(ShardSpec(shape=(total,), dim=0, degree=degree) for total in totals),
        output_starts=tuple(starts),
        shard_numel=shard_numel,
        output_numel=end,
        slices=((0, shard_numel),),
        sizes=tuple(sizes),
    )
