"""Public reports of wrong results with torch's DTensor, recreated on gloo ranks.

Each test runs the case of one report twice: with torch, and with this package. It checks that this
package is right, or raises a typed error before it communicates. Then it checks that torch still
has the fault. If a newer torch has repaired it, the test fails with a text that says so. The page
``tools/docs/pages/wrong-results.md`` lists the reports in the order of this file.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rank_pool import TORCH_2_11, Pair, RankPool, cached, expect_fault, outcome
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from hp_dtensor import (
    CheckedCollectives,
    RaggedShard,
    RaggedTensor,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    redistribute,
    reduce_partial,
)

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
BLOCKS = _StridedShard(0, split_factor=2)
RANKS = 4


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("wrong", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def flattened_mesh() -> DeviceMesh:
    def make() -> DeviceMesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh["a", "b"]._flatten("ab")
        return mesh

    return cached("wrong, flattened", make)


def ordered_mesh(*ranks: int) -> DeviceMesh:
    return cached(("wrong, ordered", ranks), lambda: DeviceMesh("cpu", torch.tensor(ranks)))


def laid(full: Tensor, mesh: DeviceMesh, *placements: theirs.Placement) -> DTensor:
    """Distribute a tensor that all ranks have, without communication."""
    return theirs.distribute_tensor(full, mesh, placements, src_data_rank=None)


# Wrong numbers without an error.


def uneven_rows_gathered(rank: int) -> list[Pair]:
    full, mesh = torch.arange(15.0).view(5, 3), flattened_mesh()
    x = laid(full, mesh, theirs.Shard(0), theirs.Shard(0))
    gathered = Pair(x.full_tensor(), redistribute(x, (R, R)).to_local())
    target = [theirs.Replicate(), theirs.Shard(0)]
    return [
        gathered,
        Pair(x.redistribute(mesh, target).to_local(), redistribute(x, target).to_local()),
    ]


def test_uneven_rows_are_gathered_over_a_flattened_mesh(ranks: Pools) -> None:
    """pytorch/pytorch#194457: a row is lost, a row of padding appears."""
    full = torch.arange(15.0).view(5, 3)
    answers = ranks(RANKS).run(uneven_rows_gathered)
    for rank, (gathered, sharded) in enumerate(answers):
        assert torch.equal(gathered.ours, full)
        assert torch.equal(sharded.ours, full.chunk(2)[rank % 2])
    fault = all(gathered.torchs[:, 0].tolist() == [0, 3, 6, 0, 9] for gathered, _ in answers)
    fault &= not torch.equal(answers[1][1].torchs, full[3:])
    expect_fault(fault, "pytorch/pytorch#194457")


def to_another_mesh(rank: int) -> tuple[bool, Pair]:
    full, target = torch.arange(8.0), ordered_mesh(3, 2, 1, 0)
    x = laid(full, mesh_of(RANKS), theirs.Shard(0))
    theirs_ = x.redistribute(target, [theirs.Shard(0)])
    ours = redistribute(x, (S0,), mesh=target)
    assert ours.device_mesh == target
    return theirs_.device_mesh == target, Pair(theirs_.to_local(), ours.to_local())


def test_equal_placements_on_another_mesh_move_the_tensor(ranks: Pools) -> None:
    """pytorch/pytorch#126795: the tensor stays on the old mesh."""
    full, fault = torch.arange(8.0), True
    for rank, (moved, pair) in enumerate(ranks(RANKS).run(to_another_mesh)):
        assert torch.equal(pair.ours, full.chunk(RANKS)[RANKS - 1 - rank])
        fault &= not moved and torch.equal(pair.torchs, full.chunk(RANKS)[rank])
    expect_fault(fault, "pytorch/pytorch#126795")


ORDER = (3, 1, 0, 2)  # the ranks of a mesh along its axis


