"""Reductions: from the packed gradients of one group to the gradients of its sharded parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Literal, cast

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._buffers import Buffers, ResizeBuffer
from ._errors import StateError
from ._mesh import DataAxes
from ._offsets import GradientRows
from ._options import Options
from ._packing import Packing
from ._param import ShardedParameter
from ._streams import Begun, SideStream, Streams, Waitable
from ._torch import (
    any_hooks_after_gradient,
    averages,
    give_gradients,
    have_no_gradients,
    named_range,
    profiled,
    storage_references,
    tensor_references,
    training,
)


class PartialSum:
    """What reductions left that were scattered and not yet summed over the replicas."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self._used: list[bool] = []

    @property
    def waits(self) -> bool:
        """Return whether something is kept."""
        return self._flat is not None

    def add(
        self, flat: Tensor, names: tuple[str, ...], used: list[bool]
    ) -> tuple[Tensor, list[bool]]:
        """Keep the sum of ``flat`` and what is kept; return it, and what this rank used in it."""
        if self._flat is not None:
            if names != self._names:
                raise StateError(
                    f"gradients of {list(self._names)} wait for an all-reduce, and now come those "
                    f"of {list(names)}; freeze parameters only after a reduction over all axes"
                )
            flat = flat.add_(self._flat)
            used = [now or before for now, before in zip(used, self._used, strict=True)]
        self._flat, self._names, self._used = flat, names, used
        return flat, used

    @property
    def flat(self) -> Tensor | None:
        """Return what is kept."""
        return self._flat

    def drop(self) -> None:
        """Keep zeros in place of this rank's sum, with which replicas add theirs as before."""
        if self._flat is not None:
            self._flat.zero_()
            self._used = [False] * len(self._used)

    def clear(self) -> None:
        """Keep nothing."""
        self._flat, self._names, self._used = None, (), []


# From there on memory counts more than the time to get it again.
RELEASED_BYTES = 2**18


class ReducedGradients:
    """A flat reduced gradient, and over it the gradients that sharded parameters are given.

    Made once, because views and DTensors cost more than the reduction of small parameters, and
    used again in each step in which nobody else refers to it any more. Where it is large, its
    memory is given back as long as no parameter has a gradient.
    """

    def __init__(
        self, rows: GradientRows, parameters: Sequence[ShardedParameter], like: Tensor
    ) -> None:
        """Make room for gradients and flags, of the dtype and on the device of ``like``."""
        pinned = like.is_pinned()
        self._buffer = ResizeBuffer(rows.reduced_numel, like.dtype, like.device, pinned)
        self.flat = flat = self._buffer.tensor
        self.values = flat[: rows.flags]
        self.gradients = [
            parameter.wrap(view)
            for parameter, view in zip(parameters, rows.views(flat), strict=True)
        ]
        self.locals_ = [
            parameter.part(gradient)
            for parameter, gradient in zip(parameters, self.gradients, strict=True)
        ]
        self.in_flight = True  # a reduction that is not finished writes it
        self._released = False
        self._runs: dict[tuple[int, int], Tensor] = {}
        self._storage = flat.untyped_storage()
        self._tensors = [*self.gradients, *self.locals_]
        self._marks = [vars(each) for each in self.gradients]
        self._references = self._counted()

    def _counted(self) -> int:
        """Return how many hold the memory or one of the tensors, or have put a mark there.

        It is least where no one does, and so a sum says it.
        """
        found = getrefcount(self._storage) + sum(storage_references([self._storage]))
        found += sum(map(getrefcount, self._tensors)) + sum(map(len, self._marks))
        found += sum(training(self.gradients))
        return found + sum(map(tensor_references, self._tensors))

    @property
    def held(self) -> bool:
        """Return whether a parameter or a user refers to the memory, or one is marked by a user."""
        return self.in_flight or self._counted() != self._references

    def use(self) -> None:
        """Get memory again, for a reduction that writes it."""
        # After what an optimizer read of it on the current stream: a reduction begins after that.
        self.in_flight = True
        if self._released:
            self._buffer.allocate()
            self._released = False

    def release(self) -> None:
        """Give the memory back, if nothing refers to it."""
        # No stream writes it: while one may, it is `in_flight`, until the current one waited.
        if not self._released and not self.held:
            self._buffer.free()
            self._released = True

    def run(self, start: int, length: int) -> Tensor:
        """Return neighbouring gradients as one flat view: ``length`` elements from ``start`` on."""
        found = self._runs.get((start, length))
        if found is None:
            found = self._runs[start, length] = self.flat[start : start + length]
            self._references += 1
        return found


