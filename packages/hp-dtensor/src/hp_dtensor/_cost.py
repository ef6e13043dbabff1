"""What communication costs: the model that plans are chosen with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """The price of one collective; must be hashable, as plans are cached by it."""

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return the time for one collective over mesh axes ``axes`` with ``ranks`` ranks.

        ``received`` is the payload in bytes that a rank receives from others. Without axes it is a
        transfer between two meshes, and ``received`` the most that a rank receives or sends.
        """
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Each collective costs ``alpha`` seconds and ``beta`` seconds a received byte.

    Hockney's model (Parallel Computing 20, 1994). A tuple gives each mesh axis its own value; a
    collective over several axes pays the largest of theirs, a transfer between meshes that of all.
    The defaults are 10 us and 50 GB/s.
    """

    alpha: float | tuple[float, ...] = 1e-5
    beta: float | tuple[float, ...] = 2e-11

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            given = getattr(self, name)
            values = given if isinstance(given, tuple) else (given,)
            if not values or any(not value >= 0 for value in values):
                raise ValueError(
                    f"{name}={given!r} is no price; give seconds of 0 or more, one for all mesh "
                    "axes or a tuple with one for each"
                )

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return ``alpha + beta * received``; see `CostModel.seconds`."""
        return _largest(self.alpha, axes) + _largest(self.beta, axes) * received


def _largest(value: float | tuple[float, ...], axes: Sequence[int]) -> float:
    if isinstance(value, tuple):
        return max(value[axis] for axis in axes) if axes else max(value)
    return value
