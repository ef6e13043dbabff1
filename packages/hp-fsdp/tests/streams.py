"""Sharded models on streams of an accelerator that is not there; see `rank_pool.streams`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from rank_pool import streams
from rank_pool.streams import Nccl, Stream
from torch import Tensor

from hp_dtensor import Axis, TorchCollectives, Work
from hp_fsdp import _reduction
from hp_fsdp._agreement import TagLog
from hp_fsdp._custom import CustomAllGather, CustomReduceScatter
from hp_fsdp._reduction import StreamedReduction
from hp_fsdp._streams import SideStream, Streams
from hp_fsdp._torch import local_of
from hp_fsdp._unit import unit_of
from hp_fsdp.layout import ResizableBuffer, _buffers

SIDES = ("gather", "reduce", "all_reduce", "offload")


class Device(streams.Device):
    """A device with the side streams of a sharded model."""

    def __init__(self) -> None:
        super().__init__(*SIDES)

    @property
    def streams(self) -> Streams:
        """Return the side streams."""
        made: Any = [SideStream(Stream(self, n), lambda: self.stack[-1]) for n in SIDES]  # type: ignore[arg-type, return-value]
        return Streams(*made)


class Given:
    """An object as a user's that communicates as `Nccl` does, over one axis."""

    def __init__(self, device: Device, axis: Axis) -> None:
        self._nccl, self._axis = Nccl(device, TorchCollectives()), axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Work:
        """Gather, or with an operation reduce and scatter."""
        run = self._nccl.reduce_scatter if "op" in how else self._nccl.all_gather
        return run(self._axis, [input_tensor], [output_tensor])


@contextmanager
def watched(
    device: Device, model: Any, offloaded: bool = False, own: bool = False
) -> Iterator[None]:
    """Let a sharded model use the streams of the simulated device inside the context.

    The model must have run a forward. If ``own`` is True, it communicates with custom collectives.
    """
    unit: Any = unit_of(model)
    schedule = unit.schedule
    schedule._tag_log = log = TagLog(device.streams.offload)
    for group in (group for each in schedule.units for group in each.groups):
        group.streams = device.streams.named(group.comm.path)
        group.tag.log, group.reads_tags = log, True
        group.collectives = group.gathers = group.scatters = Nccl(device, TorchCollectives())
        if own:
            given = Given(device, group.axes.shard)
            group.gathers = CustomAllGather(given)
            group.scatters = CustomReduceScatter(given, group.collectives)
        group._plan = None
        shard = device.of(group.layout.shard, "compute")
        for view in group.layout.shards:  # separate storages over the same memory
            device.memory[view.untyped_storage()._cdata] = shard
        if offloaded:
            # A device with another name, so that shards and gradients are offloaded to it.
            group.config = replace(group.config, shard_device=torch.device("cpu", 0), pinned=True)
            device.on_host(group.layout.shard)
    schedule._pinned = offloaded
    with ExitStack() as stack:
        for patch in _patches(device, own):
            stack.enter_context(patch)
        stack.enter_context(device)
        yield


def _patches(device: Device, own: bool) -> list[Any]:
    allocate, free = ResizableBuffer.allocate, ResizableBuffer.free
    on_cpu = StreamedReduction._on_cpu

    def allocated(self: ResizableBuffer) -> None:
        allocate(self)
        device.allocate(self._storage, device.stack[-1].name)

    def freed(self: ResizableBuffer) -> None:
        had = self._storage.nbytes()
        free(self)
        if had and not self._storage.nbytes() and self._storage._cdata in device.memory:
            device.free(self._storage._cdata)

    def copied(self: StreamedReduction, tensor: Tensor) -> Tensor:
        empty = torch.empty

        def marked(*args: Any, **kwargs: Any) -> Tensor:
            found = empty(*args, **kwargs)
            device.on_host(found)
            return found

        with mock.patch.object(torch, "empty", marked):
            return on_cpu(self, tensor)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (ResizableBuffer, "allocate", allocated),
        (ResizableBuffer, "free", freed),
        (StreamedReduction, "_on_cpu", copied),
        (Tensor, "record_stream", lambda x, stream: device.record(x, stream)),
    ]
    if not own:  # `Nccl` is taken for the collectives of torch
        changes += [(module, "is_exact", lambda _: True) for module in (_buffers, _reduction)]
    return [mock.patch.object(*change) for change in changes]


@torch.no_grad()
def descend(p: Any, rate: float = 0.1) -> None:
    """Subtract this rank's gradient from its shard, as SGD does."""
    part = local_of if hasattr(p, "_local_tensor") else type(p).to_local
    part(p).sub_(part(p.grad), alpha=rate)
