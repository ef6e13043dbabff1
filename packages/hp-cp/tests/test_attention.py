"""Attention over all ranks equals attention in one process, forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_cp import (
    BackendError,
    ContextParallelError,
    Contiguous,
    DegreeError,
    InputError,
    Layout,
    LayoutError,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_dtensor import RecordingCollectives, SimulatedCollectives, SimulatedWorld

from .strategies import (
    LAYOUTS,
    MASKS,
    Three,
    dense_attention,
    inputs,
    layouts,
    leaves,
    masks,
    with_gradients,
)

CAUSAL = MaskSpec(causal=True)


def cp_mesh(n: int) -> DeviceMesh:
    return cached("cp", lambda: init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)))


# All ranks in one process: any world, any length.


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 5),
    ulysses=st.booleans(),
    seq_len=st.integers(1, 24),
    mask=masks,
    layout=layouts,
    groups=st.integers(1, 3),
    data=st.data(),
)
def test_simulated_ranks_equal_dense_attention_with_the_planned_bytes(
    n: int,
    ulysses: bool,
    seq_len: int,
    mask: MaskSpec,
    layout: Layout,
    groups: int,
    data: st.DataObject,
) -> None:
    degree = n if ulysses else 1
    divisors = [h for h in (1, 2, 3, 4, 5, 8) if degree % h == 0 or h % degree == 0]
    kv_heads = data.draw(st.sampled_from(divisors))
    q_heads = kv_heads * groups * (degree // kv_heads if kv_heads < degree else 1)
    q, k, v, grad = inputs(q_heads, kv_heads, seq_len)
    indices = layout.indices(n, seq_len)

    def rank(rank: int, door: SimulatedCollectives) -> tuple[list[Tensor], int]:
        record = RecordingCollectives(door)
        mine = list(indices[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh((n,), ("cp",)),
            mask=mask,
            layout=layout,
            ulysses_degree=degree,
            seq_len=seq_len,
            collectives=record,
        )
        results = with_gradients(out, local, grad[:, :, mine])
        traffic = record.by_axis.get("cp")
        return results, traffic.bytes if traffic else 0

    whole = leaves(q, k, v)
    expected = with_gradients(dense_attention(*whole, mask), whole, grad)
    plan = plan_attention(
        mask,
        layout,
        n,
        seq_len,
        ulysses_degree=degree,
        batch=2,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=8,
        itemsize=8,
    )
    for i, (results, received) in enumerate(SimulatedWorld(n).run(rank)):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(
                result, reference[:, :, list(indices[i])], rtol=0, atol=1e-13
            )
        assert received == plan.bytes_received(i)


# Real ranks.


def attend(
    rank: int,
    n: int,
    tensors: tuple[Tensor, ...],
    mask: MaskSpec,
    layout: Layout,
    degree: int,
    repeats: int = 1,
) -> list[tuple[list[Tensor], dict[tuple[str, str], int]]]:
    """Run forward and backward on this rank's rows; return results and calls per collective."""
    seq_len = tensors[0].shape[2]
    mine = list(layout.indices(n, seq_len)[rank])
    q, k, v, grad = (x[:, :, mine] for x in tensors)
    answers = []
    for _ in range(repeats):
        record = RecordingCollectives()
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(n),
            mask=mask,
            layout=layout,
            ulysses_degree=degree,
            seq_len=seq_len,
            collectives=record,
        )
        results = with_gradients(out, local, grad)
        answers.append((results, {key: t.calls for key, t in record.by_call.items()}))
    return answers


def on_ranks(
    ranks: Any, n: int, tensors: tuple[Tensor, ...], mask: MaskSpec, layout: Layout, degree: int
) -> list[Tensor]:
    """Return output and gradients, put together in global order."""
    answers = ranks(n).run(attend, n, tensors, mask, layout, degree)
    order = torch.tensor([i for held in layout.indices(n, tensors[0].shape[2]) for i in held])
    parts = zip(*(results for ((results, _),) in answers), strict=True)
    return [torch.cat(part, 2)[:, :, order.argsort()] for part in parts]


def single(tensors: tuple[Tensor, ...], mask: MaskSpec) -> list[Tensor]:
    q, k, v, grad = tensors
    whole = leaves(q, k, v)
    out = F.scaled_dot_product_attention(*whole, is_causal=mask.causal, enable_gqa=True)
    return with_gradients(out, whole, grad)


def errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [(a.double() - b).abs().max().item() for a, b in zip(results, exact, strict=True)]


