"""What a sharded module can do besides what it could before."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, Self, cast

from torch import nn

from ._errors import ModuleError, ShardingError
from ._report import PlanReport, report
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
            self._unit.unshard()


class FSDPModule:
    """The class that `fully_shard` mixes into a module's own; never constructed by itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct the module's own class: slices of a sharded container are not sharded."""
        own = cast(Any, cls.__mro__[2])
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
            for each in self._units(True):
                each.reset()

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | None, recurse: bool = True
    ) -> None:
        """Choose as `fully_shard` does, from now on.

        Raises `ShardingError` for anything but True, False or None.
        """
        self._edit(recurse, reshard_after_forward=reshard_after_forward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward (the default), or let them add up unsharded until then.

        Without synchronisation nothing is reduced, and every rank holds whole gradients, which
        ``zero_grad`` does not see; the next backward with it reduces the sum.
        """
        self._edit(recurse, gradient_sync=requires_gradient_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch gradient synchronisation off inside the block, for all units in this module."""
        before = [(unit, unit.options.gradient_sync) for unit in self._units(True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync in before:
                unit.options = replace(unit.options, gradient_sync=sync)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divide the sum of the ranks' gradients by ``factor``; 1.0 leaves the sum.

        None restores the default: the mean over all ranks of the mesh. Raises `ShardingError` for
        anything but a positive finite number or None.
        """
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ShardingError(
                f"factor={factor} must be a positive finite number; 1.0 leaves the sum, None "
                "restores the mean"
            )
        self._edit(recurse, divide=None if factor is None else float(factor))

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

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        if unit is None:
            raise ModuleError(f"{type(self).__name__} was not given to fully_shard")
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        found = [self._unit()]
        for module in cast(nn.Module, self).modules() if recurse else ():
            unit = unit_of(module)
            if unit is not None and unit not in found:
                found.append(unit)
        return found

    def _edit(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.options = replace(unit.options, **changes)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Module.to, .double() and the like: convert the shards, then lay them out flat again.
        units = self._units(True)
        for unit in units:
            unit.reshard()
        module = cast(Any, super())._apply(fn, recurse)
        for unit in units:
            unit.adopt(final=len(unit.modules) == 1)  # others of a list may have their turn yet
        return cast(Self, module)


def _no_deepcopy(self: object, memo: object) -> NoReturn:
    raise ModuleError(
        f"{type(self).__name__} cannot be copied: its shards are views of one buffer; copy the "
        "module before fully_shard, or use its state_dict"
    )


@cache
def sharded_class(own: type) -> type:
    """Return the class of a sharded ``own``: `FSDPModule` first, then ``own``."""
    name = f"FSDP{own.__name__}"
    return type(name, (FSDPModule, own), {"__deepcopy__": _no_deepcopy, "__doc__": own.__doc__})
