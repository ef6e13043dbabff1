"""Which candidate of a plan to run: the fastest, unless a little time buys much memory."""

from itertools import takewhile

from ..planner import Candidate, Plan
from ._reasons import GIB, percent

TIGHT = 0.95  # of the limit; an estimate above it leaves little room for its own error
CLOSE = 1.01  # times as long counts as equally fast
CLEARLY = 0.05  # of the limit; a smaller saving is not worth any time


def choose(found: Plan) -> Candidate | None:
    """Return the candidate to run, None where there is none.

    Where the fastest needs more than 95% of the limit, it is the fastest of those within 1% of its
    time that need less by at least 5% of the limit, if there is one.
    """
    best = found.best
    if best is None or best.fit != "fits" or best.memory.total <= TIGHT * best.limit:
        return best
    close = takewhile(lambda one: one.time.total <= CLOSE * best.time.total, found.fits)
    enough = best.memory.total - CLEARLY * best.limit
    return next((one for one in close if one.memory.total <= enough), best)


def why_chosen(chosen: Candidate, fastest: Candidate) -> str:
    """Return what a candidate costs and saves against the fastest."""
    slower = percent(chosen.time.total / fastest.time.total - 1)
    less = (fastest.memory.total - chosen.memory.total) / GIB
    free = (fastest.limit - fastest.memory.total) / GIB
    return (
        f"{slower} slower than the fastest, {less:.1f} GiB less: "
        f"the fastest would leave {free:.1f} GiB"
    )
