"""Streams of an accelerator that there is none of: what must be ordered, and what is.

Every operator of a step runs on the CPU, at once, and is noted as work of the stream that is the
current one. Streams are ordered by what waits for what alone (vector clocks), collectives run on a
stream of their own, as NCCL's do, and memory that is freed goes back to the pool of the stream that
it was got on. A `Race` is a pair of accesses that nothing orders, one of which writes, or memory
that a pool could lend again while another stream still uses it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hp_dtensor import Axis, TorchCollectives, Work
from hp_fsdp import _layout, _reduction, _reduction_plan
from hp_fsdp._agreement import TagLog
from hp_fsdp._buffers import ResizeBuffer
from hp_fsdp._custom import CustomAllGather, CustomReduceScatter
from hp_fsdp._reduction import StreamedReduction
from hp_fsdp._reduction_plan import ReducedGradients
from hp_fsdp._streams import SideStream, Streams
from hp_fsdp._torch import local_of
from hp_fsdp._unit import unit_of

Clock = dict[str, int]
HOST = "host"


@dataclass
class Memory:
    """One allocation: the stream of its pool, and its accesses.

    Of each the stream, the time, whether it wrote, and what it was.
    """

    alive: StorageWeakRef
    pool: str
    host: bool = False
    accesses: list[tuple[str, int, bool, str]] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    covered: list[Clock] = field(default_factory=list)  # what its pool waits for before it lends it


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self, device: "Device", clock: Clock) -> None:
        self._device, self.clock = device, clock

    def query(self) -> bool:
        """Return True: everything runs at once."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        self._device.merge(HOST, self.clock)


class Stream:
    """A stream by its name."""

    def __init__(self, device: "Device", name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: "Stream") -> None:
        """Wait for all that the other was given."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Wait for what was done then."""
        self.device.merge(self.name, event.clock)

    def record_event(self) -> Event:
        """Note what was given until now."""
        return Event(self.device, dict(self.device.clocks[self.name]))

    def __enter__(self) -> "Stream":
        """Be the current stream."""
        self.device.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Be it no longer."""
        self.device.stack.pop()


class Device(TorchDispatchMode):
    """The accelerator: notes what every operator reads and writes, and on which stream."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        names = ("compute", "gather", "reduce", "all_reduce", "offload", "nccl", HOST)
        self.clocks: dict[str, Clock] = {name: dict.fromkeys(names, 0) for name in names}
        self.stack = [Stream(self, "compute")]
        self.memory: dict[int, Memory] = {}
        self.freed: list[Memory] = []
        self.races: list[str] = []
        self.log: list[tuple[str, str]] = []  # stream, operator

    @property
    def streams(self) -> Streams:
        """Return side streams of this device."""
        sides = ("gather", "reduce", "all_reduce", "offload")
        made: Any = [SideStream(Stream(self, n), lambda: self.stack[-1]) for n in sides]  # type: ignore[arg-type, return-value]
        return Streams(*made)

    def merge(self, name: str, clock: Clock) -> None:
        """Let a stream, or the host, wait for what a clock says."""
        own = self.clocks[name]
        for other, time in clock.items():
            own[other] = max(own[other], time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note its accesses."""
        kwargs = kwargs or {}
        self.collect()
        out = func(*args, **kwargs)
        schema = func._schema
        views = [r for r in schema.returns if r.alias_info and not r.alias_info.is_write]
        name = schema.name.removeprefix("aten::")
        if views or name in ("set_", "resize_", "record_stream"):
            return out
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument in schema.arguments:
            found = _tensors(given.get(argument.name))
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(found)
        writes += [] if name.startswith(("empty", "new_empty")) else _tensors(out)
        self.access(name, reads, writes, _tensors(out))
        return out

    def access(
        self,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        made: Sequence[Tensor] = (),
    ) -> None:
        """Note what the current stream reads and writes, or the host if all of it is its own."""
        stream = self.stack[-1].name
        for tensor in made:
            self.allocate(tensor.untyped_storage(), stream)
        touched = [self.of(x, stream) for x in (*reads, *writes) if x.numel()]
        if touched and all(each.host for each in touched):
            stream = HOST
        elif stream != HOST:
            self.merge(stream, {HOST: self.clocks[HOST][HOST]})  # it was given by the host
        self.clocks[stream][stream] += 1
        now = self.clocks[stream]
        self.log.append((stream, what))
        for tensors, writing in ((reads, False), (writes, True)):
            for memory in [self.of(x, stream) for x in tensors if x.numel()]:
                for other, time, wrote, before in memory.accesses:
                    if (writing or wrote) and other != stream and time > now[other]:
                        self.races.append(f"{what} on {stream} beside {before} on {other}")
                memory.accesses.append((stream, now[stream], writing, what))

    def of(self, tensor: Tensor, stream: str) -> Memory:
        """Return what is known of a tensor's memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            self.memory[storage._cdata] = Memory(StorageWeakRef(storage), stream)
        return self.memory[storage._cdata]

    def allocate(self, storage: Any, stream: str) -> None:
        """Note new memory, which may be any that its pool had back."""
        if storage._cdata in self.memory or not storage.nbytes():
            return
        self.memory[storage._cdata] = Memory(StorageWeakRef(storage), stream)
        lent = [memory for memory in self.freed if memory.pool == stream]
        self.freed = [memory for memory in self.freed if memory.pool != stream]
        now = self.clocks[stream]
        for memory in lent:
            for other, time, _, what in memory.accesses:
                waited = any(time <= clock[other] for clock in (now, *memory.covered))
                if other not in (stream, HOST) and not waited:
                    self.races.append(f"{stream} lends memory again in which {other} has {what}")

    def free(self, key: int) -> None:
        """Note that memory went back to its pool."""
        memory = self.memory.pop(key)
        memory.covered = [dict(self.clocks[name]) for name in memory.recorded]
        self.freed.append(memory)

    def collect(self) -> None:
        """Note what nobody refers to any more."""
        for key in [key for key, memory in self.memory.items() if memory.alive.expired()]:
            self.free(key)

    def on_host(self, tensor: Tensor) -> None:
        """Note that memory is the CPU's."""
        self.of(tensor, HOST).host = True


class Nccl(TorchCollectives):
    """Real collectives, noted as work of a stream that the current one waits for in ``wait``."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Gather, into outputs that are given."""
        into = list(outputs or ())
        return self._run("all_gather", super().all_gather, axis, inputs, into)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: Any = "sum",
    ) -> Work:
        """Reduce, into outputs that are given."""
        into = list(outputs or ())
        return self._run("reduce_scatter", super().reduce_scatter, axis, inputs, into, op)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: Any = "sum") -> Work:
        """Sum in place."""
        return self._run("all_reduce", super().all_reduce, axis, tensors, None, op)

    def _run(
        self, what: str, start: Any, axis: Axis, inputs: Any, outputs: Any, *more: Any
    ) -> Work:
        device, given = self._device, [inputs] if outputs is None else [inputs, outputs]
        with _disable_current_modes():
            start(axis, *given, *more).wait()
        nccl = Stream(device, "nccl")
        nccl.wait_stream(device.stack[-1])
        with nccl:
            device.access(what, inputs, inputs if outputs is None else outputs)
        device.log[-1] = (device.stack[-1].name, what)  # the one that it was started on
        return _Noted(device, nccl.record_event(), (inputs, outputs))


