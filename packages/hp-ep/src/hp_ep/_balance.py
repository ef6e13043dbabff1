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
    """Return how often each expert was chosen on all ranks, and reset the counts.

    Counts the backward passes since the last call. One all-reduce of all loads together over each
    of ``axes``.

    Args:
        model: A model with `TopKRouter` modules, or one that was given to
            `hp_ep.transformers.parallelize_experts`.
        axes: Mesh axes over which ranks hold different tokens. Defaults to the ``token_axes`` of
            the routers.
        collectives: The collectives to use. Defaults to those of the first router.

    Returns:
        Loads ``[num_experts]`` int64, by the router's name in ``model``. For a model given to
        `hp_ep.transformers.parallelize_experts`, by the name of the experts' module.

    Raises:
        ExpertConfigError: ``model`` has no routers, routers have different ``token_axes``, or none
            although a style split their experts, or ranks of ``axes`` hold the same tokens.
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
    """Move each router's bias by its ``bias_rate`` towards even loads; return the loads.

    Call it once per optimizer step. The bias of an expert rises if its load is below the mean, and
    falls if it is above (Wang et al., arXiv 2408.15664, algorithm 1). Communicates as
    `collect_loads`.

    Args:
        model: As for `collect_loads`. Routers of transformers models have the ``bias_rate`` that
            `hp_ep.transformers.parallelize_experts` was given.
        axes: As for `collect_loads`.
        collectives: As for `collect_loads`.

    Returns:
        The loads, as `collect_loads` returns them.

    Raises:
        ExpertConfigError: Before any communication: a router has ``bias_rate=0``, or a bias is a
            DTensor or narrower than float32, in which small steps are lost. And as from
            `collect_loads`.
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
    """The load-balancing loss of all layers of a model as one number, as transformers has it.

    With the tokens of all layers together, ``E * sum over e of (C_e / N) * (S_e / N)``: ``C_e`` is
    how often expert ``e`` was chosen, ``S_e`` the sum of its probabilities, both over the ``N``
    pairs of token and layer of all ranks (``load_balancing_loss_func`` of transformers, after Fedus
    et al., arXiv 2101.03961, section 2.2). Even loads make it ``top_k``, not 1. Probabilities are
    softmax scores, or sigmoid scores divided by their sum. A router's own ``load_balance_loss`` is
    another one, of its layer alone; leave that at 0 beside this.

    As a context it records the forwards of the routers in ``model`` that run inside, those of
    several micro-batches together; entered again it starts anew. Activations may be recomputed, but
    not by the reentrant kind of checkpoint, which runs them without a graph. Masked tokens are left
    out.

    Args:
        model: The model, or a part of it; routers of other pipeline stages are not counted.
        axes: Axes that split the tokens, by default those that the routers were told about.
        collectives: What communicates, by default what the routers were told.

    Raises:
        ExpertConfigError: The model has no router, its routers differ in experts or ``top_k``, or
            they were told about different axes, or about none where a style split the experts, or
            ``axes`` are over ranks that hold the same tokens.

    Example:
        >>> with BalanceLoss(model) as balance:
        ...     logits = model(tokens)
        >>> aux = balance.loss()
        >>> (cross_entropy(logits, labels) + 0.001 * aux).backward()
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
        """Return the loss of what was recorded, a scalar; all ranks call it.

        Its value is that of all ranks' tokens and is the same on all of them. Its gradient is this
        rank's share: add it to a loss whose gradients are summed over ranks. Where they are
        averaged, multiply it by their number. One small all-reduce per axis, whatever the number of
        layers.

        Raises:
            ExpertConfigError: No router ran inside the context, on this rank: others wait for it.
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
