"""Collectives of ``torch.distributed`` on an axis's process group, and torch's names for them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # the option structs of the coalesced methods
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup

from .._torch import backend_object, backend_of, timeout_of
from ._interface import (
    Axis,
    Parts,
    ReduceOp,
    Waitable,
    Work,
    as_tensors,
    check_divisible,
    own_fault,
)


def _names(*names: str) -> tuple[str, ...]:
    """Return the names of one method of process groups, with this torch version's name first."""
    known = [name for name in names if hasattr(ProcessGroup, name)]
    if not known:
        raise ImportError(f"torch {ProcessGroup} has none of {names}; hp-dtensor needs torch 2.11+")
    return (known[0], *(name for name in names if name != known[0]))


# torch 2.13 renamed these methods. The older name is the second.
_GATHER_SINGLE = _names("all_gather_single", "_allgather_base")
_SCATTER_SINGLE = _names("reduce_scatter_single", "_reduce_scatter_base")
_EXCHANGE = _names("all_to_all_single", "alltoall_base")
_GATHER = _names("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_SCATTER = _names("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_REDUCE = _names("allreduce_coalesced")


def _method(group: ProcessGroup, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the method of a process group that starts a collective.

    A subclass of ``ProcessGroup`` may override the method under its new or its old name.
    """
    if type(group) is not ProcessGroup:
        names = _overridden(group, names) or names
    method: Callable[..., Any] = getattr(group, names[0])
    return method


def _overridden(group: ProcessGroup, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names under which a subclass overrides a method of ``ProcessGroup``."""
    own = type(group)
    return tuple(x for x in names if getattr(own, x, None) is not getattr(ProcessGroup, x, None))


def _takes_lists(group: ProcessGroup, names: tuple[str, ...], device: torch.device) -> bool:
    """Return whether a group can start one collective of several tensors.

    A group written in Python without a backend can do so only if it overrides the method. gloo
    reduces lists of CPU tensors only.
    """
    if names is _REDUCE and device.type != "cpu" and backend_of(group, device) == "gloo":
        return False
    if type(group) is ProcessGroup or _overridden(group, names):
        return True
    return backend_object(group, device) is not None


def _asynchronous(options: Any, op: Any = None) -> Any:
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    return options


def _direct(start: Callable[..., Any], options: Any, *args: Any, op: Any = None) -> Any:
    """Start a collective by the group's own method and return c10d's work.

    torch's public functions take a third longer on the host, and have none of several tensors.
    """
    return start(*args, _asynchronous(options, op))


def _real(tensor: Tensor, op: Any = None) -> Tensor:
    """Return a real view of a complex tensor, because not all backends support complex dtypes.

    If ``op`` does not act on real and imaginary parts separately, the tensor is returned as it is.
    """
    as_parts = tensor.is_complex() and (op is None or op in _LINEAR)
    return torch.view_as_real(tensor) if as_parts else tensor


def _all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup) -> Any:
    return _method(group, _GATHER_SINGLE)(_real(output), _real(input), _GATHERED)


def _reduce_scatter_single(output: Tensor, input: Tensor, op: Any, group: ProcessGroup) -> Any:
    op = _for_dtype(op, input)
    parts = _real(output, op), _real(input, op)
    return _direct(_method(group, _SCATTER_SINGLE), ReduceScatterOptions(), *parts, op=op)


def _all_to_all_single(
    output: Tensor, input: Tensor, receive: list[int], send: list[int], group: ProcessGroup
) -> Any:
    if input.is_complex() or output.dtype != input.dtype:  # the latter raises
        how: dict[str, Any] = {"group": group, "async_op": True}
        return dist.all_to_all_single(output, input, receive or None, send or None, **how)
    start = _method(group, _EXCHANGE)
    return _direct(start, AllToAllOptions(), output, input, receive, send)


_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}

_LINEAR = (_OPS["sum"], _OPS["avg"])  # of each part of a complex number alone


def _for_dtype(op: Any, tensor: Tensor) -> Any:
    """Return the operation that gives a valid result for a tensor's dtype.

    gloo adds the bytes of bools. A byte of 2 counts as True, but does not equal it, and 256 ranks
    would give False. NCCL takes the maximum itself.
    """
    return _OPS["max"] if tensor.dtype is torch.bool and op == _OPS["sum"] else op


