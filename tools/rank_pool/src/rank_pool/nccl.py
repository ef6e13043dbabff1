"""Let gloo ranks on CPUs meet the rules of NCCL.

`install` replaces the methods of ``ProcessGroup`` in this process. Messages still travel over gloo,
but code that asks for the backend gets NCCL's name and its support of coalescing, and so takes the
branches for NCCL. These rules of ``ProcessGroupNCCL`` (torch 2.11 to 2.13) hold:

- Dtypes that it does not know raise, in collectives and in sends.
- Reductions with bitwise operators, of float8 numbers, and averages of booleans raise.
- Inputs and outputs must be contiguous. The tensors of one coalesced all-reduce have one dtype.
- The first collective of a group, or its first batch of sends and receives, waits for all ranks.
- Outputs are undefined until the work has been waited for. Here they hold NaN, or numbers that no
  test expects, and work that nobody waits for never writes them.
- Inputs must not change before that. If one does, the outputs stay undefined.

Not simulated: CUDA devices, streams (see `rank_pool.streams`), and the deadlock of two ranks that
send to each other without a batch. Functional collectives in C++ go to gloo unchanged.
"""

import datetime
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

CONNECT_SECONDS = 60.0  # what ranks get to take part in a group's first call
# The keys of torch's table of NCCL dtypes (NCCLUtils.cpp, getNcclDataType).
FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
DTYPES = FLOAT8 | {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_AVG, _SUM, _MAX = dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.MAX
_OPS = (_SUM, _AVG, _MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
_CPU = torch.device("cpu")

_original: dict[str, Callable[..., Any]] = {}
_connected: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()
_batches: "weakref.WeakKeyDictionary[ProcessGroup, list[Callable[[], Any]]]" = (
    weakref.WeakKeyDictionary()
)


class Backend:
    """A gloo backend that has NCCL's name and capabilities."""

    supports_coalescing = True

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def name(self) -> str:
        """Return NCCL's name."""
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


class LikeNcclWork:
    """Work over gloo that writes its outputs in `wait`."""

    def __init__(
        self, works: Sequence[Any], inputs: Sequence[Tensor], finish: Callable[[], None]
    ) -> None:
        self._works, self._finish = list(works), finish
        self._inputs = [(x, _bytes(x).clone()) for x in inputs]

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for gloo, and write the outputs unless an input has changed."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if self._works:
            self._works = []
            inputs, self._inputs = self._inputs, []
            with torch.no_grad(), _disable_current_modes():
                if all(torch.equal(_bytes(x), before) for x, before in inputs):
                    self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether gloo is done."""
        return all(work.is_completed() for work in self._works)


def install() -> None:
    """Let all gloo groups of this process follow NCCL's rules from now on."""
    for name, method in _METHODS.items():
        if name not in _original and hasattr(ProcessGroup, name):
            _original[name] = getattr(ProcessGroup, name)
            setattr(ProcessGroup, name, _instead(name, method))


def _instead(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if not _is_over_gloo(group) or not _are_plain([*args, *kwargs.values()]):
                return _original[name](group, *args, **kwargs)
            return method(name, group, *args, **kwargs)

    return call


def _is_over_gloo(group: ProcessGroup) -> bool:
    if type(group) is not ProcessGroup:
        return False
    try:
        backend = _original["_get_backend"](group, _CPU)
    except RuntimeError:
        return False
    return isinstance(backend, dist.ProcessGroupGloo)


def _are_plain(values: Sequence[Any]) -> bool:
    """Return whether all tensors among the arguments are plain CPU tensors."""
    for value in values:
        if isinstance(value, list | tuple) and not _are_plain(value):
            return False
        if isinstance(value, Tensor) and (
            type(value) not in (Tensor, torch.nn.Parameter) or value.device != _CPU
        ):
            return False
    return True


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _check(what: str, tensors: Sequence[Tensor], op: Any = None) -> None:
    for x in tensors:
        if x.dtype not in DTYPES:
            raise TypeError(
                f"Input tensor data type is not supported for NCCL process group: {x.dtype}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{what}: Tensors must be contiguous")
        if op is None:
            continue
        if op not in _OPS:
            raise ValueError(f"Cannot use {op} with NCCL")
        if x.dtype in FLOAT8:
            raise TypeError(f"{what}: NCCL before sm90 reduces no {x.dtype}")
        if x.dtype == torch.bool and op == _AVG:
            raise TypeError("Cannot use ReduceOp.AVG with Boolean inputs")


def _connect(group: ProcessGroup) -> None:
    """Wait for all ranks of a group before its first call, as NCCL makes its communicator."""
    if group in _connected or group.size() == 1:
        return
    store: Any = cast(Any, group).get_group_store()
    keys = [f"like-nccl/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "here")
    deadline = time.monotonic() + CONNECT_SECONDS
    while not store.check(keys):
        if time.monotonic() > deadline:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                "NCCL connects all ranks of a group in its first collective or its first batch of "
                f"sends and receives; ranks {absent} of group {group.group_name!r} did not come"
            )
        time.sleep(0.001)
    _connected.add(group)


def _carried(x: Tensor) -> Tensor:
    """Return a private copy in a dtype that gloo knows."""
    copy = x.detach().clone()
    return copy.view(torch.uint8) if x.dtype in FLOAT8 or x.dtype == torch.bool else copy


def _write(x: Tensor, value: Tensor | None) -> None:
    """Write a value, or one that no test expects; autograd does not take it for a change."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        if value is not None:
            x.data.copy_(value if value.dtype == x.dtype else value.view(x.dtype))
        elif x.dtype in FLOAT8:
            x.data.view(torch.uint8).fill_(0x7F)
        elif x.dtype.is_floating_point:
            x.data.fill_(torch.nan)
        else:
            x.data.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max - 90)


def _overlap(x: Tensor, others: Sequence[Tensor]) -> bool:
    return any(x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in others)


def _run(
    what: str,
    group: ProcessGroup,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    start: Callable[[list[Tensor], list[Tensor]], list[Any]],
    op: Any = None,
    *,
    connects: bool = True,
) -> LikeNcclWork:
    """Start a collective on private memory; the outputs are written when it is waited for."""
    _check(what, [*inputs, *outputs], op)
    if connects:
        _connect(group)
    with _disable_current_modes():
        given, private = [_carried(x) for x in inputs], [_carried(x) for x in outputs]
    apart = [x for x in inputs if not _overlap(x, outputs)]
    works = start(given, private)

    def finish() -> None:
        for x, value in zip(outputs, private, strict=True):
            if op == _AVG:
                value = value.div(group.size(), rounding_mode=_rounding(value))
            _write(x, value)

    with _disable_current_modes():
        work = LikeNcclWork(works, apart, finish)
        for x in outputs:
            _write(x, None)
    return work


def _rounding(x: Tensor) -> str | None:
    return None if x.dtype.is_floating_point else "floor"


def _carried_op(op: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what gloo reduces with: it has no average, and the sum of booleans is their or."""
    is_or = op == _SUM and any(x.dtype == torch.bool for x in tensors)
    return _MAX if is_or else _SUM if op == _AVG else op


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op_of(options: Any) -> Any:
    given = getattr(options, "reduceOp", options)
    return next((op for op in _OPS if given == op), given)  # a `ReduceOp` equals no other one


def _all_reduce(
    name: str, group: ProcessGroup, tensors: Any, opts: Any = _SUM, *_: Any, op: Any = None
) -> Any:
    tensors, op = _list(tensors), _op_of(op if op is not None else opts)
    if len({x.dtype for x in tensors}) > 1:
        raise ValueError("Tensors must have identical type")
    options: Any = AllreduceOptions() if name == "allreduce" else AllreduceCoalescedOptions()
    options.reduceOp = _carried_op(op, tensors)

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original[name](group, private, options)]

    return _run(name, group, tensors, tensors, start, op)


def _all_gather(name: str, group: ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> Any:
    outputs, inputs = _list(outputs), _list(inputs)
    if any(x.dtype != y.dtype for x, y in zip(outputs, inputs, strict=True)):
        raise TypeError("output tensor must have the same type as input tensor")

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        one, pairs = _original["_allgather_base"], zip(private, given, strict=True)
        return [one(group, x, y, AllgatherOptions()) for x, y in pairs]

    return _run(name, group, inputs, outputs, start)


def _all_gather_list(name: str, group: ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> Any:
    nested = outputs[0] if isinstance(outputs[0], list | tuple) else outputs

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original[name](group, [private], given, AllgatherOptions())]

    return _run(name, group, _list(inputs), list(nested), start)


def _reduce_scatter(
    name: str, group: ProcessGroup, outputs: Any, inputs: Any, opts: Any = _SUM, *_: Any
) -> Any:
    outputs, inputs, op = _list(outputs), _list(inputs), _op_of(opts)
    if any(x.dtype != y.dtype for x, y in zip(outputs, inputs, strict=True)):
        raise TypeError("input tensor must be the same type as the output tensor.")
    options = ReduceScatterOptions()
    options.reduceOp = _carried_op(op, inputs)

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        one, pairs = _original["_reduce_scatter_base"], zip(private, given, strict=True)
        return [one(group, x, y, options) for x, y in pairs]

    return _run(name, group, inputs, outputs, start, op)


def _all_to_all(
    name: str, group: ProcessGroup, output: Tensor, input: Tensor, out: Any, sent: Any, *_: Any
) -> Any:
    if output.dtype != input.dtype:
        raise TypeError("Tensors are not equal in data type")

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original[name](group, *private, *given, out, sent, AllToAllOptions())]

    return _run(name, group, [input], [output], start)


def _broadcast(name: str, group: ProcessGroup, tensors: Any, opts: Any, *_: Any) -> Any:
    tensors = _list(tensors)
    options = BroadcastOptions()
    options.rootRank = getattr(opts, "rootRank", opts)

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original[name](group, private, options)]

    return _run(name, group, tensors, tensors, start)


def _send(name: str, group: ProcessGroup, tensors: Any, peer: int, tag: int = 0) -> Any:
    tensors = _list(tensors)

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original["send"](group, given, peer, tag)]

    return _in_batch(group, partial(_run, name, group, tensors, [], start, connects=False))


