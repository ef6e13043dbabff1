"""Answers of the commands plan and estimate, as JSON and as tables, and texts about candidates.

A candidate is a valid configuration with its estimated memory and time.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from time import monotonic
from typing import Any

from .._dims import ParallelDims
from .._errors import Violation, plural
from ..planner import (
    Candidate,
    Comparison,
    Hint,
    ModelShape,
    Plan,
    Rejection,
    estimate,
    hints,
    plan,
    smallest_world,
)
from ..planner._configuration import AXES
from ..planner._result import CLOSE, GIB, counts_of
from ._answers import Answer, Block, Json, Line, Table, violation_json
from ._inputs import MOST_RANKS, Reader, read_count, read_dims, read_run, read_words

# Parts of the step time that are not communication over an axis.
WITHOUT_AXIS = ("compute", "bubble", "optimizer")
# The data-parallel degree dp is the product of these two degrees.
SPLIT = ("dp_replicate", "dp_shard")
NOTHING = "no configuration keeps all rules"
SILENT = 1.0  # seconds before a search shows its progress
MOST_LETTERS = 60  # longer names of models are shortened
BAR_WIDTH = 30  # length of the longest bar in characters


def answer_plan(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``plan``: the best configurations.

    The exit code is 1 if no configuration fits into memory.
    """
    world = reader(read_count, "--gpus/--world", args.world, most=MOST_RANKS)
    top = reader(read_count, "--top", args.top)
    run = read_run(args, reader, world)
    fix = reader(read_words, args.fix, AXES)
    reader.finish()
    hint = smallest = None
    with _progress("planning") as progress:
        found = plan(*run, fix=fix, progress=progress)
        # The hint needs one more search, and is printed only with the tables.
        if not (args.json or args.as_code):
            hint = next(iter(hints(found, most=1, progress=progress)), None)
    if not (found.fits or fix):
        with _progress("looking for the smallest world that fits") as progress:
            smallest = smallest_world(*run, largest=MOST_RANKS, progress=progress)
    return Answer(
        json=partial(_plan_json, found, top or 0, smallest),
        blocks=_plan_blocks(found, top or 0, smallest, hint),
        exit_code=0 if found.fits else 1,
        data=found,
    )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Context manager for printing the progress of a search to standard error.

    Yields a function ``show(done, total)``, which prints a line such as ``"planning: 5 of 80"``.
    Nothing is printed in the first `SILENT` seconds, or if standard error is not a terminal. At the
    end, the line is erased.
    """
    begin = monotonic()

    def is_shown() -> bool:
        return sys.stderr.isatty() and monotonic() - begin > SILENT

    def show(done: int, total: int) -> None:
        if is_shown():
            print(f"\r{title}: {done} of {total}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _plan_json(found: Plan, top: int, smallest: int | None) -> Json:
    """Return the dictionary that ``hp-mesh plan --json`` prints.

    Memory is in bytes, and time is in seconds.

    Args:
        found: The plan.
        top: Number of candidates to list.
        smallest: Smallest world size on which a configuration fits. None if no search for it took
            place, or if the search found none.
    """
    counts = {
        "considered": found.considered,
        "fits": len(found.fits),
        "borderline": len(found.borderline),
        "does not fit": len(found.too_large),
        "rejected": len(found.rejected),
    }
    rejected = []
    for rule, cases in rejections_by_rule(found.rejected).items():
        degrees, violation = cases[0]
        example = {"degrees": dict(degrees), "text": str(violation)}
        rejected.append({"rule": rule, "count": len(cases), "example": example})
    return {
        **_model_json(found.model),
        "world_size": found.cluster.world_size,
        "accelerator": found.cluster.device.name,
        "counts": counts,
        "smallest_world": smallest,
        "recommended": found.best and _candidate_json(found.best),
        "candidates": [*map(_candidate_json, found.candidates[:top])],
        "rejected": rejected,
    }


def _plan_blocks(found: Plan, top: int, smallest: int | None, hint: Hint | None) -> Iterator[Block]:
    best, world, node = found.best, found.cluster.world_size, found.cluster.ranks_per_node
    yield from _plan_title_blocks(found)
    if world > node and world % node:
        text = f"note: {world} ranks do not fill nodes of {node}, so the last node has "
        yield Line(f"{text}{world % node}; --ranks-per-node N sets another size", "warn")
    if best is None:
        yield Line(NOTHING, "bad")
    else:
        yield from _best_blocks(best, found.fastest or best)
        yield from _part_blocks(best)
        yield _candidates_table(found, best, plan_rows(found, top))
    yield Line()
    if hint is not None:
        yield Line(hint_line(hint, best), "good")
    if smallest is not None:
        text = "the smallest number of GPUs on which a configuration fits"
        yield Line(f"{text}: {smallest}", "warn")
    yield Line(counts_of(found))
    if found.rejected:
        by_rule = rejections_by_rule(found.rejected)
        rows = [(rule, len(cases), cases[0][1].reason) for rule, cases in by_rule.items()]
        yield Table(("rule", "count", "example"), rows, ("count",), "rejected by rule")


def _plan_title_blocks(found: Plan) -> Iterator[Block]:
    yield Line(plan_title(found), "bold")
    model = found.model
    total = f"{format_count(model.parameters)} parameters"
    active = f", {format_count(model.active_parameters)} of them active in one token"
    yield Line(total + (active if model.experts else ""))


def _best_blocks(best: Candidate, fastest: Candidate) -> Iterator[Block]:
    headings = {
        "fits": "RUN THIS",
        "borderline": "NOTHING FITS; this is up to 15% above the memory limit",
        "does not fit": "NOTHING FITS; this comes nearest",
    }
    yield Line()
    yield Line(headings[best.fit], best.fit)
    yield Line(f"  {constructor_line(best.dims)}", "bold")
    yield Line(f"  {word_line(best.dims)}")
    yield from _cost_blocks(best)
    if best != fastest:
        yield Line(f"  {why_chosen(best, fastest)}")


def _cost_blocks(one: Candidate) -> Iterator[Block]:
    yield Line(f"  {settings(one)}")
    yield Line(
        f"  estimated {format_seconds(one.time.total)} s per step, "
        f"{one.tokens_per_second_per_gpu:.0f} tokens/s per GPU, {one.mfu:.0%} MFU; "
        f"{one.memory.total / GIB:.1f} of {one.limit / GIB:.1f} GiB ({one.fit})"
    )
    yield Line(f"  {one.trust}", "dim")


def _part_blocks(best: Candidate) -> Iterator[Block]:
    """Yield two tables for a candidate: the parts of its memory, and the parts of its step time."""
    memory = {name: part / GIB for name, part in best.memory.parts.items()}
    whole = max(best.limit, best.memory.total) / GIB
    title = f"memory of one GPU; shares of {whole:.1f} GiB"
    yield _bar_table(title, memory, whole, "GiB", ".1f")
    times = {
        name if name in WITHOUT_AXIS else f"exposed {name}": part
        for name, part in best.time.parts.items()
    }
    title = f"time of one step; shares of {format_seconds(best.time.total)} s"
    yield _bar_table(title, times, best.time.total, "s", ".3f")


def _bar_table(
    title: str, parts: Mapping[str, float], whole: float, unit: str, digits: str
) -> Table:
    """Create a table with one row for each part: name, value, share, and a bar of ``#`` signs.

    Args:
        title: Title of the table.
        parts: Dictionary from the name of each part to its value.
        whole: Value that counts as 100 %.
        unit: Unit of the values.
        digits: Format specification of the values, such as ``".1f"``.
    """
    rows = []
    for name, part in parts.items():
        marks = max(1, round(BAR_WIDTH * part / whole)) if part > 0 else 0
        rows.append((name, f"{part:{digits}}", percent(part / whole), Line("#" * marks, "cyan")))
    return Table(("part", unit, "share", ""), rows, (unit, "share"), title)


def _candidates_table(found: Plan, best: Candidate, rows: Sequence["Row"]) -> Table:
    title = f"the best of {len(found.candidates)} candidates; # is the place among all"
    if any(row.splits for row in rows):
        title += "; splits of dp within 1% in time share a row"
    cells = []
    for row in rows:
        one, splits = row.candidate, plural(row.splits, "split")
        cells.append(
            (
                row.place,
                word_line(one.dims) + (f" (+{splits} of dp)" if row.splits else ""),
                one.micro_batch,
                one.recompute + variant(one),
                f"{one.time.total / best.time.total:.3f}x",
                f"{one.memory.total / GIB:.1f}",
                Line(one.fit, one.fit),
                "" if one == best else why_it_loses(one, best, found.cluster.ranks_per_node),
            )
        )
    columns = ("#", "degrees", "micro", "recompute", "time", "GiB", "fit", "why not first")
    return Table(columns, cells, ("#", "micro", "time", "GiB"), title)


def rejections_by_rule(
    rejected: Iterable[Rejection],
) -> dict[str, list[tuple[Mapping[str, int], Violation]]]:
    """Group rejections by broken rule.

    Returns:
        A dictionary from the code of a rule, such as ``"heads-tp"``, to a list. The list has one
        pair ``(degrees, violation)`` for each rejection that breaks the rule. The rule with the
        most rejections is first. A rejection that breaks several rules is in several lists.
    """
    found: dict[str, list[tuple[Mapping[str, int], Violation]]] = {}
    for each in rejected:
        # If a rejection has several violations of one rule, only the first one is listed.
        for rule, violation in {v.rule: v for v in reversed(each.violations)}.items():
            found.setdefault(rule, []).append((each.degrees, violation))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def answer_estimate(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``estimate``: compare a configuration with the best one of its plan.

    The exit code is 1 if the `Candidate.fit` of the configuration is ``"does not fit"``. For a
    borderline configuration, the exit code is 0.
    """
    _, dims = read_dims(args, reader)
    run = read_run(args, reader, dims.layout().world_size if dims else None)
    own = estimate(*run, reader.checked(dims))
    with _progress("planning") as progress:
        found = plan(*run, progress=progress)
    comparison = found.compare(own)
    return Answer(
        json=partial(_estimate_json, found, comparison),
        blocks=_estimate_blocks(found, comparison),
        exit_code=1 if own.fit == "does not fit" else 0,
    )


