"""`CheckedCollectives`: compares the calls of all ranks of an axis before each call runs."""

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import default_store, group_identity
from ._interface import (
    Axis,
    Collectives,
    RankMismatchError,
    as_tensors,
    described,
    dtype_name,
    own_fault,
)
from ._wrapper import CollectiveCall, CollectivesWrapper

_ROOT = "hp_dtensor/checked"
_MEMBERS = f"{_ROOT}/ranks"
_GO = "go"  # outcome that is published if all ranks make the same call
# Numbers of the `CheckedCollectives` objects of this process. All ranks have to create these
# objects in the same order, so that corresponding objects have the same number.
_numbers = count(1)


class _Fingerprint(NamedTuple):
    """Description of one call on one rank. Each rank writes its description to the store as JSON.

    The attributes ``axis``, ``operation``, ``must_match``, ``group`` and ``devices`` have to be
    equal on all ranks of the axis. For a point to point message, they have to be equal on the
    sender and the receiver.

    Attributes:
        rank: Global rank of the process that makes the call.
        axis: Name of the axis.
        ranks: Global ranks of the axis.
        operation: Name of the operation with its reduction or source, such as ``"all_reduce sum"``.
        must_match: Other text that has to be equal, such as dtypes and shapes.
        group: Result of `group_identity` for the process group.
        devices: Device types of the tensors, such as ``"cuda"``.
        instance: Number of the `CheckedCollectives` object, from 1. It is 0 if the object was
            created with ``store=``.
        details: Text for the error message, which may differ between ranks.
        fault: Description of a problem on this rank. Empty if there is no problem.
        sent: Number of rows that an all-to-all sends to each rank. Empty for other operations.
        received: Number of rows that an all-to-all expects from each rank. Empty for other
            operations.
        number: Number of the call, from 1. Calls are counted for each axis. Point to point messages
            are counted for each pair of sender and receiver.
    """

    rank: int
    axis: str
    ranks: Sequence[int]
    operation: str
    must_match: str
    group: str
    devices: str
    instance: int
    details: str = ""
    fault: str = ""
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    number: int = 0

    @staticmethod
    def read(text: Any) -> "_Fingerprint":
        """Return the fingerprint from a JSON text, the result of `written`."""
        call = _Fingerprint(*json.loads(text))
        runs: Any = call.ranks
        return call._replace(ranks=[rank for run in runs for rank in range(*run)])

    def written(self) -> str:
        """Return the fingerprint as JSON text. The ranks are written as ranges; see `_runs`."""
        runs: Any = _runs(self.ranks)
        return json.dumps(self._replace(ranks=runs))

    def in_full(self) -> str:
        """Return a text like ``str(self)`` that also names the process group and the devices."""
        group = f" in process group {self.group} of these ranks" if self.group else ""
        return f"{self}{group} on {self.devices or 'no device'}"

    def __str__(self) -> str:
        text = " ".join(filter(None, (self.operation, self.must_match, self.details)))
        made = f" of CheckedCollectives object {self.instance}" if self.instance else ""
        return f"{text} over axis {self.axis!r}, ranks {self.ranks}, call {self.number}{made}"


