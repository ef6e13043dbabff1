"""Read the pages that list the tests of another library and the tests that restate them."""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """A Markdown page with one table per test file of another library.

    Each row has three cells: the test of the other library, the tests that restate it
    (```test_file.py::test_name```) and the result. A first table states the number of rows for each
    result.

    Attributes:
        path: File of the page. The named test files are in the same folder.
        results: Words of which each result cell begins with one.
    """

    path: Path
    results: Sequence[str]

    def text(self) -> str:
        """Return the text of the page."""
        return self.path.read_text(encoding="utf-8")

    def named_tests(self) -> list[tuple[str, str]]:
        """Return the file and the function of each test that the page names."""
        named: list[tuple[str, str]] = re.findall(r"`(test_\w+\.py)::(test_\w+)`", self.text())
        return named

    def missing_tests(self) -> list[str]:
        """Return the tests that the page names and that do not exist."""
        named = self.named_tests()
        known = {file: _functions(self.path.parent / file) for file in {file for file, _ in named}}
        return [f"{file}::{test}" for file, test in named if test not in known[file]]

    def rows(self) -> list[tuple[str, str]]:
        """Return the cells with the restating tests and with the result, one pair per row.

        Raises:
            ValueError: A section of the page has no rows.
        """
        found: list[tuple[str, str]] = []
        for section in self.text().split("\n## ")[1:]:
            rows = re.findall(r"^\| \w*\.?test_\S* \| (.*?) \| (.*) \|$", section, re.MULTILINE)
            if not rows:
                raise ValueError(f"section without rows: {section.splitlines()[0]}")
            found += rows
        return found

    def problems(self, least: int) -> list[str]:
        """Return descriptions of the mistakes on the page.

        Args:
            least: The page must name at least this many tests.

        Returns:
            Tests that do not exist, wrong numbers, and rows "same" or "differs" without a test.
        """
        counted, named = self.counted(), len(self.named_tests())
        found = [f"no test {name}" for name in self.missing_tests()]
        if named < least:
            found.append(f"{named} tests are named, fewer than {least}")
        if self.stated() != counted:
            found.append(f"the first table states {self.stated()}; counted: {counted}")
        if f"{sum(counted.values())} in all" not in self.text():
            found.append(f"the total is {sum(counted.values())}")
        for restated, result in self.rows():
            if "`test_" not in restated and result.startswith(("same", "differs")):
                found.append(f"a row names no test: {result}")
        return found

    def counted(self) -> dict[str, int]:
        """Return the number of rows for each result.

        Raises:
            ValueError: A result begins with none of the words in ``results``.
        """
        counts: Counter[str] = Counter()
        for _, result in self.rows():
            name = next((each for each in self.results if result.startswith(each)), None)
            if name is None:
                raise ValueError(f"unknown result: {result}; use one of {', '.join(self.results)}")
            counts[name] += 1
        return dict(counts)

    def stated(self) -> dict[str, int]:
        """Return the numbers that the first table states for each result."""
        stated = re.findall(r"^\| ([\w ]+) \| (\d+) \|", self.text(), re.MULTILINE)
        return {name: int(number) for name, number in stated}


def _functions(path: Path) -> set[str]:
    """Return the names of the functions in a file; no names if it does not exist."""
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
