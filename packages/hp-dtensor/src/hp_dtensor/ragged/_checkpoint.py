"""Hooks with which ``torch.distributed.checkpoint`` saves and loads a tensor class.

A box is a rectangular region of a tensor: one half-open range ``(lo, hi)`` of global indices for
each dim. Each box that a rank holds becomes one ``WriteItem`` of the checkpoint.
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

    A checkpoint stores the boxes of a tensor and not its layout. So the tensor can be loaded into
    any other layout. The hooks communicate nothing. Instances of the decorated class need the
    attributes ``shape``, the global shape, and ``dtype``.

    Args:
        pieces: Called with an instance of the class. Returns a ``(box, view)`` pair for each box
            that this rank holds. A save reads ``view``, the elements in the box; a load overwrites
            it. A box may be empty only if the whole tensor is empty.
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
