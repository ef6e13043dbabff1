"""What a redistribution starts from: a DTensor, a ragged tensor, or nothing on this rank."""

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._absent import Absent
from .._torch import local_part, order_of, shard_order_of, spec_of
from ..layouts._convert import to_layout
from ..layouts._layout import Layout
from ..ragged._tensor import RaggedTensor

Distributed: TypeAlias = DTensor | RaggedTensor | Absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a tensor lies: ``layout`` by position in ``mesh``, by rank where this rank has no mesh.

    ``mesh`` is None for an `Absent`.
    """

    layout: Layout
    mesh: DeviceMesh | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def origin_of(x: object) -> Origin:
    """Return how ``x`` lies; raises `PlacementTypeError` for what is no distributed tensor."""
    if isinstance(x, Absent):
        return Origin(layout=x.layout, mesh=None, shape=x.shape, dtype=x.dtype)
    if isinstance(x, Origin):
        return x
    if isinstance(x, RaggedTensor):
        held = x._spec
        return Origin(layout=held.layout, mesh=held.mesh, shape=held.shape, dtype=x.dtype)
    spec = spec_of(x)
    return origin_of_parts(spec.mesh, spec.placements, spec.tensor_meta, shard_order_of(spec))


def origin_of_parts(mesh: DeviceMesh, placements: Any, meta: Any, order: Any) -> Origin:
    """Return how a DTensor lies whose spec has these parts."""
    shape = tuple(meta.shape)
    layout = to_layout(placements, tuple(mesh.shape), len(shape), order_of(order))
    return Origin(layout=layout, mesh=mesh, shape=shape, dtype=meta.dtype)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def part_of(x: Any) -> torch.Tensor | None:
    """Return this rank's part, complete, without autograd; None where there is none."""
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else None


def mesh_under(x: Any) -> DeviceMesh | None:
    """Return the mesh of a tensor, None for an `Absent`."""
    return None if isinstance(x, Absent) else cast(DeviceMesh, x._spec.mesh)
