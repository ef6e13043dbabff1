"""The table of torch's tests names tests that exist, and counts its rows right."""

from pathlib import Path

from rank_pool import CaseTable

TABLE = CaseTable(
    path=Path(__file__).parent / "torch_cases.md",
    results=("same", "differs", "internal", "needs CUDA"),
)


def test_the_table_is_complete_and_names_tests_that_exist() -> None:
    assert TABLE.problems(least=9) == []
