"""What experts with a placement have below the layer: one gradient for replicas, rows that move."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, Collectives, TorchCollectives

from .._errors import ExpertConfigError
from .._torch import first_order, run_several
from ._plan import Migration, Placement, plan_migration


class ReplicaSum:
    """Sums the gradients of an expert's replicas, in the order of their ranks: all get one value.

    Backward makes one all-to-all over ``axis`` where the placement has replicas; each holder sends
    its gradient to each other one. Experts with a single slot are left alone.
    """

    def __init__(
        self,
        axis: Axis,
        placement: Placement,
        collectives: Collectives | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.axis = axis
        self.placement = placement
        self.collectives: Collectives = TorchCollectives() if collectives is None else collectives
        holders = [
            {slot // placement.slots_per_rank for slot in slots} for slots in placement.slots_of
        ]
        here = placement.on_rank(axis.index)
        self.repeated = tuple(slot for slots in placement.slots_of for slot in slots[1:])
        self.exist = any(len(h) > 1 for h in holders)
        # What is sent to a rank and what comes from it: the experts that both hold, in one order.
        self._shared = [
            sorted(e for e in here if rank != axis.index and rank in holders[e])
            for rank in range(axis.size)
        ]
        self._slot = {e: slot for slot, e in enumerate(here)}
        sent = [self._slot[e] for shared in self._shared for e in shared]
        self._order = torch.tensor(sent, dtype=torch.int64, device="cpu")
        # On the device from the start: backward must not wait for a copy.
        self._sent = self._order.to(device)

    def moved_to(self, placement: Placement) -> "ReplicaSum":
        """Return the same for another placement on the same ranks."""
        return ReplicaSum(self.axis, placement, self.collectives, device=self._sent.device)

    def share(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``weights``, each ``[slots here, ...]``, whose gradients will be those of all.

        Frozen ones come as they are, and nothing of them is sent.
        """
        trained = [w for w in weights if w.requires_grad]
        if not (self.exist and trained):
            return weights
        device = trained[0].device
        if self._sent.device != device:  # the layer got its memory elsewhere
            self._sent = self._order.to(device)
        shared = iter(run_several(_Share, self, *trained))
        return tuple(next(shared) if w.requires_grad else w for w in weights)

    def add(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients ``[slots here, ...]``, those of replicas summed."""
        sent = torch.cat([g.index_select(0, self._sent).flatten(1) for g in grads], 1)
        splits = [len(shared) for shared in self._shared]
        (received,) = self.collectives.all_to_all(self.axis, sent, splits, splits).wait()
        parts: dict[int, list[Tensor]] = {}
        row = 0
        for rank, shared in enumerate(self._shared):
            if rank == self.axis.index:
                for expert in {e for held in self._shared for e in held}:
                    own = [g[self._slot[expert]].flatten() for g in grads]
                    parts.setdefault(expert, []).append(torch.cat(own))
            for expert in shared:
                parts.setdefault(expert, []).append(received[row])
                row += 1
        totals = [g.clone() for g in grads]  # a gradient may be another's memory
        for expert, several in parts.items():
            pieces = torch.stack(several).sum(0).split([g[0].numel() for g in grads])
            for total, piece in zip(totals, pieces, strict=True):
                place = total[self._slot[expert]]
                place.copy_(piece.view(place.shape))
        return totals


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: ReplicaSum, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.replicas.add(list(grads))


def rows_here(what: str, tensor: Tensor, num_rows: int, axis: Axis) -> Tensor:
    """Return this rank's rows of ``tensor [num_rows, ...]``, of which each rank has a whole block.

    Communicates nothing. `ExpertConfigError`, which says ``what`` it is, for another number of rows
    and where another axis than ``axis`` cuts them.
    """
    if not isinstance(tensor, DTensor):
        raise ExpertConfigError(f"{what} is no DTensor; move experts that a style has spread")
    cuts = [
        p
        for p in tensor.placements
        if not isinstance(p, Replicate) and getattr(p, "dim", 0) == 0  # partial ones have none
    ]
    over = [
        Axis.of(tensor.device_mesh, i).ranks
        for i, placement in enumerate(tensor.placements)
        if placement == Shard(0)
    ]
    if tensor.shape[0] != num_rows or cuts != [Shard(0)] or over != [axis.ranks]:
        raise ExpertConfigError(
            f"{what} has shape {tuple(tensor.shape)} and placements {tensor.placements}; experts "
            f"move as whole rows, here {num_rows}, so only {axis.name} of "
            f"{tensor.device_mesh.mesh_dim_names} may cut dimension 0"
        )
    return tensor.to_local()


def check_same_placement(
    placement: object,
    axes: Iterable[Axis],
    device: torch.device,
    collectives: Collectives,
    tensors: str = "",
) -> None:
    """Raise an `ExpertConfigError` on all ranks of ``axes`` unless all give one ``placement``.

    And the same ``tensors``, a description of those that are to move. What is no `Placement`
    differs from any, and is otherwise the caller's to refuse. All-gathers 24 bytes for each rank
    over each of the axes, and reads what came on the host.
    """
    text = type(placement).__name__
    if isinstance(placement, Placement):
        text = repr((placement.num_ranks, placement.num_experts, placement.experts))
    digests = [
        int.from_bytes(hashlib.blake2b(each.encode(), digest_size=7).digest())
        for each in (text, tensors)
    ]
    over = [axis for axis in axes if axis.size > 1]
    if not over:
        return
    mine = [over[0].ranks[over[0].index], *digests]
    told = torch.tensor([mine], dtype=torch.int64, device=device)
    for axis in over:
        (told,) = collectives.all_gather(axis, [told]).wait()
        told = told.reshape(-1, 3)
    every = sorted(told.tolist())
    groups = _groups([(rank, placed) for rank, placed, _ in every])
    if len(groups) > 1:
        raise ExpertConfigError(
            f"{len(groups)} placements were given, each by the ranks in one of these lists: "
            f"{'; '.join(map(str, groups))}; all ranks must give the same, or experts are taken "
            "for others: plan it from loads of all ranks, as collect_loads returns them, or "
            "broadcast it"
        )
    groups = _groups([(rank, moved) for rank, _, moved in every])
    if len(groups) > 1:
        raise ExpertConfigError(
            f"other tensors would move on the ranks in each of these lists: "
            f"{'; '.join(map(str, groups))}; all ranks must have a gradient of the same parameters "
            "and give an optimizer with the same state"
        )


def _groups(numbers: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the ranks with each number."""
    found: dict[int, list[int]] = {}
    for rank, number in numbers:
        found.setdefault(number, []).append(rank)
    return list(found.values())


def exchange_rows(
    local: Tensor, migration: Migration, axis: Axis, collectives: Collectives
) -> Tensor:
    """Return this rank's rows of the new placement ``[new slots here, ...]``.

    One all-to-all over ``axis``, of the rows that change rank.
    """
    rows = local.flatten(1)
    sent, received = migration.sent(axis.index), migration.received(axis.index)
    leaving = rows[[slot for part in sent for slot in part]]
    work = collectives.all_to_all(axis, leaving, list(map(len, sent)), list(map(len, received)))
    new = rows.new_empty(migration.new.slots_per_rank, rows.shape[1])
    for slot, source in migration.kept(axis.index):
        new[slot] = rows[source]
    (arrived,) = work.wait()
    new[[slot for part in received for slot in part]] = arrived
    return new.view(-1, *local.shape[1:])


def own_order(layer: str, placed: Placement) -> Placement:
    """Return the placement that has the experts of ``placed`` in their own order, each once."""
    if placed.num_experts % placed.num_ranks:
        raise ExpertConfigError(
            f"{layer or 'experts'}: {placed.num_ranks} ranks do not divide {placed.num_experts} "
            "experts, so they have no order without replicas; save and load them as they are placed"
        )
    return Placement.contiguous(placed.num_experts, placed.num_ranks)


def move_rows(value: DTensor, migration: Migration, replicas: ReplicaSum) -> DTensor:
    """Return ``value [old slots, ...]`` with a row for each slot of the new placement."""
    local = exchange_rows(value.to_local(), migration, replicas.axis, replicas.collectives)
    shape = torch.Size((len(migration.new.experts), *value.shape[1:]))
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


@torch.no_grad()
def place_rows(given: Mapping[str, Tensor], replicas: ReplicaSum) -> dict[str, Tensor]:
    """Return tensors ``[experts, ...]`` in the experts' own order with a row for each slot.

    One all-to-all over the experts' axis for each DTensor, none for whole tensors.
    `ExpertConfigError`, before that, for another number of rows, and where another axis than that
    of the experts cuts them.
    """
    placed = replicas.placement
    for name, value in given.items():
        if isinstance(value, DTensor):
            rows_here(name, value, placed.num_experts, replicas.axis)
        elif value.shape[:1] != (placed.num_experts,):
            raise ExpertConfigError(
                f"{name} has shape {tuple(value.shape)} and no order of its rows beside it; those "
                f"of {placed.num_experts} experts in their own order have as many rows"
            )
    if not any(isinstance(value, DTensor) for value in given.values()):
        return {name: value[list(placed.experts)] for name, value in given.items()}
    migration = plan_migration(own_order("", placed), placed)
    return {
        name: move_rows(value, migration, replicas)
        if isinstance(value, DTensor)
        else value[list(placed.experts)]
        for name, value in given.items()
    }
