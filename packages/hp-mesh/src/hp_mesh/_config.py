"""Degrees from mappings, configuration objects and command lines, as constructor arguments."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from ._degrees import BASE_AXES
from ._errors import ParallelDimsError, Violation, join_words

HELP = {
    "dp_replicate": "data-parallel replicas of the sharded model",
    "dp_shard": "ranks that shard parameters; -1 takes what the other degrees leave",
    "cp": "context-parallel ranks: parts of one sequence",
    "tp": "tensor-parallel ranks: parts of one layer",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks, among those of dp_shard, cp and tp",
    "etp": "tensor-parallel ranks inside one expert: 1 or tp",
    "ulysses_degree": "ranks of cp that exchange heads instead of sequence",
}
DEGREES = (*HELP,)
FIELDS = (*HELP, "world_size", "order")


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, None where it is absent."""
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def arguments_from_config(config: object) -> dict[str, Any]:
    """Return the constructor arguments that a configuration gives; absent and None mean default.

    ``dp`` is an older name of ``dp_shard``. Raises `ParallelDimsError` where both differ.
    """
    given = {name: read_field(config, name) for name in (*DEGREES, "order")}
    arguments = {name: value for name, value in given.items() if value is not None}
    dp = read_field(config, "dp")
    if dp is not None and arguments.setdefault("dp_shard", dp) != dp:
        shard = arguments["dp_shard"]
        raise ParallelDimsError(
            [
                Violation(
                    rule="dp",
                    values={"dp": dp, "dp_shard": shard},
                    reason=f"dp={dp} and dp_shard={shard} differ, but dp is an older name of "
                    "dp_shard; give one of them",
                )
            ]
        )
    return arguments


def arguments_from_dict(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as constructor arguments; a key that is none raises `ParallelDimsError`."""
    unknown = [key for key in mapping if key not in FIELDS]
    if unknown:
        raise ParallelDimsError(
            [
                Violation(
                    rule="field",
                    values={key: mapping[key]},
                    reason=f"{key!r} is not a field; use {join_words(FIELDS)}",
                )
                for key in unknown
            ]
        )
    return dict(mapping)


def add_arguments(parser: ArgumentParser) -> None:
    """Add ``--dp-replicate``, ``--dp-shard``, ... and ``--order``, all optional.

    Values stay text here, so that a wrong one gets the error that every other way in gives.
    """
    group = parser.add_argument_group("parallel degrees")
    for name, text in HELP.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=text)
    group.add_argument(
        "--order", metavar="AXES", help=f"outermost first, e.g. {','.join(BASE_AXES)}"
    )


def arguments_from_args(args: Namespace) -> dict[str, Any]:
    """Return the constructor arguments that were given on the command line."""
    given = {name: read_field(args, name) for name in (*DEGREES, "order")}
    return {name: value for name, value in given.items() if value is not None}
