"""The flat shard of one group, and its all-gather into one flat buffer."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._agreement import is_exact
from ._buffers import Buffer, as_sent, in_own_storage
from ._layout_exact import ExactPlan
from ._layout_ragged import RaggedPlan, UnevenPlan
from ._streams import Streams, Waitable
from ._tags import tag_digits


class Layout:
    """The flat shard of one group, and the buffer that it is all-gathered into.

    The buffer is in use by the collective from the start of an all-gather until `wait` returns.
    `free` is legal at any time. If the start or `wait` raised, `free` leaves the memory to the
    collective, and the next all-gather gets new memory and new ``fulls``.

    The buffer is allocated at first, so that unsharded parameters can be created over it. With one
    rank, the flat shard is the buffer unless dtype or device differ.

    Attributes:
        plan: Offsets of the parameters in the flat shard.
        specs: Shape of each parameter.
        spans: Elements ``[start, end)`` of the flat shard for each parameter.
        shard: The flat shard: this rank's part of all parameters.
        shards: This rank's part of each parameter, a view of ``shard``. Always readable.
        fulls: The unsharded parameters. Readable from `finish_gather` until `free`.
        tags: The tags of all ranks, a view of the buffer: ``[ranks]``, or ``[ranks, digits]``. None
            if the all-gather has no tags.
        expected_tags: Value of ``tags`` if all ranks gather the same unit.
        is_exact: Whether the all-gather copies every element unchanged.
        gathered_bytes: Bytes that all ranks together send in an all-gather.
    """

    plan: ExactPlan | RaggedPlan
    shard: Tensor
    shards: list[Tensor]
    fulls: list[Tensor]
    tags: Tensor | None = None
    expected_tags: Sequence[float | list[float]] = ()
    is_exact = False
    gathered_bytes = 0
    _output: Buffer | None = None
    _sent: Buffer | None = None
    _inputs: Sequence[Tensor] = ()
    _outputs: Sequence[Tensor] = ()
    _block: Sequence[Tensor] = ()
    _copy_out: Callable[[], object] | None = None
    _gathered_by: Collectives | None = None

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
        """Copy this rank's part of each parameter (``locals_``) to a new flat shard.

        The flat shard has their dtype and device. The unsharded parameters have ``dtype`` and
        ``device``.
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
        output: Buffer | None = None
        sent: Buffer | None = None
        if axis.size > 1 or not as_stored:
            output = Buffer(plan.full_numel, dtype, device)
        if not as_stored:
            sent = Buffer(plan.shard_numel, dtype, device)
        self._connect(plan, output, sent)

    def _connect(
        self, plan: ExactPlan | RaggedPlan | UnevenPlan, output: Buffer | None, sent: Buffer | None
    ) -> None:
        """Set up the all-gather.

        Args:
            plan: Offsets in the buffers that the all-gather reads and writes.
            output: Buffer of the unsharded parameters. None: the flat shard is the output.
            sent: Buffer that the all-gather reads. `_fill` fills it before each all-gather. None:
                the all-gather reads the flat shard.
        """
        self._gathered, self._output, self._sent = plan, output, sent
        self._view(self.shard.data if output is None else output.tensor)
        self._send_from(self.shard if sent is None else sent.tensor)
        if output is not None:
            self._wire(output.writable)
        if sent is not None:
            sent.free()

    def _fill(self, target: Tensor) -> None:
        """Copy this rank's part to ``target``, which has the offsets of the flat shard."""
        target.copy_(self.shard, non_blocking=True)

    def _view(self, memory: Tensor) -> None:
        self.fulls = self._gathered.wholes(memory)
        self._memory = memory  # last: after an interrupt, the next all-gather starts here again

    def _send_from(self, source: Tensor) -> None:
        self._inputs = [as_sent(source[start : start + n]) for start, n in self._gathered.segments]
        self._source = source

    def _wire(self, memory: Tensor) -> None:
        plan, degree = self._gathered, self._gathered.degree
        self._outputs = [
            as_sent(memory[degree * start : degree * (start + n)]) for start, n in plan.segments
        ]
        self.gathered_bytes = sum([output.nbytes for output in self._outputs])
        self._copy_out = plan.copy_out(memory)
        if plan.tag_numel:
            start, length = plan.segments[-1]
            rows = memory[degree * start : degree * (start + length)].view(degree, length)
            self.tags = rows[:, -1] if plan.tag_numel == 1 else rows[:, -plan.tag_numel :]
        self._started_by: Collectives | None = None  # the collectives that `_start` uses

    def write_tag(self, number: int) -> None:
        """Write the number of the unit to the end of the flat shard that this rank sends."""
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
        """Start the all-gather over ``axis``.

        Returns:
            The all-gather in flight, for `wait`. None if nothing is communicated.
        """
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
        """Copy the flat shard to another dtype or device, then start the all-gather.

        With one rank the copy goes to the output, and nothing is communicated.
        """
        sent = self._sent
        if sent is None or self.plan.degree == 1:
            if streams is not None:
                output.lent = True
                with streams.gather.after_current("copy_shard"):
                    self._fill(output.writable)
                return streams.gather.begun()
            self._fill(output.writable)
            return None
        sent.allocate()
        if sent.tensor is not self._source:
            with torch.inference_mode(False):
                self._send_from(sent.tensor)
        sent.lent = True
        start = partial(collectives.all_gather, axis, self._inputs, self._outputs)
        if streams is not None:
            output.lent = True
            # The copy and the all-gather overlap with computation, which waits for both by the
            # returned work. The collective may finish on the stream on which it was started.
            with streams.gather.after_current("copy_shard"):
                self._fill(sent.writable)
                work = start()
            return streams.gather.begun(work)
        self._fill(sent.writable)
        output.lent = True
        return start()

    def _renew(self, output: Buffer) -> None:
        with torch.inference_mode(False):
            self._wire(output.writable)
            self._view(output.tensor)

    def save_block(self, size: int) -> None:
        """Copy the part that this rank keeps for backward, if it reshards to fewer ranks.

        The ranks of the axis form blocks of ``size`` neighbours. Each block keeps all parameters.
        """
        position = self._index % size
        self._block = [
            output.view(size, -1)[position].clone(memory_format=torch.contiguous_format)
            for output in self._outputs
        ]

    def gather_block(self, axis: Axis, collectives: Collectives) -> Waitable | None:
        """Start the all-gather of the copies of `save_block`, over the axis of the block."""
        if self._output is None or not self._block:
            return None
        self._output.allocate()
        if self._output.tensor is not self._memory:
            self._renew(self._output)
        self._output.lent = True
        return collectives.all_gather(axis, self._block, self._outputs)

    def drop_block(self) -> None:
        """Free the copies of `save_block`."""
        self._block = ()

    def wait(self, work: Waitable) -> None:
        """Wait for the all-gather. The collective does not use the buffers any more."""
        work.wait()
        if self._output is not None:
            self._output.lent = False
        if self._sent is not None:
            self._sent.lent = False
            self._sent.free()

    def finish_gather(self, work: Waitable | None) -> None:
        """Copy packed parameters to their places in the output. Call it after `wait`."""
        if work is not None and self._copy_out is not None:
            self._copy_out()

    def free(self) -> None:
        """Free the memory of the all-gather, unless a collective may still use it."""
        if self._output is not None:
            self._output.free()
        if self._sent is not None:
            self._sent.free()


def _prepared(
    collectives: Collectives, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[], Waitable]:
    """Return a function that starts the same all-gather in every step.

    With torch's collectives, it looks up the operation once, which saves host time.
    """
    if type(collectives) is TorchCollectives and len(inputs) == 1 < axis.size:
        return collectives.prepare_all_gather(axis, inputs[0], outputs[0])
    return partial(collectives.all_gather, axis, inputs, outputs)
