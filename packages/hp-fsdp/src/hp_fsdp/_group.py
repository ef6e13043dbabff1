"""A parameter group: parameters of one dtype that share one all-gather and one reduction."""

import warnings
import weakref
from collections.abc import Sequence
from functools import cache, partial
from itertools import repeat
from operator import is_, or_
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hp_dtensor import Axis, Collectives, RaggedTensor
from hp_dtensor.torch_compat import writes_into

from ._agreement import Tag, is_exact
from ._errors import Once, ParameterError, StateError
from ._extensions import ExtendedFlatBuffer
from ._gradients import BucketHooks
from ._mesh import DataAxes
from ._options import GroupConfig, Options
from ._param import (
    ParameterTable,
    ShardedParameter,
    gradient_accumulator,
    meta_device_error,
    mixture,
    sharded_from,
)
from ._precision import choose_dtypes
from ._reduction import PartialSum, Reduction, ReductionPlan, StreamedReduction
from ._states import AFTER, Event, ParameterState
from ._stats import UnitComm
from ._streams import Streams, Waitable
from ._torch import (
    graph_task,
    local_of,
    named_range,
    profiled,
    take_gradients,
    training,
    uncompiled,
)
from .layout import PLANNERS, FlatBuffer, FlatPlan, GradientRows, ShardSpec

# Attribute of a parameter: the number of the last optimizer step that included the parameter.
STEPPED_ATTRIBUTE = "_fully_shard_stepped"
# The states in which an all-gather can start.
GATHERABLE = (ParameterState.SHARDED, ParameterState.POST_FORWARD)


