"""Gradients that are packed as they come, instead of once at the end."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Collectives

from ._cut import Cut
from ._errors import StateError
from ._fused import can_fuse, fuse
from ._parameters import ShardedParameter
from ._plan import Slot
from ._sink import Sink


class Collector:
    """Moves each gradient of a group into packed rows when autograd has it, and adds later ones.

    With ``fused`` the weight gradients of linear layers are written there by the matrix product
    itself. DTensors, whose gradients may have to be redistributed, come last.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        cuts: Sequence[Cut],
        take: Callable[[int], Tensor],
        fused: bool,
    ) -> None:
        """Nothing is watched before `watch`."""
        self._parameters = parameters
        self._cuts = cuts
        self._take = take
        self._sink: Sink | None = None
        self._chosen: list[int] = []
        self.announce: Callable[[], None] | None = None
        for index, parameter in enumerate(parameters):
            for owner in parameter.owners if fused and parameter.is_plain else ():
                if can_fuse(owner.module, owner.name):
                    fuse(owner.module, parameter.is_face, partial(self._product, index))

    def watch(self, slots: Sequence[Slot], order: Sequence[int], dtype: torch.dtype) -> None:
        """Follow the parameters' unsharded faces, which were made anew."""
        self._slots, self._order, self._dtype = slots, order, dtype
        for index, parameter in enumerate(self._parameters):
            if parameter.is_plain and parameter.unsharded.is_floating_point():
                face = parameter.unsharded
                face.requires_grad_(True)  # hooks need it; it is set right with every gather
                face.register_post_accumulate_grad_hook(partial(self._came, index))

    def _begin(self) -> Sink:
        if self._sink is None:
            trains = [parameter.sharded.requires_grad for parameter in self._parameters]
            self._chosen = [i for i in self._order if trains[i]]
            self._sink = Sink(
                [self._slots[i] for i in self._chosen],
                [self._cuts[i] for i in self._chosen],
                self._cuts[0].degree,
                self._dtype,
                self._take,
            )
        return self._sink

    def _place(self, index: int) -> int:
        if index not in self._chosen:
            raise StateError(
                f"a gradient of {self._parameters[index].name}, which was frozen when gradients "
                "began to add up; thaw parameters only after a reduction"
            )
        return self._chosen.index(index)

    @torch.no_grad()
    def _came(self, index: int, face: Tensor) -> None:
        gradient, face.grad = face.grad, None
        if gradient is not None:
            self._begin().add(self._place(index), gradient.contiguous())

    @torch.no_grad()
    def _product(self, index: int, left: Tensor, right: Tensor) -> None:
        sink = self._begin()
        place = self._place(index)
        if sink.takes_products(place, left.dtype):
            sink.add_product(place, left, right)
        else:
            sink.add(place, left.t() @ right)
        if self.announce is not None:
            self.announce()

    def finish(self, chosen: Sequence[int], collectives: Collectives) -> Tensor:
        """Return the packed rows of the parameters at ``chosen``, and begin anew."""
        sink = self._begin()
        if self._chosen != list(chosen):
            names = [self._parameters[i].name for i in self._chosen]
            raise StateError(
                f"gradients of {names} were added up, and since then other parameters were frozen "
                "or thawed; do so only after a reduction"
            )
        for place, index in enumerate(self._chosen):
            if self._parameters[index].has_gradient:
                sink.add(place, self._parameters[index].take_gradient(collectives))
        self._sink = None
        return sink.finish()

    def drop(self) -> None:
        """Forget what was added up."""
        self._sink = None
