"""A group and a mesh of ranks that are threads of one process."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


class SimulatedGroup:
    """The ranks of one axis, seen from one of them."""

    def __init__(self, ranks: tuple[int, ...], me: int) -> None:
        self.ranks = ranks
        self._index = ranks.index(me)

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return self._index

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)


class SimulatedMesh:
    """An `AxisMesh` over simulated ranks, row-major."""

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], me: int, ranks: Sequence[int]
    ) -> None:
        if math.prod(shape) != len(ranks):
            raise ValueError(f"a mesh of shape {tuple(shape)} does not hold {len(ranks)} ranks")
        self.mesh = torch.tensor(list(ranks)).view(*shape)
        self.mesh_dim_names: tuple[str, ...] | None = tuple(names)
        self.device_type = "cpu"
        self._me = me
        self._coordinate = [int(i) for i in (self.mesh == me).nonzero()[0]]

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, of one axis or of all."""
        return self.mesh.numel() if mesh_dim is None else self.mesh.shape[mesh_dim]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate on one axis."""
        return self._coordinate[self._position(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> SimulatedGroup:
        """Return the group along one axis."""
        return SimulatedGroup(tuple(self._line(self._position(mesh_dim)).tolist()), self._me)

    def __getitem__(self, name: str) -> "SimulatedMesh":
        line = self._line(self._position(name)).tolist()
        return SimulatedMesh((len(line),), (name,), self._me, line)

    def _line(self, position: int) -> Tensor:
        index: list[Any] = list(self._coordinate)
        index[position] = slice(None)
        return self.mesh[tuple(index)]

    def _position(self, mesh_dim: int | str | None) -> int:
        if isinstance(mesh_dim, str):
            return cast(tuple[str, ...], self.mesh_dim_names).index(mesh_dim)
        if mesh_dim is None and self.ndim > 1:
            raise RuntimeError("name the axis of a mesh with several axes")
        return mesh_dim or 0
