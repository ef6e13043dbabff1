"""Parse and check the fields of `ParallelDims`, and infer the degree that is -1."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from ._errors import (
    INFERRED,
    ParallelDimsError,
    Violation,
    as_degree,
    as_flag,
    broken,
    join_words,
    raise_errors,
    refusal,
    show,
)
from ._rules import Subject, degree_violations, division_violations

BASE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# With ep_mode="peer", ep is one more mesh dimension.
PEER_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
DEFAULT_ORDER = PEER_AXES
"""Default order of the mesh dimensions, outermost first."""
EP_MODES = ("folded", "peer")
DEGREES = (*PEER_AXES, "etp")
OPTIONAL_FIELDS = ("dp_shard", "ulysses_degree", "world_size")


def world_axes(ep_mode: str) -> tuple[str, ...]:
    """Return the names of the degrees that multiply to the world size, outermost first."""
    return PEER_AXES if ep_mode == "peer" else BASE_AXES


def as_order(order: object) -> tuple[str, ...]:
    """Convert the field ``order`` of `ParallelDims` to a tuple.

    Args:
        order: A list or tuple of names of mesh dimensions, or one string with commas.

    Returns:
        The names in the same order. They are not checked.

    Raises:
        ParallelDimsError: ``order`` has another type. Sets are not allowed, because their order
            differs between processes.
    """
    if isinstance(order, str):
        return tuple(name.strip() for name in order.split(","))
    if isinstance(order, list | tuple) and all(isinstance(name, str) for name in order):
        return tuple(order)
    reason = f"order={show(order)} is not a list of axis names; use {DEFAULT_ORDER}"
    raise refusal("order", reason, {"order": order})


def infer_degrees(
    degrees: Mapping[str, int], axes: tuple[str, ...], world_size: int
) -> dict[str, int]:
    """Replace the degree that is -1 by the number that makes the product equal the world size.

    A degree is unknown if it is -1 or absent.

    Args:
        degrees: A key is the name of a degree. A degree with an invalid value has no entry.
        axes: Names of the degrees that must multiply to ``world_size``.
        world_size: Number of ranks.

    Returns:
        A copy of ``degrees``. If exactly one degree in ``axes`` is unknown and it is -1, the copy
        has the inferred number in its place.

    Raises:
        ParallelDimsError: The product of the known degrees in ``axes`` does not divide
            ``world_size``, or differs from it although no degree is unknown.
    """
    unknown = [name for name in axes if degrees.get(name, INFERRED) == INFERRED]
    given = {name: degrees[name] for name in axes if name not in unknown and degrees[name] != 1}
    given = given or {"dp_shard": 1}
    product = prod(given.values())
    if world_size % product or not (unknown or product == world_size):
        found = division_violations("product", "world_size", world_size, given, exactly=not unknown)
        raise ParallelDimsError(found)
    if len(unknown) == 1 and unknown[0] in degrees:
        return {**degrees, unknown[0]: world_size // product}
    return dict(degrees)


def as_mode(ep_mode: object) -> str:
    """Return ``ep_mode``, or raise `ParallelDimsError` if it is not in `EP_MODES`."""
    if isinstance(ep_mode, str) and ep_mode in EP_MODES:
        return ep_mode
    reason = f"ep_mode={show(ep_mode)} is not a mode; use {join_words(EP_MODES)}"
    raise refusal("ep-mode", reason, {"ep_mode": ep_mode})


def order_violations(ep_mode: str, order: tuple[str, ...]) -> Iterator[Violation]:
    """Yield a violation if ``order`` lacks a mesh dimension or has a wrong or repeated name.

    Args:
        ep_mode: ``"folded"`` or ``"peer"``. With ``"folded"``, ``order`` may omit ``ep``.
        order: Names of mesh dimensions.
    """
    axes = world_axes(ep_mode)
    placed = order if ep_mode == "peer" else tuple(name for name in order if name != "ep")
    if {*placed} != {*axes} or len({*order}) != len(order):
        may = "" if ep_mode == "peer" else " (ep may stand among them or be left out)"
        reason = f"order={show(order)} is not a permutation of {axes}; give each of them once, "
        yield broken("order", f"{reason}outermost first{may}", {"order": order})


def inferred_violations(degrees: Mapping[str, int]) -> Iterator[Violation]:
    """Yield one violation if more than one value of ``degrees`` is -1."""
    inferred = [name for name, degree in degrees.items() if degree == INFERRED]
    if len(inferred) > 1:
        reason = f"{join_words(inferred, 'and')} are -1, but only one degree can be inferred from "
        reason += "the world; give the others a positive integer"
        yield broken("one-inferred", reason, dict.fromkeys(inferred, INFERRED))


def resolve_fields(
    given: Mapping[str, Any],
    found: Iterable[Violation] = (),
    *,
    etp_is_tp: bool = False,
) -> dict[str, Any]:
    """Convert and check all fields of `ParallelDims`, and infer the degree that is -1.

    Args:
        given: A key is a field of `ParallelDims`, and the value is the user's value, of any type.
            Every field has an entry.
        found: Violations to report with the violations that this function finds.
        etp_is_tp: If True and ``tp`` is not -1, ``etp`` is set to the value of ``tp``.

    Returns:
        A dict. A key is a field of `ParallelDims`, and the value has the type of the field. If
        ``world_size`` is not None, all degrees are positive integers. If ``world_size`` is None, a
        degree may be -1, and ``dp_shard`` may be None.

    Raises:
        ParallelDimsError: ``found`` is not empty, a value is invalid, or the degrees break a rule.
            The error lists all these violations.
    """
    violations = list(found)
    fields: dict[str, Any] = {}
    for name, parse in _parsers(world_axes(given["ep_mode"])).items():
        try:
            fields[name] = parse(given[name])
        except ParallelDimsError as error:
            violations += error.violations
    degrees = degrees_from(fields)
    violations += inferred_violations(degrees)
    if "ep_mode" in fields:
        mode, world = fields["ep_mode"], fields.get("world_size")
        if world is not None:
            try:
                degrees = infer_degrees(degrees, world_axes(mode), world)
            except ParallelDimsError as error:
                violations += error.violations
        if etp_is_tp and "tp" in degrees:
            degrees["etp"] = degrees["tp"]
            if degrees["tp"] != INFERRED:
                fields["etp"] = degrees["tp"]
        free = fields.get("free_etp", False)
        known = Subject(degrees=_known_degrees(fields, degrees), ep_mode=mode, free_etp=free)
        violations += degree_violations(known)
        if "order" in fields:
            violations += order_violations(mode, fields["order"])
    raise_errors(violations)
    return fields if fields["world_size"] is None else fields | degrees


def _parsers(axes: tuple[str, ...]) -> dict[str, Callable[[Any], Any]]:
    parsers: dict[str, Callable[[Any], Any]] = {
        name: partial(as_degree, name, inferable=name in axes, optional=name in OPTIONAL_FIELDS)
        for name in (*DEGREES, *OPTIONAL_FIELDS)
    }
    parsers |= {name: partial(as_flag, name) for name in ("fsdp_folds_cp", "free_etp")}
    return parsers | {"ep_mode": as_mode, "order": as_order}


def _known_degrees(fields: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, int]:
    """Collect the input `Subject.degrees` of the rules.

    Args:
        fields: Valid fields of `ParallelDims` by name.
        degrees: Result of `degrees_from` or `infer_degrees`.

    Returns:
        A dict of positive integers. A key is the name of a degree. A degree that is invalid or -1
        has no entry. ``"ulysses_degree"`` is 1 if the field is None. ``"world_size"`` has an entry
        if the world size is known.
    """
    known = {name: degree for name, degree in degrees.items() if degree != INFERRED}
    if "ulysses_degree" in fields:
        known["ulysses_degree"] = fields["ulysses_degree"] or 1
    if fields.get("world_size") is not None:
        known["world_size"] = fields["world_size"]
    return known


def degrees_from(fields: Mapping[str, Any]) -> dict[str, int]:
    """Select the degrees from the fields of `ParallelDims`, and set the default of ``dp_shard``.

    Args:
        fields: A key is a field of `ParallelDims`. A field with an invalid value has no entry.

    Returns:
        A dict. A key is a name in `DEGREES`, and the value is a positive integer or -1. If
        ``fields["dp_shard"]`` is None, the result has 1 if another degree is -1, otherwise -1.
    """
    degrees = {name: fields[name] for name in DEGREES if name in fields}
    if "dp_shard" in degrees and degrees["dp_shard"] is None:
        degrees["dp_shard"] = 1 if INFERRED in degrees.values() else INFERRED
    return degrees
