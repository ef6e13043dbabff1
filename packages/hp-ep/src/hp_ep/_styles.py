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
    """Experts split over one mesh axis; tokens travel to them.

    The mesh is 1-D or has an axis ``ep``; weights become Shard(0) over it. Options and what happens
    to a `MoE` or a `GroupedExperts` are those of `BaseExpertParallel`.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the axis ``ep``, or the only one."""
        axis = expert_axis(mesh)
        return Split(mesh=mesh if mesh.ndim == 1 else mesh[axis.name], expert_axis=axis)


class TensorParallel(BaseExpertParallel):
    """Every expert cut along its hidden dimension over a 1-D mesh; no token travels.

    Weights become Shard(2), and the ranks' parts of the output are summed: for a `MoE` once per
    token, for a `GroupedExperts` once per row. The ranks hold the same tokens.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the only axis of ``mesh``."""
        if mesh.ndim != 1:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass the 1-D mesh of the axis that cuts "
                "experts, or use ExpertTensorParallel on two"
            )
        return Split(mesh=mesh, tensor_axis=Axis.of(mesh, 0))


class ExpertTensorParallel(BaseExpertParallel):
    """Experts split over the first axis of a 2-D mesh and cut over the second, whatever its names.

    Tokens travel over the first axis only; the ranks of the second hold the same tokens, and their
    parts of the output are summed as in `TensorParallel`.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the two axes of ``mesh``."""
        if mesh.ndim != 2:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass a 2-D mesh of the axis that splits "
                "experts and the axis that cuts each of them"
            )
        return Split(mesh=mesh, expert_axis=Axis.of(mesh, 0), tensor_axis=Axis.of(mesh, 1))


def parallelize_experts(model: nn.Module, mesh: DeviceMesh, style: BaseExpertParallel) -> list[str]:
    """Apply ``style`` to every `MoE` in ``model`` and return their names.

    Communicates nothing; only a placement is compared first, by one small all-gather over each axis
    of the split. `ExpertConfigError` that names the first layer for which the style is not legal,
    before any layer was changed, for a model without any, for layers that share experts or
    parameters of them with each other or anything else (one `MoE` in several places is fine), and
    on all ranks for a placement that they do not all give.
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
