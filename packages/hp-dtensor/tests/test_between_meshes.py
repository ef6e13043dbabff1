"""From one mesh of real ranks to another: values, bytes, absent ranks, errors."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    Layout,
    LayoutError,
    MeshError,
    NonMember,
    NoPlanError,
    Partial,
    RaggedShard,
    RaggedTensor,
    RankMismatchError,
    RecordingCollectives,
    Replicate,
    Shard,
    TorchCollectives,
    UnsupportedError,
    explain,
    redistribute,
)

from .strategies import Case, layouts, shapes

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
WORLD = 4
BATCH = 12  # cases that travel to the ranks together: the trip costs more than the work


def mesh_of(layout: Layout) -> DeviceMesh:
    ranks = tuple(layout.ranks or range(layout.size))
    names = ("a", "b", "c")[: len(layout.mesh_shape)]
    grid = torch.tensor(ranks).view(layout.mesh_shape)
    return cached(
        ("mesh", layout.mesh_shape, ranks), lambda: DeviceMesh("cpu", grid, mesh_dim_names=names)
    )


def whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def cut(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the local tensor of a rank."""
    for dim, ranges in enumerate(layout.intervals_at(tuple(full.shape), layout.coordinate(rank))):
        parts = [full.narrow(dim, lo, hi - lo) for lo, hi in ranges]
        full = torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)
    if layout.ragged is not None:
        start, stop = layout.run_at(layout.coordinate(rank))
        lead = len(layout.ragged[1].dims)
        full = full.reshape(math.prod(full.shape[:lead]), *full.shape[lead:])[start:stop]
    return full.contiguous()


def laid(full: Tensor, layout: Layout, rank: int, grad: bool = False) -> Any:
    """Return the tensor in a layout, or a `NonMember` if this rank holds no part."""
    mesh = mesh_of(layout)
    if not layout.holds(rank):
        return NonMember(layout, tuple(full.shape), full.dtype)
    local = cut(full, layout, rank)
    if layout.ragged is not None:
        return RaggedTensor.from_local(local, mesh, layout.placements, shape=full.shape)
    placements = spelled(layout)
    x = DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride())
    return x.detach().requires_grad_() if grad else x


def spelled(layout: Layout) -> list[theirs.Placement]:
    kinds: dict[type, Callable[[Any], theirs.Placement]] = {
        Replicate: lambda p: theirs.Replicate(),
        Shard: lambda p: theirs.Shard(p.dim),
        Partial: lambda p: theirs.Partial(p.op),
    }
    return [kinds[type(p)](p) for p in layout.placements]


# Few meshes, as each makes groups: overlapping, disjoint, permuted, of one to all ranks.
GRIDS: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    2: [((2,), (0, 1)), ((2,), (1, 0)), ((1,), (1,))],
    4: [
        ((2, 2), (0, 1, 2, 3)),
        ((4,), (3, 1, 2, 0)),
        ((2,), (0, 1)),
        ((2,), (3, 2)),
        ((3,), (1, 2, 3)),
        ((1,), (2,)),
    ],
    8: [
        ((2, 2, 2), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((2, 4), (7, 5, 3, 1, 6, 4, 2, 0)),
        ((4,), (0, 1, 2, 3)),
        ((2, 2), (4, 5, 6, 7)),
        ((2, 3), (1, 2, 3, 4, 5, 6)),
    ],
}


@st.composite
def drawn(draw: st.DrawFn, world: int) -> Case:
    """Draw layouts on two of the meshes that torch can spell without an order of axes."""
    shape = draw(shapes)
    sides = []
    for _ in range(2):
        mesh, ranks = draw(st.sampled_from(GRIDS[world]))
        layout = draw(layouts(mesh, len(shape)))
        sides.append(Layout(mesh, layout.placements, None, ranks))
    return Case(sides[0], sides[1], shape)


def moved(rank: int, batch: list[Case]) -> list[tuple[Tensor | None, int, int, bool]]:
    """For each case: the local result, bytes received and predicted, and whether async agrees."""
    results: list[tuple[Tensor | None, int, int, bool]] = []
    for source, target, shape in batch:
        x = laid(whole(shape), source, rank)
        mesh = mesh_of(target)
        collectives = RecordingCollectives()
        y = redistribute(x, target.placements, mesh=mesh, collectives=collectives)
        again = redistribute(x, target.placements, mesh=mesh, async_op=True).wait()
        received = sum(traffic.bytes for traffic in collectives.by_axis.values())
        if isinstance(y, NonMember):
            results.append((None, received, 0, y == again and y.layout == target))
            continue
        predicted = explain(x, target.placements, mesh=mesh).bytes_received
        same = torch.equal(y.to_local(), again.to_local())
        results.append((y.to_local(), received, predicted, same))
    return results


