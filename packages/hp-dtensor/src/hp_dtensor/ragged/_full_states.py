"""Support for ragged tensors in torch's full state dicts.

Importing this module replaces functions of ``torch.distributed.checkpoint.state_dict``, so that
``StateDictOptions(full_state_dict=True)`` works for state dicts with `RaggedTensor` values.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._errors import LayoutError
from .._torch import wrap_full_states
from ._tensor import RaggedTensor


class _Gathered(dict[Any, Any]):
    """A state dict whose method `items` all-gathers each ragged tensor just before yielding it.

    With ``cpu_offload``, torch moves each yielded tensor to the CPU, or drops it, before it takes
    the next item. So at most one gathered tensor is in device memory at a time.
    """

    def items(self) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        for key, value in super().items():
            yield key, _gathered(value)


def _gathered(value: Any) -> Any:
    if isinstance(value, RaggedTensor):
        with torch.no_grad():
            return value.full_tensor()
    if isinstance(value, dict):
        return _Gathered(value)
    if isinstance(value, list | tuple):
        values = [_gathered(each) for each in value]
        return tuple(values) if isinstance(value, tuple) else values
    return value


def _gather_ragged(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that gathers a state dict, so that it accepts ragged tensors.

    Each ragged tensor is replaced by the result of `RaggedTensor.full_tensor`.
    """

    @wraps(gather)
    def gather_all(state_dict: Any, **options: Any) -> Any:
        return gather(_gathered(state_dict), **options)

    return gather_all


def _scatter_ragged(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function that loads a full state dict, so that it accepts ragged tensors.

    torch's function replaces each ragged tensor of the local state dict by the whole tensor. The
    wrapper then replaces each whole tensor by a ragged tensor with this rank's part. The wrapper
    communicates nothing. Until torch's function returns, each rank holds all whole tensors in
    memory.
    """

    @wraps(scatter)
    def scatter_all(full: Any, local: dict[str, Any], *args: Any, **options: Any) -> Any:
        ragged = {name: x for name, x in local.items() if isinstance(x, RaggedTensor)}
        result = scatter(full, local, *args, **options)
        for name, like in ragged.items():
            found = local.get(name)
            if isinstance(found, Tensor) and not isinstance(found, RaggedTensor):
                local[name] = _sharded(name, found, like)
        return result

    return scatter_all


def _sharded(name: str, full: Tensor, like: RaggedTensor) -> RaggedTensor:
    if full.shape != like.shape:
        raise LayoutError(
            f"the full state dict has {name} of shape {list(full.shape)}, which loads into a "
            f"ragged tensor of shape {list(like.shape)}; load a tensor of that shape"
        )
    with torch.no_grad():
        return type(like)(like._spec.local_part(full), like._spec)


wrap_full_states(_gather_ragged, _scatter_ragged)
