"""Violations, reports and the error that carries them."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(("power", "rest"), [(23, "8388608"), (24, "1 more"), (32, "9 more")])
def test_many_legal_numbers_are_counted_in_the_text_and_listed_in_the_violation(
    power: int, rest: str
) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=7, world_size=2**power)
    (violation,) = caught.value.violations
    assert violation.legal == {"tp": tuple(2**n for n in range(power + 1))}
    first = ", ".join(str(2**n) for n in range(min(power, 24)))
    assert str(violation) == f"tp=7 does not divide world_size={2**power}; use {first} or {rest}"


@given(st.integers(1, 3000))
@settings(deadline=None, max_examples=100)
def test_the_legal_numbers_are_all_divisors_in_ascending_order(world: int) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=world + 1, world_size=world)
    (violation,) = caught.value.violations
    assert violation.legal["tp"] == tuple(n for n in range(1, world + 1) if world % n == 0)


def test_a_long_value_is_shown_by_its_two_ends() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp="a" * 500 + "z")  # type: ignore[arg-type]
    assert str(caught.value).startswith("tp='aaaa")
    assert "aaaz' is not a degree" in str(caught.value)
    assert len(str(caught.value)) < 200
