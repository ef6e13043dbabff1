"""Measure arms: times, memory, received bytes, and the components of a step."""

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import profile
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hp_dtensor import RaggedTensor

from .sides import Arm

WARM_UP = 2
QUIET = 1.2  # the probe of a quiet round takes at most this many times the shortest time
MOST = 2  # at most this many times the wanted rounds
_resolve_group: Callable[[str], Any] = vars(distributed_c10d)["_resolve_process_group"]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Probe:
    """A fixed computation of about 15 ms, which takes longer while other programs use the machine.

    It runs on as many ranks as there are CPU cores.

    Args:
        rank: Rank of this process.

    Attributes:
        fastest: The shortest mean time of a round so far in seconds, on the slowest rank.
    """

    def __init__(self, rank: int) -> None:
        self.fastest = float("inf")
        self._runs = rank < (os.cpu_count() or 1)
        self._square = torch.ones(512, 512)
        self._long = torch.ones(2**22)
        self._copy = torch.empty(2**22)

    def seconds(self) -> float:
        """Run the computation once, and return its time in seconds."""
        start = time.perf_counter()
        if self._runs:
            for _ in range(2):
                torch.mm(self._square, self._square)
                self._copy.copy_(self._long)
        return time.perf_counter() - start

    def is_quiet(self, load: float) -> bool:
        """Return whether a round with this mean time was not disturbed."""
        return load <= QUIET * self.fastest


class Times(NamedTuple):
    """Seconds of each round on this rank, by the name of an arm.

    Attributes:
        seconds: Until the device has finished.
        host: Until the host has returned.
        discarded: Number of rounds that are not included.
    """

    seconds: dict[str, list[float]]
    host: dict[str, list[float]]
    discarded: int


def timed(
    arms: "Sequence[Arm | BareCollectives]", rounds: int, device: torch.device, probe: Probe
) -> Times:
    """Run each arm once per round, in random order, after `WARM_UP` rounds.

    In one round, all arms have the same batch. All ranks start each step together. Python's garbage
    collection runs between the rounds.

    The probe runs before each step. More rounds follow, up to `MOST` times ``rounds``, until
    ``rounds`` of them were quiet. The rounds in which the probe took longest are discarded, with
    the times of all arms.
    """
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    host: dict[str, list[float]] = {arm.name: [] for arm in arms}
    loads: list[float] = []
    shuffle = random.Random(0)  # the same order on all ranks
    gc.disable()
    try:
        for turn in range(WARM_UP + MOST * rounds):
            gc.collect()
            probed = []
            for arm in shuffle.sample(list(arms), len(arms)):
                synchronize(device)
                dist.barrier()
                probed.append(probe.seconds())
                dist.barrier()
                start = time.perf_counter()
                arm.step(turn)
                returned = time.perf_counter()
                synchronize(device)
                if turn >= WARM_UP:
                    seconds[arm.name].append(time.perf_counter() - start)
                    host[arm.name].append(returned - start)
            load = torch.tensor(sum(probed) / len(probed), dtype=torch.float64)
            dist.all_reduce(load, dist.ReduceOp.MAX)
            probe.fastest = min(probe.fastest, load.item())
            if turn >= WARM_UP:
                loads.append(load.item())
            if sum(map(probe.is_quiet, loads)) >= rounds:
                break
    finally:
        gc.enable()
    kept = sorted(sorted(range(len(loads)), key=loads.__getitem__)[:rounds])

    def chosen(times: dict[str, list[float]]) -> dict[str, list[float]]:
        return {name: [every[number] for number in kept] for name, every in times.items()}

    return Times(chosen(seconds), chosen(host), discarded=len(loads) - len(kept))


