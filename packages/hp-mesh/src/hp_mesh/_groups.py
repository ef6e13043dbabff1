"""Creation of process groups and device meshes on all ranks or on none.

`create_meshes` is the main function. Every rank calls it, and each call has three steps:

1. The ranks compare their arguments in an all-reduce.
2. Each rank creates its process groups. The order is the same on all ranks.
3. The ranks compare in an all-reduce whether all of them succeeded.

A rank with invalid arguments calls `report_invalid_arguments` instead. This function takes part in
the all-reduce of step 1, so that the other ranks raise an error instead of waiting.
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
    increase_joint_group_number,
    is_registered,
    joint_group_number,
    raised_group_count,
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
# "local": Only the members of a group call ``new_group``. A rank makes at most one call for each
#     mesh dimension, for any world size.
# "joint": All ranks create all groups of a mesh dimension, as torch does by default.
# "split": All ranks split the default group's communicator into the groups of a mesh dimension, in
#     one call. This is needed if NCCL was initialized eagerly: torch then creates every group with
#     ``ncclCommSplit``, a collective over all ranks. If only the members called ``new_group``, they
#     would wait forever for the other ranks.
Creation: TypeAlias = Literal["local", "joint", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of `_compare`: settings with which all ranks create their process groups.

    All ranks have the same values.

    Attributes:
        equally_many: Whether every rank has the same number of existing process groups.
        count: Value to which `raised_group_count` sets torch's counter of groups, which torch puts
            into the names of new groups. It is so high that no rank uses one of these names yet.
        serial: Number of this call of `create_meshes`, different from all earlier calls in the same
            job. It is part of the keys that the new groups write to the store.
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

    Collective over the default group. If the creation fails on one rank, every rank destroys its
    new groups and raises an error.

    Args:
        plan: The groups that contain this rank, and the names, shape and ranks of each mesh.
        device_type: Device type of the meshes, or None for `default_device_type`.
        timeout: Timeout of the groups, or None for torch's default.
        compared: Dict of values that must be equal on all ranks. Error messages use the keys.
        created: List to which this function appends the new groups. After an error it is empty.

    Returns:
        A dict from the name of a view, such as ``"dense"``, to a device mesh with all ranks.

    Raises:
        MeshError: The device type is invalid, the values in ``compared`` or the device types differ
            between ranks, or another rank failed.
    """
    try:
        kind = checked_device_type(device_type)
    except MeshError:
        report_invalid_arguments()
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

    Each new group is appended to ``created`` at once. If torch raises an error for a group, the
    function adds a note with the group's dimensions and ranks to the error, and raises the error.

    Returns:
        A dict from the name of each mesh dimension to the group of this rank.
    """
    world = default_group()
    creation = _choose_creation(world, agreement)
    by_axis: dict[str, dist.ProcessGroup] = {}
    with store_prefix(f"{PREFIX}/{agreement.serial}", world), raised_group_count(agreement.count):
        for planned in plan.groups:
            group = world
            if planned.ranks:
                try:
                    group = _create_group(plan.layout, planned, timeout, creation, created)
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
    creation: Creation,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Create one process group that contains this rank, append it to ``created`` and return it.

    If ``creation`` is ``"joint"`` or ``"split"``, this rank also takes part in the creation of the
    other groups of the same mesh dimension. These groups are not appended.
    """
    settings: dict[str, Any] = {"timeout": timeout, "group_desc": ",".join(planned.axes)}
    if creation == "local":
        ranks = list(planned.ranks)
        created.append(dist.new_group(ranks, use_local_synchronization=True, **settings))
        return created[-1]
    all_groups = layout.groups(planned.axes[0])
    if creation == "split":
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

    Collective over the default group: after an all-reduce at the end of the block, every rank knows
    whether another rank failed.

    - If the block raises an ``Exception`` on this rank, the exception is raised again. If another
      rank failed earlier, a note names the other rank: this rank may have failed only because it
      waited for the other rank.
    - If the block raises on other ranks only, `MeshError` is raised.
    - If the block raises another ``BaseException``, such as ``KeyboardInterrupt``, this rank skips
      the all-reduce and raises the exception again.
    """
    start = time.monotonic()
    try:
        try:
            yield
        except Exception as error:
            seconds = time.monotonic() - start
            with suppress(RuntimeError, MeshError):  # ranks or the default group may be gone
                first = _first_failed_rank(seconds)
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

    A group that is already destroyed is skipped.
    """
    while created:
        group = created.pop()
        if is_registered(group):
            dist.destroy_process_group(group)


def report_invalid_arguments() -> None:
    """Inform the other ranks that this rank cannot call `create_meshes`.

    A rank calls this function if the arguments from the user are invalid, then raises its own
    error. The function takes part in the first all-reduce of `create_meshes`. The ranks that called
    `create_meshes` then raise `MeshError` instead of waiting for this rank.
    """
    with suppress(MeshError):  # this rank raises its own error
        _compare(default_group())


