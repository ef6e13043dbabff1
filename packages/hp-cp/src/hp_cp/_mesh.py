"""Whom a rank communicates with: its Ulysses neighbours, and the ranks of its schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_dtensor import Axis, AxisMesh, Collectives, Work
from hp_dtensor.torch_compat import keep_eager

from ._errors import InputError, described
from ._plan import check_degree
from ._torch import has_values

# Groups that made their first call. A group itself does not say so; it is not kept alive here.
_CONNECTED: WeakSet[object] = WeakSet()

# Local lengths that all ranks of a group were found to hold, the latest of them; see
# `check_equal_lengths`. Groups are not kept alive here.
_EQUAL: WeakKeyDictionary[object, dict[tuple[int, ...], None]] = WeakKeyDictionary()
_EQUAL_KEPT = 64

# The axes of a mesh, which takes long to list; meshes and groups are not kept alive here.
_AXES: WeakKeyDictionary[AxisMesh, tuple[tuple[str, tuple[int, ...], ref[Any]], ...]]
_AXES = WeakKeyDictionary()

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients, which travel together


@dataclass(frozen=True, slots=True)
class Peers:
    """Coordinates on an axis in ascending order, counted from 0 as the ranks of a schedule.

    Where they are not the whole axis, every rank of the axis makes the same calls among its own
    peers, and collectives have splits of zero for the others: no group is created.
    """

    axis: Axis
    members: tuple[int, ...]
    index: int  # this rank's place among them
    collectives: Collectives

    @staticmethod
    def on(axis: Axis, collectives: Collectives) -> "Peers":
        """Return all ranks of an axis."""
        return Peers(axis, tuple(range(axis.size)), axis.index, collectives)

    @property
    def size(self) -> int:
        """Return how many there are, this rank among them."""
        return len(self.members)

    @property
    def whole(self) -> bool:
        """Return whether they are all ranks of the axis."""
        return len(self.members) == self.axis.size

    def connect(self, device: torch.device) -> None:
        """Let all ranks of the axis join its first batch of sends, once for each group.

        NCCL makes a group's communicator in its first call, for which a batch waits until every
        rank has joined (see ``torch.distributed.batch_isend_irecv``), but a rank with nothing to
        move joins none. So each sends one element to the next. Every rank calls this where all
        do, before it calls anything else; a CPU's groups are connected when they are made.
        """
        if self.size == 1 or device.type == "cpu" or self.axis.group in _CONNECTED:
            return
        here, n = self.axis.index, self.axis.size
        sends, receives = (torch.zeros(1, device=device) for _ in range(2))
        self.collectives.send_recv(
            self.axis, {(here + 1) % n: sends}, {(here - 1) % n: receives}
        ).wait()
        _CONNECTED.add(self.axis.group)

    def all_gather(self, parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """Concatenate equal parts of the whole axis into ``outputs``."""
        return self.collectives.all_gather(self.axis, parts, outputs)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> Work:
        """Send and receive point to point; see `Collectives.send_recv`."""
        if not self.whole:
            sends, receives = self._placed(sends), self._placed(receives)
        return self.collectives.send_recv(self.axis, sends, receives)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Work:
        """Start sending row block ``i`` of ``x`` to peer ``i``; the output is in peer order."""
        return self.collectives.all_to_all(
            self.axis, x, self._widened(send), self._widened(receive)
        )

    def _placed(self, tensors: Mapping[int, Sequence[Tensor]]) -> Mapping[int, Sequence[Tensor]]:
        return {self.members[peer]: tensor for peer, tensor in tensors.items()}

    def _widened(self, splits: Sequence[int]) -> Sequence[int]:
        if self.whole:
            return splits
        wide = [0] * self.axis.size
        for member, rows in zip(self.members, splits, strict=True):
            wide[member] = rows
        return wide


class RankGroups(NamedTuple):
    """Rank ``rank`` of ``n``: the Ulysses group exchanges heads, the ring group runs the schedule.

    Fang and Zhao, arXiv 2405.07719, section 3.
    """

    n: int
    rank: int
    ulysses: Peers
    ring: Peers

    @property
    def axes(self) -> list[Axis]:
        """Return the axes of the mesh, the last one first."""
        ulysses, ring = self.ulysses.axis, self.ring.axis
        return [ulysses] if ulysses is ring else [ulysses, ring]


def check_mesh(mesh: object) -> None:
    """Raise `InputError` for what is no mesh."""
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_local_rank")):
        raise InputError(
            f"mesh must be a DeviceMesh, got {described(mesh)}; make one with init_device_mesh "
            f"and pass its axis, as mesh['cp']"
        )


def axes_of(mesh: AxisMesh) -> list[Axis]:
    """Return the one or two axes of a context parallel mesh, the outer one first.

    Raises `InputError` for what is no mesh, and for one of more axes.
    """
    check_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise InputError(
            f"context parallelism runs over a mesh of one axis, or of two, (outer, ulysses), got "
            f"axes {list(mesh.mesh_dim_names or range(mesh.ndim))}; pass one axis, as mesh['cp']"
        )
    axes: list[Axis] = []
    try:
        known = _AXES.get(mesh, ())
    except TypeError:  # a mesh without a hash, or of which nobody can tell when it is gone
        return [Axis.of(mesh, position) for position in range(mesh.ndim)]
    for position, (name, ranks, seen) in enumerate(known):
        group: Any = mesh.get_group(position)
        known_group = group is seen()
        if not known_group and isinstance(group, ProcessGroup):
            break  # another one since, or that of an equal mesh
        axes.append(Axis(name, group, ranks))
    if len(axes) != mesh.ndim:
        axes = [Axis.of(mesh, position) for position in range(mesh.ndim)]
        _AXES[mesh] = tuple((axis.name, axis.ranks, ref(axis.group)) for axis in axes)
    return axes


def place_of(mesh: AxisMesh) -> tuple[int, int]:
    """Return the number of ranks that share a sequence, and this rank's place among them."""
    return _place_on(axes_of(mesh))


