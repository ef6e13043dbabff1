"""Every rule with the numbers that it looks at, whether they keep it or not."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeAlias, TypeVar

from ._degrees import resolved_rules, world_axes
from ._errors import Violation
from ._layout import RankLayout
from ._rules import RULES, Absent, Subject
from ._topology import AXES, Topology, node_size, topology_violations

Verdict: TypeAlias = Literal["holds", "error", "advice", "skipped", "idle"]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What one rule says.

    ``rule`` is the code that its violations have, ``sentence`` the rule itself, ``values`` the
    numbers that it looked at. ``verdict`` is ``"holds"``, ``"error"`` or ``"advice"``,
    ``"skipped"`` where a field that it needs is absent, ``"idle"`` where the degrees leave it
    nothing to ask. ``text`` has it all.
    """

    rule: str
    sentence: str
    values: Mapping[str, object] = field(hash=False)
    verdict: Verdict
    text: str


class _Seen(Mapping[str, Value]):
    """A mapping that remembers which of its entries were looked at."""

    def __init__(self, content: Mapping[str, Value]) -> None:
        self._content = content
        self.keys_seen: dict[str, None] = {}

    def __getitem__(self, key: str) -> Value:
        self.keys_seen[key] = None
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def explain_rules(
    subject: Subject, ep_mode: str, *, free_etp: bool = False
) -> tuple[Explanation, ...]:
    """Return an explanation of each rule of degrees and of each rule of models."""
    explanations = [_explain_product(subject.degrees, world_axes(ep_mode))]
    for code, degree_rule in resolved_rules(ep_mode, free_etp=free_etp).items():
        degrees = _Seen(subject.degrees)
        found = [*degree_rule(degrees)]
        explanations.append(_conclude(code, degree_rule, degrees, _Seen({}), found))
    for code, rule in RULES.items():
        degrees, numbers = _Seen(subject.degrees), _Seen(subject.numbers)
        try:
            found = [*rule(replace(subject, degrees=degrees, numbers=numbers))]
        except Absent as absent:
            wrong = subject.wrong.get(str(absent))
            found, missing = [wrong] if wrong else [], None if wrong else str(absent)
            explanations.append(_conclude(code, rule, degrees, numbers, found, missing=missing))
        else:
            idle = not numbers.keys_seen  # the degrees alone left it nothing to ask
            explanations.append(_conclude(code, rule, degrees, numbers, found, idle=idle))
    return tuple(explanations)


def explain_topology(layout: RankLayout, topology: Topology) -> tuple[Explanation, ...]:
    """Return for each axis whether its groups stay inside a node."""
    node = node_size(topology)
    found = {next(iter(v.values)): v for v in topology_violations(layout, topology)}
    sentence = "Groups inside a node use its fast links alone."
    explanations = []
    for axis in ("world_size", *AXES):
        size = layout.world_size if axis == "world_size" else layout.size(axis)
        violation = found.get(axis)
        inside = "fills" if axis == "world_size" else "stays inside"
        text = str(violation) if violation else f"{axis}={size} {inside} nodes of {node} ranks"
        explanations.append(
            Explanation(
                rule="topology" if axis == "world_size" else f"node-{axis.replace('_', '-')}",
                sentence=sentence,
                values={axis: size, "ranks_per_node": node},
                verdict=violation.level if violation else "idle" if size == 1 else "holds",
                text=text,
            )
        )
    return tuple(explanations)


def _explain_product(degrees: Mapping[str, int], axes: tuple[str, ...]) -> Explanation:
    world = prod(degrees[axis] for axis in axes)
    given = {axis: degrees[axis] for axis in axes if degrees[axis] > 1} or {"dp_shard": 1}
    return Explanation(
        rule="product",
        sentence="The degrees of the world's axes multiply to its ranks.",
        values={**given, "world_size": world},
        verdict="holds",
        text=f"{'*'.join(given)}={'*'.join(map(str, given.values()))} is world_size={world}",
    )


def _conclude(
    code: str,
    rule: Callable[..., object],
    degrees: _Seen[int],
    numbers: _Seen[tuple[str, int]],
    found: list[Violation],
    *,
    missing: str | None = None,
    idle: bool = False,
) -> Explanation:
    values: dict[str, object] = {name: degrees[name] for name in degrees.keys_seen}
    values |= dict(numbers[field] for field in numbers.keys_seen if field in numbers)
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    levels = {violation.level for violation in found}
    verdict: Verdict = "error" if "error" in levels else "advice" if levels else "holds"
    if missing:
        verdict, text = "skipped", f"{text}, but {missing} is not known"
    elif found:
        text = "; ".join(map(str, found))
    elif idle:
        verdict = "idle"
    return Explanation(
        rule=code,
        sentence=(rule.__doc__ or "").strip(),
        values=values,
        verdict=verdict,
        text=text,
    )
