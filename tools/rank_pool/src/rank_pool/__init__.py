"""Run functions on a pool of gloo ranks, and helpers that the tests of several packages share."""

from ._cached import cached as cached
from ._calls import count_returns as count_returns
from ._calls import count_upward_calls as count_upward_calls
from ._calls import modules_called as modules_called
from ._calls import profile as profile
from ._case_table import CaseTable as CaseTable
from ._doubles import FinishedWork as FinishedWork
from ._doubles import WrappedMapping as WrappedMapping
from ._pool import RankError as RankError
from ._pool import RankPool as RankPool
from ._program import Ended as Ended
from ._program import run_program as run_program
from ._reports import Pair as Pair
from ._reports import expect_fault as expect_fault
from ._reports import outcome as outcome
from ._versions import TORCH_2_11 as TORCH_2_11
from ._versions import fails_with_torch_2_11 as fails_with_torch_2_11
