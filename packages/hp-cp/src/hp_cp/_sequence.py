"""Cut tensors along the sequence, put them together again, and say which positions are here."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_dtensor import AxisMesh, Collectives, all_gather

from ._errors import InputError
from ._intervals import overlaps
from ._lineage import note_anew
from ._masks import MaskSpec, check_mask
from ._seats import axes_of, place_of
from ._torch import map_tensors, share_structure
from .layouts._interface import Chunks, Layout, check_layout, in_global_order, lengths_of
from .plans._checks import checked_chunks


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a tensor is cut: the dim, and the positions of each rank."""

    dim: int
    chunks: Chunks


def shard_sequence(
    tree: Any, mesh: AxisMesh, layout: Layout, seq_dim: Any, mask: MaskSpec | None = None
) -> Any:
    """Return ``tree`` with every tensor cut to this rank's positions along ``seq_dim``.

    Tensors hold the whole sequence, the same on every rank; containers keep their type, other
    leaves pass. ``seq_dim`` is an int, or where tensors have the sequence in different dims a tree
    of ints, built as ``tree`` is. Results are new tensors or views; communicates nothing. Raises
    `InputError` for a tensor without that dim and a ``seq_dim`` that is neither, and `LayoutError`
    for a layout that is no `Layout`, needs the mask or makes no partition, and for a mask of
    another length.
    """
    n, rank = place_of(mesh)
    check_layout(layout)

    def cut_of(x: Tensor, seq_dim: object) -> _Cut:
        dim = checked_dim(x, seq_dim)
        return _Cut(dim, checked_chunks(layout, n, x.shape[dim], mask))

    cuts = map_tensors(cut_of, tree, _each_dim(tree, seq_dim))
    return map_tensors(lambda x, cut: note_anew(_cut(x, cut.chunks[rank], cut.dim)), tree, cuts)


def unshard_sequence(
    tree: Any,
    mesh: AxisMesh,
    layout: Layout,
    seq_dim: Any,
    mask: MaskSpec | None = None,
    *,
    seq_len: int | None = None,
    collectives: Collectives | None = None,
) -> Any:
    """Return ``tree`` with every tensor whole along ``seq_dim``, in global order, on every rank.

    ``seq_dim`` is that of `shard_sequence`. ``seq_len`` is the whole length; None means that at
    which the mask's documents end, else the local length times the number of ranks, so ranks that
    hold unequal lengths must be given one. Differentiable: backward sums the ranks' gradients of
    the whole tensor and keeps this rank's positions. Per tensor and axis: where lengths are equal
    one all-gather, and backward one reduce-scatter; where they differ sends from each rank to each,
    and backward one all-to-all. Raises, before any communication, `LayoutError` and `InputError` as
    `shard_sequence` does, `LayoutError` where the mask's documents end elsewhere than at
    ``seq_len``, and `InputError` for a tensor with another length than the layout gives, which is
    seen on that rank only.
    """
    n, rank = place_of(mesh)
    check_layout(layout)
    if mask is not None:
        check_mask(mask)
    ends = None if mask is None else mask.cu_seqlens
    given = ends[-1] if ends is not None and seq_len is None else seq_len

    def cut_of(x: Tensor, seq_dim: object) -> _Cut:
        dim = checked_dim(x, seq_dim)
        length = x.shape[dim] * n if given is None else given
        chunks = checked_chunks(layout, n, length, mask)
        if x.shape[dim] != lengths_of(chunks)[rank]:
            raise InputError(
                f"dim {dim} of {tuple(x.shape)} is not what {type(layout).__name__}(n={n}, "
                f"S={length}) gives rank {rank}, {lengths_of(chunks)[rank]}; give seq_len where "
                f"ranks hold unequal lengths"
            )
        return _Cut(dim, chunks)

    def whole(x: Tensor, cut: _Cut) -> Tensor:
        gathered = _gather(x, mesh, lengths_of(cut.chunks), cut.dim, collectives)
        return _sort_rows(note_anew(gathered), cut.chunks, cut.dim)

    return map_tensors(whole, tree, map_tensors(cut_of, tree, _each_dim(tree, seq_dim)))


def position_ids(
    mesh: AxisMesh,
    layout: Layout,
    seq_len: int,
    mask: MaskSpec | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of this rank's rows, ``int64 [rows]``; communicates nothing.

    They count from the start of the sequence, or of each document where the mask has some. Raises
    `LayoutError` as `shard_sequence` does.
    """
    n, rank = place_of(mesh)
    chunks = checked_chunks(layout, n, seq_len, mask)
    documents = (range(seq_len),) if mask is None else mask.documents(seq_len)
    parts = []
    for _, i, part in overlaps(chunks[rank], documents):
        start = documents[i].start
        parts.append(torch.arange(part.start - start, part.stop - start, device=device))
    return torch.cat(parts or [torch.arange(0, device=device)])


def _cut(x: Tensor, chunks: tuple[range, ...], dim: int) -> Tensor:
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _gather(
    x: Tensor, mesh: AxisMesh, lengths: tuple[int, ...], dim: int, collectives: Collectives | None
) -> Tensor:
    """Return the rows of all ranks in rank order, gathered over the last axis first."""
    *outer, inner = axes_of(mesh)
    if not outer:
        return all_gather(x, inner, dim, sizes=lengths, collectives=collectives)
    groups = [lengths[i : i + inner.size] for i in range(0, len(lengths), inner.size)]
    x = all_gather(x, inner, dim, sizes=groups[outer[0].index], collectives=collectives)
    return all_gather(x, outer[0], dim, sizes=list(map(sum, groups)), collectives=collectives)


def _sort_rows(rows: Tensor, chunks: Chunks, dim: int) -> Tensor:
    order = in_global_order(chunks)
    if order == sorted(order):
        return rows
    parts = rows.split([len(chunk) for held in chunks for chunk in held], dim)
    return torch.cat([parts[i] for i in order], dim)


def _each_dim(tree: Any, seq_dim: Any) -> Any:
    """Return a tree of dims for ``tree``."""
    if type(seq_dim) is int:
        return map_tensors(lambda x: seq_dim, tree)
    if not share_structure(tree, seq_dim):
        raise InputError(
            f"seq_dim={seq_dim!r} is not built as the tensors are; give one int for all, or the "
            f"same containers with an int for every leaf"
        )
    return seq_dim


def checked_dim(x: Tensor, seq_dim: object) -> int:
    """Return the dim of ``x`` that ``seq_dim`` means, or raise `InputError` where there is none."""
    if type(seq_dim) is not int or not -x.ndim <= seq_dim < x.ndim:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)} has no dim {seq_dim!r} for the sequence; use one "
            f"of {list(range(-x.ndim, x.ndim))}"
        )
    return seq_dim % x.ndim
