"""What one `fully_shard` call manages, and the hooks that tie it to forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ._errors import StateError
from ._group import ParameterGroup
from ._nested import map_tensors, tensors_with_gradient
from ._states import Event, GradientState, advance
from ._torch import inside_backward

if TYPE_CHECKING:
    from ._schedule import Schedule

UNIT_ATTRIBUTE = "_fully_shard_unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the setters of a unit edit.

    ``reshard_after_forward`` None: the schedule decides. ``divide`` None: the mean over all ranks.
    """

    reshard_after_forward: bool | None = None
    gradient_sync: bool = True
    divide: float | None = None


class Unit:
    """The modules of one call, their groups (one per dtype), and their part in a step."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        options: Options,
        attach: "Callable[[nn.Module], Schedule]",
    ) -> None:
        """Install the hooks; ``attach(root)`` makes a schedule for all units under ``root``."""
        self._attach = attach
        self.modules = tuple(modules)
        self.groups = tuple(groups)
        self.options = options
        self.gradients = GradientState.EMPTY
        self.schedule: Schedule | None = None
        self._waiting: set[nn.Module] = set()  # modules of the list that have yet to run
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_post_hook(self._after_load)

    def gather(self) -> None:
        """Start the all-gathers of the groups that are sharded."""
        for group in self.groups:
            group.gather()

    def unshard(self) -> None:
        """Make the unsharded parameters the modules' parameters."""
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        """Make the sharded parameters the modules' parameters, free the others."""
        for group in self.groups:
            group.reshard()

    def reset(self) -> None:
        """Forget the step under way."""
        self.gradients = advance(self.gradients, Event.RESET)
        self._waiting.clear()
        for group in self.groups:
            group.reset()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        schedule = self.attached(module)
        if inside_backward():
            # Activation checkpointing runs the forward again, and may leave it half way: nothing
            # here may wait for the hook after forward.
            self.unshard()
            if torch.is_grad_enabled() and self.gradients is GradientState.EMPTY:
                # No forward announced these gradients (reentrant checkpointing runs it without).
                self.gradients = advance(self.gradients, Event.BACKWARD)
                schedule.begin_backward()
            return None
        schedule.check_no_backward()
        first = not self._waiting or len(self.modules) == 1
        if first:
            self._waiting.update(self.modules)
            schedule.enter(self)
        self.unshard()
        if first and torch.is_grad_enabled():
            return self._mark_inputs(args, kwargs)
        return None

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if inside_backward():
            return None
        schedule = self.attached(module)
        if torch.is_grad_enabled():
            for tensor in tensors_with_gradient(output):
                tensor.register_hook(self._before_backward)
            self.gradients = advance(self.gradients, Event.FORWARD)
        self._waiting.discard(module)
        if not self._waiting:
            self.leave(schedule)
        return None

    def leave(self, schedule: "Schedule") -> None:
        """End this unit's forward, with modules of its list unrun if the root says so."""
        self._waiting.clear()
        if schedule.reshards_after_forward(self):
            self.reshard()
        schedule.leave(self)

    @property
    def half_run(self) -> bool:
        """Return whether some but not all modules of the list have run."""
        return bool(self._waiting)

    def forget_half_run(self) -> None:
        """Start the list over at the next forward."""
        self._waiting.clear()

    def _mark_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tensors = tensors_with_gradient((args, kwargs))
        if not tensors:
            return None  # the end of backward will reduce
        apply: Any = _AfterBackward.apply
        marked = iter(apply(self.finish_backward, *tensors))
        args, kwargs = map_tensors(
            lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
        )
        return args, kwargs

    def _before_backward(self, gradient: Tensor) -> None:
        if self.schedule is None:
            raise StateError("a backward reached a unit that has not run forward")
        self.gradients = advance(self.gradients, Event.BACKWARD)
        self.schedule.backward_reached(self)
        self.unshard()

    def finish_backward(self) -> None:
        """Reshard and hand the gradients to a reduction; without synchronisation they stay."""
        if self.gradients is GradientState.EMPTY or self.schedule is None:
            return
        self.gradients = advance(self.gradients, Event.REDUCE)
        self.reshard()
        if self.options.gradient_sync:
            for group in reversed(self.groups):
                self.schedule.reduce(group, self.options.divide)

    def attached(self, module: nn.Module) -> "Schedule":
        """Return the schedule, made now with ``module`` as its root if there is none yet."""
        return self._attach(module) if self.schedule is None else self.schedule

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def _after_load(self, *_: Any) -> None:
        self.adopt()

    def adopt(self) -> None:
        """Take back parameters that were replaced or converted from outside."""
        for group in self.groups:
            group.adopt()


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after the unit's own backward."""

    @staticmethod
    def forward(ctx: Any, finish: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.finish = finish
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.finish()
        return None, *gradients


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``module`` was given to by a `fully_shard` call, if any."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None
