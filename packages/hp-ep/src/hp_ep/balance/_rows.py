"""The rows of tensors that have one per slot, and how they get to other ranks."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, Collectives

from .._errors import ExpertConfigError
from ._migration import Migration, plan_migration
from ._placement import Placement
from ._replicas import ReplicaSum


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
    if tensor.shape[0] != num_rows or cuts != [Shard(0)]:
        raise ExpertConfigError(
            f"{what} has shape {tuple(tensor.shape)} and placements {tensor.placements}; experts "
            f"move as whole rows, here {num_rows}, so only {axis.name} may cut dimension 0"
        )
    return tensor.to_local()


def check_same_placement(
    placement: object, axes: Iterable[Axis], device: torch.device, collectives: Collectives
) -> None:
    """Raise an `ExpertConfigError` on all ranks of ``axes`` unless all give one ``placement``.

    What is no `Placement` differs from any, and is otherwise the caller's to refuse.
    All-gathers 16 bytes for each rank over each of the axes, and reads what came on the host.
    """
    text = type(placement).__name__
    if isinstance(placement, Placement):
        text = repr((placement.num_ranks, placement.num_experts, placement.experts))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    over = [axis for axis in axes if axis.size > 1]
    if not over:
        return
    told = torch.tensor([[over[0].ranks[over[0].index], digest]], dtype=torch.int64, device=device)
    for axis in over:
        (told,) = collectives.all_gather(axis, [told]).wait()
        told = told.reshape(-1, 2)
    ranks_of: dict[int, list[int]] = {}
    for rank, given in sorted(told.tolist()):
        ranks_of.setdefault(given, []).append(rank)
    if len(ranks_of) > 1:
        groups = "; ".join(map(str, ranks_of.values()))
        raise ExpertConfigError(
            f"{len(ranks_of)} placements were given, each by the ranks in one of these lists: "
            f"{groups}; all ranks must give the same, or experts are taken for others: plan it "
            "from loads of all ranks, as collect_loads returns them, or broadcast it"
        )


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
