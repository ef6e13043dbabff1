"""The modules of one `fully_shard` call, their parameter groups, options and states."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from hp_dtensor import Axis
from hp_dtensor.torch_compat import inside_backward

from ._agreement import (
    Collective,
    CollectiveOrder,
    History,
    Intent,
    NumberedUnit,
    Tag,
    checking,
    compare,
    is_exact,
    order_of,
)
from ._errors import DisagreementError, first_error
from ._group import GATHERABLE, ParameterGroup
from ._groups import ParameterGroups
from ._mesh import Alone, DataAxes
from ._options import Options
from ._param import are_unchanged
from ._states import AFTER, Event, GradientState, ParameterState
from ._torch import graph_task, runs_after_new_ones

if TYPE_CHECKING:
    from ._schedule import Schedule

UNIT_ATTRIBUTE = "_fully_shard_unit"
_created = itertools.count()


class Operation(Enum):
    """Purpose of a unit's collectives. Each value is the text for error messages."""

    __hash__ = object.__hash__  # Enum's own runs in Python

    FORWARD = "gather {} for forward"
    BACKWARD = "gather {} for backward"
    REDUCTION = "reduce the gradients of {}"


class ForwardCall:
    """One forward call of a unit, and the progress of its backward.

    Args:
        unit: The unit.
        sequence_number: Autograd's number of the first operation of the call.

    Attributes:
        outputs_hooked: Whether hooks on the outputs detect the start of the unit's backward.
        inputs_hooked: Whether hooks on the inputs detect the end of the unit's backward.
        unknown_inputs: Whether some inputs have an unknown type. Tensors inside them cannot be
            found, so they have no hooks.
        backward_begun: Whether a backward has reached the unit.
        backward_ended: Whether the unit's backward has ended.
        backward_number: Number of the last backward that reached the unit; see `Schedule`.
        events: Starts (False) and ends (True) of all forward calls of the same pass, in order.
        begin: Position in ``events`` of this call's start; -1 before the call has started.
        end: Position in ``events`` of this call's end; -1 before the call has ended.
        end_number: Number of forward calls that ended before this one in the same pass.
        next_in_backward: The unit whose forward ended just before this call. Backward needs it
            next.
        output: The output tensor with a hook, if there is exactly one.
        input: The output tensor of the previous call, if it is the only input that requires grad.
        next_call: The call whose ``input`` is the output of this call. The backward of
            ``next_call`` ends when the backward of this call starts.
        nested_modules: Modules that are running inside a call of the same module.
        parameters_version: Value of ``unit.parameters_version`` during the call.
        steps: Number of optimizer steps before the call.
    """

    # Class attributes, because a step creates many objects and most attributes keep these values.
    outputs_hooked = inputs_hooked = unknown_inputs = backward_begun = backward_ended = False
    backward_number = 0
    events: "list[tuple[ForwardCall, bool]] | None" = None
    begin = end = -1
    end_number = 0
    next_in_backward: "Unit | None" = None
    output: "weakref.ref[Tensor] | None" = None
    input: "weakref.ref[Tensor] | None" = None
    next_call: "ForwardCall | None" = None
    nested_modules: tuple[nn.Module, ...] = ()
    parameters_version = steps = 0

    def __init__(self, unit: "Unit", sequence_number: int) -> None:
        self.unit = unit
        self.sequence_number = sequence_number

    def use_hook_of_previous(self, tensor: Tensor) -> bool:
        """Detect the end of backward with the hook that the previous call set on its output.

        Args:
            tensor: The only input of this call that requires grad.

        Returns:
            True if ``tensor`` is the output of the previous call and its hook can be used. If
            False, the caller has to add another hook to the input.
        """
        if self.events is None or self.begin < 1:
            return False
        for group in self.unit.groups:
            if group.trains:
                break
        else:
            return False  # a frozen unit may have outputs of unknown type
        previous, ended = self.events[self.begin - 1]
        if not ended or previous.output is None or previous.output() is not tensor:
            return False
        if not runs_after_new_ones(tensor):
            return False  # its hooks would run too early
        previous.next_call, self.input = self, previous.output
        return True

    def needs_view(self, tensor: Tensor) -> bool:
        """Return whether an output must be replaced by a view before it gets a hook.

        - A leaf needs a view, because a hook on a leaf would never be freed.
        - The tensor `input` needs a view, because it already has the hook of the previous call.
        """
        return tensor.is_leaf or (self.input is not None and self.input() is tensor)


