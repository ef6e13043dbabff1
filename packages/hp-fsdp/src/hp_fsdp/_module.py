"""What a sharded module can do besides what it could before: setters, reports, and more."""

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
from ._schedule import Schedule, drop_gradients, release_gradients
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
    """Communication of one parameter.

    Args:
        name: Name of the parameter in its unit.
        shape: Unsharded local shape.
        rows_per_rank: Number of rows of each shard.
        direct: True if the parameter is all-gathered directly into place; False if it is packed.
        unfused: Reason why matrix products do not write the gradient themselves; ``""`` if they do.

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
    unfused: str

    @property
    def fused(self) -> bool:
        """Whether matrix products write the gradient into the packed gradients themselves."""
        return not self.unfused


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Communication of one group: parameters that are all-gathered together.

    Args:
        unit: Path of the group's unit in the module; ``"(root)"`` for the module itself. For a list
            of modules, all paths.
        dtype: Dtype of the shards.
        axes: Number of ranks of each axis over which gradients are reduced, by name.
        parameter_bytes: Bytes of the unsharded parameters.
        padding_bytes: Bytes of padding in each all-gather.
        shard_bytes: Bytes of the shard of each rank.
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
    """Communication of a sharded module. ``str(report)`` is a table.

    Args:
        groups: Reports of all groups of the module and of the modules in it.

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
                f"{'direct' if p.direct else 'packed'}, "
                f"gradient {'fused' if p.fused else f'not fused: {p.unfused}'}"
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
                shape=group.layout.specs[i].shape,
                rows_per_rank=plan.rows_per_rank(i),
                direct=plan.direct[i],
                unfused=group.unfused[i],
            )
            for i, parameter in enumerate(group.parameters)
        ),
    )


def _unit(module: object) -> Unit:
    """Return the unit of a sharded module: no method, whose name a user's class may have too."""
    unit = unit_of(cast(nn.Module, module))
    if unit is None:
        raise ModuleStateError(f"{type(module).__name__} was not given to fully_shard")
    return unit


def _units(module: object, recurse: bool) -> list[Unit]:
    own = _unit(module)
    return units_in(cast(nn.Module, module)) if recurse else [own]


def _edit(module: object, recurse: bool, **changes: Any) -> None:
    edited = [(unit, replace(unit.options, **changes)) for unit in _units(module, recurse)]
    for unit, options in edited:
        unit.options = options


def _groups_for(module: object, comm: object, call: str) -> Sequence[ParameterGroup]:
    if isinstance(comm, type) or not isinstance(comm, Communication):
        raise ArgumentTypeError(
            f"comm is {shown(comm)}; legal is an object with allocate(size, *, dtype, device) "
            f"and {call}"
        )
    groups = _unit(module).groups
    ranks = {group.axes.shard.ranks for group in groups if group.axes.shard.size > 1}
    if len(ranks) > 1:
        raise ShardingError(
            f"the unit shards parameters over several meshes, of ranks {sorted(ranks)}; one "
            "object to communicate by is legal only for one mesh"
        )
    return groups


def _units_of(modules: Iterable[nn.Module], do: str = "prefetch") -> tuple[Unit, ...]:
    units = []
    listed: object = modules
    if isinstance(listed, nn.Module) or not isinstance(listed, Iterable):
        raise ModuleTypeError(f"modules is {shown(listed)}; legal is a list of sharded modules")
    for module in modules:
        given: object = module
        unit = unit_of(given) if isinstance(given, nn.Module) else None
        if unit is None:
            raise ModuleError(
                f"a module to {do} is {shown(module)}; legal are modules that were given to "
                "fully_shard"
            )
        units.append(unit)
    return tuple(units)


class UnshardHandle:
    """Handle of an all-gather in flight; `FSDPModule.unshard` returns it.

    Args:
        unit: The unit to gather.

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

        A no-op if it was called before, or if the unit was resharded in the meantime.
        """
        if self._unit.gathering:
            self._unit.gather()  # anew, if an optimizer stepped since
            self._unit.unshard()


