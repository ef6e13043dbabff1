"""What the function of a mask shows, of single pairs and of tiles of the attention matrix.

Needs torch: `_plan` loads it with the first mask that has a function.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._blocks import Tiles
from ._errors import LayoutError
from ._masks import MaskMod, MaskSpec
from ._ranges import Band, Ranges

_PAIRS = 2**24  # of batch, heads, rows and keys that a function is asked for at a time


def shown(mask_mod: MaskMod, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return which keys a function shows, ``bool [batch, heads, rows, keys]``.

    Of rows of the batch, query heads and positions, all 1-D. Dims of which the function makes no
    use are expanded, without memory of their own. Raises `LayoutError` for one without bools.
    """
    # Imported where it is called: it loads much that nothing else here needs.
    from torch.nn.attention.flex_attention import create_mask

    seen = create_mask(
        lambda b, h, i, j: mask_mod(batch[b], heads[h], rows[i], keys[j]),
        *map(len, (batch, heads, rows, keys)),
        device=rows.device,
    )
    if seen.dtype != torch.bool:
        raise LayoutError(
            f"mask_mod {mask_mod!r} returned {seen.dtype}; return a tensor of bool, as a comparison "
            f"does"
        )
    return seen


def whole_function(mask: MaskSpec) -> MaskMod:
    """Return one function for all that a mask shows inside a document."""
    function, band = mask.mask_mod, mask.band

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = within(band, q_idx, kv_idx)
        return seen if function is None else seen & function(b, h, q_idx, kv_idx)

    return mask_mod


def within(band: Band, rows: Tensor, keys: Tensor) -> Tensor:
    """Return whether the positions of keys are in the band of those of rows."""
    (lowest, highest), distance = band, keys - rows
    seen = torch.ones_like(distance, dtype=torch.bool)
    if lowest is not None:
        seen = seen & (distance >= lowest)
    if highest is not None:
        seen = seen & (distance <= highest)
    return seen


def tiles_of(
    mask: MaskSpec,
    size: tuple[int, int],
    rows: Ranges,
    keys: Ranges,
    side: int,
    device: torch.device,
) -> Tiles:
    """Return what a mask shows of tiles of rows and keys of one document, at these positions.

    Of all rows of the batch and all heads, ``size``. Asks the function for every pair once: a small
    share of the arithmetic of the attention over them. Holds some millions of answers at a time,
    and the host waits for one answer per row of tiles.
    """
    batch, heads = (torch.arange(n, device=device) for n in size)
    at_rows, at_keys = positions(rows, device), positions(keys, device)
    width = max(1, _PAIRS // max(1, size[0] * size[1] * side) // side) * side
    found: list[list[Tensor]] = [[], [], []]
    if mask.mask_mod is None:
        raise RuntimeError("tiles are looked at for the function of a mask, and it has none")
    for i in at_rows.split(side):
        parts = []
        for j in at_keys.split(width):
            rest = within(mask.band, i.unsqueeze(1), j)
            seen = shown(mask.mask_mod, batch, heads, i, j)
            # of dims that are expanded one is all
            seen = seen[tuple(slice(1) if step == 0 else slice(None) for step in seen.stride())[:2]]
            any_seen, all_seen = seen.flatten(0, 1).any(0), seen.flatten(0, 1).all(0)
            pairs = torch.stack([any_seen & rest, rest & ~all_seen, ~(all_seen & rest)])
            padded = F.pad(pairs, (0, -pairs.shape[2] % side)).unflatten(2, (-1, side))
            parts.append(padded.any(3).any(1))
        for table, of_row in zip(found, torch.cat(parts, 1), strict=True):
            table.append(of_row)
    seen_tiles, hidden, partly = (_listed(table) for table in found)
    return Tiles(seen_tiles, hidden, [[not cut for cut in row] for row in partly])


def positions(held: Ranges, device: torch.device) -> Tensor:
    """Return positions as int64, 1-D."""
    parts = [torch.arange(part.start, part.stop, device=device) for part in held]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def _listed(table: Sequence[Tensor]) -> list[list[bool]]:
    listed: list[list[bool]] = torch.stack(list(table)).tolist()
    return listed