def in_other_order(rank: int) -> list[Pair]:
    full, mesh = torch.arange(8.0), ordered_mesh(*ORDER)
    x = DTensor.from_local(full.chunk(RANKS)[ORDER.index(rank)], mesh, [theirs.Shard(0)])
    distributed = Pair(
        theirs.distribute_tensor(full, mesh, [theirs.Shard(0)]).to_local(),
        distribute_tensor(full, mesh, [S0]).to_local(),
    )
    return [Pair(x.full_tensor(), redistribute(x, (R,)).to_local()), distributed]


def test_ranks_of_a_mesh_may_have_any_order(ranks: Pools) -> None:
    """pytorch/pytorch#193224 and #176126: groups sort the ranks of a mesh."""
    full, faults = torch.arange(8.0), []
    for rank, (gathered, distributed) in enumerate(ranks(RANKS).run(in_other_order)):
        part = full.chunk(RANKS)[ORDER.index(rank)]
        assert torch.equal(gathered.ours, full)
        assert torch.equal(distributed.ours, part)
        faults.append(not torch.equal(gathered.torchs, full))
        faults.append(rank == 1 or not torch.equal(distributed.torchs, part))
    expect_fault(all(faults), "pytorch/pytorch#193224")


def of_unequal_parts(rank: int) -> Pair:
    mesh, sizes = mesh_of(RANKS), (2, 3, 4, 5)
    part = torch.arange(14.0).split(sizes)[rank]
    size: Any = (14,)
    x = DTensor.from_local(part, mesh, [theirs.Shard(0)], run_check=True, shape=size, stride=(1,))
    refused = outcome(lambda: redistribute(x, (R,), collectives=CheckedCollectives()))
    ragged = RaggedTensor.from_local(part, mesh, (RaggedShard((0,), sizes),), shape=size)
    assert torch.equal(redistribute(ragged, (R,)).to_local(), torch.arange(14.0))
    return Pair(x.full_tensor(), refused)


def test_parts_that_are_no_chunks_are_refused_or_ragged(ranks: Pools) -> None:
    """pytorch/pytorch#144109: parts of 2, 3, 4 and 5 elements are gathered as 4, 4, 4 and 2."""
    fault, wrong = True, [0, 1, 0, 0, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10]
    for pair in ranks(RANKS).run(of_unequal_parts):
        assert pair.ours.startswith("RankMismatchError: rank 0 cannot take part in redistribute")
        assert "the local tensor has shape [2]" in pair.ours
        fault &= pair.torchs.tolist() == wrong
    expect_fault(fault, "pytorch/pytorch#144109")


def without_a_shape(rank: int) -> tuple[tuple[int, ...], str]:
    mesh = mesh_of(2)
    x = DTensor.from_local(torch.arange(5.0).chunk(2)[rank], mesh, [theirs.Shard(0)])
    refused = outcome(lambda: redistribute(x, (R,), collectives=CheckedCollectives()))
    return tuple(x.shape), refused


def test_ranks_that_infer_different_global_shapes_raise(ranks: Pools) -> None:
    """pytorch/torchtitan#4593: 5 elements on 2 ranks are 6 on rank 0 and 4 on rank 1."""
    answers = ranks(2).run(without_a_shape)
    for _, refused in answers:
        assert refused.startswith("RankMismatchError")
        assert "[6]" in refused
        assert "[4]" in refused
    expect_fault([shape for shape, _ in answers] == [(6,), (4,)], "pytorch/torchtitan#4593")


def blocks_of_blocks(rank: int, rows: int) -> Pair:
    full = torch.arange(float(rows))
    x = laid(full, mesh_of(2, 2), BLOCKS, BLOCKS)
    return Pair(x.full_tensor(), redistribute(x, (R, R)).to_local())


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        ("pytorch/pytorch#168134", [0, 1, 0]),
        ("pytorch/pytorch#178735", [0, 4, 2, 6, 1, 5, 3, 7]),
    ],
)
def test_blocks_of_blocks_are_gathered(ranks: Pools, report: str, wrong: list[int]) -> None:
    """pytorch/pytorch#168134 (uneven) and #178735: two axes split a dim into blocks."""
    answers = ranks(RANKS).run(blocks_of_blocks, len(wrong))
    assert all(torch.equal(pair.ours, torch.arange(float(len(wrong)))) for pair in answers)
    expect_fault(all(pair.torchs.tolist() == wrong for pair in answers), report)


