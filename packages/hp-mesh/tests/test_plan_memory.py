"""Memory: the formulas of the papers, exactly, and what may only grow or shrink."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import (
    CONSTANTS,
    MODELS,
    Candidate,
    Cluster,
    MemorySplit,
    ModelShape,
    TrainSpec,
    estimate,
    plan,
)

from .plan_strategies import clusters, runs, shapes

# The logits of its vocabulary leave room for a layer that is computed again.
GPT = ModelShape(layers=16, hidden=2048, heads=16, ffn=8192, vocab=51200, glu=False)


def paper(train: TrainSpec, vocab: int = 51200, **degrees: Any) -> MemorySplit:
    """Return the memory of a run without data parallelism, activations as the paper has them."""
    dims = ParallelDims(**degrees, dp_shard=1)
    cluster = Cluster(world_size=dims.non_dp_size, accelerator="A100-80")
    return estimate(replace(GPT, vocab=vocab), cluster, train, dims).memory


def per_layer(split: MemorySplit, train: TrainSpec) -> float:
    """Return the bytes of one layer for each element of its hidden state."""
    rows = train.seq_len * (train.micro_batch or 1) * GPT.hidden * GPT.layers
    return split.activations / CONSTANTS["FRAGMENTATION"] / rows


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_activations_are_those_of_the_paper(tp: int, micro_batch: int) -> None:
    # arXiv 2205.05198: table 2, rows "tensor and sequence parallelism" and those after it.
    train = TrainSpec(seq_len=1024, global_batch=4, micro_batch=micro_batch, fused=False)
    scores = 5 * GPT.heads * train.seq_len / GPT.hidden
    cases: list[tuple[Any, float]] = [("none", 34 + scores), ("selective", 34), ("full", 2)]
    for recompute, expected in cases:
        split = paper(replace(train, recompute=recompute), tp=tp)
        assert per_layer(split, train) == pytest.approx(expected / tp)


@pytest.mark.parametrize(("pp", "stages"), [(2, 1), (8, 1), (2, 4), (4, 2)])
def test_the_first_stage_holds_all_layers_and_interleaving_adds_its_part(
    pp: int, stages: int
) -> None:
    # Section 4.2.3: L/p layers of p microbatches, times 1 + (p - 1) / (p m) if interleaved.
    train = TrainSpec(
        seq_len=1024,
        global_batch=64,
        micro_batch=1,
        recompute="selective",
        fused=False,
        schedule="interleaved" if stages > 1 else "1f1b",
        virtual_stages=stages,
    )
    first = 1 + (pp - 1) / (pp * stages) if stages > 1 else 1
    # With so few words the first stage needs most.
    split = paper(train, vocab=256, pp=pp)
    assert split.logits == 0
    # One layer's scores are computed again, and no logits make room for them here.
    again = 5 * GPT.heads * train.seq_len / GPT.hidden / GPT.layers
    assert per_layer(split, train) == pytest.approx(34 * first + again)


def test_few_microbatches_are_all_that_a_stage_can_hold() -> None:
    train = TrainSpec(seq_len=256, global_batch=2, micro_batch=1, recompute="none")
    many = paper(replace(train, global_batch=8), vocab=256, pp=4)
    assert paper(train, vocab=256, pp=4).activations == pytest.approx(many.activations / 2)


@settings(deadline=None, max_examples=30)
@given(model=shapes(experts=False), shard=st.sampled_from([1, 2, 4, 8]))
def test_states_are_16_bytes_a_parameter_over_all_shards(model: ModelShape, shard: int) -> None:
    cluster = Cluster(world_size=shard, accelerator="H100")
    train = TrainSpec(seq_len=64, global_batch=8)
    own = estimate(model, cluster, train, ParallelDims(world_size=shard))
    assert own.memory.states == pytest.approx(16 * model.parameters / shard, rel=1e-2)
    assert own.memory.optimizer == 2 * own.memory.parameters == 2 * own.memory.gradients


def test_experts_are_sharded_over_ep_and_efsdp() -> None:
    model = ModelShape(
        layers=2, hidden=64, heads=4, ffn=64, vocab=8, experts=64, top_k=2, expert_ffn=512
    )
    cluster = Cluster(world_size=16, accelerator="H100")
    train = TrainSpec(seq_len=64, global_batch=16)
    for ep, tp, etp in [(1, 1, 1), (4, 1, 1), (16, 1, 1), (8, 2, 1), (8, 2, 2)]:
        dims = ParallelDims(ep=ep, tp=tp, etp=etp, world_size=16)
        memory = estimate(model, cluster, train, dims, 1, "none").memory
        assert dims.efsdp == 16 // (ep * etp)
        assert memory.states == pytest.approx(16 * model.parameters / 16, rel=1e-2)
        # Fewer ranks gather one layer's experts the more ranks share them.
        gathered = 2 * 3 * 64 * 512 * 64 * 2 / (ep * etp)
        assert memory.buffers > gathered


def test_logits_are_16_bytes_an_element() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=131072, global_batch=2, recompute="full")
    own = estimate(GPT, cluster, train, ParallelDims(cp=4, world_size=8))
    elements = 131072 // 4 * 51200
    assert own.memory.logits == pytest.approx(CONSTANTS["FRAGMENTATION"] * 16 * elements)
    assert own.memory.logits > own.memory.total / 2


@settings(deadline=None, max_examples=30)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_parts_sum_up_and_none_is_negative(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    found = plan(model, cluster, train)
    assume(found.candidates)
    memory = found.candidates[data.draw(st.integers(0, len(found.candidates) - 1))].memory
    parts = [getattr(memory, field.name) for field in fields(memory)]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(memory.total)


def grown(model: ModelShape, train: TrainSpec, **degrees: Any) -> Candidate | None:
    dims = ParallelDims(**degrees)
    world = dims.dp_size * dims.non_dp_size
    train = replace(train, global_batch=24 * dims.dp_size, micro_batch=2)
    try:
        cluster = Cluster(world_size=world, accelerator="H100")
        return estimate(model, cluster, train, dims, recompute=train.recompute or "full")
    except ParallelDimsError:
        return None


@settings(deadline=None, max_examples=60)
@given(
    model=shapes(),
    train=runs(),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    shard=st.sampled_from([1, 2, 4]),
)
def test_more_shards_never_hold_more_states(
    model: ModelShape, train: TrainSpec, tp: int, pp: int, shard: int
) -> None:
    few = grown(model, train, tp=tp, pp=pp, dp_shard=shard)
    many = grown(model, train, tp=tp, pp=pp, dp_shard=2 * shard)
    assume(few is not None and many is not None)
    assert few is not None
    assert many is not None
    assert many.memory.states <= few.memory.states


@settings(deadline=None, max_examples=80)
@given(
    model=shapes(),
    train=runs(),
    tp=st.sampled_from([1, 2, 4]),
    whole=st.booleans(),
    ep=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    shard=st.sampled_from([1, 2, 4]),
)
@example(
    model=MODELS["mixtral-8x7b"],
    train=TrainSpec(seq_len=4096, global_batch=8),
    tp=8,
    whole=True,
    ep=1,
    pp=2,
    shard=1,
)
def test_replicas_that_become_shards_never_need_more(
    model: ModelShape, train: TrainSpec, tp: int, whole: bool, ep: int, pp: int, shard: int
) -> None:
    degrees = {"tp": tp, "etp": 1 if whole else tp, "ep": ep, "pp": pp}
    assume(shard * tp % (ep * degrees["etp"]) == 0)
    few = grown(model, train, dp_replicate=2, dp_shard=shard, **degrees)
    many = grown(model, train, dp_replicate=1, dp_shard=2 * shard, **degrees)
    assume(few is not None and many is not None)
    assert few is not None
    assert many is not None
    assert many.memory.total <= few.memory.total


def test_whole_experts_of_a_tensor_parallel_group_are_sharded_without_shards_of_the_data() -> None:
    cluster = Cluster(world_size=32, accelerator="H100")
    train = TrainSpec(seq_len=4096, global_batch=8)
    few, many = (
        estimate(MODELS["mixtral-8x7b"], cluster, train, dims, 1, "none").memory
        for dims in (
            ParallelDims(dp_replicate=2, dp_shard=1, tp=8, pp=2, world_size=32),
            ParallelDims(dp_replicate=1, dp_shard=2, tp=8, pp=2, world_size=32),
        )
    )
    assert many.total < few.total
    # Half of all experts' gradients are added up in float32 before they are reduced over tp.
    experts = MODELS["mixtral-8x7b"].expert_parameters / 2
    assert few.buffers > CONSTANTS["FRAGMENTATION"] * (2 + 4) * experts


@settings(deadline=None, max_examples=40)
@given(model=shapes(), seq_len=st.sampled_from([64, 512]), fused=st.booleans())
def test_recomputing_more_and_smaller_microbatches_never_need_more(
    model: ModelShape, seq_len: int, fused: bool
) -> None:
    cluster = Cluster(world_size=1, accelerator="H100")
    train = TrainSpec(seq_len=seq_len, global_batch=8, fused=fused)
    dims = ParallelDims(world_size=1)
    totals = [
        estimate(model, cluster, train, dims, 4, recompute).memory.total
        for recompute in ("full", "selective-op", "selective", "none")
    ]
    assert totals == sorted(totals)
    for smaller, larger in ((1, 2), (2, 4), (4, 8)):
        one = estimate(model, cluster, train, dims, smaller, "none").memory.total
        two = estimate(model, cluster, train, dims, larger, "none").memory.total
        assert one < two
