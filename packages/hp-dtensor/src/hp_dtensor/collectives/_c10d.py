"""`TorchCollectives`: collectives on the process group of an axis.

Most collectives call the methods of ``ProcessGroup`` directly, by private names of torch. The
public functions of ``torch.distributed`` take a third more host time, and none of them takes
several tensors. Only this module and ``_torch.py`` use private names of torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
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

from .._errors import LayoutError
from .._torch import backend_object, backend_of, is_plain_gloo, timeout_of
from ._interface import (
    Axis,
    Collectives,
    Parts,
    RankMismatchError,
    ReduceOp,
    Waitable,
    Work,
    as_tensors,
    check_divisible,
    check_outputs,
    own_fault,
)


def _names(*names: str) -> tuple[str, ...]:
    """Return ``names`` with the name that exists in the installed torch version first.

    ``names`` are the names of one ``ProcessGroup`` method in different torch versions. Raises
    ImportError if the installed version has none of them.
    """
    known = [name for name in names if hasattr(ProcessGroup, name)]
    if not known:
        raise ImportError(f"torch {ProcessGroup} has none of {names}; hp-dtensor needs torch 2.11+")
    return (known[0], *(name for name in names if name != known[0]))


# Names of methods that start a collective of one tensor. torch 2.13 renamed the first three; the
# second name is the older one.
_GATHER = _names("all_gather_single", "_allgather_base")
_SCATTER = _names("reduce_scatter_single", "_reduce_scatter_base")
_EXCHANGE = _names("all_to_all_single", "alltoall_base")
_REDUCE = _names("allreduce")
# Names of methods that start a collective of several tensors.
_GATHER_LIST = _names("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_SCATTER_LIST = _names("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_REDUCE_LIST = _names("allreduce_coalesced")

_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}


def _asynchronous(options: Any, op: Any = None) -> Any:
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    return options


# Torch does not modify these options, so all calls share the same objects.
_GATHER_OPTIONS = _asynchronous(AllgatherOptions())
_EXCHANGE_OPTIONS = _asynchronous(AllToAllOptions())
_SCATTER_OPTIONS = {name: _asynchronous(ReduceScatterOptions(), op) for name, op in _OPS.items()}
_REDUCE_OPTIONS = {name: _asynchronous(AllreduceOptions(), op) for name, op in _OPS.items()}
_REDUCE_LIST_OPTIONS = {
    name: _asynchronous(AllreduceCoalescedOptions(), op) for name, op in _OPS.items()
}

_MAX_BROADCASTS = 8  # for one all-gather over gloo; see `_gathers`
_BROADCAST_OPTIONS = [_asynchronous(BroadcastOptions()) for _ in range(_MAX_BROADCASTS)]
for _source, _options in enumerate(_BROADCAST_OPTIONS):
    _options.rootRank = _source

_Pair = tuple[Tensor, Tensor]  # (output, input) of a collective of one tensor
_Finish = Callable[[], None]  # copies or divides outputs after the communication
# Over gloo, small tensors are packed into one buffer. For tensors of at least this many bytes,
# copying to and from the buffer takes longer than separate calls.
_MIN_BYTES_UNPACKED = 2**20
# Over gloo, a sum of blocks of at least this many bytes is an all-to-all; see `_start_block_sum`.
_MIN_BYTES_BLOCK_SUM = 2**18


class _PendingWork:
    """The `Work` that `TorchCollectives` returns. It can wait for several works of torch.

    `wait` waits for all works, even if one of them fails, and then raises the first error. Later
    calls of `wait` raise the same error. If an interrupt stops `wait`, the next call waits for the
    remaining works.

    Args:
        collective: Name of the collective. `wait` adds it to error messages.
        axis: Axis of the collective. `wait` adds its name and ranks to error messages.
        works: Handles ``torch.distributed.Work`` of the started operations.
        outputs: Tensors that `wait` returns.
        inputs: Tensors that must stay alive until all works are done.
        finishes: Functions that `wait` calls in this order, once all works are done.
        error: Error that was raised when an operation was started. `wait` raises it.
    """

    __slots__ = ("_axis", "_collective", "_error", "_finishes", "_inputs", "_outputs", "_works")

    def __init__(
        self,
        collective: str,
        axis: Axis,
        works: list[Any],
        outputs: list[Tensor],
        inputs: Sequence[Tensor] = (),
        finishes: Sequence[_Finish] = (),
        error: Exception | None = None,
    ) -> None:
        self._collective = collective
        self._axis = axis
        self._works = works
        self._outputs = outputs
        self._inputs = inputs
        self._finishes = finishes
        self._error = error

    def wait(self) -> list[Tensor]:
        while self._works:
            try:
                self._works[0].wait()
            except Exception as error:  # noqa: BLE001 - raised below, once all works are done
                self._error = self._error or self._with_note(error)
            del self._works[0]
        self._inputs = ()
        if self._error is not None:
            raise self._error
        if self._finishes:
            try:
                for finish in self._finishes:
                    finish()
            except BaseException as error:
                self._error = RuntimeError("the outputs of a collective were not finished")
                self._error.__cause__ = error
                raise
            self._finishes = ()
        return self._outputs

    def _with_note(self, error: Exception) -> Exception:
        """Add the names of the collective and the axis to an error of torch, as a note."""
        ranks = self._axis.ranks
        shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
        error.add_note(f"in {self._collective} over axis {self._axis.name!r} (ranks {shown})")
        return error


def _start(
    collective: str,
    axis: Axis,
    starts: Sequence[Callable[[], Any]],
    finishes: Sequence[_Finish],
    outputs: list[Tensor],
    inputs: Sequence[Tensor],
) -> _PendingWork:
    """Start the operations of one collective call, one after the other.

    If the first start fails, this function raises the error. If a later start fails, ``wait`` of
    the result raises the error, after the operations in flight have ended.

    Args:
        collective: Name of the collective, for error messages.
        axis: Axis of the collective.
        starts: Functions that each start one operation and return its ``torch.distributed.Work``.
        finishes: Functions that ``wait`` calls after all operations are done.
        outputs: Tensors that ``wait`` returns.
        inputs: Tensors that must stay alive until all operations are done.
    """
    works: list[Any] = []
    for start in starts:
        try:
            works.append(start())
        except Exception as error:
            if not works:
                raise
            # The operations in flight still use the caller's tensors, so `wait` raises the error.
            return _PendingWork(collective, axis, works, outputs, inputs, finishes, error)
    return _PendingWork(collective, axis, works, outputs, inputs, finishes)


class TorchCollectives:
    """`Collectives` that call ``torch.distributed``.

    The constructor takes no arguments. Instances have no state, so they are interchangeable. On an
    axis of one rank, nothing is communicated. The results are then copies of the inputs in
    ``outputs``, or the inputs themselves if ``outputs`` is None.

    Attributes:
        all_gather: Starts an all-gather.
        reduce_scatter: Starts a reduce-scatter.
        all_reduce: Starts an all-reduce.
        all_to_all: Starts an all-to-all of rows.
        send_recv: Starts sends and receives between pairs of ranks.
        broadcast: Starts a broadcast from one rank.

    Examples:
        On 4 ranks:

        >>> axis, weight = Axis.of(init_device_mesh("cpu", (4,))), torch.ones(2)
        >>> TorchCollectives().all_reduce(axis, [weight]).wait()
        [tensor([4., 4.])]
    """

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Concatenate each input over the axis; see `Collectives.all_gather`."""
        if axis.size == 1:
            return _PendingWork("all_gather", axis, [], _copied(inputs, outputs))
        if outputs is None:
            outputs = [x.new_empty((x.shape[0] * axis.size, *x.shape[1:])) for x in inputs]
        else:
            check_outputs("all_gather", axis, inputs, outputs)
        if len(inputs) == len(outputs) == 1 and not inputs[0].dtype.is_complex:
            (x,), (out,) = inputs, outputs
            if x.is_contiguous() and out.is_contiguous():
                return _start("all_gather", axis, _gathers(out, x, axis), (), [out], [x])
        inputs = [x.contiguous().resolve_conj() for x in inputs]
        dense, copies = _dense(outputs)
        pairs = list(zip(dense, inputs, strict=True))
        starts: list[Callable[[], Any]]
        over_gloo = bool(inputs) and _is_gloo(axis, inputs[0].device)
        if len(pairs) > 1 and over_gloo:
            pairs, unpack = _pack_small(pairs, axis.size)
            copies = [*unpack, *copies]
        if len(pairs) > 1 and not over_gloo and _takes_lists(axis, _GATHER_LIST, inputs[0].device):
            parts = [_real(x) for x in dense], [_real(x) for x in inputs]
            starts = [partial(_method(axis, _GATHER_LIST), *parts, _GATHER_OPTIONS)]
        else:
            starts = [start for pair in pairs for start in _gathers(*pair, axis)]
        used = [x for pair in pairs for x in pair]
        return _start("all_gather", axis, starts, copies, list(outputs), used)

    def prepare_all_gather(
        self, axis: Axis, input: Tensor, output: Tensor
    ) -> Callable[[], Waitable]:
        """Return a function that starts the same all-gather, with the same tensors, at each call.

        This method checks the axis and looks up the process group only once, which saves host time
        in each call of the returned function.

        Args:
            axis: Axis of at least two ranks, with a process group.
            input: Contiguous tensor of this rank.
            output: Contiguous tensor with ``axis.size`` times as many elements.

        Returns:
            A function without arguments that starts the all-gather and returns a handle. Keep both
            tensors alive until the handle's ``wait()`` returns. ``wait()`` raises an error if the
            collective fails.

        Raises:
            ValueError: The axis belongs to a simulated world, or has one rank.

        Examples:
            On 4 ranks:

            >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
            >>> shard, whole = torch.ones(2), torch.empty(8)
            >>> start = TorchCollectives().prepare_all_gather(axis, shard, whole)
            >>> _ = start().wait()
            >>> whole.sum()
            tensor(8.)
        """
        _check_prepared(axis)
        starts = _gathers(output, input, axis)
        if len(starts) == 1:
            return starts[0]
        return partial(_start, "all_gather", axis, starts, (), [output], [input])

    def prepare_reduce_scatter(
        self, axis: Axis, op: ReduceOp = "sum"
    ) -> Callable[[Tensor, Tensor], Waitable]:
        """Return a function that starts a reduce-scatter of one contiguous tensor at each call.

        This method checks the axis and looks up the process group only once. Each call of the
        returned function can have other tensors.

        Args:
            axis: Axis of at least two ranks, with a process group.
            op: Reduction. ``"avg"`` works only if the backend supports it.

        Returns:
            A function ``start(output, input)`` that starts the reduce-scatter and returns a handle.
            ``input`` has ``axis.size`` times as many elements as ``output``. Both are contiguous.
            Keep them alive until the handle's ``wait()`` returns.

        Raises:
            ValueError: The axis belongs to a simulated world, or has one rank.

        Examples:
            On 4 ranks:

            >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
            >>> own, rows = torch.empty(2), torch.ones(8)
            >>> _ = TorchCollectives().prepare_reduce_scatter(axis)(own, rows).wait()
            >>> own
            tensor([4., 4.])
        """
        _check_prepared(axis)
        return partial(_scatter, op=op, axis=axis, method=_method(axis, _SCATTER))

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input and return this rank's block; see `Collectives.reduce_scatter`."""
        if axis.size == 1:
            return _PendingWork("reduce_scatter", axis, [], _copied(inputs, outputs))
        check_divisible(axis, inputs)
        if outputs is None:
            outputs = [x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) for x in inputs]
        else:
            check_outputs("reduce_scatter", axis, outputs, inputs)
        divide: Sequence[_Finish] = ()
        if op == "avg":
            op, divide = _average(axis, outputs)
        if len(inputs) == len(outputs) == 1 and not inputs[0].dtype.is_complex:
            (x,), (out,) = inputs, outputs
            if x.is_contiguous() and out.is_contiguous():
                works = [_scatter(out, x, op, axis, _method(axis, _SCATTER))]
                return _PendingWork("reduce_scatter", axis, works, [out], [x], divide)
        inputs = [x.contiguous().resolve_conj() for x in inputs]
        dense, copies = _dense(outputs)
        pairs = list(zip(dense, inputs, strict=True))
        several, dtypes = len(pairs) > 1, {x.dtype for x in inputs}
        over_gloo = several and _is_gloo(axis, inputs[0].device)
        if over_gloo and len(dtypes) == 1 and sum(map(bytes_of, inputs)) < _MIN_BYTES_UNPACKED:
            packed, unpack = _packed(pairs, axis.size, 1)
            pairs, copies = [packed], [unpack, *copies]
        takes_list = len(pairs) > 1 and torch.bool not in dtypes
        if takes_list and _takes_lists(axis, _SCATTER_LIST, inputs[0].device):
            parts = [_real(x.detach(), op) for x in dense], [_real(x, op) for x in inputs]
            starts = [partial(_method(axis, _SCATTER_LIST), *parts, _SCATTER_OPTIONS[op])]
        else:
            method = _method(axis, _SCATTER)
            starts = [partial(_scatter, *pair, op, axis, method) for pair in pairs]
        used, finishes = [x for pair in pairs for x in pair], [*copies, *divide]
        return _start("reduce_scatter", axis, starts, finishes, list(outputs), used)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor in place; see `Collectives.all_reduce`."""
        outputs = list(tensors)
        if axis.size == 1:
            return _PendingWork("all_reduce", axis, [], outputs)
        divide: Sequence[_Finish] = ()
        if op == "avg":
            op, divide = _average(axis, outputs)
        if len(outputs) == 1 and outputs[0].is_contiguous():
            works = [_reduce(outputs[0], op, axis)]
            return _PendingWork("all_reduce", axis, works, outputs, (), divide)
        dense, copies = _dense(outputs)
        if len(dense) > 1 and _takes_lists(axis, _REDUCE_LIST, dense[0].device):
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for tensor in dense:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
            starts = [partial(_reduce_list, same, op, axis) for same in by_dtype.values()]
        else:
            starts = [partial(_reduce, tensor, op, axis) for tensor in dense]
        return _start("all_reduce", axis, starts, [*copies, *divide], outputs, dense)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Send one block of rows to each rank; see `Collectives.all_to_all`."""
        if axis.size == 1:
            for splits in (send_splits, receive_splits):
                if splits is not None and list(splits) != [input.shape[0]]:
                    raise ValueError(
                        f"splits {list(splits)} of {input.shape[0]} rows over {axis.name}, which "
                        "has one rank; they are one number, that of the rows"
                    )
            outputs = _copied([input], None if output is None else [output])
            return _PendingWork("all_to_all", axis, [], outputs)
        send = [] if send_splits is None else list(send_splits)
        receive = [] if receive_splits is None else list(receive_splits)
        input = input.contiguous()
        if output is None:
            rows = input.shape[0] if receive_splits is None else sum(receive)
            output = input.new_empty((rows, *input.shape[1:]))
        elif output.dtype != input.dtype:
            raise ValueError(
                f"the output of all_to_all over {axis.name} has dtype {output.dtype}; it must have "
                f"the dtype of the input, {input.dtype}"
            )
        dense, copies = ([output], ()) if output.is_contiguous() else _dense([output])
        start = _method(axis, _EXCHANGE)
        if input.is_complex():
            work = start(_real(dense[0]), _real(input), receive, send, _EXCHANGE_OPTIONS)
        else:
            work = start(dense[0], input, receive, send, _EXCHANGE_OPTIONS)
        return _PendingWork("all_to_all", axis, [work], [output], [input, *dense], copies)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send tensors to ranks and receive tensors from ranks; see `Collectives.send_recv`.

        With NCCL, all ranks of the group have to take part in the group's first call. With gloo,
        tensors on other devices are sent and received through copies in CPU memory.
        """
        if axis.size > 1:
            _check_group(axis)
        if fault := own_fault(axis, sends, receives):
            raise ValueError(fault)
        outputs = [x for parts in receives.values() for x in as_tensors(parts)]
        me = axis.index
        if me in sends:
            own = zip(as_tensors(receives[me]), as_tensors(sends[me]), strict=True)
            with _unrecorded(outputs):
                for output, tensor in own:
                    output.copy_(tensor)
        leaving = [
            (peer, x.contiguous().resolve_conj().resolve_neg()) for peer, x in _to_peers(sends, me)
        ]
        arriving = _to_peers(receives, me)
        if axis.size == 1 or not (leaving or arriving):
            return _PendingWork("send_recv", axis, [], outputs)
        staged = _needs_staging(axis, [x for _, x in (*leaving, *arriving)])
        dense, copies = _dense([x for _, x in arriving], on_cpu=staged)
        if staged:
            leaving = [(peer, x.detach().cpu()) for peer, x in leaving]
        buffers = [(peer, x) for (peer, _), x in zip(arriving, dense, strict=True)]
        return _send_and_receive(axis, leaving, buffers, outputs, copies)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with the tensor of one rank; see `Collectives.broadcast`."""
        outputs = list(tensors)
        if axis.size == 1:
            return _PendingWork("broadcast", axis, [], outputs)
        _check_group(axis)
        dense, copies = _dense(outputs)
        options: dict[str, Any] = {"group": axis.group, "async_op": True}
        starts = [partial(dist.broadcast, x, axis.ranks[source], **options) for x in dense]
        return _start("broadcast", axis, starts, copies, outputs, dense)


