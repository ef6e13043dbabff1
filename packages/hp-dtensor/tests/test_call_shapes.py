"""Functions accept torch's argument order and placements, which compare equal to ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached, fails_with_torch_2_11
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    LayoutError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    redistribute,
)

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("shapes", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def source() -> Any:
    full = torch.arange(64.0).view(8, 8)
    shards = [theirs.Shard(0), theirs.Shard(1)]
    return theirs.distribute_tensor(full, mesh_of((2, 2)), shards, src_data_rank=None)


def calls(rank: int) -> list[tuple[str, bool, Tensor]]:
    x, own, line = source(), mesh_of((2, 2)), mesh_of((4,))
    call: Any = redistribute
    results = [
        call(x, own, (S1, R)),
        call(x, own, [theirs.Shard(1), theirs.Replicate()]),
        call(x, own, placements=(S1, R)),
        call(x, None, (S1, R)),
        call(x, own),
        call(x, line, (S1,)),
        call(x, line, [theirs.Shard(1)], async_op=True).wait(),
        call(x, line, placements=(S1,)),
        call(x, (S1, R)),
        call(x, (S1,), mesh=line),
        call(x, placements=(S1,), mesh=line),
    ]
    return [(str(y.placements), y.device_mesh is own, y.full_tensor()) for y in results]


@pytest.mark.nccl
def test_a_mesh_before_the_placements_is_torchs_call(ranks: Pools) -> None:
    one, line = str((theirs.Shard(1), theirs.Replicate())), str((theirs.Shard(1),))
    whole = str((theirs.Replicate(), theirs.Replicate()))
    wanted = [(one, True)] * 4 + [(whole, True)] + [(line, False)] * 3
    wanted += [(one, True)] + [(line, False)] * 2
    for results in ranks(4).run(calls):
        assert [(text, same) for text, same, _ in results] == wanted
        for _, _, full in results:
            assert torch.equal(full, torch.arange(64.0).view(8, 8))


def compiled(rank: int) -> Tensor:
    x, line = source(), mesh_of((4,))
    call: Any = redistribute

    def step(x: Any) -> Any:
        return call(call(x, mesh_of((2, 2)), (S1, R)), line, [theirs.Shard(1)])

    made: Any = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    full: Tensor = made.full_tensor()
    return full


@fails_with_torch_2_11("Dynamo refuses a mesh as an argument")
def test_torchs_call_can_be_compiled(ranks: Pools) -> None:
    for full in ranks(4).run(compiled):
        assert torch.equal(full, torch.arange(64.0).view(8, 8))


def wrong(rank: int) -> list[str]:
    x, own = source(), mesh_of((2, 2))
    call: Any = redistribute
    said = []
    attempts: list[Callable[[], Any]] = [
        lambda: call(x, own, (S1, R), mesh=own),
        lambda: call(x, (S1, R), placements=(S1, R)),
        lambda: call(x, (S1, R), own),
        lambda: call(x, own, (S1, R), None),
    ]
    for attempt in attempts:
        with pytest.raises((LayoutError, TypeError)) as info:
            attempt()
        said.append(str(info.value))
    return said


def test_a_mesh_or_placements_given_twice_are_refused(ranks: Pools) -> None:
    first, *others = ranks(4).run(wrong)
    assert others == [first] * 3
    assert all("redistribute(x, placements" in text for text in first), first


PAIRS: list[tuple[Any, Any]] = [
    (Replicate(), theirs.Replicate()),
    (Shard(0), theirs.Shard(0)),
    (Shard(3), theirs.Shard(3)),
    *((Partial(op), theirs.Partial(op)) for op in ("sum", "avg", "max", "min")),
    (Partial("prod"), theirs.Partial("product")),
]


def test_placements_equal_torchs_both_ways_with_equal_hashes() -> None:
    for number, (ours, theirs_) in enumerate(PAIRS):
        assert ours == theirs_
        assert theirs_ == ours
        assert hash(ours) == hash(theirs_)
        assert len({ours, theirs_}) == 1
        for other, (_, different) in enumerate(PAIRS):
            assert (ours == different) == (number == other)
            assert (different == ours) == (number == other)


def test_other_kinds_are_never_equal() -> None:
    kinds: list[Any] = [
        *(ours for ours, _ in PAIRS),
        StridedShard(0, 2),
        StridedShard(0, 3),
        StridedShard(1, 2),
        RaggedShard((0,), (1, 2)),
        RaggedShard((0,), (2, 1)),
    ]
    for place, one in enumerate(kinds):
        assert [other == one for other in kinds] == [at == place for at in range(len(kinds))]
        assert one != "S(0)"
        assert one is not None


def labels(rank: int) -> tuple[bool, bool, bool, bool]:
    y = redistribute(source(), (S1, R))
    ours, torchs = (S1, R), (theirs.Shard(1), theirs.Replicate())
    return (
        y.placements == ours,
        ours == y.placements,
        y.placements == torchs,
        torchs == y.placements,
    )


def test_placements_of_results_equal_ours_and_torchs_both_ways(ranks: Pools) -> None:
    assert ranks(4).run(labels) == [(True,) * 4] * 4


def test_a_strided_shard_of_ours_on_the_left_equals_torchs() -> None:
    strided = theirs.placement_types._StridedShard(0, split_factor=2)
    assert StridedShard(0, 2) == strided
    assert StridedShard(0, 3) != strided
    assert StridedShard(0, 2) != DTensor
    assert hash(StridedShard(0, 2)) == hash(strided)


def in_turn(rank: int) -> list[list[int]]:
    """Return the local rows for ours, torch's and ours again, with an order for the dim."""
    mesh = mesh_of((2, 2))
    x = theirs.distribute_tensor(
        torch.arange(12.0), mesh, [theirs.Replicate()] * 2, src_data_rank=None
    )
    torchs = theirs.placement_types._StridedShard(0, split_factor=3)
    call: Any = redistribute
    return [
        call(x, (placement, R), shard_order={0: (0,)}).to_local().tolist()
        for placement in (StridedShard(0, 3), torchs, StridedShard(0, 3))
    ]


def test_equal_placements_of_ours_and_torchs_are_prepared_separately(ranks: Pools) -> None:
    """With a shard order, torch's split factor says the same as the order; ours makes blocks."""
    for rank, (ours, torchs, again) in enumerate(ranks(4).run(in_turn)):
        half = rank // 2
        assert torchs == list(range(6 * half, 6 * half + 6))
        assert ours == again == [i for i in range(12) if i % 4 // 2 == half]
