"""Access to the default process group and to private names of torch.

No other module of hp-mesh uses private names of torch. They exist in torch 2.11 to 2.13.
"""

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
    """Return torch's default process group, which has all ranks of the job.

    Raises:
        MeshError: ``init_process_group`` was not called.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def splits_world(world: dist.ProcessGroup) -> bool:
    """Return whether all ranks must take part in the creation of each new process group.

    This is the case if NCCL was initialized eagerly (``device_id=`` of ``init_process_group``):
    torch then splits the communicator of the default group. It is also the case if
    ``torch.distributed.config.use_torchcomms`` (torch 2.13) is True.

    Reads the attribute ``bound_device_id`` of the default group, ``world``. There is no public
    replacement.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return the number of process groups that exist in this process: ``len(_world.pg_names)``.

    ``new_group(use_local_synchronization=True)`` hashes this number into the name of the new group.
    If the number differs between members, they use different names and wait for each other forever.
    There is no public replacement; a name as an argument of ``new_group`` would be one.
    """
    return len(distributed_c10d._world.pg_names)


def unused_count(groups: Iterable[Sequence[int]], at_least: int = 0) -> int:
    """Return the lowest number of existing groups with which all new groups get unused names.

    ``new_group(use_local_synchronization=True)`` derives the name of a group from its ranks and the
    number of existing groups (``_process_group_name``). The number decreases when a group is
    destroyed. A new group can therefore get the name of an existing group with the same ranks.

    Args:
        groups: Ranks of the new groups, in the order of their creation.
        at_least: Lower bound of the result.

    Returns:
        A number for `group_count`. It is at least `registered_groups`.
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
    """Increase the number of existing groups to ``count`` inside the ``with`` block.

    torch uses the number in the names of new groups (see `registered_groups`). Placeholder entries
    in ``_world.pg_names`` increase the number. A number above ``count`` stays unchanged.
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
    """Return whether a process group exists.

    The result is False after the group was destroyed, separately or with the default group. Reads
    ``_world.pg_map``. A public function cannot replace this: it raises the same error for a
    destroyed group as for other problems.
    """
    return group in distributed_c10d._world.pg_map


def joint_group_number() -> int:
    """Return the number that torch uses as the name of the next group that all ranks create.

    Groups that only their members create (``use_local_synchronization=True``) have other names.
    Reads ``_world.group_count``.
    """
    return int(distributed_c10d._world.group_count)


def raise_joint_group_number(number: int) -> None:
    """Increase `joint_group_number` to ``number``. A higher number stays unchanged.

    If ranks failed at different groups, their numbers differ. They would use different names for
    the next group and wait for each other.
    """
    distributed_c10d._world.group_count = max(joint_group_number(), number)


class _StoreByThread(tuple[str, Store]):
    """A (backend, store) pair that gives different stores to different threads.

    It replaces the pair of the default group in torch's ``_world.pg_map``.
    `torch.distributed.new_group` unpacks the pair and uses the store for the new group.
    """

    def __init__(self, pair: tuple[str, Store]) -> None:
        self.pair = pair  # the original pair, for all threads that are not in `stores`
        self.stores: dict[int, Store] = {}  # store of each thread, by ``threading.get_ident()``

    def __iter__(self) -> Iterator[Any]:
        backend, store = self.pair
        return iter((backend, self.stores.get(get_ident(), store)))

    def __getitem__(self, index: Any) -> Any:
        return (*self,)[index]


_pairs_lock = Lock()  # held while ``_world.pg_map`` is changed; reading needs no lock


@contextmanager
def store_prefix(prefix: str, world: dist.ProcessGroup) -> Iterator[None]:
    """Put a prefix before the store keys of groups that this thread creates inside ``with``.

    ``new_group(use_local_synchronization=True)`` derives the name of a group from its ranks and the
    number of existing groups. After a group is destroyed, a new group can get the same name. Its
    members would then read the addresses of the destroyed group from the store. Different prefixes
    avoid this. The store in ``_world.pg_map`` is replaced by a ``PrefixStore``, for this thread
    only. There is no public replacement; a name or a store as an argument of ``new_group`` would be
    one.

    Args:
        prefix: Prefix of the keys.
        world: The default process group.
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
    """Let ``mesh`` use the tuple of ranks that ``other`` holds, to save memory.

    Each mesh and sub-mesh has a tuple ``_flatten_rank_map`` with one entry for each rank of the
    job: 4.7 MB for 131,072 ranks. If the tuples differ, nothing changes. There is no public
    replacement.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def register_fold(root: DeviceMesh, fold: DeviceMesh) -> None:
    """Register a flattened mesh dimension with the mesh from which it was flattened.

    The name of the process group is added to the dict ``root._alias_groups``, under the name of the
    dimension. hp-mesh defines this attribute. hp-dtensor reads it in addition to torch's
    ``DeviceMesh._flatten_mapping``.

    The group is not added to ``_flatten_mapping``, because torch's DTensor (2.13) would then merge
    the two all-gathers of ``[Shard(0), Shard(0)]`` into one. The result is wrong if the number of
    rows is not divisible by the sizes of the mesh dimensions.

    Args:
        root: Mesh of all ranks.
        fold: One-dimensional mesh that flattens several dimensions of ``root``.
    """
    names: dict[str, str] = vars(root).setdefault("_alias_groups", {})
    names[(fold.mesh_dim_names or ("",))[0]] = fold.get_group().group_name


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Flatten all dimensions of a mesh into one.

    Calls ``DeviceMesh._flatten``. The public ``DeviceMesh.from_group`` is no replacement: its
    result has no root mesh, so torch cannot combine the result with other slices of the root mesh.

    Args:
        mesh: Mesh with one or more dimensions.
        name: Name of the flattened dimension. If None, the names of the dimensions are joined by
            ``_``.

    Returns:
        A one-dimensional slice of the root mesh of ``mesh``.
    """
    return mesh._flatten(name)
