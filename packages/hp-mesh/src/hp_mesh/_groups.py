"""Creation of process groups and device meshes on all ranks or on none.

`create_meshes` is the main function. It is collective: all ranks compare their arguments in one
all-reduce, create their groups in the same order, and compare in a second all-reduce whether all
succeeded. A rank with invalid arguments refuses: it takes part in the first all-reduce and reports
the problem, so that the other ranks raise an error instead of waiting.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import MeshError, join_words
from ._layout import MeshPlan, PlannedGroup, RankLayout, View
from ._torch import (
    default_group,
    group_count,
    is_registered,
    joint_group_number,
    raise_joint_group_number,
    registered_groups,
    share_rank_map,
    splits_world,
    store_prefix,
    unused_count,
)

PREFIX = "parallel_mesh"  # prefix of this module's keys in the default group's store
MOST_FIELDS = 32  # upper bound of compared values; every rank sends this many numbers
LATEST = 2**62  # upper bound of a failure time, in milliseconds times the number of ranks

# How ranks create process groups:
# "local": Only the members of a group call ``new_group``. A rank makes about 12 calls for any
#     world size.
# "joint": All ranks create all groups of a mesh dimension, as torch does by default.
# "split": All ranks split the default group's communicator into the groups of a mesh dimension, in
#     one call. This is needed if NCCL was initialized eagerly: torch then creates every group with
#     ``ncclCommSplit``, a collective over all ranks. If only the members called ``new_group``, they
#     would wait forever for the other ranks.
Creation: TypeAlias = Literal["local", "joint", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Values that are equal on all ranks after the first all-reduce of `create_meshes`.

    Attributes:
        equally_many: Whether every rank has the same number of existing process groups.
        count: Number of existing process groups that every rank must report to torch when the first
            new group is created. torch derives the names of new groups from this number, and with
            this number the names are unused.
        serial: Number of this call of `create_meshes`. Earlier calls in the same job have other
            numbers.
    """

    equally_many: bool
    count: int
    serial: int


def create_meshes(
    plan: MeshPlan,
    device_type: object,
    timeout: timedelta | None,
    compared: Mapping[str, object],
    created: list[dist.ProcessGroup],
) -> dict[str, DeviceMesh]:
    """Create the process groups of this rank and the device meshes that use them.

    Collective over the default group. If a rank fails, all ranks destroy the groups that they
    created, and raise.

    Args:
        plan: The groups that contain this rank, and the names, shape and ranks of each mesh.
        device_type: Device type of the meshes, or None for `default_device_type`.
        timeout: Timeout of the groups, or None for torch's default.
        compared: Values by name that must be equal on all ranks.
        created: List to which this function appends the new groups, for `destroy_groups`.

    Returns:
        The device meshes by name, such as ``"dense"``. Each mesh has all ranks.

    Raises:
        MeshError: The device type is invalid, the compared values differ between ranks, or another
            rank failed.
    """
    try:
        kind = checked_device_type(device_type)
    except MeshError:
        join_as_refusing()
        raise
    agreement = _compare(default_group(), {**compared, "device_type": kind}, plan.groups)
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
            share_rank_map(meshes[view.name], meshes["dense"])
        return meshes


def _rank_tensor(view: View, ranks: Sequence[int]) -> torch.Tensor:
    if isinstance(ranks, range):
        return torch.arange(len(ranks), dtype=torch.int, device="cpu").view(view.shape)
    return torch.tensor(ranks, dtype=torch.int, device="cpu").view(view.shape)


def _create_groups(
    plan: MeshPlan,
    timeout: timedelta | None,
    agreement: Agreement,
    created: list[dist.ProcessGroup],
) -> dict[str, dist.ProcessGroup]:
    """Create the process groups that contain this rank, in the order of ``plan.groups``.

    If torch raises an error for a group, a note with the dimensions and ranks of the group is added
    to the error. ``created`` then has the groups that were created earlier.

    Returns:
        The group of each mesh dimension by its name.
    """
    world = default_group()
    way = _choose_creation(world, agreement)
    by_axis: dict[str, dist.ProcessGroup] = {}
    with store_prefix(f"{PREFIX}/{agreement.serial}", world), group_count(agreement.count):
        for planned in plan.groups:
            group = world
            if planned.ranks:
                try:
                    group = _create_group(plan.layout, planned, timeout, way, created)
                except Exception as error:
                    axes, ranks = ", ".join(planned.axes), list(planned.ranks)
                    error.add_note(f"while creating the process group of {axes} over ranks {ranks}")
                    raise
            by_axis |= dict.fromkeys(planned.axes, group)
    return by_axis


