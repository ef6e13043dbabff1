"""Whether the rows of a call come from an attention that took them for those of another cut.

A layout that follows the mask cuts the sequence in another way for another mask. Layers of one
model share their rows, so that the second of two such layers would attend the wrong pairs. The
graph of gradients tells what a layer's rows were made of; ranks build equal graphs and raise
together.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._errors import LayoutError
from ._masks import MaskSpec
from .layouts._fixed import Contiguous, Zigzag
from .layouts._pinned import Pinned
from .plans._plan import AttentionPlan

_NODES = 10_000  # of the graph that are looked at; the layer before is some tens away


class Origin(NamedTuple):
    """What a node of the graph returns: rows as a plan cuts them, or whole sequences (None)."""

    plan: AttentionPlan | None


def check_lineage(tensors: Sequence[Tensor], plan: AttentionPlan) -> None:
    """Raise `LayoutError` where an attention with another cut made the rows of ``tensors``.

    Looks at nothing for layouts that all masks share, and sees nothing without gradients.
    """
    if plan.n == 1 or isinstance(plan.layout, (Contiguous, Zigzag, Pinned)):
        return
    waiting: deque[Any] = deque(x.grad_fn for x in tensors if x.grad_fn is not None)
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        if node in seen:
            continue
        seen.add(node)
        origin = getattr(node, "origin", None)
        if not isinstance(origin, Origin):
            waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
        elif origin.plan is not None:  # the nearest: those before it were seen when it was made
            _check_cut(origin.plan, plan)
            return


def note_whole(x: Tensor) -> Tensor:
    """Return ``x``, which was gathered: what is cut of it later may be cut in another way."""
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        node: Any = x.grad_fn  # of a function written in Python, which takes attributes
        node.origin = Origin(None)
    return x


def _check_cut(before: AttentionPlan, plan: AttentionPlan) -> None:
    same = (before.n, before.seq_len) == (plan.n, plan.seq_len)
    if same and before.chunks != plan.chunks:
        raise LayoutError(
            f"q, k or v was made of rows that {before.layout!r} cut by {_brief(before.mask)}, but "
            f"{plan.layout!r} cuts by {_brief(plan.mask)} here; layers of one model share one cut: "
            f"give every layer Pinned({plan.layout!r}, mask), with the mask that cut the sequence"
        )


def _brief(mask: MaskSpec) -> str:
    documents = "" if mask.cu_seqlens is None else f", {len(mask.cu_seqlens) - 1} documents"
    window = "" if mask.window is None else f", window={mask.window}"
    return f"a mask of causal={mask.causal}{window}{documents}"
