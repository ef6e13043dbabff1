"""Shard(0) of every parameter, as torch's ``fully_shard`` cuts it, gathered without a copy-out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._buffers import Resize
from .._plan import GroupPlan, Slot, plan_group


class ExactLayout:
    """The flat shard of one group and the flat output that it is gathered into.

    The rest of the package relies on: `shards` and `fulls`, views per parameter; `gather`,
    `finish_gather` and `free`, the life of the output. Sharded views are always readable, full ones
    between `finish_gather` and `free`; the output begins allocated, so that faces can be built over
    it, and is then freed. With one rank both are views of the same memory.
    """

    def __init__(
        self, locals_: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], axis: Axis
    ) -> None:
        """Copy this rank's rows of each parameter (``locals_``) into a new flat shard."""
        first = locals_[0]
        self.plan: GroupPlan = plan_group(shapes, axis.size, first.element_size())
        self.shard = torch.zeros(self.plan.shard_numel, dtype=first.dtype, device=first.device)
        self.shards = [_rows(self.shard, slot, axis.index) for slot in self.plan.slots]
        for view, local in zip(self.shards, locals_, strict=True):
            view.copy_(local)
        self._output: Resize | None = None
        if axis.size == 1:
            # Parameters start at their shard's offset, and the shard is the output.
            memory = self.shard.data
        else:
            self._output = Resize(self.plan.full_numel, first.dtype, first.device)
            memory = self._output.tensor
        self.fulls = [
            _narrow(memory, slot.full_offset, slot.numel).view(slot.shape)
            for slot in self.plan.slots
        ]
        self._inputs = [_narrow(self.shard, start, n) for start, n in self.plan.segments]
        self._outputs: list[Tensor] = []
        self._arrived: Tensor | None = None
        self._unpacked: list[Tensor] = []
        if self._output is not None:
            self._wire(self._output.writable)

    def _wire(self, memory: Tensor) -> None:
        plan, degree = self.plan, self.plan.degree
        self._outputs = [_narrow(memory, degree * start, degree * n) for start, n in plan.segments]
        self._packed = [slot for slot in plan.slots if not slot.direct]
        if plan.packed_numel:
            arrived = _narrow(memory, degree * plan.packed_offset, degree * plan.packed_numel)
            self._arrived = arrived.view(degree, plan.packed_numel)
            self._unpacked = [
                _narrow(memory, slot.full_offset, degree * slot.shard_numel).view(
                    degree, slot.shard_numel
                )
                for slot in self._packed
            ]

    def gather(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        if self._output is None or not self._inputs:
            return None
        self._output.allocate()
        return collectives.all_gather(axis, self._inputs, self._outputs)

    def finish_gather(self, work: Work | None) -> None:
        """Wait for the all-gather and copy the packed parameters to their places."""
        if work is None:
            return
        work.wait()
        if self._arrived is not None:
            widths = [slot.shard_numel for slot in self._packed]
            torch.split_with_sizes_copy(self._arrived, widths, dim=1, out=self._unpacked)

    def free(self) -> None:
        """Give back the output's memory."""
        if self._output is not None:
            self._output.free()


def _narrow(flat: Tensor, start: int, length: int) -> Tensor:
    return flat[start : start + length]


def _rows(flat: Tensor, slot: Slot, index: int) -> Tensor:
    rows = slot.held_rows(index)
    held = _narrow(flat, slot.shard_offset, rows * slot.row_numel)
    return held.view(rows, *slot.shape[1:])
