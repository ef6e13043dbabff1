"""What one `fully_shard` call manages: modules, parameter groups, options, and their states."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from operator import is_
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
from ._errors import DisagreementError, ParameterError, first_error
from ._group import RESTING, ParameterGroup
from ._mesh import Alone, DataAxes
from ._options import Options
from ._param import are_shown
from ._states import AFTER, Event, GradientState, ParameterState
from ._torch import graph_task, runs_after_new_ones

if TYPE_CHECKING:
    from ._schedule import Schedule

UNIT_ATTRIBUTE = "_fully_shard_unit"
_made = itertools.count()


class Act(Enum):
    """What a unit communicates for."""

    __hash__ = object.__hash__  # as those of states

    FORWARD = "gather {} for forward"
    BACKWARD = "gather {} for backward"
    REDUCTION = "reduce the gradients of {}"


class Run:
    """One forward of a unit, and how far its backward is.

    ``expected``: backward can be seen to reach it. ``marked``: and to leave it. ``hidden_input``:
    it may leave it in what cannot be looked into. ``backward``: the number of the last one that
    did. ``order``: the begins (False) and ends (True) of all runs of its pass, in which its own
    have the positions ``begin`` and ``end``. ``output``: the one tensor that backward comes in by,
    if there is one. ``follower``: the run that took it for its only input with a gradient, its
    ``input``, so that this one's backward begins where that one's ends. ``within``: the modules
    that are called from calls of their own. ``number``: autograd's of what it computed first.
    ``laid_out``: that of its unit, when it was gathered for.
    """

    # Most of them stay as they are here for a while, and a step makes many runs.
    expected = marked = hidden_input = reached = left = False
    backward = 0
    order: "list[tuple[Run, bool]] | None" = None
    begin = end = -1
    output: "weakref.ref[Tensor] | None" = None
    input: "weakref.ref[Tensor] | None" = None
    follower: "Run | None" = None
    within: tuple[nn.Module, ...] = ()
    laid_out = 0

    def __init__(self, unit: "Unit", number: int) -> None:
        self.unit = unit
        self.number = number

    def follow(self, tensor: Tensor) -> bool:
        """Begin where the run that ended last does, if ``tensor`` is what came out of it."""
        if self.order is None or self.begin < 1:
            return False
        for group in self.unit.groups:
            if group.trains:
                break
        else:
            return False  # it may hide what it returns: then its inputs alone tell of backward
        before, ended = self.order[self.begin - 1]
        if not ended or before.output is None or before.output() is not tensor:
            return False
        if not runs_after_new_ones(tensor):
            return False  # its hooks would tell too early
        before.follower, self.input = self, before.output
        return True

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether it is the ``input``, whose hooks are those of the run before."""
        return self.input is not None and self.input() is tensor


