"""A group whose parameters are runs of one buffer."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ._cut import Cut
from ._gradients import Batch, Reduction
from ._group import ParameterGroup
from ._options import Options
from ._plan import Slot
from ._precision import choose_dtypes
from ._ragged_parameter import RaggedParameter
from ._ragged_plan import plan_ragged
from .layouts._ragged import RaggedLayout


class RaggedGroup(ParameterGroup):
    """Parameters whose parts are runs of one share; gradients are reduced as they lie there."""

    layout: RaggedLayout

    def _own_parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        parameters = cast("list[RaggedParameter]", self.parameters)
        storage, index = self.storage, self.axes.shard.index
        dtypes = choose_dtypes(storage.precision, wholes[0].dtype)
        self._plan = plan_ragged(
            [tuple(whole.shape) for whole in wholes],
            [parameter.atom for parameter in parameters],
            self.axes.shard.size,
            min(dtypes.compute.itemsize, wholes[0].element_size()),
        )
        parts = []
        for position, (parameter, whole) in enumerate(zip(parameters, wholes, strict=True)):
            leading = self._plan.leading(position)
            parameter.lay(leading, self._plan.sizes(position))
            first, end = self._plan.span(position, index)
            rest = whole.shape[leading:]
            held = whole.flatten()[first:end]
            rows = self._plan.sizes(position)[index]
            parts.append(held.view(rows, *rest))
        return parts

    def _layout_of(self, locals_: Sequence[Tensor], compute: torch.dtype) -> RaggedLayout:
        storage = self.storage
        return RaggedLayout(
            locals_,
            self._plan,
            self.axes.shard,
            dtype=compute,
            device=storage.device,
            buffers=storage.buffers,
            pinned=storage.pinned and not locals_[0].is_meta,
        )

    def _reduction(self, options: Options) -> Reduction | None:
        trains = [parameter.sharded.requires_grad for parameter in self.parameters]
        if not any(trains):
            return None
        plan, layout = self._plan, self.layout
        numel = plan.degree * plan.share
        flat = self._take(numel)
        end = 0
        for position, whole in enumerate(layout.wholes(flat)):
            start = plan.starts[position]
            flat[end:start].zero_()
            end = start + whole.numel()
            if trains[position]:
                whole.copy_(self.parameters[position].take_gradient(self._collectives))
            else:
                whole.zero_()
        flat[end:].zero_()
        slot = Slot(
            shape=(numel,),
            rows=plan.share,
            row_numel=1,
            shard_offset=0,
            full_offset=0,
            direct=True,
        )
        batch = Batch(
            parameters=[_Share(self, trains)],
            slots=[slot],
            cuts=[Cut(shape=(numel,), dim=0, degree=plan.degree)],
            held=layout.held,
            dtype=self.dtypes.reduce,
            shard=layout.shard,
            partial=self.partial,
            buffers=self.storage.buffers,
            rows=flat.view(plan.degree, plan.share),
        )
        return Reduction(batch, [], self.reduce_axes, self._collectives, options)


class _Share:
    """The gradients of a whole group, as one."""

    def __init__(self, group: RaggedGroup, trains: Sequence[bool]) -> None:
        self._group = group
        self._trains = trains
        names = [p.name for p, each in zip(group.parameters, trains, strict=True) if each]
        self.name = ", ".join(names)

    def add_gradient(self, local: Tensor) -> None:
        """Give each parameter its part of the reduced share."""
        parts = self._group.layout.parts(local)
        for parameter, part, trains in zip(
            self._group.parameters, parts, self._trains, strict=True
        ):
            if trains:
                parameter.add_gradient(part)
