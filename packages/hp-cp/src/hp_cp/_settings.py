"""What a context parallel style was made with."""

from dataclasses import dataclass

from hp_dtensor import Collectives

from ._layouts import Layout
from ._masks import MaskSpec
from ._routes import Schedule
from .kernels._interface import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `ContextParallel`; see there."""

    seq_dim: int
    head_dim: int
    qkv_indices: tuple[int, int, int]
    qkv_kwarg_names: tuple[str, ...]
    load_balance: bool
    schedule: Schedule
    layout: Layout
    mask: MaskSpec | None
    backend: str | AttentionBackend
    seq_len: int | None
    collectives: Collectives
