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

    Args:
        world: The default process group. The function reads its attribute ``bound_device_id``. No
            public function of torch returns this value.

    Returns:
        True in two cases. Either NCCL was initialized eagerly (``device_id=`` of
        ``init_process_group``): torch then splits the communicator of the default group. Or
        ``torch.distributed.config.use_torchcomms`` (torch 2.13) is True.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return the number of process groups that exist in this process: ``len(_world.pg_names)``.

    ``new_group(use_local_synchronization=True)`` hashes this number into the name of the new group.
    If two members of the new group have different numbers, they use different names and wait for
    each other forever. This function would not be needed if ``new_group`` took the name of the
    group as an argument.
    """
    return len(distributed_c10d._world.pg_names)


def unused_count(groups: Iterable[Sequence[int]], at_least: int = 0) -> int:
    """Return an argument for `raised_group_count` that gives every new group an unused name.

    ``new_group(use_local_synchronization=True)`` computes the name of a new group from the ranks
    and the number of existing groups (``_process_group_name``). The number of existing groups
    decreases when a group is destroyed. torch can therefore give a new group the name of an
    existing group with the same ranks. A higher number avoids this.

    Args:
        groups: Ranks of the new groups, in the order of their creation.
        at_least: Lower bound of the result.

    Returns:
        The lowest number of existing groups with which all names are unused in this process. It is
        at least ``at_least`` and at least `registered_groups`.
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
    with raised_group_count(count):
        return str(distributed_c10d._process_group_name(ranks, use_hashed_name=True))


@contextmanager
def raised_group_count(count: int) -> Iterator[None]:
    """Make torch count at least ``count`` existing process groups inside the ``with`` block.

    torch uses its number of existing groups in the names of new groups (see `registered_groups`).
    The number is the length of ``_world.pg_names``. If it is lower than ``count``, placeholder
    entries are added to ``_world.pg_names``. The end of the block removes them.
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
    """Return whether torch knows ``group``: it was created and is not destroyed.

    A group is destroyed by ``destroy_process_group(group)``, and together with the default group by
    ``destroy_process_group()``. The function reads ``_world.pg_map``, because no public function of
    torch returns this value. ``torch.distributed.get_backend`` raises ``ValueError`` for a
    destroyed group, but also for a group that does not contain this rank.
    """
    return group in distributed_c10d._world.pg_map


def joint_group_number() -> int:
    """Return the number that becomes the name of the next joint process group.

    A joint group is a group for which all ranks call ``new_group``, not only its members. Its name
    is the counter ``_world.group_count``, which this function returns. Groups from ``split_group``
    and ``new_group(use_local_synchronization=True)`` have a hash as their name.
    """
    return int(distributed_c10d._world.group_count)


def increase_joint_group_number(number: int) -> None:
    """Set `joint_group_number` to ``number`` if it is lower than ``number``.

    If an error stopped the ranks after they created different numbers of groups, their joint group
    numbers differ. Without this function, the ranks would use different names for the next joint
    group and wait for each other.
    """
    distributed_c10d._world.group_count = max(joint_group_number(), number)


class _StoreByThread(tuple[str, Store]):
    """A pair ``(backend, store)`` that gives different stores to different threads.

    torch keeps one pair per process group in ``_world.pg_map``. `torch.distributed.new_group` reads
    the pair of the default group, and uses its store for the new group. `store_prefix` replaces the
    pair of the default group by a `_StoreByThread`.
    """

    def __init__(self, pair: tuple[str, Store]) -> None:
        self.pair = pair  # the original pair; threads that are not in `stores` use its store
        self.stores: dict[int, Store] = {}  # from ``threading.get_ident()`` to the thread's store

    def __iter__(self) -> Iterator[Any]:
        backend, store = self.pair
        return iter((backend, self.stores.get(get_ident(), store)))

    def __getitem__(self, index: Any) -> Any:
        return (*self,)[index]


_pairs_lock = Lock()  # held to change ``_world.pg_map``, but not to read it


@contextmanager
def store_prefix(prefix: str, world: dist.ProcessGroup) -> Iterator[None]:
    """Add a prefix to the store keys of process groups that are created in the ``with`` block.

    The store is the key-value store through which the members of a new group exchange addresses.
    ``new_group(use_local_synchronization=True)`` can give a new group the name of a destroyed
    group, because it computes the name from the ranks and the number of existing groups. The
    members of the new group would then read the addresses of the destroyed group. A different
    prefix for each call avoids this.

    The default group's store in ``_world.pg_map`` is replaced by a ``PrefixStore`` for this thread
    only. This function would not be needed if ``new_group`` took a name or a store as an argument.

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
    """Save memory: replace the ranks stored in ``mesh`` by the equal tuple stored in ``other``.

    Each mesh and sub-mesh has an attribute ``_flatten_rank_map``, a tuple with one entry for each
    rank of the job. It needs 4.7 MB for 131,072 ranks. If the tuples of ``mesh`` and ``other``
    differ, the function is a no-op. No public function of torch shares the tuple.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def register_flattened(root: DeviceMesh, flattened: DeviceMesh) -> None:
    """Add a flattened mesh dimension to the dict ``root._alias_groups``.

    The dict maps the name of the flattened dimension to the name of its process group. The
    attribute ``_alias_groups`` is defined by hp-mesh. hp-dtensor reads it, so that it can use the
    process group for a collective over several dimensions of ``root``.

    torch has a similar dict, ``DeviceMesh._flatten_mapping``. It is not used here: with an entry in
    it, torch's DTensor (2.13) unshards a tensor with placements ``[Shard(0), Shard(0)]`` in one
    all-gather instead of two. The result is wrong if the number of rows is not divisible by the
    number of ranks.

    Args:
        root: Mesh of all ranks.
        flattened: One-dimensional mesh that flattens several dimensions of ``root``.
    """
    names: dict[str, str] = vars(root).setdefault("_alias_groups", {})
    names[(flattened.mesh_dim_names or ("",))[0]] = flattened.get_group().group_name


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Flatten all dimensions of a mesh into one, with ``DeviceMesh._flatten``.

    The public ``DeviceMesh.from_group`` also returns a mesh with one dimension. It is not used
    here, because its result is not a slice of the root mesh of ``mesh``. torch can combine two
    meshes only if they are slices of one root mesh.

    Args:
        mesh: Mesh with one or more dimensions.
        name: Name of the flattened dimension. If None, the names of the dimensions are joined by
            ``_``.

    Returns:
        A one-dimensional slice of the root mesh of ``mesh``.
    """
    return mesh._flatten(name)
