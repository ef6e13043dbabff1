"""The pytest fixture: ``ranks(n)`` is the session's pool of ``n`` ranks."""

from collections.abc import Callable, Iterator

import pytest

from ._pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Give the session's pool for a world size; pools start at their first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for each in pools.values():
        each.close()
