"""Reductions: from the packed gradients of one group to the gradients of its sharded parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Literal, cast

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._agreement import Tag, is_exact
from ._errors import StateError
from ._mesh import DataAxes
from ._options import Options
from ._param import ShardedParameter
from ._stats import UnitComm
from ._streams import Begun, SideStream, Streams, Waitable
from ._tags import TAG_FLAGS, flags_agree
from ._torch import any_hooks_after_gradient, averages, in_range, named_range, pack_rank_major
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
    """Divisors of gradients before and after the reduction, and axes of the all-reduces.

    Attributes:
        before: Divisor before the reduction. None: no division.
        after: Divisor after the reduction, a CPU tensor of one number. None: no division.
        op: "avg" if the communication divides.
        sums: The replicate axes of two or more ranks.
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

        Large sums overflow in float16. Therefore about half of the factor, as a power of two, is
        divided before the reduction.
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
            # torch would convert a Python number to a tensor of this dtype in each step.
            exact = dtype if dtype in (torch.float32, torch.float64) else torch.float64
            with torch.inference_mode(False):
                after = torch.tensor(factor, dtype=exact, device="cpu")
        return Division(
            before=before, after=after, op="avg" if factor is None else "sum", sums=sums
        )


class PartialSum:
    """Accumulates reduce-scattered gradients, ``flat``, until the all-reduce over replicas."""

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self._scale: object = None
        self._used: list[bool] = []

    @property
    def waits(self) -> bool:
        """Return whether there is a sum."""
        return self.flat is not None

    def add(
        self, flat: Tensor, names: tuple[str, ...], used: list[bool], scale: object
    ) -> tuple[Tensor, list[bool]]:
        """Add ``flat`` to the accumulated sum.

        Args:
            flat: Reduced row of this rank. It is updated in place and kept.
            names: Names of the parameters. They must be the same until the all-reduce.
            used: Whether this rank has a gradient, per parameter.
            scale: How ``flat`` was divided. It must be the same until the all-reduce.

        Returns:
            The sum, and per parameter whether this rank had a gradient in any of its terms.
        """
        if self.flat is not None:
            if names != self._names:
                raise StateError(
                    f"gradients of {list(self._names)} wait for an all-reduce, and now come those "
                    f"of {list(names)}; freeze parameters only after a reduction over all axes"
                )
            if self._scale not in (None, scale):
                raise StateError(
                    f"gradients of {list(names)} wait for an all-reduce as averages, and now come "
                    "sums to divide at the end, or the other way round; set divide factors and "
                    "force_sum_reduction_for_comms after a reduction over all axes"
                )
            flat = flat.add_(self.flat)
            used = [now or before for now, before in zip(used, self._used, strict=True)]
        self.flat, self._names, self._used, self._scale = flat, names, used, scale
        return flat, used

    def drop(self) -> None:
        """Set this rank's sum to zero. Other replicas still all-reduce their sums with it."""
        if self.flat is not None:
            self.flat.zero_()
            self._used, self._scale = [False] * len(self._used), None

    def clear(self) -> None:
        """Forget the sum."""
        self.flat, self._names, self._used = None, (), []


# Up to this many elements, copying the packed gradients once more to append the flags costs less
# than a second tensor in the reduce-scatter.
COPIED_NUMEL = 2**16


