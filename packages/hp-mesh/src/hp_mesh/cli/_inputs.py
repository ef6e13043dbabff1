"""Options of the commands, and the values that are read from their texts.

argparse keeps all values as text. They are read afterwards, so that one error lists everything
that is wrong with a command line.
"""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from itertools import islice
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .._config import FIELDS, arguments_from_config, is_of_framework, read_file
from .._degrees import PEER_AXES, world_axes
from .._dims import ParallelDims
from .._errors import (
    INFERRED,
    LARGEST,
    LayoutError,
    ParallelDimsError,
    Violation,
    as_degree,
    join_words,
    raise_errors,
    refusal,
    show,
)
from .._model import read_numbers
from .._rules import Subject, Topology, check_rules, topology_violations
from ..planner import MODELS, Accelerator, Cluster, ModelShape, TrainSpec

NODE = 8  # ranks of a node, if neither the user nor a file says otherwise
MOST_RANKS = 2**18  # more would take too long to list
MOST_DIGITS = 4000  # of an integer; Python reads at most 4300 digits
Value = TypeVar("Value")


class Reader:
    """Calls functions that read inputs, and collects the violations that they raise."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def __call__(self, read: Callable[..., Value], *values: Any, **options: Any) -> Value | None:
        """Return the result of ``read``, or None if it raises for a wrong input."""
        try:
            return read(*values, **options)
        except ParallelDimsError as error:
            self.violations += error.violations
        except LayoutError as error:
            self.violations.append(Violation(rule="layout", reason=str(error), values={}))
        return None

    def finish(self) -> None:
        """Raise one error with all violations, if there are any."""
        raise_errors(self.violations)

    def checked(self, value: Value | None) -> Value:
        """Return ``value``, or raise one error with all violations, if there are any."""
        if value is None or self.violations:
            raise ParallelDimsError(self.violations)
        return value


class Option(NamedTuple):
    """An option of a command: arguments of argparse's ``add_argument``, and a heading for help."""

    names: Sequence[str]
    settings: Mapping[str, Any]
    heading: str = ""


def option(help: str, *names: str, heading: str = "", **settings: Any) -> Option:
    """Return an option with its description, its names and its settings for argparse."""
    return Option(names, {"help": help, **settings}, heading)


def field_options(spec: type, heading: str = "", *, required: bool | None = None) -> list[Option]:
    """Return an option for each field of a dataclass that has a description.

    Args:
        spec: `TrainSpec` or `Cluster`.
        heading: Heading of these options in the help.
        required: None selects the fields that have a default. True and False select the others, as
            options that must or may be given.
    """
    options = []
    for each in fields(spec):
        if "help" not in each.metadata or (each.default is MISSING) == (required is None):
            continue
        text, choices = each.metadata["help"], each.metadata["choices"]
        settings: dict[str, Any] = {"required": bool(required)}
        if each.default is False:
            settings = {"action": "store_true", "default": None}
        elif choices:
            settings["metavar"] = f"{{{','.join(map(_word, choices))}}}"
        else:
            settings["metavar"] = each.metadata["unit"].upper()
        if each.default not in (None, False, MISSING):
            text += f" (default: {_word(each.default)})"
        options.append(option(text, _flag(each.name), heading=heading, **settings))
    return options


