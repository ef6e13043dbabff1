"""The steps before and after the forward of a unit, and the hooks that detect its backward.

`pre_forward` and `post_forward` run in the forward of a module. `pre_backward` runs when
autograd has computed the gradient of an output, `_PostBackward` when it has computed the gradients
of the inputs.
"""

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
from ._unit import ForwardCall, Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


# A compiler that traced communication would break its graph there, and would recompile whenever the
# state of the unit changes. The user's ``forward``, which is called from here, may be compiled.
@uncompiled_itself
def run_forward(
    unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Run `pre_forward`, ``forward`` with the unsharded parameters, and `post_forward`."""
    if module in unit.running_modules and not (
        unit.groups.sharded or unit.groups.stale or inside_backward()
    ):
        return _run_within(unit, module, forward, args, kwargs)
    plain = compiler() is None  # without a compiler, the functions need no protection from it
    try:
        args, kwargs = (_pre_forward if plain else pre_forward)(unit, module, args, kwargs)
        output = forward(*args, **kwargs)
        if module not in unit.running_modules and (graph_task() < 0 or module in unit.hook_ended):
            return output  # the hook of `end_in_hook` has run `post_forward`
        return (_post_forward if plain else post_forward)(unit, module, output)
    except BaseException:
        _forward_failed(unit, module)
        raise


def _run_within(
    unit: Unit, module: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Call ``forward`` inside a forward call of the same module.

    For example, a module calls itself, or a registered method calls its module. The parameters stay
    unsharded until the outer call ends. The outputs get hooks, because the outer call may run a
    backward from them.
    """
    call, before = unit.forward_call, unit.forward_call.nested_modules
    call.nested_modules = (*before, module)
    try:
        args, kwargs = _cast_inputs(unit, args, kwargs)
        output = forward(*args, **kwargs)
        return output if module in unit.hook_ended else post_forward(unit, module, output)
    finally:
        call.nested_modules = before


def end_in_hook(unit: Unit, module: nn.Module) -> None:
    """Register a forward hook that runs `post_forward`.

    Forward hooks that are registered later run after `post_forward`, so they find the sharded
    parameters, as with torch's ``fully_shard``. If a module has no forward hooks, `run_forward`
    runs `post_forward` instead, which is faster.
    """

    @uncompiled
    def hook(module: nn.Module, _: Args, output: Any) -> Any:
        ended = module not in unit.running_modules and graph_task() < 0
        return output if ended else post_forward(unit, module, output)

    if module not in unit.hook_ended:
        unit.hook_ended.add(module)
        nn.Module.register_forward_hook(module, hook)


def _pre_forward(unit: Unit, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Unshard the parameters, and return the inputs of the forward.

    The inputs are cast if the mixed precision policy requires it. Inputs that require grad also get
    a hook that detects the end of the unit's backward; see `_mark_inputs`.
    """
    schedule = unit.schedule
    if schedule is None:
        schedule = Schedule(unit.modules)
    if unit.options.precision.param_dtype is not None:
        args, kwargs = _cast_inputs(unit, args, kwargs)
    if graph_task() >= 0:
        # Activation checkpointing recomputes the forward, and may stop before its end.
        outside_transforms(_unshard_in_backward, unit)
        if torch.is_grad_enabled() and unit.gradient_state is GradientState.EMPTY:
            # Reentrant checkpointing runs the first forward without gradients. So the unit did not
            # expect a backward until now.
            unit.gradient_state = AFTER[Event.BACKWARD][unit.gradient_state]
            schedule.begin_backward()
        return args, kwargs
    if schedule.in_backward:
        schedule.check_no_backward()
    # A forward call of the unit starts if the module has ended its last forward. It also starts if
    # the module is still running: its last forward did not end, or it calls itself.
    first = module not in unit.pending_modules or module in unit.running_modules
    if first:
        unit.running_modules.clear()
        unit.pending_modules.update(unit.modules)
        unit.expects_backward = False
        unit.forward_call = ForwardCall(unit, next_number())
    unit.running_modules.add(module)
    transformed = inside_transform()
    if first:
        begin, call = schedule.pre_forward, unit.forward_call
        is_root = outside_transforms(begin, call) if transformed else begin(call)
        if is_root and schedule.device.type != "cpu":
            args, kwargs = move_tensors((args, kwargs), schedule.device)
    if transformed:
        outside_transforms(unit.groups.unshard)
    else:
        unit.groups.unshard()
        # A unit without parameters has nothing to do at the end of its backward.
        if first and unit.groups and torch.is_grad_enabled():
            args, kwargs = _mark_inputs(unit.forward_call, args, kwargs)
    return args, kwargs


def _unshard_in_backward(unit: Unit) -> None:
    unit.gather(by_schedule=True)
    unit.groups.unshard()
    unit.groups.copy_requires_grad_to_unsharded(backward=True)


def _cast_inputs(unit: Unit, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    policy = unit.options.precision
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
    return args, kwargs


def _post_forward(unit: Unit, module: nn.Module, output: Any) -> Any:
    """Cast the outputs, register hooks on them that detect backward, and reshard the unit.

    With a list of modules, the unit is resharded after the last of them. During recomputation in
    backward, only the cast is done.
    """
    dtype = unit.options.precision.output_dtype
    output = output if dtype is None else cast_floating(output, dtype)
    if graph_task() >= 0:  # recomputation in backward
        return output
    schedule = unit.schedule
    if schedule is None:
        raise StateError("post_forward was called without pre_forward")
    if torch.is_grad_enabled():
        output = _expect_backward(unit, schedule, output)
    if module in unit.forward_call.nested_modules:
        return output
    unit.pending_modules.discard(module)
    unit.running_modules.discard(module)
    if not unit.pending_modules:
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
    if module in unit.running_modules:
        unit.forget_forward()
        if unit.schedule is not None:
            unit.schedule.forward_failed(unit)


def _expect_backward(unit: Unit, schedule: Schedule, output: Any) -> Any:
    """Register hooks on the output tensors that detect the start of the unit's backward.

    Returns:
        The output. Two kinds of tensors in it are replaced by views: leaves, and an unchanged input
        that already has the hook of the previous unit. See `ForwardCall.needs_view`.
    """
    tensors = tensors_with_gradient(output)
    if inside_transform():
        # A transform of torch.func may run several backwards on one graph, and their end cannot be
        # detected. So each backward unshards the parameters if necessary, and does not reshard.
        for tensor in tensors:
            tensor.register_hook(partial(_before_transform, unit))
        tensors = []
    call = unit.forward_call
    if tensors:
        if True in map(call.needs_view, tensors):
            output = map_tensors(partial(_own_view, call), output)
            tensors = tensors_with_gradient(output)
        before = partial(pre_backward, call)
        for tensor in tensors:
            tensor.register_hook(before)
            if (base := base_since(tensor, call.sequence_number)) is not None:
                base.register_hook(before)
        call.output = weakref.ref(tensors[0]) if len(tensors) == 1 else None
        call.outputs_hooked = True
    elif not (unit.hook_gradients(partial(_on_gradient, unit, schedule)) or _hides(call, output)):
        return output  # everything is frozen: no backward reaches this unit
    else:
        unit.unhooked = True
    unit.expects_backward = True
    unit.gradient_state = AFTER[Event.FORWARD][unit.gradient_state]
    return output


def _hides(call: ForwardCall, output: Any) -> bool:
    """Return whether a backward through a frozen unit may go undetected.

    This is so if the inputs may require grad, and the output has an unknown type or no tensors.
    """
    if not (call.inputs_hooked or call.unknown_inputs):
        return False
    return not (can_look_into(output) and tensors_in(output))


def _own_view(call: ForwardCall, tensor: Tensor) -> Tensor:
    needs_view = tensor.requires_grad and call.needs_view(tensor)
    return tensor.view_as(tensor) if needs_view else tensor


def _on_gradient(unit: Unit, schedule: Schedule) -> None:
    schedule.check_unhooked(unit)
    unit.gradient_state = AFTER[Event.BACKWARD][unit.gradient_state]
    schedule.begin_backward()


def _before_transform(unit: Unit, gradient: Tensor) -> None:
    outside_transforms(_unshard_in_backward, unit)


def pre_backward(call: ForwardCall, gradient: Tensor) -> None:
    """Unshard the parameters. A hook that runs when the gradient of an output was computed."""
    unit = call.unit
    if unit.schedule is None:
        raise StateError("a backward reached a unit that has not run forward")
    if torch.is_grad_enabled():  # with create_graph=True
        with torch.no_grad():
            _expect_second_backward(call, unit.schedule)
            pre_backward(call, gradient)
        return
    unit.schedule.pre_backward(call)
    if unit.options.unshard_in_backward:
        unit.groups.unshard()


def _expect_second_backward(call: ForwardCall, schedule: Schedule) -> None:
    """Prepare a unit for a second backward, through the graph that ``create_graph=True`` creates.

    The second backward does not run the hooks on the unit's outputs. So hooks on the gradients of
    the parameters detect it. These hooks are kept while the graph may exist.

    Raises:
        UnsupportedError: The unit frees its parameters before a second backward.
    """
    unit = call.unit
    if not unit.keeps_parameters(schedule.units[0] is unit):
        raise UnsupportedError(
            f"a backward with create_graph=True reached {schedule.path_of(unit)}, which frees its "
            "parameters, but the second backward needs them. Either keep the parameters, with "
            "fully_shard(..., reshard_after_forward=False) and set_reshard_after_backward(False), "
            "or use torch.func.grad instead of create_graph=True, which works in every "
            "configuration"
        )
    if unit.hook_gradients(partial(_on_gradient, unit, schedule)):
        unit.unhooked = True
        unit.note_create_graph(call)


def _mark_inputs(call: ForwardCall, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the inputs, with hooks that detect the end of the unit's backward.

    - Usually, the inputs that require grad pass through `_PostBackward`.
    - If only one input requires grad and it is the output of the previous unit, the hook on that
      output is used instead.
    - If no input requires grad, the unit's backward ends with the whole backward.
    """
    alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    tensors = list(args) if alone else tensors_with_gradient((args, kwargs))
    call.inputs_hooked = tensors[0].requires_grad if alone else bool(tensors)
    if not call.inputs_hooked:
        call.unknown_inputs = not alone and not can_look_into((args, kwargs))
        return args, kwargs
    if len(tensors) == 1 and call.use_hook_of_previous(tensors[0]):
        return args, kwargs
    if alone:
        return apply_untransformed(_PostBackward, call, *args), kwargs
    marked = iter(apply_untransformed(_PostBackward, call, *tensors))
    args, kwargs = map_tensors(
        lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
    )
    return args, kwargs


class _PostBackward(torch.autograd.Function):
    """Identity function on a unit's inputs. Its backward runs after the unit's backward."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.unit.schedule is not None:
            with torch.no_grad():  # gradients are enabled with create_graph=True
                ctx.call.unit.schedule.post_backward(ctx.call)
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        # The outputs are views of the inputs, so autograd requires views of the tangents.
        return tuple(tangent.view_as(tangent) for tangent in tangents)