class _Noted:
    def __init__(self, device: Device, event: Event, held: Any) -> None:
        self._device, self._event, self._held = device, event, held

    def wait(self) -> list[Tensor]:
        """Let the current stream wait, and give up what the collective used."""
        self._device.stack[-1].wait_event(self._event)
        outputs, self._held = list((self._held or ((), ()))[-1] or ()), None
        return outputs


class Given:
    """An object as a user's that communicates as `Nccl` does, over one axis."""

    def __init__(self, device: Device, axis: Axis) -> None:
        self._nccl, self._axis = Nccl(device), axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Work:
        """Gather, or with an operation reduce and scatter."""
        run = self._nccl.reduce_scatter if "op" in how else self._nccl.all_gather
        return run(self._axis, [input_tensor], [output_tensor])


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, list | tuple) else []


@contextmanager
def watched(
    device: Device, model: Any, offloaded: bool = False, own: bool = False
) -> Iterator[None]:
    """Let a sharded model, whose forward ran before, use the device's streams inside.

    With ``own`` it gathers and scatters by objects as a user's.
    """
    unit: Any = unit_of(model)
    schedule = unit.schedule
    schedule._tag_log = log = TagLog(device.streams.offload)
    for group in (group for each in schedule.units for group in each.groups):
        group.streams = device.streams.named(group.path)
        group.tag.log, group.reads_tags = log, True
        group.collectives = group.gathers = group.scatters = Nccl(device)
        if own:
            given = Given(device, group.axes.shard)
            group.gathers = CustomAllGather(given)
            group.scatters = CustomReduceScatter(given, group.collectives)
        group._plan = None
        shard = device.of(group.layout.shard, "compute")
        for view in group.layout.shards:  # storages of their own over the same memory
            device.memory[view.untyped_storage()._cdata] = shard
        if offloaded:
            # Another device in name, so that shards and their gradients are taken to rest there.
            group.config = replace(group.config, rest=torch.device("cpu", 0), pinned=True)
            device.on_host(group.layout.shard)
    schedule._pinned = offloaded
    with ExitStack() as stack:
        for patch in _patches(device, offloaded, own):
            stack.enter_context(patch)
        stack.enter_context(device)
        yield


def _patches(device: Device, offloaded: bool, own: bool) -> list[Any]:
    allocate, free = ResizeBuffer.allocate, ResizeBuffer.free
    on_cpu, made = StreamedReduction._on_cpu, ReducedGradients.__init__

    def allocated(self: ResizeBuffer) -> None:
        allocate(self)
        device.allocate(self._storage, device.stack[-1].name)

    def freed(self: ResizeBuffer) -> None:
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

    def reduced(self: ReducedGradients, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if offloaded:
            device.on_host(self.flat)

    def record(tensor: Tensor, stream: Stream) -> None:
        device.of(tensor, stream.name).recorded.add(stream.name)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (ResizeBuffer, "allocate", allocated),
        (ResizeBuffer, "free", freed),
        (StreamedReduction, "_on_cpu", copied),
        (ReducedGradients, "__init__", reduced),
        (Tensor, "record_stream", record),
    ]
    if offloaded:  # gradients that rest elsewhere are not what a reduction writes to
        changes.append((_reduction, "_is_alike", lambda one, other: False))
    if not own:  # `Nccl` is taken for the collectives of torch
        changes += [(module, "is_exact", lambda _: True) for module in (_layout, _reduction_plan)]
    return [mock.patch.object(*change) for change in changes]


@torch.no_grad()
def descend(p: Any, rate: float = 0.1) -> None:
    """Step as an optimizer does, on what this rank has of a parameter and its gradient."""
    part = local_of if hasattr(p, "_local_tensor") else type(p).to_local
    part(p).sub_(part(p.grad), alpha=rate)
