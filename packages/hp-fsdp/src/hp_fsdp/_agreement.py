"""Checks that all ranks of a process group communicate for the same unit.

A mix-up is a collective in which ranks all-gather or reduce different units. The backend raises no
error, but the parameters or gradients are wrong. Three checks detect mix-ups:

- *Comparison*: ranks exchange a digest of 8 bytes before the first all-gather for forward, the
  first all-gather for backward and the first reduction of each unit. Ranks also exchange a digest
  before an unexpected collective, unless tags would detect a mix-up with the expected collective.
  Tags do not help if, for example, the sizes differ. On gloo the exchange is an all-to-all: if
  another rank runs an all-gather of other sizes, an all-to-all waits, and an all-gather would
  abort the process.
- *Tags* (`_tags`): each rank sends the number of its unit with every reduction. All-gathers have
  tags only in the exact layout, if parameters are packed or all-gathered in several slices. The
  result shows whether all ranks communicated for the same unit.
- *Reports*: if a collective fails because another rank did not join it, each rank writes a
  description of its collective to the store.
"""

import hashlib
import json
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hp_dtensor import (
    Axis,
    CheckedCollectives,
    Collectives,
    RecordingCollectives,
    TorchCollectives,
)
from hp_dtensor.torch_compat import backend_of, default_store, group_identity

from ._errors import DisagreementError
from ._streams import Begun, SideStream
from ._tags import FLAG_BITS, TAG_BITS, flags_agree, number_of, tag_flags, tag_width

# Seconds to wait for the reports of other ranks after a timeout, and after a lost connection.
REPORT_SECONDS = 10.0
LOST_SECONDS = 2.0
# A history knows what followed each sequence of CONTEXT collectives, for at most KEPT sequences.
CONTEXT = 8
KEPT = 2**12
# First number of the units that communicate over two or more process groups.
REPLICATED = 2 ** (FLAG_BITS - 1)
RULE = "all ranks must run the same units in the same order"
# Returns an error if the values of tags show that ranks communicated for different units.
# The second argument is a prefix of the error message.
TagCheck = Callable[[list[float], str], DisagreementError | None]