@pytest.mark.parametrize(("world", "examples"), [(2, 3), (4, 6), (8, 3)])
def test_random_layouts_on_random_meshes_give_slices(
    ranks: Pools, world: int, examples: int
) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(st.lists(drawn(world), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Case]) -> None:
        for rank, results in enumerate(ranks(world).run(moved, batch)):
            for case, (local, received, predicted, same) in zip(batch, results, strict=True):
                assert (local is None) == (not case.target.holds(rank))
                if local is not None:
                    assert torch.equal(local, cut(whole(case.shape), case.target, rank))
                    assert received == predicted
                assert same

    check()


PAIRS = [
    (Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(2, 3))),
    (Layout((2, 2), (S0, R)), Layout((2,), (S1,), ranks=(3, 1))),
    (Layout((2,), (R,), ranks=(1, 2)), Layout((4,), (S0,))),
    (Layout((2, 2), (R, S1)), Layout((2, 2), (S0, S1), ranks=(3, 2, 1, 0))),
    (Layout((1,), (R,), ranks=(3,)), Layout((3,), (R,), ranks=(0, 1, 2))),
    (Layout((2,), (Partial(),)), Layout((2,), (S0,), ranks=(2, 3))),
    (Layout((2, 2), (Partial(), S0)), Layout((4,), (S1,), ranks=(3, 2, 1, 0))),
]
SHAPE = (6, 4)


def carried(rank: int, grad: bool) -> list[Tensor | None]:
    """Return the local result of each pair, if there is one, with gradients disabled."""
    results: list[Tensor | None] = []
    with torch.no_grad():
        for source, target in PAIRS:
            x = laid(whole(SHAPE, 1), source, rank, grad=grad)
            y = redistribute(x, target.placements, mesh=mesh_of(target))
            assert not y.requires_grad
            results.append(None if isinstance(y, NonMember) else y.to_local())
    return results


@pytest.mark.parametrize("grad", [False, True])
def test_partial_values_are_reduced_on_their_way_to_other_ranks(ranks: Pools, grad: bool) -> None:
    for rank, results in enumerate(ranks(WORLD).run(carried, grad)):
        for (source, target), local in zip(PAIRS, results, strict=True):
            terms = math.prod(
                n
                for n, p in zip(source.mesh_shape, source.placements, strict=True)
                if isinstance(p, Partial)
            )
            assert (local is None) == (not target.holds(rank))
            if local is not None:
                assert torch.equal(local, cut(terms * whole(SHAPE, 1), target, rank))


def recorded(rank: int, started: bool) -> list[str]:
    """Return the errors of all pairs for an input that requires grad, and of a detached one."""
    texts = []
    for source, target in PAIRS:
        x = laid(whole(SHAPE, 1), source, rank, grad=True)
        mesh = mesh_of(target)
        try:
            call: Any = redistribute
            result = call(x, target.placements, mesh=mesh, async_op=started)
            result = result.wait() if started else result
            texts.append(f"nothing raised, got {result}")
        except UnsupportedError as error:
            texts.append(str(error))
        y = redistribute(x if isinstance(x, NonMember) else x.detach(), (R,), mesh=mesh_of(ALL))
        assert torch.equal(y.to_local(), cut(total(source), ALL, rank))
    return texts


ALL = Layout((4,), (R,), ranks=(3, 1, 2, 0))


def total(source: Layout) -> Tensor:
    return whole(SHAPE, 1) * (2 if source.has_partial else 1)


@pytest.mark.nccl
@pytest.mark.parametrize("started", [False, True])
def test_a_gradient_between_meshes_is_refused_on_every_rank(ranks: Pools, started: bool) -> None:
    """Ranks outside the source's mesh raise too, and later calls work."""
    for rank, texts in enumerate(ranks(WORLD).run(recorded, started)):
        for (source, target), text in zip(PAIRS, texts, strict=True):
            if source.holds(rank) or target.holds(rank):
                assert "torch.no_grad()" in text
                assert "x.detach()" in text
            else:
                assert text.startswith("nothing raised, got NonMember")


