"""What runs before and after the forward and the backward of a unit's modules."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hp_dtensor.torch_compat import inside_backward

from ._errors import StateError, UnsupportedError
from ._precision import (
    can_look_into,
    cast_floating,
    map_tensors,
    move_tensors,
    tensors_in,
    tensors_with_gradient,
)
from ._schedule import Schedule
from ._states import AFTER, Event, GradientState
from ._torch import (
    apply_untransformed,
    base_since,
    compiler,
    graph_task,
    inside_transform,
    next_number,
    outside_transforms,
    uncompiled,
    uncompiled_itself,
)
from ._unit import Run, Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


# A compiler that traced what communicates would break its graph there, and again whenever the step
# is in another state; what is called in between may be compiled.
@uncompiled_itself
def run_forward(
    unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Call ``forward`` on gathered parameters; a hook in it ends it, or else this does."""
    if module in unit.running and not (unit.sharded or unit.stale or inside_backward()):
        return _run_within(unit, module, forward, args, kwargs)
    plain = compiler() is None  # then nothing needs to be kept from it
    try:
        args, kwargs = (_pre_forward if plain else pre_forward)(unit, module, args, kwargs)
        output = forward(*args, **kwargs)
        if module not in unit.running and (graph_task() < 0 or module in unit.ended_by_hook):
            return output  # a hook has ended it
        return (_post_forward if plain else post_forward)(unit, module, output)
    except BaseException:
        _forward_failed(unit, module)
        raise


