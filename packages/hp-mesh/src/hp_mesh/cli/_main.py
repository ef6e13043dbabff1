"""The entry point: options in, one answer out."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from itertools import islice
from os.path import exists
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from .._config import FIELDS, arguments_from_config, read_file
from .._degrees import INFERRED, PEER_AXES, as_degree, world_axes
from .._dims import ParallelDims
from .._errors import (
    LARGEST,
    LayoutError,
    ParallelDimsError,
    Violation,
    join_words,
    raise_errors,
    refusal,
)
from .._layout import RankLayout
from .._model import read_numbers
from .._names import is_of_framework
from .._rules import Subject, check_rules
from .._topology import Topology, topology_violations
from ..planner import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    Cluster,
    ModelShape,
    TrainSpec,
    estimate,
    plan,
    smallest_world,
)
from ._reports import (
    dims_document,
    estimate_document,
    group_rejections,
    map_ranks,
    plan_document,
    show_document,
    violation_document,
)
from ._tables import (
    Block,
    check_blocks,
    estimate_blocks,
    explain_blocks,
    group_blocks,
    plain_text,
    plan_blocks,
    print_rich,
    rank_group_blocks,
    show_blocks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODE = 8  # ranks of a usual one
MOST_RANKS = 2**18  # so that the groups of any order are listed in seconds
MOST_DIGITS = 10  # of any number here; Python reads none of thousands
REFUSED = 2
SUFFIXES = (".svg", ".png", ".pdf")  # of pictures
SILENT = 1.0  # seconds before a search shows how far it is
EXIT_CODES = """exit code:
  0  answered
  1  asked correctly, but nothing fits, this does not (estimate) or no configuration is valid
  2  bad input, or degrees that break a rule (check, explain, estimate)"""
Value = TypeVar("Value")


class Inputs:
    """Readers of options for argparse; what they cannot read is kept for one error at the end.

    Attributes:
        violations: What was refused so far.
        degrees_are_read: Whether all words, ``--config`` and ``--world`` could be read.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.degrees_are_read = True

    @contextmanager
    def noted(self, *, of_degrees: bool = False) -> Iterator[None]:
        """Keep what the block raises about its input and go on after it."""
        try:
            yield
        except ParallelDimsError as error:
            self.violations += error.violations
            self.degrees_are_read &= not of_degrees
        except LayoutError as error:
            self.violations.append(Violation(rule="layout", reason=str(error), values={}))

    def raise_all(self) -> None:
        """Raise one `ParallelDimsError` with all that was noted; do nothing without any."""
        raise_errors(self.violations)

    def reader(
        self, read: Callable[[str], Value], *, of_degrees: bool = False
    ) -> Callable[[str], Value | None]:
        """Return an argparse type that gives None for what ``read`` refuses."""

        def noting(text: str) -> Value | None:
            value = None
            with self.noted(of_degrees=of_degrees):
                value = read(text)
            return value

        return noting

    def count(
        self, option: str, *, least: int = 1, most: int = LARGEST, of_degrees: bool = False
    ) -> Any:
        """Return the argparse type of an integer."""

        def read(text: str) -> int:
            number = whole_number(text)
            if number is None or number < least:
                legal = "a positive integer" if least else "an integer from 0"
                raise refusal("number", f"{option} {text!r} is not {legal}", {option: text})
            if number > most:
                raise refusal("number", f"{option} {text!r} is not at most {most}", {option: text})
            return number

        return self.reader(read, of_degrees=of_degrees)

    def amount(self, option: str) -> Any:
        """Return the argparse type of a number, which `Cluster` judges."""

        def read(text: str) -> float:
            try:
                return float(text)
            except ValueError:
                reason = f"{option} {text!r} is not a number"
                raise refusal("number", reason, {option: text}) from None

        return self.reader(read)


