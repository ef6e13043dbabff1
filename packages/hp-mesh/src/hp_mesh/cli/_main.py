"""The command line ``hp-mesh``: all commands with their options, and the printing of answers."""

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._errors import ParallelDimsError, join_words, refusal
from ..planner import ACCELERATORS, MODELS, Cluster, Plan, TrainSpec
from ..planner._cluster import NODE
from ._answers import (
    STYLES,
    Answer,
    Block,
    Line,
    RankMap,
    answer_check,
    answer_explain,
    answer_groups,
    answer_show,
    violation_json,
)
from ._code import as_code
from ._inputs import Option, Reader, add_options, field_options, option
from ._plans import NOTHING, answer_estimate, answer_plan

REFUSED = 2  # exit code for wrong input
SUFFIXES = (".svg", ".png", ".pdf")  # formats of pictures
WIDE = 10_000  # width in characters if the output is not a terminal, so that no line is wrapped
EXTRA = "pip install 'hp-mesh[cli]'"
EXIT_CODES = """exit code:
  0  answered
  1  no valid configuration, nothing fits (plan), or this one does not fit (estimate)
  2  bad input, a missing package, or degrees that break a rule (check, explain, estimate)"""
NOTES = """words of the answer:
  buffers     memory of gathered parameters, gradients being reduced and tokens sent to experts
  exposed tp  communication over tp that does not overlap with computation; so for other axes
  bubble      time that a pipeline rank waits for other ranks
  borderline  above the memory limit by at most 15%, which is the error of the estimate"""


def _world_options(text: str, *, required: bool) -> tuple[Option, Option]:
    node = f"ranks of one node (default: {NODE}, if the ranks fill such nodes)"
    return (
        option(text, "--world", "--gpus", dest="world", metavar="N", required=required),
        option(node, "--ranks-per-node", metavar="N"),
    )


def _model_options(*, required: bool) -> tuple[Option, ...]:
    text = f"path of a config.json or its folder, or one of {', '.join(MODELS)}"
    model = option(text, "--model", metavar="NAME|FILE", required=required)
    return (model, *field_options(TrainSpec, required=required))