@pytest.mark.parametrize("seq_len", [64, 37])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("n", [2, 4])
def test_gathered_attention_is_dense_attention_in_fp64(
    ranks: Any, n: int, kv_heads: int, mask: MaskSpec, layout: Layout, seq_len: int
) -> None:
    tensors = inputs(8, kv_heads, seq_len)
    results = on_ranks(ranks, n, tensors, mask, layout, 1)
    whole = leaves(*tensors[:3])
    expected = with_gradients(dense_attention(*whole, mask), whole, tensors[3])
    assert max(errors(results, expected)) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("n", [2, 4])
def test_gathered_attention_is_about_as_exact_as_one_process(
    ranks: Any, n: int, mask: MaskSpec, dtype: torch.dtype
) -> None:
    tensors = inputs(8, 4, 256, size=32, dtype=dtype)
    whole = leaves(*(x.double() for x in tensors[:3]))
    exact = with_gradients(dense_attention(*whole, mask), whole, tensors[3].double())
    allowed = 1.5 if dtype == torch.float32 else 2.0
    ours = errors(on_ranks(ranks, n, tensors, mask, Zigzag(), 1), exact)
    for mine, theirs in zip(ours, errors(single(tensors, mask), exact), strict=True):
        assert mine <= allowed * theirs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq_len", [64, 37])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("n", [2, 4])
def test_ulysses_is_bitwise_one_process(
    ranks: Any, n: int, mask: MaskSpec, layout: Layout, seq_len: int, dtype: torch.dtype
) -> None:
    tensors = inputs(8, 4, seq_len, dtype=dtype)
    results = on_ranks(ranks, n, tensors, mask, layout, n)
    for result, reference in zip(results, single(tensors, mask), strict=True):
        assert torch.equal(result, reference)


def test_ulysses_with_fewer_kv_heads_than_ranks_is_one_process(ranks: Any) -> None:
    tensors = inputs(8, 2, 64)
    out, dq, dk, dv = on_ranks(ranks, 4, tensors, CAUSAL, Zigzag(), 4)
    expected = single(tensors, CAUSAL)
    assert torch.equal(out, expected[0])
    assert torch.equal(dq, expected[1])
    # partial sums over the query heads of a group add in another order
    torch.testing.assert_close(dk, expected[2], rtol=0, atol=1e-13)
    torch.testing.assert_close(dv, expected[3], rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [1, 4])
def test_repeats_are_bitwise_equal(ranks: Any, degree: int) -> None:
    tensors = inputs(8, 4, 128, dtype=torch.float32)
    for answers in ranks(4).run(attend, 4, tensors, CAUSAL, Zigzag(), degree, 5):
        (first, _), *rest = answers
        for results, _ in rest:
            assert all(map(torch.equal, results, first))


@pytest.mark.parametrize(
    ("degree", "seq_len", "calls"),
    [
        (1, 16, {"all_gather": 1, "all_to_all": 1}),
        (1, 15, {"exchange": 1, "all_to_all": 1}),
        (2, 16, {"all_to_all": 4}),
    ],
)
def test_a_forward_and_backward_make_the_documented_calls(
    ranks: Any, degree: int, seq_len: int, calls: dict[str, int]
) -> None:
    tensors = inputs(2, 2, seq_len)
    for ((_, counted),) in ranks(2).run(attend, 2, tensors, CAUSAL, Zigzag(), degree):
        assert counted == {("cp", name): number for name, number in calls.items()}