# Wrong numbers of torch's operators: redistribute first.


def added_number(rank: int) -> list[Pair]:
    total: Any = laid(torch.arange(8.0), mesh_of(RANKS), theirs.Shard(0)).sum()
    reduced: Any = reduce_partial(total)
    numbers = (torch.tensor(10), 10)  # the second sum takes the placements of the first one
    return [
        Pair((total + n).full_tensor().item(), (reduced + n).full_tensor().item()) for n in numbers
    ]


def test_a_number_is_added_once_to_a_reduced_tensor(ranks: Pools) -> None:
    """pytorch/pytorch#163193: each rank adds the number to its partial value."""
    answers = ranks(RANKS).run(added_number)
    assert all(pair.ours == 28 + 10 for pairs in answers for pair in pairs)
    found = [[pair.torchs for pair in pairs] for pairs in answers]
    expect_fault(found == [[28 + 10, 28 + RANKS * 10]] * RANKS, "pytorch/pytorch#163193")


def read_as_number(rank: int) -> Pair:
    total: Any = laid(torch.arange(8.0), mesh_of(RANKS), theirs.Shard(0)).sum()
    return Pair(total.item(), reduce_partial(total).item())


def test_item_of_a_reduced_tensor_is_the_sum_of_all_ranks(ranks: Pools) -> None:
    """pytorch/pytorch#144054 and #166638: item() returns the partial value of the rank."""
    answers = ranks(RANKS).run(read_as_number)
    assert all(pair.ours == 28 for pair in answers)
    expect_fault([pair.torchs for pair in answers] == [1, 5, 9, 13], "pytorch/pytorch#144054")


# Hangs.

SECONDS = 2.0  # the timeout of the group, once it is connected


def one_rank_alone(rank: int) -> tuple[str, str, float]:
    group: Any = cached("wrong, alone", lambda: dist.new_group(timeout=timedelta(seconds=60)))
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=SECONDS))
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.arange(2))
    x = DTensor.from_local(torch.ones(2), mesh, [theirs.Shard(0)])
    checked, torchs, ours = CheckedCollectives(deadline=SECONDS), "", ""
    start = time.monotonic()
    if rank == 0:
        torchs = outcome(x.full_tensor)
    seconds = time.monotonic() - start
    if rank == 0:
        ours = outcome(lambda: redistribute(x, (R,), collectives=checked))
    dist.barrier()
    return torchs, ours, seconds


def test_a_rank_that_gathers_alone_learns_which_rank_is_missing(ranks: Pools) -> None:
    """areal-project/AReaL#187: only rank 0 calls full_tensor()."""
    (torchs, ours, seconds), _ = ranks(2).run(one_rank_alone)
    assert ours.startswith("RankMismatchError")
    assert "the last calls: ranks [0]: redistribute" in ours
    assert "ranks [1]: " in ours
    expect_fault("Timed out" in torchs and seconds > SECONDS * 0.9, "areal-project/AReaL#187")


# Errors.


def clipped(rank: int, plain: bool) -> Pair:
    full, mesh = torch.arange(1.0, 5.0), mesh_of(2, 2)

    def parameters() -> list[nn.Parameter]:
        tensors = [laid(full, mesh["a"], theirs.Shard(0))]
        tensors.append(full.clone() if plain else laid(full, mesh["b"], theirs.Shard(0)))  # type: ignore[arg-type]
        result = [nn.Parameter(tensor) for tensor in tensors]
        for parameter, tensor in zip(result, tensors, strict=True):
            parameter.grad = tensor.clone()
        return result

    torchs = outcome(lambda: nn.utils.clip_grad_norm_(parameters(), 1.0))
    return Pair(str(torchs), clip_grad_norm_(parameters(), 1.0))


