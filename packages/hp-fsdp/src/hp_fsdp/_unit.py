"""What one `fully_shard` call manages, and the hooks that tie it to forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ._errors import ParameterError, ShardingError, StateError, shown
from ._group import ParameterGroup
from ._nested import map_tensors, tensors_with_gradient
from ._states import Event, GradientState, ParameterState, advance
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

    def __post_init__(self) -> None:
        """Refuse what torch's `fully_shard` gives another meaning, and what has none."""
        chosen: object = self.reshard_after_forward
        if not isinstance(chosen, bool | None):
            raise ShardingError(
                f"reshard_after_forward is {shown(chosen)}; legal are True, False and None (the "
                "default); torch's int, the size of a group to reshard to, is not supported"
            )


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
        self.in_pass = False  # gathered by a pass of the schedule, not by hand
        self._waiting: set[nn.Module] = set()  # modules of the list that have yet to end
        self._running: set[nn.Module] = set()  # those that have begun and not ended
        self._expects_backward = False  # of this pass
        self._unreduced = False  # gradients of earlier backwards wait for synchronisation
        self._watches: list[RemovableHandle] = []  # of a backward that no output can announce
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_post_hook(self._after_load)

    def gather(self, in_pass: bool = False) -> None:
        """Start the all-gathers of the groups that are sharded; a pass answers for what it does.

        Raises `ParameterError` for parameters that were replaced by what cannot take their place.
        """
        if not all(group.in_place for group in self.groups):
            self.adopt(final=True)
        self.in_pass |= in_pass
        for group in self.groups:
            group.gather()

    def unshard(self) -> None:
        """Make the unsharded parameters the modules' parameters."""
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        """Make the sharded parameters the modules' parameters, free the others."""
        self.in_pass = False
        for group in self.groups:
            group.reshard()

    def reset(self) -> None:
        """Forget the step under way."""
        self.gradients = advance(self.gradients, Event.RESET)
        self.in_pass = self._unreduced = False
        self.forget_half_run()
        self._unwatch()
        for group in self.groups:
            group.reset()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        schedule = self.attached(module)
        if inside_backward():
            # Activation checkpointing runs the forward again, and may leave it half way: nothing
            # here may wait for the hook after forward.
            self.gather(in_pass=True)
            self.unshard()
            if torch.is_grad_enabled() and self.gradients is GradientState.EMPTY:
                # No forward announced these gradients (reentrant checkpointing runs it without).
                self.gradients = advance(self.gradients, Event.BACKWARD)
                schedule.begin_backward()
            return None
        schedule.check_no_backward()
        # A module that began and never ended raised: the unit starts over.
        first = module not in self._waiting or module in self._running
        if first:
            self.forget_half_run()
            self._waiting.update(self.modules)
            self._expects_backward = False
            schedule.enter(self)
        self._running.add(module)
        self.unshard()
        if first and torch.is_grad_enabled():
            return self._mark_inputs(args, kwargs)
        return None

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if inside_backward():
            return None
        schedule = self.attached(module)
        if torch.is_grad_enabled():
            self._expect_backward(output)
        self._waiting.discard(module)
        self._running.discard(module)
        if not self._waiting:
            self.leave(schedule)
        return None

    def _expect_backward(self, output: Any) -> None:
        tensors = tensors_with_gradient(output)
        for tensor in tensors:
            tensor.register_hook(self._before_backward)
        if not tensors and not self._watch():
            return  # all is frozen: no backward comes through here
        self._expects_backward = True
        self.gradients = advance(self.gradients, Event.FORWARD)

    def _watch(self) -> bool:
        """Learn of a backward from the parameters' gradients; return whether any can have one.

        For outputs in which no tensor can be hooked: objects of unknown type, or nothing at all
        where the module keeps its results to itself.
        """
        if not self._watches:
            self._watches = [
                parameter.unsharded.register_post_accumulate_grad_hook(self._gradient_came)
                for group in self.groups
                for parameter in group.parameters
                if parameter.sharded.requires_grad
            ]
        return bool(self._watches)

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _gradient_came(self, _: Tensor) -> None:
        if self.schedule is not None:
            self.gradients = advance(self.gradients, Event.BACKWARD)
            self.schedule.begin_backward()

    def leave(self, schedule: "Schedule") -> None:
        """End this unit's forward, with modules of its list unrun if the root says so.

        Without a backward to come nobody would come back for the parameters. Where its beginning
        cannot be seen, nobody could gather them again in time.
        """
        self.forget_half_run()
        if not self._expects_backward or (
            not self._watches and schedule.reshards_after_forward(self)
        ):
            self.reshard()
        schedule.leave(self)

    @property
    def sharded(self) -> bool:
        """Return whether there is something to gather."""
        return any(group.state is ParameterState.SHARDED for group in self.groups)

    @property
    def gathering(self) -> bool:
        """Return whether a gather is under way."""
        return any(group.state is ParameterState.GATHERING for group in self.groups)

    @property
    def half_run(self) -> bool:
        """Return whether some but not all modules of the list have run."""
        return bool(self._waiting)

    def forget_half_run(self) -> None:
        """Start the list over at the next forward."""
        self._waiting.clear()
        self._running.clear()

    def _mark_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tensors = tensors_with_gradient((args, kwargs))
        if not tensors:
            return None  # the end of backward will reduce
        apply: Any = _AfterBackward.apply
        marked = iter(apply(self._backward_left, *tensors))
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

    def _backward_left(self) -> None:
        if not self._watches:  # otherwise more may come unannounced: the end of backward reduces
            self.finish_backward()

    def finish_backward(self) -> None:
        """Reshard and hand the gradients to a reduction; without synchronisation they stay."""
        if self.gradients is GradientState.EMPTY:
            return
        self.gradients = advance(self.gradients, Event.REDUCE)
        self._unwatch()
        self.reshard()
        self._unreduced = True
        self.reduce()

    def reduce(self) -> None:
        """Hand all gradients of the backwards since the last reduction to one, if told to."""
        if self._unreduced and self.options.gradient_sync and self.schedule is not None:
            self._unreduced = False
            for group in reversed(self.groups):
                self.schedule.reduce(group, self.options.divide)

    def attached(self, module: nn.Module) -> "Schedule":
        """Return the schedule, made now with ``module`` as its root if there is none yet."""
        return self._attach(module) if self.schedule is None else self.schedule

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def _after_load(self, *_: Any) -> None:
        # The modules of a list come here one after the other, with the others yet unchanged.
        self.adopt(final=len(self.modules) == 1)

    def adopt(self, final: bool) -> None:
        """Take back parameters that were replaced or converted from outside, all or none.

        What cannot be taken is refused with the parameters that stood there before, if this is
        ``final``; otherwise the next gather decides.
        """
        self._unwatch()
        self.reshard()
        refusals = [refusal for group in self.groups for refusal in group.refusals()]
        if refusals and final:
            for group in self.groups:
                group.install_sharded()
            raise ParameterError("; ".join(refusals))
        for group in self.groups if not refusals else ():
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
