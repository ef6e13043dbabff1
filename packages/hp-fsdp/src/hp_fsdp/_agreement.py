"""Whether all ranks are about to do the same: compared where a unit does something first."""

import hashlib
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hp_dtensor import Axis, TorchCollectives

from ._errors import DisagreementError

if TYPE_CHECKING:
    from ._unit import Unit


class Act(Enum):
    """What a unit communicates for."""

    FORWARD = "gather {} for forward"
    BACKWARD = "gather {} for backward"
    REDUCTION = "reduce the gradients of {}"


ACTS = tuple(Act)
Said = tuple[int, int, int, int]  # rank, act, unit, digest of what the unit has


class Agreement:
    """What the ranks of a unit's axes have agreed on.

    Each act of each unit is compared once, before it communicates for the first time: one
    all-gather of 32 bytes over each axis. So ranks that come to their units in different orders
    learn of it before wrong parameters are gathered, or a rank waits for one that never comes. The
    collectives that a user passes do not see this.
    """

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._agreed: set[Act] = set()

    def before(self, act: Act) -> None:
        """Compare what this rank does next, unless that was done before.

        Raises `DisagreementError` on every rank of the axes if it is not the same on all of them.
        """
        schedule, groups = self._unit.schedule, self._unit.groups
        if act in self._agreed or schedule is None or not groups:
            return
        if act is Act.REDUCTION and not any(group.reduced() for group in groups):
            return  # nothing is reduced
        data = max((group.axes for group in groups), key=lambda axes: axes.shard.size)
        axes = [data.shard]
        if act is Act.REDUCTION and self._unit.options.all_reduce:
            axes += data.replicate
        axes = [a for a in axes if a.size > 1 and isinstance(a.group, dist.ProcessGroup)]
        if axes:
            own = schedule.units.index(self._unit)
            device = groups[0].storage.device
            said = _exchange(axes, (ACTS.index(act), own, self._digest(act)), device)
            if len({each[1:] for each in said}) > 1:
                raise DisagreementError(_complaint(said, schedule.paths()))
        self._agreed.add(act)

    def _digest(self, act: Act) -> int:
        facts = [
            (p.name, tuple(p.shape), p.dim, act is not Act.REDUCTION or i in reduced)
            for group in self._unit.groups
            for reduced in [set(group.reduced())]
            for i, p in enumerate(group.parameters)
        ]
        layouts = [
            (group.layout.plan.shard_numel, str(group.dtypes), str(group.layout.shard.dtype))
            for group in self._unit.groups
        ]
        found = hashlib.blake2b(repr((facts, layouts)).encode(), digest_size=8)
        return int.from_bytes(found.digest(), "big", signed=True)


def _exchange(axes: Sequence[Axis], own: tuple[int, int, int], device: torch.device) -> list[Said]:
    """Return what all ranks of the axes say, the same on each of them."""
    rank = axes[0].ranks[axes[0].index]
    table = torch.tensor([rank, *own], dtype=torch.int64, device=device)
    for axis in axes:
        (table,) = TorchCollectives().all_gather(axis, [table]).wait()
    return sorted(tuple(row) for row in table.view(-1, 4).tolist())


def _complaint(said: Iterable[Said], paths: Sequence[str]) -> str:
    alike: dict[tuple[int, int, int], list[int]] = {}
    for rank, act, unit, digest in said:
        alike.setdefault((act, unit, digest), []).append(rank)
    lines = [
        (f"rank {ranks[0]} is to " if len(ranks) == 1 else f"ranks {ranks} are to ")
        + ACTS[act].value.format(paths[unit] if unit < len(paths) else f"unit {unit}")
        for (act, unit, _), ranks in alike.items()
    ]
    what = "all ranks must run the same units in the same order"
    if len({(act, unit) for act, unit, _ in alike}) == 1:
        what = "its parameters there differ in names, shapes, dtypes or in what trains"
    return f"{', '.join(lines)}; {what}"
