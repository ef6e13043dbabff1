"""Options of the commands, and functions that convert the texts of a command line to values.

argparse returns all values as text. The functions of this module convert the texts afterwards, so
that one error can list everything that is wrong with the command line.
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
from .._degrees import PEER_AXES, as_mode, world_axes
from .._dims import ParallelDims
from .._errors import (
    INFERRED,
    LARGEST,
    LayoutError,
    ParallelDimsError,
    Violation,
    as_degree,
    as_flag,
    integer_of,
    join_words,
    raise_errors,
    refusal,
    show,
)
from .._layout import Folds
from .._model import read_numbers
from .._rules import Subject, Topology, check_rules, topology_violations
from ..planner import MODELS, Accelerator, Cluster, ModelShape, TrainSpec
from ..planner._cluster import NODE

MOST_RANKS = 2**18  # largest world size; to list more ranks would take too long
Value = TypeVar("Value")


class Reader:
    """Collects the errors of several functions, so that one error can list all of them.

    A reader calls functions that convert texts of the command line to values.

    Attributes:
        violations: Violations of the errors that the functions raised.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def __call__(self, read: Callable[..., Value], *values: Any, **options: Any) -> Value | None:
        """Call ``read(*values, **options)`` and return its result.

        If ``read`` raises `ParallelDimsError` or `LayoutError`, returns None and appends to
        ``violations``.
        """
        try:
            return read(*values, **options)
        except ParallelDimsError as error:
            self.violations += error.violations
        except LayoutError as error:
            self.violations.append(Violation(rule="layout", reason=str(error), values={}))
        return None

    def finish(self) -> None:
        """Raise one `ParallelDimsError` with all violations, if there are any."""
        raise_errors(self.violations)

    def checked(self, value: Value | None) -> Value:
        """Return ``value`` if there are no violations and ``value`` is not None.

        Otherwise raises one `ParallelDimsError` with all violations.
        """
        if value is None or self.violations:
            raise ParallelDimsError(self.violations)
        return value


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        names: Positional arguments of argparse's ``add_argument``, such as ``("--axis",)``.
        settings: Keyword arguments of argparse's ``add_argument``.
        heading: Heading under which the help lists the option; ``""`` without one.
    """

    names: Sequence[str]
    settings: Mapping[str, Any]
    heading: str = ""


def option(help: str, *names: str, heading: str = "", **settings: Any) -> Option:
    """Create an `Option` with a help text. ``settings`` are passed to ``add_argument``."""
    return Option(names, {"help": help, **settings}, heading)


def field_options(spec: type, heading: str = "", *, required: bool | None = None) -> list[Option]:
    """Return command-line options for fields of a dataclass whose metadata has a help text.

    Args:
        spec: The dataclass: `TrainSpec` or `Cluster`.
        heading: Heading under which the help lists the options.
        required: None: options for the fields with a default. True or False: options for the
            fields without a default, which the user must (True) or may (False) give.
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
    """Add options to a parser. The help lists options with the same heading together."""
    groups: dict[str, ArgumentParser | _ArgumentGroup] = {"": parser}
    for names, settings, heading in options:
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(*names, **settings)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _word(value: object) -> str:
    """Return the text that a user writes for a value on the command line: ``"true"`` for True."""
    return str(value).lower()


def read_fields(args: Namespace, spec: type) -> dict[str, Any]:
    """Return a dictionary of the dataclass fields whose options are on the command line.

    The keys are names of fields. A value is a choice of the field if the text of the option equals
    this choice. Otherwise the value is a number if the text is a number. Any other text remains
    text, for which the dataclass raises an error.

    Args:
        args: The parsed command line.
        spec: The dataclass: `TrainSpec` or `Cluster`.
    """
    given = {}
    for each in fields(spec):
        text = getattr(args, each.name, None)
        if "help" in each.metadata and text is not None:
            words = {_word(value): value for value in each.metadata["choices"]}
            given[each.name] = words.get(_word(text), _number(text))
    return given


def _number(text: Any) -> Any:
    """Convert a text to an int or a float. Return the argument unchanged if it is not a number."""
    number = integer_of(text) if isinstance(text, str) else text
    if number is None and text.isascii() and "_" not in text:
        with suppress(ValueError):
            return float(text)
    return text if number is None else number


def read_count(option: str, text: str | None, *, least: int = 1, most: int = LARGEST) -> int | None:
    """Convert the text of an option to an integer from ``least`` to ``most``.

    Returns None if ``text`` is None.

    Raises:
        ParallelDimsError: The text is no integer, or the integer is out of range.
    """
    if text is None:
        return None
    number = integer_of(text)
    if number is None or number < least:
        legal = "a positive integer" if least else "an integer from 0"
        raise refusal("number", f"{option} {text!r} is not {legal}", {option: text})
    if number > most:
        raise refusal("number", f"{option} {text!r} is not at most {most}", {option: text})
    return number


