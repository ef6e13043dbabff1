"""From the values that were given to degrees that are checked and, where they can be, known."""

from collections.abc import Mapping
from math import prod
from typing import Any

from ._degrees import (
    BASE_AXES,
    INFERRED,
    PEER_AXES,
    VALUE_RULES,
    as_degree,
    as_flag,
    as_order,
    infer_degrees,
    mode_violations,
    resolved_rules,
    rule_violations,
    world_axes,
)
from ._errors import ParallelDimsError, Violation, join_words, raise_errors

DEGREES = (*PEER_AXES, "etp")
OPTIONAL = ("dp_shard", "ulysses_degree", "world_size")


def settle(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with every value parsed, and every degree known if the world is.

    Raises one `ParallelDimsError` with all values that are none, else one with all rules that the
    degrees break.
    """
    fields = dict(given)
    violations: list[Violation] = []
    axes = world_axes(given["ep_mode"])
    for name in (*DEGREES, "ulysses_degree", "world_size"):
        try:
            fields[name] = as_degree(
                name, given[name], inferable=name in axes, optional=name in OPTIONAL
            )
        except ParallelDimsError as error:
            violations += error.violations
    try:
        fields["fsdp_folds_cp"] = as_flag("fsdp_folds_cp", given["fsdp_folds_cp"])
    except ParallelDimsError as error:
        violations += error.violations
    try:
        fields["order"] = as_order(given["order"])
    except ParallelDimsError as error:
        violations += error.violations
    raise_errors(violations)
    found = rule_violations(_with_ulysses(fields), VALUE_RULES)
    raise_errors([*found, *mode_violations(fields["ep_mode"], fields["order"])])
    if fields["world_size"] is not None:
        fields |= infer_degrees(degrees_of(fields), axes, fields["world_size"])
        raise_errors(rule_violations(_with_ulysses(fields), resolved_rules(fields["ep_mode"])))
    return fields


def degrees_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return every degree as a number, -1 where it is to be inferred."""
    degrees = {name: fields[name] for name in DEGREES}
    if degrees["dp_shard"] is None:
        degrees["dp_shard"] = 1 if INFERRED in degrees.values() else INFERRED
    return degrees


def resolved_degrees(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return every degree as a positive number, for the world that they make if none was given.

    Raises `ParallelDimsError` where one of them is still to be inferred.
    """
    degrees = degrees_of(fields)
    if fields["world_size"] is not None:
        return degrees
    unknown = [name for name, degree in degrees.items() if degree == INFERRED]
    if not unknown:
        world = prod(degrees[name] for name in world_axes(fields["ep_mode"]))
        return degrees_of(settle({**fields, "world_size": world}))
    raise ParallelDimsError(
        [
            Violation(
                rule="resolved",
                values=dict.fromkeys(unknown, INFERRED),
                reason=f"{join_words(unknown)} is not known yet; call resolve(world_size)",
            )
        ]
    )


def summarize(fields: Mapping[str, Any]) -> str:
    """Return one line with every degree, and whatever else is not as by default."""
    words: dict[str, object] = {**degrees_of(fields)}
    words = {name: words[name] for name in (*BASE_AXES, "ep", "etp")}
    others = {"ulysses": "ulysses_degree", "world": "world_size"}
    words |= {word: fields[name] for word, name in others.items() if fields[name] is not None}
    words |= {"ep_mode": "peer"} if fields["ep_mode"] == "peer" else {}
    words |= {} if fields["fsdp_folds_cp"] else {"fsdp_folds_cp": False}
    return " ".join(f"{name}={value}" for name, value in words.items())


def _with_ulysses(fields: Mapping[str, Any]) -> dict[str, int]:
    return {**degrees_of(fields), "ulysses_degree": fields["ulysses_degree"] or 1}
