"""Once per step: what was routed where, on all ranks, the biases that even it, and one loss."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, AxisMesh, Collectives

from ._errors import ExpertConfigError
from ._losses import RoutingRecord
from ._router import TopKRouter, as_axes, check_apart


class Counted(Protocol):
    """What `collect_loads` and `update_router_bias` need of a router: its loads and its bias."""

    token_axes: tuple[Axis, ...] | None
    experts_are_split: bool
    replicated_over: Axis | None
    collectives: Collectives
    bias_rate: float

    @property
    def bias(self) -> Tensor | None:
        """Return the bias that is added to scores before the top k are chosen; None without."""
        ...

    def counted_load(self) -> Tensor:
        """Return how often each expert was chosen ``[num_experts]``; callers may zero it."""
        ...


COUNTED = "_expert_loads"
"""Name of the attribute in which a module that is no `TopKRouter` stores its `Counted`."""


def collect_loads(
    model: nn.Module,
    axes: AxisMesh | Sequence[Axis] | None = None,
    collectives: Collectives | None = None,
) -> dict[str, Tensor]:
    """Return the number of tokens that chose each expert on all ranks, and reset the counts.

    This number is called the load of an expert. Choices are counted in the backward of a router,
    from the last call of this function on. All ranks have to call this function. Communicates one
    all-reduce of all loads per axis.

    Args:
        model: A model with `TopKRouter` modules, or a model that was passed to
            `hp_ep.transformers.parallelize_experts`.
        axes: A mesh or axes on which ranks hold different tokens. Defaults to the ``token_axes`` of
            the routers.
        collectives: Implementation of the collectives. Defaults to the one of the first router.

    Returns:
        A dict from the name of each router in ``model`` to an int64 tensor ``[num_experts]``. For a
        model of transformers, the keys are the names of the modules of experts.

    Raises:
        ExpertConfigError: ``model`` has no routers; ``axes`` is None, and the routers have
            different ``token_axes``; ``axes`` is None, and a style has split the experts without
            setting the ``token_axes`` of a router; or ``axes`` include ranks that hold the same
            tokens, because a style splits each expert over them. All ranks raise together before
            communication.

    Examples:
        >>> model = nn.Sequential(MoE(64, hidden_dim=128, num_experts=8, top_k=2))
        >>> model(torch.randn(16, 64)).sum().backward()
        >>> loads = collect_loads(model)  # once per step, after the backward
        >>> loads["0.router"].shape
        torch.Size([8])
    """
    routers = _counted(model)
    over = _axes(routers) if axes is None else _given(axes, routers)
    used = next(iter(routers.values())).collectives if collectives is None else collectives
    loads = [router.counted_load().clone() for router in routers.values()]
    for axis in over:
        if axis.size > 1:
            used.all_reduce(axis, loads).wait()
    for router in routers.values():
        router.counted_load().zero_()
    return dict(zip(routers, loads, strict=True))


@torch.no_grad()
def update_router_bias(
    model: nn.Module,
    axes: AxisMesh | Sequence[Axis] | None = None,
    collectives: Collectives | None = None,
) -> dict[str, Tensor]:
    """Move the bias of each router by its ``bias_rate`` towards equal loads.

    Call this function once per optimizer step, on all ranks. The bias of an expert rises if its
    load is below the mean, and falls if its load is above the mean (Wang et al., arXiv 2408.15664,
    algorithm 1). Like `collect_loads`, the function communicates one all-reduce per axis and resets
    the counts.

    Args:
        model: A model as for `collect_loads`. Routers of transformers models have the ``bias_rate``
            of `hp_ep.transformers.parallelize_experts`.
        axes: As for `collect_loads`. Defaults to the ``token_axes`` of the routers.
        collectives: As for `collect_loads`. Defaults to the one of the first router.

    Returns:
        The loads before the update, as `collect_loads` returns them.

    Raises:
        ExpertConfigError: A router has ``bias_rate=0``, a bias is a DTensor or has a dtype narrower
            than float32, or `collect_loads` raises the error. All ranks raise together before
            communication.

    Examples:
        >>> router = TopKRouter(64, num_experts=8, top_k=2, score="sigmoid", bias_rate=1e-3)
        >>> layer = MoE(64, hidden_dim=128, num_experts=8, top_k=2, router=router)
        >>> layer(torch.randn(16, 64)).sum().backward()
        >>> loads = update_router_bias(layer)
    """
    routers = _counted(model)
    rates = {name: router.bias_rate for name, router in routers.items()}
    without = [name for name, rate in rates.items() if not rate]
    if without:
        raise ExpertConfigError(
            f"routers {without} have bias_rate=0; set a rate for all routers of the model"
        )
    biases = {name: r.bias for name, r in routers.items() if r.bias is not None}
    for name, bias in biases.items():
        if isinstance(bias, DTensor) or bias.element_size() < 4:
            kind = "DTensor of" if isinstance(bias, DTensor) else "plain"
            raise ExpertConfigError(
                f"the bias of {name} is a {kind} {bias.dtype}; it must be a plain tensor of "
                "float32 or float64: keep it out of FSDP, and cast it back after model.to(dtype)"
            )
    loads = collect_loads(model, axes, collectives)
    for name, bias in biases.items():
        load = loads[name].to(torch.float64)
        step = rates[name] * (load.mean() - load).sign()
        bias += step.to(bias.dtype).view(bias.shape)
    return loads


class BalanceLoss:
    """One load-balancing loss for all layers of a model, computed as in transformers.

    The loss is ``E * sum over e of (C_e / N) * (S_e / N)``. ``E`` is the number of experts. ``C_e``
    is the number of times that tokens chose expert ``e``, ``S_e`` is the sum of its probabilities,
    and ``N`` is the number of tokens times the number of layers. All three count over all layers
    and all ranks (``load_balancing_loss_func`` of transformers, after Fedus et al., arXiv
    2101.03961, section 2.2). If all experts have equal loads, the loss is ``top_k``, not 1.
    Probabilities are softmax scores, or sigmoid scores divided by their sum.

    Use the object as a context manager around the forward of the model. All forwards inside the
    ``with`` block are recorded and counted together, for example several micro-batches. Entering
    the block again starts a new record. Tokens that ``valid`` of `MoE` masks are not counted.

    Args:
        model: The model or a part of it. Routers of other pipeline stages are not counted.
        axes: A mesh or axes on which ranks hold different tokens. Defaults to the ``token_axes`` of
            the routers.
        collectives: Implementation of the collectives. Defaults to the one of the first router.

    Raises:
        ExpertConfigError: ``model`` has no router; routers differ in the number of experts or in
            ``top_k``; or ``token_axes`` or ``axes`` are invalid, as in `collect_loads`. Entering
            the ``with`` block raises the error if a router is inside another open block. All ranks
            raise together before communication.

    Examples:
        >>> layer = MoE(64, hidden_dim=128, num_experts=8, top_k=2)
        >>> model = nn.Sequential(nn.Embedding(100, 64), layer, nn.Linear(64, 100))
        >>> tokens, labels = torch.randint(100, (2, 16))
        >>> with BalanceLoss(model) as balance:
        ...     loss = nn.functional.cross_entropy(model(tokens), labels)
        >>> (loss + 0.001 * balance.loss()).backward()

    Note:
        - Set ``load_balance_loss`` of the routers to 0. That loss is computed for each layer
          separately, and would be added to this one.
        - Activation checkpointing is supported with ``use_reentrant=False`` only.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: AxisMesh | Sequence[Axis] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        routers = _routers(model)
        sizes = {name: (r.num_experts, r.top_k) for name, r in routers.items()}
        if len(set(sizes.values())) > 1:
            raise ExpertConfigError(
                f"routers have num_experts and top_k {sizes}; one loss needs one number of experts "
                "and one top_k: make a BalanceLoss for each kind of layer"
            )
        self._routers = list(routers.values())
        self._axes = _axes(routers) if axes is None else _given(axes, routers)
        self._collectives = self._routers[0].collectives if collectives is None else collectives
        self._records: list[RoutingRecord] = []

    def __enter__(self) -> "BalanceLoss":
        if any(r.record is not None and r.record.is_open for r in self._routers):
            raise ExpertConfigError(
                "a router is recorded already; leave that BalanceLoss before entering another"
            )
        self._records = [RoutingRecord(is_open=True) for _ in self._routers]
        for router, record in zip(self._routers, self._records, strict=True):
            router.record = record
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for record in self._records:
            record.is_open = False
        # A closed one stays: recomputation must compute what forward did.
        for router in self._routers:
            router.record = RoutingRecord()

    def loss(self) -> Tensor:
        """Return the loss of all forwards that were recorded in the last ``with`` block.

        All ranks have to call this method. Communicates one small all-reduce per axis, for any
        number of layers.

        Returns:
            A scalar tensor. Its value covers the tokens of all ranks and is equal on all ranks. Its
            gradient covers the tokens of this rank only. Add the scalar to a training loss if
            gradients are summed over ranks. If gradients are averaged over ranks, multiply the
            scalar by the number of ranks first.

        Raises:
            ExpertConfigError: No router ran inside the ``with`` block. Raised on this rank only;
                the other ranks wait in the all-reduce.
        """
        entries = [entry for record in self._records for entry in record.entries]
        if not entries:
            raise ExpertConfigError("no router ran; run the model inside `with BalanceLoss(model)`")
        first = entries[0].probabilities
        mine = torch.stack([e.probabilities.to(first.device, first.dtype) for e in entries]).sum(0)
        counts = torch.stack([e.counts.to(first.device) for e in entries]).sum(0)
        pairs = counts.new_full((1,), sum(e.num_tokens for e in entries))
        share, whole = balance_shares(mine, counts, pairs, self._axes, self._collectives)
        return share + (whole - share).detach()


