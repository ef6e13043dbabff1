"""Which parameters units have, noted on the modules that register them.

A unit knows what lies under its modules; from below it cannot be seen.
"""

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ._torch import parameters_of

TAKEN_ATTRIBUTE = "_fully_shard_taken"


class _Taken:
    """The names of a module's parameters that units have; a copied or loaded module has none."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the copy's parameters are its own


def note_taken(roots: Iterable[nn.Module], ignored: Container[int] = ()) -> None:
    """Note that units have all parameters under ``roots``, but those whose id is ``ignored``."""
    for root in roots:
        for inner in root.modules():
            names = (
                name
                for name, p in parameters_of(inner).items()
                if p is not None and id(p) not in ignored
            )
            inner.__dict__[TAKEN_ATTRIBUTE] = _Taken(names)


def is_taken(module: nn.Module, name: str) -> bool:
    """Return whether a unit has the parameter that ``module`` registers as ``name``."""
    noted = module.__dict__.get(TAKEN_ATTRIBUTE)
    return isinstance(noted, _Taken) and name in noted.names
