"""Run functions on a pool of gloo ranks and bring their results back to one test process."""

from ._pool import RankError as RankError
from ._pool import RankPool as RankPool
from ._worker import cached as cached
