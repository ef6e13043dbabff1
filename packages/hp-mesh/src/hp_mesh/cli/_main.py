"""The entry point: options in, one answer out."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .._errors import ParallelDimsError
from ._blocks import Answer
from ._check import CHECK, EXPLAIN
from ._command import Command
from ._documents import violation_document
from ._groups import GROUPS
from ._plain import plain_text
from ._plan import PLAN
from ._problems import refusal
from ._show import SHOW

COMMANDS = (PLAN, CHECK, SHOW, EXPLAIN, GROUPS)
REFUSED = 2
EXIT_CODES = """exit code:
  0  answered
  1  asked correctly, but nothing fits or no configuration is valid (plan)
  2  bad input, or degrees that break a rule (check, explain)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one command line and return its exit code, see `EXIT_CODES`.

    The answer goes to standard output, what is wrong with the input to standard error.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone. Python would meet the closed pipe again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser, commands = _parsers()
    try:
        args = _parse(parser, commands, argv)
    except SystemExit as stop:  # argparse has printed its help or what it does not know
        return stop.code if isinstance(stop.code, int) else REFUSED
    command: Command = args.command
    try:
        answer = command.answer(args)
        if args.svg is not None and answer.draw is not None:
            _write(args.svg, answer.draw())
    except ParallelDimsError as error:
        if args.json:
            found = [violation_document(violation) for violation in error.violations]
            print(json.dumps({"violations": found}, indent=1, default=str))
        print(f"{parser.prog} {command.name}: {error}", file=sys.stderr)
        return REFUSED
    _print(answer, args)
    return answer.exit_code


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
        added.add_argument(
            "--json", action="store_true", help="print one JSON document and nothing else"
        )
        added.set_defaults(command=command, svg=None)
        commands[command.name] = added
    return parser, commands


def _parse(
    parser: ArgumentParser, commands: dict[str, ArgumentParser], argv: Sequence[str] | None
) -> Namespace:
    args, rest = parser.parse_known_args(argv)
    # argparse takes words up to the first option only; those after it are words all the same.
    if rest and ("words" not in args or any(word.startswith("-") for word in rest)):
        commands[args.command.name].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words = [*args.words, *rest]
    return args


def _write(path: str, picture: str) -> None:
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise refusal(
            "file", f"cannot write {path}: {error.strerror or error}", {"path": path}
        ) from None


def _print(answer: Answer, args: Namespace) -> None:
    if args.json:
        print(json.dumps(answer.document(), indent=1, default=str))
    elif sys.stdout.isatty() and find_spec("rich") is not None:
        from ._pretty import print_pretty

        print_pretty(answer.blocks, sys.stdout)
    else:
        sys.stdout.write(plain_text(answer.blocks))
    if args.svg is not None:
        print(f"wrote {args.svg}", file=sys.stderr)
