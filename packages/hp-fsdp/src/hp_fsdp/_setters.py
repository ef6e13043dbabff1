"""The setters of a sharded module: each edits the options of its unit, or of all units below."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ._axes import DataAxes, new_axis
from ._errors import (
    ModuleError,
    ModuleStateError,
    ShardingError,
    StateError,
    UnsupportedError,
    shown,
)
from ._options import ReductionHook
from ._unit import Unit, unit_of


class Setters:
    """How the units of a module compute and communicate from now on."""

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | None, recurse: bool = True
    ) -> None:
        """Choose as `fully_shard` does, from now on.

        Raises `ShardingError` for anything but True, False or None.
        """
        chosen: object = reshard_after_forward
        if not isinstance(chosen, bool | None):
            raise ShardingError(
                f"reshard_after_forward is {shown(chosen)}; legal are True, False and None (the "
                "default); an int, the number of ranks to reshard to, only fully_shard takes"
            )
        self._edit(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters up after backward (the default), or keep them for the next forward.

        A forward gathers anew what an optimizer wrote to in between.
        """
        self._edit(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather parameters for backward (the default), or not: it needs none of this unit's."""
        self._edit(False, unshard_in_backward=unshard_in_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward (the default), or let them add up unsharded until then.

        Without synchronisation nothing is reduced, and every rank holds whole gradients, which no
        parameter shows; the next backward with it reduces the sum. ``zero_grad`` of the module
        drops them, that of torch's optimizers does not see them.
        """
        sync = requires_gradient_sync
        self._edit(recurse, gradient_sync=sync, all_reduce=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum gradients over the replicas in backward (the default), or only reduce-scatter them.

        What is scattered adds up, seen by nobody, until a backward sums it.
        """
        self._edit(recurse, all_reduce=requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch gradient synchronisation off inside the block, for all units in this module."""
        before = [(unit, unit.options) for unit in self._units(True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, was in before:
                unit.options = replace(
                    unit.options, gradient_sync=was.gradient_sync, all_reduce=was.all_reduce
                )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one of the step, for all units below.

        Only the last one waits for reductions and puts gradients on the parameters.
        """
        self._edit(True, is_last_backward=is_last_backward)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divide the sum of the ranks' gradients by ``factor``; 1.0 leaves the sum.

        None restores what ``gradient_reduction`` of `fully_shard` says: the mean over all ranks of
        the mesh, or the sum. Without ``recurse`` units below keep theirs. Raises `ShardingError`
        for anything but a positive finite number or None.
        """
        self._edit(recurse, divide=None if factor is None else float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as `set_gradient_divide_factor`, under the name that came before it."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Only sum while communicating, and divide afterwards."""
        self._edit(False, force_sum=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], Any], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` once per group and reduction with the flat reduced gradient.

        That is the result of the reduce-scatter, or of the all-reduce where there are replicas;
        what the hook writes to it ends in the gradients. With ``stream`` it runs there. Raises
        `ShardingError` for a stream where this package reduces over replicas itself.
        """
        unit = self._unit()
        if stream is not None and any(group.axes.replicate for group in unit.groups):
            raise ShardingError("a stream for the hook is legal only on a mesh of one axis")
        self._edit(False, hook=ReductionHook(function=hook, stream=stream))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Start the gathers of ``modules`` when this module's forward begins, instead of the next.

        Raises `ModuleError` for a module that is not sharded.
        """
        self._unit().forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Start the gathers of ``modules`` when this module's backward begins.

        Raises `ModuleError` for a module that is not sharded.
        """
        self._unit().backward_prefetch = _units_of(modules)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept True: parameters that a rank did not use always take part, with zeros.

        Those that no rank used keep ``grad is None``.
        """
        if reduce_scatter_unused_params is not True:
            raise UnsupportedError(
                f"reduce_scatter_unused_params is {shown(reduce_scatter_unused_params)}; only True "
                "is legal: ranks communicate alike, whatever parameters each of them used"
            )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let so many packed gradients be alive at once, 2 by default; the largest number counts.

        Raises `ShardingError` for anything but 1, 2, ...
        """
        self._edit(recurse, in_flight=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over process groups of their own, one per set of ranks, or over the mesh's again.

        Making a group waits for all of its ranks.
        """
        made: dict[tuple[int, ...], DataAxes] = {}
        for unit in self._units(recurse):
            for group in unit.groups:
                axes = group.axes
                if enable and axes.shard.size > 1 and axes.shard.ranks not in made:
                    axis = new_axis(axes.shard, axes.shard.ranks, axes.shard.name)
                    made[axes.shard.ranks] = replace(axes, shard=axis)
                found = made.get(axes.shard.ranks)
                group.reduce_axes = axes if found is None else replace(axes, shard=found.shard)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next pass begin on its device only after ``event``; for one pass."""
        schedule = self._unit().schedule
        if schedule is None:
            raise StateError("an event after an optimizer step needs a forward before it")
        schedule.starts_after = event

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Raise `UnsupportedError`: `fully_shard` takes ``collectives=`` instead."""
        _unsupported("set_custom_all_gather", "pass collectives= to fully_shard")

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Raise `UnsupportedError`: `fully_shard` takes ``collectives=`` instead."""
        _unsupported("set_custom_reduce_scatter", "pass collectives= to fully_shard")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept False; the memory of gathers is that of the parameters."""
        if enable:
            _unsupported(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "pass collectives= to fully_shard",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise `UnsupportedError`: `fully_shard` takes ``collectives=`` instead."""
        _unsupported("set_symm_mem_for_comm", "pass collectives= to fully_shard")

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        if unit is None:
            raise ModuleStateError(f"{type(self).__name__} was not given to fully_shard")
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        found = [self._unit()]
        for module in cast(nn.Module, self).modules() if recurse else ():
            unit = unit_of(module)
            if unit is not None and unit not in found:
                found.append(unit)
        return found

    def _edit(self, recurse: bool, **changes: Any) -> None:
        edited = [(unit, replace(unit.options, **changes)) for unit in self._units(recurse)]
        for unit, options in edited:
            unit.options = options


def _unsupported(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not supported; {instead}")


def _units_of(modules: Iterable[nn.Module]) -> tuple[Unit, ...]:
    units = []
    for module in modules:
        given: object = module
        unit = unit_of(given) if isinstance(given, nn.Module) else None
        if unit is None:
            raise ModuleError(
                f"a module to prefetch is {shown(module)}; legal are modules that were given to "
                "fully_shard"
            )
        units.append(unit)
    return tuple(units)
