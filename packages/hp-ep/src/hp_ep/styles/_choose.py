"""The dispatcher of a layer that is split over ranks."""

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from .._moe import MoE
from ..dispatch._all_to_all import AllToAll
from ..dispatch._cost import choose_dispatcher
from ..dispatch._dedup import Dedup, Hierarchical
from ..dispatch._interface import SpreadDispatcher, TokenDispatcher
from ..dispatch._local import Local
from ..dispatch._wrappers import Placed, Summed
from ..placement._plan import Placement
from ._split import Split


def make_dispatcher(
    layer: MoE,
    split: Split,
    given: TokenDispatcher | None,
    placement: Placement | None,
    node_mesh: AxisMesh | None,
    collectives: Collectives | None,
) -> TokenDispatcher:
    """Return ``given`` or the expected best one, for slots and sums where the layer has them."""
    num_slots = layer.experts.num_experts if placement is None else len(placement.experts)
    if given is None:
        dispatcher = _best(layer, split, num_slots, node_mesh, collectives)
    elif node_mesh is not None:
        raise ExpertConfigError("node_mesh is for dispatcher='auto'; a given one has its own mesh")
    else:
        _check_given(given, split, num_slots)
        dispatcher = given
    if placement is not None:
        index = 0 if split.expert_axis is None else split.expert_axis.index
        device = layer.experts.w1.device
        dispatcher = Placed(dispatcher, placement, index, device=device)
    if split.summed_over is not None:
        dispatcher = Summed(dispatcher, split.summed_over, collectives)
    return dispatcher


def _check_given(given: TokenDispatcher, split: Split, num_slots: int) -> None:
    """Raise unless ``given`` brings tokens to where the split puts their experts."""
    if isinstance(given, Placed | Summed):
        raise ExpertConfigError(
            f"the style puts a {type(given).__name__} around the dispatcher where one is due; give "
            "it the inner one, and placement= where experts have one"
        )
    if not isinstance(given, SpreadDispatcher):
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


def _best(
    layer: MoE,
    split: Split,
    num_slots: int,
    node_mesh: AxisMesh | None,
    collectives: Collectives | None,
) -> TokenDispatcher:
    axis = split.expert_axis
    node_size = None if node_mesh is None else _node_size(node_mesh, axis)
    kind = choose_dispatcher(
        num_ranks=split.num_ranks,
        num_experts=num_slots,
        top_k=layer.router.top_k,
        row_bytes=layer.dim * layer.experts.w1.element_size(),
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


def _node_size(node_mesh: AxisMesh, axis: Axis | None) -> int:
    ranks = [rank for row in node_mesh.mesh.tolist() for rank in row] if node_mesh.ndim == 2 else []
    if axis is None or tuple(ranks) != axis.ranks:
        own = "no axis does" if axis is None else f"axis {axis.name!r} has {axis.size}"
        raise ExpertConfigError(
            f"node_mesh has ranks {node_mesh.mesh.tolist()}; it must be nodes x ranks inside one "
            f"of the ranks that split experts; {own}"
        )
    return Axis.of(node_mesh, 1).size
