"""Collectives with gradients."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._c10d import TorchCollectives
from ._interface import Axis, Collectives

Change: TypeAlias = Callable[[Tensor], Tensor]


class AutogradCollectives:
    """Collectives of one tensor, with gradients.

    The backward of each is the adjoint that its docstring names; second derivatives pass. In a
    function that ``torch.compile`` traces, each call ends a graph and runs between two of them;
    with ``fullgraph=True`` it raises.

    Args:
        inner: What carries the calls out, forward and backward; `TorchCollectives` if None.

    Example:
        >>> AutogradCollectives().all_gather(hidden, Axis.of(mesh, "tp"), dim=1)
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        self._inner: Collectives = TorchCollectives() if inner is None else inner

    def all_gather(
        self, x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return the concatenation over ``dim`` of every rank's ``x``, in rank order.

        One all-gather over ``axis``; backward: one reduce-scatter, summed. Where lengths differ:
        sends from each rank to each, and backward one all-to-all, summed in rank order.

        Args:
            x: This rank's part.
            axis: The ranks that gather.
            dim: The dim along which parts lie end to end.
            sizes: Each rank's length in ``dim`` where they differ.

        Raises:
            ValueError: ``sizes`` do not fit the axis or this rank's part.
        """
        how = axis, dim, _lengths(x, axis, dim, sizes), self._inner
        return _apply(x, lambda y: _gather(y, *how), lambda y: _scatter(y, *how))

    def reduce_scatter(
        self, x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's part in ``dim`` of the sum of every rank's ``x``.

        One reduce-scatter over ``axis``; backward: one all-gather. Where lengths differ: an
        all-to-all, summed in rank order, and backward sends from each rank to each.

        Args:
            x: A tensor of one shape on all ranks.
            axis: The ranks that sum.
            dim: The dim that is cut.
            sizes: Each rank's length in ``dim``; equal ones, which must divide it, if None.

        Raises:
            ValueError: The length does not divide, or ``sizes`` do not add up.
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
        how = axis, dim, tuple(sizes), self._inner
        return _apply(x, lambda y: _scatter(y, *how), lambda y: _gather(y, *how))

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """Return the sum of every rank's ``x``; one all-reduce over ``axis``.

        Backward passes the gradient through: the result is replicated, and every rank's gradient of
        it is already the whole one (Megatron-LM's g, arXiv 1909.08053, section 3).
        """
        return _apply(x, lambda y: _sum(y, axis, self._inner), _same)

    def replicate(self, x: Tensor, axis: Axis) -> Tensor:
        """Return ``x`` itself, which every rank of ``axis`` holds; communicates nothing.

        Backward sums the ranks' gradients, each of which stands for a part of the work done with
        ``x``: one all-reduce (Megatron-LM's f, arXiv 1909.08053, section 3).
        """
        return _apply(x, _same, lambda y: _sum(y, axis, self._inner))

    def all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send row block ``i`` of ``x`` to rank ``i``; return what each sent here, in rank order.

        One all-to-all over ``axis``; backward: one all-to-all with the splits exchanged.

        Args:
            x: Rows to send, ``[rows, ...]``.
            axis: The ranks that take part.
            send_splits: Rows to each rank; equal blocks if None.
            receive_splits: Rows from each rank; both are given, or neither.

        Raises:
            ValueError: One of the splits alone, or rows that equal blocks do not divide.
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
        return _apply(
            x,
            lambda y: _exchange(y, axis, send, receive, self._inner),
            lambda y: _exchange(y, axis, receive, send, self._inner),
        )


def _apply(x: Tensor, change: Change, adjoint: Change) -> Tensor:
    """Return ``change(x)``, linear in ``x``; the two are each other's backward."""
    return (_communicate_outside if is_compiling() else _communicate)(x, change, adjoint)


def _communicate(x: Tensor, change: Change, adjoint: Change) -> Tensor:
    # What is sent are bytes: they must be those of the values, not of their conjugates.
    x = x.resolve_conj()
    result: Tensor = _Linear.apply(x, change, adjoint)  # type: ignore[no-untyped-call]
    return result


# torch.compiler.disable (2.11 to 2.13) that loads the compiler with the first call, as torch's
# optimizers have it. The public one loads it with this module.
_communicate_outside: Callable[..., Tensor] = torch._disable_dynamo(  # type: ignore[attr-defined]
    _communicate
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change, adjoint: Change) -> Tensor:
        ctx.back = adjoint, change
        return change(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(grads[0], *ctx.back), None, None


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
        collectives.send_recv(axis, dict.fromkeys(places, rows), places).wait()
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


def _sum(x: Tensor, axis: Axis, collectives: Collectives) -> Tensor:
    own = x.clone(memory_format=torch.contiguous_format)
    (total,) = collectives.all_reduce(axis, [own]).wait()
    return total


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _exchange(
    x: Tensor,
    axis: Axis,
    send: tuple[int, ...] | None,
    receive: tuple[int, ...] | None,
    collectives: Collectives,
) -> Tensor:
    if axis.size == 1:
        return x.clone()
    (received,) = collectives.all_to_all(axis, x.contiguous(), send, receive).wait()
    return received
