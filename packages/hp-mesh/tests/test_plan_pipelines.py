"""Pipelines and latent attention: the terms of time and memory that only they have."""

from dataclasses import replace
from typing import Any, cast

import pytest

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import CONSTANTS, MODELS, Candidate, Cluster, ModelShape, TrainSpec, estimate

LLAMA = MODELS["llama3-8b"]
TRAIN = TrainSpec(seq_len=4096, global_batch=64, micro_batch=1, recompute="none")
TORCH = replace(TRAIN, receive_buffers="all")


def cost(
    model: ModelShape = LLAMA, train: TrainSpec = TRAIN, *, world: int = 16, **degrees: Any
) -> Candidate:
    cluster = Cluster(world_size=world, accelerator="H200")
    return estimate(model, cluster, train, ParallelDims(**degrees, world_size=world))


@pytest.mark.parametrize(("pp", "received"), [(2, 1), (4, 2), (8, 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_torch_keeps_a_buffer_for_what_every_microbatch_receives(
    pp: int, received: int, tp: int
) -> None:
    # Activations, but on the first rank, and gradients, but on the last.
    own, more = (
        cost(train=replace(TORCH, global_batch=batch), world=pp * tp, pp=pp, tp=tp, dp_shard=1)
        for batch in (64, 96)
    )
    rows = 32 * 4096 * LLAMA.hidden / tp * 2 * CONSTANTS["FRAGMENTATION"]
    assert more.memory.buffers - own.memory.buffers == pytest.approx(received * rows)
    assert more.memory.activations == own.memory.activations


def test_others_keep_those_of_microbatches_in_flight() -> None:
    own, more = (cost(train=replace(TRAIN, global_batch=batch), pp=8) for batch in (64, 96))
    assert own.memory == more.memory
    with pytest.raises(ParallelDimsError, match="receive_buffers='some' given; use 'in-flight'"):
        TrainSpec(seq_len=8, global_batch=8, receive_buffers=cast("Any", "some"))


MIXED = ModelShape(
    layers=16,
    hidden=1024,
    heads=8,
    ffn=1024,
    vocab=8192,
    experts=8,
    top_k=2,
    expert_ffn=4096,
    dense_layers=2,
)


def test_the_slowest_stage_has_experts_in_all_its_layers() -> None:
    # The two small layers are on the first of four ranks; the others have none of them.
    found, every = (
        cost(model, pp=4, ep=4).time.compute for model in (MIXED, replace(MIXED, dense_layers=0))
    )
    assert found == every
    # Without stages all layers are on the same ranks.
    alone, whole = (
        cost(model, ep=8).time.compute for model in (MIXED, replace(MIXED, dense_layers=0))
    )
    assert alone < whole


LATENT = ModelShape(
    layers=8,
    hidden=2048,
    heads=16,
    head_dim=128,
    ffn=8192,
    vocab=8192,
    latent=512,
    query_latent=1536,
    nope_dim=128,
    rope_dim=64,
)


def test_activations_of_latent_attention_have_all_heads_and_their_positions() -> None:
    own = cost(LATENT, world=8).memory.activations
    rest = cost(replace(LATENT, nope_dim=64, rope_dim=64), world=8).memory.activations
    # Queries and keys are 192 wide, and 128: 64 more for each of 16 heads.
    more = 8 * 4096 * 2 * 2 * 64 * 16
    assert own - rest == pytest.approx(CONSTANTS["FRAGMENTATION"] * more)
    plain = replace(LATENT, latent=0, query_latent=0, nope_dim=0, rope_dim=0)
    latents = 8 * 4096 * 2 * (512 + 64 + 1536)
    as_plain = cost(plain, world=8).memory.activations
    assert rest - as_plain == pytest.approx(CONSTANTS["FRAGMENTATION"] * latents)


def test_scores_of_latent_attention_are_as_wide_as_its_queries() -> None:
    seq_len = 32768
    flops = LATENT.flops_per_token(seq_len) - LATENT.flops_per_token(0)
    # Forward and backward, half of them masked: scores over 192, values over 128 of each head.
    assert flops == 8 * seq_len * 3 * 16 * (192 + 128)
    wide = replace(LATENT, nope_dim=320)
    train = replace(TRAIN, seq_len=seq_len, global_batch=8)
    assert cost(wide, train, world=8).time.compute > cost(LATENT, train, world=8).time.compute
