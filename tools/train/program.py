"""The program: one rank of a run where there is one to join, else the launcher of all."""

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hp_mesh import ParallelDimsError

from .config import ModelError, TransformersConfig
from .launch import RENDEZVOUS, launch, watch_parent
from .options import Options, OptionsError, counted, parse
from .text import TextError

USAGE_STATUS = 2


def main(argv: Sequence[str]) -> int:
    """Run the trainer with the words of a command line and return the exit status.

    Bad options end with one message and status 2 before torch is loaded; so do too few GPUs, which
    torch counts, before a rank starts. With ``RANK`` and ``WORLD_SIZE`` in the environment
    (torchrun, or the launcher) this process is that rank.
    """
    if RENDEZVOUS in os.environ:
        watch_parent()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    leads = not joins or os.environ["RANK"] == "0"
    try:
        options = parse(argv, int(os.environ["WORLD_SIZE"]) if joins else None)
        if options.device == "cuda" and not joins:
            _check_gpus(options.world_size)
        # A cluster's ranks agree on a folder that was not given once they have joined.
        if leads and (options.out_given or not joins):
            _make_folder(options.out)
    except (OptionsError, ParallelDimsError, ModelError, TextError) as error:
        if leads:
            print(f"train: error: {error}", file=sys.stderr)
        return USAGE_STATUS
    if joins or options.reference:
        from .rank import run_rank  # loads torch

        return run_rank(options)
    number = options.world_size
    print(f"starting {number} {'process' if number == 1 else 'processes'}", flush=True)
    words = [*argv, "--out", str(options.out)]
    if options.device != "cpu" or sys.platform != "linux":
        return launch([sys.executable, str(Path(__file__).resolve().parent), *words], number)
    _import_for_ranks(options)
    return launch(partial(main, words), number)


def _import_for_ranks(options: Options) -> None:
    """Import here, once, what each rank needs: most of the time until the first step."""
    os.environ["OMP_NUM_THREADS"] = "1"  # with threads, this process could not be forked safely
    import torch._dynamo  # noqa: F401 - what the first step of an optimizer imports

    from . import rank  # noqa: F401

    if isinstance(options.model, TransformersConfig):
        from transformers import AutoModelForCausalLM  # noqa: F401


def _check_gpus(processes: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < processes:
        raise OptionsError(
            f"device=cuda with procs={processes}: each process takes a GPU of its own, and this "
            f"machine has {counted(found, 'GPU')}; use "
            + (f"--procs {found} or fewer, or " if found > 1 else "--procs 1 or " * found)
            + "--device cpu"
        )


def _make_folder(out: Path) -> None:
    """Make the folder of the results and see that files can be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OptionsError(
            f"out={out} is no folder that can be written: {error.strerror}; give another"
        ) from error
