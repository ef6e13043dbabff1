"""What a redistribution starts from: a DTensor, a ragged tensor, or nothing on this rank."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._absent import Absent
from .._torch import Spec, dtype_of, local_part, order_of, spec_of
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
        spec = x._spec
        return Origin(layout=spec.layout, mesh=spec.mesh, shape=spec.shape, dtype=x.dtype)
    return origin_of_spec(spec_of(x))


def origin_of_spec(spec: Spec) -> Origin:
    """Return how a DTensor with this spec lies."""
    mesh: DeviceMesh = spec.mesh
    shape = tuple(spec.shape)
    layout = to_layout(spec.placements, tuple(mesh.shape), len(shape), order_of(spec))
    return Origin(layout=layout, mesh=mesh, shape=shape, dtype=dtype_of(spec))


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def part_of(x: Any) -> torch.Tensor | None:
    """Return this rank's part, complete, without autograd; None where there is none."""
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else None
