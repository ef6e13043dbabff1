"""Fully sharded data parallel training, as with torch's ``fully_shard``.

Parameters, gradients and optimizer state are sharded over the data-parallel ranks. Each sharded
parameter is a DTensor. Modules compute on views of the all-gather output, so an all-gather of large
parameters needs no copy. Gradients are copied once, to the input of the reduce-scatter.
"""

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from ._errors import CheckpointError as CheckpointError
from ._errors import DisagreementError as DisagreementError
from ._errors import MeshError as MeshError
from ._errors import ModuleError as ModuleError
from ._errors import ParameterError as ParameterError
from ._errors import ShardingError as ShardingError
from ._errors import StateError as StateError
from ._errors import UnsupportedError as UnsupportedError
from ._fully_shard import fully_shard as fully_shard
from ._mesh import DataParallelMeshDims as DataParallelMeshDims
from ._module import FSDPModule as FSDPModule
from ._module import GroupReport as GroupReport
from ._module import ParameterReport as ParameterReport
from ._module import PlanReport as PlanReport
from ._module import UnshardHandle as UnshardHandle
from ._module import register_fsdp_forward_method as register_fsdp_forward_method
from ._module import share_comm_ctx as share_comm_ctx
from ._optimizer import sharded_optimizer as sharded_optimizer
from ._stats import CollectiveStats as CollectiveStats
from ._stats import CommStats as CommStats
from .weights import load_safetensors as load_safetensors
from .weights import parameters_on_meta as parameters_on_meta
from .weights import save_safetensors as save_safetensors

__version__ = "0.3.0"
__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "CollectiveStats",
    "CommStats",
    "DataParallelMeshDims",
    "DisagreementError",
    "FSDPModule",
    "GroupReport",
    "MeshError",
    "MixedPrecisionPolicy",
    "ModuleError",
    "OffloadPolicy",
    "ParameterError",
    "ParameterReport",
    "PlanReport",
    "ShardingError",
    "StateError",
    "UnshardHandle",
    "UnsupportedError",
    "__version__",
    "fully_shard",
    "load_safetensors",
    "parameters_on_meta",
    "register_fsdp_forward_method",
    "save_safetensors",
    "sharded_optimizer",
    "share_comm_ctx",
]


def __getattr__(name: str) -> object:
    if name in ("Resize", "Ring"):
        # An AttributeError would lose its message in `from hp_fsdp import Ring`.
        raise ImportError(
            f"{__name__}.{name} was removed in 0.3.0: each unit frees its memory after use; leave "
            "out buffers= of fully_shard"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
