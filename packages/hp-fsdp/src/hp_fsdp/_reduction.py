"""Reductions: pack and reduce the gradients of a group, and set them on its sharded parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._agreement import Tag, is_exact
from ._errors import StateError
from ._mesh import DataAxes
from ._options import Options
from ._param import ShardedParameter, wrapper_of
from ._stats import UnitComm
from ._streams import Begun, SideStream, Streams, Waitable
from ._tags import TAG_FLAGS, flags_agree
from ._torch import (
    any_hooks_after_gradient,
    averages,
    named_range,
    pack_rank_major,
    profiled,
    set_gradients,
)
from .layout import GradientRows

_dtype_of = attrgetter("dtype")


StartScatter = Callable[[Tensor, Tensor], Waitable]  # called with the output and the input


def _prepared_scatter(
    collectives: Collectives, axis: Axis, op: Literal["sum", "avg"], device: torch.device
) -> StartScatter:
    """Return a function that starts the reduce-scatter, with all lookups done once."""
    divides = op == "sum" or averages(axis.group, device)
    if type(collectives) is TorchCollectives and divides and axis.size > 1:
        return collectives.prepare_reduce_scatter(axis, op)
    return lambda output, rows: collectives.reduce_scatter(axis, [rows], [output], op=op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a reduction divides gradients, and over which axes it all-reduces them.

    Attributes:
        before: Divisor before the reduction, or None if there is no division before it.
        after: Divisor after the reduction, a 0-dim CPU tensor, or None if there is no division
            after it.
        op: "avg" if the collectives divide, else "sum".
        sums: The replicate axes that have two or more ranks.
    """

    before: float | None
    after: Tensor | None
    op: Literal["sum", "avg"]
    sums: tuple[Axis, ...]

    @staticmethod
    def of(
        options: Options, axes: DataAxes, dtype: torch.dtype, device: torch.device
    ) -> "Division":
        """Return the division of gradients that are reduced in ``dtype`` over ``axes``.

        In float16, large sums overflow. So the gradients are divided twice: before the reduction by
        a power of two near the square root of the factor, and after it by the rest.
        """
        sums = tuple(axis for axis in axes.replicate if axis.size > 1)
        before, factor = None, None
        if options.divide is not None or options.reduction != "mean":
            factor = options.divisor(axes.size)
        elif options.force_sum or (dtype == torch.float16 and axes.size > 1):
            factor = float(axes.size)
        elif not sums and options.hook is None and not averages(axes.shard.group, device):
            factor = float(axes.shard.size)  # one division of the result
        if factor is not None and dtype == torch.float16 and axes.size > 1:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            factor /= before
        after = None
        if factor is not None and factor != 1.0:
            # With a Python number, torch would create a tensor of this dtype in each step.
            exact = dtype if dtype in (torch.float32, torch.float64) else torch.float64
            with torch.inference_mode(False):
                after = torch.tensor(factor, dtype=exact, device="cpu")
        return Division(
            before=before, after=after, op="avg" if factor is None else "sum", sums=sums
        )


class PartialSum:
    """Accumulates reduce-scattered gradients until the all-reduce over replicas.

    Used if ``set_requires_all_reduce(False)`` postpones the all-reduce to a later backward.

    Attributes:
        flat: The sum so far, a flat tensor of gradients and flags, or None if there is no sum.
    """

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self._scale: object = None
        self._used: list[bool] = []

    @property
    def waits(self) -> bool:
        """Return whether there is a sum that has not been all-reduced."""
        return self.flat is not None

    def add(
        self, flat: Tensor, names: tuple[str, ...], used: list[bool], scale: object
    ) -> tuple[Tensor, list[bool]]:
        """Add ``flat`` to the accumulated sum.

        Args:
            flat: Output of the reduce-scatter on this rank. It is updated in place and kept.
            names: Names of the parameters. They must be the same until the all-reduce.
            used: One bool per parameter: whether this rank has a gradient.
            scale: How ``flat`` was divided. It must be the same until the all-reduce.

        Returns:
            The sum; and one bool per parameter: whether this rank had a gradient in any term of the
            sum.

        Raises:
            StateError: ``names`` or ``scale`` differ from earlier calls.
        """
        if self.flat is not None:
            if names != self._names:
                raise StateError(
                    f"cannot add gradients of {list(names)}: gradients of {list(self._names)} wait "
                    "for an all-reduce; freeze parameters only after a reduction over all axes"
                )
            if self._scale not in (None, scale):
                raise StateError(
                    f"gradients of {list(names)} that wait for an all-reduce are divided in "
                    "another way than the new ones; set divide factors and "
                    "force_sum_reduction_for_comms only after a reduction over all axes"
                )
            flat = flat.add_(self.flat)
            used = [now or before for now, before in zip(used, self._used, strict=True)]
        self.flat, self._names, self._used, self._scale = flat, names, used, scale
        return flat, used

    def drop(self) -> None:
        """Set this rank's sum to zero.

        The sum is kept as zeros, because the other replicas may still all-reduce theirs.
        """
        if self.flat is not None:
            self.flat.zero_()
            self._used, self._scale = [False] * len(self._used), None

    def clear(self) -> None:
        """Remove the sum, so that the next `add` starts from zero."""
        self.flat, self._names, self._used = None, (), []


