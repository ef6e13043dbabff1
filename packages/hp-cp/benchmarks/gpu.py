"""Check and measure attention kernels and attention over ranks on GPUs, beside torch's own.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

On one GPU, without ranks: each backend of the package on full and causal blocks, windows, masks by
a function, packed stretches, soft caps and values of another size, forward and backward, against
float64. Then times at 8,192 positions in bfloat16, beside ``scaled_dot_product_attention`` as it
chooses, and for windows, functions and soft caps beside a compiled FlexAttention.

Then worlds: gloo with two and with four ranks on one GPU, and NCCL with one rank for each GPU if
there are several. In each, every schedule and degree, with causal, windowed and packed masks, with
a function and with sinks, against attention of one process in float64; with NCCL also host waits,
which are errors. A last world runs torch's ``context_parallel`` over gloo, if it can.

Times on CPUs, and of gloo on GPUs, are not meaningful.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_cp import (
    AttentionBackend,
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    ScoreOptions,
    Zigzag,
    context_parallel_attention,
)
from hp_cp.kernels._choose import FLEX
from hp_cp.kernels._eager import EAGER
from hp_cp.kernels._interface import PLAIN, Places, packs
from hp_cp.kernels._sdpa import CUDNN, EFFICIENT, SDPA
from hp_cp.kernels._varlen import VARLEN

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Result, Rows, World, interleaved, main, milliseconds, nccl, skipped

BACKENDS: tuple[AttentionBackend, ...] = (SDPA, EFFICIENT, CUDNN, VARLEN, FLEX, EAGER)
# The largest root mean square error of a result, over that of the exact one.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CAP = 5.0
TIMES = "8,192 positions"


@dataclass(frozen=True)
class Sizes:
    """Numbers of one run: positions, query and kv heads, head size."""

    seq_len: int
    heads: tuple[int, int]
    size: int


SMALL, MIDDLE, LARGE = Sizes(96, (4, 2), 32), Sizes(1024, (8, 2), 128), Sizes(8192, (16, 4), 128)


def every_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Attend to every third earlier key, shifted per head."""
    return (kv_idx <= q_idx) & ((q_idx - kv_idx + h) % 3 == 0)


def drawn(sizes: Sizes, device: torch.device, dtype: torch.dtype, values: int = 0) -> list[Tensor]:
    """Return q, k, v and a gradient, equal on all ranks; ``values`` is another size of v."""
    generator = torch.Generator().manual_seed(0)
    (q, kv), size, rows = sizes.heads, sizes.size, sizes.seq_len
    shapes = [(q, size), (kv, size), (kv, values or size), (q, values or size)]
    every = [torch.randn((1, heads, rows, n), generator=generator) for heads, n in shapes]
    return [x.to(device, dtype) for x in every]


