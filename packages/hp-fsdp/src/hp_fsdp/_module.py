"""`FSDPModule`, the methods that `fully_shard` adds to a module, and the reports they return."""

import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ._custom import Communication, CustomAllGather, CustomReduceScatter
from ._errors import (
    ArgumentTypeError,
    CallOrderError,
    ModuleError,
    ModuleStateError,
    ModuleTypeError,
    ShardingError,
    StateError,
    UnsupportedError,
    first_error,
    shown,
)
from ._group import ParameterGroup
from ._hooks import end_in_hook, post_forward, pre_forward, run_forward
from ._mesh import new_axis
from ._options import ReductionHook, check_bool
from ._schedule import Schedule, drop_gradients
from ._stats import CommStats
from ._torch import (
    GROUP_MEMORY,
    TORCH_MODULE,
    TorchState,
    note_state,
    noted_state,
    parameters_of,
    registers_memory,
    uncompiled_itself,
)
from ._unit import UNIT_ATTRIBUTE, Unit, unit_of, units_in


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReport:
    """Describes the communication of one parameter; part of a `GroupReport`.

    Args:
        name: Name of the parameter in its module.
        shape: Shape of the unsharded parameter on this rank.
        rows_per_rank: Largest number of rows on any rank. Rows are counted along the sharded dim.
        direct: True if the parameter is all-gathered directly into its unsharded memory. False if
            it is packed with other parameters and copied.

    Examples:
        On 4 ranks:

        >>> report = fully_shard(nn.Linear(8, 8)).plan_report()
        >>> report.groups[0].parameters[0].rows_per_rank
        2
    """

    name: str
    shape: tuple[int, ...]
    rows_per_rank: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Describes the communication of one group: the parameters of a unit that share an all-gather.

    Parameters of a unit are in one group if they have the same dtype and are sharded over the same
    ranks. Parameters with and without all-gather extensions are in different groups.

    Args:
        unit: Path of the sharded module; ``"(root)"`` for the module of the report itself. If
            `fully_shard` was called with a list of modules, all their paths.
        dtype: Name of the dtype of the shards, such as ``"float32"``.
        axes: Mesh axes over which gradients are reduced: a dict from the name to the number of
            ranks.
        parameter_bytes: Bytes of the unsharded parameters.
        padding_bytes: Bytes of padding in each all-gather.
        shard_bytes: Bytes that each rank holds of the parameters and the padding.
        parameters: Reports of the parameters.

    Examples:
        On 4 ranks:

        >>> group = fully_shard(nn.Linear(8, 8)).plan_report().groups[0]
        >>> group.unit, group.parameter_bytes
        ('(root)', 288)
    """

    unit: str
    dtype: str
    axes: dict[str, int]
    parameter_bytes: int
    padding_bytes: int
    shard_bytes: int
    parameters: tuple[ParameterReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Describes the communication of a sharded module. ``print(report)`` prints a table.

    Args:
        groups: Reports for the module and all sharded modules inside it. A group is a set of
            parameters that share an all-gather.

    Examples:
        On 4 ranks:

        >>> len(fully_shard(nn.Linear(8, 8)).plan_report().groups)
        1
    """

    groups: tuple[GroupReport, ...]

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            axes = " x ".join(f"{name}={size}" for name, size in group.axes.items())
            lines.append(
                f"{group.unit}: {group.dtype} over {axes}: {group.parameter_bytes} bytes, "
                f"{group.padding_bytes} of padding, {group.shard_bytes} per rank"
            )
            lines += [
                f"  {p.name} {list(p.shape)}: {p.rows_per_rank} rows per rank, "
                f"{'direct' if p.direct else 'packed'}"
                for p in group.parameters
            ]
        return "\n".join(lines)


def _group_report(unit: str, group: ParameterGroup) -> GroupReport:
    plan, axes = group.layout.plan, group.axes
    return GroupReport(
        unit=unit,
        dtype=str(group.layout.shard.dtype).removeprefix("torch."),
        axes={axis.name: axis.size for axis in axes.named},
        parameter_bytes=plan.parameter_bytes,
        padding_bytes=plan.padding_bytes,
        shard_bytes=plan.shard_numel * group.layout.shard.element_size(),
        parameters=tuple(
            ParameterReport(
                name=parameter.name,
                shape=plan.specs[i].shape,
                rows_per_rank=plan.rows_per_rank(i),
                direct=plan.direct[i],
            )
            for i, parameter in enumerate(group.parameters)
        ),
    )