def in_a_row(rank: int) -> Tensor | None:
    """Return the result of two transfers over three meshes, of which no rank is in all."""
    first, second, third = (
        Layout((2,), (S0,), ranks=(0, 1)),
        Layout((2,), (S1,), ranks=(1, 2)),
        Layout((2,), (S0,), ranks=(2, 3)),
    )
    x = laid(whole(SHAPE, 1), first, rank)
    y = redistribute(x, second.placements, mesh=mesh_of(second))
    tripled = y if isinstance(y, NonMember) else cast(DTensor, y * 3)
    z = redistribute(tripled, third.placements, mesh=mesh_of(third))
    return None if isinstance(z, NonMember) else cast(DTensor, z).to_local()


@pytest.mark.nccl
def test_tensors_pass_through_meshes_in_a_row(ranks: Pools) -> None:
    full = whole(SHAPE, 1)
    for rank, result in enumerate(ranks(WORLD).run(in_a_row)):
        assert (result is not None) == (rank >= 2)
        if result is not None:
            assert torch.equal(result, 3 * full.chunk(2)[rank - 2])


RAGGED = [
    (Layout((4,), (RaggedShard((0, 1), (9, 0, 11, 4)),)), Layout((2, 2), (S0, S1))),
    (Layout((2, 2), (S0, S1)), Layout((4,), (RaggedShard((0,), (1, 3, 0, 2)),))),
    (
        Layout((4,), (RaggedShard((0,), (1, 3, 0, 2)),)),
        Layout((2,), (RaggedShard((0, 1), (5, 19)),), ranks=(3, 1)),
    ),
    (Layout((4,), (RaggedShard((0,), (6, 0, 0, 0)),)), Layout((4,), (R,))),
    (Layout((2, 2), (RaggedShard((0,), (4, 2)), S1)), Layout((2, 2), (S1, R))),
]


def ragged(rank: int) -> list[tuple[Tensor | None, str, Tensor | None]]:
    """Return the local result, its type, and the gradient if the mesh does not change."""
    results: list[tuple[Tensor | None, str, Tensor | None]] = []
    for source, target in RAGGED:
        same = source.mesh_shape == target.mesh_shape
        x = laid(whole(SHAPE, 1), source, rank).detach().requires_grad_(same)
        y = redistribute(x, target.placements, mesh=None if same else mesh_of(target))
        local = None if isinstance(y, NonMember) else y.to_local()
        if same and local is not None:
            local.backward(cut(whole(SHAPE, 2), target, rank))
        grad = None if x.grad is None else x.grad.to_local()
        results.append((None if local is None else local.detach(), type(y).__name__, grad))
    return results


@pytest.mark.nccl
def test_ragged_tensors_come_and_go_with_their_gradients(ranks: Pools) -> None:
    for rank, results in enumerate(ranks(WORLD).run(ragged)):
        for (source, target), (local, kind, grad) in zip(RAGGED, results, strict=True):
            if not target.holds(rank):
                assert kind == "NonMember"
            else:
                assert kind == ("DTensor" if target.ragged is None else "RaggedTensor")
                assert local is not None
                assert torch.equal(local, cut(whole(SHAPE, 1), target, rank))
            assert (grad is not None) == (source.mesh_shape == target.mesh_shape)
            if grad is not None:
                assert torch.equal(grad, cut(whole(SHAPE, 2), source, rank))


def refused(rank: int) -> list[tuple[str, str]]:
    source, target = Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(2, 3))
    x = laid(whole(SHAPE), source, rank)
    mesh = mesh_of(target)
    calls: list[Callable[[], Any]] = [
        lambda: redistribute(x, (S0, S1), mesh=mesh),
        lambda: redistribute(x, (Shard(2),), mesh=mesh),
        lambda: redistribute(x, (Partial(),), mesh=mesh),
        lambda: redistribute(x, (S0,), mesh=mesh, max_bytes=64),
        lambda: redistribute(NonMember(source, SHAPE, torch.double), (S0,), mesh="b"),  # type: ignore[call-overload]
    ]
    texts = []
    for call in calls:
        with pytest.raises(LayoutError) as info:
            call()
        texts.append((info.type.__name__, str(info.value)))
    return texts


