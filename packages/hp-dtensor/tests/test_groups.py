"""Groups over several axes of a mesh that is only a part of the world, and ranks outside it."""

import itertools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    Layout,
    MeshError,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    TorchCollectives,
    distribute_tensor,
    explain,
    plan_transfer,
    redistribute,
)

_package = plan_transfer.__module__.rpartition("._")[0]
_prepare = import_module(f"{_package}._prepare")

Placements = tuple[Replicate | Shard, ...]
Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
WORLD = 5  # a mesh of four of them, not in order; the fifth rank is outside
GRID = [[3, 1], [0, 2]]
SHAPE = (6, 5)


def full() -> Tensor:
    return torch.arange(math.prod(SHAPE), dtype=torch.double).view(SHAPE)


def grid(flat: bool) -> DeviceMesh:
    """Return a (2, 2) mesh, with a group over both of its axes if ``flat``."""

    def make() -> DeviceMesh:
        # Other names make another mesh: a flattened one is found by every equal mesh.
        names = ("a", "b") if flat else ("c", "d")
        mesh = DeviceMesh("cpu", torch.tensor(GRID), mesh_dim_names=names)
        if flat:
            mesh._flatten("ab")
        return mesh

    return cached(("grid", flat), make)


def source(rank: int, mesh: DeviceMesh) -> DTensor:
    """Return the whole tensor as (S0, S1); a rank outside holds nothing."""
    local = torch.empty(0, dtype=torch.double)
    if mesh.get_coordinate() is not None:
        local = part(rank, (S0, S1))
    return DTensor.from_local(
        local,
        mesh,
        [theirs.Shard(0), theirs.Shard(1)],
        shape=torch.Size(SHAPE),
        stride=(SHAPE[1], 1),
    )


def part(rank: int, placements: Placements) -> Tensor:
    layout = Layout((2, 2), placements, ranks=tuple(r for row in GRID for r in row))
    box = layout.box_at(SHAPE, layout.coordinate(rank))
    return full()[tuple(slice(lo, hi) for lo, hi in box)].clone()


def swapped(rank: int, flat: bool) -> tuple[Tensor, list[str], list[str], str]:
    mesh = grid(flat)
    x = source(rank, mesh)
    collectives = RecordingCollectives()
    y = redistribute(x, (S1, S0), collectives=collectives)
    inside = mesh.get_coordinate() is not None
    plan = explain(x, (S1, S0)) if inside else None
    kinds: list[str] = [step.kind for step in plan.steps] if plan else []
    assert y.placements == (theirs.Shard(1), theirs.Shard(0))
    return y.to_local(), list(collectives.by_axis), kinds, plan.note if plan else ""


@pytest.mark.nccl
def test_a_direct_plan_uses_the_flattened_group_of_a_mesh_smaller_than_the_world(
    ranks: Pools,
) -> None:
    results = ranks(WORLD).run(swapped, True)
    for rank, (local, axes, kinds, note) in enumerate(results[:4]):
        assert torch.equal(local, part(rank, (S1, S0)))
        assert (axes, kinds, note) == (["a_b"], ["direct"], "")
    assert results[4][0].numel() == 0
    assert results[4][1] == []


@pytest.mark.nccl
def test_without_such_a_group_it_goes_axis_by_axis_and_the_plan_says_so(ranks: Pools) -> None:
    for rank, (local, axes, kinds, note) in enumerate(ranks(WORLD).run(swapped, False)[:4]):
        assert torch.equal(local, part(rank, (S1, S0)))
        assert set(axes) == {"c", "d"}
        assert len(kinds) > 1
        assert "(0, 1)" in note


IN_TURN: list[tuple[Placements, Placements]] = [
    ((S0, R), (R, R)),
    ((S0, R), (S1, R)),
    ((R, S1), (R, S0)),
]


