"""DTensors on real groups: values, gradients, bytes, errors."""

import itertools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from rank_pool import TORCH_2_11, RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hp_dtensor import (
    Layout,
    LayoutError,
    MeshError,
    NoPlanError,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    explain,
    plan_transfer,
    redistribute,
)

from .strategies import Case, cases

_torch: Any = import_module(f"{plan_transfer.__module__.rpartition('._')[0]}._torch")
Pools = Callable[[int], RankPool]
Placements = tuple[Replicate | Shard | Partial, ...]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
BATCH = 16  # cases that travel to the ranks together: the trip costs more than the work


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b", "c")[: len(shape)]
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def slice_of(full: Tensor, layout: Layout, rank: int) -> Tensor:
    box = layout.box_at(tuple(full.shape), layout.coordinate(rank))
    return full[tuple(slice(lo, hi) for lo, hi in box)].clone()


def as_dtensor(full: Tensor, layout: Layout, rank: int) -> DTensor:
    """Wrap a rank's slice; a shard order is reached by redistribution from mesh order."""
    mesh = mesh_of(layout.mesh_shape)
    plain = Layout(layout.mesh_shape, layout.placements)
    local = slice_of(full, plain, rank)
    placements = [_theirs(p) for p in layout.placements]
    x = DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())
    if layout != plain:
        moved = redistribute(x, layout.placements, shard_order=layout.shard_order)
        assert isinstance(moved, DTensor)
        return moved
    return x


def leaf(x: DTensor) -> DTensor:
    copy = x.detach().requires_grad_()
    assert isinstance(copy, DTensor)
    return copy


def _theirs(placement: object) -> theirs.Placement:
    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    if isinstance(placement, Partial):
        return theirs.Partial(placement.op)
    assert placement == R
    return theirs.Replicate()


def moved(rank: int, batch: list[Case]) -> list[tuple[Tensor, Tensor, int, int, bool]]:
    """For each case: our local result, torch's whole tensor of it, bytes, shared layout."""
    results = []
    for source, target, shape in batch:
        full = whole(shape)
        x = as_dtensor(full, source, rank)
        collectives = RecordingCollectives()
        order = target.shard_order
        plan = explain(x, target.placements, shard_order=order)
        y = redistribute(x, target.placements, shard_order=order, collectives=collectives)
        received = sum(traffic.bytes for traffic in collectives.by_axis.values())
        again = redistribute(x, target.placements, shard_order=order, async_op=True).wait()
        same = torch.equal(again.to_local(), y.to_local()) and again.placements == y.placements
        results.append((y.to_local(), y.full_tensor(), received, plan.bytes_received, same))
    return results


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_random_layouts_give_slices_of_the_global_tensor(
    ranks: Pools, mesh: tuple[int, ...]
) -> None:
    @settings(deadline=None, max_examples=3)
    @given(st.lists(cases(mesh=mesh), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Case]) -> None:
        for rank, results in enumerate(ranks(math.prod(mesh)).run(moved, batch)):
            for case, result in zip(batch, results, strict=True):
                local, gathered, received, predicted, same = result
                full = whole(case.shape)
                assert torch.equal(local, slice_of(full, case.target, rank))
                # torch reads our placements, strided shards too, as we meant them.
                assert torch.equal(gathered, full)
                assert received == predicted
                assert same

    check()


def from_torch(rank: int) -> tuple[Tensor, Tensor]:
    full = whole((15, 3))
    mesh = mesh_of((2, 2))
    fsdp_tp = redistribute(
        distribute_tensor(full, mesh, [theirs.Shard(0), theirs.Shard(0)]),
        (S0, S0),
        shard_order={0: (1, 0)},
    ).placements
    x = distribute_tensor(full, mesh, list(fsdp_tp), src_data_rank=None)
    return x.to_local(), redistribute(x, (R, R)).to_local()


def test_torchs_strided_shards_are_understood(ranks: Pools) -> None:
    full = whole((15, 3))
    layout = Layout((2, 2), (S0, S0), {0: (1, 0)})
    for rank, (local, gathered) in enumerate(ranks(4).run(from_torch)):
        assert torch.equal(local, slice_of(full, layout, rank))
        assert torch.equal(gathered, full)


