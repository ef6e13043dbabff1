"""Terms of the cost model, one by one; comparisons, and how far to trust an estimate."""

import pickle
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import (
    ACCELERATORS,
    CONSTANTS,
    MODELS,
    Calibration,
    Candidate,
    Cluster,
    ModelShape,
    TrainSpec,
    Trust,
    compare,
    estimate,
    plan,
    smallest_world,
)

from .plan_strategies import clusters, runs, shapes, with_bandwidths

LLAMA, MIXTRAL, DEEPSEEK = (MODELS[n] for n in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"))
TRAIN = TrainSpec(seq_len=4096, global_batch=64, micro_batch=1, recompute="none")


def cost(
    model: ModelShape = LLAMA, train: TrainSpec = TRAIN, *, world: int = 16, **degrees: Any
) -> Candidate:
    cluster = Cluster(world_size=world, accelerator="H100")
    return estimate(model, cluster, train, ParallelDims(**degrees, world_size=world))


@settings(deadline=None, max_examples=25)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_more_memory_fits_all_that_fitted_and_more_bandwidth_is_never_slower(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    found = plan(model, cluster, train)
    assume(found.candidates)
    chip, cluster = cluster.device, with_bandwidths(cluster)
    larger = replace(cluster, accelerator=replace(chip, memory_gib=2 * chip.memory_gib))
    assert plan(model, larger, train).fitting >= found.fitting
    own = found.candidates[data.draw(st.integers(0, len(found.candidates) - 1))]
    for other in (
        replace(cluster, intra_gbs=2 * (cluster.intra_gbs or 0)),
        replace(cluster, inter_gbs=2 * (cluster.inter_gbs or 0)),
    ):
        faster = estimate(model, other, train, own.dims, own.micro_batch, own.recompute)
        assert faster.time.total <= own.time.total + 1e-12


@settings(deadline=None, max_examples=25)
@given(
    model=shapes(),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    fused=st.sampled_from([True, False, "attention"]),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
)
def test_more_sequences_take_longer(
    model: ModelShape, tp: int, pp: int, fused: Any, zero: Any
) -> None:
    train = TrainSpec(seq_len=128, global_batch=8, micro_batch=1, fused=fused, zero=zero)
    seconds = []
    for more in (train, replace(train, global_batch=16)):
        try:
            seconds.append(
                cost(model, more, world=2 * tp * pp, tp=tp, pp=pp, dp_shard=2).time.total
            )
        except ParallelDimsError:
            assume(False)
    assert seconds[0] <= seconds[1]


@settings(deadline=None, max_examples=150)
@given(
    model=shapes(),
    seq_len=st.sampled_from([64, 512, 4096]),
    degrees=st.fixed_dictionaries(
        {name: st.sampled_from([1, 2]) for name in ("tp", "cp", "pp", "dp_shard", "ep")}
    ),
    options=st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["1f1b", "zero-bubble", "dualpipe"]),
            "recompute": st.sampled_from(["none", "selective-op", "full"]),
            "fused": st.sampled_from([True, False, "attention"]),
            "zero": st.sampled_from([None, 0, 1, 2, 3]),
        }
    ),
    accelerator=st.sampled_from(["A100-80", "H100", "B200"]),
)
def test_nothing_larger_takes_less_time(
    model: ModelShape,
    seq_len: int,
    degrees: dict[str, Any],
    options: dict[str, Any],
    accelerator: str,
) -> None:
    train = TrainSpec(seq_len=seq_len, global_batch=16, micro_batch=1, **options)
    block = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    if not model.experts or block == 1:
        degrees = {**degrees, "ep": 1}
    dims = ParallelDims(**degrees)
    cluster = Cluster(
        world_size=dims.dp_size * dims.non_dp_size, accelerator=accelerator, ranks_per_node=4
    )
    if dims.pp > 1:  # one layer on every rank, also of the wider model
        model = replace(model, layers=dims.pp, dense_layers=0, vocab=256)
    wider = ("hidden", "heads", "ffn", "vocab")
    larger = [replace(model, **{name: 2 * getattr(model, name)}) for name in wider]
    if not model.dense_layers:  # all layers are alike
        larger.append(replace(model, layers=2 * model.layers))
    runs = [(other, train) for other in larger]
    runs += [(model, replace(train, seq_len=2 * seq_len)), (model, replace(train, global_batch=32))]
    try:
        least = estimate(model, cluster, train, dims).time.total
    except ParallelDimsError:
        least = 0.0
    assume(least)
    for other, more in runs:
        with suppress(ParallelDimsError):
            seconds = estimate(other, cluster, more, dims).time.total
            assert seconds >= least * (1 - 1e-12), (other, more)