# What c10d only reads, made once.
_GATHERED = _asynchronous(AllgatherOptions())
_SCATTERED = {name: _asynchronous(ReduceScatterOptions(), op) for name, op in _OPS.items()}

_Pair = tuple[Tensor, Tensor]
Finish = Callable[[list[Tensor]], None]  # what is left to do with the outputs
_AVERAGING = frozenset({"nccl"})  # the backends that reduce with AVG
# Over gloo several tensors go through a buffer of all inputs and one of all outputs, each copied:
# from so many bytes on that takes longer than a call for each.
_ALONE = 2**20


# The name of a collective, of its axis, and the global ranks of the axis, for messages.
_Call = tuple[str, str, tuple[int, ...]]


def _call(collective: str, axis: Axis) -> _Call:
    return collective, axis.name, axis.ranks


def _noted(error: Exception, call: _Call) -> Exception:
    """Add a note to an error of c10d, which says neither the collective nor the axis."""
    collective, axis, ranks = call
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    error.add_note(f"in {collective} over axis {axis!r} (ranks {shown})")
    return error


class _Done:
    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def wait(self) -> list[Tensor]:
        return self._outputs


class _Pending:
    """Holds inputs and outputs alive until c10d is done, then finishes the outputs.

    `wait` waits for all works, also after one has failed, then raises the first error, each time it
    is called. An ``error`` of a start that came after other starts counts as one of them. After an
    interrupt it can be called again, and goes on with the works that are left.
    """

    def __init__(
        self,
        call: _Call,
        works: Sequence[Any],
        outputs: list[Tensor],
        inputs: Sequence[Tensor] = (),
        finish: Finish | None = None,
        error: Exception | None = None,
    ) -> None:
        self._call = call
        self._works = list(works)
        self._outputs = outputs
        self._inputs = inputs
        self._finish = finish
        self._error = error

    def wait(self) -> list[Tensor]:
        while self._works:
            try:
                self._works[0].wait()
            except Exception as error:  # noqa: BLE001 - raised below, when all works have ended
                self._error = self._error or _noted(error, self._call)
            del self._works[0]
        self._inputs = ()
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            try:
                self._finish(self._outputs)
            except BaseException as error:
                self._error = RuntimeError("the outputs of a collective were not finished")
                self._error.__cause__ = error
                raise
            self._finish = None
        return self._outputs


class _Single:
    """What `_Pending` is for one work and nothing to do after it: two calls, as steps have many.

    c10d's work raises its error each time that it is waited for, and can be waited for again after
    an interrupt.
    """

    __slots__ = ("_call", "_input", "_output", "_work")

    def __init__(self, call: _Call, work: Any, output: Tensor, input: Tensor) -> None:
        self._call = call
        self._work = work
        self._output = output
        self._input: Tensor | None = input

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            try:
                self._work.wait()
            except Exception as error:
                _noted(error, self._call)
                raise
            self._work = self._input = None
        return [self._output]


class _WithTimeout:
    """A send or receive of gloo that waits at most for the present timeout of its group.

    Without an argument, ``wait`` of gloo uses the timeout with which the group was created.
    """

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> None:
        self._work.wait(self._timeout)


