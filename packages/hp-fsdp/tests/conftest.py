"""Which cases run by default."""

import pytest

# Modes that the next minor version removes.
REMOVED_SOON = {"fused", "ring"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the cases of modes that will be removed to `nox -s long`, except their own tests."""
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None or item.path.stem == "test_gradient_modes":
            continue
        if REMOVED_SOON & set(spec.id.split("-")):
            item.add_marker(pytest.mark.long)
