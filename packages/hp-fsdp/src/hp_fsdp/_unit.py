"""What one `fully_shard` call manages: parameters, gradients, options, and their states."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._agreement import Act, Agreement
from ._errors import ParameterError, first_error
from ._group import ParameterGroup
from ._options import Options
from ._passage import Passage
from ._states import Event, GradientState, ParameterState, advance
from ._torch import inside_backward

if TYPE_CHECKING:
    from ._schedule import Schedule

UNIT_ATTRIBUTE = "_fully_shard_unit"
_GATHERABLE = (ParameterState.SHARDED, ParameterState.POST_FORWARD)


class Unit:
    """The modules of one call, their groups (one per dtype), and their part in a step."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        options: Options,
        device: torch.device,
        attach: "Callable[[nn.Module], Schedule]",
    ) -> None:
        """Install the hooks; ``attach(root)`` makes a schedule for all units under ``root``."""
        self._attach = attach
        self.modules = tuple(modules)
        self.groups = tuple(groups)
        self.options = options
        self.device = device
        self.gradients = GradientState.EMPTY
        self.schedule: Schedule | None = None
        self.in_pass = False  # gathered by a pass of the schedule, not by hand
        self.kept = False  # left gathered after backward, as it was told to
        self.forward_prefetch: tuple[Unit, ...] | None = None  # None: the next in learned order
        self.backward_prefetch: tuple[Unit, ...] | None = None
        self._unreduced = False  # gradients of earlier backwards wait for synchronisation
        self.passage = Passage(self)
        self._agreement = Agreement(self)
        # Also those inside, whose state may be asked for alone; the next gather sees what came.
        owners = [o.module for g in groups for p in g.parameters for o in p.owners]
        for module in dict.fromkeys([*self.modules, *owners]):
            module.register_state_dict_pre_hook(_Reshard(self))
            module.register_load_state_dict_pre_hook(_Reshard(self))
        for module in self.modules:
            module.register_load_state_dict_post_hook(self._after_load)

    def gather(self, in_pass: bool = False) -> None:
        """Start the all-gathers of the groups that are sharded; a pass answers for what it does.

        Raises `ParameterError` for parameters that were removed, or replaced by what cannot take
        their place, `StateError` for those without memory, `DisagreementError` where ranks gather
        other units.
        """
        if not all(group.in_place for group in self.groups):
            self.adopt(final=True)
        if not in_pass and self.stale:
            self.reshard()
        if self.sharded:
            self._agreement.before(Act.BACKWARD if inside_backward() else Act.FORWARD)
            self.in_pass |= in_pass
        stays = not in_pass or not (torch.is_grad_enabled() or inside_backward())
        for group in self.groups:
            group.gather()
            if stays:
                group.note_writes()

    def unshard(self) -> None:
        """Make the unsharded parameters the modules' parameters."""
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        """Make the sharded parameters the modules' parameters, free the others."""
        self.in_pass = self.kept = False
        error = first_error(group.reshard for group in self.groups)
        if error is not None:
            raise error

    @property
    def stays(self) -> bool:
        """Return whether a forward without a backward to come leaves the parameters gathered.

        Under ``torch.no_grad`` those do that the user gathered, or told to stay after forward.
        """
        asked = not self.in_pass or self.options.reshard_after_forward is False
        return asked and not torch.is_grad_enabled()

    def stay(self) -> None:
        """Leave the parameters gathered until `reshard`, or a forward that finds them `stale`."""
        self.in_pass = False
        for group in self.groups:
            group.note_writes()

    def keep(self) -> None:
        """Reshard to the smaller number of ranks that the options say."""
        for group in self.groups:
            group.keep()
            group.note_writes()

    def reset(self) -> None:
        """Forget the step under way."""
        self.gradients = advance(self.gradients, Event.RESET)
        self.in_pass = self.kept = self._unreduced = False
        self.passage.reset()
        error = first_error(group.reset for group in self.groups)
        if error is not None:
            raise error

    @property
    def sharded(self) -> bool:
        """Return whether there is something to gather."""
        return any(group.state in _GATHERABLE for group in self.groups)

    @property
    def awaits_split_backward(self) -> bool:
        """Return whether a pipeline schedule may be about to run a part of a backward."""
        waits = self._unreduced or self.gradients is GradientState.EXPECTED
        return self.options.in_pipeline and waits and self.sharded and not inside_backward()

    @property
    def gathering(self) -> bool:
        """Return whether a gather is under way."""
        return any(group.state is ParameterState.GATHERING for group in self.groups)

    @property
    def stale(self) -> bool:
        """Return whether what is gathered is not what the shards say any more."""
        return any(group.stale for group in self.groups)

    def note(self, event: Event) -> None:
        """Move the state of the gradients."""
        self.gradients = advance(self.gradients, event)

    def finish_backward(self) -> None:
        """Reshard and hand the gradients to a reduction; without synchronisation they stay."""
        if self.gradients is GradientState.EMPTY:
            return
        self.note(Event.REDUCE)
        self.passage.end_watch()
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self.in_pass, self.kept = False, True
            for group in self.groups:
                group.note_writes()
        self._unreduced = True
        if not self.options.gradient_sync:
            for group in self.groups:
                group.hold_gradients()
        self.reduce()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet; reductions under way are finished first."""
        if self.schedule is not None:
            self.schedule.finish_early()
        for group in self.groups:
            group.drop_gradients()

    def reduce(self) -> None:
        """Hand all gradients of the backwards since the last reduction to one, if told to."""
        if self._unreduced and self.options.gradient_sync:
            self._reduce(self.options)

    def reduce_all(self) -> None:
        """Hand all gradients to a reduction over all axes, whatever the options say."""
        if self._unreduced or any(group.partial.waits for group in self.groups):
            self._reduce(replace(self.options, all_reduce=True))

    def _reduce(self, options: Options) -> None:
        if self.schedule is not None:
            self._agreement.before(Act.REDUCTION)
            self._unreduced = False
            for group in reversed(self.groups):
                self.schedule.reduce(group, options)

    def attached(self, module: nn.Module) -> "Schedule":
        """Return the schedule, made now with ``module`` as its root if there is none yet."""
        return self._attach(module) if self.schedule is None else self.schedule

    def _after_load(self, *_: Any) -> None:
        # The modules of a list come here one after the other, with the others yet unchanged.
        self.adopt(final=len(self.modules) == 1)

    def adopt(self, final: bool) -> None:
        """Take back parameters that were replaced or converted from outside, all or none.

        What cannot be taken is refused with the parameters that stood there before, but for those
        that were removed, if this is ``final``; otherwise the next gather decides.
        """
        self.passage.end_watch()
        self.reshard()
        refusals = [refusal for group in self.groups for refusal in group.refusals()]
        if refusals and final:
            for group in self.groups:
                group.undo_replacements()
            raise ParameterError("; ".join(refusals))
        for group in self.groups if not refusals else ():
            group.adopt()


class _Reshard:
    """Reshards a unit before the state of a module in it is taken or loaded."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        """Reshard, whatever the hook is told."""
        self._unit.reshard()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()  # a copy of the module is in no unit


class _Nothing:
    """A hook that does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``module`` was given to by a `fully_shard` call, if any."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None
