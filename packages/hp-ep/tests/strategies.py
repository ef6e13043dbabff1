"""Routings of a few tokens on a few ranks, the odd ones often."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

MISFITS = [
    ((2,), (2, 1), (2, 1), "the tokens or rows have 1 dimensions; give a matrix [tokens, dim]"),
    ((2, 1), (2,), (2, 1), "weights have 1 dimensions; give a matrix [tokens, k]"),
    ((2, 1), (2, 1), (2, 1, 1), "expert_ids have 3 dimensions; give a matrix [tokens, k]"),
    ((3, 1), (2, 1), (3, 1), "weights are for 2 tokens, but x has 3"),
    ((2, 1), (2, 1), (3, 1), "expert_ids are for 3 tokens, but x has 2"),
    ((2, 1), (2, 1), (2, 2), "expert_ids name 2 experts per token, but there are 1 weights"),
    ((2, 1), (2, 4), (2, 4), "each token names 4 of 3 experts; use 1 to 3"),
    ((2, 1), (2, 0), (2, 0), "each token names 0 of 3 experts; use 1 to 3"),
]
"""Shapes of x, weights and expert ids for 3 experts, and how the complaint begins."""


@dataclass(frozen=True)
class Routing:
    """What the router of each rank decided, and the inputs: one entry per rank."""

    num_ranks: int
    num_experts: int
    top_k: int
    x: list[Tensor]
    weights: list[Tensor]
    expert_ids: list[Tensor]


@st.composite
def routings(draw: st.DrawFn, max_ranks: int = 4, dim: int = 3) -> Routing:
    """Draw uneven loads: ranks or experts without tokens, one expert for all, k = E."""
    ranks = draw(st.integers(1, max_ranks))
    experts = ranks * draw(st.integers(1, 3))
    top_k = draw(st.one_of(st.integers(1, min(experts, 4)), st.just(experts)))
    tokens = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    load = draw(st.sampled_from(["any", "first", "last"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(sum(tokens), experts, generator=generator, dtype=torch.float64)
    if load != "any":  # the same few experts for every token
        logits += torch.arange(experts) * (100.0 if load == "last" else -100.0)
    ids = logits.topk(top_k).indices
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64) + 0.1
    x = torch.randn(sum(tokens), dim, generator=generator, dtype=torch.float64)
    return Routing(
        num_ranks=ranks,
        num_experts=experts,
        top_k=top_k,
        x=list(x.split(tokens)),
        weights=list(weights.split(tokens)),
        expert_ids=list(ids.split(tokens)),
    )


@st.composite
def group_counts(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Draw ``(tokens_per_expert_group, experts_per_rank, num_ranks)``."""
    experts, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = experts * ranks
    counts = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    return torch.tensor(counts), experts, ranks