def _place_on(axes: Sequence[Axis]) -> tuple[int, int]:
    n, place = 1, 0
    for axis in axes:
        size = axis.size
        n, place = n * size, place * size + axis.index
    return n, place


def device_of(mesh: AxisMesh) -> torch.device:
    """Return the kind of device that a mesh is of; a CPU where it does not say."""
    return torch.device(getattr(mesh, "device_type", "cpu"))


def list_ranks(mesh: AxisMesh) -> list[int]:
    """Return the global ranks that a sequence is sharded over, in its order."""
    *outer, inner = axes_of(mesh)
    rows = mesh.mesh.tolist()
    return [rank for row in rows for rank in row] if outer else list(inner.ranks)


def default_degree(mesh: AxisMesh) -> int:
    """Return the size of the last axis: all ranks of one, the Ulysses ranks of two."""
    return axes_of(mesh)[-1].size


def rank_groups_of(mesh: AxisMesh, ulysses_degree: int, collectives: Collectives) -> RankGroups:
    """Return the Ulysses group and the ring group of this rank.

    Neighbouring ranks exchange heads: on a mesh of two axes those of the last one, on one axis each
    ``ulysses_degree`` in turn. Raises `InputError` for a mesh or a degree that does not fit.
    """
    axes = axes_of(mesh)
    n, rank = _place_on(axes)
    if len(axes) == 2:
        outer, inner = axes
        if ulysses_degree != inner.size:
            raise InputError(
                f"ulysses_degree={ulysses_degree} on a mesh of {outer.name} ({outer.size} ranks) "
                f"and {inner.name} ({inner.size}), whose last axis exchanges heads; use "
                f"ulysses_degree={inner.size}, or a mesh of one axis"
            )
        return RankGroups(
            n=n,
            rank=rank,
            ulysses=Peers.on(inner, collectives),
            ring=Peers.on(outer, collectives),
        )
    check_degree(ulysses_degree, n)
    (axis,) = axes
    group, place = divmod(rank, ulysses_degree)
    first = group * ulysses_degree
    ulysses = tuple(range(first, first + ulysses_degree))
    ring = tuple(range(place, n, ulysses_degree))
    return RankGroups(
        n=n,
        rank=rank,
        ulysses=Peers(axis, ulysses, place, collectives),
        ring=Peers(axis, ring, group, collectives),
    )


@keep_eager  # what it does depends on what it did before
def check_equal_lengths(
    axes: Sequence[Axis],
    lengths: tuple[int, ...],
    device: torch.device,
    collectives: Collectives,
) -> None:
    """Raise `InputError` on every rank unless all ranks of ``axes`` hold the same local lengths.

    For calls that infer the whole length from the local one. All-reduces the extremes over each
    axis, unless these lengths were found to be equal over its group before.

    Whether a rank communicates here follows from its own lengths and from what its group found
    before. The latter is the same on all ranks of a group: it changes only after a comparison that
    all of them joined and that found one value on all of them, and by that value. So ranks with
    equal lengths all compare or all do not, and a correct program never has one rank wait here for
    another. Where lengths differ there are three cases. None of them was found before: all ranks
    compare and raise. Some were: their ranks go on to what follows, and the others wait here in
    vain. All were: no rank compares. In the last two cases the call would fail without this check
    too, as each rank takes another length for the whole. No check without communication in each
    call could see them, since nothing that a rank with a known length has tells it that another's
    changed; `CheckedCollectives` of hp-dtensor, which communicates in each call, does.
    """
    new = [axis for axis in axes if axis.size > 1 and lengths not in _EQUAL.get(axis.group, ())]
    if not new:
        return
    extremes = torch.tensor([*lengths, *(-length for length in lengths)], device=device)
    if not has_values(extremes):
        return
    for axis in new:
        collectives.all_reduce(axis, [extremes], "max").wait()
    found = extremes.tolist()
    most, least = found[: len(lengths)], [-length for length in found[len(lengths) :]]
    if most != least:
        unequal = [f"{low} to {high}" for low, high in zip(least, most, strict=True) if low < high]
        raise InputError(
            f"ranks hold unequal local lengths, {', '.join(unequal)}, from which the length of the "
            f"whole sequence cannot be told; give seq_len, or a mask with cu_seqlens"
        )
    for axis in new:
        equal = _EQUAL.setdefault(axis.group, {})
        equal[lengths] = None
        if len(equal) > _EQUAL_KEPT:
            del equal[next(iter(equal))]  # the oldest, on every rank: known ones leave no trace
