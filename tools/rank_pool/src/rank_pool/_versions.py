"""Tests of what the oldest supported torch lacks."""

from importlib.metadata import version

import pytest

TORCH_2_11 = version("torch").startswith("2.11.")


def fails_with_torch_2_11(reason: str) -> pytest.MarkDecorator:
    """Mark a test that must fail with torch 2.11, and pass with later versions."""
    return pytest.mark.xfail(TORCH_2_11, reason=f"torch 2.11: {reason}", strict=True)
