"""Run a module's own forward on all rows of some heads, between two exchanges."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._blockwise import repeat_heads
from ._errors import InputError
from ._inputs import from_batch_first, to_batch_first
from ._lineage import note_rows
from ._plan import AttentionPlan
from ._ulysses import Exchange, heads_to_rows, rows_to_heads

Forward = Callable[[Tensor, Tensor, Tensor], Any]


def exchange_around(
    forward: Forward,
    qkv: tuple[Tensor, ...],
    plan: AttentionPlan,
    exchange: Exchange,
    seq_dim: int,
    head_dim: int,
) -> Any:
    """Return what ``forward`` returns for the whole sequence of this rank's heads, as local rows.

    Tensors shaped like the q that it gets come back as this rank's rows of all heads, whether alone
    or in a tuple or list, which keep their type; other values pass. Communicates as
    `rows_to_heads` does and as `heads_to_rows` does for each such tensor. Raises `InputError` after
    the first exchange where there is none.
    """
    dims = (seq_dim, head_dim)
    q, k, v = (to_batch_first(x, *dims) for x in qkv)
    q, k, v = rows_to_heads(q, k, v, exchange)
    repeats = exchange.shares[exchange.peers.index].repeats  # the module groups heads evenly
    k, v = (repeat_heads(x, repeats) for x in (k, v))
    q, k, v = (from_batch_first(x, *dims) for x in (q, k, v))
    shape = q.shape
    result = forward(q, k, v)

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == shape

    if not any(map(has_rows, result if isinstance(result, (tuple, list)) else [result])):
        raise InputError(
            f"the module returned {_describe(result)}, and nothing shaped like the q that it got, "
            f"{tuple(shape)}; return the attention of that shape, alone or in a tuple or list, or "
            f"use ulysses_degree=1"
        )

    def back(value: Any) -> Any:
        if not has_rows(value):
            return value
        mine = heads_to_rows(to_batch_first(value, *dims), exchange)
        return from_batch_first(note_rows(mine, plan), *dims)

    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(back, result))
    if isinstance(result, (tuple, list)):
        return type(result)(map(back, result))
    return back(result)


def _describe(result: Any) -> str:
    """Return the shapes of what a forward returned, and the types of what is no tensor."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of [{', '.join(map(_describe, result))}]"
    return f"a {type(result).__name__}"
