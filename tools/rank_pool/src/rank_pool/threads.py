"""Ranks as threads, over torch's own process group that is written in Python."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")


def on_threads(world: int, function: Callable[[int], T]) -> list[T]:
    """Run ``function(rank)`` on one thread per rank and return the results in rank order."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            found[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with _thread_local_groups():
        store: Any = vars(dist)["HashStore"]()
        threads = [threading.Thread(target=run, args=(rank, store)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(world)]


@contextmanager
def _thread_local_groups() -> Iterator[None]:
    """Give each thread its own registry of process groups, as ``MultiThreadedTestCase`` does."""
    isolate: Any = vars(torch._C._distributed_c10d)["_set_thread_isolation_mode"]
    isolate(True)
    threaded._install_threaded_pg()
    world: Any = threaded.ThreadLocalWorld
    if not hasattr(world, "comms"):  # destroy_process_group of torch 2.11 reads it
        world.comms = []
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
