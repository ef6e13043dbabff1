"""Cut tensors along the sequence, put them together again, and say which positions are here."""

from typing import Any

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, all_gather

from ._errors import InputError
from ._inputs import one_axis
from ._layouts import Layout, check_layout, in_global_order, lengths_of
from ._torch import map_tensors


def shard_sequence(tree: Any, mesh: AxisMesh, layout: Layout, seq_dim: int) -> Any:
    """Return ``tree`` with every tensor cut to this rank's positions along ``seq_dim``.

    Tensors hold the whole sequence, the same on every rank; containers keep their type, other
    leaves pass. Results are new tensors or views; communicates nothing. Raises `InputError` for a
    tensor without that dim, and `LayoutError` for a layout that is no `Layout`.
    """
    axis = one_axis(mesh)
    check_layout(layout)
    return map_tensors(lambda x: _cut(x, axis, layout, _dim(x, seq_dim)), tree)


def unshard_sequence(
    tree: Any,
    mesh: AxisMesh,
    layout: Layout,
    seq_dim: int,
    *,
    seq_len: int | None = None,
    collectives: Collectives | None = None,
) -> Any:
    """Return ``tree`` with every tensor whole along ``seq_dim``, in global order, on every rank.

    ``seq_len`` is the whole length; None means the local length times the axis size, so ranks that
    hold unequal lengths must be given it. Differentiable: backward sums the ranks' gradients of the
    whole tensor and keeps this rank's positions. Per tensor: where lengths are equal one
    all-gather, and backward one reduce-scatter; where they differ sends from each rank to each, and
    backward one all-to-all. Raises `InputError`, before it communicates this tensor, for one
    without that dim, or with another length than the layout gives, which is seen on that rank only.
    """
    axis = one_axis(mesh)
    check_layout(layout)
    return map_tensors(
        lambda x: _whole(x, axis, layout, _dim(x, seq_dim), seq_len, collectives), tree
    )


def position_ids(
    mesh: AxisMesh, layout: Layout, seq_len: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the global positions of this rank's rows, ``int64 [rows]``; communicates nothing."""
    axis = one_axis(mesh)
    check_layout(layout)
    return _cut(torch.arange(seq_len, device=device), axis, layout, 0)


def _cut(x: Tensor, axis: Axis, layout: Layout, dim: int) -> Tensor:
    chunks = layout.chunks(axis.size, x.shape[dim])[axis.index]
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _whole(
    x: Tensor,
    axis: Axis,
    layout: Layout,
    dim: int,
    seq_len: int | None,
    collectives: Collectives | None,
) -> Tensor:
    seq_len = x.shape[dim] * axis.size if seq_len is None else seq_len
    chunks = layout.chunks(axis.size, seq_len)
    lengths = lengths_of(chunks)
    if x.shape[dim] != lengths[axis.index]:
        raise InputError(
            f"dim {dim} of {tuple(x.shape)} is not what {type(layout).__name__}(n={axis.size}, "
            f"S={seq_len}) gives rank {axis.index}, {lengths[axis.index]}; give seq_len where "
            f"ranks hold unequal lengths"
        )
    rows = all_gather(x, axis, dim, sizes=lengths, collectives=collectives)
    order = in_global_order(chunks)
    if order == sorted(order):
        return rows
    parts = rows.split([len(chunk) for rank in chunks for chunk in rank], dim)
    return torch.cat([parts[i] for i in order], dim)


def _dim(x: Tensor, seq_dim: int) -> int:
    if not -x.ndim <= seq_dim < x.ndim:
        raise InputError(f"a tensor of shape {tuple(x.shape)} has no dim {seq_dim} to cut")
    return seq_dim % x.ndim
