"""Run a program as a process, without the seconds that importing torch takes."""

import gc
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._pool import CALL_SECONDS, server


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended and what it wrote to standard output and standard error."""

    status: int
    stdout: str
    stderr: str


def run_program(
    path: str,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = CALL_SECONDS,
) -> Ended:
    """Do what ``python path words`` does, in a fork of the server that pools are forked from.

    The program gets this process's folder and environment, with ``environment`` over it. What an
    interpreter does at its end, such as calling what `atexit` holds, is left out.

    Raises:
        TimeoutError: The program ran longer than ``timeout`` seconds; it was killed.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        process = server().Process(
            target=_be_program,
            args=(path, [*words], {**os.environ, **(environment or {})}, os.getcwd(), out, err),
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{path} ran for {timeout} s: {out.read_text()}{err.read_text()}")
        return Ended(process.exitcode, out.read_text(), err.read_text())


def _be_program(
    path: str, words: list[str], environment: dict[str, str], folder: str, out: Path, err: Path
) -> None:
    gc.freeze()  # as in a rank
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [path, *words]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_path(path, run_name="__main__")
