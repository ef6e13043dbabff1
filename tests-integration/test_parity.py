"""Every combination of axes trains as one process does."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from parity import (
    MODEL,
    TRAIN,
    Outcome,
    agreed,
    combinations,
    evaluations,
    name,
    of_options,
    of_transformers,
    on_rank,
    on_stages,
    single_process,
)
from rank_pool import RankPool

from hp_mesh import ParallelDims

Ranks = Callable[[int], RankPool]


@cache
def reference(dtype: torch.dtype) -> Outcome:
    return single_process(dtype)


def assert_same(outcomes: list[Outcome], expected: Outcome, relative: float) -> None:
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=relative, abs=0)
        assert outcome.norm == pytest.approx(expected.norm, rel=relative, abs=0)
    gradients = outcomes[0].gradients
    assert gradients.keys() == expected.gradients.keys()
    assert all(gradients[key].shape == want.shape for key, want in expected.gradients.items())
    errors = {
        key: ((gradients[key] - want).abs().max() / want.abs().max()).item()
        for key, want in expected.gradients.items()
    }
    assert all(want.abs().max() > 0 for want in expected.gradients.values())
    assert {key: error for key, error in errors.items() if not error <= relative} == {}


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_matrix_holds_every_valid_combination(world_size: int) -> None:
    listed = {tuple(degrees.items()) for degrees in combinations(world_size)}
    every = range(1, world_size + 1)
    for replicate in every:
        for shard in every:
            for cp in every:
                for tp in every:
                    for ep in every:
                        degrees = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp}
                        degrees |= {"tp": tp, "ep": ep, "ulysses_degree": 1}
                        try:
                            dims = ParallelDims.from_dict({**degrees, "world_size": world_size})
                            dims.validate(MODEL, TRAIN.seq_len, TRAIN.batch_size)
                        except ValueError:
                            assert tuple(degrees.items()) not in listed
                        else:
                            assert tuple(degrees.items()) in listed


@pytest.mark.parametrize("degrees", combinations(2), ids=name)
def test_two_ranks_train_as_one_process(ranks: Ranks, degrees: dict[str, int]) -> None:
    outcomes = ranks(2).run(on_rank, degrees, torch.float64)
    assert_same(outcomes, reference(torch.float64), 1e-12)


def some_now(every: list[dict[str, int]]) -> list[Any]:
    """Return all combinations, those marked long that others have in parts.

    Left are those of one axis, and of two where experts are spread over all ranks that can.
    """
    left = []
    for degrees in every:
        axes = sum(degrees[axis] > 1 for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
        ranks = prod(degrees[axis] for axis in ("dp_shard", "cp", "tp"))
        now = degrees["ep"] == ranks or (axes == 1 and degrees["ep"] == 1)
        left.append(pytest.param(degrees, marks=[] if now else pytest.mark.long))
    return left


@pytest.mark.parametrize("degrees", some_now(combinations(4)), ids=name)
def test_four_ranks_train_as_one_process(ranks: Ranks, degrees: dict[str, int]) -> None:
    outcomes = ranks(4).run(on_rank, degrees, torch.float64)
    assert_same(outcomes, reference(torch.float64), 1e-12)


CUT_EXPERTS = [
    {"tp": 2, "etp": 2},
    {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dp_shard": 2, "tp": 2, "ep": 1, "etp": 2},
    {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"tp": 4, "etp": 4},
]


@pytest.mark.parametrize("degrees", CUT_EXPERTS, ids=name)
def test_experts_cut_like_the_layers_train_as_one_process(
    ranks: Ranks, degrees: dict[str, int]
) -> None:
    size = prod(degrees[axis] for axis in ("dp_shard", "cp", "tp") if axis in degrees)
    outcomes = ranks(size).run(on_rank, degrees, torch.float64)
    assert_same(outcomes, reference(torch.float64), 1e-12)


REPLICATED_OVER_CP = [
    {"cp": 2},
    {"cp": 4, "ep": 4, "ulysses_degree": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_replicate": 2, "cp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
]


@pytest.mark.parametrize("degrees", REPLICATED_OVER_CP, ids=name)
def test_parameters_that_are_replicated_over_cp_train_as_one_process(
    ranks: Ranks, degrees: dict[str, int]
) -> None:
    size = prod(degrees.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    outcomes = ranks(size).run(on_rank, {**degrees, "fsdp_folds_cp": False}, torch.float64)
    assert_same(outcomes, reference(torch.float64), 1e-12)
    assert all("replicate" in outcome.traffic for outcome in outcomes)


FLOAT32 = [
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 4},
]


@pytest.mark.parametrize("degrees", FLOAT32, ids=name)
def test_float32_differs_by_rounding_only(ranks: Ranks, degrees: dict[str, int]) -> None:
    outcomes = ranks(4).run(on_rank, degrees, torch.float32)
    assert_same(outcomes, reference(torch.float32), 1e-5)


RECOMPUTED = [
    {"dp_shard": 2, "cp": 2, "ep": 4, "ulysses_degree": 1},
    {"dp_shard": 2, "tp": 2, "ep": 2, "ulysses_degree": 1},
    {"dp_replicate": 2, "cp": 2, "ep": 2, "ulysses_degree": 2},
]


@pytest.mark.parametrize("degrees", RECOMPUTED, ids=name)
def test_recomputation_changes_nothing(ranks: Ranks, degrees: dict[str, int]) -> None:
    plain, again = (ranks(4).run(on_rank, degrees, torch.float64, flag) for flag in (False, True))
    for before, after in zip(plain, again, strict=True):
        assert before.losses == after.losses
        assert before.norm == after.norm
    for key, gradient in plain[0].gradients.items():
        assert torch.equal(gradient, again[0].gradients[key]), key


def test_traffic_is_counted_by_axis(ranks: Ranks) -> None:
    outcomes = ranks(4).run(on_rank, {"dp_shard": 2, "cp": 2, "ep": 4}, torch.float64)
    for outcome in outcomes:
        assert {"fsdp", "cp", "ep", "loss"} <= outcome.traffic.keys()
        assert all(traffic.bytes > 0 for traffic in outcome.traffic.values())


IN_PARTS = replace(TRAIN, accumulate=2)
# Each part adds the loss of its own experts' loads: halves of the coefficient make their mean.
HALVED = replace(MODEL, router_aux_loss_coef=MODEL.router_aux_loss_coef / 2)


@pytest.mark.parametrize(
    ("degrees", "model", "config"),
    [
        ({"dp_shard": 2, "ep": 2}, HALVED, IN_PARTS),
        ({"tp": 2, "ep": 2}, replace(HALVED, tie_word_embeddings=True), IN_PARTS),
        ({"dp_shard": 2}, replace(HALVED, vocab_size=259), IN_PARTS),
    ],
    ids=["parts", "tied", "odd vocabulary"],
)
def test_batches_in_parts_tied_weights_and_odd_vocabularies_train_as_on_one_process(
    ranks: Ranks, degrees: dict[str, int], model: Any, config: Any
) -> None:
    outcomes = ranks(2).run(of_options, degrees, model, config)
    assert_same(outcomes[:1], single_process(torch.float64, model, config), 1e-12)


STAGES = [
    ({"pp": 2, "dp_shard": 2, "ep": 2}, "1f1b", 3),  # three layers: stages of one and of two
    ({"pp": 2, "cp": 2, "ep": 2}, "interleaved", 5),
    ({"pp": 2, "tp": 2, "ep": 2}, "1f1b", 3),
    ({"pp": 2, "cp": 2, "ep": 2, "fsdp_folds_cp": False}, "1f1b", 3),
    ({"pp": 4}, "1f1b", 5),
    ({"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4}, "interleaved", 5),
    pytest.param({"pp": 2, "dp_replicate": 2, "tp": 2, "ep": 2}, "1f1b", 3, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("degrees", "schedule", "layers"), STAGES)
def test_a_pipeline_trains_as_one_process(
    ranks: Ranks, degrees: dict[str, int], schedule: str, layers: int
) -> None:
    config = replace(TRAIN, accumulate=degrees["pp"])
    coefficient = MODEL.router_aux_loss_coef / config.accumulate
    model = replace(MODEL, num_hidden_layers=layers, router_aux_loss_coef=coefficient)
    size = prod(degrees[axis] for axis in degrees if axis not in ("ep", "fsdp_folds_cp"))
    results = ranks(size).run(on_stages, degrees, schedule, model, config)
    expected, losses = single_process(torch.float64, model, config), evaluations(model, config)
    gradients = {key: g for outcome, _ in results for key, g in outcome.gradients.items()}
    outcomes = [replace(outcome, gradients=gradients) for outcome, _ in results]
    assert_same(outcomes, expected, 1e-12)
    for _, found in results:
        assert found == pytest.approx(losses, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [({"pp": 2, "dp_shard": 2}, "1f1b"), ({"pp": 2, "tp": 2, "ep": 2}, "interleaved")],
)
def test_tied_weights_on_the_ends_of_a_pipeline_train_as_one(
    ranks: Ranks, degrees: dict[str, int], schedule: str
) -> None:
    model = replace(HALVED, num_hidden_layers=4, tie_word_embeddings=True)
    results = ranks(4).run(on_stages, degrees, schedule, model, IN_PARTS)
    expected, losses = (
        single_process(torch.float64, model, IN_PARTS),
        evaluations(model, IN_PARTS),
    )
    gradients = {key: g for outcome, _ in results for key, g in outcome.gradients.items()}
    # Each end has its own part of the gradient: what they sum to is seen in the steps after.
    ends = gradients.pop("head.weight") + gradients["embedding.weight"]
    outcomes = [
        replace(outcome, gradients={**gradients, "embedding.weight": ends})
        for outcome, _ in results
    ]
    assert_same(outcomes, expected, 1e-12)
    for _, found in results:
        assert found == pytest.approx(losses, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("name", "degrees", "fields"),
    [
        (
            "gpt-oss-tiny",
            {"cp": 2, "ep": 2, "fsdp_folds_cp": False},
            {"output_router_logits": True},
        ),
        ("qwen3-tiny", {"tp": 2}, {"attention_bias": True}),
    ],
    ids=["gpt-oss", "qwen3"],
)
def test_models_of_transformers_train_as_on_one_process(
    ranks: Ranks, name: str, degrees: dict[str, int], fields: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    small = {**fields, "num_hidden_layers": 2, "vocab_size": 256}
    expected, *found = (
        ranks(2).run(of_transformers, each, name, small, IN_PARTS)[0] for each in ({}, degrees)
    )
    assert_same(found, expected, 1e-6)  # the library computes norms and positions in float32


def test_ranks_that_would_train_otherwise_are_all_told_so(ranks: Ranks) -> None:
    words = ["--tp", "2", "--lr", "1e-3"]
    assert ranks(2).run(agreed, [words, [*words, "--out", "elsewhere"]]) == ["", ""]
    first, second = ranks(2).run(agreed, [words, [*words[:2], "--steps", "9"]])
    assert first == second
    assert (
        "rank 0 has learning_rate=0.001 steps=60, rank 1 has learning_rate=0.003 steps=9" in first
    )