def test_wrong_targets_raise_on_every_rank(ranks: Pools) -> None:
    first, *others = ranks(WORLD).run(refused)
    assert [name for name, _ in first] == [
        kind.__name__ for kind in (LayoutError, LayoutError, LayoutError, NoPlanError, MeshError)
    ]
    assert others == [first] * 3
    assert "from another mesh to P(sum)" in first[2][1]


# Source and target by ranks, and all ranks that take part; one is the world's.
APART = [
    (Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(1, 2)), {0, 1, 2}),
    (Layout((2,), (S0,), ranks=(3, 1)), Layout((1,), (R,), ranks=(0,)), {0, 1, 3}),
    (Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(3, 2)), {0, 1, 2, 3}),
    (Layout((3,), (S0,), ranks=(1, 2, 3)), Layout((1,), (R,), ranks=(2,)), {1, 2, 3}),
]


def groups_used(rank: int) -> list[tuple[Tensor | None, list[set[int]], list[str]]]:
    """For each case, twice: the result, the ranks of every call's group, and the calls."""
    for source, target, _ in APART:
        mesh_of(source), mesh_of(target)
    results: list[tuple[Tensor | None, list[set[int]], list[str]]] = []
    for source, target, both in APART:
        if rank not in both:
            results.append((None, [], []))
            continue
        for _ in range(2):
            made: list[tuple[str, set[int]]] = []
            with _watched(made):
                y = redistribute(
                    laid(whole(SHAPE), source, rank), target.placements, mesh=mesh_of(target)
                )
        local = None if isinstance(y, NonMember) else y.to_local()
        results.append((local, [peers for _, peers in made], [name for name, _ in made]))
    return results


@contextmanager
def _watched(made: list[tuple[str, set[int]]]) -> Iterator[None]:
    def watching(name: str, call: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            group = options.get("group")
            if name == "batch_isend_irecv":
                group = args[0][0].group
            elif name == "all_reduce":
                group = args[1].group
            made.append((name, set(dist.get_process_group_ranks(group))))
            return call(*args, **options)

        return watched

    with ExitStack() as stack:
        for place, name in (
            (TorchCollectives, "all_reduce"),
            (dist, "batch_isend_irecv"),
            (dist, "all_gather_object"),
        ):
            call = watching(name, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, call))
        yield


def test_only_the_ranks_of_both_meshes_share_the_group_and_agree_in_one_all_reduce(
    ranks: Pools,
) -> None:
    for rank, results in enumerate(ranks(WORLD).run(groups_used)):
        for (_, target, both), (local, groups, calls) in zip(APART, results, strict=True):
            if rank not in both:
                assert not calls
                continue
            assert groups
            assert all(group == both for group in groups)
            assert calls.count("all_reduce") == 1
            assert calls.count("batch_isend_irecv") <= 1
            if target.holds(rank):
                assert local is not None
                assert torch.equal(local, cut(whole(SHAPE), target, rank))


def disagreeing(rank: int) -> list[tuple[str, Tensor | None]]:
    """Make three calls. In the second call, rank 2 has another dtype."""
    group = cached("impatient", lambda: dist.new_group(range(WORLD), timeout=timedelta(seconds=5)))
    source, target, _ = APART[2]
    mesh = mesh_of(target)
    found: list[tuple[str, Tensor | None]] = []
    for number in range(3):
        x = laid(whole(SHAPE, number), source, rank)
        if rank == 2 and number == 1:
            x = NonMember(source, SHAPE, torch.float32)
        try:
            pending = redistribute(x, target.placements, mesh=mesh, groups=[group], async_op=True)
            y = pending.wait()
            found.append(("", None if isinstance(y, NonMember) else y.to_local()))
        except RankMismatchError as error:
            found.append((str(error), None))
    return found


def test_a_refused_transfer_leaves_no_message_for_the_next_one(ranks: Pools) -> None:
    _, target, _ = APART[2]
    results = ranks(WORLD).run(disagreeing)
    assert len({found[1][0] for found in results}) == 1
    assert "rank 0 plans torch.float64" in results[0][1][0]
    assert "rank 2 plans torch.float32" in results[0][1][0]
    for rank, found in enumerate(results):
        for number in (0, 2):
            text, local = found[number]
            assert text == ""
            assert (local is None) == (not target.holds(rank))
            if local is not None:
                assert torch.equal(local, cut(whole(SHAPE, number), target, rank))