def read_words(words: list[str], listed: Sequence[str] = FIELDS) -> dict[str, Any]:
    """Convert words such as ``"tp=8"`` to a dictionary such as ``{"tp": 8}``.

    The keys are names of fields of `ParallelDims`. A value that is not an integer remains text.
    Raises one `ParallelDimsError` that lists all wrong words. For an unknown name, the error lists
    the names ``listed``.
    """
    reader, found = Reader(), dict[str, Any]()
    for word in words:
        reader(_read_word, word, listed, found)
    reader.finish()
    return found


def _read_word(word: str, listed: Sequence[str], found: dict[str, Any]) -> None:
    name, equals, text = word.partition("=")
    if not (name and equals and text):
        raise refusal("word", f"{word!r} is not NAME=VALUE; write e.g. tp=8", {})
    if name not in FIELDS:
        reason = f"{name!r} is not a field; use {join_words(listed)}"
        raise refusal("field", reason, {name: text})
    if name in found:
        raise refusal("word", f"{name} is given twice; give it once", {name: text})
    number = integer_of(text)
    found[name] = text if number is None else number


def read_dims(args: Namespace, reader: Reader) -> tuple[dict[str, Any], ParallelDims | None]:
    """Read the degrees from words such as ``tp=8``, from ``--config`` and from ``--world``.

    Returns:
        A pair ``(given, dims)``. ``given`` is a dictionary of the `ParallelDims` fields that the
        words and the file contain. ``dims`` is the `ParallelDims` with all degrees known. If an
        input is wrong, ``dims`` is None, and ``reader.violations`` has the errors.
    """
    before = len(reader.violations)
    words = reader(read_words, args.words) or {}
    given, etp_is_tp = reader(_merge_table, args.config, words) or (words, False)
    reader(_check_sizes, given)
    world = reader(read_count, "--world", args.world, most=MOST_RANKS)
    if len(reader.violations) > before:
        return given, None
    return given, reader(_resolve, given, world, etp_is_tp)


