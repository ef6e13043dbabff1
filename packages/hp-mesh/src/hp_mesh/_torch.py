"""The default process group, and all private names of torch that hp-mesh uses (2.11 to 2.13)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ._errors import MeshError


def default_group() -> dist.ProcessGroup:
    """Return the default process group: all ranks of this job.

    Raises:
        MeshError: It does not exist.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def splits_world(world: dist.ProcessGroup) -> bool:
    """Return whether all ranks together must split new groups off the world's communicator.

    ``ProcessGroup.bound_device_id`` is set if NCCL was initialized eagerly (``device_id=`` of
    ``init_process_group``). ``torch.distributed.config.use_torchcomms`` (2.13) requires the same.
    There is no public replacement.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return the number of process groups of this rank.

    ``new_group(use_local_synchronization=True)`` hashes ``len(_world.pg_names)`` into the name of
    the group. Members with different numbers would wait for each other forever. A group name as an
    argument of ``new_group`` would be a public replacement.
    """
    return len(distributed_c10d._world.pg_names)


def unused_count(groups: Iterable[Sequence[int]], at_least: int = 0) -> int:
    """Return the lowest group count with which the next groups get unused names.

    If only its members create a group, torch names it after its ranks and the number of groups
    (``_process_group_name``), which grows by one with each group. After groups are destroyed the
    number is lower, and an existing group over the same ranks can have the name.

    Args:
        groups: Ranks of the next groups, in the order of their creation.
        at_least: Lower bound of the result. The number of existing groups is another one.

    Returns:
        A group count for `group_count`.
    """
    used = {*distributed_c10d._world.pg_names.values()}
    count = max(at_least, registered_groups())
    ranks = [sorted(group) for group in groups]
    while len(used) > 1 and any(
        _local_name(each, count + index) in used for index, each in enumerate(ranks)
    ):
        count += 1
    return count


def _local_name(ranks: list[int], count: int) -> str:
    with group_count(count):
        return str(distributed_c10d._process_group_name(ranks, use_hashed_name=True))


@contextmanager
def group_count(count: int) -> Iterator[None]:
    """Raise `registered_groups` to ``count`` inside the ``with`` statement, if it is lower.

    Placeholder entries in ``_world.pg_names`` raise the number. Skipped numbers do no harm.
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

    Reads ``_world.pg_map``. The public functions raise the same error for this and other reasons.
    """
    return group in distributed_c10d._world.pg_map


def joint_group_number() -> int:
    """Return the number in the name of the next group that all ranks create together.

    Reads ``_world.group_count``.
    """
    return int(distributed_c10d._world.group_count)


def raise_joint_group_number(number: int) -> None:
    """Raise `joint_group_number` to ``number``, if it is lower.

    Ranks that stopped at different groups would otherwise give the next group different names, and
    wait for each other. Numbers are only skipped, so no name is used twice.
    """
    distributed_c10d._world.group_count = max(joint_group_number(), number)


class _StoreByThread(tuple[str, Store]):
    """A (backend, store) pair of ``_world.pg_map`` with another store for some threads.

    `torch.distributed.new_group` unpacks the pair.
    """

    def __init__(self, pair: tuple[str, Store]) -> None:
        self.pair = pair  # for all other threads
        self.stores: dict[int, Store] = {}  # by thread identifier

    def __iter__(self) -> Iterator[Any]:
        backend, store = self.pair
        return iter((backend, self.stores.get(get_ident(), store)))

    def __getitem__(self, index: Any) -> Any:
        return (*self,)[index]


_pairs_lock = Lock()  # of changes of ``_world.pg_map``, not of its readers


@contextmanager
def store_prefix(prefix: str, world: dist.ProcessGroup) -> Iterator[None]:
    """Use a prefix of the world's store for groups that this thread creates inside ``with``.

    ``new_group(use_local_synchronization=True)`` names a group after its ranks and the number of
    groups. After a group is destroyed, a new group can get the same name, and its members would
    read the old addresses from the store. The prefix avoids this. It is set by replacing the store
    in ``_world.pg_map``, for this thread only. A public replacement would be a name or a store as
    an argument of ``new_group``.
    """
    pairs: dict[dist.ProcessGroup, tuple[str, Store]] = distributed_c10d._world.pg_map
    thread = get_ident()
    with _pairs_lock:
        pair = pairs[world]
        if not isinstance(pair, _StoreByThread):
            pair = pairs[world] = _StoreByThread(pair)
        pair.stores[thread] = PrefixStore(prefix, pair.pair[1])
    try:
        yield
    finally:
        with _pairs_lock:
            del pair.stores[thread]
            if not pair.stores and pairs.get(world) is pair:
                pairs[world] = pair.pair


def share_rank_map(mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Replace the rank tuple of ``mesh`` by the equal tuple of ``other``, to save memory.

    Each mesh and submesh has a tuple ``_flatten_rank_map`` as long as the world: 4.7 MB at 131,072
    ranks. There is no public replacement.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def register_fold(root: DeviceMesh, fold: DeviceMesh) -> None:
    """Register the group of ``fold`` with ``root``, a mesh of all ranks.

    ``fold`` is a one-dimensional mesh with the ranks of several axes of ``root``. The attribute
    ``_alias_groups`` of ``root`` has names of process groups by axis name. It belongs to this
    package; hp-dtensor reads it in addition to ``DeviceMesh._flatten_mapping``.

    The group is not added to ``_flatten_mapping``, because torch's DTensor (2.13) would then merge
    two all-gathers of ``[Shard(0), Shard(0)]`` into one. The result is wrong if the axes do not
    divide the rows.
    """
    names: dict[str, str] = vars(root).setdefault("_alias_groups", {})
    names[(fold.mesh_dim_names or ("",))[0]] = fold.get_group().group_name


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Flatten all axes of a mesh into one. The result is a slice of the same root mesh.

    Calls ``DeviceMesh._flatten``. The public ``DeviceMesh.from_group`` returns a mesh without a
    root.
    """
    return mesh._flatten(name)
