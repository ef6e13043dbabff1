"""Parallel styles: how a mixture-of-experts layer is spread over a mesh."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dtensor import Axis, AxisMesh, Collectives

from ._errors import ExpertConfigError
from ._experts import GroupedExperts
from ._moe import MoE
from ._parameters import replicate_parameters, shard_experts
from .dispatch._all_to_all import AllToAll
from .dispatch._exchange import RowExchange
from .dispatch._faults import check_counts
from .dispatch._local import Local
from .dispatch._protocol import TokenDispatcher


class ExpertParallel(ParallelStyle):
    """Experts split over one mesh axis; tokens travel to them.

    Applied to a `MoE`, the layer takes and gives this rank's own tokens, and its dispatcher becomes
    `AllToAll` (on an axis of one rank `Local`), or ``dispatcher`` where one is given. Applied to a
    `GroupedExperts`, the module takes rows sorted by *global* expert with *global* counts
    ``[num_experts]`` and returns as many rows in that order: its ``forward`` is wrapped.

    The experts' parameters become DTensors, Shard(0) over the axis; each rank keeps its block of
    the values that it has and nothing is communicated, so initialise them alike on all ranks.
    Apply before FSDP.

    ``token_axes`` go to `TopKRouter.split_tokens_over`, for a `MoE` with a load-balancing loss.
    ``sequence_mesh`` is for tensor parallelism with whole experts: the 1-D mesh over which the
    `MoE`'s input is sharded by sequence. Parameters of the router and of the shared experts become
    DTensors replicated over it, whose gradients are Partial: sums over its ranks are still due.
    """

    def __init__(
        self,
        dispatcher: Literal["auto"] | TokenDispatcher = "auto",
        *,
        token_axes: AxisMesh | Sequence[Axis] | None = None,
        sequence_mesh: DeviceMesh | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        if isinstance(dispatcher, str) and dispatcher != "auto":
            raise ExpertConfigError(f"dispatcher={dispatcher!r} is not 'auto' or a TokenDispatcher")
        self._dispatcher = dispatcher
        self._token_axes = token_axes
        self._sequence_mesh = sequence_mesh
        self._collectives = collectives

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Return ``module``, changed in place; ``mesh`` is 1-D or has an axis ``ep``.

        `ExpertConfigError` where the axis does not divide the experts, on another kind of module,
        and on a module that has been distributed before.
        """
        if isinstance(module, MoE):
            self._apply_to_layer(module, mesh)
        elif isinstance(module, GroupedExperts):
            self._apply_to_experts(module, mesh)
        else:
            raise ExpertConfigError(
                f"expert parallelism takes a MoE or a GroupedExperts, not {type(module).__name__}"
            )
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def _apply_to_layer(self, layer: MoE, mesh: DeviceMesh) -> None:
        num_experts = layer.experts.num_experts
        exchange = RowExchange(mesh, num_experts, self._collectives)  # checks axis and sizes
        shard_experts(layer.experts, _axis_mesh(mesh, exchange.axis))
        if self._sequence_mesh is not None:
            replicate_parameters(layer.router, self._sequence_mesh)
            if layer.shared_experts is not None:
                replicate_parameters(layer.shared_experts, self._sequence_mesh)
        if self._token_axes is not None:
            layer.router.split_tokens_over(self._token_axes, self._collectives)
        if not isinstance(self._dispatcher, str):
            layer.dispatcher = self._dispatcher
        elif exchange.axis.size == 1:
            layer.dispatcher = Local(num_experts)
        else:
            layer.dispatcher = AllToAll(mesh, num_experts, self._collectives)

    def _apply_to_experts(self, experts: GroupedExperts, mesh: DeviceMesh) -> None:
        if self._dispatcher != "auto":
            raise ExpertConfigError(
                "a dispatcher moves tokens of a whole MoE; apply the style to the MoE, or use "
                "dispatcher='auto' for a GroupedExperts"
            )
        exchange = RowExchange(mesh, experts.num_experts, self._collectives)
        shard_experts(experts, _axis_mesh(mesh, exchange.axis))
        compute = experts.forward

        def forward(rows: Tensor, counts: Tensor) -> Tensor:
            if counts.shape != (exchange.num_experts,):
                raise ExpertConfigError(
                    f"counts {tuple(counts.shape)} must have one number for each of the "
                    f"{exchange.num_experts} experts of all ranks"
                )
            fault = check_counts(counts.long(), rows.shape[0])
            plan = exchange.plan(exchange.announce(counts, fault))
            return exchange.combine(compute(exchange.dispatch(rows, plan), plan.counts), plan)

        experts.forward = forward  # type: ignore[method-assign]


def _axis_mesh(mesh: DeviceMesh, axis: Axis) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[axis.name]
