"""From the values that were given to degrees that are checked and, where they can be, known."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

from ._degrees import (
    BASE_AXES,
    INFERRED,
    PEER_AXES,
    as_degree,
    as_flag,
    as_mode,
    as_order,
    infer_degrees,
    one_is_inferred,
    order_violations,
    resolved_rules,
    rule_violations,
    world_axes,
)
from ._errors import ParallelDimsError, Violation, join_words, raise_errors

DEGREES = (*PEER_AXES, "etp")
OPTIONAL = ("dp_shard", "ulysses_degree", "world_size")


def settle(
    given: Mapping[str, Any],
    found: Iterable[Violation] = (),
    *,
    needs_world: bool = False,
    etp_is_tp: bool = False,
) -> dict[str, Any]:
    """Return the fields with every value parsed, and every degree known if the world is.

    With ``etp_is_tp`` a known ``tp`` replaces ``etp``. Raises one `ParallelDimsError` with
    what was ``found`` before, all values that are none, and all rules that the other values break.
    """
    violations = list(found)
    fields: dict[str, Any] = {}
    for name, parse in _parsers(world_axes(given["ep_mode"]), needs_world).items():
        try:
            fields[name] = parse(given[name])
        except ParallelDimsError as error:
            violations += error.violations
    degrees = degrees_of(fields)
    violations += one_is_inferred(degrees)
    if "ep_mode" in fields:
        mode, world = fields["ep_mode"], fields.get("world_size")
        if world is not None:
            try:
                degrees = infer_degrees(degrees, world_axes(mode), world)
            except ParallelDimsError as error:
                violations += error.violations
        if etp_is_tp and "tp" in degrees:
            degrees["etp"] = degrees["tp"]
        rules = resolved_rules(mode, free_etp=fields.get("free_etp", False))
        violations += rule_violations(_known(fields, degrees), rules)
        if "order" in fields:
            violations += order_violations(mode, fields["order"])
    raise_errors(violations)
    return fields if fields["world_size"] is None else fields | degrees


def _parsers(axes: tuple[str, ...], needs_world: bool) -> dict[str, Callable[[Any], Any]]:
    optional = OPTIONAL[:-1] if needs_world else OPTIONAL
    parsers: dict[str, Callable[[Any], Any]] = {
        name: partial(as_degree, name, inferable=name in axes, optional=name in optional)
        for name in (*DEGREES, *OPTIONAL)
    }
    parsers |= {name: partial(as_flag, name) for name in ("fsdp_folds_cp", "free_etp")}
    return parsers | {"ep_mode": as_mode, "order": as_order}


def _known(fields: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, int]:
    """Return what rules may look at: degrees and world, without what is wrong or unknown."""
    known = {name: degree for name, degree in degrees.items() if degree != INFERRED}
    if "ulysses_degree" in fields:
        known["ulysses_degree"] = fields["ulysses_degree"] or 1
    if fields.get("world_size") is not None:
        known["world_size"] = fields["world_size"]
    return known


def as_world(fields: Mapping[str, Any], world_size: Any) -> int | None:
    """Return the number of ranks asked for; what is none, or not that of the fields, raises."""
    world = as_degree("world_size", world_size, inferable=False, optional=False)
    if fields["world_size"] in (None, world):
        return world
    reason = f"world_size={world} is not the world_size={fields['world_size']} that these "
    reason += f"degrees are for ({summarize(fields)})"
    values = {"world_size": world, "configured": fields["world_size"]}
    raise ParallelDimsError([Violation(rule="world", values=values, reason=reason)])


def degrees_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return every degree that is there as a number, -1 where it is to be inferred."""
    degrees = {name: fields[name] for name in DEGREES if name in fields}
    if "dp_shard" in degrees and degrees["dp_shard"] is None:
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


def summarize(fields: Mapping[str, Any], *, etp_from_tp: bool = False) -> str:
    """Return one line with every degree, and whatever else is not as by default.

    With ``etp_from_tp`` it says so where there is something to take.
    """
    words: dict[str, object] = {**degrees_of(fields)}
    words = {name: words[name] for name in (*BASE_AXES, "ep", "etp")}
    if etp_from_tp and fields["tp"] != 1:
        words["etp"] = f"{words['etp']} (from tp)"
    others = {"ulysses": "ulysses_degree", "world": "world_size"}
    words |= {word: fields[name] for word, name in others.items() if fields[name] is not None}
    words |= {"ep_mode": "peer"} if fields["ep_mode"] == "peer" else {}
    words |= {} if fields["fsdp_folds_cp"] else {"fsdp_folds_cp": False}
    words |= {"free_etp": True} if fields["free_etp"] else {}
    return " ".join(f"{name}={value}" for name, value in words.items())
