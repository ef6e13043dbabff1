"""Time the host's part of an attention whose plan is known, on a fake group of eight ranks.

Communication takes no time there, and the kernel is a stand-in that makes its results and computes
nothing, so that what is left is this package's Python, the operators that cut and merge blocks, and
autograd. Each row is the processor time of one call, the median over rounds of some calls, with the
least and the most of them; arms take turns. Operators are those of torch in one call.

The floor of a schedule is what rank 0 calls of torch in it, one line after the other in one
autograd function: the group's own sends, receives and collectives, the stand-in for each block, the
few operators of a merge by online softmax, and sums of gradients. It knows its shapes and nothing
else: no plan, no other mask, layout, rank or backend, no checks, no errors. ``one block`` is the
stand-in called once in each direction: what no attention can be below.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention

RANKS, ROWS, HEADS, SIZE = 8, 16, 8, 8
FLOOR = ", floor"
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


KERNEL, HALF = StandIn(), ROWS // 2


def turned(*tensors: Tensor) -> list[Tensor]:
    """Return views with rows and heads exchanged, as kernels take them, or back."""
    return [x.transpose(1, 2) for x in tensors]


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stand-in's output and log-sum-exp; ``q`` is a view as kernels take it."""
    return KERNEL.forward(q, *turned(k, v), causal=True, options=None)


