"""Ranks, coordinates and groups, checked over whole worlds."""

from collections.abc import Callable
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings

from hp_mesh import LayoutError, ParallelDims, RankLayout

from .strategies import dims

FOLDS = {
    "fsdp": ("dp_shard", "cp"),
    "dp": ("dp_replicate", "dp_shard"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_the_last_axis_of_the_order_varies_fastest(dims: ParallelDims) -> None:
    layout = dims.layout()
    base = [name for name in dims.order if name != "ep"]
    expected = product(*(range(layout.size(name)) for name in base))
    for rank, coordinates in enumerate(expected):
        assert layout.coordinates(rank) == dict(zip(base, coordinates, strict=True))


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_coordinates_and_rank_invert_each_other_in_every_view(dims: ParallelDims) -> None:
    layout = dims.layout()
    for name, view in layout.views.items():
        seen = []
        for rank in range(layout.world_size):
            coordinates = layout.coordinates(rank, name)
            assert layout.rank(coordinates, name) == rank
            assert [layout.coordinate(a, rank) for a in view.axes] == list(coordinates.values())
            seen.append(tuple(coordinates.values()))
        assert len(set(seen)) == layout.world_size == prod(view.shape)
        assert [layout.rank(dict(zip(view.axes, c, strict=True)), name) for c in sorted(seen)] == [
            *view.ranks()
        ]


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_the_groups_of_every_name_partition_the_world(dims: ParallelDims) -> None:
    layout = dims.layout()
    for name in layout.names:
        groups = layout.groups(name)
        assert sorted(rank for group in groups for rank in group) == [*range(layout.world_size)]
        assert groups == sorted(groups)
        for group in groups:
            assert len(group) == layout.size(name)
            assert list(group) == sorted(group)
            for index, rank in enumerate(group):
                assert layout.group(name, rank) == group
                assert layout.coordinate(name, rank) == index


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_a_fold_has_the_ranks_that_its_parts_reach(dims: ParallelDims) -> None:
    layout = dims.layout()
    where = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for name, parts in FOLDS.items():
        assert layout.size(name) == prod(layout.size(part) for part in parts)
        for rank in range(0, layout.world_size, 3):
            fixed = {axis: c for axis, c in where[rank].items() if axis not in parts}
            reached = [r for r, other in enumerate(where) if fixed.items() <= other.items()]
            assert list(layout.group(name, rank)) == reached


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_expert_groups_cut_the_dense_block_and_stay_inside_a_stage_and_a_replica(
    dims: ParallelDims,
) -> None:
    layout = dims.layout()
    where = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for name in ("efsdp", "ep", "etp"):
        for group in layout.groups(name):
            assert len({(where[rank]["pp"], where[rank]["dp_replicate"]) for rank in group}) == 1
    for rank in range(0, layout.world_size, 3):
        block = {
            other
            for expert in layout.group("efsdp", rank)
            for peer in layout.group("ep", expert)
            for other in layout.group("etp", peer)
        }
        dense = {o for r in layout.group("fsdp", rank) for o in layout.group("tp", r)}
        assert block == dense
    if dims.etp > 1:
        assert layout.groups("etp") == layout.groups("tp")


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_ulysses_groups_cut_the_context_parallel_groups(dims: ParallelDims) -> None:
    assume(dims.ulysses_degree is not None)
    layout = dims.layout()
    assert layout.size("ulysses") == dims.ulysses_degree
    for rank in range(0, layout.world_size, 3):
        reached = {o for r in layout.group("ulysses", rank) for o in layout.group("cp_outer", r)}
        assert reached == set(layout.group("cp", rank))


@given(dims(max_world=96))
@settings(deadline=None, max_examples=50)
def test_every_name_resolves_whatever_its_size(dims: ParallelDims) -> None:
    layout = dims.layout()
    assert {"pp", *FOLDS, *FOLDS["loss"], "tp", "efsdp", "ep", "etp"} <= set(layout.names)
    assert {"ulysses", "cp_outer"} <= set(layout.names) or dims.ulysses_degree is None
    for name in layout.names:
        assert 0 in layout.group(name, 0)


def test_experts_take_neighbouring_ranks() -> None:
    layout = ParallelDims(dp_shard=2, cp=2, ep=2, pp=2, world_size=8).layout()
    assert layout.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups("efsdp") == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_axes_of_different_views_are_refused_with_the_views_that_have_each() -> None:
    layout = ParallelDims(world_size=4).layout()
    with pytest.raises(LayoutError, match=r"no view has all of .*fsdp is in dense, ep is in spars"):
        layout.find("fsdp", "ep")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layout: layout.size("tq"), "no axis 'tq'; use pp, .* or batch"),
        (lambda layout: layout.size("ulysses"), "set ulysses_degree"),
        (lambda layout: layout.find(), "no axis given; use one or more of pp, .* or batch"),
        (lambda layout: layout.find("tp", "tp"), r"\['tp', 'tp'\] given, .* use each axis once"),
        (lambda layout: layout.group("tp", 4), "rank=4 .* use 0 to 3"),
        (lambda layout: layout.coordinates(-1), "rank=-1 .* use 0 to 3"),
        (lambda layout: layout.coordinates(0, "sparce"), "no view 'sparce'; use dense, base"),
        (lambda layout: layout.rank({"tp": 0}), "use .*'pp', 'dp_replicate'"),
        (
            lambda layout: layout.rank({"pp": 0, "dp": 4, "cp": 0, "tp": 0}, "data"),
            "dp=4 given; use 0 to 3",
        ),
    ],
)
def test_names_ranks_and_coordinates_outside_the_layout_are_refused(
    call: Callable[[RankLayout], object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        call(ParallelDims(world_size=4).layout())
