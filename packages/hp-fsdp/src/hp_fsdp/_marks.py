"""What tells a unit that backward comes, and that it has left."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ._nested import map_tensors, tensors_with_gradient


class Watch:
    """Learns of a backward from the gradients of parameters.

    For outputs in which no tensor can be hooked: objects of unknown type, or nothing at all where
    the module keeps its results to itself.
    """

    def __init__(self, came: Callable[[Tensor], None]) -> None:
        self._came = came
        self._handles: list[RemovableHandle] = []

    def begin(self, parameters: Iterable[Tensor]) -> bool:
        """Watch unless it does; return whether any gradient can come."""
        if not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._came) for parameter in parameters
            ]
        return bool(self._handles)

    @property
    def active(self) -> bool:
        """Return whether gradients are watched."""
        return bool(self._handles)

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def mark_inputs(
    left: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the inputs, those that take a gradient marked: ``left`` runs when backward is past.

    The last value says whether there are any.
    """
    tensors = tensors_with_gradient((args, kwargs))
    if not tensors:
        return args, kwargs, False  # the end of backward will do
    apply: Any = _AfterBackward.apply
    marked = iter(apply(left, *tensors))
    args, kwargs = map_tensors(
        lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs)
    )
    return args, kwargs, True


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs after the unit's own backward."""

    @staticmethod
    def forward(ctx: Any, finish: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.finish = finish
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.finish()
        return None, *gradients
