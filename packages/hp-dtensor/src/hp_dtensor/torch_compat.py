"""Functions that use private names of torch, for hp-dtensor and the packages built on it.

The functions work with torch 2.11 to 2.13. If a later version of torch renames a private name, only
hp-dtensor has to be changed.
"""

from ._torch import EXTRA_STATE_KEY as EXTRA_STATE_KEY
from ._torch import autocast_dtype as autocast_dtype
from ._torch import backend_of as backend_of
from ._torch import backward_keeps_graph as backward_keeps_graph
from ._torch import default_store as default_store
from ._torch import first_order as first_order
from ._torch import group_identity as group_identity
from ._torch import inside_backward as inside_backward
from ._torch import keep_eager as keep_eager
from ._torch import pytree_node as pytree_node
from ._torch import strided_shard as strided_shard
from ._torch import without_autocast as without_autocast
from ._torch import writes_into as writes_into

__all__ = [
    "EXTRA_STATE_KEY",
    "autocast_dtype",
    "backend_of",
    "backward_keeps_graph",
    "default_store",
    "first_order",
    "group_identity",
    "inside_backward",
    "keep_eager",
    "pytree_node",
    "strided_shard",
    "without_autocast",
    "writes_into",
]
