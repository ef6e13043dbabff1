"""Where and how a group computes: what a user chooses once, when sharding."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._buffers import Buffers

GradientMode = Literal["copy", "accumulate", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where a group computes, in which dtypes, and where its shards rest in the meantime."""

    precision: MixedPrecisionPolicy
    device: torch.device
    rest: torch.device
    buffers: Buffers
    grads: GradientMode = "copy"
    pinned: bool = False
    direct_bytes: float | None = None
