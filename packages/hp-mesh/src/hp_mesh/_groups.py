"""Process groups of a mesh: which ones a rank creates, and agreement of all ranks about them.

`create_meshes` is the entry. It is collective: all ranks compare their arguments in one all-reduce,
create their groups in the same order, and compare in a second all-reduce whether all succeeded.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import MeshError, join_words
from ._layout import MeshPlan, PlannedGroup, RankLayout, View
from ._torch import (
    count_from,
    free_count,
    is_registered,
    meet_under,
    named_groups,
    registered_groups,
    share_ranks,
    skip_names,
    splits_world,
)

PREFIX = "parallel_mesh"  # of keys in the world's store


def create_meshes(
    plan: MeshPlan,
    device_type: object,
    timeout: timedelta | None,
    compared: Mapping[str, object],
    created: list[dist.ProcessGroup],
) -> dict[str, DeviceMesh]:
    """Create the groups of this rank, and one mesh of the whole world for each view.

    Collective over the world. If a rank fails, all ranks destroy the groups that they created, and
    raise.

    Args:
        plan: Groups and views of this rank.
        device_type: Device type of the meshes, or None for the default.
        timeout: Timeout of the groups.
        compared: Values that must be equal on all ranks.
        created: List to which the new groups are added.

    Returns:
        The mesh of each view by its name.

    Raises:
        MeshError: The device type is invalid, the values differ, or another rank failed.
    """
    try:
        kind = checked_device_type(device_type)
    except MeshError:
        join_as_refusing()
        raise
    agreement = _compare(_world(), {**compared, "device_type": kind}, plan.groups)
    with _all_or_none(created):
        groups = _create_groups(plan, timeout, agreement, created)
        meshes: dict[str, DeviceMesh] = {}
        for view, ranks in plan.views:
            meshes[view.name] = DeviceMesh.from_group(
                [groups[axis] for axis in view.axes],
                kind,
                mesh=_rank_tensor(view, ranks),
                mesh_dim_names=view.axes,
            )
            share_ranks(meshes[view.name], meshes["dense"])
        return meshes


def _rank_tensor(view: View, ranks: Sequence[int]) -> torch.Tensor:
    if isinstance(ranks, range):
        return torch.arange(len(ranks), dtype=torch.int, device="cpu").view(view.shape)
    return torch.tensor(ranks, dtype=torch.int, device="cpu").view(view.shape)


def _create_groups(
    plan: MeshPlan,
    timeout: timedelta | None,
    agreement: "Agreement",
    created: list[dist.ProcessGroup],
) -> dict[str, dist.ProcessGroup]:
    """Create this rank's groups in order and return the group of each axis.

    If a group cannot be created, the error has a note that names it, and ``created`` has the groups
    before it.
    """
    world = _world()
    create = _choose_creation(world, agreement)
    by_axis: dict[str, dist.ProcessGroup] = {}
    with meet_under(f"{PREFIX}/{agreement.serial}", world), count_from(agreement.count):
        for own in plan.groups:
            group = world
            if own.ranks:
                try:
                    group = create(plan.layout, own, timeout, created)
                except Exception as error:
                    axes, ranks = ", ".join(own.axes), list(own.ranks)
                    error.add_note(f"while creating the process group of {axes} over ranks {ranks}")
                    raise
            by_axis |= dict.fromkeys(own.axes, group)
    return by_axis


@contextmanager
def _all_or_none(created: list[dist.ProcessGroup]) -> Iterator[None]:
    """Destroy the groups in ``created`` if the block raises on this rank or on another one.

    Collective over the world: one all-reduce after the block compares success. A rank that failed
    raises its own error, with a note if another rank failed first, since this rank may have waited
    for it. All other ranks raise `MeshError`. An interrupted rank (``KeyboardInterrupt``) leaves at
    once without telling the others.
    """
    start = time.monotonic()
    try:
        try:
            yield
        except Exception as error:
            after = time.monotonic() - start
            with suppress(RuntimeError, MeshError):  # the other ranks or the world may be gone
                first = _first_failed_rank(after)
                if first is not None and first != _world().rank():
                    error.add_note(f"rank {first} failed before this one; see its own error first")
            raise
        failed = _first_failed_rank(None)
        if failed is not None:
            raise MeshError(
                f"rank {failed} could not build its part of this mesh; its own error says why, and "
                "no rank keeps a group of it"
            )
    except BaseException:
        destroy_groups(created)
        raise


def destroy_groups(created: list[dist.ProcessGroup]) -> None:
    """Destroy the groups in a list, the last one first, and empty it.

    Groups that are already destroyed, alone or with the default group, are skipped.
    """
    while created:
        group = created.pop()
        if is_registered(group):
            dist.destroy_process_group(group)


def join_as_refusing() -> None:
    """Take part in the comparison of `create_meshes` on a rank that creates no groups.

    The other ranks would otherwise wait for this rank. They raise `MeshError`.
    """
    with suppress(MeshError):  # this rank raises its own error
        _compare(_world())


def _world() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Values that all ranks share before they create groups.

    Attributes:
        equally_many: All ranks are in the same number of groups.
        count: First number in the names of the new groups.
        serial: Number of this call of `create_meshes`, unique among all that use the same store.
    """

    equally_many: bool
    count: int
    serial: int


