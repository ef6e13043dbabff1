"""From the unsharded gradients of one group to sharded gradients on its parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, ReduceOp, Work

from ._parameters import ShardedParameter
from ._plan import GradientPlan, Slot, plan_gradients
from ._torch import pack_rank_major


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The axes that gradients are reduced over: scattered over one, summed over the other."""

    shard: Axis
    replicate: Axis | None

    @property
    def size(self) -> int:
        """Return the number of ranks that gradients are reduced over."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)


class Reduction:
    """One reduction under way: a reduce-scatter, then for HSDP an all-reduce of its result.

    ``divide`` None means the mean over all ranks; a number divides the sum.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        slots: Sequence[Slot],
        axes: DataAxes,
        collectives: Collectives,
        divide: float | None,
    ) -> None:
        self._parameters = parameters
        self._slots = slots
        self._axes = axes
        self._collectives = collectives
        self._divide = divide
        self._op: ReduceOp = "avg" if divide is None else "sum"
        self._scattering: Work | None = None
        self._summing: Work | None = None
        gradients = [parameter.take_gradient(collectives) for parameter in parameters]
        self._plan: GradientPlan = plan_gradients(slots, gradients[0].element_size())
        self._locals: list[Tensor] = gradients
        self._flat: Tensor | None = None
        if axes.shard.size > 1:
            rows = self._pack(gradients).view(-1)
            self._locals = []
            self._scattering = collectives.reduce_scatter(axes.shard, [rows], op=self._op)
        elif axes.size > 1:
            self._begin_sum(self._pack(gradients).view(-1))

    def _pack(self, gradients: list[Tensor]) -> Tensor:
        degree, plan = self._axes.shard.size, self._plan
        out = gradients[0].new_empty(degree, plan.shard_numel)
        pieces = [g for g, slot in zip(gradients, self._slots, strict=True) if slot.shard_numel]
        if plan.padding:
            pieces.append(gradients[0].new_zeros(degree, plan.padding))
        if pieces:
            pack_rank_major(pieces, degree, out)
        return out

    def _begin_sum(self, shard: Tensor) -> None:
        replicate, index = self._axes.replicate, self._axes.shard.index
        self._flat = shard
        widths = [slot.shard_numel for slot in self._slots]
        # One split instead of a slice each: it runs for every parameter in every step.
        pieces = shard.split([*widths, self._plan.padding])
        self._locals = [
            _rows(piece, slot, index) for piece, slot in zip(pieces, self._slots, strict=False)
        ]
        if replicate is not None and replicate.size > 1:
            self._summing = self._collectives.all_reduce(replicate, [shard], op=self._op)

    @property
    def scattering(self) -> bool:
        """Return whether the reduce-scatter, and with it the packed gradients, is still alive."""
        return self._scattering is not None

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, release its input, start the all-reduce of HSDP."""
        if self._scattering is not None:
            (shard,) = self._scattering.wait()
            self._scattering = None
            self._begin_sum(shard)

    def wait(self) -> None:
        """Wait for everything; afterwards nothing of this reduction is in flight."""
        self.finish_scatter()
        if self._summing is not None:
            self._summing.wait()
            self._summing = None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, divide, and put the results on the parameters' ``grad``."""
        self.wait()
        if self._divide is not None and self._divide != 1.0:
            for part in self._locals if self._flat is None else [self._flat]:
                part.div_(self._divide)
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            parameter.add_gradient(local)


def _rows(piece: Tensor, slot: Slot, index: int) -> Tensor:
    rows = slot.held_rows(index)
    held = piece if rows == slot.rows else piece[: rows * slot.row_numel]
    return held if len(slot.shape) == 1 else held.view(rows, *slot.shape[1:])
