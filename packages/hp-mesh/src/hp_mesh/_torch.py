"""All private names of torch that hp-mesh uses (torch 2.11 to 2.13)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store


def splits_world(world: dist.ProcessGroup) -> bool:
    """Return whether all ranks together must split new groups off the world's communicator.

    ``ProcessGroup.bound_device_id`` is set if NCCL was initialized eagerly (``device_id=`` of
    ``init_process_group``). ``torch.distributed.config.use_torchcomms`` (2.13) requires the same.
    Torch has no public function that tells it.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return the number of process groups of this rank.

    ``new_group(use_local_synchronization=True)`` hashes ``len(_world.pg_names)`` into the name of
    the group. Members with different numbers would wait for each other forever. A public
    replacement would be a group name as an argument.
    """
    return len(distributed_c10d._world.pg_names)


def free_count(groups: Iterable[Sequence[int]], at_least: int = 0) -> int:
    """Return the first count from which local creation gives all ``groups`` unused names.

    Torch names a group after its ranks and the number of groups (``_process_group_name``, 2.11 to
    2.13), which grows by one with each group. After groups are closed the number is lower, and a
    name can belong to a living group over the same ranks. The result is at least ``at_least`` and
    `registered_groups`.
    """
    living = {*distributed_c10d._world.pg_names.values()}
    count = max(at_least, registered_groups())
    ranks = [sorted(group) for group in groups]
    while len(living) > 1 and any(
        _local_name(each, count + place) in living for place, each in enumerate(ranks)
    ):
        count += 1
    return count


def _local_name(ranks: list[int], count: int) -> str:
    with count_from(count):
        return str(distributed_c10d._process_group_name(ranks, use_hashed_name=True))


@contextmanager
def count_from(count: int) -> Iterator[None]:
    """Raise `registered_groups` to ``count`` during the block, if it is lower.

    Placeholder entries in ``_world.pg_names`` (2.11 to 2.13) raise the number. Skipped numbers do
    no harm.
    """
    names: Any = distributed_c10d._world.pg_names
    fillers = [object() for _ in range(count - len(names))]
    names.update(dict.fromkeys(fillers, ""))
    try:
        yield
    finally:
        for filler in fillers:
            names.pop(filler, None)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether a group exists: it was not destroyed, alone or with the default group.

    Reads ``_world.pg_map`` (2.11 to 2.13). The public functions raise the same error for this and
    for other reasons.
    """
    return group in distributed_c10d._world.pg_map


def named_groups() -> int:
    """Return the counter that torch puts into the name of the next group that all ranks create.

    Reads the private ``_world.group_count`` (torch 2.11 to 2.13).
    """
    return int(distributed_c10d._world.group_count)


def skip_names(count: int) -> None:
    """Raise the number in the name of the next jointly created group to ``count``, if it is lower.

    Ranks that stopped at different groups would otherwise give the next group different names, and
    wait for each other. Numbers are only skipped, so no name is used twice.
    """
    distributed_c10d._world.group_count = max(named_groups(), count)


class _StoreByThread(tuple[str, Store]):
    """A (backend, store) pair of ``_world.pg_map`` with another store for some threads.

    `torch.distributed.new_group` unpacks the pair.
    """

    given: tuple[str, Store]  # the pair for all other threads
    stores: dict[int, Store]  # by thread identifier

    @classmethod
    def of(cls, pair: tuple[str, Store]) -> "_StoreByThread":
        """Return an equal pair without stores of threads."""
        made = cls(pair)
        made.given, made.stores = pair, {}
        return made

    def __iter__(self) -> Iterator[Any]:
        backend, store = self.given
        return iter((backend, self.stores.get(get_ident(), store)))

    def __getitem__(self, index: Any) -> Any:
        return (*self,)[index]


_changing = Lock()  # protects changes of the map only


@contextmanager
def meet_under(prefix: str, world: dist.ProcessGroup) -> Iterator[None]:
    """Use a prefix of the world's store for the groups that this thread creates in the block.

    ``new_group(use_local_synchronization=True)`` names a group after its ranks and the number of
    groups. After a group is destroyed, a new group can get the same name, and its members would
    read the old addresses from the store. The prefix avoids this. It is set by replacing the store
    in ``_world.pg_map`` (2.11 to 2.13), for this thread only. A public replacement would be a name
    or a store as an argument of ``new_group``.
    """
    known: dict[dist.ProcessGroup, tuple[str, Store]] = distributed_c10d._world.pg_map
    thread = get_ident()
    with _changing:
        pair = known[world]
        if not isinstance(pair, _StoreByThread):
            pair = known[world] = _StoreByThread.of(pair)
        pair.stores[thread] = PrefixStore(prefix, pair.given[1])
    try:
        yield
    finally:
        with _changing:
            del pair.stores[thread]
            if not pair.stores and known.get(world) is pair:
                known[world] = pair.given


def share_ranks(mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Replace the rank tuple of ``mesh`` by the equal tuple of ``other``, to save memory.

    Each mesh and submesh has a tuple ``_flatten_rank_map`` (2.11 to 2.13) as long as the world: 4.7
    MB at 131,072 ranks. There is no public replacement.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def know_fold(root: DeviceMesh, fold: DeviceMesh) -> None:
    """Register the group of a mesh that folds several axes of a full-world mesh.

    Sets the attribute ``_alias_groups`` of ``root``: names of process groups by axis name. It
    belongs to this package; hp-dtensor reads it in addition to ``DeviceMesh._flatten_mapping``.
    The group is not added to ``_flatten_mapping``, because torch's DTensor (2.13) would then merge
    two all-gathers of ``[Shard(0), Shard(0)]`` into one. The result is wrong if the axes do not
    divide the rows.
    """
    names: dict[str, str] = vars(root).setdefault("_alias_groups", {})
    names[(fold.mesh_dim_names or ("",))[0]] = fold.get_group().group_name


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Flatten all axes of a mesh into one. The result is a slice of the same root mesh.

    ``DeviceMesh._flatten`` (2.11 to 2.13). The public ``DeviceMesh.from_group`` makes a mesh
    without a root.
    """
    return mesh._flatten(name)
