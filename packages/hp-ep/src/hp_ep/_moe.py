"""The mixture-of-experts layer: router, dispatcher, experts."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis

from ._errors import ExpertConfigError
from ._experts import Activation, GroupedExperts, SharedExperts
from ._permutation import gather_tokens, place_rows, scatter_tokens
from ._router import TopKRouter
from ._sizes import check_shared, check_sizes
from ._torch import fenced
from .dispatch._interface import (
    Dispatched,
    DispatchState,
    Pending,
    TokenDispatcher,
    start_combine,
    start_dispatch,
)
from .dispatch._local import Local, sort_assignments

Sequences = tuple[Tensor, int]
"""Which sequence each token is of, ``[tokens]``, and how many there are."""

Chunk = tuple[Tensor, Tensor, Tensor]
"""Tokens, weights and expert ids."""
Experts = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What computes rows by expert, from their counts and weights."""


class MoE(nn.Module):
    """A mixture-of-experts layer: each token is computed by ``top_k`` of ``num_experts`` experts.

    The result for a token is the sum over its experts of routing weight times expert output
    (Shazeer et al., arXiv 1701.06538, section 2). If there are shared experts, their output is
    added; they compute every token (Dai et al., arXiv 2401.06066, section 3.2). Without a style,
    the layer runs in one process. A style such as `ExpertParallel` splits the experts over ranks.
    The shared experts then run while tokens are in flight.

    ``torch.compile`` supports the layer: as one graph if all experts are local, else with graph
    breaks around communication.

    Args:
        dim: Length of a token.
        hidden_dim: Hidden size of each expert.
        num_experts: Number of experts of all ranks.
        top_k: Number of experts per token.
        num_shared_experts: Number of shared experts. They are one network with the hidden size
            ``num_shared_experts * hidden_dim``. Defaults to 0.
        gated_shared_experts: If True, the output of the shared experts is multiplied by a sigmoid
            of the token (Qwen). Defaults to False.
        activation: Activation of all experts, as for `GroupedExperts`. Defaults to None:
            ``"swiglu"``, or the activation of ``experts``.
        load_balance_loss: Coefficient of the load-balancing loss if ``router`` is None. Defaults to
            0.0.
        router: The `TopKRouter` to use. Defaults to None: a router with default options.
        experts: The `GroupedExperts` to use. Defaults to None: experts with default options.
        num_chunks: Number of chunks into which the tokens are split. One chunk is in flight while
            the experts compute another. Defaults to 1.
        device: Device of the parameters. Defaults to the default device.
        dtype: Dtype of the parameters. Defaults to the default dtype.

    Attributes:
        dispatcher: The `TokenDispatcher` of the layer, `Local` by default. It can be replaced
            between calls.

    Raises:
        ExpertConfigError: A number is invalid; ``router`` or ``experts`` has the wrong type or
            other sizes than the layer; or ``load_balance_loss`` is given together with ``router``,
            or ``activation`` together with ``experts``.

    Examples:
        >>> layer = MoE(dim=64, hidden_dim=128, num_experts=8, top_k=2)
        >>> layer(torch.randn(4, 16, 64)).shape
        torch.Size([4, 16, 64])
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
        gated_shared_experts: bool = False,
        activation: Activation | None = None,
        load_balance_loss: float = 0.0,
        router: TopKRouter | None = None,
        experts: GroupedExperts | None = None,
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
        if experts is None:
            experts = GroupedExperts(
                dim,
                hidden_dim,
                num_experts,
                activation=activation or "swiglu",
                device=device,
                dtype=dtype,
            )
        elif activation is not None:
            raise ExpertConfigError(
                f"activation={activation!r} beside experts of their own; give it to the experts"
            )
        _check_experts(experts, dim, hidden_dim, num_experts)
        self.experts = experts
        self.shared_experts: SharedExperts | None = None
        if num_shared_experts:
            self.shared_experts = SharedExperts(
                dim,
                hidden_dim * num_shared_experts,
                activation=experts.activation,
                swiglu_alpha=experts.swiglu_alpha,
                swiglu_limit=experts.swiglu_limit,
                gated=gated_shared_experts,
                device=device,
                dtype=dtype,
            )
        elif gated_shared_experts:
            raise ExpertConfigError(
                "gated_shared_experts=True without shared experts; set num_shared_experts"
            )
        self.dispatcher = Local(num_experts)
        self.replicated_over: Axis | None = None
        self.compare_inputs: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Compute the layer for this rank's tokens.

        All ranks that split the experts have to call the layer, also ranks without tokens. The
        dispatcher communicates. If the router has losses, one small all-reduce per axis is added.

        Args:
            x: Tokens ``[..., dim]``. A DTensor must be sharded over another dimension than the
                last; if it were replicated, every rank would compute the same tokens. Exception: if
                a style has split each expert over ranks (`TensorParallel`), the DTensor must be
                replicated over these ranks. If the router has a ``sequence_loss``, the dimension
                before the last is the sequence.
            valid: Bool mask ``[...]``. Tokens with False are not routed and not counted, and their
                results are 0. The mask is read on the host. Defaults to None: all tokens are valid.

        Returns:
            Results with the shape and dtype of ``x``.

        Raises:
            ExpertConfigError: ``x`` does not have the last dimension ``dim``, a floating dtype of
                at least two bytes, or the device of the layer; ``x`` is a DTensor with a wrong
                placement; or ``valid`` has a wrong shape or dtype. Raised before communication. If
                only one rank has an invalid ``valid`` or DTensor, only this rank raises and the
                others wait. The same holds for any invalid ``x`` if the dispatcher does not
                communicate.
            RoutingError: Only some ranks have an invalid ``x``, or only some run under autocast,
                and the dispatcher communicates. All ranks raise together.
        """
        if self.router.experts_are_split or self.replicated_over is not None:
            check_unwrapped(self.experts)
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
        return place_rows(routed, places, tokens.shape[0]).view(x.shape)

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
        chunks = list(zip(*parts, strict=True))
        shared = self.shared_experts
        if isinstance(self.dispatcher, Local):  # nothing to wait for, and nothing to overlap
            here = [run_here(self.dispatcher, self.experts, chunk) for chunk in chunks]
            aside = None if shared is None else shared(tokens)
            total = here[0] if len(here) == 1 else torch.cat(here)
        else:
            total, aside = run_chunks(
                self.dispatcher,
                self.experts,
                chunks,
                lambda: None if shared is None else shared(tokens),
            )
        return total if aside is None else total + aside.to(total.dtype)


