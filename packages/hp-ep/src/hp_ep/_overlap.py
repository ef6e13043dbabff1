"""Tokens in chunks: one travels while the experts work on another."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .dispatch._interface import TokenDispatcher, start_combine, start_dispatch

Chunk = tuple[Tensor, Tensor, Tensor]


def run_chunks(
    dispatcher: TokenDispatcher,
    experts: Callable[[Tensor, Tensor], Tensor],
    chunks: Sequence[Chunk],
    beside: Callable[[], Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens' results ``[tokens, dim]`` and what ``beside`` returns.

    ``chunks`` are tokens, weights and expert ids, in the same number on every rank. While the first
    travels ``beside`` runs; while the experts compute one chunk the next is on its way to them and
    the one before on its way back. In backward the same happens in the opposite order. A dispatcher
    that cannot be started and waited for apart does one thing after the other.
    """
    pending = start_dispatch(dispatcher, *chunks[0])
    aside = beside()
    returning = []
    for following in (*chunks[1:], None):
        rows, counts, state = pending.wait()
        if following is not None:
            pending = start_dispatch(dispatcher, *following)
        results = experts(rows, counts)
        if following is not None:
            pending.send()  # before these results, which would be waited for
        returning.append(start_combine(dispatcher, results, state))
    parts = [each.wait() for each in returning]
    return parts[0] if len(parts) == 1 else torch.cat(parts), aside
