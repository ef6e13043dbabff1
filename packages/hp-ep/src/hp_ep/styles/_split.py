"""Along which axes experts are split, and what that makes of each weight."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TensorPlacement
from torch.distributed.tensor import Shard

from hp_dtensor import Axis

from .._errors import ExpertConfigError
from .._experts import GroupedExperts
from ..dispatch._checks import check_divides
from ..placement._plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """The axes of a mesh that split experts: whole ones apart, or each inside, or both.

    ``mesh`` has these axes alone, experts first; weights become DTensors over it.
    """

    mesh: DeviceMesh
    expert_axis: Axis | None = None
    tensor_axis: Axis | None = None

    @property
    def num_ranks(self) -> int:
        """Return how many ranks have different experts."""
        return 1 if self.expert_axis is None else self.expert_axis.size

    @property
    def summed_over(self) -> Axis | None:
        """Return the axis whose ranks each have a part of every output, None where one has all."""
        axis = self.tensor_axis
        return None if axis is None or axis.size == 1 else axis

    def placements(self, name: str) -> tuple[TensorPlacement, ...]:
        """Return how the weight ``name`` lies over the mesh.

        The hidden dimension is the one that is cut inside an expert: rows of ``w1`` and ``w3``,
        columns of ``w2`` (Megatron-LM, arXiv 1909.08053, section 3).
        """
        found: list[TensorPlacement] = [] if self.expert_axis is None else [Shard(0)]
        if self.tensor_axis is not None:
            found.append(Shard(2 if name == "w2" else 1))
        return tuple(found)

    def check(self, experts: GroupedExperts, placement: Placement | None) -> None:
        """Raise an `ExpertConfigError` where the axes do not suit these experts."""
        if placement is not None and self.expert_axis is None:
            raise ExpertConfigError(
                "a placement says which rank holds which experts, but no axis splits them here; "
                "leave placement out"
            )
        if placement is not None:
            _check_placement(placement, experts.num_experts, self.num_ranks)
        elif self.expert_axis is not None:
            check_divides(self.expert_axis.name, self.expert_axis.size, experts.num_experts)
        axis = self.tensor_axis
        if axis is not None and experts.hidden_dim % axis.size:
            legal = [n for n in range(1, experts.hidden_dim + 1) if experts.hidden_dim % n == 0]
            raise ExpertConfigError(
                f"{axis.name}={axis.size} does not divide hidden_dim={experts.hidden_dim}; "
                f"use one of {legal} ranks"
            )


def _check_placement(placement: Placement, num_experts: int, num_ranks: int) -> None:
    if (placement.num_experts, placement.num_ranks) != (num_experts, num_ranks):
        raise ExpertConfigError(
            f"a placement of {placement.num_experts} experts on {placement.num_ranks} ranks does "
            f"not fit {num_experts} experts on {num_ranks} ranks; plan one for these"
        )