def _recv(name: str, group: ProcessGroup, tensors: Any, peer: int, tag: int = 0) -> Any:
    tensors = _list(tensors)

    def start(given: list[Tensor], private: list[Tensor]) -> list[Any]:
        return [_original["recv"](group, private, peer, tag)]

    return _in_batch(group, partial(_run, name, group, [], tensors, start, connects=False))


def _in_batch(group: ProcessGroup, start: Callable[[], Any]) -> Any:
    if group not in _batches:
        return start()
    _batches[group].append(start)
    return None


def _start_batch(name: str, group: ProcessGroup, device: torch.device) -> None:
    _batches[group] = []


def _end_batch(name: str, group: ProcessGroup, device: torch.device) -> Any:
    starts = _batches.pop(group)
    if starts:
        _connect(group)
    works = [start() for start in starts]
    return LikeNcclWork(works, [], lambda: None)


def _unsupported(name: str, group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"Backend nccl does not support {name}")


def _backend(name: str, group: ProcessGroup, device: torch.device) -> Any:
    return Backend(_original[name](group, device))


_METHODS: dict[str, Callable[..., Any]] = {
    "_get_backend": _backend,
    "_start_coalescing": _start_batch,
    "_end_coalescing": _end_batch,
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), _all_reduce),
    **dict.fromkeys(
        (
            *("all_gather_single", "_allgather_base"),
            *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        ),
        _all_gather,
    ),
    "allgather": _all_gather_list,
    **dict.fromkeys(
        (
            *("reduce_scatter_single", "_reduce_scatter_base"),
            *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        ),
        _reduce_scatter,
    ),
    **dict.fromkeys(("all_to_all_single", "alltoall_base"), _all_to_all),
    "broadcast": _broadcast,
    "send": _send,
    "recv": _recv,
    **dict.fromkeys(("recv_anysource", "monitored_barrier"), _unsupported),
}