def _unit(module: object) -> Unit:
    """Return the unit of a sharded module. Raises `ModuleError` if the module is not sharded.

    This is not a method, because a user's class may have a method with the same name.
    """
    unit = unit_of(cast(nn.Module, module))
    if unit is None:
        raise ModuleStateError(f"{type(module).__name__} was not passed to fully_shard")
    return unit


def _units(module: object, recurse: bool) -> list[Unit]:
    own = _unit(module)
    return units_in(cast(nn.Module, module)) if recurse else [own]


def _paths(module: object) -> dict[Unit, str]:
    """Return the path of each unit in ``module``, such as ``"layers.0"``.

    The unit of ``module`` itself has the path ``"(root)"``. If a unit has several modules, their
    paths are joined: ``"layers.0, layers.1"``.
    """
    paths = {_unit(module): ["(root)"]}
    for path, inner in cast(nn.Module, module).named_modules():
        unit = unit_of(inner)
        if unit is not None and path:
            paths.setdefault(unit, []).append(path)
    return {unit: ", ".join(at) for unit, at in paths.items()}


def _edit(module: object, recurse: bool, **changes: Any) -> None:
    edited = [(unit, replace(unit.options, **changes)) for unit in _units(module, recurse)]
    for unit, options in edited:
        unit.options = options


def _groups_for(module: object, comm: object, call: str) -> Sequence[ParameterGroup]:
    if isinstance(comm, type) or not isinstance(comm, Communication):
        raise ArgumentTypeError(
            f"comm is {shown(comm)}; allowed: an object with allocate(size, *, dtype, device) "
            f"and {call}"
        )
    groups = _unit(module).groups
    ranks = {group.axes.shard.ranks for group in groups if group.axes.shard.size > 1}
    if len(ranks) > 1:
        raise ShardingError(
            f"the unit shards parameters over several meshes, of ranks {sorted(ranks)}; a "
            "custom collective is allowed for one mesh only"
        )
    return groups


def _units_of(modules: Iterable[nn.Module], do: str = "prefetch") -> tuple[Unit, ...]:
    units = []
    listed: object = modules
    if isinstance(listed, nn.Module) or not isinstance(listed, Iterable):
        raise ModuleTypeError(f"modules is {shown(listed)}; allowed: a list of sharded modules")
    for module in modules:
        given: object = module
        unit = unit_of(given) if isinstance(given, nn.Module) else None
        if unit is None:
            raise ModuleError(
                f"a module to {do} is {shown(module)}; allowed: modules that were passed to "
                "fully_shard"
            )
        units.append(unit)
    return tuple(units)


class UnshardHandle:
    """Handle of an all-gather in flight, returned by ``FSDPModule.unshard(async_op=True)``.

    Args:
        unit: Internal. Handles are created by `FSDPModule.unshard` only.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8))
        >>> handle = model.unshard(async_op=True)
        >>> handle.wait()
        >>> model.weight.shape
        torch.Size([8, 8])
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters with the module.

        A no-op if `wait` was called before, or if the parameters were resharded in the meantime.
        """
        if self._unit.gathering:
            self._unit.gather()  # repeats the all-gather if an optimizer has stepped
            self._unit.groups.unshard()


