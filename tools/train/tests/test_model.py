"""The model and its training step on one process."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import ModelConfig, TrainConfig
from train.data import IGNORED, Batch, Samples
from train.loop import MOST_SKIPPED, Diverged, Trainer, make_optimizer
from train.model import LanguageModel, build_model, rotate

TINY = ModelConfig(
    hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2
)
SHORT = TrainConfig(batch_size=2, seq_len=8)


def _logits(model: LanguageModel, tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, torch.arange(first, first + tokens.shape[1]))
    return logits.detach()


def test_initial_values_depend_on_seed_and_name_only() -> None:
    shallow = dict(build_model(TINY, 1).named_parameters())
    deep = dict(build_model(replace(TINY, num_hidden_layers=4), 1).named_parameters())
    other = dict(build_model(TINY, 2).named_parameters())
    for name, value in shallow.items():
        if value.ndim > 1:
            assert not torch.equal(value, other[name]), name
            # What writes to the residual stream is scaled by depth, whatever else it depends on.
            scale = 2**0.5 if name.endswith(("wo.weight", "w2.weight", "down_proj")) else 1.0
            assert torch.allclose(value, deep[name] * scale, rtol=1e-15, atol=0), name


@settings(deadline=None, max_examples=20)
@given(position=st.integers(0, 7), token=st.integers(0, 255), seed=st.integers(0, 5))
def test_a_token_changes_no_logits_before_it(position: int, token: int, seed: int) -> None:
    model = build_model(TINY, 0)
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(seed))
    changed = tokens.clone()
    changed[:, position] = token
    before, after = _logits(model, tokens), _logits(model, changed)
    # The experts' matrix products have other shapes: equal but for rounding.
    assert torch.allclose(before[:, :position], after[:, :position], rtol=1e-12, atol=1e-13)
    if not torch.equal(tokens, changed):
        assert not torch.allclose(before[:, position], after[:, position])


@settings(deadline=None, max_examples=20)
@given(shift=st.integers(0, 100))
def test_only_distances_between_positions_matter(shift: int) -> None:
    model = build_model(TINY, 0)
    tokens = torch.arange(16).view(2, 8)
    moved = _logits(model, tokens, first=shift)
    assert torch.allclose(moved, _logits(model, tokens), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(_logits(model, tokens.flip(1)).flip(1), moved)


def test_rotation_keeps_lengths_and_leaves_position_zero() -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    turned = rotate(x, torch.arange(5), 10_000.0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert not torch.allclose(turned[:, :, 1:], x[:, :, 1:])


def test_ignored_rows_change_neither_loss_nor_gradients_of_attention() -> None:
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    padded = Batch(
        tokens=torch.cat([tokens, torch.zeros_like(tokens)]),
        labels=torch.cat([tokens, torch.full_like(tokens, IGNORED)]),
        consumed=2,
    )
    # Without experts' load balancing, which sees padding too, padding must not count.
    config = replace(TINY, router_aux_loss_coef=0.0)
    one, two = (Trainer(build_model(config, 0), SHORT) for _ in range(2))
    losses = one.gradients(Batch(tokens, tokens, 2)), two.gradients(padded)
    assert abs(losses[0] - losses[1]) < 1e-14
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-11, atol=1e-15), name


def test_the_trainer_repeats_itself_bitwise_and_learns() -> None:
    data = Samples(b"the cat sat on the mat. " * 40, SHORT.seq_len, 0)
    runs = []
    for _ in range(2):
        trainer = Trainer(build_model(TINY, 0), SHORT)
        runs.append([trainer.train_step(data).loss for _ in range(30)])
    assert runs[0] == runs[1]
    assert sum(runs[0][-5:]) / 5 < 0.75 * runs[0][0]
    assert trainer.step == 30
    assert trainer.samples == 60


DATA = b"the cat sat on the mat. " * 40


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    batch = Samples(DATA, trainer.config.seq_len, 0).batch(0, trainer.config.batch_size)
    trainer.gradients(batch)
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_a_batch_in_parts_has_the_gradients_of_the_whole() -> None:
    config = replace(TINY, router_aux_loss_coef=0.0)  # experts' loads are those of a part
    whole = _gradients(Trainer(build_model(config, 0), replace(SHORT, batch_size=4)))
    trainer = Trainer(build_model(config, 0), replace(SHORT, batch_size=4, accumulate=4))
    for name, found in _gradients(trainer).items():
        assert torch.allclose(found, whole[name], rtol=1e-11, atol=1e-15), name


def test_bfloat16_keeps_weights_and_gradients_in_float32() -> None:
    exact = _gradients(Trainer(build_model(TINY, 0, torch.float32), SHORT))
    model = build_model(TINY, 0, torch.float32)
    seen: list[torch.dtype] = []
    model.blocks["0"].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    found = _gradients(Trainer(model, SHORT, compute_dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for name, want in exact.items():
        assert found[name].dtype == torch.float32
        assert not torch.equal(found[name], want)
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), want.flatten(), 0) > 0.9


def test_norms_and_biases_do_not_decay() -> None:
    optimizer = Trainer(build_model(TINY, 0), SHORT).optimizer
    decay = {p.ndim > 1: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {True: 0.1, False: 0.0}


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.ones(4, 3, 2))
        self.down_proj_bias = torch.nn.Parameter(torch.ones(4, 3))


def test_a_bias_of_experts_does_not_decay_either() -> None:
    experts = _Experts()
    optimizer = make_optimizer(experts, SHORT)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert (decay[experts.down_proj], decay[experts.down_proj_bias]) == (0.1, 0.0)


def test_gradients_that_are_not_finite_change_nothing_and_end_a_run_where_they_stay() -> None:
    model, data = build_model(TINY, 0), Samples(DATA, SHORT.seq_len, 0)
    trainer = Trainer(model, SHORT)
    trainer.train_step(data)
    before = [p.clone() for p in trainer.model.parameters()]
    state = [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    hook = model.blocks["0"].register_forward_hook(lambda *args: args[2] * math.inf)
    for step in range(2, MOST_SKIPPED + 1):
        result = trainer.train_step(data)
        assert (result.step, trainer.skipped) == (step, step - 1)
        assert not math.isfinite(result.grad_norm)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert all(map(torch.equal, state, (s["exp_avg"] for s in trainer.optimizer.state.values())))
    with pytest.raises(Diverged, match=f"in 10 steps in a row, the last of them step {step + 1}"):
        trainer.train_step(data)
    hook.remove()
    assert math.isfinite(trainer.train_step(data).loss)
    assert trainer.skipped == 0


def test_dropout_depends_on_seed_and_step_alone() -> None:
    def losses(config: TrainConfig, first: int) -> list[float]:
        model = build_model(TINY, 0)
        trainer = Trainer(model, replace(config, learning_rate=0.0))
        for name in ("0", "1"):
            model.blocks[name].register_forward_hook(
                lambda *args: torch.nn.functional.dropout(args[2], 0.5)
            )
        trainer.step = first
        return [trainer.train_step(DATA_SAMPLES).loss for _ in range(3)]

    whole = losses(SHORT, 0)
    torch.rand(3)
    assert losses(SHORT, 0) == whole
    assert losses(replace(SHORT, seed=1), 0) != whole


DATA_SAMPLES = Samples(b"the cat sat on the mat. " * 40, SHORT.seq_len, 0)


def test_tied_weights_are_one_and_get_both_gradients() -> None:
    model = build_model(replace(TINY, tie_word_embeddings=True), 0)
    assert "head.weight" not in dict(model.named_parameters())
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert (_gradients(Trainer(model, SHORT))["embedding.weight"].abs().sum(1) > 0).all()


def test_evaluation_changes_nothing_and_has_the_loss_of_the_held_out_text() -> None:
    data = Samples(DATA, SHORT.seq_len, 0, held_out=True)
    trainer = Trainer(build_model(TINY, 0), SHORT)
    before = [p.clone() for p in trainer.model.parameters()]
    loss = trainer.evaluate(data)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.model.training
    (only,) = data.held_out(100)
    assert abs(loss - Trainer(build_model(TINY, 0), SHORT).gradients(only)) < 1e-12


def test_the_learning_rate_rises_and_falls_like_a_cosine() -> None:
    rises = TrainConfig(learning_rate=1.0, warmup_steps=4)
    assert [rises.learning_rate_of(step) for step in (0, 3, 4, 999)] == [0.25, 1.0, 1.0, 1.0]
    falls = replace(rises, decay_steps=14)
    rates = [falls.learning_rate_of(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a > b for a, b in pairwise(rates[3:14]))
    assert abs(rates[8] - 0.55) < 1e-12
    assert rates[13:] == [0.1] * 7
