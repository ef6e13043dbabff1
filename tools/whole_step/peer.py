"""The peer's parts: torch's ring attention, torchtitan's MoE layer, torch's clipping and AdamW."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from train.model import LanguageModel

from hp_ep import MoE

from .cases import TRAIN

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
# Folder of `peers`, which makes torchtitan's layer for hp-ep's benchmarks.
sys.path.append(str(Path(__file__).parents[2] / "packages" / "hp-ep" / "benchmarks"))


def without_torchtitan() -> str:
    """Return why torchtitan's layer cannot be used; empty if it can."""
    if importlib.util.find_spec("torchtitan") is not None:
        return ""
    return (
        "torchtitan is not installed; install packages/hp-ep/benchmarks/requirements.txt with "
        "--no-deps"
    )


def context_parallel_error(mesh: DeviceMesh) -> str:
    """Return the error of torch's public ``context_parallel`` on a mesh; empty if there is none."""
    q, k, v = (torch.randn(1, 1, 4, 8, device=mesh.device_type) for _ in range(3))
    buffer = torch.zeros(1, 4 * mesh.size(), device=mesh.device_type)
    try:
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


def use_ring_attention(model: LanguageModel, group: dist.ProcessGroup, rotate: str) -> None:
    """Replace the attention of each block by torch's ring attention with zigzag sharding.

    ``context_parallel`` raises on CPUs. This is its algorithm with the kernels for CPUs.
    """
    for block in model.blocks.values():
        cast(Any, block).attention.core = _RingAttention(group, rotate)


class _RingAttention(nn.Module):
    """torch's ring attention."""

    def __init__(self, group: dist.ProcessGroup, rotate: str) -> None:
        super().__init__()
        self._group = group
        self._rotate = rotate

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        """Return attention of ``[batch, heads, seq, head_dim]``, sharded along ``seq``."""
        ring: Any = importlib.import_module(_RING)
        ring._cp_options.enable_load_balance = True
        ring._cp_options.rotate_method = ring._RotateMethod[self._rotate]
        out = _Ring.apply(query, key, value, self._group)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Any:
        ring: Any = importlib.import_module(_RING)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(
            group, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ring: Any = importlib.import_module(_RING)

        def kernel(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
            run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            out, lse, causal = given["out"], given["logsumexp"], given["is_causal"]
            return run(given["grad_out"], query, key, value, out, lse, 0.0, causal)

        q, k, v, out, lse = ctx.saved_tensors
        found = ring._templated_ring_attention_backward(
            ctx.group, 2, kernel, grads[0], "grad_out", q, k, v, out, lse, True
        )
        return (*found, None)


def use_torchtitan(model: LanguageModel, ep: DeviceMesh | None) -> None:
    """Replace each mixture of experts by torchtitan's layer with the same weights.

    torchtitan's routed experts cast to bfloat16. Here they compute in the dtype of their weights.
    With ``ep``, experts are sharded over it and the dispatcher is the all-to-all one.
    """
    for block in model.blocks.values():
        if isinstance(block.mlp, MoE):
            block.mlp = _layer_like(block.mlp, ep)


def experts_of(block: nn.Module) -> nn.Module | None:
    """Return the routed experts of a block with torchtitan's layer. Returns None for others."""
    routed = getattr(getattr(block, "mlp", None), "routed_experts", None)
    found: nn.Module | None = getattr(routed, "inner_experts", None)
    return found


def _layer_like(layer: MoE, ep: DeviceMesh | None) -> nn.Module:
    found: Any = cast(Any, importlib.import_module("peers")).layer_like(layer, ep)
    experts = found.routed_experts.inner_experts
    experts.forward = MethodType(_experts_in_own_dtype, experts)
    for name in ("w1_EFD", "w3_EFD", "w2_EDF") if ep is not None else ():
        local = experts.get_parameter(name).detach()
        sharded = DTensor.from_local(local, ep, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(sharded))
    return cast(nn.Module, found)


def _experts_in_own_dtype(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Return ``w2(silu(w1 x) * w3 x)`` of rows that are sorted by expert."""
    w1, w2, w3 = map(_local, (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
    ends = counts.cumsum(0, dtype=torch.int32)
    hidden = F.silu(F.grouped_mm(rows, w1.mT, offs=ends)) * F.grouped_mm(rows, w3.mT, offs=ends)
    return F.grouped_mm(hidden, w2.mT, offs=ends)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def adamw(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return AdamW with the options of the trainer. Norms have no weight decay.

    torch's kernels over lists of DTensors need all DTensors of a list on one mesh, so each mesh has
    its own parameter groups.
    """
    groups: dict[object, dict[str, Any]] = {}
    for parameter in model.parameters():
        decay = TRAIN.weight_decay if parameter.ndim >= 2 else 0.0
        group = groups.setdefault(
            (decay, _mesh_of(parameter)), {"params": [], "weight_decay": decay}
        )
        group["params"].append(parameter)
    options: dict[str, Any] = {"lr": TRAIN.learning_rate, "betas": TRAIN.betas, kind: True}
    return torch.optim.AdamW(list(groups.values()), **options)


def clipping(model: nn.Module) -> Callable[[], Tensor]:
    """Return a function that clips all gradients by their common norm and returns the norm.

    As in torchtitan, norms of parameters on different meshes are computed one by one.
    """
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(_mesh_of(parameter), []).append(parameter)
    groups = list(by_mesh.values())

    def clip() -> Tensor:
        norms = []
        for group in groups:
            found = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            norms.append(found.full_tensor() if isinstance(found, DTensor) else found)
        total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, TRAIN.max_norm, total)
        return total

    return clip


def _mesh_of(parameter: Tensor) -> object:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
