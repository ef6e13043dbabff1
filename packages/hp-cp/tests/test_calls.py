"""Calls: which collectives, what they receive, and no state between or beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_cp import (
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_dtensor import RecordingCollectives, SimulatedCollectives, SimulatedWorld

from .strategies import inputs, leaves, single, with_gradients

CAUSAL = MaskSpec(causal=True)
MODES = [("gather", 1), ("direct", 1), ("ring", 1), ("direct", 2)]


def cp_mesh(n: int) -> DeviceMesh:
    return cached("cp", lambda: init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)))


def counted(
    rank: int, n: int, seq_len: int, options: dict[str, Any]
) -> tuple[dict[tuple[str, str], int], int]:
    """Return the calls of a forward and backward, and the bytes that they received."""
    tensors = inputs(4, 4, seq_len)
    mine = list(Zigzag().indices(n, seq_len)[rank])
    q, k, v, grad = (x[:, :, mine] for x in tensors)
    record = RecordingCollectives()
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=CAUSAL,
        layout=Zigzag(),
        seq_len=seq_len,
        collectives=record,
        **options,
    )
    out.backward(grad)
    received = sum(traffic.bytes for traffic in record.by_axis.values())
    return {key: traffic.calls for key, traffic in record.by_call.items()}, received


@pytest.mark.parametrize(
    ("options", "seq_len", "calls"),
    [
        ({"schedule": "gather"}, 16, {"all_gather": 1, "exchange": 3}),
        ({"schedule": "gather"}, 15, {"exchange": 4}),
        ({"schedule": "gather", "keep_kv": False}, 16, {"all_gather": 2, "exchange": 3}),
        ({"schedule": "direct"}, 16, {"exchange": 9}),
        ({"schedule": "direct", "keep_kv": True}, 16, {"exchange": 6}),
        ({"schedule": "ring"}, 16, {"exchange": 9}),
        ({"schedule": "double_ring"}, 16, {"exchange": 9}),
        ({"ulysses_degree": 4}, 16, {"all_to_all": 4}),
        ({"ulysses_degree": 2}, 16, {"all_to_all": 4, "exchange": 3}),
    ],
)
def test_a_forward_and_backward_make_the_documented_calls_and_receive_the_planned_bytes(
    ranks: Any, options: dict[str, Any], seq_len: int, calls: dict[str, int]
) -> None:
    shape: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 4, "head_size": 8, "itemsize": 8}
    plan = plan_attention(
        CAUSAL, Zigzag(), 4, seq_len, **{"schedule": "direct", **options}, **shape
    )
    answers = ranks(4).run(counted, 4, seq_len, options)
    for rank, (made, received) in enumerate(answers):
        assert made == {("cp", name): number for name, number in calls.items()}
        assert received == plan.bytes_received(rank)


def forward_only(rank: int, schedule: Any) -> tuple[int, bool]:
    record = RecordingCollectives()
    q, k, v, _ = (x.chunk(4, 2)[rank] for x in inputs(4, 4, 16))
    with torch.no_grad():
        out = context_parallel_attention(
            q.requires_grad_(), k, v, cp_mesh(4), mask=CAUSAL, schedule=schedule, collectives=record
        )
    return sum(traffic.calls for traffic in record.by_axis.values()), out.requires_grad


@pytest.mark.parametrize(("schedule", "calls"), [("gather", 1), ("direct", 3), ("ring", 3)])
def test_without_gradients_only_the_forward_communicates(
    ranks: Any, schedule: str, calls: int
) -> None:
    assert ranks(4).run(forward_only, schedule) == [(calls, False)] * 4


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(x for x in lines if x.strip().startswith("lo:")).partition(":")[2].split()[0])


def carried(rank: int, seq_len: int, schedule: Any, degree: int) -> tuple[int, int]:
    """Return what the loopback device carried for one forward and backward, and what was counted.

    The sequence is long enough for other traffic of the machine not to matter.
    """
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in inputs(4, 4, seq_len, size=64))
    record = RecordingCollectives()

    def once(collectives: RecordingCollectives) -> None:
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(2),
            mask=MaskSpec(causal=True, window=8),
            ulysses_degree=degree,
            schedule=schedule,
            collectives=collectives,
        )
        out.backward(grad)

    once(RecordingCollectives())  # connects
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    once(record)
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return after - before, sum(traffic.bytes for traffic in record.by_axis.values())


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="needs Linux's counters")
@pytest.mark.parametrize(("schedule", "degree"), [("gather", 1), ("ring", 1), ("direct", 2)])
def test_the_loopback_device_carries_what_is_counted(
    ranks: Any, schedule: str, degree: int
) -> None:
    # Others use the device, too: some round has it to itself.
    least, payload = None, 0
    for _ in range(12):
        answers = ranks(2).run(carried, 4096, schedule, degree)
        payload = sum(received for _, received in answers)
        seen = max(seen for seen, _ in answers)
        least = seen if least is None else min(least, seen)
        if least <= 1.05 * payload:
            break
    assert least is not None
    assert payload <= least <= 1.05 * payload


def crossed(
    rank: int, n: int, schedule: Any, degree: int, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """Two forwards, then their backwards in the opposite order of a stack."""
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)
    calls = []
    for scale in (1.0, 0.5):
        local = leaves(q * scale, k, v)
        out = context_parallel_attention(
            *local, cp_mesh(n), mask=CAUSAL, schedule=schedule, ulysses_degree=degree
        )
        calls.append((out, local))
    return [x for out, local in calls for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize(("schedule", "degree"), MODES)
def test_two_forwards_in_flight_do_not_see_each_other(
    ranks: Any, schedule: str, degree: int
) -> None:
    tensors = inputs(4, 2, 16)
    per_rank = ranks(4).run(crossed, 4, schedule, degree, tensors)
    together = [torch.cat(parts, 2) for parts in zip(*per_rank, strict=True)]
    q, k, v, grad = tensors
    expected = [*single((q, k, v, grad), CAUSAL), *single((q * 0.5, k, v, grad), CAUSAL)]
    for result, reference in zip(together, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


class Failing:
    """A backend that fails on every rank at its ``at``-th block."""

    name = "failing"

    def __init__(self, inner: Any, at: int) -> None:
        self._inner = inner
        self._left = at

    def supports(self, *args: Any) -> None:
        """Support everything."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a kernel failed")
        return self._inner.forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a kernel failed")
        return self._inner.backward(*args, **options)


