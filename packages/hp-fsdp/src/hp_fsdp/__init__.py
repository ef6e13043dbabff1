"""Fully sharded data parallel training without copies.

Parameters, gradients and optimizer state are sharded over the data-parallel ranks, with the
per-parameter DTensors of torch's ``fully_shard``; modules compute on views of what was gathered.
"""

from ._errors import MeshError as MeshError
from ._errors import ModuleError as ModuleError
from ._errors import ParameterError as ParameterError
from ._errors import ShardingError as ShardingError
from ._errors import StateError as StateError
from ._fully_shard import fully_shard as fully_shard
from ._report import GroupReport as GroupReport
from ._report import ParameterReport as ParameterReport
from ._report import PlanReport as PlanReport
from ._surface import FSDPModule as FSDPModule
from ._surface import UnshardHandle as UnshardHandle

__version__ = "0.1.0"
__all__ = [
    "FSDPModule",
    "GroupReport",
    "MeshError",
    "ModuleError",
    "ParameterError",
    "ParameterReport",
    "PlanReport",
    "ShardingError",
    "StateError",
    "UnshardHandle",
    "__version__",
    "fully_shard",
]
