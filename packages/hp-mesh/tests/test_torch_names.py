"""What is asked of torch's names that are not public."""

from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_mesh._torch import is_registered, splits_world, store_prefix

from .fakes import fake_world


@pytest.mark.parametrize(
    ("device", "config", "splits"),
    [
        (None, SimpleNamespace(use_torchcomms=False), False),
        (None, SimpleNamespace(use_torchcomms=True), True),
        (None, SimpleNamespace(), False),
        (torch.device("cuda", 0), SimpleNamespace(use_torchcomms=False), True),
    ],
)
def test_groups_are_split_off_a_world_that_is_bound_to_a_device_or_runs_on_torchcomms(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None, config: Any, splits: bool
) -> None:
    monkeypatch.setattr(dist, "config", config, raising=False)
    world: Any = SimpleNamespace(bound_device_id=device)
    assert splits_world(world) is splits


def test_a_world_of_torch_that_is_bound_to_no_device_is_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_world(2):
        assert dist.group.WORLD is not None
        assert not splits_world(dist.group.WORLD)
        # As in versions without this module.
        monkeypatch.delattr(dist, "config", raising=False)
        assert not splits_world(dist.group.WORLD)


def test_a_group_is_registered_until_it_or_the_world_is_destroyed() -> None:
    with fake_world(2):
        one, other = dist.new_group([0]), dist.new_group([0, 1])
        dist.destroy_process_group(one)
        assert not is_registered(one)
        assert is_registered(other)
    assert not is_registered(other)
    with fake_world(2):
        assert not is_registered(other)


def test_a_name_that_comes_again_is_another_place_in_the_store_under_a_prefix() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def keys_after_a_group() -> int:
        dist.destroy_process_group(dist.new_group([0], use_local_synchronization=True))
        return int(store.num_keys())

    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        first = keys_after_a_group()
        # What this module is for: torch uses the place of a destroyed group again.
        assert keys_after_a_group() == first
        with store_prefix("apart", world):
            assert keys_after_a_group() > first
        second = store.num_keys()
        with pytest.raises(ValueError, match="rank"), store_prefix("elsewhere", world):
            dist.new_group([5], use_local_synchronization=False)
        assert keys_after_a_group() == second
    finally:
        dist.destroy_process_group()


def test_each_of_several_threads_meets_under_its_own_prefix_and_others_under_none() -> None:
    def store_of_new_groups() -> Any:
        _, store = dist.distributed_c10d._world.pg_map[world]
        return store

    def other_thread() -> None:
        with store_prefix("other", world):
            inside.set()
            left.wait(20)
            store_of_new_groups().set("key", "other")

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        inside, left, thread = Event(), Event(), Thread(target=other_thread)
        thread.start()
        assert inside.wait(20)
        plain = store_of_new_groups()
        with store_prefix("this", world):
            store_of_new_groups().set("key", "this")
        # The other thread is in its block still; then nobody is.
        store_of_new_groups().set("key", "plain")
        left.set()
        thread.join()
        assert store_of_new_groups() is plain
        assert plain.get("key") == b"plain"
        assert [plain.get(f"{name}/key") for name in ("this", "other")] == [b"this", b"other"]
        assert type(dist.distributed_c10d._world.pg_map[world]) is tuple
    finally:
        dist.destroy_process_group()
