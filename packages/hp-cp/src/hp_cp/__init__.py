"""Attention over a sequence that no single rank holds."""

from ._attention import context_parallel_attention as context_parallel_attention
from ._errors import BackendError as BackendError
from ._errors import ContextParallelError as ContextParallelError
from ._errors import DegreeError as DegreeError
from ._errors import InputError as InputError
from ._errors import LayoutError as LayoutError
from ._layouts import Contiguous as Contiguous
from ._layouts import Layout as Layout
from ._layouts import Zigzag as Zigzag
from ._loss import cp_loss as cp_loss
from ._loss import shift_labels as shift_labels
from ._masks import MaskSpec as MaskSpec
from ._plan import AttentionPlan as AttentionPlan
from ._plan import Block as Block
from ._plan import plan_attention as plan_attention
from ._sequence import position_ids as position_ids
from ._sequence import shard_sequence as shard_sequence
from ._sequence import unshard_sequence as unshard_sequence
from ._style import ContextParallel as ContextParallel
from .backends._interface import AttentionBackend as AttentionBackend

__version__ = "0.1.0"
__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "BackendError",
    "Block",
    "ContextParallel",
    "ContextParallelError",
    "Contiguous",
    "DegreeError",
    "InputError",
    "Layout",
    "LayoutError",
    "MaskSpec",
    "Zigzag",
    "__version__",
    "context_parallel_attention",
    "cp_loss",
    "plan_attention",
    "position_ids",
    "shard_sequence",
    "shift_labels",
    "unshard_sequence",
]
