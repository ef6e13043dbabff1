"""Decides when units gather, prefetch and reduce, from the order recorded in earlier passes."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ._agreement import TagLog
from ._errors import Once, StateError, first_error
from ._group import ParameterGroup, step_hooks
from ._mesh import split_axis
from ._options import Options
from ._param import added_parameters, are_unchanged, named_modules
from ._reduction import Reduction
from ._states import AFTER, Event, GradientState
from ._streams import Streams
from ._torch import call_after_backward, inside_forward_ad, without_tangents
from ._unit import ForwardCall, Operation, Unit, unit_of, units_in

# Number of units at the start of backward that prefetch late. Most activations are still allocated
# during their backwards.
LATE_UNITS = 2

# The starts (False) and ends (True) of the forward calls of one pass, in order.
Events = list[tuple[ForwardCall, bool]]
LearnedOrder = tuple[list[Unit], list[Unit]]  # units in the order of starts, and of ends


class Schedule:
    """Runs all units under a root: gathers, prefetches and reductions.

    - A forward pass starts with the root unit, or with a unit that user code calls directly. The
      schedule records the order in which the forwards of units start and end.
    - The next pass that starts with the same unit follows this order: when the forward of a unit
      starts, the next unit is prefetched. If a pass deviates from the order, the rest of the pass
      has no prefetch.
    - Backward visits the units in reverse order of the ends of their forwards. When it reaches a
      unit, the next one is prefetched.
    - With ``grads="accumulate"``, the first `LATE_UNITS` units in backward start the prefetch at
      the end of their backward. An earlier prefetch would raise the peak of memory.
    - Backward may skip a unit on one rank and reach this unit on another. When a rank reaches the
      next unit or the end of backward, it first gathers the units that it skipped, and reduces
      gradients of zero for them. So all ranks start the same collectives in the same order.

    Args:
        roots: The modules of the root unit. If units below them have schedules already, this
            schedule replaces those schedules and finishes their reductions.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self.units = units_in(*roots)
        self.device = self.units[0].device
        # Whether copies to the device may still read shards that the host writes next.
        self._pinned = any(group.config.pinned for unit in self.units for group in unit.groups)
        self.starts_after: torch.Event | torch.cpu.Event | None = None
        self._pass_root: Unit | None = None
        self._checked = False
        self._orders: dict[Unit, LearnedOrder] = {}  # by the first unit of a pass
        self._begin_order: list[Unit] = []  # expected order of starts in this pass
        self._end_order: list[Unit] = []  # expected order of ends in this pass
        self._begun = self._ended = 0  # numbers of starts and ends in this pass
        self._last_ended: Unit | None = None  # the unit whose forward ended last in this pass
        self._following = False  # whether this pass has followed the expected order so far
        self.in_backward = False
        self._backwards = 0  # number of backwards that have begun
        self._events: Events = []  # of the current pass, or of the last one
        self._traversed: Events | None = None  # events that this backward visits in reverse
        self._reached = 0  # position of the last event that backward has reached
        self._reductions: list[Reduction] = []  # in flight
        self._scattering: list[Reduction] = []  # in flight, with packed gradients allocated
        self._hooked: list[Reduction] = []  # in flight, to be finished during backward
        self._in_flight = 1  # largest number of packed gradients at once
        self._is_last = True  # whether this backward is the last one of the step
        self._pass_number = 0  # number of passes and backwards that have begun
        self._dual = False  # whether this backward started inside forward-mode differentiation
        self._deferred: Unit | None = None  # to prefetch at the end of the current unit's backward
        for part in dict.fromkeys(unit.schedule for unit in self.units):
            if part is not None:
                part.check_no_backward()
                part.finish_early()
                part.wait_for_optimizer()
                if part._pinned:
                    part._finish_copies()
        # If the code above or `_split_axes` raises, the constructor can be called again.
        self._split_axes()
        self._name_groups()
        for unit in self.units:
            unit.schedule, unit.checked_in_pass = self, 0
            unit.forget_comparisons()

    def paths(self) -> list[str]:
        """Return the paths of all units from the root."""
        found: dict[Unit, str] = {self.units[0]: "(root)"}
        for path, module in named_modules(self._roots):
            unit = unit_of(module)
            if unit is not None:
                found.setdefault(unit, path)
        return [found.get(unit, "(removed)") for unit in self.units]

    def path_of(self, unit: Unit) -> str:
        """Return the path of a unit from the root."""
        return self.paths()[self.units.index(unit)]

    def _name_groups(self) -> None:
        """Set each group's path and, on accelerators, the shared streams and the tag log."""
        streams = Streams.on(self.device)
        self._tag_log = self._new_tag_log(streams)
        use_warning = Once()
        for unit, path in zip(self.units, self.paths(), strict=True):
            unit.groups.comm.path = "" if path == "(root)" else path
            for group in unit.groups:
                group.use_warning = use_warning
                group.streams = None if streams is None else streams.named(group.comm.path)
                group.tag.log = self._tag_log
                group.reads_tags = self._tag_log is not None

    def _new_tag_log(self, streams: Streams | None) -> TagLog | None:
        """Return a `TagLog` for tags that are read later, or None on a CPU.

        The log includes the unread tags of the schedules that this schedule replaces.
        """
        if streams is None:
            return None
        log = TagLog(streams.offload)
        groups = [group for unit in self.units for group in unit.groups]
        for known in dict.fromkeys(group.tag.log for group in groups):
            if known is not None:
                log.take(known)
        return log

    def check_tags(self) -> None:
        """Raise `DisagreementError` if ranks used different units in one collective.

        On an accelerator, the host waits until the tags of earlier collectives are on the CPU. On a
        CPU this is a no-op, because tags are read directly after each collective.
        """
        if self._tag_log is not None:
            self._tag_log.send("in the last step: ")
            self._tag_log.check(wait=True)

    def _split_axes(self) -> None:
        """Create the post-forward axes of units with an int ``reshard_after_forward``.

        Parameter groups with the same ranks and the same int share one axis and its process group.
        Process groups that an earlier schedule created are used again.
        """
        chosen = [
            (group, (group.axes.shard.ranks, int(size or 0)))
            for unit in self.units
            for size in [unit.options.reshard_after_forward]
            for group in (unit.groups if size not in (None, True, False) else ())
        ]
        made = {key: group.post_forward_axis for group, key in chosen if group.post_forward_axis}
        for group, key in chosen:
            if key not in made and group.axes.shard.size > 1:
                made[key] = split_axis(group.axes.shard, key[1])
            group.post_forward_axis = made.get(key)

    def check_no_backward(self) -> None:
        """Raise `StateError` if an earlier backward started but did not end."""
        if self.in_backward:
            raise StateError(
                "an earlier backward ended with an exception; call reset() on the root module "
                "before the next forward"
            )

    def pre_forward(self, call: ForwardCall) -> bool:
        """Record the start of a forward call, and start its all-gather and the prefetch.

        Returns:
            Whether ``call.unit`` is the first unit of the pass.
        """
        unit = call.unit
        # If only one module of the root's list ran, the last pass did not end. The root ends it by
        # starting another pass.
        if self._pass_root is None or self._pass_root is unit or unit is self.units[0]:
            self._begin_pass(unit)
        call.events, call.begin = self._events, len(self._events)
        self._events.append((call, False))
        position, order = self._begun, self._begin_order
        self._begun += 1
        self._following &= position < len(order) and order[position] is unit
        if (
            unit.unhooked
            and unit.gradient_state is GradientState.EMPTY
            and not unit.create_graph_calls
        ):
            unit.remove_gradient_hooks()
        if unit.groups.retained and unit.groups.stale:
            unit.reshard()  # an optimizer has stepped
        elif unit.groups.retained:
            if unit.checked_in_pass != self._pass_number:
                unit.groups.check_registered()
            unit.groups.copy_requires_grad_to_sharded()
            unit.groups.copy_requires_grad_to_unsharded()
        unit.start_gather(Operation.FORWARD, self._pass_number)
        call.parameters_version, call.steps = unit.parameters_version, step_hooks().count
        if unit.forward_prefetch is not None:
            for chosen in unit.forward_prefetch:
                chosen.start_gather(Operation.FORWARD, self._pass_number, prefetch=True)
        elif self._following and position + 1 < len(order):
            order[position + 1].start_gather(Operation.FORWARD, self._pass_number, prefetch=True)
        return unit is self._pass_root

    def _begin_pass(self, root: Unit) -> None:
        self._pass_root = root
        if not self._checked and root is self.units[0]:
            self._checked = True
            self._warn_of_divisors()
            self._warn_of_added()
        self.wait_for_optimizer()
        if self._tag_log is not None:
            self._tag_log.send("in a forward without a backward: ")
            self._tag_log.check()
        self._begun = self._ended = 0
        self._last_ended = None
        self._begin_order, self._end_order = self._orders.get(root, ([], []))
        self._events = []
        self._following = True
        # An earlier pass without a backward (after an exception, or if the loss was discarded) left
        # units unsharded. An optimizer may have stepped.
        for unit in self.units:
            if unit.pending_modules and unit is not root:
                unit.forget_forward()
            if unit.gathered_by_schedule or (unit.groups.retained and unit.groups.stale):
                unit.groups.check_registered()
                unit.groups.copy_requires_grad_to_sharded()
                unit.reshard()
        self._check_together(self._begin_order, backward=False)

    def _check_together(self, units: Iterable[Unit], backward: bool) -> None:
        """Check all parameters of ``units`` at once: whether user code replaced or moved one.

        One check of all units costs less host time than a check of each unit. If no parameter was
        replaced or moved, the units are not checked again in this pass. Otherwise each unit is
        checked before its all-gather. If ``backward`` is True, this method does not check whether
        parameters were moved.
        """
        self._pass_number += 1
        chosen = list(dict.fromkeys(units))
        tables = [group.table for unit in chosen for group in unit.groups]
        if are_unchanged(tables, backward):
            for unit in chosen:
                unit.checked_in_pass = self._pass_number

    def wait_for_optimizer(self) -> None:
        """Make the current stream wait for the event of `FSDPModule.set_post_optim_event`.

        A no-op if no event was set since the last call.
        """
        if self.starts_after is not None:
            self.starts_after.wait()
            self.starts_after = None

    def _warn_of_divisors(self) -> None:
        """Warn if units divide their gradients by different numbers."""
        found: dict[float, dict[str, None]] = {}
        for unit, path in zip(self.units, self.paths(), strict=True):
            for group in unit.groups:
                if any(parameter.sharded.requires_grad for parameter in group.parameters):
                    by = unit.options.divisor(group.reduce_axes.size)
                    found.setdefault(by, {})[path] = None
        if len(found) > 1:
            said = "; ".join(f"{', '.join(paths)} by {by:g}" for by, paths in found.items())
            warnings.warn(
                f"units divide the sum of their gradients by different numbers: {said}. Give all "
                "of them the same gradient_reduction, or call set_gradient_divide_factor(factor, "
                "recurse=True) on the root",
                stacklevel=2,
            )

    def _warn_of_added(self) -> None:
        """Warn about parameters that were added after `fully_shard`."""
        if added := added_parameters(self._roots):
            warnings.warn(
                f"{', '.join(added)} train and belong to no unit, because they were added after "
                "fully_shard: every rank keeps the gradients of its own batch. Add them before, "
                "or give a module that has only new ones to fully_shard too",
                stacklevel=2,
            )

    def end_forward(self, unit: Unit) -> None:
        """Record the end of a unit's forward, and reshard the unit if necessary.

        - If a backward can follow, the option ``reshard_after_forward`` applies.
        - If a backward can follow but its start cannot be detected, the unit stays unsharded until
          the end of the backward.
        - If no backward can follow, see `Unit.end_without_backward`.
        - If ``unit`` is the first unit of the pass, the pass ends. Then the forwards of units with
          a list of modules end too, if only some of these modules have run.
        """
        if unit.pending_modules:
            unit.forget_forward()
        if not unit.expects_backward:
            unit.end_without_backward()
        elif unit.unhooked:
            unit.groups.retain()  # unsharded until the end of backward
        else:
            self._reshard_after_forward(unit)
        call = unit.forward_call
        if call.events is self._events:  # the call started in this pass
            call.end = len(self._events)
            self._events.append((call, True))
        call.next_in_backward, call.end_number = self._last_ended, self._ended
        self._last_ended = unit
        self._ended += 1
        if unit is not self._pass_root:
            return
        for other in self.units:
            if other.pending_modules:  # some but not all modules of its list have run
                self.end_forward(other)
        begun = [call.unit for call, ended in self._events if not ended]
        self._orders[unit] = begun, [call.unit for call, ended in self._events if ended]
        self._pass_root = None
        self._drop_unused_gathers()
        if not unit.expects_backward:
            if self._pinned:
                self._finish_copies()
            if self._tag_log is not None:
                self._tag_log.send("in a forward without backward: ")

    def forward_failed(self, unit: Unit) -> None:
        """End the forward pass if the forward of its first unit raised an exception.

        The order of units in this pass is discarded. A no-op if ``unit`` is another unit.
        """
        if unit is self._pass_root:
            self._pass_root = None
            self._following = False

    def _reshard_after_forward(self, unit: Unit) -> None:
        """Apply the option ``reshard_after_forward`` of a unit.

        If the option is None, the unit is resharded with two exceptions: the first unit of the pass
        and, if the pass follows a recorded order, the unit whose forward ends just before it.
        Backward needs these two units first.
        """
        chosen = unit.options.reshard_after_forward
        if chosen is None:
            last = self._end_order[-2:-1] == [unit] and self._ended == len(self._end_order) - 2
            chosen = unit is not self._pass_root and not (self._following and last)
        if chosen is True:
            unit.reshard()
        elif chosen is False:
            unit.groups.retain()
        else:
            unit.groups.reshard_to_fewer()

    def begin_backward(self) -> None:
        """Start a backward, and let autograd call `_finish_backward` at its end.

        A no-op if a backward has already started.
        """
        if not self.in_backward:
            self.in_backward = True
            self._backwards += 1
            self._dual = inside_forward_ad()
            self._in_flight = max([unit.options.in_flight for unit in self.units])
            self._is_last = all([unit.options.is_last_backward for unit in self.units])
            self._traversed, self._reached, self._deferred = None, 0, None
            for unit in self.units:
                if unit.groups.retained:
                    unit.groups.copy_requires_grad_to_sharded()
                for group in unit.groups:
                    if group.waiting:
                        group.freeze_unsharded()
            call_after_backward(self._finish_backward)
            self._check_together(self.units, backward=True)

    def pre_backward(self, call: ForwardCall) -> None:
        """Record that backward has reached the outputs of ``call``.

        Starts the all-gather of the unit, and the prefetch of the next unit in backward. If the
        unit was reached before through another output, only the all-gather is started.

        Raises:
            StateError: Parameters were converted or moved since the forward.
        """
        if call.parameters_version != call.unit.parameters_version:
            raise StateError(
                f"parameters of {self.path_of(call.unit)} were converted or moved between its "
                "forward and its backward, which needs the previous parameters; convert them after "
                "backward"
            )
        if call.steps != step_hooks().count and not call.unit.groups.retained:
            self._check_steps(call)
        later = call.next_call
        if later is not None and later.backward_number == self._backwards and self.in_backward:
            self.post_backward(later)
        unit = call.unit
        if not self.in_backward:
            self.begin_backward()
        if call.backward_number == self._backwards:  # already reached through another output
            unit.gradient_state = AFTER[Event.BACKWARD][unit.gradient_state]
            if unit.options.unshard_in_backward:
                unit.start_gather(Operation.BACKWARD, self._pass_number)
            return
        if call.events is self._traversed and self._reached == call.end + 1:
            self._reached = call.end
        else:
            self._advance_to(call, call.end)  # this may end a later call of the same unit
        unit.gradient_state = AFTER[Event.BACKWARD][unit.gradient_state]
        self._reach(call)

    def _check_steps(self, call: ForwardCall) -> None:
        """Raise `StateError` if parameters were stepped since the forward and gathered again."""
        if any([group.stepped_since(call.steps) for group in call.unit.groups]):
            raise StateError(
                f"an optimizer changed parameters of {self.path_of(call.unit)} between its forward "
                "and its backward, which needs the earlier values; step after backward"
            )

    def check_unhooked(self, unit: Unit) -> None:
        """Raise `StateError` if the parameters of an unhooked unit were freed before a backward.

        Such a unit keeps its parameters until the end of one backward only.
        """
        if not all([group.unsharded for group in unit.groups]):
            path = self.path_of(unit)
            raise StateError(
                f"a backward reached {path}, whose parameters were freed: none of its outputs can "
                "be hooked, so the parameters stay unsharded until the end of one backward only; "
                "return a tensor in addition, or call set_is_last_backward(False) before all "
                "backwards except the last one, and reshard after it"
            )

    def post_backward(self, call: ForwardCall) -> None:
        """End the backward of a forward call: reshard the unit and reduce its gradients."""
        if call.unit.unhooked:
            self.check_unhooked(call.unit)
            return  # more gradients may follow, so the end of backward reduces
        if not self.in_backward or call.backward_number != self._backwards:
            # The loss depends on a value inside the unit and on none of its outputs. So no hook on
            # an output has detected the start of the backward.
            if not self.in_backward:
                self.begin_backward()
            call.backward_begun, call.backward_number = True, self._backwards
            call.unit.gradient_state = AFTER[Event.BACKWARD][call.unit.gradient_state]
        if call.events is self._traversed and self._reached == call.begin + 1:
            self._reached = call.begin
        else:
            self._advance_to(call, call.begin)
        call.backward_ended = True
        self._finish_unit(call.unit)

    def _advance_to(self, call: ForwardCall, position: int) -> None:
        """Continue the traversal of a pass at ``position`` of ``call.events``.

        The units of later events that backward skipped are gathered and reduced first.
        """
        if call.events is None or position < 0:
            return  # its forward did not end
        if call.events is not self._traversed:
            self._end_traversal()
            self._traversed, self._reached = call.events, len(call.events)
        if self._reached > position + 1:
            self._handle_skipped(position + 1)
        if self._reached > position:
            self._reached = position

    def _end_traversal(self) -> None:
        """End the traversal of a pass: stop visiting its forward calls in reverse order.

        In the last backward of a step, this method first gathers and reduces the remaining units
        that backward skipped. Then it clears `ForwardCall.events`, the list of starts and ends of
        the pass's forward calls.
        """
        self._handle_skipped(0)
        if self._traversed is not None and self._is_last:
            self._traversed.clear()
        self._traversed = None

    def _handle_skipped(self, end: int) -> None:
        """Gather and reduce the units that backward skipped, down to position ``end``.

        Before the last backward of a step no unit is handled, because a later backward may reach
        it.
        """
        while self._traversed is not None and self._reached > end:
            self._reached -= 1
            call, ended = self._traversed[self._reached]
            if ended and call.outputs_hooked and not call.backward_begun and self._is_last:
                call.unit.gradient_state = AFTER[Event.BACKWARD][call.unit.gradient_state]
                self._reach(call)
            elif (
                not ended
                and call.inputs_hooked
                and call.backward_begun
                and not call.backward_ended
                and self._is_last
            ):
                call.backward_ended = True
                if not call.unit.unhooked:
                    self._finish_unit(call.unit)

    def _reach(self, call: ForwardCall) -> None:
        unit = call.unit
        call.backward_begun, call.backward_number = True, self._backwards
        # On a CPU, wait here so that one buffer of packed gradients is allocated at a time. On an
        # accelerator, this wait would leave no computation to overlap with the reduce-scatter, so
        # `_reduce` waits, after the backward of this unit.
        if unit.packs_during_backward and unit.groups[0].streams is None:
            self._wait_for_buffers()
        if unit is self._deferred:
            self._deferred = None
        if unit.options.unshard_in_backward:
            unit.start_gather(Operation.BACKWARD, self._pass_number)
        if unit.backward_prefetch is not None:
            for chosen in unit.backward_prefetch:
                if chosen.options.unshard_in_backward:
                    chosen.start_gather(Operation.BACKWARD, self._pass_number, prefetch=True)
            return
        following = call.next_in_backward
        if following is None or not following.expects_backward:
            return
        if not following.options.unshard_in_backward:
            return
        # The root usually ends last, so that it is the first unit in backward.
        if unit.packs_during_backward and 0 < self._ended - 1 - call.end_number <= LATE_UNITS:
            self._deferred = following
        else:
            following.start_gather(Operation.BACKWARD, self._pass_number, prefetch=True)

    def _finish_unit(self, unit: Unit) -> None:
        if not unit.finish_backward():
            return
        if self._deferred is not None:
            late, self._deferred = self._deferred, None
            late.start_gather(Operation.BACKWARD, self._pass_number, prefetch=True)
        if unit.options.gradient_sync:
            self._reduce(unit, unit.options)

    def _reduce(self, unit: Unit, options: Options) -> None:
        """Start the reductions of a unit.

        Waits first if as many reductions are in flight as the options allow.
        """
        if self._dual and inside_forward_ad():
            with without_tangents():
                self._reduce(unit, options)
            return
        if unit.order is not None and unit.order.reductions.unsettled is not None:
            for begun in self._reductions:
                begun.wait()
            unit.order.reductions.settle()
        chosen = list(map(ParameterGroup.reduced, unit.groups))
        unit.before_reduction(chosen, options)
        unit.unreduced = False
        unit.unsummed = not options.all_reduce and unit.groups.replicated
        pairs = zip(reversed(unit.groups), reversed(chosen), strict=True)
        for position, (group, own) in enumerate(pairs):
            # On accelerators, no computation runs between the reductions of the groups of one unit.
            # So only the first group waits, for the reductions of the previous unit.
            waits = position == 0 or group.streams is None
            if waits and (self._scattering or self._hooked):
                self._wait_for_buffers()
            reduction = group.reduce(options, own)
            if reduction is not None:
                self._reductions.append(reduction)
                if reduction.scattering is not None:
                    self._scattering.append(reduction)
                # The hooks of earlier backwards run at the end of the last one. They may step an
                # optimizer, and the last backward still gathers the parameters.
                if reduction.ends_early and self._is_last:
                    self._hooked.append(reduction)

    def _wait_for_buffers(self) -> None:
        """Wait until another tensor of packed gradients may be allocated.

        At most `Options.in_flight` of them may be allocated at once. Also finishes reductions whose
        parameters have post-gradient hooks.
        """
        while len(self._scattering) >= self._in_flight:
            self._scattering[0].finish_scatter()  # a no-op if it was called before
            del self._scattering[0]
        # Hooks on gradients may step an optimizer and free the gradients during backward.
        while self._hooked and self._hooked[0].scattering is None:
            with torch.no_grad():
                self._hooked[0].finish()
            self._reductions.remove(self._hooked.pop(0))

    @torch.no_grad()
    def _finish_backward(self) -> None:
        last = self._is_last
        self._end_traversal()
        for unit in reversed(self.units):
            # Before the last backward, units that this backward did not reach are left for a later
            # one. So are unhooked units, because their end in a backward cannot be detected.
            written = unit.gradient_state is GradientState.WRITING and not unit.unhooked
            if written or (last and unit.gradient_state is not GradientState.EMPTY):
                self._finish_unit(unit)
            if last:
                # This backward did not reach the unit, but earlier ones left gradients in it.
                waits = unit.unreduced or (unit.unsummed and unit.options.all_reduce)
                if waits and unit.options.gradient_sync:
                    self._reduce(unit, unit.options)
                if unit.pending_modules:
                    unit.forget_forward()
        if last:
            self._finish_reductions()
            self._drop_unused_gathers()
            if self._tag_log is not None:
                self._tag_log.send(f"the gradients of backward {self._backwards} are wrong: ")
        self.in_backward = False

    def _finish_reductions(self) -> None:
        """Wait for all reductions and set the gradients of the sharded parameters.

        If one raises, `reset` waits for the others.
        """
        self._hooked, self._scattering = [], []
        if self._pinned:
            self._finish_copies()  # hooks on gradients may step an optimizer
        # Tensors that are created in inference mode cannot be used as gradients outside of it.
        with torch.inference_mode(False), torch.no_grad():
            while self._reductions:
                self._reductions[0].finish()
                del self._reductions[0]

    def _finish_copies(self) -> None:
        """Block the host until the copies from pinned shards to the device are finished.

        An optimizer may write to these shards next.
        """
        for unit in self.units:
            unit.groups.finish_copies()

    def finish_early(self) -> None:
        """Finish the reductions that earlier backwards of the step have left in flight.

        A no-op during a backward and after a backward that raised, because it is then not certain
        that all ranks call this method.
        """
        if self._reductions and not self.in_backward:
            self._finish_reductions()

    def reduce_all(self, units: Iterable[Unit]) -> None:
        """Reduce the accumulated gradients of ``units``, in the given order.

        If this raises, call `reset` before the next forward, as after an exception in backward.
        """
        self.check_no_backward()
        self.finish_early()
        self.in_backward, self._dual, self._is_last = True, inside_forward_ad(), True
        with torch.inference_mode(False), torch.no_grad():  # as in `_finish_reductions`
            for unit in units:
                if unit.unreduced or unit.unsummed:
                    self._reduce(unit, replace(unit.options, all_reduce=True))
        self._finish_reductions()
        self.in_backward = False

    def _drop_unused_gathers(self) -> None:
        for unit in self.units:
            if unit.gathered_by_schedule and unit.gathering:
                unit.reshard()

    def reset(self) -> None:
        """Abort the current step; see `FSDPModule.reset`."""
        drops = [reduction.drop for reduction in self._reductions]
        error = first_error([*drops, *(unit.reset for unit in self.units)])
        self._reductions, self._scattering, self._hooked = [], [], []
        if self._tag_log is not None:
            self._tag_log.drop()
        self._pass_root = None
        self.in_backward = False
        self._traversed, self._reached = None, 0
        self._following = False
        if error is not None:
            raise error


def drop_gradients(units: Sequence[Unit]) -> None:
    """Finish the reductions in flight, and drop the gradients that are not reduced yet."""
    for unit in units:
        if unit.schedule is not None:
            unit.schedule.finish_early()
        unit.groups.drop_gradients()
