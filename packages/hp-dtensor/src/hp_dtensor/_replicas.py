"""Check that ranks which hold the same tensor, or the same shard of it, hold equal values."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.nn.parameter import is_lazy

from .collectives._c10d import checked_collectives
from .collectives._interface import Axis, AxisMesh, Collectives, RankMismatchError
from .ragged._tensor import local_tensor_of, mesh_and_placements

_SHOWN = 8  # largest number of tensors that an error names
_CHUNK = 2**20  # number of 8-byte words that are hashed at once, which bounds temporary memory
_ODD = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed integer
_LOW = 2**32 - 1  # mask of the lower 32 bits


@torch.no_grad()
def check_same(model: nn.Module, mesh: AxisMesh, *, collectives: Collectives | None = None) -> None:
    """Check that replicas of parameters and buffers have equal values, bit for bit.

    Call it after the model is built or loaded. Different initial values, for example because of a
    missing seed, raise no error later: each rank trains another model.

    - A plain tensor must be equal on all ranks of ``mesh``.
    - A shard of a DTensor or `RaggedTensor` must be equal on all ranks of ``mesh`` that hold it.

    Ranks compare hashes of 8 bytes. Communicates two all-gathers per axis: one of 8 bytes per rank,
    and one of 16 bytes per tensor and rank. The host waits for the results.

    Args:
        model: Module with the parameters and buffers, before or after it is parallelized.
        mesh: Mesh of all ranks that hold the same model. In hp-mesh this is ``mesh["loss", "tp"]``,
            or ``mesh["loss"]`` without tensor parallelism. Pipeline stages hold different
            parameters, so ``pp`` must not be part of the mesh.
        collectives: Object that carries out the collectives. Defaults to `TorchCollectives`.

    Raises:
        ValueError: A parameter or buffer has no values on any rank, as on the meta device. Raised
            on all ranks.
        LayoutError: ``collectives`` does not implement `Collectives`.
        RankMismatchError: Values differ between replicas. Or names, shapes, dtypes or placements
            differ between ranks. Or a tensor has no values on some ranks only. Raised on all ranks.
            The message names the ranks, and the tensors with different values.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> _ = torch.manual_seed(0)
        >>> check_same(nn.Linear(4, 4), mesh)  # equal on all ranks
        >>> model = nn.Linear(4, 4, bias=False)
        >>> _ = model.weight.data.fill_(mesh.get_local_rank("dp"))
        >>> try:
        ...     check_same(model, mesh)
        ... except RankMismatchError as error:
        ...     print(str(error)[:36])
        1 of 1 parameters and buffers differ
    """
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    collectives = checked_collectives(collectives)
    device = next((x.device for x in named.values() if not x.is_meta), torch.device("cpu"))
    if isinstance(mesh, DeviceMesh):
        device = torch.device(mesh.device_type)
    ranks: list[int] = mesh.mesh.flatten().tolist()
    structure = [[name, *_kind(x)] for name, x in named.items()]
    hashes = _gathered(torch.tensor([_hash(structure)], device=device), mesh, collectives)[:, 0]
    if others := [rank for rank, x in zip(ranks, hashes, strict=True) if x != hashes[0]]:
        raise RankMismatchError(
            f"ranks {_numbers(others)} have other names, shapes, dtypes or placements of "
            f"parameters and buffers than rank {ranks[0]}, or no values; build the same model on "
            "all ranks of the mesh, which must not contain pipeline stages"
        )
    if empty := [name for name, x in named.items() if _is_empty(x)]:
        more = f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        raise ValueError(
            f"{', '.join(empty[:_SHOWN])}{more} have no values yet; load or initialize the model "
            "before check_same"
        )
    if not named:
        return
    shards = torch.tensor([_hash(_shard(x)) for x in named.values()], device=device)
    values = torch.stack([_fingerprint(local_tensor_of(x)).to(device) for x in named.values()])
    found = _gathered(torch.cat([shards, values]), mesh, collectives).unflatten(1, (2, -1))
    differing = [
        f"{name!r}: ranks {' and '.join(map(_numbers, groups))}"
        for index, name in enumerate(named)
        if (groups := _unequal(found[:, :, index].tolist(), ranks))
    ]
    if differing:
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise RankMismatchError(
            f"{len(differing)} of {len(named)} parameters and buffers differ between ranks that "
            f"must hold equal values: {'; '.join(differing[:_SHOWN])}{more}; call "
            "torch.manual_seed with the same seed on these ranks before the model is built, or "
            "load the same checkpoint"
        )


def _is_empty(x: Tensor) -> bool:
    return is_lazy(x) or x.is_meta


def _kind(x: Tensor) -> list[object]:
    """Return a list ``[shape, dtype, placements]``, which must be equal on all ranks.

    For a tensor without values, such as on the meta device, return ``["no values"]``.
    """
    if _is_empty(x):
        return ["no values"]
    distributed = mesh_and_placements(x)
    placements = None if distributed is None else distributed[1]
    return [tuple(x.shape), str(x.dtype), str(placements)]


def _shard(x: Tensor) -> object:
    """Return a key of this rank's shard: the coordinates on the mesh axes that shard the tensor.

    Ranks with equal keys hold the same shard. The key of a plain tensor is None.
    """
    if (distributed := mesh_and_placements(x)) is None:
        return None
    mesh, placements = distributed
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return "this rank is not in the mesh"
    pairs = zip(coordinate, placements, strict=True)
    return [index for index, placement in pairs if not isinstance(placement, Replicate)]


def _hash(value: object) -> int:
    """Return a 64-bit hash that is equal in all processes, unlike Python's ``hash``."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fingerprint(x: Tensor) -> Tensor:
    """Return a 64-bit hash of the bytes of a tensor, as a scalar tensor on the same device.

    The hash is a weighted sum over the 8-byte words of the tensor, each hashed by `_mixed`. The
    weight of a word depends on its position.
    """
    if x.layout is not torch.strided:
        x = x.to_dense()
    # A lazy conjugation or negation is not part of the bytes in memory.
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if missing := -len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    if flat.storage_offset() % 8:
        flat = flat.clone()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start, words in enumerate(flat.view(torch.int64).split(_CHUNK)):
        first = start * _CHUNK
        positions = torch.arange(first, first + len(words), device=x.device)
        # With these odd, irregular weights, swapped words and opposite signs change the sum.
        total += (_mixed(words) * (_mixed(positions) | 1)).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of each 64-bit integer, by multiplications and shifts."""
    for _ in range(2):
        x = (x ^ ((x >> 32) & _LOW)) * _ODD
    return x ^ ((x >> 32) & _LOW)


def _gathered(own: Tensor, mesh: AxisMesh, collectives: Collectives) -> Tensor:
    """All-gather a tensor over all axes of a mesh.

    Returns a CPU tensor ``[ranks, *own.shape]``. Ranks are in row-major order of the mesh.
    """
    rows = own[None]
    for position in reversed(range(mesh.ndim)):
        (rows,) = collectives.all_gather(Axis.of(mesh, position), [rows]).wait()
    return rows.cpu()


def _unequal(found: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[list[int]]:
    """Find the shards whose replicas differ, and group their ranks by equal replicas.

    Example: if ``ranks`` is ``[0, 1, 2]`` and ``found`` is ``[(7, 1), (7, 1), (7, 2)]``, the result
        is
    ``[[0, 1], [2]]``: ranks 0 and 1 hold equal replicas of a shard, and rank 2 holds a different
    one.

    Args:
        found: One pair ``(hash of the shard key, hash of the values)`` for each rank.
        ranks: Global ranks, in the same order.

    Returns:
        Lists of ranks. The ranks of one list hold equal replicas of the same shard. A shard whose
        replicas are all equal has no list. The lists of all other shards follow each other in one
        flat list.
    """
    holders: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (shard, value) in zip(ranks, found, strict=True):
        holders[shard][value].append(rank)
    differing = [list(by_value.values()) for by_value in holders.values() if len(by_value) > 1]
    return [group for groups in differing for group in groups]


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
