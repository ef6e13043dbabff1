"""Degrees on their own: what each value may be, and how a missing one follows from the world."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import SupportsIndex, TypeAlias

from ._errors import LARGEST, ParallelDimsError, Violation, divisors, join_words, show

BASE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Where experts have ranks of their own, ep is one more axis of the world.
PEER_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
DEFAULT_ORDER = PEER_AXES
EP_MODES = ("folded", "peer")
INFERRED = -1
MOST_DIGITS = 20  # more than the largest degree has

Degree = SupportsIndex | str | None
DegreeRule: TypeAlias = Callable[[Mapping[str, int]], Iterator[Violation]]


def world_axes(ep_mode: str) -> tuple[str, ...]:
    """Return the axes whose degrees multiply to the world."""
    return PEER_AXES if ep_mode == "peer" else BASE_AXES


def as_degree(name: str, value: Degree, *, inferable: bool, optional: bool) -> int | None:
    """Return ``value`` as a positive integer, -1 where ``inferable``, or None where ``optional``.

    Integers of any type and strings that spell one are taken; a bool, a float, any other string or
    what is more than torch has ranks for raises `ParallelDimsError`.
    """
    if value is None and optional:
        return None
    number = _as_integer(value)
    if number is not None and (0 < number <= LARGEST or (number == INFERRED and inferable)):
        return number
    too_large = number is not None and number > LARGEST
    choices = [f"at most {LARGEST}" if too_large else "a positive integer"]
    choices += ["-1 (inferred)"] if inferable else []
    choices += ["None"] if optional else []
    raise ParallelDimsError(
        [
            Violation(
                rule="value",
                values={name: value},
                reason=f"{name}={show(value)} is not a degree; use {join_words(choices)}",
            )
        ]
    )


def _as_integer(value: Degree) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.removeprefix("-").isdecimal()):
            return None
        return int(text[:MOST_DIGITS])  # Python reads no number of several thousand digits
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_order(order: object) -> tuple[str, ...]:
    """Return the names in a list or a tuple; a string is split at its commas.

    Raises `ParallelDimsError` for anything else: sets, whose order differs between processes, too.
    """
    if isinstance(order, str):
        return tuple(name.strip() for name in order.split(","))
    if isinstance(order, list | tuple) and all(isinstance(name, str) for name in order):
        return tuple(order)
    raise ParallelDimsError(
        [
            Violation(
                rule="order",
                values={"order": order},
                reason=f"order={show(order)} is no list of axis names; use such as {DEFAULT_ORDER}",
            )
        ]
    )


def as_flag(name: str, value: object) -> bool:
    """Return a bool, or one of the words true and false, as a bool."""
    spelled = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(spelled, bool):
        return spelled
    raise ParallelDimsError(
        [
            Violation(
                rule="value",
                values={name: value},
                reason=f"{name}={show(value)} is neither true nor false",
            )
        ]
    )


def infer_degrees(
    degrees: Mapping[str, int], axes: tuple[str, ...], world_size: int
) -> dict[str, int]:
    """Return the degrees with the one that is -1 replaced so that ``axes`` multiply to the world.

    An axis without a degree may have any, and then nothing is replaced. Raises `ParallelDimsError`
    where no degree makes the product the world.
    """
    unknown = [name for name in axes if degrees.get(name, INFERRED) == INFERRED]
    given = {name: degrees[name] for name in axes if name not in unknown and degrees[name] != 1}
    given = given or {"dp_shard": 1}
    product = prod(given.values())
    if world_size % product or not (unknown or product == world_size):
        raise ParallelDimsError([_product_violation(given, unknown, world_size)])
    if len(unknown) == 1 and unknown[0] in degrees:
        return {**degrees, unknown[0]: world_size // product}
    return dict(degrees)


def _product_violation(given: dict[str, int], inferred: list[str], world_size: int) -> Violation:
    product = prod(given.values())
    names, factors = "*".join(given), "*".join(str(n) for n in given.values())
    subject = f"{names}={factors}" + (f"={product}" if len(given) > 1 else "")
    legal: dict[str, tuple[int, ...]] = {}
    if inferred:
        reason = f"{subject} does not divide world_size={world_size}"
        for name, degree in given.items():
            others = product // degree
            if world_size % others == 0:
                legal[name] = divisors(world_size // others)
    else:
        reason = f"{subject} is not world_size={world_size}"
        for name, degree in given.items():
            others = product // degree
            if world_size % others == 0:
                legal[name] = (world_size // others,)
    if not legal:  # no degree alone repairs it
        legal["*".join(given)] = divisors(world_size) if inferred else (world_size,)
    values = {**given, "world_size": world_size}
    return Violation(rule="product", reason=reason, values=values, legal=legal)


def as_mode(ep_mode: object) -> str:
    """Return a name of `EP_MODES`; anything else raises `ParallelDimsError`."""
    if isinstance(ep_mode, str) and ep_mode in EP_MODES:
        return ep_mode
    reason = f"ep_mode={show(ep_mode)} is no way to place experts; use {join_words(EP_MODES)}"
    raise ParallelDimsError([Violation(rule="ep-mode", values={"ep_mode": ep_mode}, reason=reason)])


def order_violations(ep_mode: str, order: tuple[str, ...]) -> Iterator[Violation]:
    """Yield what is wrong with ``order`` as an order of the world's axes."""
    axes = world_axes(ep_mode)
    placed = order if ep_mode == "peer" else tuple(name for name in order if name != "ep")
    if {*placed} != {*axes} or len({*order}) != len(order):
        may = "" if ep_mode == "peer" else " (ep may stand among them or be left out)"
        yield Violation(
            rule="order",
            values={"order": order},
            reason=f"order={show(order)} is not a permutation of {axes}; give each of them once, "
            f"outermost first{may}",
        )