def blocks(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Our and torch's whole tensor of torch's strided shards that spell no order; and back."""
    mesh = mesh_of((2, 2))
    results = []
    for shape in ((12, 4), (7, 3), (2, 5)):
        full = whole(shape)
        for placements in (
            (_torch.strided_shard(0, 3), theirs.Replicate()),
            (theirs.Shard(1), _torch.strided_shard(0, 3)),
            (_torch.strided_shard(0, 3), theirs.Shard(1)),
        ):
            x = distribute_tensor(full, mesh, placements, src_data_rank=None)
            gathered = redistribute(x, (R, R))
            again = redistribute(redistribute(gathered, (S1, S0)), placements)
            assert again.placements == placements
            assert torch.equal(again.to_local(), x.to_local())
            results.append((gathered.to_local(), full))
    return results


def test_blocks_of_torchs_strided_shards_come_and_go(ranks: Pools) -> None:
    for results in ranks(4).run(blocks):
        for gathered, full in results:
            assert torch.equal(gathered, full)


def both_gradients(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Our gradient and torch's for all pairs of plain placements."""
    mesh = mesh_of((2, 2))
    results = []
    kinds: tuple[Replicate | Shard, ...] = (R, S0, S1)
    for source, target in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
        grads = []
        for ours in (True, False):
            x = leaf(as_dtensor(whole((8, 4), 1), Layout((2, 2), source), rank))
            moved = (
                redistribute(x, target)
                if ours
                else x.redistribute(mesh, [_theirs(p) for p in target])
            )
            torch.autograd.backward((moved * moved).sum())
            grad = x.grad
            assert isinstance(grad, DTensor)
            grads.append(grad.to_local())
        results.append((grads[0], grads[1]))
    return results


def test_gradients_are_torchs(ranks: Pools) -> None:
    for results in ranks(4).run(both_gradients):
        for ours, torchs in results:
            assert torch.equal(ours, torchs)


def adjoint(rank: int, batch: list[Case]) -> list[tuple[float, float, Tensor, bool]]:
    """<redistribute(x), y> and <x, gradient>, each over the global tensor; placement of both."""
    results = []
    for source, target, shape in batch:
        x = leaf(as_dtensor(whole(shape, 1), source, rank))
        y = as_dtensor(whole(shape, 2), target, rank)
        out = redistribute(x, target.placements, shard_order=target.shard_order)
        assert isinstance(out, DTensor)
        if TORCH_2_11:  # replicates gradients of uneven shards that it copies, as backward(y) does
            (x.grad,) = torch.autograd.grad(out, x, y)
        else:
            out.backward(y)
        forward = (out.full_tensor().detach() * whole(shape, 2)).sum()
        grad = x.grad
        assert isinstance(grad, DTensor)
        backward = (whole(shape, 1) * grad.full_tensor()).sum()
        results.append(
            (forward.item(), backward.item(), grad.to_local(), grad.placements == x.placements)
        )
    return results


@pytest.mark.nccl
@settings(deadline=None, max_examples=3)
@given(batch=st.lists(cases(mesh=(2, 2)), min_size=BATCH, max_size=BATCH))
def test_backward_is_the_adjoint_and_has_the_layout_of_the_input(
    ranks: Pools, batch: list[Case]
) -> None:
    for rank, results in enumerate(ranks(4).run(adjoint, batch)):
        for case, (forward, backward, grad, same) in zip(batch, results, strict=True):
            assert forward == backward
            assert torch.equal(grad, slice_of(whole(case.shape, 2), case.source, rank))
            assert same


PARTIAL_PAIRS: list[tuple[Placements, Placements]] = [
    ((Partial(), R), (R, R)),
    ((Partial(), R), (R, S0)),
    ((Partial(), S0), (S0, R)),
    ((Partial(), S1), (S1, S0)),
    ((Partial(), Partial()), (S0, S0)),
    ((Partial(), Partial()), (S1, R)),
    ((Partial("avg"), S0), (S0, S0)),
    ((R, Partial("max")), (S1, S0)),
    ((Partial("min"), Partial("min")), (R, S1)),
    ((Partial("prod"), R), (S0, R)),
]


def reduced(rank: int, shape: tuple[int, ...]) -> list[tuple[Tensor, tuple[str, ...], Tensor]]:
    results = []
    for source, target in PARTIAL_PAIRS:
        mesh = mesh_of((2, 2))
        layout = Layout((2, 2), source)
        mine = slice_of(whole(shape, partial_seed(source, rank)), layout, rank)
        placements = [
            theirs.Partial("product") if p == Partial("prod") else _theirs(p) for p in source
        ]
        stride = whole(shape).stride()
        x = leaf(DTensor.from_local(mine, mesh, placements, shape=torch.Size(shape), stride=stride))
        y = redistribute(x, target)
        y.backward(as_dtensor(whole(shape, 99), Layout((2, 2), target), rank))
        grad = x.grad
        assert isinstance(grad, DTensor)
        results.append((y.to_local().detach(), tuple(map(str, grad.placements)), grad.to_local()))
    return results


def partial_seed(source: Placements, rank: int) -> int:
    """Ranks hold different values exactly along the partial axes."""
    coordinate = divmod(rank, 2)
    return sum(
        (axis + 1) * coordinate[axis] for axis, p in enumerate(source) if isinstance(p, Partial)
    )


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "prod": lambda parts: parts.prod(0),
}


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2)])
def test_partial_values_are_reduced_and_their_gradient_is_replicated(
    ranks: Pools, shape: tuple[int, ...]
) -> None:
    for rank, results in enumerate(ranks(4).run(reduced, shape)):
        for (source, target), (local, placements, grad) in zip(PARTIAL_PAIRS, results, strict=True):
            op = next(p.op for p in source if isinstance(p, Partial))
            seeds = sorted({partial_seed(source, other) for other in range(4)})
            full = OPS[op](torch.stack([whole(shape, seed) for seed in seeds]))
            assert torch.equal(local, slice_of(full, Layout((2, 2), target), rank))
            back: Placements = tuple(R if isinstance(p, Partial) else p for p in source)
            assert placements == tuple(map(str, back))
            assert torch.equal(grad, slice_of(whole(shape, 99), Layout((2, 2), back), rank))