def slowest(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the largest time over the ranks, for each arm and round."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, times)
    return {
        name: [max(each) for each in zip(*(rank[name] for rank in found), strict=True)]
        for name in times
    }


def with_memory(
    make: Callable[[], Arm], device: torch.device
) -> tuple[Arm, list[tuple[Tensor, Tensor]], int]:
    """Create an arm, take three steps, and return its peak memory in bytes.

    Memory between steps (weights, optimizer states, buffers) counts, too. On a CPU, all allocations
    and releases of torch's allocator in this thread count, as the profiler reports them. Memory of
    gloo's own threads is not known to the profiler.

    Returns:
        The arm; the loss and the norm of each step; and the peak of the third step.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        arm = make()
        results = [arm.step() for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        results.append(arm.step())
        torch.cuda.synchronize()
        return arm, results, torch.cuda.max_memory_allocated() - before
    with profile(use_device=None, profile_memory=True) as building:
        arm = make()
        results = [arm.step() for _ in range(2)]
    with profile(use_device=None, profile_memory=True) as report:
        results.append(arm.step())
    level = peak = 0
    for size in _sizes_of(report):
        level += size
        peak = max(peak, level)
    return arm, results, sum(_sizes_of(building)) + peak


def _sizes_of(report: profile) -> list[int]:
    """Return the bytes of each allocation, and of each release as negative numbers, in order."""
    events: Any = report.kineto_results
    found = sorted(events.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in found if event.name() == "[memory]"]


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that the collectives of a rank receive from other ranks.

    They are computed from the shapes, for both sides in the same way. An all-reduce of ``b`` bytes
    over ``n`` ranks counts as ``2 * b * (n - 1) / n``. Raises RuntimeError for an unknown
    collective operator.

    Attributes:
        by_kind: Bytes of each kind of collective.
        calls: Number of collectives of each kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_kind: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        if any(issubclass(kind, (DTensor, RaggedTensor)) for kind in types):
            return NotImplemented  # the operators on its local tensors follow
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name in ("wait_tensor", "barrier", "_wrap_tensor_autograd"):
            return
        if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
            self._add("all-gather", _bytes(args[0]) - _bytes(args[1]))
        elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
            self._add("reduce-scatter", _bytes(args[1]) - _bytes(args[0]))
        elif name in ("allreduce_", "allreduce_coalesced_"):
            self._add("all-reduce", _of_all_reduce(args[0], dist.ProcessGroup.unbox(args[1])))
        elif name == "alltoall_base_":
            group = dist.ProcessGroup.unbox(args[2])
            self._add("all-to-all", _from_others(args[0], args[3], group))
        elif name == "broadcast_":
            group = dist.ProcessGroup.unbox(args[1])
            self._add("broadcast", _bytes(args[0]) if args[2] != group.rank() else 0)
        elif name == "recv_":
            self._add("send and receive", _bytes(args[0]))
        elif name == "send":
            return
        elif name in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
            self._add("all-gather", _bytes(result) - _bytes(args[0]))
        elif name == "reduce_scatter_tensor":
            self._add("reduce-scatter", _bytes(args[0]) - _bytes(result))
        elif name in ("all_reduce", "all_reduce_"):
            self._add("all-reduce", _of_all_reduce(args[0], _resolve_group(args[2])))
        elif name == "all_to_all_single":
            group = _resolve_group(args[3])
            self._add("all-to-all", _from_others(result, args[1], group))
        else:
            raise RuntimeError(f"the bytes of {name} are not counted")

    def _add(self, kind: str, size: int) -> None:
        self.by_kind[kind] += size
        self.calls[kind] += 1


def _bytes(tensors: Any) -> int:
    parts = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(x.numel() * x.element_size() for x in parts)


def _of_all_reduce(tensors: Any, group: Any) -> int:
    size: int = group.size()
    return 2 * _bytes(tensors) * (size - 1) // size


def _from_others(output: Tensor, splits: Sequence[int], group: Any) -> int:
    rows = output.shape[0]
    own: int = splits[group.rank()] if splits else rows // group.size()
    return (rows - own) * (_bytes(output) // rows if rows else 0)


def received(arm: Arm) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a step of an arm receives and its calls, by kind of collective."""
    with ReceivedBytes() as counted:
        arm.step()
    return dict(counted.by_kind), dict(counted.calls)


class _Recorded(TorchDispatchMode):
    """Records each collective operator of a step, with its arguments.

    Each tensor argument is replaced by a new zero tensor of the same shape, so that the calls can
    be repeated later.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record, and call."""
        if any(issubclass(kind, (DTensor, RaggedTensor)) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in ("wait_tensor", "barrier", "_wrap_tensor_autograd"):
                own = tree_map_only(Tensor, torch.zeros_like, (args, kwargs or {}))
                self.calls.append((func, *own))
        return func(*args, **(kwargs or {}))


class BareCollectives:
    """Runs the computation together with the recorded collectives of another arm.

    The arm's copies and hooks are left out. All collectives start at the beginning of the step.
    Exchanges of rows of tokens, for which experts have to wait, run one after the other. The step
    ends when the computation and all collectives have ended.

    Args:
        arm: The arm whose collectives are recorded, in one step.
        compute: The computation.
    """

    name = "bare collectives"

    def __init__(self, arm: Arm, compute: Arm) -> None:
        with _Recorded() as recorded:
            arm.step()
        self._calls = recorded.calls
        self._compute = compute

    def step(self, number: int) -> None:
        """Start all collectives, compute the step with this number, and wait for all."""
        started = []
        for func, args, kwargs in self._calls:
            result = func(*args, **kwargs)
            if _exchanges_rows(func, args):
                _wait_for(result)
            else:
                started.append(result)
        self._compute.step(number)
        for result in started:
            _wait_for(result)


def _exchanges_rows(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator is an all-to-all with split sizes."""
    name = func._schema.name.partition("::")[2]
    return (name == "alltoall_base_" and bool(args[3])) or name == "all_to_all_single"


def _wait_for(result: Any) -> None:
    """Wait for a collective; ``result`` is the result of its operator."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
    else:
        work = result[1] if isinstance(result, tuple | list) else result
        dist.Work.unbox(work).wait()


# Methods of process groups. torch 2.13 has other names for some than torch 2.11.
_KINDS = {
    "all-gathers": ("all_gather_single", "_allgather_base", "allgather"),
    "reduce-scatters": ("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter"),
    "all-reduces": ("allreduce", "allreduce_coalesced"),
    "all-to-alls": ("all_to_all_single", "alltoall_base"),
    "broadcasts": ("broadcast",),
    "sends and receives": ("send", "recv"),
}


@contextmanager
def named_waits() -> Iterator[None]:
    """Label each wait for a collective in the profile with the kind of the collective.

    Replaces methods of ``Work`` and ``ProcessGroup`` while the context is open. Create the arms in
    this context, because hp-fsdp looks up the method of its reduce-scatters once.
    """
    work, group = vars(dist)["Work"], vars(dist)["ProcessGroup"]
    kinds: dict[int, str] = {}
    original_wait = work.wait
    # The entries of the classes, which bind to an object. Attributes of pybind's classes do not.
    replaced = [(work, "wait", vars(work)["wait"])]

    def wait(self: Any, *args: Any) -> Any:
        with record_function(f"wait for {kinds.pop(id(self), 'other collectives')}"):
            return original_wait(self, *args)

    def noted(kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = start(*args, **kwargs)
            kinds[id(found)] = kind
            return found

        return run

    work.wait = wait
    for kind, names in _KINDS.items():
        for name in (name for name in names if name in vars(group)):
            replaced.append((group, name, vars(group)[name]))
            setattr(group, name, noted(kind, getattr(group, name)))
    try:
        yield
    finally:
        for owner, name, method in replaced:
            setattr(owner, name, method)


_PRODUCTS = ("mm", "attention")
_COPIES = ("copy", "cat", "clone", "fill_", "zero_", "as_strided_scatter", "slice_backward")
_ROWS = ("index", "gather", "scatter", "sort", "topk", "bincount", "cumsum", "repeat_interleave")
COMPONENTS = (
    *(f"wait for {kind}" for kind in _KINDS),
    "wait for other collectives",
    "wait in functional collectives",
    "start of collectives",
    "products and attention",
    "copies",
    "rows of tokens and indices",
    "AdamW",
    "other operators",
    "host, outside operators",
)


def component_of(name: str) -> str:
    """Return the component to which the self time of an event in a profile belongs.

    Ranges without an operator, such as hooks and autograd nodes, are host time.
    """
    low = name.lower()
    if name in COMPONENTS:
        return name
    if low == "_c10d_functional::wait_tensor":
        return "wait in functional collectives"
    if low.startswith(("c10d::", "_c10d_functional")):
        return "start of collectives"
    space, _, operator = name.partition("::")  # "FSDP" is the name of a range, "fsdp" of operators
    if space not in ("aten", "fsdp"):
        return "host, outside operators"
    if "adam" in operator:
        return "AdamW"
    if any(word in operator for word in _PRODUCTS):
        return "products and attention"
    if any(word in operator for word in _ROWS):
        return "rows of tokens and indices"
    if space == "fsdp" or any(word in operator for word in _COPIES):
        return "copies"
    return "other operators"


def components(arm: Arm, steps: int) -> dict[str, float]:
    """Profile some steps, and return the milliseconds per step of each component on this thread.

    Call it in the context `named_waits`.

    The sum is the time of the step under the profiler, which is longer than without one. Tensor
    parallelism, ring attention and torchtitan's dispatcher use torch's functional collectives.
    These wait in ``wait_tensor``, which does not know the kind of the collective.
    """
    found = dict.fromkeys(COMPONENTS, 0.0)
    whole = 0.0
    for number in range(steps):
        dist.barrier()
        with profile(use_device=None) as report:
            start = time.perf_counter()
            with record_function("step"):
                arm.step(number)
            whole += time.perf_counter() - start
        events: Any = report.function_events
        thread = next(event.thread for event in events if event.name == "step")
        for event in events:
            if event.thread == thread and not event.is_async:
                found[component_of(event.name)] += event.self_cpu_time_total / 1e3 / steps
    measured = sum(ms for name, ms in found.items() if not name.startswith("host"))
    found["host, outside operators"] = 1e3 * whole / steps - measured
    return found
