"""What the numbers that describe a layer may be."""

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from ._errors import ExpertConfigError


def check_sizes(sizes: Mapping[str, object]) -> None:
    """Raise an `ExpertConfigError` that names all ``sizes`` that are not positive integers."""
    wrong = [f"{name}={size!r}" for name, size in sizes.items() if not is_count(size, 1)]
    if wrong:
        raise ExpertConfigError(f"{', '.join(wrong)} must be a positive integer")


def check_choices(top_k: object, num_experts: int) -> None:
    """Raise an `ExpertConfigError` if ``top_k`` is not an integer from 1 to ``num_experts``."""
    if not is_count(top_k, 1, num_experts):
        raise ExpertConfigError(
            f"top_k={top_k!r} of num_experts={num_experts} experts; "
            f"use an integer from 1 to {num_experts}"
        )


def check_shared(num_shared_experts: object) -> None:
    """Raise an `ExpertConfigError` if the number of shared experts is no integer of at least 0."""
    if not is_count(num_shared_experts, 0):
        raise ExpertConfigError(
            f"num_shared_experts={num_shared_experts!r} must be an integer of at least 0"
        )


def check_factors(factors: Mapping[str, Any]) -> None:
    """Raise an `ExpertConfigError` for the first factor that is no finite number of at least 0."""
    for name, value in factors.items():
        if not is_factor(value):
            raise ExpertConfigError(
                f"{name}={value!r} must be a finite number of at least 0; 0 is none"
            )


def check_groups(n_group: Any, topk_group: object, num_experts: int, top_k: int) -> None:
    """Raise an `ExpertConfigError` for groups that do not divide or are too few for ``top_k``."""
    legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    if not is_count(n_group, 1, num_experts) or n_group not in legal:
        raise ExpertConfigError(
            f"n_group={n_group!r} does not divide num_experts={num_experts}; use one of {legal}"
        )
    if topk_group is None:
        return
    groups = operator.index(n_group)
    least = -(-top_k * groups // num_experts)
    if not is_count(topk_group, least, groups):
        raise ExpertConfigError(
            f"topk_group={topk_group!r} of n_group={groups} must hold top_k={top_k} of "
            f"num_experts={num_experts} experts; use an integer from {least} to {groups}"
        )


class Listed(Protocol):
    """Numbers that become a list at once, as a tensor's do."""

    def tolist(self) -> list[float]:
        """Return the numbers."""
        ...


def as_loads(load: Any) -> tuple[float, ...]:
    """Return ``load`` as numbers, a tensor's by one read; `ExpertConfigError` for anything else."""
    found = load.tolist() if hasattr(load, "tolist") else load
    if not (isinstance(found, Sequence) and found and all(map(is_factor, found))):
        raise ExpertConfigError(
            f"loads {load!r} must be finite numbers of at least 0, one for each expert"
        )
    return tuple(found)


def is_factor(value: Any) -> bool:
    """Return whether ``value`` is a finite real number of at least 0, of any type but bool."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and 0 <= value < math.inf


def is_count(value: Any, least: int, most: float = math.inf) -> bool:
    """Return whether ``value`` is an integer, of any type but bool, from ``least`` to ``most``."""
    if isinstance(value, bool):
        return False
    try:
        return least <= operator.index(value) <= most
    except TypeError:
        return False
