"""Time: what must be faster or slower, whatever the constants."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims
from hp_mesh.planner import (
    ACCELERATORS,
    CONSTANTS,
    MODELS,
    Candidate,
    Cluster,
    ModelShape,
    TrainSpec,
    estimate,
    plan,
)
from hp_mesh.planner._cluster import Links, expert_groups_of, groups_of

from .plan_strategies import clusters, nodes, runs, shapes, with_bandwidths

DEFAULT_AXES = ["pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"]
LLAMA = MODELS["llama3-8b"]
TRAIN = TrainSpec(seq_len=8192, global_batch=64, micro_batch=1, recompute="full")


def timed(world: int, train: TrainSpec = TRAIN, *, node: int = 8, **degrees: Any) -> Candidate:
    cluster = Cluster(world_size=world, accelerator="H100", ranks_per_node=node)
    return estimate(LLAMA, cluster, train, ParallelDims(**degrees, world_size=world))


@settings(deadline=None, max_examples=30)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_parts_sum_up_and_every_axis_in_use_is_named(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    found = plan(model, cluster, train)
    assume(found.candidates)
    own = found.candidates[data.draw(st.integers(0, len(found.candidates) - 1))]
    time, dims = own.time, own.dims
    parts = [time.compute, time.bubble, time.optimizer, *time.communication.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(time.total)
    sizes = {
        "tp": dims.tp,
        "cp": dims.cp,
        "fsdp": (dims.dp_shard or 1) * dims.cp,
        "dp_replicate": dims.dp_replicate,
        "ep": dims.ep,
        "pp": dims.pp,
    }
    assert {*time.communication} == {name for name, size in sizes.items() if size > 1}
    assert (time.bubble > 0) == (dims.pp > 1)


@settings(deadline=None, max_examples=30)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_slower_links_and_devices_are_never_faster(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    found = plan(model, cluster, train)
    assume(found.candidates)
    own = found.candidates[data.draw(st.integers(0, len(found.candidates) - 1))]
    chip, cluster = cluster.device, with_bandwidths(cluster)
    for other in (
        replace(cluster, intra_gbs=(cluster.intra_gbs or 0) / 2),
        replace(cluster, inter_gbs=(cluster.inter_gbs or 0) / 2),
        replace(cluster, intra_us=9.0, inter_us=20.0),
        replace(cluster, accelerator=replace(chip, tflops=chip.tflops / 2)),
        replace(cluster, accelerator=replace(chip, hbm_gbs=chip.hbm_gbs / 2)),
    ):
        slower = estimate(model, other, train, own.dims, own.micro_batch, own.recompute)
        assert slower.time.total >= own.time.total - 1e-12
        assert slower.memory == own.memory


@pytest.mark.parametrize(("pp", "stages", "microbatches"), [(4, 1, 8), (8, 1, 8), (4, 2, 16)])
def test_the_bubble_is_pp_less_one_over_microbatches_and_virtual_stages(
    pp: int, stages: int, microbatches: int
) -> None:
    train = replace(
        TRAIN,
        global_batch=microbatches,
        schedule="interleaved" if stages > 1 else "1f1b",
        virtual_stages=stages,
    )
    time = timed(pp, train, pp=pp).time
    busy = time.compute + time.communication["pp"]
    assert time.bubble / busy == pytest.approx((pp - 1) / (microbatches * stages))


def test_recomputing_more_computes_longer() -> None:
    seconds = [
        timed(8, replace(TRAIN, recompute=recompute)).time.compute
        for recompute in ("none", "selective-op", "full")
    ]
    assert seconds == sorted(set(seconds))
    # Full recomputation adds one forward to a forward and a backward of twice the work.
    assert 1.25 < seconds[2] / seconds[0] < 1.4


def test_recomputed_layers_send_their_tokens_to_experts_again() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=4096, global_batch=8, micro_batch=1)
    dims = ParallelDims(ep=8, world_size=8)
    once, again = (
        estimate(MODELS["mixtral-8x7b"], cluster, train, dims, recompute=kind).time
        for kind in ("none", "full")
    )
    # Dispatch and combine, forward and backward; then the forward once more.
    assert again.communication["ep"] == pytest.approx(6 / 4 * once.communication["ep"])


def test_a_group_that_leaves_its_node_communicates_longer() -> None:
    inside = timed(16, node=8, tp=8).time.communication["tp"]
    outside = timed(16, node=4, tp=8).time.communication["tp"]
    assert outside > 2 * inside


@settings(deadline=None, max_examples=100)
@given(
    shard=st.integers(1, 6),
    cp=st.integers(1, 4),
    tp=st.integers(1, 6),
    pp=st.integers(1, 3),
    ep=st.integers(1, 6),
    order=st.permutations(DEFAULT_AXES),
    peer=st.booleans(),
    data=st.data(),
)
def test_links_are_those_of_the_ranks_in_the_worst_group_of_an_axis(
    shard: int,
    cp: int,
    tp: int,
    pp: int,
    ep: int,
    order: list[str],
    peer: bool,
    data: st.DataObject,
) -> None:
    cluster_size = shard * cp * tp * pp * (ep if peer else 1)
    node = data.draw(st.sampled_from(nodes(cluster_size)))
    assume(peer or (shard * cp * tp) % ep == 0)
    order = order if peer else DEFAULT_AXES
    dims = ParallelDims(
        dp_shard=shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        ep_mode="peer" if peer else "folded",
        order=tuple(order),
        world_size=cluster_size,
    )
    links = Links(Cluster(world_size=cluster_size, accelerator="H100", ranks_per_node=node), 0.8)
    groups = groups_of(dims.layout()) | expert_groups_of(dims.layout())
    layout = dims.layout()
    for axis in ("tp", "cp", "fsdp", "pp", "ep", "efsdp"):
        fewest = min(
            min(Counter(rank // node for rank in group).values()) for group in layout.groups(axis)
        )
        assert groups[axis].size == layout.size(axis)
        assert links.ranks_on_node(groups[axis]) == fewest
        assert links.crosses(groups[axis]) == layout.crosses_nodes(axis, node)


@settings(deadline=None, max_examples=100)
@given(
    degrees=st.fixed_dictionaries(
        {"dp_shard": st.integers(1, 6), "cp": st.integers(1, 4), "tp": st.integers(1, 6)}
    ),
    pp=st.integers(1, 3),
    order=st.permutations(DEFAULT_AXES),
    data=st.data(),
)
def test_links_of_folded_experts_are_those_of_their_ranks_in_any_order(
    degrees: dict[str, Any], pp: int, order: list[str], data: st.DataObject
) -> None:
    etp = data.draw(st.sampled_from([1, degrees["tp"]]))
    block = prod(degrees.values()) // etp
    ep = data.draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
    dims = ParallelDims(**degrees, pp=pp, ep=ep, etp=etp, order=tuple(order)).resolve(
        pp * block * etp
    )
    node = data.draw(st.sampled_from(nodes(pp * block * etp)))
    cluster = Cluster(world_size=pp * block * etp, accelerator="H100", ranks_per_node=node)
    links, layout = Links(cluster, 0.8), dims.layout()
    groups = groups_of(dims.layout()) | expert_groups_of(dims.layout())
    for axis in ("ep", "efsdp"):
        fewest = min(
            min(Counter(rank // node for rank in group).values()) for group in layout.groups(axis)
        )
        assert groups[axis].size == layout.size(axis)
        assert links.ranks_on_node(groups[axis]) == fewest


def test_a_group_that_a_node_ends_in_the_middle_of_is_outside() -> None:
    model = ModelShape(layers=4, hidden=96, heads=12, ffn=384, vocab=960)
    train, dims = TrainSpec(seq_len=768, global_batch=12), ParallelDims(dp_shard=2, tp=6)
    seconds = [
        estimate(
            model,
            Cluster(world_size=12, accelerator="H100", ranks_per_node=node, intra_us=0, inter_us=0),
            train,
            dims,
            1,
            "none",
        ).time.communication["tp"]
        for node in (6, 8)
    ]
    # Two of the second group's ranks are alone in the first node of eight, with two cards.
    assert seconds[1] / seconds[0] == pytest.approx(450 / (2 * 50))


def test_heads_are_exchanged_in_the_node_and_the_rest_goes_round() -> None:
    train = replace(TRAIN, seq_len=65536, global_batch=2)
    ring, mixed = (timed(32, train, cp=16, **u) for u in ({}, {"ulysses_degree": 8}))
    assert mixed.memory == ring.memory
    # Two chunks for each of two ranks are longer than two for each of sixteen.
    assert mixed.time.compute < ring.time.compute
    apart = timed(32, train, node=1, cp=16, ulysses_degree=8)
    assert apart.time.communication["cp"] > mixed.time.communication["cp"]
    alone = timed(8, train, cp=8, ulysses_degree=8).time
    assert alone.communication["cp"] > 0
    assert timed(8, train, cp=8, ulysses_degree=1).time == timed(8, train, cp=8).time


def test_ulysses_sends_queries_keys_values_and_outputs_over_the_wire() -> None:
    train = replace(TRAIN, seq_len=65536, global_batch=1, recompute="none")
    exposed = timed(8, train, cp=8, ulysses_degree=8).time.communication["cp"]
    rows = 65536 / 8
    # Queries and outputs of 4096, keys and values of 1024, in bf16; as many again come back.
    sent = 2 * rows * (2 * 4096 + 2 * 1024) * 7 / 8
    wire = 450e9 * CONSTANTS["LINK_EFFICIENCY"]
    assert exposed == pytest.approx(32 * 2 * (sent / wire + 7 * 2e-6))


def test_the_order_of_the_axes_decides_which_of_them_leaves_the_node() -> None:
    cluster = Cluster(world_size=64, accelerator="H100")
    usual = ParallelDims(tp=8, pp=8, world_size=64)
    inner = replace(usual, order=("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"))
    first, second = (estimate(LLAMA, cluster, TRAIN, dims).time for dims in (usual, inner))
    assert second.communication["tp"] > first.communication["tp"]
    assert second.communication["pp"] < first.communication["pp"]
    assert second.compute == first.compute


def test_more_devices_train_more_tokens_and_fp8_is_faster() -> None:
    rates = [timed(world).tokens_per_second_per_gpu * world for world in (8, 16, 32, 64)]
    assert rates == sorted(set(rates))
    assert timed(8, replace(TRAIN, float8=True)).time.total < timed(8).time.total


def test_no_estimate_is_above_the_peak() -> None:
    for name in ("llama3-8b", "mixtral-8x7b"):
        cluster = Cluster(world_size=8, accelerator=ACCELERATORS["B200"])
        found = plan(MODELS[name], cluster, TrainSpec(seq_len=8192, global_batch=64))
        assert all(0 < candidate.mfu < 0.8 for candidate in found.candidates[:50])


def test_the_longest_sequences_are_mostly_attention() -> None:
    short, long = (timed(8, replace(TRAIN, seq_len=n), cp=8) for n in (8192, 262144))
    # Operations on one token grow with the sequence, and so does the time it takes.
    per_token = [c.time.compute / c.tokens for c in (short, long)]
    assert per_token[1] > 5 * per_token[0]


def test_a_tied_embedding_on_two_stages_is_reduced_between_them_once_a_step() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = replace(TRAIN, seq_len=1024)
    shape = ModelShape(layers=8, hidden=1024, heads=8, ffn=4096, vocab=50304)
    for pp, dims in ((1, ParallelDims(world_size=8)), (4, ParallelDims(pp=4, world_size=8))):
        apart, tied = (
            estimate(replace(shape, tied=is_tied), cluster, train, dims).time.communication
            for is_tied in (False, True)
        )
        assert ("pp" in tied) == (pp > 1)
        if pp > 1:
            # Four bytes for each element of the shard, one way over a link inside the node.
            rate = Links(cluster, CONSTANTS["LINK_EFFICIENCY"]).send(
                groups_of(dims.layout())["pp"], 4 * 50304 * 1024 / 2
            )
            assert tied["pp"] - apart["pp"] == pytest.approx(rate, rel=1e-6)
    found = plan(replace(shape, tied=True), cluster, train)
    assert {candidate.dims.pp for candidate in found.candidates} == {1, 2, 4, 8}
