"""Once per step: what was routed where, on all ranks, and the biases that even it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from ._router import TopKRouter, as_axes


def collect_loads(
    model: nn.Module,
    axes: AxisMesh | Sequence[Axis] | None = None,
    collectives: Collectives | None = None,
) -> dict[str, Tensor]:
    """Return how often each expert was chosen on all ranks, by router, and count from zero again.

    Values are ``[num_experts]`` int64, keys the routers' names in ``model``. The loads are those of
    the backward passes since the last call. One all-reduce of all routers' loads together for each
    of ``axes``, by default those that the routers were told about. `ExpertConfigError` for a model
    without routers, and for routers that were told about different axes.
    """
    routers = _routers(model)
    over = _axes(routers) if axes is None else as_axes(axes)
    used = next(iter(routers.values())).collectives if collectives is None else collectives
    loads = [router.counted_load().clone() for router in routers.values()]
    for axis in over:
        if axis.size > 1:
            used.all_reduce(axis, loads).wait()
    for router in routers.values():
        router.load.zero_()
    return dict(zip(routers, loads, strict=True))


@torch.no_grad()
def update_router_bias(
    model: nn.Module,
    axes: AxisMesh | Sequence[Axis] | None = None,
    collectives: Collectives | None = None,
) -> dict[str, Tensor]:
    """Move each router's bias by its ``bias_rate`` towards even loads; return the loads.

    Call it once per optimizer step: the bias of experts with less than the mean load rises, of
    those with more falls, of exact ones stays (Wang et al., arXiv 2408.15664, algorithm 1).
    Communicates as `collect_loads`. `ExpertConfigError`, before that, where some routers have a
    rate and others none.
    """
    rates = {name: router.bias_rate for name, router in _routers(model).items()}
    without = [name for name, rate in rates.items() if not rate]
    if without:
        raise ExpertConfigError(
            f"routers {without} have bias_rate=0; set a rate for all routers of the model"
        )
    loads = collect_loads(model, axes, collectives)
    for name, router in _routers(model).items():
        if router.bias is not None:
            load = loads[name].to(torch.float64)
            router.bias += router.bias_rate * (load.mean() - load).sign().to(router.bias.dtype)
    return loads


def _routers(model: nn.Module) -> dict[str, TopKRouter]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, TopKRouter)}
    if not found:
        raise ExpertConfigError(f"{type(model).__name__} has no TopKRouter")
    return found


def _axes(routers: dict[str, TopKRouter]) -> tuple[Axis, ...]:
    told = {name: router.token_axes or () for name, router in routers.items()}
    if len({tuple(axis.ranks for axis in axes) for axes in told.values()}) > 1:
        names = {name: [axis.name for axis in axes] for name, axes in told.items()}
        raise ExpertConfigError(
            f"routers count tokens over different axes, {names}; pass the axes of this model"
        )
    return next(iter(told.values()))
