"""The exact layout: the same shards as torch's ``fully_shard``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .._tags import tag_width
from ._memory import as_bytes
from ._offsets import DIRECT_BYTES, GradientRows, ShardSpec, aligned_numel, round_up, rows_by_rank
from ._plan import FlatPlan

# With at most this number of packed elements, one indexed copy is faster than one copy for each
# parameter.
INDEXED_NUMEL = 2**14
# With at least this number of parameters per series, strided copies are faster than a split.
SERIES_LENGTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan(FlatPlan):
    """Offsets of the parameters of one group, each sharded along one dim.

    - A direct parameter has its own slice of the all-gather. Its elements are contiguous in the
      output.
    - All other parameters are packed: they share the last slice, and `copy_out` copies each of them
      to a contiguous part of the output.

    Attributes:
        shard_starts: Offset of each parameter in the flat shard. The shards of a parameter are
            padded to the same size on all ranks.
        packed_start: Offset of the packed slice in the flat shard. The slice has the packed
            parameters, then the tag.
        packed_numel: Number of elements of the packed slice; 0 if there is no such slice.
    """

    kind: ClassVar[str] = "exact"
    shard_starts: tuple[int, ...]
    packed_start: int
    packed_numel: int

    @property
    def packed(self) -> list[int]:
        """Return the positions of the packed parameters, in the order of the flat shard."""
        chosen = (i for i, direct in enumerate(self.direct) if not direct)
        return sorted(chosen, key=self.shard_starts.__getitem__)

    def shard_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the range ``(start, end)`` of each parameter in the flat shard, with padding."""
        pairs = zip(self.shard_starts, self.specs, strict=True)
        return [(start, start + spec.shard_numel) for start, spec in pairs]

    def part(self, position: int, unsharded: Tensor, rank: int) -> Tensor:
        """Return the shard that ``rank`` holds of an unsharded parameter, as a view."""
        return self.specs[position].part(unsharded, rank)

    def rows_per_rank(self, position: int) -> int:
        """Return the size of the largest shard of a parameter along its sharded dim."""
        return self.specs[position].rows

    def gradient_rows(self, chosen: Sequence[int], rank: int, itemsize: int) -> GradientRows:
        """Return the offsets of the packed gradients of the parameters at ``chosen``."""
        return rows_by_rank([self.specs[i] for i in chosen], rank, itemsize)

    def with_itemsize(self, itemsize: int, direct_bytes: float) -> "ExactPlan":
        """Return the plan of the same parameters for elements of ``itemsize`` bytes."""
        return plan_exact(self.specs, self.degree, itemsize, direct_bytes)

    def copy_out(self, output: Tensor) -> Callable[[], object] | None:
        """Return a function that copies the packed parameters to their offsets in ``output``.

        None if there are no packed parameters.
        """
        if self.packed_numel == self.tag_numel:
            return None
        # `tail` has the packed slices of all ranks, then the unsharded packed parameters.
        tail = output[self.degree * self.packed_start :]
        target = tail[self.degree * (self.shard_numel - self.packed_start) :]
        if len(target) > INDEXED_NUMEL:
            return self._copy_each(tail)
        gathered = self.degree * self.packed_numel
        numbers = torch.zeros(len(tail), dtype=torch.int32, device="cpu")
        # With ``out=``, torch would raise inside ``with torch.device("meta")``.
        numbers[:gathered] = torch.arange(gathered, dtype=torch.int32, device="cpu")
        self._copy_each(numbers)()
        index = numbers[-len(target) :].to(output.device)
        source = as_bytes(tail[:gathered])
        return partial(torch.index_select, source, 0, index, out=as_bytes(target))

    def _copy_each(self, tail: Tensor) -> Callable[[], None]:
        """Return a function that copies the packed parameters within ``tail``.

        ``tail`` is the output from the packed slices on.

        - Parameters that are sharded along dim 0 are copied with one
          ``torch.split_with_sizes_copy``. If there are long series of parameters with equal sizes,
          each series is copied with one strided copy instead.
        - Other parameters are copied one by one.
        """
        degree, numel, specs = self.degree, self.packed_numel, self.specs
        gathered = tail[: degree * numel].view(degree, numel)
        sources = [start - self.packed_start for start in self.shard_starts]
        targets = [start - degree * self.packed_start for start in self.output_starts]
        plain = [i for i in self.packed if not specs[i].dim]
        widths = [specs[i].shard_numel for i in plain]
        source = gathered[:, : sum(widths)]
        places = [
            tail[targets[i] : targets[i] + degree * width].view(degree, width)
            for i, width in zip(plain, widths, strict=True)
        ]
        copies = []
        series = series_of([(sources[i], targets[i]) for i in plain], widths)
        if SERIES_LENGTH * len(series) <= len(plain):
            for begin, count, (step, target_step) in series:
                i, width = plain[begin], widths[begin]
                shape = degree, count, width
                part = tail[sources[i] :].as_strided(shape, (numel, step, 1))
                place = tail[targets[i] :].as_strided(shape, (width, target_step, 1))
                copies.append((place, part))
            widths = []
        for i in (i for i in self.packed if specs[i].dim):
            unsharded = tail[targets[i] : targets[i] + specs[i].numel].view(specs[i].shape)
            place = specs[i].by_rank(unsharded)
            part = gathered[:, sources[i] : sources[i] + specs[i].shard_numel]
            copies.append((place, part.view(place.shape)))

        def copy_out() -> None:
            if widths:
                torch.split_with_sizes_copy(source, widths, dim=1, out=places)
            for place, part in copies:
                place.copy_(part)

        return copy_out


