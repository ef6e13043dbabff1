"""Which process groups a rank needs, each set of ranks once, and their collective creation."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TypeAlias

import torch
import torch.distributed as dist

from ._errors import MeshError
from ._layout import RankLayout
from ._torch import registered_groups, splits_world


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGroup:
    """One set of ranks that this rank is in, and all axes whose group it is."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]


def own_groups(layout: RankLayout, rank: int) -> list[OwnGroup]:
    """Return this rank's groups, each distinct set of ranks once, in one order on every rank.

    All axes of size 1 share the rank's own group; axes over the whole world share one whose ranks
    are left out, since that group is there already. Two axes share a set of ranks either on every
    rank or on none, which is why the order is the same everywhere.
    """
    axes_of: dict[tuple[int, ...], list[str]] = {}
    for axis in dict.fromkeys(axis for view in layout.views.values() for axis in view.axes):
        size = layout.size(axis)
        # () stands for the world: its ranks need not be listed to be found.
        ranks = () if size == layout.world_size else layout.group(axis, rank)
        axes_of.setdefault(ranks, []).append(axis)
    return [OwnGroup(axes=tuple(axes), ranks=ranks) for ranks, axes in axes_of.items()]


def create_groups(
    layout: RankLayout, rank: int, device_type: str, timeout: timedelta | None, agreed: str
) -> tuple[dict[str, dist.ProcessGroup], list[dist.ProcessGroup]]:
    """Create this rank's groups; return the group of each axis, and those that are new.

    Collective over the world: one all-reduce, in which ranks compare what they have ``agreed`` on,
    then the groups, in one order on every rank.
    """
    world = _world()
    names = _LocalNames(world)
    create = _choose_way(world, device_type, agreed, names)
    by_axis: dict[str, dist.ProcessGroup] = {}
    created: list[dist.ProcessGroup] = []
    for own in own_groups(layout, rank):
        group = world
        if own.ranks:
            group = create(layout, own, timeout)
            created.append(group)
        by_axis |= dict.fromkeys(own.axes, group)
    names.mark_used()
    return by_axis, created


def tell_refusal(device_type: str, reason: str) -> None:
    """Take part in the comparison of `create_groups` with the reason why this rank creates none.

    All others would wait for this rank otherwise; those that could create groups raise instead.
    """
    world = _world()
    if not _is_fake(world):
        _compare(world, device_type, reason, _LocalNames(world))


def _world() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


class _LocalNames:
    """Which names of locally created groups are taken, as the world's store remembers.

    Members meet under a name made of their ranks and of how many groups each is in. Destroying
    groups lowers that number, and the same ranks would meet where the addresses of the destroyed
    group still lie. The first rank keeps the highest number used, for all: equal by agreement.
    """

    key = "local_group_names_used"

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.count = registered_groups()
        self._store = world.get_group_store() if world.rank() == 0 and not _is_fake(world) else None
        self._used = self._store.add(self.key, 0) if self._store else 0
        self.taken = self.count < self._used

    def mark_used(self) -> None:
        if self._store:
            self._store.add(self.key, max(0, registered_groups() - self._used))


def _is_fake(world: dist.ProcessGroup) -> bool:
    # Fake groups have no peers: nothing to agree on, no device and no store behind them.
    return dist.get_backend(world) == "fake"


def _choose_way(
    world: dist.ProcessGroup, device_type: str, agreed: str, names: _LocalNames
) -> "Way":
    same, local = True, True
    if not _is_fake(world):
        same, local = _compare(world, device_type, agreed, names)
    if not same:
        raise MeshError(f"ranks build different meshes; this rank has {agreed}")
    if splits_world(world):
        return _split
    return _create_locally if local else _create_together


def _compare(
    world: dist.ProcessGroup, device_type: str, text: str, names: _LocalNames
) -> tuple[bool, bool]:
    """Return whether all ranks have this text, and whether all can create groups locally."""
    digest = int.from_bytes(sha256(text.encode()).digest()[:7], "big")
    mine = [digest, -digest, names.count, -names.count, int(names.taken)]
    # Where gloo is at hand this needs no device, and starts no communicator before its time.
    device = "cpu" if "gloo" in dist.get_backend_config(world) else device_type
    most = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world)
    most_digest, least_digest, most_count, least_count, taken = most.tolist()
    return most_digest == -least_digest, most_count == -least_count and not taken


def _create_locally(
    layout: RankLayout, own: OwnGroup, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Only members take part: a rank makes a dozen calls, not one for each group of the world."""
    group: dist.ProcessGroup = dist.new_group(
        list(own.ranks),
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=",".join(own.axes),
    )
    return group


def _create_together(
    layout: RankLayout, own: OwnGroup, timeout: timedelta | None
) -> dist.ProcessGroup:
    """All ranks make all groups of an axis, as torch does when nothing else is asked for."""
    mine: dist.ProcessGroup | None = None
    for ranks in layout.groups(own.axes[0]):
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=",".join(own.axes))
        mine = group if ranks == own.ranks else mine
    return _member(mine)


def _split(layout: RankLayout, own: OwnGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """All ranks split the world's communicator into the groups of an axis, in one call.

    Where NCCL was initialised eagerly every new group comes from ``ncclCommSplit``, a collective
    of the whole world: creating it locally would wait for ranks that never call.
    """
    group = dist.split_group(
        split_ranks=[list(ranks) for ranks in layout.groups(own.axes[0])],
        timeout=timeout,
        group_desc=",".join(own.axes),
    )
    return _member(group)


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise MeshError("torch returned no group for a set of ranks that this rank is in")
    return group


Way: TypeAlias = Callable[[RankLayout, OwnGroup, timedelta | None], dist.ProcessGroup]
