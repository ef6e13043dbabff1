"""Checks that all ranks of a process group communicate for the same unit.

Ranks that gather or reduce different units in one collective would get wrong parameters or
gradients without an error. Three checks find that:

- *Comparison*: 8 bytes per rank are exchanged before a unit's first gather for forward, first
  gather for backward and first reduction. They are exchanged again before a collective that was not
  expected and has another size than the expected one. On gloo the exchange is an all-to-all: gloo
  ends the process if the sizes of an all-gather differ, but an all-gather that meets an all-to-all
  waits.
- *Tags* (`_tags`): each rank sends the number of the unit with every gather and reduction. Every
  rank sees in the result whether all ranks meant the same unit.
- *Reports*: if a collective fails because a peer did not join it, the ranks exchange through the
  store which collective each of them was in.
"""

import hashlib
import json
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Literal, Protocol, cast
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

# Seconds that a rank waits for the reports of others: after a timeout, and after a lost connection.
REPORT_SECONDS = 10.0
LOST_SECONDS = 2.0
# How many collectives a history keeps at least.
KEPT = 2**12
# At so many of its last places a collective is looked for in the past.
PLACES = 64
# Numbers of units with replicas begin here.
REPLICATED = 2 ** (FLAG_BITS - 1)
RULE = "all ranks must run the same units in the same order"
# Reads the values of tags. The second argument begins the message of the error.
TagCheck = Callable[[list[float], str], DisagreementError | None]


class TagLog:
    """Reads tags on an accelerator without a host wait.

    Tags are copied to the CPU on a side stream at the end of a backward, or of a forward without
    backward. They are checked when a later forward begins.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._tags: list[tuple[Tensor, TagCheck]] = []
        self._sent: list[tuple[str, list[tuple[int, TagCheck]], Tensor, Begun]] = []

    def add(self, tags: Tensor, check: TagCheck) -> None:
        """Copy the tags of a finished collective on the device, to pass them to ``check`` later."""
        real = tags.real if tags.is_complex() else tags
        self._tags.append((real.to(torch.float32, copy=True).flatten(), check))

    def send(self, when: str) -> None:
        """Start to copy all new tags to the CPU. ``when`` begins the message of an error."""
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
        """Raise `DisagreementError` for a mix-up in the copies that have arrived.

        The last copy is waited for only with ``wait``. Earlier copies are always waited for, so
        that all ranks raise in the same pass; they come from a whole pass before this one.
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
        """Take over the unread tags of another log."""
        self._tags += other._tags
        self._sent += other._sent

    def drop(self) -> None:
        """Discard tags that were not sent. Called when a step is abandoned."""
        self._tags = []


