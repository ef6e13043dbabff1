"""Take a distributed tensor to another layout or mesh: the call, autograd, and what is pending."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._between_meshes import ConsistencyCheck, NonMember
from ._convert import AnyPlacement, DensePlacement, TorchPartial, torch_step
from ._cost import CostModel
from ._errors import LayoutError
from ._execute import start
from ._layout import Layout, reduced_layout
from ._prepare import (
    NO_OPTIONS,
    Distributed,
    Options,
    Order,
    Prepared,
    Target,
    local_of,
    options_of,
    own_mesh,
    prepare,
)
from ._torch import writes_into
from .collectives._c10d import TorchCollectives
from .collectives._checked import checking
from .collectives._interface import Collectives

Result = TypeVar("Result", bound=Distributed)


class Pending(Generic[Result]):
    """A redistribution under way."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish
        self._done = False
        self._error: BaseException | None = None

    def wait(self) -> Result:
        """Return the result, complete for use on the caller's stream; may be called again.

        Until then what was given must stay untouched, and the result may share its memory. Where a
        collective fails, nothing further is started, and every call raises that first error.

        Raises:
            RuntimeError: What was given was written into since, in place, while it was being sent.
        """
        if self._error is not None:
            raise self._error
        if not self._done:
            try:
                self._result = self._finish()
            except BaseException as error:
                self._error = error
                raise
            finally:
                del self._finish  # it holds the buffers of the last collective
            self._done = True
        return self._result


class _Keywords(TypedDict, total=False):
    """What every form of the call takes besides; see `redistribute`."""

    shard_order: Order
    max_bytes: int | None
    cost: CostModel | None
    collectives: Collectives | None
    groups: Sequence[ProcessGroup | DeviceMesh] | None


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    async_op: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> DTensor: ...


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    async_op: Literal[True],
    **options: Unpack[_Keywords],
) -> Pending[DTensor]: ...


@overload
def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    async_op: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Distributed: ...


@overload
def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    async_op: Literal[True],
    **options: Unpack[_Keywords],
) -> Pending[Distributed]: ...


def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: bool = False,
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Distributed | Pending[Any]:
    """Change the placements or the mesh of a distributed tensor.

    Runs the cheapest sequence of collectives between the two layouts; `explain` returns this
    sequence. The call can be written as ``redistribute(x, placements, mesh=mesh)``, or in the order
    of torch as ``redistribute(x, mesh, placements)``.

    - **Groups.** Each step runs in a process group with exactly the ranks of its axes. Steps use
      existing groups: the given ``groups``, and the groups of single axes, of the world, of
      flattened meshes and of hp-mesh aliases.
    - **Gradients.** Backward redistributes the gradient to the layout of ``x``. If an axis of ``x``
      is `Partial`, the gradient is replicated on this axis. The plan of backward respects ``cost``
      and ``max_bytes``.
    - **Other meshes.** Data is sent point to point, over a group with the ranks of both meshes: one
      of ``groups``, the world's, or one that the first call creates. Every rank of both meshes has
      to call. On a rank outside a mesh, a `NonMember` represents the tensor. The ranks first
      compare their calls with one all-reduce of 32 bytes, which does not go through
      ``collectives``. With ``async_op=True``, only the first call with a given plan waits for this
      all-reduce; later calls wait for it in ``wait()``.
    - **Compilation.** Under ``torch.compile`` the plan is made during tracing, for the traced
      sizes, and carried out by one opaque op. ``async_op`` then changes only the type of the
      result. Ragged tensors, `NonMember`, other meshes, ``collectives`` and ``groups`` raise.

    Args:
        x: A DTensor or a `RaggedTensor` on any mesh, or a `NonMember`. A `NonMember` needs the
            ``requires_grad`` of the tensor that it represents.
        *where: ``placements``, or torch's ``mesh, placements``.
        placements: One placement for each mesh axis, of this package or of torch. None means
            `Replicate` on all axes. With a `RaggedShard` the result is a `RaggedTensor`.
        mesh: Mesh of the result. Defaults to the mesh of ``x``.
        shard_order: Order of axes that shard the same dim, as in `Layout`. The result then has
            torch's strided shards.
        max_bytes: Upper bound on the memory of one step on any rank, in bytes.
        cost: Cost model by which plans are compared. Defaults to ``AlphaBeta()``.
        async_op: If True, start the first collective and return a handle. Its ``wait()`` carries
            out the other steps and returns the tensor. Do not write to ``x`` before ``wait()``
            returns; otherwise ``wait()`` raises RuntimeError.
        collectives: Object that carries out the steps. Defaults to `TorchCollectives`.
        groups: Additional process groups, or meshes of one axis, for steps over several axes. They
            have to be the same on all ranks, in the same order.

    Returns:
        The tensor in the target layout. Its placements are torch's if torch has an equivalent. If
        the layout does not change, the result shares memory with ``x``. If in addition autograd
        records nothing, the result is ``x`` itself.

    Raises:
        LayoutError: The placements or the shard order are invalid for the mesh or the shape. Or the
            target has a `Partial` that ``x`` does not have on this axis. Or two reductions cannot
            be exchanged, such as sum and max. Or a reduction does not support the dtype. Raised on
            all ranks before communication. If only the local tensor of this rank has a wrong shape,
            only this rank raises and the other ranks wait; with `CheckedCollectives` all of them
            raise `RankMismatchError`.
        MeshError: ``mesh`` is not a device mesh, or a required process group does not exist.
        NoPlanError: Every plan, or every plan of backward, needs more than ``max_bytes``.
        RankMismatchError: The ranks of two meshes make different calls, or a rank has a local
            tensor of the wrong shape. Raised on all ranks before data is sent, or in ``wait()``.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        >>> redistribute(x, [Shard(1)]).to_local().shape
        torch.Size([8, 1])
    """
    if where:
        first: Any = where[0]
        # Whether it is a mesh takes longer to ask than all else here.
        listed = type(first) is list or type(first) is tuple
        if listed and placements is None and len(where) == 1:
            placements = first
        else:
            mesh, placements = _sorted_out(where, mesh, placements)
    target: Target = (placements, mesh, shard_order)
    if is_compiling():
        from ._compile import trace  # it loads the compiler, which takes seconds

        return trace(x, target, max_bytes, cost, async_op, collectives, groups)
    options = NO_OPTIONS
    if cost is not None or max_bytes is not None or groups is not None:
        options = options_of(cost, max_bytes, groups)
    return run(x, target, options, collectives, async_op)


