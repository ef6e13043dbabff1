"""Rotary embeddings that depend on the length of the sequence are those of the whole sequence."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp import Contiguous, InputError, Zigzag, unshard_sequence
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh
from .test_hugging_face import (
    BOUND,
    DOCUMENTS,
    SEQ_LEN,
    Run,
    alone,
    error_of,
    exact,
    exact_models,
    losses_and_gradients,
    model_of,
    one_rank,
    tokens,
)

transformers = pytest.importorskip("transformers")

__all__ = ["exact_models"]  # a fixture


def dynamic(length: int) -> dict[str, Any]:
    """Return options of a model whose frequencies change for sequences above ``length``."""
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}
    return {"max_position_embeddings": length, "rope_parameters": rope}


def longrope(length: int) -> dict[str, Any]:
    """Return options of a model that has other factors for sequences above ``length``."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 2.0, 1.0, 2.0],
        "long_factor": [4.0, 3.0, 2.0, 1.0],
        "original_max_position_embeddings": length,
    }
    return {"rope_parameters": rope, "max_position_embeddings": 2 * length}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all ranks beyond": ("Llama", dynamic(8)),
    "one rank beyond": ("Llama", dynamic(20)),
    "long factors": ("Phi3", {**longrope(20), "original_max_position_embeddings": 20}),
    "long factors for all": ("Phi3", {**longrope(8), "original_max_position_embeddings": 8}),
    "scaled with its factors": (
        "Phimoe",
        {
            **longrope(20),
            "num_local_experts": 4,
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
            "rope_parameters": {
                **longrope(20)["rope_parameters"],
                "short_mscale": 1.0,
                "long_mscale": 1.3,
            },
        },
    ),
    "of each kind of layer": (
        "Gemma3",
        {
            "sliding_window": 9,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 20,
            "rope_parameters": {
                "full_attention": dynamic(20)["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}


def sequences() -> dict[str, dict[str, Tensor]]:
    """Return one long document, and shorter ones of which the longest decides."""
    lengths = [b - a for a, b in pairwise(DOCUMENTS)]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    ids = tokens()
    return {
        "whole": {"input_ids": ids, "labels": ids},
        "packed": {
            "input_ids": ids,
            "labels": ids.masked_fill(positions == 0, -100),
            "position_ids": positions,
        },
    }


def scaled_model(case: str) -> Any:
    """Return the model of a case, without parameters that have no gradient and random routers."""
    name, options = CASES[case]
    model = model_of(name, **options).eval()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("router" not in key)
    return model


def on_rank(rank: int, case: str) -> list[Run]:
    """Return loss and gradients summed over real ranks, of each batch in each layout."""
    mesh, runs = cp_mesh(2), []
    for layout in (Contiguous(), Zigzag()):
        for batch in sequences().values():
            model = context_parallel(scaled_model(case), mesh, layout=layout)
            with exact():
                run = losses_and_gradients(model, shard_batch(batch, mesh, layout))
            for x in (run[0], *run[1].values()):
                torch.distributed.all_reduce(x)
            runs.append(run)
    return runs


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_chosen_by_the_whole_sequence(ranks: Any, case: str) -> None:
    model = scaled_model(case)
    expected = [alone(model, batch) for batch in sequences().values()]
    for runs in ranks(2).run(on_rank, case):
        errors = [error_of(run, right) for run, right in zip(runs, 2 * expected, strict=True)]
        assert max(errors) <= BOUND, errors


def test_a_rotary_embedding_alone_is_refused_where_ranks_hold_parts() -> None:
    """As in a recomputation, or in a call of a part of the model: it would take its own length."""
    mesh, collectives = one_rank()
    model = context_parallel(model_of("Llama", **dynamic(8)), mesh, collectives=collectives)
    part = shard_batch({"input_ids": tokens()}, mesh)
    with pytest.raises(InputError, match="LlamaRotaryEmbedding scales rotary embeddings by the"):
        model.model(**part)


def test_frequencies_follow_each_batch() -> None:
    """One process keeps the frequencies of the longest sequence so far, until a short one comes."""
    model, layout = model_of("Llama", **dynamic(20)), Zigzag()
    batches = [{"input_ids": tokens()[:, :size]} for size in (SEQ_LEN, 30, 12, 22)]

    def rank(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(model), mesh, layout=layout, collectives=collectives)
        parts = [mine(**shard_batch(batch, mesh, layout)).logits for batch in batches]
        return [
            unshard_sequence(x.detach(), mesh, layout, 1, seq_len=size, collectives=collectives)
            for x, size in zip(parts, (SEQ_LEN, 30, 12, 22), strict=True)
        ]

    whole = [model(**batch, use_cache=False).logits for batch in batches]
    for found in SimulatedWorld(2).run(rank):
        for x, right in zip(found, whole, strict=True):
            torch.testing.assert_close(x, right, rtol=BOUND, atol=BOUND)