class Tag:
    """The tag that one parameter group sends with its gathers and reductions.

    Args:
        orders: One for each process group that the parameter group communicates over. The first
            one gave the number. Empty if there is only one rank.
        number: The number of the unit.
        rank: This global rank.
    """

    def __init__(
        self, orders: "Sequence[CollectiveOrder]" = (), number: int = 0, rank: int = 0
    ) -> None:
        self.orders, self.number, self._rank = tuple(orders), number, rank
        self.flags = tag_flags(number % 2**FLAG_BITS)
        self.log: TagLog | None = None  # on accelerators

    def check_gathered(self, tags: Tensor, itemsize: int) -> DisagreementError | None:
        """Return the error if ranks gathered different units. Accelerators raise it later.

        Args:
            tags: The tags of all ranks, ``[ranks, digits]`` or ``[ranks]``.
            itemsize: Bytes per element, as for `tag_digits`.
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
        """Return the error if ranks reduced different units. Accelerators raise it later.

        Args:
            flags: The reduced flags of the tag, ``[TAG_FLAGS]``.
            on_host: Whether the host may read them without waiting.
        """

        def check(values: list[float], when: str = "") -> DisagreementError | None:
            return None if flags_agree(values) or not self.orders else self._mixed_up(when)

        if self.log is None or on_host:
            return check(flags.tolist())
        self.log.add(flags, check)
        return None

    def _mixed_up(self, when: str) -> DisagreementError:
        """Return the error for ranks that reduced different units in one collective.

        The sum shows that units differ, but not which, so ranks report it through the store.
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

        Args:
            error: What the collective raised.
            doing: Describes this rank's collective, with ``{}`` for the unit.
            axis: Its axis. None: the first one of the unit.
        """
        if self.orders:
            first = self.orders[0]
            over = first if axis is None else order_of(axis) or first
            over.report(error, self._rank, doing.format(first.name(self.number)))


class Collective:
    """One collective that a unit repeats.

    Attributes:
        signature: Sizes and dtypes. If two ranks start different collectives of equal signatures,
            the backend runs them as one. None if it is unknown.
        tagged: Whether tags in the result show a mix-up.
        compared: Whether the ranks have compared it.
        owner: Stands for the schedule that it last ran under.
    """

    __slots__ = ("compared", "owner", "signature", "tagged")

    def __init__(self, signature: tuple[object, ...] | None = None, tagged: bool = False) -> None:
        self.signature, self.tagged, self.compared = signature, tagged, False
        self.owner: object = None

    def is_like(self, other: "Collective | None") -> bool:
        """Return whether a mix-up of the two collectives would complete and be visible in tags.

        Then ranks need no comparison before they start one of the two.
        """
        if other is None or self.signature is None or self.signature != other.signature:
            return False
        return self.tagged and other.tagged and self.compared


class Turn:
    """One place in the cycle of collectives that a program repeats."""

    __slots__ = ("collective", "following", "place")

    def __init__(self, collective: Collective, place: int) -> None:
        self.collective, self.place = collective, place
        self.following: Turn | None = None  # None at the end of the cycle


class History:
    """Collectives of one kind over one process group, in the order in which they ran.

    Programs repeat themselves, so the collectives of the last cycle are expected to run again. All
    ranks of a right program have equal histories, so they expect the same collective.

    Attributes:
        turn: The expected collective; None at the end of a cycle, and if nothing is expected.
        unsettled: Refers to the unit of an unexpected collective that ranks did not compare.
            Histories may differ until its tags are read. Until then nothing is expected. None
            usually. A weak reference, because a history lives as long as its process group.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.turn: Turn | None = None
        self.unsettled: weakref.ref[NumberedUnit] | None = None
        self._past: list[Collective] = []
        # Where each of the first `_indexed` collectives came last.
        self._places: dict[Collective, deque[int]] = {}
        self._indexed = 0
        self._dropped = 0
        self._cycle: list[Turn] = []
        self._first: Collective | None = None  # of the schedule that began last

    def __len__(self) -> int:
        return self._dropped + len(self._past) + self._done

    @property
    def awaits_tags(self) -> bool:
        """Return whether the tags of an unexpected gather have not arrived yet."""
        unit = None if self.unsettled is None else self.unsettled()
        return unit is not None and unit.gathering

    @property
    def _done(self) -> int:
        """Return how many collectives of the cycle have run since it began last."""
        return len(self._cycle) if self.turn is None else self.turn.place

    def repeats(self, collective: Collective) -> bool:
        """Advance to the next expected collective and return True, if ``collective`` is expected.

        At the end of a cycle, the first collective of the cycle is expected. Callers first compare
        with ``turn`` themselves, because that is faster.
        """
        if self.turn is None and self._cycle:
            self._keep()
            self.turn = self._cycle[0]
        if self.turn is None or self.turn.collective is not collective:
            return False
        self.turn = self.turn.following
        return True

    def judge(self, collective: Collective) -> Literal["expected", "like", "other"]:
        """Classify a collective for which `repeats` returned False.

        - "expected": it was compared and is the expected one. No comparison is needed.
        - "like": if other ranks start the expected collective instead, tags show it.
        - "other": ranks must compare before they start it.
        """
        if self.unsettled is not None:
            return "other"
        expected = self._first if self.turn is None else self.turn.collective
        if expected is collective and collective.compared:
            return "expected"
        return "like" if collective.is_like(expected) else "other"

    def add(
        self,
        collective: Collective,
        owner: object,
        unsettled: "weakref.ref[NumberedUnit] | None" = None,
    ) -> None:
        """Record a collective for which `repeats` returned False.

        Args:
            collective: The collective that starts now.
            owner: Stands for its schedule.
            unsettled: Its unit, if ranks did not compare and its tags must be read first.
        """
        if collective.owner is not owner:
            collective.owner = owner
            if self._first is None or self._first.owner is not owner:
                self._first = collective
        self._keep()
        self._past.append(collective)
        self.turn, self._cycle, self.unsettled = None, [], unsettled
        if unsettled is None:
            self._align()

    def settle(self) -> None:
        """Expect collectives again after the tags of an unexpected one were read."""
        self.unsettled = None
        self._align()

    def _keep(self) -> None:
        """Append the part of the cycle that has run to the past."""
        self._past += [turn.collective for turn in self._cycle[: self._done]]
        if len(self._past) > 2 * KEPT:
            self._dropped += len(self._past) - KEPT
            del self._past[:-KEPT]

    def _align(self) -> None:
        """Predict the next cycle from the past.

        Finds the earlier position with the longest common suffix with the past, and expects the
        collectives since then to repeat.
        """
        past = self._past
        end, best, lag = len(past) - 1, 0, 0
        for place in range(max(0, self._indexed - self._dropped), len(past)):
            self._places.setdefault(past[place], deque(maxlen=PLACES)).append(self._dropped + place)
        self._indexed = self._dropped + len(past)
        for known in [*self._places[past[end]]][-2::-1]:  # latest first, without the last
            place, length = known - self._dropped, 1
            while length <= place and past[place - length] is past[end - length]:
                length += 1
            if place >= 0 and length > best:
                best, lag = length, end - place
            if length >= KEPT // 8:
                break
        self._cycle = [Turn(past[end + 1 - lag + place], place) for place in range(lag)]
        for turn, following in pairwise(self._cycle):
            turn.following = following
        self.turn = self._cycle[0] if self._cycle else None


