"""Compare torch with a package in the case of a public report of a wrong result."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from ._versions import TORCH_2_11


class Pair(NamedTuple):
    """The results of torch and of a package in the same case on one rank.

    Attributes:
        torchs: Result of torch: tensors, numbers or the text of an error.
        ours: Result of the package.
    """

    torchs: Any
    ours: Any


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a function, or a text that describes its error.

    Args:
        call: Function without arguments.

    Returns:
        The result. If the function raises ``RuntimeError``, ``ValueError``, ``AssertionError`` or a
        subclass, the text ``"NAME: MESSAGE"``.
    """
    try:
        return call()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def expect_fault(fault: bool, report: str) -> None:
    """Fail the test if the installed torch no longer has the fault of a report.

    Skips the test if torch 2.11 is installed, which lacks some of the faults.

    Args:
        fault: Whether torch returned the wrong result of the report.
        report: Name of the report, such as ``"pytorch/pytorch#158719"``.
    """
    if fault:
        return
    if TORCH_2_11:
        pytest.skip(f"torch 2.11 does not have the fault of {report}")
    pytest.fail(
        f"torch {torch.__version__} no longer has the fault of {report}: move its row on the page "
        "wrong-results to the repaired reports, and test only the right result"
    )
