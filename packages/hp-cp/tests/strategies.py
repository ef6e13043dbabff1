"""What the tests draw, and the dense attention that they compare with."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_cp import Auto, Contiguous, Greedy, Layout, MaskSpec, PerDocument, Zigzag

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag())
ALL_LAYOUTS: tuple[Layout, ...] = (*LAYOUTS, PerDocument(), Greedy(2), Greedy(4), Auto())
MASKS = (MaskSpec(causal=True), MaskSpec(causal=False))

Three = tuple[Tensor, Tensor, Tensor]

worlds = st.integers(1, 9)
seq_lens = st.integers(0, 200)
layouts = st.sampled_from(LAYOUTS)
masks = st.sampled_from(MASKS)
all_layouts = st.sampled_from(ALL_LAYOUTS)


@st.composite
def masked(draw: st.DrawFn, longest: int = 60, shortest: int = 0) -> tuple[MaskSpec, int]:
    """Draw a mask of any kind and the length of its sequence; documents may be empty."""
    seq_len = draw(st.integers(shortest, longest))
    window = draw(st.none() | st.integers(1, seq_len + 2))
    ends = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=5).map(sorted))
    documents = None if ends is None else (0, *ends, seq_len)
    return MaskSpec(causal=draw(st.booleans()), window=window, cu_seqlens=documents), seq_len


def visible(mask: MaskSpec, seq_len: int, batch: int = 1, heads: int = 1) -> Tensor:
    """Return which key each query sees, ``bool [seq, seq]``, by the definition of `MaskSpec`.

    With a function ``[batch, heads, seq, seq]``, asked pair by pair.
    """
    i, j = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None, :]
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if mask.causal:
        seen &= j <= i
    if mask.window is not None:
        seen &= (i - j < mask.window) & (j - i < mask.window)
    if mask.cu_seqlens is not None:
        document = torch.zeros(seq_len, dtype=torch.int64)
        for end in mask.cu_seqlens[1:-1]:
            document[end:] += 1
        seen &= document[:, None] == document[None, :]
    if mask.mask_mod is not None:
        seen = seen.repeat(batch, heads, 1, 1)
        for at in seen.nonzero():
            seen[tuple(at)] = mask.mask_mod(*at)
    return seen


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
    """Return attention by its definition, of ``[batch, heads, seq, size]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(mask, q.shape[2]), -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out


def inputs(
    q_heads: int,
    kv_heads: int,
    seq_len: int,
    *,
    batch: int = 2,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(batch, heads, seq_len, size, generator=generator, dtype=torch.float64)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)


def with_gradients(out: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the leaves."""
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def leaves(*tensors: Tensor) -> Three:
    """Return copies of q, k and v that require gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    return q, k, v


def single(
    tensors: tuple[Tensor, ...],
    mask: MaskSpec,
    attention: Callable[[Tensor, Tensor, Tensor, MaskSpec], Tensor] | None = None,
) -> list[Tensor]:
    """Return output and gradients in one process, by torch's own attention if none is given."""
    q, k, v, grad = tensors
    whole = leaves(q, k, v)
    if attention is not None:
        return with_gradients(attention(*whole, mask), whole, grad)
    plain = mask.window is None and mask.cu_seqlens is None
    seen = None if plain else visible(mask, q.shape[2])
    out = F.scaled_dot_product_attention(
        *whole, attn_mask=seen, is_causal=plain and mask.causal, enable_gqa=True
    )
    return with_gradients(out, whole, grad)


def cp_mesh(n: int) -> DeviceMesh:
    """Return the mesh of all ``n`` real ranks, one axis."""
    return cached("cp", lambda: init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)))


class UnrealMesh:
    """An `AxisMesh` of devices without memory, as one rank sees it; made of no tensors."""

    device_type = "meta"

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        self.mesh_dim_names: tuple[str, ...] | None = ("outer", "ulysses")[-len(shape) :]
        self.ndim = len(shape)
        self.mesh = _Listed(shape)
        self._place = (rank,) if len(shape) == 1 else divmod(rank, shape[1])
        self._groups = [_Group(i, n) for i, n in zip(self._place, shape, strict=True)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this process's coordinate on one axis."""
        assert isinstance(mesh_dim, int)
        return self._place[mesh_dim]

    def get_group(self, mesh_dim: int | str | None = None) -> "_Group":
        """Return the group of one axis, the same one every time."""
        assert isinstance(mesh_dim, int)
        return self._groups[mesh_dim]


class _Listed:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def tolist(self) -> list[Any]:
        if len(self._shape) == 1:
            return list(range(self._shape[0]))
        outer, inner = self._shape
        return [list(range(i * inner, (i + 1) * inner)) for i in range(outer)]


class _Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
