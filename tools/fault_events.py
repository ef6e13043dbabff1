"""Events that disturb a run of the trainer at a chosen rank, step and phase.

``python tools/fault_events.py EVENT... -- WORDS`` runs the trainer with ``WORDS``. Each event is
``kind:rank:step:phase:delay``:

- kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (an exception), ``fill`` (files grow no
  larger from then on), ``note`` (nothing), or the name of a signal to the launcher such as
  ``SIGTERM``;
- phase: ``join``, ``gradients``, ``update``, ``save`` or ``name`` (a checkpoint gets its name);
- delay: seconds between the begin of the phase and the event.

An event happens once, also if the rank is restarted: it leaves a file in the folder
``$FAULT_MARKS``.
"""

import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parent / "train"
MARKS = "FAULT_MARKS"
PHASES = {
    "join": ("train.rank", "", "_join"),
    "gradients": ("train.loop", "Trainer", "gradients"),
    "update": ("train.loop", "Trainer", "update"),
    "save": ("train.checkpoint", "Checkpoints", "start"),
    "name": ("train.checkpoint", "Checkpoints", "_take_name"),
}
FULL = 20_000  # bytes: the log fits, the model's files do not


@dataclass(frozen=True, slots=True)
class Event:
    """What happens to one rank, ``delay`` seconds after a phase of a step (from 1) begins."""

    kind: str
    rank: int
    step: int
    phase: str = "gradients"
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}:{self.phase}:{self.delay}"

    @staticmethod
    def read(text: str) -> "Event":
        """Return the event that `str` wrote."""
        kind, rank, step, phase, delay = text.split(":")
        return Event(kind, int(rank), int(step), phase, float(delay))

    @property
    def mark(self) -> Path:
        """Return the file that says that the event has begun."""
        return Path(os.environ[MARKS]) / str(self)

    def begin(self) -> None:
        """Let the event happen, unless it has."""
        if self.mark.exists():
            return
        self.mark.touch()
        if self.delay:
            threading.Thread(target=self._later, daemon=True).start()
        else:
            self._happen()

    def _later(self) -> None:
        time.sleep(self.delay)
        self._happen()

    def _happen(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "raise":
            raise ArithmeticError(f"{self} happened")
        elif self.kind == "fill":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))
        elif self.kind != "note":
            os.kill(os.getppid(), signal.Signals[self.kind])


def install(events: list[Event]) -> None:
    """Replace the functions of the trainer in which events begin."""
    count = {"step": 0}
    for phase, (module, owner, name) in PHASES.items():
        found: Any = __import__(module, fromlist=["x"])
        place = getattr(found, owner) if owner else found
        setattr(place, name, _disturbed(getattr(place, name), phase, events, count))


def _disturbed(
    function: Callable[..., Any], phase: str, events: list[Event], count: dict[str, int]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if phase == "gradients":
            count["step"] = args[0].step + 1
        for event in events:
            step = event.step if phase == "join" else count["step"]
            if phase == "name":  # a later step may have begun meanwhile
                step = int(args[0]._fields["step"])
            here = (phase, int(os.environ.get("RANK", "0")), step)
            if here == (event.phase, event.rank, event.step):
                event.begin()
        return function(*args, **kwargs)

    return call


def main() -> None:
    """Run the trainer in this process, disturbed."""
    words = sys.argv[1:]
    at = words.index("--")
    sys.path.insert(0, str(TRAIN.parent))
    install([Event.read(word) for word in words[:at]])
    sys.argv = [str(TRAIN), *words[at + 1 :]]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