def _sorted_out(
    where: tuple[Any, ...], mesh: DeviceMesh | None, placements: Sequence[AnyPlacement] | None
) -> tuple[DeviceMesh | None, Sequence[AnyPlacement] | None]:
    """Return mesh and placements of a call, given by position as ours are or as torch's."""
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


class _Call(NamedTuple):
    """A prepared redistribution with what is not kept between calls.

    ``mesh`` is that of the result; ``absent`` is what was given where there is no tensor.
    """

    prepared: Prepared
    mesh: Any
    collectives: Collectives
    absent: NonMember | None


def run(
    x: Distributed,
    target: Target,
    options: Options,
    collectives: Collectives | None = None,
    async_op: bool = False,
    prepare: Callable[[Any, Target, Options], Prepared] = prepare,
) -> Distributed | Pending[Any]:
    """Return what `redistribute` does, in eager code, in backward and in a graph.

    ``prepare`` is another one in a graph, where an op carries the plan out.
    """
    # Looking through a protocol takes longer than a call that moves nothing.
    given: object = None if type(collectives) is TorchCollectives else collectives
    if given is not None and (isinstance(given, type) or not isinstance(given, Collectives)):
        raise LayoutError(
            f"collectives={collectives!r} does not have the methods of Collectives; give "
            "TorchCollectives(), or leave it out"
        )
    try:
        prepared = prepare(x, target, options)
    except TorchPartial:
        placements, mesh, shard_order = target
        step = torch_step(x, placements, mesh is not None and mesh != own_mesh(x))
        rest: Target = (step.then, mesh, shard_order)
        # What is wrong with the rest is said before torch communicates.
        prepare(step.spec, rest, options)
        y = step.run(cast(DTensor, x))
        if step.whole:
            return _at_hand(y) if async_op else y
        return run(y, rest, options, collectives, async_op, prepare)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if prepared.unchanged and not recorded:
        return _at_hand(x) if async_op else x
    # Where nothing moves, the gradient may still be laid out otherwise than x: it is brought back.
    if recorded:
        prepared.check_back()
    call = _Call(
        prepared,
        target[1] if prepared.crosses else own_mesh(x),
        TorchCollectives() if collectives is None else collectives,
        x if isinstance(x, NonMember) else None,
    )
    compared = None if prepared.check is None else _compared(x, call, recorded, async_op)
    if async_op:
        return _pending(x, call, recorded, compared)
    return _recorded(x, call, None) if recorded else _finished(x, call, None)