class ReductionPlan:
    """State that all reductions of the same parameters of a group share.

    Attributes:
        comm: Starts and counts the collectives of the unit.
        tag: Tag of the unit, sent with every reduction.
        offloaded: Whether shards are on the CPU and computed on another device.
        rows: Layout of the packed gradients.
        shard: The flat shard. Gradients get its dtype and device.
        has_flags: Whether `pack` writes the flags into the rows. Otherwise they are a second
            tensor, `flags`, that is reduced in the same call.
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
        self.unsharded = [parameter.unsharded for parameter in parameters]
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.partial = partial
        # Properties that every reduction reads.
        self.numel, self.reduced_numel = rows.numel, rows.reduced_numel
        self.tag_columns = slice(rows.tag_start, rows.tag_start + TAG_FLAGS)
        self.has_flags = not rows.flags_apart or self.numel <= COPIED_NUMEL
        self._ranks = self.numel // rows.flags if rows.flags_apart else rows.degree
        self._flags_shape = self._ranks, rows.flag_count
        self._gaps = rows.gaps[::-1]  # backwards, so that insertions shift no later gap
        self._rearranged = [(i, e.spec) for i, e in enumerate(rows.columns) if e.spec.dim]
        self._has_empty = any(not each.spec.numel for each in rows.columns)
        self._known: dict[tuple[object, torch.dtype], Tensor] = {}
        with torch.inference_mode(False):
            self.tag_flags = torch.tensor(tag.flags, dtype=dtype, device=device)
        self.is_exact = False  # whether the collectives send every element unchanged
        self.nothing: Sequence[Tensor | None] = [None] * len(self.parameters)
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
        """Return the packed rows, flat.

        Args:
            gradients: One contiguous gradient per parameter; zeros if it is not ``used``.
            used: Whether this rank has a gradient, per parameter.
        """
        rows, pieces = self.rows, gradients
        for i, spec in self._rearranged:
            pieces[i] = spec.by_rank(pieces[i]).contiguous()
        if len(set(map(_dtype_of, pieces))) > 1:
            pieces = [piece.to(self.dtype) for piece in pieces]
        dtype = pieces[0].dtype
        for i, start, end in self._gaps:
            pieces.insert(i, self._gap(start, end, used, dtype))
        if self._has_empty:
            pieces = [piece for piece in pieces if piece.numel()]
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        if pieces:
            pack_rank_major(pieces, rows.degree, flat.view(rows.degree, rows.width))
        if rows.flags_apart and self.has_flags:
            shares = flat.view(self._ranks, rows.flags)
            flat = torch.cat((shares, self.flags(used, self.dtype)), 1).view(-1)
        return flat

    def flags(self, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return ``[ranks, flags]``: in each row 1 or 0 per parameter, then the tag's flags."""
        return self._made("flags", self._flags_shape, 0, used, dtype)

    def _gap(self, start: int, end: int, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return the values of the columns ``[start, end)``, which hold no gradient.

        The values are zeros, of shape ``[degree, end - start]``. If the flags are stored in these
        columns, the flags are filled in from ``used``.
        """
        shape, flags = (self.rows.degree, end - start), self.rows.flags
        if self.rows.flags_apart or not start <= flags < end:
            return self._made(start, shape, 0, (), dtype)
        return self._made(start, shape, flags - start, used, dtype)

    def _made(
        self,
        what: object,
        shape: tuple[int, int],
        first: int,
        used: Sequence[bool],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a tensor of zeros, with the flags from column ``first`` on if ``used`` is given.

        The flags are 1 or 0 for each parameter, then the flags of the tag. The tensor is cached if
        all parameters are used.
        """
        known = self._known.get((what, dtype)) if all(used) else None
        if known is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():
            made = torch.zeros(shape, dtype=dtype, device=self.device)
            if used:
                end = first + len(used)
                made[:, first:end] = 1
                made[:, end : end + TAG_FLAGS] = self.tag_flags
            for i in (i for i, is_used in enumerate(used) if not is_used):
                made[:, first + i] = 0
        if all(used) and made.numel() <= COPIED_NUMEL:
            self._known[what, dtype] = made
        return made

    def report(self, error: Exception, doing: str, axis: Axis) -> None:
        """Raise `DisagreementError` if ``error`` means that ranks were in different collectives."""
        self.tag.report(error, f"{doing} ({len(self.parameters)} parameters)", axis)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)


