"""`explain` returns the plan of a redistribution, without carrying it out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ._errors import LayoutError, MeshError
from ._layout import Layout
from ._planner import Plan, PlanOptions, check_names, check_order_left_out, explain_layouts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._prepare import Distributed


def explain(
    x: "Distributed | Layout",
    placements: "Sequence[Any] | Layout | None" = None,
    *,
    mesh: "DeviceMesh | None" = None,
    shape: Sequence[int] | None = None,
    rank: int | None = None,
    itemsize: int | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the plan that `redistribute` would carry out. Communicates nothing.

    ``print(plan)`` lists the steps with their bytes, peak memory and time.

    Args:
        x: A DTensor, a `RaggedTensor`, a `NonMember` (a tensor on a rank outside its mesh) or a
            `Layout`. For a tensor, the plan uses only process groups that exist. For a `Layout`,
            the plan assumes a process group for every set of mesh axes, and torch is not needed.
        placements: Target placements, as in `redistribute`; or a `Layout`, which may be on another
            mesh if ``x`` is a `Layout` too.
        mesh: Target mesh of a tensor. Not allowed with a `Layout`.
        shape: Global shape. Required for a `Layout`, not allowed for a tensor.
        rank: Global rank for which bytes and memory are computed. Only if ``x`` is a `Layout`.
            Defaults to 0.
        itemsize: Bytes per element. Only if ``x`` is a `Layout`. Defaults to 4.
        **options: ``shard_order``, ``max_bytes``, ``cost`` and ``groups``, as in `redistribute`.
            ``shard_order`` is not allowed if ``placements`` is a `Layout`. ``groups`` is not
            allowed if ``x`` is a `Layout`.

    Returns:
        The plan. Bytes and memory are for this rank if ``x`` is a tensor, otherwise for ``rank``.
        The plan has these attributes:

        - ``steps``: the steps, in order.
        - ``bytes_received``: bytes that the rank receives from other ranks.
        - ``step_bytes``: bytes that the rank receives from other ranks in each step.
        - ``peak_bytes``: peak memory of the rank in bytes.
        - ``time``: time in seconds, estimated by the cost model.
        - ``why``: text that says how many plans were compared.
        - ``note``: text about a process group that would allow a faster plan, or empty.

    Raises:
        LayoutError: `redistribute` does not support this change. Or ``shape`` is missing. Or an
            argument is not allowed for this kind of ``x``.
        MeshError: ``rank`` is in neither mesh. Or ``mesh`` is given with a `Layout`. Or a required
            process group does not exist.
        NoPlanError: Every plan needs more than ``max_bytes``.

    Examples:
        >>> plan = explain(Layout((8,), (Shard(0),)), (Replicate(),), shape=(1024, 1024))
        >>> [step.kind for step in plan.steps], plan.bytes_received
        (['all_gather'], 3670016)
    """
    for layout in (x, placements):
        if mesh is not None and isinstance(layout, Layout):
            raise MeshError(
                f"mesh={mesh!r} beside a Layout, which has its own mesh of shape "
                f"{layout.mesh_shape}; leave mesh= out"
            )
    check_names(options, PlanOptions)
    check_order_left_out(placements, options.get("shard_order"))
    if isinstance(x, Layout):
        return explain_layouts(
            x, placements, shape=shape, rank=rank, itemsize=itemsize, options=options
        )
    from ._prepare import options_of, plan_for  # They need torch; plans between layouts do not.

    plan = plan_for(x, placements, mesh, options_of(options))
    if not (shape is None and rank is None and itemsize is None):
        raise LayoutError(
            f"shape={shape!r}, rank={rank!r} and itemsize={itemsize!r} beside a tensor, which "
            "has its own, of which this is the plan on this rank; leave them out, or give a "
            "Layout in its place"
        )
    return plan