def in_order(rank: int) -> list[bool]:
    """Whether each change over one axis is right; the group of axis 0 has its ranks reversed."""
    mesh = grid(True)
    if mesh.get_coordinate() is None:
        return []
    right = []
    start = redistribute(source(rank, mesh), (R, R))
    for first, second in IN_TURN:
        x = redistribute(start, first)
        right.append(torch.equal(x.to_local(), part(rank, first)))
        y = redistribute(x, second)
        right.append(torch.equal(y.to_local(), part(rank, second)))
    terms = DTensor.from_local(full(), mesh, [theirs.Partial(), theirs.Replicate()])
    scattered = redistribute(terms, (S0, R))
    return [*right, torch.equal(scattered.to_local(), 2 * part(rank, (S0, R)))]


def test_a_mesh_may_list_its_ranks_in_any_order(ranks: Pools) -> None:
    assert ranks(WORLD).run(in_order) == [[True] * 7] * 4 + [[]]


TURNED = [2, 0, 3, 1]  # its inverse is another order
SPELLED: dict[Any, theirs.Placement] = {
    R: theirs.Replicate(),
    S0: theirs.Shard(0),
    S1: theirs.Shard(1),
    Partial(): theirs.Partial(),
}


def turned(rank: int, shape: tuple[int, ...]) -> list[str]:
    """Return the changes over a mesh of ranks in no order that are wrong on this rank."""
    mesh = cached("turned", lambda: DeviceMesh("cpu", TURNED))
    whole = torch.arange(math.prod(shape), dtype=torch.double).view(shape)
    place = TURNED.index(rank)

    def local(placement: Any, terms: int) -> Tensor:
        box = Layout((4,), (placement,)).box_at(shape, (place,))
        return terms * whole[tuple(slice(lo, hi) for lo, hi in box)].clone()

    def tensor(placement: Any) -> DTensor:
        held = whole * (place + 1) if placement == Partial() else local(placement, 1)
        spelled = [SPELLED[placement]]
        return DTensor.from_local(held, mesh, spelled, shape=whole.shape, stride=whole.stride())

    wrong = []
    for source in SPELLED:
        terms = 10 if source == Partial() else 1
        for placement in (R, S0, S1):
            found = redistribute(tensor(source), (placement,)).to_local()
            if not torch.equal(found, local(placement, terms)):
                wrong.append(f"{source} -> {placement}")
    return wrong


@pytest.mark.parametrize("shape", [(8, 4, 3), (6, 5, 3)])
def test_every_kind_of_call_keeps_the_order_of_the_mesh(
    ranks: Pools, shape: tuple[int, ...]
) -> None:
    assert ranks(4).run(turned, shape) == [[]] * 4


def given_out(rank: int, grid: list[Any], source: int | None) -> list[str]:
    """Return the layouts in which this rank gets other rows than its coordinate's."""
    mesh = cached(("given out", str(grid)), lambda: DeviceMesh("cpu", grid))
    shape, degrees = (8, 6), tuple(mesh.shape)
    whole = torch.arange(48.0).view(shape)
    place, wrong = tuple(mesh.get_coordinate() or ()), []
    kinds: tuple[Replicate | Shard, ...] = (R, S0, S1)
    for placements in itertools.product(kinds, repeat=mesh.ndim):
        # Only the rank at the source's coordinate on every axis has the values that count.
        counts = source is None or place == (source,) * mesh.ndim
        data = whole.clone() if counts else torch.full(shape, -1.0)
        found = distribute_tensor(data, mesh, placements, src_data_rank=source)
        box = Layout(degrees, placements).box_at(shape, place)
        expected = whole[tuple(slice(lo, hi) for lo, hi in box)]
        back = redistribute(found)
        if not torch.equal(found.to_local(), expected) or not torch.equal(back.to_local(), whole):
            wrong.append(str(placements))
    return wrong


@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize("grid", [TURNED, [[3, 1], [0, 2]], [[1, 0], [3, 2]]], ids=str)
def test_each_rank_is_given_the_part_of_its_coordinate(
    ranks: Pools, grid: list[Any], source: int | None
) -> None:
    assert ranks(4).run(given_out, grid, source, timeout=60.0) == [[]] * 4


