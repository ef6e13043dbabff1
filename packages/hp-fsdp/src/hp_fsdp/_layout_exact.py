"""The shards that torch's ``fully_shard`` makes, gathered by one collective without a copy-out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._buffers import Buffer, Buffers, Resize, as_bytes, as_sent, in_own_storage
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
from ._streams import Streams, Waitable, gather_copy

# Up to so many packed elements one indexed copy costs less than a copy for each parameter.
PERMUTED_NUMEL = 2**14
# Where so many of them, or more, are alike, a strided copy of all costs less than their split.
ALIKE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group's flat buffers: per rank ``shard_numel`` elements, gathered ``full_numel``.

    The shard of parameter ``i`` begins at ``starts[i]`` of the flat shard, the last ranks' padded
    (``torch.chunk``); gathered, its extent is ``full[i]``. ``segments`` are the ``(start, length)``
    pieces of the flat shard that the all-gather sends; piece ``(s, n)`` arrives at
    ``[degree * s, degree * (s + n))``. A parameter that is ``direct`` is a piece of its own, which
    arrives in its place. The others are the last piece, ``packed_numel`` elements from
    ``packed_start`` on, and are copied to their places from there.
    """

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


def plan_group(
    specs: Sequence[ShardSpec], degree: int, itemsize: int, direct_bytes: float | None = None
) -> GroupPlan:
    """Return the plan for parameters, each at least 1-D, sharded over ``degree`` ranks.

    A parameter is direct if its shard along dim 0 has at least ``direct_bytes`` (64 KiB) and is a
    multiple of 16 bytes; every direct parameter then starts at a multiple of 16 bytes. With one
    rank all are direct: flat shard and output are the same. What is sharded along another dimension
    does not arrive in its order, so it is packed, last.
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
    packed_numel = end - packed_start
    if packed_numel:
        segments.append((packed_start, packed_numel))
    shard_numel = round_up(end, unit)
    full_end = degree * shard_numel
    for i in packed:
        full_starts[i] = full_end
        full_end = round_up(full_end + degree * held[i], unit)
    return GroupPlan(
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
    )


class ExactLayout:
    """The flat shard of one group and the flat output that it is gathered into: a `Layout`.

    The output begins allocated, so that unsharded parameters can be built over it, and is then
    freed. Where shards are stored as they are gathered, one rank's output is its shard.
    """

    def __init__(
        self,
        locals_: Sequence[Tensor],
        specs: Sequence[ShardSpec],
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers | None = None,
        pinned: bool = False,
        direct_bytes: float | None = None,
    ) -> None:
        """Copy this rank's part of each parameter (``locals_``) into a new flat shard.

        It keeps their dtype and device; the output has ``dtype`` and is on ``device``.
        """
        first = locals_[0]
        self.specs = tuple(specs)
        self._index = axis.index
        itemsize = min(first.element_size(), dtype.itemsize)
        self.plan = plan_group(specs, axis.size, itemsize, direct_bytes)
        self.spans = [
            (start, start + spec.shard_numel)
            for start, spec in zip(self.plan.starts, specs, strict=True)
        ]
        self.shard = torch.zeros(
            self.plan.shard_numel, dtype=first.dtype, device=first.device, pin_memory=pinned
        )
        shapes = [spec.local_shape(self._index) for spec in specs]
        self.shards = [
            in_own_storage(_narrow(self.shard, start, math.prod(shape)).view(shape))
            for start, shape in zip(self.plan.starts, shapes, strict=True)
        ]
        for view, local in zip(self.shards, locals_, strict=True):
            view.copy_(local)
        as_stored = first.dtype == dtype and (first.device == device or first.is_meta)
        self._output: Buffer | None = None
        if axis.size == 1 and as_stored:
            # Parameters start at their shard's offset, and the shard is the output.
            memory = self.shard.data
        else:
            own = Resize() if buffers is None else buffers
            self._output = own.buffer(self.plan.full_numel, dtype, device)
            memory = self._output.tensor
        self._view(memory)
        self._sent: Buffer | None = None
        if not as_stored:
            self._sent = Resize().buffer(self.plan.shard_numel, dtype, device)
        self._send_from(self.shard if self._sent is None else self._sent.tensor)
        self._outputs: list[Tensor] = []
        self._copy_out: Callable[[], object] | None = None
        self._block: list[Tensor] = []
        if self._output is not None:
            self._wire(self._output.writable)
        if self._sent is not None:
            self._sent.free()

    def _view(self, memory: Tensor) -> None:
        self.fulls = [extent.whole(memory) for extent in self.plan.full]
        self._memory = memory  # last: an interrupt before it lets the next gather begin again

    def _send_from(self, source: Tensor) -> None:
        self._inputs = [as_sent(_narrow(source, start, n)) for start, n in self.plan.segments]
        self._source = source

    def _wire(self, memory: Tensor) -> None:
        plan, degree = self.plan, self.plan.degree
        self._outputs = [
            as_sent(_narrow(memory, degree * start, degree * n)) for start, n in plan.segments
        ]
        self._copy_out = copy_out_of(plan, memory) if plan.packed_numel else None
        self._started_by: Collectives | None = None  # what `_start` starts the gather by

    def gradient_rows(self, chosen: Sequence[int], itemsize: int) -> GradientRows:
        """Return the offsets of the gradients of the parameters at ``chosen``, rank by rank."""
        return rows_by_rank([self.specs[i] for i in chosen], self._index, itemsize)

    @property
    def available(self) -> bool:
        """Return whether there is memory to gather into."""
        return self._output is None or self._output.available

    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        output = self._output
        if output is None or not self._inputs:
            return None
        output.allocate()
        if output.tensor is not self._memory:
            self._renew(output)
        if self._sent is not None or self.plan.degree == 1:
            return self._gather_copy(output, axis, collectives, streams)
        if self._started_by is not collectives:
            self._start = prepared_gather(collectives, axis, self._inputs, self._outputs)
            self._started_by = collectives
        output.lent = True
        return self._start()

    def _gather_copy(
        self, output: Buffer, axis: Axis, collectives: Collectives, streams: Streams | None
    ) -> Waitable | None:
        """Gather what is copied first, to another dtype or device; one rank only copies."""
        sent = self._sent
        if sent is None or self.plan.degree == 1:
            if streams is not None:
                output.lent = True
                with streams.gather.after_current("copy_shard"):
                    output.writable.copy_(self.shard, non_blocking=True)
                return streams.gather.begun()
            output.writable.copy_(self.shard, non_blocking=True)
            return None
        sent.allocate()
        if sent.tensor is not self._source:
            with torch.inference_mode(False):
                self._send_from(sent.tensor)
        sent.lent = True
        start = partial(collectives.all_gather, axis, self._inputs, self._outputs)
        if streams is not None:
            output.lent = True
            return gather_copy(streams.gather, sent.writable, self.shard, start)
        sent.writable.copy_(self.shard, non_blocking=True)
        output.lent = True
        return start()

    def _renew(self, output: Buffer) -> None:
        with torch.inference_mode(False):
            self._wire(output.writable)
            self._view(output.tensor)

    def save_block(self, size: int) -> None:
        """Copy what this rank is to hold between forward and backward among ``size`` neighbours.

        The neighbours are those of this rank on an axis that is split into blocks of ``size``.
        """
        position = self._index % size
        self._block = [
            output.view(size, -1)[position].clone(memory_format=torch.contiguous_format)
            for output in self._outputs
        ]

    def gather_block(self, axis: Axis, collectives: Collectives) -> Waitable | None:
        """Start an all-gather over a smaller axis of what `save_block` copied."""
        if self._output is None or not self._block:
            return None
        self._output.allocate()
        if self._output.tensor is not self._memory:
            self._renew(self._output)
        self._output.lent = True
        return collectives.all_gather(axis, self._block, self._outputs)

    def drop_block(self) -> None:
        """Release what `save_block` copied."""
        self._block = []

    def wait(self, work: Waitable) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        if self._output is not None:
            self._output.lent = False
        if self._sent is not None:
            self._sent.lent = False
            self._sent.free()

    def finish_gather(self, work: Waitable | None) -> None:
        """Copy the packed parameters to their places, after `wait`."""
        if work is not None and self._copy_out is not None:
            self._copy_out()

    def free(self) -> None:
        """Give back the memory of the gather, or leave it to a collective that may still use it."""
        if self._output is not None:
            self._output.free()
        if self._sent is not None:
            self._sent.free()


def prepared_gather(
    collectives: Collectives, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[], Waitable]:
    """Return what starts the same all-gather in every step; torch's looks things up only here."""
    if type(collectives) is TorchCollectives and len(inputs) == 1 < axis.size:
        return collectives.prepare_all_gather(axis, inputs[0], outputs[0])
    return partial(collectives.all_gather, axis, inputs, outputs)


