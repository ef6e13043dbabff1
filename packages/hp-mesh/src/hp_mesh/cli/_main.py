"""The command ``hp-mesh``: its commands, their answers and how they are printed."""

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from .._errors import ParallelDimsError, join_words, refusal
from ..planner import estimate, hints, plan, smallest_world
from ._code import as_code
from ._inputs import (
    MOST_RANKS,
    Reader,
    add_degrees,
    add_model,
    add_run,
    add_sequence,
    add_world,
    read_count,
    read_dims,
    read_question,
    read_ranks,
    read_run,
    read_words,
)
from ._reports import (
    NOTHING,
    Answer,
    Checked,
    Estimated,
    Explained,
    Groups,
    Planned,
    map_ranks,
    violation_document,
)

REFUSED = 2
SUFFIXES = (".svg", ".png", ".pdf")  # of pictures
SILENT = 1.0  # seconds of a search before it shows its progress
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Args:
        name: Name on the command line.
        summary: Its purpose, in one line.
        example: Arguments of an example.
        add_options: Adds its options to a parser.
        answer: Computes its answer.
        notes: Explanation of words in the answer.
    """

    name: str
    summary: str
    example: str
    add_options: Callable[[ArgumentParser], None]
    answer: Callable[[Namespace, Reader], Answer]
    notes: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hp-mesh``.

    The answer goes to standard output. Errors go to standard error. Tables need the package rich,
    pictures need matplotlib; the extra ``cli`` installs both. ``--json`` and ``--as-code`` work
    without them.

    Args:
        argv: Arguments of the command line after ``hp-mesh``. Defaults to ``sys.argv[1:]``.

    Returns:
        0 for success, 1 if no usable configuration was found, 2 for wrong input, a missing package
        or output that cannot be written, 130 after Ctrl-C, 141 if the reader of a pipe is gone.

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
    except OSError as error:  # of the standard output: other files have errors of their own
        # Python would fail again at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"hp-mesh: cannot write the answer: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser, commands = _parsers()
    try:
        args = _parse(parser, commands, argv)
    except SystemExit as stop:  # argparse has printed its help or an error
        return stop.code if isinstance(stop.code, int) else REFUSED
    command: Command = args.command
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
            found = [violation_document(violation) for violation in error.violations]
            print(json.dumps({"violations": found}, indent=1, default=str))
        print(f"{parser.prog} {command.name}: {error}", file=sys.stderr)
        return REFUSED
    if args.json:
        print(json.dumps(answer.document(), indent=1, default=str))
    elif args.as_code and isinstance(answer, Planned):  # only `plan` has this option
        _print_code(answer)
    else:
        from ._tables import print_answer

        print_answer(answer, sys.stdout)
    if args.picture:
        try:
            _draw(answer, args.picture)
        except OSError as error:
            reason = error.strerror or error
            place = f"{parser.prog} {command.name}"
            print(f"{place}: cannot write {args.picture}: {reason}", file=sys.stderr)
            return REFUSED
        print(f"wrote {args.picture}", file=sys.stderr)
    return answer.exit_code


def _require(package: str, purpose: str) -> None:
    try:
        __import__(package)
    except ImportError:
        reason = f"{purpose} need {package}: {EXTRA}"
        raise refusal("package", reason, {"package": package}) from None


def _print_code(answer: Planned) -> None:
    best = answer.plan.best
    if best is None:
        print(NOTHING, file=sys.stderr)
        return
    if best.fit != "fits":
        print(f"# {best.fit}: {best.violations[0]}")
    print(as_code(best, answer.plan.train, answer.plan.model.layers))


def _check_picture(path: str) -> None:
    reason = ""
    if Path(path).suffix.lower() not in SUFFIXES:
        reason = f"its name must end in {join_words(SUFFIXES)}"
    elif not Path(path).parent.is_dir():
        reason = f"there is no folder {Path(path).parent}"
    if reason:
        raise refusal("file", f"cannot write {path}: {reason}", {"path": path})


def _draw(answer: Answer, path: str) -> None:
    from ._pictures import draw, save

    save(draw(answer), path)


def _parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    parser = ArgumentParser(
        prog="hp-mesh",
        description="Plan, check and show parallel degrees.",
        epilog=EXIT_CODES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = {}
    for command in COMMANDS:
        example = f"example:\n  {parser.prog} {command.name} {command.example}"
        added = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog="\n\n".join(filter(None, (command.notes, EXIT_CODES, example))),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_options(added)
        forms = added.add_mutually_exclusive_group()
        forms.add_argument("--json", action="store_true", help="print one JSON document")
        if command.name == "plan":
            text = "print the best configuration for hp, torchtitan and Megatron-LM"
            forms.add_argument("--as-code", action="store_true", help=text)
        added.set_defaults(command=command)
        commands[command.name] = added
    parser.set_defaults(picture=None, as_code=False)
    return parser, commands


def _parse(
    parser: ArgumentParser, commands: dict[str, ArgumentParser], argv: Sequence[str] | None
) -> Namespace:
    args, rest = parser.parse_known_args(argv)
    # argparse stops reading degrees at the first option. Degrees may also follow options.
    if rest and ("words" not in args or any(word.startswith("-") for word in rest)):
        commands[args.command.name].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words = [*args.words, *rest]
    return args


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress on a terminal's standard error after a second."""
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