class Progress:
    """How far a search is, on a terminal's standard error, once it has taken a second."""

    def __init__(self, title: str) -> None:
        self._title, self._shown, self._begin = title, "", monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show how many of how many are done."""
        if sys.stderr.isatty() and monotonic() - self._begin > SILENT:
            self._show(f"{self._title}: {done} of {total}")

    def __enter__(self) -> Self:
        """Return the function to report to."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Wipe the line."""
        if self._shown:
            self._show("")
            sys.stderr.write("\r")

    def _show(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(len(self._shown)))
        sys.stderr.flush()
        self._shown = text


def whole_number(text: str) -> int | None:
    """Return what decimal digits spell, None for other text; very long numbers are cut short."""
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if len(text) <= MOST_DIGITS else 10**MOST_DIGITS


def read_word(word: str) -> tuple[str, object]:
    """Return a word like ``tp=8`` as a field; what is no integer stays text, to be judged later."""
    name, equals, text = word.partition("=")
    if not (name and equals and text):
        raise refusal("word", f"{word!r} is not NAME=VALUE; write e.g. tp=8", {})
    if name not in FIELDS:
        reason = f"{name!r} is not a field; use {join_words(FIELDS)}"
        raise refusal("field", reason, {name: text})
    number = whole_number(text)
    return name, text if number is None else number


def read_table(place: str) -> Mapping[str, Any]:
    """Return the table that ``FILE`` or ``FILE:TABLE`` names; ``a.b`` is table b of table a."""
    path, _, table = (place, "", "") if exists(place) else place.rpartition(":")
    return _read(path or place, table if path else "")


def read_model(name: str) -> ModelShape | Mapping[str, Any]:
    """Return a model of the catalogue, or the content of a configuration file or of a folder's."""
    if name in MODELS:
        return MODELS[name]
    if Path(name).is_dir():
        name = str(Path(name, "config.json"))
    if not Path(name).suffix and not exists(name):
        reason = f"no model {name!r}; use {join_words(MODELS)}, or the path of a config.json"
        raise refusal("model", reason, {"model": name})
    return _read(name, "")


def read_chip(name: str) -> Mapping[str, Any]:
    """Return an accelerator, and the links that its file gives, as arguments of `Cluster`."""
    if Path(name.partition(":")[0]).suffix.lower() != ".toml":
        return {"accelerator": name}
    given = read_table(name)
    chip = {field.name: field for field in fields(Accelerator)}
    known = join_words((*chip, *LINKS, "ranks_per_node"))
    for key, value in given.items():
        if key not in (*chip, *LINKS, "ranks_per_node"):
            reason = f"{name} has {key!r}, which is none of {known}"
            raise refusal("accelerator", reason, {key: value})
    missing = [n for n, field in chip.items() if field.default is MISSING and n not in given]
    if missing:
        reason = f"{name} lacks {join_words(missing, 'and')}"
        raise refusal("accelerator", reason, {"file": name})
    links = {key: value for key, value in given.items() if key not in chip}
    own = Accelerator(**{key: value for key, value in given.items() if key in chip})
    return {"accelerator": own, **links}


def read_shape(name: str) -> ModelShape:
    """Return the shape of a model; an unknown one, or one that lacks a field, raises."""
    found = read_model(name)
    return found if isinstance(found, ModelShape) else ModelShape.from_config(found)