def test_longer_sequences_take_longer() -> None:
    every: list[dict[str, Any]] = [{"dp_shard": 16}, {"tp": 2, "pp": 2}, {"cp": 2, "tp": 4}]
    for degrees in every:
        seconds = [
            cost(train=replace(TRAIN, seq_len=2048 * more), **degrees).time.total
            for more in (1, 2, 4, 8)
        ]
        assert seconds == sorted(seconds)


def test_stages_of_zero_shard_more_and_stage_3_with_pipeline_stages_is_dearer() -> None:
    every = {
        zero: cost(train=replace(TRAIN, zero=zero), world=32, pp=4, dp_shard=8)
        for zero in (0, 1, 2, 3)
    }
    states = [every[zero].memory.states for zero in (0, 1, 2, 3)]
    assert states == sorted(states, reverse=True)
    whole = LLAMA.parameters / 4
    assert every[0].memory.states > 18 * whole * 0.9
    seconds = {zero: own.time.total for zero, own in every.items()}
    assert seconds[1] < seconds[2] < seconds[3]
    # What FSDP keeps gathered costs the time of stage 1.
    kept = cost(train=TRAIN, world=32, pp=4, dp_shard=8)
    assert kept.time.total == pytest.approx(seconds[1], rel=0.01)


def test_gradients_and_moments_of_less_precision_need_less() -> None:
    wide = cost(train=replace(TRAIN, zero=1), dp_shard=16).memory
    narrow = cost(
        train=replace(TRAIN, zero=1, gradient_dtype="bfloat16", moment_dtype="bfloat16"),
        dp_shard=16,
    ).memory
    assert narrow.gradients == wide.gradients / 2
    assert narrow.optimizer == wide.optimizer / 2


def test_schedules_fill_the_bubble_and_an_open_one_takes_the_best() -> None:
    train = replace(TRAIN, global_batch=32)
    bubbles = {
        name: cost(train=replace(train, schedule=name), world=8, pp=8).time.bubble
        for name in ("1f1b", "zero-bubble", "dualpipe")
    }
    assert bubbles["dualpipe"] < bubbles["zero-bubble"] < bubbles["1f1b"]
    interleaved = replace(train, schedule="interleaved", virtual_stages=2)
    halved = cost(train=interleaved, world=8, pp=8)
    best = cost(train=replace(train, schedule="any"), world=8, pp=8)
    assert best.time.total <= halved.time.total
    assert best.schedule != "1f1b"
    with pytest.raises(ParallelDimsError, match="not both even"):
        cost(train=replace(train, schedule="dualpipe", global_batch=33), world=8, pp=8)


