"""The candidates of a plan that are worth a row each."""

from dataclasses import dataclass, fields, replace

from ..planner import Candidate, Plan
from ._choice import CLOSE

SPLIT = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate, its place among all from 1 on, and how many ``splits`` it stands for too."""

    place: int
    candidate: Candidate
    splits: int = 0


def plan_rows(found: Plan, chosen: Candidate | None, most: int) -> tuple[Row, ...]:
    """Return the first rows, at most ``most``: the chosen candidate's, then by place.

    Candidates that differ only in how dp is split into dp_replicate and dp_shard share the row of
    the fastest of them, as far as they are within 1% of its time. The chosen one has its own.
    Those that do not fit are not folded, for a split decides how far they are from fitting.
    """
    rows: list[Row] = []
    leaders: dict[object, int] = {}
    for place, one in enumerate(found.candidates, start=1):
        key = (place,) if one.fit == "does not fit" else _all_but_split(one)
        leader = leaders.get(key)
        near = leader is not None and _close(one, rows[leader].candidate)
        if leader is not None and near and one != chosen:
            rows[leader] = replace(rows[leader], splits=rows[leader].splits + 1)
        elif len(rows) < most or one == chosen:
            if not near:
                leaders[key] = len(rows)
            rows.append(Row(place=place, candidate=one))
        elif not _close(one, rows[-1].candidate):
            break
    return tuple(sorted(rows, key=lambda row: row.candidate != chosen)[:most])


def _close(one: Candidate, faster: Candidate) -> bool:
    return one.fit == faster.fit and one.time.total <= CLOSE * faster.time.total


def _all_but_split(one: Candidate) -> tuple[object, ...]:
    """Return what candidates have in common that differ in the split of dp alone."""
    degrees = (getattr(one.dims, f.name) for f in fields(one.dims) if f.name not in SPLIT)
    return one.fit, one.micro_batch, one.recompute, *degrees
