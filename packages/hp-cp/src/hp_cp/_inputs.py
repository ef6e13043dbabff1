"""Check the tensors of a call and make its plan; nothing here communicates."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._errors import InputError, described
from ._layouts import Layout
from ._lineage import check_lineage
from ._masks import MaskSpec
from ._plan import AttentionPlan, plan_attention
from ._routes import Schedule


def check_dims(seq_dim: int, head_dim: int) -> None:
    """Raise `InputError` unless both are dims of a 4-D tensor before the head size."""
    if seq_dim == head_dim or not all(type(d) is int and 0 <= d < 3 for d in (seq_dim, head_dim)):
        raise InputError(
            f"seq_dim={seq_dim!r} and head_dim={head_dim!r} are no dims of rows and heads in "
            f"tensors whose last of four dims is the head size; use two different dims of 0, 1, 2"
        )


def check_tensors(q: object, k: object, v: object) -> None:
    """Raise `InputError` unless all three are tensors of four dims."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, got {described(x)}")
        if x.ndim != 4:
            raise InputError(
                f"attention takes 4-D tensors whose last dim is the head size, got {name} of "
                f"shape {tuple(x.shape)}"
            )


def check_scale(scale: Any) -> None:
    """Raise `InputError` unless scores are scaled by a number, or by default."""
    if scale is not None and (type(scale) not in (int, float) or not math.isfinite(scale)):
        raise InputError(
            f"scale={described(scale)} is no finite number, and no gradient goes to it; pass a "
            f"float, or None for head_size ** -0.5"
        )


def plan_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    rank: int,
    *,
    mask: MaskSpec,
    layout: Layout | None,
    ulysses_degree: int,
    schedule: Schedule,
    seq_dim: int,
    head_dim: int,
    seq_len: int | None,
    keep_kv: bool | None,
    load_balance: bool,
) -> AttentionPlan:
    """Return the plan for these local tensors, or raise for what does not fit.

    Ranks whose tensors have equal shapes raise together; only the check of the local length sees
    what is this rank's alone.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor):
            raise InputError(
                f"{name} is a DTensor with {x.placements}; pass local rows, {name}.to_local(), or "
                f"use ContextParallel, which takes DTensors"
            )
    if k.shape != v.shape or _without(q, head_dim) != _without(k, head_dim):
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in all dims "
            f"but the heads of q, dim {head_dim}; cross attention and unequal head sizes are not "
            f"supported"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise InputError(
            f"q, k and v must share dtype and device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}"
        )
    rows = q.shape[seq_dim]
    plan = plan_attention(
        mask,
        layout,
        n,
        rows * n if seq_len is None else seq_len,
        schedule=schedule,
        ulysses_degree=ulysses_degree,
        keep_kv=keep_kv,
        load_balance=load_balance,
        batch=q.shape[3 - seq_dim - head_dim],
        q_heads=q.shape[head_dim],
        kv_heads=k.shape[head_dim],
        head_size=q.shape[3],
        itemsize=q.element_size(),
    )
    if rows != plan.lengths[rank]:
        raise InputError(
            f"q has {rows} local tokens but {type(plan.layout).__name__}(n={plan.n}, "
            f"S={plan.seq_len}) gives rank {rank} {plan.lengths[rank]}; shard with "
            f"shard_sequence first, and give seq_len where ranks hold unequal lengths"
        )
    check_lineage((q, k, v), plan)
    return plan


def to_batch_first(x: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """Return a view ``[batch, heads, rows, size]`` with a dense last dim."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.permute(3 - seq_dim - head_dim, head_dim, seq_dim, 3)


def from_batch_first(x: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """Undo `to_batch_first`."""
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    return x.permute([order.index(dim) for dim in range(4)])


def as_autocast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast hands it to SDPA: any floating dtype but float64 becomes its own."""
    device = x.device.type
    known = torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device) or not x.is_floating_point():
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))


def _without(x: Tensor, dim: int) -> list[int]:
    return [size for i, size in enumerate(x.shape) if i != dim]