class TagLog:
    """Checks the tags of collectives on an accelerator without blocking the host.

    A tag is the unit number that a rank sends with a collective. Tags are copied to the CPU on a
    side stream at the end of a backward, or of a forward without backward. The copies are checked
    when a later forward begins.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._tags: list[tuple[Tensor, TagCheck]] = []
        self._sent: list[tuple[str, list[tuple[int, TagCheck]], Tensor, Begun]] = []

    def add(self, tags: Tensor, check: TagCheck) -> None:
        """Store a copy of the tags of a finished collective, on the device of the tags.

        `TagLog.check` later calls ``check`` with the values of the tags.
        """
        real = tags.real if tags.is_complex() else tags
        self._tags.append((real.to(torch.float32, copy=True).flatten(), check))

    def send(self, when: str) -> None:
        """Start a copy to the CPU, on the side stream, of the tags added since the last call.

        `check` reads this copy later. ``when`` is the prefix of the error message if ranks
        communicated for different units, for example ``"in the last step: "``.
        """
        if not self._tags:
            return
        flat = torch.cat([tags for tags, _ in self._tags])
        pieces = [(len(tags), check) for tags, check in self._tags]
        self._tags = []
        with self._stream.after_current():
            host = torch.empty(flat.shape, device="cpu", pin_memory=flat.device.type != "cpu")
            host.copy_(flat, non_blocking=True)
        self._stream.uses(flat)
        self._sent.append((when, pieces, host, self._stream.begun()))

    def check(self, wait: bool = False) -> None:
        """Raise `DisagreementError` if the copied tags of ranks belong to different units.

        Waits for every copy that `send` started, except the latest one, and reads it. The latest
        copy is read if it has arrived, or if ``wait`` is True. So one rank can raise one pass
        later than another rank, but not more.
        """
        while self._sent and (wait or len(self._sent) > 1 or self._sent[0][3].done):
            when, pieces, host, copied = self._sent.pop(0)
            copied.synchronize()
            values = iter(host.tolist())
            for count, check in pieces:
                error = check([next(values) for _ in range(count)], when)
                if error is not None:
                    self._sent = []
                    raise error

    def take(self, other: "TagLog") -> None:
        """Add the unread tags of another log to this log."""
        self._tags += other._tags
        self._sent += other._sent

    def drop(self) -> None:
        """Discard the tags that `send` has not copied. Called when a step is aborted."""
        self._tags = []


class Tag:
    """The unit number that a parameter group sends with its all-gathers and reductions.

    Args:
        orders: One `CollectiveOrder` for each process group over which the parameter group
            communicates. Empty if there is only one rank.
        number: Number of the unit in the first of ``orders``.
        rank: Global rank of this process.
    """

    def __init__(
        self, orders: "Sequence[CollectiveOrder]" = (), number: int = 0, rank: int = 0
    ) -> None:
        self.orders, self.number, self._rank = tuple(orders), number, rank
        self.flags = tag_flags(number % 2**FLAG_BITS)
        self.log: TagLog | None = None  # set by the schedule on accelerators

    def check_gathered(self, tags: Tensor, itemsize: int) -> DisagreementError | None:
        """Return an error if ranks all-gathered different units, else None.

        On accelerators, this method adds the tags to the `TagLog` and returns None. The log raises
        the error later.

        Args:
            tags: Tags of all ranks, of shape ``[ranks, digits]`` or ``[ranks]``.
            itemsize: Bytes per element of the all-gather. The encoding of the tags depends on this
                size; see `tag_digits`.
        """
        width = tag_width(itemsize)

        def check(values: list[float], when: str = "") -> DisagreementError | None:
            rows = [values[i : i + width] for i in range(0, len(values), width)]
            if all(row == rows[0] for row in rows) or not self.orders:
                return None
            return self.orders[0].mixed_up([number_of(row, itemsize) for row in rows], when)

        if self.log is None:
            return check(tags.flatten().tolist())
        self.log.add(tags, check)
        return None

    def check_reduced(self, flags: Tensor, on_host: bool) -> DisagreementError | None:
        """Return an error if ranks reduced different units, else None.

        On accelerators, if ``on_host`` is False, this method adds the flags to the `TagLog` and
        returns None. The log raises the error later.

        Args:
            flags: Tags after the reduction, of shape ``[TAG_FLAGS]``; see `tag_flags`.
            on_host: Whether the host can read ``flags`` without waiting for the device.
        """

        def check(values: list[float], when: str = "") -> DisagreementError | None:
            return None if flags_agree(values) or not self.orders else self._mixed_up(when)

        if self.log is None or on_host:
            return check(flags.tolist())
        self.log.add(flags, check)
        return None

    def _mixed_up(self, when: str) -> DisagreementError:
        """Return an error that lists which unit each rank reduced in one collective.

        The reduced flags do not show the units, so each rank writes its unit's name to the store.
        """
        own = f"reduced {self.orders[0].name(self.number)}"
        for order in self.orders:
            reports, where = order.exchange("reductions", self._rank, own, REPORT_SECONDS), order
            if len(reports) > 1:
                break
        for order in self.orders:
            order.forget()
        return where.conclude(
            f"{when}{listed(reports)}, in one collective over {where.axis_name!r}; these gradients "
            f"are wrong; {RULE}"
        )

    def report(self, error: Exception, doing: str, axis: Axis | None = None) -> None:
        """Raise `DisagreementError` if ``error`` means that ranks were in different collectives.

        Otherwise, only adds notes to ``error``; see `CollectiveOrder.report`.

        Args:
            error: The exception of the collective.
            doing: Description of this rank's collective, such as ``"gather {}"``. The name of the
                unit replaces ``{}``.
            axis: Axis of the collective. Defaults to the first axis of the unit.
        """
        if self.orders:
            first = self.orders[0]
            over = first if axis is None else order_of(axis) or first
            over.report(error, self._rank, doing.format(first.name(self.number)))


class Collective:
    """A collective that a unit runs in each step, for example its all-gather for forward.

    Attributes:
        signature: Sizes and dtypes, or None if they are unknown. If two ranks start different
            collectives with equal signatures, the backend runs them as one collective.
        tagged: Whether the result has tags, which show if ranks communicated for different units.
        compared: Whether ranks have compared this collective; see `compare`.
    """

    __slots__ = ("compared", "signature", "tagged")

    def __init__(self, signature: tuple[object, ...] | None = None, tagged: bool = False) -> None:
        self.signature, self.tagged, self.compared = signature, tagged, False

    def is_like(self, other: "Collective | None") -> bool:
        """Return whether tags would show that some ranks run ``other`` and some this collective.

        If True, ranks need no comparison before they start one of the two collectives.
        """
        if other is None or self.signature is None or self.signature != other.signature:
            return False
        return self.tagged and other.tagged and self.compared


class History:
    """All-gathers or reductions over one process group, in the order in which they ran.

    A training program repeats a sequence of collectives, usually one training step. So the history
    expects the collective that followed the same `CONTEXT` collectives the last time. If these have
    not run in this order before, it expects the collective that followed the last one the last
    time, or else the first collective of all. In a correct program, all ranks have equal histories
    and expect the same collective.

    Attributes:
        count: Number of collectives so far.
        expected: The collective that is expected next. None before the first collective, and while
            `unsettled`.
        unsettled: Weak reference to the unit of the last collective if this collective was
            unexpected and ranks did not compare it; usually None. The histories of ranks may then
            differ, so no collective is expected until the tags of this unit are read.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all collectives."""
        self.count = 0
        self.expected: Collective | None = None
        # Weak, because a history lives as long as its process group.
        self.unsettled: weakref.ref[NumberedUnit] | None = None
        self._first: Collective | None = None
        self._last: Collective | None = None
        self._context: tuple[Collective | None, ...] = (None,) * CONTEXT
        self._after_context: dict[tuple[Collective | None, ...], Collective] = {}
        self._after: dict[Collective | None, Collective] = {}

    @property
    def awaits_tags(self) -> bool:
        """Return whether an all-gather of the unit in `unsettled` is in flight.

        The tags of the unit can be read when the all-gather has finished.
        """
        unit = None if self.unsettled is None else self.unsettled()
        return unit is not None and unit.gathering

    def needs_comparison(self, collective: Collective) -> bool:
        """Return whether ranks must compare a collective before they start it.

        Ranks need no comparison in two cases:

        - ``collective`` is `expected`.
        - ``collective`` is not `expected`, but its result has tags. If other ranks start `expected`
          instead, the tags show it; see `Collective.is_like`.
        """
        if self.unsettled is not None:
            return True
        return collective is not self.expected and not collective.is_like(self.expected)

    def add(
        self, collective: Collective, unsettled: "weakref.ref[NumberedUnit] | None" = None
    ) -> None:
        """Record a collective.

        Args:
            collective: The collective that starts now.
            unsettled: Weak reference to the unit of ``collective`` if the collective is unexpected
                and ranks did not compare it, else None; see the attribute `unsettled`.
        """
        if len(self._after_context) >= KEPT:  # units that are gone must not stay in memory
            self._after_context, self._after, self._first = {}, {}, None
        self._after_context[self._context] = self._after[self._last] = collective
        self._context = (*self._context[1:], collective)
        self._last, self._first = collective, self._first or collective
        self.count += 1
        self.unsettled = unsettled
        self.expected = None if unsettled is not None else self._following()

    def _following(self) -> Collective | None:
        known = self._after_context.get(self._context) or self._after.get(self._last)
        return known or self._first

    def settle(self) -> None:
        """Set `unsettled` to None. Called after the tags of the unit in `unsettled` were read."""
        self.unsettled, self.expected = None, self._following()


class NumberedUnit(Protocol):
    """The methods of `Unit` that `CollectiveOrder` uses."""

    def __str__(self) -> str:
        """Return a name for error messages that is the same on all ranks."""
        ...

    @property
    def gathering(self) -> bool:
        """Return whether an all-gather of the unit is in flight."""
        ...

    def forget_comparisons(self) -> None:
        """Forget which collectives were compared, so that ranks compare them again."""
        ...


class CollectiveOrder:
    """The units that communicate over one process group, and the order of their collectives.

    Units are numbered in the order of their `fully_shard` calls.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup) -> None:
        self.gathers, self.reductions = History(), History()
        self.axis_name = axis.name
        self._ranks, self._prefix = axis.ranks, f"hp_fsdp/{group_identity(group)}/{axis.ranks}"
        self._made: Counter[tuple[CollectiveOrder, ...]] = Counter()
        self.resets = 0  # number of `FSDPModule.reset` calls on this rank
        self._mix_ups = 0  # number of mix-ups for which this rank has an error
        self._units: WeakValueDictionary[int, NumberedUnit] = WeakValueDictionary()

    def add(self, unit: NumberedUnit, others: "Sequence[CollectiveOrder]") -> int:
        """Add a unit and return its number.

        Units are numbered separately for each set of process groups. So the number of a unit is the
        same on all replicas, even if a replica shards other models over its own groups.

        Args:
            unit: The new unit.
            others: Orders of the other process groups over which the unit communicates.
        """
        number = self._made[tuple(others)] + (REPLICATED if others else 0)
        self._made[tuple(others)] += 1
        self._units[number] = unit
        return number

    def name(self, number: int) -> str:
        """Return the name of the unit with this number, such as ``"layers.0"``.

        Numbers are compared modulo ``2**TAG_BITS``. If there is no unit 7, the name is
        ``"unit 7"``.
        """
        found = [str(u) for n, u in self._units.items() if (n - number) % 2**TAG_BITS == 0]
        return found[-1] if found else f"unit {number}"

    def forget(self) -> None:
        """Forget the order and all comparisons, after ranks have run different collectives."""
        self.gathers.reset()
        self.reductions.reset()
        for unit in list(self._units.values()):
            unit.forget_comparisons()

    def mixed_up(self, numbers: Sequence[int], when: str = "") -> DisagreementError:
        """Return an error for an all-gather in which ranks communicated for different units.

        Args:
            numbers: Number of the unit for which each rank communicated, in the order of the axis.
            when: Prefix of the error message.
        """
        found: dict[str, list[int]] = {}
        for rank, number in zip(self._ranks, numbers, strict=True):
            found.setdefault(f"gathered {self.name(number)}", []).append(rank)
        self.forget()
        return self.conclude(
            f"{when}{listed(found)}, in one collective over {self.axis_name!r}; these parameters "
            f"are wrong, and all that are gathered later; {RULE}"
        )

    def conclude(self, text: str) -> DisagreementError:
        """Return a `DisagreementError` with the same message on all ranks.

        The message is ``text`` of the first rank that calls this method. If the store fails, each
        rank uses its own ``text``.
        """
        with suppress(*_STORE_GONE):
            text = default_store().compare_set(self._mix_up_key, "", text).decode()
        self._mix_ups += 1
        return DisagreementError(text)

    @property
    def _mix_up_key(self) -> str:
        """Return the store key under which ranks share the error message of the next mix-up.

        A mix-up is a collective in which ranks communicated for different units.
        """
        return f"{self._prefix}/mixed_up/{self._mix_ups}"

    def _concluded(self) -> str:
        """Return the message of `conclude` if another rank has called it, else an empty string."""
        with suppress(*_STORE_GONE):
            store, key = default_store(), self._mix_up_key
            if store.check([key]):
                text: str = store.get(key).decode()
                self._mix_ups += 1
                return text
        return ""

    def report(self, error: Exception, rank: int, doing: str) -> None:
        """Raise `DisagreementError` if ``error`` means that ranks were in different collectives.

        Returns if ``error`` is neither a timeout nor a lost connection. If all ranks that report
        were in the same collective, adds a note to ``error`` that lists the reports and the ranks
        that did not report.

        Args:
            error: The exception of the collective.
            rank: Global rank of this process.
            doing: Description of this rank's collective.
        """
        error.add_note(f"in the collective to {doing} over axis {self.axis_name!r}")
        timed_out = re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE) is not None
        lost = re.search(r"(closed|reset) by peer|broken pipe|pair closure", str(error), re.I)
        if not (timed_out or lost):
            return
        if text := self._concluded():
            raise DisagreementError(text) from error
        seconds = REPORT_SECONDS if timed_out else LOST_SECONDS
        begun = f"{self.gathers.count} gathers and {self.reductions.count} reductions"
        # A rank with more resets than the other ranks has left the common order.
        begun += f" and {self.resets} reset()" if self.resets else ""
        found = self.exchange("lost", rank, f"waited to {doing} after {begun}", seconds)
        text = f"a collective did not end: {listed(found)}"
        if len([report for report in found if report != _SILENT]) > 1:
            raise DisagreementError(f"{text}; {RULE}") from error
        error.add_note(f"{text}. A rank that does not report is slow, has ended or runs other code")

    def exchange(self, topic: str, rank: int, report: str, seconds: float) -> dict[str, list[int]]:
        """Exchange reports through the store. Returns the same dictionary on all ranks.

        Args:
            topic: Part of the store keys that separates exchanges for different purposes.
            rank: Global rank of this process.
            report: The report of this rank.
            seconds: Time to wait for the reports of other ranks.

        Returns:
            A dict from each report to the global ranks that gave it. Ranks without a report have
            the report "did not report". If the store fails, the dict has only this rank's report.
        """
        own = {report: [rank]}
        try:
            store = default_store()
            turn = store.add(f"{self._prefix}/{topic}/{rank}", 1)
            prefix = f"{self._prefix}/{topic}/{turn}"
            keys = [f"{prefix}/{each}" for each in self._ranks]
            store.set(f"{prefix}/{rank}", report)
            with suppress(RuntimeError):  # some ranks may not report in time
                store.wait(keys, timedelta(seconds=seconds))
            found: dict[str, list[int]] = {}
            for each, key in zip(self._ranks, keys, strict=True):
                text = store.get(key).decode() if store.check([key]) else _SILENT
                found.setdefault(text, []).append(each)
            # All ranks use the dict of the first rank that finishes.
            outcome = store.compare_set(f"{prefix}/outcome", "", json.dumps(found))
            agreed: dict[str, list[int]] = json.loads(outcome)
        except _STORE_GONE:
            return own
        return agreed


