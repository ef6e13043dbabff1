"""Gradients that are packed as they come, instead of once at the end."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Collectives

from ._errors import StateError
from ._fused import can_fuse, fuse
from ._fused_embedding import can_fuse_embedding, fuse_embedding
from ._packing import Packing
from ._parameters import ShardedParameter
from ._sink import Sink


class Collector:
    """Moves each large gradient of a group into packed rows when autograd has it, and adds others.

    With ``fused`` the weight gradients of linear layers and of embeddings are written there by the
    matrix product, or row by row, itself. The small ones come last, as do those of DTensors, which
    may have to be redistributed: watching each would cost more host time than it saves.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        large: Collection[int],
        reduced: Callable[[], list[int]],
        packing_of: Callable[[Sequence[int]], Packing],
        take: Callable[[int], Tensor],
        fused: bool,
    ) -> None:
        """Nothing is watched before `watch`; ``large`` says which of ``parameters`` will be.

        ``reduced`` says which parameters the next reduction is of, in the order to pack them in.
        """
        self._parameters = parameters
        self._large = [i for i in large if parameters[i].is_plain]
        self._reduced = reduced
        self._packing_of = packing_of
        self._take = take
        self._sink: Sink | None = None
        self._chosen: list[int] = []
        self._packing: Packing | None = None
        self.announce: Callable[[], None] | None = None
        for i in self._large:
            is_face = parameters[i].is_face
            for owner in parameters[i].owners if fused else ():
                if can_fuse(owner.module, owner.name):
                    fuse(owner.module, is_face, partial(self._product, i))
                elif can_fuse_embedding(owner.module, owner.name):
                    fuse_embedding(owner.module, is_face, partial(self._rows, i))

    def watch(self) -> None:
        """Follow the parameters' unsharded faces, which were made anew."""
        self._packing = None
        for i in self._large:
            face = self._parameters[i].unsharded
            if face.is_floating_point():
                face.requires_grad_(True)  # hooks need it; it is set right with every gather
                face.register_post_accumulate_grad_hook(partial(self._came, i))

    def _begin(self) -> Sink:
        if self._sink is None:
            chosen = self._reduced()
            if self._packing is None or chosen != self._chosen:
                self._chosen, self._packing = chosen, self._packing_of(chosen)
            plan = self._packing.sink
            flags = None if self._packing.apart else self._packing.flags
            self._sink = Sink(plan, self._take(plan.degree * plan.width), flags)
        return self._sink

    def _place(self, index: int) -> int:
        if index not in self._chosen:
            raise StateError(
                f"a gradient of {self._parameters[index].name}, which was frozen when gradients "
                "began to add up; thaw parameters only after a reduction"
            )
        return self._chosen.index(index)

    def _trains(self, index: int) -> bool:
        """Return False for what was frozen since its forward: its gradient is dropped."""
        return self._parameters[index].sharded.requires_grad

    @torch.no_grad()
    def _came(self, index: int, face: Tensor) -> None:
        gradient, face.grad = face.grad, None
        if gradient is not None and self._trains(index):
            self._begin().add(self._place(index), gradient.contiguous())

    @torch.no_grad()
    def _product(self, index: int, left: Tensor, right: Tensor) -> None:
        if not self._trains(index):
            return
        sink = self._begin()
        place = self._place(index)
        if sink.takes_products(place, left.dtype):
            sink.add_product(place, left, right)
        else:
            sink.add(place, left.t() @ right)
        self._announce()

    @torch.no_grad()
    def _rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        if not self._trains(index):
            return
        sink = self._begin()
        place = self._place(index)
        if sink.takes_rows(place):
            sink.add_rows(place, ids, rows)
        else:
            whole = torch.zeros_like(self._parameters[index].unsharded)
            sink.add(place, whole.index_add_(0, ids, rows))
        self._announce()

    def _announce(self) -> None:
        if self.announce is not None:
            self.announce()

    def finish(self, chosen: Sequence[int], collectives: Collectives) -> tuple[Tensor, list[bool]]:
        """Return the packed gradients of the parameters at ``chosen``, and begin anew.

        With them, for each parameter, whether it has any.
        """
        sink = self._begin()
        if self._chosen != list(chosen):
            names = [self._parameters[i].name for i in self._chosen]
            raise StateError(
                f"gradients of {names} were added up, and since then other parameters were "
                "thawed; do so only after a reduction"
            )
        for place, index in enumerate(self._chosen):
            gradient = self._parameters[index].take_gradient(collectives)
            if gradient is not None:
                sink.add(place, gradient)
        self._sink = None
        return sink.finish(), sink.written

    def drop(self) -> None:
        """Forget what was added up."""
        self._sink = None