def linear(rank: int) -> tuple[Tensor, Tensor]:
    mesh = mesh_of((4,))
    layout = Layout((4,), (Partial(),))

    def scattered(values: Tensor) -> Tensor:
        x = DTensor.from_local(values, mesh, [theirs.Partial()])
        return redistribute(x, (S0,)).to_local()

    a, b = (slice_of(whole((8, 2), seed + rank), layout, rank) for seed in (10, 20))
    return scattered(2 * a + 3 * b), 2 * scattered(a) + 3 * scattered(b)


@pytest.mark.nccl
def test_reduction_is_linear_in_the_partial_values(ranks: Pools) -> None:
    for together, apart in ranks(4).run(linear):
        assert torch.equal(together, apart)


def twice(rank: int) -> tuple[Tensor, bool]:
    x = leaf(as_dtensor(whole((4, 4)), Layout((4,), (S0,)), rank))
    y = redistribute(x, (S1,))
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert isinstance(second, DTensor)
    with torch.no_grad():
        return second.full_tensor(), redistribute(x, (S0,)) is x


def test_second_derivatives_pass_and_nothing_to_do_is_the_same_tensor(ranks: Pools) -> None:
    for second, same in ranks(4).run(twice):
        assert torch.equal(second, 6 * whole((4, 4)))
        assert same


