"""Save and load in pieces with ``torch.distributed.checkpoint``."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .._errors import LayoutError
from .._layout import Box
from .._torch import CHECKPOINT_HOOKS

if TYPE_CHECKING:
    from ._tensor import RaggedTensor

C = TypeVar("C", bound=type)


def checkpointed(
    boxes: Callable[[Any], Sequence[Box]], view: Callable[[Any, Sequence[int]], Tensor]
) -> Callable[[C], C]:
    """Return a class decorator that lets a distributed checkpoint save and load objects in pieces.

    ``boxes(x)`` are the boxes that this rank holds of ``x``, of which none is empty unless all of
    ``x`` is; ``view(x, start)`` is the data of the box that starts there, which a load overwrites.
    Objects have a global ``shape`` and a ``dtype``. A checkpoint keeps boxes and no layout, so that
    what was saved in one layout loads into any other. Communicates nothing.
    """

    def chunks(x: Any) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([lo for lo, _ in box]),
                sizes=torch.Size([hi - lo for lo, hi in box]),
            )
            for box in boxes(x)
        ]

    def items(x: Any, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=x.dtype)
        size = torch.Size(x.shape)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in chunks(x)
        ]

    def data(x: Any, index: MetadataIndex) -> Tensor:
        return view(x, index.offset or ())

    def decorate(cls: C) -> C:
        for name, hook in zip(CHECKPOINT_HOOKS, (items, chunks, data), strict=True):
            setattr(cls, name, hook)
        return cls

    return decorate


def gathering(
    kind: "type[RaggedTensor]",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what lets torch's gathering of a state dict take ragged tensors, one at a time.

    Every rank that it is called on gathers every tensor, and keeps it where torch keeps what it
    gathers: on all ranks, or on those in ``ranks_only``.
    """

    def wrap(gather: Callable[..., Any]) -> Callable[..., Any]:
        def walk(state: Any, options: dict[str, Any]) -> Any:
            if isinstance(state, kind):
                # Made whole, so that torch moves it, or leaves it out, as it would a DTensor.
                with torch.no_grad():
                    full = state.full_tensor()
                return gather({"whole": full}, **options).get("whole")
            if not _has(kind, state):
                return gather({"rest": state}, **options).get("rest")
            if isinstance(state, dict):
                found: Any = {key: walk(value, options) for key, value in state.items()}
            else:
                found = type(state)(walk(value, options) for value in state)
            only = options.get("ranks_only", ())
            if only and dist.get_rank(options.get("pg")) not in only:
                return {} if isinstance(found, dict) else None
            return found

        @wraps(gather)
        def whole(state_dict: Any, **options: Any) -> Any:
            if not _has(kind, state_dict):
                return gather(state_dict, **options)
            return walk(state_dict, options)

        return whole

    return wrap


def scattering(
    kind: "type[RaggedTensor]",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what lets torch's loading of a full state dict cut whole tensors into ragged ones.

    Communicates nothing besides what torch does, whose broadcasts are complete only at its end.
    Until then each rank holds the whole tensors that it received.
    """

    def wrap(scatter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(scatter)
        def cut(full: Any, local: dict[str, Any], *args: Any, **options: Any) -> Any:
            ragged = {name: held for name, held in local.items() if isinstance(held, kind)}
            result = scatter(full, local, *args, **options)
            for name, held in ragged.items():
                found = local.get(name)
                if isinstance(found, Tensor) and not isinstance(found, kind):
                    local[name] = _cut(name, found, held)
            return result

        return cut

    return wrap


def _cut(name: str, full: Tensor, like: "RaggedTensor") -> "RaggedTensor":
    """Return this rank's part of a whole tensor, in memory of its own, laid as ``like``."""
    if full.shape != like.shape:
        raise LayoutError(
            f"the full state dict has {name} of shape {list(full.shape)}, which loads into a "
            f"ragged tensor of shape {list(like.shape)}; load a tensor of that shape"
        )
    spec = like._spec
    with torch.no_grad():
        part = full.new_empty(like._local.shape)
        for box in spec.boxes():
            view = spec.view(part, [lo for lo, _ in box])
            view.copy_(full[tuple(slice(lo, hi) for lo, hi in box)])
    return type(like)(part, spec)


def _has(kind: "type[RaggedTensor]", state: Any) -> bool:
    if isinstance(state, dict):
        return any(_has(kind, value) for value in state.values())
    if isinstance(state, list | tuple):
        return any(_has(kind, value) for value in state)
    return isinstance(state, Tensor) and isinstance(state, kind)