def _estimate_json(found: Plan, comparison: Comparison) -> Json:
    return {
        **_model_json(found.model),
        "configuration": _candidate_json(comparison.own),
        "best": _candidate_json(comparison.best),
        "slowdown": comparison.slowdown,
        "more_time": dict(comparison.time),
        "more_memory": dict(comparison.memory),
        "violations": [violation_json(violation) for violation in comparison.violations],
    }


def _estimate_blocks(found: Plan, comparison: Comparison) -> Iterator[Block]:
    own, best, node = comparison.own, comparison.best, found.cluster.ranks_per_node
    yield from _plan_title_blocks(found)
    yield Line()
    yield Line(f"{word_line(own.dims)}: {own.fit}", own.fit)
    yield from _cost_blocks(own)
    if own.fit != "fits":
        yield Line(f"  {why_it_loses(own, best, node)}", own.fit)
    if own == best:
        yield Line("this is the best configuration", "good")
        yield from _part_blocks(own)
        return
    yield Line()
    yield Line(f"the best: {word_line(best.dims)} ({best.fit})", "bold")
    yield from _cost_blocks(best)
    place = next((i for i, one in enumerate(found.candidates, 1) if one == own), None)
    of = f"; it is number {place} of {len(found.candidates)}" if place else ""
    yield Line(f"yours takes {comparison.slowdown:.2f}x the time of the best{of}")
    if own.fit == "fits" and own.time.total > best.time.total:
        yield Line(f"main loss: {why_it_loses(own, best, node)}", "warn")
    yield _difference_table("seconds of one step", own.time.parts, best.time.parts, 1, ".3f")
    yield _difference_table("GiB of one GPU", own.memory.parts, best.memory.parts, GIB, ".1f")


