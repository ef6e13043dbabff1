"""The forwards of units in the order they ran, which backward goes through in reverse."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._unit import Unit


@dataclass(slots=True, eq=False)
class Run:
    """One forward of a unit, and how far its backward is.

    ``expected``: backward can be seen to reach it. ``marked``: and to leave it. ``backward``: the
    number of the last one that did.
    """

    unit: "Unit"
    expected: bool = False
    marked: bool = False
    reached: bool = False
    left: bool = False
    backward: int = 0
    order: "Order | None" = None
    begin: int = -1
    end: int = -1


@dataclass(slots=True, eq=False)
class Order:
    """Where the runs of one pass begin (False) and end (True), one after another."""

    events: list[tuple[Run, bool]] = field(default_factory=list)

    def begin(self, run: Run) -> None:
        """Note that a run begins."""
        run.order, run.begin = self, len(self.events)
        self.events.append((run, False))

    def end(self, run: Run) -> None:
        """Note that a run ends, if it began in this pass."""
        if run.order is self:
            run.end = len(self.events)
            self.events.append((run, True))
