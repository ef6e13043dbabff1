"""A kernel in torch operations: for what no fused kernel takes, on any device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._mask_mod import in_band, shown
from .._ranges import Band, Kernel
from ._interface import Dropout, Places, ScoreOptions

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LOW = 0xFFFFFFFF
_STEP = 0x9E3779B1  # odd, so that no two counters meet
_ELEMENTS = 2**22  # scores that are held at a time


class EagerBackend:
    """Scores by matrix products, in float32 or float64, a tile of rows at a time.

    Takes every head size, heads in equal groups and every option. It holds about four million
    scores at a time, or one row of one element of the batch where that has more.
    """

    name = "eager"

    def supports(
        self,
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        options: ScoreOptions,
    ) -> str | None:
        """Return None for the dtypes of attention, else the reason."""
        if device.type == "meta":
            return "tensors on meta have no numbers"
        if dtype not in _DTYPES:
            return f"it takes {', '.join(map(str, _DTYPES))}, not {dtype}"
        return options.lack("scale", "softcap", "dropout", "window", "mask_mod")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=_wide(q).dtype)
        band = options.band(causal, q.shape[2], k.shape[2])
        for tile in _tiles(q, k, band):
            scores = _scores(q[tile.rows], k[tile.keys], tile, band, options).capped
            total = scores.logsumexp(-1, keepdim=True)
            weights = (scores - _finite(total, options)).exp()
            if options.dropout is not None:
                weights *= _kept_weights(options.dropout, _places_of(options), tile, weights.dtype)
            out[tile.rows] = _times(weights, _wide(v[tile.keys]))
            lse[tile.rows] = total.squeeze(-1)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv."""
        dq = torch.empty_like(q)
        dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        band = options.band(causal, q.shape[2], k.shape[2])
        for tile in _tiles(q, k, band):
            rows, keys = tile.rows, tile.keys
            wide_q, wide_k, wide_grad = _wide(q[rows]), _wide(k[keys]), _wide(grad[rows])
            scores, slope = _scores(q[rows], k[keys], tile, band, options)
            weights = (scores - _finite(lse[rows], options).unsqueeze(-1)).exp()
            to_weights = _times(wide_grad, _wide(v[keys]).transpose(2, 3))
            left = weights
            if options.dropout is not None:
                kept = _kept_weights(options.dropout, _places_of(options), tile, weights.dtype)
                to_weights, left = to_weights * kept, weights * kept
            dv[keys] += _times_over_rows(left, wide_grad, v)
            mean = (wide_grad * out[rows]).sum(-1, keepdim=True)
            to_scores = weights * (to_weights - mean) * options.scale_of(q.shape[3])
            if slope is not None:
                to_scores *= slope
            dq[rows] = _times(to_scores, wide_k)
            dk[keys] += _times_over_rows(to_scores, wide_q, k)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class _Tile(NamedTuple):
    """Rows of some elements of the batch, and the keys that any of them sees."""

    rows: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]


def _tiles(q: Tensor, k: Tensor, band: Band) -> Iterator[_Tile]:
    (batch, heads, rows, _), length, (lowest, highest) = q.shape, k.shape[2], band
    height = min(rows, max(1, _ELEMENTS // max(1, heads * length)))
    depth = min(batch, max(1, _ELEMENTS // max(1, heads * length * height)))
    every = slice(None)
    for first in range(0, batch, max(1, depth)):
        part = slice(first, min(first + depth, batch))
        for start in range(0, rows, max(1, height)):
            stop = min(start + height, rows)
            begin = 0 if lowest is None else max(0, start + lowest)
            end = length if highest is None else min(length, stop + highest)
            yield _Tile((part, every, slice(start, stop)), (part, every, slice(begin, end)))


class _Scores(NamedTuple):
    """Scaled and capped scores ``[batch, heads, rows, keys]``, and the derivative of the cap."""

    capped: Tensor
    slope: Tensor | None


def _scores(q: Tensor, k: Tensor, tile: _Tile, band: Band, options: ScoreOptions) -> _Scores:
    scores = _times(_wide(q), _wide(k).transpose(2, 3)) * options.scale_of(q.shape[3])
    slope = None
    if options.softcap is not None:
        share = torch.tanh(scores / options.softcap)
        slope = 1 - share * share
        scores = share * options.softcap
    if band != (None, None):
        row = torch.arange(tile.rows[2].start, tile.rows[2].stop, device=q.device)
        key = torch.arange(tile.keys[2].start, tile.keys[2].stop, device=q.device)
        seen = in_band(band, row.unsqueeze(1), key)
        scores = scores.masked_fill(~seen, -torch.inf)
    if options.mask_mod is not None:
        (part, _, rows), (_, _, keys) = tile.rows, tile.keys
        batch, row, key, heads = _places_of(options)
        seen = shown(options.mask_mod, batch[part, 0, 0], heads, row[0, 0, rows], key[0, 0, keys])
        scores = scores.masked_fill(~seen, -torch.inf)
    return _Scores(scores, slope)


def _places_of(options: ScoreOptions) -> Places:
    if options.places is None:
        raise RuntimeError("dropout and mask functions need the places of the weights")
    return options.places


def _kept_weights(dropout: Dropout, places: Places, tile: _Tile, dtype: torch.dtype) -> Tensor:
    """Return the factor of every weight ``[batch, heads, rows, keys]``: zero where it is dropped.

    A hash of counters: each of the seed, the row of the batch, the position of the query, the head
    and the position of the key is mixed into 32 bits.
    """
    (part, every, rows), (_, _, keys) = tile.rows, tile.keys
    batch, row, key, heads = places
    seed = torch.full((), dropout.seed, device=heads.device)
    state = _mixed(_mixed(seed & _LOW) ^ (seed >> 32))
    state = _mixed(state * _STEP + batch[part, every, rows])
    state = _mixed(state * _STEP + row[part, every, rows])
    state = _mixed(state * _STEP + heads.unsqueeze(1))
    state = _mixed(state.unsqueeze(3) * _STEP + key[part, every, keys].unsqueeze(2))
    return (state >= int(dropout.rate * 2**32)).to(dtype) / (1 - dropout.rate)


def _mixed(x: Tensor) -> Tensor:
    """Return 32 bits that depend on each of the lower 32 bits of ``x``; products wrap."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _finite(lse: Tensor, options: ScoreOptions) -> Tensor:
    """Return log-sum-exps with 0 for those of rows without keys, whose weights are to be 0."""
    return lse if options.mask_mod is None else lse.masked_fill(lse == -torch.inf, 0.0)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype that sums are kept in."""
    return x if x.dtype == torch.float64 else x.float()


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return ``[batch, heads, a, b] @ [batch, kv_heads, b, c]``, heads in equal groups."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    product: Tensor = x.unflatten(1, (y.shape[1], -1)) @ y.unsqueeze(2)
    return product.flatten(1, 2)


def _times_over_rows(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """Return ``[batch, heads, rows, a]`` transposed times ``y``, groups summed to kv heads."""
    product: Tensor = x.transpose(2, 3) @ y
    if product.shape[1] == like.shape[1]:
        return product
    total: Tensor = product.unflatten(1, (like.shape[1], -1)).sum(2)
    return total


EAGER = EagerBackend()