class Reduction:
    """A reduction in flight: a reduce-scatter, followed by an all-reduce of its result for HSDP.

    Args:
        plan: The parameters and their layout.
        gradients: One contiguous gradient per parameter, if ``rows`` is None. The list is cleared
            when they are packed.
        rows: Gradients that are packed already.
        used: Whether this rank has a gradient, per parameter. A parameter without one counts as
            zeros, and gets a gradient only if another rank has one.
        axes: Axes to reduce over.
        collectives: Start the collectives.
        options: Divide factor, hook, and whether to all-reduce. Later changes have no effect.

    Attributes:
        scattering: The reduce-scatter. The packed gradients are alive until it is None.
    """

    _reads_tags_early = True  # when a collective has ended, not at the end of backward

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
        self._summing: Waitable | None = None
        self._gradients = gradients
        self._used = used
        self._flat: Tensor | None = None  # this rank's reduced row, flags included
        self._rows: Tensor | None = None
        # Rows that are packed already have flags if the layout has columns for them.
        self._has_flags = plan.has_flags if rows is None else not plan.rows.flags_apart
        if axes.shard.size > 1:
            self._rows = rows = self._pack(rows, division.before)
            self.scattering = self._scatter(axes.shard, start, rows)
        elif self._sums or options.hook is not None:
            self._begin_sum(self._pack(rows, division.before))

    def _pack(self, rows: Tensor | None, before: float | None) -> Tensor:
        plan = self._plan
        if rows is None:
            pack = partial(plan.pack, self._gradients, self._used)
            rows = in_range("pack_gradients", plan.comm.path, pack)
            self._gradients.clear()  # frees them before the result is allocated
        if before and self._has_flags:  # do not divide the flags, which could become zero
            layout = plan.rows
            width = layout.flags + layout.flag_count if layout.flags_apart else layout.width
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
        return self._plan.comm.start("reduce_scatter", axis, axis.size * flat.nbytes, function)

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat
        if not self._sums:
            return
        plan = self._plan
        self._flat, self._used = plan.partial.add(flat, plan.names, self._used, self._scale)
        self._ready = self._options.all_reduce
        if self._ready:
            plan.partial.clear()
            self._summing = self._sum(self._sums.pop(0))

    def _sum(self, axis: Axis) -> Waitable:
        self._sum_axis = axis
        flats = [] if self._flat is None else [self._flat]
        size = sum([flat.nbytes for flat in flats])
        function = partial(self._collectives.all_reduce, axis, flats, op=self._op)
        return self._plan.comm.start("all_reduce", axis, size, function)

    @property
    def ends_early(self) -> bool:
        """Return whether to finish during backward, because parameters have post-gradient hooks.

        Only some ranks may have such hooks. So this is False if `finish` would start another
        collective, because all ranks must start collectives in the same order.
        """
        return self._hooked and (self.scattering is not None or not self._sums)

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, release its input, start the all-reduce of HSDP."""
        if self.scattering is not None:
            try:
                in_range("wait_reduce_scatter", self._plan.comm.path, self.scattering.wait)
            except Exception as error:  # after an interrupt the collective would still run
                self.scattering, self._ready = None, False
                self._plan.report(error, "reduce the gradients of {}", self._shard_axis)
                raise
            self.scattering = None
            self._release_packed()
            if self._reads_tags_early:
                self._check_tags()
            if self._sums and self._flat is not None:
                self._begin_sum(self._flat)

    def _release_packed(self) -> None:
        self._rows = None

    def wait(self) -> None:
        """Wait for all collectives of this reduction."""
        if self.scattering is not None:
            self.finish_scatter()
        while self._summing is not None:
            try:
                in_range("wait_all_reduce", self._plan.comm.path, self._summing.wait)
            except Exception as error:
                self._summing, self._ready = None, False
                self._plan.report(error, "sum the gradients of {} over replicas", self._sum_axis)
                raise
            self._summing = self._sum(self._sums.pop(0)) if self._sums else None
            if self._summing is None and self._reads_tags_early:
                self._check_tags()

    def drop(self) -> None:
        """Wait for the collectives in flight and discard the result. Starts no other collective."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
        if self.scattering is not None:
            self.scattering.wait()
            self.scattering = None
            self._release_packed()

    def finish(self) -> None:
        """Wait, divide, and set the gradients of the sharded parameters."""
        self.wait()
        if self._ready:
            self._put_gradients()

    def _check_tags(self) -> None:
        """Raise `DisagreementError` if other ranks reduced other units."""
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
        plan, used = self._plan, self._used if all(self._used) else self._used_by_any()
        for parameter, local, is_used in zip(plan.parameters, self._results(), used, strict=True):
            if is_used and not self._hooked and parameter.sharded.grad is None:
                parameter.sharded.grad = parameter.wrap(local)
            elif is_used:
                parameter.add_gradient(local)

    def _used_by_any(self) -> list[bool]:
        """Return whether any rank used the parameter, per parameter. Reads the reduced flags."""
        if self._flat is None:
            return self._used
        first = self._plan.rows.flags
        return self._flat[first : first + len(self._used)].ne(0).tolist()

    def _results(self) -> list[Tensor]:
        """Return this rank's part of each gradient, with the dtype and device of the shards.

        The parts are views of one new flat tensor, which lives as long as one of them.
        """
        plan, flat = self._plan, self._flat
        if flat is None:
            return [self._divided(gradient).to(plan.shard) for gradient in self._gradients]
        return plan.rows.views(self._final(flat[: plan.rows.flags]).to(plan.shard))

    def _final(self, values: Tensor) -> Tensor:
        """Call the user's hook with the reduced values, then divide them."""
        if self._options.hook is not None:
            self._options.hook(values)
        return values if self._after is None else values.div_(self._after)

    def _divided(self, reduced: Tensor) -> Tensor:
        return reduced if self._after is None else reduced.div_(self._after)


