"""Tensor layouts on device meshes, and the cheapest plan from one layout to another.

Names that need torch are loaded on first use. Layouts and plans work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._cost import AlphaBeta as AlphaBeta
from ._errors import LayoutError as LayoutError
from ._errors import MeshError as MeshError
from ._errors import NoPlanError as NoPlanError
from ._errors import UnsupportedError as UnsupportedError
from ._explain import explain as explain
from ._layout import Layout as Layout
from ._placements import Partial as Partial
from ._placements import RaggedShard as RaggedShard
from ._placements import Replicate as Replicate
from ._placements import Shard as Shard
from ._placements import StridedShard as StridedShard
from ._transfer import plan_transfer as plan_transfer

if TYPE_CHECKING:
    from ._between_meshes import NonMember as NonMember
    from ._modules import concatenate_meshes as concatenate_meshes
    from ._modules import distribute_module as distribute_module
    from ._modules import distribute_tensor as distribute_tensor
    from ._modules import reduce_partial as reduce_partial
    from ._norms import clip_grad_norm_ as clip_grad_norm_
    from ._norms import mark_repeated_rows as mark_repeated_rows
    from ._redistribute import redistribute as redistribute
    from ._replicas import check_same as check_same
    from .collectives._autograd import AutogradCollectives as AutogradCollectives
    from .collectives._c10d import TorchCollectives as TorchCollectives
    from .collectives._checked import CheckedCollectives as CheckedCollectives
    from .collectives._interface import Axis as Axis
    from .collectives._interface import AxisMesh as AxisMesh
    from .collectives._interface import Collectives as Collectives
    from .collectives._interface import RankMismatchError as RankMismatchError
    from .collectives._interface import Work as Work
    from .collectives._recording import RecordingCollectives as RecordingCollectives
    from .ragged._tensor import RaggedTensor as RaggedTensor

_NEED_TORCH = {
    "AutogradCollectives": ".collectives._autograd",
    "Axis": ".collectives._interface",
    "AxisMesh": ".collectives._interface",
    "CheckedCollectives": ".collectives._checked",
    "Collectives": ".collectives._interface",
    "NonMember": "._between_meshes",
    "RaggedTensor": ".ragged._tensor",
    "RankMismatchError": ".collectives._interface",
    "RecordingCollectives": ".collectives._recording",
    "TorchCollectives": ".collectives._c10d",
    "Work": ".collectives._interface",
    "check_same": "._replicas",
    "clip_grad_norm_": "._norms",
    "concatenate_meshes": "._modules",
    "distribute_module": "._modules",
    "distribute_tensor": "._modules",
    "mark_repeated_rows": "._norms",
    "redistribute": "._redistribute",
    "reduce_partial": "._modules",
}

__version__ = "0.3.0"
__all__ = [
    "AlphaBeta",
    "Layout",
    "LayoutError",
    "MeshError",
    "NoPlanError",
    "Partial",
    "RaggedShard",
    "Replicate",
    "Shard",
    "StridedShard",
    "UnsupportedError",
    "__version__",
    "explain",
    "plan_transfer",
    *_NEED_TORCH,
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