_SILENT = "did not report"
_STORE_GONE = RuntimeError, ValueError  # lost connection; no default process group
_ORDERS: WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder] = WeakKeyDictionary()


def order_of(axis: Axis) -> CollectiveOrder | None:
    """Return the `CollectiveOrder` of an axis. It lives as long as the process group.

    Returns None if the axis has one rank, or if it is simulated and has no process group.
    """
    group = axis.group
    if axis.size == 1 or not isinstance(group, dist.ProcessGroup):
        return None
    if group not in _ORDERS:
        _ORDERS[group] = CollectiveOrder(axis, group)
    return _ORDERS[group]


def unwrapped(collectives: Collectives) -> Collectives:
    """Remove the `RecordingCollectives` wrappers around ``collectives``."""
    while isinstance(collectives, RecordingCollectives):
        collectives = collectives.inner
    return collectives


def checking(collectives: Collectives) -> CheckedCollectives | None:
    """Return the `CheckedCollectives` inside all `RecordingCollectives` wrappers.

    Returns None if ``collectives`` are not checked.
    """
    found = unwrapped(collectives)
    return found if isinstance(found, CheckedCollectives) else None


def is_exact(collectives: Collectives) -> bool:
    """Return whether ``collectives`` send every element unchanged.

    Returns False for custom collectives, because they may compress the elements.
    """
    found = unwrapped(collectives)
    while isinstance(found, CheckedCollectives):
        found = unwrapped(found.inner)
    return type(found) is TorchCollectives


