"""Order between the computation and the stream of NCCL, which carries the exchanges."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
from rank_pool import RankPool, cached
from rank_pool.streams import Device, Nccl, Stream
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_cp import MaskSpec, Zigzag, context_parallel_attention
from hp_dtensor import TorchCollectives

from .strategies import inputs

Ranks = Callable[[int], RankPool]
Break = Callable[[], AbstractContextManager[Any]]
CALLS: dict[str, dict[str, Any]] = {
    "direct": {},
    "gather": {"schedule": "gather"},
    "gather again": {"schedule": "gather", "keep_kv": False},
    "ring": {"schedule": "ring"},
    "ulysses": {"ulysses_degree": 2},
    "window": {"mask": MaskSpec(causal=True, window=5)},
    "mask function": {"mask": MaskSpec(causal=True, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0)},
    "ragged documents": {"mask": MaskSpec(causal=True, cu_seqlens=(0, 5, 16))},
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("cp", "u")[: len(shape)]
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def step(rank: int, name: str, collectives: Any) -> list[Tensor]:
    options = {"mask": MaskSpec(causal=True), "layout": Zigzag(), **CALLS[name]}
    found = []
    for seed in range(2):
        mine = Zigzag().indices(2, 16, options["mask"])[rank]
        q, k, v, grad = (x[:, :, list(mine)] for x in inputs(4, 2, 16, seed=seed))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        shape = (1, 2) if name == "ulysses" else (2,)
        attend: Any = context_parallel_attention
        out = attend(*leaves, mesh_of(shape), seq_len=16, collectives=collectives, **options)
        out.backward(grad)
        found += [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
    return found


def simulated(rank: int, name: str, broken: Break = nullcontext) -> tuple[float, list[str], int]:
    """Return the difference to plain calls, the races, and the number of communications."""
    expected = step(rank, name, TorchCollectives())
    device = Device()
    with broken(), device:
        found = step(rank, name, Nccl(device, TorchCollectives()))
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    calls = ("all_gather", "all_to_all", "send_recv", "reduce_scatter")
    return worst, device.races, sum(what in calls for _, what in device.log)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_nothing_unordered(ranks: Ranks, name: str) -> None:
    for worst, races, calls in ranks(2).run(simulated, name):
        assert worst == 0
        assert races == []
        assert calls >= 4


def no_wait() -> AbstractContextManager[Any]:
    """Start the computation before the exchange has completed."""
    return mock.patch.object(Stream, "wait_event", return_value=None)


@pytest.mark.parametrize("name", ["direct", "gather", "ring", "ulysses"])
def test_a_missing_wait_and_memory_that_is_reused_too_early_are_found(
    ranks: Ranks, name: str
) -> None:
    for _, races, _ in ranks(2).run(simulated, name, no_wait):
        assert any("on compute beside" in race for race in races)
        assert any("lends memory again in which nccl has" in race for race in races)
