"""What a decoder model, its sequences and its batches ask of the degrees: a tuple of functions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from ._errors import Report, Violation, divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What one check looks at: resolved degrees, numbers of model, sequence and batch.

    ``numbers`` are ``{field: (its spelling, its value)}``; ``wrong`` has the fields that are given,
    but are none.
    """

    degrees: Mapping[str, int]
    ulysses_degree: int | None
    numbers: Mapping[str, tuple[str, int]]
    wrong: Mapping[str, Violation]
    causal_balance: bool


# What a run may change without another model.
ADJUSTABLE = ("seq_len", "global_batch")


class Absent(Exception):
    """A field that a rule needs is not known."""


Rule: TypeAlias = Callable[[Subject], Iterator[Violation]]


def _field(subject: Subject, field: str) -> tuple[str, int]:
    if field not in subject.numbers:
        raise Absent(field)
    return subject.numbers[field]


def _split(subject: Subject, rule: str, field: str, *axes: str) -> Iterator[Violation]:
    """A field of the model is cut over the product of some degrees."""
    degrees = {axis: _degree(subject, axis) for axis in axes}
    if prod(degrees.values()) > 1:
        yield from _indivisible(rule, *_field(subject, field), degrees)


def _degree(subject: Subject, axis: str) -> int:
    return (subject.ulysses_degree or 1) if axis == "ulysses_degree" else subject.degrees[axis]


def _indivisible(
    rule: str, name: str, number: int, degrees: Mapping[str, int], factor: int = 1
) -> Iterator[Violation]:
    """Yield a violation where ``factor`` times the product of degrees does not divide a number."""
    product = factor * prod(degrees.values())
    if number % product == 0:
        return
    given = {axis: degree for axis, degree in degrees.items() if degree > 1}
    twice = [str(factor)] if factor > 1 else []
    if len(given) == 1 and not twice:
        subject = f"{next(iter(given))}={product}"
    else:
        numbers = [*twice, *map(str, given.values())]
        subject = f"{'*'.join([*twice, *given])}={'*'.join(numbers)}={product}"
    legal = {
        axis: divisors(number // (product // degree))
        for axis, degree in given.items()
        if number % (product // degree) == 0
    }
    if not legal:  # no degree alone makes it divide
        if len(given) > 1 and number % factor == 0:
            legal["*".join(given)] = divisors(number // factor)
        if name in ADJUSTABLE:
            below = number // product * product
            legal[name] = tuple(n for n in (below, below + product) if n > 0)
    yield Violation(
        rule=rule,
        values={**given, name: number},
        reason=f"{subject} does not divide {name}={number}",
        legal=legal,
    )


def heads_over_tp(subject: Subject) -> Iterator[Violation]:
    """Attention heads divide over tp."""
    yield from _split(subject, "heads-tp", "heads", "tp")


def kv_heads_over_tp(subject: Subject) -> Iterator[Violation]:
    """Key and value heads divide over tp, so fewer of them than tp is an error too."""
    yield from _split(subject, "kv-heads-tp", "kv_heads", "tp")


def heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    """The heads of one tp rank divide over its Ulysses group."""
    if (subject.ulysses_degree or 1) > 1:
        yield from _split(subject, "heads-ulysses", "heads", "tp", "ulysses_degree")


def kv_heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    """Ulysses ranks get equal shares of a tp rank's kv heads, or equally many share each head."""
    ulysses, tp = subject.ulysses_degree or 1, subject.degrees["tp"]
    if ulysses == 1:
        return
    name, kv_heads = _field(subject, "kv_heads")
    kv = kv_heads // tp
    if kv_heads % tp or _shares(kv, ulysses):  # where tp does not divide them, that is the error
        return
    owner = f"{name}={kv_heads}" if tp == 1 else f"{name}/tp={kv_heads}/{tp}={kv}"
    yield Violation(
        rule="kv-heads-ulysses",
        values={"ulysses_degree": ulysses, **({"tp": tp} if tp > 1 else {}), name: kv_heads},
        reason=f"ulysses_degree={ulysses} neither divides {owner} nor is a multiple of it",
        legal={
            "ulysses_degree": tuple(u for u in divisors(subject.degrees["cp"]) if _shares(kv, u))
        },
    )


def _shares(kv_heads: int, ulysses: int) -> bool:
    return kv_heads % ulysses == 0 or ulysses % kv_heads == 0


def experts_over_ep(subject: Subject) -> Iterator[Violation]:
    """Experts divide over ep; a model without experts has nothing to divide."""
    name, experts = subject.numbers.get("experts", ("experts", None))
    ep = subject.degrees["ep"]
    if experts == 0 and ep > 1:
        yield Violation(
            rule="experts-ep",
            values={"ep": ep, name: 0},
            reason=f"ep={ep} has no experts to divide: {name}=0",
            legal={"ep": (1,)},
        )
        return
    yield from _split(subject, "experts-ep", "experts", "ep")


def ffn_over_tp(subject: Subject) -> Iterator[Violation]:
    """The feed-forward width divides over tp."""
    yield from _split(subject, "ffn-tp", "ffn", "tp")


def vocab_over_tp(subject: Subject) -> Iterator[Violation]:
    """The vocabulary divides over tp."""
    yield from _split(subject, "vocab-tp", "vocab", "tp")


def sequence_over_cp_and_tp(subject: Subject) -> Iterator[Violation]:
    """A sequence divides over cp and tp; balanced causal attention cuts it into twice cp parts."""
    cp, tp = subject.degrees["cp"], subject.degrees["tp"]
    if cp * tp == 1:
        return
    factor = 2 if subject.causal_balance and cp > 1 else 1
    rule = "sequence-balance" if factor == 2 else "sequence"
    yield from _indivisible(rule, *_field(subject, "seq_len"), {"cp": cp, "tp": tp}, factor)


def batch_over_dp(subject: Subject) -> Iterator[Violation]:
    """Every data-parallel rank gets the same number of samples."""
    yield from _split(subject, "batch", "global_batch", "dp_replicate", "dp_shard")


RULES: tuple[Rule, ...] = (
    heads_over_tp,
    kv_heads_over_tp,
    heads_over_ulysses,
    kv_heads_over_ulysses,
    experts_over_ep,
    ffn_over_tp,
    vocab_over_tp,
    sequence_over_cp_and_tp,
    batch_over_dp,
)


def check_rules(subject: Subject) -> Report:
    """Return the wrong numbers and what every rule finds.

    A rule whose field is absent is skipped and the field named; one whose field is wrong is not
    asked either.
    """
    violations = list(subject.wrong.values())
    skipped: dict[str, None] = {}
    for rule in RULES:
        try:
            violations += rule(subject)
        except Absent as absent:
            if str(absent) not in subject.wrong:
                skipped[str(absent)] = None
    return Report(violations, skipped)
