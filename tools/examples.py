"""Run the code blocks of Markdown files.

    python tools/examples.py README.md          the blocks of one file
    python tools/examples.py tools/docs/pages   those of all files in a folder

| fence | action |
|---|---|
| ``python`` | The blocks of a file run in order, in one process and one namespace. |
| ``python`` after ``<!-- ranks: 4 -->`` | 4 processes run the block, as with torchrun. |
| ``sh`` | bash runs it in the repository's root, unless each command is pip, nox or git. |
| ``text`` | Shown only. Directly after a block that runs, it must be the printed text. |
| any after ``<!-- not run: REASON -->`` | Shown only. |

Other fences are errors. A line ``...`` in a ``text`` block matches any lines. The printed lines
of ranks are compared in any order: a line ``...`` anywhere stands for all lines that the block does
not show. ``python`` blocks run in an empty folder of their file.

The site (tools/docs/hooks.py) replaces the marks ``<!-- results -->``, ``<!-- results: NAME -->``,
``<!-- changelog: PACKAGE -->`` and ``<!-- recipe: NAME -->``. Other comments are errors, and so is
a mark without a block below it.

Each process is forked from a server that has imported torch once. Only the standard library is
needed, and torch for blocks that use it.
"""

import argparse
import gc
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SECONDS = 240.0  # for one block, on a machine that has other work too
GRACE_SECONDS = 5.0  # for the other ranks, after one has failed
LOOPBACK = "127.0.0.1"
PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
USES_TRANSFORMERS = re.compile(r"^ *(import|from) transformers\b", re.MULTILINE)
FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^\s`{]*)[^`]*$")
COMMENT = re.compile(r"^ *<!-- *(.*?) *-->$")
RANKS = re.compile(r"ranks: ([1-8])")
NOT_RUN = re.compile(r"not run: \S.*")
OF_THE_SITE = re.compile(r"results(: \w+)?|changelog: [\w-]+|recipe: \w+")
MARKS = (
    "'ranks: 1' to 8, 'not run: REASON', 'results', 'results: NAME', 'changelog: PACKAGE' or "
    "'recipe: NAME'"
)
SKIPPED_COMMANDS = ("pip ", "python -m pip ", "nox", "python -m nox", "git ")

_server = multiprocessing.get_context("forkserver")


class ExampleError(Exception):
    """A block failed or a fence is not in the table above; the text begins with file and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    ``line`` is the line of its first line of code, from 1. ``ranks`` is 0 for a block without
    ranks. ``output``: the text block directly below, if there is one.
    """

    path: Path
    line: int
    language: str
    text: str
    ranks: int = 0
    run: bool = True
    output: str | None = None

    def error(self, words: str) -> ExampleError:
        """Return an error of this block."""
        return ExampleError(f"{self.path}:{self.line}: {words}")


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a file.

    Raises:
        ExampleError: A fence has an unknown language, or a mark is unknown or does not fit.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    mark, directly, number = "", False, 0  # mark: of the block below
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := FENCE.match(line):
            code, number = _inside(path, lines, number, fence)
            block = _block(path, number - len(code), fence[3], "".join(code), mark)
            if block.language == "text" and directly and found and found[-1].run:
                found[-1] = replace(found[-1], output=block.text)
            found.append(block)
            mark, directly = "", True
        elif line.strip():
            mark, directly = _mark(path, lines, number), False
    return found


def _mark(path: Path, lines: Sequence[str], number: int) -> str:
    """Return the mark in a line for the block below it, or an empty text.

    Raises:
        ExampleError: The line is a comment, but no mark of a block or of the site.
    """
    line = lines[number - 1]
    if not line.lstrip().startswith("<!--"):
        return ""
    comment = COMMENT.match(line)
    if comment and OF_THE_SITE.fullmatch(comment[1]) and line == f"<!-- {comment[1]} -->":
        return ""
    below = next((text for text in lines[number:] if text.strip()), "")
    if comment is None or not FENCE.match(below):
        raise ExampleError(
            f"{path}:{number}: {line.strip()} is no mark of the site, and no block is below it; "
            f"use {MARKS}"
        )
    return comment[1]


