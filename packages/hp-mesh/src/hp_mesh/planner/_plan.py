"""All configurations of a run, in the order in which to try them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._cluster import Cluster
from ._result import GIB, Candidate, Rejection
from ._shape import ModelShape
from ._train import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every valid configuration, ranked, and every rejection.

    ``candidates`` starts with those that fit, then come the borderline ones, both the fastest
    first; last come those that do not fit, the smallest first. Each is built when it is looked at.
    """

    model: ModelShape
    cluster: Cluster
    train: TrainSpec
    candidates: Sequence[Candidate] = field(repr=False)
    rejected: Sequence[Rejection] = field(repr=False)
    fitting: int
    bordering: int

    @property
    def fits(self) -> Sequence[Candidate]:
        """Return the candidates whose memory is within the limit."""
        return self.candidates[: self.fitting]

    @property
    def borderline(self) -> Sequence[Candidate]:
        """Return the candidates whose memory is above the limit by at most 15%."""
        return self.candidates[self.fitting : self.fitting + self.bordering]

    @property
    def too_large(self) -> Sequence[Candidate]:
        """Return the candidates that need more."""
        return self.candidates[self.fitting + self.bordering :]

    @property
    def best(self) -> Candidate | None:
        """Return the first candidate, which is the nearest miss where nothing fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def considered(self) -> int:
        """Return how many configurations were looked at: candidates and rejections."""
        return len(self.candidates) + len(self.rejected)

    def __str__(self) -> str:
        counts = (
            f"{self.considered} considered: {self.fitting} fit, {self.bordering} borderline, "
            f"{len(self.too_large)} do not fit, {len(self.rejected)} rejected"
        )
        best = self.best
        if best is None:
            return f"no valid configuration; {counts}"
        if self.fitting:
            return f"best: {best}; {counts}"
        limit = best.limit / GIB
        return f"nothing fits in {limit:.1f} GiB, the nearest is {best}; {counts}"
