"""The losses of routing, and how they reach the gradient without being returned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.torch_compat import inside_backward

from ._torch import first_order, run_function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """What one forward routed: sums of probabilities and choices, ``[experts]`` each."""

    probabilities: Tensor
    counts: Tensor
    num_tokens: int


class RoutingRecord:
    """What a router's forwards routed while it was open; a copy is empty and closed."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.entries: list[Routed] = []

    def __reduce__(self) -> tuple[type["RoutingRecord"], tuple[()]]:
        return RoutingRecord, ()

    def add(self, routed: Routed) -> None:
        """Note one forward, if the record is open; not one that backward runs again."""
        if self.is_open and not inside_backward():
            self.entries.append(routed)


def load_balancing_share(
    probabilities: Tensor, counts: Tensor, num_tokens: Tensor, top_k: int
) -> Tensor:
    """Return this rank's share of the load-balancing loss of the whole batch, a scalar.

    The loss is ``E * sum_e f_e * P_e`` (Fedus et al., arXiv 2101.03961, section 2.2), where ``f_e``
    is the fraction of all choices that fell on expert ``e`` and ``P_e`` the mean probability of
    ``e`` over all tokens; it is 1 where all is uniform. ``probabilities [tokens, E]`` are this
    rank's, ``counts [E]`` and ``num_tokens`` those of all ranks, so the shares sum to the loss.
    ``counts`` carries no gradient. Communicates nothing.
    """
    tokens = num_tokens.to(probabilities.dtype).clamp(min=1)
    fractions = counts.to(probabilities.dtype) / (tokens * top_k)
    return probabilities.shape[1] * (fractions * probabilities.sum(0)).sum() / tokens


def sequence_balancing_share(
    probabilities: Tensor, sequence_ids: Tensor, counts: Tensor, num_sequences: Tensor, top_k: int
) -> Tensor:
    """Return this rank's share of the mean over sequences of each one's load-balancing loss.

    The loss of a sequence is `load_balancing_share`'s of its tokens alone (DeepSeek-V3, arXiv
    2412.19437, equations 17 to 20), 0 without any. ``probabilities [tokens, E]`` are this rank's,
    ``sequence_ids [tokens]`` say whose row of ``counts [sequences, E]`` a token is in; ``counts``
    are those of all ranks that share these sequences, ``num_sequences`` of the whole batch.
    Communicates nothing.
    """
    counts = counts.to(probabilities.dtype)
    choices = counts.sum(1).clamp(min=top_k)
    sums = probabilities.new_zeros(counts.shape).index_add(0, sequence_ids, probabilities)
    each = (counts * sums).sum(1) / choices / (choices / top_k)
    return counts.shape[1] * each.sum() / num_sequences.to(counts.dtype).clamp(min=1)


def z_share(logits: Tensor, num_tokens: Tensor) -> Tensor:
    """Return this rank's share of the z loss of the whole batch, a scalar.

    The loss is the mean over all tokens of ``logsumexp(logits) ** 2`` (Zoph et al., arXiv
    2202.08906, section 3.2); ``num_tokens`` is that of all ranks. Communicates nothing.
    """
    return logits.logsumexp(-1).square().sum() / num_tokens.to(logits.dtype).clamp(min=1)


def attach(x: Tensor, loss: Tensor, add_load: Callable[[Tensor], None], counts: Tensor) -> Tensor:
    """Return ``x``; its backward calls ``add_load(counts)`` and gives ``loss`` a gradient of 1.

    ``counts`` may be any tensor that ``add_load`` takes. Loads are counted in backward because
    forward runs twice if activations are recomputed. If several backward passes use one graph, the
    first of them counts.
    """
    return run_function(_Attach, x, loss, add_load, counts)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, add_load: Callable[[Tensor], None], counts: Tensor
    ) -> Tensor:
        ctx.add_load = add_load
        ctx.save_for_backward(counts)
        ctx.loss = loss.shape, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        if ctx.add_load is not None:
            ctx.add_load(counts)
            ctx.add_load = None
        shape, dtype, device = ctx.loss
        return grads[0], torch.ones(shape, dtype=dtype, device=device), None, None