@dataclass(frozen=True, slots=True)
class Intent:
    """The collective that one rank is about to start.

    Attributes:
        rank: Global rank.
        key: Name of the `Operation` and index of the unit under its root, such as
            ``("FORWARD", 3)``.
        doing: Description for error messages, such as ``"gather layers.0 for forward"``.
        facts: Settings that must be equal on all ranks: a dict from names for error messages to
            values.
    """

    rank: int
    key: tuple[str, int]
    doing: str
    facts: dict[str, str]


def compare(axes: Sequence[Axis], own: Intent, hints: dict[str, str], device: torch.device) -> None:
    """Raise the same `DisagreementError` on all ranks of ``axes`` if the ranks' intents differ.

    Args:
        axes: Axes over which ranks must agree.
        own: The intent of this rank.
        hints: A dict from prefixes of fact names to advice. If the name of the first fact that
            differs starts with a prefix, the error message ends with the advice.
        device: Device of the exchanged digests.
    """
    digest = int.from_bytes(hashed((own.key, own.facts)), "big", signed=True)
    found = torch.tensor([digest], device=device)
    for axis in axes:
        if backend_of(axis.group, device) == "gloo":
            sent = found.flatten().repeat(axis.size)
            found = TorchCollectives().all_to_all(axis, sent).wait()[0]
        else:  # an all-to-all of NCCL would connect every pair of ranks
            found = TorchCollectives().all_gather(axis, [found]).wait()[0]
    if len(set(found.flatten().tolist())) == 1:
        return
    intents = [own]
    for axis in axes:
        parts: list[list[Intent]] = [[]] * axis.size
        dist.all_gather_object(parts, intents, group=cast(dist.ProcessGroup, axis.group))
        intents = [each for part in parts for each in part]
    raise DisagreementError(_difference(sorted(intents, key=lambda each: each.rank), hints))