class ParameterGroup:
    """Parameters of one dtype and layout, and the state of their all-gather.

    The constructor copies this rank's shard of each parameter. It neither communicates nor
    registers parameters with the modules.

    Args:
        parameters: The parameters. None of them is sharded yet.
        axes: The mesh axes that shard and replicate the parameters.
        collectives: Starts the all-gathers and the reductions.
        config: Settings that cannot change.

    Attributes:
        layout: The flat shard and its all-gather.
        flat: Whether the shards are views of one flat shard. False for parameters with all-gather
            extensions.
    """

    layout: FlatBuffer

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        axes: DataAxes,
        collectives: Collectives,
        config: GroupConfig,
    ) -> None:
        self.parameters = list(parameters)
        self.flat = parameters[0].extension is None
        self.axes = self.reduce_axes = axes
        self.config = config
        self.own_axis: Axis | None = None  # a copy of the shard axis with another process group
        self.post_forward_axis: Axis | None = None  # set if parameters reshard to fewer ranks
        self.partial = PartialSum()
        self.tag = Tag()
        self.reads_tags = False  # whether tags are checked after the all-gather in flight
        self.comm = UnitComm(config.device)  # shared by the groups of a unit
        self.streams: Streams | None = None  # shared by all units under the root; None on CPUs
        self.state = ParameterState.SHARDED
        self.bucket_hooks: BucketHooks | None = None
        self.use_warning = Once()
        # Parameters refer to their accumulators weakly, and an accumulator owns its hooks.
        self._accumulators: list[Node] = []
        # Positions of the parameters whose gradients of earlier backwards are not reduced yet.
        self.waiting: set[int] = set()
        self._dropped = False  # whether the gradients of `waiting` were dropped
        self._held = False  # whether parameters hold gradients in the dtype of the reduction
        self.collectives = collectives
        # The collectives of `set_custom_all_gather` and `set_custom_reduce_scatter`, if given.
        self.gathers: Collectives = collectives
        self.scatters: Collectives = collectives
        self._work: Waitable | None = None
        self.noted: tuple[int, int] | None = None  # counts of writes at `note_writes`
        self._training: list[bool] = []  # `requires_grad` of the unsharded parameters, when set
        self.trains = True  # whether one of them is True
        self._stayed = False  # whether the unsharded parameters were kept since `_training` was set
        self._plan: ReductionPlan | None = None
        self._planned: list[int] = []  # positions of the parameters in `_plan`
        wholes = []
        for parameter in self.parameters:
            whole = cast(Tensor, parameter.original()).detach()
            wholes.append(local_of(whole) if isinstance(whole, DTensor) else whole)
        shard = axes.shard
        specs = [
            ShardSpec(
                shape=tuple(whole.shape), dim=each.dim or 0, degree=shard.size, atom=each.atom
            )
            for each, whole in zip(self.parameters, wholes, strict=True)
        ]
        planner, itemsize = PLANNERS[parameters[0].layout], self._itemsize(wholes[0])
        plan = planner(specs, shard.size, itemsize, config.direct_bytes)
        self._lay_out([plan.part(i, whole, shard.index) for i, whole in enumerate(wholes)], plan)
        # With one rank, gradients are not packed. With all-gather extensions, the unsharded
        # parameters do not exist yet.
        if config.grads != "copy" and axes.size > 1 and self.flat:
            self._hook_gradients()
        for i, parameter in enumerate(self.parameters):
            parameter.build_sharded(self.layout.shards[i], plan.ragged_shard(i))
        self._build_unsharded()

    def _itemsize(self, stored: Tensor) -> int:
        """Return the bytes per element for which offsets are aligned.

        This is the smaller one of the storage dtype and the compute dtype.
        """
        dtypes = choose_dtypes(self.config.precision, stored.dtype)
        return min(stored.element_size(), dtypes.compute.itemsize)

    def _lay_out(self, parts: Sequence[Tensor], plan: FlatPlan) -> None:
        """Create the flat buffers from ``parts``, this rank's shard of each parameter."""
        config = self.config
        self.dtypes = choose_dtypes(config.precision, parts[0].dtype)
        if not parts[0].is_meta:
            parts = [part.to(config.shard_device) for part in parts]
        self.layout = self._buffer_of(parts, plan)
        self.layout.write_tag(self.tag.number)
        # Gradients are packed in the order of the output, which is also the order of the flat
        # shard. So an optimizer can update the flat shard as one tensor.
        self.order = sorted(range(len(plan.specs)), key=plan.output_starts.__getitem__)

    def use_tag(self, tag: Tag) -> None:
        """Set the tag of the group's unit, and write its number to the flat shard."""
        self.layout.write_tag(tag.number)
        self.tag = tag

    @property
    def tagged(self) -> bool:
        """Return whether the all-gather also sends the unit's tag."""
        return self.layout.tags is not None and is_exact(self.gathers)

    @property
    def gather_signature(self) -> tuple[object, ...] | None:
        """Return the slices that each rank sends in the all-gather, and the bytes per element.

        Returns None if the group has all-gather extensions, because they choose the sizes.
        """
        if not self.flat:
            return None
        return self.layout.plan.slices, self.dtypes.compute.itemsize

    def reduction_signature(self, chosen: Sequence[int]) -> tuple[object, ...]:
        """Return the sizes and the dtype of the reduction of the parameters at ``chosen``.

        ``chosen`` are positions in ``parameters``. The result is empty if ``chosen`` is empty.
        """
        if not chosen:
            return ()
        rows = self._rows_of(chosen)
        return rows.numel, rows.reduced_numel, self.dtypes.reduce

    def _buffer_of(self, parts: Sequence[Tensor], plan: FlatPlan) -> FlatBuffer:
        config, axis, compute = self.config, self.axes.shard, self.dtypes.compute
        extensions = [each.extension for each in self.parameters if each.extension is not None]
        if extensions:
            if config.shard_device != config.device:
                raise ParameterError(
                    f"{[each.name for each in extensions]} have all-gather extensions, which run "
                    "on the device; allowed for them: offload_policy=OffloadPolicy()"
                )
            return ExtendedFlatBuffer(
                extensions,
                parts,
                plan,
                axis,
                dtype=compute,
                config=config,
                collectives=self.collectives,
            )
        return FlatBuffer(
            parts,
            plan,
            axis,
            dtype=compute,
            device=config.device,
            pinned=config.pinned and not parts[0].is_meta,
        )

    def _build_unsharded(self) -> None:
        for parameter, view in zip(self.parameters, self.layout.unsharded, strict=True):
            parameter.build_unsharded(view)
        self._views = self.layout.unsharded
        self.layout.free()
        self._list_parameters()
        if self.bucket_hooks is not None:
            self.bucket_hooks.register()

    def _list_parameters(self) -> None:
        """Create the parameter table and lists, after parameters were created or replaced."""
        layout = self.layout
        flat = layout.shard if self.flat else None
        if flat is None:  # extensions are methods of the parameters' local tensors
            layout.shards = [each.local_view for each in self.parameters]
        self.table = ParameterTable(self.parameters, layout.shards, flat)
        self.watch_sharded()
        self._in_order = [self.table.sharded[i] for i in self.order]
        self._plain = all(each.is_plain for each in self.parameters)
        self._training = []
        self._plan = None

    def watch_sharded(self) -> None:
        """Register hooks that warn if a loss uses a sharded parameter directly.

        Autograd accumulates the gradient of such a use, which runs the hooks. The gradients of
        forwards are set without autograd. With one rank, direct use is correct, so there are no
        hooks.
        """
        known = set(self._accumulators)
        self._accumulators = []
        for parameter in self.parameters if self.axes.size > 1 else ():
            node = gradient_accumulator(parameter.sharded)
            if node is not None:
                if node not in known:
                    node.register_hook(partial(_warn_of_use, weakref.ref(self), parameter.name))
                self._accumulators.append(node)

    def stop_watching(self) -> None:
        """Undo `watch_sharded`, so that ``Module.to`` may swap the parameters."""
        self._accumulators = []

    def _hook_gradients(self) -> None:
        """Create hooks that pack each large gradient as soon as autograd has computed it.

        Small gradients are packed together, after the unit's backward.
        """
        least = self.config.direct_bytes / self.dtypes.reduce.itemsize
        specs = self.layout.plan.specs
        large = [i for i, spec in enumerate(specs) if spec.shard_numel >= least]
        if large:
            self.bucket_hooks = BucketHooks(
                self.parameters, large, self.reduced, self._rows_of, self._allocate_rows
            )

    def _rows_of(self, chosen: Sequence[int]) -> GradientRows:
        index, itemsize = self.axes.shard.index, self.dtypes.reduce.itemsize
        return self.layout.plan.gradient_rows(chosen, index, itemsize)

    def _allocate_rows(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtypes.reduce, device=self.config.device)

    def gather(self) -> None:
        """Start the all-gather. A no-op if it is already in flight or the group is unsharded."""
        before, layout = self.state, self.layout
        fewer = before is ParameterState.POST_FORWARD
        if not fewer and before is not ParameterState.SHARDED:
            return
        if layout.shard.is_meta:
            raise meta_device_error(self.parameters, self.comm.path)
        block = self.post_forward_axis if fewer else None
        axis = block or self.axes.shard
        try:
            if block is None:
                gather = partial(layout.gather, axis, self.gathers, self.streams)
            else:
                gather = partial(layout.gather_block, block, self.gathers)
            self._work = self.comm.start("all_gather", axis, layout, gather)
            if not fewer:
                self.noted = None
            self.state = AFTER[Event.GATHER][before]
        except BaseException:
            self._work, self.state = None, before
            layout.free()
            raise

    @property
    def incomplete(self) -> bool:
        """Return whether some parameters, but not all, have left the meta device."""
        if not self.layout.shard.is_meta:
            return False
        return len({parameter.local().is_meta for parameter in self.parameters}) > 1

    @property
    def unsharded(self) -> bool:
        """Return whether the unsharded parameters are registered with the modules."""
        return self.state is ParameterState.UNSHARDED

    @property
    def stale(self) -> bool:
        """Return whether an optimizer or other code wrote to the shards since `note_writes`.

        False if `note_writes` was not called since the last all-gather.
        """
        if self.noted is None or self.state is ParameterState.SHARDED:
            return False
        steps, writes = self.noted
        return self._writes() != writes or self.stepped_since(steps)

    def stepped_since(self, number: int) -> bool:
        """Return whether an optimizer has stepped the parameters since optimizer step ``number``.

        ``number`` is an earlier value of `StepHooks.count`.
        """
        steps: list[int] = [vars(p).get(STEPPED_ATTRIBUTE, 0) for p in self.table.sharded]
        return max(steps) > number

    def note_writes(self) -> None:
        """Start to detect writes to the shards; see `stale`.

        Called when the unsharded parameters are kept after forward or backward. If this was already
        called since the last all-gather, writes are detected from the first call on.
        """
        self._stayed = True
        if self.noted is None:
            self.noted = step_hooks().count, self._writes()

    def _writes(self) -> int:
        # A write to a DTensor increments only its version, a write to its local tensor only that.
        parts = sum([writes_into(p.sharded, p.part(p.sharded)) for p in self.parameters])
        return writes_into(self.layout.shard) + parts

    def unshard(self) -> None:
        """Wait for the all-gather, and register the unsharded parameters with the modules.

        Starts the all-gather if it is not in flight. After this call, an optimizer may write to the
        shards, because the current stream has waited for the all-gather.

        If waiting for the all-gather raises, the group is sharded again. If registering the
        parameters raises, the next call tries again.
        """
        if self.state in GATHERABLE:
            self.gather()
        if self.state is ParameterState.GATHERING:
            self._wait()
            if profiled():
                with named_range("register_unsharded", self.comm.path):
                    self._register_unsharded()
            else:
                self._register_unsharded()
            self.state = AFTER[Event.ARRIVE][self.state]
            self._work = None
            if self.post_forward_axis is not None:
                self.layout.drop_block()

    def _wait(self) -> None:
        if self._work is not None:
            try:
                self.layout.wait(self._work)
            except Exception as error:  # after KeyboardInterrupt, the next call can wait again
                self._return_to_sharded()
                self.tag.report(error, "gather {}")
                raise

    def _check_tags(self) -> None:
        """Raise `DisagreementError` if another rank gathered another unit."""
        layout, tag, tags = self.layout, self.tag, self.layout.tags
        self.reads_tags = tag.log is not None
        if tags is None or not layout.is_exact:
            return
        # Without a log, the host would have to wait for an accelerator before it can read the tags.
        # So they are read here on CPUs only.
        readable = self.config.device.type == "cpu"
        if tag.log is None and not (readable and tags.tolist() != layout.expected_tags):
            return
        error = tag.check_gathered(tags, layout.plan.itemsize)
        if error is not None:
            self._return_to_sharded()
            raise error

    def _register_unsharded(self) -> None:
        if self.reads_tags:
            self._check_tags()
        layout = self.layout
        layout.finish_gather(self._work)
        if layout.unsharded is not self._views:  # a collective may still use the last memory
            for parameter, view in zip(self.parameters, layout.unsharded, strict=True):
                parameter.move_unsharded(view)
            self._views = layout.unsharded
            if isinstance(layout, ExtendedFlatBuffer):
                self._list_parameters()
                self.copy_requires_grad_to_unsharded()
                layout.parameters = self.table.unsharded
        if graph_task() < 0:
            self.copy_requires_grad_to_unsharded()
        self.table.register_unsharded()

    def reshard(self) -> None:
        """Register the sharded parameters with the modules, and free the unsharded ones.

        If an all-gather is in flight, waits for it first. A no-op if the group is sharded.
        """
        if self.state is ParameterState.GATHERING:
            self._wait()
            if self.reads_tags:
                self._check_tags()
            self._return_to_sharded()
        elif self.state is ParameterState.POST_FORWARD:
            self.state = AFTER[Event.RESHARD][self.state]
            self.layout.drop_block()
        elif self.state is ParameterState.UNSHARDED:
            if self.noted is not None:
                self.copy_requires_grad_to_sharded()
            # The memory is freed last. So the registered parameters are readable even if one of
            # these steps raises.
            self.table.register_sharded()
            self.state = AFTER[Event.RESHARD][self.state]
            self.layout.free()

    def _return_to_sharded(self) -> None:
        self._work = None
        self.table.register_sharded()
        self.state = AFTER[Event.RESET][self.state]
        self.layout.drop_block()
        self.layout.free()

    def reshard_to_fewer(self) -> None:
        """Reshard to the ranks of ``post_forward_axis``. Backward then gathers over this axis.

        Reshards to all ranks if there is no such axis or only one rank.
        """
        if self.post_forward_axis is None or self.axes.shard.size == 1:
            self.reshard()
        elif self.state is ParameterState.UNSHARDED:
            if self.noted is not None:
                self.copy_requires_grad_to_sharded()
            with torch.no_grad():
                self.layout.save_block(self.post_forward_axis.size)
            self.table.register_sharded()
            self.state = AFTER[Event.RESHARD_TO_FEWER][self.state]
            self.layout.free()

    def reset(self) -> None:
        """Return to the sharded state from any state, and drop gradients that are not reduced.

        Waits for an all-gather in flight, and starts no collective. If the all-gather failed, its
        error is raised after the group is sharded. Changes of ``requires_grad`` of the registered
        unsharded parameters are copied to the sharded ones.
        """
        self.copy_requires_grad_to_sharded()
        self.drop_gradients()
        self.partial.clear()
        self.waiting.clear()
        self._wait()
        self._return_to_sharded()

    def finish_copies(self) -> None:
        """Block the host until copies from pinned shards are finished.

        Then the host may write to the shards. A no-op if the shards are not pinned.
        """
        if self.config.pinned and self.streams is not None:
            self.streams.gather.synchronize()
        elif self.config.pinned:
            torch.accelerator.current_stream(self.config.device).synchronize()

    def drop_gradients(self) -> None:
        """Discard this rank's unreduced gradients.

        The next reduction still includes these parameters, and this rank sends zeros. So some ranks
        may call this and others not.
        """
        self._dropped = True
        for parameter in self.parameters:
            if self._held:
                parameter.drop_gradient()
            parameter.unsharded.grad = None
        self._held = False
        if self.bucket_hooks is not None:
            self.bucket_hooks.drop()
        if self.streams is not None and self.partial.waits:
            self.streams.all_reduce.join()  # that stream may still add to the partial sum
        self.partial.drop()

    def accumulate_gradients(self) -> None:
        """Keep the gradients of this backward for a later reduction.

        They are cast to the dtype of the reduction. Gradients of frozen parameters are dropped.
        """
        chosen = self.reduced()
        self._drop_frozen(chosen)
        self.waiting.update(chosen)
        self._dropped = False
        if self.dtypes.reduce != self.dtypes.compute:
            self._held = True
            for parameter in self.parameters:
                parameter.accumulate_gradient(self.dtypes.reduce)

    def reduced(self) -> list[int]:
        """Return the positions of the parameters in the next reduction, in flat shard order.

        The parameters are the trainable ones, and those frozen ones that have gradients of earlier
        backwards. All ranks return the same list, even if they used different parameters.
        """
        flags = training(self._in_order)
        if all(flags):
            return self.order
        waiting = self.waiting
        return [i for i, trains in zip(self.order, flags, strict=True) if trains or i in waiting]

    def check_unfrozen(self) -> None:
        """Raise `StateError` if parameters were unfrozen while gradients are accumulated.

        The tensor of packed gradients has no space for the gradients of these parameters. All ranks
        raise, even if they used different parameters.
        """
        if self.bucket_hooks is None or not self.waiting:
            return
        unfrozen = [self.parameters[i].name for i in self.reduced() if i not in self.waiting]
        if unfrozen:
            raise StateError(
                f"{unfrozen} were frozen when gradients of others began to add up; unfreeze "
                "parameters only after a reduction"
            )

    def _drop_frozen(self, chosen: Sequence[int]) -> None:
        """Drop the gradients of parameters that are not in ``chosen``.

        These parameters were frozen after their forward, so autograd still computed gradients.
        """
        for i in set(self.order).difference(chosen):
            self.parameters[i].drop_gradient()

    def reduce(self, options: Options, chosen: list[int]) -> Reduction | None:
        """Start the reduction of the gradients of some parameters.

        If this rank has no gradient of a parameter, it sends zeros. If no rank has a gradient of a
        parameter, the parameter gets no gradient. Must run under ``torch.no_grad``.

        Args:
            options: Options of this reduction.
            chosen: Positions of the parameters, a result of `reduced`.

        Returns:
            The reduction in flight, or None if ``chosen`` is empty.
        """
        plan = self._plan
        if len(chosen) < len(self.parameters):
            self._drop_frozen(chosen)
            if not chosen:
                return None
        if plan is None or self._planned is not chosen:
            if plan is None or self._planned != chosen:
                self._plan = plan = self._plan_of(chosen)
            self._planned = chosen
        gradients: list[Tensor] = []
        rows: Tensor | None = None
        if self.bucket_hooks is not None:
            rows, used = self.bucket_hooks.finish(chosen, self.collectives, plan.tag_flags)
        else:
            gradients, used = self._take_gradients(plan)
        axes = self.reduce_axes
        adds_up = not options.all_reduce and any([axis.size > 1 for axis in axes.replicate])
        if adds_up or self.waiting:
            self.waiting = set(chosen if adds_up else ())
        self._held = self._dropped = False
        given = (plan, gradients, rows, used, axes, self.scatters, options)
        if self.streams is not None:
            return StreamedReduction(self.streams, *given)
        return Reduction(*given)

    def _take_gradients(self, plan: ReductionPlan) -> tuple[list[Tensor], list[bool]]:
        """Remove the gradients from the unsharded parameters and return them.

        Returns:
            One contiguous gradient per parameter, zeros if this rank has none; and one bool per
            parameter: whether this rank has a gradient.
        """
        if not self._plain or self._held:
            found = [each.take_gradient(self.collectives) for each in plan.parameters]
        else:
            found = take_gradients(plan.unsharded)
        used, gradients = plan.all_used, cast("list[Tensor]", found)
        if any(map(is_, found, repeat(None))):
            used = [gradient is not None for gradient in found]
            gradients = [
                parameter.no_gradient() if gradient is None else gradient
                for parameter, gradient in zip(plan.parameters, found, strict=True)
            ]
        if not all(map(Tensor.is_contiguous, gradients)):
            gradients = [gradient.contiguous() for gradient in gradients]
        return gradients, used

    def _plan_of(self, chosen: Sequence[int]) -> ReductionPlan:
        return ReductionPlan(
            parameters=[self.parameters[i] for i in chosen],
            rows=self._rows_of(chosen),
            dtype=self.dtypes.reduce,
            device=self.config.device,
            shard=self.layout.shard,
            partial=self.partial,
            offloaded=self.config.shard_device != self.config.device,
            tag=self.tag,
            comm=self.comm,
        )

    def copy_requires_grad_to_unsharded(self, backward: bool = False) -> None:
        """Copy `requires_grad` from the sharded parameters to the unsharded ones.

        In backward, it is not changed from True to False. If a parameter was frozen after its
        forward, its gradient is dropped later instead.
        """
        flags = training(self.table.sharded)
        if backward and self._training:
            flags = list(map(or_, flags, self._training))
        if flags != self._training or (self._stayed and not backward):
            for unsharded, trains in zip(self.table.unsharded, flags, strict=True):
                if trains != unsharded.requires_grad:
                    unsharded.requires_grad_(trains)
            self._training, self.trains = flags, True in flags
        if not backward:
            self._stayed = False

    def freeze_unsharded(self) -> None:
        """Set `requires_grad` of unsharded parameters to False if the sharded ones are frozen."""
        for sharded, unsharded in zip(self.table.sharded, self.table.unsharded, strict=True):
            if unsharded.requires_grad and not sharded.requires_grad:
                unsharded.requires_grad_(False)
                self._stayed = True  # the next forward compares all of them again

    def copy_requires_grad_to_sharded(self) -> None:
        """Copy `requires_grad` from the registered unsharded parameters to the sharded ones.

        If user code freezes a module while the unsharded parameters are registered, it changes only
        these. Parameters whose `requires_grad` has not changed since
        `copy_requires_grad_to_unsharded` are skipped.
        """
        if self.state is not ParameterState.UNSHARDED or not self._training:
            return
        now = training(self.table.unsharded)
        if now != self._training:
            flags = zip(self.table.sharded, now, self._training, strict=True)
            for sharded, trains, before in flags:
                if trains != before:
                    sharded.requires_grad_(trains)
            self._training, self.trains = now, True in now

    def replacement_errors(self) -> list[str]:
        """Return error messages for registered parameters that `reset_sharded` cannot use.

        The list is empty if all of them can be used.
        """
        where = f"in {self.comm.path}: " if self.comm.path else ""
        said = [parameter.replacement_error() for parameter in self.parameters]
        refused = [where + each for each in said if each is not None]
        if refused or self.incomplete:
            return refused  # the other parameters may be loaded later
        mixed = mixture(self.parameters)
        return [] if mixed is None else [where + mixed]

    def undo_replacements(self) -> None:
        """Register the sharded parameters again in place of parameters that cannot be used."""
        for parameter in self.parameters:
            parameter.undo_replacement()

    @torch.no_grad()
    def reset_sharded(self) -> None:
        """Copy parameters that user code replaced or converted back to the flat shard.

        For example, ``load_state_dict(assign=True)`` replaces parameters and ``Module.to`` converts
        them. Call this only if the group is sharded and `replacement_errors` returns no messages.
        """
        if self.incomplete:
            return
        converted = self._converted
        for parameter in self.parameters:
            parameter.take_replacement()
        locals_ = [parameter.local() for parameter in self.parameters]
        if not converted:
            for view, local in zip(self.layout.shards, locals_, strict=True):
                if local is not view:
                    view.copy_(local)
        else:
            self.partial.clear()
            plan, itemsize = self.layout.plan, self._itemsize(locals_[0])
            self._lay_out(locals_, plan.with_itemsize(itemsize, self.config.direct_bytes))
        for parameter, view in zip(self.parameters, self.layout.shards, strict=True):
            parameter.put(view)
        if converted:
            self._build_unsharded()
        else:
            self._list_parameters()
        self.table.register_sharded()

    @property
    def _converted(self) -> bool:
        """Return whether user code converted or moved parameters.

        True if a parameter and the flat shard differ in dtype or device, or if the address of a
        shard has changed.
        """
        shard = self.layout.shard
        kinds = {(x.dtype, x.device) for x in (each.local() for each in self.parameters)}
        return kinds != {(shard.dtype, shard.device)} or self.table.moved()

    def check_converted(self) -> None:
        """Raise `StateError` if parameters were converted while their gradients wait.

        `reset_sharded` would lose these gradients. Every rank that converted parameters raises.
        """
        if (
            self.has_pending_gradients
            and not self._dropped
            and not self.incomplete
            and self._converted
        ):
            names = [self.parameters[i].name for i in sorted(self.waiting)]
            raise StateError(
                f"{names} were converted or moved while their gradients wait for a reduction; "
                "convert them after it, or after zero_grad() of the module, which drops these "
                "gradients; to keep these gradients, convert the parameters back"
            )

    @property
    def has_pending_gradients(self) -> bool:
        """Return whether gradients of earlier backwards are not reduced yet."""
        return bool(self.waiting) or self.partial.waits


