"""A run that resumes under other degrees and numbers of ranks continues with the same losses."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import MODEL, TRAIN, mesh_of, samples
from rank_pool import RankPool
from train.checkpoint import Checkpoints, load
from train.loop import Trainer
from train.model import build_model
from train.parallelize import parallelize
from train.pipeline import build_pipeline

CONFIG = replace(TRAIN, accumulate=2)
SAVED, LAST = 2, 4  # steps
CONFIGS: dict[str, dict[str, int]] = {
    "one": {},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "fsdp-cp-ep": {"dp_shard": 2, "cp": 2, "ep": 4},
    "fsdp-tp-etp": {"dp_shard": 2, "tp": 2, "etp": 2, "ep": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "pp-fsdp-ep": {"pp": 2, "dp_shard": 2, "ep": 2},
    "fsdp-cp-tp-ep": {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
    "hsdp-pp-cp": {"dp_replicate": 2, "pp": 2, "cp": 2},
}
# Each configuration saves once and resumes once; each axis appears and disappears.
DEFAULT = [
    ("one", "fsdp-cp-tp-ep"),
    ("fsdp-cp-tp-ep", "one"),
    ("fsdp", "pp"),
    ("pp", "fsdp-cp-ep"),
    ("fsdp-cp-ep", "fsdp-tp-etp"),
    ("fsdp-tp-etp", "hsdp"),
    ("hsdp", "pp-fsdp-ep"),
    ("pp-fsdp-ep", "tp"),
    ("tp", "hsdp-pp-cp"),
    ("hsdp-pp-cp", "fsdp"),
]
PAIRS = [
    pytest.param(*pair, marks=() if pair in DEFAULT else pytest.mark.long)
    for pair in permutations(CONFIGS, 2)
]


def ranks_of(name: str) -> int:
    sizes = {key: size for key, size in CONFIGS[name].items() if key not in ("ep", "etp")}
    return int(torch.tensor([*sizes.values(), 1]).prod())


def trainer_of(name: str) -> Trainer:
    """Return a trainer before the first step; that of one process has no mesh."""
    model = build_model(
        replace(MODEL, router_aux_loss_coef=MODEL.router_aux_loss_coef / CONFIG.accumulate),
        CONFIG.seed,
    )
    degrees = CONFIGS[name]
    if not degrees:
        return Trainer(model, CONFIG)
    mesh = mesh_of(degrees)
    if mesh.dims.pp == 1:
        return Trainer(model, CONFIG, mesh=mesh, forward=parallelize(model, mesh, mesh.dims))
    stages, pipeline = build_pipeline(
        model,
        mesh,
        CONFIG,
        schedule="1f1b",
        stages_per_rank=1,
        parallelize_stage=lambda stage: parallelize(stage, mesh, mesh.dims),
        dtype=torch.float64,
    )
    return Trainer(stages, CONFIG, mesh=mesh, pipeline=pipeline)


def losses_of(trainer: Trainer, steps: int) -> list[float]:
    data = samples()
    return [trainer.train_step(data).loss for _ in range(steps)]


def saving(rank: int, name: str, folder: str) -> list[float]:
    """Train, save in between, and return the losses of all steps."""
    trainer = trainer_of(name)
    checkpoints = Checkpoints(Path(folder), {})
    losses = losses_of(trainer, SAVED)
    checkpoints.start(trainer)
    checkpoints.finish()
    return losses + losses_of(trainer, LAST - SAVED)


def resuming(rank: int, name: str, folder: str) -> tuple[list[float], int]:
    """Return the losses after the checkpoint, and the samples consumed before."""
    trainer = trainer_of(name)
    load(trainer, Path(folder))
    before = trainer.samples
    return losses_of(trainer, LAST - SAVED), before


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the folder and the losses of a configuration's run."""
    runs: dict[str, tuple[str, list[float]]] = {}

    def run(name: str) -> tuple[str, list[float]]:
        if name not in runs:
            folder = str(tmp_path_factory.mktemp(name) / "checkpoint")
            pool: RankPool = ranks(ranks_of(name))
            (losses, *_) = pool.run(saving, name, folder)
            runs[name] = folder, losses
        return runs[name]

    return run


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Return the losses of one process that trains without a checkpoint."""
    return losses_of(trainer_of("one"), LAST)


def test_default_pairs_cover_every_axis_in_both_directions() -> None:
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"):
        for begin, end in ((1, 2), (2, 1)):
            assert any(
                (axis in CONFIGS[before]) == (begin == 2) and (axis in CONFIGS[after]) == (end == 2)
                for before, after in DEFAULT
            )
    assert {before for before, _ in DEFAULT} == {after for _, after in DEFAULT} == set(CONFIGS)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_losses_continue(
    ranks: Any, saved: Any, undisturbed: list[float], before: str, after: str
) -> None:
    folder, losses = saved(before)
    assert losses == pytest.approx(undisturbed, rel=1e-12)
    for found, consumed in ranks(ranks_of(after)).run(resuming, after, folder):
        assert found == pytest.approx(undisturbed[SAVED:], rel=1e-12)
        assert consumed == read_samples(folder) == 8 + 3  # the second batch ends the text


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_degrees_continue_bitwise(ranks: Any, saved: Any, name: str) -> None:
    folder, losses = saved(name)
    for found, _ in ranks(ranks_of(name)).run(resuming, name, folder):
        assert found == losses[SAVED:]


def read_samples(folder: str) -> int:
    return int(json.loads((Path(folder) / "run.json").read_text())["samples"])