def _check_options(parser: ArgumentParser) -> None:
    add_degrees(parser)
    add_model(parser)
    add_sequence(parser)


def _show_options(parser: ArgumentParser) -> None:
    add_degrees(parser)
    text = "axis or alias whose groups get colours (default: the innermost axis)"
    parser.add_argument("--axis", metavar="AXIS", help=text)
    _picture_option(parser)


def _groups_options(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="AXIS", help="an axis or alias: tp, fsdp, dp, ep, ...")
    add_degrees(parser)
    parser.add_argument("--rank", metavar="R", help="print only the group of this rank")


def _plan_options(parser: ArgumentParser) -> None:
    add_model(parser, required=True)
    add_world(parser)
    add_run(parser)
    text = "try only configurations with this degree; may be given several times: --fix pp=1"
    parser.add_argument("--fix", metavar="NAME=N", action="append", default=[], help=text)
    text = "number of candidates to print; --json does not fold splits of dp (default: 10)"
    parser.add_argument("--top", metavar="N", default="10", help=text)
    _picture_option(parser)


def _estimate_options(parser: ArgumentParser) -> None:
    add_degrees(parser)
    add_model(parser, required=True)
    add_run(parser)


def _picture_option(parser: ArgumentParser) -> None:
    text = f"write a picture to this file: {', '.join(SUFFIXES)}"
    parser.add_argument("--picture", "--svg", dest="picture", metavar="FILE", help=text)


def _check(args: Namespace, reader: Reader) -> Answer:
    dims, question = read_question(args, reader)
    return Checked(dims=dims, report=dims.check(**question))


def _explain(args: Namespace, reader: Reader) -> Answer:
    dims, question = read_question(args, reader)
    return Explained(dims=dims, rules=tuple(dims.explain(**question)))


def _show(args: Namespace, reader: Reader) -> Answer:
    dims, node = read_ranks(args, reader)
    found = reader(map_ranks, dims, node, args.axis)
    if found is None or reader.violations:
        raise ParallelDimsError(reader.violations)
    return found


def _groups(args: Namespace, reader: Reader) -> Answer:
    dims, node = read_ranks(args, reader)
    rank = reader(read_count, "--rank", args.rank, least=0)
    reader(dims.layout().size, args.name)
    reader(dims.layout().coordinates, rank or 0)
    reader.finish()
    return Groups(dims=dims, ranks_per_node=node, axis=args.name, rank=rank)


def _plan(args: Namespace, reader: Reader) -> Answer:
    world = reader(read_count, "--gpus/--world", args.world, most=MOST_RANKS)
    top = reader(read_count, "--top", args.top)
    model, cluster, train = read_run(args, reader, world)
    fix = reader(read_words, args.fix)
    reader.finish()
    with _progress("planning") as progress:
        found = plan(model, cluster, train, fix=fix, progress=progress)
        tables = not (args.json or args.as_code)
        # Hints take several searches, and only tables show them.
        hint = next(iter(hints(found)), None) if tables else None
    smallest = None
    if not (found.fits or fix):
        with _progress("looking for the smallest world that fits") as progress:
            smallest = smallest_world(model, cluster, train, largest=MOST_RANKS, progress=progress)
    return Planned(plan=found, top=top or 0, smallest=smallest, hint=hint)


def _estimate(args: Namespace, reader: Reader) -> Answer:
    _, dims = read_dims(args, reader)
    world = dims.layout().world_size if dims else None
    model, cluster, train = read_run(args, reader, world)
    if dims is None or reader.violations:
        raise ParallelDimsError(reader.violations)
    own = estimate(model, cluster, train, dims)
    with _progress("planning") as progress:
        found = plan(model, cluster, train, progress=progress)
    return Estimated(plan=found, comparison=found.compare(own))


COMMANDS = (
    Command(
        name="plan",
        summary="find the best configuration, and rank the other valid ones",
        example="--model llama3-405b --gpus 2048 --gpu h100 --seq-len 8192 --global-batch 2048",
        add_options=_plan_options,
        answer=_plan,
        notes=NOTES,
    ),
    Command(
        name="estimate",
        summary="estimate one configuration, and compare it with the best",
        example="dp_shard=8 tp=4 pp=16 --model llama3-405b --gpu h100 --seq-len 8192 "
        "--global-batch 512",
        add_options=_estimate_options,
        answer=_estimate,
        notes=NOTES,
    ),
    Command(
        name="check",
        summary="list the rules that degrees break for a model",
        example="tp=16 pp=4 --world 512 --model llama3-70b --seq-len 8192 --global-batch 256",
        add_options=_check_options,
        answer=_check,
    ),
    Command(
        name="show",
        summary="show the position of every rank",
        example="tp=8 pp=2 --world 64 --axis pp --picture ranks.svg",
        add_options=_show_options,
        answer=_show,
    ),
    Command(
        name="explain",
        summary="print every rule with its numbers and its verdict",
        example="tp=16 --model llama3-70b --seq-len 8192",
        add_options=_check_options,
        answer=_explain,
    ),
    Command(
        name="groups",
        summary="list the groups of an axis or alias",
        example="fsdp tp=8 cp=2 --world 64 --rank 5",
        add_options=_groups_options,
        answer=_groups,
    ),
)
