"""Save and load in pieces with ``torch.distributed.checkpoint``."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .._torch import CHECKPOINT_HOOKS
from ..layouts._layout import Box

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
