"""One group: parameters of one dtype that are gathered and reduced in one collective each."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, Collectives, Work

from ._axes import DataAxes
from ._collect import Collector
from ._cut import Cut
from ._faces import Faces
from ._gradients import Batch, PartialSum, Reduction
from ._options import Options
from ._packing import Packing
from ._parameters import ShardedParameter, mixture, no_memory
from ._plan import is_large
from ._precision import choose_dtypes
from ._states import Event, ParameterState, advance
from ._steps import optimizer_steps
from ._storage import Storage
from ._torch import are_parts, inside_backward, local_of, named_range, writes_to
from .layouts._exact import ExactLayout
from .layouts._layout import Layout


class ParameterGroup:
    """Parameters whose shards are one flat buffer, and where they are in their life."""

    flat = True  # a group of shards that are no views of one buffer says otherwise

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        axes: DataAxes,
        collectives: Collectives,
        storage: Storage,
    ) -> None:
        """Copy this rank's rows; nothing is communicated, and registered only on request."""
        self.parameters = list(parameters)
        self.axes = self.reduce_axes = axes
        self.storage = storage
        self.smaller: Axis | None = None  # what `keep` shards over between forward and backward
        self.partial = PartialSum()
        self._waiting: set[int] = set()  # trained in backwards whose gradients are not reduced yet
        self.path = ""  # from the root of the step to the unit, once there is one
        self._collectives = collectives
        self._work: Work | None = None
        self._noted: tuple[int, int] | None = None
        self.state = ParameterState.SHARDED
        wholes = []
        for parameter in self.parameters:
            whole = cast(Tensor, parameter.original()).detach()
            wholes.append(local_of(whole) if isinstance(whole, DTensor) else whole)
        kept = self._own_parts(wholes)
        self.collector: Collector | None = None
        self._batch: Batch | None = None
        self._reduced: list[int] = []  # what the batch has
        self.layout: Layout = self._lay_out(kept)
        if storage.grads != "copy" and axes.size > 1:  # alone, gradients are not packed at all
            self._collect(fused=storage.grads == "fused")
        for parameter, local in zip(self.parameters, self.layout.shards, strict=True):
            parameter.build_sharded(local)
        self._build_unsharded()

    def _own_parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        axis = self.axes.shard
        self._cuts = [
            Cut(shape=tuple(whole.shape), dim=parameter.dim or 0, degree=axis.size)
            for parameter, whole in zip(self.parameters, wholes, strict=True)
        ]
        return [cut.part(each, axis.index) for cut, each in zip(self._cuts, wholes, strict=True)]

    def _lay_out(self, locals_: Sequence[Tensor]) -> Layout:
        self.dtypes = choose_dtypes(self.storage.precision, locals_[0].dtype)
        if not locals_[0].is_meta:
            locals_ = [local.to(self.storage.rest) for local in locals_]
        layout = self._layout_of(locals_, self.dtypes.compute)
        slots = layout.slots
        # Gradients lie in the order of the shard, so that both can be stepped as one tensor.
        self.order = sorted(range(len(slots)), key=lambda i: slots[i].shard_offset)
        return layout

    def _layout_of(self, locals_: Sequence[Tensor], compute: torch.dtype) -> Layout:
        storage = self.storage
        return ExactLayout(
            locals_,
            self._cuts,
            self.axes.shard,
            dtype=compute,
            device=storage.device,
            buffers=storage.buffers,
            pinned=storage.pinned and not locals_[0].is_meta,
            direct_bytes=storage.direct_bytes,
        )

    def install_sharded(self) -> None:
        """Register the sharded parameters with their modules."""
        self._faces.show_sharded()

    def _build_unsharded(self) -> None:
        for parameter, full in zip(self.parameters, self.layout.fulls, strict=True):
            parameter.build_unsharded(full)
        self._fulls = self.layout.fulls
        self.layout.free()
        self._addresses = self._found_addresses()
        self._faces = Faces(self.parameters)
        self._batch = None
        if self.collector is not None:
            self.collector.watch()

    def _collect(self, fused: bool) -> None:
        """Pack large gradients as they come; others cost less when they are packed together."""
        itemsize, least = self.dtypes.reduce.itemsize, self.storage.direct_bytes
        large = [
            i
            for i, slot in enumerate(self.layout.slots)
            if is_large(slot.shard_numel, itemsize, least)
        ]
        if large:
            self.collector = Collector(
                self.parameters, large, self.reduced, self._packing, self._take, fused
            )

    def _packing(self, chosen: Sequence[int]) -> Packing:
        return self.layout.packing(chosen, self.dtypes.reduce.itemsize)

    def _take(self, numel: int) -> Tensor:
        return self.storage.buffers.take(numel, self.dtypes.reduce, self.storage.device)

    def gather(self) -> None:
        """Start the all-gather unless it was started or has arrived."""
        kept = self.state is ParameterState.POST_FORWARD
        if not kept and self.state is not ParameterState.SHARDED:
            return
        if self.layout.shard.is_meta:
            raise no_memory(self.parameters, self.path)
        before = self.state
        try:
            if kept and self.smaller is not None:
                with named_range("all_gather", self.path, self.smaller.name):
                    self._work = self.layout.gather_kept(self.smaller, self._collectives)
            else:
                with named_range("all_gather", self.path, self.axes.shard.name):
                    self._work = self.layout.gather(self.axes.shard, self._collectives)
                self._noted = None
            self.state = advance(self.state, Event.GATHER)
        except BaseException:
            self._work, self.state = None, before
            self.layout.free()
            raise

    @property
    def incomplete(self) -> bool:
        """Return whether a group that began without memory has it for some parameters only."""
        return self.layout.shard.is_meta and len({p.local().is_meta for p in self.parameters}) > 1

    @property
    def available(self) -> bool:
        """Return whether a gather can start: it needs none, or there is memory for it."""
        resting = self.state in (ParameterState.SHARDED, ParameterState.POST_FORWARD)
        return not resting or self.layout.available

    @property
    def unsharded(self) -> bool:
        """Return whether modules have the unsharded parameters."""
        return self.state is ParameterState.UNSHARDED

    @property
    def stale(self) -> bool:
        """Return whether an optimizer stepped, or shards were written to, since `note_writes`."""
        if self._noted is None or self.state is ParameterState.SHARDED:
            return False
        return (optimizer_steps(), self._writes()) != self._noted

    def note_writes(self) -> None:
        """Watch for writes to the shards: what is gathered, or a part of it, stays for a while.

        They are watched from now on, or from the first call since the gather.
        """
        if self._noted is None:
            self._noted = optimizer_steps(), self._writes()

    def _writes(self) -> int:
        # What is written through a DTensor is counted there, what is written below it is not.
        parts = sum(writes_to(p.sharded) + writes_to(p.part(p.sharded)) for p in self.parameters)
        return writes_to(self.layout.shard) + parts

    def unshard(self) -> None:
        """Wait for the all-gather, started here if need be, and register unsharded parameters.

        Where the all-gather failed, the group is sharded again. Where what comes after it raised,
        the next call goes on from there.
        """
        self.gather()
        if self.state is ParameterState.GATHERING:
            if self._work is not None:
                with named_range("wait_all_gather", self.path):
                    self._wait(self._work)
            with named_range("show_unsharded", self.path):
                self._finish_gather()
                self._faces.show_unsharded()
            self.state = advance(self.state, Event.ARRIVE)
            self._work = None
            self.layout.drop()

    def _wait(self, work: Work) -> None:
        try:
            self.layout.wait(work)
        except Exception:  # an interrupt says nothing of the gather: it can be awaited again
            self._come_back()
            raise

    def _finish_gather(self) -> None:
        self.layout.finish_gather(self._work)
        if self.layout.fulls is not self._fulls:  # the memory before is left to a collective
            for parameter, full in zip(self.parameters, self.layout.fulls, strict=True):
                parameter.move_unsharded(full)
            self._fulls = self.layout.fulls

    def reshard(self) -> None:
        """Register sharded parameters and free the gathered ones; a gather under way is awaited."""
        if self.state is ParameterState.GATHERING:
            self._stop()
        elif self.state is ParameterState.POST_FORWARD:
            self.state = advance(self.state, Event.RESHARD)
            self.layout.drop()
        elif self.state is ParameterState.UNSHARDED:
            # In this order an exception in between leaves nothing that is shown and not readable.
            self.install_sharded()
            self.state = advance(self.state, Event.RESHARD)
            self.layout.free()

    def _stop(self) -> None:
        """Wait for a gather under way, if there is one, and come back to sharded."""
        if self._work is not None:
            self._wait(self._work)
        self._come_back()

    def _come_back(self) -> None:
        self._work = None
        self.install_sharded()
        self.state = advance(self.state, Event.RESET)
        self.layout.drop()
        self.layout.free()

    def keep(self) -> None:
        """Reshard, but keep what the backward gather over the smaller axis needs."""
        if self.smaller is None or self.axes.shard.size == 1:
            self.reshard()
        elif self.state is ParameterState.UNSHARDED:
            with torch.no_grad():
                self.layout.keep(self.smaller.size)
            self.install_sharded()
            self.state = advance(self.state, Event.KEEP)
            self.layout.free()

    def reset(self) -> None:
        """Come back to sharded from any state; gradients not yet reduced are dropped.

        Communicates nothing. A gather under way is awaited; its error comes last.
        """
        self.drop_gradients()
        self.partial.clear()
        self._waiting.clear()
        self._stop()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet, of this rank alone if need be.

        The next reduction is of the same parameters as if they were there.
        """
        for parameter in self.parameters:
            parameter.drop_gradient()
        if self.collector is not None:
            self.collector.drop()
        self.partial.drop()

    def hold_gradients(self) -> None:
        """Put gradients that are not to be reduced yet aside, in the dtype of the reduction."""
        chosen = self.reduced()
        self._drop_frozen(chosen)
        self._waiting.update(chosen)
        if self.dtypes.reduce != self.dtypes.compute:
            for parameter in self.parameters:
                parameter.hold_gradient(self.dtypes.reduce)

    def reduced(self) -> list[int]:
        """Return which parameters the next reduction is of, in the order of the shard.

        Those that train, and those that were frozen while gradients of theirs waited. So all ranks
        choose the same, whichever parameters each of them used.
        """
        parameters, waiting = self.parameters, self._waiting
        return [i for i in self.order if parameters[i].sharded.requires_grad or i in waiting]

    def _drop_frozen(self, chosen: Sequence[int]) -> None:
        """Forget what came for parameters, not of ``chosen``, that were frozen since a forward."""
        if len(chosen) < len(self.parameters):
            for i in set(self.order).difference(chosen):
                self.parameters[i].drop_gradient()

    def reduce(self, options: Options) -> Reduction | None:
        """Start the reduction of the gradients, zeros where there are none; None if all frozen.

        What no rank used gets no gradient.
        """
        with torch.no_grad():
            return self._reduction(options)

    def _reduction(self, options: Options) -> Reduction | None:
        chosen = self.reduced()
        self._drop_frozen(chosen)
        if not chosen:
            return None
        if self._batch is None or self._reduced != chosen:
            self._batch, self._reduced = self._batch_of(chosen), chosen
        collectives, parameters = self._collectives, self.parameters
        gradients: list[Tensor] = []
        rows: Tensor | None = None
        if self.collector is None:
            found = [parameters[i].take_gradient(collectives) for i in chosen]
            used = [gradient is not None for gradient in found]
            gradients = [
                parameters[i].no_gradient() if gradient is None else gradient
                for i, gradient in zip(chosen, found, strict=True)
            ]
        else:
            rows, used = self.collector.finish(chosen, collectives)
        axes = self.reduce_axes
        adds_up = not options.all_reduce and any(axis.size > 1 for axis in axes.replicate)
        self._waiting = set(chosen) if adds_up else set()
        return Reduction(self._batch, gradients, rows, used, axes, collectives, options)

    def _batch_of(self, chosen: Sequence[int]) -> Batch:
        return Batch(
            path=self.path,
            parameters=[self.parameters[i] for i in chosen],
            packing=self._packing(chosen),
            dtype=self.dtypes.reduce,
            shard=self.layout.shard,
            partial=self.partial,
            buffers=self.storage.buffers,
        )

    @property
    def in_place(self) -> bool:
        """Return whether modules hold the group's parameters, and those the flat shard's memory."""
        resting = self.state in (ParameterState.SHARDED, ParameterState.POST_FORWARD)
        if not resting:
            return True
        # A backward gathers what its forward did, wherever parameters were moved in between.
        return self._faces.sharded_shown and (
            inside_backward() or (self._in_place() and not self.moved)
        )

    def _in_place(self) -> bool:
        """Return whether the sharded parameters have the flat shard's memory."""
        faces = cast("list[DTensor]", [parameter.sharded for parameter in self.parameters])
        return are_parts(self.layout.shards, faces)

    @property
    def moved(self) -> bool:
        """Return whether the memory of a shard is no longer the flat shard's.

        Sending a tensor to another process moves its storage to shared memory, on the CPU.
        """
        return self._found_addresses() != self._addresses

    def _found_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.layout.shards)) if self.flat else []

    def refusals(self) -> list[str]:
        """Return why `adopt` cannot take what is registered now: nothing if it can."""
        where = f"in {self.path}: " if self.path else ""
        said = [parameter.refusal() for parameter in self.parameters]
        refused = [where + each for each in said if each is not None]
        if refused or self.incomplete:
            return refused  # the rest may be loaded later
        mixed = mixture(self.parameters)
        return [] if mixed is None else [where + mixed]

    def undo_replacements(self) -> None:
        """Register the sharded parameters where others stand, which `refusals` refuses."""
        for parameter in self.parameters:
            parameter.undo_replacement()

    @torch.no_grad()
    def adopt(self) -> None:
        """Bring parameters that were replaced or converted from outside back to the flat shard.

        ``load_state_dict(assign=True)`` and ``Module.to`` give parameters memory of their own. The
        group is sharded, and `refusals` has none.
        """
        if self.incomplete:
            return
        for parameter in self.parameters:
            parameter.take_replacement()
        locals_ = [parameter.local() for parameter in self.parameters]
        views = self.layout.shards
        kinds = {(x.dtype, x.device) for x in locals_}
        if kinds == {(self.layout.shard.dtype, self.layout.shard.device)} and not self.moved:
            for view, local in zip(views, locals_, strict=True):
                if local is not view:
                    view.copy_(local)
        else:
            self.layout = self._lay_out(locals_)
            self._build_unsharded()
        for parameter, view in zip(self.parameters, self.layout.shards, strict=True):
            parameter.put(view)
        self._faces = Faces(self.parameters)
        self.install_sharded()
