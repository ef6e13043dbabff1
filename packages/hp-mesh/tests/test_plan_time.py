"""Time: what must be faster or slower, whatever the constants."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims
from hp_mesh.plan import (
    ACCELERATORS,
    MODELS,
    Candidate,
    Cluster,
    ModelShape,
    TrainSpec,
    estimate,
    plan,
)

from .plan_strategies import clusters, runs, shapes

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
    chip = cluster.device
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