class StreamedReduction(Reduction):
    """A reduction on side streams. All of its steps are enqueued when it is created.

    The all-reduce over replicas, the user's hook, the division and the copy to the CPU follow the
    reduce-scatter on side streams, while the computation continues. `finish_scatter` lets the
    current stream wait for the reduce-scatter only, `wait` for everything. The host waits only in
    `wait`, and only for copies to the CPU.
    """

    _reads_tags_early = False

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
        self._held: list[Tensor] = []  # used by a side stream until `_ended` was waited for
        super().__init__(plan, gradients, rows, used, axes, collectives, options)
        self._go_on()

    def _scatter(self, axis: Axis, start: StartScatter, rows: Tensor) -> Waitable:
        # The result is memory of this stream. The packed rows are memory of the current stream, so
        # they are kept until it has waited.
        with self._streams.reduce.after_current():
            work = super()._scatter(axis, start, rows)
            work.wait()  # lets this stream wait, and with gloo the host
        return self._streams.reduce.begun()

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat  # `_go_on` has begun it, or will

    def _go_on(self) -> None:
        """Enqueue all steps after the reduce-scatter."""
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
            # Keep the memory of the last sum and of a result that is cast: this stream reads it.
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
        """Copy the reduced row, flags included, and release its memory on the device."""
        flat, out = cast(Tensor, self._flat), self._streams.offload
        self._final(flat[: self._plan.rows.flags])
        with out.after_current("copy_gradients"):
            row = self._on_cpu(flat)
        for each in self._held:  # the reduced row and the partial sum
            side.uses(each)
        out.uses(flat)
        self._flat, self._held = row, []
        self._made = self._plan.rows.views(row)
        self._ended = out.begun()

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        shard = self._plan.shard
        pinned = shard.is_pinned()
        made = torch.empty(tensor.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
        return made.copy_(tensor, non_blocking=True)

    def _release_packed(self) -> None:
        if self._made is not None:
            self._gradients = []
        super()._release_packed()

    def wait(self) -> None:
        """Wait for all steps. If gradients are copied to the CPU, the host waits for the copy."""
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
        """Wait for all steps, which were enqueued at once, and discard the result."""
        self.wait()

    def _results(self) -> list[Tensor]:
        return super()._results() if self._made is None else self._made
