"""Traces of steps, in which collectives are named after their axis and module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.module_tracker import ModuleTracker

from hp_dtensor import Axis, Collectives, TorchCollectives

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast")


class NamedCollectives:
    """`Collectives` whose calls are ranges such as ``all_to_all over ep in blocks.1.mlp``.

    ``module`` returns the name of the running module, or None for no ranges.
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


class RunningModule:
    """The name of the module that runs, in forward or backward. Registers hooks.

    Compiled code calls no hooks, so its collectives are named after the module outside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._forward: list[str] = []  # from the outermost to the innermost
        self._backward: list[str] = []  # from the first to the last that got a gradient
        self._engine: Any = ModuleTracker()  # only for its check whether backward runs
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def __str__(self) -> str:
        """Return the path of the innermost module, ``the model`` or ``the step``."""
        backward = bool(self._engine.is_bw)
        found = self._forward[-1:]  # in backward: a recomputed module
        if backward and not found:
            found = self._backward[-1:]
        path = "the model" if found == [""] or (backward and not found) else "".join(found)
        return f"{path or 'the step'}{' (backward)' if backward else ''}"

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._names:
            return
        name = self._names[module]
        if not self._engine.is_bw:
            self._backward.clear()
        self._forward.append(name)
        self._hook(args, lambda gradient: self._leave(name))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._names:
            return
        name = self._names[module]
        if self._forward:
            self._forward.pop()
        self._hook(output, lambda gradient: self._enter(name))

    def _hook(self, found: Any, call: Callable[[Tensor], None]) -> None:
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(call)

    def _enter(self, name: str) -> None:
        """Insert a module that got a gradient before its inner ones, which may share its output."""
        if name not in self._backward:
            inner = [name in self._parents(other) for other in self._backward]
            self._backward.insert(inner.index(True) if any(inner) else len(inner), name)

    def _leave(self, name: str) -> None:
        if name in self._backward:
            self._backward.remove(name)

    def _parents(self, name: str) -> list[str]:
        parts = name.split(".")
        return ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]


class Profiler:
    """Writes ``trace-<rank>.json`` of a range of steps to a folder, by torch.profiler."""

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._running: tuple[profile, RunningModule] | None = None
        self.collectives = cast(Collectives, NamedCollectives(TorchCollectives(), self._module))

    def before(self, step: int, model: nn.Module) -> None:
        """Start with the first step of the range."""
        if step in self._steps and self._running is None:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=activities), RunningModule(model)
            self._running[0].start()

    def after(self, step: int) -> None:
        """End with the last step of the range."""
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Stop tracing and write the trace."""
        if self._running is None:
            return
        trace, module = self._running
        self._running = None
        trace.stop()
        module.remove()
        rank = dist.get_rank() if dist.is_initialized() else 0
        trace.export_chrome_trace(str(self._folder / f"trace-{rank}.json"))

    def _module(self) -> str | None:
        """Return the innermost module that runs, in a traced step."""
        return None if self._running is None else str(self._running[1])