def graded(late: Sequence[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the stand-in's gradients; ``late`` are views of grad, q, out and a log-sum-exp."""
    grad, q, out, lse = late
    given = grad, q, *turned(k, v), out, lse
    return turned(*KERNEL.backward(*given, causal=True, options=None))


class Sum:
    """The output and log-sum-exp of all rows, to whose second half others are merged."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.all, self.late = (out, lse), [x[:, :, HALF:] for x in (out, lse)]

    def merge(self, other_out: Tensor, other_lse: Tensor) -> None:
        """Merge by online softmax."""
        out, lse = self.late
        weight = torch.sigmoid(other_lse - lse)
        out.lerp_(other_out, weight.unsqueeze(-1))
        torch.logaddexp(lse, other_lse, out=lse)


def passed(group: Any, step: int, sends: Sequence[Tensor], rooms: Sequence[Tensor]) -> list[Any]:
    """Start receives from the rank ``step`` before, and sends to the one ``step`` after."""
    works = [group.recv([x], RANKS - step, 0) for x in rooms]
    return works + [group.send([x], step, 0) for x in sends]


def waited(works: list[Any]) -> None:
    """Wait for them."""
    for work in works:
        work.wait()


def arriving(group: Any, k: Tensor, v: Tensor, around: bool) -> Iterator[list[Tensor]]:
    """Yield the own keys and values, then those of each other rank, asked for one step before.

    Half of the own ones go straight to each rank, or all that is held ``around`` the ring.
    """
    held = rooms = [k, v]
    sends = held if around else [x[:, :HALF] for x in held]
    works: list[Any] = []
    for step in range(RANKS):
        waited(works)
        held = rooms
        if step + 1 < RANKS:
            rooms = [torch.empty_like(k), torch.empty_like(v)]
            works = passed(group, 1 if around else step + 1, held if around else sends, rooms)
        yield held


class Bare(torch.autograd.Function):
    """One block of all rows, with torch's operators alone; subclasses exchange keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """Return an output."""
        out, lse = attended(q.transpose(1, 2), k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return gradients."""
        q, k, v, out, lse = ctx.saved_tensors
        return *graded([*turned(grads[0].contiguous(), q), out, lse], k, v), None


class BareDirect(Bare):
    """Half of the own keys goes to each rank, all keys of each come; and again in the backward."""

    around = False

    @classmethod
    def forward(cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """Return an output."""
        every = q.transpose(1, 2)
        late, total = every[:, :, HALF:], None
        for held in arriving(group, k, v, cls.around):
            if total is None:
                total = Sum(*attended(every, *held))
            else:
                total.merge(*attended(late, *held))
        assert total is not None
        ctx.save_for_backward(q, k, v, *total.all)
        ctx.group = group
        return total.all[0].transpose(1, 2)

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        """Return gradients; those of others' keys go straight home, and are added there."""
        q, k, v, out, lse = ctx.saved_tensors
        every = [*turned(grads[0].contiguous(), q), out, lse]
        late = [x[:, :, HALF:] for x in every]
        parts = arriving(ctx.group, k, v, cls.around)
        dq, dk, dv = graded(every, *next(parts))
        sums, own = dq[:, HALF:], [x[:, :HALF] for x in (dk, dv)]
        back: list[Tensor] = []
        home: list[Any] = []
        for step, held in enumerate(parts, 1):
            part, *shares = graded(late, *held)
            sums.add_(part)
            waited(home)
            for total, share in zip(own, back, strict=False):
                total.add_(share)
            back = [torch.empty_like(x) for x in own]
            home = passed(ctx.group, RANKS - step, shares, back)
        waited(home)
        for total, share in zip(own, back, strict=True):
            total.add_(share)
        return dq, dk, dv, None


class BareRing(BareDirect):
    """Keys go around the ring, and in the backward the sums of their gradients behind them."""

    around = True

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        """Return gradients; each rank adds to those that come, and passes them on."""
        q, k, v, out, lse = ctx.saved_tensors
        every = [*turned(grads[0].contiguous(), q), out, lse]
        late = [x[:, :, HALF:] for x in every]
        parts = arriving(ctx.group, k, v, cls.around)
        dq, dk, dv = graded(every, *next(parts))
        sums = dq[:, HALF:]
        back: list[Tensor] = []
        home: list[Any] = []
        for held in parts:
            part, *total = graded(late, *held)
            sums.add_(part)
            waited(home)
            for came, share in zip(back, total, strict=False):
                came.add_(share)
            total = back or total
            back = [torch.empty_like(k), torch.empty_like(v)]
            home = passed(ctx.group, 1, total, back)
        waited(home)
        return dq, dk.add_(back[0]), dv.add_(back[1]), None


class BareGather(Bare):
    """One all-gather of two pieces of keys and values, two blocks, one all-to-all of gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """Return an output."""
        gathered = [x.new_empty((RANKS * ROWS, *x.shape[2:])) for x in (k, v)]
        halves = [half for x in (k, v) for half in x[0].split(HALF)]
        rooms = [half for x in gathered for half in x.split(RANKS * HALF)]
        work = group.allgather_into_tensor_coalesced(rooms, halves)
        every = q.transpose(1, 2)
        total = Sum(*attended(every, k, v))
        work.wait()
        total.merge(*attended(every[:, :, HALF:], *(x.unsqueeze(0) for x in gathered)))
        ctx.save_for_backward(q, k, v, *total.all, *gathered)
        ctx.group = group
        return total.all[0].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return gradients."""
        q, k, v, out, lse, *gathered = ctx.saved_tensors
        every = [*turned(grads[0].contiguous(), q), out, lse]
        late = [x[:, :, HALF:] for x in every]
        part, *shares = graded(late, *(x.unsqueeze(0) for x in gathered))
        sends = torch.empty(RANKS, 2, 2 * HALF, *k.shape[2:])
        for room, share in zip(sends.unbind(1), shares, strict=True):
            for half, piece in zip(room.split(HALF, 1), share[0].split(RANKS * HALF), strict=True):
                half.copy_(piece.unflatten(0, (RANKS, HALF)))
        came = torch.empty_like(sends)
        work = ctx.group.alltoall_base(came, sends, [], [])
        dq, *own = graded(every, k, v)
        dq[:, HALF:].add_(part)
        work.wait()
        for total, part in zip(own, came.sum(0), strict=True):
            total.add_(part)
        return dq, *own, None


class BareUlysses(Bare):
    """One all-to-all of q, k and v, one block, one all-to-all of the output; and back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """Return an output."""
        sends = torch.stack([x[0].unflatten(1, (RANKS, -1)) for x in (q, k, v)], 2)
        whole = exchanged(group, sends.transpose(0, 1).contiguous()).flatten(0, 1).unsqueeze(0)
        q, k, v = whole.unbind(2)
        out, lse = attended(q.transpose(1, 2), k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        came = exchanged(group, out[0].transpose(0, 1).unflatten(0, (RANKS, -1)))
        return came.permute(1, 0, 2, 3).flatten(1, 2).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return gradients."""
        sends = grads[0][0].unflatten(1, (RANKS, -1)).transpose(0, 1).contiguous()
        grad = exchanged(ctx.group, sends).flatten(0, 1).unsqueeze(0)
        q, k, v, out, lse = ctx.saved_tensors
        parts = torch.stack(graded([*turned(grad, q), out, lse], k, v), 2)
        came = exchanged(ctx.group, parts[0].unflatten(0, (RANKS, -1)))
        return *(x.permute(1, 0, 2, 3).flatten(1, 2).unsqueeze(0) for x in came.unbind(2)), None


def exchanged(group: Any, sends: Tensor) -> Tensor:
    """Return block ``i`` of every rank, on rank ``i``."""
    came = torch.empty_like(sends)
    group.alltoall_base(came, sends, [], []).wait()
    return came


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

    def bare(function: type[Bare]) -> Arm:
        group = mesh.get_group()
        return lambda: function.apply(*inputs, group)  # type: ignore[no-untyped-call]

    return {
        "direct zigzag": arm(Zigzag(), "direct"),
        "direct zigzag" + FLOOR: bare(BareDirect),
        "ring zigzag": arm(Zigzag(), "ring"),
        "ring zigzag" + FLOOR: bare(BareRing),
        "gather zigzag": arm(Zigzag(), "gather"),
        "gather zigzag" + FLOOR: bare(BareGather),
        "ulysses": arm(Contiguous(), "direct", RANKS),
        "ulysses" + FLOOR: bare(BareUlysses),
        "ulysses 4 x ring": arm(Zigzag(), "ring", 4),
        "one block": bare(Bare),
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


class Operators(TorchDispatchMode):
    """Counts the operators of torch that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of(call: Arm) -> str:
    """Return how many operators a call has in the forward and in the backward."""
    with Operators() as forward:
        out = call()
    grad = torch.ones_like(out)
    with Operators() as backward:
        out.backward(grad)
    return f"{forward.count} + {backward.count}"


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
    arms = arms_of(mesh, inputs)
    found = timed(arms, *((2, 3) if args.quick else (60, 10)))
    rows = []
    for name, parts in found.items():
        for part, times in parts.items():
            if name.endswith(FLOOR):
                continue
            median, spread = statistics.median(times), [min(times), max(times)]
            row: dict[str, Any] = {"arm": name, "part": part, "ms": median, "spread": spread}
            shown = f"{name:18s} {part:18s} {median:7.3f} ms [{spread[0]:.3f}, {spread[1]:.3f}]"
            if bare := found.get(name + FLOOR):
                row["floor_ms"] = statistics.median(bare[part])
                row["floor_spread"] = [min(bare[part]), max(bare[part])]
                over = statistics.median(a / b for a, b in zip(times, bare[part], strict=True))
                row["over_floor"] = over
                shown += f"   floor {row['floor_ms']:7.3f} ms [{min(bare[part]):.3f}, "
                shown += f"{max(bare[part]):.3f}]   over it {over:5.2f}"
            rows.append(row)
            print(shown)
        counts = [operators_of(arms[x]) for x in (name, name + FLOOR) if x in arms]
        if not name.endswith(FLOOR):
            rows.append({"arm": name, "operators": counts})
            print(f"{name:18s} operators {'   floor '.join(counts)}")
    if args.json:
        args.json.write_text(json.dumps({"name": "cp_host", "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
