"""What a decoder model, its sequences and its batches ask of the degrees: a table of functions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from ._errors import Level, Report, Violation, divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What one check looks at: resolved degrees, numbers of model, sequence and batch.

    ``degrees`` have the Ulysses degree too, 1 where there is none; ``sharding`` are the axes, next
    to ``dp_replicate``, whose ranks see other samples. ``numbers`` are ``{field: (its spelling, its
    value)}``; ``wrong`` has the fields that are given, but are none. With ``sequence_parallel``
    ranks of tp hold parts of the sequence between the layers.
    """

    degrees: Mapping[str, int]
    sharding: tuple[str, ...]
    numbers: Mapping[str, tuple[str, int]]
    wrong: Mapping[str, Violation]
    causal_balance: bool
    sequence_parallel: bool = True


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
    degrees = {axis: subject.degrees[axis] for axis in axes}
    if prod(degrees.values()) > 1:
        yield from _indivisible(rule, *_field(subject, field), degrees)


def _indivisible(
    rule: str,
    name: str,
    number: int,
    degrees: Mapping[str, int],
    factor: int = 1,
    level: Level = "error",
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
        level=level,
    )


def heads_over_tp(subject: Subject) -> Iterator[Violation]:
    """Attention heads divide over tp."""
    yield from _split(subject, "heads-tp", "heads", "tp")


def kv_heads_over_tp(subject: Subject) -> Iterator[Violation]:
    """Key and value heads divide over tp, so fewer of them than tp is an error too."""
    yield from _split(subject, "kv-heads-tp", "kv_heads", "tp")


def heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    """Every Ulysses rank of a tp rank gets a head of it, best equally many."""
    ulysses, tp = subject.degrees["ulysses_degree"], subject.degrees["tp"]
    if ulysses > 1:
        name, heads = _field(subject, "heads")
        degrees = {"tp": tp, "ulysses_degree": ulysses}
        level: Level = "error" if heads < tp * ulysses else "advice"
        fitting = divisors(subject.degrees["cp"])
        for found in _indivisible("heads-ulysses", name, heads, degrees, level=level):
            legal = dict(found.legal)
            if "ulysses_degree" in legal:
                legal["ulysses_degree"] = tuple(n for n in legal["ulysses_degree"] if n in fitting)
            yield replace(found, legal=legal)


def kv_heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    """Ulysses ranks best get equal shares of a tp rank's kv heads, or equally many share each."""
    ulysses, tp = subject.degrees["ulysses_degree"], subject.degrees["tp"]
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
        level="advice",
    )


def _shares(kv_heads: int, ulysses: int) -> bool:
    return kv_heads % ulysses == 0 or ulysses % kv_heads == 0


def experts_over_ep(subject: Subject) -> Iterator[Violation]:
    """Experts divide over ep; a model without experts has nothing to divide."""
    ep = subject.degrees["ep"]
    if ep == 1:
        return
    name, experts = _field(subject, "experts")
    if experts:
        yield from _indivisible("experts-ep", name, experts, {"ep": ep})
    else:
        yield Violation(
            rule="experts-ep",
            values={"ep": ep, name: 0},
            reason=f"ep={ep} has no experts to divide: {name}=0",
            legal={"ep": (1,)},
        )


def expert_ffn_over_etp(subject: Subject) -> Iterator[Violation]:
    """The feed-forward width of an expert divides over etp; a model without experts has none."""
    etp = subject.degrees["etp"]
    if etp == 1 or ("experts" in subject.numbers and _field(subject, "experts")[1] == 0):
        return
    name, width = _field(subject, "expert_ffn")
    if width % etp:
        yield Violation(
            rule="expert-ffn-etp",
            values={"etp": etp, name: width},
            reason=f"etp={etp} does not divide {name}={width}",
            legal={"etp": (1,)},  # or tp, which it is
        )


def ffn_over_tp(subject: Subject) -> Iterator[Violation]:
    """The feed-forward width divides over tp."""
    yield from _split(subject, "ffn-tp", "ffn", "tp")


