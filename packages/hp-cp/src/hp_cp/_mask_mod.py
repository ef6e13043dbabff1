"""What the function of a mask shows, of single pairs and of tiles of the attention matrix.

Needs torch: `_plan` loads it with the first mask that has a function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._blocks import Tiles
from ._errors import InputError, described
from ._masks import MaskMod, MaskSpec
from ._ranges import Band, Ranges

_PAIRS = 2**24  # of batch, heads, rows and keys that a function is asked for at a time


def shown(mask_mod: MaskMod, batch: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return which keys a function shows, ``bool [batch, heads, rows, keys]``.

    Of rows of the batch, query heads and positions, all 1-D. Dims of which the function makes no
    use are expanded, without memory of their own. Raises `InputError` for one without bools.
    """
    # Imported where it is called: it loads much that nothing else here needs.
    from torch.nn.attention.flex_attention import create_mask

    def asked(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = mask_mod(batch[b], heads[h], rows[i], keys[j])
        if not isinstance(found, Tensor):
            raise InputError(
                f"mask_mod {mask_mod!r} returned {described(found)}; return a tensor of bool, as "
                f"of a comparison"
            )
        return found

    seen = create_mask(
        asked,
        len(batch),
        len(heads),
        len(rows),
        len(keys),
        rows.device,
    )
    if seen.dtype != torch.bool:
        raise InputError(
            f"mask_mod {mask_mod!r} returned {seen.dtype}; return a tensor of bool, as of a "
            f"comparison"
        )
    return seen


def whole_function(mask: MaskSpec) -> MaskMod:
    """Return one function for all that a mask shows inside a document."""
    function, band = mask.mask_mod, mask.band
    if function is None:
        raise RuntimeError("a mask without a function, of which there are no pairs to ask")

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = function(b, h, q_idx, kv_idx)
        return seen if band == (None, None) else seen & in_band(band, q_idx, kv_idx)

    return mask_mod


def in_band(
    band: tuple[int | Tensor | None, int | Tensor | None], rows: Tensor, keys: Tensor
) -> Tensor:
    """Return whether the positions of keys are in the band of those of rows."""
    lowest, highest = band
    if lowest is None:
        return (keys < 0) | (rows >= 0) if highest is None else keys <= rows + highest
    seen = keys >= rows + lowest
    return seen if highest is None else seen & (keys <= rows + highest)


def tiles_of(
    mask: MaskSpec,
    batch: range,
    heads: int,
    rows: Ranges,
    keys: Ranges,
    side: int,
    device: torch.device,
) -> Tiles:
    """Return what a mask shows of tiles of rows and keys of one document, at these positions.

    Of these rows of the batch and all heads. Asks the function for every pair once: a small share
    of the arithmetic of the attention over them. Holds some millions of answers at a time, and the
    host waits for one answer per call.
    """
    of_batch, of_heads = (positions((x,), device) for x in (batch, range(heads)))
    at_rows, at_keys = positions(rows, device), positions(keys, device)
    width = max(1, _PAIRS // max(1, len(batch) * heads * side) // side) * side
    mask_mod, band = mask.mask_mod, _met(mask.band, rows, keys)
    if mask_mod is None:
        raise RuntimeError("a mask without a function, of which there are no tiles to look at")
    found = []
    for i in at_rows.split(side):
        parts = []
        for j in at_keys.split(width):
            seen = shown(mask_mod, of_batch, of_heads, i, j)
            # Of dims that are expanded one is all.
            seen = seen[tuple(slice(1 if step == 0 else None) for step in seen.stride()[:2])]
            some, every = seen.flatten(0, 1).any(0), seen.flatten(0, 1).all(0)
            hidden = partly = ~every.all(0)
            if band != (None, None):
                rest = in_band(band, i.unsqueeze(1), j)
                some, hidden = some & rest, (rest & ~every).any(0)
                partly = ~(every & rest).all(0)
            parts.append(torch.stack([some.any(0), hidden, partly]))
        found.append(torch.cat(parts, 1))
    table = torch.stack(found, 1)
    table = F.pad(table, (0, -table.shape[2] % side)).unflatten(2, (-1, side)).any(3)
    of_some, of_hidden, of_partly = table.tolist()
    return Tiles(of_some, of_hidden, [[not cut for cut in row] for row in of_partly])


def _met(band: Band, rows: Ranges, keys: Ranges) -> Band:
    """Return the band without the edges that no pair lies beyond."""
    (lowest, highest), first, last = band, rows[0].start, rows[-1].stop - 1
    return (
        None if lowest is None or last + lowest <= keys[0].start else lowest,
        None if highest is None or first + highest >= keys[-1].stop - 1 else highest,
    )


def positions(held: Ranges, device: torch.device) -> Tensor:
    """Return positions as int64, 1-D."""
    parts = [torch.arange(part.start, part.stop, device=device) for part in held]
    return torch.cat(parts) if parts else torch.arange(0, device=device)