def _compare(
    world: dist.ProcessGroup,
    fields: Mapping[str, object] | None = None,
    groups: Sequence[PlannedGroup] = (),
) -> Agreement:
    """Check that all ranks passed equal ``fields``, and choose settings for the new groups.

    The check needs one all-reduce. `Agreement.count` becomes part of the names of the new groups.
    If the proposed count would give a name that some rank uses already, the ranks try higher
    counts until all agree, with one more all-reduce each time.

    Args:
        world: The default process group.
        fields: Dict of values that must be equal on all ranks. A rank with invalid arguments passes
            None. All ranks then raise.
        groups: The groups that this rank will create.

    Returns:
        An `Agreement`. It is equal on all ranks. The names of the new groups depend on it.

    Raises:
        MeshError: The values differ, or a rank passed None. All ranks raise the error.
    """
    fields = fields or {}
    planned = [group.ranks for group in groups if group.ranks]
    # A fake group communicates with no other process and has no store.
    if dist.get_backend(world) == "fake":
        return Agreement(equally_many=True, count=unused_count(planned), serial=0)
    # After a failed call, addresses of its groups remain in the store. Every call therefore gets
    # its own number, which is part of the store keys.
    serial = world.get_group_store().add(PREFIX, 1) if world.rank() == 0 else 0
    # 0 means valid arguments. The maximum over the ranks gives the lowest rank with invalid ones.
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
    while most != least:  # the name of a new group may be in use on one rank only
        (most,), (least,) = _extremes(world, [unused_count(planned, most)])
    return Agreement(equally_many=largest[2] == smallest[2], count=most, serial=largest[1])


def _digest(name: str, value: object) -> int:
    return int.from_bytes(sha256(f"{name}={value!r}".encode()).digest()[:7], "big")


def _extremes(world: dist.ProcessGroup, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the element-wise maximum and minimum of ``numbers`` over all ranks.

    Needs one all-reduce with ``ReduceOp.MAX``: min(x) is computed as -max(-x).

    Args:
        world: The default process group.
        numbers: List of integers. All ranks pass lists of the same length.

    Returns:
        A tuple ``(largest, smallest)`` of two lists with the length of ``numbers``. ``largest[i]``
        is the maximum of ``numbers[i]`` over all ranks, and ``smallest[i]`` is the minimum.
    """
    rows = [numbers, [-number for number in numbers]]
    both = torch.tensor(rows, dtype=torch.int64, device=comparison_device_type())
    dist.all_reduce(both, dist.ReduceOp.MAX, group=world)
    largest, negatives = both.tolist()
    return largest, [-number for number in negatives]


def _first_failed_rank(seconds: float | None) -> int | None:
    """Return the rank that failed first, after one all-reduce over the default group.

    Args:
        seconds: Time from the start of the creation of groups to the failure of this rank, or None
            if this rank succeeded.

    Returns:
        A global rank, or None if all ranks succeeded or the default group is fake.
    """
    world = default_group()
    if dist.get_backend(world) == "fake":
        return None
    # The rank that failed first has the largest value; 0 means success.
    late = 0 if seconds is None else round(1000 * seconds) * world.size() + world.rank()
    failure = 0 if seconds is None else LATEST - late
    (first, number), _ = _extremes(world, [failure, joint_group_number()])
    if first == 0:
        return None
    # Ranks may have failed before the creation of different groups. Their numbers are made equal,
    # so that the name of the next group is the same on all ranks.
    increase_joint_group_number(number)
    return (LATEST - first) % world.size()


def default_device_type() -> str:
    """Return the device type of meshes for which the user gave no device type.

    Returns:
        The type of the current accelerator, such as ``"cuda"``, if the default group has a backend
        for this type, else ``"cpu"``. If gloo is the only backend, the result is ``"cpu"``,
        although gloo accepts CUDA tensors.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type if accelerator.type in _backends() else "cpu"


def comparison_device_type() -> str:
    """Return the device type of the tensors with which ranks compare their arguments.

    The device type from the user is not used, because it may differ between ranks.

    Returns:
        ``"cpu"`` if the default group has a gloo backend: the comparison then needs no accelerator
        and creates no NCCL communicator. Else `default_device_type`.
    """
    return "cpu" if "gloo" in dist.get_backend_config() else default_device_type()


def checked_device_type(device_type: object) -> str:
    """Check the device type from the user.

    Args:
        device_type: A device type, or None for `default_device_type`. ``"meta"`` is valid without a
            backend, because meta tensors have no data.

    Returns:
        ``device_type``, or `default_device_type` if ``device_type`` is None. It is a string without
        an index, such as ``"cuda"``.

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
