"""Run functions on a pool of gloo ranks and bring their results back to one test process."""

from ._cached import cached as cached
from ._pool import RankError as RankError
from ._pool import RankPool as RankPool
from ._program import Ended as Ended
from ._program import run_program as run_program
