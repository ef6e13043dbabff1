"""Say what a redistribution would do, without doing it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._cost import CostModel, check_cost
from ._errors import LayoutError, MeshError
from ._layout import Layout, ShardOrder
from ._placements import in_tuple
from ._planner import Plan, make_plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._prepare import Distributed


def explain(
    x: "Distributed | Layout",
    placements: "Sequence[Any] | Layout | None" = None,
    *,
    mesh: "DeviceMesh | None" = None,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    shape: Sequence[int] | None = None,
    rank: int = 0,
    itemsize: int = 4,
    cost: CostModel | None = None,
    max_bytes: int | None = None,
    groups: "Sequence[ProcessGroup | DeviceMesh] | None" = None,
) -> Plan:
    """Return the plan with which `redistribute` would take ``x`` to ``placements``.

    Communicates nothing. ``str(plan)`` lists the steps with bytes, peak memory, time and why.

    Args:
        x: A DTensor, a `RaggedTensor` or a `NonMember`, planned with the groups that exist; or a
            `Layout`, planned as if any set of axes had a group, without torch.
        placements: As for `redistribute`, or a `Layout`, also on another mesh where ``x`` is one.
        mesh: The target's mesh; not for a `Layout`.
        shard_order: The order of axes that shard the same dim, as in `Layout`.
        shape: The global shape, for a `Layout` only.
        rank: Whose plan it is, for a `Layout` only.
        itemsize: Bytes of an element, for a `Layout` only.
        cost: What plans are compared by; `AlphaBeta` with its defaults if None.
        max_bytes: The most bytes that a step may hold at once, on any rank.
        groups: Process groups or meshes of one axis that may carry steps over several axes.

    Returns:
        The plan of this rank, or of ``rank``: ``steps``, ``bytes_received``, ``step_bytes``,
        ``peak_bytes``, ``time`` in seconds by the cost model, ``why`` and ``note``.

    Raises:
        LayoutError: As `redistribute` does; a `Layout` without ``shape``; negative sizes.
        MeshError: As `redistribute` does; a rank that has no part.
        NoPlanError: Every plan needs more than ``max_bytes``.

    Example:
        >>> print(explain(Layout((8,), (Shard(0),)), (Replicate(),), shape=(1024, 1024)))
    """
    if not isinstance(x, Layout):
        # Layouts are planned without loading torch.
        from ._groups import group_names
        from ._prepare import Options

        if isinstance(placements, Layout):
            shard_order, placements = _on_own_mesh(x, placements)
        named = () if groups is None else group_names(groups)
        where = (placements, mesh, shard_order)
        return _plan_of(x, where, Options(cost, max_bytes, named))
    check_cost(cost)
    if shape is None:
        raise LayoutError("a plan between layouts needs the tensor's global shape=")
    if mesh is not None:
        raise MeshError(
            f"mesh={mesh!r} beside a Layout, which has its own mesh of shape {x.mesh_shape}; "
            "leave mesh= out"
        )
    if not isinstance(placements, Layout):
        target = in_tuple(placements, len(x.mesh_shape))
        placements = Layout(x.mesh_shape, target, shard_order, x.ranks)
    if not x.holds(rank) and not placements.holds(rank):
        held = sorted({*x.all_ranks(), *placements.all_ranks()})
        raise MeshError(
            f"rank={rank} is in neither layout's mesh, so that it has no part; use one of "
            f"{_short(held)}"
        )
    return make_plan(x, placements, tuple(shape), rank, itemsize, cost, max_bytes=max_bytes)


def _on_own_mesh(x: "Distributed", target: Layout) -> tuple[Any, Any]:
    """Return shard order and placements of a layout; raises `MeshError` for another mesh."""
    from ._prepare import ranks_of, tensor_spec

    spec = tensor_spec(x)
    held = spec.layout
    if target.mesh_shape != held.mesh_shape:
        raise MeshError(
            f"the tensor is on a mesh of shape {held.mesh_shape} and the target on one of shape "
            f"{target.mesh_shape}; give placements and mesh="
        )
    ranks = held.ranks if spec.mesh is None else ranks_of(spec.mesh)
    if target.ranks is not None and target.ranks != replace(held, ranks=ranks).ranks:
        raise MeshError(
            f"the tensor is on ranks {list(ranks or ())} and the target on "
            f"{target.ranks_in_words()}; give placements and mesh="
        )
    return target.shard_order, target.placements


def _plan_of(x: Any, target: Any, options: Any) -> Plan:
    """Return what `redistribute` would do; raises `MeshError` on a rank that has no part."""
    from ._convert import TorchPartial, torch_step
    from ._prepare import own_mesh, prepare, ranks_of, tensor_spec

    try:
        prepared = prepare(x, target, options)
    except TorchPartial:
        placements, mesh, shard_order = target
        step = torch_step(x, placements, mesh is not None and mesh != own_mesh(x))
        plan = _plan_of(step.spec, (step.then, mesh, shard_order), options)
        return replace(plan, note="; ".join(filter(None, (step.note, plan.note))))
    if prepared.steps is None:
        ranks = prepared.source.ranks_in_words()
        if (own := tensor_spec(x).mesh) is not None:
            ranks = str(list(ranks_of(own)))
        raise MeshError(
            f"this rank is not in the mesh of the tensor, so it holds nothing of it; its ranks: "
            f"{ranks}"
        )
    return prepared.plan


def _short(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    consecutive = last - first + 1 == len(ranks)
    return f"{first} to {last}" if consecutive else str(ranks)