def _check_group(axis: Axis) -> None:
    if not isinstance(axis.group, ProcessGroup):
        raise ValueError(
            f"axis {axis.name!r} is simulated; pass collectives=, those that the simulated world "
            f"gave this rank, as a {type(axis.group).__name__} is no process group"
        )


def _check_prepared(axis: Axis) -> None:
    if axis.size == 1:
        raise ValueError(f"axis {axis.name!r} has one rank, so that there is nothing to prepare")
    _check_group(axis)


def _method(axis: Axis, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the bound method of the axis's process group that starts a collective.

    ``names`` are the names of the method in different torch versions, from `_names`. If the group's
    class overrides one of them, the override is returned. Otherwise, the method with the first name
    is returned. Raises ValueError if the group of the axis is simulated.
    """
    group: Any = axis.group
    if type(group) is not ProcessGroup:
        _check_group(axis)
        names = _overridden(group, names) or names
    method: Callable[..., Any] = getattr(group, names[0])
    return method


def _overridden(group: object, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in ``names`` that the class of ``group`` overrides.

    ``names`` are names of methods of ``ProcessGroup``. Returns an empty tuple if the class
    overrides none of them.
    """
    own = type(group)
    return tuple(x for x in names if getattr(own, x, None) is not getattr(ProcessGroup, x, None))


def _takes_lists(axis: Axis, names: tuple[str, ...], device: torch.device) -> bool:
    """Return whether the axis's process group can start one collective of several tensors.

    The result is False in two cases:

    - An all-reduce over gloo on another device than the CPU.
    - A process group that is written in Python, has no backend and does not override the method.

    Args:
        axis: Axis of the collective.
        names: Names of the ``ProcessGroup`` method for several tensors in different torch versions,
            such as ``allreduce_coalesced``.
        device: Device of the tensors.
    """
    group = axis.group
    if names is _REDUCE_LIST and device.type != "cpu" and _is_gloo(axis, device):
        return False
    if type(group) is ProcessGroup or _overridden(group, names):
        return True
    return backend_object(group, device) is not None


def _is_gloo(axis: Axis, device: torch.device) -> bool:
    """Return whether the process group of ``axis`` uses gloo for tensors on ``device``."""
    return backend_of(axis.group, device) == "gloo"


def _gathers(output: Tensor, input: Tensor, axis: Axis) -> list[Callable[[], Any]]:
    """Return functions that together start an all-gather of one contiguous tensor.

    For large tensors on CPUs and few ranks over gloo, these are one broadcast from each rank.
    gloo's all-gather receives all blocks in a buffer of its own and then copies them to the output
    (torch 2.11 to 2.13). A broadcast receives a block in the output.
    """
    output, input = output.detach(), input.detach()  # gloo writes with autograd enabled
    if input.is_complex():
        output, input = _real(output), _real(input)
    if (
        axis.size > _MAX_BROADCASTS
        or bytes_of(input) < _MIN_BYTES_UNPACKED
        or input.device.type != "cpu"
        or output.dtype is not input.dtype
        or output.numel() != axis.size * input.numel()
        or not (output.is_contiguous() and input.is_contiguous())
        or not is_plain_gloo(axis.group, input.device)
    ):
        return [partial(_method(axis, _GATHER), output, input, _GATHER_OPTIONS)]
    index, group, block = axis.index, cast(Any, axis.group), input.view(-1)
    blocks = output.view(axis.size, -1).unbind()

    def start(source: int) -> Any:
        if source == index:
            with _unrecorded([blocks[source]]):
                blocks[source].copy_(block)
        return group.broadcast([blocks[source]], _BROADCAST_OPTIONS[source])

    return [partial(start, source) for source in range(axis.size)]


def _scatter(
    output: Tensor, input: Tensor, op: ReduceOp, axis: Axis, method: Callable[..., Any]
) -> Any:
    """Start a reduce-scatter of one contiguous tensor, and return a handle with ``wait()``.

    For large sums on CPUs over gloo, this is an all-to-all and a local sum. See `_start_block_sum`.

    Args:
        output: Contiguous tensor of one block.
        input: Contiguous tensor of one block for each rank.
        op: Reduction.
        axis: Axis of the ranks.
        method: Method of the process group that starts a reduce-scatter.
    """
    if output.requires_grad:
        output = output.detach()  # gloo writes to it with autograd enabled
    if input.dtype.is_complex:
        output, input = _real(output, op), _real(input, op)
    elif input.dtype is torch.bool:
        op = _for_bools(op)
    if (
        output.nbytes >= _MIN_BYTES_BLOCK_SUM
        and op == "sum"
        and input.dtype.is_floating_point
        and output.dtype is input.dtype
        and input.numel() == axis.size * output.numel()
        and input.device.type == "cpu"
        and is_plain_gloo(axis.group, input.device)
    ):
        return _start_block_sum(output, input.detach(), axis)
    return method(output, input, _SCATTER_OPTIONS[op])


def _start_block_sum(output: Tensor, input: Tensor, axis: Axis) -> _PendingWork:
    """Start an all-to-all of the blocks of a reduce-scatter. `wait` of the result adds them.

    gloo's own reduce-scatter all-reduces a copy of the input, so each rank receives twice the bytes
    (torch 2.11 to 2.13). A small all-to-all before the large one compares the sizes of the ranks:
    if a rank sends smaller blocks than the others, gloo's all-to-all leaves the rest of the
    received blocks uninitialized, without an error.

    Args:
        output: Contiguous tensor of one block, which does not require grad.
        input: Contiguous tensor of one block for each rank.
        axis: Axis of the ranks.
    """
    own = torch.full((axis.size,), input.numel(), dtype=torch.int64, device=input.device)
    sizes, blocks = torch.empty_like(own), input.new_empty((axis.size, *output.shape))
    exchange = _method(axis, _EXCHANGE)
    starts = [
        partial(exchange, received, sent, [], [], _EXCHANGE_OPTIONS)
        for received, sent in ((sizes, own), (blocks, input))
    ]

    def add() -> None:
        found = sizes.tolist()
        if len(set(found)) > 1:
            pairs = zip(axis.ranks, found, strict=True)
            raise RankMismatchError(
                f"the inputs of a reduce-scatter over {axis.name!r} differ in size: "
                + ", ".join(f"rank {rank} has {size} elements" for rank, size in pairs)
            )
        with _unrecorded([output]):
            if axis.size == 2:  # takes half the time of ``torch.sum``
                torch.add(blocks[0], blocks[1], out=output)
            else:
                torch.sum(blocks, 0, out=output)

    return _start("reduce_scatter", axis, starts, [add], [output], [input])


def _reduce(tensor: Tensor, op: ReduceOp, axis: Axis) -> Any:
    """Start an in-place all-reduce of one contiguous tensor, and return torch's work.

    Raises ValueError for a complex tensor if ``op`` is not ``"sum"`` or ``"avg"``.
    """
    if tensor.is_complex():
        if op not in _LINEAR:
            raise ValueError(f"all_reduce over {axis.name} with {op} needs real numbers")
        tensor = _real(tensor, op)
    elif tensor.dtype is torch.bool:
        op = _for_bools(op)
    return _method(axis, _REDUCE)([tensor], _REDUCE_OPTIONS[op])


def _reduce_list(tensors: list[Tensor], op: ReduceOp, axis: Axis) -> Any:
    """Start one in-place all-reduce of several contiguous tensors of one dtype."""
    if tensors[0].dtype is torch.bool:
        op = _for_bools(op)
    parts = [_real(x, op) for x in tensors]
    return _method(axis, _REDUCE_LIST)(parts, _REDUCE_LIST_OPTIONS[op])


_LINEAR = ("sum", "avg")  # reductions that act on real and imaginary parts separately


def _real(tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
    """Return ``torch.view_as_real(tensor)`` for a complex tensor, and other tensors unchanged.

    Some backends do not support complex dtypes. If ``op`` is not ``"sum"`` or ``"avg"``, a complex
    tensor is returned unchanged, because real and imaginary parts cannot be reduced separately.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() and op in _LINEAR else tensor


def _for_bools(op: ReduceOp) -> ReduceOp:
    """Return the reduction to use for tensors of bools: ``"max"`` instead of ``"sum"``.

    Other reductions are returned unchanged.
    """
    # gloo would add bools as bytes. The byte 2 means True but does not equal the byte 1, and 256
    # times True overflows to 0, which is False. NCCL replaces the sum by the maximum itself.
    return "max" if op == "sum" else op


def _average(axis: Axis, outputs: Sequence[Tensor]) -> tuple[ReduceOp, list[_Finish]]:
    """Return the reduction for an average, and the functions to call after the communication.

    - With NCCL: ``"avg"``, and no function.
    - With other backends, which have no average: ``"sum"``, and a function that divides ``outputs``
      in place by the number of ranks. Raises ValueError if the dtype of an output is neither
      floating nor complex.
    """
    if outputs and backend_of(axis.group, outputs[0].device) == "nccl":
        return "avg", []
    sums = list(outputs)
    for output in sums:
        if not (output.is_floating_point() or output.is_complex()):
            raise ValueError(
                f"an average over {axis.name} of {output.dtype}; use a floating-point or complex "
                "dtype, or op='sum'"
            )

    def divide() -> None:
        with _unrecorded(sums):
            for output in sums:
                output.div_(axis.size)

    return "sum", [divide]


def _copied(inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the results of a collective over an axis of one rank.

    If ``outputs`` is None, the results are the inputs themselves. Otherwise the inputs are copied
    to ``outputs``, and the results are ``outputs``.
    """
    if outputs is None:
        return list(inputs)
    with _unrecorded(outputs):
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor.view(output.shape))
    return list(outputs)


@contextmanager
def _unrecorded(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Return a context manager that allows in-place writes to ``outputs``.

    Without it, torch refuses to write to parameters that require grad and to inference tensors.
    """
    with torch.inference_mode(any(x.is_inference() for x in outputs)), torch.no_grad():
        yield


def _dense(
    outputs: Sequence[Tensor], *, on_cpu: bool = False
) -> tuple[list[Tensor], list[_Finish]]:
    """Return a contiguous tensor for each output, into which the backend writes the result.

    An output that is contiguous and not lazily conjugated needs no new tensor. Other outputs are
    replaced by contiguous copies. If ``on_cpu`` is True, all outputs are replaced by uninitialized
    CPU tensors.

    Returns:
        A pair. The first list has one tensor per output: the output itself or its replacement. The
        second list has one function, which copies the results from the replacements to the outputs.
        If nothing is replaced, the second list is empty.
    """
    # gloo ignores the strides of a tensor when it writes.
    if on_cpu:
        dense = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in outputs]
    else:
        # A lazily conjugated output has no real view.
        dense = [x.contiguous().resolve_conj() for x in outputs]
    copied = [(x, y) for x, y in zip(outputs, dense, strict=True) if x is not y]

    def copy_out() -> None:
        with _unrecorded([output for output, _ in copied]):
            for output, tensor in copied:
                output.copy_(tensor)

    return dense, [copy_out] if copied else []


def _pack_small(pairs: list[_Pair], ranks: int) -> tuple[list[_Pair], list[_Finish]]:
    """Pack the small tensors of an all-gather over gloo into one buffer.

    An input is small if it has fewer than `_MIN_BYTES_UNPACKED` bytes. The first small input is
    packed, together with all other small inputs of the same dtype.

    Args:
        pairs: ``(output, input)`` of each tensor.
        ranks: Number of ranks of the axis.

    Returns:
        A tuple of two lists. The first list has the ``(output, input)`` pairs to communicate: the
        pairs that are not packed, then ``(output buffer, input buffer)``. The second list has one
        function, which copies the output buffer to the outputs. If no input is small, the first
        list is ``pairs`` and the second list is empty.
    """
    small, others = list[_Pair](), list[_Pair]()
    for pair in pairs:
        is_small = bytes_of(pair[1]) < _MIN_BYTES_UNPACKED
        fits = is_small and (not small or pair[1].dtype == small[0][1].dtype)
        (small if fits else others).append(pair)
    if not small:
        return pairs, []
    packed, unpack = _packed(small, 1, ranks)
    return [*others, packed], [unpack]


@torch.no_grad()
def _packed(pairs: Sequence[_Pair], rows_in: int, rows_out: int) -> tuple[_Pair, _Finish]:
    """Pack several tensors into one input buffer, and allocate one output buffer.

    Each buffer is a flattened matrix, in which each tensor has a range of columns. In a
    reduce-scatter, each rank gets one row of the input buffer. In an all-gather, each rank fills
    one row of the output buffer.

    Args:
        pairs: ``(output, input)`` of each tensor.
        rows_in: Rows of the input buffer: the number of ranks for a reduce-scatter, else 1.
        rows_out: Rows of the output buffer: the number of ranks for an all-gather, else 1.

    Returns:
        The pair ``(output buffer, input buffer)``, and a function that copies the output buffer to
        the outputs.
    """
    # gloo's own coalesced all-gather is not used. It corrupts the heap if two of them are in flight
    # in one group, because two threads write the name of the collective to one string without a
    # lock (``ProcessGroupGloo::runLoop``, torch 2.11 to 2.13). Names of up to 15 letters need no
    # heap memory. ``ALLGATHER_COALESCED`` is the only longer name among the collectives used here.
    outputs, inputs = zip(*pairs, strict=True)
    widths = [x.numel() for x in (inputs if rows_in == 1 else outputs)]
    rows = [x.reshape(rows_in, width) for x, width in zip(inputs, widths, strict=True)]
    flat = torch.cat(rows, dim=1).view(-1)
    whole = flat.new_empty(rows_out * sum(widths))

    def unpack() -> None:
        parts = [x.view(rows_out, width) for x, width in zip(outputs, widths, strict=True)]
        with _unrecorded(outputs):
            torch.split_with_sizes_copy(whole.view(rows_out, -1), widths, dim=1, out=parts)

    return (whole, flat), unpack


def bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes: number of elements times bytes per element."""
    return tensor.numel() * tensor.element_size()


def _to_peers(parts: Mapping[int, Parts], me: int) -> list[tuple[int, Tensor]]:
    """Return ``(peer, tensor)`` for each tensor that is sent to or received from another rank.

    Args:
        parts: Argument ``sends`` or ``receives`` of `send_recv`.
        me: Coordinate of this rank on the axis. Tensors under this key are left out.
    """
    return [(peer, x) for peer, each in parts.items() if peer != me for x in as_tensors(each)]


def _needs_staging(axis: Axis, tensors: Sequence[Tensor]) -> bool:
    """Return whether `send_recv` must copy the tensors through CPU memory.

    This is True if gloo would send or receive a tensor that is not on the CPU. gloo's collectives
    copy such tensors themselves, but gloo's send and receive crash the process.
    """
    devices = {x.device for x in tensors if x.device.type != "cpu"}
    return any(backend_of(axis.group, device) == "gloo" for device in devices)


def _send_and_receive(
    axis: Axis,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    outputs: list[Tensor],
    finishes: Sequence[_Finish],
) -> _PendingWork:
    """Start sends and receives, as one batch if the backend supports batches.

    For other backends, such as gloo, the sends and receives are started one by one.

    Args:
        axis: Axis of the ranks.
        sends: ``(peer, tensor)`` pairs. ``peer`` is the coordinate of the receiver on the axis.
        receives: ``(peer, tensor)`` pairs. ``peer`` is the coordinate of the sender on the axis.
        outputs: Tensors that ``wait`` of the result returns.
        finishes: Functions that ``wait`` calls after the communication.
    """
    # Convert all tensors before the first start. A later error would leave receives in flight.
    arriving = [(peer, _real(x)) for peer, x in receives]
    leaving = [(peer, _real(x)) for peer, x in sends]
    used = [x for _, x in (*receives, *sends)]
    group: Any = axis.group
    backend = backend_object(group, used[0].device)
    starts: list[Callable[[], Any]]
    if backend is not None and not backend.supports_coalescing:
        # ``batch_isend_irecv`` would start the same operations in the same order, but would look up
        # the group and the peer several times.
        timeout = timeout_of(group)
        starts = [
            partial(_start_with_timeout, method, x, peer, timeout)
            for method, tensors in ((group.recv, arriving), (group.send, leaving))
            for peer, x in tensors
        ]
        return _start("send_recv", axis, starts, finishes, outputs, used)
    pairs = [
        (function, peer, x)
        for function, tensors in ((dist.irecv, arriving), (dist.isend, leaving))
        for peer, x in tensors
    ]
    if type(group) is ProcessGroup:
        operations = [
            dist.P2POp(function, x, axis.ranks[peer], group) for function, peer, x in pairs
        ]
        works = dist.batch_isend_irecv(operations)
        return _PendingWork("send_recv", axis, works, outputs, used, finishes)
    # The group is written in Python. ``batch_isend_irecv`` would also call its methods one by one.
    starts = [partial(function, x, axis.ranks[peer], group) for function, peer, x in pairs]
    return _start("send_recv", axis, starts, finishes, outputs, used)


def _start_with_timeout(
    method: Callable[..., Any], tensor: Tensor, peer: int, timeout: timedelta
) -> "_WorkWithTimeout":
    return _WorkWithTimeout(method([tensor], peer, 0), timeout)


class _WorkWithTimeout:
    """Handle of a gloo send or receive. `wait` passes a timeout to gloo.

    Without a timeout argument, gloo's ``wait`` uses the timeout with which the group was created,
    even if the timeout of the group was changed later.
    """

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> None:
        self._work.wait(self._timeout)


def checked_collectives(collectives: object) -> Collectives:
    """Return ``collectives`` after a check of its methods, or `TorchCollectives` if it is None.

    Raises:
        LayoutError: The object does not have all methods of `Collectives`, or is a class.
    """
    if collectives is None:
        return TorchCollectives()
    if isinstance(collectives, Collectives) and not isinstance(collectives, type):
        return collectives
    raise LayoutError(
        f"collectives={collectives!r} does not have the methods of Collectives; use "
        "TorchCollectives(), an object with all of its methods, or leave it out"
    )
