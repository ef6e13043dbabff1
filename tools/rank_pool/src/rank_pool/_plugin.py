"""What pytest gets: ``ranks(n)``, a pool of ``n`` ranks; ``--every``, ``--repeat``, ``--fast``."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from ._pool import RankPool


def pytest_configure() -> None:
    """Set the scheduling policy and the compile threads that all processes of the tests inherit.

    Under Linux's batch policy no process interrupts another because it has just been woken up. A
    message over loopback wakes its reader up, which usually takes the processor from the writer at
    once. The writer still holds the lock of its connection then, and the thread of gloo that finds
    an answer there asks again and again until it is free: 250,000 times a second, a third of the
    time of two processors.

    With more than one compile thread, inductor starts processes that import torch, in each process
    that compiles: that takes longer than the few kernels of the tests.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if hasattr(os, "SCHED_BATCH"):  # Linux; what is started from here inherits it
        with contextlib.suppress(OSError):  # not allowed here: slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fast``, ``--every N`` and ``--repeat N``."""
    parser.addoption(
        "--fast",
        action="store_true",
        help="of each test on ranks one case, and none marked slow: for a change just made",
    )
    parser.addoption(
        "--like-nccl",
        choices=["some", "all", "none"],
        default="some",
        help="run tests on ranks with NCCL's rules: one case of those marked nccl in addition, or "
        "all of them and no other test",
    )
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="collect all tests and run every Nth: for code that other runs test whole",
    )
    parser.addoption(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run all tests N times, one round after the other: for failures that are rare",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case of each test on ranks, or every Nth test, and run it as often as asked."""
    every, repeat = config.getoption("every"), config.getoption("repeat")
    if every < 1:
        raise pytest.UsageError(f"--every {every} runs no test; give 1 for all, 2 for every other")
    if repeat < 1:
        raise pytest.UsageError(f"--repeat {repeat} runs no test; give 1 for once, 2 for twice")
    kept = [item for item in items if not (_is_like_nccl(item) and _is_about_gloo(item))]
    kept = _one_case_each(kept) if config.getoption("fast") else kept
    if config.getoption("like_nccl") == "all":
        kept = [item for item in kept if _is_like_nccl(item)]
    else:
        kept = _first_like_nccl(kept)
    kept = kept[::every]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept * repeat


def pytest_collection_finish() -> None:
    """Let torch use one thread, as in ranks: a second takes a processor, most of it to wait."""
    if torch := sys.modules.get("torch"):  # tests may not need it
        torch.set_num_threads(1)


def _is_like_nccl(item: pytest.Item) -> bool:
    spec = getattr(item, "callspec", None)
    return spec is not None and spec.params.get("ranks") == "nccl"


def _is_about_gloo(item: pytest.Item) -> bool:
    return item.get_closest_marker("gloo") is not None


def _first_like_nccl(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the first case of each that NCCL's rules are an addition to."""
    chosen = set(_one_case_each([item for item in items if _is_like_nccl(item)]))
    return [item for item in items if item in chosen or not _is_like_nccl(item)]


def _one_case_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests without ranks, and the first case of each on ranks; none that is marked slow."""
    seen: set[tuple[object, str]] = set()
    kept = []
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        test = (item.parent, getattr(item, "originalname", item.name))
        if "ranks" not in getattr(item, "fixturenames", ()) or test not in seen:
            kept.append(item)
        seen.add(test)
    return kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on ranks with NCCL's rules: all of them, or the marked ones in addition."""
    given = [str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")]
    if "ranks" not in metafunc.fixturenames or re.search(r"\branks\b", " ".join(given)):
        return
    which = metafunc.config.getoption("like_nccl")
    if which == "some" and not metafunc.config.getoption("fast"):
        which = "both" if metafunc.definition.get_closest_marker("nccl") else "none"
    if which in ("all", "both"):
        gloo, nccl = pytest.param("gloo", id=pytest.HIDDEN_PARAM), pytest.param("nccl", id="nccl")
        cases = [nccl] if which == "all" else [gloo, nccl]
        # By the scope, pytest would run the tests of each case together, in another order.
        metafunc.parametrize("ranks", cases, indirect=True, scope="function")


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[Callable[[int], RankPool]]:
    """Give the session's pool of ranks with NCCL's rules for a world size."""
    with _pools(like_nccl=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def _gloo_ranks() -> Iterator[Callable[[int], RankPool]]:
    with _pools(like_nccl=False) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[[int], RankPool]:
    """Give the session's pool for a world size; pools start at their first use."""
    is_nccl = getattr(request, "param", "gloo") == "nccl"
    pool: Callable[[int], RankPool]
    pool = request.getfixturevalue("nccl_ranks" if is_nccl else "_gloo_ranks")
    return pool


@contextlib.contextmanager
def _pools(*, like_nccl: bool) -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, like_nccl=like_nccl)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()
