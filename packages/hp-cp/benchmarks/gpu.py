"""Check and measure attention over ranks on GPUs, beside torch's own kernels, in one table.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

On one GPU, without ranks: each backend of the package on full, causal and windowed blocks, masks by
a function and packed stretches, forward and backward, against float64 and beside
``scaled_dot_product_attention``. Then worlds: gloo with two and with four ranks on one GPU, for
what several ranks compute; NCCL with one rank for each GPU where there are several. In each, every
schedule and degree, with causal, windowed and packed masks and with a function, against attention
of one process in float64; with NCCL host waits in a step, which are errors; and the time.

A row that needs what is not here says SKIPPED and what it needs; a check that fails says FAILED,
and the script then ends with 1. Times on CPUs mean nothing here, nor do those of gloo on GPUs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
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
from hp_cp.kernels._interface import Places, packs
from hp_cp.kernels._sdpa import CUDNN, EFFICIENT, SDPA
from hp_cp.kernels._varlen import VARLEN

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Rows, World, main, nccl

BACKENDS: tuple[AttentionBackend, ...] = (SDPA, EFFICIENT, CUDNN, VARLEN, FLEX, EAGER)
# The largest root mean square error of a result, over that of the exact one.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sizes:
    """Numbers of one run."""

    seq_len: int
    heads: tuple[int, int]
    size: int
    rounds: int


SMALL, LARGE = Sizes(96, (4, 2), 32, 2), Sizes(8192, (16, 4), 128, 20)


def every_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Show every third key before the query, and other ones to each head."""
    return (q_idx - kv_idx + h) % 3 == 0


