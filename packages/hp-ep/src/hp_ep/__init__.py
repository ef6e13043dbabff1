"""Expert parallel mixture-of-experts layers for PyTorch."""

from ._errors import DispatchStateError as DispatchStateError
from ._errors import ExpertConfigError as ExpertConfigError
from ._errors import RoutingError as RoutingError
from ._experts import GroupedExperts as GroupedExperts
from ._moe import MoE as MoE
from ._permutation import bag_sum as bag_sum
from ._permutation import gather_rows as gather_rows
from ._permutation import permute as permute
from ._permutation import permute_indices as permute_indices
from ._permutation import unpermute as unpermute
from ._routing import TopKRouter as TopKRouter
from ._styles import ExpertParallel as ExpertParallel
from .dispatch._all_to_all import AllToAll as AllToAll
from .dispatch._local import Local as Local
from .dispatch._protocol import DispatchState as DispatchState
from .dispatch._protocol import TokenDispatcher as TokenDispatcher

__version__ = "0.1.0"
__all__ = [
    "AllToAll",
    "DispatchState",
    "DispatchStateError",
    "ExpertConfigError",
    "ExpertParallel",
    "GroupedExperts",
    "Local",
    "MoE",
    "RoutingError",
    "TokenDispatcher",
    "TopKRouter",
    "__version__",
    "bag_sum",
    "gather_rows",
    "permute",
    "permute_indices",
    "unpermute",
]
