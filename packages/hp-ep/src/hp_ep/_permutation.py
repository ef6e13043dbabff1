"""Moving rows between orders: permutations, gathers and weighted scatters of routed rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.torch_compat import backward_keeps_graph

from ._errors import ExpertConfigError
from ._torch import first_order, run_function

_BLOCK = 1 << 18  # elements of a temporary


def permute_indices(
    tokens_per_expert_group: Tensor,
    experts_per_rank: int,
    num_ranks: int,
    *,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the permutation of received rows from rank-major to expert-major order.

    Communicates nothing.

    Args:
        tokens_per_expert_group: Number of received rows, ``[num_ranks * experts_per_rank]``: from
            rank 0 for expert 0, from rank 0 for expert 1, ..., from rank 1 for expert 0, ....
        experts_per_rank: Number of local experts.
        num_ranks: Number of ranks that send rows.
        num_rows: Sum of the counts, if the caller knows it. It saves a device-to-host
            synchronization. Defaults to None.

    Returns:
        ``(indices, tokens_per_expert)``, int64: ``indices [rows]`` for `permute`, and the number of
        rows of each local expert, ``[experts_per_rank]``.

    Raises:
        ExpertConfigError: The counts have another shape or no integer dtype. On the CPU also: a
            count is negative, or the counts do not sum to ``num_rows``.

    Examples:
        >>> counts = torch.tensor([1, 2, 2, 1])  # from 2 ranks, for 2 experts
        >>> indices, tokens_per_expert = permute_indices(counts, experts_per_rank=2, num_ranks=2)
        >>> indices, tokens_per_expert
        (tensor([0, 3, 4, 1, 2, 5]), tensor([3, 3]))
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
    """Return the rows or numbers at ``places``, which are distinct; backward is `place_rows`."""
    return run_function(_TakeRows, rows, places)


def permute(rows: Tensor, indices: Tensor) -> Tensor:
    """Reorder rows by a permutation. The backward is `unpermute`.

    Args:
        rows: Rows ``[rows, dim]``.
        indices: Permutation ``[rows]``, int64.

    Returns:
        ``rows[indices]``.

    Raises:
        ExpertConfigError: The indices have another shape or dtype. On the CPU also: they are no
            permutation.

    Examples:
        >>> permute(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1])).flatten()
        tensor([3., 1., 2.])
    """
    check_permutation(rows, indices)
    return reorder(rows, indices, invert(indices))


def unpermute(rows: Tensor, indices: Tensor) -> Tensor:
    """Undo `permute`. The backward is `permute`.

    Args:
        rows: Rows ``[rows, dim]``, as returned by `permute`.
        indices: Permutation of `permute`, ``[rows]``, int64.

    Returns:
        The rows in their original order.

    Raises:
        ExpertConfigError: The indices have another shape or dtype. On the CPU also: they are no
            permutation.

    Examples:
        >>> unpermute(torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([2, 0, 1])).flatten()
        tensor([1., 2., 3.])
    """
    check_permutation(rows, indices)
    return reorder(rows, invert(indices), indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenGroups:
    """Which rows are of which token: those of a token are a group.

    ``tokens [rows]`` is each row's token. ``rows`` lists the rows token by token: ``[tokens, k]``
    where each token has ``k`` of them, else ``[rows]`` with ``starts [tokens]``, where each token's
    begin.
    """

    tokens: Tensor
    rows: Tensor
    starts: Tensor | None = None


def gather_tokens(
    x: Tensor,
    groups: TokenGroups,
    dtype: torch.dtype | None = None,
    *,
    sums: torch.dtype | None = None,
) -> Tensor:
    """Return each row's token ``[rows, dim]`` of ``x [tokens, dim]``, in ``dtype``.

    Backward is `scatter_tokens` without weights, which sums in ``sums``. Both are the dtype of
    ``x`` by default.
    """
    return run_function(
        _Gather,
        x,
        dtype or x.dtype,
        sums or x.dtype,
        groups.tokens,
        groups.rows,
        groups.starts,
    )


def scatter_tokens(
    rows: Tensor, groups: TokenGroups, weights: Tensor | None = None, *, consume: bool = False
) -> Tensor:
    """Return the sum of each token's rows ``[tokens, dim]``, times ``weights`` if given.

    These are listed as ``groups.rows``. The sum is deterministic. Gradients: of ``rows``, the
    token's gradient times the weight; of ``weights``, the inner product of row and gradient. With
    ``consume`` nobody else has the memory of ``rows``, and the gradient may take their place.
    """
    return run_function(_Scatter, rows, weights, groups.tokens, groups.rows, groups.starts, consume)


def gather_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Copy each token once for each of its experts. The backward is `scatter_rows` without weights.

    The ``j``-th choice of token ``t`` is assignment ``t * k + j``.

    Args:
        x: Tokens ``[tokens, dim]``.
        order: Assignments in the order of the result, ``[tokens * k]``, int64.
        places: Inverse of ``order``: the row of each assignment, ``[tokens, k]``, int64.

    Returns:
        Rows ``[tokens * k, dim]``.

    Raises:
        ExpertConfigError: A shape or dtype is wrong. On the CPU also: ``places`` does not invert
            ``order``.

    Examples:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> order, places = torch.tensor([1, 2, 0, 3]), torch.tensor([[2, 0], [1, 3]])
        >>> gather_rows(x, order, places).flatten()
        tensor([1., 2., 1., 2.])
    """
    return gather_tokens(x, _groups_of(order, places, x.shape[0]))


