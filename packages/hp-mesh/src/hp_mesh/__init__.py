"""Parallel degrees, rank layout and device meshes for PyTorch, and a planner of all three.

Names that need torch are loaded on first use, and so is the planner: degrees, checks and layouts
work without either.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._axis_names import MeshAxisName as MeshAxisName
from ._degrees import DEFAULT_ORDER as DEFAULT_ORDER
from ._dims import ParallelDims as ParallelDims
from ._errors import LayoutError as LayoutError
from ._errors import MeshError as MeshError
from ._errors import ParallelDimsError as ParallelDimsError
from ._errors import Report as Report
from ._errors import Violation as Violation
from ._explain import Explanation as Explanation
from ._hybrid import HybridShard as HybridShard
from ._layout import RankLayout as RankLayout
from ._layout import View as View
from ._topology import Topology as Topology

if TYPE_CHECKING:
    from ._getters import WorldMesh as WorldMesh
    from ._getters import flatten_mesh as flatten_mesh
    from ._getters import get_cp_mesh as get_cp_mesh
    from ._getters import get_device_mesh_info as get_device_mesh_info
    from ._getters import get_dp_mesh as get_dp_mesh
    from ._getters import get_dp_model_mesh as get_dp_model_mesh
    from ._getters import get_dp_process_group as get_dp_process_group
    from ._getters import get_dp_replicate_mesh as get_dp_replicate_mesh
    from ._getters import get_dp_shard_mesh as get_dp_shard_mesh
    from ._getters import get_ep_mesh as get_ep_mesh
    from ._getters import get_pp_mesh as get_pp_mesh
    from ._getters import get_pp_stage_mesh as get_pp_stage_mesh
    from ._getters import get_tp_mesh as get_tp_mesh
    from ._mesh import ParallelMesh as ParallelMesh
    from ._world import build_expert_parallel_mesh as build_expert_parallel_mesh
    from ._world import build_world_mesh as build_world_mesh
    from ._world import get_world_mesh as get_world_mesh
    from ._world import reset_world_mesh as reset_world_mesh
    from .planner import Accelerator as Accelerator
    from .planner import Candidate as Candidate
    from .planner import Cluster as Cluster
    from .planner import ModelShape as ModelShape
    from .planner import Plan as Plan
    from .planner import TrainSpec as TrainSpec
    from .planner import plan as plan

__version__ = "0.1.0"

_LATER = {
    "._getters": (
        "WorldMesh",
        "flatten_mesh",
        "get_cp_mesh",
        "get_device_mesh_info",
        "get_dp_mesh",
        "get_dp_model_mesh",
        "get_dp_process_group",
        "get_dp_replicate_mesh",
        "get_dp_shard_mesh",
        "get_ep_mesh",
        "get_pp_mesh",
        "get_pp_stage_mesh",
        "get_tp_mesh",
    ),
    "._mesh": ("ParallelMesh",),
    "._world": (
        "build_expert_parallel_mesh",
        "build_world_mesh",
        "get_world_mesh",
        "reset_world_mesh",
    ),
    ".planner": ("Accelerator", "Candidate", "Cluster", "ModelShape", "Plan", "TrainSpec", "plan"),
}
__all__ = [
    "DEFAULT_ORDER",
    "Accelerator",
    "Candidate",
    "Cluster",
    "Explanation",
    "HybridShard",
    "LayoutError",
    "MeshAxisName",
    "MeshError",
    "ModelShape",
    "ParallelDims",
    "ParallelDimsError",
    "ParallelMesh",
    "Plan",
    "RankLayout",
    "Report",
    "Topology",
    "TrainSpec",
    "View",
    "Violation",
    "WorldMesh",
    "__version__",
    "build_expert_parallel_mesh",
    "build_world_mesh",
    "flatten_mesh",
    "get_cp_mesh",
    "get_device_mesh_info",
    "get_dp_mesh",
    "get_dp_model_mesh",
    "get_dp_process_group",
    "get_dp_replicate_mesh",
    "get_dp_shard_mesh",
    "get_ep_mesh",
    "get_pp_mesh",
    "get_pp_stage_mesh",
    "get_tp_mesh",
    "get_world_mesh",
    "plan",
    "reset_world_mesh",
]


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
