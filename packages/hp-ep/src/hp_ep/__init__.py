"""Mixture-of-experts layers with experts on different ranks, for PyTorch.

Names that need torch are imported on first use. Placements and `choose_dispatcher` work without
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._errors import DispatchStateError as DispatchStateError
from ._errors import ExpertConfigError as ExpertConfigError
from ._errors import RoutingError as RoutingError
from ._errors import UnsupportedError as UnsupportedError
from .dispatch._cost import choose_capacity as choose_capacity
from .dispatch._cost import choose_dispatcher as choose_dispatcher
from .placement._plan import LoadStats as LoadStats
from .placement._plan import Placement as Placement
from .placement._plan import plan_migration as plan_migration
from .placement._plan import plan_placement as plan_placement
from .placement._plan import smooth_load as smooth_load

if TYPE_CHECKING:
    from ._balance import BalanceLoss as BalanceLoss
    from ._balance import collect_loads as collect_loads
    from ._balance import update_router_bias as update_router_bias
    from ._experts import GroupedExperts as GroupedExperts
    from ._moe import MoE as MoE
    from ._permutation import gather_rows as gather_rows
    from ._permutation import permute as permute
    from ._permutation import permute_indices as permute_indices
    from ._permutation import scatter_rows as scatter_rows
    from ._permutation import unpermute as unpermute
    from ._router import TopKRouter as TopKRouter
    from ._sources import expert_sources as expert_sources
    from ._styles import BaseExpertParallel as BaseExpertParallel
    from ._styles import ExpertParallel as ExpertParallel
    from ._styles import ExpertTensorParallel as ExpertTensorParallel
    from ._styles import TensorParallel as TensorParallel
    from ._styles import parallelize_experts as parallelize_experts
    from .dispatch._all_to_all import AllToAll as AllToAll
    from .dispatch._dedup import Dedup as Dedup
    from .dispatch._dedup import Hierarchical as Hierarchical
    from .dispatch._interface import AsyncDispatcher as AsyncDispatcher
    from .dispatch._interface import DispatchState as DispatchState
    from .dispatch._interface import TokenDispatcher as TokenDispatcher
    from .dispatch._local import Local as Local
    from .dispatch._padded import Padded as Padded
    from .placement._migrate import migrate_experts as migrate_experts
    from .placement._migrate import order_by_expert as order_by_expert
    from .placement._migrate import order_by_slot as order_by_slot

_NEED_TORCH = {
    "AllToAll": ".dispatch._all_to_all",
    "BalanceLoss": "._balance",
    "BaseExpertParallel": "._styles",
    "Dedup": ".dispatch._dedup",
    "DispatchState": ".dispatch._interface",
    "ExpertParallel": "._styles",
    "ExpertTensorParallel": "._styles",
    "GroupedExperts": "._experts",
    "Hierarchical": ".dispatch._dedup",
    "Local": ".dispatch._local",
    "MoE": "._moe",
    "AsyncDispatcher": ".dispatch._interface",
    "Padded": ".dispatch._padded",
    "TensorParallel": "._styles",
    "TokenDispatcher": ".dispatch._interface",
    "TopKRouter": "._router",
    "collect_loads": "._balance",
    "expert_sources": "._sources",
    "gather_rows": "._permutation",
    "migrate_experts": ".placement._migrate",
    "order_by_expert": ".placement._migrate",
    "order_by_slot": ".placement._migrate",
    "parallelize_experts": "._styles",
    "permute": "._permutation",
    "permute_indices": "._permutation",
    "scatter_rows": "._permutation",
    "unpermute": "._permutation",
    "update_router_bias": "._balance",
}

__version__ = "0.2.0"
__all__ = [
    "AllToAll",
    "BalanceLoss",
    "Dedup",
    "ExpertConfigError",
    "ExpertParallel",
    "ExpertTensorParallel",
    "GroupedExperts",
    "Hierarchical",
    "LoadStats",
    "Local",
    "MoE",
    "Padded",
    "Placement",
    "RoutingError",
    "TensorParallel",
    "TopKRouter",
    "choose_capacity",
    "choose_dispatcher",
    "collect_loads",
    "expert_sources",
    "migrate_experts",
    "order_by_expert",
    "order_by_slot",
    "parallelize_experts",
    "plan_migration",
    "plan_placement",
    "update_router_bias",
]
"""Names for users. Other names are for extensions of this package and may change."""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