class FSDPModule:
    """Base class that `fully_shard` adds to the class of a module.

    Do not construct this class. A unit is the module, or the list of modules, of one `fully_shard`
    call. A method with ``recurse=False`` applies only to the unit of this module. With
    ``recurse=True``, it also applies to the units of all modules inside this module.

    Attributes:
        unshard: Unshards the parameters of this unit.
        reshard: Frees the unsharded parameters of this unit.
        no_sync: Context in which gradients accumulate without communication.
        reset: Aborts a step after an exception.
        plan_report: Describes the communication of this module.
        comm_stats: Counts the collectives of this module.

    Raises:
        ModuleError: The class is constructed directly.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8))
        >>> isinstance(model, FSDPModule), isinstance(model, nn.Linear)
        (True, True)
        >>> with model.no_sync():
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> model.weight.grad is None
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct an instance of the module's original class, which is not sharded.

        For example, a slice of a sharded ``nn.Sequential`` is a plain ``nn.Sequential``.
        """
        if cls is FSDPModule:
            raise ModuleTypeError("FSDPModule cannot be constructed; give a module to fully_shard")
        own = cast(Any, cls.__bases__[1])
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return cast(Self, module)

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module with unsharded parameters.

        Forward hooks that were registered after `fully_shard` run after the reshard, as with torch.
        """
        own: Any = self
        forward: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return run_forward(own.__dict__[UNIT_ATTRIBUTE], own, forward, args, kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a forward hook, as ``nn.Module.register_forward_hook`` does.

        A hook that is registered after `fully_shard` runs after the reshard, as with torch. The
        module then has its sharded parameters, unless they stay unsharded after forward.

        Args:
            *args: Positional arguments of ``nn.Module.register_forward_hook``.
            **kwargs: Keyword arguments of ``nn.Module.register_forward_hook``.

        Returns:
            A handle. Its ``remove()`` removes the hook.
        """
        own: Any = self
        end_in_hook(own.__dict__[UNIT_ATTRIBUTE], own)
        return cast(RemovableHandle, cast(Any, super()).register_forward_hook(*args, **kwargs))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard the parameters of this unit, with one all-gather per dtype.

        Units of modules inside this module are not affected.

        Args:
            async_op: If True, return before the all-gather has finished. The ``wait()`` of the
                handle, or the next forward, completes the all-gather.

        Returns:
            An `UnshardHandle` if ``async_op`` is True, else None.

        Raises:
            ModuleError: The module is not sharded.
        """
        check_bool("async_op", async_op)
        unit = _unit(self)
        unit.gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Register the sharded parameters of this unit, and free the unsharded parameters.

        Units of modules inside this module are not affected.

        Raises:
            ModuleError: `fully_shard` was not applied to this module.
        """
        unit = _unit(self)
        unit.reshard()
        unit.groups.finish_copies()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module.

        This includes gradients that are not reduced yet, and gradients of sharded parameters while
        the unsharded parameters are registered. Outside of a backward, the method waits for
        reductions in flight.

        Args:
            set_to_none: If True, set gradients to None. If False, set them to zero. Gradients that
                are not reduced yet are dropped in both cases.
        """
        units = _units(self, True)
        drop_gradients(units)
        cast(Any, super()).zero_grad(set_to_none)
        for unit in units:
            for group in unit.groups:
                for parameter in group.parameters if group.unsharded else ():
                    parameter.clear_gradient(set_to_none)

    def reset(self) -> None:
        """Abort the current step, in any state, so that the next step starts clean.

        Call this method after an exception in forward or backward. It waits for collectives in
        flight, reshards all units of the model, and drops gradients that are not reduced yet,
        including gradients from `no_sync`. Sharded gradients are kept. It starts no communication.
        """
        units = _units(self, True)
        # Inner units that ran without this module have separate schedules.
        each: list[Schedule | Unit] = [unit.schedule or unit for unit in units]
        for order in {unit.order for unit in units if unit.order is not None}:
            order.resets += 1
            # Other ranks may resume without a reset, so the next collectives of this rank must be
            # compared with theirs. This runs before the resets below, because these may raise.
            order.forget()
        if (error := first_error([one.reset for one in dict.fromkeys(each)])) is not None:
            raise error

    def reset_iter_state(self) -> None:
        """Abort the current step, as `reset` does. torch uses this name."""
        self.reset()

    def reduce_gradients(self) -> None:
        """Reduce the gradients accumulated without communication, for all units in this module.

        Communicates one reduce-scatter per unit and dtype, and one all-reduce if there are
        replicas. Afterwards ``parameter.grad`` has the result. Pipeline schedules call this method
        after the backwards of a step.
        """
        of: dict[Schedule, list[Unit]] = {}
        for unit in reversed(_units(self, True)):
            if unit.schedule is not None:
                of.setdefault(unit.schedule, []).append(unit)
        for schedule, units in of.items():
            schedule.reduce_all(units)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the registered parameters of this module, sharded or unsharded.

        Some pipeline schedules split a backward into two parts, for the gradients of inputs and of
        weights. During such a schedule, this method first unshards all units with an incomplete
        backward. This communicates, so either all ranks or no ranks have to call the method.

        Args:
            recurse: If True, include the parameters of all modules inside this one.

        Returns:
            An iterator over parameters.

        Raises:
            ModuleError: The module is not sharded.
        """
        # Gradient clipping calls this method in every step, so only one unit is checked first.
        if recurse and _unit(self).options.in_pipeline:
            for unit in _units(self, True):
                if unit.awaits_split_backward:
                    unit.gather(by_schedule=True)
                    unit.groups.unshard()
        return cast(nn.Module, super()).parameters(recurse)

    def plan_report(self) -> PlanReport:
        """Describe the communication of this module. Communicates nothing.

        Returns:
            A report with bytes, padding and shards of all parameters that share an all-gather. It
            is the same on all ranks. ``print(report)`` prints a table.

        Raises:
            ModuleError: The module is not sharded.

        Examples:
            On 4 ranks:

            >>> group = fully_shard(nn.Linear(8, 8, bias=False)).plan_report().groups[0]
            >>> group.dtype, group.parameter_bytes
            ('float32', 256)
        """
        found = [(path, group) for unit, path in _paths(self).items() for group in unit.groups]
        return PlanReport(groups=tuple(_group_report(path, group) for path, group in found))

    def comm_stats(self, *, reset: bool = False) -> CommStats:
        """Return the number and the bytes of the collectives of all units in this module.

        Every collective is counted when it starts, on this rank only. For ``n`` ranks of its axis:

        - An all-gather of ``b`` bytes per rank counts ``(n - 1) * b`` bytes. All-gathers of forward
          and backward are in one row.
        - A reduce-scatter with an output of ``b`` bytes counts ``(n - 1) * b`` bytes.
        - An all-reduce of ``b`` bytes counts ``2 * b * (n - 1) // n`` bytes.
        - A collective over one rank is not counted.

        Bytes include padding. They do not include the messages in which ranks compare the order of
        their collectives, or the sizes that all-gather extensions send.

        Args:
            reset: If True, set all counts of these units to zero afterwards.

        Returns:
            The counts since `fully_shard` or the last reset. ``print(stats)`` prints a table.

        Raises:
            ModuleError: The module is not sharded.

        Examples:
            On 4 ranks:

            >>> model = fully_shard(nn.Linear(8, 8, bias=False))
            >>> model(torch.ones(2, 8)).sum().backward()
            >>> [(row.collective, row.count) for row in model.comm_stats(reset=True).rows]
            [('all_gather', 1), ('reduce_scatter', 1)]
            >>> model.comm_stats().rows
            ()
        """
        check_bool("reset", reset)
        paths = _paths(self)
        rows = [row for unit, path in paths.items() for row in unit.groups.comm.stats(path)]
        for unit in paths if reset else ():
            unit.groups.comm.reset()
        return CommStats(rows=tuple(rows))

    def set_comm_timing(self, enable: bool) -> None:
        """Set whether `comm_stats` has the duration of collectives, for all units in this module.

        The duration of a collective ends when its result is waited for. On a CPU, it is the host
        time from the start of the collective to the end of its ``wait``. On accelerators, it is the
        time between two events: one when the collective starts, one after the ``wait`` of the
        stream that needs the result. So it includes the time in which a prefetched result is not
        needed yet, and waiting for other ranks. Collectives that start while timing is disabled are
        counted, but not timed.

        Args:
            enable: True to time collectives from now on. Initially False.

        Raises:
            ModuleError: The module is not sharded.

        Examples:
            On 4 ranks:

            >>> model = fully_shard(nn.Linear(8, 8))
            >>> model.set_comm_timing(True)
            >>> _ = model(torch.ones(2, 8))
            >>> model.comm_stats().rows[0].seconds > 0
            True
        """
        check_bool("enable", enable)
        for unit in _units(self, True):
            unit.groups.comm.timing = enable

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | None, recurse: bool = True
    ) -> None:
        """Set whether parameters are resharded after forward.

        Args:
            reshard_after_forward: True, False or None, as in `fully_shard`. An integer is not
                allowed.
            recurse: If True, apply to all units in this module.

        Raises:
            ShardingError: ``reshard_after_forward`` is not True, False or None.
        """
        chosen: object = reshard_after_forward
        if not isinstance(chosen, bool | None):
            raise ShardingError(
                f"reshard_after_forward is {shown(chosen)}; allowed: True, False and None (the "
                "default); pass an integer to fully_shard instead"
            )
        _edit(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are resharded after backward.

        If parameters stay unsharded, the next forward repeats the all-gather after an optimizer
        step or an in-place operation on the shards. In-place operations are detected by the version
        counters of the shards. Outside of an optimizer step, writes to ``parameter.data`` and by
        ``torch._foreach_*`` are not detected: call `reshard` after them.

        Args:
            reshard_after_backward: True (the default) frees the unsharded parameters after
                backward. False keeps them for the next forward.
            recurse: If True, apply to all units in this module.
        """
        _edit(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards the parameters of this unit.

        Units of modules inside this module are not affected.

        Args:
            unshard_in_backward: False if backward does not need the parameters of this unit.
                Initially True.
        """
        _edit(self, False, unshard_in_backward=unshard_in_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients. Disable it to accumulate without communication.

        If disabled, every rank accumulates unsharded gradients outside of ``parameter.grad``. The
        next backward with reduction reduces the accumulated sum. ``zero_grad`` of the module drops
        accumulated gradients; ``zero_grad`` of an optimizer does not.

        Args:
            requires_gradient_sync: True (the default) reduces gradients in backward.
            recurse: If True, apply to all units in this module.
        """
        sync = requires_gradient_sync
        _edit(self, recurse, gradient_sync=sync, all_reduce=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over replicas.

        If disabled, backward only reduce-scatters. The reduce-scattered gradients accumulate
        outside of ``parameter.grad`` until a backward all-reduces them. The setting has no effect
        if there are no replicas.

        Args:
            requires_all_reduce: True (the default) all-reduces gradients in backward.
            recurse: If True, apply to all units in this module.
        """
        _edit(self, recurse, all_reduce=requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable the reduction of gradients inside a ``with`` block, for all units in this module.

        See `set_requires_gradient_sync`.
        """
        before = [(unit, unit.options) for unit in _units(self, True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, was in before:
                unit.options = replace(
                    unit.options, gradient_sync=was.gradient_sync, all_reduce=was.all_reduce
                )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one of the step, for all units in this module.

        The last backward waits for all reductions and assigns ``parameter.grad``. Earlier backwards
        do not.

        Args:
            is_last_backward: True (the default) if the next backward is the last one.
        """
        _edit(self, True, is_last_backward=is_last_backward)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Set the number by which the sum of gradients over ranks is divided.

        Args:
            factor: A finite number above 0; 1.0 gives the sum. With None, ``gradient_reduction`` of
                `fully_shard` selects the mean or the sum.
            recurse: If True, apply to all units in this module.

        Raises:
            ShardingError: ``factor`` is neither None nor a finite number above 0.
        """
        given: object = factor
        if isinstance(given, bool) or not isinstance(given, int | float | None):
            raise ArgumentTypeError(f"factor is {shown(given)}; allowed: numbers above 0 and None")
        try:
            divide = None if factor is None else float(factor)
        except OverflowError:  # the int is too large for a float
            divide = math.inf
        _edit(self, recurse, divide=divide)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`. The method exists for compatibility with older torch.

        Args:
            factor: See `set_gradient_divide_factor`.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether a mean of gradients is always computed as a sum and a separate division.

        Args:
            enable: True to sum and divide. False (the default) uses the average of the backend if
                the backend has one.
        """
        _edit(self, False, force_sum=enable)

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], Any] | None,
        *,
        stream: torch.Stream | torch.cpu.Stream | None = None,
    ) -> None:
        """Set a function that is called with the reduced gradients of this unit.

        Each reduction calls the hook once per group of the unit; see `GroupReport`. The hook
        receives one flat tensor: the result of the all-reduce if there are replicas, else of the
        reduce-scatter. It may change this tensor in place. Units of modules inside this module are
        not affected.

        Args:
            hook: A function of one tensor, or None to remove the hook.
            stream: Stream on which the hook runs. Defaults to the stream of the reduction. On CPU
                it is ignored, and the hook runs synchronously.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``hook`` or ``stream`` has a wrong type; or ``stream`` is given although
                gradients of this unit are all-reduced over replicas, because the mesh has a
                replicate axis or ``min_shard_numel`` leaves parameters unsharded.
        """
        unit = _unit(self)
        if hook is None:
            _edit(self, False, hook=None)
            return
        if not callable(hook):
            raise ArgumentTypeError(
                f"hook is {shown(hook)}; allowed: a function of a tensor, and None"
            )
        summed = {axis.size > 1 for group in unit.groups for axis in group.axes.replicate}
        if stream is not None and True in summed:
            raise ShardingError(
                "a stream for the hook is allowed only if gradients are not summed over "
                "replicas: on a mesh of one axis, without replicated parameters (min_shard_numel)"
            )
        on_cpu = all(group.config.device.type == "cpu" for group in unit.groups)
        if on_cpu and isinstance(stream, torch.cpu.Stream):
            stream = None
        asked: object = stream
        if not isinstance(asked, torch.Stream | None):
            also = ", a torch.cpu.Stream" if on_cpu else ""
            raise ArgumentTypeError(
                f"stream is {shown(asked)}; allowed: a torch.Stream{also} and None"
            )
        _edit(self, False, hook=ReductionHook(function=hook, stream=asked))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Set the modules to prefetch when the forward of this module begins.

        Args:
            modules: Sharded modules, in the order of their all-gathers. None restores the default:
                the next unit in the order of the first step is prefetched.

        Raises:
            ModuleError: This module, or one of ``modules``, is not sharded.
        """
        _unit(self).forward_prefetch = None if modules is None else _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Set the modules to prefetch when the backward of this module begins.

        Args:
            modules: Sharded modules, in the order of their all-gathers. None restores the default:
                the previous unit in the order of the first step is prefetched.

        Raises:
            ModuleError: This module, or one of ``modules``, is not sharded.
        """
        _unit(self).backward_prefetch = None if modules is None else _units_of(modules)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept only True. The method exists for compatibility with torch.

        Unused parameters always take part in reduce-scatters. A parameter that only some ranks used
        contributes zeros on the other ranks. A parameter that no rank used keeps ``grad is None``.

        Args:
            reduce_scatter_unused_params: Has to be True.
            recurse: Has no effect.

        Raises:
            UnsupportedError: ``reduce_scatter_unused_params`` is not True.
        """
        if reduce_scatter_unused_params is not True:
            raise UnsupportedError(
                f"reduce_scatter_unused_params is {shown(reduce_scatter_unused_params)}; only True "
                "is allowed, because all ranks have to run the same collectives"
            )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many buffers of packed gradients may exist at once.

        With more buffers, more reduce-scatters overlap with backward, and more memory is used. If
        units have different settings, the largest number applies. On accelerators, the limit has
        two exceptions: the buffer that a unit fills during its backward (``grads="accumulate"``)
        does not count, and the buffers of one unit with several dtypes or meshes may exist
        together.

        Args:
            max_input_buffers: An integer of at least 1. Initially 1.
            recurse: If True, apply to all units in this module.

        Raises:
            ShardingError: ``max_input_buffers`` is not an integer of at least 1.
        """
        _edit(self, recurse, in_flight=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reduce-scatters use other process groups than all-gathers.

        The first call with ``enable=True`` creates one process group for each set of ranks over
        which parameters are sharded. All of these ranks have to make this call. Later calls reuse
        the groups.

        Args:
            enable: True to use separate groups for reduce-scatters. False to use the groups of the
                mesh for all collectives.
            recurse: If True, apply to all units in this module.
        """
        check_bool("enable", enable)
        known = [group for unit in _units(self, True) for group in unit.groups]
        made = {group.own_axis.ranks: group.own_axis for group in known if group.own_axis}
        for group in (group for unit in _units(self, recurse) for group in unit.groups):
            group.reduce_axes, axis = group.axes, group.axes.shard
            if enable and axis.size > 1:
                if axis.ranks not in made:
                    made[axis.ranks] = new_axis(axis, axis.ranks, axis.name)
                group.own_axis = made[axis.ranks]
                group.reduce_axes = replace(group.axes, shard=group.own_axis)

    def set_post_optim_event(self, event: torch.Event | torch.cpu.Event | None) -> None:
        """Set an event that the device waits for when the next forward begins.

        Later forwards do not wait for the event.

        Args:
            event: An event, such as one that was recorded after the optimizer step. Pass None to
                remove an event that was set before.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``event`` has no ``wait`` method.
            StateError: ``event`` is given before the first forward.
        """
        schedule = _unit(self).schedule
        if event is None:
            if schedule is not None:
                schedule.starts_after = None
            return
        if schedule is None:
            raise StateError("an event after an optimizer step needs a forward before it")
        given: object = event
        if not callable(getattr(given, "wait", None)):
            raise ArgumentTypeError(f"event is {shown(given)}; allowed: a torch.Event and None")
        schedule.starts_after = event

    def set_custom_all_gather(self, comm: Communication) -> None:
        """Set an object that performs the all-gathers of this unit.

        The object is called once per group of the unit, with tensors of one dtype; see
        `GroupReport`. Units of modules inside this module are not affected.

        Args:
            comm: An object with the interface of torch's ``AllGather``. With prefetch, two
                all-gathers are in flight at once, so ``comm.allocate`` has to return different
                memory for them. Otherwise the second all-gather raises `StateError`.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``comm`` does not have this interface, or the parameters of the unit are
                sharded over several meshes.
        """
        for group in _groups_for(
            self, comm, "__call__(output_tensor, input_tensor, group, async_op)"
        ):
            group.gathers = CustomAllGather(comm)
        _unit(self).forget_comparisons()

    def set_custom_reduce_scatter(self, comm: Communication) -> None:
        """Set an object that performs the reduce-scatters of this unit.

        Units of modules inside this module are not affected.

        Args:
            comm: An object with the interface of torch's ``ReduceScatter``. Every call of
                ``comm`` has the reduction "sum". For a mean, the result is divided afterwards.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``comm`` does not have this interface, or the parameters of the unit are
                sharded over several meshes.
        """
        call = "__call__(output_tensor, input_tensor, group, op, async_op)"
        for group in _groups_for(self, comm, call):
            group.scatters = CustomReduceScatter(comm, group.collectives)
        _unit(self).forget_comparisons()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether the collectives of this unit use memory that the process group allocates.

        If enabled, each collective needs one copy before and one after. The setting has no effect
        if the backend cannot allocate memory. Units of modules inside this module are not affected.

        Args:
            enable: True to use memory of the process group.

        Raises:
            ModuleError: The module is not sharded.
            StateError: `set_custom_all_gather` or `set_custom_reduce_scatter` was called before.
        """
        check_bool("enable", enable)
        groups = _unit(self).groups
        for way in (way for group in groups for way in (group.gathers, group.scatters)):
            if isinstance(way, CustomAllGather | CustomReduceScatter) and not isinstance(
                way.given, GROUP_MEMORY
            ):
                raise CallOrderError(
                    f"this unit communicates with a {type(way.given).__name__}, which allocates "
                    "its own memory; call set_allocate_memory_from_process_group_for_comm before "
                    "it is set"
                )
        for group in groups:
            group.gathers = group.scatters = group.collectives
            if enable and registers_memory(group.axes.shard.group, group.config.device):
                gather, scatter = GROUP_MEMORY
                group.gathers = CustomAllGather(gather(group.axes.shard.group))
                given = scatter(group.reduce_axes.shard.group)
                group.scatters = CustomReduceScatter(given, group.collectives)
        _unit(self).forget_comparisons()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Raise an error. Not supported: use the argument ``collectives`` of `fully_shard` instead.

        Args:
            backend: Has no effect.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "set_symm_mem_for_comm is not supported; pass collectives= to fully_shard"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing, because all-gathers are always asynchronous.

        The method exists for compatibility with torch.
        """

    def _get_fsdp_state(self) -> Any:
        return noted_state(cast(nn.Module, self))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # ``Module.to`` and similar methods convert each shard separately. `Unit.reset_sharded` then
        # copies the shards to one buffer again.
        units = _units(self, True)
        groups = [group for unit in units for group in unit.groups]
        for unit in units:
            if unit.schedule is not None:
                unit.schedule.finish_early()
            unit.reshard_and_wait()
        try:
            # torch cannot swap a frozen parameter while its AccumulateGrad node is alive.
            for group in groups:
                group.stop_watching()
            module = cast(Any, super())._apply(fn, recurse)
        finally:
            for group in groups:
                group.watch_sharded()
        for unit in units:
            unit.reset_sharded(
                final=len(unit.modules) == 1
            )  # modules of a list are converted one by one
        return cast(Self, module)


def _no_copy(self: object, _: object) -> NoReturn:
    raise ModuleStateError(
        f"{type(self).__name__} cannot be copied or pickled: its shards are views of one buffer; "
        "copy the module before fully_shard, or use its state_dict"
    )


def _finish_pipeline(module: FSDPModule) -> None:
    # The pipeline schedule disabled reductions in backward, and reads the sharded gradients next.
    module.reduce_gradients()
    for unit in _units(module, True):
        unit.reshard()


def attach_torch_state(module: FSDPModule) -> None:
    """Attach a `TorchState` to ``module``, for code in torch that reads a module's FSDP state."""
    unit, own = _unit(module), cast(nn.Module, module)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return post_forward(unit, own, output)

    note_state(
        own, TorchState(partial(_finish_pipeline, module), partial(pre_forward, unit), after)
    )


def hidden_names(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes that methods of `FSDPModule` would hide."""
    own: list[Container[str]] = [
        vars(each) for each in type(module).__mro__ if each not in (nn.Module, TORCH_MODULE)
    ]
    registered = (module.named_children(), module.named_buffers(recurse=False))
    own += [vars(module), parameters_of(module), *map(dict, registered)]
    return [name for name in _names() if any(name in each for each in own)]


@cache
def _names() -> list[str]:
    names = {name for name in dir(FSDPModule) if not name.startswith("__")}
    return sorted(names.difference(dir(nn.Module)))


_SAVE_RECIPE = """save_pretrained of a sharded module needs state_dict=, because the shards of one \
rank cannot be saved alone. Gather the parameters first, on all ranks:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    model.save_pretrained(path, state_dict=state)"""


def _checked_save(save: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap ``save_pretrained`` so that it raises on all ranks if ``state_dict`` is missing.

    Returns None if ``save`` has no argument ``state_dict``. Without the check, only the rank that
    writes files would raise.
    """
    signature = inspect.signature(save)
    if "state_dict" not in signature.parameters:
        return None

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return save(*args, **kwargs)  # raises with the name of the function
        if given.get("state_dict") is None and not given.get("distributed_checkpoint"):
            raise UnsupportedError(_SAVE_RECIPE)
        return save(*args, **kwargs)

    return save_pretrained


@cache
def sharded_class(own: type) -> type:
    """Return the class of a sharded module of class ``own``.

    It inherits from `FSDPModule`, ``own``, and torch's ``FSDPModule``, in this order. torch's class
    is only for ``isinstance`` checks, as in pipeline stages. All of its methods are overridden.
    """
    members = {"__deepcopy__": _no_copy, "__reduce_ex__": _no_copy, "__doc__": own.__doc__}
    save = getattr(own, "save_pretrained", None)  # for models of transformers
    if inspect.isfunction(save) and (checked := _checked_save(save)) is not None:
        members["save_pretrained"] = checked
    return type(f"FSDP{own.__name__}", (FSDPModule, own, TORCH_MODULE), members)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module unshard parameters and reduce gradients, like ``forward``.

    A no-op if the module is not sharded.

    Args:
        module: A module.
        method_name: Name of the method, which is replaced on this module.

    Raises:
        ModuleError: ``module`` is not a module, or has no such method.
        ShardingError: ``method_name`` is not a string.

    Examples:
        On 4 ranks:

        >>> class Encoder(nn.Linear):
        ...     def encode(self, x):
        ...         return self.forward(x).tanh()
        >>> model = fully_shard(Encoder(8, 8))
        >>> register_fsdp_forward_method(model, "encode")
        >>> model.encode(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise ModuleTypeError(f"module is {shown(given)}; allowed: an nn.Module")
    if not isinstance(method_name, str):
        raise ArgumentTypeError(f"method_name is {shown(method_name)}; allowed: a method's name")
    unit = unit_of(module)
    if unit is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise ModuleError(f"{type(module).__name__} has no method {method_name!r}")
    own = getattr(module, method_name)

    @functools.wraps(own)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return post_forward(unit, self, own(*args, **kwargs))

        return run_forward(unit, self, forward, args, kwargs)

    setattr(module, method_name, MethodType(gathered, module))


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Check that modules are sharded. The function exists for compatibility with torch.

    torch's function shares streams between modules. In this package, all units under one root share
    their streams, and other roots have their own, so nothing has to be done.

    Args:
        modules: Sharded modules.

    Raises:
        ModuleError: ``modules`` is not a list, or one of the modules is not sharded.

    Examples:
        On 4 ranks:

        >>> share_comm_ctx([fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8))])
    """
    _units_of(modules, "share streams with")