MOST_FIELDS = 32  # compared values; every rank sends this many numbers
LATEST = 2**62  # milliseconds times ranks, longer than any build


def _compare(
    world: dist.ProcessGroup,
    fields: Mapping[str, object] | None = None,
    groups: Sequence[PlannedGroup] = (),
) -> Agreement:
    """Compare values over all ranks in one all-reduce. A rank without ``fields`` refuses.

    A second all-reduce follows if a rank cannot use the names that torch gives to its next groups.

    Raises:
        MeshError: The values differ, or a rank refuses. Raised on all ranks.
    """
    fields = fields or {}
    own = [group.ranks for group in groups if group.ranks]
    # Fake groups have no peers and no store.
    if dist.get_backend(world) == "fake":
        return Agreement(equally_many=True, count=free_count(own), serial=0)
    # A build that fails leaves addresses in the store, so every attempt has its own number.
    serial = world.get_group_store().add(PREFIX, 1) if world.rank() == 0 else 0
    # The largest value belongs to the first rank that refuses; 0 means that none refuses.
    refusal = 0 if fields else world.size() - world.rank()
    digests = [_digest(name, value) for name, value in fields.items()]
    digests += [0] * (MOST_FIELDS - len(digests))
    compared = [registered_groups(), free_count(own), *digests]
    before_end, serial, *ends = _largest(world, [refusal, serial, *_both_ends(compared)])
    same = [most == -least for most, least in zip(ends[::2], ends[1::2], strict=True)]
    if before_end:
        raise MeshError(
            f"ranks build different meshes: rank {world.size() - before_end} refuses its arguments "
            f"and builds none, its own error says why; this rank has {dict(fields)}"
        )
    differ = [name for name, equal in zip(fields, same[2:], strict=False) if not equal]
    if differ:
        raise MeshError(
            f"ranks build different meshes: {join_words(differ, 'and')} "
            f"{'differs' if len(differ) == 1 else 'differ'} between ranks; "
            f"this rank has {dict(fields)}"
        )
    most, least = ends[2:4]
    while most != -least:  # a name that is free on one rank may be in use on another
        most, least = _largest(world, _both_ends([free_count(own, most)]))
    return Agreement(equally_many=same[0], count=most, serial=serial)


def _digest(name: str, value: object) -> int:
    return int.from_bytes(sha256(f"{name}={value!r}".encode()).digest()[:7], "big")


def _both_ends(numbers: Sequence[int]) -> list[int]:
    """Return each number and its negative: their maxima over the ranks show whether all equal."""
    return [end for number in numbers for end in (number, -number)]


def _largest(world: dist.ProcessGroup, numbers: Sequence[int]) -> list[int]:
    """Return the maximum of each number over the ranks, in one all-reduce."""
    most = torch.tensor(numbers, dtype=torch.int64, device=comparison_device_type())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world)
    return [int(number) for number in most.tolist()]


