"""Where the shards that torch's ``fully_shard`` makes lie, so that large ones need no copy-out."""

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

# Up to so many packed elements one indexed copy costs less than a copy for each parameter.
PERMUTED_NUMEL = 2**14
# Where so many of them, or more, are alike, a strided copy of all costs less than their split.
ALIKE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """One group's flat buffers: per rank ``shard_numel`` elements, gathered ``full_numel``.

    The shard of parameter ``i`` begins at ``starts[i]`` of the flat shard, the last ranks' padded
    (``torch.chunk``); gathered, its extent is ``full[i]``. ``segments`` are the ``(start, length)``
    pieces of the flat shard that the all-gather sends; piece ``(s, n)`` arrives at
    ``[degree * s, degree * (s + n))``. A parameter that is ``direct`` is a piece of its own, which
    arrives in its place. The others are the last piece, ``packed_numel`` elements from
    ``packed_start`` on, and are copied to their places from there. The last ``tag_numel`` elements
    of this piece are the unit's tag.
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
        """Return the bytes of the parameters themselves."""
        return sum(spec.numel for spec in self.specs) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of every gather that no parameter needs."""
        gathered = self.degree * sum(length for _, length in self.segments) * self.itemsize
        return gathered - self.parameter_bytes

    @property
    def packed(self) -> list[int]:
        """Return the packed parameters, in the order of the flat shard."""
        chosen = (i for i, direct in enumerate(self.direct) if not direct)
        return sorted(chosen, key=self.starts.__getitem__)

    def rows_per_rank(self, position: int) -> int:
        """Return how many rows of a parameter a rank holds at most."""
        return self.specs[position].rows

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return which elements of the flat shard are each parameter's, padding included."""
        starts = zip(self.starts, self.specs, strict=True)
        return [(start, start + spec.shard_numel) for start, spec in starts]

    def wholes(self, memory: Tensor) -> list[Tensor]:
        """Return the parameters in the flat output, as views."""
        return [extent.whole(memory) for extent in self.full]

    def copy_out(self, memory: Tensor) -> Callable[[], object] | None:
        """Return what copies packed parameters from where they were gathered to their places.

        ``memory`` is the flat output. Few elements go in one indexed copy. Otherwise those along
        dim 0 go in one split or, where many are alike, in one strided copy of each kind; those
        along another dimension go one by one. None where nothing is packed.
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
    """Return the plan for parameters, each at least 1-D, sharded over ``degree`` ranks.

    A parameter is direct if its shard along dim 0 has at least ``direct_bytes`` (64 KiB) and is a
    multiple of 16 bytes; every direct parameter then starts at a multiple of 16 bytes. With one
    rank all are direct: flat shard and output are the same. What is sharded along another dimension
    does not arrive in its order, so it is packed, last.

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
    """Return how pieces of one width follow at one distance: first piece, how many, distance.

    ``starts`` says where each is and where it goes, and so do the distances.
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
    """Return for each element of the output from ``first`` on which arrived element goes there."""
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
