"""The mixture-of-experts layer: router, dispatcher, experts."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis

from ._errors import ExpertConfigError
from ._experts import Activation, GroupedExperts, SharedExperts
from ._overlap import run_chunks
from ._sizes import check_shared, check_sizes
from .dispatch._interface import TokenDispatcher
from .dispatch._local import Local
from .routing._router import TopKRouter

Sequences = tuple[Tensor, int]
"""Which sequence each token is of, ``[tokens]``, and how many there are."""


class MoE(nn.Module):
    """A layer of ``num_experts`` feed-forward experts, ``top_k`` of which see each token.

    The result is the sum over a token's experts of routing weight times expert output (Shazeer et
    al., arXiv 1701.06538, section 2), plus ``num_shared_experts`` experts' worth of a network that
    sees every token (Dai et al., arXiv 2401.06066, section 3.2). Needs no process group as it is;
    `ExpertParallel` spreads the experts over ranks.

    ``router`` is the `TopKRouter` given, or a plain one with ``load_balance_loss``; ``experts`` a
    `GroupedExperts`, ``shared_experts`` a network or None, ``dispatcher`` a `TokenDispatcher`
    (`Local` by default) that may be replaced between calls. Shared experts run while tokens travel.
    ``num_chunks`` cuts the tokens in as many parts, so that one travels while the experts compute
    another: they are called once for each. `ExpertConfigError` for numbers that make no layer.
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
        num_chunks: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_shared(num_shared_experts)
        check_sizes({"num_chunks": num_chunks})
        self.num_chunks = num_chunks
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
        elif not isinstance(router, TopKRouter):
            raise ExpertConfigError(f"router is a {type(router).__name__}; give a TopKRouter")
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
        self.compare_inputs: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the layer's result for ``x [..., dim]``, in its shape and dtype.

        Communicates what the dispatcher and the router's losses do; no token is dropped. ``x`` are
        this rank's own tokens: a DTensor must be sharded, not over ``dim``, since the tokens of a
        replicated one would be computed by every rank; where a style cut the experts inside, it
        must be replicated over the ranks that share them.

        With the router's ``sequence_loss`` the dimension before the last is that of a sequence.

        Tokens where ``valid [...]``, a bool for each of this rank's, is False are left out of
        everything, and their result is 0; that reads the mask on the host. A sequence without valid
        tokens has a ``sequence_loss`` of 0, and counts in the mean over sequences.

        `ExpertConfigError` for such a DTensor, for an input whose last dimension is not ``dim``,
        that has no floating dtype of two bytes or more, is no tensor or on the meta device, and for
        a wrong mask. Where only some ranks' inputs are so and tokens travel, or only some ranks are
        under autocast, all of them raise a `RoutingError` instead; a wrong mask or DTensor and,
        where no tokens travel, a wrong input are seen on their own rank alone, for which others
        then wait.
        """
        if not _has_values(x, self.router.weight):
            self._report(torch.empty(0, self.dim, device="meta"), torch.Size())
            raise ExpertConfigError(
                f"the input is {_kind(x)}; give a tensor on the layer's device, "
                f"{self.router.weight.device}"
            )
        if isinstance(x, DTensor):
            _check_tokens(x, self.replicated_over)
            result = DTensor.from_local(
                self._compute(x.to_local(), valid),
                x.device_mesh,
                x.placements,
                run_check=False,
                shape=x.shape,
                stride=torch.empty(x.shape, device="meta").stride(),
            )
            return result
        return self._compute(x, valid)

    def _compute(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the result for this rank's own tokens, contiguous."""
        if not x.is_floating_point() or x.element_size() == 1:  # torch does not multiply float8
            self._report(x.new_empty(0, self.dim), x.shape)
            raise ExpertConfigError(
                f"the input is {x.dtype}; give one of a floating dtype of two bytes or more"
            )
        if x.shape[-1:] != (self.dim,):
            self._report(x.new_empty(0, x.shape[-1] if x.dim() else 0), x.shape)
            raise ExpertConfigError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be dim={self.dim}"
            )
        self._compare(x)
        tokens = x.reshape(-1, x.shape[-1])
        sequences = _sequences_of(x) if self.router.sequence_loss else None
        if valid is None:
            return self._routed(tokens, sequences).view(x.shape)
        if valid.shape != x.shape[:-1] or valid.dtype != torch.bool:
            raise ExpertConfigError(
                f"valid is {valid.dtype} of shape {tuple(valid.shape)}; it must be torch.bool of "
                f"shape {tuple(x.shape[:-1])}, one for each token"
            )
        places = valid.reshape(-1).nonzero()[:, 0]
        if sequences is not None:
            sequences = sequences[0].index_select(0, places), sequences[1]
        routed = self._routed(tokens.index_select(0, places), sequences)
        return torch.zeros_like(tokens).index_copy(0, places, routed).view(x.shape)

    def _compare(self, x: Tensor) -> None:
        """Compare inputs over the ranks that are to hold different ones, until they do once."""
        compare = self.compare_inputs
        if compare is not None and self.training and torch.is_grad_enabled():
            compare(x)
            self.compare_inputs = None

    def _report(self, x: Tensor, shape: torch.Size) -> None:
        """Take part in the exchanges of ranks with a good input, which tell all of ``x``.

        That has no rows, but what is wrong with the input of ``shape``.
        """
        weight = self.router.weight
        nothing = torch.empty(
            (*shape[:-2], 0, self.dim),
            dtype=weight.dtype,
            device=weight.device if x.is_meta else x.device,
        )
        self._compare(nothing)
        weights, expert_ids = self._route(nothing.view(0, self.dim), _sequences_of(nothing))
        if not isinstance(self.dispatcher, Local):  # nobody to tell
            self.dispatcher.dispatch(x, weights, expert_ids)

    def _route(self, tokens: Tensor, sequences: Sequences | None) -> tuple[Tensor, Tensor]:
        weights: Tensor
        expert_ids: Tensor
        wanted = () if sequences is None or not self.router.sequence_loss else sequences
        weights, expert_ids = self.router(tokens, *wanted)
        return weights, expert_ids

    def _routed(self, tokens: Tensor, sequences: Sequences | None) -> Tensor:
        weights, expert_ids = self._route(tokens, sequences)
        parts = (t.tensor_split(self.num_chunks) for t in (tokens, weights, expert_ids))
        shared = self.shared_experts
        total, aside = run_chunks(
            self.dispatcher,
            self.experts,
            list(zip(*parts, strict=True)),
            lambda: None if shared is None else shared(tokens),
        )
        return total if aside is None else total + aside


def _sequences_of(x: Tensor) -> Sequences:
    """Return the sequences of ``x [..., length, dim]``, all before its last two dimensions."""
    number = math.prod(x.shape[:-2])
    length = math.prod(x.shape[:-1]) // max(number, 1)
    ids = torch.arange(number, device=x.device)
    return ids[:, None].expand(number, length).reshape(-1), number


def _has_values(x: object, weight: Tensor) -> bool:
    """Return whether ``x`` is a tensor that can be computed with ``weight``."""
    return isinstance(x, Tensor) and (weight.is_meta or not x.is_meta)


def _kind(x: object) -> str:
    return f"a {type(x).__name__}" + (" on the meta device" if isinstance(x, Tensor) else "")


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
