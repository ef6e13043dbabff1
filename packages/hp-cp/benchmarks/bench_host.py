"""Time the host's part of an attention whose plan is known, on a fake group of eight ranks.

Communication takes no time there, and the kernel is a stand-in that makes its results and computes
nothing, so that what is left is this package's Python, the operators that cut and merge blocks, and
autograd. Each row is the processor time of one call, the median over rounds of many calls; arms
take turns. ``one block`` is the stand-in called by one autograd function alone: what no attention
can be below.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention

RANKS, ROWS, HEADS, SIZE = 8, 16, 8, 8
Arm = Callable[[], Tensor]
ScheduleName = Literal["gather", "direct", "ring"]


class StandIn:
    """A backend whose results are new tensors of the right shapes."""

    name = "stand-in"

    def supports(self, *args: Any) -> str | None:
        """Return None: everything is supported."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return an output and a log-sum-exp."""
        rows_first = q.transpose(1, 2)
        out = torch.empty_like(rows_first, memory_format=torch.contiguous_format)
        return out.transpose(1, 2), q.new_empty(q.shape[:3])

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
        options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients."""
        dq, dk, dv = (
            torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format)
            for x in (q, k, v)
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class OneBlock(torch.autograd.Function):
    """The stand-in once in each direction."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return an output."""
        out, lse = StandIn().forward(q, k, v, causal=True, options=None)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return gradients."""
        return StandIn().backward(grads[0], *ctx.saved_tensors, causal=True, options=None)


def arms_of(mesh: DeviceMesh, inputs: list[Tensor]) -> dict[str, Arm]:
    """Return one call of every mode; a model makes its backend once, and masks in every call."""
    backend = StandIn()

    def arm(layout: Layout, schedule: ScheduleName, degree: int = 1) -> Arm:
        return lambda: context_parallel_attention(
            *inputs,
            mesh,
            mask=MaskSpec(causal=True),
            layout=layout,
            schedule=schedule,
            ulysses_degree=degree,
            seq_len=RANKS * ROWS,
            seq_dim=1,
            head_dim=2,
            backend=backend,
        )

    def one_block() -> Tensor:
        out: Tensor = OneBlock.apply(*inputs)  # type: ignore[no-untyped-call]
        return out

    return {
        "direct zigzag": arm(Zigzag(), "direct"),
        "ring zigzag": arm(Zigzag(), "ring"),
        "gather zigzag": arm(Zigzag(), "gather"),
        "ulysses": arm(Contiguous(), "direct", RANKS),
        "ulysses 4 x ring": arm(Zigzag(), "ring", 4),
        "one block": one_block,
    }


def timed(arms: dict[str, Arm], rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds of processor time per call, forward and with backward."""
    found: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "forward+backward": []} for name in arms
    }
    for round_ in range(rounds + 1):
        for name, call in arms.items():
            for part, times in found[name].items():
                start = time.thread_time()
                for _ in range(calls):
                    out = call()
                    if part != "forward":
                        out.sum().backward()
                if round_:
                    times.append(1000 * (time.thread_time() - start) / calls)
    return found


def main() -> None:
    """Print a row per mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few calls")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    inputs = [torch.randn(1, ROWS, HEADS, SIZE, requires_grad=True) for _ in range(3)]
    found = timed(arms_of(mesh, inputs), *((2, 3) if args.quick else (9, 100)))
    rows = []
    for name, parts in found.items():
        for part, times in parts.items():
            median, spread = statistics.median(times), [min(times), max(times)]
            rows.append({"arm": name, "part": part, "ms": median, "spread": spread})
            print(f"{name:18s} {part:18s} {median:7.3f} ms [{spread[0]:.3f}, {spread[1]:.3f}]")
    if args.json:
        args.json.write_text(json.dumps({"name": "cp_host", "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
