"""Why one candidate of a plan loses against another, in a few words."""

from collections.abc import Mapping
from dataclasses import fields

from ..planner import Candidate, MemorySplit

GIB = 2**30
WITHOUT_AXIS = ("compute", "bubble", "optimizer")


def memory_parts(candidate: Candidate) -> dict[str, float]:
    """Return the bytes of each part of a candidate's memory."""
    return {field.name: getattr(candidate.memory, field.name) for field in fields(MemorySplit)}


def time_parts(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of each part of a step, communication as far as it is exposed by axis."""
    time = candidate.time
    return {
        "compute": time.compute,
        **time.communication,
        "bubble": time.bubble,
        "optimizer": time.optimizer,
    }


def largest_exposed(candidate: Candidate) -> tuple[str, float]:
    """Return the axis whose exposed communication takes longest, and its share of the step."""
    axis, seconds = max(
        candidate.time.communication.items(), key=lambda item: item[1], default=("", 0.0)
    )
    return axis, seconds / candidate.time.total


def why_it_loses(candidate: Candidate, best: Candidate, ranks_per_node: int) -> str:
    """Return what holds a candidate back most against the best one."""
    if candidate.memory.total > candidate.limit:
        # Where the best one fits, what it has less of is to blame; else simply the largest part.
        others = memory_parts(best) if best.fit == "fits" else {}
        part = _most_extra(memory_parts(candidate), others)
        over = (candidate.memory.total - candidate.limit) / GIB
        return f"{part} {over:.1f} GiB over the limit"
    if candidate.time.total < best.time.total and candidate.fit == best.fit:
        return f"{(candidate.memory.total - best.memory.total) / GIB:.1f} GiB more memory"
    part = _most_extra(time_parts(candidate), time_parts(best))
    share = time_parts(candidate)[part] / candidate.time.total
    if part == "compute" and candidate.recompute != best.recompute:
        return f"recomputes {candidate.recompute}"
    if part == "compute":
        return f"compute {percent(candidate.time.compute / best.time.compute - 1)} slower"
    if part in WITHOUT_AXIS:
        return f"{part} {percent(share)}"
    inside = not _leaves_node(best, part, ranks_per_node)
    if inside and _leaves_node(candidate, part, ranks_per_node):
        return f"{part} crosses nodes, {percent(share)} exposed"
    return f"exposed {part} {percent(share)}"


def percent(share: float) -> str:
    """Return a share as text, with a decimal where it would otherwise say little."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _leaves_node(candidate: Candidate, axis: str, ranks_per_node: int) -> bool:
    return candidate.dims.layout().crosses_nodes(axis, ranks_per_node)


def _most_extra(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name] - others.get(name, 0))
