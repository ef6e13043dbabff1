"""The program: a rank if there is a run to join, else the launcher of all ranks."""

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from hp_mesh import ParallelDimsError

from .config import ModelError, TransformersConfig
from .launch import RENDEZVOUS, USAGE_STATUS, launch, watch_parent
from .options import NO_COMPILER, FinishedError, Options, counted, how_to_resume, parse
from .run_folder import OptionsError
from .text import TextError

LOCK_FILE = ".lock"  # in the folder of a run in progress


def main(argv: Sequence[str]) -> int:
    """Run the trainer with a command line and return the exit status.

    Wrong options end with one message and status 2 before torch is loaded. Too few GPUs and an
    unknown compiler, which only torch knows, do so before a rank starts. With ``RANK`` and
    ``WORLD_SIZE`` in the environment (torchrun, or the launcher) this process is that rank.
    """
    with contextlib.ExitStack() as stack:  # the lock of the folder
        return _main(argv, stack)


def _main(argv: Sequence[str], stack: contextlib.ExitStack) -> int:
    launched = RENDEZVOUS in os.environ
    if launched:
        watch_parent()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    leads = not joins or os.environ["RANK"] == "0"
    try:
        options = parse(argv, int(os.environ["WORLD_SIZE"]) if joins else None)
        if options.device == "cuda" and not joins:
            _check_gpus(options.world_size)
        if options.compile != NO_COMPILER and not launched:
            _check_compiler(options.compile)
        # The launcher has made and locked the folder. Ranks of a cluster agree on a default one
        # when they have joined.
        writes = not options.only_exports and (options.out_given or not joins)
        if leads and not launched and writes:
            stack.enter_context(_make_folder(options.out))
    except FinishedError as finished:
        if leads:
            print(finished)
        return 0
    except (OptionsError, ParallelDimsError, ModelError, TextError) as error:
        # Once on each node of a cluster, since a file may be missing on one of them.
        if not joins or launched or os.environ.get("LOCAL_RANK", "0") == "0":
            rank = "" if leads else f"rank {os.environ['RANK']}: "
            print(f"train: error: {rank}{_with_option_names(str(error), joins)}", file=sys.stderr)
        return USAGE_STATUS
    if joins or options.reference:
        from .rank import run_rank  # loads torch

        return run_rank(options)
    number = options.world_size
    print(f"starting {number} {'process' if number == 1 else 'processes'}", flush=True)
    argv = [*argv, "--out", str(options.out)]
    if options.device != "cpu" or sys.platform != "linux":
        status = launch([sys.executable, str(Path(__file__).resolve().parent), *argv], number)
    else:
        _import_for_ranks(options)
        status = launch(partial(main, argv), number)
    if status not in (0, USAGE_STATUS):
        print(how_to_resume(options), file=sys.stderr)
    return status


def _with_option_names(message: str, joins: bool) -> str:
    """Replace names of hp-mesh in a message by the names of options."""
    names = {"world_size": "WORLD_SIZE" if joins else "procs", "global_batch": "batch-size"}
    names["seq_len"] = "seq-len"
    return re.sub(rf"\b({'|'.join(names)})(?==)", lambda found: names[found[1]], message)


def _import_for_ranks(options: Options) -> None:
    """Import the modules of all ranks once, which takes most of the time of a start."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely
    import torch._dynamo  # noqa: F401 - what the first step of an optimizer imports

    from . import rank  # noqa: F401

    if isinstance(options.model, TransformersConfig):
        from transformers import AutoModelForCausalLM  # noqa: F401


def _check_gpus(processes: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < processes:
        raise OptionsError(
            f"device=cuda with procs={processes}: each process needs its own GPU, and this "
            f"machine has {counted(found, 'GPU')}; use "
            + (f"--procs {found} or fewer, or " if found > 1 else "--procs 1 or " * found)
            + "--device cpu"
        )


def _check_compiler(name: str) -> None:
    import torch

    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = torch.compiler.list_backends()
        raise OptionsError(
            f"compile={name} is not a compiler of torch; use {', '.join(usual)}, or aot_eager or "
            "eager, which generate no code"
        )


def _make_folder(out: Path) -> TextIO:
    """Make the folder of the results; return a file in it that is locked.

    The system releases the lock when this process and its forks have ended.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = (out / LOCK_FILE).open("a")
    except OSError as error:
        raise OptionsError(
            f"out={out} is no folder that can be written: {error.strerror}; give another"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise OptionsError(
            f"out={out} is in use by a run that has not ended; wait for it, or give another folder"
        ) from error
    except OSError:  # a file system without locks
        pass
    return held
