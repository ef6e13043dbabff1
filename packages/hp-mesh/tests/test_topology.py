"""Nodes: which axes cross them, and what a build knows of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import MeshError, ParallelDims, ParallelDimsError, Topology

from .fakes import fake_world
from .strategies import dims

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "etp", "cp", "tp")


@given(dims(max_world=96), st.integers(1, 16))
@settings(deadline=None, max_examples=100)
def test_an_axis_crosses_nodes_when_some_group_of_it_has_ranks_of_two(
    dims: ParallelDims, node: int
) -> None:
    layout = dims.layout()
    for name in layout.names:
        spread = any(len({rank // node for rank in group}) > 1 for group in layout.groups(name))
        assert layout.crosses_nodes(name, node) is spread


@given(dims(max_world=96), st.data())
@settings(deadline=None, max_examples=100)
def test_the_check_advises_on_exactly_the_axes_that_cross_nodes(
    dims: ParallelDims, data: st.DataObject
) -> None:
    layout = dims.layout()
    nodes = [n for n in range(1, layout.world_size + 1) if layout.world_size % n == 0]
    node = data.draw(st.sampled_from(nodes))
    report = dims.check({}, topology=Topology(ranks_per_node=node))
    found = {axis for v in report if v.rule.startswith("node-") for axis in v.values}
    crossing = {axis for axis in AXES if layout.crosses_nodes(axis, node)}
    assert found - {"ranks_per_node"} == crossing
    assert report.errors == ()


def test_the_advice_names_the_axis_and_the_node() -> None:
    dims = ParallelDims(tp=16, dp_shard=2)
    report = dims.check({}, topology=Topology(ranks_per_node=8))
    assert [str(violation) for violation in report] == [
        "dp_shard=2 crosses nodes of 8 ranks",
        "tp=16 crosses nodes of 8 ranks",
    ]
    assert not dims.check({}, topology=Topology(ranks_per_node=64))


def test_the_axis_inside_the_nodes_is_the_one_that_the_order_puts_last() -> None:
    order = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    dims = ParallelDims(pp=8, tp=4, dp_shard=2, order=order)
    layout = dims.layout()
    assert not layout.crosses_nodes("pp", 8)
    assert layout.crosses_nodes("tp", 8)


def test_ranks_that_do_not_fill_the_nodes_are_an_error() -> None:
    (violation,) = ParallelDims(dp_shard=12).check({}, topology=Topology(ranks_per_node=8))
    assert violation.level == "error"
    assert (
        str(violation) == "ranks_per_node=8 does not divide world_size=12; use 1, 2, 3, 4, 6 or 12"
    )


@pytest.mark.parametrize("value", [0, -8, 2.0, True, "x", None])
def test_a_node_without_a_number_of_ranks_is_refused(value: Any) -> None:
    with pytest.raises(ParallelDimsError, match="ranks_per_node="):
        Topology(ranks_per_node=value)


@pytest.mark.parametrize("topology", [8, 0, "8", {"ranks_per_node": 8}])
def test_a_number_of_ranks_alone_is_no_topology(topology: Any) -> None:
    for ask in (ParallelDims(dp_shard=8).check, ParallelDims(dp_shard=8).explain):
        with pytest.raises(ParallelDimsError, match=r"^topology=.* use Topology\(ranks_per"):
            ask({}, topology=topology)


def test_a_mesh_built_with_a_topology_knows_what_crosses_a_node() -> None:
    dims = ParallelDims(tp=4, dp_shard=4)
    with fake_world(16):
        mesh = dims.build_mesh(topology=Topology(ranks_per_node=8))
        assert [mesh.crosses_nodes(name) for name in ("tp", "fsdp", "batch")] == [False, True, True]
        with pytest.raises(MeshError, match="topology"):
            dims.build_mesh().crosses_nodes("tp")
        with pytest.raises(ParallelDimsError, match="ranks_per_node=3 does not divide"):
            dims.build_mesh(topology=Topology(ranks_per_node=3))


def test_nothing_is_said_to_hold_that_was_not_checked() -> None:
    topology = Topology(ranks_per_node=6)
    world, *axes = ParallelDims(tp=8, world_size=16).explain(topology=topology)[-8:]
    assert (world.verdict, world.text) == (
        "error",
        "ranks_per_node=6 does not divide world_size=16; use 1, 2, 4, 8 or 16",
    )
    assert {each.verdict for each in axes} == {"idle"}
    assert axes[-1].text == "tp=8, but the ranks do not fill nodes of 6 ranks"
    small = ParallelDims(tp=2, world_size=4).explain(topology=Topology(ranks_per_node=8))[-8]
    assert (small.verdict, small.text) == ("holds", "world_size=4 fits one node of 8 ranks")
