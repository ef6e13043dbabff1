"""Tensor layouts over device meshes, and the cheapest way from one to another.

Names that need torch are loaded on first use: layouts and plans work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._boxes import Box as Box
from ._caches import clear_caches as clear_caches
from ._cost import AlphaBeta as AlphaBeta
from ._cost import CostModel as CostModel
from ._errors import CostModelError as CostModelError
from ._errors import CrossMeshError as CrossMeshError
from ._errors import LayoutError as LayoutError
from ._errors import LocalShapeMismatch as LocalShapeMismatch
from ._errors import MissingGroup as MissingGroup
from ._errors import MixedPartialError as MixedPartialError
from ._errors import NoPlan as NoPlan
from ._errors import PartialDtypeError as PartialDtypeError
from ._errors import PartialSourceError as PartialSourceError
from ._errors import PartialTargetError as PartialTargetError
from ._errors import PlacementCountError as PlacementCountError
from ._errors import PlacementTypeError as PlacementTypeError
from ._errors import RaggedSizesError as RaggedSizesError
from ._errors import RankNotInMesh as RankNotInMesh
from ._errors import RanksDisagree as RanksDisagree
from ._errors import ShardDimError as ShardDimError
from ._errors import ShardOrderError as ShardOrderError
from ._explain import explain as explain
from ._layout import Layout as Layout
from ._placements import Partial as Partial
from ._placements import RaggedShard as RaggedShard
from ._placements import Replicate as Replicate
from ._placements import Shard as Shard
from ._placements import StridedShard as StridedShard
from ._planner import Plan as Plan
from ._steps import Step as Step
from ._transfer import Transfer as Transfer
from ._transfer import plan_transfer as plan_transfer

if TYPE_CHECKING:
    from ._errors import RaggedOpError as RaggedOpError
    from ._modules import MeshError as MeshError
    from ._modules import NonLeafError as NonLeafError
    from ._modules import SharedParameterError as SharedParameterError
    from ._modules import concatenate_meshes as concatenate_meshes
    from ._modules import distribute_module as distribute_module
    from ._modules import distribute_tensor as distribute_tensor
    from ._modules import reduce_partial as reduce_partial
    from ._non_member import Absent as Absent
    from ._non_member import AbsentError as AbsentError
    from ._norms import CollectivesError as CollectivesError
    from ._norms import MaxNormError as MaxNormError
    from ._norms import NonFiniteNormError as NonFiniteNormError
    from ._norms import NormOrderError as NormOrderError
    from ._norms import clip_grad_norm_ as clip_grad_norm_
    from ._redistribute import Pending as Pending
    from ._redistribute import redistribute as redistribute
    from .collectives._autograd import all_gather as all_gather
    from .collectives._autograd import all_reduce as all_reduce
    from .collectives._autograd import all_to_all as all_to_all
    from .collectives._autograd import reduce_scatter as reduce_scatter
    from .collectives._autograd import replicate as replicate
    from .collectives._checked import CheckedCollectives as CheckedCollectives
    from .collectives._interface import Axis as Axis
    from .collectives._interface import AxisMesh as AxisMesh
    from .collectives._interface import Collectives as Collectives
    from .collectives._interface import Group as Group
    from .collectives._interface import RankMismatchError as RankMismatchError
    from .collectives._interface import ReduceOp as ReduceOp
    from .collectives._interface import Work as Work
    from .collectives._recording import RecordingCollectives as RecordingCollectives
    from .collectives._recording import Traffic as Traffic
    from .collectives._torch import TorchCollectives as TorchCollectives
    from .ragged._tensor import RaggedTensor as RaggedTensor
    from .testing import SimulatedCollectives as SimulatedCollectives
    from .testing import SimulatedWorld as SimulatedWorld

_NEED_TORCH = {
    "Absent": "._non_member",
    "AbsentError": "._non_member",
    "Axis": ".collectives._interface",
    "AxisMesh": ".collectives._interface",
    "CheckedCollectives": ".collectives._checked",
    "Collectives": ".collectives._interface",
    "CollectivesError": "._norms",
    "Group": ".collectives._interface",
    "MaxNormError": "._norms",
    "MeshError": "._modules",
    "NonFiniteNormError": "._norms",
    "NonLeafError": "._modules",
    "NormOrderError": "._norms",
    "Pending": "._redistribute",
    "RaggedOpError": "._errors",
    "RaggedTensor": ".ragged._tensor",
    "RecordingCollectives": ".collectives._recording",
    "RankMismatchError": ".collectives._interface",
    "ReduceOp": ".collectives._interface",
    "SharedParameterError": "._modules",
    "SimulatedCollectives": ".testing",
    "SimulatedWorld": ".testing",
    "TorchCollectives": ".collectives._torch",
    "Traffic": ".collectives._recording",
    "Work": ".collectives._interface",
    "all_gather": ".collectives._autograd",
    "all_reduce": ".collectives._autograd",
    "all_to_all": ".collectives._autograd",
    "clip_grad_norm_": "._norms",
    "concatenate_meshes": "._modules",
    "distribute_module": "._modules",
    "distribute_tensor": "._modules",
    "redistribute": "._redistribute",
    "reduce_partial": "._modules",
    "reduce_scatter": ".collectives._autograd",
    "replicate": ".collectives._autograd",
}

__version__ = "0.1.0"
__all__ = [
    "AlphaBeta",
    "Box",
    "CostModel",
    "CostModelError",
    "CrossMeshError",
    "Layout",
    "LayoutError",
    "LocalShapeMismatch",
    "MissingGroup",
    "MixedPartialError",
    "NoPlan",
    "Partial",
    "PartialDtypeError",
    "PartialSourceError",
    "PartialTargetError",
    "PlacementCountError",
    "PlacementTypeError",
    "Plan",
    "RaggedShard",
    "RaggedSizesError",
    "RankNotInMesh",
    "RanksDisagree",
    "Replicate",
    "Shard",
    "ShardDimError",
    "ShardOrderError",
    "Step",
    "StridedShard",
    "Transfer",
    "__version__",
    "clear_caches",
    "explain",
    "plan_transfer",
    *_NEED_TORCH,
]


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
