"""The rows of tensors that have one per slot, and how they get to other ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, Collectives

from .._errors import ExpertConfigError
from ._migration import Migration


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
        if not isinstance(p, Replicate) and not (isinstance(p, Shard) and p.dim != 0)
    ]
    if tensor.shape[0] != num_rows or cuts != [Shard(0)]:
        raise ExpertConfigError(
            f"{what} has shape {tuple(tensor.shape)} and placements {tensor.placements}; experts "
            f"move as whole rows, here {num_rows}, so only {axis.name} may cut dimension 0"
        )
    return tensor.to_local()


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
