"""What communication costs: the model that plans are chosen with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .._errors import CostModelError


@runtime_checkable
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
    collective over several axes pays the largest of theirs. Between two meshes it gives the axes
    of either, by position, and a transfer pays the largest of all. It has a value for every axis of
    the mesh with the most; further ones stand for no axis. The defaults are 10 us and 50 GB/s.

    Raises `CostModelError` for what is no finite number of 0 or more, alone or in a tuple.
    """

    alpha: float | tuple[float, ...] = 1e-5
    beta: float | tuple[float, ...] = 2e-11

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            given = getattr(self, name)
            values = given if isinstance(given, tuple) else (given,)
            if not values or not all(map(_is_price, values)):
                raise CostModelError(
                    f"{name}={given!r} is no price; give finite seconds of 0 or more, one for all "
                    "mesh axes or a tuple with one for each"
                )

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return ``alpha + beta * received``; see `CostModel.seconds`."""
        return _largest(self.alpha, axes) + _largest(self.beta, axes) * received


def check_cost(cost: object) -> None:
    """Raise `CostModelError` for what is neither None nor a hashable `CostModel`."""
    if cost is None or isinstance(cost, AlphaBeta):
        return
    try:
        legal = isinstance(cost, CostModel) and not isinstance(cost, type)
        hash(cost)
    except TypeError:
        legal = False
    if not legal:
        raise CostModelError(
            f"cost={cost!r} is no cost model that plans can be kept by; give AlphaBeta(...), or a "
            "hashable object with the method seconds(axes, ranks, received)"
        )


def check_length(cost: CostModel, axes: int) -> None:
    """Raise `CostModelError` where a tuple of prices has fewer values than there are mesh axes."""
    if not isinstance(cost, AlphaBeta):
        return
    for name, given in (("alpha", cost.alpha), ("beta", cost.beta)):
        if isinstance(given, tuple) and len(given) < axes:
            raise CostModelError(
                f"{name}={given!r} prices {len(given)} mesh axes of {axes}; give {axes} values, or "
                "one number for all"
            )


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _largest(value: float | tuple[float, ...], axes: Sequence[int]) -> float:
    if isinstance(value, tuple):
        return max(value[axis] for axis in axes) if axes else max(value)
    return value
