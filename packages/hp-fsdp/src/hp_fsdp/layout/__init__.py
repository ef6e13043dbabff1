"""Flat buffers of parameter groups, and plans of the offsets in these buffers.

A group stores this rank's shards of all parameters in one tensor, the flat shard. It all-gathers
the flat shard into another tensor, the flat output. A `FlatBuffer` owns both tensors and runs the
all-gather. A `FlatPlan` has the offsets of each parameter in both tensors. Each layout, "exact" and
"ragged", has its own kind of plan.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from ._buffers import FlatBuffer as FlatBuffer
from ._exact import plan_exact as plan_exact
from ._memory import ResizableBuffer as ResizableBuffer
from ._memory import in_own_storage as in_own_storage
from ._offsets import GradientRows as GradientRows
from ._offsets import ShardSpec as ShardSpec
from ._offsets import direct_bytes_of as direct_bytes_of
from ._plan import FlatPlan as FlatPlan
from ._plan import GatherPlan as GatherPlan
from ._ragged import plan_ragged
from ._uneven import plan_uneven as plan_uneven

LayoutName = Literal["exact", "ragged"]

# The function that creates the plan of each layout. Its arguments are the parameters, the number of
# ranks, the bytes per element, and ``direct_bytes``. The plan also decides which elements of each
# parameter a rank holds, and the placement of the sharded parameter.
PLANNERS: dict[LayoutName, Callable[[Sequence[ShardSpec], int, int, float], FlatPlan]] = {
    "exact": plan_exact,
    "ragged": plan_ragged,
}
