"""Parallel styles: how a mixture-of-experts layer is spread over a mesh."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dtensor import Axis, AxisMesh, Collectives

from ._errors import ExpertConfigError
from ._experts import GroupedExperts
from ._moe import MoE
from ._parameters import check_plain, replicate_parameters, shard_experts
from ._routing import TopKRouter, as_axes
from .dispatch._all_to_all import AllToAll
from .dispatch._exchange import RowExchange
from .dispatch._faults import Fault, as_numbers, check_counts, check_rows
from .dispatch._local import Local
from .dispatch._protocol import TokenDispatcher
from .dispatch._trip import arrive

Forward = Callable[[GroupedExperts, Tensor, Tensor], Tensor]


class ExpertParallel(ParallelStyle):
    """Experts split over one mesh axis; tokens travel to them.

    Applied to a `MoE`, the layer takes and gives this rank's own tokens, and its dispatcher becomes
    `AllToAll` (on an axis of one rank `Local`), or ``dispatcher`` where one is given. Applied to a
    `GroupedExperts`, the module takes rows sorted by *global* expert with *global* counts
    ``[num_experts]`` and returns as many rows in that order: its ``forward`` is wrapped.

    The experts' parameters become DTensors, Shard(0) over the axis; each rank keeps its block of
    the values that it has and nothing is communicated, so initialise them alike on all ranks.
    Apply before FSDP.

    ``token_axes`` go to `TopKRouter.split_tokens_over`; a `MoE` with a load-balancing loss needs
    them, ``()`` where no axis splits the tokens.
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
        on a module that has been distributed before, and for options that do not suit it; the
        module is then as it was.
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
        experts_mesh = _axis_mesh(mesh, exchange.axis)
        check_plain(layer.experts)
        replicated = self._replicated(layer)
        for module in replicated:
            check_plain(module)
        token_axes = None if self._token_axes is None else as_axes(self._token_axes)
        _check_balance(layer.router, token_axes)
        if not isinstance(self._dispatcher, str):
            dispatcher = self._dispatcher
        elif exchange.axis.size == 1:
            dispatcher = Local(num_experts)
        else:
            dispatcher = AllToAll(mesh, num_experts, self._collectives)

        # Nothing raises from here on: a layer that was refused is as it was.
        shard_experts(layer.experts, experts_mesh)
        if self._sequence_mesh is not None:
            for module in replicated:
                replicate_parameters(module, self._sequence_mesh)
        if token_axes is not None:
            layer.router.split_tokens_over(token_axes, self._collectives)
        layer.dispatcher = dispatcher

    def _replicated(self, layer: MoE) -> list[nn.Module]:
        """Return the modules whose weights all ranks of ``sequence_mesh`` share."""
        if self._sequence_mesh is None:
            return []
        if self._sequence_mesh.ndim != 1:
            raise ExpertConfigError(
                f"sequence_mesh has axes {self._sequence_mesh.mesh_dim_names}; pass the 1-D mesh "
                "of the axis that shards the sequence"
            )
        modules = [layer.router, layer.shared_experts]
        return [module for module in modules if module is not None]

    def _apply_to_experts(self, experts: GroupedExperts, mesh: DeviceMesh) -> None:
        if self._dispatcher != "auto":
            raise ExpertConfigError(
                "a dispatcher moves tokens of a whole MoE; apply the style to the MoE, or use "
                "dispatcher='auto' for a GroupedExperts"
            )
        if self._token_axes is not None or self._sequence_mesh is not None:
            raise ExpertConfigError(
                "token_axes and sequence_mesh are for the router and the shared experts of a whole "
                "MoE; apply the style to the MoE, or leave them out for a GroupedExperts"
            )
        exchange = RowExchange(mesh, experts.num_experts, self._collectives)
        experts_mesh = _axis_mesh(mesh, exchange.axis)
        check_plain(experts)
        if "forward" in vars(experts):
            raise ExpertConfigError(
                "forward of this GroupedExperts was replaced; apply the style first, then wrap it"
            )
        shard_experts(experts, experts_mesh)
        # Bound to the module it is called on, so that a deep copy computes with its own weights.
        wrapped = MethodType(_over_ranks(type(experts).forward, exchange), experts)
        experts.forward = wrapped  # type: ignore[method-assign]


def _over_ranks(compute: Forward, exchange: RowExchange) -> Forward:
    """Return ``compute`` for rows and counts of all experts, where a rank computes its block."""

    def forward(self: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
        found = check_rows(rows, counts, exchange.num_experts, self.w1.shape[-1])
        report = as_numbers(found, rows.device)
        if found[0] == Fault.NONE:
            report = check_counts(counts.long(), rows.shape[0], report)
        else:  # take part without rows, so that all ranks raise
            rows, counts = rows.new_empty(0, 1), report.new_zeros(exchange.num_experts)
        plan = exchange.plan(exchange.announce(counts, report))
        here = exchange.arrive(exchange.depart(rows, plan), plan)
        return arrive(exchange.send_back(compute(self, here, plan.counts), plan))

    return forward


def _check_balance(router: TopKRouter, token_axes: tuple[Axis, ...] | None) -> None:
    if router.load_balance_loss and token_axes is None and router.token_axes is None:
        raise ExpertConfigError(
            f"load_balance_loss={router.load_balance_loss} is the loss of the whole batch; say "
            "which axes split its tokens: token_axes=mesh for all of a mesh, or token_axes=() for "
            "none"
        )


def _axis_mesh(mesh: DeviceMesh, axis: Axis) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[axis.name]