def _inside(
    path: Path, lines: Sequence[str], start: int, fence: re.Match[str]
) -> tuple[list[str], int]:
    """Return the lines of a block without its indent, and the index behind the closing fence."""
    indent, ticks = len(fence[1]), fence[2]
    for end in range(start, len(lines)):
        closing = lines[end].strip()
        if closing.startswith(ticks) and not closing.strip(ticks[0]):
            return [f"{line[indent:]}\n" for line in lines[start:end]], end + 1
    raise ExampleError(f"{path}:{start}: this fence is not closed")


def _block(path: Path, line: int, language: str, text: str, mark: str) -> Block:
    block = Block(path, line, language, text, run=language in ("python", "sh"))
    if NOT_RUN.fullmatch(mark):
        return replace(block, run=False)
    if language not in ("python", "sh", "text"):
        raise block.error(
            f"a fence of {language or 'no language'}; use python, sh or text, or put "
            "<!-- not run: REASON --> above it"
        )
    if ranks := RANKS.fullmatch(mark):
        if language != "python":
            raise block.error(f"<!-- {mark} --> is for python blocks, and this one is {language}")
        return replace(block, ranks=int(ranks[1]))
    if mark:
        raise block.error(f"<!-- {mark} --> is no mark; use {MARKS}")
    if language == "sh" and all(map(_is_skipped, _commands(text))):
        return replace(block, run=False)
    return block


def _commands(text: str) -> list[str]:
    """Return the lines of a shell block without comments; continued lines are one."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _is_skipped(command: str) -> bool:
    return command.startswith(SKIPPED_COMMANDS)


def run(path: Path) -> list[Block]:
    """Run the blocks of a file in order; return those that ran.

    Raises:
        ExampleError: A block failed or printed a text that differs from the text below it.
    """
    blocks = [block for block in blocks_of(path) if block.run]
    with tempfile.TemporaryDirectory(prefix="example-") as folder, _python(folder) as python:
        for block in blocks:
            if block.language == "sh":
                printed = _run_shell(block)
            elif block.ranks:
                printed = _run_ranks(block, folder)
            else:
                (printed,) = _answers(block, [python.request(block)])
            _compare(block, printed)
    return blocks


def _compare(block: Block, printed: str) -> None:
    if block.output is None:
        return
    lines = [line.rstrip() for line in block.output.strip().splitlines()]
    found = [line.rstrip() for line in printed.strip().splitlines()]
    if not _is_as_shown(lines, found, ordered=not block.ranks):
        raise block.error(
            f"the text below this block differs from what it prints:\n{printed.rstrip()}"
        )


def _is_as_shown(shown: Sequence[str], printed: Sequence[str], *, ordered: bool) -> bool:
    """Return whether printed lines are the shown ones, of which ``...`` stands for any."""
    if ordered:
        pattern = "".join("(.*\n)*" if line == "..." else re.escape(line + "\n") for line in shown)
        return bool(re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)))
    wanted, given = Counter(shown), Counter(printed)
    return wanted <= given if wanted.pop("...", 0) else wanted == given


def _run_shell(block: Block) -> str:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=ROOT,
            env={**os.environ, "PATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BLOCK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise block.error(f"these commands ran for more than {BLOCK_SECONDS:.0f} s") from None
    if done.returncode:
        raise block.error(
            f"these commands ended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class _Python:
    """A process that runs the one-process blocks of a file; it starts with the first of them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pipe: Connection | None = None
        self._process: BaseProcess | None = None

    def request(self, block: Block) -> Connection:
        """Send a block; the pipe returns one answer."""
        if self._pipe is None:
            self._pipe, self._process = _start(_serve, self._folder)
        self._pipe.send((str(block.path), block.line, block.text))
        return self._pipe

    def end(self) -> None:
        """Kill the process. Its state is not needed."""
        if self._process:
            self._process.kill()
            self._process.join()


@contextmanager
def _python(folder: str) -> Iterator[_Python]:
    python = _Python(folder)
    try:
        yield python
    finally:
        python.end()


