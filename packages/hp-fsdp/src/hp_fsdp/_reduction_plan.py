"""Reusable state of a group's reductions: layout of packed gradients, divisors, result memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._agreement import Tag, is_exact
from ._errors import StateError
from ._mesh import DataAxes
from ._offsets import GradientRows
from ._options import Options
from ._param import ShardedParameter
from ._streams import Waitable
from ._tags import TAG_FLAGS
from ._torch import averages, pack_rank_major

_dtype_of = attrgetter("dtype")


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


class PartialSum:
    """Accumulates reduce-scattered gradients, ``flat``, until the all-reduce over replicas."""

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self._scale: object = None
        self._used: list[bool] = []

    @property
    def waits(self) -> bool:
        """Return whether something is kept."""
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
        """Set this rank's sum to zero. Other replicas still all-reduce theirs with it."""
        if self.flat is not None:
            self.flat.zero_()
            self._used, self._scale = [False] * len(self._used), None

    def clear(self) -> None:
        """Keep nothing."""
        self.flat, self._names, self._used = None, (), []


# Up to this many elements, copying the packed gradients once more to append the flags costs less
# than a second tensor in the reduce-scatter.
COPIED_NUMEL = 2**16


class ReductionPlan:
    """State that all reductions of the same parameters of a group share.

    Attributes:
        path: Path of the module, for profiles.
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
    ) -> None:
        self.path = ""
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
        self.has_flags = not rows.flags_apart or rows.numel <= COPIED_NUMEL
        self._ranks = rows.numel // rows.flags if rows.flags_apart else rows.degree
        self._flags_shape = self._ranks, rows.flag_count
        self._gaps = rows.gaps[::-1]  # so that what is put there moves no other
        self._rearranged = [(i, e.spec) for i, e in enumerate(rows.extents) if e.spec.dim]
        self._has_empty = any(not extent.spec.numel for extent in rows.extents)
        self._known: dict[tuple[object, torch.dtype], Tensor] = {}
        with torch.inference_mode(False):
            self.tag_flags = torch.tensor(tag.flags, dtype=dtype, device=device)
        self.is_exact = False  # whether the reduce-scatter sums every element as it is
        self.nothing: Sequence[Tensor | None] = [None] * len(self.parameters)
        self.all_used = [True] * len(self.parameters)
        self._prepared: tuple[Options, DataAxes, Collectives, Division, StartScatter] | None = None

    def prepared(
        self, options: Options, axes: DataAxes, collectives: Collectives
    ) -> tuple[Division, StartScatter]:
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
            self.is_exact = is_exact(collectives)
        return known[3], known[4]

    def pack(self, gradients: list[Tensor], used: Sequence[bool]) -> Tensor:
        """Return the rows, flat; contiguous ``gradients`` are zeros where they are not ``used``."""
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
        flat = torch.empty(rows.numel, dtype=self.dtype, device=self.device)
        if pieces:
            pack_rank_major(pieces, rows.degree, flat.view(rows.degree, rows.width))
        if rows.flags_apart and self.has_flags:
            shares = flat.view(self._ranks, rows.flags)
            flat = torch.cat((shares, self.flags(used, self.dtype)), 1).view(-1)
        return flat

    def flags(self, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return ``[ranks, flags]``: in each row 1 for what this rank ``used``, then the tag."""
        return self._made("flags", self._flags_shape, 0, used, dtype)

    def _gap(self, start: int, end: int, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
        """Return the columns of no parameter from ``start`` to ``end``: zeros, or flags in them."""
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
