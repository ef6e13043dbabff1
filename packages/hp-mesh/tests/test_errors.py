"""Violations, reports and the error that carries them."""

import pickle

import pytest

from hp_mesh import ParallelDims, ParallelDimsError, Report, Violation


def test_errors_are_value_errors_that_survive_a_process_boundary() -> None:
    with pytest.raises(ValueError, match="tp=3") as caught:
        ParallelDims(tp=3, world_size=4)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ParallelDimsError)
    assert str(copy) == str(caught.value)
    assert isinstance(caught.value, ParallelDimsError)
    assert copy.violations == caught.value.violations


def test_a_violation_carries_the_numbers_that_its_text_shows() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=3, world_size=4)
    (violation,) = caught.value.violations
    assert violation.rule == "product"
    assert violation.values == {"tp": 3, "world_size": 4}
    assert violation.legal == {"tp": (1, 2, 4)}
    assert violation.level == "error"


def test_a_report_is_a_sequence_that_tells_errors_from_advice() -> None:
    error = Violation(rule="a", reason="a=1 is odd", values={"a": 1}, legal={"a": (2, 4)})
    advice = Violation(rule="b", reason="b=3 is slow", values={"b": 3}, level="advice")
    report = Report([error, advice], skipped=["c"])
    assert list(report) == [report[0], report[1]] == [*report[:2]]
    assert len(report) == 2
    assert report.errors == (error,)
    assert report.skipped == ("c",)
    assert [str(v) for v in report] == ["a=1 is odd; use 2 or 4", "b=3 is slow"]
