"""Checks that all ranks of a process group communicate for the same unit.

Ranks that gather or reduce different units in one collective would get wrong parameters or
gradients without an error. Three checks find that:

- *Comparison*: 8 bytes per rank are exchanged. It runs before a unit's first gather for forward,
  first gather for backward and first reduction. It also runs before a collective of another size
  than the one that came next the last time. On gloo it is an all-to-all: gloo ends the process if
  the sizes of an all-gather differ, but an all-gather that meets an all-to-all waits.
- *Tags*: each rank adds the number of the unit to what it gathers and reduces. Every rank sees in
  the result whether all ranks meant the same unit. That costs no collective.
- *Reports*: if a collective fails because a peer did not come, the ranks tell one another through
  the store which collective each of them was in.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
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

from ._errors import DisagreementError
from ._streams import Begun, SideStream
from ._torch import backend_of, default_store

# Tags hold the number of a unit modulo 2**TAG_BITS.
TAG_BITS = 12
TAG_FLAGS = 2 * TAG_BITS
# Seconds that a rank waits for the reports of others: after a timeout, and after a lost connection.
REPORT_SECONDS = 10.0
LOST_SECONDS = 2.0
# What reads tags: it takes their values and the beginning of a message.
TagCheck = Callable[[list[float], str], DisagreementError | None]
RULE = "all ranks must run the same units in the same order"


def tag_base(itemsize: int) -> int:
    """Return a base whose digits are exact in every floating-point dtype of ``itemsize`` bytes.

    float8_e5m2 has 3 significant bits, bfloat16 has 8, float32 has 24.
    """
    return {1: 8, 2: 256}.get(itemsize, 2**24)


def tag_width(itemsize: int) -> int:
    """Return the number of digits of a tag in a gather."""
    return next(n for n in range(1, TAG_BITS + 1) if tag_base(itemsize) ** n >= 2**TAG_BITS)


def tag_digits(number: int, itemsize: int) -> list[int]:
    """Return the tag of a unit in gathers: the digits of its number, the lowest first."""
    base, number = tag_base(itemsize), number % 2**TAG_BITS
    return [number // base**place % base for place in range(tag_width(itemsize))]


def number_of(digits: Sequence[float], itemsize: int) -> int:
    """Return the unit number that `tag_digits` was called with, modulo 2**TAG_BITS."""
    base = tag_base(itemsize)
    return sum(int(digit.real) * base**place for place, digit in enumerate(digits))


@cache
def tag_flags(number: int) -> tuple[bool, ...]:
    """Return the tag of a unit in reductions: the bits of its number, then the inverted bits.

    In the sum over ranks exactly half of these flags are zero if all ranks have the same number,
    and fewer if not. That holds in every dtype and for averages, because only zero counts.
    """
    bits = [bool(number >> place & 1) for place in range(TAG_BITS)]
    return (*bits, *(not bit for bit in bits))


class TagLog:
    """Tags on an accelerator, read without a wait of the host.

    They are copied to the CPU on a side stream at the end of a backward or of a forward without
    backward, and checked when a later forward begins and the copy has arrived.
    """

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._tags: list[tuple[Tensor, TagCheck]] = []
        self._sent: list[tuple[str, list[tuple[int, TagCheck]], Tensor, Begun]] = []

    def add(self, tags: Tensor, check: "TagCheck") -> None:
        """Keep a copy of what a collective left on the device, for ``check``."""
        real = tags.real if tags.is_complex() else tags
        self._tags.append((real.to(torch.float32, copy=True).flatten(), check))

    def send(self, when: str) -> None:
        """Start to copy what was added to the CPU; ``when`` begins the error."""
        if not self._tags:
            return
        flat = torch.cat([tags for tags, _ in self._tags])
        pieces = [(len(tags), check) for tags, check in self._tags]
        self._tags = []
        with self._stream.after_current():
            host = torch.empty(flat.shape, pin_memory=flat.device.type != "cpu")
            host.copy_(flat, non_blocking=True)
        self._stream.uses(flat)
        self._sent.append((when, pieces, host, self._stream.begun()))

    def check(self) -> None:
        """Raise `DisagreementError` for copies that have arrived.

        The third copy under way is waited for. The device has finished it by then: accelerators
        limit how far the host may be ahead.
        """
        while self._sent and (len(self._sent) > 2 or self._sent[0][3].done):
            when, pieces, host, copied = self._sent.pop(0)
            copied.synchronize()
            values = iter(host.tolist())
            for count, check in pieces:
                error = check([next(values) for _ in range(count)], when)
                if error is not None:
                    self._sent = []
                    raise error

    def drop(self) -> None:
        """Forget the tags of a step that is given up."""
        self._tags = []


class Tag:
    """The number of a unit in what one group of its parameters communicates.

    Args:
        order: That of the process group; None if there is only one rank.
        number: The number of the unit there.
        rank: This rank.
    """

    def __init__(
        self, order: "CollectiveOrder | None" = None, number: int = 0, rank: int = 0
    ) -> None:
        self.order, self.number, self._rank = order, number, rank
        self.log: TagLog | None = None  # on accelerators
        self.use_divisor(1.0)

    def use_divisor(self, divisor: float) -> None:
        """Let the tag in reductions also say what the sum of the gradients is divided by."""
        self._divisor = divisor
        mixed = int.from_bytes(hashed(divisor), "big") % 2**TAG_BITS
        self.flags = tag_flags(self.number % 2**TAG_BITS ^ mixed)

    def check_gather(self, tags: Tensor, itemsize: int) -> None:
        """Raise `DisagreementError` if ranks gathered different units; later on accelerators.

        Args:
            tags: What arrived, ``[ranks, digits]`` or ``[ranks]``.
            itemsize: Bytes per element of the plan, as for `tag_digits`.
        """
        width = tag_width(itemsize)

        def check(values: list[float], when: str = "") -> DisagreementError | None:
            rows = [values[i : i + width] for i in range(0, len(values), width)]
            if all(row == rows[0] for row in rows) or self.order is None:
                return None
            return self.order.mixed_up([number_of(row, itemsize) for row in rows], when)

        if self.log is not None:
            self.log.add(tags, check)
        elif (error := check(tags.flatten().tolist())) is not None:
            raise error

    def check_reduction(self, flags: Tensor, on_host: bool) -> None:
        """Raise `DisagreementError` if ranks reduced different units; later on accelerators.

        Args:
            flags: The reduced flags of the tag, ``[TAG_FLAGS]``.
            on_host: Whether the host may read them without waiting.
        """

        def check(values: list[float], when: str = "") -> DisagreementError | None:
            if values.count(0.0) == TAG_BITS or self.order is None:
                return None
            did = f"reduced {self.order.name(self.number)}, divided by {self._divisor:g}"
            return self.order.mixed_up_reduction(did, self._rank, when)

        if self.log is not None and not on_host:
            self.log.add(flags, check)
        elif (error := check(flags.tolist())) is not None:
            raise error

    def report(self, error: Exception, doing: str) -> None:
        """Raise `DisagreementError` if ``error`` says that peers did not come; ``doing {unit}``."""
        if self.order is not None:
            self.order.report(error, self._rank, doing.format(self.order.name(self.number)))


class Collective:
    """One collective that a unit repeats, and the collective that came next the last time.

    Attributes:
        size: Two collectives with equal sizes are carried out as one if ranks mix them up. None if
            the size is unknown.
        tagged: Whether its result shows if ranks mixed up units.
        compared: Whether the ranks have compared the facts of the unit.
        following: The collective that came next the last time.
        restart: The collective that comes next if none has come next so far: the first one of the
            same schedule.
    """

    __slots__ = ("compared", "following", "owner", "restart", "size", "tagged")

    def __init__(self, size: object = None, tagged: bool = False) -> None:
        self.size, self.tagged, self.compared = size, tagged, False
        self.following: Collective | None = None
        self.restart: Collective | None = None
        self.owner: object = None

    def is_like(self, other: "Collective | None") -> bool:
        """Return whether ranks that mix up the two see it in the result, and nothing worse."""
        if other is None or self.size is None or self.size != other.size:
            return False
        return self.tagged and other.tagged and self.compared


class History:
    """Which collective of one kind followed which over a process group; ``last`` ran last."""

    def __init__(self) -> None:
        self.last = Collective()

    def needs_comparison(self, collective: Collective) -> bool:
        """Return whether ranks compare before a collective that did not come next last time."""
        last = self.last
        expected = last.following or last.restart
        if expected is collective and collective.compared:
            return False
        return not collective.is_like(expected)

    def add(self, collective: Collective, owner: object) -> None:
        """Note that ``collective``, of the schedule ``owner``, comes next."""
        last = self.last
        if collective.restart is None or collective.owner is not owner:
            same = last.owner is owner and last.restart is not None
            collective.restart = last.restart if same else collective
            collective.owner = owner
        last.following = self.last = collective


class NumberedUnit(Protocol):
    """The part of a unit that the order of collectives needs."""

    def __str__(self) -> str:
        """Return a name for messages, the same on all ranks."""
        ...

    def forget_comparisons(self) -> None:
        """Compare everything again."""
        ...


class CollectiveOrder:
    """Units and the order of their collectives over one process group.

    Units are numbered in the order of the `fully_shard` calls over the group.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup) -> None:
        self.gathers, self.reductions = History(), History()
        self._ranks, self._name = axis.ranks, axis.name
        self._prefix = f"hp_fsdp/{group.group_name}"
        self._made = 0
        self._units: WeakValueDictionary[int, NumberedUnit] = WeakValueDictionary()

    def add(self, unit: NumberedUnit) -> int:
        """Return the number of a new unit."""
        number, self._made = self._made, self._made + 1
        self._units[number] = unit
        return number

    def name(self, number: int) -> str:
        """Return how messages call the unit with this number."""
        return str(self._units.get(number, f"unit {number}"))

    def forget(self) -> None:
        """Start again, after ranks have run different collectives."""
        self.gathers, self.reductions = History(), History()
        for unit in list(self._units.values()):
            unit.forget_comparisons()

    def mixed_up(self, numbers: Sequence[int], when: str = "") -> DisagreementError:
        """Return the error for ranks that gathered units of different ``numbers`` at once."""
        found: dict[int, list[int]] = {}
        for rank, number in zip(self._ranks, numbers, strict=True):
            found.setdefault(number, []).append(rank)
        said = ", ".join(
            f"{ranks_text(ranks)} gathered {self.name(number)}" for number, ranks in found.items()
        )
        self.forget()
        return DisagreementError(
            f"{when}{said}, in one collective over {self._name!r}; parameters that were gathered "
            f"since then are wrong; {RULE}"
        )

    def mixed_up_reduction(self, did: str, rank: int, when: str = "") -> DisagreementError:
        """Return the error for ranks that reduced different units at once.

        The sum shows that units differ, but not which: the ranks exchange through the store what
        each of them ``did``.
        """
        told = self._exchange("reductions", rank, did, REPORT_SECONDS)
        self.forget()
        return DisagreementError(
            f"{when}{told}, in one collective over {self._name!r}; these gradients are wrong; "
            f"{RULE}"
        )

    def report(self, error: Exception, rank: int, doing: str) -> None:
        """Raise `DisagreementError` if ``error`` says that a peer did not come to a collective.

        Returns without an exception if it says something else, or if the connection to a peer was
        lost that was in the same collective.
        """
        timed_out = re.search(r"tim(ed|e) ?out", str(error), re.IGNORECASE) is not None
        lost = re.search(r"(closed|reset) by peer|broken pipe|pair closure", str(error), re.I)
        if not (timed_out or lost):
            return
        seconds = REPORT_SECONDS if timed_out else LOST_SECONDS
        try:
            told = self._exchange("lost", rank, f"waited to {doing}", seconds)
        except RuntimeError:  # the store is gone too
            return
        if told.count("waited to") > 1 or timed_out:
            raise DisagreementError(f"a collective did not end: {told}; {RULE}") from error

    def _exchange(self, topic: str, rank: int, text: str, seconds: float) -> str:
        """Return what the ranks of the group report, the same text on all of them."""
        store = default_store()
        prefix = f"{self._prefix}/{topic}"
        turn = store.add(f"{prefix}/{rank}", 1)
        keys = [f"{prefix}/{turn}/{each}" for each in self._ranks]
        store.set(f"{prefix}/{turn}/{rank}", text)
        with suppress(RuntimeError):  # some may not report in time
            store.wait(keys, timedelta(seconds=seconds))
        found: dict[str, list[int]] = {}
        for each, key in zip(self._ranks, keys, strict=True):
            said = store.get(key).decode() if store.check([key]) else "did not report"
            found.setdefault(said, []).append(each)
        lines = ", ".join(f"{ranks_text(ranks)} {said}" for said, ranks in found.items())
        # The first rank to finish decides for all.
        outcome: bytes = store.compare_set(f"{prefix}/{turn}/outcome", "", lines)
        return outcome.decode()


