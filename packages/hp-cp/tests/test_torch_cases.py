"""That the table of torch's tests names tests that exist, and counts its rows right."""

import ast
import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = ("same", "differs", "internal", "needs CUDA")


def table() -> str:
    return (HERE / "torch_cases.md").read_text()


def functions_in(file: str) -> set[str]:
    """Return the names of the test functions in a file."""
    path = HERE / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module(body=[], type_ignores=[])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def rows() -> list[tuple[str, str]]:
    """Return what restates each of torch's tests, and the result."""
    parts = table().split("\n## ")[1:]
    found = [re.findall(r"^\| \w*\.?test_\S* \| (.*?) \| (.*) \|$", each, re.M) for each in parts]
    assert all(found)
    return [row for each in found for row in each]


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table())
    assert len(named) >= 9
    known = {file: functions_in(file) for file in {file for file, _ in named}}
    assert [f"{file}::{test}" for file, test in named if test not in known[file]] == []


def test_the_counts_are_those_of_the_rows() -> None:
    results = [next(each for each in RESULTS if said.startswith(each)) for _, said in rows()]
    counted = {name: int(n) for name, n in re.findall(r"^\| ([\w ]+) \| (\d+) \|", table(), re.M)}
    assert counted == dict(Counter(results))
    assert f"{len(results)} in all" in table()


def test_what_is_the_same_or_differs_is_restated() -> None:
    for restated, said in rows():
        assert "`test_" in restated or not said.startswith(("same", "differs")), said