def _read(path: str, table: str) -> Mapping[str, Any]:
    try:
        return read_file(path, table or None)
    except OSError as error:
        reason = error.strerror or str(error)
    except ImportError:
        reason = "YAML needs the package pyyaml; use TOML or JSON"
    except ParallelDimsError:
        raise
    except ValueError as error:  # bytes that are no text, text that is no TOML, YAML or JSON
        reason = " ".join(str(error).split())
    raise refusal("file", f"cannot read {path}: {reason}", {"path": path})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A command's result: ``document`` makes the one for programs, ``blocks`` are for people.

    ``draw`` makes the picture, where the command has one. ``exit_code`` is 0, 1 where nothing was
    found that can be used, or 2 where the degrees that were given break a rule.
    """

    document: Callable[[], Mapping[str, object]]
    blocks: tuple[Block, ...]
    draw: "Callable[[], Figure] | None" = None
    exit_code: Literal[0, 1, 2] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: its options and the function that answers it.

    ``example`` holds the words after the command's name, ``notes`` what its answer's words mean.
    """

    name: str
    summary: str
    example: str
    add_options: Callable[[ArgumentParser, Inputs], None]
    answer: Callable[[Namespace, Inputs], Answer]
    notes: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hp-mesh``.

    The answer goes to standard output. Errors of the input go to standard error.

    Args:
        argv: Words of the command line after ``hp-mesh``. Defaults to ``sys.argv[1:]``.

    Returns:
        0 for success, 1 if no usable configuration was found, 2 for wrong input.

    Examples:
        >>> main(["groups", "tp", "tp=2", "--world", "4", "--rank", "3"])
        pp=1 dp_replicate=1 dp_shard=2 cp=1 tp=2 ep=1 etp=1 world=4
        rank 3 is at pp=0 dp_replicate=0 dp_shard=1 cp=0 tp=1
        its tp group of 2: 2 3
        0
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
    inputs = Inputs()
    parser, commands = _parsers(inputs)
    try:
        args = _parse(parser, commands, argv, inputs)
    except SystemExit as stop:  # argparse has printed its help or what it does not know
        return stop.code if isinstance(stop.code, int) else REFUSED
    command: Command = args.command
    try:
        answer = command.answer(args, inputs)
        if args.picture is not None and answer.draw is not None:
            _save(answer.draw, args.picture)
    except ParallelDimsError as error:
        if args.json:
            found = [violation_document(violation) for violation in error.violations]
            print(json.dumps({"violations": found}, indent=1, default=str))
        print(f"{parser.prog} {command.name}: {error}", file=sys.stderr)
        return REFUSED
    if args.json:
        print(json.dumps(answer.document(), indent=1, default=str))
    elif sys.stdout.isatty() and find_spec("rich") is not None:
        print_rich(answer.blocks, sys.stdout)
    else:
        sys.stdout.write(plain_text(answer.blocks))
    if args.picture is not None:
        print(f"wrote {args.picture}", file=sys.stderr)
    return answer.exit_code


def _parsers(inputs: Inputs) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
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
        command.add_options(added, inputs)
        added.add_argument(
            "--json", action="store_true", help="print one JSON document and nothing else"
        )
        added.set_defaults(command=command, picture=None)
        commands[command.name] = added
    return parser, commands


def _parse(
    parser: ArgumentParser,
    commands: dict[str, ArgumentParser],
    argv: Sequence[str] | None,
    inputs: Inputs,
) -> Namespace:
    args, rest = parser.parse_known_args(argv)
    # argparse takes words up to the first option only; those after it are words all the same.
    if rest and ("words" not in args or any(word.startswith("-") for word in rest)):
        commands[args.command.name].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.words = [*args.words, *map(inputs.reader(read_word, of_degrees=True), rest)]
    return args


def _save(draw: "Callable[[], Figure]", path: str) -> None:
    try:
        from ._pictures import save

        if Path(path).suffix.lower() not in SUFFIXES:
            raise ValueError(f"its name must end in {join_words(SUFFIXES)}")
        save(draw(), path)
    except ImportError:
        reason = "pictures need matplotlib: pip install 'hp-mesh[cli]'"
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
    except ValueError as error:
        reason = f"cannot write {path}: {error}"
    else:
        return
    raise refusal("file", reason, {"path": path})


def _add_degrees(parser: ArgumentParser, inputs: Inputs) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="NAME=VALUE",
        type=inputs.reader(read_word, of_degrees=True),
        help="degrees and order: tp=8 pp=2 dp_shard=-1",
    )
    parser.add_argument(
        "--config",
        metavar="FILE[:TABLE]",
        type=inputs.reader(read_table, of_degrees=True),
        help="degrees from a .toml, .yaml or .json file, also by a framework's names; words "
        "replace them",
    )
    _add_world(parser, inputs, default="the product of the degrees given")


