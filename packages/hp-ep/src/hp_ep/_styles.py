"""Parallel styles: how a mixture-of-experts layer is spread over a mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TensorPlacement
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from hp_dtensor import AutogradCollectives, Axis, AxisMesh, Collectives

from ._errors import ExpertConfigError
from ._experts import GroupedExperts, SharedExperts, weigh_rows
from ._inputs import check_different_tokens, comparison
from ._moe import MoE, check_unwrapped
from ._parameters import (
    check_alike,
    check_plain,
    check_untied,
    replicate_parameters,
    split_experts,
)
from ._router import TopKRouter, as_axes, check_apart, check_axes
from .dispatch._all_to_all import AllToAll, RowExchange
from .dispatch._checks import (
    Fault,
    as_tensor,
    check_counts,
    check_divides,
    check_rows,
    expert_axis,
    or_torch,
)
from .dispatch._cost import choose_dispatcher
from .dispatch._dedup import Dedup, Hierarchical
from .dispatch._interface import ShardedDispatcher, TokenDispatcher
from .dispatch._local import Local
from .dispatch._wrappers import Placed, Summed
from .placement._plan import Placement
from .placement._replicas import ReplicaSum, check_same_placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """The axes of a mesh that split experts: whole ones apart, or each inside, or both.

    ``mesh`` has these axes alone, experts first; weights become DTensors over it.
    """

    mesh: DeviceMesh
    expert_axis: Axis | None = None
    tensor_axis: Axis | None = None

    @property
    def num_ranks(self) -> int:
        """Return how many ranks have different experts."""
        return 1 if self.expert_axis is None else self.expert_axis.size

    @property
    def summed_over(self) -> Axis | None:
        """Return the axis whose ranks each have a part of every output, None where one has all."""
        axis = self.tensor_axis
        return None if axis is None or axis.size == 1 else axis

    def placements(self, name: str) -> tuple[TensorPlacement, ...]:
        """Return how the parameter ``name`` is laid out over the mesh.

        The hidden dimension is the one that is cut inside an expert: rows of the gate and of the
        up product, each apart, columns of the down product (Megatron-LM, arXiv 1909.08053, section
        3). The bias of the down product is whole.
        """
        found: list[TensorPlacement] = [] if self.expert_axis is None else [Shard(0)]
        if self.tensor_axis is not None:
            found.append(Replicate() if name == "down_proj_bias" else Shard(2))
        return tuple(found)

    def check(self, experts: GroupedExperts, placement: Placement | None) -> None:
        """Raise an `ExpertConfigError` where the axes do not suit these experts."""
        if placement is not None and self.expert_axis is None:
            raise ExpertConfigError(
                "a placement says which rank holds which experts, but no axis splits them here; "
                "leave placement out"
            )
        if placement is not None:
            _check_placement(placement, experts.num_experts, self.num_ranks)
        elif self.expert_axis is not None:
            check_divides(self.expert_axis.name, self.expert_axis.size, experts.num_experts)
        axis = self.tensor_axis
        if axis is not None and experts.hidden_dim % axis.size:
            legal = [n for n in range(1, experts.hidden_dim + 1) if experts.hidden_dim % n == 0]
            raise ExpertConfigError(
                f"{axis.name}={axis.size} does not divide hidden_dim={experts.hidden_dim}; "
                f"use one of {legal} ranks"
            )


def _check_placement(placement: Placement, num_experts: int, num_ranks: int) -> None:
    if (placement.num_experts, placement.num_ranks) != (num_experts, num_ranks):
        raise ExpertConfigError(
            f"a placement of {placement.num_experts} experts on {placement.num_ranks} ranks does "
            f"not fit {num_experts} experts on {num_ranks} ranks; plan one for these"
        )


class BaseExpertParallel(ParallelStyle):
    """Base class of styles that split experts over a mesh. Subclasses override `split`.

    | module | after the style |
    |---|---|
    | `MoE` | takes and returns this rank's tokens |
    | `GroupedExperts` | takes rows sorted by global expert and counts ``[num_experts]`` |

    A `GroupedExperts` returns its results in the order of the rows.

    Parameters become DTensors of this rank's values. Nothing is communicated, so initialize all
    ranks equally. Apply the style before FSDP.

    Ranks that split whole experts must hold different tokens, else gradients of the experts count a
    token once for each rank that holds it. Ranks that split each expert inside hold the same
    tokens; their partial results are summed. Training forwards check that ranks of
    ``sequence_axes`` and ``sequence_mesh`` have different inputs, by one small collective per axis,
    until the check has passed once.

    Args:
        dispatcher: ``"auto"``, or a `TokenDispatcher` for the same experts and ranks. Defaults to
            ``"auto"``: the result of `choose_dispatcher`.
        token_axes: All axes on which ranks hold different tokens: a mesh, `Axis` objects, or ``()``
            if there are none. Required if the router has losses or a ``bias_rate``. Defaults to
            None: keep the ``token_axes`` of the router.
        sequence_axes: Subset of ``token_axes`` on which ranks hold different parts of the same
            sequences. Defaults to ``()``.
        sequence_mesh: 1-D mesh over which the input of the layer is sharded by sequence, for tensor
            parallelism with whole experts. Parameters of the router and the shared experts become
            DTensors that are replicated over this mesh. Their gradients are `Partial`: sum them
            over its ranks. Defaults to None.
        placement: `Placement` that assigns experts to ranks, the same on all ranks. To check this,
            ranks communicate one small all-gather over each mesh axis that splits the experts. In
            the backward, one all-to-all sums the gradients of replicas. Defaults to None: each rank
            holds an equal block of consecutive experts.
        node_mesh: The same ranks as a 2-D mesh ``(nodes, ranks of a node)``, so that ``"auto"`` can
            choose `Hierarchical`. Defaults to None.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Raises:
        ExpertConfigError: ``dispatcher`` is not a `TokenDispatcher`, or ``placement`` is not a
            `Placement`. The other arguments are checked when the style is applied.

    Examples:
        >>> class MyExpertParallel(BaseExpertParallel):
        ...     def split(self, mesh):
        ...         return ExpertParallel().split(mesh["experts"])
        >>> style = MyExpertParallel(token_axes=())
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
        check_dispatcher(dispatcher)
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
        """Return the axes of a mesh that split experts.

        Args:
            mesh: Mesh that the style is applied to.

        Returns:
            The axis that splits whole experts and the axis that splits each expert; none by
            default.
        """
        return Split(mesh=mesh)

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Split the experts of a module, as ``parallelize_module`` does.

        If there is a placement, ranks compare it: one small all-gather per axis of the split.
        Nothing else is communicated.

        Args:
            module: A `MoE` or a `GroupedExperts`. It is changed in place.
            mesh: Mesh of the ranks that split the experts.

        Returns:
            ``module``.

        Raises:
            ExpertConfigError: An axis does not divide the experts or their hidden size; ``module``
                is another kind of module, or was distributed before; an option does not fit; or
                ranks have different placements. All ranks raise together, and ``module`` is
                unchanged.
        """
        self.compare_placements(mesh)
        self.prepare(module, mesh)()
        return module

    # What torch's parallelize_module calls; it has no public name for it.
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def compare_placements(self, mesh: DeviceMesh) -> None:
        """Check that all ranks have the same placement.

        Communicates one small all-gather per axis that splits experts, nothing without a placement.

        Args:
            mesh: Mesh of the ranks that split the experts.

        Raises:
            ExpertConfigError: Ranks have different placements. All ranks raise together.
        """
        if self._placement is None:
            return
        split = self.split(mesh)
        axes = [Axis.of(split.mesh, i) for i in range(split.mesh.ndim)]
        # A layer may have no memory yet, so its device does not say where to communicate.
        device = torch.device(mesh.device_type)
        check_same_placement(self._placement, axes, device, or_torch(self._collectives))

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
        """Check a module and return a function that splits it.

        Args:
            module: A `MoE` or a `GroupedExperts`.
            mesh: Mesh of the ranks that split the experts.

        Returns:
            A function without arguments that changes ``module``.

        Raises:
            ExpertConfigError: As from `apply`, before any change.
        """
        split = self.split(mesh)
        if isinstance(module, MoE):
            return self._prepare_layer(module, split)
        if isinstance(module, GroupedExperts):
            return self._prepare_experts(module, split)
        raise ExpertConfigError(
            f"expert parallelism takes a MoE or a GroupedExperts, not {type(module).__name__}"
        )

    def replaced(self, layer: MoE) -> list[nn.Module]:
        """Return the modules with parameters that the style replaces by DTensors.

        Args:
            layer: The layer.

        Returns:
            The experts, and with a ``sequence_mesh`` also the router and the shared experts.
        """
        return [layer.experts, *(_beside(layer) if self._sequence_mesh is not None else ())]

    def _prepare_layer(self, layer: MoE, split: Split) -> Callable[[], None]:
        check_unwrapped(layer.experts)
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
        dispatcher = self._dispatcher_of(layer, split)

        def change() -> None:
            split_experts(layer.experts, split.mesh, split.placements, self._placement)
            if self._placement is not None and split.expert_axis is not None:
                layer.experts.place(
                    ReplicaSum(
                        split.expert_axis,
                        self._placement,
                        self._collectives,
                        device=layer.experts.gate_up_proj.device,
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
            layer.router.experts_are_split = split.num_ranks > 1
            layer.compare_inputs = comparison(
                sequence_axes, self._sequence_mesh, layer.router.token_axes, self._collectives
            )
            layer.experts.summed_over = split.summed_over
            for each in (layer, *beside):
                each.replicated_over = split.summed_over

        return change

    def _dispatcher_of(self, layer: MoE, split: Split) -> TokenDispatcher:
        """Return the one given or the expected best, with slots and sums where they are due."""
        placed = self._placement
        dispatcher = given_or_best(
            None if isinstance(self._dispatcher, str) else self._dispatcher,
            split,
            layer.experts.num_experts if placed is None else len(placed.experts),
            self._node_mesh,
            self._collectives,
            top_k=layer.router.top_k,
            row_bytes=layer.dim * layer.experts.gate_up_proj.element_size(),
        )
        if placed is not None:
            index = 0 if split.expert_axis is None else split.expert_axis.index
            device = layer.experts.gate_up_proj.device
            dispatcher = Placed(dispatcher, placed, index, device=device)
        if split.summed_over is not None:
            dispatcher = Summed(dispatcher, split.summed_over, self._collectives)
        return dispatcher

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
            experts.summed_over = split.summed_over
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


class ExpertParallel(BaseExpertParallel):
    """Parallel style that splits whole experts over one mesh axis. Tokens travel to their experts.

    The mesh is 1-D or has an axis ``ep``. Weights of the experts become ``Shard(0)`` over this
    axis. Its ranks have to hold different tokens. If several ranks held the same token, gradients
    of the experts would count this token several times.

    Apply the style to a `MoE` or to a `GroupedExperts`. The forward of a `GroupedExperts` then
    takes two inputs: rows for the experts of all ranks, sorted by expert, and the number of rows of
    each expert, ``[num_experts]``. It returns its results in the order of the rows. Parameters
    become DTensors with this rank's values. Values are not communicated, so all ranks must
    initialize the module with equal values. Apply the style before FSDP.

    Args:
        dispatcher: ``"auto"``, or a `TokenDispatcher` for the same experts and ranks. Defaults to
            ``"auto"``: the result of `choose_dispatcher`.
        token_axes: All axes on which ranks hold different tokens: a mesh, `Axis` objects, or ``()``
            if there are none. Required if the router has losses or a ``bias_rate``. Defaults to
            None: keep the ``token_axes`` of the router.
        sequence_axes: Subset of ``token_axes`` on which ranks hold different parts of the same
            sequences. Defaults to ``()``.
        sequence_mesh: 1-D mesh over which the input of the layer is sharded by sequence, for tensor
            parallelism with whole experts. Parameters of the router and the shared experts become
            DTensors that are replicated over this mesh. Their gradients are `Partial`: sum them
            over its ranks. Defaults to None.
        placement: `Placement` that assigns experts to ranks, the same on all ranks. To check this,
            ranks communicate one small all-gather over each mesh axis that splits the experts. In
            the backward, one all-to-all sums the gradients of replicas. Defaults to None: each rank
            holds an equal block of consecutive experts.
        node_mesh: The same ranks as a 2-D mesh ``(nodes, ranks of a node)``, so that ``"auto"`` can
            choose `Hierarchical`. Defaults to None.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Raises:
        ExpertConfigError: ``dispatcher`` is not a `TokenDispatcher`, or ``placement`` is not a
            `Placement`. The other arguments are checked when the style is applied.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (4,))
        >>> layer = MoE(dim=64, hidden_dim=128, num_experts=8, top_k=2)
        >>> layer = parallelize_module(layer, mesh, ExpertParallel(token_axes=mesh))
        >>> layer(torch.randn(16, 64)).shape  # this rank's tokens
        torch.Size([16, 64])
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return how this style uses a mesh: its only axis, or the axis ``ep``, splits the experts.

        Args:
            mesh: Mesh that the style is applied to.

        Returns:
            An object with the attributes ``mesh`` and ``expert_axis``, the axis that splits whole
            experts.
        """
        axis = expert_axis(mesh)
        return Split(mesh=mesh if mesh.ndim == 1 else mesh[axis.name], expert_axis=axis)


class TensorParallel(BaseExpertParallel):
    """Parallel style that splits each expert along its hidden size over a 1-D mesh.

    Weights of the experts become ``Shard(2)``. All ranks of the mesh have to hold the same tokens,
    so no token travels. Each rank computes a partial output. One all-reduce sums the partial
    outputs: one per token for a `MoE`, one per row for a `GroupedExperts`.

    Apply the style to a `MoE` or to a `GroupedExperts`. A `GroupedExperts` then takes rows for the
    experts of all ranks, sorted by expert, and counts ``[num_experts]``. It returns its results in
    the order of the rows. Parameters become DTensors with this rank's values. Values are not
    communicated, so all ranks must initialize the module with equal values. Apply the style before
    FSDP.

    Args:
        dispatcher: ``"auto"``, or a `TokenDispatcher` for the same experts and ranks. Defaults to
            ``"auto"``: the result of `choose_dispatcher`.
        token_axes: All axes on which ranks hold different tokens: a mesh, `Axis` objects, or ``()``
            if there are none. Required if the router has losses or a ``bias_rate``. Defaults to
            None: keep the ``token_axes`` of the router.
        sequence_axes: Subset of ``token_axes`` on which ranks hold different parts of the same
            sequences. Defaults to ``()``.
        sequence_mesh: 1-D mesh over which the input of the layer is sharded by sequence, for tensor
            parallelism with whole experts. Parameters of the router and the shared experts become
            DTensors that are replicated over this mesh. Their gradients are `Partial`: sum them
            over its ranks. Defaults to None.
        placement: `Placement` that assigns experts to ranks, the same on all ranks. To check this,
            ranks communicate one small all-gather over each mesh axis that splits the experts. In
            the backward, one all-to-all sums the gradients of replicas. Defaults to None: each rank
            holds an equal block of consecutive experts.
        node_mesh: The same ranks as a 2-D mesh ``(nodes, ranks of a node)``, so that ``"auto"`` can
            choose `Hierarchical`. Defaults to None.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Raises:
        ExpertConfigError: ``dispatcher`` is not a `TokenDispatcher`, or ``placement`` is not a
            `Placement`. The other arguments are checked when the style is applied.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (4,))
        >>> layer = MoE(dim=64, hidden_dim=128, num_experts=8, top_k=2)
        >>> layer = parallelize_module(layer, mesh, TensorParallel())
        >>> layer(torch.randn(16, 64)).shape  # the same tokens on all ranks
        torch.Size([16, 64])
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return how this style uses a mesh: its only axis splits each expert.

        Args:
            mesh: Mesh that the style is applied to.

        Returns:
            An object with the attributes ``mesh`` and ``tensor_axis``, the axis that splits each
            expert.

        Raises:
            ExpertConfigError: The mesh is not 1-D.
        """
        if mesh.ndim != 1:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass the 1-D mesh of the axis that cuts "
                "experts, or use ExpertTensorParallel on two"
            )
        return Split(mesh=mesh, tensor_axis=Axis.of(mesh, 0))


class ExpertTensorParallel(BaseExpertParallel):
    """Parallel style that splits whole experts over one axis and each expert over a second axis.

    The first axis of the 2-D mesh splits whole experts, and the second axis splits each expert. The
    names of the axes do not matter. Tokens travel over the first axis only. Ranks of the second
    axis have to hold the same tokens, and one all-reduce sums their partial outputs.

    Apply the style to a `MoE` or to a `GroupedExperts`. A `GroupedExperts` then takes rows for the
    experts of all ranks, sorted by expert, and counts ``[num_experts]``. It returns its results in
    the order of the rows. Parameters become DTensors with this rank's values. Values are not
    communicated, so all ranks must initialize the module with equal values. Apply the style before
    FSDP.

    Args:
        dispatcher: ``"auto"``, or a `TokenDispatcher` for the same experts and ranks. Defaults to
            ``"auto"``: the result of `choose_dispatcher`.
        token_axes: All axes on which ranks hold different tokens: a mesh, `Axis` objects, or ``()``
            if there are none. Required if the router has losses or a ``bias_rate``. Defaults to
            None: keep the ``token_axes`` of the router.
        sequence_axes: Subset of ``token_axes`` on which ranks hold different parts of the same
            sequences. Defaults to ``()``.
        sequence_mesh: 1-D mesh over which the input of the layer is sharded by sequence, for tensor
            parallelism with whole experts. Parameters of the router and the shared experts become
            DTensors that are replicated over this mesh. Their gradients are `Partial`: sum them
            over its ranks. Defaults to None.
        placement: `Placement` that assigns experts to ranks, the same on all ranks. To check this,
            ranks communicate one small all-gather over each mesh axis that splits the experts. In
            the backward, one all-to-all sums the gradients of replicas. Defaults to None: each rank
            holds an equal block of consecutive experts.
        node_mesh: The same ranks as a 2-D mesh ``(nodes, ranks of a node)``, so that ``"auto"`` can
            choose `Hierarchical`. Defaults to None.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Raises:
        ExpertConfigError: ``dispatcher`` is not a `TokenDispatcher`, or ``placement`` is not a
            `Placement`. The other arguments are checked when the style is applied.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
        >>> layer = MoE(dim=64, hidden_dim=128, num_experts=8, top_k=2)
        >>> layer = parallelize_module(layer, mesh, ExpertTensorParallel(token_axes=mesh["ep"]))
        >>> layer(torch.randn(16, 64)).shape  # the same tokens on the ranks of etp
        torch.Size([16, 64])
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return how this style uses a mesh: one axis splits the experts, the other each expert.

        Args:
            mesh: Mesh that the style is applied to.

        Returns:
            An object with the attributes ``mesh``, ``expert_axis`` (splits whole experts) and
            ``tensor_axis`` (splits each expert).

        Raises:
            ExpertConfigError: The mesh is not 2-D.
        """
        if mesh.ndim != 2:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass a 2-D mesh of the axis that splits "
                "experts and the axis that cuts each of them"
            )
        return Split(mesh=mesh, expert_axis=Axis.of(mesh, 0), tensor_axis=Axis.of(mesh, 1))


def parallelize_experts(model: nn.Module, mesh: DeviceMesh, style: BaseExpertParallel) -> list[str]:
    """Apply a parallel style to every `MoE` of a model. If this raises, no layer is changed.

    If the style has a ``placement``, ranks check that it is the same everywhere, with one small
    all-gather over each mesh axis that splits the experts. Nothing else is communicated.

    Args:
        model: The model. Its `MoE` layers are changed in place.
        mesh: Mesh of the ranks over which the style splits the experts.
        style: An `ExpertParallel`, `TensorParallel` or `ExpertTensorParallel`.

    Returns:
        The names of the `MoE` layers in ``model``.

    Raises:
        ExpertConfigError: Raised on all ranks together before any change, if the style cannot be
            applied to a layer, which the message names; ``model`` has no `MoE`; a parameter of a
            layer also belongs to another module; ``mesh`` or ``style`` has the wrong type; or ranks
            have different placements. The same `MoE` object may occur several times in the model.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> model = nn.Sequential(nn.Linear(64, 64), MoE(64, 128, num_experts=8, top_k=2))
        >>> parallelize_experts(model, mesh, ExpertParallel(token_axes=mesh))
        ['1']
    """
    if not hasattr(mesh, "ndim"):
        raise ExpertConfigError(f"{mesh!r} is no mesh; pass that of the split, as mesh['ep']")
    if not isinstance(style, BaseExpertParallel):
        raise ExpertConfigError(f"{style!r} is no style; pass one, as ExpertParallel()")
    style.compare_placements(mesh)
    changes = {}
    replaced = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            try:
                changes[name] = style.prepare(module, mesh)
                replaced[name] = style.replaced(module)
            except ExpertConfigError as error:
                raise ExpertConfigError(f"layer {name!r}: {error}") from error
    if not changes:
        raise ExpertConfigError(
            f"{type(model).__name__} has no MoE; apply the style to the experts of your own layer"
        )
    check_untied(model, replaced)
    for change in changes.values():
        change()
    return list(changes)


def check_dispatcher(given: object) -> None:
    """Raise an `ExpertConfigError` unless this is ``"auto"`` or a `TokenDispatcher`."""
    if isinstance(given, type):  # it has the methods too
        name = given.__name__
        raise ExpertConfigError(
            f"dispatcher is the class {name}; give an object of it, as {name}(mesh, num_experts)"
        )
    if given != "auto" and not isinstance(given, TokenDispatcher):
        raise ExpertConfigError(f"dispatcher={given!r} is not 'auto' or a TokenDispatcher")


def given_or_best(
    given: TokenDispatcher | None,
    split: Split,
    num_slots: int,
    node_mesh: AxisMesh | None,
    collectives: Collectives | None,
    *,
    top_k: int,
    row_bytes: int,
) -> TokenDispatcher:
    """Return ``given`` or the expected best one for tokens of ``row_bytes`` with ``top_k`` experts.

    `ExpertConfigError` where ``given`` is for another split of experts.
    """
    if given is not None:
        if node_mesh is not None:
            raise ExpertConfigError(
                "node_mesh is for dispatcher='auto'; a given one has its own mesh"
            )
        _check_given(given, split, num_slots)
        return given
    axis = split.expert_axis
    node_size = None if node_mesh is None else _node_size(node_mesh, axis)
    kind = choose_dispatcher(
        num_ranks=split.num_ranks,
        num_experts=num_slots,
        top_k=top_k,
        row_bytes=row_bytes,
        node_size=node_size,
        device_type=split.mesh.device_type,
    )
    if axis is None or kind == "local":
        return Local(num_slots)
    if kind == "hierarchical" and node_mesh is not None:
        return Hierarchical(node_mesh, num_slots, collectives)
    make = Dedup if kind == "dedup" else AllToAll
    return make(
        split.mesh if split.mesh.ndim == 1 else split.mesh[axis.name], num_slots, collectives
    )


def _check_given(given: TokenDispatcher, split: Split, num_slots: int) -> None:
    """Raise unless ``given`` brings tokens to where the split puts their experts."""
    if isinstance(given, Placed | Summed):
        raise ExpertConfigError(
            f"the style puts a {type(given).__name__} around the dispatcher where one is due; give "
            "it the inner one, and placement= where experts have one"
        )
    if not isinstance(given, ShardedDispatcher):
        return
    kind = type(given).__name__
    if given.num_experts not in (None, num_slots):
        raise ExpertConfigError(
            f"{kind} for {given.num_experts} experts in a layer that has {num_slots} experts or "
            "slots of a placement; make it for as many"
        )
    ranks = () if split.expert_axis is None else split.expert_axis.ranks
    if given.ranks is not None and given.ranks != ranks and max(len(given.ranks), len(ranks)) > 1:
        raise ExpertConfigError(
            f"{kind} over ranks {list(given.ranks)}, but the blocks of experts lie on "
            f"{list(ranks) or 'each rank'}; make it over the axis that splits experts, in its order"
        )


def _node_size(node_mesh: AxisMesh, axis: Axis | None) -> int:
    ranks = [rank for row in node_mesh.mesh.tolist() for rank in row] if node_mesh.ndim == 2 else []
    if axis is None or tuple(ranks) != axis.ranks:
        own = "no axis does" if axis is None else f"axis {axis.name!r} has {axis.size}"
        raise ExpertConfigError(
            f"node_mesh has ranks {node_mesh.mesh.tolist()}; it must be nodes x ranks inside one "
            f"of the ranks that split experts; {own}"
        )
    return Axis.of(node_mesh, 1).size


Forward = Callable[..., Tensor]


def wrap_forward(experts: GroupedExperts, split: Split, collectives: Collectives | None) -> None:
    """Replace ``forward`` of ``experts``, for this module alone."""
    compute: Forward = type(experts).forward
    if split.expert_axis is not None:
        exchange = RowExchange(split.expert_axis, experts.num_experts, collectives)
        compute = _over_ranks(compute, exchange)
    if split.summed_over is not None:
        compute = _summed(compute, split.summed_over, collectives)
    # Bound to the module it is called on, so that a deep copy computes with its own weights.
    experts.forward = MethodType(compute, experts)  # type: ignore[method-assign]


def _over_ranks(compute: Forward, exchange: RowExchange) -> Forward:
    """Return ``compute`` for rows and counts of all experts, where a rank computes its block."""

    def forward(
        self: GroupedExperts, rows: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        found = check_rows(rows, counts, weights, exchange.num_experts, self.gate_up_proj.shape[-1])
        report = as_tensor(found, rows.device)
        if found[0] == Fault.NONE:
            report = check_counts(counts.long(), rows.shape[0], report)
        else:  # take part without rows, so that all ranks raise
            rows, counts = rows.new_empty(0, 1), report.new_zeros(exchange.num_experts)
            weights = None
        if weights is not None and self.score_before_experts:
            rows, weights = weigh_rows(rows, weights), None
        plan = exchange.plan(exchange.start_counts(counts, report))
        here = exchange.start(exchange.load(rows), plan).wait()
        results = exchange.start_back(compute(self, here, plan.counts), plan).wait()
        return results if weights is None else weigh_rows(results, weights)

    return forward


def _summed(compute: Forward, axis: Axis, collectives: Collectives | None) -> Forward:
    """Return ``compute`` where every rank of ``axis`` has the rows and a part of the result."""

    def forward(
        self: GroupedExperts, rows: Tensor, counts: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        if weights is not None and weights.shape != rows.shape[:1]:
            return compute(self, rows, counts, weights)  # which raises, on all ranks that wait
        if weights is not None and self.score_before_experts:
            rows, weights = weigh_rows(rows, weights), None
        part = compute(self, AutogradCollectives(collectives).replicate(rows, axis), counts)
        results = AutogradCollectives(collectives).all_reduce(part, axis)
        return results if weights is None else weigh_rows(results, weights)

    return forward
