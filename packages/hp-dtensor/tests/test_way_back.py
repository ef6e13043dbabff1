"""The way back of gradients: its bound, its cost, when it is recorded; and lazy values."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import AlphaBeta, NoPlanError, RecordingCollectives, Replicate, Shard, redistribute

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of() -> DeviceMesh:
    return cached("way back", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def leaf(placements: list[theirs.Placement], grad: bool = True) -> DTensor:
    full = torch.arange(4096.0).view(64, 64)
    x = theirs.distribute_tensor(full, mesh_of(), placements, src_data_rank=None)
    return cast(DTensor, x.detach().requires_grad_(grad))


def modes(rank: int) -> list[tuple[bool, bool]]:
    results = []
    for target in ((R, R), (S1, R)):
        x = leaf([theirs.Shard(0), theirs.Replicate()])
        pending = redistribute(x, target, async_op=True)
        with torch.no_grad():
            recorded = pending.wait().requires_grad
            unrecorded = redistribute(x, target, async_op=True)
        results.append((recorded, unrecorded.wait().requires_grad))
    return results


def test_a_started_redistribution_is_recorded_if_autograd_was_on_at_the_call(ranks: Pools) -> None:
    for results in ranks(4).run(modes):
        assert results == [(True, False)] * 2


def costs(rank: int) -> list[dict[str, int]]:
    """Return how often each axis was used on the way back, for two models."""
    seen = []
    for cost in (AlphaBeta(alpha=1.0, beta=0.0), AlphaBeta(alpha=0.0, beta=1.0)):
        x = leaf([theirs.Shard(1), theirs.Shard(0)])
        collectives = RecordingCollectives()
        y = redistribute(x, (S0, R), cost=cost, collectives=collectives)
        before = {axis: traffic.bytes for axis, traffic in collectives.by_axis.items()}
        y.backward(leaf([theirs.Shard(0), theirs.Replicate()], grad=False))
        after = {axis: traffic.bytes for axis, traffic in collectives.by_axis.items()}
        seen.append({axis: after[axis] - before.get(axis, 0) for axis in after})
    return seen


def test_the_way_back_is_the_cheapest_under_the_same_cost(ranks: Pools) -> None:
    """One call over the outer axis and a slice, or one call over both axes with fewer bytes."""
    answers = ranks(4).run(costs)
    assert sum(sum(seen[0].values()) for seen in answers) > sum(
        sum(seen[1].values()) for seen in answers
    )


def bounded(rank: int, compiled: bool) -> list[str]:
    """Slicing holds 16 + 8 KiB, the gradient's gathering more than that."""

    def sliced(x: DTensor) -> DTensor:
        return redistribute(x, (S0, R), max_bytes=24 * 1024)

    call: Any = torch.compile(sliced, backend="eager", fullgraph=True) if compiled else sliced
    replicated: list[theirs.Placement] = [theirs.Replicate(), theirs.Replicate()]
    texts = []
    assert call(leaf(replicated, grad=False)).to_local().shape == (32, 64)
    with torch.no_grad():
        call(leaf(replicated))
    try:
        call(leaf(replicated))
    except (NoPlanError, RuntimeError) as error:  # the compiler wraps errors of tracing
        texts.append(f"{type(error).__name__}: {error}")
    return texts


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_whose_gradient_has_no_way_back_is_refused(ranks: Pools, compiled: bool) -> None:
    first, *others = ranks(4).run(bounded, compiled)
    assert len(first) == 1
    assert "the gradient needs a plan too: no plan from (S(0), R) to (R, R)" in first[0]
    assert "max_bytes=24576" in first[0]
    if not compiled:
        assert others == [first] * 3
        assert first[0].startswith("NoPlanError: ")


def lazy(rank: int) -> list[tuple[Tensor, Tensor]]:
    values = torch.complex(torch.arange(16.0), torch.arange(16.0) + 1).view(4, 4)
    results = []
    for local in (values.conj(), values.conj().imag):
        for target in ((R, R), (S1, R)):
            x = DTensor.from_local(local, mesh_of(), [theirs.Shard(0), theirs.Replicate()])
            full = torch.cat([local, local]).resolve_conj().resolve_neg()
            half = rank // 2
            wanted = full if target == (R, R) else full[:, 2 * half : 2 * half + 2]
            results.append((redistribute(x, target).to_local(), wanted))
    return results


def test_lazily_conjugated_and_negated_values_arrive_as_such(ranks: Pools) -> None:
    for results in ranks(4).run(lazy):
        for moved, wanted in results:
            assert torch.equal(moved, wanted)


IDENTITIES: list[tuple[list[theirs.Placement], Any]] = [
    ([theirs.Replicate(), theirs.Replicate()], (R, R)),
    ([theirs.Shard(0), theirs.Replicate()], (S0, R)),
    ([theirs.Replicate(), theirs.Partial()], (theirs.Replicate(), theirs.Partial())),
]


def unchanged(rank: int, compiled: bool) -> list[tuple[list[str], Tensor, bool]]:
    """Return layouts and values of gradients that are partial if the result is partial."""
    results = []
    for placements, target in IDENTITIES:
        for started in (False, True):
            x = cast(
                DTensor,
                DTensor.from_local(torch.ones(4, 4), mesh_of(), placements)
                .detach()
                .requires_grad_(),
            )

            def step(
                x: DTensor,
                target: Any = target,
                started: bool = started,
                placements: Any = placements,
            ) -> Tensor:
                y: Any = redistribute(x, target, async_op=True) if started else None
                y = y.wait() if started else redistribute(x, target)
                # A gradient that is still to be summed on all axes that do not shard.
                lies = [p if p.is_shard() else theirs.Partial() for p in placements]
                return cast(Tensor, y.to_local(grad_placements=lies) * 2.0)

            if compiled:
                step = torch.compile(step, backend="aot_eager", fullgraph=True)
            (step(x) * (rank + 1.0)).sum().backward()
            grad = x.grad
            assert isinstance(grad, DTensor)
            with torch.no_grad():
                same = redistribute(x, target) is x
            results.append(([str(p) for p in grad.placements], grad.to_local(), same))
    return results


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_come_back_in_the_layout_of_the_input_where_nothing_moved(
    ranks: Pools, compiled: bool
) -> None:
    for rank, results in enumerate(ranks(4).run(unchanged, compiled)):
        for (placements, _), found in zip(
            [pair for pair in IDENTITIES for _ in range(2)], results, strict=True
        ):
            labels, local, same = found
            wanted = [str(theirs.Replicate()) if p.is_partial() else str(p) for p in placements]
            assert labels == wanted
            terms = (2 * (rank // 2) + 1, 2 * (rank // 2) + 2)
            total = 2.0 * sum(terms if placements[0].is_shard() else (1, 2, 3, 4))
            assert torch.equal(local, torch.full_like(local, total))
            assert same