def failing_once(
    rank: int, n: int, schedule: Any, degree: int, at: int, tensors: tuple[Tensor, ...]
) -> tuple[str, list[Tensor]]:
    from hp_cp.backends._sdpa import SdpaBackend

    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)

    def run(backend: Any) -> list[Tensor]:
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(n),
            mask=MaskSpec(causal=False),
            schedule=schedule,
            ulysses_degree=degree,
            backend=backend,
        )
        return with_gradients(out, local, grad)

    try:
        run(Failing(SdpaBackend(), at))
    except RuntimeError as error:
        return str(error), run("sdpa")
    return "nothing failed", []


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("schedule", ["gather", "direct", "ring"])
def test_after_an_exception_in_forward_or_backward_the_next_call_is_right(
    ranks: Any, schedule: str, at: int
) -> None:
    tensors = inputs(4, 2, 16)
    answers = ranks(4).run(failing_once, 4, schedule, 1, at, tensors)
    assert [said for said, _ in answers] == ["a kernel failed"] * 4
    expected = single(tensors, MaskSpec(causal=False))
    for parts, reference in zip(
        zip(*(results for _, results in answers), strict=True), expected, strict=True
    ):
        torch.testing.assert_close(torch.cat(parts, 2), reference, rtol=0, atol=1e-13)


def checkpointed(
    rank: int, n: int, schedule: Any, degree: int, reentrant: bool, tensors: tuple[Tensor, ...]
) -> list[list[Tensor]]:
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q, k, v, cp_mesh(n), mask=CAUSAL, schedule=schedule, ulysses_degree=degree
        )

    results = []
    for again in (False, True):
        local = leaves(q, k, v)
        out = checkpoint(attention, *local, use_reentrant=reentrant) if again else attention(*local)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in local if x.grad is not None)])
    return results


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("schedule", "degree"), MODES)
def test_activation_checkpointing_changes_nothing(
    ranks: Any, schedule: str, degree: int, reentrant: bool
) -> None:
    tensors = inputs(4, 2, 16)
    for plain, again in ranks(4).run(checkpointed, 4, schedule, degree, reentrant, tensors):
        assert len(plain) == 4
        assert all(map(torch.equal, plain, again))


def other_dims(
    rank: int, n: int, degree: int, seq_dim: int, head_dim: int, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    back = [order.index(dim) for dim in range(4)]
    q, k, v, grad = (x.chunk(n, 2)[rank].permute(back) for x in tensors)
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=CAUSAL,
        ulysses_degree=degree,
        scale=0.3,
        seq_dim=seq_dim,
        head_dim=head_dim,
    )
    return [x.permute(order) for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("seq_dim", "head_dim"), [(1, 2), (0, 2), (0, 1)])
def test_any_order_of_dims_and_any_scale(
    ranks: Any, degree: int, seq_dim: int, head_dim: int
) -> None:
    q, k, v, grad = inputs(4, 2, 16, batch=3)
    per_rank = ranks(2).run(other_dims, 2, degree, seq_dim, head_dim, (q, k, v, grad))
    whole = leaves(q, k, v)
    reference = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    expected = with_gradients(reference, whole, grad)
    for parts, right in zip(zip(*per_rank, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right, rtol=0, atol=1e-13)


def under_autocast(rank: int, degree: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in tensors)
    local = leaves(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*local, cp_mesh(2), mask=CAUSAL, ulysses_degree=degree)
    return with_gradients(out, local, grad.to(out.dtype))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_as_it_casts_sdpa(ranks: Any, dtype: torch.dtype, degree: int) -> None:
    tensors = inputs(2, 2, 8, dtype=dtype)
    whole = leaves(*tensors[:3])
    with torch.autocast("cpu", torch.bfloat16):
        reference = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = with_gradients(reference, whole, tensors[3].to(reference.dtype))
    parts = zip(*ranks(2).run(under_autocast, degree, tensors), strict=True)
    # Values up to 4 have a last place of 2 eps; both sides round, to q, k, v's and to this dtype.
    atol = 1e-13 if dtype == torch.float64 else 4 * torch.finfo(torch.bfloat16).eps
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(part, 2), right, rtol=0, atol=atol)


def test_one_rank_is_sdpa_without_communication() -> None:
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    record = RecordingCollectives(door)
    q, k, v, grad = inputs(4, 2, 9)
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local, door.mesh((1,), ("cp",)), mask=CAUSAL, layout=Zigzag(), collectives=record
    )
    results = with_gradients(out, local, grad)
    assert all(map(torch.equal, results, single((q, k, v, grad), CAUSAL)))
    assert record.by_axis == {}
