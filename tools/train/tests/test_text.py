"""The training text."""

from pathlib import Path

import pytest

from train.text import TextError, digest, read_text


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_sources_are_joined_in_path_order_without_tests_and_packages(tmp_path: Path) -> None:
    files = {"b.py": "B", "a/z.py": "Z", "a/b.py": "b", "c.txt": "-", "test/t.py": "-"}
    _write(tmp_path, {**files, "a/tests/t.py": "-", "site-packages/p.py": "-"})
    assert read_text(tmp_path) == b"bZB"


def test_the_text_ends_at_the_limit(tmp_path: Path) -> None:
    _write(tmp_path, {"a.py": "abc", "b.py": "def"})
    assert read_text(tmp_path, limit=4) == b"abcd"


def test_a_folder_without_sources_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=str(tmp_path)):
        read_text(tmp_path)


def test_this_python_has_a_text_and_it_is_the_same_every_time() -> None:
    first = read_text()
    assert len(first) > 2**20
    assert digest(first) == digest(read_text()) != digest(first[1:])
