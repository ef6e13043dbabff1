"""The mixture-of-experts layer: router, dispatcher, experts."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis

from ._errors import ExpertConfigError
from ._experts import Activation, GroupedExperts, SharedExperts
from ._sizes import check_shared
from .dispatch._local import Local
from .dispatch._protocol import TokenDispatcher
from .routing._router import TopKRouter


class MoE(nn.Module):
    """A layer of ``num_experts`` feed-forward experts, ``top_k`` of which see each token.

    The result is the sum over a token's experts of routing weight times expert output (Shazeer et
    al., arXiv 1701.06538, section 2), plus ``num_shared_experts`` experts' worth of a network that
    sees every token (Dai et al., arXiv 2401.06066, section 3.2). Needs no process group as it is;
    `ExpertParallel` spreads the experts over ranks.

    ``router`` is a `TopKRouter` with ``load_balance_loss``, ``experts`` a `GroupedExperts`,
    ``shared_experts`` a network or None, ``dispatcher`` a `TokenDispatcher` (`Local` by default)
    that may be replaced between calls. `ExpertConfigError` for numbers that make no layer.
    """

    dispatcher: TokenDispatcher

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared_experts: int = 0,
        activation: Activation = "swiglu",
        load_balance_loss: float = 0.0,
        router: TopKRouter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_shared(num_shared_experts)
        self.dim = dim
        if router is None:
            router = TopKRouter(
                dim,
                num_experts,
                top_k,
                load_balance_loss=load_balance_loss,
                device=device,
                dtype=dtype,
            )
        elif (router.dim, router.num_experts, router.top_k) != (dim, num_experts, top_k):
            raise ExpertConfigError(
                f"a router with dim={router.dim}, num_experts={router.num_experts}, "
                f"top_k={router.top_k} in a layer with dim={dim}, num_experts={num_experts}, "
                f"top_k={top_k}; they must agree"
            )
        elif load_balance_loss:
            raise ExpertConfigError(
                f"load_balance_loss={load_balance_loss} beside a router of its own; give it to the "
                "router"
            )
        self.router = router
        self.experts = GroupedExperts(
            dim, hidden_dim, num_experts, activation=activation, device=device, dtype=dtype
        )
        self.shared_experts: SharedExperts | None = None
        if num_shared_experts:
            self.shared_experts = SharedExperts(
                dim,
                hidden_dim * num_shared_experts,
                activation=activation,
                device=device,
                dtype=dtype,
            )
        self.dispatcher = Local(num_experts)
        self.replicated_over: Axis | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result for ``x [..., dim]``, in its shape and dtype.

        Communicates what the dispatcher and the router's loss do; no token is dropped. ``x`` are
        this rank's own tokens: a DTensor must be sharded, not over ``dim``, since the tokens of a
        replicated one would be computed by every rank.

        `ExpertConfigError` for such a DTensor and for an input whose last dimension is not ``dim``,
        raised only on the rank whose input it is, before it communicates: other ranks wait for it.
        """
        if isinstance(x, DTensor):
            _check_tokens(x, self.replicated_over)
            result = DTensor.from_local(
                self._compute(x.to_local()),
                x.device_mesh,
                x.placements,
                run_check=False,
                shape=x.shape,
                stride=torch.empty(x.shape, device="meta").stride(),
            )
            return result
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        """Return the result for this rank's own tokens, contiguous."""
        if x.shape[-1:] != (self.dim,):
            raise ExpertConfigError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be dim={self.dim}"
            )
        tokens = x.reshape(-1, x.shape[-1])
        weights, expert_ids = self.router(tokens)
        rows, counts, state = self.dispatcher.dispatch(tokens, weights, expert_ids)
        total = self.dispatcher.combine(self.experts(rows, counts), state)
        if self.shared_experts is not None:
            total = total + self.shared_experts(tokens)
        return total.view(x.shape)


def _check_tokens(x: DTensor, replicated_over: Axis | None) -> None:
    """Raise unless ``x`` is each token once, or once on each rank of ``replicated_over``."""
    for index, placement in enumerate(x.placements):
        ranks = Axis.of(x.device_mesh, index).ranks
        alike = replicated_over is not None and ranks == replicated_over.ranks
        if alike and not placement.is_replicate():
            raise ExpertConfigError(
                f"the input is a DTensor with placements {x.placements}; replicate it over the "
                f"ranks {list(ranks)}, each of which has a part of every expert"
            )
        if not alike and (not placement.is_shard() or placement.is_shard(x.dim() - 1)):
            raise ExpertConfigError(
                f"the input is a DTensor with placements {x.placements}; shard it over tokens (by "
                "sequence or batch) or pass this rank's own tokens as a plain tensor"
            )