def vocab_over_tp(subject: Subject) -> Iterator[Violation]:
    """The vocabulary divides over tp."""
    yield from _split(subject, "vocab-tp", "vocab", "tp")


def layers_over_pp(subject: Subject) -> Iterator[Violation]:
    """Every pipeline stage gets a layer, best equally many."""
    pp = subject.degrees["pp"]
    if pp == 1:
        return
    name, layers = _field(subject, "layers")
    values = {"pp": pp, name: layers}
    if layers < pp:
        yield Violation(
            rule="layers-pp",
            values=values,
            reason=f"pp={pp} is more stages than {name}={layers}",
            legal={"pp": divisors(layers)},
        )
    elif layers % pp:
        few, more = layers // pp, layers // pp + 1
        yield Violation(
            rule="layers-pp",
            values=values,
            reason=f"pp={pp} does not divide {name}={layers}: stages of {few} and {more} layers",
            legal={"pp": divisors(layers)},
            level="advice",
        )


def tied_embeddings_on_one_stage(subject: Subject) -> Iterator[Violation]:
    """Tied embeddings best are on one stage: two keep the weight twice and sum its gradients."""
    pp = subject.degrees["pp"]
    if pp == 1:
        return
    name, tied = _field(subject, "tied")
    if tied:
        yield Violation(
            rule="tied-pp",
            values={"pp": pp, name: tied},
            reason=f"pp={pp} with {name}=True keeps the embedding on the first and the last stage: "
            "both hold it with its gradient and optimizer state, and its gradients must be summed "
            "over the two in each step",
            legal={"pp": (1,)},
            level="advice",
        )


def sequence_over_cp_and_tp(subject: Subject) -> Iterator[Violation]:
    """A sequence divides over cp and tp; balanced causal attention cuts it into twice cp parts.

    Without tp, or where tp ranks all hold the whole sequence, the parts may be unequal, which costs
    balance.
    """
    cp, tp = subject.degrees["cp"], subject.degrees["tp"]
    if not subject.sequence_parallel:
        tp = 1
    if cp * tp == 1:
        return
    factor = 2 if subject.causal_balance and cp > 1 else 1
    rule = "sequence-balance" if factor == 2 else "sequence"
    name, seq_len = _field(subject, "seq_len")
    level: Level = "advice" if tp == 1 and seq_len >= factor * cp else "error"
    yield from _indivisible(rule, name, seq_len, {"cp": cp, "tp": tp}, factor, level)


def batch_over_dp(subject: Subject) -> Iterator[Violation]:
    """Every data-parallel rank gets the same number of samples."""
    yield from _split(subject, "batch", "global_batch", "dp_replicate", *subject.sharding)


# By the code of what they find; a code may go on after it, as in sequence-balance.
RULES: Mapping[str, Rule] = {
    "heads-tp": heads_over_tp,
    "kv-heads-tp": kv_heads_over_tp,
    "heads-ulysses": heads_over_ulysses,
    "kv-heads-ulysses": kv_heads_over_ulysses,
    "experts-ep": experts_over_ep,
    "expert-ffn-etp": expert_ffn_over_etp,
    "ffn-tp": ffn_over_tp,
    "vocab-tp": vocab_over_tp,
    "layers-pp": layers_over_pp,
    "tied-pp": tied_embeddings_on_one_stage,
    "sequence": sequence_over_cp_and_tp,
    "batch": batch_over_dp,
}


def check_rules(subject: Subject) -> Report:
    """Return the wrong numbers and what every rule finds.

    A rule whose field is absent is skipped and the field named; one whose field is wrong is not
    asked either.
    """
    violations = list(subject.wrong.values())
    skipped: dict[str, None] = {}
    for rule in RULES.values():
        try:
            violations += rule(subject)
        except Absent as absent:
            if str(absent) not in subject.wrong:
                skipped[str(absent)] = None
    return Report(violations, skipped)