def _choose_creation(world: dist.ProcessGroup, agreement: Agreement) -> Creation:
    if splits_world(world):
        return "split"
    # With "local", torch puts the rank's number of existing groups into the new group's name. If
    # this number differs between members, they use different names and wait for each other.
    return "local" if agreement.equally_many else "joint"


def _create_group(
    layout: RankLayout,
    planned: PlannedGroup,
    timeout: timedelta | None,
    way: Creation,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Create one process group that contains this rank, append it to ``created`` and return it.

    If ``way`` is not ``"local"``, the other groups of the same mesh dimension are created too.
    """
    settings: dict[str, Any] = {"timeout": timeout, "group_desc": ",".join(planned.axes)}
    if way == "local":
        ranks = list(planned.ranks)
        created.append(dist.new_group(ranks, use_local_synchronization=True, **settings))
        return created[-1]
    all_groups = layout.groups(planned.axes[0])
    if way == "split":
        group = dist.split_group(split_ranks=[list(ranks) for ranks in all_groups], **settings)
        if group is None:
            raise MeshError("torch returned no group for a set of ranks that this rank is in")
        created.append(group)
        return group
    for members in all_groups:
        group = dist.new_group(list(members), **settings)
        if members == planned.ranks:
            created.append(group)
    return created[-1]


@contextmanager
def _all_or_none(created: list[dist.ProcessGroup]) -> Iterator[None]:
    """Destroy the groups in ``created`` if the ``with`` block raises on any rank.

    Collective over the default group: after the block, one all-reduce shares whether all ranks
    succeeded. If the block failed on this rank, its error is raised. If another rank failed
    earlier, a note with the number of the other rank is added to the error, because this rank may
    have failed only while it waited. If the block failed on other ranks only, `MeshError` is
    raised. After a ``KeyboardInterrupt``, a rank skips the all-reduce.
    """
    start = time.monotonic()
    try:
        try:
            yield
        except Exception as error:
            after = time.monotonic() - start
            with suppress(RuntimeError, MeshError):  # ranks or the default group may be gone
                first = _first_failed_rank(after)
                if first is not None and first != default_group().rank():
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
    """Destroy the process groups in ``created``, the last one first, and empty the list.

    Groups that are already destroyed, separately or with the default group, are skipped.
    """
    while created:
        group = created.pop()
        if is_registered(group):
            dist.destroy_process_group(group)


def join_as_refusing() -> None:
    """Take part in the first all-reduce of `create_meshes` on a rank with invalid arguments.

    The other ranks then raise `MeshError` instead of waiting for this rank.
    """
    with suppress(MeshError):  # this rank raises its own error
        _compare(default_group())


def _compare(
    world: dist.ProcessGroup,
    fields: Mapping[str, object] | None = None,
    groups: Sequence[PlannedGroup] = (),
) -> Agreement:
    """Check in one all-reduce that values are equal on all ranks.

    More all-reduces follow if a group name that is unused on one rank is in use on another.

    Args:
        world: The default process group.
        fields: Values that must be equal on all ranks, by name. A rank with invalid arguments
            passes None, which makes all ranks raise.
        groups: The groups that this rank will create.

    Returns:
        Values that are equal on all ranks. They make the names of the new groups equal too.

    Raises:
        MeshError: The values differ, or a rank passed None. All ranks raise the error.
    """
    fields = fields or {}
    planned = [group.ranks for group in groups if group.ranks]
    # Fake groups have no peers and no store.
    if dist.get_backend(world) == "fake":
        return Agreement(equally_many=True, count=unused_count(planned), serial=0)
    # After a failed call, addresses remain in the store, so every call gets its own number.
    serial = world.get_group_store().add(PREFIX, 1) if world.rank() == 0 else 0
    # The lowest rank with invalid arguments has the largest value; 0 means valid arguments.
    refusal = 0 if fields else world.size() - world.rank()
    digests = [_digest(name, value) for name, value in fields.items()]
    digests += [0] * (MOST_FIELDS - len(digests))
    compared = [refusal, serial, registered_groups(), unused_count(planned), *digests]
    largest, smallest = _extremes(world, compared)
    ends = zip(fields, largest[4:], smallest[4:], strict=False)
    differ = [name for name, most, least in ends if most != least]
    if largest[0] or differ:
        verb = "differs" if len(differ) == 1 else "differ"
        problem = f"{join_words(differ, 'and')} {verb} between ranks"
        if largest[0]:
            problem = f"rank {world.size() - largest[0]} refuses its arguments and builds none, "
            problem += "its own error says why"
        raise MeshError(f"ranks build different meshes: {problem}; this rank has {dict(fields)}")
    most, least = largest[3], smallest[3]
    while most != least:  # a name that is unused on one rank may be in use on another
        (most,), (least,) = _extremes(world, [unused_count(planned, most)])
    return Agreement(equally_many=largest[2] == smallest[2], count=most, serial=largest[1])


def _digest(name: str, value: object) -> int:
    return int.from_bytes(sha256(f"{name}={value!r}".encode()).digest()[:7], "big")


def _extremes(world: dist.ProcessGroup, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the maximum and the minimum of each number over all ranks.

    Needs one all-reduce: the minimum is computed as the negative of the maximum of the negatives.

    Args:
        world: The default process group.
        numbers: This rank's numbers; equally many on all ranks.

    Returns:
        A list with the maximum of each number, and a list with the minimum of each number.
    """
    rows = [numbers, [-number for number in numbers]]
    both = torch.tensor(rows, dtype=torch.int64, device=comparison_device_type())
    dist.all_reduce(both, dist.ReduceOp.MAX, group=world)
    largest, negatives = both.tolist()
    return largest, [-number for number in negatives]


def _first_failed_rank(after: float | None) -> int | None:
    """Find the rank that failed first, in one all-reduce over the default group.

    Args:
        after: Seconds until this rank failed, or None if this rank succeeded.

    Returns:
        A global rank, or None if all ranks succeeded.
    """
    world = default_group()
    if dist.get_backend(world) == "fake":
        return None
    # The rank that failed first has the largest value; 0 means success.
    late = 0 if after is None else round(1000 * after) * world.size() + world.rank()
    failure = 0 if after is None else LATEST - late
    (first, number), _ = _extremes(world, [failure, joint_group_number()])
    if first == 0:
        return None
    # Ranks may have failed at different groups. Equal numbers make the name of the next group equal
    # on all ranks.
    raise_joint_group_number(number)
    return (LATEST - first) % world.size()


def default_device_type() -> str:
    """Return the device type of meshes for which the user gave no device type.

    It is the type of the current accelerator, such as ``"cuda"``, if the default group has a
    backend for this type, else ``"cpu"``. If gloo is the only backend, the result is ``"cpu"``,
    although gloo accepts CUDA tensors.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type if accelerator.type in _backends() else "cpu"


def comparison_device_type() -> str:
    """Return the device type of the tensors with which ranks compare their arguments.

    It is ``"cpu"`` if the default group has a gloo backend: the comparison then needs no
    accelerator, and creates no NCCL communicator. Else it is `default_device_type`. The device type
    that the user gave is not used, because it may differ between ranks.
    """
    return "cpu" if "gloo" in dist.get_backend_config() else default_device_type()


def checked_device_type(device_type: object) -> str:
    """Return a valid device type without index, such as ``"cuda"``.

    Args:
        device_type: Device type from the user, or None for `default_device_type`. ``"meta"`` is
            valid without a backend, because meta tensors have no data.

    Raises:
        MeshError: The value is not a device type, has an index (``"cuda:0"``), or the default group
            has no backend for the type.
    """
    if device_type is None:
        device_type = default_device_type()
    if not isinstance(device_type, str):
        reason = "is no string"
    else:
        try:
            kind = torch.device(device_type).type
        except RuntimeError:
            reason = "is no device type of torch"
        else:
            if kind == device_type and kind in (*_backends(), "meta"):
                return kind
            has_index = f"has an index; give {kind!r} without it"
            reason = has_index if kind != device_type else "has no backend in this world"
    legal = join_words(sorted(map(repr, _backends())))
    raise MeshError(
        f"device_type={device_type!r} {reason}; this world has backends for {legal}, "
        "and None takes the default"
    )


def _backends() -> list[str]:
    """Return the device types for which the default group has a backend, such as ``["cpu"]``."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
