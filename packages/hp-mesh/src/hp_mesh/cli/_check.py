"""The commands that hold degrees against a model: all that breaks, or rule by rule."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._dims import ParallelDims
from .._errors import Violation, raise_errors
from .._topology import Topology
from ._blocks import Answer, Block, Cell, Line, Table, Tone, cells
from ._command import Command, add_degrees, add_model, add_sequence
from ._degrees import make_dims, read_values
from ._documents import dims_document, violation_document
from ._judge import judge_apart
from ._models import read_fields
from ._nodes import choose_nodes
from ._numbers import read_count
from ._problems import Problems

TONES: dict[str, Tone] = {
    "holds": "good",
    "error": "bad",
    "advice": "warn",
    "skipped": "dim",
    "idle": "dim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Degrees and what to hold them against."""

    dims: ParallelDims
    model: object
    seq_len: int | None
    global_batch: int | None
    causal_balance: bool
    sequence_parallel: bool
    topology: Topology | None


def read_question(args: Namespace) -> Question:
    """Return what the command line asks; raises one error with all that is wrong with it."""
    problems = Problems()
    fields: Mapping[str, Any] = {}
    model: object = {}
    seq_len = global_batch = None
    with problems.noted():
        fields, ranks = read_values(args.words, args.config, args.world)
        dims = make_dims(fields, ranks)
    with problems.noted():
        model = {} if args.model is None else read_fields(args.model)
    with problems.noted():
        seq_len = read_count("--seq-len", args.seq_len)
    with problems.noted():
        global_batch = read_count("--global-batch", args.global_batch)
    with problems.noted():
        ranks_per_node = read_count("--ranks-per-node", args.ranks_per_node)
    if problems:
        with problems.noted():
            raise_errors(
                judge_apart(
                    fields,
                    model,
                    seq_len,
                    global_batch,
                    args.causal_balance,
                    args.sequence_parallel,
                )
            )
    problems.raise_all()
    return Question(
        dims=dims,
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        causal_balance=args.causal_balance,
        sequence_parallel=args.sequence_parallel,
        topology=choose_nodes(dims.layout().world_size, ranks_per_node),
    )


def _add_options(parser: ArgumentParser) -> None:
    add_degrees(parser)
    add_model(parser)
    add_sequence(parser)


def answer_check(args: Namespace) -> Answer:
    """Return every violation, and the fields that were absent."""
    asked = read_question(args)
    report = asked.dims.check(
        asked.model,
        asked.seq_len,
        asked.global_batch,
        causal_balance=asked.causal_balance,
        sequence_parallel=asked.sequence_parallel,
        topology=asked.topology,
    )
    errors, advice = len(report.errors), len(report) - len(report.errors)
    verdict = "no error" if not errors else f"{errors} error{'s' * (errors > 1)}"
    blocks: list[Block] = [
        Line(text=asked.dims.summary(), tone="title"),
        Line(
            text=verdict + (f", {advice} piece{'s' * (advice > 1)} of advice" if advice else ""),
            tone="bad" if errors else "good",
        ),
    ]
    if report:
        rows = tuple(map(_violation_row, report))
        blocks.append(Table(title="", columns=("level", "rule", "what and what to do"), rows=rows))
    if report.skipped:
        blocks.append(Line(text=f"not checked, not given: {', '.join(report.skipped)}", tone="dim"))
    return Answer(
        document=lambda: {
            "dims": dims_document(asked.dims),
            "ok": not errors,
            "violations": [violation_document(violation) for violation in report],
            "skipped": list(report.skipped),
        },
        blocks=tuple(blocks),
        exit_code=2 if errors else 0,
    )


def _violation_row(violation: Violation) -> tuple[Cell, ...]:
    level = Cell(text=violation.level, tone=TONES[violation.level])
    return cells(level, violation.rule, violation)


def answer_explain(args: Namespace) -> Answer:
    """Return each rule with its numbers and its verdict."""
    asked = read_question(args)
    explanations = asked.dims.explain(
        asked.model,
        asked.seq_len,
        asked.global_batch,
        causal_balance=asked.causal_balance,
        sequence_parallel=asked.sequence_parallel,
        topology=asked.topology,
    )
    rows = tuple(
        cells(Cell(text=found.verdict, tone=TONES[found.verdict]), found.rule, found.text)
        for found in explanations
    )
    return Answer(
        document=lambda: {
            "dims": dims_document(asked.dims),
            "rules": [
                {
                    "rule": found.rule,
                    "sentence": found.sentence,
                    "values": dict(found.values),
                    "verdict": found.verdict,
                    "text": found.text,
                }
                for found in explanations
            ],
        },
        blocks=(
            Line(text=asked.dims.summary(), tone="title"),
            Table(title="", columns=("verdict", "rule", "with its numbers"), rows=rows),
        ),
        exit_code=2 if any(found.verdict == "error" for found in explanations) else 0,
    )


CHECK = Command(
    name="check",
    summary="list everything that degrees break for a model",
    example="tp=16 pp=4 --world 512 --model llama3-70b --seq-len 8192 --global-batch 256",
    add_options=_add_options,
    answer=answer_check,
)
EXPLAIN = Command(
    name="explain",
    summary="print each rule with its numbers and its verdict",
    example="tp=16 --model llama3-70b --seq-len 8192",
    add_options=_add_options,
    answer=answer_explain,
)
