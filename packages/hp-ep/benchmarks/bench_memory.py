"""Peak memory of a layer's forward and backward against torchtitan's, in live bytes.

    python bench_memory.py [--quick] [--json FILE]

Both layers have the same bfloat16 weights, tokens and routing, which is even; outputs and gradients
are compared first. The bytes are those of all storages that the step makes, gradients of the
weights among them, counted as they come and go: the same in every run, on a busy machine too. What
a kernel uses inside is not seen. Ranks are gloo processes; the largest of them counts.
"""

import argparse
import copy
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peers import Case, is_missing, layer_like, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_ep import AllToAll, Dedup, ExpertParallel, MoE, TopKRouter

CASES = [
    Case(ranks=1, tokens=2048, dim=512, hidden=1024, experts=16, top_k=4),
    Case(ranks=2, tokens=2048, dim=512, hidden=1024, experts=16, top_k=4),
    Case(ranks=4, tokens=1024, dim=512, hidden=1024, experts=32, top_k=8),
]
QUICK = [
    Case(ranks=1, tokens=64, dim=16, hidden=32, experts=4, top_k=2),
    Case(ranks=2, tokens=64, dim=16, hidden=32, experts=8, top_k=2),
]


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
    if is_missing("bench_memory"):
        return 1
    rows = []
    for case in QUICK if options.quick else CASES:
        every = run_ranks(_peaks, case.ranks, case)
        peaks = {name: max(found[name] for found in every) for name in every[0]}
        rows.append(asdict(case) | {"peak_bytes": peaks})
        print(case)
        for name, peak in peaks.items():
            print(f"  {name:9s} {peak / 2**20:8.2f} MiB  ratio {peak / peaks['theirs']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"name": "ep_memory", "rows": rows}, indent=2))
    return 0


def _peaks(rank: int, mesh: DeviceMesh, case: Case) -> dict[str, int]:
    """Return the peak of each arm on this rank."""
    torch.manual_seed(rank)
    x = torch.randn(1, case.tokens, case.dim).bfloat16().requires_grad_()
    grad = torch.randn(1, case.tokens, case.dim).bfloat16()
    arms = _arms(case, mesh)
    _compare(arms, x, grad)
    return {name: _peak(layer, x, grad) for name, layer in arms.items()}


def _arms(case: Case, mesh: DeviceMesh) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    sizes = case.dim, case.hidden, case.experts, case.top_k
    # Scores of bfloat16 have ties, of which the two sides may choose differently.
    router = TopKRouter(case.dim, case.experts, case.top_k, force_balance=True)
    whole = MoE(*sizes, router=router).bfloat16()
    arms: dict[str, nn.Module] = {"theirs": layer_like(whole, mesh)}
    if case.ranks == 1:
        return arms | {"Local": whole}
    for make in (AllToAll, Dedup):
        layer = copy.deepcopy(whole)
        ExpertParallel(make(mesh, case.experts)).apply(layer, mesh)
        arms[make.__name__] = layer
    return arms


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
