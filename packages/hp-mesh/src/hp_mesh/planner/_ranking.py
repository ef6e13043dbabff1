"""A sequence whose members are built when they are looked at."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

from ._result import Candidate

Source = TypeVar("Source")


class Ranking(Sequence[Candidate], Generic[Source]):
    """Candidates in a fixed order, of which only those that are looked at take time and space."""

    __slots__ = ("_build", "_sources")

    def __init__(self, sources: Sequence[Source], build: Callable[[Source], Candidate]) -> None:
        self._sources, self._build = sources, build

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> "Ranking[Source]": ...
    def __getitem__(self, index: int | slice) -> "Candidate | Ranking[Source]":
        if isinstance(index, slice):
            return Ranking(self._sources[index], self._build)
        return self._build(self._sources[index])

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"Ranking of {len(self)} candidates"
