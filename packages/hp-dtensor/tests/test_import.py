"""Layouts and plans work where torch is not installed."""

import subprocess
import sys

from hp_dtensor import Layout

PROGRAM = """
import importlib, sys
sys.modules["torch"] = None  # any import of it fails
package = importlib.import_module(sys.argv[1])
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
