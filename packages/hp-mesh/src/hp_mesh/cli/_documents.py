"""Values of the package as JSON documents."""

from collections.abc import Mapping

from .._dims import ParallelDims
from .._errors import Violation


def dims_document(dims: ParallelDims) -> Mapping[str, object]:
    """Return resolved degrees as a mapping that `ParallelDims.from_dict` takes back."""
    return dims.to_dict()


def violation_document(violation: Violation) -> Mapping[str, object]:
    """Return a violation with its text."""
    return {
        "rule": violation.rule,
        "level": violation.level,
        "reason": violation.reason,
        "values": dict(violation.values),
        "legal": {name: list(numbers) for name, numbers in violation.legal.items()},
        "text": str(violation),
    }
