"""What pytest gets: ``ranks(n)``, a pool of ``n`` ranks, and ``--every`` and ``--repeat``."""

from collections.abc import Callable, Iterator

import pytest

from ._pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--every N`` and ``--repeat N``."""
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
    """Keep every Nth test, from the first on, and run what is kept as often as asked."""
    every, repeat = config.getoption("every"), config.getoption("repeat")
    if every < 1:
        raise pytest.UsageError(f"--every {every} runs no test; give 1 for all, 2 for every other")
    if repeat < 1:
        raise pytest.UsageError(f"--repeat {repeat} runs no test; give 1 for once, 2 for twice")
    left_out = [item for place, item in enumerate(items) if place % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = items[::every]
    items[:] = items * repeat


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Give the session's pool for a world size; pools start at their first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for each in pools.values():
        each.close()