def _difference_table(
    title: str, own: Mapping[str, float], best: Mapping[str, float], unit: float, digits: str
) -> Table:
    parts = {name: (own.get(name, 0.0), best.get(name, 0.0)) for name in (*own, *best)}
    parts["total"] = (sum(own.values()), sum(best.values()))
    columns = ("part", "yours", "best", "more")
    rows = []
    for name, (mine, its) in parts.items():
        more = f"{(mine - its) / unit:+{digits}}"
        rows.append((name, f"{mine / unit:{digits}}", f"{its / unit:{digits}}", more))
    return Table(columns, rows, columns[1:], title)


def _candidate_json(candidate: Candidate) -> Json:
    names = (
        *("micro_batch", "microbatches", "recompute", "schedule", "virtual_stages", "zero"),
        *("fit", "limit", "tokens_per_second_per_gpu", "mfu"),
    )
    return {
        "dims": candidate.dims.to_dict(),
        **{name: getattr(candidate, name) for name in names},
        "memory": {**candidate.memory.parts, "total": candidate.memory.total},
        "time": {**candidate.time.parts, "total": candidate.time.total},
        "trust": str(candidate.trust),
    }


def _model_json(model: ModelShape) -> Json:
    sizes = {"parameters": model.parameters, "active_parameters": model.active_parameters}
    return {"model": model.name, **sizes}