def test_a_chunked_loss_holds_few_logits_and_recomputing_some_layers_lies_between() -> None:
    assert cost(train=replace(TRAIN, fused_loss=True)).memory.logits < cost().memory.logits / 2
    kept = [
        cost(train=replace(TRAIN, recompute="full", recompute_layers=layers)).memory.activations
        for layers in (None, 16, 1)
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[2]


def test_tokens_go_to_a_node_once_to_fewer_nodes_and_in_fp8() -> None:
    degrees = {"dp_shard": 64, "ep": 64}
    every: dict[str, dict[str, Any]] = {
        "copies": {"dispatch": "copies"},
        "once": {"max_nodes": 8},
        "limited": {},
        "fp8": {"fp8_dispatch": True},
    }
    exchange = {
        name: cost(DEEPSEEK, replace(TRAIN, **options), world=64, **degrees).time.communication[
            "ep"
        ]
        for name, options in every.items()
    }
    assert exchange["copies"] > exchange["once"] > exchange["limited"] > exchange["fp8"]


def test_small_experts_and_small_microbatches_reach_less_of_the_peak() -> None:
    small = replace(MIXTRAL, experts=64, top_k=16, expert_ffn=MIXTRAL.expert_width // 8)
    assert small.flops_per_token(4096) == pytest.approx(MIXTRAL.flops_per_token(4096), rel=0.01)
    assert cost(small, world=8, ep=8).tflops < 0.9 * cost(MIXTRAL, world=8, ep=8).tflops
    # Sixteen tokens in a microbatch launch as many kernels as thousands.
    tiny = replace(TRAIN, seq_len=16, global_batch=8)
    floor = 32 * CONSTANTS["LAYER_SECONDS"] * CONSTANTS["FUSED_LAUNCHES"]
    assert cost(train=tiny, world=8).time.compute >= floor


def test_small_experts_gain_less_from_a_faster_device_and_one_expert_is_a_layer() -> None:
    few = replace(MIXTRAL, experts=64, top_k=2, expert_ffn=2048)
    chip = Cluster(world_size=8, accelerator="H100").device
    faster = replace(chip, tflops=2 * chip.tflops, hbm_gbs=2 * chip.hbm_gbs)

    def gain(model: ModelShape, ep: int) -> float:
        first, second = (
            estimate(
                model,
                Cluster(world_size=8, accelerator=each, intra_gbs=450, inter_gbs=50),
                replace(TRAIN, global_batch=8),
                ParallelDims(ep=ep, world_size=8),
            ).time.compute
            for each in (chip, faster)
        )
        return first / second

    assert gain(few, 8) < gain(LLAMA, 1) < 2.01
    # Of eight experts each rank has one, of sixteen two, with as many rows for either.
    alone, both = (
        cost(replace(MIXTRAL, experts=count), world=8, ep=8).time.compute for count in (8, 16)
    )
    assert alone < both


def test_eager_kernels_keep_and_take_more() -> None:
    eager, fused = cost(train=replace(TRAIN, fused="attention"), tp=2), cost(tp=2)
    assert eager.memory.activations > 1.3 * fused.memory.activations
    assert eager.time.total > fused.time.total


def test_gathered_keys_and_values_have_nothing_beside_them() -> None:
    train = replace(TRAIN, seq_len=32768, global_batch=4)
    ring = cost(train=train, cp=4).time
    gathered = cost(train=replace(train, context="all-gather"), cp=4).time
    assert gathered.communication["cp"] > ring.communication["cp"]
    assert gathered.compute < ring.compute


def test_every_accelerator_plans_and_says_that_no_run_resembles_an_unpublished_one() -> None:
    train = TrainSpec(seq_len=4096, global_batch=16)
    for name, chip in ACCELERATORS.items():
        cluster = Cluster(world_size=16, accelerator=name.lower())
        assert cluster.device == chip
        best = plan(LLAMA, cluster, train).best
        assert best is not None
        published = name.startswith(("A100", "H100", "H800", "H200"))
        assert (best.trust.error is not None) == published, name
        assert published or "no published run resembles this" in best.explain()
    assert Cluster(world_size=8, accelerator="a100").device.name == "A100-80"


def test_an_estimate_names_what_sets_it_apart_from_the_published_runs() -> None:
    assert cost(tp=8).trust.resembles == "dense bf16 on H100"
    apart = cost(MODELS["gpt-175b"], world=32, tp=32).trust
    assert apart.differs[0] == "tp=32 leaves the node"
    assert "no published run resembles this" in str(apart) or "off by" in str(apart)


def test_trust_looks_at_the_pipeline() -> None:
    train = TrainSpec(seq_len=8192, global_batch=256, micro_batch=4, recompute="full", float8=True)
    dims = ParallelDims(dp_shard=8, tp=8, pp=8, world_size=512)

    def trust(train: TrainSpec, dims: ParallelDims = dims) -> Trust:
        cluster = Cluster(world_size=512, accelerator="H100")
        return estimate(MODELS["llama3-405b"], cluster, train, dims).trust

    plain, interleaved = trust(train), trust(replace(train, schedule="interleaved", micro_batch=1))
    assert plain.resembles == "dense fp8 on H100 with 1f1b pipelines"
    assert interleaved.resembles == "dense fp8 on H100 with interleaved pipelines"
    without = trust(train, ParallelDims(dp_shard=64, tp=8, world_size=512))
    assert without.resembles == "dense fp8 on H100"
    assert plain.error is not None
    assert interleaved.error is not None
    assert plain.error > interleaved.error
    bf16 = trust(replace(train, float8=False))
    apart = "bf16 without experts on H100 with 1f1b pipelines"
    assert str(bf16) == f"no published run resembles this ({apart})"


def test_trust_looks_at_the_stage_of_zero_and_at_the_kernels() -> None:
    staged = ParallelDims(dp_shard=8, tp=4, pp=2, world_size=64)

    def trust(chip: str, dims: ParallelDims = staged, **changes: Any) -> Trust:
        train = replace(TRAIN, schedule="interleaved", virtual_stages=2, **changes)
        return estimate(LLAMA, Cluster(world_size=64, accelerator=chip), train, dims).trust

    for chip in ("A100-80", "H100"):
        usual = trust(chip)
        assert usual.error is not None
        assert trust(chip, zero=1) == usual
        assert trust(chip, zero=0).error is None
        assert "ZeRO stage 0 with pipeline stages" in str(trust(chip, zero=0))
        assert "eager elementwise kernels" in trust(chip, fused="attention").differs
    flat = ParallelDims(dp_shard=8, tp=8, world_size=64)
    assert "ZeRO stage 0" in trust("H100", flat, zero=0).differs
    assert "ZeRO stage 0" not in trust("H100", flat).differs
    # Nothing is sharded at any stage; the runs published on A100 have such kernels.
    alone = ParallelDims(dp_replicate=8, tp=8, dp_shard=1, world_size=64)
    assert "ZeRO stage 0" not in trust("H100", alone, zero=0).differs
    stores = "attention that stores its scores"
    assert stores not in trust("A100-80", fused=False).differs
    assert stores in trust("H100", fused=False).differs


def test_an_accelerator_of_other_rates_has_neither_the_trust_nor_the_links_of_its_name() -> None:
    other = replace(ACCELERATORS["H100"], tflops=100)
    with pytest.raises(ParallelDimsError, match=r"(?s)intra_gbs=None.*inter_gbs=None") as caught:
        Cluster(world_size=16, accelerator=other)
    assert "a modified H100" in str(caught.value)
    for chip in (other, replace(other, name="hopper")):
        cluster = Cluster(world_size=16, accelerator=chip, intra_gbs=450, inter_gbs=50)
        found = estimate(LLAMA, cluster, TRAIN, ParallelDims(tp=8, world_size=16))
        assert found.trust.error is None
        assert "bf16 without experts on " in str(found.trust)
    same = replace(ACCELERATORS["H100"])
    assert Cluster(world_size=8, accelerator=same) == Cluster(world_size=8, accelerator="H100")


def test_a_comparison_says_which_parts_take_longer_and_why_it_does_not_fit() -> None:
    cluster = Cluster(world_size=16, accelerator="H100")
    train = TrainSpec(seq_len=4096, global_batch=64, zero=0)
    found = compare(LLAMA, cluster, train, ParallelDims(dp_shard=16, world_size=16))
    assert found.own.fit == "does not fit"
    assert [violation.rule for violation in found.violations] == ["memory"]
    assert next(iter(found.memory)) in ("optimizer", "gradients", "parameters")
    assert sum(found.time.values()) == pytest.approx(found.own.time.total - found.best.time.total)
    assert "more than there" in str(found)
    same = compare(LLAMA, cluster, train, found.best.dims)
    assert same.slowdown == 1
    assert "this is the best configuration" in str(same)


def test_the_smallest_world_fits_and_half_of_it_does_not() -> None:
    train = TrainSpec(seq_len=4096, global_batch=1536)
    cluster = Cluster(world_size=8, accelerator="H100")
    model = MODELS["llama3-70b"]
    least = smallest_world(model, cluster, train)
    assert least is not None
    assert plan(model, replace(cluster, world_size=least), train).fitting
    assert not plan(model, replace(cluster, world_size=least // 2), train).fitting
    assert smallest_world(model, cluster, train, largest=8) is None


def test_progress_goes_from_nothing_to_all() -> None:
    calls: list[tuple[int, int]] = []
    cluster = Cluster(world_size=256, accelerator="H100")
    train = TrainSpec(seq_len=4096, global_batch=256)
    plan(MIXTRAL, cluster, train, progress=lambda done, all_: calls.append((done, all_)))
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_constants_can_be_replaced_and_each_has_a_meaning_and_a_source() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    dims = ParallelDims(world_size=8)
    slow = Calibration(gemm_efficiency=0.5)
    usual = estimate(LLAMA, cluster, TRAIN, dims).time
    assert estimate(LLAMA, cluster, TRAIN, dims, calibration=slow).time.compute > usual.compute
    for constant in Calibration.__dataclass_fields__.values():
        assert f"\n        {constant.name}: " in str(Calibration.__doc__)
        assert constant.metadata["source"]
    with pytest.raises(ParallelDimsError, match="gemm_efficiency=-1 given"):
        Calibration(gemm_efficiency=-1)


def test_the_memory_that_may_be_planned_for_is_the_clusters_where_it_says() -> None:
    dims = ParallelDims(world_size=8)
    limits = [
        estimate(
            LLAMA, Cluster(world_size=8, accelerator="H100", memory_fraction=share), TRAIN, dims
        ).limit
        for share in (None, 0.5)
    ]
    assert limits[1] == pytest.approx(limits[0] / 0.95 / 2)
    with pytest.raises(ParallelDimsError, match=r"memory_fraction=1\.5 given; use 1 or below"):
        Cluster(world_size=8, accelerator="H100", memory_fraction=1.5)


def test_an_expert_tensor_degree_without_a_price_is_refused() -> None:
    with pytest.raises(
        ParallelDimsError, match="etp=4 is neither 1 nor tp=1, and estimates need one"
    ):
        cost(MIXTRAL, world=8, dp_shard=8, ep=2, etp=4, free_etp=True)


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_replicas_and_shards_of_stage_0_are_one_run(model: str) -> None:
    train = TrainSpec(seq_len=2048, global_batch=128, zero=0, micro_batch=1, recompute="full")
    seconds, needs = [], []
    for replicas in (1, 2, 8, 64):
        own = cost(MODELS[model], train, world=64, dp_replicate=replicas, dp_shard=64 // replicas)
        seconds.append(own.time.total)
        needs.append(own.memory.total)
    assert max(seconds) == pytest.approx(min(seconds), rel=1e-6)
    assert max(needs) == min(needs)


def test_an_open_schedule_keeps_degrees_that_no_interleaving_has() -> None:
    cluster = Cluster(world_size=256, accelerator="H100")
    train = TrainSpec(seq_len=8192, global_batch=512, schedule="any", virtual_stages=8)
    dims = ParallelDims(tp=4, pp=16, world_size=256)
    assert estimate(MODELS["llama3-70b"], cluster, train, dims).virtual_stages == 1
    with pytest.raises(ParallelDimsError, match="is more than layers=80"):
        estimate(MODELS["llama3-70b"], cluster, replace(train, schedule="interleaved"), dims)


@pytest.mark.parametrize(("model", "pp"), [("llama3-405b", 16), ("llama3-8b", 4)])
def test_no_number_of_virtual_stages_is_faster_than_the_one_found(model: str, pp: int) -> None:
    cluster = Cluster(world_size=1024, accelerator="H200")
    train = TrainSpec(seq_len=4096, global_batch=1024, schedule="interleaved", micro_batch=1)
    dims, shape = ParallelDims(tp=8, pp=pp, world_size=1024), MODELS[model]
    found = estimate(shape, cluster, train, dims)
    for stages in range(2, (shape.layers + 2) // pp + 1):
        other = estimate(shape, cluster, replace(train, virtual_stages=stages), dims)
        assert other.fit != "fits" or other.time.total >= found.time.total


@pytest.mark.parametrize("batch", [24, 48, 60])
def test_no_micro_batch_is_faster_than_the_one_found(batch: int) -> None:
    train = TrainSpec(seq_len=1024, global_batch=batch * 16, recompute="full", zero=1)
    best = cost(MODELS["qwen3-30b-a3b"], train, ep=16).time.total
    for size in (n for n in range(1, batch + 1) if batch % n == 0):
        own = cost(MODELS["qwen3-30b-a3b"], replace(train, micro_batch=size), ep=16)
        assert own.fit != "fits" or own.time.total >= best


def test_every_rank_of_a_zero_bubble_schedule_has_as_many_microbatches_in_flight() -> None:
    # One layer on each rank, so that the last one, which has the logits, needs most.
    model = ModelShape(layers=8, hidden=4096, heads=32, ffn=16384, vocab=16384)
    train = replace(TRAIN, schedule="zero-bubble", seq_len=1024)
    own, one = (cost(model, replace(train, global_batch=b), world=8, pp=8) for b in (64, 1))
    assert own.memory.logits == one.memory.logits > 0
    assert own.memory.activations == pytest.approx(8 * one.memory.activations, rel=0.01)


def test_scores_that_are_not_kept_are_computed_again() -> None:
    train = replace(TRAIN, fused=False, recompute="selective-op", micro_batch=1)
    more, own = (
        cost(train=replace(train, recompute=kind)).time.compute for kind in ("selective-op", "none")
    )
    selective = cost(train=replace(train, recompute="selective")).time.compute
    assert more > selective > own


@pytest.mark.parametrize(
    ("options", "degrees", "text"),
    [
        ({"zero": 0}, {"pp": 4}, "ZeRO stage 0 with pipeline stages"),
        ({"fused": "attention"}, {}, "eager elementwise kernels"),
        ({"fused": False}, {}, "attention that stores its scores"),
    ],
)
def test_trust_names_kernels_and_stages_that_no_published_run_has(
    options: dict[str, Any], degrees: dict[str, Any], text: str
) -> None:
    assert text in str(cost(train=replace(TRAIN, **options), **degrees).trust)


def test_a_device_of_your_own_does_not_resemble_published_runs_by_its_name() -> None:
    slow = replace(ACCELERATORS["H100"], tflops=100.0)
    cluster = Cluster(world_size=16, accelerator=slow, intra_gbs=450, inter_gbs=50)
    own = estimate(LLAMA, cluster, TRAIN, ParallelDims(world_size=16))
    assert own.trust.error is None
    assert "a modified H100" in str(own.trust)


@pytest.mark.parametrize(
    "name",
    [*(f.name for f in fields(Calibration) if f.name.endswith("_efficiency")), "flash2_tflops"],
)
def test_an_efficiency_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ParallelDimsError, match=f"{name}=0 given; use a number above 0"):
        Calibration(**{name: 0})


def test_a_plan_can_be_pickled() -> None:
    train = TrainSpec(seq_len=4096, global_batch=64, micro_batch=1)
    found = plan(MODELS["llama3-8b"], Cluster(world_size=8, accelerator="H100"), train)
    copied = pickle.loads(pickle.dumps(found))
    assert copied.best == found.best
    assert str(copied) == str(found)
