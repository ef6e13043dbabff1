"""Which process groups a rank needs, each set of ranks once; their device and their creation."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TypeAlias

import torch
import torch.distributed as dist

from ._errors import MeshError, join_words
from ._layout import RankLayout
from ._torch import (
    count_from,
    free_count,
    is_registered,
    meet_under,
    named_groups,
    registered_groups,
    skip_names,
    splits_world,
)

PREFIX = "parallel_mesh"  # in the world's store


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
    layout: RankLayout,
    timeout: timedelta | None,
    consistency: "Consistency",
    created: list[dist.ProcessGroup],
) -> dict[str, dist.ProcessGroup]:
    """Create this rank's groups and return the group of each axis; new ones go to ``created``.

    Collective over the world: every rank creates them in one order. If one cannot be created, its
    error has a note that names it, and those before it are in ``created``.
    """
    world = _world()
    create = _choose_creation(world, consistency)
    by_axis: dict[str, dist.ProcessGroup] = {}
    with meet_under(f"{PREFIX}/{consistency.serial}", world), count_from(consistency.count):
        for own in own_groups(layout, world.rank()):
            group = world
            if own.ranks:
                try:
                    group = create(layout, own, timeout, created)
                except Exception as error:
                    axes, ranks = ", ".join(own.axes), list(own.ranks)
                    error.add_note(f"while creating the process group of {axes} over ranks {ranks}")
                    raise
            by_axis |= dict.fromkeys(own.axes, group)
    return by_axis


@contextmanager
def all_or_none(created: list[dist.ProcessGroup]) -> Iterator[None]:
    """Destroy the groups that are in ``created`` after the block if it failed, here or elsewhere.

    Collective over the world: in one all-reduce after the block each rank says whether it failed.
    A rank that did raises its own error, with a note of the rank that failed first, which it may
    have waited for; all others raise `MeshError`. A rank that is interrupted (by
    ``KeyboardInterrupt`` and the like) leaves at once and tells nobody.
    """
    start = time.monotonic()
    with ExitStack() as undo:
        undo.callback(destroy_groups, created)
        try:
            yield
        except Exception as error:
            after = time.monotonic() - start
            with suppress(RuntimeError, MeshError):  # the others, or the world, may be gone
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
        undo.pop_all()


def destroy_groups(created: list[dist.ProcessGroup]) -> None:
    """Destroy the groups in a list, the last first, and empty it.

    Those that are gone already, alone or with the default one, are left alone.
    """
    while created:
        group = created.pop()
        if is_registered(group):
            dist.destroy_process_group(group)


def check_consistency(fields: Mapping[str, object], layout: RankLayout) -> "Consistency":
    """Compare over the world, in one all-reduce, what ranks are about to build.

    A second one follows where a rank cannot take the names that torch gives to its next groups.
    Raises `MeshError` on all ranks unless the fields, which have the same names in the same order
    on all of them, have the same values.
    """
    return _compare(_world(), fields, layout)


def tell_refusal() -> None:
    """Take part in the comparison of `check_consistency` as a rank that creates no groups.

    All others would wait for this rank otherwise; those that could create groups raise instead.
    """
    with suppress(MeshError):  # this rank raises its own error
        _compare(_world())


def _world() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Consistency:
    """What ranks know of each other before they create groups.

    ``equally_many`` is whether each is in as many groups as the others, ``count`` from where names
    of new groups are counted, ``serial`` a number that no other build over the same store has.
    """

    equally_many: bool
    count: int
    serial: int


MOST_FIELDS = 32  # that are compared; ranks that compare none send as many numbers
LATEST = 2**62  # milliseconds times ranks, longer than any build


def _compare(
    world: dist.ProcessGroup,
    fields: Mapping[str, object] | None = None,
    layout: RankLayout | None = None,
) -> Consistency:
    """Return what ranks agree on, and raise where they do not; a rank without fields refuses."""
    fields = fields or {}
    own = [] if layout is None else [o.ranks for o in own_groups(layout, world.rank()) if o.ranks]
    # Fake groups have no peers: nothing to agree on, no device and no store behind them.
    if dist.get_backend(world) == "fake":
        return Consistency(equally_many=True, count=free_count(own), serial=0)
    # A build that fails half way leaves addresses behind too, so every attempt has its own number.
    serial = world.get_group_store().add(PREFIX, 1) if world.rank() == 0 else 0
    # The smallest rank that refuses has the largest of these; none refuses where all are 0.
    refusal = 0 if fields else world.size() - world.rank()
    digests = [_digest(name, value) for name, value in fields.items()]
    digests += [0] * (MOST_FIELDS - len(digests))
    compared = [registered_groups(), free_count(own), *digests]
    before_end, serial, *ends = _most(world, [refusal, serial, *_both_ends(compared)])
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
    while most != -least:  # what is free on one rank may be taken on another
        most, least = _most(world, _both_ends([free_count(own, most)]))
    return Consistency(equally_many=same[0], count=most, serial=serial)


def _digest(name: str, value: object) -> int:
    return int.from_bytes(sha256(f"{name}={value!r}".encode()).digest()[:7], "big")


def _both_ends(numbers: Sequence[int]) -> list[int]:
    """Return each number and its negative, whose largest over the ranks say whether all equal."""
    return [end for number in numbers for end in (number, -number)]


def _most(world: dist.ProcessGroup, numbers: Sequence[int]) -> list[int]:
    """Return the largest of each number over the ranks, in one all-reduce."""
    most = torch.tensor(numbers, dtype=torch.int64, device=comparison_device_type())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world)
    return [int(number) for number in most.tolist()]


def _first_failed_rank(after: float | None) -> int | None:
    """Return the rank that failed after the fewest seconds, None where none did.

    An all-reduce over the world; ``after`` is None on a rank that did not fail.
    """
    world = _world()
    if dist.get_backend(world) == "fake":
        return None
    # The first rank that failed has the largest of these; none failed where all are 0.
    late = 0 if after is None else round(1000 * after) * world.size() + world.rank()
    first, names = _most(world, [0 if after is None else LATEST - late, named_groups()])
    if first == 0:
        return None
    # Ranks may have stopped at different groups: the next that all create has one name again.
    skip_names(names)
    return (LATEST - first) % world.size()


def _choose_creation(world: dist.ProcessGroup, consistency: Consistency) -> "Creation":
    if splits_world(world):
        return _split
    # Members that count their groups differently would meet under different names.
    return _create_locally if consistency.equally_many else _create_together


def _create_locally(
    layout: RankLayout,
    own: OwnGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """Only members take part: a rank makes a dozen calls, not one for each group of the world."""
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
    own: OwnGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """All ranks make all groups of an axis, as torch does when nothing else is asked for."""
    mine: dist.ProcessGroup | None = None
    for ranks in layout.groups(own.axes[0]):
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=",".join(own.axes))
        if ranks == own.ranks:
            mine = group
            created.append(mine)
    return _member(mine)


def _split(
    layout: RankLayout,
    own: OwnGroup,
    timeout: timedelta | None,
    created: list[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """All ranks split the world's communicator into the groups of an axis, in one call.

    Where NCCL was initialised eagerly every new group comes from ``ncclCommSplit``, a collective
    of the whole world: creating it locally would wait for ranks that never call.
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
    [RankLayout, OwnGroup, timedelta | None, list[dist.ProcessGroup]], dist.ProcessGroup
]


def default_device_type() -> str:
    """Return the accelerator's type if this world has a backend for it, else the CPU's.

    A world that runs on gloo alone is on the CPU too.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type if accelerator.type in _backends() else "cpu"


def comparison_device_type() -> str:
    """Return where a tensor of the default group's own collectives may lie.

    Where gloo is at hand that is the CPU: no device is needed, and no communicator starts early.
    It does not depend on what a caller wants, which may differ between ranks.
    """
    return "cpu" if "gloo" in dist.get_backend_config() else default_device_type()


def checked_device_type(device_type: object) -> str:
    """Return a device type that this world has a backend for as it is, and the default for None.

    ``"meta"``, which has no data to communicate, needs no backend. Raises `MeshError` for anything
    else, a device with an index included.
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
    """Return the device types that the default group has a backend for."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]


def _refused(device_type: object, reason: str) -> MeshError:
    legal = join_words(sorted(map(repr, _backends())))
    return MeshError(
        f"device_type={device_type!r} {reason}; this world has backends for {legal}, "
        "and None takes the default"
    )
