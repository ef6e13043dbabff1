"""Peak memory of a layer's forward and backward against torchtitan's, in live bytes.

    python bench_memory.py [--quick] [--json FILE]

Both layers have the same bfloat16 weights, tokens and routing, which is even; outputs and gradients
are compared first. The bytes are those of all storages that the step makes, gradients of the
weights among them, counted as they come and go: the same in every run, on a busy machine too. What
a kernel uses inside is not seen. Ranks are gloo processes; the largest of them counts.
"""

import argparse
import copy
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_ep import AllToAll, Dedup, ExpertParallel, MoE, TopKRouter

PEER = "torchtitan.models.common.moe"
DISPATCH = "torchtitan.models.common.token_dispatcher"
LINEAR = "torchtitan.models.common.linear"


@dataclass(frozen=True)
class Case:
    """One setting."""

    ranks: int
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int


CASES = [
    Case(1, 2048, 512, 1024, 16, 4),
    Case(2, 2048, 512, 1024, 16, 4),
    Case(4, 1024, 512, 1024, 32, 8),
]
QUICK = [Case(1, 64, 16, 32, 4, 2), Case(2, 64, 16, 32, 8, 2)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that live, of those made inside, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: set[int] = set()
        self._lock = threading.RLock()  # threads that communicate free what they sent

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Leave out the storages of these, which were there before and stay."""
        self._seen |= {id(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(
                tensor, DTensor
            ):  # its own storage has the size of all ranks, and no bytes
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return
        for _ in range(50):
            if self.live + size <= self.peak:
                break
            time.sleep(0.001)  # those threads free it a moment later, when they get to run
        with self._lock:
            self._seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        with self._lock:
            self._seen.remove(key)
            self.live -= size


def main() -> int:
    """Run all cases and print one line per arm; 1 where the other side is not there."""
    parser = argparse.ArgumentParser(description="peak memory of a layer against torchtitan's")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if importlib.util.find_spec("torchtitan") is None:
        print(
            "bench_memory: torchtitan cannot be imported; install benchmarks/requirements.txt "
            "with --no-deps",
            file=sys.stderr,
        )
        return 1
    rows = []
    for case in QUICK if options.quick else CASES:
        peaks = _run_ranks(case)
        rows.append(asdict(case) | {"peak_bytes": peaks})
        print(case)
        for name, peak in peaks.items():
            print(f"  {name:9s} {peak / 2**20:8.2f} MiB  ratio {peak / peaks['theirs']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"name": "ep_memory", "rows": rows}, indent=2))
    return 0


def _run_ranks(case: Case) -> dict[str, int]:
    """Return the largest rank's peak of each arm."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", PEER])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (case, folder), case.ranks, start_method="forkserver")
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(case.ranks)]
    return {name: max(peaks[name] for peaks in found) for name in found[0]}


def _rank(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.ranks)
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(rank)
    x = torch.randn(1, case.tokens, case.dim).bfloat16().requires_grad_()
    grad = torch.randn(1, case.tokens, case.dim).bfloat16()
    arms = _arms(case, mesh)
    _compare(arms, x, grad)
    peaks = {name: _peak(layer, x, grad) for name, layer in arms.items()}
    Path(folder, str(rank)).write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


def _arms(case: Case, mesh: DeviceMesh) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    sizes = case.dim, case.hidden, case.experts, case.top_k
    # Scores of bfloat16 have ties, of which the two sides may choose differently.
    router = TopKRouter(case.dim, case.experts, case.top_k, force_balance=True)
    whole = MoE(*sizes, router=router).bfloat16()
    arms: dict[str, nn.Module] = {"theirs": _theirs(case, mesh, whole)}
    if case.ranks == 1:
        return arms | {"Local": whole}
    for make in (AllToAll, Dedup):
        layer = copy.deepcopy(whole)
        ExpertParallel(make(mesh, case.experts)).apply(layer, mesh)
        arms[make.__name__] = layer
    return arms


def _theirs(case: Case, mesh: DeviceMesh, whole: MoE) -> nn.Module:
    """Return the other side's layer with this rank's part of the experts of ``whole``."""
    moe: Any = importlib.import_module(PEER)
    dispatch: Any = importlib.import_module(DISPATCH)
    linear = importlib.import_module(LINEAR).Linear
    moe.get_spmd_backend = dispatch.get_spmd_backend = lambda: "partial_dtensor"
    peer = dispatch.LocalTokenDispatcher if case.ranks == 1 else dispatch.AllToAllTokenDispatcher
    local = case.experts // case.ranks
    layer: Any = moe.MoE.Config(
        num_experts=case.experts,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(
                dim=case.dim, hidden_dim=case.hidden, num_experts=local
            ),
            token_dispatcher=peer.Config(num_experts=case.experts, top_k=case.top_k),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=case.experts,
            gate=linear.Config(in_features=case.dim, out_features=case.experts),
            top_k=case.top_k,
            score_func="softmax",
            route_norm=True,
            _debug_force_load_balance=True,
        ),
        load_balance_coeff=None,
    ).build()
    layer.bfloat16()
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh if case.ranks > 1 else None)
    here = slice(mesh.get_rank() * local, (mesh.get_rank() + 1) * local)
    experts = whole.experts
    values = {
        "w1_EFD": experts.gate_up_proj[here, 0],
        "w3_EFD": experts.gate_up_proj[here, 1],
        "w2_EDF": experts.down_proj[here],
    }
    with torch.no_grad():
        for name, value in values.items():
            layer.routed_experts.inner_experts.get_parameter(name).copy_(value)
        layer.router.gate.weight.copy_(whole.router.weight)
    found: nn.Module = layer
    return found


def _compare(arms: dict[str, nn.Module], x: Tensor, grad: Tensor) -> None:
    results = {}
    for name, layer in arms.items():
        y = layer(x)
        results[name] = (y, *torch.autograd.grad(y, x, grad))
    for name, ours in results.items():
        for a, b in zip(ours, results["theirs"], strict=True):
            if (a - b).abs().max() > 0.05 * b.abs().max():
                raise RuntimeError(f"{name} does not compute the same as the other side")


def _peak(layer: nn.Module, x: Tensor, grad: Tensor) -> int:
    layer.zero_grad()
    x.grad = None
    held = [t.to_local() if isinstance(t, DTensor) else t for t in layer.state_dict().values()]
    counted = LiveBytes()
    counted.know([x, grad, *held, *layer.buffers()])
    with torch.autograd.set_multithreading_enabled(False), counted:
        layer(x).backward(grad)
    return counted.peak


if __name__ == "__main__":
    sys.exit(main())
