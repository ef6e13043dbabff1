"""Streams of an accelerator that is not there: what must be ordered, and what is.

Every operator runs on the CPU, at once, and is noted as work of the stream that is the current one.
Only waits order streams (vector clocks), collectives run on a stream of their own, as NCCL's do,
and memory that is freed returns to the pool of the stream that allocated it. ``Device.races`` lists
pairs of accesses that nothing orders, one of which writes, and memory that a pool could lend again
while another stream still uses it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Clock = dict[str, int]
HOST, NCCL = "host", "nccl"


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

    def __init__(self, *sides: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        names = ("compute", *sides, NCCL, HOST)
        self.clocks: dict[str, Clock] = {name: dict.fromkeys(names, 0) for name in names}
        self.stack = [Stream(self, "compute")]
        self.memory: dict[int, Memory] = {}
        self.freed: list[Memory] = []
        self.races: list[str] = []
        self.log: list[tuple[str, str]] = []  # stream, operator

    @property
    def current(self) -> Stream:
        """Return the current stream."""
        return self.stack[-1]

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

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Note that memory is in use by a stream, as ``Tensor.record_stream`` does."""
        self.of(tensor, stream.name).recorded.add(stream.name)


class Nccl:
    """Collectives of hp-dtensor, noted as work of a stream that the current one waits for.

    ``collectives`` carry them at once. Work holds its tensors until it is waited for.
    """

    def __init__(self, device: Device, collectives: Any) -> None:
        self._device, self._collectives = device, collectives

    def all_gather(self, axis: Any, inputs: Sequence[Tensor], outputs: Any = None) -> "NotedWork":
        """Gather."""
        return self._run("all_gather", axis, (inputs, outputs), inputs)

    def reduce_scatter(
        self, axis: Any, inputs: Sequence[Tensor], outputs: Any = None, op: Any = "sum"
    ) -> "NotedWork":
        """Reduce and scatter."""
        return self._run("reduce_scatter", axis, (inputs, outputs, op), inputs)

    def all_reduce(self, axis: Any, tensors: Sequence[Tensor], op: Any = "sum") -> "NotedWork":
        """Reduce in place."""
        return self._run("all_reduce", axis, (tensors, op), tensors)

    def all_to_all(
        self,
        axis: Any,
        input: Tensor,
        send_splits: Any = None,
        receive_splits: Any = None,
        output: Tensor | None = None,
    ) -> "NotedWork":
        """Exchange blocks of rows."""
        given = (input, send_splits, receive_splits, output)
        return self._run("all_to_all", axis, given, [input])

    def send_recv(self, axis: Any, sends: Any, receives: Any) -> "NotedWork":
        """Send and receive."""
        sent = [x for parts in sends.values() for x in _tensors(parts)]
        return self._run("send_recv", axis, (sends, receives), sent)

    def broadcast(self, axis: Any, tensors: Sequence[Tensor], source: int = 0) -> "NotedWork":
        """Overwrite tensors with the source's."""
        return self._run("broadcast", axis, (tensors, source), tensors)

    def _run(
        self, what: str, axis: Any, given: tuple[Any, ...], inputs: Sequence[Tensor]
    ) -> "NotedWork":
        device, started_on = self._device, self._device.current
        with _disable_current_modes():
            outputs = getattr(self._collectives, what)(axis, *given).wait()
        for output in outputs:  # what is new belongs to the pool of the stream that asked for it
            device.allocate(output.untyped_storage(), started_on.name)
        nccl = Stream(device, NCCL)
        nccl.wait_stream(started_on)
        with nccl:
            device.access(what, inputs, outputs)
        device.log[-1] = (started_on.name, what)
        return NotedWork(device, nccl.record_event(), outputs, inputs)


class NotedWork:
    """Work on the stream of collectives."""

    def __init__(self, device: Device, event: Event, outputs: list[Tensor], inputs: Any) -> None:
        self._device, self._event, self._held = device, event, inputs
        self._outputs = outputs

    def wait(self) -> list[Tensor]:
        """Let the current stream wait; give up the tensors, which a second call lacks."""
        self._device.current.wait_event(self._event)
        outputs, self._outputs, self._held = self._outputs, [], None
        return outputs


@contextmanager
def as_cuda(device: Device, side: str) -> Iterator[None]:
    """Let ``torch.cuda``'s streams and events be those of a device; new streams are ``side``.

    Pinned memory is the host's, and ``tolist`` a read of the host.
    """
    empty, tolist = torch.empty, Tensor.tolist

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found = empty(*args, **kwargs)
        if pin_memory:
            device.on_host(found)
        return found

    def read(x: Tensor) -> Any:
        device.access("tolist", [x], [])
        if not device.of(x, HOST).host:  # a copy that the host waits for
            device.current.record_event().synchronize()
        return tolist(x)

    changes: list[tuple[Any, str, Any]] = [
        (torch, "empty", pinned),
        (Tensor, "tolist", read),
        (Tensor, "record_stream", lambda x, stream: device.record(x, stream)),
        (torch.cuda, "Stream", lambda *_: Stream(device, side)),
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda *_: device.current),
        (torch.cuda, "stream", lambda stream: stream),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(device)
        yield


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, list | tuple) else []
