"""What makes a command, and the options that several share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from ._blocks import Answer
from ._nodes import NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: its options and the function that answers it.

    ``example`` holds the words after the command's name, ``notes`` what its answer's words mean.
    """

    name: str
    summary: str
    example: str
    add_options: Callable[[ArgumentParser], None]
    answer: Callable[[Namespace], Answer]
    notes: str = ""


def add_degrees(parser: ArgumentParser) -> None:
    """Add the words for degrees, ``--config``, the world and the nodes."""
    parser.add_argument(
        "words", nargs="*", metavar="NAME=VALUE", help="degrees and order: tp=8 pp=2 dp_shard=-1"
    )
    parser.add_argument(
        "--config",
        metavar="FILE[:TABLE]",
        help="degrees from a .toml, .yaml or .json file; words replace its values",
    )
    add_world(parser, default="the product of the degrees given")


def add_world(parser: ArgumentParser, default: str | None = None) -> None:
    """Add ``--world`` and ``--ranks-per-node``; without a default the world must be given."""
    parser.add_argument(
        "--world",
        "--gpus",
        dest="world",
        metavar="N",
        required=default is None,
        help="number of ranks" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument(
        "--ranks-per-node",
        metavar="N",
        help=f"ranks of one node (default: {NODE}, where all nodes are full)",
    )


def add_model(parser: ArgumentParser, *, required: bool = False) -> None:
    """Add ``--model``, ``--seq-len`` and ``--global-batch``."""
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        required=required,
        help="a name of the catalogue or the path of a config.json",
    )
    parser.add_argument("--seq-len", metavar="N", required=required, help="tokens of one sequence")
    parser.add_argument(
        "--global-batch",
        metavar="N",
        required=required,
        help="sequences of one optimizer step, over all ranks",
    )


def add_sequence(parser: ArgumentParser) -> None:
    """Add ``--causal-balance`` and ``--no-sequence-parallel``."""
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


def add_picture(parser: ArgumentParser) -> None:
    """Add ``--svg``."""
    parser.add_argument("--svg", metavar="FILE", help="write a picture to this file")