def dense(
    given: list[Tensor], seen: Tensor, cap: float | None = None, sinks: Tensor | None = None
) -> list[Tensor]:
    """Return the output and the gradients in float64, from all scores at once.

    ``seen`` are the bools of all heads, rows and keys, or of all rows and keys.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in given[:3])
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[3] ** -0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -1e30)
    if sinks is not None:
        own = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * seen  # rows without keys give 0
    out = weights @ v.repeat_interleave(groups, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].double())]


def shown(mask: MaskSpec, heads: int, seq_len: int, device: torch.device) -> Tensor:
    """Return which keys each head's rows see, by the definition of the mask."""
    at = torch.arange(seq_len, device=device)
    i, j = at[:, None], at[None, :]
    seen = (j <= i) if mask.causal else torch.ones_like(i + j, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & ((i - j).abs() < mask.window)
    if mask.cu_seqlens is not None:
        ends = torch.tensor(mask.cu_seqlens[1:], device=device)
        document = torch.bucketize(at, ends, right=True)
        seen = seen & (document[:, None] == document[None, :])
    if mask.mask_mod is not None:
        h = torch.arange(heads, device=device)[:, None, None]
        seen = seen & mask.mask_mod(torch.zeros_like(h), h, i, j)
    return seen


def error_of(found: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> Result:
    """Return the largest relative error, and whether it is too large or no number."""
    errors = [
        float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt())
        for x, y in zip(found, right, strict=True)
    ]
    worst = float(torch.tensor(errors).max())  # a nan stays one
    return Result(f"error {worst:.1e}", status="passed" if worst < BOUNDS[dtype] else "failed")


@dataclass(frozen=True)
class Kind:
    """A kind of block: its mask, the options of a kernel, and the size of values if another."""

    mask: MaskSpec
    options: ScoreOptions = PLAIN
    values: int = 0
    packed: bool = False

    @property
    def causal(self) -> bool:
        """Return whether a kernel is asked for a causal block; windows are options."""
        return self.mask.causal and self.mask.window is None


def kinds_of(sizes: Sizes) -> Iterator[tuple[str, Kind]]:
    """Yield the kinds of blocks."""
    rows, causal = sizes.seq_len, MaskSpec(causal=True)
    yield "full", Kind(MaskSpec(causal=False))
    yield "causal", Kind(causal)
    reach = rows // 7
    yield "window", Kind(replace(causal, window=reach + 1), ScoreOptions(window=(reach, 0)))
    function = MaskSpec(causal=False, mask_mod=every_third)
    yield "function", Kind(function, ScoreOptions(mask_mod=every_third))
    yield "packed", Kind(replace(causal, cu_seqlens=(0, rows // 2, rows)), packed=True)
    yield "soft cap", Kind(causal, ScoreOptions(softcap=CAP))
    yield "other values", Kind(causal, values=sizes.size // 2)


def lack_of(backend: AttentionBackend, kind: Kind, given: list[Tensor]) -> str | None:
    """Return why a backend does not take a kind of block, or None."""
    known: Any = "causal" if kind.causal else "full"
    q, _, v, _ = given
    lack = backend.supports(known, q.device, q.dtype, q.shape[3], v.shape[3], kind.options)
    if q.shape[3] != v.shape[3] and backend not in (EFFICIENT, FLEX, EAGER):
        return lack or "its values have the size of keys"
    return lack or ("it packs no blocks" if kind.packed and not packs(backend) else None)


def step_of(backend: AttentionBackend, kind: Kind, given: list[Tensor]) -> Callable[[], Any]:
    """Return the forward and backward of one block."""
    q, k, v, grad = given
    options, half = kind.options, q.shape[2] // 2
    if options.mask_mod is not None:
        batch = torch.zeros(1, 1, q.shape[2], dtype=torch.int64, device=q.device)
        rows = torch.arange(q.shape[2], device=q.device).view(1, 1, -1)
        options = options.at(Places(batch, rows, rows, torch.arange(q.shape[1], device=q.device)))
    lengths = [half, q.shape[2] - half]

    def step() -> list[Tensor]:
        how: dict[str, Any] = {"causal": kind.causal, "options": options}
        if kind.packed and packs(backend):
            out, lse = backend.forward_packed(q, k, v, lengths, lengths, **how)
            given: Any = (grad, q, k, v, out, lse, lengths, lengths)
            return [out, *backend.backward_packed(*given, **how)]
        out, lse = backend.forward(q, k, v, **how)
        return [out, *backend.backward(grad, q, k, v, out, lse, **how)]

    return step


def kernel_error(backend: AttentionBackend, kind: Kind, given: list[Tensor]) -> Result:
    """Compare one backend on one kind of block with float64."""
    q = given[0]
    if (lack := lack_of(backend, kind, given)) is not None:
        return skipped(lack)
    seen = shown(kind.mask, q.shape[1], q.shape[2], q.device)
    right = dense(given, seen, kind.options.softcap)
    return error_of(step_of(backend, kind, given)(), right, q.dtype)


def kernel_time(
    backend: AttentionBackend, kind: Kind, given: list[Tensor], peer: Callable[[], Any]
) -> Result:
    """Measure one backend on one kind of block beside torch's attention."""
    return interleaved(step_of(backend, kind, given), peer, 10, given[0].device)


def torchs(name: str, kind: Kind, given: list[Tensor]) -> Callable[[], Any]:
    """Return torch's forward and backward: SDPA as it chooses, or FlexAttention, compiled."""
    *leaves, grad = given
    q, k, v = (x.clone().requires_grad_() for x in leaves)
    if name in ("window", "function", "soft cap"):
        return torchs_flex(kind, q, k, v, grad)
    half = q.shape[2] // 2 if kind.packed else q.shape[2]

    def step() -> None:
        parts = zip(*(x.split(half, 2) for x in (q, k, v)), strict=True)
        attend: Any = F.scaled_dot_product_attention
        outs = [attend(*part, is_causal=kind.causal, enable_gqa=True) for part in parts]
        torch.autograd.grad(outs, (q, k, v), grad.split(half, 2))

    return step


def torchs_flex(kind: Kind, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable[[], Any]:
    """Return FlexAttention with a block mask that is made once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    reach, cap, function = kind.options.window, kind.options.softcap, kind.options.mask_mod
    left = q.shape[2] if reach is None else reach[0] or 0

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= left) if function is None else function(b, h, i, j)

    heads = None if function is None else q.shape[1]
    blocks = create_block_mask(seen, None, heads, q.shape[2], k.shape[2], q.device)
    score: Any = None if cap is None else lambda x, *at: cap * torch.tanh(x / cap)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def step() -> None:
        out = compiled(q, k, v, score, blocks, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return step


def kernels(device: torch.device, sizes: Sizes, rows: Rows) -> None:
    """Add the rows of what the kernels compute."""
    for dtype in reversed(BOUNDS):
        short = str(dtype).removeprefix("torch.")
        for name, kind in kinds_of(sizes):
            given = drawn(sizes, device, dtype, kind.values)
            for backend in BACKENDS:
                # Compiling takes some ten seconds for each kind.
                few = backend is not FLEX or dtype == torch.bfloat16 or name == "function"
                if few:
                    rows.add(f"{backend.name}, {name}, {short}", kernel_error, backend, kind, given)


def kernel_times(device: torch.device, rows: Rows) -> None:
    """Add the rows of how long the kernels take."""
    for name, kind in kinds_of(LARGE):
        given = drawn(LARGE, device, torch.bfloat16, kind.values)
        peer = torchs(name, kind, given)
        for backend in BACKENDS[:-1]:
            own = backend is not FLEX or name in ("window", "function", "soft cap")
            if own and lack_of(backend, kind, given) is None:
                rows.add(f"{backend.name}, {name}", kernel_time, backend, kind, given, peer)


def masks_of(seq_len: int) -> dict[str, MaskSpec]:
    """Return the masks for attention over ranks, by name."""
    ends = (0, seq_len // 5, seq_len // 2, seq_len // 2 + 1, seq_len)
    return {
        "causal": MaskSpec(causal=True),
        "full": MaskSpec(causal=False),
        "window": MaskSpec(causal=True, window=seq_len // 7),
        "documents": MaskSpec(causal=True, cu_seqlens=ends),
        "function": MaskSpec(causal=True, mask_mod=every_third),
        "sinks": MaskSpec(causal=True),
    }


def modes_of(n: int) -> dict[str, tuple[Layout, dict[str, Any]]]:
    """Return the layouts and options that are tried."""
    modes: dict[str, tuple[Layout, dict[str, Any]]] = {
        "direct": (Zigzag(), {"schedule": "direct"}),
        "gather": (Zigzag(), {"schedule": "gather"}),
        "ring": (Zigzag(), {"schedule": "ring"}),
        "Greedy, direct": (Greedy(4), {"schedule": "direct"}),
        "Ulysses": (Contiguous(), {"ulysses_degree": n}),
    }
    if n > 2 and n % 2 == 0:
        modes["2 x Ulysses, direct"] = (Zigzag(), {"ulysses_degree": 2})
    return modes


def over_ranks(given: list[Tensor], name: str, mesh: Any, mode: str) -> Result:
    """Check one mode; with NCCL, also look for host waits, and measure it."""
    layout, options = modes_of(mesh.size())[mode]
    seq_len, device = given[0].shape[2], given[0].device
    mask, heads = masks_of(seq_len)[name], given[0].shape[1]
    sinks = torch.linspace(-1, 1, heads, device=device) if name == "sinks" else None
    right = dense(given, shown(mask, heads, seq_len, device), sinks=sinks)
    mine = torch.tensor(layout.indices(mesh.size(), seq_len, mask)[mesh.get_local_rank()])
    mine = mine.to(device)
    q, k, v, grad = (x.index_select(2, mine).clone() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = context_parallel_attention(
            q, k, v, mesh, mask=mask, layout=layout, seq_len=seq_len, sinks=sinks, **options
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    result = error_of(step(), [x.index_select(2, mine) for x in right], q.dtype)
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        torch.cuda.set_sync_debug_mode("error")  # a wait of the host raises
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        times = sorted(milliseconds(step, device) for _ in range(5))
        return replace(result, ours=f"{result.ours}, {times[2]:.2f} ms")
    return result


def beside_torch(given: list[Tensor], mesh: Any) -> Result:
    """Run torch's ``context_parallel`` and ours in turn, and compare both outputs."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask, layout, seq_len = MaskSpec(causal=True), Zigzag(), given[0].shape[2]
    mine = torch.tensor(layout.indices(mesh.size(), seq_len, mask)[mesh.get_local_rank()])
    q, k, v, grad = (x.index_select(2, mine.to(x.device)) for x in given)
    outs: dict[str, Tensor] = {}

    def ours() -> None:
        leaves: Any = [x.detach().requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, mesh, mask=mask, layout=layout, seq_len=seq_len)
        out.backward(grad)
        outs["ours"] = out.detach()

    def torchs() -> None:
        whole = [x.clone() for x in given[:3]]
        cut = context_parallel(
            mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers={*whole}
        )
        with cut, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            leaves: Any = [x.detach().requires_grad_() for x in whole]
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            out.backward(grad)
        outs["torch"] = out.detach()

    result = interleaved(ours, torchs, 3, grad.device)
    difference = (outs["ours"] - outs["torch"]).float().norm() / outs["torch"].float().norm()
    return replace(result, ours=f"{result.ours}, difference {float(difference):.1e}")


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world; FlexAttention that runs uncompiled is an error."""
    warnings.filterwarnings("error", message="FlexAttention runs uncompiled")
    if world.name == TIMES:
        kernel_times(device, rows)
        return
    if not world.backend:
        kernels(device, MIDDLE if large else SMALL, rows)
        return
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=("cp",))
    sizes = MIDDLE if large else SMALL
    if world.optional:
        given = drawn(replace(MIDDLE, heads=(4, 4)), device, torch.bfloat16)
        rows.add("causal, bfloat16", beside_torch, given, mesh)
        return
    for dtype in BOUNDS:
        given = drawn(sizes, device, dtype)
        for name in masks_of(sizes.seq_len):
            for mode in modes_of(world.ranks):
                what = f"{mode}, {name}, {str(dtype).removeprefix('torch.')}"
                rows.add(what, over_ranks, given, name, mesh, mode)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here; on CPUs those with most of the code."""
    if not on_gpu:  # torch's context_parallel has no CPU kernels
        return [World("kernels", ""), World("2 ranks, gloo", "gloo", (2,))]
    gpus = torch.cuda.device_count()
    lack = None if gpus > 1 else "it needs two GPUs"
    return [
        World("kernels", ""),
        World(TIMES, ""),
        World("2 ranks, gloo", "gloo", (2,)),
        World("4 ranks, gloo", "gloo", (4,)),
        World(f"{max(2, gpus)} ranks, NCCL", nccl(on_gpu), (max(2, gpus),), lack),
        World("torch's, gloo", "gloo", (2,), optional=True),
    ]


if __name__ == "__main__":
    sys.exit(main("hp-cp", __doc__, worlds_of, checks))