class FSDPModule:
    """Base class that `fully_shard` adds to the class of a module.

    Do not construct it. Methods with ``recurse`` apply to this unit only if it is False, and to the
    units of all modules inside this module too if it is True.

    Raises:
        ModuleError: It is constructed directly.

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
        """Construct the module's own class: slices of a sharded container are not sharded."""
        if cls is FSDPModule:
            raise ModuleTypeError("an FSDPModule is made by fully_shard; give it a module")
        own = cast(Any, cls.__bases__[1])
        module = own.__new__(own, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return cast(Self, module)

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on gathered parameters.

        Forward hooks that were registered after `fully_shard` run after the unit's own, and see the
        sharded parameters, as under torch's.
        """
        own: Any = self
        forward: Callable[..., Any] = super().__call__  # type: ignore[misc]
        return run_forward(own.__dict__[UNIT_ATTRIBUTE], own, forward, args, kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a forward hook, as ``nn.Module.register_forward_hook`` does.

        A hook that is registered after `fully_shard` runs after the unit's own hooks. It sees the
        sharded parameters, as in torch.

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
        """Gather the parameters of this unit, with one all-gather per dtype.

        It applies to this unit only.

        Args:
            async_op: If True, return at once. The ``wait()`` of the handle, or the next forward,
                completes the all-gather.

        Returns:
            A handle if ``async_op`` is True, else None.

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
        """Register the sharded parameters of this unit, and free the unsharded ones.

        It applies to this unit only.

        Raises:
            ModuleError: The module is not sharded.
        """
        _unit(self).rest()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module.

        It also clears the gradients of sharded parameters while the unsharded ones are registered,
        and the gradients that are not reduced yet. Outside of a backward it waits for reductions in
        flight.

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
        release_gradients(units)

    def reset(self) -> None:
        """Abort the current step, in any state, so that the next step starts clean.

        Use it after an exception in forward or backward. It waits for collectives in flight,
        reshards every unit of the root, and drops gradients that are not reduced yet, including
        gradients from `no_sync`. Sharded gradients stay. It starts no communication.
        """
        units = _units(self, True)
        # Parts that ran before this module, or before it was sharded, have schedules of their own.
        each: list[Schedule | Unit] = [unit.schedule or unit for unit in units]
        for order in {unit.order for unit in units if unit.order is not None}:
            order.resets += 1
            # Ranks that resume without this one must not take its gathers for theirs. What failed
            # here did not fail on all ranks, so that this must not depend on it.
            order.forget()
        if (error := first_error([one.reset for one in dict.fromkeys(each)])) is not None:
            raise error

    def reset_iter_state(self) -> None:
        """Call `reset`. This is torch's name for it."""
        self.reset()

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backwards without synchronisation have accumulated. Recursive.

        Communicates one reduce-scatter per group and, with replicas, one all-reduce. Afterwards
        ``parameter.grad`` has the result. Pipeline schedules use it after the backwards of a step.
        """
        of: dict[Schedule, list[Unit]] = {}
        for unit in reversed(_units(self, True)):
            if unit.schedule is not None:
                of.setdefault(unit.schedule, []).append(unit)
        for schedule, units in of.items():
            schedule.reduce_all(units)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the registered parameters of this module, sharded or unsharded.

        During a pipeline schedule that splits backward in two, this unshards the parameters that
        the schedule needs. In that case all ranks have to call it, or none.

        Args:
            recurse: If True, include the parameters of all modules inside this one.

        Returns:
            An iterator over parameters.

        Raises:
            ModuleError: The module is not sharded.
        """
        # Asked of this unit first: a clip looks at all parameters in every step.
        if recurse and _unit(self).options.in_pipeline:
            for unit in _units(self, True):
                if unit.awaits_split_backward:
                    unit.gather(in_pass=True)
                    unit.unshard()
        return cast(nn.Module, super()).parameters(recurse)

    def plan_report(self) -> PlanReport:
        """Describe the communication of all groups in this module. Communicates nothing.

        Returns:
            Bytes, padding and shards of each group, the same on all ranks. ``print`` shows a table.

        Raises:
            ModuleError: The module is not sharded.

        Examples:
            On 4 ranks:

            >>> group = fully_shard(nn.Linear(8, 8, bias=False)).plan_report().groups[0]
            >>> group.dtype, group.parameter_bytes
            ('float32', 256)
        """
        paths = {_unit(self): ["(root)"]}
        for path, module in cast(nn.Module, self).named_modules():
            unit = unit_of(module)
            if unit is not None and path:
                paths.setdefault(unit, []).append(path)
        found = [(", ".join(at), group) for unit, at in paths.items() for group in unit.groups]
        return PlanReport(groups=tuple(_group_report(unit, group) for unit, group in found))

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | None, recurse: bool = True
    ) -> None:
        """Set whether parameters are resharded after forward.

        Args:
            reshard_after_forward: As in `fully_shard`, except that an integer is not allowed.
            recurse: If True, apply to all units in this module.

        Raises:
            ShardingError: ``reshard_after_forward`` is not True, False or None.
        """
        chosen: object = reshard_after_forward
        if not isinstance(chosen, bool | None):
            raise ShardingError(
                f"reshard_after_forward is {shown(chosen)}; legal are True, False and None (the "
                "default); an int, the number of ranks to reshard to, only fully_shard takes"
            )
        _edit(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are resharded after backward.

        If they stay unsharded, the next forward gathers again what an optimizer, or an in-place
        operation, has changed. Call `reshard` after changes that do not increase a tensor's version
        counter: writes to ``parameter.data`` and by ``torch._foreach_*``.

        Args:
            reshard_after_backward: True (the default) frees the unsharded parameters after
                backward. False keeps them for the next forward.
            recurse: If True, apply to all units in this module.
        """
        _edit(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards the parameters of this unit.

        It applies to this unit only.

        Args:
            unshard_in_backward: False if backward does not need the parameters of this unit.
                Initially True.
        """
        _edit(self, False, unshard_in_backward=unshard_in_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, for gradient accumulation without communication.

        Without synchronisation, every rank accumulates unsharded gradients, which
        ``parameter.grad`` does not show. The next backward with synchronisation reduces the sum.
        ``zero_grad`` of the module drops them; ``zero_grad`` of an optimizer does not.

        Args:
            requires_gradient_sync: True (the default) reduces gradients in backward.
            recurse: If True, apply to all units in this module.
        """
        sync = requires_gradient_sync
        _edit(self, recurse, gradient_sync=sync, all_reduce=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over replicas.

        Without it, backward only reduce-scatters. These gradients accumulate outside of
        ``parameter.grad`` until a backward all-reduces them. It has no effect with one replica.

        Args:
            requires_all_reduce: True (the default) all-reduces gradients in backward.
            recurse: If True, apply to all units in this module.
        """
        _edit(self, recurse, all_reduce=requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient synchronisation inside a ``with`` block, for all units in this module.

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

        The last backward waits for all reductions and assigns ``parameter.grad``. Other backwards
        do not.

        Args:
            is_last_backward: True (the default) if the next backward is the last one.
        """
        _edit(self, True, is_last_backward=is_last_backward)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Set the number by which the sum of gradients over ranks is divided.

        Args:
            factor: A finite number above 0; 1.0 gives the sum. None restores the mean or sum by the
                ``gradient_reduction`` of `fully_shard`.
            recurse: If True, apply to all units in this module.

        Raises:
            ShardingError: ``factor`` is not a finite number above 0 or None.
        """
        given: object = factor
        if isinstance(given, bool) or not isinstance(given, int | float | None):
            raise ArgumentTypeError(f"factor is {shown(given)}; legal are numbers above 0 and None")
        try:
            divide = None if factor is None else float(factor)
        except OverflowError:  # of an int
            divide = math.inf
        _edit(self, recurse, divide=divide)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`. This is torch's earlier name for it.

        Args:
            factor: See `set_gradient_divide_factor`.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, so that the division is a separate step after them.

        Args:
            enable: True to only sum. Initially False, which lets the backend average if it can.
        """
        _edit(self, False, force_sum=enable)

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], Any] | None,
        *,
        stream: torch.Stream | torch.cpu.Stream | None = None,
    ) -> None:
        """Set a function that is called with each reduced flat gradient.

        It applies to this unit only.

        It is called once per group and reduction, with the result of the reduce-scatter, or of the
        all-reduce if there are replicas. It may change the gradient in place.

        Args:
            hook: A function of one tensor, or None to remove the hook.
            stream: Stream on which the hook runs. Defaults to the stream of the reduction. On a CPU
                the hook always runs in order.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``hook`` or ``stream`` has a wrong type, or ``stream`` is given and this
                package reduces over replicas itself.
        """
        unit = _unit(self)
        if hook is None:
            _edit(self, False, hook=None)
            return
        if not callable(hook):
            raise ArgumentTypeError(
                f"hook is {shown(hook)}; legal are a function of a tensor, and None"
            )
        summed = {axis.size > 1 for group in unit.groups for axis in group.axes.replicate}
        if stream is not None and True in summed:
            raise ShardingError(
                "a stream for the hook is legal only where this package sums nothing over "
                "replicas: on a mesh of one axis, with no parameter kept whole (min_shard_numel)"
            )
        on_cpu = all(group.config.device.type == "cpu" for group in unit.groups)
        if on_cpu and isinstance(stream, torch.cpu.Stream):
            stream = None
        asked: object = stream
        if not isinstance(asked, torch.Stream | None):
            also = ", a torch.cpu.Stream" if on_cpu else ""
            raise ArgumentTypeError(
                f"stream is {shown(asked)}; legal are a torch.Stream{also} and None"
            )
        _edit(self, False, hook=ReductionHook(function=hook, stream=asked))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Set the modules to prefetch when the forward of this module begins.

        Args:
            modules: Sharded modules, in the order of their all-gathers. None restores the default:
                the next unit in the order of the first step.

        Raises:
            ModuleError: This module, or one of ``modules``, is not sharded.
        """
        _unit(self).forward_prefetch = None if modules is None else _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Set the modules to prefetch when the backward of this module begins.

        Args:
            modules: Sharded modules, in the order of their all-gathers. None restores the default:
                the previous unit in the order of the first step.

        Raises:
            ModuleError: This module, or one of ``modules``, is not sharded.
        """
        _unit(self).backward_prefetch = None if modules is None else _units_of(modules)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept True, for compatibility with torch: unused parameters always take part.

        A parameter that only some ranks used contributes zeros on the other ranks. A parameter that
        no rank used keeps ``grad is None``.

        Args:
            reduce_scatter_unused_params: True.
            recurse: Has no effect.

        Raises:
            UnsupportedError: ``reduce_scatter_unused_params`` is not True.
        """
        if reduce_scatter_unused_params is not True:
            raise UnsupportedError(
                f"reduce_scatter_unused_params is {shown(reduce_scatter_unused_params)}; only True "
                "is legal: ranks communicate alike, whatever parameters each of them used"
            )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set the largest number of buffers of packed gradients that may exist at once.

        A larger number lets more reduce-scatters overlap with backward and needs more memory. The
        largest number of all units is used. On accelerators, the buffer that a unit fills during
        its backward (``grads="accumulate"`` or ``"fused"``) does not count, and the buffers of a
        unit with several dtypes or meshes may exist at once.

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
        """Set whether reduce-scatters use their own process groups, one for each set of ranks.

        Collective if it creates a group. Groups that an earlier call created are reused.

        Args:
            enable: True for separate groups. False for the groups of the mesh.
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
        """Set an event that the next forward waits for on its device. It is used once.

        Args:
            event: An event, such as one that was recorded after the optimizer step. None: do not
                wait.

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
            raise ArgumentTypeError(f"event is {shown(given)}; legal are a torch.Event and None")
        schedule.starts_after = event

    def set_custom_all_gather(self, comm: Communication) -> None:
        """Set an object that carries out the all-gathers of this unit.

        It applies to this unit only.

        It is called once for each group, with tensors of one dtype. With prefetch, two all-gathers
        are in flight, so it has to return different memory for them.

        Args:
            comm: An object with the interface of torch's ``AllGather``.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``comm`` does not have this interface, or the unit has parameters on
                several meshes.
        """
        for group in _groups_for(
            self, comm, "__call__(output_tensor, input_tensor, group, async_op)"
        ):
            group.gathers = CustomAllGather(comm)
        _unit(self).forget_comparisons()

    def set_custom_reduce_scatter(self, comm: Communication) -> None:
        """Set an object that carries out the reduce-scatters of this unit.

        It applies to this unit only.

        Args:
            comm: An object with the interface of torch's ``ReduceScatter``. It is always called to
                sum; a mean is divided afterwards.

        Raises:
            ModuleError: The module is not sharded.
            ShardingError: ``comm`` does not have this interface, or the unit has parameters on
                several meshes.
        """
        call = "__call__(output_tensor, input_tensor, group, op, async_op)"
        for group in _groups_for(self, comm, call):
            group.scatters = CustomReduceScatter(comm, group.collectives)
        _unit(self).forget_comparisons()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether communication uses memory that the process group allocates.

        It applies to this unit only.

        It has no effect if the backend does not support it. It costs a copy before and after each
        collective.

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
                    f"this unit communicates by a {type(way.given).__name__}, which gives its own "
                    "memory; call set_allocate_memory_from_process_group_for_comm before it is set"
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
        """Raise an error that names the replacement: the argument ``collectives`` of `fully_shard`.

        Args:
            backend: Has no effect.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "set_symm_mem_for_comm is not supported; pass collectives= to fully_shard"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept both, under torch's name for it: gathers here are always asynchronous."""

    def _get_fsdp_state(self) -> Any:
        return noted_state(cast(nn.Module, self))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Module.to, .double() and the like: convert the shards, then put them in one buffer again.
        units = _units(self, True)
        groups = [group for unit in units for group in unit.groups]
        for unit in units:
            if unit.schedule is not None:
                unit.schedule.finish_early()
            unit.rest()
        try:
            # torch swaps no frozen parameter whose gradient accumulator is alive.
            for group in groups:
                group.stop_watching()
            module = cast(Any, super())._apply(fn, recurse)
        finally:
            for group in groups:
                group.watch_sharded()
        for unit in units:
            unit.reset_sharded(
                final=len(unit.modules) == 1
            )  # others of a list may have their turn yet
        return cast(Self, module)


def _no_copy(self: object, _: object) -> NoReturn:
    raise ModuleStateError(
        f"{type(self).__name__} cannot be copied or pickled: its shards are views of one buffer; "
        "copy the module before fully_shard, or use its state_dict"
    )


def _finish_pipeline(module: FSDPModule) -> None:
    # A schedule told the units not to reduce, and reads gradients of sharded parameters next.
    module.reduce_gradients()
    for unit in _units(module, True):
        unit.reshard()


def show_to_torch(module: FSDPModule) -> None:
    """Show torch's callers what they read of its own sharded modules."""
    unit, own = _unit(module), cast(nn.Module, module)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return post_forward(unit, own, output)

    note_state(
        own, TorchState(partial(_finish_pipeline, module), partial(pre_forward, unit), after)
    )


def hidden_names(module: nn.Module) -> list[str]:
    """Return the names of `FSDPModule` that a module or its class has of its own."""
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
    """Return ``save_pretrained`` with a check of its state dict; None if it does not take one.

    Without the check the rank that writes files raises alone, and the others go on.
    """
    signature = inspect.signature(save)
    if "state_dict" not in signature.parameters:
        return None

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return save(*args, **kwargs)  # which raises it with the name of the function
        if given.get("state_dict") is None and not given.get("distributed_checkpoint"):
            raise UnsupportedError(_SAVE_RECIPE)
        return save(*args, **kwargs)

    return save_pretrained


@cache
def sharded_class(own: type) -> type:
    """Return the class of a sharded ``own``: `FSDPModule` first, then ``own``.

    Torch's `FSDPModule` comes last, for what asks whether a module is one: pipeline stages and
    trainers. All that it does is overridden.
    """
    members = {"__deepcopy__": _no_copy, "__reduce_ex__": _no_copy, "__doc__": own.__doc__}
    save = getattr(own, "save_pretrained", None)  # of a model of transformers
    if inspect.isfunction(save) and (checked := _checked_save(save)) is not None:
        members["save_pretrained"] = checked
    return type(f"FSDP{own.__name__}", (FSDPModule, own, TORCH_MODULE), members)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module unshard parameters and hook backward, like its forward.

    A no-op for a module that is not sharded.

    Args:
        module: A module.
        method_name: Name of the method.

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
        raise ModuleTypeError(f"module is {shown(given)}; legal is an nn.Module")
    if not isinstance(method_name, str):
        raise ArgumentTypeError(f"method_name is {shown(method_name)}; legal is a method's name")
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
    """Check that modules are sharded, for compatibility with torch. Otherwise a no-op.

    In torch this shares streams between modules. Here all units of a mesh already share them.

    Args:
        modules: Sharded modules.

    Raises:
        ModuleError: ``modules`` is not a list, or one of the modules is not sharded.

    Examples:
        On 4 ranks:

        >>> share_comm_ctx([fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8))])
    """
    _units_of(modules, "share streams with")
