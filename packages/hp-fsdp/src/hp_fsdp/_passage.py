"""The hooks that tie a unit to the forward and backward of its modules."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._errors import StateError, UnsupportedError
from ._marks import Watch, mark_inputs
from ._nested import tensors_with_gradient
from ._precision import cast_floating, move_tensors
from ._runs import Run
from ._states import Event, GradientState
from ._torch import inside_backward, inside_transform, outside_transforms

if TYPE_CHECKING:
    from ._schedule import Schedule
    from ._unit import Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Passage:
    """One way through the modules of a unit: which have yet to end, what backward is expected."""

    def __init__(self, unit: "Unit") -> None:
        """Install the hooks on the unit's modules."""
        self._unit = unit
        self._waiting: set[nn.Module] = set()  # modules of the list that have yet to end
        self._running: set[nn.Module] = set()  # those that have begun and not ended
        self._expects_backward = False
        self._run = Run(unit)
        self._watch = Watch(self._gradient_came)
        # A compiler that traced what communicates would break its graph there, and again whenever
        # the step is in another state.
        self.before_forward = torch.compiler.disable(self._before_forward)
        self.after_forward = torch.compiler.disable(self._after_forward)
        self.end_forward = torch.compiler.disable(self._end_forward)
        for module in unit.modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward)
            module.register_forward_hook(self.end_forward, always_call=True)

    def _before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather, and return the inputs, cast and marked."""
        unit = self._unit
        schedule = unit.attached(module)
        policy = unit.options.precision
        if policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        if inside_backward():
            # Activation checkpointing runs the forward again, and may leave it half way: nothing
            # here may wait for the hook after forward.
            with outside_transforms():
                unit.gather(in_pass=True)
                unit.unshard()
            if torch.is_grad_enabled() and unit.gradients is GradientState.EMPTY:
                # No forward announced these gradients (reentrant checkpointing runs it without).
                unit.note(Event.BACKWARD)
                schedule.begin_backward()
            return args, kwargs
        schedule.check_no_backward()
        # A module that never ended, or that runs within itself, starts its unit over.
        first = module not in self._waiting or module in self._running
        if first:
            self.forget()
            self._waiting.update(unit.modules)
            self._expects_backward = False
            self._run = Run(unit)
        self._running.add(module)
        with outside_transforms():
            is_root = first and schedule.enter(self._run)
        if is_root and schedule.device.type != "cpu":
            args, kwargs = move_tensors((args, kwargs), schedule.device)
        with outside_transforms():
            unit.unshard()
        if first and torch.is_grad_enabled() and not inside_transform():
            left = partial(self._backward_left, self._run)
            args, kwargs, self._run.marked = mark_inputs(left, args, kwargs)
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Expect the backward, reshard, and return the output, cast."""
        unit = self._unit
        cast = cast_floating(output, unit.options.precision.output_dtype)
        if inside_backward():
            return cast
        schedule = unit.attached(module)
        if torch.is_grad_enabled():
            self._expect_backward(cast)
        self._waiting.discard(module)
        self._running.discard(module)
        if not self._waiting:
            try:
                with outside_transforms():
                    self.leave(schedule)
            except BaseException:
                schedule.abandon(unit)
                raise
        return cast

    def _end_forward(self, module: nn.Module, args: Args, output: Any) -> None:
        """End a forward that raised: `after_forward` has ended all others."""
        if module in self._running:
            self.forget()
            if self._unit.schedule is not None:
                self._unit.schedule.abandon(self._unit)

    def _expect_backward(self, output: Any) -> None:
        tensors = tensors_with_gradient(output)
        if inside_transform():
            # Its backwards come and go unseen, several on one graph: the parameters stay, and are
            # back for one that comes after others. Only gradients of parameters end up anywhere.
            for tensor in tensors:
                tensor.register_hook(self._before_transform)
            tensors = []
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, self._run))
        if not tensors and not self._watch.begin(
            parameter.unsharded
            for group in self._unit.groups
            for parameter in group.parameters
            if parameter.sharded.requires_grad
        ):
            return  # all is frozen: no backward comes through here
        if not tensors:
            self._announce(self._backward_came)
        self._expects_backward = True
        self._run.expected |= bool(tensors)
        self._unit.note(Event.FORWARD)

    def end_watch(self) -> None:
        """Watch the parameters' gradients no more."""
        if self._watch.active:
            self._announce(None)
        self._watch.end()

    def _announce(self, came: Callable[[], None] | None) -> None:
        for group in self._unit.groups:
            if group.collector is not None:
                group.collector.announce = came

    def _gradient_came(self, _: Tensor) -> None:
        self._backward_came()

    def _backward_came(self) -> None:
        if self._unit.schedule is not None:
            self._unit.note(Event.BACKWARD)
            self._unit.schedule.begin_backward()

    def leave(self, schedule: "Schedule") -> None:
        """End this unit's forward, with modules of its list unrun if the root says so.

        Without a backward to come nobody would come back for the parameters, so they are given up
        unless they were asked to stay. Where its beginning cannot be seen, nobody could gather them
        again in time.
        """
        self.forget()
        if not self._expects_backward:
            if self._unit.stays:
                self._unit.stay()
            else:
                self._unit.reshard()
        elif not self._watch.active:
            schedule.after_forward(self._unit)
        schedule.leave(self._run)

    @property
    def half_run(self) -> bool:
        """Return whether some but not all modules of the list have run."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Start the list over at the next forward."""
        self._waiting.clear()
        self._running.clear()

    def reset(self) -> None:
        """Forget the step under way."""
        self.forget()
        self.end_watch()

    def _before_transform(self, gradient: Tensor) -> None:
        with outside_transforms():
            self._unit.gather(in_pass=True)
            self._unit.unshard()

    def _before_backward(self, run: Run, gradient: Tensor) -> None:
        unit = self._unit
        if unit.schedule is None:
            raise StateError("a backward reached a unit that has not run forward")
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a backward with create_graph=True through a sharded unit is not supported: its "
                "parameters are given up after backward, and a second one would read them"
            )
        unit.schedule.backward_reached(run)
        if unit.options.unshard_in_backward:
            unit.unshard()

    def _backward_left(self, run: Run) -> None:
        # While parameters are watched more may come: the end of backward reduces.
        if not self._watch.active and self._unit.schedule is not None:
            self._unit.schedule.backward_left(run)
