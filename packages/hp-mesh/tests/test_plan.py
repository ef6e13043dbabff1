"""The planner's list: complete, legal, ranked, the same each time."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError, planner
from hp_mesh import plan as root_plan
from hp_mesh.planner import (
    MODELS,
    Candidate,
    Cluster,
    ModelShape,
    TrainSpec,
    estimate,
    plan,
)
from hp_mesh.planner._result import CLASSES
from hp_mesh.planner._train import RECOMPUTE

from .plan_strategies import clusters, runs, shapes
from .strategies import divisors

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
GPT2 = ModelShape(layers=12, hidden=768, heads=12, ffn=3072, vocab=50304, glu=False)


def degrees(dims: ParallelDims) -> tuple[int, ...]:
    return tuple(getattr(dims, axis) for axis in AXES)


def all_degrees(world: int, experts: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for replicas in divisors(world):
        for shard in divisors(world // replicas):
            for cp in divisors(world // replicas // shard):
                for tp in divisors(world // replicas // shard // cp):
                    pp = world // replicas // shard // cp // tp
                    for etp in {1, tp} if experts else {1}:
                        for ep in divisors(shard * cp * tp // etp) if experts else [1]:
                            values = (replicas, shard, cp, tp, pp, ep, etp)
                            found.append(dict(zip(AXES, values, strict=True)))
    return found


@settings(deadline=None, max_examples=30)
@given(model=shapes(), cluster=clusters(), train=runs())
def test_every_candidate_passes_the_check_and_every_rejection_says_why(
    model: ModelShape, cluster: Cluster, train: TrainSpec
) -> None:
    found = plan(model, cluster, train)
    for candidate in found.candidates[:: 1 + len(found.candidates) // 40]:
        report = candidate.dims.check(model.to_config(), train.seq_len, train.global_batch)
        assert not report.errors
        assert candidate.dims.world_size == cluster.world_size
        assert candidate.microbatches * candidate.micro_batch * candidate.dims.dp_size == (
            train.global_batch
        )
    for rejection in found.rejected:
        assert rejection.violations
        assert all(violation.level == "error" for violation in rejection.violations)
        assert str(rejection)
    assert len(found.fits) + len(found.borderline) + len(found.too_large) == len(found.candidates)
    assert found.considered == len(found.candidates) + len(found.rejected)


@settings(deadline=None, max_examples=25)
@given(model=shapes(), cluster=clusters(), train=runs())
def test_all_degrees_are_candidates_or_rejected_and_none_is_both(
    model: ModelShape, cluster: Cluster, train: TrainSpec
) -> None:
    train = replace(train, micro_batch=None, schedule="1f1b", virtual_stages=1)
    found = plan(model, cluster, train)
    kept = {degrees(candidate.dims) for candidate in found.candidates}
    for choice in all_degrees(cluster.world_size, model.experts > 0):
        dims = ParallelDims(**choice, world_size=cluster.world_size)
        report = dims.check(
            model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        legal = not report.errors and model.shared_ffn % dims.tp == 0
        legal &= not model.experts or model.expert_width % dims.etp == 0
        rejected = any(choice.items() >= dict(r.degrees).items() for r in found.rejected)
        assert rejected == (not legal)
        assert (degrees(dims) in kept) == legal


@settings(deadline=None, max_examples=20)
@given(model=shapes(), cluster=clusters(), train=runs())
def test_what_fits_comes_first_and_the_fastest_of_it_before_the_others(
    model: ModelShape, cluster: Cluster, train: TrainSpec
) -> None:
    found = plan(model, cluster, train)
    some = slice(0, 30)
    assert {c.fit for c in found.fits[some]} <= {"fits"}
    assert {c.fit for c in found.borderline[some]} <= {"borderline"}
    assert {c.fit for c in found.too_large[some]} <= {"does not fit"}
    # What to run comes first, then the others in order.
    for group in (found.fits[1:30], found.borderline[some]):
        seconds = [candidate.time.total for candidate in group]
        assert seconds == sorted(seconds)
    sizes = [candidate.memory.total for candidate in found.too_large[some]]
    assert sizes == sorted(sizes)
    assert found.best == (found.candidates[0] if found.candidates else None)


@settings(deadline=None, max_examples=15)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_a_candidate_is_what_estimate_says_and_planning_again_gives_the_same(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    found, again = plan(model, cluster, train), plan(model, cluster, train)
    assert list(found.candidates[:20]) == list(again.candidates[:20])
    assert [str(r) for r in found.rejected] == [str(r) for r in again.rejected]
    if found.candidates:
        candidate = found.candidates[data.draw(st.integers(0, len(found.candidates) - 1))]
        own = estimate(
            model, cluster, train, candidate.dims, candidate.micro_batch, candidate.recompute
        )
        assert own == candidate


def test_equal_runs_have_equal_plans() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=1024, global_batch=64)
    found, again = plan(GPT2, cluster, train), plan(GPT2, cluster, train)
    assert (found, hash(found)) == (again, hash(again))
    assert found.fits == again.fits
    assert found.fits[1:] != found.fits
    other = plan(replace(GPT2, vocab=50432), cluster, train)
    assert len(other.candidates) == len(found.candidates)
    assert other.candidates != found.candidates


def test_without_a_setting_estimate_takes_the_best_one_of_the_plan() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=1024, global_batch=64)
    found = plan(GPT2, cluster, train)
    assert found.best is not None
    assert estimate(GPT2, cluster, train, found.best.dims) == found.best


@settings(deadline=None, max_examples=60)
@given(
    shape=shapes(),
    large=st.sampled_from([None, "llama3-8b", "gpt-22b"]),
    batch=st.sampled_from([24, 64, 120]),
    dims=st.sampled_from([{}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}]),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
    fused=st.sampled_from([True, False, "attention"]),
    accelerator=st.sampled_from(["A100-80", "H100"]),
    share=st.sampled_from([1.0, 0.9, 0.6, 0.01, 0.003]),
)
@example(None, "gpt-22b", 64, {"cp": 2}, 3, True, "H100", 0.95)
@example(None, "gpt-22b", 64, {"cp": 2}, None, "attention", "A100-80", 0.95)
def test_no_other_micro_batch_and_recomputation_that_fits_is_faster(
    shape: ModelShape,
    large: str | None,
    batch: int,
    dims: dict[str, Any],
    zero: Any,
    fused: Any,
    accelerator: str,
    share: float,
) -> None:
    model = MODELS[large] if large else shape
    cluster = Cluster(world_size=8, accelerator=accelerator, memory_fraction=share)
    train = TrainSpec(seq_len=2048, global_batch=batch, zero=zero, fused=fused)
    given_dims = ParallelDims(**dims, world_size=8)
    try:
        chosen = estimate(model, cluster, train, given_dims)
    except ParallelDimsError:
        reject()
    local = batch // chosen.dims.dp_size
    every = [
        estimate(model, cluster, train, given_dims, size, kind)
        for size in divisors(local)
        for kind in RECOMPUTE
    ]
    assert chosen.fit == min((one.fit for one in every), key=CLASSES.index)
    if chosen.fit != "does not fit":
        fastest = min(one.time.total for one in every if one.fit == chosen.fit)
        assert chosen.time.total == pytest.approx(fastest, rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_on_ranks_of_their_own_need_the_same_but_sit_where_their_axis_is(tp: int) -> None:
    model, train = MODELS["mixtral-8x7b"], TrainSpec(seq_len=4096, global_batch=64)
    cluster = Cluster(world_size=32, accelerator="H100")
    peer = ParallelDims(dp_shard=4 // tp, ep=8, tp=tp, world_size=32, ep_mode="peer")
    folded = ParallelDims(dp_shard=32 // tp, ep=8, tp=tp, world_size=32)
    ours, theirs = (estimate(model, cluster, train, dims, 1, "none") for dims in (peer, folded))
    assert ours.memory == theirs.memory
    assert ours.dims == peer
    if tp == 1:
        assert ours.time == theirs.time
    else:  # every second rank of sixteen, in two nodes, against eight ranks of one
        assert peer.layout().group("ep", 0) == tuple(range(0, 16, 2))
        assert ours.time.communication["ep"] > 2 * theirs.time.communication["ep"]
        assert ours.time.communication["tp"] == theirs.time.communication["tp"]


def test_the_place_of_peer_experts_in_the_order_decides_their_links() -> None:
    model, train = MODELS["mixtral-8x7b"], TrainSpec(seq_len=4096, global_batch=64)
    cluster = Cluster(world_size=32, accelerator="H100")
    usual = ParallelDims(dp_shard=2, ep=8, tp=2, world_size=32, ep_mode="peer")
    inner = replace(usual, order=("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    first, second = (estimate(model, cluster, train, d, 1, "none").time for d in (usual, inner))
    assert second.communication["ep"] < first.communication["ep"]
    assert second.communication["tp"] > first.communication["tp"]


def test_where_nothing_fits_the_best_is_the_nearest_miss() -> None:
    cluster = Cluster(world_size=8, accelerator="A100-80")
    found = plan(MODELS["llama3-405b"], cluster, TrainSpec(seq_len=8192, global_batch=8))
    assert not found.fits
    assert not found.borderline
    assert found.best is not None
    assert found.best.fit == "does not fit"
    assert [v.level for v in found.best.violations] == ["error"]
    assert found.best.memory.total == min(c.memory.total for c in found.candidates)
    assert str(found).startswith("nothing fits in 76.0 GiB, the nearest is pp=")


def test_a_world_that_no_rule_allows_has_no_candidates_but_reasons() -> None:
    model = ModelShape(layers=2, hidden=64, heads=4, ffn=128, vocab=64)
    cluster = Cluster(world_size=7, accelerator="H100")
    # Seven ranks divide no size of the model, no sequence and no batch.
    found = plan(model, cluster, TrainSpec(seq_len=4, global_batch=4))
    assert found.best is None
    assert not found.candidates
    assert {v.rule for r in found.rejected for v in r.violations} >= {
        "heads-tp",
        "layers-pp",
        "batch",
    }
    assert str(found).startswith("no valid configuration; ")


def test_a_micro_batch_that_divides_no_local_batch_is_rejected_with_what_would() -> None:
    cluster = Cluster(world_size=2, accelerator="H100")
    found = plan(GPT2, cluster, TrainSpec(seq_len=64, global_batch=8, micro_batch=3))
    reasons = {str(v) for r in found.rejected for v in r.violations}
    assert (
        "micro_batch=3 does not divide the 4 sequences of each data-parallel rank; use 1, 2 or 4"
    ) in reasons


@pytest.mark.parametrize("layers", [12, 13])
def test_an_interleaved_schedule_without_stages_is_searched_from_two_on(layers: int) -> None:
    model = replace(GPT2, layers=layers)
    cluster = Cluster(world_size=4, accelerator="H100")
    train = TrainSpec(seq_len=64, global_batch=16, micro_batch=1, schedule="interleaved")
    dims = ParallelDims(pp=4, world_size=4)
    found = estimate(model, cluster, train, dims)
    assert found.virtual_stages > 1
    given = [replace(train, virtual_stages=n) for n in divisors(layers)[1:] if 4 * n <= layers + 2]
    given = given or [replace(train, virtual_stages=2)]
    best = min(estimate(model, cluster, each, dims).time.total for each in given)
    assert found.time.total == best
    plain = estimate(model, cluster, replace(train, schedule="1f1b"), dims)
    assert found.time.bubble < plain.time.bubble
    plans = plan(model, cluster, train).candidates
    assert all(c.virtual_stages > 1 for c in plans if c.dims.pp > 1)
    eight = Cluster(world_size=8, accelerator="H100")
    with pytest.raises(ParallelDimsError, match=r"pp\*virtual_stages=8\*2 is more than"):
        estimate(model, eight, train, ParallelDims(pp=8, world_size=8))


def test_stages_of_an_interleaved_schedule_do_not_bind_the_others_of_an_open_one() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=64, global_batch=16, schedule="any", virtual_stages=4)
    dims = ParallelDims(pp=8, world_size=8)
    found = estimate(GPT2, cluster, train, dims)
    assert (found.virtual_stages, found.schedule) != (4, "interleaved")
    assert dims in [c.dims for c in plan(GPT2, cluster, train).candidates]
    plain = estimate(GPT2, cluster, replace(train, schedule="1f1b", virtual_stages=1), dims)
    assert found.time.total <= plain.time.total


def test_an_interleaved_schedule_needs_microbatches_and_layers_for_its_stages() -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(
        seq_len=64, global_batch=12, micro_batch=1, schedule="interleaved", virtual_stages=4
    )
    found = plan(GPT2, cluster, train)
    assert {c.dims.pp for c in found.candidates} == {1, 2}
    rules = {v.rule for r in found.rejected for v in r.violations}
    assert rules >= {"virtual-stages", "interleaved"}


@pytest.mark.parametrize(
    ("share", "fit"), [(1.0, "fits"), (1.0001, "borderline"), (1.15, "borderline")]
)
def test_an_estimate_at_the_limit_fits_and_one_within_15_percent_is_borderline(
    share: float, fit: str
) -> None:
    own = candidate()
    tight = replace(own, limit=own.memory.total / share)
    assert tight.fit == fit
    assert [v.level for v in tight.violations] == ["advice"] * (fit == "borderline")


def test_an_estimate_beyond_15_percent_above_the_limit_does_not_fit() -> None:
    own = candidate()
    tight = replace(own, limit=own.memory.total / 1.1501)
    assert tight.fit == "does not fit"
    assert [v.rule for v in tight.violations] == ["memory"]
    assert "does not fit" in str(tight)


def candidate() -> Candidate:
    cluster = Cluster(world_size=2, accelerator="H100")
    train = TrainSpec(seq_len=1024, global_batch=2)
    return estimate(GPT2, cluster, train, ParallelDims(world_size=2))


def test_rates_follow_from_the_time_of_a_step() -> None:
    own = candidate()
    seconds = own.time.total
    assert own.tokens_per_second_per_gpu == pytest.approx(2048 / seconds / 2)
    # Six operations for each weight of a product, and attention over half a sequence.
    weights = 12 * 12 * 768**2 + 768 * 50304
    per_token = 6 * weights + 6 * 12 * 768 * 1024
    assert own.tflops == pytest.approx(2048 * per_token / seconds / 2 / 1e12, rel=1e-3)
    assert own.mfu == pytest.approx(own.tflops / 989)


def test_a_model_without_experts_is_not_tried_with_ep() -> None:
    found = plan(
        GPT2, Cluster(world_size=64, accelerator="H100"), TrainSpec(seq_len=64, global_batch=64)
    )
    assert found.rejected
    assert not [r for r in found.rejected for v in r.violations if v.rule == "experts-ep"]


def test_plan_and_check_agree_on_heads_whose_keys_come_from_a_latent() -> None:
    model, train = MODELS["deepseek-v3"], TrainSpec(seq_len=4096, global_batch=64)
    found = plan(model, Cluster(world_size=64, accelerator="H200"), train)
    wide = ParallelDims(tp=16, world_size=64)
    assert not wide.check(model.to_config(), 4096, 64).errors
    assert 16 in {candidate.dims.tp for candidate in found.candidates}


def test_the_root_has_the_function_and_the_planner_is_a_module() -> None:
    assert root_plan is plan
    assert not callable(planner)


def test_planning_does_not_load_torch() -> None:
    root = planner.__name__.rpartition(".")[0]
    code = f"import sys, {planner.__name__}, {root} as p; assert {{*p.__all__}} <= {{*dir(p)}}; "
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "False"
