"""Hooks that save and load tensors with ``torch.distributed.checkpoint``.

Each box of elements that a rank holds becomes one ``WriteItem``.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .._boxes import Box, extent
from .._torch import CHECKPOINT_HOOKS

C = TypeVar("C", bound=type)


def checkpointed(pieces: Callable[[Any], Iterable[tuple[Box, Tensor]]]) -> Callable[[C], C]:
    """Return a class decorator that adds torch's hooks for distributed checkpoints.

    A checkpoint stores boxes and no layout, so a tensor can be loaded into any other layout.
    The hooks communicate nothing. Instances of the class need ``shape`` (global) and ``dtype``.

    Args:
        pieces: Returns the boxes that this rank holds of an instance, each with a view of its
            elements, which a load overwrites. No box is empty, unless the whole tensor is.
    """

    def chunks(x: Any) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=_start(box), sizes=torch.Size(extent(box)))
            for box, _ in pieces(x)
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
        return next(view for box, view in pieces(x) if _start(box) == index.offset)

    def decorate(cls: C) -> C:
        for name, hook in zip(CHECKPOINT_HOOKS, (items, chunks, data), strict=True):
            setattr(cls, name, hook)
        return cls

    return decorate


def _start(box: Box) -> torch.Size:
    return torch.Size([lo for lo, _ in box])