def _run_within(
    unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Call ``forward`` in a run of the same module, which keeps its parameters to its own end.

    So a registered method may call its module, or a module itself. What comes out is hooked all the
    same: a backward may begin inside.
    """
    run, before = unit.run, unit.run.within
    run.within = (*before, module)
    try:
        args, kwargs = _cast_inputs(unit, args, kwargs)
        output = forward(*args, **kwargs)
        return output if module in unit.ended_by_hook else post_forward(unit, module, output)
    finally:
        run.within = before


def end_in_hook(unit: Unit, module: nn.Module) -> None:
    """Let a hook end the module's forward from now on, before those that are registered later.

    So these see the parameters resharded, as under torch's ``fully_shard``. Without other hooks
    `run_forward` does it, and a module without any is called in fewer steps.
    """

    @uncompiled
    def hook(module: nn.Module, _: Args, output: Any) -> Any:
        ended = module not in unit.running and graph_task() < 0
        return output if ended else post_forward(unit, module, output)

    if module not in unit.ended_by_hook:
        unit.ended_by_hook.add(module)
        nn.Module.register_forward_hook(module, hook)


def _pre_forward(unit: Unit, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Gather; return the inputs, cast, and marked so that the end of backward is seen."""
    schedule = unit.schedule
    if schedule is None:
        schedule = Schedule(unit.modules)
    if unit.options.precision.param_dtype is not None:
        args, kwargs = _cast_inputs(unit, args, kwargs)
    if graph_task() >= 0:
        # Activation checkpointing runs the forward again, and may leave it half way: nothing here
        # may wait for what runs after forward.
        outside_transforms(_gather_now, unit)
        if torch.is_grad_enabled() and unit.gradients is GradientState.EMPTY:
            # No forward announced these gradients (reentrant checkpointing runs it without).
            unit.gradients = AFTER[Event.BACKWARD][unit.gradients]
            schedule.begin_backward()
        return args, kwargs
    if schedule.in_backward:
        schedule.check_no_backward()
    # A module that never ended, or that runs within itself, starts its unit over.
    first = module not in unit.waiting or module in unit.running
    if first:
        unit.running.clear()
        unit.waiting.update(unit.modules)
        unit.expects_backward = False
        unit.run = Run(unit, next_number())
    unit.running.add(module)
    transformed = inside_transform()
    if first:
        begin = schedule.pre_forward
        is_root = outside_transforms(begin, unit.run) if transformed else begin(unit.run)
        if is_root and schedule.device.type != "cpu":
            args, kwargs = move_tensors((args, kwargs), schedule.device)
    if transformed:
        outside_transforms(unit.unshard)
    else:
        unit.unshard()
        # Without parameters nothing is given up or reduced when backward is past.
        if first and unit.groups and torch.is_grad_enabled():
            args, kwargs = _mark_inputs(unit.run, args, kwargs)
    return args, kwargs


def _gather_now(unit: Unit) -> None:
    unit.gather(in_pass=True)
    unit.unshard()
    for group in unit.groups:
        group.train_as_sharded(backward=True)


def _cast_inputs(unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    policy = unit.options.precision
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    return args, kwargs


def _post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Expect the backward, reshard, and return the output, cast."""
    dtype = unit.options.precision.output_dtype
    output = output if dtype is None else cast_floating(output, dtype)
    if graph_task() >= 0:  # a forward that runs again
        return output
    schedule = unit.schedule
    if schedule is None:
        raise StateError("a forward ended in a unit in which none began")
    if torch.is_grad_enabled():
        output = _expect_backward(unit, schedule, output)
    if module in unit.run.within:
        return output
    unit.waiting.discard(module)
    unit.running.discard(module)
    if not unit.waiting:
        try:
            if inside_transform():
                outside_transforms(schedule.end_forward, unit)
            else:
                schedule.end_forward(unit)
        except BaseException:
            schedule.forward_failed(unit)
            raise
    return output


pre_forward, post_forward = uncompiled(_pre_forward), uncompiled(_post_forward)


def _forward_failed(unit: Unit, module: nn.Module) -> None:
    if module in unit.running:
        unit.forget_forward()
        if unit.schedule is not None:
            unit.schedule.forward_failed(unit)


def _expect_backward(unit: Unit, schedule: Schedule, output: Any) -> Any:
    """Hook what backward comes in by; return the output, with views in place of some tensors.

    A hook on a leaf, such as the unit's own parameter, would stay for good, and one on an input
    that the hook of the unit before is on would tell of both at once.
    """
    tensors = tensors_with_gradient(output)
    if inside_transform():
        # Its backwards come and go unseen, several on one graph: the parameters stay, and are back
        # for one that comes after others. Only gradients of parameters end up anywhere.
        for tensor in tensors:
            tensor.register_hook(partial(_before_transform, unit))
        tensors = []
    run = unit.run
    if tensors:
        if any([tensor.is_leaf or run.is_input(tensor) for tensor in tensors]):
            output = map_tensors(partial(_of_its_own, run), output)
            tensors = tensors_with_gradient(output)
        before = partial(_before_backward, unit.run)
        for tensor in tensors:
            tensor.register_hook(before)
            if (base := base_since(tensor, unit.run.number)) is not None:
                base.register_hook(before)
        unit.run.output = weakref.ref(tensors[0]) if len(tensors) == 1 else None
        unit.run.expected = True
    elif not (unit.hook_gradients(partial(_gradient_came, unit, schedule)) or _hides(run, output)):
        return output  # all is frozen: no backward comes through here
    else:
        unit.hidden = True
    unit.expects_backward = True
    unit.gradients = AFTER[Event.FORWARD][unit.gradients]
    return output


def _hides(run: Run, output: Any) -> bool:
    """Return whether backward may go through a frozen unit in what cannot be looked into."""
    if not (run.marked or run.hidden_input):
        return False
    return not (can_look_into(output) and tensors_in(output))


def _of_its_own(run: Run, tensor: Tensor) -> Tensor:
    shared = tensor.requires_grad and (tensor.is_leaf or run.is_input(tensor))
    return tensor.view_as(tensor) if shared else tensor


def _gradient_came(unit: Unit, schedule: Schedule) -> None:
    schedule.check_hidden(unit)
    unit.gradients = AFTER[Event.BACKWARD][unit.gradients]
    schedule.begin_backward()


def _before_transform(unit: Unit, gradient: Tensor) -> None:
    outside_transforms(_gather_now, unit)


def _before_backward(run: Run, gradient: Tensor) -> None:
    unit = run.unit
    if unit.schedule is None:
        raise StateError("a backward reached a unit that has not run forward")
    if torch.is_grad_enabled():  # with create_graph=True
        with torch.no_grad():
            _expect_second_backward(run, unit.schedule)
            _before_backward(run, gradient)
        return
    unit.schedule.backward_reached(run)
    if unit.options.unshard_in_backward:
        unit.unshard()


def _expect_second_backward(run: Run, schedule: Schedule) -> None:
    """Prepare a unit for a second backward, through the graph that ``create_graph=True`` makes.

    That backward does not reach the hooks on the unit's outputs, so hooks on the gradients of the
    parameters signal it. They stay as long as the graph can be alive.
    """
    unit = run.unit
    if not unit.keeps_parameters(schedule.units[0] is unit):
        raise UnsupportedError(
            f"a backward with create_graph=True reached {schedule.path_of(unit)}, which frees its "
            "parameters, but the second backward needs them. Either keep the parameters, with "
            "fully_shard(..., reshard_after_forward=False) and set_reshard_after_backward(False), "
            "or use torch.func.grad instead of create_graph=True, which works in every "
            "configuration"
        )
    if unit.hook_gradients(partial(_gradient_came, unit, schedule)):
        unit.hidden = True
        unit.note_create_graph(run)


def _mark_inputs(run: Run, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the inputs; those that take a gradient tell when backward is past.

    Where that is the output of the unit before, its own hook tells. Without any, the end of the
    whole backward will do.
    """
    alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    tensors = list(args) if alone else tensors_with_gradient((args, kwargs))
    run.marked = tensors[0].requires_grad if alone else bool(tensors)
    if not run.marked:
        run.hidden_input = not alone and not can_look_into((args, kwargs))
        return args, kwargs
    if len(tensors) == 1 and run.follow(tensors[0]):
        return args, kwargs
    if alone:
        return apply_untransformed(_AfterBackward, run, *args), kwargs
    marked = iter(apply_untransformed(_AfterBackward, run, *tensors))
    args, kwargs = map_tensors(
        lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
    )
    return args, kwargs


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after the unit's own backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.run.unit.schedule is not None:
            with torch.no_grad():  # gradients are enabled with create_graph=True
                ctx.run.unit.schedule.backward_left(ctx.run)
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        # The outputs are views of the inputs, so autograd requires views of the tangents.
        return tuple(tangent.view_as(tangent) for tangent in tangents)