def scatter_rows(
    rows: Tensor, order: Tensor, places: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum the rows of each token, with weights. The transpose of `gather_rows`.

    The sum is deterministic.

    Args:
        rows: Rows ``[tokens * k, dim]`` in the order ``order``.
        order: Assignments in the order of ``rows``, as for `gather_rows`.
        places: Inverse of ``order``, as for `gather_rows`.
        weights: Factor of each row, ``[tokens, k]``. Defaults to None: 1.

    Returns:
        Sums ``[tokens, dim]``.

    Raises:
        ExpertConfigError: As from `gather_rows`, or ``rows`` or ``weights`` has not one entry for
            each assignment.

    Examples:
        >>> order, places = torch.tensor([1, 2, 0, 3]), torch.tensor([[2, 0], [1, 3]])
        >>> scatter_rows(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), order, places).flatten()
        tensor([4., 6.])
    """
    groups = _groups_of(order, places, places.shape[0])
    if rows.shape[0] != places.numel():
        raise ExpertConfigError(
            f"scatter_rows got {rows.shape[0]} rows for {tuple(places.shape)} token assignments; "
            "give one for each"
        )
    if weights is not None and weights.shape != places.shape:
        raise ExpertConfigError(
            f"weights {tuple(weights.shape)} and places {tuple(places.shape)} must agree"
        )
    return scatter_tokens(rows, groups, weights)


def reorder(rows: Tensor, indices: Tensor, inverse: Tensor) -> Tensor:
    """Return ``rows[indices]``; backward takes ``inverse``, which the caller has at hand."""
    return run_function(_Reorder, rows, indices, inverse)


def invert(indices: Tensor) -> Tensor:
    """Return the inverse of a permutation ``[n]``."""
    steps = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)
    return torch.empty_like(indices).scatter_(0, indices, steps)


def row_parts(x: Tensor) -> Iterator[slice]:
    """Yield slices of ``x [rows, n]``, each of as many rows as are computed at once.

    Temporaries stay small, and on a CPU in its cache; elsewhere a kernel launch costs more than a
    larger temporary. There is one slice at least.
    """
    step = max(1, (_BLOCK if x.is_cpu else 64 * _BLOCK) // max(1, x.shape[1]))
    return (slice(start, start + step) for start in range(0, max(1, x.shape[0]), step))


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return each row's inner product, in float32 where that is wider.

    In parts: torch's own product makes a temporary as large as ``a``.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    parts = [torch.linalg.vecdot(a[p].to(wide), b[p].to(wide)) for p in row_parts(a)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum_groups(
    x: Tensor, rows: Tensor, starts: Tensor | None, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of each group of rows of ``x``; see `TokenGroups`."""
    if starts is not None and not x.numel():  # torch's sums refuse to choose from nothing
        return x.new_zeros(starts.shape[0], x.shape[1])
    total: Tensor = F.embedding_bag(
        rows, x.contiguous(), starts, mode="sum", per_sample_weights=weights
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
        zeros = grads[0].new_zeros(ctx.size, *grads[0].shape[1:])
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        sums: torch.dtype,
        tokens: Tensor,
        rows: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, starts)
        ctx.dtype, ctx.sums = x.dtype, sums
        return x.to(dtype).index_select(0, tokens)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = _sum_groups(grads[0].to(ctx.sums), *ctx.saved_tensors)
        return total.to(ctx.dtype), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        tokens: Tensor,
        rows: Tensor,
        starts: Tensor | None,
        consume: bool,
    ) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if keep else None, weights, tokens, rows)
        ctx.consume = consume
        return _sum_groups(x, rows, starts, None if weights is None else weights.to(x.dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, tokens, rows = ctx.saved_tensors
        if weights is None:
            return grads[0].index_select(0, tokens), None, None, None, None, None
        flat = rows.view(-1)
        each = weights.new_empty(flat.shape).index_copy_(0, flat, weights.reshape(-1))
        scale = each.to(grads[0].dtype)[:, None]
        if x is not None and ctx.consume and not backward_keeps_graph():
            found = x
        else:
            found = grads[0].new_empty(tokens.shape[0], grads[0].shape[1])
        products = []
        for part in row_parts(found):
            grad = grads[0].index_select(0, tokens[part])
            if x is not None:
                products.append(row_products(x[part], grad))
            torch.mul(grad, scale[part], out=found[part])
        if x is None:
            return found, None, None, None, None, None
        inner = torch.cat(products).to(weights.dtype).index_select(0, flat)
        return found, inner.view(rows.shape), None, None, None, None


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
    counts = torch.zeros(number, dtype=torch.uint8, device="cpu")
    # Where one index is out of range another is missing: count the others.
    known = indices[(indices >= 0) & (indices < number)]
    missing = counts.index_fill_(0, known, 1) == 0
    if missing.any():
        raise ExpertConfigError(
            f"indices are no permutation of {number} rows: {missing.nonzero()[0].item()} is not "
            f"among them; each of 0 .. {number - 1} must be there once"
        )


def _groups_of(order: Tensor, places: Tensor, tokens: int) -> TokenGroups:
    """Return the groups; `ExpertConfigError` unless ``order`` and ``places`` are inverses."""
    if places.dim() != 2 or places.shape[0] != tokens or order.shape != (places.numel(),):
        raise ExpertConfigError(
            f"order {tuple(order.shape)} and places {tuple(places.shape)} must be [tokens * k] and "
            f"[tokens, k] for {tokens} tokens"
        )
    if order.dtype != torch.int64 or places.dtype != torch.int64:
        raise ExpertConfigError(
            f"order is {order.dtype} and places are {places.dtype}; they must be torch.int64"
        )
    if order.is_cpu and places.is_cpu:  # elsewhere looking would synchronise
        flat = places.reshape(-1)
        check_permutation(flat, flat)
        wrong = order.index_select(0, flat) != torch.arange(flat.shape[0], device="cpu")
        if wrong.any():
            which = int(wrong.nonzero()[0].item())
            raise ExpertConfigError(
                f"places say that assignment {which} is row {flat[which].item()}, but order has "
                f"assignment {order[flat[which]].item()} there; places must be the inverse of order"
            )
    return TokenGroups(tokens=order // max(1, places.shape[1]), rows=places)


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
