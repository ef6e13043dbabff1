"""The program: one rank of a run where there is one to join, else the launcher of all."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_mesh import ParallelDimsError

from .launch import RENDEZVOUS, launch, watch_parent
from .options import OptionsError, parse
from .text import TextError

USAGE_STATUS = 2


def main(argv: Sequence[str]) -> int:
    """Run the trainer with the words of a command line and return the exit status.

    Bad options end with one message and status 2 before torch is loaded. With ``RANK`` and
    ``WORLD_SIZE`` in the environment (torchrun, or the launcher) this process is that rank.
    """
    if RENDEZVOUS in os.environ:
        watch_parent()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        options = parse(argv, int(os.environ["WORLD_SIZE"]) if joins else None)
    except (OptionsError, ParallelDimsError, TextError) as error:
        if not joins or os.environ["RANK"] == "0":
            print(f"train: error: {error}", file=sys.stderr)
        return USAGE_STATUS
    if joins or options.reference:
        from .rank import run_rank  # loads torch

        return run_rank(options)
    number = options.world_size
    print(f"starting {number} {'process' if number == 1 else 'processes'}", flush=True)
    program = [sys.executable, str(Path(__file__).resolve().parent)]
    return launch([*program, *argv, "--out", str(options.out)], number)
