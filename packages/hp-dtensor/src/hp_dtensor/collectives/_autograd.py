"""Collectives with gradients: each function's backward is the adjoint that its docstring names."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._interface import Axis, Collectives
from ._torch import TorchCollectives


def all_gather(
    x: Tensor,
    axis: Axis,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return the concatenation over ``dim`` of every rank's ``x``, in rank order.

    ``sizes`` gives each rank's length in ``dim`` where they differ. One all-gather over ``axis``;
    backward: one reduce-scatter, summed. Where lengths differ: sends from each rank to each, and
    backward one all-to-all, summed in rank order.
    """
    return _apply(_AllGather, x, axis, dim, _lengths(x, axis, dim, sizes), _door(collectives))


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return this rank's part in ``dim`` of the sum of every rank's ``x``.

    Without ``sizes`` the length must divide by the axis size. One reduce-scatter over ``axis``;
    backward: one all-gather. Where lengths differ: an all-to-all, summed in rank order, and
    backward sends from each rank to each.
    """
    if sizes is None:
        length = x.shape[dim]
        if length % axis.size:
            raise ValueError(
                f"reduce_scatter over {axis.name} splits dim {dim} of {tuple(x.shape)} in "
                f"{axis.size} equal parts; pass sizes= for unequal ones"
            )
        sizes = (length // axis.size,) * axis.size
    elif len(sizes) != axis.size or sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"sizes {tuple(sizes)} over {axis.name} must be {axis.size} lengths that sum to "
            f"{x.shape[dim]}, the length of dim {dim}"
        )
    return _apply(_ReduceScatter, x, axis, dim, tuple(sizes), _door(collectives))


def all_reduce(x: Tensor, axis: Axis, *, collectives: Collectives | None = None) -> Tensor:
    """Return the sum of every rank's ``x``; one all-reduce over ``axis``.

    Backward passes the gradient through: the result is replicated, and every rank's gradient of it
    is already the whole one (Megatron-LM's g, arXiv 1909.08053, section 3).
    """
    return _apply(_AllReduce, x, axis, _door(collectives))


def replicate(x: Tensor, axis: Axis, *, collectives: Collectives | None = None) -> Tensor:
    """Return ``x`` itself, which every rank of ``axis`` holds; communicates nothing.

    Backward sums the ranks' gradients, each of which stands for a part of the work done with ``x``:
    one all-reduce (Megatron-LM's f, arXiv 1909.08053, section 3).
    """
    return _apply(_Replicate, x, axis, _door(collectives))


def all_to_all(
    x: Tensor,
    axis: Axis,
    send_splits: Sequence[int] | None = None,
    receive_splits: Sequence[int] | None = None,
    *,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return what each rank sent here, in rank order: row block ``i`` of ``x`` goes to rank ``i``.

    Blocks are equal, or ``send_splits`` rows to and ``receive_splits`` rows from each rank. One
    all-to-all over ``axis``; backward: one all-to-all with the splits exchanged.
    """
    if (send_splits is None) != (receive_splits is None):
        raise ValueError("give both send_splits and receive_splits, or neither")
    if send_splits is None and x.shape[0] % axis.size:
        raise ValueError(
            f"all_to_all over {axis.name} sends {axis.size} equal blocks of dim 0, got "
            f"{tuple(x.shape)}; pass send_splits= and receive_splits= for unequal ones"
        )
    send = None if send_splits is None else tuple(send_splits)
    receive = None if receive_splits is None else tuple(receive_splits)
    return _apply(_AllToAll, x, axis, send, receive, _door(collectives))


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _door(collectives: Collectives | None) -> Collectives:
    return TorchCollectives() if collectives is None else collectives


def _lengths(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    if sizes is None:
        return (x.shape[dim],) * axis.size
    if len(sizes) != axis.size or sizes[axis.index] != x.shape[dim]:
        raise ValueError(
            f"sizes {tuple(sizes)} over {axis.name} must be {axis.size} lengths, this rank's "
            f"({x.shape[dim]}) at position {axis.index}"
        )
    return tuple(sizes)


def _gather(
    x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], collectives: Collectives
) -> Tensor:
    if axis.size == 1:
        return x.clone()
    rows = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        (whole,) = collectives.all_gather(axis, [rows]).wait()
    else:
        whole = rows.new_empty((sum(sizes), *rows.shape[1:]))
        places = dict(enumerate(whole.split(list(sizes))))
        collectives.exchange(axis, dict.fromkeys(places, rows), places).wait()
    return whole.movedim(0, dim)


def _scatter(
    x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], collectives: Collectives
) -> Tensor:
    if axis.size == 1:
        return x.clone()
    rows = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        (part,) = collectives.reduce_scatter(axis, [rows]).wait()
    else:
        mine = sizes[axis.index]
        (parts,) = collectives.all_to_all(axis, rows, sizes, (mine,) * axis.size).wait()
        part = parts.view(axis.size, mine, *rows.shape[1:]).sum(0)
    return part.movedim(0, dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], door: Collectives
    ) -> Tensor:
        ctx.saved = (axis, dim, sizes, door)
        return _gather(x, axis, dim, sizes, door)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, sizes, door = ctx.saved
        return _apply(_ReduceScatter, grads[0], axis, dim, sizes, door), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], door: Collectives
    ) -> Tensor:
        ctx.saved = (axis, dim, sizes, door)
        return _scatter(x, axis, dim, sizes, door)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, sizes, door = ctx.saved
        return _apply(_AllGather, grads[0], axis, dim, sizes, door), None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, door: Collectives) -> Tensor:
        ctx.saved = (axis, door)
        (total,) = door.all_reduce(axis, [x.clone(memory_format=torch.contiguous_format)]).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_Replicate, grads[0], *ctx.saved), None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, door: Collectives) -> Tensor:
        ctx.saved = (axis, door)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_AllReduce, grads[0], *ctx.saved), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        send: tuple[int, ...] | None,
        receive: tuple[int, ...] | None,
        door: Collectives,
    ) -> Tensor:
        ctx.saved = (axis, receive, send, door)
        if axis.size == 1:
            return x.clone()
        (received,) = door.all_to_all(axis, x.contiguous(), send, receive).wait()
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_AllToAll, grads[0], *ctx.saved), None, None, None, None
