"""The shards that torch's ``fully_shard`` cuts, gathered without a copy-out."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._buffers import Buffer, Buffers, Resize, in_own_storage
from .._cut import Cut
from .._packing import Packing, pack_by_rank
from .._plan import GroupPlan, Slot, plan_group
from ._carried import carried


class ExactLayout:
    """The flat shard of one group and the flat output that it is gathered into.

    The rest of the package relies on: `shards` and `fulls`, views per parameter; `gather`,
    `wait`, `finish_gather` and `free`, the life of the output; `keep` and `drop`, that of a larger
    part of it between forward and backward. Sharded views are always readable, full ones between
    `finish_gather` and `free`; the output begins allocated, so that faces can be built over it, and
    is then freed. Where shards are stored as they are gathered, one rank's output is its shard.

    What a gather reads and writes is lent to it from before its start until `wait` returned. `free`
    is legal at any time: memory that is still lent then, because a start or a wait raised, is left
    to the collective, and the next gather goes to new memory and new ``fulls``.
    """

    def __init__(
        self,
        locals_: Sequence[Tensor],
        cuts: Sequence[Cut],
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers | None = None,
        pinned: bool = False,
        direct_bytes: float | None = None,
    ) -> None:
        """Copy this rank's part of each parameter (``locals_``) into a new flat shard.

        It keeps their dtype and device; the output has ``dtype`` and lies on ``device``.
        """
        first = locals_[0]
        self.cuts = tuple(cuts)
        self._index = axis.index
        self.plan: GroupPlan = plan_group(
            [cut.planned_shape for cut in cuts],
            axis.size,
            min(first.element_size(), dtype.itemsize),
            direct_bytes,
            [i for i, cut in enumerate(cuts) if cut.dim],
        )
        self.slots = self.plan.slots
        self.spans = [(s.shard_offset, s.shard_offset + s.shard_numel) for s in self.slots]
        self.shard = torch.zeros(
            self.plan.shard_numel, dtype=first.dtype, device=first.device, pin_memory=pinned
        )
        shapes = [cut.local_shape(self._index) for cut in cuts]
        self.shards = [
            in_own_storage(_narrow(self.shard, slot.shard_offset, math.prod(shape)).view(shape))
            for slot, shape in zip(self.plan.slots, shapes, strict=True)
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
        self._arrived: Tensor | None = None
        self._kept: list[Tensor] = []
        if self._output is not None:
            self._wire(self._output.writable)
        if self._sent is not None:
            self._sent.free()

    def _view(self, memory: Tensor) -> None:
        self.fulls = [
            _narrow(memory, slot.full_offset, slot.numel).view(cut.shape)
            for slot, cut in zip(self.plan.slots, self.cuts, strict=True)
        ]
        self._memory = memory  # last: an interrupt before it lets the next gather begin again

    def _send_from(self, source: Tensor) -> None:
        self._inputs = [carried(_narrow(source, start, n)) for start, n in self.plan.segments]
        self._source = source

    def _wire(self, memory: Tensor) -> None:
        plan, degree = self.plan, self.plan.degree
        self._outputs = [
            carried(_narrow(memory, degree * start, degree * n)) for start, n in plan.segments
        ]
        if not plan.packed_numel:
            return
        arrived = _narrow(memory, degree * plan.packed_offset, degree * plan.packed_numel)
        arrived = arrived.view(degree, plan.packed_numel)
        packed = [
            (slot, cut) for slot, cut in zip(plan.slots, self.cuts, strict=True) if not slot.direct
        ]
        plain = [slot for slot, cut in packed if not cut.dim]
        self._widths = [slot.shard_numel for slot in plain]
        self._unpacked = [_place(memory, slot, degree) for slot in plain]
        self._arrived = arrived[:, : sum(self._widths)]
        self._rearranged: list[tuple[Tensor, Tensor]] = []
        for slot, cut in packed:
            if cut.dim:
                full = cut.by_rank(_narrow(memory, slot.full_offset, slot.numel).view(cut.shape))
                start = slot.shard_offset - plan.packed_offset
                part = arrived[:, start : start + slot.shard_numel]
                self._rearranged.append((full, part.view(full.shape)))

    def packing(self, chosen: Sequence[int], itemsize: int) -> Packing:
        """Return where the gradients of the parameters at ``chosen`` lie, rank by rank."""
        return pack_by_rank(
            [self.slots[i] for i in chosen],
            [self.cuts[i] for i in chosen],
            [tuple(self.shards[i].shape) for i in chosen],
            itemsize,
        )

    @property
    def available(self) -> bool:
        """Return whether there is memory to gather into."""
        return self._output is None or self._output.available

    def gather(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        if self._output is None or not self._inputs:
            return None
        output = self._allocated(self._output)
        if self.plan.degree == 1:
            output.writable.copy_(self.shard, non_blocking=True)
            return None
        if self._sent is not None:
            self._sent.allocate()
            if self._sent.tensor is not self._source:
                with torch.inference_mode(False):
                    self._send_from(self._sent.tensor)
            self._sent.writable.copy_(self.shard, non_blocking=True)
            self._sent.lend()
        output.lend()
        return collectives.all_gather(axis, self._inputs, self._outputs)

    def _allocated(self, output: Buffer) -> Buffer:
        output.allocate()
        if output.tensor is not self._memory:
            with torch.inference_mode(False):
                self._wire(output.writable)
                self._view(output.tensor)
        return output

    def keep(self, size: int) -> None:
        """Copy what ``size`` neighbours hold together, of the gathered output, to gather it from.

        The neighbours are those of this rank on an axis that is split into blocks of ``size``.
        """
        block = self._index % size
        self._kept = [
            output.view(size, -1)[block].clone(memory_format=torch.contiguous_format)
            for output in self._outputs
        ]

    def gather_kept(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start an all-gather over a smaller axis of what `keep` copied."""
        if self._output is None or not self._kept:
            return None
        self._allocated(self._output).lend()
        return collectives.all_gather(axis, self._kept, self._outputs)

    def drop(self) -> None:
        """Release what `keep` copied."""
        self._kept = []

    def wait(self, work: Work) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        if self._output is not None:
            self._output.returned()
        if self._sent is not None:
            self._sent.returned()
            self._sent.free()

    def finish_gather(self, work: Work | None) -> None:
        """Copy the packed parameters to their places, after `wait`."""
        if work is None or self._arrived is None:
            return
        if self._widths:
            torch.split_with_sizes_copy(self._arrived, self._widths, dim=1, out=self._unpacked)
        for full, arrived in self._rearranged:
            full.copy_(arrived)

    def free(self) -> None:
        """Give back the memory of the gather, or leave it to a collective that may still use it."""
        if self._output is not None:
            self._output.free()
        if self._sent is not None:
            self._sent.free()


def _narrow(flat: Tensor, start: int, length: int) -> Tensor:
    return flat[start : start + length]


def _place(memory: Tensor, slot: Slot, degree: int) -> Tensor:
    held = _narrow(memory, slot.full_offset, degree * slot.shard_numel)
    return held.view(degree, slot.shard_numel)
