"""HSDP degrees: their product is the data-parallel size, or an error with the numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDimsError
from hp_mesh.world import HybridShard

degrees = st.integers(1, 64)


@given(degrees, degrees, degrees, st.integers(1, 8))
@settings(deadline=None, max_examples=300)
def test_the_product_is_the_data_parallel_size_or_an_error_names_the_numbers(
    dp_size: int, replicas: int, shard_degree: int, others: int
) -> None:
    world_size = dp_size * others
    for hybrid in (
        HybridShard(replicas=replicas),
        HybridShard(shard_degree=shard_degree),
        HybridShard(replicas=replicas, shard_degree=shard_degree),
    ):
        product = (hybrid.replicas or 1) * (hybrid.shard_degree or 1)
        both = hybrid.replicas and hybrid.shard_degree
        if product == dp_size if both else dp_size % product == 0:
            found = hybrid.split(dp_size, world_size)
            assert found[0] * found[1] == dp_size
            assert found[0] == (hybrid.replicas or found[0])
            assert found[1] == (hybrid.shard_degree or found[1])
        else:
            with pytest.raises(ParallelDimsError) as caught:
                hybrid.split(dp_size, world_size)
            for number in (product, dp_size, world_size):
                assert str(number) in str(caught.value)


@given(degrees, degrees, st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=200)
def test_with_neither_there_is_one_replica_per_node(
    nodes: int, ranks_per_node: int, others: int
) -> None:
    world_size = nodes * ranks_per_node
    dp_size, left = divmod(world_size, others)
    if left:
        return
    hybrid = HybridShard(ranks_per_node=ranks_per_node)
    if dp_size % nodes == 0:
        assert hybrid.split(dp_size, world_size) == (nodes, dp_size // nodes)
    else:
        with pytest.raises(ParallelDimsError, match=f"^replicas={nodes} "):
            hybrid.split(dp_size, world_size)


@given(degrees, degrees)
@settings(deadline=None, max_examples=100)
def test_every_legal_value_that_an_error_names_works(dp_size: int, replicas: int) -> None:
    try:
        HybridShard(replicas=replicas).split(dp_size, dp_size)
    except ParallelDimsError as error:
        legal = error.violations[0].legal["replicas"]
        assert legal
        for value in legal:
            assert HybridShard(replicas=value).split(dp_size, dp_size)[0] == value


def test_a_product_too_small_is_an_error_and_not_a_smaller_mesh() -> None:
    expected = r"^replicas=2 \* shard_degree=2 = 4 is not dp_size=8, the data-parallel ranks of "
    with pytest.raises(ParallelDimsError, match=expected + "world_size=16; use replicas=4, or "):
        HybridShard(replicas=2, shard_degree=2).split(8, 16)


def test_more_nodes_than_data_parallel_ranks_is_an_error_and_no_division_by_zero() -> None:
    expected = r"^replicas=4 \(one per node: world_size=8 / ranks_per_node=2\) does not divide "
    with pytest.raises(ParallelDimsError, match=expected + "dp_size=2, .*use 1 or 2$"):
        HybridShard(ranks_per_node=2).split(2, 8)


def test_the_launcher_says_how_many_ranks_a_node_has_unless_an_argument_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert HybridShard().split(16, 16) == (4, 4)
    assert HybridShard(ranks_per_node=8).split(16, 16) == (2, 8)
    with pytest.raises(
        ParallelDimsError, match=r"^LOCAL_WORLD_SIZE=4 does not divide world_size=6"
    ):
        HybridShard().split(6, 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    with pytest.raises(ParallelDimsError, match=r"^LOCAL_WORLD_SIZE='none' is not a degree"):
        HybridShard().split(16, 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ParallelDimsError, match="give replicas, shard_degree or ranks_per_node"):
        HybridShard().split(16, 16)
    assert HybridShard(replicas=2).split(16, 16) == (2, 8)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "two"])
@pytest.mark.parametrize("name", ["replicas", "shard_degree", "ranks_per_node"])
def test_a_value_that_is_no_degree_is_refused_at_once(name: str, value: object) -> None:
    arguments: dict[str, object] = {name: value}
    with pytest.raises(ParallelDimsError, match=f"^{name}={value!r} is not a degree"):
        HybridShard(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["replicas", "shard_degree"])
def test_nodes_beside_a_degree_are_refused(name: str) -> None:
    with pytest.raises(ParallelDimsError, match=f"ranks_per_node=8 has no effect with {name}=2"):
        HybridShard(**{name: 2}, ranks_per_node=8)