def copy_out_of(plan: GroupPlan, memory: Tensor) -> Callable[[], object]:
    """Return what copies packed parameters from where they arrived, rank by rank, to their places.

    ``memory`` is the flat output. Few elements go in one indexed copy. Otherwise those along dim 0
    go in one split or, where many are alike, in one strided copy of each kind; those along another
    dimension go one by one.
    """
    degree, numel, packed = plan.degree, plan.packed_numel, plan.packed
    arrived = _narrow(memory, degree * plan.packed_start, degree * numel)
    first = plan.full[packed[0]].start
    if plan.full_numel - first <= PERMUTED_NUMEL:
        order, target = _packed_order(plan, first, memory.device), as_bytes(memory[first:])
        return partial(torch.index_select, as_bytes(arrived), 0, order, out=target)
    rows = arrived.view(degree, numel)
    plain = [i for i in packed if not plan.specs[i].dim]
    widths = [plan.specs[i].shard_numel for i in plain]
    source, places = rows[:, : sum(widths)], [plan.full[i].runs(memory) for i in plain]
    copies = []
    series = series_of([(plan.starts[i], plan.full[i].start) for i in plain], widths)
    if ALIKE * len(series) <= len(plain):
        for begin, count, (step, full_step) in series:
            i, width = plain[begin], widths[begin]
            shape, start = (degree, count, width), plan.starts[i] - plan.packed_start
            part = arrived[start:].as_strided(shape, (numel, step, 1))
            place = memory[plan.full[i].start :].as_strided(shape, (width, full_step, 1))
            copies.append((place, part))
        widths = []
    for i in (i for i in packed if plan.specs[i].dim):
        spec, start = plan.specs[i], plan.starts[i] - plan.packed_start
        place = spec.by_rank(plan.full[i].whole(memory))
        part = rows[:, start : start + spec.shard_numel]
        copies.append((place, part.view(place.shape)))

    def copy_out() -> None:
        if widths:
            torch.split_with_sizes_copy(source, widths, dim=1, out=places)
        for place, part in copies:
            place.copy_(part)

    return copy_out


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


def _packed_order(plan: GroupPlan, first: int, device: torch.device) -> Tensor:
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


def _narrow(flat: Tensor, start: int, length: int) -> Tensor:
    return flat[start : start + length]
