"""The styles: experts apart, experts cut, or both."""

from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor import Axis

from .._errors import ExpertConfigError
from ..dispatch._checks import expert_axis
from ._base import BaseExpertParallel
from ._split import Split


class ExpertParallel(BaseExpertParallel):
    """Experts split over one mesh axis; tokens travel to them.

    The mesh is 1-D or has an axis ``ep``; weights become Shard(0) over it. Options and what happens
    to a `MoE` or a `GroupedExperts` are those of `BaseExpertParallel`.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the axis ``ep``, or the only one."""
        axis = expert_axis(mesh)
        return Split(mesh=mesh if mesh.ndim == 1 else mesh[axis.name], expert_axis=axis)


class TensorParallel(BaseExpertParallel):
    """Every expert cut along its hidden dimension over a 1-D mesh; no token travels.

    Weights become Shard(1) (``w1``, ``w3``) and Shard(2) (``w2``), and the ranks' parts of the
    output are summed: for a `MoE` once per token, for a `GroupedExperts` once per row. The ranks
    hold the same tokens.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the only axis of ``mesh``."""
        if mesh.ndim != 1:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass the 1-D mesh of the axis that cuts "
                "experts, or use ExpertTensorParallel on two"
            )
        return Split(mesh=mesh, tensor_axis=Axis.of(mesh, 0))


class ExpertTensorParallel(BaseExpertParallel):
    """Experts split over the first axis of a 2-D mesh and cut over the second, whatever its names.

    Tokens travel over the first axis only; the ranks of the second hold the same tokens, and their
    parts of the output are summed as in `TensorParallel`.
    """

    def split(self, mesh: DeviceMesh) -> Split:
        """Return the two axes of ``mesh``."""
        if mesh.ndim != 2:
            raise ExpertConfigError(
                f"a mesh with axes {mesh.mesh_dim_names}; pass a 2-D mesh of the axis that splits "
                "experts and the axis that cuts each of them"
            )
        return Split(mesh=mesh, expert_axis=Axis.of(mesh, 0), tensor_axis=Axis.of(mesh, 1))
