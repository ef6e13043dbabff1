"""Tensor layouts over device meshes, and the cheapest way from one to another.

Names that need torch are loaded on first use: layouts and plans work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives._differentiable import all_gather as all_gather
    from .collectives._differentiable import all_reduce as all_reduce
    from .collectives._differentiable import all_to_all as all_to_all
    from .collectives._differentiable import reduce_scatter as reduce_scatter
    from .collectives._differentiable import replicate as replicate
    from .collectives._interface import Axis as Axis
    from .collectives._interface import AxisMesh as AxisMesh
    from .collectives._interface import Collectives as Collectives
    from .collectives._interface import Group as Group
    from .collectives._interface import ReduceOp as ReduceOp
    from .collectives._interface import Work as Work
    from .collectives._recording import RecordingCollectives as RecordingCollectives
    from .collectives._recording import Traffic as Traffic
    from .collectives._simulated import SimulatedCollectives as SimulatedCollectives
    from .collectives._simulated import SimulatedWorld as SimulatedWorld
    from .collectives._torch import TorchCollectives as TorchCollectives

_NEED_TORCH = {
    "Axis": ".collectives._interface",
    "AxisMesh": ".collectives._interface",
    "Collectives": ".collectives._interface",
    "Group": ".collectives._interface",
    "RecordingCollectives": ".collectives._recording",
    "ReduceOp": ".collectives._interface",
    "SimulatedCollectives": ".collectives._simulated",
    "SimulatedWorld": ".collectives._simulated",
    "TorchCollectives": ".collectives._torch",
    "Traffic": ".collectives._recording",
    "Work": ".collectives._interface",
    "all_gather": ".collectives._differentiable",
    "all_reduce": ".collectives._differentiable",
    "all_to_all": ".collectives._differentiable",
    "reduce_scatter": ".collectives._differentiable",
    "replicate": ".collectives._differentiable",
}

__version__ = "0.1.0"
__all__ = ["__version__", *_NEED_TORCH]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