class ReductionPlan:
    """What the reductions of some parameters of a group have in common: for many steps.

    ``path`` is that of the module now, for a profile; ``shard`` the flat shard, for dtype and
    device;
    ``offloaded``: it rests on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        rows: GradientRows,
        dtype: torch.dtype,
        device: torch.device,
        shard: Tensor,
        partial: PartialSum,
        buffers: Buffers,
        offloaded: bool,
    ) -> None:
        self.path = ""
        self.offloaded = offloaded
        self.parameters = list(parameters)
        self.sharded = [parameter.sharded for parameter in parameters]
        self.unsharded = [parameter.unsharded for parameter in parameters]
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.partial = partial
        self.buffers = buffers
        self.packing = Packing(rows, dtype, device, buffers)
        self.outputs: list[ReducedGradients] = []
        self.nothing: Sequence[Tensor | None] = [None] * len(self.parameters)
        self.all_used = [True] * len(self.parameters)
        self.is_large = rows.reduced_numel * shard.element_size() >= RELEASED_BYTES
        self._prepared: tuple[Options, DataAxes, Collectives, Division, StartScatter] | None = None

    def prepared(
        self, options: Options, axes: DataAxes, collectives: Collectives
    ) -> "tuple[Division, StartScatter]":
        """Return what a reduction divides by, and what starts its reduce-scatter.

        Options and axes are frozen, so what was worked out holds as long as they are the same.
        """
        known = self._prepared
        if (
            known is None
            or known[0] is not options
            or known[1] is not axes
            or known[2] is not collectives
        ):
            division = Division.of(options, axes, self.dtype, self.device)
            start = _prepared_scatter(collectives, axes.shard, division.op, self.device)
            known = self._prepared = options, axes, collectives, division, start
        return known[3], known[4]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    def release(self) -> None:
        """Give back the memory of gradients that no parameter has, if it is worth the while."""
        if self.is_large and self.outputs and have_no_gradients(self.sharded):
            for known in self.outputs:
                known.release()

    def output(self) -> ReducedGradients | None:
        """Return gradients that nobody refers to; None where they would be added to others.

        Mostly all parameters have others, or none has, so that the first is asked. Two are kept at
        most: a user may hold those of the step before.
        """
        if self.sharded[0].grad is not None:
            return None
        for known in self.outputs:
            if not known.held:
                known.use()
                return known
        with torch.inference_mode(False), torch.no_grad():  # for steps of all kinds
            made = ReducedGradients(self.rows, self.parameters, self.shard)
        self.outputs = [*self.outputs[-1:], made]
        return made


class Reduction:
    """One reduction under way: a reduce-scatter, then for HSDP an all-reduce of its result.

    Of contiguous ``gradients``, or of ``rows`` where they are packed already; these are given back.
    ``used`` says of which parameters this rank has gradients; the others, zeros here, get one only
    if another rank has.
    Of ``options`` counts what they are now: the factor, the hook, whether replicas are summed.
    As long as ``scattering`` is there, the packed gradients are alive.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        gradients: list[Tensor],
        rows: Tensor | None,
        used: list[bool],
        axes: DataAxes,
        collectives: Collectives,
        options: Options,
    ) -> None:
        self._plan = plan
        self._collectives = collectives
        self._options = options
        self._hooked = any_hooks_after_gradient(plan.sharded)
        division, start = plan.prepared(options, axes, collectives)
        self._after, self._op = division.after, division.op
        self._sums = list(division.sums)
        self._ready = True
        self.scattering: Waitable | None = None
        self._summing: Waitable | None = None
        self._gradients = gradients  # released when they are packed
        self._used = used
        self._output: ReducedGradients | None = None
        self._flat: Tensor | None = None  # this rank's reduced row, flags included
        self._rows: Tensor | None = None
        # In the rows, but where they were written in place, and the layout has no room there.
        self._has_flags = plan.packing.has_flags if rows is None else not plan.rows.flags_apart
        if axes.shard.size > 1:
            self._rows = rows = self._pack(rows, division.before)
            self._flat = self._target(rows)
            if profiled():
                with named_range("reduce_scatter", plan.path, axes.shard.name):
                    self.scattering = self._scatter(axes.shard, start, rows, self._flat)
            else:
                self.scattering = self._scatter(axes.shard, start, rows, self._flat)
        elif self._sums or options.hook is not None:
            self._begin_sum(self._pack(rows, division.before))

    def _pack(self, rows: Tensor | None, before: float | None) -> Tensor:
        plan, gradients = self._plan, self._gradients
        if rows is None:
            self._gradients = []
            if profiled():
                with named_range("pack_gradients", plan.path):
                    rows = plan.packing.pack(gradients, self._used)
            else:
                rows = plan.packing.pack(gradients, self._used)
        if before and self._has_flags:  # a flag could become zero
            width = plan.rows.flags + len(self._used) if plan.rows.flags_apart else plan.rows.width
            rows.view(-1, width)[:, : plan.rows.flags].div_(before)
        elif before:
            rows.div_(before)
        return rows

    def _target(self, rows: Tensor) -> Tensor:
        """Return memory for the reduced row: that of the gradients, if nothing comes between."""
        plan = self._plan
        # Where hooks step an optimizer in backward, gradients are not to outlive it.
        if not self._hooked and (self._options.all_reduce or not self._sums):
            self._output = plan.output()
        if self._output is not None and _is_alike(self._output.flat, rows):
            return self._output.flat
        return rows.new_empty(plan.rows.reduced_numel)

    def _scatter(self, axis: Axis, start: "StartScatter", rows: Tensor, flat: Tensor) -> Waitable:
        if self._has_flags:
            return start(flat, rows)
        flags, end = self._plan.packing.flags(self._used, rows.dtype), self._plan.rows.flags
        inputs, outputs = [rows, flags.flatten()], [flat[:end], flat[end:]]
        return self._collectives.reduce_scatter(axis, inputs, outputs, op=self._op)

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat
        if not self._sums:
            return
        plan = self._plan
        self._flat, self._used = plan.partial.add(flat, plan.names, self._used)
        self._ready = self._options.all_reduce
        if self._ready:
            plan.partial.clear()
            self._summing = self._sum(self._sums.pop(0))

    def _sum(self, axis: Axis) -> Waitable:
        flats = [] if self._flat is None else [self._flat]
        try:
            with named_range("all_reduce", self._plan.path, axis.name):
                return self._collectives.all_reduce(axis, flats, op=self._op)
        except BaseException:  # it may have been started all the same
            self._lose_output()
            raise

    @property
    def ends_early(self) -> bool:
        """Return whether it is finished in backward, for hooks, which one rank alone may have.

        Not a sum over two axes of what is kept whole: its end starts the second one, which has to
        come in the same place on all ranks.
        """
        return self._hooked and (self.scattering is not None or not self._sums)

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, release its input, start the all-reduce of HSDP."""
        if self.scattering is not None:
            try:
                if profiled():
                    with named_range("wait_reduce_scatter", self._plan.path):
                        self.scattering.wait()
                else:
                    self.scattering.wait()
            except Exception:  # it has ended, with this error; an interrupt says nothing of it
                self.scattering, self._ready = None, False
                self._lose_output()
                raise
            self.scattering = None
            self._give_back()
            if self._sums and self._flat is not None:
                self._begin_sum(self._flat)

    def _give_back(self) -> None:
        if self._rows is not None:
            self._plan.buffers.give(self._rows)
            self._rows = None

    def wait(self) -> None:
        """Wait for everything; afterwards nothing of this reduction is in flight."""
        if self.scattering is not None:
            self.finish_scatter()
        while self._summing is not None:
            try:
                with named_range("wait_all_reduce", self._plan.path):
                    self._summing.wait()
            except Exception:
                self._summing = None
                self._lose_output()
                raise
            self._summing = self._sum(self._sums.pop(0)) if self._sums else None

    def _lose_output(self) -> None:
        """Leave the memory of the result to a collective that failed, and may still write to it."""
        plan = self._plan
        plan.outputs = [output for output in plan.outputs if output is not self._output]
        self._output = None

    def drop(self) -> None:
        """Wait for what is under way and start nothing more: the result is not wanted."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
        if self.scattering is not None:
            self.scattering.wait()
            self.scattering = None
            self._give_back()
        self._release_output()

    def finish(self) -> None:
        """Wait, divide, and put the results on the parameters' ``grad``, without autograd."""
        self.wait()
        if self._ready:
            self._put_gradients()
        self._release_output()

    def _release_output(self) -> None:
        if self._output is not None:
            self._output.in_flight = False

    def _put_gradients(self) -> None:
        plan, used = self._plan, self._used if all(self._used) else self._used_by_any()
        locals_ = self._results()
        made = plan.nothing if self._output is None else self._output.gradients
        if self._output is not None and all(used):
            for i in give_gradients(plan.sharded, self._output.gradients):
                plan.parameters[i].add_gradient(locals_[i])
            return
        parts = zip(plan.parameters, locals_, made, used, strict=True)
        for parameter, local, gradient, is_used in parts:
            if is_used:
                parameter.add_gradient(local, gradient)

    def _used_by_any(self) -> list[bool]:
        """Return which parameters any rank used; reads flags only where this rank did not."""
        if self._flat is None:
            return self._used
        first = self._plan.rows.flags
        return self._flat[first : first + len(self._used)].ne(0).tolist()

    def _results(self) -> list[Tensor]:
        """Return this rank's part of each gradient, in the dtype and on the device of shards."""
        plan, flat = self._plan, self._flat
        if flat is None:
            return [self._divided(gradient).to(plan.shard) for gradient in self._gradients]
        output = self._output
        ours = output is not None and flat is output.flat
        values = output.values if ours and output is not None else flat[: plan.rows.flags]
        values = self._final(values)
        if output is None:
            return plan.rows.views(values.to(plan.shard))
        if not ours:
            output.values.copy_(values)
        return output.locals_

    def _final(self, values: Tensor) -> Tensor:
        """Return the reduced values after the user's hook, divided."""
        if self._options.hook is not None:
            self._options.hook(values[:])  # a view of its own, so that it counts if it is kept
        return values if self._after is None else values.div_(self._after)

    def _divided(self, reduced: Tensor) -> Tensor:
        return reduced if self._after is None else reduced.div_(self._after)