def _warn_of_use(group: "weakref.ref[ParameterGroup]", name: str, *_: object) -> None:
    """Warn that a loss used a sharded parameter outside its module's forward.

    Warns once for all units under one root.
    """
    found = group()
    if found is None or not found.use_warning.first():
        return
    path = f"{found.comm.path}.{name}" if found.comm.path else name
    warnings.warn(
        f"a loss used the sharded parameter {path} outside its module's forward, for example by "
        f"full_tensor(). The gradient of this use is not reduced: each rank adds the gradient of "
        "its own data. Compute this part of the loss in a forward: call the module that has the "
        "parameter, or move the code to a method of it and call register_fsdp_forward_method on "
        "that. Only a term that is the same on all ranks, such as a penalty on weights, is right "
        "as it is; filter this warning then. It is given once",
        stacklevel=2,
    )


class StepHooks:
    """Hooks on all optimizers: number the steps, and check each optimizer at its first step.

    Attributes:
        count: Number of steps of all optimizers so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self.checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        register_optimizer_step_pre_hook(uncompiled(self._before))
        register_optimizer_step_post_hook(uncompiled(self._count))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._count(optimizer)
        if optimizer not in self.checked:
            self.checked.add(optimizer)
            self._check(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += 1
        # Marks the parameters, because other optimizers may step on some ranks only. Version
        # counters are not enough: they do not change in all steps, for example with
        # ``foreach=True`` on DTensors or with ``fused=True``.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor | RaggedTensor):
                    vars(parameter)[STEPPED_ATTRIBUTE] = self.count

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if the optimizer holds parameters that `fully_shard` replaced."""
        if optimizer in self._warned:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # A gradient means that a module outside the unit still trains the parameter.
        found = [sharded_from(p) for p in held if p.grad is None]
        names = [parameter.name for parameter in found if parameter is not None]
        if names:
            self._warned.add(optimizer)
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            warnings.warn(
                f"{type(optimizer).__name__} holds {', '.join(names[:2])}{more}, which fully_shard "
                "has replaced: stepping them changes nothing in the model; make the optimizer "
                "after fully_shard, from the parameters of the module while it is sharded",
                stacklevel=4,
            )


step_hooks = cache(StepHooks)


def watch_optimizers() -> None:
    """Let every optimizer be checked at its next step. Called when parameters were replaced."""
    step_hooks().checked.clear()