def add_options(parser: ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to a parser. Options with a heading are grouped under it in the help."""
    groups: dict[str, ArgumentParser | _ArgumentGroup] = {"": parser}
    for names, settings, heading in options:
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(*names, **settings)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _word(value: object) -> str:
    """Write a value as on the command line."""
    return str(value).lower()


def read_fields(args: Namespace, spec: type) -> dict[str, Any]:
    """Return the fields of a dataclass that the command line sets.

    Texts that are neither a choice nor a number stay texts. The dataclass refuses them.
    """
    given = {}
    for each in fields(spec):
        text = getattr(args, each.name, None)
        if "help" in each.metadata and text is not None:
            words = {_word(value): value for value in each.metadata["choices"]}
            given[each.name] = words.get(_word(text), _number(text))
    return given


def _number(text: Any) -> Any:
    """Read an integer or a decimal number. Other values are returned unchanged."""
    number = _integer(text) if isinstance(text, str) else text
    if number is None and text.isascii() and "_" not in text:
        with suppress(ValueError):
            return float(text)
    return text if number is None else number


def read_count(option: str, text: str | None, *, least: int = 1, most: int = LARGEST) -> int | None:
    """Return the integer from ``least`` to ``most`` that a text has; None if it is None.

    Raises:
        ParallelDimsError: The text is not such an integer.
    """
    if text is None:
        return None
    number = _integer(text)
    if number is None or number < least:
        legal = "a positive integer" if least else "an integer from 0"
        raise refusal("number", f"{option} {text!r} is not {legal}", {option: text})
    if number > most:
        raise refusal("number", f"{option} {text!r} is not at most {most}", {option: text})
    return number


def _integer(text: str) -> int | None:
    """Return the number that ASCII digits and an optional minus sign make, or None.

    Digits after the first 4,000 are dropped. Such a number is too large for every option.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return int(text[:MOST_DIGITS])


def read_words(words: list[str]) -> dict[str, Any]:
    """Return the fields that words such as ``tp=8`` set. Values that are no integers stay texts."""
    reader, found = Reader(), dict[str, Any]()
    for word in words:
        reader(_read_word, word, found)
    reader.finish()
    return found


def _read_word(word: str, found: dict[str, Any]) -> None:
    name, equals, text = word.partition("=")
    if not (name and equals and text):
        raise refusal("word", f"{word!r} is not NAME=VALUE; write e.g. tp=8", {})
    if name not in FIELDS:
        reason = f"{name!r} is not a field; use {join_words(FIELDS)}"
        raise refusal("field", reason, {name: text})
    if name in found:
        raise refusal("word", f"{name} is given twice; give it once", {name: text})
    number = _integer(text)
    found[name] = text if number is None else number


def read_dims(args: Namespace, reader: Reader) -> tuple[dict[str, Any], ParallelDims | None]:
    """Return the given fields of `ParallelDims`, and the resolved degrees; None if one is wrong."""
    before = len(reader.violations)
    words = reader(read_words, args.words) or {}
    given = reader(_merge_table, args.config, words) or words
    reader(_check_sizes, given)
    world = reader(read_count, "--world", args.world, most=MOST_RANKS)
    if len(reader.violations) > before:
        return given, None
    return given, reader(_resolve, given, world)


def _merge_table(place: str | None, words: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a file's table. A field that is also given as a word has its value."""
    table = read_table(place) if place else {}
    if not is_of_framework(table):
        return {**table, **words}
    arguments, found, etp_is_tp = arguments_from_config(table, None)
    raise_errors(found)
    given = {**arguments, **words}
    return {"etp": given["tp"], **given} if etp_is_tp and "tp" in given else given


def _resolve(given: Mapping[str, Any], world: int | None) -> ParallelDims:
    dims = ParallelDims.from_dict(given)
    if world is None and dims.world_size is None:
        unknown = [name for name in world_axes(dims.ep_mode) if getattr(dims, name) == INFERRED]
        if unknown:
            reason = f"{unknown[0]}=-1 follows from the world; give --world N"
            raise refusal("resolved", reason, dict.fromkeys(unknown, INFERRED))
        world = replace(dims, dp_shard=dims.dp_shard or 1).layout().world_size
        _check_sizes({"world_size": world})
    return dims if world is None else dims.resolve(world)


def _check_sizes(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        number = _integer(value) if isinstance(value, str) else value
        if name in FIELDS and isinstance(number, int) and number > MOST_RANKS:
            rule = f"is more than the {MOST_RANKS} ranks that can be laid out here"
            raise refusal("size", f"{name}={show(number)} {rule}", {name: number})


def read_ranks(args: Namespace, reader: Reader) -> tuple[ParallelDims, int | None]:
    """Return the resolved degrees, and the number of ranks per node or None if it is unknown.

    Raises:
        ParallelDimsError: An input is wrong.
    """
    _, dims = read_dims(args, reader)
    node = _read_node(args, reader, dims.layout().world_size if dims else None)
    return reader.checked(dims), node


def _read_node(
    args: Namespace, reader: Reader, world: int | None, *, must_fill: bool = True
) -> int | None:
    """Return the number of ranks per node.

    Without ``--ranks-per-node`` it is 8, or None if 8 does not divide the world size. With
    ``must_fill``, a given number that does not divide the world size is a violation.
    """
    node = reader(read_count, "--ranks-per-node", args.ranks_per_node)
    if args.ranks_per_node is None:
        return None if world and world > NODE and world % NODE else NODE
    if must_fill and node and world:
        layout = ParallelDims(world_size=world).layout()
        # The first violation is the error. The others are advice, and take time for each axis.
        found = topology_violations(layout, Topology(ranks_per_node=node))
        reader(raise_errors, islice(found, 1))
    return node


def read_check(args: Namespace, reader: Reader) -> tuple[ParallelDims, dict[str, Any]]:
    """Return the resolved degrees, and the arguments of `ParallelDims.check` by name.

    Raises:
        ParallelDimsError: An input is wrong. The error also lists the rules of the model that the
            known degrees break.
    """
    given, dims = read_dims(args, reader)
    world = dims.layout().world_size if dims else None
    node = _read_node(args, reader, world, must_fill=False)
    model = reader(read_model, args.model) if args.model else {}
    model = model.to_config() if isinstance(model, ModelShape) else model or {}
    options = {name: getattr(args, name) for name in ("causal_balance", "sequence_parallel")}
    numbers = {
        name: reader(read_count, _flag(name), getattr(args, name))
        for name in ("seq_len", "global_batch")
    }
    if dims is None or reader.violations:
        reader(_check_model, given, model, numbers, options)
        raise ParallelDimsError(reader.violations)
    topology = Topology(ranks_per_node=node) if node else None
    return dims, {"model": model, **numbers, **options, "topology": topology}


def _check_model(
    given: Mapping[str, Any],
    model: object,
    counts: Mapping[str, int | None],
    options: Mapping[str, Any],
) -> None:
    """Raise the rules of a model that the known degrees break. An unknown degree counts as 1.

    A larger degree cannot repair such an error: each rule asks that a product of degrees divides a
    number, or is at most this number.
    """
    numbers, wrong = read_numbers(model, counts["seq_len"], counts["global_batch"])
    degrees = {}
    for name in (*PEER_AXES, "etp", "ulysses_degree"):
        degree = Reader()(as_degree, name, given.get(name), inferable=False, optional=True)
        degrees[name] = degree or 1
    sharding = ("dp_shard", "ep") if given.get("ep_mode") == "peer" else ("dp_shard",)
    subject = Subject(degrees=degrees, sharding=sharding, numbers=numbers, wrong=wrong, **options)
    raise_errors(check_rules(subject).errors)


def read_run(args: Namespace, reader: Reader, world: int | None) -> tuple[Any, Any, Any]:
    """Return the `ModelShape`, the `Cluster` and the `TrainSpec`. Each is None if it is wrong."""
    model = reader(read_shape, args.model)
    chip = reader(read_chip, args.gpu)
    given = read_fields(args, Cluster)
    node = _read_node(args, reader, world)
    given |= {"ranks_per_node": node} if args.ranks_per_node else {}
    # With a world of 1 the other values can be checked.
    cluster = chip and reader(Cluster, **{"world_size": world or 1, **chip, **given})
    return model, cluster, reader(TrainSpec, **read_fields(args, TrainSpec))


def read_model(name: str) -> ModelShape | Mapping[str, Any]:
    """Return a model of the catalogue, or the content of a configuration file."""
    if name in MODELS:
        return MODELS[name]
    if Path(name).is_dir():
        name = str(Path(name, "config.json"))
    if not Path(name).suffix and not exists(name):
        reason = f"no model {name!r}; use {join_words(MODELS)}, or the path of a config.json"
        raise refusal("model", reason, {"model": name})
    return _read_file(name, "")


def read_shape(name: str) -> ModelShape:
    """Return the shape of a model."""
    found = read_model(name)
    return found if isinstance(found, ModelShape) else ModelShape.from_config(found)


def read_chip(name: str) -> dict[str, Any]:
    """Return the arguments of `Cluster` for an accelerator: its name, or the content of a file."""
    if Path(name.partition(":")[0]).suffix.lower() != ".toml":
        return {"accelerator": name}
    given = read_table(name)
    chip = {each.name: each for each in fields(Accelerator)}
    links = [each.name for each in fields(Cluster) if "help" in each.metadata]
    known = (*chip, *links, "ranks_per_node")
    for key, value in given.items():
        if key not in known:
            reason = f"{name} has {key!r}, which is none of {join_words(known)}"
            raise refusal("accelerator", reason, {key: value})
    missing = [n for n, each in chip.items() if each.default is MISSING and n not in given]
    if missing:
        reason = f"{name} lacks {join_words(missing, 'and')}"
        raise refusal("accelerator", reason, {"file": name})
    own = Accelerator(**{key: value for key, value in given.items() if key in chip})
    others = {key: value for key, value in given.items() if key not in chip}
    return {"accelerator": own, **others}


def read_table(place: str) -> Mapping[str, Any]:
    """Return a file's table from ``FILE`` or ``FILE:TABLE``. ``a.b`` is table b in table a."""
    path, _, table = (place, "", "") if exists(place) else place.rpartition(":")
    return _read_file(path or place, table if path else "")


def _read_file(path: str, table: str) -> Mapping[str, Any]:
    try:
        return read_file(path, table or None)
    except OSError as error:
        reason = error.strerror or str(error)
    except ImportError:
        reason = "YAML needs the package pyyaml; use TOML or JSON"
    except ParallelDimsError:
        raise
    except ValueError as error:  # the file is no text, or not in its format
        reason = " ".join(str(error).split())
    raise refusal("file", f"cannot read {path}: {reason}", {"path": path})
