"""What the scripts that compare with torchtitan share: its layer, a setting, and gloo ranks."""

import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

from hp_ep import MoE

LAYER = "torchtitan.models.common.moe"
DISPATCHER = "torchtitan.models.common.token_dispatcher"
LINEAR = "torchtitan.models.common.linear"
FEED_FORWARD = "torchtitan.models.common.feed_forward"
BACKEND = "partial_dtensor"  # plain tensors inside


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting; ``hidden`` 0 means experts that only double their input."""

    ranks: int
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    skew: float = 0.0


def is_missing(script: str) -> bool:
    """Return whether torchtitan cannot be imported, and say so."""
    if importlib.util.find_spec("torchtitan") is not None:
        return False
    print(
        f"{script}: torchtitan cannot be imported; install benchmarks/requirements.txt with "
        "--no-deps",
        file=sys.stderr,
    )
    return True


def run_ranks(step: Callable[..., Any], size: int, *args: Any, deadline: float = 600.0) -> Any:
    """Return what ``step(rank, mesh, *args)`` returns on each rank; raise where one fails.

    Or where one is late. Results travel as JSON. Each rank is a gloo process of one thread.
    """
    end = time.monotonic() + deadline
    # One process imports the other side, which takes seconds, and forks the ranks.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", LAYER])
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _rank, (step, size, folder, args), size, join=False, start_method="forkserver"
        )
        try:
            while not context.join(timeout=max(0.0, end - time.monotonic()), grace_period=1.0):
                if time.monotonic() >= end:
                    raise TimeoutError(f"the {size} ranks did not end in {deadline:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]


def _rank(rank: int, step: Callable[..., Any], size: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    found = step(rank, mesh, *args)
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def dispatcher_config(size: int, num_experts: int, top_k: int) -> Any:
    """Return the configuration of torchtitan's dispatcher for ``size`` ranks."""
    module: Any = importlib.import_module(DISPATCHER)
    module.get_spmd_backend = lambda: BACKEND
    kind = module.LocalTokenDispatcher if size == 1 else module.AllToAllTokenDispatcher
    return kind.Config(num_experts=num_experts, top_k=top_k)


def layer_like(whole: MoE, mesh: DeviceMesh | None) -> nn.Module:
    """Return torchtitan's layer with the options and weights of ``whole``, and this rank's experts.

    ``mesh``: 1-D mesh over which the experts are distributed; None for one rank. Only options that
    both layers have are supported: group scores of two experts, SwiGLU.
    """
    module: Any = importlib.import_module(LAYER)
    linear: Any = importlib.import_module(LINEAR).Linear
    feed_forward: Any = importlib.import_module(FEED_FORWARD).FeedForward
    module.get_spmd_backend = lambda: BACKEND
    size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    router, experts = whole.router, whole.experts
    local, shared = router.num_experts // size, whole.shared_experts

    def matrix(rows: int, columns: int) -> Any:
        return linear.Config(in_features=columns, out_features=rows)

    groups = router.n_group if router.topk_group < router.n_group else None
    beside = None
    if shared is not None:
        hidden = shared.down_proj.shape[1]
        shapes = {"w1": (hidden, whole.dim), "w2": (whole.dim, hidden), "w3": (hidden, whole.dim)}
        beside = feed_forward.Config(**{name: matrix(*shape) for name, shape in shapes.items()})
    layer: Any = module.MoE.Config(
        num_experts=router.num_experts,
        routed_experts=module.RoutedExperts.Config(
            inner_experts=module.GroupedExperts.Config(
                dim=whole.dim, hidden_dim=experts.hidden_dim, num_experts=local
            ),
            token_dispatcher=dispatcher_config(size, router.num_experts, router.top_k),
        ),
        router=module.TokenChoiceTopKRouter.Config(
            num_experts=router.num_experts,
            gate=matrix(router.num_experts, whole.dim),
            num_expert_groups=groups,
            num_limited_groups=None if groups is None else router.topk_group,
            top_k=router.top_k,
            score_func=router.score,
            route_norm=router.norm_topk_prob,
            route_scale=router.routed_scaling_factor,
            _debug_force_load_balance=router.force_balance,
        ),
        load_balance_coeff=None if router.bias is None else 1e-3,
        shared_experts=beside,
    ).build()
    layer.to(router.weight)
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh if size > 1 else None)
    here = slice(rank * local, (rank + 1) * local)
    values = {
        "routed_experts.inner_experts.w1_EFD": experts.gate_up_proj[here, 0],
        "routed_experts.inner_experts.w3_EFD": experts.gate_up_proj[here, 1],
        "routed_experts.inner_experts.w2_EDF": experts.down_proj[here],
        "router.gate.weight": router.weight,
    }
    if shared is not None:
        w1, w3 = shared.gate_up_proj.chunk(2)
        beside_values = {"w1": w1, "w2": shared.down_proj, "w3": w3}
        values |= {f"shared_experts.{name}.weight": w for name, w in beside_values.items()}
    with torch.no_grad():
        for name, value in values.items():
            layer.get_parameter(name).copy_(value)
        if router.bias is not None:
            layer.expert_bias_E = router.bias.clone()
        layer.tokens_per_expert_E.zero_()
    found: nn.Module = layer
    return found