class Unit:
    """The modules of one call, their groups (one per dtype), and where their step is.

    Beside the states of parameters (of each group) and gradients: ``in_pass``, gathered by a pass
    of the schedule, not by hand; ``stays``, since the last gather parameters were to stay while
    shards may be written to; ``checked``, the schedule's number of the pass or backward that found
    them in place; ``unreduced``, gradients of earlier backwards wait for a
    reduction; ``waiting`` and ``running``, modules that have yet to end, and of these those that
    have begun; ``hidden``, something came out of it since its last backward of which no tensor can
    be hooked; ``gradient_hooks``, where gradients of parameters then tell of backward;
    ``expects_backward`` and ``run``, of the forward under way or the last one;
    ``ended_by_hook``, modules whose forward hooks end them; ``laid_out``, how often the parameters
    that modules compute with were made.
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
        # Made once, because histories compare it.
        self._reference: weakref.ref[NumberedUnit] = weakref.ref(self)
        # What the last reduction was planned for: parameters of each group, and options.
        self._planned_for: tuple[list[list[int]], Options | None]
        self._reduction: Collective | None
        self._take_groups(groups)
        self.device = device
        self.gradients = GradientState.EMPTY
        self.in_pass = False
        self.unreduced = False
        self.stays = False
        self.checked = 0
        self.waiting: set[nn.Module] = set()
        self.running: set[nn.Module] = set()
        self.ended_by_hook: set[nn.Module] = set()
        self.expects_backward = False
        self.laid_out = 0
        self.run = Run(self, 0)
        self.schedule: Schedule | None = None  # what runs the unit
        self.forward_prefetch: tuple[Unit, ...] | None = None  # None: the next in learned order
        self.backward_prefetch: tuple[Unit, ...] | None = None
        self.made = next(_made)  # before units of later calls
        self._place = self._place_made = 0
        self._paths: Callable[[], list[str]] | None = None
        self._owner: object = None
        self.hidden = False
        self.gradient_hooks: list[RemovableHandle] = []
        # Forwards whose backward ran with create_graph=True; None before the first one.
        self.create_graph_runs: weakref.WeakSet[Run] | None = None
        # Also those inside, whose state may be asked for alone; the next gather sees what came.
        owners = [o.module for g in groups for p in g.parameters for o in p.owners]
        for module in dict.fromkeys([*self.modules, *owners]):
            module.register_state_dict_pre_hook(_Reshard(self))
            module.register_load_state_dict_pre_hook(_Reshard(self))
        for module in self.modules:
            module.register_load_state_dict_post_hook(self._after_load)

    def _take_groups(self, groups: Sequence[ParameterGroup]) -> None:
        self.groups = tuple(groups)
        self.packs_early = any(group.bucket_hooks is not None for group in groups)
        self._join_orders()
        self.forget_comparisons()

    def join(
        self, owner: object, place: int, place_made: int, paths: Callable[[], list[str]]
    ) -> None:
        """Join a schedule.

        Args:
            owner: Stands for the schedule.
            place: Position among the units under its root.
            place_made: Position among them in the order of `fully_shard` calls.
            paths: Returns the paths of all of them.
        """
        self._owner, self._place = owner, place
        self._place_made, self._paths = place_made, paths
        self.forget_comparisons()

    def gather(self, in_pass: bool = False) -> None:
        """Check the parameters and start the all-gathers of the groups that are sharded.

        A pass answers for what it gathers. Raises `ParameterError` for parameters that were
        removed, or replaced by what cannot take their place, `StateError` for those without memory,
        `DisagreementError` where ranks gather other units.
        """
        if not in_pass and self.stale:
            self.reshard()
        act = Act.BACKWARD if graph_task() >= 0 else Act.FORWARD
        self.gather_in_turn(act, None, in_pass or self.in_pass)
        if not in_pass:
            self.note_writes()

    def check_parameters(self, backward: bool) -> None:
        """Detect parameters that user code replaced or converted while they were sharded.

        With ``backward`` it does not check whether their memory moved, because backward gathers
        the parameters of its forward. Raises `ParameterError` for unusable parameters.
        """
        for group in self.groups:
            if group.state in RESTING and not (
                are_shown([group.table]) if backward else group.in_place
            ):
                self.reset_sharded(final=True)
                return

    def gather_in_turn(
        self, act: Act, turn: int | None, in_pass: bool = True, ahead: bool = False
    ) -> None:
        """Start the gathers of a pass or backward.

        Args:
            act: What the parameters are gathered for.
            turn: Number of the pass or backward. Parameters that were checked in it are not
                checked again. None: check them.
            in_pass: Whether the schedule started the gather, not the user.
            ahead: Whether this is a prefetch. It is skipped while ranks have not agreed on the
                order of their collectives.
        """
        if act is Act.FORWARD and self.packs_early:
            self._check_unfrozen()
        for group in self.groups:
            if group.state in RESTING:
                break
        else:
            return
        if turn is None or self.checked != turn:
            self.check_parameters(act is Act.BACKWARD)
            if act is Act.FORWARD and self.packs_early:
                self._check_unfrozen()  # what took the place of others
        history = self._history
        if history is not None:
            expected = history.turn if self._checked is None else None
            if expected is not None and expected.collective is self._gathers[act]:
                history.turn = expected.following
            elif ahead and history.awaits_tags:
                return
            else:
                self._before_gather(act)
        self.in_pass, self.stays = in_pass, False
        for group in self.groups:
            group.gather()
        if act is Act.FORWARD and not torch.is_grad_enabled():
            self.note_writes()
            self._read_tags()
        elif history is not None and history.unsettled is self._reference:
            self._read_tags()

    def _read_tags(self) -> None:
        """Read the tags of the gathers under way.

        Ranks mix up gathers only if one of them starts an unexpected gather. That rank reads the
        tags and raises. Others raise when they miss it in a later collective, before they have
        gradients. Without a backward there may be no later collective, so all ranks read.
        """
        for group in self.groups:
            group.reads_tags = True

    def _check_unfrozen(self) -> None:
        for group in self.groups:
            group.check_unfrozen()

    def unshard(self) -> None:
        """Make the unsharded parameters the modules' parameters."""
        for group in self.groups:
            group.unshard()

    def reshard(self) -> None:
        """Make the sharded parameters the modules' parameters, free the others."""
        self.in_pass = False
        if self.create_graph_runs:
            self._refuse_second_backwards()
        if len(self.groups) == 1:
            self.groups[0].reshard()
        elif (error := first_error([group.reshard for group in self.groups])) is not None:
            raise error

    def reshard_to_fewer(self) -> None:
        """Reshard to the smaller number of ranks that the options say."""
        self.stays = True
        for group in self.groups:
            group.reshard_to_fewer()
            group.note_writes()

    def note_writes(self) -> None:
        """Watch for writes to the shards, while parameters stay gathered."""
        self.stays = True
        for group in self.groups:
            group.note_writes()

    def train_as_shown(self) -> None:
        """Let the sharded parameters train where those that stay with the modules do."""
        for group in self.groups:
            group.train_as_shown()

    def train_as_sharded(self) -> None:
        """Let the parameters that stay with the modules train where the sharded ones do."""
        for group in self.groups:
            group.train_as_sharded()

    def end_without_backward(self) -> None:
        """End a forward that no backward can follow: give the parameters up.

        Under ``torch.no_grad`` those stay, until `reshard` or a forward that finds them `stale`,
        that the user gathered, or told to stay after forward.
        """
        asked = not self.in_pass or self.options.reshard_after_forward is False
        if asked and not torch.is_grad_enabled():
            self.in_pass = False
            self.note_writes()
        else:
            self.reshard()

    def reset(self) -> None:
        """Forget the step under way."""
        if self.create_graph_runs:
            self._refuse_second_backwards()
        self.gradients = AFTER[Event.RESET][self.gradients]
        self.in_pass = self.unreduced = False
        self.forget_forward()
        self.forget_hidden()
        error = first_error(group.reset for group in self.groups)
        if error is not None:
            raise error

    def forget_forward(self) -> None:
        """Start the list of modules over at the next forward."""
        self.waiting.clear()
        self.running.clear()

    @property
    def sharded(self) -> bool:
        """Return whether there is something to gather."""
        return any([group.state in RESTING for group in self.groups])

    @property
    def awaits_split_backward(self) -> bool:
        """Return whether a pipeline schedule may be about to run a part of a backward."""
        waits = self.unreduced or self.gradients is GradientState.EXPECTED
        return self.options.in_pipeline and waits and self.sharded and not inside_backward()

    @property
    def gathering(self) -> bool:
        """Return whether a gather is under way."""
        return any(group.state is ParameterState.GATHERING for group in self.groups)

    @property
    def stale(self) -> bool:
        """Return whether what is gathered is not what the shards say any more."""
        return any([group.stale for group in self.groups])

    def finish_backward(self) -> bool:
        """Reshard, and leave the gradients to a reduction; return whether there was a backward."""
        if self.gradients is GradientState.EMPTY:
            return False
        self.gradients = AFTER[Event.REDUCE][self.gradients]
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self.in_pass = False
            self.note_writes()
        self.unreduced = True
        if not self.options.gradient_sync:
            for group in self.groups:
                group.hold_gradients()
        return True

    def rest(self) -> None:
        """Reshard, and wait for what uses the shards, which are read or written next."""
        self.reshard()
        self.finish_copies()
        if self.schedule is not None:
            self.schedule.check_tags()

    def finish_copies(self) -> None:
        """Wait, on the host, for copies from the CPU of all groups."""
        for group in self.groups:
            group.finish_copies()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet."""
        for group in self.groups:
            group.drop_gradients()

    def hook_gradients(self, came: Callable[[], None]) -> bool:
        """Call ``came`` with each gradient of a parameter; return whether any can come.

        For outputs in which no tensor can be hooked: objects of unknown type, or nothing at all
        where the module keeps its results to itself.
        """
        if not self.gradient_hooks:

            def call(_: Tensor) -> None:
                came()

            self.gradient_hooks = [
                parameter.unsharded.register_post_accumulate_grad_hook(call)
                for group in self.groups
                for parameter in group.parameters
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

    def note_create_graph(self, run: Run) -> None:
        """Note a forward whose backward can be differentiated, as long as its graph is alive."""
        if self.create_graph_runs is None:
            self.create_graph_runs = weakref.WeakSet()
        self.create_graph_runs.add(run)

    def _refuse_second_backwards(self) -> None:
        """Increment the versions of the unsharded parameters.

        Autograd then raises if a second backward reads them after they were freed.
        """
        self.create_graph_runs = None
        for group in self.groups:
            for parameter in group.parameters:
                increment_version(parameter.unsharded)

    def forget_hidden(self) -> None:
        """Forget what came out of the unit, and remove the hooks on gradients."""
        self.hidden = False
        for handle in self.gradient_hooks:
            handle.remove()
        self.gradient_hooks = []

    def _after_load(self, *_: Any) -> None:
        # The modules of a list come here one after the other, with the others yet unchanged.
        self.reset_sharded(final=len(self.modules) == 1)

    def reset_sharded(self, final: bool) -> None:
        """Take back parameters that were replaced or converted from outside, all or none.

        What cannot be taken is refused with the parameters that stood there before, but for those
        that were removed, if this is ``final``; otherwise the next gather decides.
        """
        self.rest()
        refusals = [refusal for group in self.groups for refusal in group.refusals()]
        if refusals and final:
            for group in self.groups:
                group.undo_replacements()
            raise ParameterError("; ".join(refusals))
        if not refusals:
            for group in self.groups:
                group.check_converted()
            before = [p.unsharded for group in self.groups for p in group.parameters]
            for group in self.groups:
                group.reset_sharded()
            # A backward to come may find parameters given up, which hooks on their gradients tell;
            # those that were made anew get their own.
            now = [p.unsharded for group in self.groups for p in group.parameters]
            if not all(map(is_, before, now)):
                self.gradient_hooks = []
                self.laid_out += 1
                self.forget_comparisons()

    def _before_gather(self, act: Act) -> None:
        """Raise `DisagreementError` if other ranks gather other units next.

        Compares with other ranks only if the gather is new or unexpected; see `_agreement`.
        """
        order = self.order
        if order is not None:
            if order.gathers.unsettled is not None and not order.gathers.awaits_tags:
                order.gathers.settle()
            if self._checked is not None:
                self._checked.check(self._axis, f"gather for {act.name.lower()}", str(self))
            self._begin_unexpected(order.gathers, self._gathers[act], act, self.options)

    def before_reduction(self, chosen: list[list[int]], options: Options) -> None:
        """Raise `DisagreementError` if other ranks reduce other parameters next.

        ``chosen`` are the positions of the reduced parameters in each group. Compares with other
        ranks only if the reduction is new or unexpected; see `_agreement`.
        """
        order = self.order
        if order is None or not (self._shards or options.all_reduce):
            return
        if options is not self._planned_for[1] or chosen != self._planned_for[0]:
            self._plan_reduction(chosen, options)
        if self._reduction is not None:
            if self._checked is not None:
                self._checked.check(self._axis, "reduce the gradients", str(self))
            turn = order.reductions.turn
            if turn is not None and turn.collective is self._reduction:
                order.reductions.turn = turn.following
            else:
                self._begin_unexpected(order.reductions, self._reduction, Act.REDUCTION, options)

    def _plan_reduction(self, chosen: list[list[int]], options: Options) -> None:
        """Look up the `Collective` of these parameters; None if there are no parameters."""
        key = (tuple(map(tuple, chosen)), options.all_reduce)
        if key not in self._reductions:
            pairs = list(zip(self.groups, chosen, strict=True))
            signature = tuple(group.reduction_signature(own) for group, own in pairs)
            tagged = all(is_exact(group.scatters) for group in self.groups)
            self._reductions[key] = Collective(signature, tagged) if any(chosen) else None
        self._planned_for, self._reduction = (chosen, options), self._reductions[key]

    def _begin_unexpected(
        self, history: History, collective: Collective, act: Act, options: Options
    ) -> None:
        """Compare if needed, then record the collective as the latest one."""
        if history.repeats(collective):
            return
        found = history.judge(collective)
        if found == "other":
            self._compare(act, options)
            collective.compared = True
        # On an accelerator tags are read too late to wait for them.
        waits = found == "like" and self.groups[0].streams is None
        history.add(collective, self._owner, self._reference if waits else None)

    def _compare(self, act: Act, options: Options) -> None:
        axes = [self._data.shard]
        if act is Act.REDUCTION and options.all_reduce:
            axes += self._data.replicate
        axes = [axis for axis in axes if order_of(axis) is not None]
        if not axes:
            return
        rank = axes[0].ranks[axes[0].index]
        doing = act.value.format(self.path)
        own = Intent(rank, (act.name, self._place), doing, self._facts(act, options))
        try:
            compare(axes, own, _HINTS, self.device)
        except DisagreementError:
            raise
        except RuntimeError as error:
            if self.order is not None:
                waiting_to = f"compare before it is to {act.value.format(self)}{self._count(act)}"
                self.order.report(error, rank, waiting_to)
            raise

    def _count(self, act: Act) -> str:
        if act is not Act.REDUCTION:
            return ""
        return f" ({sum(len(group.reduced()) for group in self.groups)} parameters)"

    def forget_comparisons(self) -> None:
        """Forget which collectives were compared, so that ranks compare them again."""
        sharded = [group for group in self.groups if group.axes.shard.size > 1]
        tagged = all(group.tagged for group in sharded)
        parts = [group.gather_signature for group in sharded]
        signature = None if None in parts else tuple(parts)
        # A gather over fewer ranks sends saved blocks with their old tags, which prove nothing.
        fewer = any(group.post_forward_axis is not None for group in sharded)
        self._gathers = {
            Act.FORWARD: Collective(signature, tagged),
            Act.BACKWARD: Collective(signature, tagged and not fewer),
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
        """Return where the unit is under the root of its schedule."""
        return "(no root yet)" if self._paths is None else self._paths()[self._place]

    def __str__(self) -> str:
        kinds = dict.fromkeys(type(module).__name__ for module in self.modules)
        classes = ", ".join(kind.removeprefix("FSDP") for kind in kinds)
        return f"{self.path} ({classes}, unit {self.number})"

    def _facts(self, act: Act, options: Options) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, by their names in error messages.

        Only names of parameters have no spaces.
        """
        facts = {_PLACE_MADE: str(self._place_made), _NUMBER: str(self.number)}
        for number, group in enumerate(self.groups):
            of = f" of dtype group {number}" if number else ""
            reduced, layout = set(group.reduced()), group.layout
            for i, p in enumerate(group.parameters):
                trains = "trains" if i in reduced or act is not Act.REDUCTION else "is frozen"
                cut = "kept whole" if p.dim is None else f"cut along dim {p.dim}"
                facts[p.name] = f"shape {tuple(p.shape)} {cut}, {trains}"
            order = ", ".join(repr(p.name) for p in group.parameters)
            facts[f"the order of parameters{of}"] = order
            extended = "" if group.flat else ", with all-gather extensions"
            facts[f"the layout{of}"] = layout.plan.kind + extended
            dtypes = layout.shard.dtype, group.dtypes.compute, group.dtypes.reduce
            facts[f"the dtypes{of}"] = "stored {}, computed {}, reduced {}".format(*dtypes)
            facts[f"{_OFFSETS}{of}"] = str(layout.plan)
            if act is Act.REDUCTION:
                divisor = options.divisor(group.reduce_axes.size)
                facts[f"the divisor of gradients{of}"] = f"{divisor:.17g}"
        return facts


