"""Moving rows between orders: permutations, and the gather and weighted sum of routed rows."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._errors import ExpertConfigError
from ._torch import first_order, run_function

_BLOCK = 1 << 20  # elements of a temporary that the allocator keeps instead of returning it


def permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    *,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the permutation from rank-major to expert-major rows, and the rows of each expert.

    ``tokens_per_expert_group [num_ranks * experts_per_rank]`` counts the rows as they arrive: those
    of rank 0 for expert 0, of rank 0 for expert 1, ..., of rank 1 for expert 0, .... The results
    are int64: ``indices [rows]``, to be used with `permute`, and ``tokens_per_expert
    [experts_per_rank]``. ``num_rows``, the sum of the counts where the caller knows it, spares a
    device-to-host synchronisation. Communicates nothing. `ExpertConfigError` for counts of another
    shape or no integers and, on the CPU, for negative ones and ones that do not sum to
    ``num_rows``.
    """
    counts = tokens_per_expert_group
    if counts.shape != (num_ranks * experts_per_rank,):
        raise ExpertConfigError(
            f"tokens_per_expert_group has shape {tuple(counts.shape)}; {num_ranks} ranks x "
            f"{experts_per_rank} experts per rank need ({num_ranks * experts_per_rank},)"
        )
    check_counts(counts, num_rows)
    return block_indices(counts, experts_per_rank, num_ranks, num_rows)


def block_indices(
    counts: Tensor, experts_per_rank: int, num_ranks: int, num_rows: int | None
) -> tuple[Tensor, Tensor]:
    """Return what `permute_indices` does, of counts that are known to be right."""
    counts = counts.long()
    starts = counts.cumsum(0) - counts
    lengths = counts.view(num_ranks, experts_per_rank).t().reshape(-1)
    # What to add to a row's place in the output to get its place in the input, block by block.
    shifts = starts.view(num_ranks, experts_per_rank).t().reshape(-1)
    shifts = shifts - (lengths.cumsum(0) - lengths)
    indices = shifts.repeat_interleave(lengths, output_size=num_rows)
    indices += torch.arange(indices.shape[0], device=indices.device)
    return indices, lengths.view(experts_per_rank, num_ranks).sum(1)