def _first_failed_rank(after: float | None) -> int | None:
    """Return the rank that failed first, or None. One all-reduce over the world.

    Args:
        after: Seconds until this rank failed, or None if it did not fail.
    """
    world = _world()
    if dist.get_backend(world) == "fake":
        return None
    # The largest value belongs to the first rank that failed; 0 means that none failed.
    late = 0 if after is None else round(1000 * after) * world.size() + world.rank()
    first, names = _largest(world, [0 if after is None else LATEST - late, named_groups()])
    if first == 0:
        return None
    # Ranks may have stopped at different groups. The next group gets the same name on all.
    skip_names(names)
    return (LATEST - first) % world.size()


def _choose_creation(world: dist.ProcessGroup, agreement: Agreement) -> "Creation":
    if splits_world(world):
        return _split
    # Members with different numbers of groups would meet under different names.
    return _create_locally if agreement.equally_many else _create_together


def _create_locally(
    layout: RankLayout,
    own: PlannedGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Create a group with its members only: a dozen calls per rank, however large the world."""
    group: dist.ProcessGroup = dist.new_group(
        list(own.ranks),
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=",".join(own.axes),
    )
    created.append(group)
    return group


def _create_together(
    layout: RankLayout,
    own: PlannedGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Create all groups of an axis on all ranks, as torch does by default."""
    mine: dist.ProcessGroup | None = None
    for ranks in layout.groups(own.axes[0]):
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=",".join(own.axes))
        if ranks == own.ranks:
            mine = group
            created.append(mine)
    return _member(mine)


def _split(
    layout: RankLayout,
    own: PlannedGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Split the world's communicator into the groups of an axis, in one call on all ranks.

    If NCCL was initialized eagerly, every new group comes from ``ncclCommSplit``, a collective of
    the whole world. Local creation would wait for ranks that never call.
    """
    group = dist.split_group(
        split_ranks=[list(ranks) for ranks in layout.groups(own.axes[0])],
        timeout=timeout,
        group_desc=",".join(own.axes),
    )
    mine = _member(group)
    created.append(mine)
    return mine


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise MeshError("torch returned no group for a set of ranks that this rank is in")
    return group


Creation: TypeAlias = Callable[
    [RankLayout, PlannedGroup, timedelta | None, list[dist.ProcessGroup]], dist.ProcessGroup
]


def default_device_type() -> str:
    """Return the accelerator's type if this world has a backend for it, else ``"cpu"``.

    A world with gloo only uses the CPU, although gloo accepts CUDA tensors.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type if accelerator.type in _backends() else "cpu"


def comparison_device_type() -> str:
    """Return the device type of tensors that the default group can reduce.

    With gloo it is the CPU: no device is needed, and no NCCL communicator is created early. It does
    not depend on arguments, which may differ between ranks.
    """
    return "cpu" if "gloo" in dist.get_backend_config() else default_device_type()


def checked_device_type(device_type: object) -> str:
    """Return the device type, or the default for None.

    Raises:
        MeshError: This world has no backend for it, or it has an index. ``"meta"`` needs no
            backend, because its tensors have no data.
    """
    if device_type is None:
        device_type = default_device_type()
    if isinstance(device_type, str):
        try:
            kind = torch.device(device_type).type
        except RuntimeError:
            raise _refused(device_type, "is no device type of torch") from None
        if kind != device_type:
            raise _refused(device_type, f"has an index; give {kind!r} without it")
        if kind not in (*_backends(), "meta"):
            raise _refused(device_type, "has no backend in this world")
        return kind
    raise _refused(device_type, "is no string")


def _backends() -> list[str]:
    """Return the device types for which the default group has a backend."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]


def _refused(device_type: object, reason: str) -> MeshError:
    legal = join_words(sorted(map(repr, _backends())))
    return MeshError(
        f"device_type={device_type!r} {reason}; this world has backends for {legal}, "
        "and None takes the default"
    )
