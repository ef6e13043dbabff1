"""Run a prepared redistribution, record it for autograd, and return its result or a handle."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._between_meshes import NO_GRADIENT
from ._convert import TorchPartial, torch_step
from ._errors import LayoutError, UnsupportedError
from ._execute import start
from ._layout import ShardOrder, reduced_layout
from ._prepare import Distributed, Options, Prepared, local_of, prepare
from ._torch import local_part, writes_into
from .collectives._c10d import TorchCollectives
from .collectives._checked import checking

Result = TypeVar("Result", bound=Distributed)
Finish = Callable[[], Tensor]


class Prepare(Protocol):
    """Protocol of the functions `prepare` and `prepare_in_graph`.

    `prepare_in_graph` is used under torch.compile, and `prepare` otherwise.
    """

    def __call__(self, x: Any, placements: Any, mesh: Any, options: Options, /) -> Prepared: ...


class Pending(Generic[Result]):
    """Handle of a redistribution in flight. ``redistribute(..., async_op=True)`` returns it."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish
        self._done = False
        self._error: BaseException | None = None

    def wait(self) -> Result:
        """Finish the redistribution and return the result, ready for use on the current stream.

        Do not write to the input before this method returns. If a collective fails, the later steps
        are not started. This call and all later calls then raise the same error.

        Returns:
            The redistributed tensor. Later calls return the same object.

        Raises:
            RuntimeError: The input was written to in place while it was being sent.
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
                del self._finish  # Frees the buffers of the last collective.
            self._done = True
        return self._result


def run(
    x: Distributed,
    placements: Any,
    mesh: Any,
    options: Options,
    async_op: bool = False,
    prepare: Prepare = prepare,
) -> Distributed | Pending[Any]:
    """Redistribute ``x`` with validated options.

    The other arguments, the result and the errors are as in `redistribute`. ``prepare`` is called
    to make the plan and to bind the steps.
    """
    try:
        prepared = prepare(x, placements, mesh, options)
    except TorchPartial:
        return _run_after_torch(x, placements, mesh, options, async_op, prepare)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if prepared.unchanged and not recorded:
        return Pending(lambda: x) if async_op else x
    if not prepared.crosses:
        mesh = None
        if recorded and options.max_bytes is not None:
            prepared.check_backward()
    elif recorded and prepared.check is None:
        raise UnsupportedError(NO_GRADIENT)
    if prepared.check is not None:
        # The check ends before the first step starts. So if it raises, no message is in flight.
        prepared.check(prepared.fault(local_of(x)), recorded)
    if async_op:
        return _pending(x, mesh, prepared, options, recorded, prepare)
    if recorded:
        return _record(x, prepared, options, prepare, None)
    return prepared.wrap(_start(x, prepared, options)(), x, mesh)


def _run_after_torch(
    x: Any, placements: Any, mesh: Any, options: Options, async_op: bool, prepare: Prepare
) -> Distributed | Pending[Any]:
    """Redistribute a tensor with partial values that only torch can reduce.

    First ``DTensor.redistribute`` reduces the partial values. Then `run` does the rest. If the
    target keeps some of these partial values, ``DTensor.redistribute`` does everything.
    """
    step = torch_step(x, placements, mesh is not None and mesh != x.device_mesh)
    # If the remaining steps are impossible, this call raises the error before torch communicates.
    prepare(step.spec, step.then, mesh, options)
    y = step.run(cast(DTensor, x))
    if step.whole:
        return Pending(lambda: y) if async_op else y
    return run(y, step.then, mesh, options, async_op, prepare)


def _pending(
    x: Distributed,
    mesh: Any,
    prepared: Prepared,
    options: Options,
    recorded: bool,
    prepare: Prepare,
) -> Pending[Distributed]:
    """Start the first collective of a redistribution, and return a handle for the result.

    ``wait()`` of the handle runs the other steps. If ``recorded`` is True, ``wait()`` also records
    the redistribution for autograd.
    """
    local = local_of(x)
    sent = (cast(Tensor, x), local) if local is not None and prepared.steps else ()
    before = writes_into(*sent)
    finish = _start(x, prepared, options)

    def wait() -> Distributed:
        with torch.set_grad_enabled(recorded):
            if recorded:
                result = _record(x, prepared, options, prepare, finish)
            else:
                result = prepared.wrap(finish(), x, mesh)
        # Some steps send the memory of x, and others send a copy. Raise in both cases, so that
        # users have one rule.
        if writes_into(*sent) != before:
            raise RuntimeError(
                "a tensor was written into between redistribute(x, async_op=True) and wait(), "
                "while it was being sent, so that the result may hold any of both; write into x "
                "after wait(), or give redistribute a copy"
            )
        return result

    return Pending(wait)


def _start(x: Distributed, prepared: Prepared, options: Options) -> Finish:
    """Start the first collective. Return a function that runs the rest and returns the result.

    The result is a local tensor.

    Raises:
        LayoutError: The local tensor of ``x`` has a wrong shape.
        RankMismatchError: The options have `CheckedCollectives`, and the ranks make different
            calls or the local tensor of a rank has a wrong shape. Raised on all ranks.
    """
    local = local_part(x) if type(x) is DTensor else local_of(x)
    collectives, plan = options.collectives, prepared.plan
    fault = prepared.fault(local) if local is None or local.shape != prepared.local_shape else ""
    checked = None if type(collectives) is TorchCollectives else checking(collectives)
    if checked is not None and prepared.first_group is not None and not prepared.crosses:
        checked.check(
            prepared.first_group.find(),
            "redistribute",
            f"{prepared.dtype} of shape {list(plan.shape)} from {plan.source} to {plan.target}",
            fault=fault,
        )
    if fault:
        raise LayoutError(fault)
    if local is None or (prepared.local_shape is None and prepared.steps is not None):
        local = torch.empty(0, dtype=prepared.dtype, device=prepared.device)
    if prepared.steps is None:
        held = local
        return lambda: held
    return start(prepared.steps, local, collectives)


def _record(
    x: Distributed, prepared: Prepared, options: Options, prepare: Prepare, finish: Finish | None
) -> Distributed:
    arguments = x, prepared, options, prepare, finish
    result: Distributed = _Redistribute.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    """A redistribution on one mesh. Backward redistributes the gradient to the input's layout.

    On axes where the input is `Partial`, the gradient is replicated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        prepared: Prepared,
        options: Options,
        prepare: Prepare,
        finish: Finish | None,
    ) -> Any:
        layout = reduced_layout(prepared.plan.source)
        order = cast(ShardOrder | None, layout.shard_order)
        ctx.back = layout.placements, options._replace(shard_order=order), prepare
        local = (_start(x, prepared, options) if finish is None else finish)()
        return prepared.wrap(local, x, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        placements, options, prepare = ctx.back
        back = run(grads[0], placements, None, options, prepare=prepare)
        return back, None, None, None, None
