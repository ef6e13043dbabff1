"""The model and its training step on one process."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import ModelConfig, TrainConfig
from train.data import IGNORED, Batch, Samples
from train.loop import Trainer
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