def pad_blocks(counts: Tensor, num_rows: int, multiple: int) -> tuple[Tensor, Tensor, int]:
    """Return where blocks of rows go so that the length of each is a multiple of ``multiple``.

    ``counts [blocks]`` sum to ``num_rows``. The results are each row's place ``[rows]``, the
    padded counts, and how many rows these are: a number that the host knows beforehand, so the
    last block has what the others leave.
    """
    size = -(-(num_rows + counts.shape[0] * (multiple - 1)) // multiple) * multiple
    counts = counts.long()
    padded = (counts + multiple - 1) // multiple * multiple
    shifts = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = shifts.repeat_interleave(counts, output_size=num_rows)
    places = places + torch.arange(num_rows, device=places.device)
    rest = size - padded[:-1].sum()
    return places, torch.cat([padded[:-1], rest[None]]), size


def place_rows(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """Return ``size`` rows, those of ``rows`` at ``places [rows]`` and zeros; see `take_rows`."""
    if torch.compiler.is_compiling():  # 2.11 loses the gradient of what a function changed in place
        return rows.new_zeros(size, rows.shape[1]).index_copy(0, places, rows)
    return run_function(_PlaceRows, rows, places, size)


def take_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows at ``places``, which are distinct; backward is `place_rows`."""
    return run_function(_TakeRows, rows, places)


def permute(rows: Tensor, indices: Tensor) -> Tensor:
    """Return ``rows[indices]`` for a permutation ``indices [rows]`` int64; backward: `unpermute`.

    `ExpertConfigError` for indices of another shape or dtype and, on the CPU, for indices that are
    no permutation; on other devices their values are not looked at.
    """
    check_permutation(rows, indices)
    return reorder(rows, indices, invert(indices))


def unpermute(rows: Tensor, indices: Tensor) -> Tensor:
    """Return the rows that `permute` with the same ``indices`` took: its inverse and transpose.

    The errors are those of `permute`.
    """
    check_permutation(rows, indices)
    return reorder(rows, invert(indices), indices)


def gather_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return ``x [tokens, dim]`` once per slot, in ``order``: ``[tokens * k, dim]``.

    Slot ``t * k + j`` is the ``j``-th choice of token ``t``. ``order [tokens * k]`` lists the slots
    in the order of the result, and ``places [tokens, k]`` is its inverse: each slot's row. Backward
    is `bag_sum` without weights. `ExpertConfigError` for other shapes and dtypes and, on the CPU,
    for ``places`` that do not invert ``order``.
    """
    check_slots(order, places, x.shape[0])
    return take_slots(x, order, places)


def take_slots(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return what `gather_rows` does, of an order that is known to be right."""
    return run_function(_GatherRows, x, order, places)


def bag_sum(rows: Tensor, order: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows, weighted: ``[tokens, dim]``; `gather_rows` transposed.

    ``rows [tokens * k, dim]`` lie in ``order``; ``weights [tokens, k]`` (1 by default) multiply
    the rows at ``places``. The sum is deterministic. Gradients: of ``rows``, the token's gradient
    times the weight; of ``weights``, the inner product of row and gradient. The errors are those of
    `gather_rows`, and for rows or weights that are not one for each slot.
    """
    check_slots(order, places, places.shape[0])
    if rows.shape[0] != places.numel():
        raise ExpertConfigError(
            f"bag_sum got {rows.shape[0]} rows for {tuple(places.shape)} slots; give one per slot"
        )
    if weights is not None and weights.shape != places.shape:
        raise ExpertConfigError(
            f"weights {tuple(weights.shape)} and places {tuple(places.shape)} must agree"
        )
    return sum_slots(rows, order, places, weights)


def sum_slots(rows: Tensor, order: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return what `bag_sum` does, of an order that is known to be right."""
    return run_function(_BagSum, rows, order, places, weights)


def reorder(rows: Tensor, indices: Tensor, inverse: Tensor) -> Tensor:
    """Return ``rows[indices]``; backward takes ``inverse``, which the caller has at hand."""
    return run_function(_Reorder, rows, indices, inverse)


def invert(indices: Tensor) -> Tensor:
    """Return the inverse of a permutation ``[n]``."""
    steps = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)
    return torch.empty_like(indices).scatter_(0, indices, steps)


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return each row's inner product, in float32 where that is wider.

    In blocks: torch's own product makes a temporary as large as ``a``.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    # Elsewhere a kernel launch costs more than a larger temporary.
    step = max(1, (_BLOCK if a.is_cpu else 16 * _BLOCK) // max(1, a.shape[1]))
    blocks = zip(a.split(step), b.split(step), strict=True)
    return torch.cat([torch.linalg.vecdot(x.to(wide), y.to(wide)) for x, y in blocks])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Which rows belong to which token.

    ``tokens [rows]`` is each row's token; ``rows [rows]`` lists the rows token by token and
    ``starts [tokens]`` where each token's begin in that list.
    """

    tokens: Tensor
    rows: Tensor
    starts: Tensor


def bags_of(tokens: Tensor, num_tokens: int) -> Bags:
    """Return the bags of rows with these tokens ``[rows]``; reads nothing on the host."""
    counts = torch.zeros(num_tokens, dtype=torch.int64, device=tokens.device)
    counts.scatter_add_(0, tokens, torch.ones_like(tokens))
    # Sorting four bytes per key costs less than sorting eight.
    rows = tokens.to(torch.int32).argsort(stable=True)
    return Bags(tokens=tokens, rows=rows, starts=counts.cumsum(0) - counts)


def spread(x: Tensor, bags: Bags) -> Tensor:
    """Return each row's token ``[rows, dim]`` of ``x [tokens, dim]``; backward is `collect`."""
    return run_function(_Spread, x, bags)


def collect(rows: Tensor, bags: Bags, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows ``[tokens, dim]``, times ``weights [rows]`` if given.

    The sum is deterministic. Gradients: of ``rows``, the token's gradient times the weight; of
    ``weights``, the inner product of row and gradient.
    """
    return run_function(_Collect, rows, weights, bags)


def _sums(rows: Tensor, bags: Bags, weights: Tensor | None) -> Tensor:
    if not rows.numel():  # torch's sums refuse to choose from nothing
        return rows.new_zeros(bags.starts.shape[0], rows.shape[1])
    scale = None if weights is None else weights.index_select(0, bags.rows)
    total: Tensor = F.embedding_bag(
        bags.rows, rows.contiguous(), bags.starts, mode="sum", per_sample_weights=scale
    )
    return total


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, places, rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        zeros = grads[0].new_zeros(ctx.size, grads[0].shape[1])
        return zeros.index_copy_(0, places, grads[0]), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(indices, inverse)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices, inverse = ctx.saved_tensors
        return run_function(_Reorder, grads[0], inverse, indices), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return F.embedding_bag(places, grads[0].contiguous(), mode="sum"), None, None


class _BagSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, places: Tensor, weights: Tensor | None
    ) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = weights is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(rows if keep else None, order, places, weights)
        scale = None if weights is None else weights.to(rows.dtype)
        return F.embedding_bag(places, rows.contiguous(), mode="sum", per_sample_weights=scale)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, order, places, weights = ctx.saved_tensors
        grad = grads[0].index_select(0, order // places.shape[1])
        if weights is None:
            return grad, None, None, None
        grad_weights = None
        if rows is not None:
            products = row_products(rows, grad).to(weights.dtype)
            grad_weights = products.index_select(0, places.view(-1)).view(places.shape)
        grad *= weights.reshape(-1).index_select(0, order).to(grad.dtype)[:, None]
        return grad, None, None, grad_weights


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bags: Bags) -> Tensor:
        ctx.save_for_backward(bags.tokens, bags.rows, bags.starts)
        return x.index_select(0, bags.tokens)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, rows, starts = ctx.saved_tensors
        return _sums(grads[0], Bags(tokens=tokens, rows=rows, starts=starts), None), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, bags: Bags) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if keep else None, weights, bags.tokens)
        return _sums(rows, bags, None if weights is None else weights.to(rows.dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, tokens = ctx.saved_tensors
        grad = grads[0].index_select(0, tokens)
        if weights is None:
            return grad, None, None
        grad_weights = None if rows is None else row_products(rows, grad).to(weights.dtype)
        grad *= weights.to(grad.dtype)[:, None]
        return grad, grad_weights, None


def check_permutation(rows: Tensor, indices: Tensor) -> None:
    """Raise an `ExpertConfigError` unless ``indices`` name each of ``rows`` once."""
    if indices.shape != rows.shape[:1]:
        raise ExpertConfigError(
            f"a permutation of {rows.shape[0]} rows has shape ({rows.shape[0]},), "
            f"got indices {tuple(indices.shape)}"
        )
    if indices.dtype != torch.int64:
        raise ExpertConfigError(f"indices are {indices.dtype}; they must be torch.int64")
    if not indices.is_cpu:  # looking would synchronise
        return
    number = indices.shape[0]
    counts = torch.zeros(number, dtype=torch.uint8)
    # Where one index is out of range another is missing: count the others.
    known = indices[(indices >= 0) & (indices < number)]
    missing = counts.index_fill_(0, known, 1) == 0
    if missing.any():
        raise ExpertConfigError(
            f"indices are no permutation of {number} rows: {missing.nonzero()[0].item()} is not "
            f"among them; each of 0 .. {number - 1} must be there once"
        )


def check_slots(order: Tensor, places: Tensor, tokens: int) -> None:
    """Raise an `ExpertConfigError` unless ``order`` and ``places`` are inverses for ``tokens``."""
    if places.dim() != 2 or places.shape[0] != tokens or order.shape != (places.numel(),):
        raise ExpertConfigError(
            f"order {tuple(order.shape)} and places {tuple(places.shape)} must be [tokens * k] and "
            f"[tokens, k] for {tokens} tokens"
        )
    if order.dtype != torch.int64 or places.dtype != torch.int64:
        raise ExpertConfigError(
            f"order is {order.dtype} and places are {places.dtype}; they must be torch.int64"
        )
    if not (order.is_cpu and places.is_cpu):  # looking would synchronise
        return
    slots = places.reshape(-1)
    check_permutation(slots, slots)
    wrong = order.index_select(0, slots) != torch.arange(slots.shape[0])
    if wrong.any():
        slot = int(wrong.nonzero()[0].item())
        raise ExpertConfigError(
            f"places say that slot {slot} is row {slots[slot].item()}, but order has slot "
            f"{order[slots[slot]].item()} there; places must be the inverse of order"
        )


def check_counts(counts: Tensor, num_rows: int | None) -> None:
    """Raise an `ExpertConfigError` unless ``counts`` are those of ``num_rows`` rows, if given."""
    if counts.dtype not in (torch.int64, torch.int32):
        raise ExpertConfigError(f"counts are {counts.dtype}; they must be torch.int64 or int32")
    if not counts.is_cpu:  # looking would synchronise
        return
    numbers = counts.tolist()
    if min(numbers, default=0) < 0 or num_rows not in (None, sum(numbers)):
        what = "" if num_rows is None else f" and sum to num_rows={num_rows}"
        raise ExpertConfigError(f"counts {numbers} must be at least 0{what}")
