"""Errors of ragged tensors: unsupported operators, operands and layouts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from hp_dtensor import Layout, LayoutError, Partial, RaggedShard, RaggedTensor, Replicate, Shard

from .test_ragged import Ragged, mesh_of, part_of, ragged_of, whole

Pools = Callable[[int], RankPool]
R, S0 = Replicate(), Shard(0)
UNEVEN = Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3))


def refused(rank: int) -> list[str]:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    other = Ragged(Layout((4,), (RaggedShard((0,), (4, 2, 0, 4)),)), (10, 3))
    y = ragged_of(whole(other.shape), other, rank)
    plain = torch.ones(10, 3, dtype=torch.double)
    calls: list[Callable[[], Any]] = [
        lambda: x @ torch.ones(3, 3),
        lambda: torch.ones(3, 10) @ x,
        lambda: x.sum(0),
        lambda: x.view(-1),
        lambda: x[0],
        lambda: torch.equal(x, x),
        lambda: torch.cat([x, x]),
        lambda: x.random_(),
        lambda: torch.bernoulli(x),
        lambda: torch._foreach_norm([x]),
        lambda: torch._foreach_max([x]),
        lambda: torch._foreach_norm([y], math.inf),
        lambda: dist.all_reduce(x),
        lambda: x + plain,
        lambda: plain * x,
        lambda: x + torch.ones(3, dtype=torch.double),
        lambda: x - y,
        lambda: x < y,
        lambda: x.add_(y),
        lambda: x.copy_(plain),
        lambda: torch._foreach_add([x, x], [x, y]),
    ]
    texts = []
    for call in calls:
        with pytest.raises(TypeError) as info:
            call()
        texts.append(str(info.value))
    assert torch.equal(x.to_local(), part_of(whole(UNEVEN.shape), UNEVEN, rank))
    return texts


def test_other_operators_and_operands_raise_on_every_rank(ranks: Pools) -> None:
    first, *others = ranks(4).run(refused)
    assert others == [first] * 3
    assert all("redistribute" in text for text in first)
    assert "(Ragged(0: [5, 1, 0, 4])) on a mesh of shape (4,) and a [10, 3] tensor as" in first[16]
    assert issubclass(TypeError, TypeError)


def misplaced(rank: int) -> list[tuple[str, str]]:
    line, square = mesh_of((4,)), mesh_of((2, 2))
    runs = RaggedShard((0,), (5, 1, 0, 4))

    def make(mesh: Any, placements: Any, shape: tuple[int, ...] = (10, 3)) -> RaggedTensor:
        return RaggedTensor.from_local(torch.zeros(5, 3), mesh, placements, shape=shape)

    calls: list[Callable[[], Any]] = [
        lambda: make("cpu", (runs,)),
        lambda: make(line, runs),
        lambda: make(line, (runs, R)),
        lambda: make(line, (S0,)),
        lambda: make(square, (RaggedShard((0,), (5, 5)), Partial())),
        lambda: make(line, (runs,), (11, 3)),
        lambda: make(line, (RaggedShard((0,), (5, 5)),)),
        lambda: make(line, (RaggedShard((0, 1, 2), (5, 1, 0, 4)),)),
        lambda: make(square, (RaggedShard((0,), (1, 1)), S0), (3, 3)),
    ]
    texts = []
    for call in calls:
        with pytest.raises(LayoutError) as info:
            call()
        texts.append((info.type.__name__, str(info.value)))
    if rank == 0:
        make(line, (runs,))
    else:
        wanted = rf"gives rank {rank} of the mesh \[{runs.sizes[rank]}, 3\]"
        with pytest.raises(LayoutError, match=wanted):
            make(line, (runs,))
    return texts


def test_layouts_that_do_not_fit_raise_on_every_rank(ranks: Pools) -> None:
    first, *others = ranks(4).run(misplaced)
    assert others == [first] * 3
    assert [name for name, _ in first] == [
        kind.__name__
        for kind in (
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
        )
    ]
    assert "make other tensors with DTensor.from_local" in first[3][1]


def no_collectives(rank: int) -> str:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    wrong: Any = "gloo"
    with pytest.raises(LayoutError) as info:
        x.full_tensor(collectives=wrong)
    return str(info.value)


def test_invalid_collectives_raise_with_their_type(ranks: Pools) -> None:
    for text in ranks(4).run(no_collectives):
        assert text.startswith("collectives='gloo' does not have the methods of Collectives; use ")