def submesh(rank: int) -> tuple[list[str], Tensor, Tensor, str]:
    """Redistribute on the inner axis of a (2, 2) mesh. Return the calls and the results."""
    pair = cached("line", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")))
    line = pair["y"]
    full = whole((6, 4))
    layout = Layout((2,), (S0,))
    x = DTensor.from_local(
        slice_of(full, layout, rank % 2), line, [theirs.Shard(0)], shape=full.shape, stride=(4, 1)
    )
    collectives = RecordingCollectives()
    y = redistribute(x, (S1,), collectives=collectives)
    grown = redistribute(x, mesh=line)
    return list(collectives.by_axis), y.to_local(), grown.to_local(), str(y.device_mesh)


def test_a_submesh_moves_over_its_own_axis(ranks: Pools) -> None:
    full = whole((6, 4))
    for rank, (axes, local, gathered, _) in enumerate(ranks(4).run(submesh)):
        assert axes == ["y"]
        assert torch.equal(local, slice_of(full, Layout((2,), (S1,)), rank % 2))
        assert torch.equal(gathered, full)


def refused(rank: int) -> list[tuple[str, str]]:
    mesh = mesh_of((2, 2))
    x = as_dtensor(whole((4, 4)), Layout((2, 2), (S0, R)), rank)
    wrong = DTensor.from_local(
        torch.zeros(3, 4),
        mesh,
        [theirs.Shard(0), theirs.Replicate()],
        shape=torch.Size((4, 4)),
        stride=(4, 1),
    )
    calls: list[Callable[[], Any]] = [
        lambda: redistribute(x, (S0,)),
        lambda: redistribute(x, (Shard(2), R)),
        lambda: redistribute(x, (Partial(), R)),
        lambda: redistribute(x, (S0, S0), shard_order={0: (0,)}),
        lambda: redistribute(x, (R, R), max_bytes=100),
        lambda: redistribute(x, (Partial("sum"), Partial("max"))),
        lambda: explain(x, Layout((2, 2), (R, R), ranks=(0, 2, 1, 3))),
        lambda: redistribute(wrong, (R, R)),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except LayoutError as error:
            texts.append((type(error).__name__, str(error)))
    return texts


def misused(rank: int) -> list[tuple[str, str]]:
    mesh = mesh_of((2, 2))
    x: Any = as_dtensor(whole((4, 4)), Layout((2, 2), (S0, R)), rank)
    calls: list[Callable[[], Any]] = [
        lambda: redistribute(torch.zeros(4, 4), (R, R)),  # type: ignore[call-overload]
        lambda: redistribute(Layout((2, 2), (S0, R)), (R, R)),  # type: ignore[call-overload]
        lambda: redistribute(x, Shard(0)),  # type: ignore[call-overload]
        lambda: redistribute(x, theirs.Shard(0)),  # type: ignore[call-overload]
        lambda: redistribute(x, Layout((2, 2), (R, R))),  # type: ignore[call-overload]
        lambda: explain(x, Shard(0)),  # type: ignore[arg-type]
        lambda: redistribute(x, (R, R), mesh="cp"),  # type: ignore[call-overload]
        lambda: explain(x, (R, R), mesh=[mesh]),  # type: ignore[arg-type]
        lambda: explain(x, (R, R), shape=(4, 4)),
        lambda: explain(x, (R, R), rank=3),
    ]
    texts = []
    for call in calls:
        with pytest.raises(LayoutError) as info:
            call()
        texts.append((info.type.__name__, str(info.value)))
    return texts


def test_arguments_of_wrong_types_raise_with_the_legal_types(ranks: Pools) -> None:
    first, *others = ranks(4).run(misused)
    assert others == [first] * 3
    kinds = [LayoutError] * 6 + [MeshError] * 2 + [LayoutError] * 2
    assert [name for name, _ in first] == [kind.__name__ for kind in kinds]
    starts = "a redistribution starts from a DTensor, got an object of type "
    assert first[0][1].startswith(f"{starts}Tensor; make one with")
    assert first[1][1].startswith(f"{starts}Layout; ")
    alone = "placements are a sequence with one for each mesh axis, got "
    assert all(text.startswith(alone) for _, text in first[2:6])
    assert "got Shard(dim=0) alone; on a mesh of one axis write (Shard(0),)" in first[2][1]
    assert first[6][1].startswith("mesh='cp' is no DeviceMesh; give the target's, or, to stay on")
    assert "(2, 2) with axes ('a', 'b'): leave mesh= out" in first[6][1]
    assert "rank=3 and itemsize=None beside a tensor, which has its own" in first[9][1]


def test_wrong_targets_raise_on_every_rank_before_communication(ranks: Pools) -> None:
    first, *others = ranks(4).run(refused)
    assert [name for name, _ in first] == [
        kind.__name__
        for kind in (
            LayoutError,
            LayoutError,
            LayoutError,
            LayoutError,
            NoPlanError,
            LayoutError,
            MeshError,
            LayoutError,
        )
    ]
    assert all([name for name, _ in other] == [name for name, _ in first] for other in others)
    assert all(other[:7] == first[:7] for other in others)
    assert "max_bytes=100 at once; the least found is 320: allow that much" in first[4][1]


MIXED: list[tuple[Placements, Placements]] = [
    ((Partial("avg"), Partial("sum")), (R, R)),
    ((Partial("sum"), Partial("avg")), (S0, R)),
    ((Partial("avg"), Partial("sum")), (S0, S0)),
    ((Partial("avg"), Partial("sum")), (S1, S0)),
    ((Partial("avg"), Partial("sum")), (Partial("avg"), R)),
    ((Partial("sum"), Partial("avg")), (Partial("sum"), S1)),
]


def averaged_and_summed(rank: int) -> list[tuple[Tensor, Tensor, list[str]]]:
    results = []
    for size in (8, 5):
        for source, target in MIXED:
            local = whole((size, 4), rank)
            x = DTensor.from_local(local, mesh_of((2, 2)), [_theirs(p) for p in source])
            x = leaf(x)
            chosen: Any = target
            y = redistribute(x, chosen)
            plain: Any = y.redistribute(placements=[theirs.Replicate()] * 2)
            (plain.to_local() * whole((size, 4), 9)).sum().backward()
            assert isinstance(x.grad, DTensor)
            results.append(
                (plain.to_local().detach(), x.grad.to_local(), [str(p) for p in y.placements])
            )
    return results


def test_sums_and_averages_go_together(ranks: Pools) -> None:
    for results in ranks(4).run(averaged_and_summed):
        for number, (full, grad, placements) in enumerate(results):
            size, (_, target) = (8, 5)[number // len(MIXED)], MIXED[number % len(MIXED)]
            parts = torch.stack([whole((size, 4), rank) for rank in range(4)]).sum(0) / 2
            assert torch.equal(full, parts)
            assert torch.equal(grad, whole((size, 4), 9))
            assert placements == [str(_theirs(p)) for p in target]


def fewest_bytes(rank: int) -> list[tuple[int, int]]:
    """Bytes received for sums alone, and for sums with averages."""
    results = []
    for target in ((R, R), (S0, S0)):
        seen = []
        for ops in (("sum", "sum"), ("avg", "sum")):
            partial = [theirs.Partial(op) for op in ops]
            x = DTensor.from_local(whole((64, 64), rank), mesh_of((2, 2)), partial)
            collectives = RecordingCollectives()
            redistribute(x, target, collectives=collectives)
            seen.append(sum(traffic.bytes for traffic in collectives.by_axis.values()))
        results.append((seen[0], seen[1]))
    return results


def test_sums_with_averages_cost_no_more_than_sums(ranks: Pools) -> None:
    for results in ranks(4).run(fewest_bytes):
        for sums, mixed in results:
            assert sums == mixed


def products(rank: int) -> list[list[theirs.Placement]]:
    """Return the placements of results with products on one axis."""
    found = []
    for name in ("product", "prod"):
        x = DTensor.from_local(
            torch.ones(4, 4), mesh_of((2, 2)), [theirs.Partial(name), theirs.Shard(0)]
        )
        for kept in (Partial("prod"), theirs.Partial(name)):
            found.append(list(redistribute(x, (kept, R)).placements))
    return found


def test_products_that_stay_keep_the_name_they_were_given(ranks: Pools) -> None:
    named = [[theirs.Partial(name), theirs.Replicate()] for name in ("product", "prod")]
    wanted = [each for each in named for _ in range(2)]
    assert ranks(4).run(products) == [wanted] * 4
