"""The measure that the numeric tests rest on."""

import math

import pytest
import torch

from .models import worst

ONES = torch.ones(2)


def test_nan_in_any_tensor_is_the_worst_difference() -> None:
    hole = ONES * float("nan")
    assert math.isnan(worst({"a": ONES, "b": hole}, {"a": ONES, "b": ONES}))
    assert math.isnan(worst({"a": hole, "b": ONES}, {"a": ONES, "b": ONES}))


def test_the_worst_tensor_counts_relative_to_its_size() -> None:
    assert worst({"a": ONES, "b": 8 * ONES}, {"a": ONES, "b": 10 * ONES}) == pytest.approx(0.2)


def test_shapes_that_only_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        worst({"a": torch.ones(1)}, {"a": ONES})