# If the packed gradients have at most this many elements, copying them once more to append the
# flags costs less than sending the flags as a second tensor.
COPIED_NUMEL = 2**16


class ReductionPlan:
    """Data that all reductions of the same parameters of a group share.

    Attributes:
        comm: Starts and counts the collectives of the unit.
        tag: Tag of the unit, sent with every reduction.
        offloaded: Whether the shards are on the CPU and the computation on another device.
        rows: Layout of the packed gradients.
        shard: The flat shard. Gradients get its dtype and device.
        has_flags: Whether `pack` writes the flags into the packed gradients. If False, `flags`
            returns them as a second tensor, which is reduced in the same call.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        rows: GradientRows,
        dtype: torch.dtype,
        device: torch.device,
        shard: Tensor,
        partial: PartialSum,
        offloaded: bool,
        tag: Tag,
        comm: UnitComm,
    ) -> None:
        self.comm = comm
        self.tag = tag
        self.offloaded = offloaded
        self.parameters = list(parameters)
        self.sharded = [parameter.sharded for parameter in parameters]
        self.wrap = wrapper_of(parameters)
        # User code may register one sharded parameter in place of another one, to tie them.
        self.tied = len(set(map(id, self.sharded))) < len(self.sharded)
        self.unsharded = [parameter.unsharded for parameter in parameters]
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.partial = partial
        # Properties that every reduction reads.
        self.numel, self.reduced_numel = rows.numel, rows.reduced_numel
        self.tag_columns = slice(rows.tag_start, rows.tag_start + TAG_FLAGS)
        self.has_flags = not rows.separate_flags or self.numel <= COPIED_NUMEL
        self._ranks = self.numel // rows.flags if rows.separate_flags else rows.degree
        self._rearranged = [(i, e.spec) for i, e in enumerate(rows.columns) if e.spec.dim]
        self._has_empty = any(not each.spec.numel for each in rows.columns)
        self._gaps: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        self._flags: dict[torch.dtype, Tensor] = {}
        with torch.inference_mode(False):
            self.tag_flags = torch.tensor(tag.flags, dtype=dtype, device=device)
        self.is_exact = False  # whether the collectives send every element unchanged
        self.all_used = [True] * len(self.parameters)
        self._prepared: tuple[Options, DataAxes, Collectives, Division, StartScatter] | None = None

    def prepared(
        self, options: Options, axes: DataAxes, collectives: Collectives
    ) -> tuple[Division, StartScatter]:
        """Return the division of a reduction, and a function that starts its reduce-scatter.

        Both are cached for the same options, axes and collectives, which are frozen.
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
            self.is_exact = is_exact(collectives)
        return known[3], known[4]

    def pack(self, gradients: list[Tensor], used: Sequence[bool]) -> Tensor:
        """Return the packed gradients as a flat tensor, the input of the reduce-scatter.

        Args:
            gradients: One contiguous gradient per parameter; zeros if this rank has none. The list
                is changed.
            used: One bool per parameter: whether this rank has a gradient.
        """
        rows, pieces = self.rows, gradients
        for i, spec in self._rearranged:
            pieces[i] = spec.by_rank(pieces[i]).contiguous()
        if len(set(map(_dtype_of, pieces))) > 1:
            pieces = [piece.to(self.dtype) for piece in pieces]
        for i, gap in self._gap_tensors(used, pieces[0].dtype):
            pieces.insert(i, gap)
        if self._has_empty:
            pieces = [piece for piece in pieces if piece.numel()]
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        if pieces:
            packed = flat.view(rows.degree, rows.width)
            pack_rank_major(pieces, dim=0, num_chunks=rows.degree, out=packed)
        if rows.separate_flags and self.has_flags:
            shares = flat.view(self._ranks, rows.flags)
            flat = torch.cat((shares, self.flags(used, self.dtype)), 1).view(-1)
        return flat

    def flags(self, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return the flags that are reduced together with the gradients, ``[ranks, flags]``.

        All rows are the same. A row has 1 for each parameter of which this rank has a gradient, 0
        for each other parameter, then the flags of the unit's tag. The result is cached if all
        parameters are used.
        """
        known = self._flags.get(dtype) if used is self.all_used else None
        if known is None:
            known = self._zeros(self._ranks, self.rows.flag_count, dtype)
            self._write_flags(known, used)
            if used is self.all_used:
                self._flags[dtype] = known
        return known

    def _gap_tensors(
        self, used: Sequence[bool], dtype: torch.dtype
    ) -> Sequence[tuple[int, Tensor]]:
        """Return the columns of the packed gradients that hold no gradient.

        Each of them has shape ``[degree, columns]`` and is zero, except for the flags if they are
        stored in these columns. The number before it is the position of the gradient that follows.
        The last gap is first, so that an insertion shifts no other gap. The result is cached if all
        parameters are used and it is small.
        """
        known = self._gaps.get(dtype) if used is self.all_used else None
        if known is None:
            rows, known = self.rows, []
            for i, start, end in reversed(rows.gaps):
                gap = self._zeros(rows.degree, end - start, dtype)
                if not rows.separate_flags and start <= rows.flags < end:
                    self._write_flags(gap[:, rows.flags - start :], used)
                known.append((i, gap))
            if used is self.all_used and sum([gap.numel() for _, gap in known]) <= COPIED_NUMEL:
                self._gaps[dtype] = known
        return known

    def _zeros(self, count: int, width: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # later steps use it again
            return torch.zeros((count, width), dtype=dtype, device=self.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_flags(self, columns: Tensor, used: Sequence[bool]) -> None:
        columns[:, : len(used)] = 1
        for i in (i for i, is_used in enumerate(used) if not is_used):
            columns[:, i] = 0
        columns[:, len(used) : len(used) + TAG_FLAGS] = self.tag_flags

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)


class Reduction:
    """A reduction in flight: a reduce-scatter, and with replicas an all-reduce of its result.

    Args:
        plan: The parameters and their layout.
        gradients: One contiguous gradient per parameter, zeros if this rank has none. Empty if
            ``rows`` is given. The list is cleared when the gradients are packed.
        rows: The packed gradients, if they are packed already. Otherwise None.
        used: One bool per parameter: whether this rank has a gradient. A parameter gets a reduced
            gradient if any rank has one.
        axes: Mesh axes to reduce over.
        collectives: Starts the collectives.
        options: Divide factor, hook, and whether to all-reduce.

    Attributes:
        scattering: The reduce-scatter in flight, or None after it has ended. The packed gradients
            stay allocated until it has ended.
        ends_early: Whether to call `finish` during backward, after `scattering` is None, instead of
            at its end. This is so if parameters have post-gradient hooks. But if `finish` would
            then start another collective, it is False: only some ranks may have such hooks, and all
            ranks must start collectives in the same order.
    """

    _reads_tags_early = True  # after each collective, instead of at the end of backward

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
        self._scale = division.op, division.before
        self._sums = list(division.sums)
        self._ready = True
        self._shard_axis = axes.shard
        self._sum_axis = axes.shard  # axis of the latest all-reduce
        self.scattering: Waitable | None = None
        self._all_reduce: Waitable | None = None
        self._gradients = gradients
        self._used = used
        self._flat: Tensor | None = None  # output of the reduce-scatter, flags included
        self._rows: Tensor | None = None
        # Packed gradients from a bucket contain the flags if the layout has columns for them.
        self._has_flags = plan.has_flags if rows is None else not plan.rows.separate_flags
        if axes.shard.size > 1:
            self._rows = rows = self._pack(rows, division.before)
            self.scattering = self._scatter(axes.shard, start, rows)
        elif self._sums or options.hook is not None:
            self._begin_sum(self._pack(rows, division.before))
        self.ends_early = self._hooked and (self.scattering is not None or not self._sums)

    def _pack(self, rows: Tensor | None, before: float | None) -> Tensor:
        plan = self._plan
        if rows is None:
            if profiled():
                with named_range("pack_gradients", plan.comm.path):
                    rows = plan.pack(self._gradients, self._used)
            else:
                rows = plan.pack(self._gradients, self._used)
            self._gradients.clear()  # frees the gradients before the result is allocated
        if before and self._has_flags:  # without the flags, which could become zero
            layout = plan.rows
            width = layout.flags + layout.flag_count if layout.separate_flags else layout.width
            rows.view(-1, width)[:, : layout.flags].div_(before)
        elif before:
            rows.div_(before)
        return rows

    def _scatter(self, axis: Axis, start: StartScatter, rows: Tensor) -> Waitable:
        self._flat = flat = rows.new_empty(self._plan.reduced_numel)
        function: Callable[[], Waitable] = partial(start, flat, rows)
        if not self._has_flags:
            flags, end = self._plan.flags(self._used, rows.dtype), self._plan.rows.flags
            inputs, outputs = [rows, flags.flatten()], [flat[:end], flat[end:]]
            scatter = self._collectives.reduce_scatter
            function = partial(scatter, axis, inputs, outputs, op=self._op)
        return self._plan.comm.start("reduce_scatter", axis, flat, function)

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat
        if not self._sums:
            return
        plan = self._plan
        self._flat, self._used = plan.partial.add(flat, plan.names, self._used, self._scale)
        self._ready = self._options.all_reduce
        if self._ready:
            plan.partial.clear()
            self._all_reduce = self._sum(self._sums.pop(0))

    def _sum(self, axis: Axis) -> Waitable:
        self._sum_axis, flat = axis, cast(Tensor, self._flat)
        function = partial(self._collectives.all_reduce, axis, [flat], op=self._op)
        return self._plan.comm.start("all_reduce", axis, flat, function)

    def _wait(self, work: Waitable, doing: str, axis: Axis) -> None:
        """Wait for a collective. If it failed, the parameters get no gradients."""
        try:
            work.wait()
        except Exception as error:  # not KeyboardInterrupt: the collective would still run
            self.scattering, self._all_reduce, self._ready = None, None, False
            number = len(self._plan.parameters)
            self._plan.tag.report(error, f"{doing} ({number} parameters)", axis)
            raise

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter and release its input. Start the all-reduce of HSDP.

        A no-op after the first call.
        """
        if self.scattering is not None:
            self._wait(self.scattering, "reduce the gradients of {}", self._shard_axis)
            self.scattering = self._rows = None
            if self._reads_tags_early:
                self._check_tags()
            if self._sums and self._flat is not None:
                self._begin_sum(self._flat)

    def wait(self) -> None:
        """Wait for all collectives of this reduction, and start those that are left."""
        if self.scattering is not None:
            self.finish_scatter()
        while self._all_reduce is not None:
            self._wait(self._all_reduce, "sum the gradients of {} over replicas", self._sum_axis)
            self._all_reduce = self._sum(self._sums.pop(0)) if self._sums else None
            if self._all_reduce is None and self._reads_tags_early:
                self._check_tags()

    def drop(self) -> None:
        """Wait for the collectives in flight, and discard the result. Starts no collective."""
        if self._all_reduce is not None:
            self._all_reduce.wait()
            self._all_reduce = None
        if self.scattering is not None:
            self.scattering.wait()
            self.scattering = self._rows = None

    def finish(self) -> None:
        """Wait for the collectives, divide the sums, and set the gradients of the parameters.

        If the all-reduce is postponed to a later backward, sets no gradients.
        """
        self.wait()
        if self._ready:
            self._put_gradients()

    def _check_tags(self) -> None:
        """Raise `DisagreementError` if other ranks reduced the gradients of other units."""
        flat, plan = self._flat, self._plan
        if flat is None or not plan.is_exact:
            return
        flags = flat[plan.tag_columns]
        if plan.tag.log is None and flags_agree(flags.tolist()):
            return
        error = plan.tag.check_reduced(flags, on_host=plan.offloaded and self._ready)
        if error is not None:
            self._ready = False
            raise error

    def _put_gradients(self) -> None:
        plan, used = self._plan, self._used
        if used is not plan.all_used:
            used = self._used_by_any()
        results = self._results()
        fresh = not (self._hooked or plan.tied or False in used)
        if fresh and set_gradients(plan.sharded, partial(plan.wrap, results)):
            return
        for parameter, local, is_used in zip(plan.parameters, results, used, strict=True):
            if is_used:
                parameter.add_gradient(local)

    def _used_by_any(self) -> list[bool]:
        """Return one bool per parameter: whether any rank has a gradient.

        Reads the reduced flags, so the host waits for them.
        """
        if self._flat is None or all(self._used):
            return self._used
        first = self._plan.rows.flags
        return self._flat[first : first + len(self._used)].ne(0).tolist()

    def _results(self) -> list[Tensor]:
        """Return this rank's shard of each reduced gradient, in the shards' dtype and device.

        The gradients are views of one flat tensor, unless there was nothing to communicate.
        """
        plan, flat = self._plan, self._flat
        if flat is None:
            return [self._final(gradient).to(plan.shard) for gradient in self._gradients]
        return plan.rows.views(self._final(flat[: plan.rows.flags]).to(plan.shard))

    def _final(self, values: Tensor) -> Tensor:
        """Call the user's hook with the reduced gradients, then divide them."""
        if self._options.hook is not None:
            self._options.hook(values)
        return values if self._after is None else values.div_(self._after)


class StreamedReduction(Reduction):
    """A reduction on side streams, which overlaps with the computation.

    The constructor enqueues all steps: the reduce-scatter, the all-reduce over replicas, the user's
    hook, the division, and with CPU offload the copy to the CPU.

    - `finish_scatter` makes the current stream wait for the reduce-scatter.
    - `wait` makes the current stream wait for all steps. With CPU offload, the host waits too.
    """

    _reads_tags_early = False
    _made: list[Tensor] | None = None  # the gradients, when all steps are enqueued
    _ended: Begun | None = None

    def __init__(self, streams: Streams, *given: Any) -> None:
        """Enqueue the whole reduction on ``streams``. ``given``: the arguments of `Reduction`."""
        self._streams = streams
        self._held: list[Tensor] = []  # kept alive until the current stream waited for `_ended`
        super().__init__(*given)
        self._enqueue_steps()
        self.ends_early = self._hooked

    def _scatter(self, axis: Axis, start: StartScatter, rows: Tensor) -> Waitable:
        # The output is allocated on the reduce stream. The packed gradients are allocated on the
        # current stream, so they are kept until that stream has waited for the reduce stream.
        with self._streams.reduce.after_current():
            work = super()._scatter(axis, start, rows)
            work.wait()  # makes the reduce stream wait, and with gloo the host
        return self._streams.reduce.begun()

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat  # `_enqueue_steps` starts the all-reduce

    def _enqueue_steps(self) -> None:
        """Enqueue all steps after the reduce-scatter."""
        streams = self._streams
        if self._flat is None:
            if self._plan.offloaded:
                with streams.offload.after_current("copy_gradients"):
                    self._made = [self._on_cpu(self._final(each)) for each in self._gradients]
                # `finish_scatter` waits for the copy, and then frees the gradients on the device.
                self._ended = self.scattering = streams.offload.begun()
            return
        side = streams.all_reduce if self._sums else streams.reduce
        with side.after_current():
            if self.scattering is not None:
                self.scattering.wait()
            # Keep the previous partial sum and the output of the reduce-scatter alive, because this
            # side stream reads them.
            self._held = [x for x in (self._flat, self._plan.partial.flat) if x is not None]
            super()._begin_sum(self._flat)
            while self._all_reduce is not None:
                self._all_reduce.wait()
                self._all_reduce = self._sum(self._sums.pop(0)) if self._sums else None
            self._ended = side.begun()
            if self._ready and self._plan.offloaded:
                self._copy_to_cpu(side)
            elif self._ready:
                self._made = super()._results()
                self._ended = side.begun()

    def _copy_to_cpu(self, side: SideStream) -> None:
        """Copy the reduced gradients and flags to the CPU, and release their device memory."""
        flat, out = cast(Tensor, self._flat), self._streams.offload
        self._final(flat[: self._plan.rows.flags])
        with out.after_current("copy_gradients"):
            row = self._on_cpu(flat)
        for each in self._held:  # the output of the reduce-scatter and the partial sum
            side.uses(each)
        out.uses(flat)
        self._flat, self._held = row, []
        self._made = self._plan.rows.views(row[: self._plan.rows.flags])
        self._ended = out.begun()

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        shard = self._plan.shard
        pinned = shard.is_pinned()
        made = torch.empty(tensor.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
        return made.copy_(tensor, non_blocking=True)

    def finish_scatter(self) -> None:
        """Make the current stream wait for the reduce-scatter, and release its input."""
        super().finish_scatter()
        if self._made is not None:
            self._gradients = []

    def wait(self) -> None:
        """Make the current stream wait for the reduction. With CPU offload, the host waits, too."""
        self.finish_scatter()
        if self._ended is not None:
            with named_range("wait_reduction", self._plan.comm.path):
                self._ended.wait()
                if self._plan.offloaded:
                    self._ended.synchronize()
            self._ended, self._held = None, []

    def finish(self) -> None:
        """Wait, check the tags, and set the gradients of the sharded parameters."""
        self.wait()
        self._check_tags()
        super().finish()

    def drop(self) -> None:
        """Wait for all steps, and discard the result."""
        self.wait()

    def _results(self) -> list[Tensor]:
        return super()._results() if self._made is None else self._made
