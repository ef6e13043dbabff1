"""Kernels and whole calls on CUDA tensors without values: shapes, and no waiting of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool.fake_cuda import (
    HostWaitError,
    ShapeCollectives,
    fake_cuda,
    recorded_functions,
)
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from hp_cp import Contiguous, MaskSpec, ScoreOptions, Zigzag, context_parallel_attention
from hp_cp._mesh import axes_of
from hp_cp.kernels._eager import EAGER, EagerBackend
from hp_cp.kernels._interface import Dropout, Places
from hp_cp.kernels._varlen import VARLEN
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

SHAPES: Any = ShapeCollectives()


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda x: x[0].item(), DataDependentOutputException),
        (Tensor.tolist, RuntimeError),  # of torch's, whether fake tensors have the method or not
        (lambda x: bool((x > 0).any()), DataDependentOutputException),
        (lambda x: torch.equal(x, x), DataDependentOutputException),
        (Tensor.cpu, HostWaitError),
        (lambda x: torch.zeros(2).copy_(x), HostWaitError),
        (lambda x: torch.tensor([1, 2], device=x.device), HostWaitError),
        (lambda x: x[[0, 1]], HostWaitError),
        (Tensor.nonzero, DynamicOutputShapeException),
        (lambda x: x[x > 0], DynamicOutputShapeException),
        (lambda x: x.repeat_interleave(x.long()), DynamicOutputShapeException),
        (torch.unique, DynamicOutputShapeException),
    ],
)
def test_whatever_waits_for_the_device_raises(
    read: Callable[[Tensor], object], error: type[Exception]
) -> None:
    with fake_cuda() as cuda, pytest.raises(error):
        read(torch.ones(2, device=cuda))


@pytest.mark.parametrize(
    "free",
    [
        lambda x: torch.full((2,), 3, device=x.device),
        lambda x: torch.where(x > 0, x, 2.0)[1:],
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.to(x.device, torch.bfloat16),
    ],
)
def test_what_the_device_does_alone_is_allowed(free: Callable[[Tensor], object]) -> None:
    with fake_cuda() as cuda:
        free(torch.ones(2, device=cuda))


def tensors(
    device: torch.device, dtype: torch.dtype, rows: int, keys: int, value_size: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    def made(heads: int, length: int, size: int) -> Tensor:
        return torch.empty(2, heads, length, size, dtype=dtype, device=device)

    return made(8, rows, 64), made(2, keys, 64), made(2, keys, value_size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_eager_kernel_reads_nothing(causal: bool, masked: bool) -> None:
    with fake_cuda() as cuda:
        q, k, v = tensors(cuda, torch.bfloat16, 24, 24, 48)
        every = torch.arange(24, device=cuda).expand(2, 1, -1)
        places = Places(every[:, :, :1], every, every, torch.arange(8, device=cuda))
        options = ScoreOptions(softcap=20.0)
        if masked:
            options = ScoreOptions(
                dropout=Dropout(rate=0.1, seed=3), mask_mod=lambda b, h, i, j: (i + j) % 2 == 0
            ).at(places)
        out, lse = EAGER.forward(q, k, v, causal=causal, options=options)
        grads = EAGER.backward(out, q, k, v, out, lse, causal=causal, options=options)
    assert (out.shape, out.dtype, out.device) == ((2, 8, 24, 48), q.dtype, cuda)
    assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], torch.float32, cuda)
    assert [(x.shape, x.dtype, x.device) for x in grads] == [
        (x.shape, x.dtype, cuda) for x in (q, k, v)
    ]


def test_packed_blocks_read_nothing() -> None:
    with fake_cuda() as cuda:
        q, k, v = tensors(cuda, torch.bfloat16, 24, 36)
        given = [10, 14], [20, 16]
        kind: Any = {"causal": False, "options": ScoreOptions()}
        out, lse = VARLEN.forward_packed(q, k, v, *given, **kind)
        grads = VARLEN.backward_packed(out, q, k, v, out, lse, *given, **kind)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


LONG = {"seq_len": 64, "layout": Zigzag()}
CALLS: dict[str, dict[str, Any]] = {
    "direct": {"mask": MaskSpec(causal=True), **LONG},
    "gather": {"mask": MaskSpec(causal=True), "schedule": "gather", **LONG},
    "gather again": {
        "mask": MaskSpec(causal=True),
        "schedule": "gather",
        "keep_kv": False,
        **LONG,
    },
    "ring": {"mask": MaskSpec(causal=False), "schedule": "ring", **LONG},
    "ulysses": {"mask": MaskSpec(causal=True), "ulysses_degree": 2, **LONG},
    "window": {"mask": MaskSpec(causal=True, window=9), **LONG},
    "documents": {
        "mask": MaskSpec(causal=True, cu_seqlens=(0, 9, 40, 64)),
        "layout": Contiguous(),
    },
    "each row's documents": {
        "mask": MaskSpec(causal=True, cu_seqlens=((0, 9, 40, 64), (0, 64))),
        "layout": Contiguous(),
    },
    "sinks": {"mask": MaskSpec(causal=True), "return_lse": True, "sinks": True, **LONG},
}


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "eager"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_backward_read_nothing(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend": backend, **CALLS[name]}
    door = SimulatedCollectives(SimulatedWorld(4), 1)
    two = name == "ulysses"
    mesh = door.mesh((2, 2), ("cp", "u")) if two else door.mesh((4,), ("cp",))
    # A mesh has its ranks in a tensor: look them up where tensors have values.
    groups = [axis.group for axis in axes_of(mesh)]
    monkeypatch.setattr(mesh, "get_group", lambda position: groups[position])
    with fake_cuda() as cuda, recorded_functions() as nodes:
        q, k, v = tensors(cuda, torch.bfloat16, 16, 16)
        if options.pop("sinks", False):
            options["sinks"] = torch.empty(8, device=cuda)
        found = context_parallel_attention(
            q, k, v, mesh, collectives=SHAPES, fuse_merges=False, **options
        )
        out, *lse = found if isinstance(found, tuple) else (found,)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, cuda)
        assert [(x.shape, x.device) for x in lse] == [(q.shape[:3], cuda)] * len(lse)
        assert nodes
        for node in reversed(nodes):
            for given, grad in zip(node.args, node.backward(), strict=True):
                if isinstance(given, Tensor) and grad is not None:
                    assert (grad.shape, grad.dtype, grad.device) == (
                        given.shape,
                        given.dtype,
                        cuda,
                    )


def test_a_kernel_that_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagerBackend.forward

    def reading(self: EagerBackend, *given: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(self, *given, **how)
        return (out.zero_() if bool((lse == -torch.inf).any()) else out), lse

    monkeypatch.setattr(EagerBackend, "forward", reading)
    with pytest.raises(DataDependentOutputException):
        test_a_call_and_its_backward_read_nothing("direct", "eager", monkeypatch)
