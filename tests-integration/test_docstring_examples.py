"""The examples of public docstrings, run as doctests."""

import doctest
import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import docstrings
import griffe
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
CHECKED = ("hp-mesh", "hp-dtensor", "hp-fsdp")
ON_RANKS = re.compile(r"^ *On (\d+) ranks", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Example(NamedTuple):
    """A docstring with examples; ``module`` is the one that exports the name."""

    module: str
    name: str
    text: str
    file: str
    line: int


def examples(package: str) -> list[Example]:
    """Return the public docstrings of a package that have examples."""
    found: dict[str, Example] = {}
    for module, _, target in docstrings.exported(docstrings.load([PACKAGES / package / "src"])):
        if target is None:
            continue
        members = docstrings.public_members(target) if isinstance(target, griffe.Class) else ()
        for each in (target, *members):
            text = each.docstring.value if each.docstring else ""
            if ">>>" in text:
                place = (module.path, each.path, text, str(each.filepath), each.lineno or 0)
                found[each.path] = Example(*place)
    return list(found.values())


def failures_of(example: Example) -> str:
    """Run one docstring in a namespace with the names that its module exports, and torch."""
    root = import_module(example.module.partition(".")[0])
    module = import_module(example.module)
    names: dict[str, Any] = {name: getattr(root, name) for name in root.__all__}
    names |= {name: getattr(module, name) for name in module.__all__}
    names |= {"torch": torch, "nn": torch.nn, "init_device_mesh": init_device_mesh}
    parser = doctest.DocTestParser()
    test = parser.get_doctest(example.text, names, example.name, example.file, example.line)
    output: list[str] = []
    with warnings.catch_warnings(action="ignore"):  # torch's, on what an example leaves out
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
    return "".join(output)


def run(rank: int, chosen: Sequence[Example]) -> str:
    """Run docstrings; return what failed."""
    torch.manual_seed(0)
    return "".join(map(failures_of, chosen))


@pytest.mark.parametrize("package", CHECKED)
def test_examples_of_docstrings_give_what_they_show(package: str, ranks: Any) -> None:
    by_ranks: dict[int, list[Example]] = {}
    for example in examples(package):
        needed = ON_RANKS.search(example.text)
        by_ranks.setdefault(int(needed[1]) if needed else 1, []).append(example)
    failures = run(0, by_ranks.pop(1, []))
    assert not failures, failures
    for number, chosen in by_ranks.items():
        for failures in ranks(number).run(run, chosen):
            assert not failures, failures
