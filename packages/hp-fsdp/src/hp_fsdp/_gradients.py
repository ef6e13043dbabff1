"""From the unsharded gradients of one group to sharded gradients on its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from ._axes import DataAxes
from ._buffers import Buffers
from ._errors import StateError
from ._options import Options
from ._packing import Packing
from ._parameters import ShardedParameter
from ._torch import hooks_after_gradient, named_range, pack_rank_major


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

    def drop(self) -> None:
        """Keep zeros in place of this rank's sum, with which replicas add theirs as before."""
        if self._flat is not None:
            self._flat.zero_()
            self._used = [False] * len(self._used)

    def clear(self) -> None:
        """Keep nothing."""
        self._flat, self._names, self._used = None, (), []


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The parameters of a group's reductions: where they lie, in which dtype they are reduced.

    Good for many steps, as long as the same parameters train.
    """

    path: str  # of the module, for a profile
    parameters: Sequence[ShardedParameter]
    packing: Packing
    dtype: torch.dtype
    shard: Tensor  # the flat shard, for its dtype and device
    partial: PartialSum
    buffers: Buffers
    all_used: dict[torch.dtype, Tensor] = field(default_factory=dict)  # see `flags`

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    def flags(
        self, used: Sequence[bool], shape: tuple[int, int], first: int, like: Tensor
    ) -> Tensor:
        """Return columns of zeros with the flags of the parameters from column ``first`` on.

        Each is 1 where this rank ``used`` the parameter. What all steps that use everything need is
        made once.
        """
        whole = self.all_used.get(like.dtype)
        if whole is None:
            whole = self.all_used[like.dtype] = like.new_zeros(shape)
            whole[:, first : first + len(used)] = 1
        if all(used):
            return whole
        some = whole.clone()
        for i, is_used in enumerate(used):
            if not is_used:
                some[:, first + i].zero_()
        return some


class Reduction:
    """One reduction under way: a reduce-scatter, then for HSDP an all-reduce of its result.

    Of contiguous ``gradients``, or of ``rows`` where they are packed already; these are given back.
    ``used`` says of which parameters this rank has gradients; the others, zeros here, get one only
    if another rank has.
    Of ``options`` counts what they are now: the factor, the hook, whether replicas are summed.
    """

    def __init__(
        self,
        batch: Batch,
        gradients: list[Tensor],
        rows: Tensor | None,
        used: list[bool],
        axes: DataAxes,
        collectives: Collectives,
        options: Options,
    ) -> None:
        self._batch = batch
        self._axes = axes
        self._collectives = collectives
        self._options = options
        self._before, self._after = _divisors(options, axes.size, batch.dtype)
        self._op: Literal["sum", "avg"] = "sum" if self._after else "avg"
        self._sums = [axis for axis in axes.replicate if axis.size > 1]
        self._ready = True
        # Hooks that run once gradients are reduced.
        self.hooked = any(hooks_after_gradient(p.sharded) for p in batch.parameters)
        self._scattering: Work | None = None
        self._summing: Work | None = None
        self._gradients = gradients  # released when they are packed
        self._used = used
        self._flat: Tensor | None = None
        self._rows: Tensor | None = None
        self._row: Tensor | None = None  # of gradients and flags that are scattered apart
        if axes.shard.size > 1:
            self._rows = self._pack(rows)
            with named_range("reduce_scatter", batch.path, axes.shard.name):
                self._scattering = self._scatter(axes.shard, self._rows)
        elif self._sums or options.hook is not None:
            self._begin_sum(self._pack(rows))

    def _pack(self, rows: Tensor | None) -> Tensor:
        with named_range("pack_gradients", self._batch.path):
            flat = self._packed() if rows is None else rows
        packing = self._batch.packing
        if self._before and packing.apart:
            flat.div_(self._before)
        elif self._before:  # a flag could become zero
            flat.view(packing.sink.degree, -1)[:, : packing.flags].div_(self._before)
        return flat

    def _scatter(self, axis: Axis, rows: Tensor) -> Work:
        packing, collectives = self._batch.packing, self._collectives
        if not packing.apart:
            return collectives.reduce_scatter(axis, [rows], op=self._op)
        count = len(self._used)
        flags = self._batch.flags(self._used, (axis.size, count), 0, rows)
        self._row = rows.new_empty(packing.flags + count)
        outputs = [self._row[: packing.flags], self._row[packing.flags :]]
        return collectives.reduce_scatter(axis, [rows, flags.flatten()], outputs, op=self._op)

    def _packed(self) -> Tensor:
        batch, pieces = self._batch, self._gradients
        packing, sink = batch.packing, batch.packing.sink
        device = pieces[0].device
        flat = batch.buffers.take(sink.degree * sink.width, batch.dtype, device)
        for i, cut in packing.rearranged:
            pieces[i] = cut.by_rank(pieces[i]).contiguous()
        if len({piece.dtype for piece in pieces}) > 1:
            pieces = [piece.to(batch.dtype) for piece in pieces]
        for i, start, end in reversed(sink.gaps):
            shape = (sink.degree, end - start)
            if not packing.apart and start <= packing.flags < end:
                gap = batch.flags(self._used, shape, packing.flags - start, pieces[0])
            else:
                gap = pieces[0].new_zeros(shape)
            pieces.insert(i, gap)
        pieces = [piece for piece in pieces if piece.numel()]
        self._gradients = []
        if pieces:
            pack_rank_major(pieces, sink.degree, flat.view(sink.degree, sink.width))
        return flat

    def _begin_sum(self, flat: Tensor) -> None:
        self._flat = flat
        if not self._sums:
            return
        batch = self._batch
        self._flat, self._used = batch.partial.add(flat, batch.names, self._used)
        self._ready = self._options.all_reduce
        if self._ready:
            batch.partial.clear()
            self._summing = self._sum(self._sums.pop(0))

    def _sum(self, axis: Axis) -> Work:
        flat = self._flat
        with named_range("all_reduce", self._batch.path, axis.name):
            return self._collectives.all_reduce(axis, [] if flat is None else [flat], op=self._op)

    @property
    def scattering(self) -> bool:
        """Return whether the reduce-scatter, and with it the packed gradients, is still alive."""
        return self._scattering is not None

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, release its input, start the all-reduce of HSDP."""
        if self._scattering is not None:
            try:
                with named_range("wait_reduce_scatter", self._batch.path):
                    outputs = self._scattering.wait()
            except Exception:  # it has ended, with this error; an interrupt says nothing of it
                self._scattering, self._ready = None, False
                raise
            shard = outputs[0] if self._row is None else self._row
            self._scattering = self._row = None
            if self._rows is not None:
                self._batch.buffers.give(self._rows)
                self._rows = None
            self._begin_sum(shard)

    def wait(self) -> None:
        """Wait for everything; afterwards nothing of this reduction is in flight."""
        self.finish_scatter()
        while self._summing is not None:
            try:
                with named_range("wait_all_reduce", self._batch.path):
                    self._summing.wait()
            except Exception:
                self._summing = None
                raise
            self._summing = self._sum(self._sums.pop(0)) if self._sums else None

    def drop(self) -> None:
        """Wait for what is under way and start nothing more: the result is not wanted."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
        if self._scattering is not None:
            self._scattering.wait()
            self._scattering = self._row = None
            if self._rows is not None:
                self._batch.buffers.give(self._rows)
                self._rows = None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, divide, and put the results on the parameters' ``grad``."""
        self.wait()
        if not self._ready:
            return
        used = self._used_by_any()
        for parameter, local, is_used in zip(
            self._batch.parameters, self._results(), used, strict=True
        ):
            if is_used:
                parameter.add_gradient(local)

    def _used_by_any(self) -> list[bool]:
        """Return which parameters any rank used; reads flags only where this rank did not."""
        if self._flat is None or all(self._used):
            return self._used
        first = self._batch.packing.flags
        return self._flat[first : first + len(self._used)].ne(0).tolist()

    def _results(self) -> list[Tensor]:
        if self._flat is None:
            return [self._finished(gradient) for gradient in self._gradients]
        packing = self._batch.packing
        if self._options.hook is not None:
            self._options.hook(self._flat[: packing.flags])
        reduced = self._flat[: packing.flags] if packing.apart else self._flat
        return packing.row.views(self._finished(reduced))

    def _finished(self, reduced: Tensor) -> Tensor:
        if self._after and self._after != 1.0:
            reduced.div_(self._after)
        shard = self._batch.shard
        return reduced.to(shard.device, shard.dtype)


def _divisors(options: Options, size: int, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Return what to divide gradients by before and after a sum; None, None for a mean.

    float16 overflows in large sums: about half the factor, in powers of two, comes before.
    """
    mean = options.divide is None and options.reduction == "mean"
    factor = None if mean else options.divisor(size)
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
