"""Compare what the ranks of an axis are about to do, through a store, before they do it."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor

from ._interface import Axis, Collectives, Parts, RankMismatchError, ReduceOp, Work, as_tensors
from ._torch import TorchCollectives, default_store, is_store_timeout

_ROOT = "hp_dtensor/checked"
_MEMBERS = f"{_ROOT}/ranks"


class _Call(NamedTuple):
    """The fingerprint of one call on one rank.

    ``must_match`` is equal on all ranks of a legal call, ``details`` says the rest for a reader.
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

    def __str__(self) -> str:
        text = " ".join(filter(None, (self.operation, self.must_match, self.details)))
        return f"{text} over axis {self.axis!r}, ranks {self.ranks}, call {self.number}"


class CheckedCollectives:
    """`Collectives` that raise one error on all ranks where some make another call.

    Wraps any `Collectives`, to find out which rank, axis and operation a hang or a wrong result
    comes from. Before each call a rank puts a fingerprint (operation, axis, shapes, dtypes, splits)
    into a store, under its rank and the number of the call on these ranks, and waits for those of
    its peers. Where they differ, all of these ranks raise the same `RankMismatchError`. Where a
    peer does not come before the ``deadline``, a rank reads the last fingerprint of each rank
    that it waits for, of those that these wait for, and so on, and says them in its error.

    A call costs some round trips to the store, and the ranks of an axis wait for each other on the
    host in each call, so that nothing overlaps: for debugging, not for speed. After an error
    the ranks are out of step, and the object raises it again in each call; make a new one on all
    ranks to go on.

    Args:
        inner: What carries the calls out; `TorchCollectives` if None.
        store: A store that all ranks share; that of the default process group if None.
        deadline: Seconds to wait for the peers of a call.

    Example:
        >>> redistribute(x, [Replicate()], collectives=CheckedCollectives(deadline=60))
    """

    def __init__(
        self, inner: Collectives | None = None, *, store: Any = None, deadline: float = 300.0
    ) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline={deadline} is no time to wait; give seconds above 0")
        self._inner: Collectives = TorchCollectives() if inner is None else inner
        self._given = store
        self._deadline = timedelta(seconds=deadline)
        self._prefixes: dict[tuple[int, ...], str] = {}
        self._numbers: dict[str, int] = {}
        self._failure = ""

    def check(self, axis: Axis, operation: str, details: str = "", *, fault: str = "") -> None:
        """Compare ``operation`` and ``details`` over the ranks of ``axis``.

        For code that must do the same on all ranks, once or each time. All ranks of the axis call.

        Args:
            axis: Whose ranks must agree; with one rank only ``fault`` is looked at.
            operation: What they are about to do, in a word or two.
            details: What must be the same on all of them.
            fault: What is wrong on this rank alone, such as a tensor of another shape than planned.

        Raises:
            RankMismatchError: Ranks differ, one has a fault, or one did not come before the
                deadline. The same on all ranks that called, before anything is communicated over
                the group.

        Example:
            >>> CheckedCollectives().check(Axis.of(mesh, "ep"), "place experts", repr(placement))
        """
        self._compare(axis, operation, details, fault=fault)

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Compare, then pass on; see `Collectives.all_gather`."""
        self._compare(axis, "all_gather", _described(inputs))
        return self._inner.all_gather(axis, inputs, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Compare, then pass on; see `Collectives.reduce_scatter`."""
        self._compare(axis, f"reduce_scatter {op}", _described(inputs))
        return self._inner.reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Compare, then pass on; see `Collectives.all_reduce`."""
        self._compare(axis, f"all_reduce {op}", _described(tensors))
        return self._inner.all_reduce(axis, tensors, op)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Compare, what ranks send with what their peers expect too; see `Collectives`."""
        equal = [input.shape[0] // axis.size] * axis.size
        sent = equal if send_splits is None else list(send_splits)
        received = equal if receive_splits is None else list(receive_splits)
        row = f"{_dtype(input)} rows {list(input.shape[1:])}"
        details = f"sending {sent} and expecting {received}"
        self._compare(axis, "all_to_all", row, details, sent=sent, received=received)
        return self._inner.all_to_all(axis, input, send_splits, receive_splits, output)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Compare with each peer what is sent and expected; see `Collectives.send_recv`."""
        self._compare_pairs(axis, sends, receives)
        return self._inner.send_recv(axis, sends, receives)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Compare, then pass on; see `Collectives.broadcast`."""
        self._compare(axis, f"broadcast from {source}", _described(tensors))
        return self._inner.broadcast(axis, tensors, source)

    def _compare(
        self,
        axis: Axis,
        operation: str,
        must_match: str,
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
            must_match,
            details,
            fault,
            list(sent),
            list(received),
        )
        keys = [f"{prefix}/{number}/{rank}" for rank in axis.ranks]
        calls = self._met(axis, mine, keys[axis.index], keys)
        # All came to this call, so that all have read the one before.
        if number > 1:
            self._store.delete_key(f"{prefix}/{number - 1}/{mine.rank}")
        self._raise(axis, _difference(calls))

    def _compare_pairs(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> None:
        """Compare what each pair of ranks sends and expects; others may take no part."""
        me = axis.index
        prefix = self._prefix(axis)
        posted, awaited = [], []
        for peers, kind, other in ((sends, "send", "receive"), (receives, "receive", "send")):
            for peer, parts in peers.items():
                if peer == me:
                    continue
                ends = (me, peer) if kind == "send" else (peer, me)
                pair = f"{prefix}/{ends[0]}to{ends[1]}"
                number = self._next(f"{pair}/{kind}")
                call = _Call(
                    axis.ranks[me],
                    axis.name,
                    list(axis.ranks),
                    number,
                    f"send from rank {axis.ranks[ends[0]]} to rank {axis.ranks[ends[1]]} of",
                    _described(as_tensors(parts)),
                    f"({kind})",
                )
                posted.append((f"{pair}/{number}/{kind}", call))
                awaited.append(f"{pair}/{number}/{other}")
        for key, call in posted:
            self._store.set(key, json.dumps(call))
        for (_, call), key in zip(posted, awaited, strict=True):
            met = sorted([*self._met(axis, call, None, [key]), call])
            self._store.delete_key(key)
            self._raise(axis, _difference(met))

    def _met(self, axis: Axis, mine: _Call, key: str | None, keys: list[str]) -> list[_Call]:
        """Return what all ranks put under ``keys``; raise where some do not before the deadline."""
        written = json.dumps(mine)
        self._store.set(f"{_ROOT}/last/{mine.rank}", written)
        if key is not None:
            self._store.set(key, written)
        try:
            self._store.wait(keys, self._deadline)
        except RuntimeError as error:
            if not is_store_timeout(error):
                raise
            self._raise(axis, self._late(mine))
        return [_Call(*json.loads(text)) for text in self._store.multi_get(keys)]

    def _late(self, mine: _Call) -> str:
        """Say what each rank of this store did last."""
        known = {int(rank) for rank in self._store.get(_MEMBERS).split()}
        told = dict.fromkeys(sorted({*mine.ranks} - known), "no call")
        ranks = sorted(known)
        last = self._store.multi_get([f"{_ROOT}/last/{rank}" for rank in ranks])
        told |= {
            rank: str(_Call(*json.loads(text))) for rank, text in zip(ranks, last, strict=True)
        }
        alike: dict[str, list[int]] = {}
        for rank in sorted(told):
            alike.setdefault(told[rank], []).append(rank)
        calls = "; ".join(f"ranks {ranks}: {call}" for call, ranks in alike.items())
        return (
            f"ranks have waited {self._deadline.total_seconds()} s for calls that others do not "
            f"make; the last calls: {calls}; all ranks of an axis must make the same calls over "
            "it, in the same order"
        )

    def _raise(self, axis: Axis, failure: str) -> None:
        """Raise `RankMismatchError` if there is a failure, now and in each later call."""
        if not failure:
            return
        self._failure = failure
        # Objects that come join the next number, also of ranks that did not come to this one.
        number = self._prefixes[axis.ranks].rpartition("/")[2]
        self._store.compare_set(f"{_base(axis)}/newest", number, str(int(number) + 1))
        raise RankMismatchError(failure)

    def _prefix(self, axis: Axis) -> str:
        """Return where calls on the axis's ranks are kept: of this object, not of earlier ones.

        Objects are numbered for each set of ranks. A rank joins the newest number, or begins one
        if it was in the newest with another object.
        """
        if self._failure:
            raise RankMismatchError(self._failure)
        prefix = self._prefixes.get(axis.ranks)
        if prefix is None:
            store, base = self._store, _base(axis)
            if not self._prefixes:
                store.append(_MEMBERS, f"{axis.ranks[axis.index]} ")
            newest, used = f"{base}/newest", f"{base}/used/{axis.index}"
            begun = store.get(newest).decode() if store.check([newest]) else ""
            number = int(begun or 0)
            if number == (int(store.get(used)) if store.check([used]) else 0):
                number = int(store.compare_set(newest, begun, str(number + 1)))
            store.set(used, str(number))
            prefix = self._prefixes[axis.ranks] = f"{base}/{number}"
        return prefix

    def _next(self, counted: str) -> int:
        self._numbers[counted] = self._numbers.get(counted, 0) + 1
        return self._numbers[counted]

    @property
    def _store(self) -> Any:
        return default_store() if self._given is None else self._given


def _base(axis: Axis) -> str:
    # Long lists of ranks would make long keys.
    return f"{_ROOT}/{sha256(repr(axis.ranks).encode()).hexdigest()[:16]}"


def _difference(calls: Sequence[_Call]) -> str:
    """Say why these calls do not go together, in the same words on all ranks; empty if they do."""
    for call in calls:
        if call.fault:
            return f"rank {call.rank} cannot take part in {call}: {call.fault}"
    first = calls[0]
    for call in calls[1:]:
        if call[4:6] != first[4:6] or call.axis != first.axis:
            return (
                f"ranks make different calls: rank {first.rank} calls {first}, rank {call.rank} "
                f"calls {call}; all ranks of an axis must make the same calls over it, in the "
                "same order, with the same shapes and dtypes"
            )
    for source, call in enumerate(calls):
        for target, count in enumerate(call.sent):
            if calls[target].received[source] != count:
                return (
                    f"rank {call.rank} sends {count} rows to rank {calls[target].rank}, which "
                    f"expects {calls[target].received[source]}: {call}; {calls[target]}"
                )
    return ""


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{_dtype(tensor)} {list(tensor.shape)}" for tensor in tensors)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
