"""All rules that `ParallelDims.check` evaluates.

`DEGREE_RULES` has the rules that compare degrees only. `RULES` has the rules that compare degrees
with the sizes of a model, its sequences and its batch. Each entry is a `Rule` object. The methods
`check`, `validate` and `explain` of `ParallelDims`, and the planner, evaluate these `Rule` objects.
`topology_violations` and `explain_topology` evaluate the rules about the nodes of a cluster.

A rule can read a field of the model only if the table `RULED` in the module `_model` and the class
`ModelShape` of the planner have the field. Some conditions are functions elsewhere: `_degrees` has
those about ``order`` and about several degrees of -1, and `planner._configuration` has those that
only the planner needs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ._errors import (
    Explanation,
    Level,
    Report,
    Verdict,
    Violation,
    as_degree,
    broken,
    divisors,
    plural,
    refusal,
    show,
)
from ._layout import RankLayout

SUGGESTED = ("seq_len", "global_batch")  # fields for which a violation may suggest other values
NODE_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "etp", "cp", "tp")  # fast inside one node
SHARDING = "sharding"  # placeholder in `Rule.degrees` for all names in `Subject.sharding`


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Input of all rules: degrees, numbers of the model, its sequences and batch, and options.

    One of these numbers is called a field. Its name is an hp-mesh name, such as ``"heads"`` or
    ``"seq_len"``. Its value is an integer or a bool.

    Attributes:
        degrees: A key is the name of a degree, and the value is a positive integer. The value of
            ``ulysses_degree`` is 1 if Ulysses attention is not used. A degree that is not known yet
            has no entry.
        sharding: Names of the degrees that split the batch in addition to ``dp_replicate``. They
            are ``dp_shard`` and, if ``ep_mode`` is ``"peer"``, ``ep``.
        numbers: A key is a field with a valid value, such as ``"heads"``. The value is a pair: the
            field's name in the model's configuration, such as ``"num_attention_heads"``, and its
            value.
        wrong: A key is a field with an invalid value. The value is the violation to report.
        causal_balance: If True, ``2 * cp`` must divide the sequence length.
        sequence_parallel: If True, activations between layers are sharded over ``tp`` along the
            sequence.
        ep_mode: With ``"folded"``, experts reuse the ranks of ``dp_shard``, ``cp`` and ``tp``. With
            ``"peer"``, ``ep`` is another factor of the world size.
        free_etp: If True, ``etp`` may differ from 1 and ``tp``.
    """

    degrees: Mapping[str, int]
    sharding: tuple[str, ...] = ("dp_shard",)
    numbers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    wrong: Mapping[str, Violation] = field(default_factory=dict)
    causal_balance: bool = False
    sequence_parallel: bool = True
    ep_mode: str = "folded"
    free_etp: bool = False


