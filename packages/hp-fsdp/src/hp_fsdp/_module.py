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
    """One parameter: its name, unsharded local shape, and how it is gathered and reduced.

    ``unfused`` says in words why its gradient is not written by fused products, as it was when
    `fully_shard` was called or since a conversion; "" where it is.
    """

    name: str
    shape: tuple[int, ...]
    rows_per_rank: int
    direct: bool
    unfused: str

    @property
    def fused(self) -> bool:
        """Return whether the gradient is written into the packed ones by the product itself."""
        return not self.unfused


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group: ``parameter_bytes`` of content, ``padding_bytes`` that every gather adds to it.

    ``unit`` is the path of the group's unit under the module that reports, which itself is
    ``(root)``; of a list, all paths. ``axes`` maps each axis that gradients are reduced
    over to its degree.
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
    """The groups of a module and of the modules in it; ``str`` gives a table."""

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


class FSDPModule:
    """The class that `fully_shard` mixes into a module's own; never constructed by itself."""

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
        """Register a forward hook as every module does; it sees the sharded parameters."""
        own: Any = self
        end_in_hook(own.__dict__[UNIT_ATTRIBUTE], own)
        return cast(RemovableHandle, cast(Any, super()).register_forward_hook(*args, **kwargs))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters: one all-gather per dtype over the shard axis.

        With ``async_op`` returns at once; ``wait()`` on the handle, or the next forward, completes
        it. Not recursive.
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
        """Make this unit's parameters sharded DTensors again and free the rest; not recursive."""
        _unit(self).rest()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in this module.

        Those of sharded parameters too where modules have the unsharded ones at the moment, and,
        with or without ``set_to_none``, what backwards left that is not reduced yet. Outside of a
        backward, waits for reductions under way.
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
        """Drop the step under way, from any state, so that the next one starts clean.

        For use after an exception in forward or backward: collectives in flight are awaited, every
        unit of the same root is resharded, and gradients that are not reduced yet (those of
        `no_sync` too) are dropped. Sharded gradients stay. Communicates nothing new.
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
        """Do the same as `reset`, under torch's name."""
        self.reset()

    def reduce_gradients(self) -> None:
        """Reduce what backwards without synchronisation left, in this module and those below.

        One reduce-scatter per group and, with replicas, one all-reduce; afterwards the gradients
        are on the parameters. For schedules of a pipeline, which run many backwards a step.
        """
        of: dict[Schedule, list[Unit]] = {}
        for unit in reversed(_units(self, True)):
            if unit.schedule is not None:
                of.setdefault(unit.schedule, []).append(unit)
        for schedule, units in of.items():
            schedule.reduce_all(units)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters in this module, sharded or not, as modules have them.

        Between the forwards and backwards of a pipeline schedule those are gathered that it needs:
        one that splits backward in two looks for the gradients of the unsharded parameters. All
        ranks call it there, or none.
        """
        # Asked of this unit first: a clip looks at all parameters in every step.
        if recurse and _unit(self).options.in_pipeline:
            for unit in _units(self, True):
                if unit.awaits_split_backward:
                    unit.gather(in_pass=True)
                    unit.unshard()
        return cast(nn.Module, super()).parameters(recurse)

    def plan_report(self) -> PlanReport:
        """Return bytes, padding and placement of all groups in this module, each with its unit.

        It is the same on every rank; nothing is communicated.
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
        """Choose as `fully_shard` does, from now on.

        Raises `ShardingError` for anything but True, False or None.
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
        """Give parameters up after backward (the default), or keep them for the next forward.

        A forward gathers anew what an optimizer wrote to in between, or what was written in place.
        Call `reshard` after writes that no version of a tensor tells of: to ``parameter.data``, or
        by ``torch._foreach_*``.
        """
        _edit(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather parameters for backward (the default), or not: it needs none of this unit's."""
        _edit(self, False, unshard_in_backward=unshard_in_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward (the default), or let them add up unsharded until then.

        Without synchronisation nothing is reduced, and every rank holds whole gradients, which no
        parameter shows; the next backward with it reduces the sum. ``zero_grad`` of the module
        drops them, that of torch's optimizers does not see them.
        """
        sync = requires_gradient_sync
        _edit(self, recurse, gradient_sync=sync, all_reduce=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum gradients over the replicas in backward (the default), or only reduce-scatter them.

        Reduce-scattered gradients add up outside ``grad`` until a backward all-reduces them. With
        one replica nothing waits.
        """
        _edit(self, recurse, all_reduce=requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch gradient synchronisation off inside the block, for all units in this module."""
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
        """Say whether the next backward is the last one of the step, for all units below.

        Only the last one waits for reductions and puts gradients on the parameters.
        """
        _edit(self, True, is_last_backward=is_last_backward)

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Divide the sum of the ranks' gradients by ``factor``; 1.0 leaves the sum.

        None restores what ``gradient_reduction`` of `fully_shard` says: the mean over all ranks of
        the mesh, or the sum. Without ``recurse`` units below keep theirs. Raises `ShardingError`
        for anything but a positive finite number or None.
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
        """Do the same as `set_gradient_divide_factor`, under the name that came before it."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Only sum while communicating, and divide afterwards."""
        _edit(self, False, force_sum=enable)

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], Any] | None,
        *,
        stream: torch.Stream | torch.cpu.Stream | None = None,
    ) -> None:
        """Call ``hook`` once per group and reduction with the flat reduced gradient; None: nothing.

        That is the result of the reduce-scatter, or of the all-reduce where there are replicas;
        what the hook writes to it ends in the gradients. With ``stream`` it runs there, otherwise
        on an accelerator on the stream of the reduction, while backward goes on. A CPU runs the
        hook in order, whatever ``stream`` is. Raises `ShardingError` for a stream where this
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
        """Start the gathers of ``modules`` when this module's forward begins, instead of the next.

        None restores the gather of the next in learned order. Raises `ModuleError` for a
        module that is not sharded.
        """
        _unit(self).forward_prefetch = None if modules is None else _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module] | None) -> None:
        """Start the gathers of ``modules`` when this module's backward begins.

        None restores the gather of the one before in learned order. Raises `ModuleError` for a
        module that is not sharded.
        """
        _unit(self).backward_prefetch = None if modules is None else _units_of(modules)

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
        """Set how many buffers of packed gradients may be alive at once. The default is 1.

        The largest number of all units is used. A larger number lets more reduce-scatters run
        during backward and needs more memory. On accelerators, the buffer that a unit fills during
        its backward (``grads="accumulate"`` and ``"fused"``) does not count, so that its backward
        runs during the reduce-scatter of the previous unit. For the same reason, the buffers of a
        unit with several dtypes or meshes are alive together there.

        Raises `ShardingError` for anything but 1, 2, ...
        """
        _edit(self, recurse, in_flight=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over process groups of their own, one per set of ranks, or over the mesh's again.

        Making a group waits for all of its ranks. Those of earlier calls, for this module or those
        in it, are used again.
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
        """Let the next pass begin on its device only after ``event``; for one pass.

        With None the next pass waits for no event. ``torch.cpu.current_stream().record_event()``
        returns None. Raises `StateError` for an event before the first forward.
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
        """Gather by ``comm``: an object with torch's ``AllGather`` interface, in its memory.

        It is called once per group of one dtype with what the group sends. Prefetching has two
        gathers under way, whose memory must differ. Raises `ShardingError` for a unit with
        parameters on several meshes, and for an object of another kind.
        """
        for group in _groups_for(
            self, comm, "__call__(output_tensor, input_tensor, group, async_op)"
        ):
            group.gathers = CustomAllGather(comm)
        _unit(self).forget_comparisons()

    def set_custom_reduce_scatter(self, comm: Communication) -> None:
        """Reduce-scatter by ``comm``: an object with torch's ``ReduceScatter`` interface.

        Its ``op`` is always the sum; an average is divided afterwards. Raises as
        `set_custom_all_gather` does.
        """
        call = "__call__(output_tensor, input_tensor, group, op, async_op)"
        for group in _groups_for(self, comm, call):
            group.scatters = CustomReduceScatter(comm, group.collectives)
        _unit(self).forget_comparisons()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Communicate in memory that the process group registers, where its backend has such.

        That takes a copy before and after each call. Raises `StateError` after
        `set_custom_all_gather` or `set_custom_reduce_scatter`, which may come later.
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
        """Raise `UnsupportedError`: `fully_shard` takes ``collectives=`` instead."""
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
    """Make a method of a sharded module gather parameters and hook backward as forward does.

    Does nothing to a module that is not sharded. Raises `ModuleError` for a method that is not
    there.
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
    """Accept what torch shares streams between; here all communication has the mesh's groups.

    Raises `ModuleError` for a module that is not sharded.
    """
    _units_of(modules, "share streams with")