def _pending(
    x: Distributed, call: _Call, recorded: bool, compared: Callable[[], None] | None
) -> Pending[Distributed]:
    """Start the first step; what waits for it finishes the rest, recorded if the call was."""
    local = local_of(x)
    sent = (cast(Tensor, x), local) if local is not None and call.prepared.steps else ()
    before = writes_into(*sent)
    finish = _started(x, call)

    def wait() -> Distributed:
        if compared is not None:
            compared()
        with torch.set_grad_enabled(recorded):
            result = _recorded(x, call, finish) if recorded else _finished(x, call, finish)
        # Some steps send what lies in x, others a copy: it is one rule for all.
        if writes_into(*sent) != before:
            raise RuntimeError(
                "a tensor was written into between redistribute(x, async_op=True) and wait(), "
                "while it was being sent, so that the result may hold any of both; write into x "
                "after wait(), or give redistribute a copy"
            )
        return result

    return Pending(wait)


def _at_hand(x: Result) -> Pending[Result]:
    return Pending(lambda: x)


def _compared(
    x: Distributed, call: _Call, recorded: bool, async_op: bool
) -> Callable[[], None] | None:
    """Compare what the ranks of two meshes are about to do; return what still waits for that.

    What all have compared before goes on at once in an asynchronous call: whether they mean the
    same again is seen when it is waited for.
    """
    check = cast(ConsistencyCheck, call.prepared.check)
    local = local_of(x)
    fault = call.prepared.fault(local)
    compared = check.start(recorded, fault)
    if async_op and not fault and recorded in check.passed:
        return compared
    compared()
    return None


def _started(x: Distributed, call: _Call) -> Callable[[], Tensor]:
    """Start the first step on this rank's part and return what does the rest."""
    prepared, collectives = call.prepared, call.collectives
    local = local_of(x)
    if local is None:
        prepared.check_local(None)
    if local is None or (prepared.local_shape is None and prepared.steps is not None):
        local = torch.empty(0, dtype=prepared.dtype, device=prepared.device)
    if prepared.steps is None:
        return lambda: local
    checked = None if type(collectives) is TorchCollectives else checking(collectives)
    if checked is not None and prepared.first_group is not None:
        plan = prepared.plan
        checked.check(
            prepared.first_group.find(),
            "redistribute",
            f"{prepared.dtype} of shape {list(plan.shape)} from {plan.source} to {plan.target}",
            fault=prepared.fault(local),
        )
    prepared.check_local(local)
    if prepared.op_text:
        from ._compile import execute_plan

        result = execute_plan(local, prepared.op_text)
        return lambda: result
    return start(prepared.steps, local, collectives)


def _finished(x: Distributed, call: _Call, finish: Callable[[], Tensor] | None) -> Distributed:
    if finish is None:
        finish = _started(x, call)
    return call.prepared.wrap(finish(), call.mesh)


def _recorded(x: Distributed, call: _Call, finish: Callable[[], Tensor] | None) -> Distributed:
    tensor = x if call.absent is None else call.absent.anchor()
    result: Tensor = _Redistribute.apply(tensor, call, finish)  # type: ignore[no-untyped-call]
    if isinstance(result, Distributed):
        return result
    made = cast(NonMember, call.prepared.wrap(result, None))
    return replace(made, requires_grad=True, graph=result)


class _Redistribute(torch.autograd.Function):
    """Its result is the redistributed tensor; where there is none, an empty one to come back by."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, call: _Call, finish: Callable[[], Tensor] | None) -> Tensor:
        x = tensor if call.absent is None else call.absent
        result = _finished(x, call, finish)
        back: Any = None
        if call.prepared.crosses:
            # A gradient goes back to this mesh, or to this layout of other ranks.
            back = own_mesh(x) if call.absent is None else reduced_layout(call.prepared.source)
        was_here = call.absent is None
        ctx.saved = (call._replace(absent=None), back, was_here, isinstance(result, NonMember))
        return torch.zeros(0) if isinstance(result, NonMember) else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call, there, was_here, is_gone = ctx.saved
        prepared: Prepared = call.prepared
        plan, grad = prepared.plan, grads[0]
        again = prepare
        if prepared.op_text:
            from ._compile import prepare_in_graph as again

        def take(x: Any, layout: Layout, mesh: Any) -> Any:
            target = (layout.placements, mesh, layout.shard_order)
            return run(x, target, prepared.options, call.collectives, prepare=again)

        if is_gone:
            recorded = torch.is_grad_enabled()
            grad = NonMember(plan.target, plan.shape, prepared.dtype, requires_grad=recorded)
        elif prepared.check is not None:
            # Ranks without a gradient take it to have the layout of the result.
            grad = take(grad, reduced_layout(plan.target), None)
        back = take(grad, reduced_layout(prepared.source), there)
        if not was_here:
            return torch.zeros(0), None, None
        return None if isinstance(back, NonMember) else back, None, None
