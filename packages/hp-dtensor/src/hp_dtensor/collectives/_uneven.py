"""Reduce-scatter of blocks with different lengths."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ._interface import Axis, Collectives, ReduceOp

_REDUCTIONS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    "sum": lambda blocks: blocks.sum(0, dtype=blocks.dtype),
    "avg": lambda blocks: blocks.sum(0, dtype=blocks.dtype) / blocks.shape[0],
    "max": lambda blocks: blocks.amax(0),
    "min": lambda blocks: blocks.amin(0),
    "prod": lambda blocks: blocks.prod(0, dtype=blocks.dtype),
}


def start_uneven_reduce_scatter(
    collectives: Collectives, axis: Axis, rows: Tensor, sizes: Sequence[int], op: ReduceOp = "sum"
) -> Callable[[], Tensor]:
    """Start a reduce-scatter in which ranks may get blocks of rows of different lengths.

    Communicates one all-to-all. Each rank then reduces the blocks that it received, in rank order.

    Args:
        collectives: `Collectives` that communicate.
        axis: Ranks that take part.
        rows: Contiguous tensor ``[sum(sizes), ...]``, with the same shape on all ranks. It holds
            one block of rows for each rank, in rank order. Do not change it before the returned
            function has returned.
        sizes: Number of rows in the block of each rank, the same on all ranks.
        op: Reduction.

    Returns:
        A function without arguments, to be called once. It waits for the all-to-all and returns
        this rank's reduced block, a contiguous tensor ``[sizes[axis.index], ...]`` with the dtype
        of ``rows``. An average of integers has the default floating dtype instead.
    """
    own = sizes[axis.index]
    work = collectives.all_to_all(axis, rows, sizes, [own] * axis.size)

    def finish() -> Tensor:
        (received,) = work.wait()
        return _REDUCTIONS[op](received.view(axis.size, own, *rows.shape[1:]))

    return finish
