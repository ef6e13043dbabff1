"""What all styles share: split the weights, and give the layer its dispatcher."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from .._experts import GroupedExperts, SharedExperts
from .._moe import MoE
from .._parameters import check_alike, check_plain, replicate_parameters, split_experts
from ..dispatch._checks import or_torch
from ..dispatch._interface import TokenDispatcher
from ..placement._plan import Placement
from ..placement._replicas import ReplicaSum, check_same_placement
from ..routing._router import TopKRouter, as_axes, check_apart, check_axes
from ._choose import make_dispatcher
from ._inputs import check_different_tokens, comparison
from ._split import Split
from ._wrap import wrap_forward


class BaseExpertParallel(ParallelStyle):
    """A style that is told by a `Split` alone: subclasses say which axes of a mesh it has.

    Applied to a `MoE`, the layer takes and gives this rank's own tokens through its dispatcher:
    ``dispatcher``, or the one that `choose_dispatcher` expects to be best. ``node_mesh``, the same
    ranks as a mesh of nodes and the ranks inside one, lets it choose `Hierarchical`. Applied to a
    `GroupedExperts`, the module takes rows sorted by *global* expert with *global* counts
    ``[num_experts]`` and returns as many rows in that order: its ``forward`` is wrapped.

    Where experts are cut inside, the ranks of that axis hold the same tokens (or rows), and their
    parts are summed; gradients of everything before are the same on all of them.

    Parameters become DTensors of the values that this rank has; no values are communicated, so
    initialise them alike on all ranks. Apply before FSDP.

    ``token_axes`` and ``sequence_axes`` go to `TopKRouter.split_tokens_over`; a `MoE` whose router
    needs the load of the whole batch needs them, ``()`` where no axis splits the tokens. Ranks that
    split experts must hold different tokens, or gradients of experts would count them once for
    each rank: ``token_axes`` over which they would not are refused, as are ``token_axes`` over
    ranks that cut experts inside, which hold the same tokens, and so is, in training forwards up to
    the first that passes, an input that is the same on ranks of ``sequence_axes`` or
    ``sequence_mesh``, which are to hold parts of it. These make a small collective more per axis.
    ``placement`` says which experts live where; all ranks give the same, or none. They compare it
    before anything changes, by one small all-gather per axis of the split. Replicas' gradients are
    summed in backward, by one all-to-all over the experts' axis. ``sequence_mesh`` is for tensor
    parallelism with whole experts: the 1-D mesh over which the `MoE`'s input is sharded by
    sequence. Parameters of the router and of the shared experts become DTensors replicated over it,
    whose gradients are Partial: sums over its ranks are due.
    """

    def __init__(
        self,
        dispatcher: Literal["auto"] | TokenDispatcher = "auto",
        *,
        token_axes: AxisMesh | Sequence[Axis] | None = None,
        sequence_axes: AxisMesh | Sequence[Axis] = (),
        sequence_mesh: DeviceMesh | None = None,
        placement: Placement | None = None,
        node_mesh: AxisMesh | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        if dispatcher != "auto" and not isinstance(dispatcher, TokenDispatcher):
            raise ExpertConfigError(f"dispatcher={dispatcher!r} is not 'auto' or a TokenDispatcher")
        if placement is not None and not isinstance(placement, Placement):
            raise ExpertConfigError(
                f"placement={placement!r} is not a Placement; make one by plan_placement or "
                "Placement.contiguous"
            )
        self._dispatcher = dispatcher
        self._token_axes = token_axes
        self._sequence_axes = sequence_axes
        self._sequence_mesh = sequence_mesh
        self._placement = placement
        self._node_mesh = node_mesh
        self._collectives = collectives

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the axes of ``mesh`` that split experts, none of them by default."""
        return Split(mesh=mesh)

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Return ``module``, changed in place.

        `ExpertConfigError` where an axis does not divide what it splits, on another kind of module,
        on a module that has been distributed before, and for options that do not suit it; the
        module is then as it was.
        """
        self.compare_placements(mesh)
        self.prepare(module, mesh)()
        return module

    # What torch's parallelize_module calls; it has no public name for it.
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def compare_placements(self, mesh: DeviceMesh) -> None:
        """Raise an `ExpertConfigError` on all ranks of ``mesh`` unless they have one placement.

        One small all-gather over each axis that splits experts; none without a placement.
        """
        if self._placement is None:
            return
        split = self.split(mesh)
        axes = [Axis.of(split.mesh, i) for i in range(split.mesh.ndim)]
        # A layer may have no memory yet, so its device does not say where to communicate.
        device = torch.device(mesh.device_type)
        check_same_placement(self._placement, axes, device, or_torch(self._collectives))

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
        """Return what changes ``module``, once nothing about it is wrong; raises as `apply`."""
        split = self.split(mesh)
        if isinstance(module, MoE):
            return self._prepare_layer(module, split)
        if isinstance(module, GroupedExperts):
            return self._prepare_experts(module, split)
        raise ExpertConfigError(
            f"expert parallelism takes a MoE or a GroupedExperts, not {type(module).__name__}"
        )

    def replaced(self, layer: MoE) -> list[nn.Module]:
        """Return the modules of ``layer`` whose parameters the style replaces by DTensors."""
        return [layer.experts, *(_beside(layer) if self._sequence_mesh is not None else ())]

    def _prepare_layer(self, layer: MoE, split: Split) -> Callable[[], None]:
        split.check(layer.experts, self._placement)
        check_plain(layer.experts)
        beside = _beside(layer)
        self._check_sequence_mesh(split)
        for module in beside:
            if self._sequence_mesh is not None:
                check_plain(module)
            if split.summed_over is not None:
                check_alike(module, split.summed_over)
        token_axes = None if self._token_axes is None else as_axes(self._token_axes)
        sequence_axes = check_axes(token_axes or (), self._sequence_axes)
        told = layer.router.token_axes if self._token_axes is None else self._token_axes
        check_different_tokens(split.expert_axis, told)
        check_apart(() if told is None else told, split.summed_over)
        _check_balance(layer.router, token_axes)
        _check_noise(layer.router, split.summed_over)
        given = None if isinstance(self._dispatcher, str) else self._dispatcher
        dispatcher = make_dispatcher(
            layer, split, given, self._placement, self._node_mesh, self._collectives
        )

        def change() -> None:
            split_experts(layer.experts, split.mesh, split.placements, self._placement)
            if self._placement is not None and split.expert_axis is not None:
                layer.experts.place(
                    ReplicaSum(
                        split.expert_axis,
                        self._placement,
                        self._collectives,
                        device=layer.experts.w1.device,
                    )
                )
            if self._sequence_mesh is not None:
                for module in beside:
                    replicate_parameters(module, self._sequence_mesh)
            if token_axes is not None:
                layer.router.split_tokens_over(
                    token_axes, self._collectives, sequence_axes=sequence_axes
                )
            layer.dispatcher = dispatcher
            layer.compare_inputs = comparison(
                sequence_axes, self._sequence_mesh, layer.router.token_axes, self._collectives
            )
            for each in (layer, *beside):
                each.replicated_over = split.summed_over

        return change

    def _check_sequence_mesh(self, split: Split) -> None:
        if self._sequence_mesh is None:
            return
        if self._sequence_mesh.ndim != 1:
            raise ExpertConfigError(
                f"sequence_mesh has axes {self._sequence_mesh.mesh_dim_names}; pass the 1-D mesh "
                "of the axis that shards the sequence"
            )
        tensor = split.summed_over
        if tensor is not None:
            raise ExpertConfigError(
                f"sequence_mesh is for whole experts, but {tensor.name}={tensor.size} cuts them; "
                "its ranks must hold the same tokens: leave sequence_mesh out"
            )

    def _prepare_experts(self, experts: GroupedExperts, split: Split) -> Callable[[], None]:
        if self._dispatcher != "auto":
            raise ExpertConfigError(
                "a dispatcher moves tokens of a whole MoE; apply the style to the MoE, or use "
                "dispatcher='auto' for a GroupedExperts"
            )
        options = (
            self._token_axes,
            self._sequence_axes or None,
            self._sequence_mesh,
            self._placement,
            self._node_mesh,
        )
        if any(option is not None for option in options):
            raise ExpertConfigError(
                "token_axes, sequence_axes and sequence_mesh are for the router and the shared "
                "experts of a whole MoE, placement and node_mesh for its dispatcher; apply the "
                "style to the MoE, or leave them out for a GroupedExperts"
            )
        split.check(experts, None)
        check_plain(experts)
        if "forward" in vars(experts):
            raise ExpertConfigError(
                "forward of this GroupedExperts was replaced; apply the style first, then wrap it"
            )

        def change() -> None:
            split_experts(experts, split.mesh, split.placements, None)
            wrap_forward(experts, split, self._collectives)

        return change


def _beside(layer: MoE) -> list[TopKRouter | SharedExperts]:
    return [m for m in (layer.router, layer.shared_experts) if m is not None]


def _check_noise(router: TopKRouter, alike: Axis | None) -> None:
    if alike is not None and router.noise:
        raise ExpertConfigError(
            f"noise={router.noise} is drawn on each rank, but the ranks of {alike.name} have a "
            "part of every expert and must choose alike; use noise=0, or whole experts"
        )


def _check_balance(router: TopKRouter, token_axes: tuple[Axis, ...] | None) -> None:
    if router.needs_whole_batch and token_axes is None and router.token_axes is None:
        raise ExpertConfigError(
            f"{router.needs_whole_batch}; say which axes split its tokens: token_axes=mesh for "
            "all of a mesh, or token_axes=() for none"
        )