class TorchCollectives:
    """`Collectives` that call ``torch.distributed``.

    Instances have no state, so they are interchangeable. On an axis of one rank, nothing is
    communicated: given outputs receive copies of the inputs; without given outputs, the results are
    the inputs themselves.

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
            return _Done(_copied(inputs, outputs))
        if outputs is not None and _is_one_pair(inputs, outputs):
            work = _all_gather_single(outputs[0], inputs[0], _group(axis))
            return _Single(_call("all_gather", axis), work, outputs[0], inputs[0])
        inputs = [tensor.contiguous() for tensor in inputs]
        outs = _outputs(inputs, outputs, lambda n: n * axis.size)
        dense, finish = (outs, None) if outputs is None else _dense(outs)
        group = _group(axis)
        pairs = list(zip(dense, inputs, strict=True))
        if len(pairs) == 1:
            work = _all_gather_single(*pairs[0], group)
            return _Pending(_call("all_gather", axis), [work], outs, inputs, finish)
        alone, together = pairs, list[_Pair]()
        if pairs and backend_of(group, inputs[0].device) == "gloo":
            alone, together = _split_to_pack(pairs)
        elif pairs and _takes_lists(group, _GATHER, inputs[0].device):
            parts = [_real(x) for x in dense], [_real(x) for x in inputs]
            work = _direct(_method(group, _GATHER), AllgatherOptions(), *parts)
            return _Pending(_call("all_gather", axis), [work], outs, inputs, finish)
        if together:
            packed, copy_out = _packed(together, 1, axis.size)
            finish = _both(copy_out, finish)
            inputs, alone = [*inputs, *packed], [*alone, packed]
        starts = [partial(_all_gather_single, *pair, group) for pair in alone]
        works, error = _started(starts)
        return _Pending(_call("all_gather", axis), works, outs, inputs, finish, error)

    def prepare_all_gather(
        self, axis: Axis, input: Tensor, output: Tensor
    ) -> Callable[[], Waitable]:
        """Return a function that starts an all-gather between two fixed tensors at each call.

        All lookups and checks are done once, in this method. Each call of the returned function
        then takes only the host time of ``torch.distributed``.

        Args:
            axis: Axis of at least two ranks, with a process group.
            input: Contiguous tensor of this rank.
            output: Contiguous tensor with ``axis.size`` times as many elements.

        Returns:
            A function without arguments that starts the all-gather and returns a handle. Keep both
            tensors alive until ``wait()`` of the handle returns. ``wait()`` raises errors of the
            collective.

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
        start = _method(_prepared_group(axis), _GATHER_SINGLE)
        return partial(start, _real(output), _real(input), _GATHERED)

    def prepare_reduce_scatter(
        self, axis: Axis, op: ReduceOp = "sum"
    ) -> Callable[[Tensor, Tensor], Waitable]:
        """Return a function that starts a reduce-scatter of one contiguous tensor.

        All lookups and checks that do not depend on the tensors are done once, in this method.

        Args:
            axis: Axis of at least two ranks, with a process group.
            op: Reduction. ``"avg"`` works only if the backend supports it.

        Returns:
            A function ``start(output, input)`` that starts the reduce-scatter and returns a handle.
            The input has ``axis.size`` times as many elements as the output. Keep both tensors
            alive until ``wait()`` of the handle returns.

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
        scatter = _method(_prepared_group(axis), _SCATTER_SINGLE)
        options, kind = _SCATTERED[op], _OPS[op]
        of_bools = _SCATTERED["max" if op == "sum" else op]

        def start(output: Tensor, input: Tensor) -> Waitable:
            if input.is_complex():
                output, input = _real(output, kind), _real(input, kind)
            use = options if input.dtype is not torch.bool else of_bools
            work: Waitable = scatter(output, input, use)
            return work

        return start

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input and keep this rank's part; see `Collectives.reduce_scatter`."""
        if axis.size == 1:
            return _Done(_copied(inputs, outputs))
        check_divisible(axis, inputs)
        if op != "avg" and outputs is not None and _is_one_pair(inputs, outputs):
            pair = _real(outputs[0], _OPS[op]), _real(inputs[0], _OPS[op])
            is_any = op == "sum" and inputs[0].dtype is torch.bool
            options = _SCATTERED["max" if is_any else op]
            work = _method(_group(axis), _SCATTER_SINGLE)(*pair, options)
            return _Single(_call("reduce_scatter", axis), work, outputs[0], inputs[0])
        inputs = [tensor.contiguous() for tensor in inputs]
        outs = _outputs(inputs, outputs, lambda n: n // axis.size)
        dense, copy_back = (outs, None) if outputs is None else _dense(outs)
        group = _group(axis)
        reduce, finish = _reduction(op, axis, inputs)
        if copy_back is not None:
            finish = _both(copy_back, finish)
        if len(inputs) > 1 and _is_cheaper_packed(group, inputs):
            pairs = list(zip(dense, inputs, strict=True))
            (output, packed), copy_out = _packed(pairs, axis.size, 1)
            finish, inputs = _both(copy_out, finish), [*inputs, packed]
            work = _reduce_scatter_single(output, packed, reduce, group)
        elif len(inputs) == 1:
            work = _reduce_scatter_single(dense[0], inputs[0], reduce, group)
        elif inputs and (_has_bools(inputs) or not _takes_lists(group, _SCATTER, inputs[0].device)):
            singles = [
                partial(_reduce_scatter_single, *pair, reduce, group)
                for pair in zip(dense, inputs, strict=True)
            ]
            works, error = _started(singles)
            return _Pending(_call("reduce_scatter", axis), works, outs, inputs, finish, error)
        else:
            parts = [_real(x, reduce) for x in dense], [_real(x, reduce) for x in inputs]
            work = _direct(_method(group, _SCATTER), ReduceScatterOptions(), *parts, op=reduce)
        return _Pending(_call("reduce_scatter", axis), [work], outs, inputs, finish)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor in place; see `Collectives.all_reduce`."""
        outs = list(tensors)
        if axis.size == 1:
            return _Done(outs)
        group = _group(axis)
        reduce, finish = _reduction(op, axis, outs)
        dense, copy_out = _dense(outs)
        finish = _both(copy_out, finish)
        if len(outs) == 1:
            kind = _for_dtype(reduce, dense[0])
            work = dist.all_reduce(dense[0], op=kind, group=group, async_op=True)
            return _Pending(_call("all_reduce", axis), [work], outs, dense, finish)
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in dense:
            alike.setdefault(tensor.dtype, []).append(tensor)
        if outs and not _takes_lists(group, _REDUCE, outs[0].device):
            single: dict[str, Any] = {"group": group, "async_op": True}
            starts = [
                partial(dist.all_reduce, tensor, op=_for_dtype(reduce, tensor), **single)
                for tensor in dense
            ]
        else:
            start = _method(group, _REDUCE)
            starts = [
                partial(
                    _direct,
                    start,
                    AllreduceCoalescedOptions(),
                    [_real(x, reduce) for x in same],
                    op=_for_dtype(reduce, same[0]),
                )
                for same in alike.values()
            ]
        works, error = _started(starts)
        return _Pending(_call("all_reduce", axis), works, outs, dense, finish, error)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Exchange blocks of rows; see `Collectives.all_to_all`."""
        if axis.size == 1:
            for splits in (send_splits, receive_splits):
                if splits is not None and list(splits) != [input.shape[0]]:
                    raise ValueError(
                        f"splits {list(splits)} of {input.shape[0]} rows over {axis.name}, which "
                        "has one rank; they are one number, that of the rows"
                    )
            return _Done(_copied([input], None if output is None else [output]))
        input = input.contiguous()
        copy_out = None
        if output is None:
            rows = input.shape[0] if receive_splits is None else sum(receive_splits)
            place = output = input.new_empty((rows, *input.shape[1:]))
        else:
            (place,), copy_out = _dense([output])
        receive, send = ([] if x is None else list(x) for x in (receive_splits, send_splits))
        work = _all_to_all_single(place, input, receive, send, _group(axis))
        return _Pending(_call("all_to_all", axis), [work], [output], [input, place], copy_out)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send and receive point to point; see `Collectives.send_recv`.

        With NCCL, all ranks of the group have to take part in the group's first call. With gloo,
        tensors that are not on the CPU are copied through CPU memory.
        """
        group, me = _group(axis) if axis.size > 1 else None, axis.index  # alone, a rank only copies
        if fault := own_fault(axis, sends, receives):
            raise ValueError(fault)
        outs = [(peer, x) for peer, parts in receives.items() for x in as_tensors(parts)]
        sent = [(peer, x.contiguous()) for peer, parts in sends.items() for x in as_tensors(parts)]
        if me in sends:
            own = zip(as_tensors(receives[me]), as_tensors(sends[me]), strict=True)
            for output, tensor in own:
                output.copy_(tensor)
        arriving = [(peer, x) for peer, x in outs if peer != me]
        leaving = [(peer, x) for peer, x in sent if peer != me]
        filled = [x for _, x in outs]
        if group is None or not (leaving or arriving):
            return _Pending(_call("send_recv", axis), [], filled)
        staged = _needs_staging(group, [x for _, x in (*leaving, *arriving)])
        dense, copy_out = _dense([x for _, x in arriving], on_cpu=staged)
        if staged:
            leaving = [(peer, x.detach().cpu()) for peer, x in leaving]
        places = [(peer, x) for (peer, _), x in zip(arriving, dense, strict=True)]
        works = _sent_and_received(group, axis, leaving, places)
        return _Pending(
            _call("send_recv", axis), works, filled, [*dense, *(x for _, x in leaving)], copy_out
        )

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with the tensor of one rank; see `Collectives.broadcast`."""
        outs = list(tensors)
        if axis.size == 1:
            return _Done(outs)
        group = _group(axis)
        dense, copy_out = _dense(outs)
        works, error = _started(
            [
                partial(dist.broadcast, tensor, axis.ranks[source], group=group, async_op=True)
                for tensor in dense
            ]
        )
        return _Pending(_call("broadcast", axis), works, outs, dense, copy_out, error)


def _sent_and_received(
    group: ProcessGroup,
    axis: Axis,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
) -> list[Any]:
    """Start sends and receives, as one batch if the backend supports batches.

    For other backends, such as gloo, this calls the group's methods one by one. torch's function
    does the same in the same order, but looks up the group and the peer several times.
    """
    backend = backend_object(group, (*sends, *receives)[0][1].device)
    if backend is None or backend.supports_coalescing:
        operations = [
            dist.P2POp(act, tensor, axis.ranks[peer], group)
            for act, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors
        ]
        return dist.batch_isend_irecv(operations)
    timeout = timeout_of(group)
    works: list[Any] = []
    for start, tensors in ((group.recv, receives), (group.send, sends)):
        for peer, x in tensors:  # complex numbers as pairs, which all backends send
            work = start([torch.view_as_real(x) if x.is_complex() else x], peer, 0)
            works.append(_WithTimeout(work, timeout))
    return works


def _is_one_pair(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether there is one tensor to send and one to receive, both of which are dense."""
    if len(inputs) != 1 or len(outputs) != 1:
        return False
    return inputs[0].is_contiguous() and outputs[0].is_contiguous()


def _started(starts: Sequence[Callable[[], Any]]) -> tuple[list[Any], Exception | None]:
    """Start one after the other; return the works, and the error of a start after the first.

    The first start raises its error itself: nothing is under way. A later one's is for the wait,
    which waits for the works before it, whose memory the caller may give up once it has the error.
    """
    works: list[Any] = []
    for start in starts:
        try:
            works.append(start())
        except Exception as error:
            if not works:
                raise
            return works, error
    return works, None


def _split_to_pack(pairs: list[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Return which outputs and inputs gloo gathers each alone, and which in one packed call.

    Packed are small ones of one dtype, that of the first: together they would take another.
    """
    dtype = next((tensor.dtype for _, tensor in pairs if bytes_of(tensor) < _ALONE), None)
    packs = [bytes_of(tensor) < _ALONE and tensor.dtype == dtype for _, tensor in pairs]
    alone = [pair for pair, is_packed in zip(pairs, packs, strict=True) if not is_packed]
    return alone, [pair for pair, is_packed in zip(pairs, packs, strict=True) if is_packed]


@torch.no_grad()
def _packed(pairs: Sequence[_Pair], rows_in: int, rows_out: int) -> tuple[_Pair, Finish]:
    """Return one output and one input for all ``pairs``, and what then copies the parts out.

    A tensor is columns of all rows: a reduce-scatter cuts rows of the input, an all-gather joins
    rows of the output. Gloo's own coalesced all-gather corrupts the heap where two of one group are
    under way: its two threads note the name of what each has done in one string, without a lock
    (``ProcessGroupGloo::runLoop``, torch 2.11 to 2.13). Names of up to 15 letters need no memory,
    and ``ALLGATHER_COALESCED`` is the only longer one of those used here.
    """
    outputs, inputs = zip(*pairs, strict=True)
    widths = [tensor.numel() for tensor in (inputs if rows_in == 1 else outputs)]
    rows = [tensor.reshape(rows_in, width) for tensor, width in zip(inputs, widths, strict=True)]
    flat = torch.cat(rows, dim=1).view(-1)
    whole = flat.new_empty(rows_out * sum(widths))

    def copy_out(_: list[Tensor]) -> None:
        parts = [x.view(rows_out, width) for x, width in zip(outputs, widths, strict=True)]
        with torch.inference_mode(outputs[0].is_inference()), torch.no_grad():
            torch.split_with_sizes_copy(whole.view(rows_out, -1), widths, dim=1, out=parts)

    return (whole, flat), copy_out


def _needs_staging(group: ProcessGroup, tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors must be copied to CPU memory before gloo sends or receives them.

    gloo's send and receive use the address of a tensor without a check of its device. An address of
    CUDA memory ends the process. The collectives of gloo copy CUDA tensors themselves.
    """
    devices = {x.device for x in tensors if x.device.type != "cpu"}
    return any(backend_of(group, device) == "gloo" for device in devices)


def _dense(
    outputs: Sequence[Tensor], *, on_cpu: bool = False
) -> tuple[list[Tensor], Finish | None]:
    """Return a contiguous tensor per output, and a function that copies them to the outputs.

    An output that is contiguous is returned itself; if all are, there is no function. gloo ignores
    strides when it writes. With ``on_cpu``, new CPU tensors without values are returned.
    """
    if on_cpu:
        dense = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in outputs]
    else:
        dense = [tensor.contiguous() for tensor in outputs]
    apart = [(x, y) for x, y in zip(outputs, dense, strict=True) if x is not y]

    def copy_out(_: list[Tensor]) -> None:
        with torch.inference_mode(outputs[0].is_inference()), torch.no_grad():
            for output, tensor in apart:
                output.copy_(tensor)

    return dense, copy_out if apart else None


def _has_bools(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.dtype is torch.bool for tensor in tensors)


def _is_cheaper_packed(group: dist.ProcessGroup, inputs: list[Tensor]) -> bool:
    """Return whether one reduction of all inputs takes less than gloo's, which is one of each."""
    small = sum(map(bytes_of, inputs)) < _ALONE and len({tensor.dtype for tensor in inputs}) == 1
    return small and backend_of(group, inputs[0].device) == "gloo"


def _both(first: Finish | None, then: Finish | None) -> Finish | None:
    if first is None or then is None:
        return first or then

    def finish(outputs: list[Tensor]) -> None:
        first(outputs)
        then(outputs)

    return finish


def bytes_of(tensor: Tensor) -> int:
    """Return how many bytes the elements of a tensor have."""
    return tensor.numel() * tensor.element_size()


def _group(axis: Axis) -> dist.ProcessGroup:
    if isinstance(axis.group, ProcessGroup):
        return axis.group
    raise ValueError(
        f"axis {axis.name!r} is simulated; pass collectives=, those that the simulated world gave "
        f"this rank, as a {type(axis.group).__name__} is no process group"
    )


def _prepared_group(axis: Axis) -> dist.ProcessGroup:
    if axis.size == 1:
        raise ValueError(f"axis {axis.name!r} has one rank, so that there is nothing to prepare")
    return _group(axis)


def _outputs(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None, rows: Callable[[int], int]
) -> list[Tensor]:
    if outputs is not None:
        return list(outputs)
    return [t.new_empty((rows(t.shape[0]), *t.shape[1:])) for t in inputs]


def _copied(inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None) -> list[Tensor]:
    if outputs is None:
        return list(inputs)
    for output, tensor in zip(outputs, inputs, strict=True):
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor.view(output.shape))
    return list(outputs)


def _reduction(op: ReduceOp, axis: Axis, tensors: Sequence[Tensor]) -> tuple[Any, Finish | None]:
    # Where the backend has no average the sum is divided once it is complete.
    if op != "avg" or (tensors and backend_of(_group(axis), tensors[0].device) in _AVERAGING):
        return _OPS[op], None

    def divide(outputs: list[Tensor]) -> None:
        for output in outputs:
            output.div_(axis.size)

    return _OPS["sum"], divide


def is_store_timeout(error: RuntimeError) -> bool:
    """Return whether a store's ``wait`` ended because its time was over.

    TCP stores raise ``DistStoreError``, others a plain RuntimeError, which say so in words alone.
    """
    return "timeout" in str(error).lower()
