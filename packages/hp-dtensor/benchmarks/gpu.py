"""Check collectives, redistributions and gradient norms on GPUs against the same calls on CPUs.

    python benchmarks/gpu.py                 on all GPUs of this machine
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: one rank with NCCL, and gloo with two and with 2 x 2 ranks on one GPU. With several GPUs,
also NCCL with one rank for each GPU. Every row makes the same calls with tensors on CPUs, through
gloo, and compares bits. All values are small integers, so the order of a sum does not change it.

A check fails if the results differ, or if the call raises only on the GPU. The exit status is then
1.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from placed import S0, S1, P, Placements, R, named
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hp_dtensor import Axis, TorchCollectives, clip_grad_norm_, redistribute

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Rows, World, main, nccl

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
REDUCTIONS = ("sum", "avg", "max", "min", "prod")
# Redistributions of tensor, sequence and sharded data parallel models.
PAIRS_1D: tuple[tuple[Placements, Placements], ...] = (
    ((S0,), (R,)),
    ((S1,), (R,)),
    ((R,), (S0,)),
    ((R,), (S1,)),
    ((S0,), (S1,)),
    ((S1,), (S0,)),
    ((P,), (R,)),
    ((P,), (S0,)),
    ((P,), (S1,)),
)
PAIRS_2D: tuple[tuple[Placements, Placements], ...] = (
    ((S0, R), (R, R)),
    ((R, S0), (R, R)),
    ((S0, S1), (R, R)),
    ((S0, S0), (R, R)),
    ((S0, S1), (S1, S0)),
    ((S0, R), (R, S0)),
    ((S0, S0), (S0, R)),
    ((P, S0), (R, S0)),
    ((P, P), (R, R)),
    ((P, S1), (S0, S1)),
    ((S0, P), (S0, S1)),
)
Call = Callable[[TorchCollectives, Axis, torch.device, torch.dtype], list[Tensor]]


def filled(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the numbers 0, 1 and 2 on the device. Ranks have different values."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 7 + 5 * dist.get_rank()) % 3
    return values.reshape(shape).to(dtype).to(device)


def gathered(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
    """Gather one tensor, then three in one call. One of the three has no elements."""
    alone = c.all_gather(axis, [filled((3, 2), device, dtype)]).wait()
    shapes = ((5,), (0, 4), (2, 3, 2))
    return alone + c.all_gather(axis, [filled(shape, device, dtype) for shape in shapes]).wait()


def scattered(op: Any) -> Call:
    """Return a function that reduce-scatters one tensor, then two in one call."""

    def call(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
        n = axis.size
        one = c.reduce_scatter(axis, [filled((2 * n, 3), device, dtype)], op=op).wait()
        both = [filled((n, 5), device, dtype), filled((3 * n,), device, dtype)]
        return one + c.reduce_scatter(axis, both, op=op).wait()

    return call


def reduced(op: Any) -> Call:
    """Return a function that all-reduces one tensor, then two in one call."""

    def call(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
        one = c.all_reduce(axis, [filled((7,), device, dtype)], op=op).wait()
        both = [filled((3, 5), device, dtype), filled((1,), device, dtype)]
        return one + c.all_reduce(axis, both, op=op).wait()

    return call


def exchanged(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
    """Exchange equal blocks, then blocks of unequal lengths. Some of these are empty."""
    n, me = axis.size, axis.index
    equal = c.all_to_all(axis, filled((2 * n, 3), device, dtype)).wait()
    sent, received = [(me + to) % 3 for to in range(n)], [(me + of) % 3 for of in range(n)]
    rows = filled((sum(sent), 3), device, dtype)
    return equal + c.all_to_all(axis, rows, sent, received).wait()


def passed_on(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
    """Send one tensor to the next rank, then two in one call."""
    n, me = axis.size, axis.index
    after, before = (me + 1) % n, (me - 1) % n
    out = torch.empty(4, 3, device=device, dtype=dtype)
    c.send_recv(axis, {after: filled((4, 3), device, dtype)}, {before: out}).wait()
    both = [
        torch.empty(2, device=device, dtype=dtype),
        torch.empty(1, 5, device=device, dtype=dtype),
    ]
    given = [filled((2,), device, dtype), filled((1, 5), device, dtype)]
    c.send_recv(axis, {after: given}, {before: both}).wait()
    return [out, *both]


def copied(c: TorchCollectives, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
    """Broadcast from the last rank: a plain tensor and one that is not contiguous."""
    both = [filled((6,), device, dtype), filled((4, 3), device, dtype).t()]
    return c.broadcast(axis, both, source=axis.size - 1).wait()


CALLS: dict[str, Call] = {
    "all_gather": gathered,
    "all_to_all": exchanged,
    "send_recv": passed_on,
    "broadcast": copied,
    **{f"reduce_scatter, {op}": scattered(op) for op in REDUCTIONS},
    **{f"all_reduce, {op}": reduced(op) for op in REDUCTIONS},
}


def outcome(call: Call, axis: Axis, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the bytes of a call's results on the CPU, or the error's type."""
    try:
        found = call(TorchCollectives(), axis, device, dtype)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return error
    return [out.cpu().contiguous().view(torch.uint8).tolist() for out in found]


