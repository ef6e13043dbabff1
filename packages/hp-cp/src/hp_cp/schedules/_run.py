"""One rank's part of a plan, and what carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._blocks import Block
from .._mesh import Pair, Peers
from .._plan import AttentionPlan, part_of
from .._ranges import Ranges, size
from .._routes import Ring
from ..kernels._interface import AttentionBackend, PackedBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank of a schedule computes, receives and sends; keeps no tensors.

    ``wanted`` are the local key rows that come here by source, in the order of their use, and
    ``given`` this rank's rows that go to each of the others. ``repeats`` is that of `HeadShare`,
    ``packer`` the backend where it computes many blocks in one call.
    """

    plan: AttentionPlan
    blocks: Mapping[int, tuple[Block, ...]]
    wanted: Mapping[int, Ranges]
    given: Mapping[int, Ranges]
    lengths: tuple[int, ...]
    ring: Ring | None
    gathers: bool
    keep_kv: bool
    repeats: tuple[int, ...] | None
    peers: Peers
    backend: AttentionBackend
    packer: PackedBackend | None
    scale: float | None

    @property
    def rank(self) -> int:
        """Return this rank's place in the schedule."""
        return self.peers.index

    @property
    def own_rows(self) -> Ranges:
        """Return all local rows."""
        return whole(self.lengths[self.rank])


@dataclass(frozen=True, slots=True)
class Held:
    """Keys and values of some local rows of their owner, ``[batch, kv_heads, rows, size]``."""

    k: Tensor
    v: Tensor
    rows: Ranges


def run_of(
    plan: AttentionPlan, place: int, peers: Peers, backend: AttentionBackend, scale: float | None
) -> Run:
    """Return the part of the rank at ``peers.index`` that has head share ``place``."""
    part = part_of(plan, peers.index)
    return Run(
        plan=plan,
        blocks=part.blocks,
        wanted=part.wanted,
        given=part.given,
        lengths=part.lengths,
        ring=plan.ring,
        gathers=plan.schedule == "gather",
        keep_kv=plan.keep_kv,
        repeats=plan.heads[place].repeats,
        peers=peers,
        backend=backend,
        packer=backend if isinstance(backend, PackedBackend) else None,
        scale=scale,
    )


def whole(rows: int) -> Ranges:
    """Return all of a number of rows."""
    return (range(rows),) if rows else ()


def room_for(rows: Ranges, like: Tensor, dtype: torch.dtype | None = None) -> Pair:
    """Return empty keys and values ``[batch, kv_heads, rows, size]``, as pairs travel."""
    batch, heads, _, width = like.shape
    shape = (batch, heads, size(rows), width)
    k, v = (like.new_empty(shape, dtype=dtype or like.dtype) for _ in range(2))
    return k, v


def packed(k: Tensor, v: Tensor, rows: Ranges) -> Pair:
    """Return some rows of k and v as dense tensors, which may be k and v."""
    return _dense(k, rows), _dense(v, rows)


def _dense(x: Tensor, rows: Ranges) -> Tensor:
    parts = [x[:, :, part.start : part.stop] for part in rows]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts or [x[:, :, :0]], 2)


def as_held(pair: Pair, rows: Ranges) -> Held:
    """Return what `packed` made as keys and values."""
    return Held(pair[0], pair[1], rows)
