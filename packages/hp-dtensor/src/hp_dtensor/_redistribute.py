"""`redistribute`: the public function and its arguments."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._convert import AnyPlacement, DensePlacement
from ._errors import LayoutError
from ._prepare import NO_OPTIONS, Distributed, RunOptions, options_of
from ._run import Pending, run


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    async_op: Literal[False] = False,
    **options: Unpack[RunOptions],
) -> DTensor: ...


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    async_op: Literal[True],
    **options: Unpack[RunOptions],
) -> Pending[DTensor]: ...


@overload
def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[RunOptions],
) -> Distributed: ...


@overload
def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    async_op: Literal[True],
    **options: Unpack[RunOptions],
) -> Pending[Distributed]: ...


def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    async_op: bool = False,
    **options: Unpack[RunOptions],
) -> Distributed | Pending[Any]:
    """Change the placements or the mesh of a distributed tensor.

    Runs the cheapest sequence of collectives between the two layouts; `explain` returns this
    sequence. The call can be written as ``redistribute(x, placements, mesh=mesh)``, or in the order
    of torch as ``redistribute(x, mesh, placements)``.

    - **Gradients.** Backward redistributes the gradient to the layout of ``x``. If an axis of ``x``
      is `Partial`, the gradient is replicated on this axis. All options except ``shard_order`` also
      apply to backward.
    - **Process groups.** A collective over several mesh axes needs an existing process group with
      exactly the ranks along these axes. This can be one of ``groups``, the world, the group of a
      flattened mesh, or the group of an alias in hp-mesh. Without such a group, each collective
      runs over a single axis.
    - **Two meshes.** If ``mesh`` is another mesh, data is sent point to point. Every rank of both
      meshes has to make the call. A rank that is not in the mesh of ``x`` passes a `NonMember`. A
      rank that is not in the target mesh gets a `NonMember` as result. The messages use a process
      group with the ranks of both meshes: one of ``groups``, the world, or a group that the first
      call creates. Before data is sent, the ranks compare their calls with one all-reduce of 32
      bytes. This all-reduce does not use ``collectives``, and the call waits for it even if
      ``async_op`` is True. Gradients do not pass between meshes: use ``x.detach()`` or
      ``torch.no_grad()``.
    - **Compilation.** Under ``torch.compile``, the plan is made during tracing for the traced
      sizes. One opaque operator runs it. ``async_op`` then changes only the type of the result.
      Ragged tensors, `NonMember`, ``collectives``, ``groups`` and meshes with other ranks raise an
      error.

    Args:
        x: A DTensor or a `RaggedTensor` on any mesh, or a `NonMember`.
        *where: ``placements``, or torch's ``mesh, placements``.
        placements: One placement for each mesh axis, of this package or of torch. None means
            `Replicate` on all axes. With a `RaggedShard` the result is a `RaggedTensor`.
        mesh: Mesh of the result. Defaults to the mesh of ``x``.
        async_op: If True, start the first collective and return a handle. ``wait()`` of the handle
            runs the other steps and returns the tensor. Do not write to ``x`` before ``wait()``
            returns; otherwise ``wait()`` raises RuntimeError.
        **options: Further keyword arguments, which all default to None:

            - ``shard_order``: Order in which mesh axes split the same tensor dim, as in `Layout`.
              With ``{0: (1, 0)}``, axis 1 splits dim 0 first, and then axis 0. The result then has
              torch's strided shards.
            - ``max_bytes``: Upper bound on the memory of each step on any rank, in bytes. This
              memory is the input, the output and the buffers of the step. From the second step on,
              it includes ``x``.
            - ``cost``: Cost model by which plans are compared. None means ``AlphaBeta()``.
            - ``groups``: Additional process groups, or meshes of one axis, for steps over several
              axes. Pass the same groups on all ranks, in the same order.
            - ``collectives``: `Collectives` that communicate. None means `TorchCollectives`.

    Returns:
        The tensor in the target layout. Its placements have torch's classes if torch has an
        equivalent. If the layout and the mesh do not change, the result shares memory with ``x``,
        and is ``x`` itself if autograd records nothing.

    Raises:
        LayoutError: Raised on all ranks before communication, in these cases:

            - The placements or the shard order are invalid for the mesh or the shape.
            - The target has a `Partial` on an axis where ``x`` does not have the same `Partial`.
            - Two axes have reductions whose order matters, such as sum and max.
            - A reduction does not support the dtype.

            Also raised if the local tensor of this rank has a wrong shape. Then only this rank
            raises, and the other ranks wait. With `CheckedCollectives`, all ranks raise
            `RankMismatchError` instead.
        MeshError: ``mesh`` is not a device mesh, or a required process group does not exist.
        UnsupportedError: The target is on another mesh, gradients are enabled and ``x`` requires
            grad. Raised on all ranks of both meshes before data is sent.
        NoPlanError: Every plan, or every plan of backward, needs more than ``max_bytes``.
        RankMismatchError: The target is on another mesh, and the ranks make different calls or a
            local tensor has a wrong shape. Raised on all ranks before data is sent.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        >>> redistribute(x, [Shard(1)]).to_local().shape
        torch.Size([8, 1])
    """
    if where:
        first: Any = where[0]
        # This test is faster than ``isinstance(first, DeviceMesh)``.
        is_placements = type(first) is list or type(first) is tuple
        if is_placements and placements is None and len(where) == 1:
            placements = first
        else:
            mesh, placements = _mesh_and_placements(where, mesh, placements)
    if is_compiling():
        from ._compile import trace  # This import loads the compiler, which takes seconds.

        return trace(x, placements, mesh, options, async_op)
    checked = options_of(options) if options else NO_OPTIONS
    return run(x, placements, mesh, checked, async_op)


def _mesh_and_placements(
    where: tuple[Any, ...], mesh: DeviceMesh | None, placements: Sequence[AnyPlacement] | None
) -> tuple[DeviceMesh | None, Sequence[AnyPlacement] | None]:
    """Return the mesh and the placements of a `redistribute` call with positional arguments.

    ``where`` has the positional arguments after ``x``. ``mesh`` and ``placements`` are the keyword
    arguments. Raises `LayoutError` if the mesh or the placements are given twice.
    """
    first, *more = where
    if not more and not isinstance(first, DeviceMesh):
        if placements is None:
            return mesh, first
        if first is None:
            return mesh, placements
    elif (first is None or isinstance(first, DeviceMesh)) and mesh is None:
        if not more:
            return first, placements
        if len(more) == 1 and placements is None and not isinstance(more[0], DeviceMesh):
            return first, more[0]
    raise LayoutError(
        "call redistribute(x, placements, mesh=mesh) or redistribute(x, mesh, placements), with "
        "the mesh and the placements once each"
    )
