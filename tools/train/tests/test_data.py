"""Batches: every sample once per pass, in an order that only the seed decides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import held_out_samples
from train.data import IGNORED, Samples
from train.text import TextError

numbers = st.integers(1, 9)


def _samples(count: int, seq_len: int, seed: int = 0) -> Samples:
    text = bytes(row for row in range(count) for _ in range(seq_len))
    return Samples(text + b"!" * (seq_len - 1), seq_len, seed)


@settings(deadline=None, max_examples=100)
@given(count=numbers, seq_len=numbers, size=numbers, seed=st.integers(0, 3))
def test_a_pass_takes_every_sample_once_whatever_the_batch(
    count: int, seq_len: int, size: int, seed: int
) -> None:
    data = _samples(count, seq_len, seed)
    consumed, taken = 0, []
    while consumed < count:
        batch = data.batch(consumed, size)
        real = batch.consumed - consumed
        taken += batch.tokens[:real, 0].tolist()
        assert batch.tokens.shape == batch.labels.shape == (size, seq_len)
        assert torch.equal(batch.labels[:real], batch.tokens[:real])
        assert (batch.labels[real:] == IGNORED).all()
        consumed = batch.consumed
    assert consumed == count
    assert sorted(taken) == list(range(count))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(4, 9), steps=st.integers(1, 6))
def test_where_a_batch_starts_depends_on_the_samples_consumed_only(count: int, steps: int) -> None:
    whole, again = _samples(count, 2), _samples(count, 2)
    consumed = 0
    for _ in range(steps):
        batch = whole.batch(consumed, 3)
        assert torch.equal(again.batch(consumed, 3).tokens, batch.tokens)
        assert torch.equal(_samples(count, 2).batch(consumed, 3).tokens, batch.tokens)
        consumed = batch.consumed


def test_seeds_and_passes_have_orders_of_their_own() -> None:
    orders = {
        tuple(_samples(50, 1, seed).batch(start, 50).tokens[:, 0].tolist())
        for seed in (0, 1)
        for start in (0, 50)
    }
    assert len(orders) == 4


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4), size=numbers)
def test_held_out_samples_are_the_last_and_are_never_trained_on(
    lengths: list[int], size: int
) -> None:
    parts = [np.arange(n, dtype=np.uint16) + 100 * i for i, n in enumerate(lengths)]
    rows = [part[i : i + 3].tolist() for part in parts for i in range(0, len(part) - 2, 3)]
    held = held_out_samples(len(rows))
    if len(rows) - held < 1:
        return
    data = Samples(parts, 3, 0, held_out=True)
    batch = data.batch(0, len(rows))
    trained = batch.tokens[: batch.consumed].tolist()
    assert sorted(trained) == sorted(rows[: len(rows) - held])
    batches = list(data.held_out(size))
    kept = torch.cat([b.labels[: b.consumed - i * size] for i, b in enumerate(batches)])
    assert kept.tolist() == rows[len(rows) - held :]
    assert all((b.labels[b.consumed - i * size :] == IGNORED).all() for i, b in enumerate(batches))
    assert list(Samples(parts, 3, 0).held_out(size)) == []


def test_a_token_that_the_model_has_not_is_named() -> None:
    data = Samples([np.array([1, 2, 300, 4], dtype=np.uint16)], 2, 0, vocab_size=256)
    with pytest.raises(TextError, match="the token 300, but the model has vocab-size=256"):
        data.batch(0, 2)


def test_a_twentieth_is_held_out_but_some_and_not_too_many() -> None:
    assert [held_out_samples(n) for n in (2, 40, 10**6)] == [1, 2, 512]
