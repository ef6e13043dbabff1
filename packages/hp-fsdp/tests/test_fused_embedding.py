"""Embeddings whose gradients are added to the packed gradients row by row."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from hp_fsdp import fully_shard
from hp_fsdp._gradients import GradientBucket, can_fuse
from hp_fsdp._offsets import ShardSpec, rows_by_rank
from hp_fsdp._tags import tag_flags

from .models import Gradients, full, gradients, make, mesh_of, worst

TAG = torch.tensor(tag_flags(5), dtype=torch.float64)

Ranks = Callable[[int], RankPool]


def bucket_of(shapes: list[tuple[int, ...]], degree: int) -> GradientBucket:
    specs = [ShardSpec(shape=shape, dim=0, degree=degree) for shape in shapes]
    rows = rows_by_rank(specs, 0, 8)
    return GradientBucket(rows, torch.full((rows.numel,), torch.nan, dtype=torch.float64))


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 7), st.integers(1, 3)
)
def test_rows_are_added_as_the_dense_gradient_would_be(
    vocabulary: int, inner: int, degree: int, tokens: int, times: int
) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (vocabulary, inner), (2, 2)]
    bucket, other = bucket_of(shapes, degree), bucket_of(shapes, degree)
    for _ in range(times):
        ids = torch.randint(0, vocabulary, (tokens,))
        rows = torch.randint(-9, 9, (tokens, inner)).double()
        bucket.add_rows(1, ids, rows)
        dense = torch.zeros(vocabulary, inner, dtype=torch.float64)
        for i, row in zip(ids.tolist(), rows, strict=True):
            dense[i] += row
        other.add(1, dense)
    assert torch.equal(bucket.finish(TAG), other.finish(TAG))


class Table(nn.Module):
    """An embedding with a row of padding, whose weight is also that of the layer at the end."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=2)
        self.end = nn.Linear(4, 10, bias=False)
        if tied:
            self.end.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits for ids ``[batch, tokens]``."""
        return cast(Tensor, self.end(torch.tanh(self.table(ids))))


class Dense(TorchDispatchMode):
    """Counts whole gradients of tables."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        self.count += "embedding_dense_backward" in func.name()
        return func(*args, **(kwargs or {}))


def ids_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 10, (2, 7), generator=generator)


def trained(rank: int, tied: bool, options: dict[str, Any]) -> tuple[Gradients, Gradients, int]:
    """Return the gradients of two microbatches, the right ones, and the dense gradients made."""
    model: Any = make(lambda: Table(tied))
    fully_shard(model, mesh_of((4,), ("fsdp",)), grads="fused", direct_bytes=0, **options)
    seen = Dense()
    with model.no_sync():
        model(ids_of(rank, 0)).pow(2).sum().backward()
    with seen:
        model(ids_of(rank, 1)).pow(2).sum().backward()
    plain = make(lambda: Table(tied))
    for step, replica in itertools.product(range(2), range(4)):
        plain(ids_of(replica, step)).pow(2).sum().backward()
    return gradients(model), {n: g / 4 for n, g in gradients(plain).items()}, seen.count


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_gradients_equal_one_process_and_none_is_made_whole(
    ranks: Ranks, tied: bool, layout: str
) -> None:
    for found, expected, dense in ranks(4).run(trained, tied, {"layout": layout}):
        assert worst(found, expected) < 1e-12
        assert dense == 0


class Alone(nn.Module):
    """A table and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows."""
        return cast(Tensor, self.table(ids))


def summed(rank: int) -> tuple[Tensor, Tensor]:
    """Add 300 ones to one row: bf16 has no 257."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = make(Alone, torch.float32)
    fully_shard(model, mesh_of((2,), ("fsdp",)), grads="fused", direct_bytes=0, mp_policy=policy)
    model(torch.zeros(1, 300, dtype=torch.long)).sum().backward()
    found = full(model.table.weight.grad)
    return found[0], found[1:]


def test_rows_are_summed_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    for first, others in ranks(2).run(summed):
        assert first.tolist() == [300.0] * 4
        assert not others.any()


def returned(rank: int) -> tuple[Tensor, Tensor, bool]:
    """Ask autograd for the gradient of the gathered table instead of letting it add up."""
    model: Any = make(Alone)
    fully_shard(model, mesh_of((2,), ("fsdp",)), grads="fused", direct_bytes=0)
    model.unshard()
    weight = model.table.weight
    (found,) = torch.autograd.grad(model.table(ids_of(0, 0)).sum(), weight)
    expected = torch.zeros(10, 4, dtype=torch.float64)
    for i in ids_of(0, 0).flatten().tolist():
        expected[i] += 1
    model.reshard()
    model(ids_of(rank, 1)).sum().backward()
    clean = make(Alone)
    for replica in range(2):
        clean(ids_of(replica, 1)).sum().backward()
    after = {name: gradient / 2 for name, gradient in gradients(clean).items()}
    return found, expected, worst(gradients(model), after) < 1e-12


def test_a_gradient_that_is_to_be_returned_is_not_added(ranks: Ranks) -> None:
    for found, expected, clean in ranks(2).run(returned):
        assert torch.equal(found, expected)
        assert clean


def test_tables_that_renormalise_weigh_or_are_sparse_stay_as_they_are() -> None:
    assert can_fuse(nn.Embedding(3, 2, padding_idx=0), "weight")
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        assert not can_fuse(nn.Embedding(3, 2, **cast(Any, options)), "weight")
    assert not can_fuse(nn.Linear(2, 2), "bias")


def often(rank: int, grads: Any, layout: Any, dtypes: tuple[Any, Any]) -> tuple[float, bool]:
    """Return the gradient of a row that a batch has 4,096 times, and whether it is fused."""
    mesh = mesh_of((2,), ("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    model: Any = nn.Embedding(8, 16)
    options: Any = {"grads": grads, "layout": layout, "direct_bytes": 1, "mp_policy": policy}
    fully_shard(model, mesh, **options)
    model(torch.zeros(4096, dtype=torch.long)).sum().backward()
    fused = model.plan_report().groups[0].parameters[0].fused
    return full(model.weight.grad)[0, 0].item(), fused


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_rows_do_not_add_up_in_fewer_bits_than_they_are_computed_in(
    ranks: Ranks, layout: str
) -> None:
    for grads in ("copy", "accumulate", "fused"):
        for found in ranks(2).run(often, grads, layout, (None, torch.bfloat16)):
            assert found == (4096, False)
    for found in ranks(2).run(often, "fused", layout, (torch.bfloat16, torch.float32)):
        assert found == (4096, True)
