"""Shards that say themselves what is gathered of them."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from hp_dtensor import Axis, Collectives, Work

from .._buffers import ResizeBuffer
from .._cut import Cut
from .._packing import Packing, pack_by_rank
from .._plan import plan_group


class ExtendedLayout:
    """The shards of one group, tensors on their own, and what is gathered; see `ExactLayout`.

    What to gather is offered anew every time; all of it travels as bytes, in one all-gather. There
    are no full views before the first: `received` has what arrived. ``shard`` is empty: it only
    tells dtype and device. The plan is that of gradients, which are plain numbers.
    """

    def __init__(
        self, locals_: Sequence[Tensor], cuts: Sequence[Cut], axis: Axis, *, dtype: torch.dtype
    ) -> None:
        """Take this rank's parts as they are."""
        first = locals_[0]
        self.cuts = tuple(cuts)
        shapes = [cut.shape for cut in cuts]
        self.plan = plan_group(shapes, axis.size, first.element_size(), math.inf)
        self.slots = self.plan.slots
        self.spans = [(s.shard_offset, s.shard_offset + s.shard_numel) for s in self.slots]
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.shards = list(locals_)
        self.fulls = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        self._index = axis.index
        self._degree = axis.size
        self._inputs: list[Tensor] = []
        self._shapes: list[list[torch.Size]] = []
        self._outputs: list[ResizeBuffer] = []
        self.renewed = False  # what arrives lies in other memory than full tensors were made of
        self._inner: list[tuple[UntypedStorage, int]] = []
        self._kept: list[Tensor] = []

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
        """Return True: there is always more memory."""
        return True

    def offer(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Take what to gather of each parameter: of the same dtypes and sizes every time."""
        self._shapes = [[tensor.shape for tensor in each] for each in inputs]
        flats = [tensor.reshape(-1) for each in inputs for tensor in each]
        self._inputs = [flat.view(torch.uint8) for flat in flats]
        if not self._outputs:
            self._outputs = [
                ResizeBuffer(self._degree * flat.numel(), flat.dtype, flat.device) for flat in flats
            ]

    def gather(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        if not self._inputs:
            return None
        return collectives.all_gather(axis, self._inputs, self._lent())

    def _lent(self) -> list[Tensor]:
        if any(output.lent for output in self._outputs):
            self._inner, self.renewed = [], True
        for output in self._outputs:
            output.allocate()
        flats = [output.writable.view(torch.uint8) for output in self._outputs]
        for output in self._outputs:
            output.lend()
        return flats

    def wait(self, work: Work) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        for output in self._outputs:
            output.returned()
        self._inputs = []

    def finish_gather(self, work: Work | None) -> None:
        """Get memory for the tensors inside of full ones, after `wait`."""
        for storage, size in self._inner:
            if storage.nbytes() != size:  # some lie in what was gathered
                storage.resize_(size)

    def received(self) -> list[list[Tensor]]:
        """Return what arrived of each parameter, one after the other along the first dimension."""
        outputs = iter(self._outputs)
        return [
            [next(outputs).tensor.view(self._stacked(shape)) for shape in each]
            for each in self._shapes
        ]

    def _stacked(self, shape: torch.Size) -> tuple[int, ...]:
        return (self._degree * shape[0], *shape[1:]) if shape else (self._degree,)

    def hold(self, inner: Iterable[Tensor]) -> None:
        """Allocate and free the memory of these tensors too from now on."""
        for storage in (tensor.untyped_storage() for tensor in inner):
            self._inner.append((storage, storage.nbytes()))

    def keep(self, size: int) -> None:
        """Copy what ``size`` neighbours hold together of what arrived; see `ExactLayout.keep`."""
        self._kept = [
            output.tensor.view(torch.uint8).view(size, -1)[self._index % size].clone()
            for output in self._outputs
        ]

    def gather_kept(self, axis: Axis, collectives: Collectives) -> Work | None:
        """Start an all-gather over a smaller axis of what `keep` copied."""
        if not self._kept:
            return None
        return collectives.all_gather(axis, self._kept, self._lent())

    def drop(self) -> None:
        """Release what `keep` copied."""
        self._kept = []

    def free(self) -> None:
        """Give back the memory of what arrived, and of the tensors inside of full ones.

        Leave it to a collective that may still use it; some of the tensors lie in it.
        """
        if any(output.lent for output in self._outputs):
            return
        for output in self._outputs:
            output.free()
        for storage, _ in self._inner:
            storage.resize_(0)