def _merge_table(place: str | None, words: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Merge the fields of a configuration file and the fields of the command line.

    Returns a dictionary from names of `ParallelDims` fields to values, and True if its ``etp`` has
    the value of ``tp`` by default. If both sources have a field, the command line wins.

    Args:
        place: File and table, as in `read_table`. If None, there is no file. The file may use the
            field names of hp-mesh or of another framework.
        words: Fields of the command line, as `read_words` returns them.
    """
    table = read_table(place) if place else {}
    if not is_of_framework(table):
        return {**table, **words}, False
    arguments, found, etp_is_tp = arguments_from_config(table, None)
    raise_errors(found)
    given = {**arguments, **words}
    etp_is_tp = etp_is_tp and "tp" in given and "etp" not in given
    return ({**given, "etp": given["tp"]} if etp_is_tp else given), etp_is_tp


def _resolve(given: Mapping[str, Any], world: int | None, etp_is_tp: bool) -> ParallelDims:
    dims = ParallelDims.from_dict(given)
    object.__setattr__(dims, "_etp_from_tp", etp_is_tp)  # as `ParallelDims.from_config` does
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
        number = integer_of(value) if isinstance(value, str) else value
        if name in FIELDS and isinstance(number, int) and number > MOST_RANKS:
            rule = f"is more than the {MOST_RANKS} ranks that can be laid out here"
            raise refusal("size", f"{name}={show(number)} {rule}", {name: number})


def read_ranks(args: Namespace, reader: Reader) -> tuple[ParallelDims, int | None]:
    """Read the degrees and the number of ranks per node.

    Returns:
        A pair ``(dims, ranks_per_node)``. ``dims`` has all degrees resolved. ``ranks_per_node`` is
        None if the number is unknown.

    Raises:
        ParallelDimsError: An input is wrong.
    """
    _, dims = read_dims(args, reader)
    node = _read_node(args, reader, dims.layout().world_size if dims else None)
    return reader.checked(dims), node


def _read_node(
    args: Namespace, reader: Reader, world: int | None, *, must_fill: bool = True
) -> int | None:
    """Return the number of ranks per node, or None if it is unknown or wrong.

    Without the option ``--ranks-per-node``, the number is 8. But if the world size is more than 8
    and not a multiple of 8, the number is unknown. Wrong numbers are added to
    ``reader.violations``.

    Args:
        args: The parsed command line.
        reader: Collects the errors.
        world: World size, or None if it is unknown.
        must_fill: If True, a number from ``--ranks-per-node`` that does not divide the world size
            is an error.
    """
    node = reader(read_count, "--ranks-per-node", args.ranks_per_node)
    if args.ranks_per_node is None:
        return None if world and world > NODE and world % NODE else NODE
    if must_fill and node and world:
        layout = ParallelDims(world_size=world).layout()
        # Only the first violation can be an error. The others are advice, and finding them is slow.
        found = topology_violations(layout, Topology(ranks_per_node=node))
        reader(raise_errors, islice(found, 1))
    return node


def read_check(args: Namespace, reader: Reader) -> tuple[ParallelDims, dict[str, Any]]:
    """Read the degrees, the model and the other inputs of the commands check and explain.

    Returns:
        A pair ``(dims, arguments)``. ``dims`` has all degrees resolved. ``arguments`` are the
        keyword arguments for `ParallelDims.check` and `ParallelDims.explain`.

    Raises:
        ParallelDimsError: An input is wrong. The error also lists the rules for the model that the
            valid degrees break.
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
    """Raise `ParallelDimsError` if the valid degrees in ``given`` break rules for the model.

    A degree that is absent or invalid counts as 1. No larger value of this degree could repair a
    broken rule, because each rule requires that a product of degrees divides a number or is at most
    this number.

    Args:
        given: Degrees and other fields of `ParallelDims` by name.
        model: Configuration of the model.
        counts: Dictionary with the keys ``seq_len`` and ``global_batch``. A value is None if its
            option is not on the command line.
        options: Dictionary with the keys ``causal_balance`` and ``sequence_parallel``.
    """
    numbers, wrong = read_numbers(model, counts["seq_len"], counts["global_batch"])
    degrees = {}
    for name in (*PEER_AXES, "etp", "ulysses_degree"):
        degree = Reader()(as_degree, name, given.get(name), inferable=False, optional=True)
        degrees[name] = degree or 1
    mode = Reader()(as_mode, given.get("ep_mode")) or "folded"
    subject = Subject(
        degrees=degrees,
        sharding=Folds(peer=mode == "peer").sharding,
        numbers=numbers,
        wrong=wrong,
        ep_mode=mode,
        free_etp=bool(Reader()(as_flag, "free_etp", given.get("free_etp"))),
        **options,
    )
    raise_errors(check_rules(subject).errors)


def read_run(args: Namespace, reader: Reader, world: int | None) -> tuple[Any, Any, Any]:
    """Read the model, the cluster and the training settings.

    Returns:
        A tuple ``(model, cluster, train)`` of a `ModelShape`, a `Cluster` and a `TrainSpec`. If the
        options of one of them are wrong, it is None, and ``reader.violations`` has the errors.
    """
    model = reader(read_shape, args.model)
    chip = reader(read_chip, args.gpu)
    given = read_fields(args, Cluster)
    before = len(reader.violations)
    node = _read_node(args, reader, world)
    if args.ranks_per_node and node and len(reader.violations) == before:
        given["ranks_per_node"] = node
    # If the world size is wrong, the other values are checked with a world size of 1.
    cluster = chip and reader(Cluster, **{"world_size": world or 1, **chip, **given})
    return model, cluster, reader(TrainSpec, **read_fields(args, TrainSpec))


def read_model(name: str) -> ModelShape | Mapping[str, Any]:
    """Find a published model or read a configuration file.

    If ``name`` is a key of `MODELS`, returns this `ModelShape`. Otherwise ``name`` is the path of a
    configuration file, or of a folder with a ``config.json``. Returns the entries of the file as a
    dictionary.
    """
    if name in MODELS:
        return MODELS[name]
    if Path(name).is_dir():
        name = str(Path(name, "config.json"))
    if not Path(name).suffix and not exists(name):
        reason = f"no model {name!r}; use {join_words(MODELS)}, or the path of a config.json"
        raise refusal("model", reason, {"model": name})
    return _read_file(name, "")


def read_shape(name: str) -> ModelShape:
    """Return the `ModelShape` of a model. ``name`` is the same as in `read_model`."""
    found = read_model(name)
    return found if isinstance(found, ModelShape) else ModelShape.from_config(found)


def read_chip(name: str) -> dict[str, Any]:
    """Convert the text of ``--gpu`` to keyword arguments of `Cluster`.

    The dictionary has the key ``accelerator`` and, if ``name`` is a file with fields of `Cluster`
    such as ``intra_gbs``, also these fields.

    Args:
        name: Name of an accelerator such as ``"H100"``, or the path of a TOML file with the fields
            of an `Accelerator`.
    """
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
    """Return the entries of a TOML, YAML or JSON file, or of one table in the file.

    ``place`` is ``"FILE"`` for the whole file, or ``"FILE:TABLE"`` for one table. ``TABLE`` is a
    key of the file. With a dot, as in ``a.b``, it is the key ``b`` of the table ``a``.
    """
    path, _, table = (place, "", "") if exists(place) else place.rpartition(":")
    return _read_file(path or place, table if path else "")


def _read_file(path: str, table: str) -> Mapping[str, Any]:
    try:
        return read_file(path, table or None)
    except ImportError:
        reason = f"cannot read {path}: YAML needs the package pyyaml; use TOML or JSON"
        raise refusal("file", reason, {"path": path}) from None
