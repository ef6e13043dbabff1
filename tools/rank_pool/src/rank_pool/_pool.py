"""The parent's side: fork ranks from one server, send them functions, enforce a deadline."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle

from . import _pickled

T = TypeVar("T")
START_SECONDS = 240.0  # what new processes get to import torch and find each other
CALL_SECONDS = 240.0  # what ranks get for one call: many, for a machine with other work to do
# Imported once, by the server that all ranks are forked from. Importing them starts no thread.
PRELOAD = [
    "rank_pool._worker",
    "pytest",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
]
GRACE_SECONDS = 10.0  # what the others get to answer once one rank has failed


class RankError(RuntimeError):
    """One or more ranks raised, died or did not answer in time; the text holds their tracebacks."""


class RankPool:
    """``world_size`` processes that are the ranks of one gloo world, one thread each.

    They are forked from a server that has imported torch and done nothing else: a rank starts in
    milliseconds where an interpreter that imports torch takes seconds. The server and the modules
    that it has imported are shared by all pools of this process. With ``like_nccl`` their groups
    follow the rules of `rank_pool.nccl`.
    """

    def __init__(self, world_size: int, *, like_nccl: bool = False) -> None:
        self.world_size = world_size
        self._like_nccl = like_nccl
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._store: Any = None

    def run(
        self,
        function: Callable[..., T],
        *args: object,
        timeout: float = CALL_SECONDS,
    ) -> list[T]:
        """Call ``function(rank, *args)`` on every rank and return the results in rank order.

        Functions and classes of test modules travel by value, everything else by import. Raises
        `RankError` if a rank raises or if ``timeout`` seconds pass; the pool is then respawned.
        """
        message = _dumps(function, args)
        try:
            if not self._processes:
                self._spawn()
                self._call(_dumps(_answer, ()), START_SECONDS)
            results: list[T] = self._call(message, timeout)
        except BaseException:
            # Unread answers would be taken for those of the next call.
            self.close()
            raise
        return results

    def _call(self, message: bytes, timeout: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(message)
        replies: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.world_size:
            waiting = [p for r, p in enumerate(self._pipes) if r not in replies]
            ready = set(wait(waiting, timeout=max(0.0, deadline - time.monotonic())))
            if not ready:
                break
            for rank in [r for r, p in enumerate(self._pipes) if p in ready]:
                try:
                    replies[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    replies[rank] = (False, "the process died\n")
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failures = {r: text for r, (ok, text) in replies.items() if not ok}
        silent = [r for r in range(self.world_size) if r not in replies]
        if failures or silent:
            texts = [f"--- rank {r} ---\n{text}" for r, text in failures.items()]
            if silent:
                texts.append(f"--- no answer in time from ranks {silent} ---")
            raise RankError("\n" + "\n".join(texts))
        return [replies[r][1] for r in range(self.world_size)]

    def _spawn(self) -> None:
        # Here: whoever only starts pytest need not load torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from ._worker import LOOPBACK, serve

        context = server()
        # In this process, so that it outlives any rank. A store in a file is asked every 10 ms.
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self.world_size, self._store.port, theirs, self._like_nccl),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def close(self) -> None:
        """End all ranks, by force where they do not answer; the next `run` starts new ones."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(b"")
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._store = None


@cache
def server() -> ForkServerContext:
    """Start the server that imports `PRELOAD`, with one thread so that it forks safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        ensure_running()
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = given
    return context


def _answer(rank: int) -> int:
    return rank


def _dumps(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    module: ModuleType | None = sys.modules.get(function.__module__)
    loaded = {} if module is None else sys.modules.copy()  # looking at some modules imports others
    here = "" if module is None else _folder(module)
    tests = [m for n, m in loaded.items() if here and _folder(m) == here and n != "__main__"]
    for m in tests:
        cloudpickle.register_pickle_by_value(m)
    try:
        alone = getattr(module, function.__name__, None) is not function
        sent = _pickled.dumps(function) if alone else _dumped(function)
        return pickle.dumps((sent, _pickled.dumps(args)))
    finally:
        for m in tests:
            cloudpickle.unregister_pickle_by_value(m)


@cache
def _dumped(function: Callable[..., object]) -> bytes:
    """Return a function of a module with all that it refers to, as that is at the first call.

    Each time would take some 10 ms, for a look through all modules by each function of the tests.
    """
    return _pickled.dumps(function)


@cache
def _folder(module: ModuleType) -> str:
    """Return where a module is; paths as text, because every call asks thousands of modules."""
    return os.path.dirname(str(getattr(module, "__dict__", {}).get("__file__") or ""))
