"""Ranks, coordinates and groups, checked over whole worlds."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_mesh import DEFAULT_ORDER, LayoutError, ParallelDims

from .strategies import dims


def folds_of(dims: ParallelDims) -> dict[str, tuple[str, ...]]:
    """Return the base axes that each folded name stands for."""
    shard = ("dp_shard", "ep") if dims.ep_mode == "peer" else ("dp_shard",)
    dp = ("dp_replicate", *shard)
    folds = {"dp": dp, "batch": dp, "dp_ep": dp, "loss": (*dp, "cp"), "dp_cp": (*dp, "cp")}
    if dims.fsdp_folds_cp:
        return folds | {"fsdp": (*shard, "cp"), "replicate": ("dp_replicate",)}
    return folds | {"fsdp": shard, "replicate": ("dp_replicate", "cp")}


@given(dims(max_world=96))
@settings(deadline=None, max_examples=60)
def test_the_last_axis_of_the_order_varies_fastest(dims: ParallelDims) -> None:
    layout = dims.layout()
    base = [name for name in dims.order if name != "ep" or dims.ep_mode == "peer"]
    expected = product(*(range(layout.size(name)) for name in base))
    for rank, coordinates in enumerate(expected):
        assert layout.coordinates(rank) == dict(zip(base, coordinates, strict=True))
    assert layout.world_size == prod(layout.size(name) for name in base)


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
    for name, parts in folds_of(dims).items():
        assert layout.size(name) == prod(layout.size(part) for part in parts)
        for rank in range(0, layout.world_size, 3):
            fixed = {axis: c for axis, c in where[rank].items() if axis not in parts}
            reached = [r for r, other in enumerate(where) if fixed.items() <= other.items()]
            assert list(layout.group(name, rank)) == reached


@given(dims(max_world=96))
@settings(deadline=None, max_examples=80)
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
        fixed = {axis: where[rank][axis] for axis in ("pp", "dp_replicate")}
        assert block == {r for r, other in enumerate(where) if fixed.items() <= other.items()}
    if dims.etp == dims.tp:
        assert layout.groups("etp") == layout.groups("tp")


@given(dims(max_world=96))
@settings(deadline=None, max_examples=80)
def test_expert_degrees_keep_the_rule_of_their_mode(dims: ParallelDims) -> None:
    size = dims.layout().size
    dense = size("dp_shard") * size("cp") * size("tp")
    if dims.ep_mode == "folded":
        assert size("ep") * size("etp") * size("efsdp") == dense
        assert size("dp") == size("dp_replicate") * size("dp_shard") == dims.dp_size
    else:
        assert size("efsdp") == size("dp_shard") * size("cp") * (size("tp") // size("etp"))
        assert size("dp") == size("dp_replicate") * size("dp_shard") * size("ep") == dims.dp_size
    assert size("loss") == size("batch") * size("cp")
    assert dims.efsdp == size("efsdp")


@given(dims(max_world=96))
@settings(deadline=None, max_examples=80)
def test_all_ranks_with_the_same_experts_are_one_group(dims: ParallelDims) -> None:
    layout = dims.layout()
    assert layout.size("ep_replicate") == layout.size("dp_replicate") * layout.size("efsdp")
    assert layout.groups("ep_shard") == layout.groups("ep")
    for rank in range(layout.world_size):
        shards = layout.group("efsdp", rank)
        holders = {r for shard in shards for r in layout.group("dp_replicate", shard)}
        assert layout.group("ep_replicate", rank) == tuple(sorted(holders))


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
    assert {"pp", "dp_replicate", "dp_shard", "cp", "tp", "efsdp", "ep", "etp"} <= set(layout.names)
    assert {"ep_replicate", "ep_shard", *folds_of(dims)} <= set(layout.names)
    assert {"ulysses", "cp_outer"} <= set(layout.names) or dims.ulysses_degree is None
    for name in layout.names:
        assert 0 in layout.group(name, 0)


def test_peer_experts_are_one_more_axis_of_data_parallelism() -> None:
    layout = ParallelDims(dp_shard=2, ep=2, tp=2, ep_mode="peer", world_size=8).layout()
    assert layout.coordinates(5) == {
        "pp": 0,
        "dp_replicate": 0,
        "dp_shard": 1,
        "ep": 0,
        "cp": 0,
        "tp": 1,
    }
    assert layout.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp") == layout.groups("fsdp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout.groups("efsdp") == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("order", [DEFAULT_ORDER, ("dp_replicate", "cp", "dp_shard", "tp", "pp")])
def test_ten_thousand_ranks_group_as_an_enumeration_of_their_coordinates_does(
    tp: int, order: tuple[str, ...]
) -> None:
    dims = ParallelDims(dp_replicate=2, cp=3, tp=tp, pp=7, ep=16, world_size=10752, order=order)
    layout = dims.layout()
    base = [name for name in order if name != "ep"]
    ranks = np.arange(10752).reshape([layout.size(name) for name in base])
    for name in base:
        mine = np.moveaxis(ranks, base.index(name), -1).reshape(-1, layout.size(name))
        assert layout.groups(name) == sorted(map(tuple, mine.tolist()))
    block = [base.index(name) for name in base if name in ("dp_shard", "cp", "tp")]
    blocks = np.moveaxis(ranks, block, [-3, -2, -1]).reshape(-1, dims.efsdp, 16)
    assert layout.groups("ep") == sorted(map(tuple, blocks.reshape(-1, 16).tolist()))
    experts = np.moveaxis(blocks, 1, 2).reshape(-1, dims.efsdp)
    assert layout.groups("efsdp") == sorted(map(tuple, experts.tolist()))


@pytest.mark.parametrize("order", [DEFAULT_ORDER, ("tp", "dp_shard", "dp_replicate", "pp", "cp")])
def test_a_layout_lists_no_more_ranks_than_the_groups_that_are_asked_for(
    order: tuple[str, ...],
) -> None:
    dims = ParallelDims(dp_replicate=4, tp=8, pp=4, ep=64, world_size=2**30, order=order)
    layout = dims.layout()  # lists of this many ranks would fill the memory
    assert layout.size("dp_shard") == 2**23
    assert layout.rank(layout.coordinates(2**29 + 3)) == 2**29 + 3
    for name in ("tp", "pp", "ep", "dp_replicate"):
        group = layout.group(name, 2**29 + 3)
        assert len(group) == layout.size(name)
        assert 2**29 + 3 in group


@given(dims(max_world=96), st.data())
@settings(deadline=None, max_examples=60)
def test_an_axis_of_one_rank_may_stand_anywhere_in_the_order(
    dims: ParallelDims, data: st.DataObject
) -> None:
    single = [n for n in dims.order if getattr(dims, n) == 1]
    assume(single)
    moved = data.draw(st.sampled_from(single))
    order = [name for name in dims.order if name != moved]
    order.insert(data.draw(st.integers(0, len(order))), moved)
    layout, other = dims.layout(), replace(dims, order=tuple(order)).layout()
    assert {n: layout.groups(n) for n in layout.names} == {n: other.groups(n) for n in layout.names}


@given(dims(max_world=96), st.data())
@settings(deadline=None, max_examples=60)
def test_the_order_of_outer_axes_leaves_the_groups_of_inner_ones(
    dims: ParallelDims, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(dims.order) - 1))
    outer = data.draw(st.permutations(dims.order[:cut]))
    layout = dims.layout()
    other = replace(dims, order=(*outer, *dims.order[cut:])).layout()
    for name in dims.order[cut:]:
        if name != "ep" or dims.ep_mode == "peer":
            assert layout.groups(name) == other.groups(name)


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
        (lambda layout: layout.size("tq"), "no axis 'tq'; use pp, .* or replicate"),
        (lambda layout: layout.size("ulysses"), "set ulysses_degree"),
        (lambda layout: layout.find(), "no axis given; use one or more of pp, .* or replicate"),
        (lambda layout: layout.find("tp", "tp"), r"\['tp', 'tp'\] given, .* use each axis once"),
        (lambda layout: layout.group("tp", 4), "rank=4 .* use 0 to 3"),
        (lambda layout: layout.coordinates(-1), "rank=-1 .* use 0 to 3"),
        (
            lambda layout: layout.coordinates(0, "sparce"),
            "no view 'sparce'; use dense, sparse, base",
        ),
        (lambda layout: layout.rank({"tp": 0}), "use .*'pp', 'dp_replicate'"),
        (lambda layout: layout.rank(None), "coordinates of None given; use .*'pp', 'dp_replicate'"),
        (lambda layout: layout.rank({1: 0, "tp": 0}), r"of \[1, 'tp'\] given; use .*'pp', 'dp_rep"),
        (
            lambda layout: layout.rank({"pp": 0, "dp": 2.0, "cp": 0, "tp": 0}, "data"),
            "dp=2.0 given; use 0 to 3",
        ),
        (lambda layout: layout.group("tp", "0"), "rank='0' .* use 0 to 3"),
        (lambda layout: layout.group("tp", 1.5), "rank=1.5 .* use 0 to 3"),
        (lambda layout: layout.coordinate("tp", True), "rank=True .* use 0 to 3"),
        (lambda layout: layout.coordinates(None), "rank=None .* use 0 to 3"),
        (lambda layout: layout.coordinates(0, ["base"]), r"no view \['base'\]; use dense, sparse"),
        (lambda layout: layout.size(None), "no axis None; use pp, .* or replicate"),
        (lambda layout: layout.find(["tp"]), r"no axis \['tp'\]; use pp, .* or replicate"),
        (lambda layout: layout.find(("pp", "tp")), r"no axis \('pp', 'tp'\); use pp, .*"),
        (lambda layout: layout.crosses_nodes("tp", 0), "ranks_per_node=0 given; use a positive"),
        (lambda layout: layout.crosses_nodes("tp", -2), "ranks_per_node=-2 given; use a positive"),
        (lambda layout: layout.crosses_nodes("tp", "8"), "ranks_per_node='8' given; use a positi"),
        (
            lambda layout: layout.rank({"pp": 0, "dp": 4, "cp": 0, "tp": 0}, "data"),
            "dp=4 given; use 0 to 3",
        ),
    ],
)
def test_names_ranks_and_coordinates_outside_the_layout_are_refused(
    call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        call(ParallelDims(world_size=4).layout())


def megatron_groups(axis: str, **sizes: int) -> list[tuple[int, ...]]:
    """Return the groups of an axis as Megatron-LM's rank generator has them.

    Its order is tp, cp, ep, dp, pp, the innermost first: a rank's number has its coordinates as
    digits, and a group holds the ranks that differ in one of them. Dense layers and experts have
    axes of their own over the same ranks.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    outermost_first = [*reversed(sizes)]
    for rank, place in enumerate(product(*(range(sizes[name]) for name in outermost_first))):
        rest = tuple(i for name, i in zip(outermost_first, place, strict=True) if name != axis)
        groups.setdefault(rest, []).append(rank)
    return sorted(map(tuple, groups.values()))


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("tp", "ep", "etp"),
    [(1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 2, 4), (2, 4, 1), (2, 2, 2), (4, 1, 2), (4, 8, 1)],
)
def test_groups_of_any_etp_are_those_of_megatron(
    tp: int, ep: int, etp: int, cp: int, pp: int
) -> None:
    dense = {"tp": tp, "cp": cp, "dp": 8 // tp, "pp": pp}
    experts = {"etp": etp, "ep": ep, "efsdp": 8 * cp // (ep * etp), "pp": pp}
    world = 8 * cp * pp
    layout = ParallelDims(
        tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, world_size=world, free_etp=True
    ).layout()
    for sizes in (dense, experts):
        assert prod(sizes.values()) == world
        for axis in sizes:
            assert layout.groups(axis) == megatron_groups(axis, **sizes), axis


@given(dims(max_world=48), st.integers(1, 13))
@settings(deadline=None, max_examples=150)
def test_the_fewest_ranks_of_a_group_on_one_node_are_counted(dims: ParallelDims, node: int) -> None:
    layout = dims.layout()
    for name in layout.names:
        groups = layout.groups(name)
        counts = [sum(r // node == n for r in g) for g in groups for n in {r // node for r in g}]
        assert layout.axis_group(name).on_one_node(node, layout.world_size) == min(counts), name


def test_groups_whose_levels_are_not_in_rank_order_are_counted_too() -> None:
    order = ("ep", "tp", "dp_shard", "dp_replicate", "cp", "pp")
    dims = ParallelDims(
        dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=2, etp=2, world_size=32, order=order
    )
    group = dims.layout().axis_group("ep_replicate")
    strides = [stride for _, stride in group.levels]
    assert strides == sorted(strides)
    assert group.on_one_node(12, 32) == 2