def run_here(dispatcher: Local, experts: Experts, chunk: Chunk) -> Tensor:
    """Return the results of tokens ``[tokens, dim]`` whose experts are all here."""
    x, weights, expert_ids = chunk
    if not torch.compiler.is_compiling():
        rows, counts, state = dispatcher.start_dispatch(
            x, weights, expert_ids, weigh_rows=True
        ).wait()
        return dispatcher.combine(experts(rows, counts, state.row_weights), state)
    # The same without objects that a graph cannot hold; the ids are those of the layer's router.
    found = sort_assignments(expert_ids, dispatcher.num_experts)
    groups = found.groups
    results = experts(gather_tokens(x, groups), found.counts, found.weights(weights))
    return scatter_tokens(results.to(x.dtype), groups)


def run_chunks(
    dispatcher: TokenDispatcher,
    experts: Experts,
    chunks: Sequence[Chunk],
    beside: Callable[[], Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens' results ``[tokens, dim]`` and what ``beside`` returns.

    ``chunks`` are as many on every rank. While the first travels ``beside`` runs; while the experts
    compute one chunk the next is on its way to them and the one before on its way back. In backward
    the same happens in the opposite order. A dispatcher that cannot be started and waited for apart
    does one thing after the other.
    """
    early = isinstance(experts, GroupedExperts) and experts.score_before_experts
    pending = _start_dispatch(dispatcher, *chunks[0])
    aside = beside()
    returning = []
    for following in (*chunks[1:], None):
        rows, counts, row_weights, state = _wait_for_rows(pending)
        if row_weights is None and early:
            raise ExpertConfigError(
                f"score_before_experts=True, but a {type(dispatcher).__name__} weighs the results; "
                "give a dispatcher with row_weights in its state, as those of this package have"
            )
        if following is not None:
            pending = _start_dispatch(dispatcher, *following)
        results = experts(rows, counts, row_weights)
        if following is not None:
            _send(pending)  # before these results, which would be waited for
        returning.append(_start_combine(dispatcher, results, state))
    parts = [_wait_for_results(each) for each in returning]
    return parts[0] if len(parts) == 1 else torch.cat(parts), aside


# Fences: what communicates is no part of a compiled graph.


@fenced
def _start_dispatch(
    dispatcher: TokenDispatcher, x: Tensor, weights: Tensor, ids: Tensor
) -> Pending[Dispatched]:
    return start_dispatch(dispatcher, x, weights, ids, weigh_rows=True)


@fenced
def _send(pending: Pending[Dispatched]) -> None:
    pending.send()


@fenced
def _wait_for_rows(
    pending: Pending[Dispatched],
) -> tuple[Tensor, Tensor, Tensor | None, DispatchState]:
    rows, counts, state = pending.wait()
    return rows, counts, state.row_weights, state


@fenced
def _start_combine(
    dispatcher: TokenDispatcher, results: Tensor, state: DispatchState
) -> Pending[Tensor]:
    return start_combine(dispatcher, results, state)


@fenced
def _wait_for_results(pending: Pending[Tensor]) -> Tensor:
    return pending.wait()


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


def check_unwrapped(experts: nn.Module) -> None:
    """Raise an `ExpertConfigError` if the experts are in a wrapper with parameters of its own."""
    if isinstance(experts, GroupedExperts):
        return
    inside = [module for module in experts.modules() if isinstance(module, GroupedExperts)]
    theirs = {id(parameter) for module in inside for parameter in module.parameters()}
    if not inside or any(id(parameter) not in theirs for parameter in experts.parameters()):
        raise ExpertConfigError(
            f"the experts are inside a {type(experts).__name__}, and styles split the weights of a "
            "GroupedExperts alone; use target_modules in place of target_parameters for adapters "
            "of peft, or a model of transformers, whose experts may have adapters"
        )


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


def _check_experts(experts: object, dim: int, hidden_dim: int, num_experts: int) -> None:
    if not isinstance(experts, GroupedExperts):
        raise ExpertConfigError(f"experts are a {type(experts).__name__}; give a GroupedExperts")
    if (experts.dim, experts.hidden_dim, experts.num_experts) != (dim, hidden_dim, num_experts):
        raise ExpertConfigError(
            f"experts with dim={experts.dim}, hidden_dim={experts.hidden_dim}, "
            f"num_experts={experts.num_experts} in a layer with dim={dim}, "
            f"hidden_dim={hidden_dim}, num_experts={num_experts}; they must agree"
        )
