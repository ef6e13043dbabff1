"""The flat shard of one group, and its all-gather into one flat output."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from .._agreement import is_exact
from .._streams import Streams, Waitable
from .._tags import tag_digits
from ._memory import ResizableBuffer, as_sent, in_own_storage
from ._plan import FlatPlan, GatherPlan


class FlatBuffer:
    """The flat shard of one group, and the flat output of its all-gather.

    A collective uses the output from the start of an all-gather until `wait` returns. `free` may be
    called at any time. If starting the all-gather or `wait` raised an exception, the collective may
    still use the memory. Then `free` does not free this memory, and the next all-gather allocates
    other memory and creates other ``unsharded`` views.

    The constructor allocates the output, because the unsharded parameters are views of it. With one
    rank, the output shares the memory of the flat shard if ``parts`` have the same ``dtype`` and
    ``device``.

    Args:
        parts: This rank's shard of each parameter. The flat shard is a copy of them, with the same
            dtype and device.
        plan: Offsets of the parameters.
        axis: Mesh axis that shards the parameters.
        dtype: Dtype of the unsharded parameters.
        device: Device of the unsharded parameters.
        pinned: Whether to pin the memory of the flat shard.

    Attributes:
        plan: Offsets of the parameters.
        shard_ranges: For each parameter, its elements ``(start, end)`` of the flat shard.
        shard: The flat shard: this rank's shards of all parameters.
        shards: This rank's shard of each parameter, a view of ``shard``. Always readable.
        unsharded: The unsharded parameters. Readable from `finish_gather` until `free`.
        tags: The tag that each rank sent, which encodes the number of its unit; see `_tags`. A view
            of the output of shape ``[ranks]``, or ``[ranks, digits]`` if a tag needs several
            elements. It is None if the all-gather sends no tags.
        expected_tags: Value of ``tags`` if all ranks gather this unit.
        is_exact: Whether the collectives of the last all-gather copy every element unchanged.
        nbytes: Bytes that one all-gather writes to the output.
    """

    plan: FlatPlan
    shard: Tensor
    shards: list[Tensor]
    unsharded: list[Tensor]
    tags: Tensor | None = None
    expected_tags: Sequence[float | list[float]] = ()
    is_exact = False
    nbytes = 0
    _output: ResizableBuffer | None = None
    _input: ResizableBuffer | None = None
    _inputs: Sequence[Tensor] = ()
    _outputs: Sequence[Tensor] = ()
    _block: Sequence[Tensor] = ()
    _copy_out: Callable[[], object] | None = None
    _gathered_by: Collectives | None = None

    def __init__(
        self,
        parts: Sequence[Tensor],
        plan: FlatPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
    ) -> None:
        stored = parts[0].dtype, parts[0].device
        self.plan, self._rank = plan, axis.index
        self.shard_ranges = plan.shard_ranges(axis.index)
        self.shard = torch.zeros(
            plan.shard_numel, dtype=stored[0], device=stored[1], pin_memory=pinned
        )
        self.shards = [
            in_own_storage(self.shard[start : start + part.numel()].view(part.shape))
            for (start, _), part in zip(self.shard_ranges, parts, strict=True)
        ]
        for view, part in zip(self.shards, parts, strict=True):
            view.copy_(part)
        converts = stored[0] != dtype or (stored[1] != device and not self.shard.is_meta)
        self._connect(plan, dtype, device, output=axis.size > 1 or converts, copied=converts)

    def _connect(
        self, plan: GatherPlan, dtype: torch.dtype, device: torch.device, output: bool, copied: bool
    ) -> None:
        """Allocate the input and output buffers of the all-gather, and create views of them.

        Args:
            plan: Offsets in the buffers.
            dtype: Dtype of the buffers.
            device: Device of the buffers.
            output: Whether to allocate an output buffer. False if there is one rank and the flat
                shard already has ``dtype`` and ``device``. The unsharded parameters are then views
                of the flat shard, and no all-gather runs.
            copied: Whether `_copy_in` copies the flat shard to an input buffer before each
                all-gather. With one rank, it copies to the output buffer instead. If False, the
                all-gather reads the flat shard itself.
        """
        self._gather_plan = plan
        if output:
            self._output = ResizableBuffer(plan.output_numel, dtype, device)
        if copied and plan.degree > 1:
            self._input = ResizableBuffer(plan.shard_numel, dtype, device)
        self._view_output(self.shard.data if self._output is None else self._output.tensor)
        self._view_input(self.shard if self._input is None else self._input.tensor)
        if self._output is not None:
            self._view_arrivals(self._output.writable)
        if self._input is not None:
            self._input.free()

    def _copy_in(self, target: Tensor) -> None:
        """Copy the flat shard to ``target``, a flat tensor of the same size."""
        target.copy_(self.shard, non_blocking=True)

    def _view_output(self, memory: Tensor) -> None:
        self.unsharded = self._gather_plan.unsharded(memory)
        # Set last: if an interrupt stops this method, the next all-gather creates the views again.
        self._memory = memory

    def _view_input(self, memory: Tensor) -> None:
        slices = self._gather_plan.slices
        self._inputs = [as_sent(memory[start : start + numel]) for start, numel in slices]
        self._source = memory

    def _view_arrivals(self, memory: Tensor) -> None:
        plan, degree = self._gather_plan, self._gather_plan.degree
        arrivals = [
            memory[degree * start : degree * (start + numel)] for start, numel in plan.slices
        ]
        self._outputs = list(map(as_sent, arrivals))
        self.nbytes = sum([output.nbytes for output in self._outputs])
        self._copy_out = plan.copy_out(memory)
        if plan.tag_numel:
            rows = arrivals[-1].view(degree, -1)
            self.tags = rows[:, -1] if plan.tag_numel == 1 else rows[:, -plan.tag_numel :]
        self._started_by: Collectives | None = None  # the collectives that `_start` uses

    def write_tag(self, number: int) -> None:
        """Write the tag of unit ``number`` to the end of the flat shard.

        A no-op if the all-gather sends no tags or the flat shard is on the meta device.
        """
        if self.tags is not None and not self.shard.is_meta:
            count, itemsize = self.plan.tag_numel, self.plan.itemsize
            start, numel = self.plan.slices[-1]
            own = self.shard[start + numel - count : start + numel]
            own.copy_(torch.tensor(tag_digits(number, itemsize), device="cpu"))
            digits = own.tolist()
            self.expected_tags = [digits[0] if count == 1 else digits] * self.plan.degree

    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Start the all-gather over ``axis``.

        If the flat shard differs from the output in dtype or device, the flat shard is copied first
        to the input buffer of the all-gather. With one rank, it is copied to the output instead.

        Returns:
            The all-gather in flight, to pass to `wait`, or None if there is nothing to wait for.
        """
        output, source = self._output, self._input
        if output is None or not self._inputs:
            return None
        if self._gathered_by is not collectives:
            self._gathered_by, self.is_exact = collectives, is_exact(collectives)
        output.allocate()
        if output.tensor is not self._memory:
            self._renew_views(output)
        if source is None and self.plan.degree > 1:
            if self._started_by is not collectives:
                self._start = _prepared(collectives, axis, self._inputs, self._outputs)
                self._started_by = collectives
            output.in_use = True
            return self._start()
        start: Callable[[], Waitable | None] = _nothing
        if source is not None:
            source.allocate()
            if source.tensor is not self._source:
                with torch.inference_mode(False):
                    self._view_input(source.tensor)
            source.in_use = True
            start = partial(collectives.all_gather, axis, self._inputs, self._outputs)
        target = (output if source is None else source).writable
        if streams is not None:
            output.in_use = True
            # The copy and the all-gather overlap with the computation. The returned work waits for
            # both, because the collective may finish on the stream on which it was started.
            with streams.gather.after_current("copy_shard"):
                self._copy_in(target)
                work = start()
            return streams.gather.begun(work)
        self._copy_in(target)
        output.in_use = source is not None
        return start()

    def _renew_views(self, output: ResizableBuffer) -> None:
        """Create the views again after ``output`` has allocated other memory."""
        with torch.inference_mode(False):
            self._view_arrivals(output.writable)
            self._view_output(output.tensor)

    def save_block(self, size: int) -> None:
        """Copy this rank's share of the output, to reshard to ``size`` ranks after forward.

        The ranks of the axis form blocks of ``size`` consecutive ranks. The ranks of each block
        together keep the whole output. `gather_block` restores it for backward.
        """
        position = self._rank % size
        self._block = [
            output.view(size, -1)[position].clone(memory_format=torch.contiguous_format)
            for output in self._outputs
        ]

    def gather_block(self, axis: Axis, collectives: Collectives) -> Waitable | None:
        """Start the all-gather that restores the output from the shares that `save_block` copied.

        Args:
            axis: Mesh axis over the ranks of this rank's block; see `save_block`.
            collectives: Collectives that run the all-gather.

        Returns:
            The all-gather in flight, to pass to `wait`, or None if `save_block` copied nothing.
        """
        output = self._output
        if output is None or not self._block:
            return None
        output.allocate()
        if output.tensor is not self._memory:
            self._renew_views(output)
        output.in_use = True
        return collectives.all_gather(axis, self._block, self._outputs)

    def drop_block(self) -> None:
        """Free the copies of `save_block`."""
        self._block = ()

    def wait(self, work: Waitable) -> None:
        """Wait for the all-gather ``work``, and free its input buffer."""
        work.wait()
        if self._output is not None:
            self._output.in_use = False
        if self._input is not None:
            self._input.in_use = False
            self._input.free()

    def finish_gather(self, work: Waitable | None) -> None:
        """Copy packed parameters to their offsets in the output. Call this after `wait`.

        A no-op if ``work`` is None.
        """
        if work is not None and self._copy_out is not None:
            self._copy_out()

    def free(self) -> None:
        """Free the memory of the all-gather, unless a collective may still use it."""
        for buffer in (self._output, self._input):
            if buffer is not None:
                buffer.free()


def _nothing() -> None:
    """Start nothing: with one rank there is no all-gather."""


def _prepared(
    collectives: Collectives, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[], Waitable]:
    """Return a function that starts an all-gather of ``inputs`` to ``outputs``.

    With torch's collectives and one input, the operation is looked up only once, here. This saves
    host time in each step.
    """
    if type(collectives) is TorchCollectives and len(inputs) == 1 < axis.size:
        return collectives.prepare_all_gather(axis, inputs[0], outputs[0])
    return partial(collectives.all_gather, axis, inputs, outputs)
