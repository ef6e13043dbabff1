"""The rules that let the packages compose, each where it can fail."""

from collections.abc import Callable

import pytest
import torch
from parity import MODEL, TRAIN, mesh_of, samples
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor
from train.data import IGNORED
from train.loop import Trainer
from train.model import build_model
from train.parallelize import parallelize

from hp_dtensor import RecordingCollectives

Ranks = Callable[[int], RankPool]


def make(degrees: dict[str, int]) -> Trainer:
    mesh = mesh_of(degrees)
    model = build_model(MODEL, TRAIN.seed)
    parallelize(model, mesh, mesh.dims)
    return Trainer(model, TRAIN, mesh=mesh)


def whole_parameters(rank: int, degrees: dict[str, int]) -> dict[str, Tensor]:
    trainer = make(degrees)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 4, "ep": 4}])
def test_spreading_a_model_keeps_its_names_and_values(
    ranks: Ranks, degrees: dict[str, int]
) -> None:
    expected = dict(build_model(MODEL, TRAIN.seed).named_parameters())
    for found in ranks(4).run(whole_parameters, degrees):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def test_a_step_takes_the_same_samples_whatever_the_degrees() -> None:
    data = samples()
    consumed, order = 0, []
    while consumed < len(data):
        batch = data.batch(consumed, TRAIN.batch_size)
        order += batch.tokens[: batch.consumed - consumed].tolist()
        consumed = batch.consumed
    assert consumed == len(data)
    assert len({tuple(row) for row in order}) == len({tuple(r) for r in data.batch(0, 11).tokens})
    single = [data.batch(i, 1).tokens[0].tolist() for i in range(len(data))]
    assert order == single


def test_the_last_partial_batch_is_padded_with_ignored_labels() -> None:
    data = samples()
    batch = data.batch(TRAIN.batch_size, TRAIN.batch_size)
    left = len(data) - TRAIN.batch_size
    assert batch.consumed == len(data)
    assert batch.tokens.shape == (TRAIN.batch_size, TRAIN.seq_len)
    assert (batch.labels[left:] == IGNORED).all()
    assert (batch.labels[:left] != IGNORED).all()


def parts(rank: int, degrees: dict[str, int]) -> tuple[list[int], list[int], Tensor, Tensor]:
    trainer = make(degrees)
    mesh = trainer.mesh
    assert mesh is not None
    place = [mesh["batch"].get_local_rank(), mesh["cp"].get_local_rank()]
    tokens, labels = trainer._part(samples().batch(0, TRAIN.batch_size))
    return place, [int(i) for i in trainer._positions], tokens, labels


def test_rows_follow_the_batch_coordinate_and_labels_are_shifted_before_the_cut(
    ranks: Ranks,
) -> None:
    batch = samples().batch(0, TRAIN.batch_size)
    results = ranks(4).run(parts, {"dp_shard": 2, "cp": 2})
    seen = []
    for (row, _), positions, tokens, labels in results:
        rows = batch.tokens.chunk(2)[row]
        assert torch.equal(tokens, rows[:, positions])
        for column, position in enumerate(positions):
            following = (
                rows[:, position + 1]
                if position + 1 < TRAIN.seq_len
                else torch.full_like(rows[:, 0], IGNORED)
            )
            assert torch.equal(labels[:, column], following)
        seen += [(row, position) for position in positions]
    assert sorted(seen) == [(row, i) for row in range(2) for i in range(TRAIN.seq_len)]


def test_tensor_parallel_peers_read_the_same(ranks: Ranks) -> None:
    results = ranks(2).run(parts, {"tp": 2})
    assert torch.equal(results[0][2], results[1][2])
    assert torch.equal(results[0][3], results[1][3])


def calls(rank: int, degrees: dict[str, int]) -> dict[tuple[str, str], int]:
    """Route every token to the first experts, so that other ranks' experts get none."""
    mesh = mesh_of(degrees)
    recording = RecordingCollectives()
    model = build_model(MODEL, TRAIN.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.zero_()
    parallelize(model, mesh, mesh.dims, collectives=recording)
    trainer = Trainer(model, TRAIN, mesh=mesh, collectives=recording)
    loss = trainer.gradients(samples().batch(0, TRAIN.batch_size))
    assert loss > 0
    return {key: traffic.calls for key, traffic in recording.by_call.items()}


def test_a_rank_whose_experts_get_no_token_makes_the_same_calls(ranks: Ranks) -> None:
    """Equal scores send all tokens to the lowest experts; the last ranks' stay empty."""
    results = ranks(4).run(calls, {"dp_shard": 4, "ep": 4})
    assert all(result == results[0] for result in results)
    assert any(axis == "ep" for axis, _ in results[0])


def test_the_runs_that_are_compared_are_clipped() -> None:
    """So that equal losses after the first step mean equal norms over all meshes, used alike."""
    trainer = Trainer(build_model(MODEL, TRAIN.seed), TRAIN)
    trainer.gradients(samples().batch(0, TRAIN.batch_size))
    assert trainer.update() > TRAIN.max_norm
