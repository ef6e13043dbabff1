"""A parameter whose sharded face is a ragged tensor."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from hp_dtensor import RaggedShard, RaggedTensor

from ._errors import ParameterError
from ._parameters import Owner, ShardedParameter
from ._place import Place


class RaggedParameter(ShardedParameter):
    """A parameter of which each rank holds a run of whole atoms, ``atom`` elements each."""

    def __init__(
        self, original: nn.Parameter, owners: Sequence[Owner], name: str, place: Place, atom: int
    ) -> None:
        """Work out on which mesh the parameter will lie; the group's plan says how."""
        super().__init__(original, owners, name, place)
        self.atom = atom
        self.placed: Tensor  # this rank's part as it was put into the sharded face
        if not self.is_plain:
            raise ParameterError(
                f"{name} is a DTensor already; the ragged layout takes plain parameters, so shard "
                "the modules that have such ones with layout='exact'"
            )

    def lay(self, leading: int, sizes: tuple[int, ...]) -> None:
        """Take the run lengths that the plan gives, over the flattened leading dims."""
        runs = RaggedShard(tuple(range(leading)), sizes)
        self._runs: tuple[Placement | RaggedShard, ...] = (*self._placements[:-1], runs)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor that lies as the parameter does."""
        if not torch.is_grad_enabled():
            return cast(RaggedTensor, tensor).to_local()
        with torch.no_grad():
            return cast(RaggedTensor, tensor).to_local()

    def build_sharded(self, local: Tensor) -> None:
        """Create the sharded face over ``local``, this rank's part."""
        with torch.no_grad():
            whole = RaggedTensor.from_local(local, self._mesh, self._runs, shape=self.shape)
        self.sharded = nn.Parameter(whole, requires_grad=self._requires_grad)
        self._face_is_new()

    def put(self, view: Tensor) -> None:
        """Make ``view`` the memory of the sharded face, which may be another than before."""
        self.sharded.data = cast(RaggedTensor, self.sharded).like(view)
        self._face_is_new()

    def _face_is_new(self) -> None:
        self.wrap = cast(RaggedTensor, self.sharded).like
        self.placed = self.part(self.sharded)

    def fits(self, found: object) -> bool:
        """Return whether ``found`` lies as the sharded face does."""
        return (
            isinstance(found, RaggedTensor)
            and found.shape == self.shape
            and found.device_mesh == self._mesh
            and tuple(found.placements) == tuple(cast(RaggedTensor, self.sharded).placements)
        )