@dataclass(kw_only=True)
class Row:
    """A row of the table of candidates.

    Attributes:
        place: Position of the candidate among all candidates of the plan, from 1.
        candidate: The candidate that is printed in the row.
        splits: Number of similar candidates that are counted in this row and not printed. They
            differ from ``candidate`` only in ``dp_replicate`` and ``dp_shard``.
    """

    place: int
    candidate: Candidate
    splits: int = 0


def plan_rows(found: Plan, most: int) -> tuple[Row, ...]:
    """Return the first ``most`` rows of the table of candidates, the best candidate first.

    A row prints one candidate A. Another candidate B gets no row of its own, and is counted in
    `Row.splits` of A, if all of these conditions hold:

    - A is before B in the plan.
    - A and B have the same microbatch size, recomputation, schedule, ZeRO stage and degrees, except
      for ``dp_replicate`` and ``dp_shard``.
    - B takes at least as long as A, and at most 1 % longer.
    - A and B fit, or both are borderline.

    Every other candidate has its own row. So does every candidate that does not fit, because
    ``dp_replicate`` and ``dp_shard`` change how much memory it lacks.
    """
    rows: list[Row] = []
    leaders: dict[object, Row] = {}
    for place, one in enumerate(found.candidates, start=1):
        key = (place,) if one.fit == "does not fit" else _all_but_split(one)
        leader = leaders.get(key)
        if (
            leader is not None
            and _is_near(one, leader.candidate)
            and leader.candidate.time.total <= one.time.total
        ):
            leader.splits += 1
        elif len(rows) < most or any(_is_near(one, row.candidate) for row in rows[:most]):
            # Only the first ``most`` rows are returned. More rows are collected as long as later
            # candidates may be counted in one of the returned rows.
            leaders[key] = Row(place=place, candidate=one)
            rows.append(leaders[key])
        else:
            break
    return tuple(rows[:most])


def _is_near(one: Candidate, first: Candidate) -> bool:
    return one.fit == first.fit and one.time.total <= CLOSE * first.time.total


def _all_but_split(one: Candidate) -> tuple[object, ...]:
    degrees = (getattr(one.dims, f.name) for f in fields(one.dims) if f.name not in SPLIT)
    return one.fit, one.micro_batch, one.recompute, one.setting, *degrees


def hint_line(hint: Hint, best: Candidate | None) -> str:
    """Return one line of text that recommends an option of the command line.

    For example: ``"with --fused-loss the best plan takes 1.5 s instead of 1.7 s"``. If no
    configuration fits without the option: ``"with --fused-loss a configuration fits, and takes 1.5
    s"``.

    Args:
        hint: Field of `TrainSpec` to change, and the step time after the change.
        best: Best candidate without the change, or None if there is no candidate.
    """
    option = f"--{hint.field.replace('_', '-')}"
    option += "" if hint.value is True else f" {hint.value}"
    seconds = f"{format_seconds(hint.step_seconds)} s"
    if best is None or best.fit != "fits":
        return f"with {option} a configuration fits, and takes {seconds}"
    now = format_seconds(best.time.total)
    return f"with {option} the best plan takes {seconds} instead of {now} s"


def why_chosen(chosen: Candidate, fastest: Candidate) -> str:
    """Return one line of text: why the planner recommends ``chosen`` instead of ``fastest``.

    The text says how much slower ``chosen`` is, and how much memory it saves.
    """
    slower = percent(chosen.time.total / fastest.time.total - 1)
    less = (fastest.memory.total - chosen.memory.total) / GIB
    free = (fastest.limit - fastest.memory.total) / GIB
    return (
        f"{slower} slower than the fastest, {less:.1f} GiB less: "
        f"the fastest would leave {free:.1f} GiB"
    )


def why_it_loses(candidate: Candidate, best: Candidate, ranks_per_node: int) -> str:
    """Return one line of text: the main reason why a candidate is worse than the best candidate.

    For example: ``"pp crosses nodes, 12% exposed"`` or ``"logits 3.1 GiB over the limit"``.
    """
    if candidate.memory.total > candidate.limit:
        # The text names one part of the memory. It is the part with the largest difference to the
        # best candidate. If the best candidate does not fit either, it is the largest part.
        others = best.memory.parts if best.fit == "fits" else {}
        part = _most_extra(candidate.memory.parts, others)
        over = (candidate.memory.total - candidate.limit) / GIB
        return f"{part} {over:.1f} GiB over the limit"
    if candidate.time.total < best.time.total and candidate.fit == best.fit:
        return f"{(candidate.memory.total - best.memory.total) / GIB:.1f} GiB more memory"
    part = _most_extra(candidate.time.parts, best.time.parts)
    share = candidate.time.parts[part] / candidate.time.total
    if part == "compute" and candidate.recompute != best.recompute:
        return f"recomputes {candidate.recompute}"
    if part == "compute":
        return f"compute {percent(candidate.time.compute / best.time.compute - 1)} slower"
    if part in WITHOUT_AXIS:
        return f"{part} {percent(share)}"
    crosses, best_crosses = (
        one.dims.layout().crosses_nodes(part, ranks_per_node) for one in (candidate, best)
    )
    if crosses and not best_crosses:
        return f"{part} crosses nodes, {percent(share)} exposed"
    return f"exposed {part} {percent(share)}"