def masks_of(seq_len: int) -> dict[str, MaskSpec]:
    """Return what is attended."""
    ends = (0, seq_len // 5, seq_len // 2, seq_len // 2 + 1, seq_len)
    return {
        "causal": MaskSpec(causal=True),
        "full": MaskSpec(causal=False),
        "window": MaskSpec(causal=True, window=seq_len // 7),
        "documents": MaskSpec(causal=True, cu_seqlens=ends),
        "function": MaskSpec(causal=True, mask_mod=every_third),
    }


def drawn(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and a gradient, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    heads = (sizes.heads[0], sizes.heads[1], sizes.heads[1], sizes.heads[0])
    shapes = [(1, count, sizes.seq_len, sizes.size) for count in heads]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def exact(given: list[Tensor], mask: MaskSpec, options: ScoreOptions | None = None) -> list[Tensor]:
    """Return the output and gradients in float64, some rows at a time."""
    q, k, v, grad = (x.double() for x in given)
    reach = 0 if mask.window is None else mask.window - 1
    window = None if mask.window is None else (reach, 0 if mask.causal else reach)
    options = options or ScoreOptions(window=window)
    sides = ends_of(mask, q.shape[2])
    parts = []
    for start, stop in sides:
        rows = slice(start, stop)
        part = [x[:, :, rows] for x in (q, k, v)]
        if mask.mask_mod is not None:
            options = replace(options, mask_mod=mask.mask_mod, places=places_of(part[0], start))
        causal = mask.causal and mask.window is None
        given_part: Any = part
        out, lse = EAGER.forward(*given_part, causal=causal, options=options)
        rest: Any = grad[:, :, rows], *part, out, lse
        parts.append([out, *EAGER.backward(*rest, causal=causal, options=options)])
    return [torch.cat(column, 2) for column in zip(*parts, strict=True)]


def ends_of(mask: MaskSpec, seq_len: int) -> list[tuple[int, int]]:
    """Return the documents' first and last positions."""
    return [(x.start, x.stop) for x in mask.documents(seq_len)]


def places_of(q: Tensor, start: int = 0) -> Places:
    """Return the places of a block on the diagonal."""
    batch = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    rows = torch.arange(start, start + q.shape[2], device=q.device).expand(q.shape[0], 1, -1)
    heads = torch.arange(q.shape[1], device=q.device)
    return Places(batch.expand(rows.shape), rows, rows, heads)


def error_of(found: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> str:
    """Return the largest relative error, and whether it is too large or no number."""
    errors = [
        float((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt())
        for x, y in zip(found, right, strict=True)
    ]
    worst = float(torch.tensor(errors).max())  # a nan stays one
    return f"{'' if worst < BOUNDS[dtype] else 'FAILED: '}error {worst:.1e}"


def timed(step: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Return the median of a step's milliseconds."""
    found = []
    for _ in range(rounds + 1):
        sync(device)
        start = time.perf_counter()
        step()
        sync(device)
        found.append(1e3 * (time.perf_counter() - start))
    return median(found[1:])


def sync(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_cases(sizes: Sizes) -> Iterator[tuple[str, bool, ScoreOptions]]:
    """Yield the kinds of blocks."""
    yield "full", False, ScoreOptions()
    yield "causal", True, ScoreOptions()
    yield "window", False, ScoreOptions(window=(sizes.seq_len // 7, 0))
    yield "function", False, ScoreOptions(mask_mod=every_third)
    yield "packed", True, ScoreOptions()


def kernel_row(
    backend: AttentionBackend,
    kind: str,
    causal: bool,
    options: ScoreOptions,
    given: list[Tensor],
    rounds: int,
) -> str:
    """Check one backend on one kind of block, and measure it beside torch's own attention."""
    q, k, v, grad = given
    known: Any = "causal" if causal else "full"
    lack = backend.supports(known, q.device, q.dtype, q.shape[3], v.shape[3], options)
    if lack is not None:
        return f"SKIPPED: {lack}"
    if kind == "packed" and not packs(backend):
        return "SKIPPED: it packs no blocks"
    if options.mask_mod is not None:
        options = options.at(places_of(q))
    half = q.shape[2] // 2
    lengths = [half, q.shape[2] - half]

    def step() -> list[Tensor]:
        if kind == "packed" and packs(backend):
            forward: Any = (q, k, v, lengths, lengths)
            out, lse = backend.forward_packed(*forward, causal=causal, options=options)
            rest: Any = (grad, q, k, v, out, lse, lengths, lengths)
            return [out, *backend.backward_packed(*rest, causal=causal, options=options)]
        out, lse = backend.forward(q, k, v, causal=causal, options=options)
        after: Any = (grad, q, k, v, out, lse)
        return [out, *backend.backward(*after, causal=causal, options=options)]

    mask = MaskSpec(causal=causal)
    if kind == "packed":
        mask = replace(mask, cu_seqlens=(0, half, q.shape[2]))
    elif options.mask_mod is not None:
        mask = replace(mask, mask_mod=options.mask_mod)
    plain = ScoreOptions(window=options.window)
    right = exact(given, mask, plain)
    return f"{error_of(step(), right, q.dtype)}, {timed(step, rounds, q.device):.2f} ms"


def torchs(given: list[Tensor], causal: bool, rounds: int) -> str:
    """Measure ``scaled_dot_product_attention`` as it chooses, forward and backward."""
    *leaves, grad = given
    q, k, v = (x.clone().requires_grad_() for x in leaves)

    def step() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return f"{timed(step, rounds, grad.device):.2f} ms"


def kernels(device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of the kernels alone."""
    sizes = LARGE if large else SMALL
    for dtype in BOUNDS:
        given = drawn(sizes, device, dtype)
        name = str(dtype).removeprefix("torch.")
        for causal in (False, True):
            kind = "causal" if causal else "full"
            rows.add(f"SDPA, {kind}, {name}", torchs, given, causal, sizes.rounds)
        for backend in BACKENDS:
            for kind, causal, options in kernel_cases(sizes):
                rest = kind, causal, options, given, sizes.rounds
                rows.add(f"{backend.name}, {kind}, {name}", kernel_row, backend, *rest)


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


def over_ranks(
    given: list[Tensor],
    right: list[Tensor] | None,
    mask: MaskSpec,
    mesh: Any,
    mode: str,
    rounds: int,
) -> str:
    """Check one mode, look for host waits, and measure it."""
    layout, options = modes_of(mesh.size())[mode]
    seq_len, device = given[0].shape[2], given[0].device
    mine = torch.tensor(layout.indices(mesh.size(), seq_len, mask)[mesh.get_local_rank()])
    q, k, v, grad = (x.index_select(2, mine.to(device)).clone() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = context_parallel_attention(
            q, k, v, mesh, mask=mask, layout=layout, seq_len=seq_len, **options
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = step()
    said = (
        ""
        if right is None
        else error_of(found, [x.index_select(2, mine.to(device)) for x in right], q.dtype)
    )
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            said += f", FAILED: the host waits: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return f"{said}, {timed(step, rounds, device):.2f} ms"


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    if not world.backend:
        kernels(device, large, rows)
        return
    sizes = LARGE if large else SMALL
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=("cp",))
    for dtype in BOUNDS:
        given = drawn(sizes, device, dtype)
        for name, mask in masks_of(sizes.seq_len).items():
            right = exact(given, mask)
            for mode in modes_of(world.ranks):
                what = f"{mode}, {name}, {str(dtype).removeprefix('torch.')}"
                rows.add(what, over_ranks, given, right, mask, mesh, mode, sizes.rounds)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here."""
    gpus = torch.cuda.device_count() if on_gpu else 0
    lack = None if gpus > 1 else "it needs two GPUs"
    return [
        World("kernels", ""),
        World("2 ranks, gloo", "gloo", (2,)),
        World("4 ranks, gloo", "gloo", (4,)),
        World(f"{max(2, gpus)} ranks, NCCL", nccl(on_gpu), (max(2, gpus),), lack),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, worlds_of, checks))
