"""Names of torch that are not public, touched here and nowhere else (torch 2.11 to 2.13)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store


def splits_world(world: dist.ProcessGroup) -> bool:
    """Return whether subgroups must be split off the world's communicator by all ranks together.

    ``ProcessGroup.bound_device_id`` is set when NCCL was initialised eagerly (``device_id=`` of
    ``init_process_group``); ``torch.distributed.config.use_torchcomms`` (2.13) asks for the same.
    A public predicate does not exist; `torch.distributed.split_group` raises where it cannot work.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return how many process groups this rank is in.

    ``new_group(use_local_synchronization=True)`` hashes ``len(_world.pg_names)`` into the name
    under which members meet, so members that count differently wait for each other for ever. A
    public replacement would be a name that the caller gives.
    """
    return len(distributed_c10d._world.pg_names)


def free_count(groups: Iterable[Sequence[int]], at_least: int = 0) -> int:
    """Return the first count from which local creation gives these groups names that are free.

    ``groups`` are created in turn, each at a count that is one higher. The result is
    ``at_least`` and `registered_groups`, or higher: closing groups lowers the latter, maybe to a
    number after which a living group over the same ranks is named. Names are those of
    ``_process_group_name`` (2.11 to 2.13).
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
    """Let `registered_groups` be ``count`` at the start of the block, if not higher.

    Entries that stand for no group fill ``_world.pg_names`` (2.11 to 2.13) during the block. As
    with `skip_names`, numbers are only left out.
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
    """Return whether torch still knows a group: not destroyed, alone or with the default one.

    ``_world.pg_map`` (2.11 to 2.13). The public functions that ask it raise what they also raise
    for other reasons.
    """
    return group in distributed_c10d._world.pg_map


def named_groups() -> int:
    """Return the number from which torch names the next group that all ranks create together.

    ``_world.group_count`` (2.11 to 2.13); `torch.distributed.distributed_c10d.get_pg_count` reads
    it too.
    """
    return int(distributed_c10d._world.group_count)


def skip_names(count: int) -> None:
    """Let torch name the next group that all ranks create together ``count``, if not higher.

    Ranks that stopped at different groups would otherwise give the next one different names, and
    wait for each other under them. Numbers are only left out, so that no name comes again.
    """
    distributed_c10d._world.group_count = max(named_groups(), count)


class _StoreByThread(tuple[str, Store]):
    """The backend and the store of a group, with another store for some threads.

    ``_world.pg_map`` has such pairs, which `torch.distributed.new_group` unpacks.
    """

    given: tuple[str, Store]  # the pair as all other threads see it
    stores: dict[int, Store]  # by the identifier of a thread

    @classmethod
    def of(cls, pair: tuple[str, Store]) -> "_StoreByThread":
        """Return a pair that is the same to every thread so far."""
        made = cls(pair)
        made.given, made.stores = pair, {}
        return made

    def __iter__(self) -> Iterator[Any]:
        backend, store = self.given
        return iter((backend, self.stores.get(get_ident(), store)))

    def __getitem__(self, index: Any) -> Any:
        return (*self,)[index]


_changing = Lock()  # of the map, not of what is done meanwhile


@contextmanager
def meet_under(prefix: str, world: dist.ProcessGroup) -> Iterator[None]:
    """Let members of groups that this thread creates in the block meet under a prefix in the store.

    Local creation names a group after its ranks and `registered_groups`. After a group is
    destroyed the same name can come again, and members would read the old addresses, which stay in
    the store. ``_world.pg_map`` (2.11 to 2.13) holds the store that new groups get; groups of other
    threads keep getting the world's own. A public replacement would be a name or a store that the
    caller gives to ``new_group``.
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
    """Let ``mesh`` hold the tuple of ranks of ``other`` where its own is an equal copy.

    Each mesh and submesh has ``_flatten_rank_map`` (2.11 to 2.13), a tuple as long as the world,
    which is 4.7 MB at 131,072 ranks. Nothing public replaces it; without it only memory is lost.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def know_fold(root: DeviceMesh, fold: DeviceMesh) -> None:
    """Let a full-world mesh know the group of a one-axis mesh that folds several of its axes.

    ``_alias_groups`` of a full-world mesh, ``{alias: name of a process group}``, is an attribute of
    this package's own, which hp-dtensor reads beside ``DeviceMesh._flatten_mapping``. Groups are
    not added to the latter, where torch's DTensor would find them: it merges two all-gathers of
    ``[Shard(0), Shard(0)]`` into one over the fold, and takes the shards for those of one axis,
    which they are not where the axes do not divide the rows (2.13).
    """
    names: dict[str, str] = vars(root).setdefault("_alias_groups", {})
    names[(fold.mesh_dim_names or ("",))[0]] = fold.get_group().group_name


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Return all axes of a mesh folded into one, which is a slice of the same mesh as ``mesh`` is.

    ``DeviceMesh._flatten`` (2.11 to 2.13). Publicly only ``DeviceMesh.from_group`` makes a mesh of
    ranks that are there, and that one is a slice of nothing.
    """
    return mesh._flatten(name)
