"""A plan for people: what to run first, then where its memory and time go, then the others."""

from collections.abc import Iterator, Sequence

from ..planner import Candidate, Plan
from ._blocks import Bar, Bars, Block, Cell, Line, Table, Tone, cells
from ._choice import choose, why_chosen
from ._degrees import constructor_line, word_line
from ._plan_rows import Row, plan_rows
from ._reasons import GIB, largest_exposed, memory_parts, percent, time_parts, why_it_loses
from ._rejections import RejectionGroup

TONES: dict[str, Tone] = {"fits": "good", "borderline": "warn", "does not fit": "bad"}
NOTHING = "no configuration keeps all rules"


def plan_blocks(found: Plan, rejections: Sequence[RejectionGroup], top: int) -> tuple[Block, ...]:
    """Return the whole answer, with the ``top`` first candidates."""
    blocks: list[Block] = [Line(text=plan_title(found), tone="title")]
    world, node = found.cluster.world_size, found.cluster.ranks_per_node
    if world > node and world % node:
        text = f"{world} ranks do not fill nodes of {node}; --ranks-per-node N says what they are"
        blocks.append(Line(text=text, tone="warn"))
    if found.best is None:
        blocks.append(Line(text=NOTHING, tone="bad"))
    else:
        chosen = choose(found) or found.best
        blocks += _winner(chosen, found.best)
        blocks += _splits(chosen)
        blocks.append(_candidates_table(found, chosen, top))
    blocks.append(Line(text=_counts(found)))
    if rejections:
        blocks.append(_rejections_table(rejections))
    return tuple(blocks)


def plan_title(found: Plan) -> str:
    """Return in one line what is planned."""
    cluster, train = found.cluster, found.train
    return (
        f"{found.model.name or 'model'} on {cluster.world_size} x {cluster.device.name}, "
        f"{cluster.ranks_per_node} per node; {train.global_batch} sequences of {train.seq_len} "
        f"tokens per step{', float8' if train.float8 else ''}"
    )


def settings(candidate: Candidate) -> str:
    """Return in one line what a candidate has besides its degrees."""
    parts, each = candidate.microbatches, candidate.micro_batch
    return (
        f"{parts} microbatch{'es' * (parts != 1)} of {each} sequence{'s' * (each != 1)}, "
        f"recompute {candidate.recompute}"
    )


def format_seconds(seconds: float) -> str:
    """Return seconds with about three digits."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"


def _winner(best: Candidate, fastest: Candidate) -> Iterator[Block]:
    headings = {
        "fits": "RUN THIS",
        "borderline": "RUN THIS, though it is up to 15% above the memory limit",
        "does not fit": "NOTHING FITS; this comes nearest",
    }
    yield Line(text="")
    yield Line(text=headings[best.fit], tone=TONES[best.fit])
    yield Line(text=f"  {constructor_line(best.dims)}", tone="title")
    yield Line(text=f"  {word_line(best.dims)}")
    yield Line(text=f"  {settings(best)}")
    yield Line(
        text=f"  estimated {format_seconds(best.time.total)} s per step, "
        f"{best.tokens_per_second_per_gpu:.0f} tokens/s per GPU, {best.mfu:.0%} MFU; "
        f"{best.memory.total / GIB:.1f} of {best.limit / GIB:.1f} GiB ({best.fit})"
    )
    if best != fastest:
        yield Line(text=f"  {why_chosen(best, fastest)}")


def _splits(best: Candidate) -> Iterator[Block]:
    memory, time = memory_parts(best), time_parts(best)
    whole = max(best.limit, best.memory.total)
    yield Bars(
        title=f"memory of one GPU; a full bar is {whole / GIB:.1f} GiB",
        bars=tuple(
            Bar(label=name, share=part / whole, text=f"{part / GIB:.1f} GiB")
            for name, part in memory.items()
        ),
    )
    yield Bars(
        title=f"time of one step; a full bar is {format_seconds(best.time.total)} s",
        bars=tuple(
            Bar(
                label=name if name in ("compute", "bubble", "optimizer") else f"exposed {name}",
                share=part / best.time.total,
                text=f"{part:.3f} s {percent(part / best.time.total):>5}",
            )
            for name, part in time.items()
        ),
    )


def _candidates_table(found: Plan, best: Candidate, top: int) -> Table:
    columns = "# degrees micro recompute time GiB fit bubble exposed why-not-first"
    rows = plan_rows(found, best, top)
    title = f"the best of {len(found.candidates)} candidates; # is the place among all"
    if any(row.splits for row in rows):
        title += "; splits of dp within 1% in time share a row"
    return Table(
        title=title,
        columns=tuple(column.replace("-", " ") for column in columns.split()),
        rows=tuple(_candidate_row(found, best, row) for row in rows),
        right=frozenset({"#", "micro", "time", "GiB", "bubble"}),
    )


def _candidate_row(found: Plan, best: Candidate, row: Row) -> tuple[Cell, ...]:
    one, node = row.candidate, found.cluster.ranks_per_node
    folded = f" (+{row.splits} split{'s' * (row.splits != 1)} of dp)" if row.splits else ""
    axis, share = largest_exposed(one)
    return cells(
        row.place,
        word_line(one.dims) + folded,
        one.micro_batch,
        one.recompute,
        f"{one.time.total / found.candidates[0].time.total:.3f}x",
        f"{one.memory.total / GIB:.1f}",
        Cell(text=one.fit, tone=TONES[one.fit]),
        percent(one.time.bubble / one.time.total),
        f"{axis} {percent(share)}" if axis else "-",
        "" if one == best else why_it_loses(one, best, node),
    )


def _counts(found: Plan) -> str:
    return (
        f"{found.considered} considered: {len(found.fits)} fit, {len(found.borderline)} "
        f"borderline, {len(found.too_large)} do not fit, {len(found.rejected)} rejected"
    )


def _rejections_table(rejections: Sequence[RejectionGroup]) -> Table:
    return Table(
        title="rejected by rule",
        columns=("rule", "count", "for example"),
        rows=tuple(cells(group.rule, group.count, group.violation.reason) for group in rejections),
        right=frozenset({"count"}),
    )
