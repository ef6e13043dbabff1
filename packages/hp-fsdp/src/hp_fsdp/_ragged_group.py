"""A group whose parameters are runs of one buffer."""

from collections.abc import Sequence
from operator import is_
from typing import cast

import torch
from torch import Tensor

from hp_dtensor import RaggedTensor

from ._group import ParameterGroup
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

    @torch.no_grad()
    def _in_place(self) -> bool:
        faces = cast("list[RaggedTensor]", [parameter.sharded for parameter in self.parameters])
        placed = [cast(RaggedParameter, parameter).placed for parameter in self.parameters]
        return all(map(is_, [face.to_local() for face in faces], placed))