_OFFSETS = "the offsets"
_PLACE_MADE = "the place among these units in the order of fully_shard's calls"
_NUMBER = "the number of the fully_shard call over these ranks"
_ORDER_HINT = "shard the same modules in the same order, and do not move them afterwards"
_HINTS = {
    _PLACE_MADE: _ORDER_HINT,
    _NUMBER: _ORDER_HINT,
    _OFFSETS: "give all ranks the same granularity and direct_bytes",
}


def _first_axis(data: DataAxes) -> Axis:
    """Return the axis that the order of collectives is checked over: the first of two or more."""
    axes = (data.shard, *data.replicate)
    return next((axis for axis in axes if axis.size > 1), data.shard)


class _Reshard:
    """Reshards a unit before the state of a module in it is taken or loaded."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def __call__(self, *_: Any) -> None:
        """Reshard, whatever the hook is told."""
        if self._unit is not None:
            self._unit.rest()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reshard, (None,)  # a copy of the module is in no unit


def units_in(*roots: nn.Module) -> list[Unit]:
    """Return the units that modules in ``roots`` were given to, outer ones first."""
    found = dict.fromkeys(unit_of(inner) for root in roots for inner in root.modules())
    return [unit for unit in found if unit is not None]


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``module`` was given to by a `fully_shard` call, if any."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None
