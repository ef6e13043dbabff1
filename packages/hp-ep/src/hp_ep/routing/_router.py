"""Which experts a token goes to."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from .._errors import ExpertConfigError
from .._parameters import local_weight
from .._sizes import check_choices, check_coefficient, check_sizes
from ..dispatch._sorting import count_ids
from ._losses import attach, load_balancing_share


class TopKRouter(nn.Module):
    """Chooses ``top_k`` of ``num_experts`` for each token, with weights that sum to 1.

    The probabilities are a softmax over all experts of ``weight [num_experts, dim]`` times the
    token; the weights are the ``top_k`` largest, divided by their sum. They are computed and
    returned in float32, or in the input's dtype where that is wider.

    While training, ``load_balance_loss`` times the load-balancing loss of the whole batch (see
    `split_tokens_over`) enters the gradient through the weights; it is added to a loss that is
    summed over ranks, whatever its scale, and is not returned. The buffer ``load [num_experts]``
    (int64, not saved) grows in backward by the number of times that this rank chose each expert.
    ``token_axes`` are the axes given to `split_tokens_over`, None before. `ExpertConfigError` for
    sizes that are no positive integers, ``top_k`` of more than all experts, a negative loss.
    """

    load: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax"] = "softmax",
        load_balance_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes({"dim": dim, "num_experts": num_experts})
        check_choices(top_k, num_experts)
        check_coefficient(load_balance_loss)
        if score != "softmax":
            raise ExpertConfigError(f"score={score!r} is not one of ['softmax']")
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.load_balance_loss = float(load_balance_loss)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        load = torch.empty(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        self.token_axes: tuple[Axis, ...] | None = None
        self._collectives: Collectives = TorchCollectives()
        self.reset_parameters()

    @property
    def needs_whole_batch(self) -> str:
        """Return why the load of all ranks is needed, '' where it is not."""
        if self.load_balance_loss:
            return f"load_balance_loss={self.load_balance_loss} is the loss of the whole batch"
        return ""

    def extra_repr(self) -> str:
        """Return the sizes and the loss's coefficient, as ``print`` shows them."""
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"load_balance_loss={self.load_balance_loss}"
        )

    def reset_parameters(self) -> None:
        """Draw the weight anew, uniform within ``1 / sqrt(dim)``, and set the load to zero."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        self.load.zero_()

    def split_tokens_over(
        self, axes: AxisMesh | Sequence[Axis], collectives: Collectives | None = None
    ) -> None:
        """Say which axes split the batch's tokens, so that the loss is that of the whole batch.

        ``axes`` are all axes of a mesh, or `Axis` objects, on which ranks hold *different* tokens:
        data and context parallel, and tensor parallel where the input is sharded by sequence. With
        ``load_balance_loss`` each training forward then makes one small all-reduce per axis.
        """
        self.token_axes = as_axes(axes)
        if collectives is not None:
            self._collectives = collectives

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and expert ids, both ``[tokens, top_k]``, for ``x [tokens, dim]``.

        Equal inputs give equal ids, so recomputed activations meet the same experts.
        """
        logits = F.linear(x, local_weight(self.weight))
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(-1, dtype=wide)
        chosen, expert_ids = probabilities.topk(self.top_k)
        weights = chosen / chosen.sum(-1, keepdim=True)
        if self.training and torch.is_grad_enabled():
            counts = count_ids(expert_ids, self.num_experts)
            loss = self._loss(probabilities, counts)
            weights = attach(weights, loss, self.load, counts)
        return weights, expert_ids

    def _loss(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        if self.load_balance_loss == 0:
            return probabilities.new_zeros(())
        tokens = counts.new_full((1,), probabilities.shape[0])
        totals = torch.cat([counts, tokens])
        for axis in self.token_axes or ():
            (totals,) = self._collectives.all_reduce(axis, [totals]).wait()
        share = load_balancing_share(probabilities, totals[:-1], totals[-1], self.top_k)
        return self.load_balance_loss * share


def as_axes(axes: AxisMesh | Sequence[Axis]) -> tuple[Axis, ...]:
    """Return ``axes``, or all axes of a mesh; communicates nothing."""
    if isinstance(axes, Sequence):
        if not all(isinstance(axis, Axis) for axis in axes):
            raise ExpertConfigError(f"token axes {axes!r} are not a mesh or a sequence of Axis")
        return tuple(axes)
    return tuple(Axis.of(axes, i) for i in range(axes.ndim))
