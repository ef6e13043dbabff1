"""Partial values of kinds that torch's own operators make are reduced by torch's rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    LayoutError,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    explain,
    redistribute,
    reduce_partial,
)

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of() -> DeviceMesh:
    return cached("partials", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def table() -> Tensor:
    return torch.arange(40.0).view(10, 4).sin()


def ids() -> Tensor:
    return torch.tensor([[3, 9, 0, 5], [1, 1, 8, 2]])


def embedded(rank: int) -> tuple[DTensor, DTensor]:
    """Return a vocabulary-parallel embedding's output, and its weight."""
    mesh = mesh_of()
    cut = [theirs.Replicate(), theirs.Shard(0)]
    weight: Any = theirs.distribute_tensor(table(), mesh, cut).requires_grad_()
    rows = theirs.distribute_tensor(ids(), mesh, [theirs.Shard(1), theirs.Replicate()])
    out: Any = F.embedding(rows, weight)
    assert type(out.placements[1]).__name__ == "_MaskPartial"
    return out, weight


TARGETS: list[tuple[Any, ...]] = [(R, R), (S1, R), (R, S0), (S1, S0), (S0, S1)]


def looked_up(rank: int) -> list[tuple[Tensor, Tensor, list[Any]]]:
    results = []
    for target in (*TARGETS, None):
        for started in (False, True):
            out, weight = embedded(rank)
            if target is None:
                y: Any = reduce_partial(out)
            elif started:
                y = redistribute(out, target, async_op=True).wait()
            else:
                y = redistribute(out, target)
            (y * y).sum().backward()
            grad: Any = weight.grad
            results.append((y.full_tensor().detach(), grad.full_tensor(), list(y.placements)))
    return results


def test_a_vocabulary_parallel_embedding_is_redistributed(ranks: Pools) -> None:
    weight = table().requires_grad_()
    expected = F.embedding(ids(), weight)
    (expected * expected).sum().backward()
    assert weight.grad is not None
    wanted = [target for target in (*TARGETS, (S1, R)) for _ in range(2)]
    for results in ranks(4).run(looked_up):
        for (full, grad, placements), target in zip(results, wanted, strict=True):
            torch.testing.assert_close(full, expected.detach())
            torch.testing.assert_close(grad, weight.grad)
            assert [str(p) for p in placements] == [str(p) for p in target]


def kept(rank: int) -> tuple[bool, Tensor, str, bool]:
    x: Any = theirs.distribute_tensor(table(), mesh_of(), [theirs.Shard(0), theirs.Shard(1)])
    rows: Any = torch.linalg.vector_norm(x, dim=1)
    assert type(rows.placements[1]).__name__ == "_NormPartial"
    y: Any = redistribute(rows, (R, rows.placements[1]))
    out, _ = embedded(rank)
    with pytest.raises(LayoutError, match="MaskPartial") as info:
        redistribute(out, (R, out.placements[1]))
    detached: Any = out.detach()
    same: Any = redistribute(detached, out.placements)
    whole = reduce_partial(same).full_tensor()
    text = str(info.value)
    found = torch.equal(whole, F.embedding(ids(), table()))
    return y.placements[1] == rows.placements[1], reduce_partial(y).to_local(), text, found


def test_such_a_placement_can_stay_while_others_change_unless_it_has_a_mask(ranks: Pools) -> None:
    for same, norms, text, found in ranks(4).run(kept):
        assert same
        torch.testing.assert_close(norms, torch.linalg.vector_norm(table(), dim=1))
        assert "reduce it" in text
        assert found


def compiled(rank: int) -> tuple[Tensor, Tensor]:
    cut = [theirs.Replicate(), theirs.Shard(0)]
    weight: Any = theirs.distribute_tensor(table(), mesh_of(), cut).requires_grad_()
    rows = theirs.distribute_tensor(ids(), mesh_of(), [theirs.Shard(1), theirs.Replicate()])

    def step(rows: Any, weight: Any) -> Any:
        out: Any = F.embedding(rows, weight)
        return redistribute(out, (R, S0))

    y: Any = torch.compile(step, backend="aot_eager", fullgraph=True)(rows, weight)
    (y * y).sum().backward()
    grad: Any = weight.grad
    return y.full_tensor().detach(), grad.full_tensor()


def test_an_embeddings_output_is_redistributed_in_a_compiled_function(ranks: Pools) -> None:
    weight = table().requires_grad_()
    expected = F.embedding(ids(), weight)
    (expected * expected).sum().backward()
    assert weight.grad is not None
    for full, grad in ranks(4).run(compiled):
        torch.testing.assert_close(full, expected.detach())
        torch.testing.assert_close(grad, weight.grad)


NORMS = [1, 2, 3.0]


def norms(rank: int) -> list[tuple[list[str], Tensor, Tensor, Tensor]]:
    results = []
    for order in NORMS:
        x: Any = theirs.distribute_tensor(
            table() + 2, mesh_of(), [theirs.Shard(0), theirs.Shard(1)]
        ).requires_grad_()
        norm: Any = torch.linalg.vector_norm(x, order)
        kinds = [type(p).__name__ for p in norm.placements]
        y: Any = redistribute(norm, (R, R))
        z: Any = reduce_partial(norm)
        y.backward()
        results.append((kinds, y.to_local().detach(), z.to_local().detach(), x.grad.full_tensor()))
    return results


def test_a_norm_of_a_distributed_tensor_is_reduced_by_its_own_rule(ranks: Pools) -> None:
    for results in ranks(4).run(norms):
        for (kinds, whole, reduced, grad), order in zip(results, NORMS, strict=True):
            x = (table() + 2).requires_grad_()
            expected = torch.linalg.vector_norm(x, order)
            expected.backward()
            assert "_NormPartial" in kinds
            torch.testing.assert_close(whole, expected.detach())
            torch.testing.assert_close(reduced, expected.detach())
            assert x.grad is not None
            torch.testing.assert_close(grad, x.grad)


def explained(rank: int) -> tuple[str, str, str, str]:
    embedding, _ = embedded(rank)
    out: Any = embedding.detach()
    text = str(explain(out, (R, S0)))
    with pytest.raises(LayoutError) as made:
        redistribute(redistribute(out, (R, R)), (theirs.Replicate(), out.placements[1]))
    other: Any = theirs.distribute_tensor(table(), mesh_of(), [theirs.Replicate()] * 2)
    with pytest.raises(LayoutError) as asked:
        redistribute(other, (R, Partial()))
    collectives = RecordingCollectives()
    again, _ = embedded(rank)  # torch lets go of the mask with the first reduction
    free: Any = again.detach()
    redistribute(free, (R, R), collectives=collectives)
    return text, str(made.value), str(asked.value), " ".join(sorted(collectives.by_axis))


def test_partials_of_torch_are_explained_and_no_valid_target(ranks: Pools) -> None:
    first, *others = ranks(4).run(explained)
    text, made, asked, counted = first
    assert "reduced by torch" in text
    assert "MaskP(" in made
    assert "P(sum)" in asked
    assert counted == "dp"
    assert [other[1:] for other in others] == [first[1:]] * 3
