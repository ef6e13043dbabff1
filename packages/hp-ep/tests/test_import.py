"""What can be planned without torch does not load it, and the names that a user types."""

import subprocess
import sys

from hp_ep import ExpertConfigError, __all__

PLAN = """
import importlib, sys
package = importlib.import_module(sys.argv[1])
placement = package.plan_placement([3.0, 1.0, 1.0, 1.0], 2, num_replicas=2)
package.plan_migration(placement, placement)
package.LoadStats(expert_load=(1, 2, 3, 4), placement=placement)
package.choose_dispatcher(num_ranks=2, num_experts=4, top_k=2, row_bytes=64)
assert {*package.__all__} <= {*dir(package)}
assert not {"TYPE_CHECKING", "import_module"} & {*dir(package)}
assert "torch" not in sys.modules
package.AllToAll
assert "torch" in sys.modules
"""


def test_placements_and_the_choice_of_a_dispatcher_need_no_torch() -> None:
    name = ExpertConfigError.__module__.rpartition(".")[0]
    subprocess.run([sys.executable, "-c", PLAN, name], check=True, timeout=300)


def test_every_public_name_is_there() -> None:
    package = sys.modules[ExpertConfigError.__module__.rpartition(".")[0]]
    assert 20 <= len(set(__all__)) == len(__all__) <= 27
    assert all(getattr(package, name) is not None for name in __all__)
