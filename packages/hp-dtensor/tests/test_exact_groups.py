"""A step over some axes runs among the ranks of these axes and no others."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from rank_pool import FinishedWork, RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import Axis, Layout, Partial, Replicate, Shard, TorchCollectives, redistribute

from .strategies import Case, cases

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
GRIDS = [(2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 4), (2, 2)]
NAMES = ("dp", "cp", "tp")


class Seen(TorchCollectives):
    """Collectives that keep the axes that they were called with."""

    def __init__(self) -> None:
        self.axes: list[Axis] = []


def _seen(name: str) -> Callable[..., Any]:
    def call(self: Seen, axis: Axis, *args: Any, **options: Any) -> Any:
        self.axes.append(axis)
        return getattr(super(Seen, self), name)(axis, *args, **options)

    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast"):
    setattr(Seen, _name, _seen(_name))


class Unmoved(Seen):
    """Collectives that keep their axes and move nothing."""


def _unmoved(name: str) -> Callable[..., FinishedWork]:
    def call(self: Unmoved, axis: Axis, inputs: Any, *args: Any, **options: Any) -> FinishedWork:
        self.axes.append(axis)
        if name == "send_recv":
            return FinishedWork(list(args[0].values()))
        if name == "all_reduce":
            return FinishedWork(inputs)
        tensors = inputs if isinstance(inputs, list) else [inputs]
        lengths = [x.shape[0] for x in tensors]
        if name == "all_gather":
            lengths = [length * axis.size for length in lengths]
        elif name == "reduce_scatter":
            lengths = [length // axis.size for length in lengths]
        elif args:
            lengths = [sum(args[1])]
        made = zip(tensors, lengths, strict=True)
        return FinishedWork([x.new_zeros((length, *x.shape[1:])) for x, length in made])

    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
    setattr(Unmoved, _name, _unmoved(_name))


def spelled(layout: Layout) -> list[theirs.Placement]:
    kinds: dict[type, Callable[[Any], theirs.Placement]] = {
        Replicate: lambda p: theirs.Replicate(),
        Shard: lambda p: theirs.Shard(p.dim),
        Partial: lambda p: theirs.Partial("product" if p.op == "prod" else p.op),
    }
    return [kinds[type(p)](p) for p in layout.placements]


def unchanged(case: Case, axis: int) -> bool:
    """Return whether the two layouts are equal along an axis.

    They are equal if both replicate, if both have the same partial values, or if both shard one dim
    with the axis first.
    """
    old, new = (layout.placements[axis] for layout in (case.source, case.target))
    if not isinstance(old, Shard):
        return old == new
    chains = [
        layout.shard_axes(old.dim)
        for layout in (Layout(case.source.mesh_shape, case.source.placements), case.target)
    ]
    return old == new and chains[0][0] == chains[1][0] == axis


def ranks_of(mesh: DeviceMesh, names: str) -> set[int]:
    """Return the ranks that differ from this one on the named axes only."""
    axes = [NAMES.index(name) for name in names.split("_")]
    here = mesh.get_coordinate()
    assert here is not None
    index = tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))
    return set(mesh.mesh[index].flatten().tolist())


@contextmanager
def one_of(size: int, rank: int) -> Iterator[None]:
    """Make a world of which this process is one rank, and in which nothing moves."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Case, list[int], int, list[tuple[str, ...]]]:
    """Draw layouts, the ranks of their mesh, which of them this is, and axes with a group."""
    grid = draw(st.sampled_from(GRIDS))
    case = draw(cases(partial=True, mesh=grid))
    ranks = draw(st.permutations(range(8)))[: math.prod(grid)]
    if draw(st.booleans()):
        ranks = sorted(ranks)
    rank = draw(st.sampled_from(ranks))
    names = NAMES[: len(grid)]
    spans = [tuple(names[lo:hi]) for lo in range(len(grid)) for hi in range(lo + 2, len(grid) + 1)]
    return case, ranks, rank, draw(st.lists(st.sampled_from(spans), unique=True)) if spans else []


