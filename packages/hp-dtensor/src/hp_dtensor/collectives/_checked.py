"""Compare what the ranks of an axis are about to do, through a store, before they do it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import default_store, group_identity
from ._c10d import TorchCollectives, is_store_timeout
from ._interface import (
    Axis,
    Collectives,
    Parts,
    RankMismatchError,
    ReduceOp,
    Work,
    as_tensors,
    described,
    dtype_name,
    own_fault,
)
from ._recording import RecordingCollectives

_ROOT = "hp_dtensor/checked"
_MEMBERS = f"{_ROOT}/ranks"
_GO = "go"
# All ranks make their objects in the same order, so that a number means the same one on each.
_numbers = count(1)


class _Call(NamedTuple):
    """The fingerprint of one call on one rank.

    ``must_match``, ``group`` and ``devices`` are equal on all ranks of a legal call, ``details``
    says the rest for a reader. ``instance`` is the number of the rank's `CheckedCollectives`, 0 for
    one with its own store.
    """

    rank: int
    axis: str
    ranks: Sequence[int]
    number: int
    operation: str
    must_match: str
    details: str
    fault: str = ""
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    instance: int = 0
    group: str = ""
    devices: str = ""

    @staticmethod
    def read(text: Any) -> "_Call":
        """Return what `written` was made of."""
        call = _Call(*json.loads(text))
        runs: Any = call.ranks
        return call._replace(ranks=[rank for run in runs for rank in range(*run)])

    def written(self) -> str:
        """Return the fingerprint as text, with the ranks as few evenly spaced runs."""
        runs: Any = _runs(self.ranks)
        return json.dumps(self._replace(ranks=runs))

    def in_full(self) -> str:
        """Return the text with what else must match."""
        group = f" in process group {self.group} of these ranks" if self.group else ""
        return f"{self}{group} on {self.devices or 'no device'}"

    def __str__(self) -> str:
        text = " ".join(filter(None, (self.operation, self.must_match, self.details)))
        where = f"over axis {self.axis!r}, ranks {self.ranks}"
        made = f" of CheckedCollectives object {self.instance}" if self.instance else ""
        return f"{text} {where}, call {self.number}{made}"


class CheckedCollectives:
    """`Collectives` that raise one error on all ranks if the ranks make different calls.

    Use them to find the rank, axis and operation behind a hang or a wrong result. Before each call,
    every rank writes a fingerprint of the call to a store: operation, axis, process group, shapes,
    dtypes, devices and splits. Then it waits for the fingerprints of the other ranks of the axis.
    If fingerprints differ, all of these ranks raise the same `RankMismatchError`. If a rank writes
    nothing before the deadline, the waiting ranks raise a `RankMismatchError` that lists the last
    fingerprint of every rank.

    Args:
        inner: `Collectives` that communicate. Defaults to `TorchCollectives`.
        store: A ``torch.distributed`` store that all ranks share and nothing else uses. Defaults to
            the store of the default process group.
        deadline: Seconds to wait for the other ranks of a call. Defaults to 300.

    Raises:
        ValueError: ``deadline`` is not a number of seconds above 0.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
        >>> redistribute(x, collectives=CheckedCollectives(deadline=60)).shape
        torch.Size([8])

    Note:
        - Each call takes several round trips to the store, and the ranks wait for each other on the
          host. Nothing overlaps, so use it for debugging only.
        - After an error, every later call of the same object raises this error again. To continue,
          create a new object on all ranks.
        - All ranks have to create their objects in the same order.
        - Point to point messages are compared only between sender and receiver.
    """

    def __init__(
        self, inner: Collectives | None = None, *, store: Any = None, deadline: float = 300.0
    ) -> None:
        given: object = deadline
        if not isinstance(given, int | float) or not 0 < given < math.inf:
            raise ValueError(f"deadline={deadline!r} is no time to wait; give seconds above 0")
        self._inner: Collectives = TorchCollectives() if inner is None else inner
        self._given = store
        self._number = next(_numbers) if store is None else 0
        self._deadline = timedelta(seconds=deadline)
        self._prefixes: dict[tuple[int, ...], str] = {}
        self._numbers: dict[str, int] = {}
        self._failure = ""

    @property
    def inner(self) -> Collectives:
        """`Collectives` that communicate after the check."""
        return self._inner

    def check(self, axis: Axis, operation: str, details: str = "", *, fault: str = "") -> None:
        """Check that all ranks of an axis are about to perform the same operation.

        Use this method in your own code for an operation that has to be the same on all ranks. All
        ranks of the axis have to call it.

        Args:
            axis: Ranks that are compared. With one rank, only ``fault`` is checked.
            operation: Name of the operation. It has to be the same on all ranks.
            details: Text that has to be the same on all ranks, such as sizes.
            fault: Description of a problem on this rank, such as a tensor with a wrong shape. Empty
                if there is no problem.

        Raises:
            RankMismatchError: The operation or the details differ, a rank has a fault, or a rank
                did not call before the deadline. Raised on all ranks that called.

        Examples:
            On 4 ranks:

            >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
            >>> CheckedCollectives().check(axis, "place experts", details="0 1 2 3")
        """
        self._compare(axis, operation, (), details, fault=fault)

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Check that all ranks make this call, then run it; see `Collectives.all_gather`."""
        fault = _misfit(inputs, outputs, lambda numel: numel * axis.size)
        self._compare(axis, "all_gather", inputs, fault=fault)
        return self._inner.all_gather(axis, inputs, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Check that all ranks make this call, then run it; see `Collectives.reduce_scatter`."""
        fault = _misfit(inputs, outputs, lambda numel: numel // axis.size)
        self._compare(axis, f"reduce_scatter {op}", inputs, fault=fault)
        return self._inner.reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Check that all ranks make this call, then run it; see `Collectives.all_reduce`."""
        self._compare(axis, f"all_reduce {op}", tensors)
        return self._inner.all_reduce(axis, tensors, op)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Check that calls and splits match, then run the call; see `Collectives.all_to_all`."""
        equal = [input.shape[0] // axis.size] * axis.size
        sent = equal if send_splits is None else list(send_splits)
        received = equal if receive_splits is None else list(receive_splits)
        row = f"{dtype_name(input)} rows {list(input.shape[1:])}"
        details = f"sending {sent} and expecting {received}"
        fault, rows = "", input.shape[0]
        if len(sent) != axis.size or len(received) != axis.size:
            fault = f"splits must have {axis.size} lengths, one for each rank of the axis"
        elif sum(sent) != rows:
            fault = f"it would send {sum(sent)} rows in {axis.size} blocks and has {rows}"
        elif output is not None:
            numel = sum(received) * math.prod(input.shape[1:])
            fault = _misfit([input], [output], lambda _: numel)
        self._compare(axis, "all_to_all", [input], row, details, fault, sent, received)
        return self._inner.all_to_all(axis, input, send_splits, receive_splits, output)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Check that sender and receiver agree, then run the call; see `Collectives.send_recv`."""
        self._compare_pairs(axis, sends, receives)
        return self._inner.send_recv(axis, sends, receives)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Check that all ranks make this call, then run it; see `Collectives.broadcast`."""
        self._compare(axis, f"broadcast from {source}", tensors)
        return self._inner.broadcast(axis, tensors, source)

    def _compare(
        self,
        axis: Axis,
        operation: str,
        tensors: Sequence[Tensor],
        must_match: str | None = None,
        details: str = "",
        fault: str = "",
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> None:
        if axis.size == 1:
            if fault:
                raise RankMismatchError(f"rank {axis.ranks[0]} cannot do {operation}: {fault}")
            return
        prefix = self._prefix(axis)
        number = self._next(prefix)
        mine = _Call(
            axis.ranks[axis.index],
            axis.name,
            list(axis.ranks),
            number,
            operation,
            described(tensors) if must_match is None else must_match,
            details,
            fault,
            list(sent),
            list(received),
            self._number,
            group_identity(axis.group),
            _devices(tensors),
        )
        keys = [f"{prefix}/{number}/{rank}" for rank in axis.ranks]
        calls = self._met(mine, f"{prefix}/{number}", keys[axis.index], keys)
        # All came to this call, so that all have read the one before.
        if number > 1:
            self._store.delete_key(f"{prefix}/{number - 1}/{mine.rank}")
            if axis.index == 0:
                self._store.delete_key(f"{prefix}/{number - 1}")
        self._conclude(f"{prefix}/{number}", _difference(calls))

    def _compare_pairs(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> None:
        """Compare what each pair of ranks sends and expects; others may take no part."""
        me, fault = axis.index, own_fault(axis, sends, receives)
        prefix = self._prefix(axis)
        posted, awaited = [], []
        for peers, kind, other in ((sends, "send", "receive"), (receives, "receive", "send")):
            for peer, parts in peers.items():
                if peer == me:
                    continue
                ends = (me, peer) if kind == "send" else (peer, me)
                pair = f"{prefix}/{ends[0]}to{ends[1]}"
                number = self._next(f"{pair}/{kind}")
                tensors = as_tensors(parts)
                call = _Call(
                    axis.ranks[me],
                    axis.name,
                    list(axis.ranks),
                    number,
                    f"send from rank {axis.ranks[ends[0]]} to rank {axis.ranks[ends[1]]} of",
                    described(tensors),
                    f"({kind})",
                    fault,
                    instance=self._number,
                    group=group_identity(axis.group),
                    devices=_devices(tensors),
                )
                posted.append((f"{pair}/{number}/{kind}", call))
                awaited.append((f"{pair}/{number}", f"{pair}/{number}/{other}"))
        for key, call in posted:
            self._store.set(key, call.written())
        for (_, call), (outcome, key) in zip(posted, awaited, strict=True):
            met = sorted([*self._met(call, outcome, None, [key]), call])
            self._store.delete_key(key)
            self._conclude(outcome, _difference(met))
            if call.rank == met[0].rank:
                self._store.delete_key(f"{outcome.rpartition('/')[0]}/{call.number - 1}")

    def _met(self, mine: _Call, outcome: str, key: str | None, keys: list[str]) -> list[_Call]:
        """Return what all ranks put under ``keys``; raise where some do not before the deadline."""
        written = mine.written()
        self._store.set(f"{_ROOT}/last/{mine.rank}", written)
        if key is not None:
            self._store.set(key, written)
        try:
            self._store.wait(keys, self._deadline)
        except RuntimeError as error:
            if not is_store_timeout(error):
                raise
            # Where a peer has gone on all the same, all have come meanwhile.
            self._conclude(outcome, self._late(mine))
        return [_Call.read(text) for text in self._store.multi_get(keys)]

    def _late(self, mine: _Call) -> str:
        """Say what each rank of this store did last."""
        known = {int(rank) for rank in self._store.get(_MEMBERS).split()}
        told = dict.fromkeys(sorted({*mine.ranks} - known), "no call")
        ranks = [rank for rank in sorted(known) if self._store.check([f"{_ROOT}/last/{rank}"])]
        told |= dict.fromkeys(known.difference(ranks), "no call")
        last = self._store.multi_get([f"{_ROOT}/last/{rank}" for rank in ranks])
        told |= {rank: str(_Call.read(text)) for rank, text in zip(ranks, last, strict=True)}
        alike: dict[str, list[int]] = {}
        for rank in sorted(told):
            alike.setdefault(told[rank], []).append(rank)
        calls = "; ".join(f"ranks {ranks}: {call}" for call, ranks in alike.items())
        return (
            f"ranks have waited {self._deadline.total_seconds()} s for calls that others do not "
            f"make; the last calls: {calls}; all ranks of an axis must make the same calls over "
            "it, in the same order, with objects of one number: all make theirs in the same order"
        )

    def _conclude(self, key: str, failure: str) -> None:
        """Say how a call ended for this rank, and raise what a rank said before it, if anything.

        The first says it for all: none goes on into a call that a peer has given up.
        """
        first = self._store.compare_set(key, "", failure or _GO).decode()
        if first != _GO:
            self._failure = first
            raise RankMismatchError(first)

    def _prefix(self, axis: Axis) -> str:
        """Return where calls on the axis's ranks are kept: of this object, not of another."""
        if self._failure:
            raise RankMismatchError(
                "an earlier call ended this object, which no longer knows what each rank has done; "
                f"make a new one on all ranks; that call: {self._failure}"
            )
        prefix = self._prefixes.get(axis.ranks)
        if prefix is None:
            rank = axis.ranks[axis.index]
            if not self._store.check([f"{_ROOT}/last/{rank}"]):
                self._store.append(_MEMBERS, f"{rank} ")
            # Long lists of ranks would make long keys.
            name = sha256(repr(axis.ranks).encode()).hexdigest()[:16]
            prefix = self._prefixes[axis.ranks] = f"{_ROOT}/{self._number}/{name}"
        return prefix

    def _next(self, counted: str) -> int:
        self._numbers[counted] = self._numbers.get(counted, 0) + 1
        return self._numbers[counted]

    @property
    def _store(self) -> Any:
        return default_store() if self._given is None else self._given


def _difference(calls: Sequence[_Call]) -> str:
    """Say why these calls do not go together, in the same words on all ranks; empty if they do."""
    for call in calls:
        if call.fault:
            return f"rank {call.rank} cannot take part in {call}: {call.fault}"
    first = calls[0]
    for call in calls[1:]:
        mine, its = ((c.axis, c.operation, c.must_match) for c in (first, call))
        apart = (first.group, first.devices) != (call.group, call.devices)
        if mine != its or apart:
            one, other = (c.in_full() if apart else str(c) for c in (first, call))
            return (
                f"ranks make different calls: rank {first.rank} calls {one}, rank {call.rank} "
                f"calls {other}; all ranks of an axis must make the same calls over it, in the "
                "same order, with the same shapes and dtypes"
            )
    for source, call in enumerate(calls):
        for target, rows in enumerate(call.sent):
            if calls[target].received[source] != rows:
                return (
                    f"rank {call.rank} sends {rows} rows to rank {calls[target].rank}, which "
                    f"expects {calls[target].received[source]}: {call}; {calls[target]}"
                )
    return ""


def _misfit(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None, numel: Callable[[int], int]
) -> str:
    """Say which output that a rank gave cannot take what comes; empty if all can."""
    if outputs is None:
        return ""
    if len(outputs) != len(inputs):
        return f"it gives {len(outputs)} outputs for {len(inputs)} inputs"
    for tensor, output in zip(inputs, outputs, strict=True):
        if output.dtype != tensor.dtype or output.numel() != numel(tensor.numel()):
            return (
                f"its output is {described([output])}, which must have {numel(tensor.numel())} "
                f"elements of {dtype_name(tensor)}"
            )
    return ""


def _devices(tensors: Sequence[Tensor]) -> str:
    kinds = [tensor.device.type for tensor in tensors]
    return ", ".join(kinds if len(set(kinds)) > 1 else kinds[:1])


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return evenly spaced ranks as few arguments of ``range``."""
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, stop, step = found[-1] if found else (rank, rank, 1)
        count = len(range(first, stop, step))
        if count == 1 and rank != first:
            step = rank - first
        if found and count and rank == first + count * step:
            found[-1] = (first, rank + (1 if step > 0 else -1), step)
        else:
            found.append((rank, rank + 1, 1))
    return found


def checking(collectives: Collectives) -> CheckedCollectives | None:
    """Return the `CheckedCollectives` that calls go through first, also behind recording ones."""
    while isinstance(collectives, RecordingCollectives):
        collectives = collectives.inner
    return collectives if isinstance(collectives, CheckedCollectives) else None