class StreamedReduction(Reduction):
    """A reduction on streams of its own, begun to its end at once.

    The sum over replicas, a user's hook, the division and the copy to the CPU follow the
    reduce-scatter there, while the computation goes on. It waits for the reduce-scatter alone, for
    the packed gradients' memory (`finish_scatter`), and in `wait` for the end; the host waits only
    there, and only for what was copied to the CPU.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        gradients: list[Tensor],
        rows: Tensor | None,
        used: list[bool],
        axes: DataAxes,
        collectives: Collectives,
        options: Options,
        streams: Streams,
    ) -> None:
        self._streams = streams
        self._made: list[Tensor] | None = None
        self._ended: Begun | None = None
        self._held: list[Tensor] = []  # what a side stream uses, until the end was waited for
        super().__init__(plan, gradients, rows, used, axes, collectives, options)
        try:
            self._go_on()
        except BaseException:  # of a collective that may still write to the result
            self._lose_output()
            raise

    def _target(self, rows: Tensor) -> Tensor:
        # The result is memory of this stream.
        with self._streams.reduce.after_current():
            return super()._target(rows)

    def _scatter(self, axis: Axis, start: "StartScatter", rows: Tensor, flat: Tensor) -> Waitable:
        # The packed rows, memory of the current stream, are kept.
        with self._streams.reduce.after_current():
            work = super()._scatter(axis, start, rows, flat)
            work.wait()  # lets this stream wait, and with gloo the host
        return self._streams.reduce.begun()

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat  # `_go_on` has begun it, or will

    def _go_on(self) -> None:
        """Begin all that follows the reduce-scatter; the memory of its result is kept for that."""
        streams = self._streams
        if self._flat is None:
            if self._plan.offloaded:
                with streams.offload.after_current("copy_gradients"):
                    self._made = [self._on_cpu(self._divided(each)) for each in self._gradients]
                # The gradients are kept until `finish_scatter`.
                self._ended = self.scattering = streams.offload.begun()
            return
        side = streams.all_reduce if self._sums else streams.reduce
        with side.after_current():
            if self.scattering is not None:
                self.scattering.wait()
            # Another stream may be lent the memory of the last sum, or of a result that was cast.
            self._held = [x for x in (self._flat, self._plan.partial.flat) if x is not None]
            super()._begin_sum(self._flat)
            while self._summing is not None:
                self._summing.wait()
                self._summing = self._sum(self._sums.pop(0)) if self._sums else None
            self._ended = side.begun()
            if self._ready and self._plan.offloaded:
                self._copy_to_cpu(side)
            elif self._ready:
                self._made = super()._results()
                self._ended = side.begun()

    def _copy_to_cpu(self, side: SideStream) -> None:
        """Copy the reduced row, flags included, and give its memory up."""
        flat, output, out = cast(Tensor, self._flat), self._output, self._streams.offload
        self._final(flat[: self._plan.rows.flags])
        with out.after_current("copy_gradients"):
            row = self._on_cpu(flat) if output is None else output.flat
            if output is not None:
                row.copy_(flat, non_blocking=True)
        for used_by in (side, out):
            used_by.uses(flat)
        self._flat, self._held = row, []
        self._made = self._plan.rows.views(row) if output is None else output.locals_
        self._ended = out.begun()

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        shard = self._plan.shard
        pinned = shard.is_pinned()
        made = torch.empty(tensor.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
        return made.copy_(tensor, non_blocking=True)

    def _give_back(self) -> None:
        if self._made is not None:
            self._gradients = []
        super()._give_back()

    def wait(self) -> None:
        """Wait for everything, on the host too for what was copied to the CPU."""
        self.finish_scatter()
        if self._ended is not None:
            with named_range("wait_reduction", self._plan.path):
                self._ended.wait()
                if self._plan.offloaded:
                    self._ended.synchronize()
            self._ended, self._held = None, []

    def drop(self) -> None:
        """Wait for what is under way: it was begun to its end."""
        self.wait()
        self._release_output()

    def _results(self) -> list[Tensor]:
        return super()._results() if self._made is None else self._made


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


StartScatter = Callable[[Tensor, Tensor], Waitable]  # of the output and the input


def _prepared_scatter(
    collectives: Collectives, axis: Axis, op: Literal["sum", "avg"], device: torch.device
) -> StartScatter:
    """Return what starts the same reduce-scatter each time; torch's looks things up only here."""
    divides = op == "sum" or averages(axis.group, device)
    if type(collectives) is TorchCollectives and divides and axis.size > 1:
        return collectives.prepare_reduce_scatter(axis, op)
    return lambda output, rows: collectives.reduce_scatter(axis, [rows], [output], op=op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What gradients are divided by before and after their sum, and over which axes that goes on.

    ``op`` is an average where the communication divides: then nothing comes after. What does is a
    tensor of one number on the CPU, for gradients on any device.
    """

    before: float | None
    after: Tensor | None
    op: Literal["sum", "avg"]
    sums: tuple[Axis, ...]

    @staticmethod
    def of(
        options: Options, axes: DataAxes, dtype: torch.dtype, device: torch.device
    ) -> "Division":
        """Return it for gradients that are reduced in ``dtype`` over ``axes``.

        float16 overflows in large sums: about half the factor, in powers of two, comes before.
        """
        sums = tuple(axis for axis in axes.replicate if axis.size > 1)
        before, factor = None, None
        if options.divide is not None or options.reduction != "mean":
            factor = options.divisor(axes.size)
        elif options.force_sum or (dtype == torch.float16 and axes.size > 1):
            factor = float(axes.size)
        elif not sums and options.hook is None and not averages(axes.shard.group, device):
            factor = float(axes.shard.size)  # once, at the end, and not as each sum ends
        if factor is not None and dtype == torch.float16 and axes.size > 1:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            factor /= before
        after = None
        if factor is not None and factor != 1.0:
            # A number would be made a tensor, and brought to this dtype, in each step.
            exact = dtype if dtype in (torch.float32, torch.float64) else torch.float64
            with torch.inference_mode(False):
                after = torch.tensor(factor, dtype=exact, device="cpu")
        return Division(
            before=before, after=after, op="avg" if factor is None else "sum", sums=sums
        )
