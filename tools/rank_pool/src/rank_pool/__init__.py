"""Run functions on a pool of gloo ranks and bring their results back to one test process."""

from ._cached import cached as cached
from ._pool import RankError as RankError
from ._pool import RankPool as RankPool
from ._program import Ended as Ended
from ._program import run_program as run_program
from ._versions import TORCH_2_11 as TORCH_2_11
from ._versions import fails_with_torch_2_11 as fails_with_torch_2_11