def _most_extra(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name] - others.get(name, 0))


def plan_title(found: Plan) -> str:
    """Return one line of text: model, cluster, global batch size, and sequence length."""
    cluster, train = found.cluster, found.train
    name = "".join(letter if letter.isprintable() else " " for letter in found.model.name)
    name = name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}..."
    return (
        f"{name or 'model'} on {cluster.world_size} x {cluster.device.name}, "
        f"{cluster.ranks_per_node} per node; {plural(train.global_batch, 'sequence')} of "
        f"{plural(train.seq_len, 'token')} per step{', float8' if train.float8 else ''}"
    )


def settings(candidate: Candidate) -> str:
    """Return one line of text: microbatches, recomputation, pipeline schedule and ZeRO stage."""
    batches = plural(candidate.microbatches, "microbatch")
    sequences = plural(candidate.micro_batch, "sequence")
    return f"{batches} of {sequences}, recompute {candidate.recompute}{variant(candidate)}"


def variant(candidate: Candidate) -> str:
    """Return the pipeline schedule and the ZeRO stage as text, such as ``", dualpipe, ZeRO 1"``.

    The schedule ``"1f1b"``, one stage per rank, and FSDP (``zero=None``) are defaults and are left
    out.
    """
    text = "" if candidate.schedule == "1f1b" else f", {candidate.schedule}"
    text += f" of {candidate.virtual_stages} stages" if candidate.virtual_stages > 1 else ""
    return text if candidate.zero is None else f"{text}, ZeRO {candidate.zero}"


def changed_fields(spec: Any) -> dict[str, Any]:
    """Return a dictionary of the fields of a dataclass instance that differ from their defaults.

    Fields without a default are included.
    """
    values = {each.name: (getattr(spec, each.name), each.default) for each in fields(spec)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _needed_fields(dims: ParallelDims) -> dict[str, Any]:
    """Return a dictionary of the `ParallelDims` fields that a user must write to get ``dims``.

    ``dims`` is resolved. Fields with their default value are left out. ``world_size`` is left out,
    because callers add it if they need it. ``dp_shard`` is left out if it is 1: a user who gives
    the other degrees and the world size need not write it.
    """
    left_out = (("world_size", dims.world_size), ("dp_shard", 1))
    return {
        name: value for name, value in changed_fields(dims).items() if (name, value) not in left_out
    }


def word_line(dims: ParallelDims) -> str:
    """Return resolved degrees as words of the command line, such as ``"dp_shard=8 tp=4"``.

    The world size is left out.
    """
    words = [
        f"{name}={','.join(value) if name == 'order' else value}"
        for name, value in _needed_fields(dims).items()
    ]
    return " ".join(words) or "dp_shard=1"


def constructor_line(dims: ParallelDims) -> str:
    """Return resolved degrees as Python code, such as ``"ParallelDims(tp=4, world_size=8)"``."""
    degrees = {**_needed_fields(dims), "world_size": dims.layout().world_size}
    return f"ParallelDims({arguments(degrees)})"


def arguments(values: Mapping[str, object]) -> str:
    """Return Python source of keyword arguments, such as ``"tp=4, order=('tp', 'pp')"``."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def percent(share: float) -> str:
    """Return a share as text in percent: ``"30%"`` for 0.3, and ``"3.0%"`` for 0.03."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def format_seconds(seconds: float) -> str:
    """Return seconds as text without the unit.

    The text has one decimal from 10 to a million seconds, such as ``"12.3"``, and otherwise three
    significant digits, such as ``"1.23"`` or ``"0.0123"``.
    """
    return f"{seconds:.1f}" if 10 <= seconds < 1e6 else f"{seconds:.3g}"


def format_count(number: float) -> str:
    """Return a large number as text with three digits, such as ``"1.25T"`` or ``"8.03B"``."""
    size, unit = (1e12, "T") if number >= 0.9995e12 else (1e9, "B")
    return f"{number / size:.3g}{unit}"