class NumberedUnit(Protocol):
    """The part of a unit that the order of collectives needs."""

    def __str__(self) -> str:
        """Return a name for messages, the same on all ranks."""
        ...

    @property
    def gathering(self) -> bool:
        """Return whether a gather is under way."""
        ...

    def forget_comparisons(self) -> None:
        """Forget which collectives were compared, so that ranks compare them again."""
        ...


class CollectiveOrder:
    """Units and the order of their collectives over one process group.

    Units are numbered in the order of the `fully_shard` calls over the group.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup) -> None:
        self.gathers, self.reductions = History(), History()
        self.axis_name = axis.name
        self._ranks, self._prefix = axis.ranks, f"hp_fsdp/{group_identity(group)}/{axis.ranks}"
        self._made: Counter[tuple[CollectiveOrder, ...]] = Counter()
        self.resets = 0  # by this rank, of steps that it abandoned
        self._mix_ups = 0  # for which this rank has raised an error
        self._units: WeakValueDictionary[int, NumberedUnit] = WeakValueDictionary()

    def add(self, unit: NumberedUnit, others: "Sequence[CollectiveOrder]") -> int:
        """Return the number of a new unit, which communicates over ``others`` too.

        Ranks of other replicas may shard other models over their own groups. Only units over the
        same groups are counted together, so that the number is the same on all replicas.
        """
        number = self._made[tuple(others)] + (REPLICATED if others else 0)
        self._made[tuple(others)] += 1
        self._units[number] = unit
        return number

    def name(self, number: int) -> str:
        """Return the name of the unit with this number, which may be modulo 2**TAG_BITS."""
        found = [str(u) for n, u in self._units.items() if (n - number) % 2**TAG_BITS == 0]
        return found[-1] if found else f"unit {number}"

    def forget(self) -> None:
        """Start again after ranks have run different collectives."""
        self.gathers.reset()
        self.reductions.reset()
        for unit in list(self._units.values()):
            unit.forget_comparisons()

    def mixed_up(self, numbers: Sequence[int], when: str = "") -> DisagreementError:
        """Return the error for ranks that gathered units of different ``numbers`` at once."""
        found: dict[str, list[int]] = {}
        for rank, number in zip(self._ranks, numbers, strict=True):
            found.setdefault(f"gathered {self.name(number)}", []).append(rank)
        self.forget()
        return self.conclude(
            f"{when}{listed(found)}, in one collective over {self.axis_name!r}; these parameters "
            f"are wrong, and all that are gathered later; {RULE}"
        )

    def conclude(self, text: str) -> DisagreementError:
        """Return the error. All ranks use the text of the first rank that calls this."""
        with suppress(*_STORE_GONE):
            text = default_store().compare_set(self._mix_up_key, "", text).decode()
        self._mix_ups += 1
        return DisagreementError(text)

    @property
    def _mix_up_key(self) -> str:
        """Return where the store has the text of the next mix-up."""
        return f"{self._prefix}/mixed_up/{self._mix_ups}"

    def _concluded(self) -> str:
        """Return the text of the rank that found a mix-up; "" if none has."""
        with suppress(*_STORE_GONE):
            store, key = default_store(), self._mix_up_key
            if store.check([key]):
                text: str = store.get(key).decode()
                self._mix_ups += 1
                return text
        return ""

    def report(self, error: Exception, rank: int, doing: str) -> None:
        """Raise `DisagreementError` if ``error`` means that ranks were in different collectives.

        Returns if ``error`` is neither a timeout nor a lost connection, and if all ranks that
        report were in the same collective. A note then says which ranks did not report.
        """
        error.add_note(f"in the collective to {doing} over axis {self.axis_name!r}")
        timed_out = re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE) is not None
        lost = re.search(r"(closed|reset) by peer|broken pipe|pair closure", str(error), re.I)
        if not (timed_out or lost):
            return
        if text := self._concluded():
            raise DisagreementError(text) from error
        seconds = REPORT_SECONDS if timed_out else LOST_SECONDS
        begun = f"{len(self.gathers)} gathers and {len(self.reductions)} reductions"
        # The rank with more resets than the others has left their order.
        begun += f" and {self.resets} reset()" if self.resets else ""
        found = self.exchange("lost", rank, f"waited to {doing} after {begun}", seconds)
        text = f"a collective did not end: {listed(found)}"
        if len([report for report in found if report != _SILENT]) > 1:
            raise DisagreementError(f"{text}; {RULE}") from error
        error.add_note(f"{text}. A rank that does not report is slow, has ended or runs other code")

    def exchange(self, topic: str, rank: int, report: str, seconds: float) -> dict[str, list[int]]:
        """Exchange reports through the store. Returns the same dictionary on all ranks.

        Args:
            topic: Separates exchanges for different purposes.
            rank: This global rank.
            report: The report of this rank.
            seconds: How long to wait for the reports of other ranks.

        Returns:
            The global ranks that gave each report. Only this rank's report if the store is gone.
        """
        own = {report: [rank]}
        try:
            store = default_store()
            turn = store.add(f"{self._prefix}/{topic}/{rank}", 1)
            prefix = f"{self._prefix}/{topic}/{turn}"
            keys = [f"{prefix}/{each}" for each in self._ranks]
            store.set(f"{prefix}/{rank}", report)
            with suppress(RuntimeError):  # some may not report in time
                store.wait(keys, timedelta(seconds=seconds))
            found: dict[str, list[int]] = {}
            for each, key in zip(self._ranks, keys, strict=True):
                text = store.get(key).decode() if store.check([key]) else _SILENT
                found.setdefault(text, []).append(each)
            # The first rank to finish decides for all.
            outcome = store.compare_set(f"{prefix}/outcome", "", json.dumps(found))
            agreed: dict[str, list[int]] = json.loads(outcome)
        except _STORE_GONE:
            return own
        return agreed


_SILENT = "did not report"
_STORE_GONE = RuntimeError, ValueError  # its connection is lost; there is no default group
_ORDERS: WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder] = WeakKeyDictionary()


def order_of(axis: Axis) -> CollectiveOrder | None:
    """Return the order of collectives over an axis; None for one rank and for simulated axes.

    It lives as long as the process group.
    """
    group = axis.group
    if axis.size == 1 or not isinstance(group, dist.ProcessGroup):
        return None
    if group not in _ORDERS:
        _ORDERS[group] = CollectiveOrder(axis, group)
    return _ORDERS[group]


def unwrapped(collectives: Collectives) -> Collectives:
    """Return the collectives inside `RecordingCollectives`."""
    while isinstance(collectives, RecordingCollectives):
        collectives = collectives.inner
    return collectives


def checking(collectives: Collectives) -> CheckedCollectives | None:
    """Return the `CheckedCollectives` inside `RecordingCollectives`, if there are any."""
    found = unwrapped(collectives)
    return found if isinstance(found, CheckedCollectives) else None


def is_exact(collectives: Collectives) -> bool:
    """Return whether collectives are known to copy every element unchanged.

    Collectives of a user may compress.
    """
    found = unwrapped(collectives)
    while isinstance(found, CheckedCollectives):
        found = unwrapped(found.inner)
    return type(found) is TorchCollectives


@dataclass(frozen=True, slots=True)
class Intent:
    """The collective that one rank is about to start.

    Attributes:
        rank: The global rank.
        key: Name of the `Act`, and position of the unit under its root.
        doing: Description of both for messages.
        facts: Settings that must be equal on all ranks, by names for messages.
    """

    rank: int
    key: tuple[str, int]
    doing: str
    facts: dict[str, str]


def compare(axes: Sequence[Axis], own: Intent, hints: dict[str, str], device: torch.device) -> None:
    """Raise `DisagreementError`, the same on all ranks of ``axes``, if their intents differ.

    Args:
        axes: The axes over which ranks must agree.
        own: What this rank is about to do.
        hints: Advice for the error message. Keys are prefixes of names of facts.
        device: Device of the exchanged digests.
    """
    digest = int.from_bytes(hashed((own.key, own.facts)), "big", signed=True)
    found = torch.tensor([digest], device=device)
    for axis in axes:
        if backend_of(axis.group, device) == "gloo":
            sent = found.flatten().repeat(axis.size)
            found = TorchCollectives().all_to_all(axis, sent).wait()[0]
        else:  # an all-to-all of NCCL would connect every rank with every other
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
    """Return 8 bytes that differ between values with different representations."""
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
    """Format reports for a message: each report after the ranks that gave it."""
    return ", ".join(f"{ranks_text(ranks)} {report}" for report, ranks in reports.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks [0, 1]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def _around(value: str, others: Sequence[str], shown: int = 80) -> str:
    """Return the part of a long value around its first difference from the others."""
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
