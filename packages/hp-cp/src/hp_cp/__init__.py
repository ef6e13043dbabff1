"""Context parallelism for PyTorch: attention over a sequence that is sharded over ranks.

Names that need torch are imported on first use. Masks, layouts and plans work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._blocks import Block as Block
from ._errors import BackendError as BackendError
from ._errors import ContextParallelError as ContextParallelError
from ._errors import InputError as InputError
from ._layouts import Auto as Auto
from ._layouts import Contiguous as Contiguous
from ._layouts import Greedy as Greedy
from ._layouts import Layout as Layout
from ._layouts import PerDocument as PerDocument
from ._layouts import Pinned as Pinned
from ._layouts import Zigzag as Zigzag
from ._masks import MaskSpec as MaskSpec
from ._plan import AttentionPlan as AttentionPlan
from ._plan import plan_attention as plan_attention
from ._routes import DoubleRing as DoubleRing

if TYPE_CHECKING:
    from ._attention import context_parallel_attention as context_parallel_attention
    from ._sequence import count_labels as count_labels
    from ._sequence import cp_loss as cp_loss
    from ._sequence import position_ids as position_ids
    from ._sequence import shard_sequence as shard_sequence
    from ._sequence import sharded_buffers as sharded_buffers
    from ._sequence import shift_labels as shift_labels
    from ._sequence import unshard_sequence as unshard_sequence
    from ._style import ContextParallel as ContextParallel
    from .kernels._choose import register_backend as register_backend
    from .kernels._interface import AttentionBackend as AttentionBackend
    from .kernels._interface import ScoreOptions as ScoreOptions

_NEED_TORCH = {
    "AttentionBackend": ".kernels._interface",
    "ContextParallel": "._style",
    "ScoreOptions": ".kernels._interface",
    "context_parallel_attention": "._attention",
    "count_labels": "._sequence",
    "cp_loss": "._sequence",
    "position_ids": "._sequence",
    "register_backend": ".kernels._choose",
    "shard_sequence": "._sequence",
    "sharded_buffers": "._sequence",
    "shift_labels": "._sequence",
    "unshard_sequence": "._sequence",
}

__version__ = "0.2.0"
__all__ = [
    "AttentionPlan",
    "Auto",
    "BackendError",
    "Block",
    "ContextParallelError",
    "Contiguous",
    "DoubleRing",
    "Greedy",
    "InputError",
    "Layout",
    "MaskSpec",
    "PerDocument",
    "Pinned",
    "Zigzag",
    "__version__",
    "plan_attention",
    *_NEED_TORCH,
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