def crossed(rank: int, n: int, degree: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Two forwards, then their backwards in the opposite order of a stack."""
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)
    calls = []
    for scale in (1.0, 0.5):
        local = leaves(q * scale, k, v)
        out = context_parallel_attention(*local, cp_mesh(n), mask=CAUSAL, ulysses_degree=degree)
        calls.append((out, local))
    return [x for out, local in calls for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize("degree", [1, 2])
def test_two_forwards_in_flight_do_not_see_each_other(ranks: Any, degree: int) -> None:
    tensors = inputs(4, 2, 16)
    per_rank = ranks(2).run(crossed, 2, degree, tensors)
    together = [torch.cat(parts, 2) for parts in zip(*per_rank, strict=True)]
    q, k, v, grad = tensors
    expected = [*single((q, k, v, grad), CAUSAL), *single((q * 0.5, k, v, grad), CAUSAL)]
    for result, reference in zip(together, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


def checkpointed(
    rank: int, n: int, degree: int, reentrant: bool, tensors: tuple[Tensor, ...]
) -> list[list[Tensor]]:
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, cp_mesh(n), mask=CAUSAL, ulysses_degree=degree)

    results = []
    for again in (False, True):
        local = leaves(q, k, v)
        out = checkpoint(attention, *local, use_reentrant=reentrant) if again else attention(*local)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in local if x.grad is not None)])
    return results


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_activation_checkpointing_changes_nothing(ranks: Any, degree: int, reentrant: bool) -> None:
    tensors = inputs(4, 2, 16)
    for plain, again in ranks(2).run(checkpointed, 2, degree, reentrant, tensors):
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


def test_autocast_leaves_integers_to_be_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = (x.int() for x in shapes((1, 4, 8, 8), (1, 4, 8, 8)))
        with torch.autocast("cpu", torch.bfloat16):
            context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=door)

    assert refused(2, call)[0] is BackendError


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


# Errors: on every rank, before any communication.


def refused(n: int, call: Any) -> tuple[type[ContextParallelError], str]:
    """Return the error that every rank of a simulated world raises, having called nothing."""
    caught: list[tuple[type[ContextParallelError], str]] = []

    def rank(rank: int, door: SimulatedCollectives) -> None:
        record = RecordingCollectives(door)
        with pytest.raises(ContextParallelError) as info:
            call(door.mesh((n,), ("cp",)), record)
        caught.append((info.type, str(info.value)))
        assert record.by_axis == {}

    SimulatedWorld(n).run(rank)
    assert len(caught) == n
    assert len(set(caught)) == 1
    return caught[0]


def shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> Three:
    return torch.zeros(q), torch.zeros(k), torch.zeros(k if v is None else v)


@pytest.mark.parametrize(
    ("tensors", "options", "kind", "said"),
    [
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"ulysses_degree": 2}, DegreeError, "or 4 "),
        (shapes((1, 2, 8, 8), (1, 2, 8, 8)), {"ulysses_degree": 4}, DegreeError, "a head"),
        (shapes((1, 6, 8, 8), (1, 6, 8, 8)), {"ulysses_degree": 4}, DegreeError, "evenly"),
        (shapes((1, 4, 8, 8), (1, 3, 8, 8)), {}, DegreeError, "multiple"),
        (shapes((1, 4, 8, 8), (1, 4, 4, 8)), {}, InputError, "cross attention"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 4)), {}, InputError, "head sizes"),
        (shapes((4, 8, 8), (4, 8, 8)), {}, InputError, "4-D"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"seq_dim": 1}, InputError, "different dims"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"seq_dim": 3}, InputError, "different dims"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"schedule": "x"}, LayoutError, "'gather'"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"layout": "zigzag"}, LayoutError, "use Contiguous()"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": True}, LayoutError, "use MaskSpec("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": None}, LayoutError, "use MaskSpec("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": "causal"}, LayoutError, "use MaskSpec("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"backend": "x"}, BackendError, "'sdpa'"),
    ],
)
def test_what_does_not_fit_is_named_before_any_communication(
    tensors: Three, options: dict[str, Any], kind: type[ContextParallelError], said: str
) -> None:
    options = {"mask": CAUSAL, **options}

    def call(mesh: Any, door: Any) -> None:
        context_parallel_attention(*tensors, mesh, collectives=door, **options)

    raised, text = refused(4, call)
    assert raised is kind
    assert said in text


def test_a_length_that_the_layout_does_not_give_names_both() -> None:
    door = SimulatedCollectives(SimulatedWorld(4), 2)
    with pytest.raises(InputError) as info:
        context_parallel_attention(
            *shapes((1, 1, 1024, 8), (1, 1, 1024, 8)),
            door.mesh((4,), ("cp",)),
            mask=CAUSAL,
            layout=Zigzag(),
            seq_len=8192,
            collectives=door,
        )
    assert str(info.value).startswith(
        "q has 1024 local tokens but Zigzag(n=4, S=8192) gives rank 2 2048; "
        "shard with shard_sequence first"
    )


def test_unequal_dtypes_are_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = shapes((1, 4, 8, 8), (1, 4, 8, 8))
        context_parallel_attention(q.double(), k, v, mesh, mask=CAUSAL, collectives=door)

    assert refused(2, call)[0] is InputError


def test_a_dtype_without_kernel_is_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = (x.to(torch.complex64) for x in shapes((1, 4, 8, 8), (1, 4, 8, 8)))
        context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=door)

    raised, text = refused(2, call)
    assert raised is BackendError
    assert "'sdpa' cannot compute causal attention of torch.complex64 on cpu" in text


def test_a_mesh_of_two_axes_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((2, 2), ("outer", "ulysses"))
    with pytest.raises(DegreeError, match="one axis"):
        context_parallel_attention(
            *shapes((1, 4, 8, 8), (1, 4, 8, 8)), mesh, mask=CAUSAL, layout=Contiguous()
        )
