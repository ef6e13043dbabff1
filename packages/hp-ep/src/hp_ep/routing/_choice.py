"""From scores to chosen experts: within groups, with a bias that steers but does not weigh."""

import torch
from torch import Tensor


def choose_experts(
    scores: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_experts: int = 2,
) -> Tensor:
    """Return the ids ``[tokens, top_k]`` of the largest ``scores [tokens, experts]`` plus ``bias``.

    With ``num_groups`` equal blocks of experts only those of each token's best ``top_groups`` are
    chosen from; a group is as good as the sum of its ``group_score_experts`` best experts, or of
    all where it has fewer. Carries no gradient; equal scores give equal ids.
    """
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if top_groups < num_groups:
        groups = ranked.unflatten(1, (num_groups, -1))
        best = min(group_score_experts, groups.shape[2])
        kept = groups.topk(best).values.sum(-1).topk(top_groups).indices
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
        dropped = dropped.scatter_(1, kept, torch.zeros_like(kept, dtype=torch.bool))
        ranked = groups.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
    return ranked.topk(top_k).indices