def plan_exact(
    specs: Sequence[ShardSpec],
    degree: int,
    itemsize: int,
    direct_bytes: float = DIRECT_BYTES,
    tagged: bool = True,
) -> ExactPlan:
    """Plan the flat buffers of parameters that are sharded over ``degree`` ranks.

    The all-gather sends one slice of the flat shard for each direct parameter, and one slice for
    all packed parameters together; see `ExactPlan`. A parameter is direct in these cases:

    - It is sharded along dim 0, its shard has at least ``direct_bytes``, and the number of bytes of
      the shard is a multiple of 16.
    - There is only one rank. Then the flat shard and the output have the same offsets.

    All other parameters are packed. In the output, each unsharded parameter starts at a multiple of
    16 bytes.

    The tag is the number of the unit, encoded in a few elements that each rank sends; see `_tags`.
    Its position depends on the slices:

    - If there are packed parameters, the tag is at the end of their slice.
    - If there are two or more direct parameters and no packed ones, the tag has its own slice.
    - If there is one direct parameter and no packed one, there is no tag, because it would need a
      second slice.
    - With one rank, or if ``tagged`` is False, there is no tag.
    """
    unit = aligned_numel(itemsize)
    direct = tuple(
        degree == 1 or (spec.dim == 0 and numel % unit == 0 and numel * itemsize >= direct_bytes)
        for spec, numel in [(spec, spec.shard_numel) for spec in specs]
    )
    packed = [i for i, is_direct in enumerate(direct) if not is_direct]
    packed.sort(key=lambda i: specs[i].dim != 0)  # `copy_out` splits the parameters along dim 0
    shard_starts, output_starts = [0] * len(specs), [0] * len(specs)
    slices = []
    end = 0
    for i, spec in enumerate(specs):
        if direct[i]:
            shard_starts[i], output_starts[i] = end, degree * end
            if spec.shard_numel:
                slices.append((end, spec.shard_numel))
            end = round_up(end + spec.shard_numel, unit)
    packed_start = end
    for i in packed:
        shard_starts[i] = end
        end += specs[i].shard_numel
    has_tag = tagged and degree > 1 and (end > packed_start or len(slices) > 1)
    tag_numel = tag_width(itemsize) if has_tag else 0
    end += tag_numel
    if end > packed_start:
        slices.append((packed_start, end - packed_start))
    shard_numel = round_up(end, unit)
    output_numel = degree * shard_numel
    for i in packed:
        output_starts[i] = output_numel
        output_numel = round_up(output_numel + degree * specs[i].shard_numel, unit)
    return ExactPlan(
        degree=degree,
        itemsize=itemsize,
        specs=tuple(specs),
        shard_starts=tuple(shard_starts),
        output_starts=tuple(output_starts),
        direct=direct,
        slices=tuple(slices),
        shard_numel=shard_numel,
        packed_start=packed_start,
        packed_numel=end - packed_start,
        output_numel=output_numel,
        tag_numel=tag_numel,
    )


def series_of(
    starts: Sequence[tuple[int, int]], widths: Sequence[int]
) -> list[tuple[int, int, tuple[int, int]]]:
    """Find series of tensors that can be copied with one strided copy each.

    The tensors of a series have equal sizes, and equal distances in the source and in the target.

    Args:
        starts: For each tensor, its offset in the source and in the target.
        widths: Number of elements of each tensor.

    Returns:
        One ``(first, count, (source_step, target_step))`` for each series: the index of its first
        tensor, the number of tensors, and their distances. ``count`` is 1 for a single tensor.
    """
    found: dict[int, list[tuple[int, int, tuple[int, int]]]] = {}
    for position, (start, width) in enumerate(zip(starts, widths, strict=True)):
        known = found.setdefault(width, [])
        if known:
            first, count, step = known[-1]
            since = (start[0] - starts[first][0], start[1] - starts[first][1])
            if count == 1 or since == (count * step[0], count * step[1]):
                known[-1] = first, count + 1, since if count == 1 else step
                continue
        known.append((position, 1, (width, width)))
    return [each for known in found.values() for each in known]
