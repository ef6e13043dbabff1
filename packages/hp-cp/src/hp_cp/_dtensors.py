"""DTensors among the arguments of a module: what they say of the sequence, and their local rows."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, AxisMesh

from ._errors import InputError
from ._layouts import Contiguous, lengths_of
from ._mesh import list_ranks
from ._settings import Settings


def take_local_rows(
    tensors: Sequence[Tensor], mesh: AxisMesh, settings: Settings
) -> tuple[list[Tensor], int | None]:
    """Return q, k and v as local tensors, and the length of the whole sequence where it is known.

    A DTensor whose mesh holds the ranks of ``mesh`` knows it. Communicates nothing. Raises
    `InputError`, from what all ranks share, for DTensors whose local shards are not whole rows of
    this rank's stretch of the sequence, and for lengths that contradict each other.
    """
    lengths = [
        x.shape[settings.seq_dim]
        for x in tensors
        if isinstance(x, DTensor) and _is_cut(x, mesh, settings)
    ]
    if len(set(lengths)) > 1:
        raise InputError(
            f"q, k and v are DTensors of {lengths} tokens; cross attention is not supported"
        )
    given = settings.seq_len
    length = lengths[0] if lengths else given
    if given not in (None, length):
        raise InputError(
            f"seq_len={given} was given to the style, but the DTensors have {length} "
            f"tokens; use seq_len={length} or None"
        )
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors], length


def _is_cut(x: DTensor, mesh: AxisMesh, settings: Settings) -> bool:
    """Return whether the sequence of ``x`` lies over the ranks of ``mesh``.

    Axes with none of its other ranks, as those of the batch or of heads, must leave rows whole.
    """
    ranks = list_ranks(mesh)
    axes = [Axis.of(x.device_mesh, position) for position in range(x.device_mesh.ndim)]
    along = [len(set(axis.ranks) & set(ranks)) > 1 for axis in axes]
    whole = [Replicate(), *(Shard(dim) for dim in range(3) if dim != settings.seq_dim)]
    for axis, cuts, placement in zip(axes, along, x.placements, strict=True):
        if not cuts and axis.size > 1 and placement not in whole:
            raise InputError(
                f"axis {axis.name!r} of a DTensor's mesh is not one of context parallelism and "
                f"must leave rows whole, as one of {whole}, got {placement}; redistribute it"
            )
    if not any(along):
        return len(ranks) == 1
    over = [placement for cuts, placement in zip(along, x.placements, strict=True) if cuts]
    if (
        _find_ranks(x, along) != ranks
        or any(placement != Shard(settings.seq_dim) for placement in over)
        or not isinstance(settings.layout, Contiguous)
    ):
        raise InputError(
            f"a DTensor over the context parallel mesh is sharded on dim {settings.seq_dim} over "
            f"all of its ranks and lies Contiguous, got {x.placements} on {x.device_mesh} with "
            f"{settings.layout!r}; redistribute it, or pass local rows"
        )
    sizes = [axis.size for axis, cuts in zip(axes, along, strict=True) if cuts]
    _check_lengths(x.shape[settings.seq_dim], sizes, len(ranks))
    return True


def _find_ranks(x: DTensor, along: Sequence[bool]) -> list[int]:
    """Return the ranks over which some axes of a DTensor's mesh lie, as this rank sees them."""
    here = x.device_mesh.get_coordinate() or [0] * len(along)
    index = tuple(slice(None) if cuts else i for cuts, i in zip(along, here, strict=True))
    ranks: list[int] = x.device_mesh.mesh[index].flatten().tolist()
    return ranks


def _check_lengths(length: int, sizes: Sequence[int], n: int) -> None:
    """Raise unless shards of shards are as long as the stretches over all ``n`` ranks."""
    cut: tuple[int, ...] = (length,)
    for size in sizes:
        cut = tuple(part for held in cut for part in lengths_of(Contiguous().chunks(size, held)))
    if cut != (expected := lengths_of(Contiguous().chunks(n, length))):
        raise InputError(
            f"a DTensor of {length} tokens, sharded over axes of {' x '.join(map(str, sizes))} "
            f"ranks, has local lengths {cut}, where Contiguous gives {expected}; pad it to a "
            f"multiple of {n}, or pass local rows and seq_len"
        )
