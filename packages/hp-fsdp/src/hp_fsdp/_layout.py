"""One group's flat shard and the flat output that it is gathered into."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._agreement import is_exact
from ._buffers import Buffer, as_sent, in_own_storage
from ._layout_exact import ExactPlan
from ._layout_ragged import RaggedPlan
from ._streams import Streams, Waitable
from ._tags import tag_digits


class Layout:
    """The flat shard of one group and what it is gathered into, where ``plan`` says.

    ``shards`` and ``fulls`` are views per parameter, ``spans`` the parameters' elements
    ``[start, end)`` of the flat ``shard``. Shards are always readable, full views between
    `finish_gather` and `free`. What a gather reads and writes is lent to it from before its start
    until `wait` returned. `free` is legal at any time: memory that is still lent then, because a
    start or a wait raised, is left to the collective, and the next gather goes to new memory and
    new ``fulls``.

    The output begins allocated, so that unsharded parameters can be built over it. Where shards are
    stored as they are gathered, one rank's output is its shard.
    """

    def __init__(
        self,
        locals_: Sequence[Tensor],
        plan: ExactPlan | RaggedPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        """Copy this rank's part of each parameter (``locals_``) into a new flat shard.

        It keeps their dtype and device; the output has ``dtype`` and is on ``device``.
        """
        first = locals_[0]
        self.plan, self._index = plan, axis.index
        self.specs, self.spans = plan.specs, plan.spans(axis.index)
        self.shard = torch.zeros(
            plan.shard_numel, dtype=first.dtype, device=first.device, pin_memory=pinned
        )
        self.shards = [
            in_own_storage(self.shard[start : start + local.numel()].view(local.shape))
            for (start, _), local in zip(self.spans, locals_, strict=True)
        ]
        for view, local in zip(self.shards, locals_, strict=True):
            view.copy_(local)
        as_stored = first.dtype == dtype and (first.device == device or first.is_meta)
        self._output: Buffer | None = None
        if axis.size == 1 and as_stored:
            # Parameters start at their shard's offset, and the shard is the output.
            memory = self.shard.data
        else:
            self._output = Buffer(plan.full_numel, dtype, device)
            memory = self._output.tensor
        self._view(memory)
        self._sent: Buffer | None = None
        if not as_stored:
            self._sent = Buffer(plan.shard_numel, dtype, device)
        self._send_from(self.shard if self._sent is None else self._sent.tensor)
        self._outputs: list[Tensor] = []
        # The tags of all ranks, views of the output: one digit or a list of digits per rank.
        self.tags: Tensor | None = None
        self.expected_tags: list[float | list[float]] = []
        self._gathered_by: Collectives | None = None
        self.is_exact = False  # whether gathers copy every element unchanged
        self._copy_out: Callable[[], object] | None = None
        self._block: list[Tensor] = []
        if self._output is not None:
            self._wire(self._output.writable)
        if self._sent is not None:
            self._sent.free()

    def _view(self, memory: Tensor) -> None:
        self.fulls = self.plan.wholes(memory)
        self._memory = memory  # last: an interrupt before it lets the next gather begin again

    def _send_from(self, source: Tensor) -> None:
        self._inputs = [as_sent(source[start : start + n]) for start, n in self.plan.segments]
        self._source = source

    def _wire(self, memory: Tensor) -> None:
        plan, degree = self.plan, self.plan.degree
        self._outputs = [
            as_sent(memory[degree * start : degree * (start + n)]) for start, n in plan.segments
        ]
        self._copy_out = plan.copy_out(memory)
        if plan.tag_numel:
            start, length = plan.segments[-1]
            rows = memory[degree * start : degree * (start + length)].view(degree, length)
            self.tags = rows[:, -1] if plan.tag_numel == 1 else rows[:, -plan.tag_numel :]
        self._started_by: Collectives | None = None  # what `_start` starts the gather by

    def write_tag(self, number: int) -> None:
        """Write the number of the unit to the end of what this rank sends."""
        if self.tags is not None and not self.shard.is_meta:
            count, itemsize = self.plan.tag_numel, self.plan.itemsize
            start, length = self.plan.segments[-1]
            own = self.shard[start + length - count : start + length]
            own.copy_(torch.tensor(tag_digits(number, itemsize)))
            digits = own.tolist()
            self.expected_tags = [digits[0] if count == 1 else digits] * self.plan.degree

    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        output = self._output
        if output is None or not self._inputs:
            return None
        if self._gathered_by is not collectives:
            self._gathered_by, self.is_exact = collectives, is_exact(collectives)
        output.allocate()
        if output.tensor is not self._memory:
            self._renew(output)
        if self._sent is not None or self.plan.degree == 1:
            return self._gather_copy(output, axis, collectives, streams)
        if self._started_by is not collectives:
            self._start = _prepared(collectives, axis, self._inputs, self._outputs)
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
            # Beside the computation, which waits for both with what is returned, also for a gather
            # that ends on the stream that it is started on.
            with streams.gather.after_current("copy_shard"):
                sent.writable.copy_(self.shard, non_blocking=True)
                work = start()
            return streams.gather.begun(work)
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


def _prepared(
    collectives: Collectives, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[], Waitable]:
    """Return what starts the same all-gather in every step; torch's looks things up only here."""
    if type(collectives) is TorchCollectives and len(inputs) == 1 < axis.size:
        return collectives.prepare_all_gather(axis, inputs[0], outputs[0])
    return partial(collectives.all_gather, axis, inputs, outputs)