def hashed(value: object) -> bytes:
    """Return a digest of 8 bytes of ``repr(value)``."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


def _difference(intents: Sequence[Intent], hints: dict[str, str]) -> str:
    doing: dict[tuple[str, str], list[int]] = {}
    for each in intents:
        doing.setdefault((each.doing, str(each.facts)), []).append(each.rank)
    lines = [
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} to {what}"
        for (what, _), ranks in doing.items()
    ]
    if len({each.key for each in intents}) > 1:
        same = "and gather, reshard and reduce them by the same options"
        return f"{', '.join(lines)}; {RULE}, {same}"
    names = dict.fromkeys(name for each in intents for name in each.facts)
    differ = [name for name in names if len({each.facts.get(name) for each in intents}) > 1]
    held: dict[str, list[int]] = {}
    for each in intents:
        held.setdefault(each.facts.get(differ[0], "nothing"), []).append(each.rank)
    values = ", ".join(
        f"{_around(value, list(held))} on {ranks_text(ranks)}" for value, ranks in held.items()
    )
    more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
    hint = next((f"; {text}" for name, text in hints.items() if differ[0].startswith(name)), "")
    return f"{', '.join(lines)}; its parameters there differ in {differ[0]}: {values}{more}{hint}"


def listed(reports: dict[str, list[int]]) -> str:
    """Format reports for a message, for example ``"rank 0 reduced a, rank 1 reduced b"``."""
    return ", ".join(f"{ranks_text(ranks)} {report}" for report, ranks in reports.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 0" or "ranks [0, 1]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _around(value: str, others: Sequence[str], shown: int = 80) -> str:
    """Shorten ``value`` to ``shown`` characters around its first difference from ``others``."""
    if len(value) <= shown:
        return value
    first = min(
        next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), common)
        for other in others
        if other != value
        for common in [min(len(value), len(other))]
    )
    start = max(0, first - shown // 2)
    return ("..." if start else "") + value[start : start + shown] + "..."
