"""Parallel degrees, rank layout and device meshes for PyTorch.

Names that need torch are loaded on first use: degrees, checks and layouts work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._degrees import DEFAULT_ORDER as DEFAULT_ORDER
from ._dims import ParallelDims as ParallelDims
from ._errors import LayoutError as LayoutError
from ._errors import MeshError as MeshError
from ._errors import ParallelDimsError as ParallelDimsError
from ._errors import Report as Report
from ._errors import Violation as Violation
from ._explain import Explanation as Explanation
from ._layout import RankLayout as RankLayout
from ._layout import View as View
from ._topology import Topology as Topology

if TYPE_CHECKING:
    from ._mesh import ParallelMesh as ParallelMesh

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_ORDER",
    "Explanation",
    "LayoutError",
    "MeshError",
    "ParallelDims",
    "ParallelDimsError",
    "ParallelMesh",
    "RankLayout",
    "Report",
    "Topology",
    "View",
    "Violation",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "ParallelMesh":
        return import_module("._mesh", __name__).ParallelMesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
