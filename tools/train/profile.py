"""Traces of chosen steps, in which each collective has the name of its axis and module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.module_tracker import ModuleTracker

from hp_dtensor import Axis, Collectives, TorchCollectives

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast")


class NamedCollectives:
    """`Collectives` whose calls are ranges such as ``all_to_all over ep in blocks.1.mlp``.

    ``module`` says which module runs; where it returns None there are no ranges.
    """

    def __init__(self, inner: Collectives, module: Callable[[], str | None]) -> None:
        self.inner = inner
        self.module = module


def _named(name: str) -> Callable[..., Any]:
    def call(self: NamedCollectives, axis: Axis, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if module is None:
            return getattr(self.inner, name)(axis, *args, **kwargs)
        with record_function(f"{name} over {axis.name} in {module}"):
            return getattr(self.inner, name)(axis, *args, **kwargs)

    call.__name__, call.__doc__ = name, f"Name the call and pass it on; see `Collectives.{name}`."
    return call


for _name in NAMES:
    setattr(NamedCollectives, _name, _named(_name))


class Profiler:
    """Writes ``trace-<rank>.json`` of the steps of a range to a folder, by torch.profiler."""

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._running: tuple[profile, Any] | None = None
        self.collectives = cast(Collectives, NamedCollectives(TorchCollectives(), self._module))

    def before(self, step: int) -> None:
        """Start with the first step of the range."""
        if step in self._steps and self._running is None:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            tracker: Any = ModuleTracker()
            self._running = profile(activities=activities), tracker
            for each in self._running:
                each.__enter__()

    def after(self, step: int) -> None:
        """End with the last step of the range."""
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write what has been traced."""
        if self._running is None:
            return
        trace, tracker = self._running
        self._running = None
        tracker.__exit__(None, None, None)
        trace.__exit__(None, None, None)
        rank = dist.get_rank() if dist.is_initialized() else 0
        trace.export_chrome_trace(str(self._folder / f"trace-{rank}.json"))

    def _module(self) -> str | None:
        """Return the innermost module that runs, forward or backward, in a traced step."""
        if self._running is None:
            return None
        _, tracker = self._running
        innermost = max(tracker.parents, key=lambda name: (name != "Global", name.count("."), name))
        path = "the step" if innermost == "Global" else innermost.partition(".")[2] or "the model"
        return f"{path} (backward)" if tracker.is_bw and innermost != "Global" else path
