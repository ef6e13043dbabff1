"""Whether the rows of a call come from an attention that took them for those of another cut.

Layers of one model share their rows, so that a layer with another cut than the one before it would
attend the wrong pairs. The graph of gradients tells what a layer's rows were made of; ranks build
equal graphs and raise together.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._errors import InputError
from ._masks import MaskSpec
from ._plan import AttentionPlan
from ._ranges import joined
from ._torch import largest_output

_NODES = 10_000  # of the graph that are looked at; the layer before is some tens away
_ANEW = "hp_cuts_anew"  # in the metadata of a node that returns whole sequences or new rows of them
_TELLING = 4  # rows per rank from which on a summary of them is told from them by its size


class Origin(NamedTuple):
    """What a node of the graph returns: rows as a plan cuts them."""

    plan: AttentionPlan


def check_lineage(tensors: Sequence[Tensor], plan: AttentionPlan, rows: int) -> None:
    """Raise `InputError` where an attention with another cut made the ``rows`` of ``tensors``.

    For each tensor the nearest attentions over a sequence of this length count: those before them
    were seen when they were made, and others are looked for as far as to the first once more. What
    holds less than two rows, as a summary of another sequence, brings no rows, and what was
    gathered or sharded since may be cut in another way. Sees nothing without gradients.
    """
    if plan.n == 1 or _find_other(tensors, plan) is None:  # sizes cost more than all the rest
        return
    size = max(x.numel() for x in tensors)
    least = 2 * size / rows if min(plan.lengths) >= _TELLING else 0  # two rows, on every rank
    if (before := _find_other(tensors, plan, least)) is not None:
        raise InputError(
            f"q, k or v was made of rows that {before.layout!r} cut by {_brief(before.mask)}, but "
            f"{plan.layout!r} cuts otherwise by {_brief(plan.mask)} here; layers of one model "
            f"share one cut: give every layer {_remedy(before, plan)}, or unshard the rows and "
            f"shard them again in between"
        )


def note_rows(x: Tensor, plan: AttentionPlan) -> Tensor:
    """Return ``x``, what a function written in Python returned, as rows that ``plan`` cuts."""
    if x.grad_fn is not None:
        node: Any = x.grad_fn
        node.origin = Origin(plan)
    return x


def note_anew(x: Tensor) -> Tensor:
    """Return ``x``, which was gathered or sharded: it is cut otherwise than what made it."""
    if not torch.compiler.is_compiling() and x.grad_fn is not None:
        node: Any = x.grad_fn
        node.metadata[_ANEW] = True
    return x


def _find_other(
    tensors: Sequence[Tensor], plan: AttentionPlan, least: float | None = None
) -> AttentionPlan | None:
    """Return the plan of a nearest attention where its cut is not that of ``plan``.

    With ``least``, follows no tensors of fewer elements, and none that were gathered or sharded.
    """
    seen: set[Any] = set()  # also by the walk from another tensor, which tells the rest
    for x in tensors:
        waiting: deque[Any] = deque([x.grad_fn])
        last = _NODES
        while waiting and len(seen) < last:
            node = waiting.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            if least is not None and (largest_output(node) < least or _ANEW in node.metadata):
                continue
            origin = getattr(node, "origin", None)
            if not isinstance(origin, Origin) or not _as_long(origin.plan, plan):
                waiting.extend(parent for parent, _ in node.next_functions)
            elif not _cuts_alike(origin.plan, plan):
                return origin.plan
            else:
                last = min(last, 2 * len(seen))
    return None


def _as_long(a: AttentionPlan, b: AttentionPlan) -> bool:
    return (a.n, a.row_length) == (b.n, b.row_length)


def _cuts_alike(a: AttentionPlan, b: AttentionPlan) -> bool:
    if a.chunks is b.chunks or a.chunks == b.chunks:
        return True
    return list(map(joined, a.row_chunks)) == list(map(joined, b.row_chunks))


def _remedy(before: AttentionPlan, plan: AttentionPlan) -> str:
    if before.layout == plan.layout:
        return f"Pinned({plan.layout!r}, mask), with the mask that cut the sequence"
    return (
        "the layout that cut the sequence, as Pinned(layout, mask) where it follows the mask that "
        "cut it"
    )


def _brief(mask: MaskSpec) -> str:
    documents = f", {sum(map(len, mask.ends)) - len(mask.ends)} documents" if mask.ends else ""
    window = "" if mask.window is None else f", window={mask.window}"
    return f"a mask of causal={mask.causal}{window}{documents}"
