"""Attempts of a restarted run that share one store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from train.attempt import store_of_attempt

SOON = timedelta(seconds=0.3)
LONG = timedelta(seconds=60)


def _attempt(store: Store, ranks: list[int], size: int) -> list[Store]:
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(store_of_attempt, store, rank, size, LONG) for rank in ranks]
        return [each.result() for each in started]


def test_an_attempt_sees_nothing_of_those_before() -> None:
    shared = HashStore()
    first = _attempt(shared, [0, 1, 2], 3)
    first[0].set("address", "old")
    assert first[2].get("address") == b"old"
    second = _attempt(shared, [2, 1, 0], 3)
    assert not second[1].check(["address"])
    second[2].set("address", "new")
    assert second[0].get("address") == b"new"
    assert first[1].get("address") == b"old"


def test_a_rank_that_was_killed_while_it_joined_is_not_taken_for_its_successor() -> None:
    shared = HashStore()
    shared.set("attempt/rank/1", "of the killed process")
    first, second = _attempt(shared, [0, 1], 2)
    first.set("address", "here")
    assert second.get("address") == b"here"


def test_a_rank_that_does_not_join_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"for ranks 1, 2, which did not join"):
        store_of_attempt(HashStore(), 0, 3, SOON)
