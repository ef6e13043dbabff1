"""Device meshes for PyTorch: parallel degrees, rank coordinates, process groups and a planner.

- `ParallelDims` has the parallel degrees of a training run. `RankLayout` computes the coordinates
  and groups of ranks. Both work without torch.
- `ParallelMesh` has the torch device meshes. It needs torch, and is imported on first use.
- ``hp_mesh.world`` has functions for code that uses one mesh per process.
- ``hp_mesh.planner`` estimates the memory and time of a training run, and searches for the degrees
  with the shortest time. It has the sizes of published models. It is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._degrees import DEFAULT_ORDER as DEFAULT_ORDER
from ._dims import ParallelDims as ParallelDims
from ._errors import Explanation as Explanation
from ._errors import LayoutError as LayoutError
from ._errors import MeshError as MeshError
from ._errors import ParallelDimsError as ParallelDimsError
from ._errors import Report as Report
from ._errors import Violation as Violation
from ._layout import RankLayout as RankLayout
from ._rules import Topology as Topology

if TYPE_CHECKING:
    from ._mesh import ParallelMesh as ParallelMesh
    from .planner import Accelerator as Accelerator
    from .planner import Candidate as Candidate
    from .planner import Cluster as Cluster
    from .planner import ModelShape as ModelShape
    from .planner import Plan as Plan
    from .planner import TrainSpec as TrainSpec
    from .planner import plan as plan

__version__ = "0.2.0"

_PLANNER = ("Accelerator", "Candidate", "Cluster", "ModelShape", "Plan", "TrainSpec", "plan")
_LATER = {"ParallelMesh": "._mesh", **dict.fromkeys(_PLANNER, ".planner")}
__all__ = [
    "DEFAULT_ORDER",
    "Accelerator",
    "Candidate",
    "Cluster",
    "Explanation",
    "LayoutError",
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
    "Violation",
    "__version__",
    "plan",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
