"""Which parameters units have, noted on the modules that register them.

A unit knows what lies under its modules; from below it cannot be seen.
"""

from collections.abc import Container, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor

from ._torch import parameters_of

TAKEN_ATTRIBUTE = "_fully_shard_taken"


class _Taken:
    """The names of a module's parameters that units have, and of those that were ignored.

    A copied or loaded module has none.
    """

    def __init__(self, names: Iterable[str], ignored: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.ignored = frozenset(ignored)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the copy's parameters are its own


def note_taken(roots: Iterable[nn.Module], ignored: Container[int] = ()) -> None:
    """Note that units have all parameters under ``roots``, but those whose id is ``ignored``."""
    for root in roots:
        for inner in root.modules():
            found = {name: p for name, p in parameters_of(inner).items() if p is not None}
            left = {name for name, p in found.items() if id(p) in ignored}
            inner.__dict__[TAKEN_ATTRIBUTE] = _Taken(found.keys() - left, left)


def is_taken(module: nn.Module, name: str) -> bool:
    """Return whether a unit has the parameter that ``module`` registers as ``name``."""
    noted = module.__dict__.get(TAKEN_ATTRIBUTE)
    return isinstance(noted, _Taken) and name in noted.names


def added_parameters(root: nn.Module) -> list[str]:
    """Return the plain parameters under ``root`` that train and that no unit was ever given.

    They were added after `fully_shard`, with their module or alone.
    """
    return [
        f"{path}.{name}" if path else name
        for path, inner in root.named_modules()
        for noted in [inner.__dict__.get(TAKEN_ATTRIBUTE)]
        for name, p in parameters_of(inner).items()
        if p is not None and p.requires_grad and not isinstance(p, DTensor | RaggedTensor)
        if not isinstance(noted, _Taken) or name not in noted.names | noted.ignored
    ]
