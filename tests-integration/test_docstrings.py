"""The check of public docstrings, on small packages with one lack each."""

import subprocess
import sys
from pathlib import Path

import docstrings
import pytest

TOOL = Path(docstrings.__file__)

DOCUMENTED = '''
from dataclasses import dataclass
from typing import Protocol, overload

__all__ = ["LIMIT", "Box", "BoxError", "Half", "Rows", "pack"]

LIMIT = 3
"""The most items in a box."""


class BoxError(ValueError):
    """Raised if a box is full."""


class Rows(Protocol):
    """Something with rows.

    Examples:
        >>> half.rows()
        2
    """

    def rows(self) -> int:
        """Count the rows.

        Returns:
            The number of rows.
        """


class Base:
    """Has rows."""

    def rows(self) -> int:
        """Count the rows.

        Returns:
            The number of rows.
        """
        return 0


@dataclass
class Half(Base):
    """Half of a box.

    Args:
        number: Number of items.

    Examples:
        >>> Half(2).rows()
        2
    """

    number: int

    def rows(self) -> int:
        """Count the rows."""
        return self.number


class Box(Base):
    """Holds items.

    Args:
        size: Number of items.

    Raises:
        BoxError: ``size`` is negative.

    Examples:
        >>> Box(3).full
        False
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise BoxError("negative")
        self.size = size

    def rows(self) -> int:
        """Return 1."""
        return 1

    def step(self, n: int) -> int:
        """See https://docs.pytorch.org/step."""
        return n

    @property
    def full(self) -> bool:
        """Whether no item fits."""
        return self.size > LIMIT


def pack(*items: int, size: int = 1) -> Box:
    """Put items into a box.

    Args:
        *items: The items.
        size: Number of items.

    Returns:
        The box.

    Raises:
        BoxError: There are more items than ``size``.

    Examples:
        >>> pack(1, size=2).full
        False
    """
    _check(items)
    return Box(size)


def _check(items):
    if len(items) > LIMIT:
        raise BoxError("full")
'''


def package(folder: Path, source: str) -> Path:
    """Write a package whose ``__init__`` gets its names from ``_boxes``; return its folder."""
    (folder / "boxes").mkdir()
    (folder / "boxes" / "_boxes.py").write_text(source)
    names = ("LIMIT", "Box", "BoxError", "Half", "Rows", "pack")
    lines = "".join(f"    from ._boxes import {name} as {name}\n" for name in names)
    later = f"_LATER = {dict.fromkeys(names, '._boxes')}\n__all__ = ['__version__', *_LATER]\n"
    text = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n{lines}{later}"
    (folder / "boxes" / "__init__.py").write_text(text + "__version__ = '0.0.0'\n")
    return folder


def test_a_documented_package_lacks_nothing(tmp_path: Path) -> None:
    assert docstrings.check([package(tmp_path, DOCUMENTED)]) == []


@pytest.mark.parametrize(
    ("text", "replacement", "lack"),
    [
        (
            "        *items: The items.\n        size: Number",
            "        size: Number",
            "pack lacks items",
        ),
        ("        *items: The", "        things: The", "pack lacks an argument things"),
        (
            "    Args:\n        *items: The items.\n        size: Number of items.\n",
            "",
            "pack lacks Args",
        ),
        ("    Args:\n        number: Number of items.\n", "", "Half lacks Args"),
        ('        """See https://docs.pytorch.org/step."""\n', "", "Box.step lacks a docstring"),
        ("docs.pytorch.org", "example.org", "Box.step lacks Returns"),
        ('        """Whether no item fits."""\n', "", "Box.full lacks a docstring"),
        ("    Returns:\n        The box.\n", "", "pack lacks Returns"),
        (
            "        BoxError: There are",
            "        ValueError: There are",
            "pack lacks BoxError in Raises",
        ),
        ("        BoxError: ``size``", "        OSError: ``size``", "Box lacks BoxError in Raises"),
        ("Examples:\n        >>> pack", "Example:\n        >>> pack", "pack lacks Examples"),
        ("    Examples:\n        >>> half.rows()\n        2\n", "", "Rows lacks Examples"),
        ('    """Raised if a box is full."""\n', "    pass\n", "BoxError lacks a docstring"),
        ('"""The most items in a box."""\n', "", "LIMIT lacks a docstring"),
    ],
)
def test_each_lack_is_reported_with_its_line(
    tmp_path: Path, text: str, replacement: str, lack: str
) -> None:
    assert DOCUMENTED.count(text) == 1
    source = DOCUMENTED.replace(text, replacement)
    found = docstrings.check([package(tmp_path, source)])
    definition = lack.split()[0].rpartition(".")[2]
    assert any(line.partition(": ")[2].startswith(lack) for line in found), found
    for line in found:
        number = int(line.split(":")[1])
        nearby = source.splitlines()[number - 1 : number + 1]  # a decorator is the first line
        assert any(definition in each for each in nearby), line


@pytest.mark.parametrize("name", ["lids", "_lids"])
def test_a_module_for_users_without_a_list_of_its_names_is_reported(
    tmp_path: Path, name: str
) -> None:
    folder = package(tmp_path, DOCUMENTED)
    module = folder / "boxes" / f"{name}.py"
    module.write_text("from ._boxes import Box\n_LIMIT = 3\n")
    assert docstrings.check([folder]) == []
    module.write_text("from ._boxes import Box\ndef close(): ...\n")
    found = [] if name.startswith("_") else [f"{module}:1: boxes.{name} lacks __all__"]
    assert docstrings.check([folder]) == found


def test_a_name_in_the_list_that_the_module_lacks_is_reported(tmp_path: Path) -> None:
    folder = package(tmp_path, DOCUMENTED)
    init = folder / "boxes" / "__init__.py"
    init.write_text(init.read_text().replace("['__version__'", "['__version__', 'lid'"))
    assert docstrings.check([folder]) == [f"{init}:1: boxes lacks lid, which is in its __all__"]


def test_the_command_prints_lacks_and_fails(tmp_path: Path) -> None:
    folder = package(tmp_path, DOCUMENTED.replace("    Returns:\n        The box.\n", ""))
    command = [sys.executable, str(TOOL), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "_boxes.py:" in result.stdout
    assert result.stdout.endswith(": pack lacks Returns\n")