_ORDERS: WeakKeyDictionary[dist.ProcessGroup, CollectiveOrder] = WeakKeyDictionary()


def order_of(axis: Axis) -> CollectiveOrder | None:
    """Return the order of collectives over an axis; None for one rank, and for simulated axes.

    It is kept as long as the process group exists.
    """
    group = axis.group
    if axis.size == 1 or not isinstance(group, dist.ProcessGroup):
        return None
    if group not in _ORDERS:
        _ORDERS[group] = CollectiveOrder(axis, group)
    return _ORDERS[group]


def checking(collectives: Collectives) -> CheckedCollectives | None:
    """Return the `CheckedCollectives` among nested collectives, if there is one."""
    while isinstance(collectives, RecordingCollectives):
        collectives = collectives.inner
    return collectives if isinstance(collectives, CheckedCollectives) else None


def is_exact(collectives: Collectives) -> bool:
    """Return whether collectives move every element as it is, which those of a user may not."""
    while isinstance(collectives, RecordingCollectives):
        collectives = collectives.inner
    return isinstance(collectives, TorchCollectives | CheckedCollectives)


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to do: an act of a unit, as a key and in words, and its facts."""

    rank: int
    key: tuple[str, int]
    doing: str
    facts: dict[str, str]


def compare(axes: Sequence[Axis], own: Intent, hints: dict[str, str], device: torch.device) -> None:
    """Raise `DisagreementError`, the same on all ranks of ``axes``, if their intents differ.

    ``hints`` has advice by the beginnings of facts' names.
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
    told = [own]
    for axis in axes:
        parts: list[list[Intent]] = [[]] * axis.size
        dist.all_gather_object(parts, told, group=cast(dist.ProcessGroup, axis.group))
        told = [each for part in parts for each in part]
    raise DisagreementError(_difference(sorted(told, key=lambda each: each.rank), hints))


def hashed(value: object) -> bytes:
    """Return 8 bytes that differ between values with different representations."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()


def _difference(told: Sequence[Intent], hints: dict[str, str]) -> str:
    doing: dict[tuple[str, str], list[int]] = {}
    for each in told:
        doing.setdefault((each.doing, str(each.facts)), []).append(each.rank)
    lines = [
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} to {what}"
        for (what, _), ranks in doing.items()
    ]
    if len({each.key for each in told}) > 1:
        same = "and gather, reshard and reduce them by the same options"
        return f"{', '.join(lines)}; {RULE}, {same}"
    names = dict.fromkeys(name for each in told for name in each.facts)
    differ = [name for name in names if len({each.facts.get(name) for each in told}) > 1]
    said: dict[str, list[int]] = {}
    for each in told:
        said.setdefault(each.facts.get(differ[0], "nothing"), []).append(each.rank)
    values = ", ".join(
        f"{_around(value, list(said))} on {ranks_text(ranks)}" for value, ranks in said.items()
    )
    more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
    hint = next((f"; {text}" for name, text in hints.items() if differ[0].startswith(name)), "")
    return f"{', '.join(lines)}; its parameters there differ in {differ[0]}: {values}{more}{hint}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return how messages list ranks."""
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