def _add_world(parser: ArgumentParser, inputs: Inputs, default: str | None = None) -> None:
    """Add ``--world`` and ``--ranks-per-node``; without a default the world must be given."""
    parser.add_argument(
        "--world",
        "--gpus",
        dest="world",
        metavar="N",
        type=inputs.count(
            "--world" if default else "--gpus/--world", most=MOST_RANKS, of_degrees=True
        ),
        required=default is None,
        help="number of ranks" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument(
        "--ranks-per-node",
        metavar="N",
        type=inputs.count("--ranks-per-node"),
        help=f"ranks of one node (default: {NODE}, where all nodes are full)",
    )


def _add_model(
    parser: ArgumentParser, inputs: Inputs, read: Callable[[str], Any], *, required: bool = False
) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        type=inputs.reader(read),
        required=required,
        help="a name of the catalogue or the path of a config.json",
    )
    parser.add_argument(
        "--seq-len",
        metavar="N",
        type=inputs.count("--seq-len"),
        required=required,
        help="tokens of one sequence",
    )
    parser.add_argument(
        "--global-batch",
        metavar="N",
        type=inputs.count("--global-batch"),
        required=required,
        help="sequences of one optimizer step, over all ranks",
    )


def _add_sequence(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--causal-balance",
        action="store_true",
        help="sequences are cut into twice cp parts, so that causal attention is balanced",
    )
    parser.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="ranks of tp all hold the whole sequence between the layers, so tp need not divide it",
    )


def _add_picture(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--picture",
        "--svg",
        dest="picture",
        metavar="FILE",
        help="write a picture to this file: .svg, .png, .pdf (with matplotlib)",
    )


def _read_dims(args: Namespace, inputs: Inputs) -> tuple[dict[str, Any], ParallelDims | None]:
    """Return the fields of words and ``--config``, and the resolved degrees if they make some.

    A word replaces the file's value. What is wrong is noted, and first of all that is.
    """
    fields: dict[str, Any] = {}
    with inputs.noted(of_degrees=True):
        for name, value in filter(None, args.words):
            if name in fields:
                raise refusal("word", f"{name} is given twice; give it once", {name: value})
            fields[name] = value
    with inputs.noted(of_degrees=True):
        fields = _over_table(args.config or {}, fields)
        _check_sizes(fields)
    dims, others = None, [*inputs.violations]
    if inputs.degrees_are_read:
        inputs.violations.clear()
        with inputs.noted():
            dims = _make_dims(fields, args.world)
        inputs.violations += others
    return fields, dims


