"""Fixtures of this package."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Make torch fill new memory with NaN, which shows whoever reads it before writing it."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