class Unit:
    """The modules of one `fully_shard` call, their parameter groups, and the state of their step.

    The states of the parameters are in ``groups``.

    Attributes:
        gradient_state: Progress of the backward.
        gathered_by_schedule: Whether the schedule started the last all-gather, and reshards the
            unit later. False if user code started the all-gather.
        checked_in_pass: Number of the pass or backward in which the unit was last checked for
            replaced parameters; see `Schedule`.
        unreduced: Whether gradients of earlier backwards wait for a reduction.
        unsummed: Whether reduce-scattered gradients of earlier backwards wait for an all-reduce.
        pending_modules: Modules that have not ended their forward in this forward call.
        running_modules: Modules of ``pending_modules`` that have started their forward.
        hook_ended: Modules that run `post_forward` in a forward hook, not in `run_forward`.
        unhooked: Whether a forward since the last backward returned no tensor to hook. If True,
            ``gradient_hooks`` detect backward.
        gradient_hooks: Handles of the hooks on the gradients of the parameters.
        forward_call: The current forward call, or the last one.
        expects_backward: Whether a backward may follow ``forward_call``.
        parameters_version: Increases whenever the unsharded parameters are created again.
        forward_prefetch: Units to prefetch in forward. If None, the next unit of the recorded order
            is prefetched.
        backward_prefetch: Units to prefetch in backward. If None, the next unit in reverse order is
            prefetched.
        create_graph_calls: Forward calls that had a backward with ``create_graph=True``, or None
            if there was no such call.
        creation_number: Position in the order of all `fully_shard` calls.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        options: Options,
        device: torch.device,
    ) -> None:
        self.modules = tuple(modules)
        self.options = options
        # Created once, because histories compare it.
        self._reference: weakref.ref[NumberedUnit] = weakref.ref(self)
        # Positions of parameters in each group, and options, of the last planned reduction.
        self._planned_for: tuple[list[list[int]], Options | None]
        self._reduction: Collective | None
        self.groups = ParameterGroups(groups)
        self.packs_during_backward = any(group.bucket_hooks is not None for group in groups)
        self._join_orders()
        self.forget_comparisons()
        self.device = device
        self.gradient_state = GradientState.EMPTY
        self.gathered_by_schedule = False
        self.unreduced = self.unsummed = False
        self.checked_in_pass = 0
        self.pending_modules: set[nn.Module] = set()
        self.running_modules: set[nn.Module] = set()
        self.hook_ended: set[nn.Module] = set()
        self.expects_backward = False
        self.parameters_version = 0
        self.forward_call = ForwardCall(self, 0)
        self.schedule: Schedule | None = None
        self.forward_prefetch: tuple[Unit, ...] | None = None
        self.backward_prefetch: tuple[Unit, ...] | None = None
        self.creation_number = next(_created)
        self.unhooked = False
        self.gradient_hooks: list[RemovableHandle] = []
        self.create_graph_calls: weakref.WeakSet[ForwardCall] | None = None
        # Also on modules inside: their state dict may be taken alone.
        owners = [owner.module for each in self.groups.parameters for owner in each.owners]
        for module in dict.fromkeys([*self.modules, *owners]):
            module.register_state_dict_pre_hook(_Reshard(self))
            module.register_load_state_dict_pre_hook(_Reshard(self))
        for module in self.modules:
            module.register_load_state_dict_post_hook(self._after_load)

    def gather(self, by_schedule: bool = False) -> None:
        """Check the parameters and start the all-gathers of the sharded groups.

        Args:
            by_schedule: True if the schedule calls this, and reshards the unit later. False if user
                code calls this.

        Raises:
            ParameterError: A parameter was removed, or replaced by one that cannot be used.
            StateError: A parameter is on the meta device.
            DisagreementError: Other ranks gather other units.
        """
        if not by_schedule and self.groups.stale:
            self.reshard()
        operation = Operation.BACKWARD if graph_task() >= 0 else Operation.FORWARD
        self.start_gather(operation, None, by_schedule or self.gathered_by_schedule)
        if not by_schedule:
            self.groups.retain()

    def check_parameters(self, backward: bool) -> None:
        """Take over sharded parameters that user code has replaced or converted.

        Args:
            backward: Whether the next all-gather is for backward. If True, parameters whose memory
                has moved are ignored, because backward needs the parameters of its forward.

        Raises:
            ParameterError: A parameter cannot be used.
        """
        for group in self.groups:
            if group.state in GATHERABLE and not (are_unchanged([group.table], backward)):
                self.reset_sharded(final=True)
                return

    def start_gather(
        self,
        operation: Operation,
        pass_number: int | None,
        by_schedule: bool = True,
        prefetch: bool = False,
    ) -> None:
        """Start the all-gathers of the sharded groups.

        A no-op if no group is sharded. Raises `DisagreementError` if other ranks gather another
        unit.

        Args:
            operation: Purpose of the all-gather.
            pass_number: Number of the current pass or backward. If the parameters were already
                checked in it, they are not checked again. If None, they are always checked.
            by_schedule: True if the schedule starts the all-gather, False if user code does.
            prefetch: Whether this is a prefetch. A prefetch is skipped while ranks have not agreed
                on the order of their collectives.
        """
        forward = operation is Operation.FORWARD
        if forward and self.packs_during_backward:
            self.groups.check_unfrozen()
        for group in self.groups:
            if group.state in GATHERABLE:
                break
        else:
            return
        if pass_number is None or self.checked_in_pass != pass_number:
            self.check_parameters(not forward)
            if forward and self.packs_during_backward:
                self.groups.check_unfrozen()  # replaced parameters may be unfrozen
        history = self._history
        if history is not None:
            collective = self._gathers[operation]
            if history.expected is collective and self._checked is None:
                history.add(collective)
            elif prefetch and history.awaits_tags:
                return
            else:
                self._before_gather(operation)
        self.gathered_by_schedule, self.groups.retained = by_schedule, False
        for group in self.groups:
            group.gather()
        no_backward = forward and not torch.is_grad_enabled()
        if no_backward:
            self.groups.retain()
        # Ranks gather different units at the same time only if one of them starts an all-gather
        # that is not the next one of the recorded order. That rank reads the tags and raises. The
        # other ranks raise in a later collective, in which that rank is missing, before they have
        # gradients. Without a backward there may be no later collective, so all ranks read tags.
        if no_backward or (history is not None and history.unsettled is self._reference):
            for group in self.groups:
                group.reads_tags = True

    def reshard(self) -> None:
        """Register the sharded parameters with the modules, and free the unsharded ones."""
        self.gathered_by_schedule = False
        if self.create_graph_calls:
            self._refuse_second_backwards()
        if len(self.groups) == 1:
            self.groups[0].reshard()
        elif (error := first_error([group.reshard for group in self.groups])) is not None:
            raise error

    def end_without_backward(self) -> None:
        """Reshard after a forward that no backward can follow.

        Under ``torch.no_grad``, parameters stay unsharded if user code gathered them, or if
        ``reshard_after_forward`` is False. The next `reshard` frees them, or the next forward if
        the shards were written to.
        """
        keep = not self.gathered_by_schedule or self.options.reshard_after_forward is False
        if keep and not torch.is_grad_enabled():
            self.gathered_by_schedule = False
            self.groups.retain()
        else:
            self.reshard()

    def reset(self) -> None:
        """Abort the current step: reshard, and drop the gradients that are not reduced."""
        if self.create_graph_calls:
            self._refuse_second_backwards()
        self.gradient_state = AFTER[Event.RESET][self.gradient_state]
        self.gathered_by_schedule = self.unreduced = self.unsummed = False
        self.forget_forward()
        self.remove_gradient_hooks()
        if (error := first_error([group.reset for group in self.groups])) is not None:
            raise error

    def forget_forward(self) -> None:
        """Let the next forward of any module start a new forward call of the unit."""
        self.pending_modules.clear()
        self.running_modules.clear()

    @property
    def awaits_split_backward(self) -> bool:
        """Return whether a pipeline schedule may run part of this unit's backward next."""
        waits = self.unreduced or self.gradient_state is GradientState.EXPECTED
        return self.options.in_pipeline and waits and self.groups.sharded and not inside_backward()

    @property
    def gathering(self) -> bool:
        """Return whether an all-gather is in flight."""
        return ParameterState.GATHERING in [group.state for group in self.groups]

    def finish_backward(self) -> bool:
        """End the unit's backward, and mark the gradients as unreduced.

        The unit is resharded if the option ``reshard_after_backward`` is True.

        Returns:
            False if the unit neither ran nor expected a backward. Then nothing is changed.
        """
        if self.gradient_state is GradientState.EMPTY:
            return False
        self.gradient_state = AFTER[Event.REDUCE][self.gradient_state]
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self.gathered_by_schedule = False
            self.groups.retain()
        self.unreduced = True
        if not self.options.gradient_sync:
            for group in self.groups:
                group.accumulate_gradients()
        return True

    def reshard_and_wait(self) -> None:
        """Reshard, and wait until no copy reads the shards, so that user code may write to them.

        Raises:
            DisagreementError: Ranks gathered or reduced different units in earlier collectives.
        """
        self.reshard()
        self.groups.finish_copies()
        if self.schedule is not None:
            self.schedule.check_tags()

    def hook_gradients(self, came: Callable[[], None]) -> bool:
        """Register hooks that call ``came`` when autograd has computed a parameter's gradient.

        Used if the outputs cannot be hooked: if they are objects of unknown type, or if the module
        stores its results instead of returning them.

        Returns:
            Whether any parameter requires grad.
        """
        if not self.gradient_hooks:

            def call(_: Tensor) -> None:
                came()

            self.gradient_hooks = [
                parameter.unsharded.register_post_accumulate_grad_hook(call)
                for parameter in self.groups.parameters
                if parameter.unsharded.requires_grad
            ]
        return bool(self.gradient_hooks)

    def keeps_parameters(self, is_root: bool) -> bool:
        """Return whether parameters stay unsharded after forward and after backward."""
        if not self.groups:
            return True
        after_forward = self.options.reshard_after_forward
        kept = after_forward is False or (after_forward is None and is_root)
        return kept and not self.options.reshard_after_backward

    def note_create_graph(self, call: ForwardCall) -> None:
        """Record a forward call that has a backward with ``create_graph=True``.

        The reference is weak, so that this does not keep the call's autograd graph alive.
        """
        if self.create_graph_calls is None:
            self.create_graph_calls = weakref.WeakSet()
        self.create_graph_calls.add(call)

    def _refuse_second_backwards(self) -> None:
        """Increment the versions of the unsharded parameters.

        Autograd then raises if a second backward reads them after they were freed.
        """
        self.create_graph_calls = None
        for parameter in self.groups.parameters:
            increment_version(parameter.unsharded)

    def remove_gradient_hooks(self) -> None:
        """Remove the hooks of `hook_gradients`. Called when no backward can need them."""
        self.unhooked = False
        for handle in self.gradient_hooks:
            handle.remove()
        self.gradient_hooks = []

    def _after_load(self, *_: Any) -> None:
        # With a list of modules, this runs for each of them, before the next ones are loaded.
        self.reset_sharded(final=len(self.modules) == 1)

    def reset_sharded(self, final: bool) -> None:
        """Reshard, and copy replaced or converted parameters back to the flat shards.

        If one of the parameters cannot be used, none is copied.

        Args:
            final: Whether to raise `ParameterError` if a parameter cannot be used. If False, the
                next all-gather checks again.
        """
        self.reshard_and_wait()
        if self.schedule is not None:
            self.schedule.finish_early()  # reductions in flight set gradients of these parameters
        if self.groups.take_replacements(final):
            # The unsharded parameters were created again and have no hooks yet. A backward that
            # needs the freed ones raises.
            for handle in self.gradient_hooks:
                handle.remove()
            self.gradient_hooks = []
            self.parameters_version += 1
            self.forget_comparisons()

    def _before_gather(self, operation: Operation) -> None:
        """Raise `DisagreementError` if other ranks are about to gather other units.

        Compares with other ranks, which is a collective, only if the history requires it; see
        `_agreement.History.needs_comparison`.
        """
        order = self.order
        if order is not None:
            if order.gathers.unsettled is not None and not order.gathers.awaits_tags:
                order.gathers.settle()
            if self._checked is not None:
                self._checked.check(self._axis, f"gather for {operation.name.lower()}", str(self))
            self._begin(order.gathers, self._gathers[operation], operation, self.options)

    def before_reduction(self, chosen: list[list[int]], options: Options) -> None:
        """Raise `DisagreementError` if other ranks are about to reduce other parameters.

        Compares with other ranks, which is a collective, only if the history requires it; see
        `_agreement.History.needs_comparison`.

        Args:
            chosen: For each group, the positions of the parameters to reduce.
            options: Options of this reduction.
        """
        order = self.order
        if order is None or not (self._shards or options.all_reduce):
            return
        if options is not self._planned_for[1] or chosen != self._planned_for[0]:
            self._plan_reduction(chosen, options)
        if self._reduction is not None:
            if self._checked is not None:
                self._checked.check(self._axis, "reduce the gradients", str(self))
            self._begin(order.reductions, self._reduction, Operation.REDUCTION, options)

    def _plan_reduction(self, chosen: list[list[int]], options: Options) -> None:
        """Set ``_reduction`` to the `Collective` that reduces ``chosen``.

        Sets None if ``chosen`` has no parameters.
        """
        key = (tuple(map(tuple, chosen)), options.all_reduce)
        if key not in self._reductions:
            pairs = list(zip(self.groups, chosen, strict=True))
            signature = tuple(group.reduction_signature(own) for group, own in pairs)
            tagged = all(is_exact(group.scatters) for group in self.groups)
            self._reductions[key] = Collective(signature, tagged) if any(chosen) else None
        self._planned_for, self._reduction = (chosen, options), self._reductions[key]

    def _begin(
        self, history: History, collective: Collective, operation: Operation, options: Options
    ) -> None:
        """Record a collective. Before that, compare it with other ranks if necessary."""
        compares = history.needs_comparison(collective)
        if compares:
            self._compare(operation, options)
            collective.compared = True
        # On an accelerator tags are read too late to wait for them.
        trusted = compares or history.expected is collective or self.groups[0].streams is not None
        history.add(collective, None if trusted else self._reference)

    def _compare(self, operation: Operation, options: Options) -> None:
        axes = [self._data.shard]
        if operation is Operation.REDUCTION and options.all_reduce:
            axes += self._data.replicate
        axes = [axis for axis in axes if order_of(axis) is not None]
        if not axes:
            return
        rank = axes[0].ranks[axes[0].index]
        doing = operation.value.format(self.path)
        units = [self] if self.schedule is None else self.schedule.units
        key = operation.name, units.index(self)
        own = Intent(rank, key, doing, self._facts(operation, options))
        try:
            compare(axes, own, _HINTS, self.device)
        except DisagreementError:
            raise
        except RuntimeError as error:
            if self.order is not None:
                next_step = f"{operation.value.format(self)}{self._count(operation)}"
                self.order.report(error, rank, f"compare before it is to {next_step}")
            raise

    def _count(self, operation: Operation) -> str:
        if operation is not Operation.REDUCTION:
            return ""
        return f" ({sum([len(group.reduced()) for group in self.groups])} parameters)"

    def forget_comparisons(self) -> None:
        """Let ranks compare the next all-gathers and reductions of this unit; see `_agreement`."""
        sharded = [group for group in self.groups if group.axes.shard.size > 1]
        tagged = all(group.tagged for group in sharded)
        parts = [group.gather_signature for group in sharded]
        signature = None if None in parts else tuple(parts)
        # An all-gather over fewer ranks sends saved copies. Their tags are from the all-gather of
        # forward, so they do not show which unit a rank gathers now.
        fewer = any(group.post_forward_axis is not None for group in sharded)
        self._gathers = {
            Operation.FORWARD: Collective(signature, tagged),
            Operation.BACKWARD: Collective(signature, tagged and not fewer),
        }
        self._reductions: dict[object, Collective | None] = {}
        self._planned_for, self._reduction = ([], None), None

    def _join_orders(self) -> None:
        """Register the unit with the `CollectiveOrder` of each process group that it uses."""
        alone = DataAxes(Axis("alone", Alone(), (0,)))
        axes = [group.axes for group in self.groups]
        self._data = max(axes, key=lambda data: (data.shard.size, data.size), default=alone)
        self._axis = _first_axis(self._data)
        self._shards = self._axis is self._data.shard
        shard_order = order_of(self._axis) if self._shards else None
        self._history = None if shard_order is None else shard_order.gathers
        numbers: dict[CollectiveOrder, int] = {}
        for group in self.groups:
            first = _first_axis(group.axes)
            own = [first, *(axis for axis in group.axes.replicate if axis is not first)]
            orders = [order for order in map(order_of, own) if order is not None]
            if orders:
                order = orders[0]
                if order not in numbers:
                    numbers[order] = order.add(self, orders[1:])
                group.use_tag(Tag(orders, numbers[order], first.ranks[first.index]))
        self.order = order_of(self._axis)
        self.number = numbers[self.order] if self.order is not None else 0
        found = [checking(group.collectives) for group in self.groups]
        self._checked = next((each for each in found if each is not None), None)

    @property
    def path(self) -> str:
        """Return the name of the module from the root module, such as ``"layers.0"``."""
        return "(no root yet)" if self.schedule is None else self.schedule.path_of(self)

    def __str__(self) -> str:
        kinds = dict.fromkeys(type(module).__name__ for module in self.modules)
        classes = ", ".join(kind.removeprefix("FSDP") for kind in kinds)
        return f"{self.path} ({classes}, unit {self.number})"

    def _facts(self, operation: Operation, options: Options) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, as ``{name: value}`` for messages.

        For example ``{"weight": "shape (8, 8) sharded along dim 0, trains", ...}``. Every name
        contains a space, except the names of parameters.
        """
        units = [self] if self.schedule is None else self.schedule.units
        position = sum([unit.creation_number < self.creation_number for unit in units])
        facts = {_CREATION_POSITION: str(position), _NUMBER: str(self.number)}
        for number, group in enumerate(self.groups):
            of = f" of dtype group {number}" if number else ""
            reduced, layout = set(group.reduced()), group.layout
            for i, p in enumerate(group.parameters):
                trains = (
                    "trains"
                    if i in reduced or operation is not Operation.REDUCTION
                    else "is frozen"
                )
                kind = "replicated" if p.dim is None else f"sharded along dim {p.dim}"
                facts[p.name] = f"shape {tuple(p.shape)} {kind}, {trains}"
            order = ", ".join(repr(p.name) for p in group.parameters)
            facts[f"the order of parameters{of}"] = order
            extended = "" if group.flat else ", with all-gather extensions"
            facts[f"the layout{of}"] = layout.plan.kind + extended
            dtypes = layout.shard.dtype, group.dtypes.compute, group.dtypes.reduce
            facts[f"the dtypes{of}"] = "stored {}, computed {}, reduced {}".format(*dtypes)
            facts[f"{_OFFSETS}{of}"] = str(layout.plan)
            if operation is Operation.REDUCTION:
                divisor = options.divisor(group.reduce_axes.size)
                facts[f"the divisor of gradients{of}"] = f"{divisor:.17g}"
        return facts


_OFFSETS = "the offsets"
_CREATION_POSITION = "the position in the order of the fully_shard calls"
_NUMBER = "the number of the fully_shard call over these ranks"
_ORDER_HINT = "shard the same modules in the same order, and do not move them afterwards"
_HINTS = {
    _CREATION_POSITION: _ORDER_HINT,
    _NUMBER: _ORDER_HINT,
    _OFFSETS: "give all ranks the same granularity and direct_bytes",
}


def _first_axis(data: DataAxes) -> Axis:
    """Return the mesh axis over which ranks check the order of their collectives.

    This is the first axis with two or more ranks: the shard axis, else a replicate axis. If every
    axis has one rank, it is the shard axis.
    """
    axes = (data.shard, *data.replicate)
    return next((axis for axis in axes if axis.size > 1), data.shard)


class _Reshard:
    """Hook that reshards a unit before a state dict of its modules is created or loaded."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        """Reshard the unit. The arguments of the hook are ignored."""
        if self._unit is not None:
            self._unit.reshard_and_wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reshard, (None,)  # a copy of the module belongs to no unit


def units_in(*roots: nn.Module) -> list[Unit]:
    """Return the units of all modules in ``roots``, outer units before inner ones."""
    found = dict.fromkeys(unit_of(inner) for root in roots for inner in root.modules())
    return [unit for unit in found if unit is not None]


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of ``module``, or None if ``module`` was not passed to `fully_shard`."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None