@pytest.mark.parametrize(
    ("plain", "report", "error"),
    [
        (False, "pytorch/pytorch#180346", "RuntimeError: All operands in aten.stack.default"),
        (True, "meta-pytorch/torchtune#2420", "RuntimeError: aten._foreach_norm.Scalar got mixed"),
    ],
)
def test_gradients_of_all_meshes_have_one_norm(
    ranks: Pools, plain: bool, report: str, error: str
) -> None:
    """pytorch/pytorch#180346 (two meshes), meta-pytorch/torchtune#2420 (plain tensors too)."""
    expected = torch.arange(1.0, 5.0).repeat(2).norm()
    answers = ranks(RANKS).run(clipped, plain)
    for pair in answers:
        torch.testing.assert_close(pair.ours, expected)
    expect_fault(all(pair.torchs.startswith(error) for pair in answers), report)


def to_a_new_mesh(rank: int) -> tuple[str, str, Pair]:
    full, target = torch.arange(16.0).view(4, 4), mesh_of(RANKS)
    x = laid(full, mesh_of(2, 2), theirs.Shard(0), theirs.Shard(1))
    distributed = outcome(lambda: theirs.distribute_tensor(x, target, [theirs.Shard(0)]))
    moved = outcome(lambda: x.redistribute(target, [theirs.Shard(0)]))
    return distributed, moved, Pair(None, redistribute(x, (S0,), mesh=target).to_local())


def test_a_tensor_goes_to_a_mesh_of_another_shape(ranks: Pools) -> None:
    """pytorch/pytorch#109437: torch has no way to another mesh."""
    full, fault = torch.arange(16.0).view(4, 4), True
    for rank, (distributed, moved, pair) in enumerate(ranks(RANKS).run(to_a_new_mesh)):
        assert torch.equal(pair.ours, full.chunk(RANKS)[rank])
        fault &= "ValueError: Cannot distribute a DTensor" in str(distributed)
        fault &= "NotImplementedError: Cross device mesh" in str(moved)
    expect_fault(fault, "pytorch/pytorch#109437")


def flat_view(rank: int) -> Pair:
    full, mesh = torch.arange(24.0).view(6, 4), mesh_of(RANKS)
    x = laid(full, mesh, theirs.Shard(0))
    flat: Any = redistribute(x, (S1,)).view(-1)
    return Pair(outcome(lambda: x.view(-1)), redistribute(flat, (S0,)).full_tensor())


def test_a_view_works_after_a_redistribution(ranks: Pools) -> None:
    """pytorch/pytorch#143372: view(-1) of unevenly sharded rows raises."""
    answers = ranks(RANKS).run(flat_view)
    assert all(torch.equal(pair.ours, torch.arange(24.0)) for pair in answers)
    error = "RuntimeError: Cannot flatten unevenly sharded tensor"
    expect_fault(
        all(str(pair.torchs).startswith(error) for pair in answers), "pytorch/pytorch#143372"
    )


# Repaired in torch 2.13.


def viewed(rank: int) -> Pair:
    full, mesh = torch.arange(96.0).view(12, 8), mesh_of(RANKS)
    x = laid(full, mesh, theirs.Shard(1))
    torchs: Any = x.view(-1, 6)
    ours: Any = redistribute(x, (R,)).view(-1, 6)
    return Pair(torchs.full_tensor(), ours.full_tensor())


def test_a_view_of_sharded_columns_is_right(ranks: Pools) -> None:
    """pytorch/pytorch#179502: the rows of the view were mixed up."""
    full = torch.arange(96.0).view(-1, 6)
    for pair in ranks(RANKS).run(viewed):
        assert torch.equal(pair.ours, full)
        if not TORCH_2_11:
            assert torch.equal(pair.torchs, full), "torch has the fault of #179502 again"