def one_is_inferred(degrees: Mapping[str, int]) -> Iterator[Violation]:
    """At most one degree is left for the world to decide."""
    inferred = [name for name, degree in degrees.items() if degree == INFERRED]
    if len(inferred) > 1:
        yield Violation(
            rule="one-inferred",
            values=dict.fromkeys(inferred, INFERRED),
            reason=f"{join_words(inferred, 'and')} are -1, but only one degree can be inferred "
            "from the world; give the others a positive integer",
        )


def experts_cut_like_layers(degrees: Mapping[str, int]) -> Iterator[Violation]:
    """Tensor parallel ranks share an expert as they share a layer, or not at all."""
    tp, etp = degrees["tp"], degrees["etp"]
    if etp not in (1, tp):
        yield Violation(
            rule="etp",
            values={"etp": etp, "tp": tp},
            reason=f"etp={etp} is neither 1 nor tp={tp}",
            legal={"etp": tuple(sorted({1, tp}))},
        )


def ulysses_divides_cp(degrees: Mapping[str, int]) -> Iterator[Violation]:
    """Ulysses groups are parts of the context parallel group."""
    cp, ulysses_degree = degrees["cp"], degrees["ulysses_degree"]
    if cp % ulysses_degree:
        yield Violation(
            rule="ulysses",
            values={"ulysses_degree": ulysses_degree, "cp": cp},
            reason=f"ulysses_degree={ulysses_degree} does not divide cp={cp}",
            legal={"ulysses_degree": divisors(cp)},
        )


def experts_fold_into_layers(degrees: Mapping[str, int]) -> Iterator[Violation]:
    """Folded experts live on the ranks of one dense block: dp_shard, cp and tp."""
    ep, etp = degrees["ep"], degrees["etp"]
    around = {name: degrees[name] for name in BASE_AXES[2:] if name in degrees}
    if len(around) == 3:
        ranks = prod(around.values())
        parts = ", ".join(f"{name}={degree}" for name, degree in around.items())
        whole = f"dp_shard*cp*tp={ranks} ({parts})"
    else:  # whatever the block, it divides the world
        around = {"world_size": degrees["world_size"]}
        ranks = degrees["world_size"]
        whole = f"world_size={ranks}"
    if ranks % (ep * etp) == 0:
        return
    subject = f"ep={ep}" if etp == 1 else f"ep={ep}*etp={etp}={ep * etp}"
    fits = ranks % etp == 0
    yield Violation(
        rule="sparse",
        values={"ep": ep, "etp": etp, **around},
        reason=f"{subject} does not divide {whole}",
        legal={"ep": divisors(ranks // etp)} if fits else {"ep*etp": divisors(ranks)},
    )


def resolved_rules(ep_mode: str, *, free_etp: bool = False) -> Mapping[str, DegreeRule]:
    """Return the rules that degrees keep, besides that they multiply to the world, by their codes.

    They read positive degrees by name, and raise KeyError for one that is not there. With
    ``free_etp`` folded experts may be cut over another number of ranks than the layers.
    """
    rules: dict[str, DegreeRule] = {"etp": experts_cut_like_layers, "ulysses": ulysses_divides_cp}
    if ep_mode == "peer":
        return rules
    if free_etp:
        del rules["etp"]
    return {**rules, "sparse": experts_fold_into_layers}


def rule_violations(
    degrees: Mapping[str, int], rules: Mapping[str, DegreeRule]
) -> Iterator[Violation]:
    """Yield all that the rules find; one that needs a degree which is not there finds nothing."""
    for rule in rules.values():
        with suppress(KeyError):
            yield from rule(degrees)
