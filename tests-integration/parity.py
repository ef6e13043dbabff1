"""One small training run, whatever the degrees: what a rank returns, and what one process gives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.tensor import DTensor
from train.config import ModelConfig, TrainConfig, TransformersConfig, read_model
from train.data import Samples
from train.hugging_face import build_transformers, forward_alone
from train.loop import Trainer
from train.model import build_model
from train.options import parse
from train.parallelize import parallelize
from train.pipeline import build_pipeline
from train.rank import Refused, check_agreement

from hp_dtensor import RecordingCollectives
from hp_mesh import ParallelDims, ParallelMesh

MODEL = ModelConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
TRAIN = TrainConfig(seed=3, batch_size=8, seq_len=32, warmup_steps=1)
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses of all steps, the norm and the whole gradients of the first, and what moved."""

    losses: list[float]
    norm: float
    gradients: Mapping[str, Tensor]
    traffic: Mapping[str, Any]


def samples() -> Samples:
    """Return text of words with some structure: 11 samples, so that the second batch is partial."""
    words = [bytes([97 + (i * i) % 26] * (1 + i % 5)) for i in range(200)]
    return Samples(b" ".join(words)[: 11 * TRAIN.seq_len], TRAIN.seq_len, TRAIN.seed)


def train(trainer: Trainer, recording: RecordingCollectives | None = None) -> Outcome:
    """Make `STEPS` updates and return what happened."""
    data = samples()
    batch = data.batch(0, trainer.config.batch_size)
    losses = [trainer.gradients(batch)]
    gradients = {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    norm = trainer.update()
    trainer.step, trainer.samples = 1, batch.consumed
    losses += [trainer.train_step(data).loss for _ in range(STEPS - 1)]
    traffic = {} if recording is None else recording.by_axis
    return Outcome(losses=losses, norm=norm, gradients=gradients, traffic=traffic)


def whole(gradient: Tensor | None) -> Tensor:
    """Return all of a gradient, gathered where it is distributed."""
    if gradient is None:
        raise ValueError("a parameter has no gradient")
    tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return tensor.detach().clone()


def single_process(
    dtype: torch.dtype, model: ModelConfig = MODEL, config: TrainConfig = TRAIN
) -> Outcome:
    """Return the outcome of one process without any of the parallel parts."""
    return train(Trainer(build_model(model, config.seed, dtype), config))


def mesh_of(degrees: Mapping[str, int]) -> ParallelMesh:
    """Return the mesh of these degrees, built once per rank process and kept."""
    key = ("mesh", *sorted(degrees.items()))
    return cached(key, lambda: ParallelDims.from_dict(degrees).build_mesh("cpu"))


def on_rank(
    rank: int, degrees: dict[str, int], dtype: torch.dtype, recompute: bool = False
) -> Outcome:
    """Return one rank's outcome; gradients only from rank 0, which has gathered them."""
    mesh = mesh_of(degrees)
    recording = RecordingCollectives()
    model = build_model(MODEL, TRAIN.seed, dtype)
    parallelize(model, mesh, mesh.dims, collectives=recording, checkpoint_activations=recompute)
    outcome = train(Trainer(model, TRAIN, mesh=mesh, collectives=recording), recording)
    kept = outcome.gradients if rank == 0 else {}
    return Outcome(
        losses=outcome.losses, norm=outcome.norm, gradients=kept, traffic=outcome.traffic
    )


def of_options(
    rank: int, degrees: dict[str, int], model_config: ModelConfig, config: TrainConfig
) -> Outcome:
    """Return one rank's outcome in float64 of another model, or of a batch in parts."""
    mesh = mesh_of(degrees)
    model = build_model(model_config, config.seed)
    forward = parallelize(model, mesh, mesh.dims)
    return train(Trainer(model, config, mesh=mesh, forward=forward))


def of_transformers(
    rank: int, degrees: dict[str, int], name: str, fields: dict[str, Any], config: TrainConfig
) -> Outcome:
    """Return one rank's outcome of a model of transformers; one process' where nothing is cut."""
    found = read_model(name)
    assert isinstance(found, TransformersConfig)
    known = replace(found, fields={**found.fields, **fields})
    model = build_transformers(known, config.seed, parts=config.accumulate)
    if not degrees:
        return train(Trainer(model, config, forward=forward_alone))
    mesh = mesh_of(degrees)
    forward = parallelize(model, mesh, mesh.dims)
    return train(Trainer(model, config, mesh=mesh, forward=forward))


def agreed(rank: int, words: list[list[str]]) -> str:
    """Return what two ranks with command lines of their own are told."""
    try:
        check_agreement(parse(words[rank], 2))
    except Refused as refused:
        return str(refused)
    return ""


def on_stages(
    rank: int,
    degrees: dict[str, int],
    schedule: str,
    model_config: ModelConfig,
    config: TrainConfig,
) -> tuple[Outcome, list[float]]:
    """Return one rank's outcome of a pipeline with its own gradients, and losses of evaluation."""
    mesh = mesh_of(degrees)
    parts, pipeline = build_pipeline(
        build_model(model_config, config.seed),
        mesh,
        config,
        schedule=schedule,
        stages_per_rank=2 if schedule == "interleaved" else 1,
        parallelize_stage=lambda stage: parallelize(stage, mesh, mesh.dims),
        dtype=torch.float64,
    )
    trainer = Trainer(parts, config, mesh=mesh, pipeline=pipeline)
    held_out = Samples(bytes(range(256)) * 8, config.seq_len, 0, held_out=True)
    first = trainer.evaluate(held_out)
    outcome = train(trainer)
    return outcome, [first, trainer.evaluate(held_out)]


def evaluations(model_config: ModelConfig, config: TrainConfig) -> list[float]:
    """Return what `on_stages` returns beside its outcome, of one process."""
    trainer = Trainer(build_model(model_config, config.seed), config)
    held_out = Samples(bytes(range(256)) * 8, config.seq_len, 0, held_out=True)
    first = trainer.evaluate(held_out)
    train(trainer)
    return [first, trainer.evaluate(held_out)]


def combinations(world_size: int) -> list[dict[str, int]]:
    """Return every valid choice of dp_replicate, dp_shard, cp, tp, ep and ulysses_degree."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    found = []
    for replicate, shard, cp, tp in product(divisors, repeat=4):
        if prod((replicate, shard, cp, tp)) != world_size:
            continue
        base = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
        for ep, ulysses in product(divisors, divisors):
            if cp % ulysses == 0 and (shard * cp * tp) % ep == 0 and MODEL.num_experts % ep == 0:
                found.append({**base, "ep": ep, "ulysses_degree": ulysses})
    return found


def name(degrees: Mapping[str, int]) -> str:
    """Return the degrees that say something, for a test's name."""
    said = [f"{k.removesuffix('_degree')}{v}" for k, v in degrees.items() if v > 1]
    return "-".join(said)