def every_dtype(name: str, pair: tuple[Axis, Axis], device: torch.device) -> str:
    """Return the number of dtypes with the same bits as on the CPU. Raise if any differs."""
    equal, refused, wrong = [], [], []
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        here = outcome(CALLS[name], pair[0], device, dtype)
        there = outcome(CALLS[name], pair[1], torch.device("cpu"), dtype)
        if isinstance(here, Exception) and isinstance(there, Exception):
            refused.append(short)
        elif isinstance(here, Exception):
            wrong.append(f"{short}: {type(here).__name__}: {str(here)[:120]}")
        elif isinstance(there, Exception):
            equal.append(f"{short} (the CPU refuses it)")
        elif here == there:
            equal.append(short)
        else:
            wrong.append(f"{short}: other values")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return f"{len(equal)} dtypes equal" + (
        f"; refused on both: {', '.join(refused)}" if refused else ""
    )


def mixed(pair: tuple[Axis, Axis], device: torch.device) -> str:
    """Reduce, gather and send tensors of several dtypes in one call each."""
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.float64)

    def calls(axis: Axis, on: torch.device) -> list[Any]:
        c, n, me = TorchCollectives(), axis.size, axis.index
        given = [filled((2 * n, 3), on, dtype) for dtype in kinds]
        out = c.all_gather(axis, given).wait() + c.reduce_scatter(axis, given).wait()
        into = [torch.empty_like(each) for each in given]
        out += c.send_recv(axis, {(me + 1) % n: given}, {(me - 1) % n: into}).wait()
        return [t.cpu().tolist() for t in [*out, *c.all_reduce(axis, given).wait()]]

    assert calls(pair[0], device) == calls(pair[1], torch.device("cpu")), "other values"
    return "equal"


def laid_out(mesh: DeviceMesh, placements: Placements, device: torch.device) -> DTensor:
    """Return a 12 x 10 tensor of integers in a layout. Ranks differ along partial axes only."""
    whole = (torch.arange(120.0).reshape(12, 10) % 11).to(device)
    coordinate = mesh.get_coordinate() or []
    local = whole
    for axis, placement in enumerate(placements):
        if placement == P:
            local = local + coordinate[axis]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.tensor_split(mesh.size(axis), placement.dim)[coordinate[axis]]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, shape=whole.shape, stride=whole.stride()
    )


def moved(meshes: tuple[DeviceMesh, DeviceMesh], source: Placements, target: Placements) -> str:
    """Redistribute a tensor, forward and backward."""

    def both(mesh: DeviceMesh) -> list[Any]:
        x = laid_out(mesh, source, torch.device(mesh.device_type)).requires_grad_()
        y = redistribute(x, target)
        assert isinstance(y, DTensor)
        (y * 2).sum().full_tensor().backward()  # type: ignore[attr-defined]
        assert isinstance(x.grad, DTensor)
        return [y.to_local().cpu().tolist(), x.grad.to_local().cpu().tolist()]

    assert both(meshes[0]) == both(meshes[1]), "other values"
    return "equal, and so is the gradient"


def norms(meshes: tuple[DeviceMesh, DeviceMesh], kind: float) -> str:
    """Clip gradients that are sharded by rows, sharded by columns, and replicated."""

    def clipped(mesh: DeviceMesh) -> tuple[float, list[Tensor]]:
        found = []
        for placement in (S0, S1, R):
            spread = laid_out(mesh, (placement,) * mesh.ndim, torch.device(mesh.device_type))
            parameter = nn.Parameter(spread)
            parameter.grad = spread.detach() * 3
            found.append(parameter)
        norm: Any = clip_grad_norm_(found, max_norm=1.0, norm_type=kind)
        grads = [p.grad.to_local().cpu() for p in found if isinstance(p.grad, DTensor)]
        return float(norm), grads

    here, there = (clipped(mesh) for mesh in meshes)
    torch.testing.assert_close(here[0], there[0], rtol=1e-6, atol=0)
    for one, other in zip(here[1], there[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    return f"{here[0]:.6f}, on CPUs {there[0]:.6f}"


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    names = tuple("abc"[: len(world.shape)])
    meshes = tuple(
        init_device_mesh(kind, world.shape, mesh_dim_names=names) for kind in (device.type, "cpu")
    )
    pair = (Axis.of(meshes[0], names[-1]), Axis.of(meshes[1], names[-1]))
    for name in CALLS:
        rows.add(name, every_dtype, name, pair, device)
    rows.add("several dtypes in one call", mixed, pair, device)
    for source, target in PAIRS_1D if len(names) == 1 else PAIRS_2D:
        rows.add(f"{named(source)} to {named(target)}", moved, meshes, source, target)
    for kind in (2.0, 1.0, float("inf")):
        rows.add(f"clip_grad_norm_, {kind:g}", norms, meshes, kind)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return all worlds, also worlds that this machine cannot run. On CPUs, return one."""
    if not on_gpu:
        return [World("2 x 2 ranks, gloo", "gloo", (2, 2))]
    gpus = torch.cuda.device_count()
    return [
        World("1 rank", nccl(on_gpu)),
        World("2 ranks, gloo", "gloo", (2,)),
        World("2 x 2 ranks, gloo", "gloo", (2, 2)),
        World(
            f"{max(2, gpus)} ranks, NCCL",
            nccl(on_gpu),
            (max(2, gpus),),
            None if gpus > 1 else "it needs 2 GPUs",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("hp-dtensor", __doc__, worlds_of, checks))
