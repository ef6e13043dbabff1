"""The curves and their largest difference."""

from pathlib import Path

from train.plot import largest_difference, plot_losses


def test_the_largest_difference_is_relative_and_over_common_steps() -> None:
    difference = largest_difference({1: 4.0, 2: 3.0, 9: 0.0}, {1: 4.0, 2: 2.0, 3: 50.0})
    assert difference is not None
    assert difference.step == 2
    assert difference.relative == 0.5


def test_without_common_steps_there_is_no_difference() -> None:
    assert largest_difference({1: 4.0}, {}) is None


def test_a_loss_that_is_no_number_differs_infinitely() -> None:
    difference = largest_difference({1: float("nan"), 2: 1.0}, {1: 4.0, 2: 1.5})
    assert difference is not None
    assert difference.relative == float("inf")


def test_both_pictures_are_written(tmp_path: Path) -> None:
    plot_losses({1: 4.0, 2: 3.0}, {1: 4.0, 2: 3.0}, "dp_shard=2", tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "dp_shard=2" in (tmp_path / "loss.svg").read_text()
