"""`AutogradCollectives`: collectives that autograd can differentiate."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .._torch import keep_eager
from ._c10d import checked_collectives
from ._interface import Axis, Collectives
from ._uneven import start_uneven_reduce_scatter

LinearFunction: TypeAlias = Callable[[Tensor], Tensor]


class AutogradCollectives:
    """Collectives that autograd can differentiate. Each call takes one tensor.

    The docstring of each method names the collectives of forward and of backward. Second
    derivatives are supported. Under ``torch.compile``, each call is a graph break, so it raises an
    error with ``fullgraph=True``.

    Args:
        inner: `Collectives` that communicate in forward and in backward. Defaults to
            `TorchCollectives`.

    Examples:
        On 4 ranks:

        >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
        >>> part = torch.ones(2, requires_grad=True)
        >>> AutogradCollectives().all_gather(part, axis).sum().backward()
        >>> part.grad
        tensor([4., 4.])
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        self._inner = checked_collectives(inner)

    def all_gather(
        self, x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Concatenate the tensors of all ranks along a dim, in rank order.

        Backward sums the gradients of all ranks, and returns this rank's part of the sum.

        - If the lengths are equal: one all-gather in forward, one reduce-scatter in backward.
        - If the lengths in ``sizes`` differ: point to point messages in forward, one all-to-all and
          a local sum in backward.

        Args:
            x: Tensor of this rank. All dims except ``dim`` have the same length on all ranks.
            axis: Ranks that take part.
            dim: Dim along which the tensors are concatenated.
            sizes: Length of each rank's tensor in ``dim``. None means equal lengths.

        Returns:
            The concatenation, the same on all ranks.

        Raises:
            ValueError: ``sizes`` does not have one length per rank, or its entry for this rank is
                not the length of ``x`` in ``dim``.
        """
        args = axis, dim, _lengths(x, axis, dim, sizes), self._inner
        return _apply(x, lambda y: _gather(y, *args), lambda y: _scatter(y, *args))

    def reduce_scatter(
        self, x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Sum the tensors of all ranks, and return this rank's slice of the sum along a dim.

        Backward concatenates the gradients of all ranks along the dim.

        - If the lengths are equal: one reduce-scatter in forward, one all-gather in backward.
        - If the lengths in ``sizes`` differ: one all-to-all and a local sum in forward, point to
          point messages in backward.

        Args:
            x: Tensor with the same shape on all ranks.
            axis: Ranks that take part.
            dim: Dim along which the sum is split, in rank order.
            sizes: Length of each rank's slice in ``dim``. None means equal lengths.

        Returns:
            This rank's slice of the sum.

        Raises:
            ValueError: ``sizes`` is None, and the length of ``dim`` is not a multiple of the number
                of ranks. Or ``sizes`` does not have one length per rank. Or the sum of ``sizes`` is
                not the length of ``dim``.
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
        args = axis, dim, tuple(sizes), self._inner
        return _apply(x, lambda y: _scatter(y, *args), lambda y: _gather(y, *args))

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """Sum the tensors of all ranks.

        Communicates one all-reduce in forward. Backward communicates nothing: the gradient of ``x``
        is the gradient of the result. This is correct only if all ranks have the same gradient of
        the result. The method is Megatron-LM's g (arXiv 1909.08053, section 3).

        Args:
            x: Tensor with the same shape on all ranks.
            axis: Ranks that take part.

        Returns:
            The sum, the same on all ranks.
        """
        return _apply(x, lambda y: _sum(y, axis, self._inner), _view)

    def replicate(self, x: Tensor, axis: Axis) -> Tensor:
        """Return a view of ``x`` whose gradient is summed over all ranks in backward.

        Use this method before a computation that is split over the axis, in which each rank
        computes only a part of the gradient of ``x``. Forward communicates nothing. Backward sums
        the gradients of all ranks with one all-reduce. The method is Megatron-LM's f (arXiv
        1909.08053, section 3).

        Args:
            x: Tensor with the same values on all ranks.
            axis: Ranks that take part.

        Returns:
            A view of ``x``.
        """
        return _apply(x, _view, lambda y: _sum(y, axis, self._inner))

    def all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send one block of rows to each rank, and concatenate the received blocks in rank order.

        Communicates one all-to-all in forward and one in backward. In backward, ``send_splits`` and
        ``receive_splits`` change roles.

        Args:
            x: Rows to send, ``[rows, ...]``.
            axis: Ranks that take part.
            send_splits: Number of rows to send to each rank. None means equal blocks.
            receive_splits: Number of rows to receive from each rank. Required if ``send_splits`` is
                given.

        Returns:
            The received rows, ``[sum(receive_splits), ...]``.

        Raises:
            ValueError: Only one of ``send_splits`` and ``receive_splits`` is given. Or both are
                None, and the number of rows is not a multiple of the number of ranks.
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


def _apply(x: Tensor, function: LinearFunction, adjoint: LinearFunction) -> Tensor:
    """Return ``function(x)``, differentiable any number of times.

    Args:
        x: Input.
        function: Linear function.
        adjoint: Adjoint of ``function``. Backward calls it with the gradient of the result. In
            second derivatives, the two functions change roles.
    """
    return (_communicate_eagerly if is_compiling() else _communicate)(x, function, adjoint)


def _communicate(x: Tensor, function: LinearFunction, adjoint: LinearFunction) -> Tensor:
    # Collectives send the stored values, so a lazy conjugation is carried out first.
    x = x.resolve_conj()
    result: Tensor = _Linear.apply(x, function, adjoint)  # type: ignore[no-untyped-call]
    return result


_communicate_eagerly = keep_eager(_communicate)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: LinearFunction, adjoint: LinearFunction) -> Tensor:
        ctx.swapped = adjoint, function
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(grads[0], *ctx.swapped), None, None


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
        parts = dict(enumerate(whole.split(list(sizes))))
        collectives.send_recv(axis, dict.fromkeys(parts, rows), parts).wait()
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
        part = start_uneven_reduce_scatter(collectives, axis, rows, sizes)()
    return part.movedim(0, dim)


def _sum(x: Tensor, axis: Axis, collectives: Collectives) -> Tensor:
    own = x.clone(memory_format=torch.contiguous_format)
    (total,) = collectives.all_reduce(axis, [own]).wait()
    return total


def _view(x: Tensor) -> Tensor:
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
