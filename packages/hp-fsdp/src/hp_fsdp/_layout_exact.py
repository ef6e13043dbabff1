"""The exact layout: the shards of torch's ``fully_shard``; large ones are gathered in place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ._buffers import as_bytes
from ._offsets import (
    ALIGNMENT,
    Extent,
    GradientRows,
    ShardSpec,
    elements_of,
    is_large,
    round_up,
    rows_by_rank,
)
from ._tags import tag_width

# Up to this number of packed elements, one indexed copy is faster than a copy for each parameter.
PERMUTED_NUMEL = 2**14
# From this number of equal parameters per series, one strided copy is faster than a split.
ALIKE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """Offsets of the parameters of one group in the flat shard and in the output.

    The all-gather sends pieces of the flat shard. The piece ``(start, length)`` arrives at
    ``[degree * start, degree * (start + length))`` of the output. The piece of a direct parameter
    arrives at the place of the parameter. All other parameters share the last piece, and are copied
    from there to their places.

    Attributes:
        degree: Number of ranks.
        itemsize: Bytes per element.
        specs: Shape of each parameter.
        starts: Offset of each parameter in the flat shard. The shards of the last ranks are padded.
        full: Place of each parameter in the output.
        direct: Whether a parameter is direct.
        segments: The pieces: ``(start, length)``.
        shard_numel: Number of elements of the flat shard.
        packed_start: Start of the last piece, if there are packed parameters or a tag.
        packed_numel: Length of the last piece.
        full_numel: Number of elements of the output.
        tag_numel: Number of elements at the end of the last piece that are the tag of the unit.
    """

    kind: ClassVar[str] = "exact"
    degree: int
    itemsize: int
    specs: tuple[ShardSpec, ...]
    starts: tuple[int, ...]
    full: tuple[Extent, ...]
    direct: tuple[bool, ...]
    segments: tuple[tuple[int, int], ...]
    shard_numel: int
    packed_start: int
    packed_numel: int
    full_numel: int
    tag_numel: int = 0

    @property
    def parameter_bytes(self) -> int:
        """Return the number of bytes of the parameters, without padding."""
        return sum(spec.numel for spec in self.specs) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the number of bytes of padding in each all-gather."""
        gathered = self.degree * sum(length for _, length in self.segments) * self.itemsize
        return gathered - self.parameter_bytes

    @property
    def packed(self) -> list[int]:
        """Return the packed parameters, in the order of the flat shard."""
        chosen = (i for i, direct in enumerate(self.direct) if not direct)
        return sorted(chosen, key=self.starts.__getitem__)

    def rows_per_rank(self, position: int) -> int:
        """Return the largest number of rows of a parameter on any rank."""
        return self.specs[position].rows

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return the elements ``[start, end)`` of the flat shard of each parameter, padded."""
        starts = zip(self.starts, self.specs, strict=True)
        return [(start, start + spec.shard_numel) for start, spec in starts]

    def wholes(self, memory: Tensor) -> list[Tensor]:
        """Return the parameters in the flat output, as views."""
        return [extent.whole(memory) for extent in self.full]

    def copy_out(self, memory: Tensor) -> Callable[[], object] | None:
        """Return the function that copies packed parameters to their places, or None.

        ``memory`` is the output. If there are few packed elements, the function makes one indexed
        copy. Otherwise it splits the parameters along dim 0 in one call, or copies each series of
        equal parameters in one strided copy. It copies parameters along other dims one by one.
        """
        degree, numel, packed = self.degree, self.packed_numel, self.packed
        if numel == self.tag_numel:
            return None
        start = degree * self.packed_start
        arrived = memory[start : start + degree * numel]
        first = self.full[packed[0]].start
        if self.full_numel - first <= PERMUTED_NUMEL:
            order, target = _packed_order(self, first, memory.device), as_bytes(memory[first:])
            return partial(torch.index_select, as_bytes(arrived), 0, order, out=target)
        rows = arrived.view(degree, numel)
        plain = [i for i in packed if not self.specs[i].dim]
        widths = [self.specs[i].shard_numel for i in plain]
        source, places = rows[:, : sum(widths)], [self.full[i].runs(memory) for i in plain]
        copies = []
        series = series_of([(self.starts[i], self.full[i].start) for i in plain], widths)
        if ALIKE * len(series) <= len(plain):
            for begin, count, (step, full_step) in series:
                i, width = plain[begin], widths[begin]
                shape, start = (degree, count, width), self.starts[i] - self.packed_start
                part = arrived[start:].as_strided(shape, (numel, step, 1))
                place = memory[self.full[i].start :].as_strided(shape, (width, full_step, 1))
                copies.append((place, part))
            widths = []
        for i in (i for i in packed if self.specs[i].dim):
            spec, start = self.specs[i], self.starts[i] - self.packed_start
            place = spec.by_rank(self.full[i].whole(memory))
            part = rows[:, start : start + spec.shard_numel]
            copies.append((place, part.view(place.shape)))

        def copy_out() -> None:
            if widths:
                torch.split_with_sizes_copy(source, widths, dim=1, out=places)
            for place, part in copies:
                place.copy_(part)

        return copy_out

    def gradient_rows(self, chosen: Sequence[int], index: int, itemsize: int) -> GradientRows:
        """Return the offsets of the packed gradients of the parameters at ``chosen``."""
        return rows_by_rank([self.specs[i] for i in chosen], index, itemsize)


def plan_group(
    specs: Sequence[ShardSpec],
    degree: int,
    itemsize: int,
    direct_bytes: float | None = None,
    tagged: bool = True,
) -> ExactPlan:
    """Plan the flat shard and the output for parameters that are sharded over ``degree`` ranks.

    A parameter is direct if its shard along dim 0 has at least ``direct_bytes`` (64 KiB) and is a
    multiple of 16 bytes. Every direct parameter then starts at a multiple of 16 bytes. With one
    rank, all parameters are direct, so the flat shard and the output have the same offsets.
    A parameter that is sharded along another dimension does not arrive in its order. Such
    parameters are the last packed ones.

    If there is a packed piece, the tag of the unit is appended to it. If several pieces are direct
    and none is packed, the tag is a small piece of its own. A single direct piece has no tag: with
    one, its all-gather would become two. If ``tagged`` is False, there is no tag.
    """
    unit = elements_of(ALIGNMENT, itemsize)
    held = [spec.shard_numel for spec in specs]
    direct = tuple(
        degree == 1
        or (spec.dim == 0 and numel % unit == 0 and is_large(numel, itemsize, direct_bytes))
        for spec, numel in zip(specs, held, strict=True)
    )
    packed = [i for i, is_direct in enumerate(direct) if not is_direct]
    packed.sort(key=lambda i: specs[i].dim != 0)  # a stable sort: otherwise in order
    starts, full_starts = [0] * len(specs), [0] * len(specs)
    segments = []
    end = 0
    for i, is_direct in enumerate(direct):
        if is_direct:
            starts[i], full_starts[i] = end, degree * end
            if held[i]:
                segments.append((end, held[i]))
            end = round_up(end + held[i], unit)
    packed_start = end
    for i in packed:
        starts[i] = end
        end += held[i]
    has_tag = tagged and degree > 1 and (end > packed_start or len(segments) > 1)
    tag_numel = tag_width(itemsize) if has_tag else 0
    end += tag_numel
    packed_numel = end - packed_start
    if packed_numel:
        segments.append((packed_start, packed_numel))
    shard_numel = round_up(end, unit)
    full_end = degree * shard_numel
    for i in packed:
        full_starts[i] = full_end
        full_end = round_up(full_end + degree * held[i], unit)
    return ExactPlan(
        degree=degree,
        itemsize=itemsize,
        specs=tuple(specs),
        starts=tuple(starts),
        full=tuple(
            Extent.of(spec, start, numel)
            for spec, start, numel in zip(specs, full_starts, held, strict=True)
        ),
        direct=direct,
        segments=tuple(segments),
        shard_numel=shard_numel,
        packed_start=packed_start,
        packed_numel=packed_numel,
        full_numel=full_end,
        tag_numel=tag_numel,
    )


def series_of(
    starts: Sequence[tuple[int, int]], widths: Sequence[int]
) -> list[tuple[int, int, tuple[int, int]]]:
    """Find series of pieces with equal widths and equal distances.

    Args:
        starts: Offset of each piece in the source and in the target.
        widths: Number of elements of each piece.

    Returns:
        For each series: the index of its first piece, the number of pieces, and the distances in
        the source and in the target.
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


def _packed_order(plan: ExactPlan, first: int, device: torch.device) -> Tensor:
    """Return the index of the gathered element for each element of the output from ``first`` on."""
    numbers = torch.arange(plan.degree * plan.packed_numel, dtype=torch.int32, device="cpu")
    arrived = numbers.view(plan.degree, plan.packed_numel)
    order = torch.zeros(plan.full_numel - first, dtype=torch.int32, device="cpu")
    for i in plan.packed:
        spec, extent = plan.specs[i], plan.full[i]
        start = plan.starts[i] - plan.packed_start
        part = arrived[:, start : start + spec.shard_numel]
        place = order[extent.start - first :]
        if spec.dim:
            whole = spec.by_rank(place[: spec.numel].view(spec.shape))
            whole.copy_(part.view(whole.shape))
        else:
            place[: part.numel()].copy_(part.flatten())
    return order.to(device)
