"""Ragged tensors on real ranks: parts, elementwise operators, gradients."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import Layout, RaggedShard, RaggedTensor, RecordingCollectives, Replicate, Shard

Pools = Callable[[int], RankPool]
R = Replicate()
BATCH = 12  # cases that travel to the ranks together: the trip costs more than the work


class Ragged(NamedTuple):
    """A layout with a ragged axis and a shape that it fits."""

    layout: Layout
    shape: tuple[int, ...]


@st.composite
def ragged_cases(draw: st.DrawFn, mesh: tuple[int, ...]) -> Ragged:
    """Draw runs of any lengths over any leading dims, in frames of any kind."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    dims = tuple(range(draw(st.integers(1, len(shape)))))
    axis = draw(st.integers(0, len(mesh) - 1))
    placements: list[Replicate | Shard | RaggedShard] = []
    for degree in mesh:
        sharded = draw(st.sampled_from([None, *range(len(shape))]))
        if sharded is not None and sharded in dims:
            # Runs are in frames of equal lengths.
            shape = (*shape[:sharded], shape[sharded] * degree, *shape[sharded + 1 :])
        placements.append(R if sharded is None else Shard(sharded))
    placements[axis] = R
    frame = Layout(mesh, tuple(placements))
    count = math.prod(frame.local_shape(shape, 0)[: len(dims)])
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=3, max_size=3)))[: mesh[axis] - 1]
    edges = [0, *cuts, count]
    sizes = tuple(hi - lo for lo, hi in pairwise(edges))
    placements[axis] = RaggedShard(dims, sizes)
    return Ragged(Layout(mesh, tuple(placements)), shape)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("ragged", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.double)


def part_of(full: Tensor, case: Ragged, rank: int) -> Tensor:
    """Cut a rank's part out of the whole tensor box by box."""
    shape = case.layout.local_shape(case.shape, rank)
    boxes = [
        full[tuple(slice(lo, hi) for lo, hi in box)].reshape(-1, *shape[1:])
        for box in case.layout.boxes(case.shape, rank)
    ]
    return torch.cat(boxes) if boxes else full.new_zeros(shape)


def ragged_of(full: Tensor, case: Ragged, rank: int) -> RaggedTensor:
    mesh = mesh_of(case.layout.mesh_shape)
    local = part_of(full, case, rank)
    return RaggedTensor.from_local(local, mesh, case.layout.placements, shape=case.shape)


def local_of(x: Tensor | None) -> Tensor:
    assert isinstance(x, RaggedTensor)
    return x.to_local()


def gathered(rank: int, batch: list[Ragged]) -> list[tuple[Tensor, Tensor, int, bool]]:
    results = []
    for case in batch:
        x = ragged_of(whole(case.shape), case, rank)
        collectives = RecordingCollectives()
        full = x.full_tensor(collectives=collectives)
        received = sum(traffic.bytes for traffic in collectives.by_axis.values())
        with torch.no_grad():
            same = x.to_local() is x.to_local()
        results.append((full, x.to_local(), received, same))
    return results


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_the_whole_tensor_is_gathered_without_unneeded_bytes(
    ranks: Pools, mesh: tuple[int, ...]
) -> None:
    @settings(deadline=None, max_examples=3)
    @given(st.lists(ragged_cases(mesh), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Ragged]) -> None:
        for rank, results in enumerate(ranks(math.prod(mesh)).run(gathered, batch)):
            for case, (full, local, received, same) in zip(batch, results, strict=True):
                expected = whole(case.shape)
                assert torch.equal(full, expected)
                assert torch.equal(local, part_of(expected, case, rank))
                assert received == 8 * (expected.numel() - local.numel())
                assert same

    check()


def masked(x: Any, y: Any) -> Any:
    """Set elements of a copy of ``y`` to 0.5 if ``x`` is larger."""
    z = y.clone()
    z[x > y] = 0.5
    return z


EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda x, y: (x * 2 + y / 3 - x * y) ** 2,
    "numbers in front": lambda x, y: 1 - 2 * x + 3 / (y * y + 1),
    "scalar tensor": lambda x, y: x * torch.tensor(1.5) + y,
    "choice": lambda x, y: torch.where(x > y, x, 0.0),
    "activation": lambda x, y: nn.functional.silu(x) + torch.lerp(x, y, 0.3),
    "in place": lambda x, y: x.clone().addcmul_(x, y, value=0.5).clamp_(-1, 1).add_(y),
    "copy": lambda x, y: torch.empty_like(x).copy_(y).masked_fill_(x > 0, 7),
    "out": lambda x, y: torch.mul(x, y, out=torch.zeros_like(x)),
    "dtype": lambda x, y: x.to(torch.bfloat16) + y.bfloat16(),
    "fill": lambda x, y: (
        torch.full_like(x, 3.0) + torch.ones_like(y) + torch.zeros_like(x).fill_(2)
    ),
    "two results": lambda x, y: torch.frexp(x)[0] + torch.frexp(y).exponent,
    "mask": masked,
    "room": lambda x, y: x.new_empty(x.shape, dtype=torch.float32).fill_(2) + y,
    "lists": lambda x, y: torch._foreach_add(torch._foreach_sqrt([x.abs(), y.abs()]), 1.0)[1],
}


def computed(rank: int, batch: list[Ragged]) -> list[dict[str, Tensor]]:
    results = []
    for case in batch:
        x, y = (ragged_of(whole(case.shape, seed), case, rank) for seed in (1, 2))
        results.append({name: f(x, y).to_local() for name, f in EXPRESSIONS.items()})
    return results


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_elementwise_operators_on_parts_equal_the_whole(
    ranks: Pools, mesh: tuple[int, ...]
) -> None:
    @settings(deadline=None, max_examples=2)
    @given(st.lists(ragged_cases(mesh), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Ragged]) -> None:
        for rank, results in enumerate(ranks(4).run(computed, batch)):
            for case, result in zip(batch, results, strict=True):
                x, y = whole(case.shape, 1), whole(case.shape, 2)
                for name, expression in EXPRESSIONS.items():
                    expected = part_of(expression(x, y), case, rank)
                    assert result[name].dtype == expected.dtype, name
                    torch.testing.assert_close(result[name], expected, rtol=1e-14, atol=0)

    check()


def differentiated(rank: int, batch: list[Ragged]) -> list[dict[str, Tensor]]:
    results = []
    for case in batch:
        x, y = (ragged_of(whole(case.shape, seed), case, rank) for seed in (1, 2))
        mesh, placements = y.device_mesh, case.layout.placements

        def full(z: Tensor) -> Tensor:
            assert isinstance(z, RaggedTensor)
            return z.full_tensor()

        x.requires_grad_()
        (full(x * y) * whole(case.shape, 3)).sum().backward()
        kept = x.grad  # autograd may not keep a gradient that someone else holds
        local_of(x * x).sum().backward()
        local = part_of(whole(case.shape, 1), case, rank).requires_grad_()
        spread = RaggedTensor.from_local(local, mesh, placements, shape=case.shape)
        full(spread * spread).sum().backward()
        cube = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(full(cube * cube * cube).sum(), cube, create_graph=True)
        (second,) = torch.autograd.grad(local_of(first).sum(), cube)
        assert local.grad is not None
        leaf = x.detach().requires_grad_()
        (full(masked(y, leaf)) * whole(case.shape, 3)).sum().backward()
        found = {"sum of two": kept, "second": second, "masked": leaf.grad}
        parts = {name: local_of(grad) for name, grad in found.items()}
        results.append(parts | {"local": local.grad})
    return results


def test_gradients_are_this_ranks_part_of_the_whole_gradient(ranks: Pools) -> None:
    @settings(deadline=None, max_examples=2)
    @given(st.lists(ragged_cases((2, 2)), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Ragged]) -> None:
        for rank, results in enumerate(ranks(4).run(differentiated, batch)):
            for case, result in zip(batch, results, strict=True):
                x, y, weight = (whole(case.shape, seed) for seed in (1, 2, 3))
                expected = {"sum of two": y * weight + 2 * x, "local": 2 * x, "second": 6 * x}
                expected["masked"] = weight * (y <= x)
                for name, full in expected.items():
                    torch.testing.assert_close(result[name], part_of(full, case, rank))

    check()


def local_parts(rank: int) -> list[bool]:
    mesh, sizes = mesh_of((2,)), (5, 3)
    part = torch.ones(sizes[rank])
    whole = RaggedTensor.from_local(part, mesh, [RaggedShard((0,), sizes)], shape=(8,))
    parameter: Any = nn.Parameter(whole)
    with torch.no_grad():
        found = [parameter.local is parameter.to_local()]
    other = whole.like(torch.zeros(sizes[rank]))
    parameter.data = other
    return [*found, not parameter.local.requires_grad, parameter.local is other.local]


def test_the_part_itself_is_that_which_is_there_without_autograd(ranks: Pools) -> None:
    assert ranks(2).run(local_parts) == [[True] * 3] * 2