DEGREES = (
    option(
        "degrees and order: tp=8 pp=2 dp_shard=-1",
        "words",
        nargs="*",
        default=[],  # without a default, argparse calls the argument required
        metavar="NAME=VALUE",
    ),
    option(
        "degrees from a .toml, .yaml or .json file, with the names of hp-mesh or of another "
        "framework; NAME=VALUE replaces them",
        "--config",
        metavar="FILE[:TABLE]",
    ),
    *_world_options("number of ranks (default: the product of the given degrees)", required=False),
)
SEQUENCE = (
    option(
        "each rank of cp gets two parts of a sequence, which balances causal attention",
        "--causal-balance",
        action="store_true",
    ),
    option(
        "between layers, all ranks of tp hold the whole sequence, so tp need not divide it",
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
    ),
)
RUN = (
    option(
        f"TOML file with the fields of an Accelerator, or one of {', '.join(ACCELERATORS)} "
        "(default: H100)",
        "--gpu",
        heading="machines",
        metavar="NAME|FILE[:TABLE]",
        default="H100",
    ),
    *field_options(Cluster, "machines"),
    *field_options(TrainSpec, "training"),
)
AXIS_TEXT = "axis or alias whose groups get colours (default: the innermost axis)"
FIX_TEXT = "try only configurations with this degree; may be given several times: --fix pp=1"
TOP_TEXT = "number of candidates to print; --json does not fold splits of dp (default: 10)"
PICTURE_TEXT = f"write a picture to this file: {', '.join(SUFFIXES)}"
PICTURE = option(PICTURE_TEXT, "--picture", "--svg", dest="picture", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of ``hp-mesh``, such as ``hp-mesh plan``.

    Args:
        name: Name on the command line.
        summary: Purpose of the command in one line, for the help.
        example: Example of the command's arguments, for the help.
        options: Options of the command, except ``--json`` and ``--as-code``.
        answer: Function that computes the `Answer`. Its arguments are the parsed command line and a
            `Reader`, which collects errors of the command line.
        notes: Glossary of the words that the answer uses, for the help; ``""`` without one.
    """

    name: str
    summary: str
    example: str
    options: Sequence[Option]
    answer: Callable[[Namespace, Reader], Answer]
    notes: str = ""


COMMANDS = (
    Command(
        name="plan",
        summary="find the best configuration, and rank the other valid ones",
        example="--model llama3-405b --gpus 2048 --gpu h100 --seq-len 8192 --global-batch 2048",
        options=(
            *_model_options(required=True),
            *_world_options("number of ranks", required=True),
            *RUN,
            option(FIX_TEXT, "--fix", metavar="NAME=N", action="append", default=[]),
            option(TOP_TEXT, "--top", metavar="N", default="10"),
            PICTURE,
        ),
        answer=answer_plan,
        notes=NOTES,
    ),
    Command(
        name="estimate",
        summary="estimate one configuration, and compare it with the best",
        example="dp_shard=8 tp=4 pp=16 --model llama3-405b --gpu h100 --seq-len 8192 "
        "--global-batch 512",
        options=(*DEGREES, *_model_options(required=True), *RUN),
        answer=answer_estimate,
        notes=NOTES,
    ),
    Command(
        name="check",
        summary="list the rules that degrees break for a model",
        example="tp=16 pp=4 --world 512 --model llama3-70b --seq-len 8192 --global-batch 256",
        options=(*DEGREES, *_model_options(required=False), *SEQUENCE),
        answer=answer_check,
    ),
    Command(
        name="show",
        summary="show the position of every rank",
        example="tp=8 pp=2 --world 64 --axis pp --picture ranks.svg",
        options=(*DEGREES, option(AXIS_TEXT, "--axis", metavar="AXIS"), PICTURE),
        answer=answer_show,
    ),
    Command(
        name="explain",
        summary="print every rule with its numbers and its verdict",
        example="tp=16 --model llama3-70b --seq-len 8192",
        options=(*DEGREES, *_model_options(required=False), *SEQUENCE),
        answer=answer_explain,
    ),
    Command(
        name="groups",
        summary="list the groups of an axis or alias",
        example="fsdp tp=8 cp=2 --world 64 --rank 5",
        options=(
            option("an axis or alias: tp, fsdp, dp, ep, ...", "name", metavar="AXIS"),
            *DEGREES,
            option("print only the group of this rank", "--rank", metavar="R"),
        ),
        answer=answer_groups,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hp-mesh``.

    The answer is written to standard output, and errors to standard error. Tables need the package
    rich, and pictures need matplotlib. ``pip install 'hp-mesh[cli]'`` installs both. ``--json`` and
    ``--as-code`` need neither.

    Args:
        argv: Arguments of the command line after ``hp-mesh``. Defaults to ``sys.argv[1:]``.

    Returns:
        The exit code.

        - 0: success.
        - 1: ``plan`` found no configuration that fits into memory, or the configuration of
          ``estimate`` does not fit.
        - 2: the input is wrong, a rule is broken, a package is missing, or the output cannot be
          written.
        - 130: Ctrl-C was pressed.
        - 141: the standard output is a closed pipe.

    Examples:
        >>> main(["groups", "tp", "tp=2", "--world", "4", "--rank", "3"])
        pp=1 dp_replicate=1 dp_shard=2 cp=1 tp=2 ep=1 etp=1 world=4
        rank 3 is at pp=0 dp_replicate=0 dp_shard=1 cp=0 tp=1
        its tp group of 2: 2 3
        0
    """
    if sys.stdout is None:
        print("hp-mesh: the standard output is closed", file=sys.stderr)
        return REFUSED
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # writing the standard output failed; other files are handled before
        # Without the redirection to devnull, Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"hp-mesh: cannot write the answer: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parse(argv)
    except SystemExit as stop:  # argparse printed the help or an error
        return stop.code if isinstance(stop.code, int) else REFUSED
    command: Command = args.command
    place = f"hp-mesh {command.name}"
    try:
        if not (args.json or args.as_code):
            _require("rich", "tables")
        reader = Reader()
        if args.picture:
            _require("matplotlib", "pictures")
            reader(_check_picture, args.picture)
        answer = command.answer(args, reader)
    except ParallelDimsError as error:
        if args.json:
            _print_json({"violations": [violation_json(each) for each in error.violations]})
        print(f"{place}: {error}", file=sys.stderr)
        return REFUSED
    # The picture is first, because the reader of a pipe can close it after a few lines.
    written = True
    if args.picture and answer.data is not None:
        written = _write_picture(answer.data, args.picture, place)
    if args.json:
        _print_json(answer.json())
    elif args.as_code and isinstance(answer.data, Plan):  # only `plan` has this option
        _print_code(answer.data)
    else:
        _print_blocks(answer.blocks)
    return answer.exit_code if written else REFUSED


def _write_picture(data: RankMap | Plan, path: str, place: str) -> bool:
    """Draw ``data`` and write the picture to ``path``.

    Returns False after an error message, which begins with ``place``. A plan without candidates has
    no picture.
    """
    from ._pictures import draw, save

    if isinstance(data, Plan) and not data.candidates:
        print(f"{place}: no picture: {NOTHING}", file=sys.stderr)
        return True
    try:
        save(draw(data), path)
    except OSError as error:
        print(f"{place}: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True


def _parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line. The attribute ``command`` of the result is a `Command`."""
    style: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    purpose = "Plan, check and show parallel degrees."
    parser = ArgumentParser(prog="hp-mesh", description=purpose, epilog=EXIT_CODES, **style)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        example = f"example:\n  {parser.prog} {command.name} {command.example}"
        added = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog="\n\n".join(filter(None, (command.notes, EXIT_CODES, example))),
            **style,
        )
        add_options(added, command.options)
        forms = added.add_mutually_exclusive_group()
        forms.add_argument("--json", action="store_true", help="print one JSON document")
        if command.name == "plan":
            text = "print the best configuration for hp-mesh, torchtitan and Megatron-LM"
            forms.add_argument("--as-code", action="store_true", help=text)
        added.set_defaults(command=command)
    parser.set_defaults(picture=None, as_code=False)
    args, rest = parser.parse_known_args(argv)
    # argparse reads degrees only before the first option. They may also follow an option.
    if rest and ("words" not in args or any(word.startswith("-") for word in rest)):
        subparsers.choices[args.command.name].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words = [*args.words, *rest]
    return args


def _require(package: str, purpose: str) -> None:
    try:
        __import__(package)
    except ImportError:
        reason = f"{purpose} need {package}: {EXTRA}"
        raise refusal("package", reason, {"package": package}) from None


def _check_picture(path: str) -> None:
    reason = ""
    if Path(path).suffix.lower() not in SUFFIXES:
        reason = f"its name must end in {join_words(SUFFIXES)}"
    elif Path(path).is_dir():
        reason = "it is a folder"
    elif not Path(path).parent.is_dir():
        reason = f"there is no folder {Path(path).parent}"
    if reason:
        raise refusal("file", f"cannot write {path}: {reason}", {"path": path})


def _print_json(content: Mapping[str, object]) -> None:
    print(json.dumps(content, indent=1, default=str))


def _print_code(found: Plan) -> None:
    best = found.best
    if best is None:
        print(NOTHING, file=sys.stderr)
        return
    if best.fit != "fits":
        print(f"# {best.fit}: {best.violations[0]}")
    print(as_code(best, found.train, found.model.layers))


def _print_blocks(blocks: Iterable[Block]) -> None:
    """Print lines and tables with the package rich.

    If the standard output is not a terminal, long lines are not wrapped, and the text is ASCII
    without colours.
    """
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from rich.theme import Theme

    dashes = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
    width = None if sys.stdout.isatty() else WIDE
    console = Console(highlight=False, width=width, theme=Theme(STYLES))
    with console.capture() as captured:
        for block in blocks:
            if isinstance(block, Line):
                console.print(Text(*block), soft_wrap=True)
                continue
            console.print()
            if block.title:
                console.print(Text(block.title, "bold"), soft_wrap=True)
            table = Table(box=dashes, show_edge=False, pad_edge=False, collapse_padding=True)
            for column in block.columns:
                justify: Literal["right", "left"] = "right" if column in block.numbers else "left"
                table.add_column(column, justify=justify)
            for row in block.rows:
                cells = (cell if isinstance(cell, Line) else Line(str(cell)) for cell in row)
                table.add_row(*(Text(*cell) for cell in cells))
            console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
