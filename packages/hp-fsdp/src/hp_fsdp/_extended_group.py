"""A group whose parameters say themselves what is gathered of them."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ._errors import DisagreementError, ParameterError, StateError
from ._extended_parameter import ExtendedParameter, check_local
from ._faces import Faces
from ._group import ParameterGroup
from ._states import ParameterState
from ._torch import writes_to
from .layouts._extended import ExtendedLayout

Offer = list[list[tuple[torch.dtype, torch.Size]]]


class ExtendedGroup(ParameterGroup):
    """Parameters of tensor classes with all-gather hooks; gradients are plain and go as usual."""

    layout: ExtendedLayout
    flat = False

    def _own_parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        if self.storage.rest != self.storage.device:
            raise ParameterError(
                f"{[parameter.name for parameter in self.parameters]} gather themselves "
                "(fsdp_pre_all_gather) on the device; CPUOffloadPolicy() is not legal for them"
            )
        # The operations that torch's fully_shard asks of such classes, and no others.
        parts = [part.new_zeros(part.shape).copy_(part) for part in super()._own_parts(wholes)]
        for parameter, part in zip(self.parameters, parts, strict=True):
            check_local(part, parameter.name)
        return parts

    def _layout_of(self, locals_: Sequence[Tensor], compute: torch.dtype) -> ExtendedLayout:
        self._offered: Offer | None = None
        self._faces_new = False
        return ExtendedLayout(locals_, self._cuts, self.axes.shard, dtype=compute)

    def _collect(self, fused: bool) -> None:
        """Leave gradients to be packed at the end: faces come late and compute in their own way."""

    def gather(self) -> None:
        """Start the all-gather unless it was started or has arrived.

        The hooks run before anything is noted, so that after an exception in one nothing happened.
        """
        if self.state is ParameterState.SHARDED and not self.layout.shard.is_meta:
            self._offer()
        super().gather()

    @torch.no_grad()
    def _offer(self) -> None:
        parameters = cast("list[ExtendedParameter]", self.parameters)
        inputs = [parameter.offer(self.storage.precision) for parameter in parameters]
        offered = [[(tensor.dtype, tensor.shape) for tensor in each] for each in inputs]
        if self._offered is None:
            self._agree(inputs)
            self._offered = offered
        for parameter, before, now in zip(parameters, self._offered, offered, strict=True):
            if before != now:
                raise StateError(
                    f"fsdp_pre_all_gather of {parameter.name} returned {_shown(now)}, and before "
                    f"{_shown(before)}; dtypes and shapes must stay what they are at first"
                )
        self.layout.offer(inputs)

    def _agree(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Compare once, with one small all-gather, how many bytes each rank sends."""
        own = [sum(tensor.nbytes for tensor in each) for each in inputs]
        axis = self.axes.shard
        if axis.size == 1:
            return
        table = torch.tensor(own, dtype=torch.int64, device=self.storage.device)
        (table,) = self._collectives.all_gather(axis, [table]).wait()
        sent = table.view(axis.size, -1).t().tolist()
        unlike = [
            f"{parameter.name} {each}"
            for parameter, each in zip(self.parameters, sent, strict=True)
            if len(set(each)) > 1
        ]
        if unlike:
            raise DisagreementError(
                f"fsdp_pre_all_gather gives, in bytes on the ranks of {axis.name}: "
                f"{', '.join(unlike)}; it must give the same everywhere, so pad uneven rows in it"
            )

    @torch.no_grad()
    def _finish_gather(self) -> None:
        super()._finish_gather()
        parameters = cast("list[ExtendedParameter]", self.parameters)
        if self.layout.renewed:
            for parameter in parameters:
                parameter.renew()
            self.layout.renewed = False
        for parameter, outputs in zip(parameters, self.layout.received(), strict=True):
            inner = parameter.receive(outputs, self.dtypes.compute)
            if inner is not None:
                self._faces_new = True  # stays if a later hook raises
                self.layout.hold(inner)
        if self._faces_new:
            self._faces = Faces(parameters)
            self._faces_new = False

    def _writes(self) -> int:
        return sum(writes_to(p.sharded) + writes_to(p.part(p.sharded)) for p in self.parameters)


def _shown(offered: Sequence[tuple[torch.dtype, torch.Size]]) -> list[str]:
    return [f"{dtype} {list(shape)}" for dtype, shape in offered]
