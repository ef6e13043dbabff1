"""A layout that stays as it is where the mask changes."""

from dataclasses import dataclass

from .._masks import MaskSpec, check_mask
from ._interface import Chunks, Layout, check_layout


@dataclass(frozen=True, slots=True)
class Pinned(Layout):
    """``layout`` as ``mask`` cuts it, whatever mask the rows are attended with.

    `Greedy`, `PerDocument` and `Auto` cut by the mask that they are given, so that a model whose
    layers have several masks, as windows in some and none in others, must cut by one of them and
    give every layer that same cut. Attention with any layout refuses rows that another layer took
    for those of another cut, where there are gradients to tell. Raises `LayoutError` for what is no
    layout or mask.
    """

    layout: Layout
    mask: MaskSpec

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_mask(self.mask)

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the chunks of the layout under its own mask."""
        return self.layout.chunks(n, seq_len, self.mask)