def outside(rank: int) -> tuple[str, str, bool]:
    x = source(rank, grid(True))
    name, text = "", ""
    try:
        explain(x, (R, R))
    except MeshError as error:
        name, text = type(error).__name__, str(error)
    grown = redistribute(x, (R, R))
    return name, text, torch.equal(grown.to_local(), full())


def test_a_rank_outside_the_mesh_has_no_plan_and_moves_nothing(ranks: Pools) -> None:
    *members, stranger = ranks(WORLD).run(outside)
    assert members == [("", "", True)] * 4
    assert stranger[0] == "MeshError"
    assert "[3, 1, 0, 2]" in stranger[1]
    assert not stranger[2]


def counted(rank: int) -> tuple[int, int, list[str], list[str]]:
    """How often groups are searched in two calls, then in two after the mesh is flattened."""
    mesh = DeviceMesh("cpu", torch.tensor(GRID), mesh_dim_names=("e", "f"))
    x = source(rank, mesh)
    searched: list[int] = []
    axes: list[list[str]] = []
    for _ in range(2):
        with mock.patch.object(_prepare, "spanned_axes", wraps=_prepare.spanned_axes) as search:
            for _ in range(2):
                collectives = RecordingCollectives()
                redistribute(x, (S1, S0), collectives=collectives)
        searched.append(search.call_count)
        axes.append(list(collectives.by_axis))
        if not mesh._get_root_mesh()._flatten_mapping:
            mesh._flatten("ef")
    return searched[0], searched[1], axes[0], axes[1]


def test_groups_are_searched_once_and_again_after_the_mesh_was_flattened(ranks: Pools) -> None:
    for before, after, apart, together in ranks(WORLD).run(counted)[:4]:
        assert before == after == 1
        assert set(apart) == {"e", "f"}
        assert together == ["e_f"]


def renewed(rank: int) -> tuple[Any, ...]:
    """Two equal meshes, each with its own groups: which one the result and the call are on."""
    first, second = (
        DeviceMesh("cpu", torch.tensor(GRID), mesh_dim_names=("g", "h")) for _ in range(2)
    )
    if first.get_coordinate() is None:
        return ()
    seen = []
    for mesh in (first, second):
        torchs = TorchCollectives()
        with mock.patch.object(torchs, "all_to_all", wraps=torchs.all_to_all) as call:
            y = redistribute(source(rank, mesh), (S0, S0), collectives=torchs)
        groups = [c.args[0].group for c in call.call_args_list]
        own = [mesh.get_group(axis) for axis in range(2)]
        seen.append((y.device_mesh is mesh, [group in own for group in groups]))
    return (first == second, *seen)


def test_equal_meshes_keep_their_own_groups(ranks: Pools) -> None:
    for equal, *seen in ranks(WORLD).run(renewed)[:4]:
        assert equal
        assert seen == [(True, [True])] * 2


def groupless(rank: int) -> tuple[str, str, bool]:
    """Return the errors for meshes without groups: a part of the world, and the whole world."""
    names = ("i", "j")
    part_of_world = DeviceMesh(
        "cpu", torch.tensor(GRID), mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    x = source(rank, part_of_world)
    name, text = "", ""
    if part_of_world.get_coordinate() is not None:
        with pytest.raises(MeshError) as info:
            redistribute(x, (R, R))
        name, text = info.type.__name__, str(info.value)
    world = DeviceMesh(
        "cpu", torch.arange(WORLD), mesh_dim_names=("w",), _init_backend=False, _rank=rank
    )
    whole = full()
    mine = DTensor.from_local(
        chunk_of(whole, rank), world, [theirs.Shard(0)], shape=whole.shape, stride=whole.stride()
    )
    return name, text, torch.equal(redistribute(mine, (R,)).to_local(), whole)


def chunk_of(whole: Tensor, rank: int) -> Tensor:
    chunks = whole.chunk(WORLD)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def test_a_missing_group_is_named_unless_the_worlds_will_do(ranks: Pools) -> None:
    *members, stranger = ranks(WORLD).run(groupless)
    assert members == [members[0]] * 4
    assert members[0][0] == "MeshError"
    assert "axes" in members[0][1]
    assert members[0][2]
    assert stranger[2]
