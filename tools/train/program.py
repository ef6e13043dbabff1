"""The program: one rank of a run where there is one to join, else the launcher of all."""

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

LOCK_FILE = ".lock"  # in the folder of a run, while it goes on


def main(argv: Sequence[str]) -> int:
    """Run the trainer with the words of a command line and return the exit status.

    Bad options end with one message and status 2 before torch is loaded; so do too few GPUs and an
    unknown compiler, which torch tells, before a rank starts. With ``RANK`` and ``WORLD_SIZE`` in
    the environment (torchrun, or the launcher) this process is that rank.
    """
    with contextlib.ExitStack() as held:
        return _main(argv, held)


def _main(argv: Sequence[str], held: contextlib.ExitStack) -> int:
    if RENDEZVOUS in os.environ:
        watch_parent()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    leads = not joins or os.environ["RANK"] == "0"
    try:
        options = parse(argv, int(os.environ["WORLD_SIZE"]) if joins else None)
        if options.device == "cuda" and not joins:
            _check_gpus(options.world_size)
        if options.compile != NO_COMPILER and RENDEZVOUS not in os.environ:
            _check_compiler(options.compile)
        # A cluster's ranks agree on a folder that was not given once they have joined.
        # The launcher has made it for the ranks that it started, and holds it.
        if leads and RENDEZVOUS not in os.environ and (options.out_given or not joins):
            held.enter_context(_make_folder(options.out))
    except FinishedError as finished:
        if leads:
            print(finished)
        return 0
    except (OptionsError, ParallelDimsError, ModelError, TextError) as error:
        # Once on each node of a cluster: one may lack what others have.
        if not joins or RENDEZVOUS in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            who = "" if leads else f"rank {os.environ['RANK']}: "
            print(f"train: error: {who}{_in_option_words(str(error), joins)}", file=sys.stderr)
        return USAGE_STATUS
    if joins or options.reference:
        from .rank import run_rank  # loads torch

        return run_rank(options)
    number = options.world_size
    print(f"starting {number} {'process' if number == 1 else 'processes'}", flush=True)
    words = [*argv, "--out", str(options.out)]
    if options.device != "cpu" or sys.platform != "linux":
        status = launch([sys.executable, str(Path(__file__).resolve().parent), *words], number)
    else:
        _import_for_ranks(options)
        status = launch(partial(main, words), number)
    if status not in (0, USAGE_STATUS):
        print(how_to_resume(options), file=sys.stderr)
    return status


def _in_option_words(message: str, joins: bool) -> str:
    """Return a message of hp-mesh with the names of this program's options for its numbers."""
    names = {"world_size": "WORLD_SIZE" if joins else "procs", "global_batch": "batch-size"}
    names["seq_len"] = "seq-len"
    return re.sub(rf"\b({'|'.join(names)})(?==)", lambda found: names[found[1]], message)


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


def _check_compiler(name: str) -> None:
    import torch

    if name not in torch.compiler.list_backends(exclude_tags=()):
        usual = torch.compiler.list_backends()
        raise OptionsError(
            f"compile={name} is no compiler of torch's; use {', '.join(usual)}, or aot_eager or "
            "eager, which generate no code"
        )


def _make_folder(out: Path) -> TextIO:
    """Make the folder of the results; return a file in it that this process and its forks hold.

    The system lets go of it with the last of them, however they end.
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
