"""Whether a dtype has the reductions that partial values need."""

import torch

from .._errors import PartialDtypeError
from ..layouts._layout import Layout
from ..layouts._placements import Partial
from ..plans._transfer import same_mesh


def check_reducible(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise `PartialDtypeError` where partial values are reduced as their dtype cannot be."""
    one_mesh = same_mesh(src, dst)
    for axis, placement in enumerate(src.placements):
        if not isinstance(placement, Partial) or src.mesh_shape[axis] == 1:
            continue
        if one_mesh and dst.placements[axis] == placement:
            continue
        if placement.op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            legal = "convert to a floating dtype first, or use Partial('sum')"
        elif placement.op in ("max", "min", "prod") and dtype.is_complex:
            legal = "use Partial('sum') or Partial('avg')"
        else:
            continue
        raise PartialDtypeError(
            f"{placement} on mesh axis {axis} of a tensor of {dtype}, which has no such "
            f"reduction; {legal}"
        )