def _run_ranks(block: Block, folder: str) -> str:
    """Run a block on ranks and return the printed text of all."""
    processes: list[BaseProcess] = []
    try:
        keeper, process = _start(_keep_store)
        processes.append(process)
        if not keeper.poll(BLOCK_SECONDS):
            raise block.error("the store of the ranks did not start")
        port = keeper.recv()
        pipes = []
        for rank in range(block.ranks):
            pipe, process = _start(_be_rank, folder, block, rank, port)
            pipes.append(pipe)
            processes.append(process)
        return "".join(_answers(block, pipes))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(block: Block, pipes: Sequence[Connection]) -> list[str]:
    """Wait for the printed text of each process.

    Raises:
        ExampleError: A process failed, died, or did not answer in time.
    """
    answers: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + BLOCK_SECONDS
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("", "the process died\n")
                if answers[rank][1]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in sorted(answers):
        printed, failure = answers[rank]
        if failure:
            where = f" on rank {rank}" if block.ranks else ""
            raise block.error(f"this block failed{where}:\n{printed}{failure}")
    if len(answers) < len(pipes):
        raise block.error(f"this block ran for more than {BLOCK_SECONDS:.0f} s")
    return [answers[rank][0] for rank in sorted(answers)]


def _start(target: object, *arguments: object) -> tuple[Connection, BaseProcess]:
    mine, theirs = _server.Pipe()
    process = _server.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    return mine, process


# The functions below run in the processes.


def _serve(pipe: Connection, folder: str) -> None:
    gc.freeze()  # the imported modules are not garbage, and collecting takes long
    os.chdir(folder)
    main = _main_module()
    while True:
        pipe.send(_execute(main, *pipe.recv()))


def _be_rank(pipe: Connection, folder: str, block: Block, rank: int, port: int) -> None:
    gc.freeze()
    os.chdir(folder)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(block.ranks),
        "LOCAL_WORLD_SIZE": str(block.ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun: no rank makes the store
    }
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipe.send(_execute(_main_module(), str(block.path), block.line, block.text))
    pipe.recv()  # until it is killed: groups of other ranks may still need this process


def _keep_store(pipe: Connection) -> None:
    """Hold the store of a world. It gets a free port, and nobody can take that in between."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _main_module() -> types.ModuleType:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # pickle looks classes of a block up here
    return main


def _execute(main: types.ModuleType, path: str, line: int, text: str) -> tuple[str, str]:
    """Return the printed text, and the traceback of the error or an empty text."""
    printed = io.StringIO()
    main.__file__ = path
    source = "\n" * (line - 1) + text  # tracebacks name the line of the Markdown file
    try:
        with redirect_stdout(printed):
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:  # noqa: BLE001 - whatever a block raises is reported
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return printed.getvalue(), "".join(traceback.format_exception(error.with_traceback(frames)))
    return printed.getvalue(), ""


def files_of(names: Sequence[str]) -> list[Path]:
    """Return the Markdown files of the command line, in folders too."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        found += sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return [path.resolve() for path in found]


def main(names: Sequence[str], at_once: int) -> int:
    """Run the files; return 1 if one failed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # also of the server, which must fork without threads
    paths = files_of(names)
    preload = PRELOAD
    if any(path.exists() and USES_TRANSFORMERS.search(path.read_text("utf-8")) for path in paths):
        preload = [*PRELOAD, "transformers.modeling_utils"]
    _server.set_forkserver_preload(preload)
    named = {Path(name).resolve() for name in names}
    start = time.monotonic()
    failures, count = [], 0

    def timed(path: Path) -> tuple[list[Block], float]:
        begin = time.monotonic()
        ran = run(path)
        if not ran and path in named:
            raise ExampleError(f"{path}: no block of this file is run")
        return ran, time.monotonic() - begin

    with ThreadPoolExecutor(at_once) as threads:
        for path, job in [(path, threads.submit(timed, path)) for path in paths]:
            try:
                ran, seconds = job.result()
            except ExampleError as error:
                failures.append(str(error))
                print(error, flush=True)
                continue
            count += len(ran)
            if ran:
                on_ranks = sum(block.ranks > 0 for block in ran)
                of_ranks = f", {on_ranks} on ranks" if on_ranks else ""
                print(f"{path}: {len(ran)} blocks ran{of_ranks}, {seconds:.1f} s", flush=True)
    print(f"{count} blocks ran in {time.monotonic() - start:.0f} s, {len(failures)} files failed")
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help="files and folders")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="files at a time")
    chosen = parser.parse_args()
    raise SystemExit(main(chosen.names, chosen.jobs))
