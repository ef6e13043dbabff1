"""What a sharded module can do besides what it could before."""

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import MethodType
from typing import Any, NoReturn, Self, cast

from torch import nn
from torch.distributed import fsdp

from ._errors import ModuleError, ModuleStateError, first_error, shown
from ._report import PlanReport, report
from ._setters import Setters
from ._torch import TorchState, note_state, noted_state
from ._unit import Unit, unit_of


class UnshardHandle:
    """A gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the gather and register the unsharded parameters.

        Does nothing where no gather is under way: waited for before, or resharded since.
        """
        if self._unit.gathering:
            self._unit.gather()  # anew, if an optimizer stepped since
            self._unit.unshard()


class FSDPModule(Setters):
    """The class that `fully_shard` mixes into a module's own; never constructed by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct the module's own class: slices of a sharded container are not sharded."""
        own = cast(Any, cls.__bases__[1])
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return cast(Self, module)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters: one all-gather per dtype over the shard axis.

        With ``async_op`` returns at once; ``wait()`` on the handle, or the next forward, completes
        it. Not recursive.
        """
        unit = self._unit()
        unit.gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Make this unit's parameters sharded DTensors again and free the rest; not recursive."""
        self._unit().reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module.

        Those of sharded parameters too where modules have the unsharded ones at the moment, and,
        with or without ``set_to_none``, what backwards left that is not reduced yet. Outside of a
        backward, waits for reductions under way.
        """
        units = self._units(True)
        for unit in units:
            unit.drop_gradients()
        cast(Any, super()).zero_grad(set_to_none)
        for unit in units:
            for group in unit.groups:
                for parameter in group.parameters if group.unsharded else ():
                    parameter.clear_gradient(set_to_none)

    def reset(self) -> None:
        """Drop the step under way, from any state, so that the next one starts clean.

        For use after an exception in forward or backward: collectives in flight are awaited, every
        unit of the same root is resharded, and gradients that are not reduced yet (those of
        `no_sync` too) are dropped. Sharded gradients stay. Communicates nothing new.
        """
        unit = self._unit()
        if unit.schedule is not None:
            unit.schedule.reset()
        else:
            error = first_error(each.reset for each in self._units(True))
            if error is not None:
                raise error

    def reset_iter_state(self) -> None:
        """Do the same as `reset`, under torch's name."""
        self.reset()

    def reduce_gradients(self) -> None:
        """Reduce what backwards without synchronisation left, in this module and those below.

        One reduce-scatter per group and, with replicas, one all-reduce; afterwards the gradients
        are on the parameters. For schedules of a pipeline, which run many backwards a step.
        """
        schedule = self._unit().schedule
        if schedule is not None:
            schedule.reduce_all(reversed(self._units(True)))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters in this module, sharded or not, as modules have them.

        Between the forwards and backwards of a pipeline schedule those are gathered that it needs:
        one that splits backward in two looks for the gradients of the unsharded parameters.
        """
        # Asked of this unit first: a clip looks at all parameters in every step.
        if recurse and self._unit().options.in_pipeline:
            for unit in self._units(True):
                if unit.awaits_split_backward:
                    unit.gather(in_pass=True)
                    unit.unshard()
        return cast(nn.Module, super()).parameters(recurse)

    def plan_report(self) -> PlanReport:
        """Return bytes, padding and placement of all groups in this module, each with its unit."""
        paths = {self._unit(): ["(root)"]}
        for path, module in cast(nn.Module, self).named_modules():
            unit = unit_of(module)
            if unit is not None and path:
                paths.setdefault(unit, []).append(path)
        return report(
            (", ".join(found), group) for unit, found in paths.items() for group in unit.groups
        )

    def _get_fsdp_state(self) -> Any:
        return noted_state(cast(nn.Module, self))

    def _finish_pipeline(self) -> None:
        # A schedule told the units not to reduce, and reads gradients of sharded parameters next.
        self.reduce_gradients()
        for unit in self._units(True):
            unit.reshard()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Module.to, .double() and the like: convert the shards, then lay them out flat again.
        units = self._units(True)
        for unit in units:
            unit.reshard()
        module = cast(Any, super())._apply(fn, recurse)
        for unit in units:
            unit.adopt(final=len(unit.modules) == 1)  # others of a list may have their turn yet
        return cast(Self, module)


def _no_copy(self: object, _: object) -> NoReturn:
    raise ModuleStateError(
        f"{type(self).__name__} cannot be copied or pickled: its shards are views of one buffer; "
        "copy the module before fully_shard, or use its state_dict"
    )


def show_to_torch(module: FSDPModule) -> None:
    """Show torch's callers what they read of its own sharded modules."""
    passage = module._unit().passage
    state = TorchState(module._finish_pipeline, passage.before_forward, passage.after_forward)
    note_state(cast(nn.Module, module), state)


@cache
def sharded_class(own: type) -> type:
    """Return the class of a sharded ``own``: `FSDPModule` first, then ``own``.

    Torch's `FSDPModule` comes last, for what asks whether a module is one: pipeline stages and
    trainers. All that it does is overridden.
    """
    members = {"__deepcopy__": _no_copy, "__reduce_ex__": _no_copy, "__doc__": own.__doc__}
    return type(f"FSDP{own.__name__}", (FSDPModule, own, fsdp.FSDPModule), members)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module gather parameters and hook backward as forward does.

    Does nothing to a module that is not sharded. Raises `ModuleError` for a method that is not
    there.
    """
    unit = unit_of(module)
    if unit is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise ModuleError(f"{type(module).__name__} has no method {method_name!r}")
    passage, own = unit.passage, getattr(module, method_name)

    @functools.wraps(own)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = passage.before_forward(self, args, kwargs)
            return passage.after_forward(self, args, own(*args, **kwargs))
        finally:
            passage.end_forward(self, args, None)

    setattr(module, method_name, MethodType(gathered, module))


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Accept what torch shares streams between; here all communication has the mesh's groups.

    Raises `ModuleError` for a module that is not sharded.
    """
    for module in modules:
        if unit_of(module) is None:
            raise ModuleError(f"{shown(module)} was not given to fully_shard")