Test: TypeAlias = Callable[[Subject], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition that degrees, or degrees and sizes of the model, must meet.

    Attributes:
        code: Code of the rule, such as ``"heads-tp"``. `Violation.rule` is this code, or begins
            with this code.
        sentence: The rule as an English sentence, for users.
        degrees: Names of the degrees that the rule reads. The name `SHARDING` means all names in
            `Subject.sharding`.
        test: Function that takes a `Subject` and yields the violations of this rule. `judge` calls
            it only if the rule applies, all ``degrees`` are known, and all ``fields`` are valid.
        fields: Keys of `Subject.numbers` that the rule needs, such as ``"heads"``. If a key is
            absent, `judge` does not call ``test``.
        hints: Keys of `Subject.numbers` that the rule reads too, but that may be absent.
        applies: Function that takes a `Subject` and returns whether the rule applies. Defaults to
            None: the rule applies if at least one of its ``degrees`` is above 1.
    """

    code: str
    sentence: str
    degrees: tuple[str, ...]
    test: Test
    fields: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    applies: Callable[[Subject], bool] | None = None


class RuleResult(NamedTuple):
    """Result of the function `judge` for one rule.

    Attributes:
        verdict: One of five strings.

            - ``"idle"``: the rule does not apply, or one of its degrees is unknown.
            - ``"skipped"``: the rule applies, but a field that it needs is absent.
            - ``"holds"``: the rule was tested and is not broken.
            - ``"advice"``: the rule is broken, and all violations have the level ``"advice"``.
            - ``"error"``: the rule is broken, or a field that it needs has an invalid value.
        violations: The violations for the verdict ``"advice"`` or ``"error"``. Otherwise empty.
        unusable_field: Name of the first needed field that is absent or invalid, such as
            ``"heads"``. None if no field prevented the test of the rule.
    """

    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    unusable_field: str | None = None


def judge(rule: Rule, subject: Subject) -> RuleResult:
    """Evaluate one rule.

    Args:
        rule: The rule.
        subject: Degrees and sizes that the rule reads.

    Returns:
        A `RuleResult` with the verdict, such as ``"holds"`` or ``"error"``, and the violations.
    """
    degrees = _select(rule.degrees, subject)
    if None in degrees.values():
        return RuleResult("idle")
    above_one = any(degree != 1 for degree in degrees.values())
    if not (rule.applies(subject) if rule.applies else above_one):
        return RuleResult("idle")
    for needed in rule.fields:
        if needed in subject.wrong:
            return RuleResult("error", (subject.wrong[needed],), needed)
        if needed not in subject.numbers:
            return RuleResult("skipped", (), needed)
    found = tuple(rule.test(subject))
    levels = {violation.level for violation in found}
    return RuleResult("error" if "error" in levels else "advice" if levels else "holds", found)


def expand_sharding(degrees: tuple[str, ...], subject: Subject) -> tuple[str, ...]:
    """Return names of degrees without the placeholder `SHARDING`.

    The names in ``subject.sharding`` take its position. For example, ``("dp_replicate", SHARDING)``
    becomes ``("dp_replicate", "dp_shard")``, or ``("dp_replicate", "dp_shard", "ep")`` if
    ``ep_mode`` is ``"peer"``.

    Args:
        degrees: Names of degrees, as in `Rule.degrees`.
        subject: Input of the rules.
    """
    return tuple(n for name in degrees for n in (subject.sharding if name == SHARDING else (name,)))


def _select(names: tuple[str, ...], subject: Subject) -> dict[str, Any]:
    """Select degrees of ``subject``.

    Args:
        names: Names of degrees, as in `Rule.degrees`.
        subject: Input of the rules.

    Returns:
        A dict. A key is the name of a degree, and the value is a positive integer, or None if the
        degree is not known.
    """
    return {name: subject.degrees.get(name) for name in expand_sharding(names, subject)}


def degree_violations(subject: Subject) -> Iterator[Violation]:
    """Yield the violations of `DEGREE_RULES`, the rules that compare degrees only.

    Args:
        subject: Input of the rules. Only the degrees and their options are read.
    """
    for rule in DEGREE_RULES:
        yield from judge(rule, subject).violations


def check_rules(subject: Subject) -> Report:
    """Evaluate `RULES`, the rules about the model, its sequences and its batch.

    Args:
        subject: Degrees and sizes that the rules read.

    Returns:
        A `Report`. The violations in ``subject.wrong`` come first, then the violations of the
        rules. `Report.skipped` has the absent fields that a rule needs. A rule with an absent or
        invalid field is not tested.
    """
    violations = list(subject.wrong.values())
    skipped: dict[str, None] = {}
    for rule in RULES:
        found = judge(rule, subject)
        if found.unusable_field is None:
            violations += found.violations
        elif found.unusable_field not in subject.wrong:
            skipped[found.unusable_field] = None
    return Report(violations, skipped)


def explain_rules(subject: Subject, axes: tuple[str, ...]) -> tuple[Explanation, ...]:
    """Explain the rules of `DEGREE_RULES` and `RULES`.

    Args:
        subject: Degrees and sizes. All degrees must be known.
        axes: Names of the degrees that multiply to the world size.

    Returns:
        One `Explanation` for the rule ``"product"`` about the world size, then one for each rule
        of `DEGREE_RULES`, then one for each rule of `RULES`.
    """
    world = prod(subject.degrees[axis] for axis in axes)
    given = {axis: subject.degrees[axis] for axis in axes if subject.degrees[axis] > 1}
    given = given or {"dp_shard": 1}
    product = Explanation(
        rule="product",
        sentence="The degrees of the world's axes multiply to its ranks.",
        values={**given, "world_size": world},
        verdict="holds",
        text=f"{'*'.join(given)}={'*'.join(map(str, given.values()))} is world_size={world}",
    )
    return product, *(_explain(rule, subject) for rule in (*DEGREE_RULES, *RULES))


def _explain(rule: Rule, subject: Subject) -> Explanation:
    found = judge(rule, subject)
    values: dict[str, object] = _select(rule.degrees, subject)
    if found.verdict != "idle":
        read = (*rule.hints, *rule.fields)
        values |= dict(subject.numbers[name] for name in read if name in subject.numbers)
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    if found.violations:
        text = "; ".join(map(str, found.violations))
    elif found.unusable_field:
        text = f"{text}, but {found.unusable_field} is not known"
    return Explanation(
        rule=rule.code, sentence=rule.sentence, values=values, verdict=found.verdict, text=text
    )


def _divides(code: str, sentence: str, field: str, *degrees: str) -> Rule:
    """Create a rule: the product of some degrees must divide one field.

    Args:
        code: Code of the rule.
        sentence: The rule as an English sentence.
        field: Key of `Subject.numbers`, such as ``"heads"``.
        *degrees: Names of the factors of the product.
    """

    def test(subject: Subject) -> Iterator[Violation]:
        yield from division_violations(code, *subject.numbers[field], _select(degrees, subject))

    return Rule(code=code, sentence=sentence, degrees=degrees, fields=(field,), test=test)


def division_violations(
    rule: str,
    name: str,
    number: int,
    degrees: Mapping[str, int],
    *,
    factor: int = 1,
    exactly: bool = False,
    choices: Mapping[str, Collection[int]] | None = None,
    level: Level = "error",
) -> Iterator[Violation]:
    """Yield one violation if the product of the degrees does not divide the number.

    Args:
        rule: Code of the rule.
        name: Name of the number in the message, such as ``"num_attention_heads"``.
        number: A positive integer.
        degrees: Factors of the product. A key is the name of a degree, and the value is a positive
            integer.
        factor: One more factor of the product. If it is above 1, the message shows it before the
            degrees, as in ``2*cp``.
        exactly: If True, the product must be equal to the number.
        choices: A key is the name of a degree. The violation suggests only values in its entry. If
            a degree has no entry, the violation suggests every value with which the rule holds.
        level: Level of the violation, ``"error"`` or ``"advice"``.
    """
    product = factor * prod(degrees.values())
    if product == number or (number % product == 0 and not exactly):
        return
    given = {axis: degree for axis, degree in degrees.items() if degree > 1} or degrees
    factors = {**({str(factor): factor} if factor > 1 else {}), **given}
    subject = f"{'*'.join(factors)}={'*'.join(map(str, factors.values()))}"
    if len(factors) > 1:
        subject = f"{subject}={product}"
    legal = {}
    for axis, degree in given.items():
        rest = product // degree
        if number % rest == 0:
            fitting = (number // rest,) if exactly else divisors(number // rest)
            legal[axis] = tuple(n for n in fitting if n in (choices or {}).get(axis, fitting))
    if not legal:  # several degrees or the number must change
        if len(given) > 1 and number % factor == 0:
            legal["*".join(given)] = (number,) if exactly else divisors(number // factor)
        if name in SUGGESTED:
            below = number // product * product
            legal[name] = tuple(n for n in (below, below + product) if n > 0)
    relation = "is not" if exactly else "does not divide"
    reason = f"{subject} {relation} {name}={number}"
    yield broken(rule, reason, {**given, name: number}, legal, level)


def _etp(subject: Subject) -> Iterator[Violation]:
    tp, etp = subject.degrees["tp"], subject.degrees["etp"]
    if etp not in (1, tp):
        reason = f"etp={etp} is neither 1 nor tp={tp}"
        yield broken("etp", reason, {"etp": etp, "tp": tp}, {"etp": tuple(sorted({1, tp}))})


def _ulysses(subject: Subject) -> Iterator[Violation]:
    ulysses = {"ulysses_degree": subject.degrees["ulysses_degree"]}
    yield from division_violations("ulysses", "cp", subject.degrees["cp"], ulysses)


def _sparse(subject: Subject) -> Iterator[Violation]:
    degrees = subject.degrees
    ep, etp = degrees["ep"], degrees["etp"]
    around = {name: degrees[name] for name in ("dp_shard", "cp", "tp") if name in degrees}
    if len(around) == 3:
        ranks = prod(around.values())
        parts = ", ".join(f"{name}={degree}" for name, degree in around.items())
        whole = f"dp_shard*cp*tp={ranks} ({parts})"
    elif "world_size" in degrees:  # dp_shard*cp*tp is unknown, but divides the world size
        ranks = degrees["world_size"]
        around = {"world_size": ranks}
        whole = f"world_size={ranks}"
    else:
        return
    if ranks % (ep * etp) == 0:
        return
    named = f"ep={ep}" if etp == 1 else f"ep={ep}*etp={etp}={ep * etp}"
    legal = {"ep*etp": divisors(ranks)} if ranks % etp else {"ep": divisors(ranks // etp)}
    reason = f"{named} does not divide {whole}"
    yield broken("sparse", reason, {"ep": ep, "etp": etp, **around}, legal)


def _heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    ulysses, tp = subject.degrees["ulysses_degree"], subject.degrees["tp"]
    name, heads = subject.numbers["heads"]
    yield from division_violations(
        "heads-ulysses",
        name,
        heads,
        {"tp": tp, "ulysses_degree": ulysses},
        choices={"ulysses_degree": divisors(subject.degrees["cp"])},
        level="error" if heads < tp * ulysses else "advice",
    )


def _kv_heads_over_ulysses(subject: Subject) -> Iterator[Violation]:
    ulysses, tp = subject.degrees["ulysses_degree"], subject.degrees["tp"]
    name, kv_heads = subject.numbers["kv_heads"]
    kv = kv_heads // tp
    if kv_heads % tp or _shares(
        kv, ulysses
    ):  # if tp does not divide kv_heads, the rule kv-heads-tp reports it
        return
    owner = f"{name}={kv_heads}" if tp == 1 else f"{name}/tp={kv_heads}/{tp}={kv}"
    reason = f"ulysses_degree={ulysses} neither divides {owner} nor is a multiple of it"
    values = {"ulysses_degree": ulysses, **({"tp": tp} if tp > 1 else {}), name: kv_heads}
    fitting = tuple(u for u in divisors(subject.degrees["cp"]) if _shares(kv, u))
    yield broken("kv-heads-ulysses", reason, values, {"ulysses_degree": fitting}, "advice")


def _shares(kv_heads: int, ulysses: int) -> bool:
    return kv_heads % ulysses == 0 or ulysses % kv_heads == 0


def _experts_over_ep(subject: Subject) -> Iterator[Violation]:
    ep = subject.degrees["ep"]
    name, experts = subject.numbers["experts"]
    if experts:
        yield from division_violations("experts-ep", name, experts, {"ep": ep})
    else:
        reason = f"ep={ep} has no experts to divide: {name}=0"
        yield broken("experts-ep", reason, {"ep": ep, name: 0}, {"ep": (1,)})


def _expert_ffn_over_etp(subject: Subject) -> Iterator[Violation]:
    etp = {"etp": subject.degrees["etp"]}
    choices = (
        None if subject.free_etp else {"etp": (1,)}
    )  # etp must be 1 or tp, and tp does not work
    yield from division_violations(
        "expert-ffn-etp", *subject.numbers["expert_ffn"], etp, choices=choices
    )


def _ffn_over_tp(subject: Subject) -> Iterator[Violation]:
    name, width = subject.numbers["ffn"]
    hints = ("experts", "expert_ffn", "dense_layers")
    experts, own, dense = (subject.numbers.get(hint, ("", None))[1] for hint in hints)
    if not (experts and own not in (None, width) and dense == 0):
        yield from division_violations("ffn-tp", name, width, {"tp": subject.degrees["tp"]})


def _layers_over_pp(subject: Subject) -> Iterator[Violation]:
    pp = subject.degrees["pp"]
    name, layers = subject.numbers["layers"]
    values, legal = {"pp": pp, name: layers}, {"pp": divisors(layers)}
    if layers < pp:
        yield broken("layers-pp", f"pp={pp} is more stages than {name}={layers}", values, legal)
    elif layers % pp:
        few, more = layers // pp, layers // pp + 1
        reason = f"pp={pp} does not divide {name}={layers}: stages of {few} and {more} layers"
        yield broken("layers-pp", reason, values, legal, "advice")


def _tied_on_one_stage(subject: Subject) -> Iterator[Violation]:
    pp = subject.degrees["pp"]
    name, tied = subject.numbers["tied"]
    if tied:
        reason = (
            f"pp={pp} with {name}=True keeps the embedding on the first and the last stage: both "
            "hold it with its gradient and optimizer state, and its gradients must be summed over "
            "the two in each step"
        )
        yield broken("tied-pp", reason, {"pp": pp, name: tied}, {"pp": (1,)}, "advice")


def _sequence_degrees(subject: Subject) -> dict[str, int]:
    tp = subject.degrees["tp"] if subject.sequence_parallel else 1
    return {"cp": subject.degrees["cp"], "tp": tp}


def _sequence(subject: Subject) -> Iterator[Violation]:
    degrees = _sequence_degrees(subject)
    factor = 2 if subject.causal_balance and degrees["cp"] > 1 else 1
    rule = "sequence-balance" if factor == 2 else "sequence"
    name, seq_len = subject.numbers["seq_len"]
    uneven = degrees["tp"] == 1 and seq_len >= factor * degrees["cp"]
    level: Level = "advice" if uneven else "error"
    yield from division_violations(rule, name, seq_len, degrees, factor=factor, level=level)


DEGREE_RULES = (
    Rule(
        code="etp",
        sentence="The ranks of tp split each expert as they split a layer, or not at all.",
        degrees=("tp", "etp"),
        applies=lambda subject: not subject.free_etp or subject.ep_mode == "peer",
        test=_etp,
    ),
    Rule(
        code="ulysses",
        sentence="Ulysses groups are parts of the context parallel group.",
        degrees=("cp", "ulysses_degree"),
        applies=lambda subject: True,
        test=_ulysses,
    ),
    Rule(
        code="sparse",
        sentence="Folded experts use the ranks of dp_shard, cp and tp.",
        degrees=("ep", "etp"),
        applies=lambda subject: subject.ep_mode == "folded",
        test=_sparse,
    ),
)
RULES = (
    _divides("heads-tp", "Attention heads divide over tp.", "heads", "tp"),
    _divides(
        "kv-heads-tp",
        "Key and value heads divide over tp, so there are at least tp of them.",
        "kv_heads",
        "tp",
    ),
    Rule(
        code="heads-ulysses",
        sentence="Each Ulysses rank gets at least one head of its tp rank. Equal numbers are "
        "fastest.",
        degrees=("ulysses_degree", "tp"),
        fields=("heads",),
        applies=lambda subject: subject.degrees["ulysses_degree"] > 1,
        test=_heads_over_ulysses,
    ),
    Rule(
        code="kv-heads-ulysses",
        sentence="Ulysses ranks get equal numbers of a tp rank's kv heads, or equal numbers of "
        "ranks share each kv head. Other numbers work, but cost balance.",
        degrees=("ulysses_degree", "tp"),
        fields=("kv_heads",),
        applies=lambda subject: subject.degrees["ulysses_degree"] > 1,
        test=_kv_heads_over_ulysses,
    ),
    Rule(
        code="experts-ep",
        sentence="Experts divide over ep. Without experts, ep is 1.",
        degrees=("ep",),
        fields=("experts",),
        test=_experts_over_ep,
    ),
    Rule(
        code="expert-ffn-etp",
        sentence="The feed-forward width of an expert divides over etp.",
        degrees=("etp",),
        fields=("expert_ffn",),
        hints=("experts",),
        applies=lambda s: s.degrees["etp"] > 1 and s.numbers.get("experts", ("", 1))[1] != 0,
        test=_expert_ffn_over_etp,
    ),
    Rule(
        code="ffn-tp",
        sentence="The feed-forward width divides over tp, unless all layers have experts of "
        "another width.",
        degrees=("tp",),
        fields=("ffn",),
        hints=("experts", "expert_ffn", "dense_layers"),
        test=_ffn_over_tp,
    ),
    _divides("vocab-tp", "The vocabulary divides over tp.", "vocab", "tp"),
    Rule(
        code="layers-pp",
        sentence="Each pipeline stage gets at least one layer. Equal numbers are fastest.",
        degrees=("pp",),
        fields=("layers",),
        test=_layers_over_pp,
    ),
    Rule(
        code="tied-pp",
        sentence="Tied embeddings are on one pipeline stage. Two stages would both hold the weight "
        "and sum its gradients.",
        degrees=("pp",),
        fields=("tied",),
        test=_tied_on_one_stage,
    ),
    Rule(
        code="sequence",
        sentence="A sequence divides over cp and tp; with balanced causal attention over 2*cp. "
        "Without tp, or if the ranks of tp hold whole sequences, unequal parts work, but cost "
        "balance.",
        degrees=("cp", "tp"),
        fields=("seq_len",),
        applies=lambda subject: prod(_sequence_degrees(subject).values()) > 1,
        test=_sequence,
    ),
    _divides(
        "batch",
        "Each data-parallel rank gets the same number of samples.",
        "global_batch",
        "dp_replicate",
        SHARDING,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Number of ranks per node. Node ``i`` starts at rank ``i * ranks_per_node``.

    Args:
        ranks_per_node: Number of ranks that share the fast links of one node.

    Raises:
        ParallelDimsError: ``ranks_per_node`` is not a positive integer.

    Examples:
        >>> dims = ParallelDims(tp=8, world_size=16)
        >>> [str(advice) for advice in dims.check({}, topology=Topology(ranks_per_node=4))]
        ['dp_shard=2 crosses nodes of 4 ranks', 'tp=8 crosses nodes of 4 ranks']
    """

    ranks_per_node: int

    def __post_init__(self) -> None:
        number = as_degree("ranks_per_node", self.ranks_per_node)
        object.__setattr__(self, "ranks_per_node", number)


def topology_violations(layout: RankLayout, topology: Topology) -> Iterator[Violation]:
    """Yield the violations of the rules about the nodes of a cluster.

    - If there are more ranks than one node has, and ``ranks_per_node`` does not divide the world
      size, the function yields one violation of level ``"error"``.
    - Otherwise it yields one violation of level ``"advice"`` for each mesh dimension with groups
      that cross nodes.

    Args:
        layout: Groups of all ranks.
        topology: Number of ranks per node.

    Raises:
        ParallelDimsError: ``topology`` is not a `Topology`.
    """
    return (found for _, found in _judge_nodes(layout, topology) if found)


def explain_topology(layout: RankLayout, topology: Topology) -> tuple[Explanation, ...]:
    """Explain whether the ranks fill the nodes, and which mesh dimensions cross nodes.

    Args:
        layout: Groups of all ranks.
        topology: Number of ranks per node.

    Returns:
        One `Explanation` for the world size, then one for each mesh dimension in `NODE_AXES`.

    Raises:
        ParallelDimsError: ``topology`` is not a `Topology`.
    """
    return tuple(explanation for explanation, _ in _judge_nodes(layout, topology))


def _judge_nodes(
    layout: RankLayout, topology: object
) -> Iterator[tuple[Explanation, Violation | None]]:
    """Check that the ranks fill whole nodes, and compare the groups of `NODE_AXES` with a node.

    Yields:
        A pair for each rule: the explanation, and the violation. The violation is None if the rule
        is not broken.
    """
    if not isinstance(topology, Topology):
        reason = f"topology={show(topology)} is not a Topology; use Topology(ranks_per_node=8)"
        raise refusal("topology", reason, {"topology": topology})
    node, world = topology.ranks_per_node, layout.world_size
    nodes = f"nodes of {plural(node, 'rank')}"
    uneven = world > node and world % node != 0
    for axis in ("world_size", *NODE_AXES):
        size = world if axis == "world_size" else layout.size(axis)
        rule = "topology" if axis == "world_size" else f"node-{axis.replace('_', '-')}"
        values, violation = {axis: size, "ranks_per_node": node}, None
        if axis == "world_size" and uneven:
            text = f"ranks_per_node={node} does not divide {axis}={size}"
            violation = broken(rule, text, values, {"ranks_per_node": divisors(size)})
        elif axis == "world_size":
            fills = f"fits one node of {plural(node, 'rank')}" if size < node else f"fills {nodes}"
            text = f"{axis}={size} {fills}"
        elif uneven:
            text = f"{axis}={size}, but the ranks do not fill {nodes}"
        elif size > 1 and layout.crosses_nodes(axis, node):
            text = f"{axis}={size} crosses {nodes}"
            violation = broken(rule, text, values, level="advice")
        else:
            text = f"{axis}={size} stays inside {nodes}"
        verdict: Verdict = "idle" if uneven or size == 1 else "holds"
        explanation = Explanation(
            rule=rule,
            sentence="Groups inside one node use its fast links only.",
            values=values,
            verdict=violation.level if violation else verdict,
            text=str(violation or text),
        )
        yield explanation, violation