def balance_shares(
    probabilities: Tensor,
    counts: Tensor,
    pairs: Tensor,
    axes: Sequence[Axis],
    collectives: Collectives,
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the loss of `BalanceLoss`, and that loss, two scalars.

    ``probabilities [experts]`` and ``counts [experts]`` are sums over this rank's ``pairs [1]`` of
    token and layer. The share alone has a gradient. One small all-reduce over each of ``axes``.
    """
    # Numbers of choices are exact in float64.
    totals = torch.cat([t.detach().to(torch.float64) for t in (counts, probabilities, pairs)])
    for axis in axes:
        if axis.size > 1:
            (totals,) = collectives.all_reduce(axis, [totals]).wait()
    chosen, summed = totals[:-1].chunk(2)
    scaled = chosen * (chosen.shape[0] / totals[-1].clamp(min=1) ** 2)
    # Sums of products: autocast would round those of matrices.
    share = (scaled.to(probabilities.dtype) * probabilities).sum()
    return share, (scaled * summed).sum().to(probabilities.dtype)


def _routers(model: nn.Module) -> dict[str, TopKRouter]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, TopKRouter)}
    if not found:
        raise ExpertConfigError(f"{type(model).__name__} has no TopKRouter")
    return found


def _counted(model: nn.Module) -> dict[str, Counted]:
    found = {
        name: module if isinstance(module, TopKRouter) else getattr(module, COUNTED)
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) or hasattr(module, COUNTED)
    }
    if not found:
        raise ExpertConfigError(
            f"{type(model).__name__} has no TopKRouter; give a model of transformers to "
            "parallelize_experts of the module transformers first"
        )
    return found


def _axes(routers: Mapping[str, Counted]) -> tuple[Axis, ...]:
    untold = [name for name, r in routers.items() if r.token_axes is None and r.experts_are_split]
    if untold:
        raise ExpertConfigError(
            f"routers {untold} were not told which axes split their tokens, and one rank's numbers "
            "are not those of all; pass axes, or give the style token_axes"
        )
    told = {name: router.token_axes or () for name, router in routers.items()}
    if len({tuple(axis.ranks for axis in axes) for axes in told.values()}) > 1:
        names = {name: [axis.name for axis in axes] for name, axes in told.items()}
        raise ExpertConfigError(
            f"routers count tokens over different axes, {names}; pass the axes of this model"
        )
    return next(iter(told.values()))


def _given(axes: AxisMesh | Sequence[Axis], routers: Mapping[str, Counted]) -> tuple[Axis, ...]:
    for router in routers.values():
        check_apart(axes, router.replicated_over)
    return as_axes(axes)
