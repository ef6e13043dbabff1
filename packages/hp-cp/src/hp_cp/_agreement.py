"""Checks that ranks which share a sequence were set up alike.

All of them must be given the same batch, and parameters must be sharded over all of them. Without
these checks a mistake would give wrong gradients and no error.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_dtensor import AxisMesh, Collectives, RaggedTensor

from ._errors import InputError
from ._mesh import axes_of, list_ranks
from ._torch import has_values

_HASH_FACTOR = -0x61C8864680B583EB  # 2**64 over the golden ratio, as an int64
_MIX_FACTOR = 0x2545F4914F6CDD1D

UnitRanks = dict[str, frozenset[frozenset[int]]]


class BatchHash(NamedTuple):
    """Hashes of a whole batch and of this rank's position ids, int64.

    ``batch``: of shape ``[]``. ``positions``: ``[rows]``, one hash per row of ``position_ids``;
    None unless these are ``[rows, sequence]``.
    """

    batch: Tensor
    positions: Tensor | None


def hash_rows(*tensors: Tensor) -> Tensor:
    """Return one int64 hash for each row of integer tensors, reducing their last dim.

    The tensors have the same shape and are first combined element by element. The hash is the sum
    of the values times a pseudo-random weight per position, modulo 2**64. The host does not wait
    for the device.
    """
    first, *rest = (x.to(torch.int64) for x in tensors)
    for x in rest:
        first = first * _HASH_FACTOR + x
    weights = torch.arange(1, first.shape[-1] + 1, device=first.device).mul_(_HASH_FACTOR)
    return (first * weights.bitwise_xor_(weights >> 31).mul_(_MIX_FACTOR)).sum(-1)


def hash_batch(tensors: Iterable[Tensor], others: int, positions: Tensor) -> BatchHash:
    """Return the hashes of a batch and of its position ids.

    The batch's hash covers the integer tensors and ``others``, an int64 hash of all values that are
    no tensors. Floating-point tensors are skipped, because ranks may round them differently.
    """
    total = torch.full((), others, dtype=torch.int64, device=positions.device)
    alike: dict[object, list[Tensor]] = {}  # by shape, so that weights are made once
    for x in tensors:
        if not (x.is_floating_point() or x.is_complex()):
            alike.setdefault((x.shape, x.device), []).append(x.reshape(-1))
    for same in alike.values():
        total = total * _HASH_FACTOR + hash_rows(*same).to(total.device)
    return BatchHash(total, hash_rows(positions) if positions.ndim == 2 else None)


def find_moved(made: BatchHash, given: object) -> Tensor | None:
    """Return whether position ids were replaced: a row of ``given`` has no hash in ``made``.

    ``made`` holds the hashes of the position ids that `shard_batch` returned. The result is a bool
    tensor of shape ``[]``, or None if either is not ``[rows, sequence]``.
    """
    if made.positions is None or not isinstance(given, Tensor) or given.ndim != 2:
        return None
    found = hash_rows(given)[:, None] == made.positions.to(given.device)
    return ~found.any(1).all()


def check_same_batch(
    mesh: AxisMesh,
    collectives: Collectives,
    shape: tuple[int, int],
    batch: Tensor,
    *,
    moved: Tensor | None,
    misplaced: bool,
    device: torch.device,
) -> None:
    """Raise `InputError` on every rank unless all ranks of ``mesh`` were given the same batch.

    One all-reduce over each axis of the mesh.

    Args:
        mesh: The ranks that share a sequence.
        collectives: The collectives of the model.
        shape: Number of rows and tokens of the whole batch.
        batch: Hash of the whole batch.
        moved: Whether position ids were replaced, from `find_moved`.
        misplaced: Whether this rank holds the rows of another rank.
        device: Device of the model's activations.
    """
    own = torch.tensor([*shape, int(misplaced), 0], device=device)
    if not (has_values(own) and has_values(batch)):
        return
    own[3] = batch
    flag = own.new_zeros(1) if moved is None else moved.to(own)[None]
    own = torch.cat([own, flag])
    extremes = torch.cat([own, ~own])  # the negative of the least int64 is itself
    for axis in axes_of(mesh)[::-1]:
        if axis.size > 1:
            collectives.all_reduce(axis, [extremes], "max").wait()
    found = extremes.tolist()
    most, least = found[:5], [~x for x in found[5:]]
    if most[2]:
        raise InputError(
            "shard_batch was given another mesh than context_parallel, so that a rank holds the "
            "rows of another one; give both the same mesh, as mesh['cp']"
        )
    remedy = (
        "give all ranks of the context parallel mesh the same whole batch, as by "
        "DistributedSampler(num_replicas=mesh['batch'].size(), "
        "rank=mesh['batch'].get_local_rank()) of hp-mesh, not one of all ranks"
    )
    for name, low, high in zip(("rows", "tokens"), least, most, strict=False):
        if low != high:
            raise InputError(
                f"ranks that share a sequence were given batches of {low} to {high} {name}; "
                f"{remedy}"
            )
    if most[3] != least[3]:
        raise InputError(
            f"ranks that share a sequence were given different batches of {shape[0]} rows and "
            f"{shape[1]} tokens: their input_ids, labels, position_ids, documents or dropout_seed "
            f"differ; {remedy}"
        )
    if most[4]:
        raise InputError(
            "position_ids are not those that shard_batch returned, on this rank or another one of "
            "the same sequence: ids of a rank's own rows count from 0 on each rank; hand on those "
            "of shard_batch, or give shard_batch position_ids of the whole sequences"
        )


def find_units(model: nn.Module) -> UnitRanks:
    """Return the ranks of the meshes of each unit's parameters, by the unit's module name.

    A unit is a module given to ``fully_shard``. Frozen parameters and parameters that are
    unsharded now are skipped.
    """
    from torch.distributed.fsdp import FSDPModule  # which takes long to load

    meshes: dict[DeviceMesh, frozenset[int]] = {}
    units: dict[str, str | None] = {}
    found: dict[str, set[frozenset[int]]] = {}
    for name, module in model.named_modules():
        unit = name if isinstance(module, FSDPModule) else units.get(name.rpartition(".")[0])
        units[name] = unit
        for _, x in module.named_parameters(recurse=False):
            if unit is not None and isinstance(x, DTensor | RaggedTensor) and x.requires_grad:
                mesh = x.device_mesh
                if mesh not in meshes:
                    meshes[mesh] = frozenset(mesh.mesh.flatten().tolist())
                found.setdefault(unit, set()).add(meshes[mesh])
    return {unit: frozenset(ranks) for unit, ranks in found.items()}


def is_sharded(model: nn.Module) -> bool:
    """Return whether the first parameter of a model is sharded now."""
    first = next(model.named_parameters(), None)
    return first is not None and isinstance(first[1], DTensor | RaggedTensor)


def check_units(units: UnitRanks, mesh: AxisMesh) -> None:
    """Raise `InputError` for a unit if no parameter's mesh contains all ranks of ``mesh``.

    One such parameter per unit is enough: the unit may also hold parameters on another mesh, as
    experts that ``fully_shard`` ignores.
    """
    shared = set(list_ranks(mesh))
    for name, meshes in units.items():
        if not any(shared <= ranks for ranks in meshes):
            given = sorted(map(sorted, meshes))[0]
            raise InputError(
                f"fully_shard sharded {name or 'the model'} over ranks {given}, which do "
                f"not hold the ranks that share its sequences, {sorted(shared)}: gradients would "
                f"be those of one rank's rows; give fully_shard a mesh with them, as "
                f"mesh['fsdp'] of hp-mesh, or one of two axes, replicas and shards"
            )
