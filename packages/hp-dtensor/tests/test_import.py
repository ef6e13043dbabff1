"""Public names. Layouts and plans work without torch."""

import doctest
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from hp_dtensor import Layout

ROOT: Any = import_module(Layout.__module__.rpartition("._")[0])
NAMES = [name for name in ROOT.__all__ if name != "__version__"]

PROGRAM = """
import importlib, sys
sys.modules["torch"] = None  # any import of it fails
package = importlib.import_module(sys.argv[1])
assert {*package.__all__} <= {*dir(package)}
Layout, Shard, Replicate = package.Layout, package.Shard, package.Replicate
rows, whole = Layout((2, 2), (Shard(0), Shard(1))), Layout((2, 2), (Replicate(), Shard(0)))
print(len(package.plan_transfer(rows, whole, (6, 5), rank=1).recvs))
print(package.explain(rows, whole, shape=(6, 5)))
assert not [name for name in sys.modules if name.startswith("torch.")]
try:
    package.redistribute
except ImportError:
    print("redistribute needs torch")
"""


def test_layouts_and_plans_need_no_torch() -> None:
    name = Layout.__module__.rpartition("._")[0]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[0]) > 0
    assert lines[-1] == "redistribute needs torch"


def test_the_root_has_few_names_and_few_errors() -> None:
    kinds = [getattr(ROOT, name) for name in NAMES]
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]
    assert 20 <= len(NAMES) <= 32
    assert 4 <= len(errors) <= 6
    assert not [kind for kind in kinds if kind not in errors and "Examples:" not in kind.__doc__]


@pytest.mark.parametrize(
    "name", ["Layout", "Partial", "RaggedShard", "Replicate", "Shard", "StridedShard"]
)
def test_examples_of_layouts_are_right(name: str) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(getattr(ROOT, name), name, globs=dict(vars(ROOT)))
    result = doctest.DocTestRunner().run(example)
    assert (result.attempted > 0, result.failed) == (True, 0)