@settings(deadline=None, max_examples=150)
@given(drawn())
def test_a_rank_that_differs_on_an_unchanged_axis_takes_no_part(
    example: tuple[Case, list[int], int, list[tuple[str, ...]]],
) -> None:
    case, ranks, rank, spans = example
    grid = case.source.mesh_shape
    with one_of(8, rank):
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(grid), mesh_dim_names=NAMES[: len(grid)])
        for names in spans:
            mesh[names]._flatten("+".join(names))
        plain = Layout(grid, case.source.placements)
        place = ranks.index(rank)
        local = torch.zeros(plain.local_shape(case.shape, place), dtype=torch.double)
        stride = torch.empty(case.shape, device="meta").stride()
        x = DTensor.from_local(
            local, mesh, spelled(plain), shape=torch.Size(case.shape), stride=stride
        )
        collectives = Unmoved()
        redistribute(
            x, case.target.placements, shard_order=case.target.shard_order, collectives=collectives
        )
        still = {NAMES[axis] for axis in range(len(grid)) if unchanged(case, axis)}
        for axis in collectives.axes:
            assert set(axis.ranks) == ranks_of(mesh, axis.name)
            assert still.isdisjoint(axis.name.split("_"))
            assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks  # type: ignore[arg-type]


def swapped(rank: int) -> tuple[Tensor, list[tuple[str, tuple[int, ...]]]]:
    mesh = cached("cube", lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES))
    full = torch.arange(24.0).view(6, 4)
    whole = theirs.distribute_tensor(full, mesh, [theirs.Replicate()] * 3, src_data_rank=None)
    x = redistribute(whole, (R, S0, S1))
    collectives = Seen()
    y = redistribute(x, (R, S1, S0), collectives=collectives)
    return y.to_local(), [(axis.name, axis.ranks) for axis in collectives.axes]


def test_on_a_mesh_of_the_world_two_axes_are_changed_without_the_third(ranks: Pools) -> None:
    full = torch.arange(24.0).view(6, 4)
    layout = Layout((2, 2, 2), (R, S1, S0))
    for rank, (local, called) in enumerate(ranks(8).run(swapped)):
        box = layout.box_at((6, 4), layout.coordinate(rank))
        assert torch.equal(local, full[tuple(slice(lo, hi) for lo, hi in box)])
        half = set(range(4 * (rank // 4), 4 * (rank // 4) + 4))
        assert called
        assert all(set(peers) <= half for _, peers in called)


def given_groups(rank: int) -> tuple[list[Any], list[str], list[tuple[int, ...]]]:
    """Return the groups of a step over two of three axes for several ``groups`` arguments."""
    mesh = cached("cube", lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES))
    half = cached(
        "halves", lambda: [dist.new_group(range(4)), dist.new_group(range(4, 8))][rank // 4]
    )
    line = cached("line", lambda: DeviceMesh.from_group(half, "cpu", mesh_dim_names=("any",)))
    full = torch.arange(24.0).view(6, 4)
    whole = theirs.distribute_tensor(full, mesh, [theirs.Replicate()] * 3, src_data_rank=None)
    x: Any = redistribute(whole, (R, S0, S1)).detach().requires_grad_()
    notes, used, right = [], [], []
    choices: list[Any] = [(half,), (line,), (line, dist.group.WORLD)]
    for groups in choices:
        collectives = Seen()
        y = redistribute(x, (R, S1, S0), groups=groups, collectives=collectives)
        (y * y).sum().backward()
        used.append([axis.group is half for axis in collectives.axes])
        right.append(torch.equal(y.full_tensor(), full))
        notes.append(explain_note(x, groups))
    collectives = Seen()
    redistribute(x, (R, S1, S0), collectives=collectives)
    without = [axis.ranks for axis in collectives.axes]
    return [used, right], notes, without


def explain_note(x: Any, groups: Any) -> str:
    from hp_dtensor import explain

    plan = explain(x, (R, S1, S0), groups=groups)
    return "+".join(step.kind for step in plan.steps) + plan.note


def test_groups_that_are_given_are_used_there_and_back_and_by_this_call_alone(
    ranks: Pools,
) -> None:
    for (used, right), notes, without in ranks(8).run(given_groups):
        assert used == [[True, True]] * 3
        assert right == [True] * 3
        assert notes == ["direct"] * 3
        assert without
        assert all(len(peers) == 2 for peers in without)


def wrong_groups(rank: int) -> list[tuple[str, str]]:
    mesh = cached("cube", lambda: init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES))
    x = theirs.distribute_tensor(torch.zeros(4, 4), mesh, [theirs.Replicate()] * 3)
    said, call = [], cast(Any, redistribute)
    for groups in (dist.group.WORLD, ("fsdp",), (mesh,)):
        with pytest.raises(ValueError, match="groups=") as info:
            call(x, (S0, S0, R), groups=groups)
        said.append((info.type.__name__, str(info.value)))
    return said


def test_an_invalid_sequence_of_groups_raises(ranks: Pools) -> None:
    first, *others = ranks(8).run(wrong_groups)
    assert others == [first] * 7
    assert [name for name, _ in first] == ["LayoutError"] * 3