class CheckedCollectives(CollectivesWrapper):
    """`Collectives` that raise the same error on all ranks if the ranks make different calls.

    Use this class to find the rank, axis and operation behind a hang or a wrong result.

    1. Before each call, every rank writes a fingerprint of the call to a store. The fingerprint has
       the operation, axis, process group, shapes, dtypes, devices and splits.
    2. The rank waits for the fingerprints of the other ranks of the axis.
    3. If the fingerprints differ, all ranks of the axis raise the same `RankMismatchError`.

    If a rank writes no fingerprint before the deadline, the waiting ranks raise a
    `RankMismatchError` that lists the last call of every rank.

    Args:
        inner: `Collectives` that communicate. Defaults to `TorchCollectives`.
        store: A ``torch.distributed.Store`` that all ranks share and no other code uses. Defaults
            to the store of the default process group.
        deadline: Seconds to wait for the other ranks in each call. Defaults to 300.

    Raises:
        ValueError: ``deadline`` is not a finite number above 0.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
        >>> redistribute(x, collectives=CheckedCollectives(deadline=60)).shape
        torch.Size([8])

    Note:
        - Each call takes several round trips to the store, and the ranks wait for each other on the
          host. Communication does not overlap with other host work, so use this class for debugging
          only.
        - After a `RankMismatchError`, every later call of the same object on an axis of several
          ranks raises `RankMismatchError` with the first message. To continue, create a new
          `CheckedCollectives` on all ranks.
        - All ranks have to create their `CheckedCollectives` objects in the same order.
        - Point to point messages are compared only between sender and receiver.
        - If several wrappers are used, nest them in this order, from the outermost to the
          innermost: `AutogradCollectives`, `RecordingCollectives`, `CheckedCollectives`, other
          wrappers, `TorchCollectives`. In this order, `RecordingCollectives` also counts calls that
          `CheckedCollectives` refuses. With ``CheckedCollectives(RecordingCollectives())``, refused
          calls are not counted.
    """

    def __init__(
        self, inner: Collectives | None = None, *, store: Any = None, deadline: float = 300.0
    ) -> None:
        given: object = deadline
        if not isinstance(given, int | float) or not 0 < given < math.inf:
            raise ValueError(f"deadline={deadline!r} is no time to wait; give seconds above 0")
        super().__init__(inner)
        self._given_store = store
        self._instance = next(_numbers) if store is None else 0
        self._deadline = timedelta(seconds=deadline)
        # From the ranks of an axis to the prefix of its keys in the store.
        self._prefixes: dict[tuple[int, ...], str] = {}
        # Number of calls so far. Keys: prefix of an axis, or of a sender and receiver.
        self._counts: dict[str, int] = {}
        self._failure = ""

    def check(self, axis: Axis, operation: str, details: str = "", *, fault: str = "") -> None:
        """Check that all ranks of an axis are about to perform the same operation.

        Use this method in your own code, before an operation that has to be the same on all ranks.
        All ranks of the axis have to call this method.

        Args:
            axis: Ranks that are compared. On an axis of one rank, only ``fault`` is checked.
            operation: Name of the operation. It has to be the same on all ranks.
            details: Text that has to be the same on all ranks, such as sizes.
            fault: Description of a problem on this rank, such as a tensor with a wrong shape. Empty
                if there is no problem.

        Raises:
            RankMismatchError: ``operation`` or ``details`` differs between ranks, a rank has passed
                a ``fault``, or a rank did not call this method before the deadline. Raised on all
                ranks that called it.

        Examples:
            On 4 ranks:

            >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
            >>> CheckedCollectives().check(axis, "place experts", details="0 1 2 3")
        """
        call = self._fingerprint(axis, operation, ())
        self._compare(axis, call._replace(must_match=details, fault=fault))

    def _before(self, call: CollectiveCall) -> None:
        axis, collective = call.axis, call.collective
        if collective == "send_recv":
            self._compare_pairs(call)
        elif collective == "all_to_all":
            self._compare(axis, self._exchange(call))
        else:
            n, gathers = axis.size, collective == "all_gather"
            sizes = [x.numel() * n if gathers else x.numel() // n for x in call.inputs]
            mine = self._fingerprint(axis, call.operation, call.inputs)
            self._compare(axis, mine._replace(fault=_output_fault(call, sizes)))

    def _exchange(self, call: CollectiveCall) -> _Fingerprint:
        """Return the fingerprint of an all-to-all.

        Ranks may send and receive different numbers of rows, so ``must_match`` has only the dtype
        and the shape of a row. The numbers of rows are in ``sent`` and ``received``, which
        `_difference` compares for each pair of ranks.
        """
        axis, (x,) = call.axis, call.inputs
        equal = [x.shape[0] // axis.size] * axis.size
        sent = equal if call.send_splits is None else list(call.send_splits)
        received = equal if call.receive_splits is None else list(call.receive_splits)
        if len(sent) != axis.size or len(received) != axis.size:
            fault = f"splits must have {axis.size} lengths, one for each rank of the axis"
        elif sum(sent) != x.shape[0]:
            fault = f"it would send {sum(sent)} rows in {axis.size} blocks and has {x.shape[0]}"
        else:
            fault = _output_fault(call, [sum(received) * math.prod(x.shape[1:])])
        return self._fingerprint(axis, "all_to_all", [x])._replace(
            must_match=f"{dtype_name(x)} rows {list(x.shape[1:])}",
            details=f"sending {sent} and expecting {received}",
            fault=fault,
            sent=sent,
            received=received,
        )

    def _fingerprint(self, axis: Axis, operation: str, tensors: Sequence[Tensor]) -> _Fingerprint:
        devices = [tensor.device.type for tensor in tensors]
        return _Fingerprint(
            rank=axis.ranks[axis.index],
            axis=axis.name,
            ranks=list(axis.ranks),
            operation=operation,
            must_match=described(tensors),
            group=group_identity(axis.group),
            devices=", ".join(devices if len(set(devices)) > 1 else devices[:1]),
            instance=self._instance,
        )

    def _compare(self, axis: Axis, call: _Fingerprint) -> None:
        """Compare the fingerprints of all ranks of the axis.

        If the fingerprints do not match, all ranks raise the same `RankMismatchError`. On an axis
        of one rank, only ``call.fault`` is checked.
        """
        if axis.size == 1 and call.fault:
            raise RankMismatchError(f"rank {call.rank} cannot do {call.operation}: {call.fault}")
        if axis.size == 1:
            return
        prefix = self._prefix(axis)
        call = call._replace(number=self._next(prefix))
        outcome, previous = f"{prefix}/{call.number}", f"{prefix}/{call.number - 1}"
        keys = [f"{outcome}/{rank}" for rank in axis.ranks]
        self._store.set(keys[axis.index], call.written())
        calls = self._wait_for_peers(call, outcome, keys)
        # All ranks have reached this call, so all of them have read the keys of the previous call.
        self._store.delete_key(f"{previous}/{call.rank}")
        if axis.index == 0:
            self._store.delete_key(previous)
        self._publish_outcome(outcome, _difference(calls))

    def _compare_pairs(self, call: CollectiveCall) -> None:
        """Compare each message of a ``send_recv`` between its sender and its receiver.

        Ranks that neither send nor receive do not take part. If the two fingerprints differ, for
        example in the shapes of the tensors, sender and receiver raise `RankMismatchError`.
        """
        axis = call.axis
        me, fault = axis.index, own_fault(axis, call.sends, call.receives)
        prefix = self._prefix(axis)
        posted: list[tuple[str, str, _Fingerprint]] = []
        for kind, messages in (("send", call.sends), ("receive", call.receives)):
            for peer, parts in messages.items():
                if peer == me:
                    continue  # `own_fault` has compared these messages
                source, target = (me, peer) if kind == "send" else (peer, me)
                pair = f"{prefix}/{source}to{target}"
                operation = f"send from rank {axis.ranks[source]} to rank {axis.ranks[target]} of"
                mine = self._fingerprint(axis, operation, as_tensors(parts))
                number = self._next(f"{pair}/{kind}")
                mine = mine._replace(details=f"({kind})", fault=fault, number=number)
                self._store.set(f"{pair}/{number}/{kind}", mine.written())
                posted.append((pair, kind, mine))
        for pair, kind, mine in posted:
            outcome = f"{pair}/{mine.number}"
            key = f"{outcome}/{'receive' if kind == 'send' else 'send'}"
            both = sorted([*self._wait_for_peers(mine, outcome, [key]), mine])
            self._store.delete_key(key)
            self._publish_outcome(outcome, _difference(both))
            if mine.rank == both[0].rank:
                self._store.delete_key(f"{pair}/{mine.number - 1}")

    def _wait_for_peers(
        self, mine: _Fingerprint, outcome: str, keys: list[str]
    ) -> list[_Fingerprint]:
        """Wait until the store has all ``keys``, and return the fingerprints under these keys.

        Args:
            mine: Fingerprint of this rank, for the error message of other ranks.
            outcome: Key under which the outcome of the call is published.
            keys: Keys under which the ranks write their fingerprints.

        Raises:
            RankMismatchError: A key was not written before the deadline.
        """
        self._store.set(f"{_ROOT}/last/{mine.rank}", mine.written())
        try:
            self._store.wait(keys, self._deadline)
        except RuntimeError as error:
            # TCP stores raise DistStoreError. Other stores raise RuntimeError with this text.
            if "timeout" not in str(error).lower():
                raise
            # This call returns only if a peer has already published that all ranks made the call.
            # All keys exist in that case.
            self._publish_outcome(outcome, self._timeout_message(mine))
        return [_Fingerprint.read(text) for text in self._store.multi_get(keys)]

    def _timeout_message(self, mine: _Fingerprint) -> str:
        """Return the error message for a missed deadline. It lists the last call of each rank."""
        members = {int(rank) for rank in self._store.get(_MEMBERS).split()}
        key = f"{_ROOT}/last/{{}}".format
        called = [rank for rank in sorted(members) if self._store.check([key(rank)])]
        last = dict.fromkeys(sorted({*mine.ranks} | members), "no call")
        texts = self._store.multi_get([key(rank) for rank in called])
        last |= {rank: str(_Fingerprint.read(x)) for rank, x in zip(called, texts, strict=True)}
        by_call: dict[str, list[int]] = {}
        for rank, text in last.items():
            by_call.setdefault(text, []).append(rank)
        calls = "; ".join(f"ranks {ranks}: {call}" for call, ranks in by_call.items())
        return (
            f"ranks have waited {self._deadline.total_seconds()} s for calls that others do not "
            f"make; the last calls: {calls}; all ranks of an axis must make the same calls over "
            "it, in the same order, with objects of one number: all make theirs in the same order"
        )

    def _publish_outcome(self, key: str, failure: str) -> None:
        """Publish the outcome of a call in the store, or use the outcome of a faster rank.

        The store keeps the first published outcome, and all ranks use it. So no rank runs a call
        that another rank has refused.

        Args:
            key: Key of the outcome in the store.
            failure: Error message, or an empty string if the call may run.

        Raises:
            RankMismatchError: The stored outcome is an error message.
        """
        first = self._store.compare_set(key, "", failure or _GO).decode()
        if first != _GO:
            self._failure = first
            raise RankMismatchError(first)

    def _prefix(self, axis: Axis) -> str:
        """Return the prefix of the store keys for this object's calls over the axis.

        The store has a list of all ranks that have made a call, for `_timeout_message`. This method
        adds this rank to the list if necessary. Raises `RankMismatchError` if an earlier call of
        this object has failed.
        """
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
            # A hash, because the keys would be long for many ranks.
            name = sha256(repr(axis.ranks).encode()).hexdigest()[:16]
            prefix = self._prefixes[axis.ranks] = f"{_ROOT}/{self._instance}/{name}"
        return prefix

    def _next(self, key: str) -> int:
        """Increment and return the call counter of ``key``. The first call has the number 1."""
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    @property
    def _store(self) -> Any:
        return default_store() if self._given_store is None else self._given_store


def _difference(calls: Sequence[_Fingerprint]) -> str:
    """Return an error message for the first difference between the calls of several ranks.

    ``calls`` are in the same order on all ranks, so the message is equal on all ranks. Returns an
    empty string if the calls match and no call has a fault.
    """
    for call in calls:
        if call.fault:
            return f"rank {call.rank} cannot take part in {call}: {call.fault}"
    first = calls[0]
    for call in calls[1:]:
        mine, its = ((c.axis, c.operation, c.must_match) for c in (first, call))
        group_differs = (first.group, first.devices) != (call.group, call.devices)
        if mine != its or group_differs:
            one, other = (c.in_full() if group_differs else str(c) for c in (first, call))
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


def _output_fault(call: CollectiveCall, sizes: Sequence[int]) -> str:
    """Return an error message if an output tensor of a call has a wrong size or dtype.

    Args:
        call: The call. If ``call.outputs`` is None, nothing is checked.
        sizes: Number of elements that each output must have. The dtype must be that of the input.

    Returns:
        The message, or an empty string if there is no error.
    """
    if call.outputs is None:
        return ""
    if len(call.outputs) != len(call.inputs):
        return f"it gives {len(call.outputs)} outputs for {len(call.inputs)} inputs"
    for x, output, size in zip(call.inputs, call.outputs, sizes, strict=True):
        if output.dtype != x.dtype or output.numel() != size:
            wanted = f"{size} elements of {dtype_name(x)}"
            return f"its output is {described([output])}, which must have {wanted}"
    return ""


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Convert ranks to a list of ``(start, stop, step)`` arguments of ``range``.

    Each evenly spaced run of ranks becomes one entry: ``[0, 2, 4, 5]`` becomes
    ``[(0, 5, 2), (5, 6, 1)]``.
    """
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
    """Return the outermost `CheckedCollectives` in a chain of nested wrappers.

    Returns None if neither ``collectives`` nor any object inside it is a `CheckedCollectives`.
    """
    if isinstance(collectives, CheckedCollectives):
        return collectives
    return checking(collectives.inner) if isinstance(collectives, CollectivesWrapper) else None
