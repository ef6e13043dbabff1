"""All parameters of a group in one buffer, cut in equal shares: one all-gather and no copies."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._buffers import Buffer, Buffers, Resize, in_own_storage
from .._cut import Cut
from .._packing import Packing
from .._ragged_plan import RaggedPlan
from ._carried import carried


class RaggedLayout:
    """The share of one group and the buffer that it is gathered into; see `ExactLayout`.

    Each parameter is one run of the buffer, so that nothing is moved after the all-gather.
    """

    def __init__(
        self,
        locals_: Sequence[Tensor],
        plan: RaggedPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        pinned: bool = False,
    ) -> None:
        """Copy this rank's parts (``locals_``) into a new share, of their dtype and device."""
        first = locals_[0]
        self.plan = plan
        self.slots = plan.slots(axis.index)
        self.cuts = tuple(Cut(shape=shape, dim=0, degree=plan.degree) for shape in plan.shapes)
        self._index = axis.index
        self.shard = torch.zeros(
            plan.share, dtype=first.dtype, device=first.device, pin_memory=pinned
        )
        self.spans: list[tuple[int, int]] = []
        for position, slot in enumerate(self.slots):
            start, end = plan.span(position, axis.index)
            self.spans.append((slot.shard_offset, slot.shard_offset + end - start))
        views = plan.row(range(len(plan.shapes)), axis.index).views(self.shard)
        self.shards = [in_own_storage(view) for view in views]
        for view, local in zip(self.shards, locals_, strict=True):
            view.copy_(local)
        self._output: Buffer = buffers.buffer(plan.degree * plan.share, dtype, device)
        self._view(self._output.tensor)
        as_stored = first.dtype == dtype and (first.device == device or first.is_meta)
        self._sent: Buffer | None = None
        if not as_stored:
            self._sent = Resize().buffer(plan.share, dtype, device)
            self._sent.free()
        self._kept: Tensor | None = None

    def _view(self, memory: Tensor) -> None:
        self.fulls = [
            memory[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.plan.starts, self.plan.shapes, strict=True)
        ]
        self._memory = memory  # last: an interrupt before it lets the next gather begin again

    def packing(self, chosen: Sequence[int], itemsize: int) -> Packing:
        """Return where the gradients of the parameters at ``chosen`` lie: as they are gathered."""
        return self.plan.packing(chosen, self._index)

    @property
    def available(self) -> bool:
        """Return whether there is memory to gather into."""
        return self._output.available

    def gather(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start the all-gather of the share over ``axis``."""
        self._allocate()
        source = self.shard
        if self._sent is not None:
            self._sent.allocate()
            source = self._sent.writable.copy_(self.shard, non_blocking=True)
            self._sent.lend()
        self._output.lend()
        return collectives.all_gather(axis, [carried(source)], [carried(self._output.writable)])

    def _allocate(self) -> None:
        self._output.allocate()
        if self._output.tensor is not self._memory:
            with torch.inference_mode(False):
                self._view(self._output.tensor)

    def keep(self, size: int) -> None:
        """Copy what this rank is to hold between forward and backward among ``size`` neighbours."""
        self._kept = self._output.writable.view(size, -1)[self._index % size].clone()

    def gather_kept(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start an all-gather over a smaller axis of what `keep` copied."""
        if self._kept is None:
            return None
        self._allocate()
        self._output.lend()
        return collectives.all_gather(axis, [carried(self._kept)], [carried(self._output.writable)])

    def drop(self) -> None:
        """Release what `keep` copied."""
        self._kept = None

    def wait(self, work: Work) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        self._output.returned()
        if self._sent is not None:
            self._sent.returned()
            self._sent.free()

    def finish_gather(self, work: Work | None) -> None:
        """Do nothing: what arrived lies where it is used."""

    def free(self) -> None:
        """Give back the memory of the gather, or leave it to a collective that may still use it."""
        self._output.free()
        if self._sent is not None:
            self._sent.free()
