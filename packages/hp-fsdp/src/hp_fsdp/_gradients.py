"""From the unsharded gradients of one group to sharded gradients on its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, ReduceOp, Work

from ._axes import DataAxes
from ._buffers import Buffers
from ._cut import Cut
from ._errors import StateError
from ._options import Options
from ._plan import GradientPlan, Slot, plan_gradients
from ._torch import pack_rank_major


class PartialSum:
    """What reductions left that were scattered and not yet summed over the replicas."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._names: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Return whether something is kept."""
        return self._flat is not None

    def add(self, flat: Tensor, names: tuple[str, ...]) -> Tensor:
        """Keep the sum of ``flat`` and what is kept; return it."""
        if self._flat is not None:
            if names != self._names:
                raise StateError(
                    f"gradients of {list(self._names)} wait for an all-reduce, and now come those "
                    f"of {list(names)}; freeze parameters only after a reduction over all axes"
                )
            flat = flat.add_(self._flat)
        self._flat, self._names = flat, names
        return flat

    def clear(self) -> None:
        """Keep nothing."""
        self._flat, self._names = None, ()


class Reduced(Protocol):
    """What a part of a reduction is for: a parameter, or several that are reduced as one."""

    @property
    def name(self) -> str:
        """Return the name, or the names."""
        ...

    def add_gradient(self, local: Tensor) -> None:
        """Take this rank's part of the reduced gradient."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The parameters of one reduction: how they are cut, and in which dtype they are reduced.

    ``rows`` are their gradients where they are packed already; packed ones are given back.
    """

    parameters: Sequence[Reduced]
    slots: Sequence[Slot]
    cuts: Sequence[Cut]
    held: Sequence[tuple[tuple[int, ...], int]]  # the shape of this rank's part, and its elements
    dtype: torch.dtype
    shard: Tensor  # the flat shard, for its dtype and device
    partial: PartialSum
    buffers: Buffers
    rows: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)


class Reduction:
    """One reduction under way: a reduce-scatter, then for HSDP an all-reduce of its result.

    Of ``options`` counts what they are now: the factor, the hook, whether replicas are summed.
    """

    def __init__(
        self,
        batch: Batch,
        gradients: list[Tensor],
        axes: DataAxes,
        collectives: Collectives,
        options: Options,
    ) -> None:
        self._batch = batch
        self._axes = axes
        self._collectives = collectives
        self._options = options
        self._before, self._after = _divisors(options, axes.size, batch.dtype)
        self._op: ReduceOp = "sum" if self._after else "avg"
        self._sums = [axis for axis in axes.replicate if axis.size > 1]
        self._ready = True
        self._scattering: Work | None = None
        self._summing: Work | None = None
        self._gradients = gradients  # released when they are packed
        plan = plan_gradients(batch.slots, batch.dtype.itemsize)
        self._plan: GradientPlan = plan
        self._flat: Tensor | None = None
        self._rows: Tensor | None = None
        if axes.shard.size > 1:
            self._rows = self._pack().view(-1)
            self._scattering = collectives.reduce_scatter(axes.shard, [self._rows], op=self._op)
        elif self._sums or options.hook is not None:
            self._begin_sum(self._pack().view(-1))

    def _pack(self) -> Tensor:
        rows = self._batch.rows
        out = self._packed() if rows is None else rows
        if self._before:
            out.div_(self._before)
        return out

    def _packed(self) -> Tensor:
        degree, plan, batch = self._axes.shard.size, self._plan, self._batch
        device = self._gradients[0].device
        flat = batch.buffers.take(degree * plan.shard_numel, batch.dtype, device)
        out = flat.view(degree, plan.shard_numel)
        pieces = [
            cut.by_rank(g).contiguous()
            for g, slot, cut in zip(self._gradients, batch.slots, batch.cuts, strict=True)
            if slot.shard_numel
        ]
        self._gradients.clear()
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [piece.to(batch.dtype) for piece in pieces]
        if plan.padding:
            dtype = pieces[0].dtype if pieces else batch.dtype
            pieces.append(torch.zeros(degree, plan.padding, dtype=dtype, device=device))
        if pieces:
            pack_rank_major(pieces, degree, out)
        return out

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat
        if not self._sums:
            return
        batch = self._batch
        self._flat = batch.partial.add(flat, batch.names)
        self._ready = self._options.all_reduce
        if self._ready:
            batch.partial.clear()
            self._summing = self._sum(self._sums.pop(0))

    def _sum(self, axis: Axis) -> Work:
        flat = self._flat
        return self._collectives.all_reduce(axis, [] if flat is None else [flat], op=self._op)

    @property
    def scattering(self) -> bool:
        """Return whether the reduce-scatter, and with it the packed gradients, is still alive."""
        return self._scattering is not None

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, release its input, start the all-reduce of HSDP."""
        if self._scattering is not None:
            (shard,) = self._scattering.wait()
            self._scattering = None
            if self._rows is not None:
                self._batch.buffers.give(self._rows)
                self._rows = None
            self._begin_sum(shard)

    def wait(self) -> None:
        """Wait for everything; afterwards nothing of this reduction is in flight."""
        self.finish_scatter()
        while self._summing is not None:
            self._summing.wait()
            self._summing = self._sum(self._sums.pop(0)) if self._sums else None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, divide, and put the results on the parameters' ``grad``."""
        self.wait()
        if not self._ready:
            return
        for parameter, local in zip(self._batch.parameters, self._results(), strict=True):
            parameter.add_gradient(local)

    def _results(self) -> list[Tensor]:
        if self._flat is None:
            return [self._finished(gradient) for gradient in self._gradients]
        if self._options.hook is not None:
            self._options.hook(self._flat)
        batch = self._batch
        widths = [slot.shard_numel for slot in batch.slots]
        # One split instead of a slice each: it runs for every parameter in every step.
        pieces = self._finished(self._flat).split([*widths, self._plan.padding])
        return [_part(piece, *shape) for piece, shape in zip(pieces, batch.held, strict=False)]

    def _finished(self, reduced: Tensor) -> Tensor:
        if self._after and self._after != 1.0:
            reduced.div_(self._after)
        shard = self._batch.shard
        return reduced.to(shard.device, shard.dtype)


def _divisors(options: Options, size: int, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Return what to divide gradients by before and after a sum; None, None for a mean.

    float16 overflows in large sums: about half the factor, in powers of two, comes before.
    """
    factor = options.divide
    small = dtype == torch.float16 and size > 1
    if factor is None:
        if not (options.force_sum or small):
            return None, None
        factor = float(size)
    if not small:
        return None, factor
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


def _part(piece: Tensor, shape: tuple[int, ...], numel: int) -> Tensor:
    held = piece if len(piece) == numel else piece[:numel]
    return held if len(shape) == 1 else held.view(shape)
