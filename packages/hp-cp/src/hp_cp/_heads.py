"""The Ulysses exchange: from a part of the sequence with all heads to all of it with some heads.

Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3. Rows travel sequence-major, so that
received rows are already in rank order and only layouts that interleave ranks need another copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, all_to_all

from ._layouts import Chunks, in_global_order, lengths_of


def rows_to_heads(
    tensors: Sequence[Tensor], axis: Axis, chunks: Chunks, collectives: Collectives
) -> list[Tensor]:
    """Return each ``[batch, heads, rows, size]`` as ``[batch, heads / n, seq_len, size]``.

    Rank ``r`` gets the ``r``-th share of the heads of every tensor, in global order of positions.
    A tensor with fewer heads than ranks has each head sent to the ranks that share it. One
    all-to-all over ``axis``; backward one more, and copies of a head sum their gradients.
    """
    n, lengths = axis.size, lengths_of(chunks)
    shared = [_repeated(x, n) for x in tensors]
    heads = [x.shape[1] // n for x in shared]
    by_rank = [x.unflatten(1, (n, x.shape[1] // n)).permute(1, 3, 0, 2, 4) for x in shared]
    send = torch.cat(by_rank, dim=3).flatten(0, 1)
    sent = (lengths[axis.index],) * n
    rows = all_to_all(send, axis, sent, lengths, collectives=collectives)
    pieces = rows.split([len(chunk) for rank in chunks for chunk in rank])
    whole = _join([pieces[i] for i in in_global_order(chunks)], rows)
    return list(whole.permute(1, 2, 0, 3).split(heads, dim=1))


def heads_to_rows(x: Tensor, axis: Axis, chunks: Chunks, collectives: Collectives) -> Tensor:
    """Return ``[batch, heads / n, seq_len, size]`` as ``[batch, heads, rows, size]``.

    The inverse of `rows_to_heads`. One all-to-all over ``axis``; backward one more.
    """
    n, lengths = axis.size, lengths_of(chunks)
    rows = x.permute(2, 0, 1, 3)
    order = in_global_order(chunks)
    sizes = [len(chunk) for rank in chunks for chunk in rank]
    pieces = dict(zip(order, rows.split([sizes[i] for i in order]), strict=True))
    send = _join([pieces[i] for i in range(len(sizes))], rows)
    mine = lengths[axis.index]
    received = all_to_all(send, axis, lengths, (mine,) * n, collectives=collectives)
    by_source = received.view(n, mine, *received.shape[1:])
    return by_source.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _repeated(x: Tensor, n: int) -> Tensor:
    heads = x.shape[1]
    return x if heads % n == 0 else x.repeat_interleave(n // heads, dim=1)


def _join(pieces: Sequence[Tensor], empty: Tensor) -> Tensor:
    if len(pieces) == 0:
        return empty
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
