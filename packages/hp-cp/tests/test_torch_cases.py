"""The table of torch's tests names tests that exist, and counts its rows right."""

from pathlib import Path

from rank_pool import CaseTable

TABLE = CaseTable(
    path=Path(__file__).parent / "torch_cases.md",
    results=("same", "differs", "internal", "needs CUDA"),
)


def test_every_test_that_the_table_names_exists() -> None:
    assert len(TABLE.named_tests()) >= 9
    assert TABLE.missing_tests() == []


def test_the_stated_counts_match_the_rows() -> None:
    counted = TABLE.counted()
    assert TABLE.stated() == counted
    assert f"{sum(counted.values())} in all" in TABLE.text()


def test_rows_that_are_the_same_or_differ_name_a_test() -> None:
    for restated, result in TABLE.rows():
        assert "`test_" in restated or not result.startswith(("same", "differs")), result