def _over_table(table: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file's table, also of a framework's names, with words in their place.

    Raises `ParallelDimsError` for what is wrong with a framework's table.
    """
    if not is_of_framework(table):
        return {**table, **words}
    arguments, found, etp_is_tp = arguments_from_config(table, None)
    raise_errors(found)
    fields = {**arguments, **words}
    if etp_is_tp and "tp" in fields:
        fields.setdefault("etp", fields["tp"])
    return fields


def _dims_alone(args: Namespace, inputs: Inputs) -> ParallelDims:
    """Return the resolved degrees, or raise all that is wrong with the command line."""
    _, dims = _read_dims(args, inputs)
    if dims is None or inputs.violations:
        raise ParallelDimsError(inputs.violations)
    return dims


def _make_dims(fields: Mapping[str, Any], ranks: int | None) -> ParallelDims:
    """Return the resolved degrees; without a world it is the product of the degrees given."""
    dims = ParallelDims.from_dict(fields)
    if ranks is None and dims.world_size is None:
        ranks = _product(dims)
        _check_sizes({"world_size": ranks})
    return dims if ranks is None else dims.resolve(ranks)


def _check_sizes(fields: Mapping[str, object]) -> None:
    """Raise for numbers of ranks that nothing here could list in any time."""
    for name, value in fields.items():
        number = whole_number(value) if isinstance(value, str) else value
        if name in FIELDS and isinstance(number, int) and number > MOST_RANKS:
            reason = f"{name}={value} is more than the {MOST_RANKS} ranks that can be laid out here"
            raise refusal("size", reason, {name: number})


def _product(dims: ParallelDims) -> int:
    unknown = [name for name in world_axes(dims.ep_mode) if getattr(dims, name) == INFERRED]
    if unknown:
        reason = f"{unknown[0]}=-1 follows from the world; give --world N"
        raise refusal("resolved", reason, dict.fromkeys(unknown, INFERRED))
    return replace(dims, dp_shard=dims.dp_shard or 1).layout().world_size


def _choose_nodes(world: int, ranks_per_node: int | None) -> Topology | None:
    """Return the nodes; usual ones that the world would not fill are not assumed."""
    if ranks_per_node is None and world > NODE and world % NODE:
        return None
    return Topology(ranks_per_node=ranks_per_node or NODE)


def _check_nodes(layout: RankLayout, topology: Topology | None) -> None:
    """Raise `ParallelDimsError` for nodes that the ranks do not fill."""
    if topology is not None:
        # What is wrong comes first; advice on each axis takes time and is not asked for here.
        raise_errors(islice(topology_violations(layout, topology), 1))


def _question(args: Namespace, inputs: Inputs) -> tuple[ParallelDims, dict[str, Any]]:
    """Return degrees and what to hold them against, or raise all that is wrong with either."""
    model = args.model.to_config() if isinstance(args.model, ModelShape) else args.model
    model = {} if model is None else model
    options = {name: getattr(args, name) for name in ("causal_balance", "sequence_parallel")}
    numbers = {name: getattr(args, name) for name in ("seq_len", "global_batch")}
    given, dims = _read_dims(args, inputs)
    if inputs.violations or dims is None:
        with inputs.noted():
            raise_errors(_errors_apart(given, model, **numbers, **options))
        raise ParallelDimsError(inputs.violations)
    topology = _choose_nodes(dims.layout().world_size, args.ranks_per_node)
    return dims, {"model": model, **numbers, **options, "topology": topology}


def _errors_apart(
    fields: Mapping[str, Any],
    model: object,
    seq_len: int | None,
    global_batch: int | None,
    **options: Any,
) -> Iterable[Violation]:
    """Return the errors of a model that stay errors whatever the unknown degrees become.

    An unknown degree counts as 1: all rules that find errors ask for products of degrees to divide
    or to stay below a number, so that more ranks repair nothing.
    """
    numbers, wrong = read_numbers(model, seq_len, global_batch)
    degrees = {}
    for name in (*PEER_AXES, "etp", "ulysses_degree"):
        degrees[name] = 1
        try:
            given = as_degree(name, fields.get(name), inferable=False, optional=True)
        except ParallelDimsError:
            continue
        degrees[name] = given or 1
    peer = fields.get("ep_mode") == "peer"
    sharding = ("dp_shard", "ep") if peer else ("dp_shard",)
    return check_rules(
        Subject(degrees=degrees, sharding=sharding, numbers=numbers, wrong=wrong, **options)
    ).errors


def answer_check(args: Namespace, inputs: Inputs) -> Answer:
    """Return every violation, and the fields that were absent."""
    dims, asked = _question(args, inputs)
    report = dims.check(**asked)
    return Answer(
        document=lambda: {
            "dims": dims_document(dims),
            "ok": not report.errors,
            "violations": [violation_document(violation) for violation in report],
            "skipped": list(report.skipped),
        },
        blocks=check_blocks(dims, report),
        exit_code=2 if report.errors else 0,
    )


def answer_explain(args: Namespace, inputs: Inputs) -> Answer:
    """Return each rule with its numbers and its verdict."""
    dims, asked = _question(args, inputs)
    found = dims.explain(**asked)
    names = ("rule", "sentence", "values", "verdict", "text")
    return Answer(
        document=lambda: {
            "dims": dims_document(dims),
            "rules": [{name: getattr(each, name) for name in names} for each in found],
        },
        blocks=explain_blocks(dims, found),
        exit_code=2 if any(each.verdict == "error" for each in found) else 0,
    )


def answer_show(args: Namespace, inputs: Inputs) -> Answer:
    """Return the axes with their groups, and every rank with its coordinates."""
    dims = _dims_alone(args, inputs)
    topology = _choose_nodes(dims.layout().world_size, args.ranks_per_node)
    with inputs.noted():
        _check_nodes(dims.layout(), topology)
        found = map_ranks(dims, topology.ranks_per_node if topology else None, args.axis)
    inputs.raise_all()

    def draw() -> "Figure":
        from ._pictures import draw_ranks

        return draw_ranks(found)

    return Answer(document=lambda: show_document(found), blocks=show_blocks(found), draw=draw)


def answer_groups(args: Namespace, inputs: Inputs) -> Answer:
    """Return all groups of an axis or alias, or the one that holds a rank."""
    dims = _dims_alone(args, inputs)
    layout = dims.layout()
    with inputs.noted():
        layout.size(args.name)
    with inputs.noted():
        layout.coordinates(args.rank or 0)
    topology = _choose_nodes(layout.world_size, args.ranks_per_node)
    with inputs.noted():
        _check_nodes(layout, topology)
    inputs.raise_all()
    crosses = layout.crosses_nodes(args.name, topology.ranks_per_node) if topology else None
    document = {
        "dims": dims_document(dims),
        "axis": args.name,
        "size": layout.size(args.name),
        "ranks_per_node": topology and topology.ranks_per_node,
        "crosses_nodes": crosses,
    }
    if args.rank is not None:
        group = list(layout.group(args.name, args.rank))
        return Answer(
            document=lambda: {**document, "rank": args.rank, "group": group},
            blocks=rank_group_blocks(dims, args.name, args.rank),
        )
    return Answer(
        document=lambda: {**document, "groups": [*map(list, layout.groups(args.name))]},
        blocks=group_blocks(dims, args.name, crosses),
    )


def answer_plan(args: Namespace, inputs: Inputs) -> Answer:
    """Return the configuration to run, the next ones and why they lose, and what was rejected."""
    cluster, train = _read_run(args, inputs, args.world)
    inputs.raise_all()
    with Progress("planning") as progress:
        found = plan(args.model, cluster, train, progress=progress)
    smallest = None
    if not found.fits:
        with Progress("looking for the smallest world that fits") as progress:
            smallest = smallest_world(
                args.model, cluster, train, largest=MOST_RANKS, progress=progress
            )
    rejections = group_rejections(found.rejected)

    def draw() -> "Figure":
        from ._pictures import draw_plan

        return draw_plan(found)

    return Answer(
        document=lambda: plan_document(found, found.candidates[: args.top], rejections, smallest),
        blocks=plan_blocks(found, rejections, args.top, smallest),
        draw=draw,
        exit_code=0 if found.fits else 1,
    )


def answer_estimate(args: Namespace, inputs: Inputs) -> Answer:
    """Return what one configuration costs, what it lacks to the best, and why it would not fit."""
    _, dims = _read_dims(args, inputs)
    cluster, train = _read_run(args, inputs, dims.layout().world_size if dims else args.world)
    if dims is None or inputs.violations:
        raise ParallelDimsError(inputs.violations)
    own = estimate(args.model, cluster, train, dims)
    with Progress("planning") as progress:
        found = plan(args.model, cluster, train, progress=progress)
    comparison = found.compare(own)
    return Answer(
        document=lambda: estimate_document(found, comparison),
        blocks=estimate_blocks(found, comparison),
        exit_code=1 if own.fit == "does not fit" else 0,
    )


def _read_run(args: Namespace, inputs: Inputs, world: int | None) -> tuple[Any, Any]:
    """Return the cluster and the training run; notes what is wrong with either.

    A count that is none has been noted; 1 in its place lets the other values be judged.
    """
    cluster = train = None
    with inputs.noted():
        if world is not None and args.ranks_per_node is not None:
            layout = ParallelDims(world_size=world).layout()
            _check_nodes(layout, _choose_nodes(world, args.ranks_per_node))
    with inputs.noted():
        chip = dict(args.gpu or {"accelerator": "H100"})
        given = {name: getattr(args, name) for name in (*LINKS, "memory_fraction")}
        chip |= {name: value for name, value in given.items() if value is not None}
        if args.ranks_per_node is not None:
            chip["ranks_per_node"] = args.ranks_per_node
        cluster = Cluster(world_size=world or 1, **chip)
    with inputs.noted():
        given = {name: getattr(args, name) for name in (*CHOICES, *COUNTS, *SWITCHES)}
        given = {name: value for name, value in given.items() if value is not None}
        train = TrainSpec(seq_len=args.seq_len or 1, global_batch=args.global_batch or 1, **given)
    return cluster, train


def _check_options(parser: ArgumentParser, inputs: Inputs) -> None:
    _add_degrees(parser, inputs)
    _add_model(parser, inputs, read_model)
    _add_sequence(parser)


def _show_options(parser: ArgumentParser, inputs: Inputs) -> None:
    _add_degrees(parser, inputs)
    parser.add_argument(
        "--axis", metavar="AXIS", help="colour the groups of this axis (default: the innermost)"
    )
    _add_picture(parser)


def _groups_options(parser: ArgumentParser, inputs: Inputs) -> None:
    parser.add_argument("name", metavar="AXIS", help="an axis or alias: tp, fsdp, dp, ep, ...")
    _add_degrees(parser, inputs)
    parser.add_argument(
        "--rank",
        metavar="R",
        type=inputs.count("--rank", least=0),
        help="only the group that holds this rank",
    )


def _run_options(parser: ArgumentParser, inputs: Inputs) -> None:
    machines = parser.add_argument_group("machines")
    machines.add_argument(
        "--gpu",
        metavar="NAME|FILE[:TABLE]",
        type=inputs.reader(read_chip),
        help=f"{', '.join(ACCELERATORS)}, or a TOML file with the fields of an Accelerator "
        "(default: H100)",
    )
    for name, text in {**LINKS, "memory_fraction": FRACTION}.items():
        option = f"--{name.replace('_', '-')}"
        machines.add_argument(option, metavar="X", type=inputs.amount(option), help=text)
    run = parser.add_argument_group("training")
    for name, text in COUNTS.items():
        option = f"--{name.replace('_', '-')}"
        run.add_argument(option, metavar="N", type=inputs.count(option), help=text)
    for name, text in CHOICES.items():
        option = f"--{name.replace('_', '-')}"
        read = _zero_stage if name == "zero" else _word
        run.add_argument(option, metavar="WORD", type=read, help=text)
    for name, text in SWITCHES.items():
        option = f"--{name.replace('_', '-')}"
        run.add_argument(option, action="store_true", default=None, help=text)


def _word(text: str) -> object:
    number = whole_number(text)
    return text if number is None else number


def _zero_stage(text: str) -> object:
    return None if text.lower() == "none" else _word(text)


def _estimate_options(parser: ArgumentParser, inputs: Inputs) -> None:
    _add_degrees(parser, inputs)
    _add_model(parser, inputs, read_shape, required=True)
    _run_options(parser, inputs)


def _plan_options(parser: ArgumentParser, inputs: Inputs) -> None:
    _add_model(parser, inputs, read_shape, required=True)
    _add_world(parser, inputs)
    _run_options(parser, inputs)
    parser.add_argument(
        "--top",
        metavar="N",
        type=inputs.count("--top"),
        default=10,
        help="candidates to tell of; only --json tells of all splits of dp apart (default: 10)",
    )
    _add_picture(parser)


# Options of a plan, by the field of `Cluster` or `TrainSpec` that each gives.
LINKS = {
    "intra_gbs": "GB/s of each device in one direction, inside a node (default: usual ones)",
    "inter_gbs": "GB/s of each device in one direction, between nodes (default: usual ones)",
    "intra_us": "microseconds of one hop inside a node",
    "inter_us": "microseconds of one hop between nodes",
}
FRACTION = "share of a device's memory that may be planned for (default: 0.95)"
COUNTS = {
    "micro_batch": "sequences at once (default: the best)",
    "virtual_stages": "stages of each pipeline rank, with an interleaved schedule (default: best)",
    "recompute_layers": "layers of each pipeline rank that recompute (default: all)",
    "max_nodes": "nodes whose experts one token may have (default: no limit, or the model's)",
}
CHOICES = {
    "recompute": "what the backward computes again: none, selective (the attention core), "
    "selective-op (all but attention outputs and every second matrix product) or full (whole "
    "layers) (default: the best)",
    "schedule": "of the pipeline: 1f1b, interleaved, zero-bubble, dualpipe or any (default: 1f1b)",
    "receive_buffers": "of pipeline ranks: in-flight (microbatches), or all of a step, as "
    "torch.distributed.pipelining keeps them (default: in-flight)",
    "zero": "ZeRO stage, 0 to 3, any or none (default: none, as FSDP does: 3, but with stages "
    "gathered and reduced once a step)",
    "gradient_dtype": "float32 or bfloat16, of gradients that are added up and reduced",
    "moment_dtype": "float32 or bfloat16, of the optimizer's moments",
    "attention": "native (the device's own kernels) or flash-2",
    "context": "over cp: ring or all-gather",
    "dispatch": "of tokens to experts: deduplicated (once to each node) or copies",
}
SWITCHES = {
    "float8": "multiply linear layers in fp8",
    "fused_loss": "compute the loss in chunks of tokens, so that logits are never whole",
    "fp8_dispatch": "send tokens to experts in fp8",
}
NOTES = """words of the answer:
  buffers     memory of gathered parameters, gradients on their way and tokens sent to experts
  exposed tp  communication over tp that computing does not hide; so for the other axes
  bubble      time that a pipeline rank waits for others
  borderline  above the memory limit by at most 15%, which is the estimate's own error"""
COMMANDS = (
    Command(
        name="plan",
        summary="say what to run: the best configuration, then every other valid one",
        example="--model llama3-405b --gpus 2048 --gpu h100 --seq-len 8192 --global-batch 2048",
        add_options=_plan_options,
        answer=answer_plan,
        notes=NOTES,
    ),
    Command(
        name="estimate",
        summary="say what one configuration costs and what it lacks to the best",
        example="dp_shard=8 tp=4 pp=16 --model llama3-405b --gpu h100 --seq-len 8192 "
        "--global-batch 512",
        add_options=_estimate_options,
        answer=answer_estimate,
        notes=NOTES,
    ),
    Command(
        name="check",
        summary="list everything that degrees break for a model",
        example="tp=16 pp=4 --world 512 --model llama3-70b --seq-len 8192 --global-batch 256",
        add_options=_check_options,
        answer=answer_check,
    ),
    Command(
        name="show",
        summary="show which rank sits where",
        example="tp=8 pp=2 --world 64 --axis pp --picture ranks.svg",
        add_options=_show_options,
        answer=answer_show,
    ),
    Command(
        name="explain",
        summary="print each rule with its numbers and its verdict",
        example="tp=16 --model llama3-70b --seq-len 8192",
        add_options=_check_options,
        answer=answer_explain,
    ),
    Command(
        name="groups",
        summary="list the groups of an axis or alias",
        example="fsdp tp=8 cp=2 --world 64 --rank 5",
        add_options=_groups_options,
        answer=answer_groups,
    ),
)
