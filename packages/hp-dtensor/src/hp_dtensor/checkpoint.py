"""Helpers for distributed checkpoints.

`ChecksumReader` verifies checksums while loading. `local_boxes` returns the elements of a tensor
that this rank stores, with their global indices.
"""

import io
import zipfile
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from ._boxes import Box
from ._errors import LayoutError
from ._placements import Partial, Replicate
from ._prepare import tensor_spec
from .ragged._spec import box_views
from .ragged._tensor import RaggedTensor, local_tensor_of

__all__ = ["ChecksumError", "ChecksumReader", "LocalBoxes", "local_boxes"]


class ChecksumError(ValueError):
    """Raised if an item of a checkpoint does not match its checksum, or has no checksum."""


class LocalBoxes(NamedTuple):
    """The elements of a tensor that this rank stores.

    Attributes:
        boxes: Pairs ``(box, elements)``. A box is one half-open range ``(start, stop)`` of global
            indices for each dim. The elements are a view of the local tensor with the lengths of
            the box. No box is empty.
        is_first_replica: Whether this rank is the first rank in the mesh of the tensor that holds
            these elements. A checkpoint has each element once if only first replicas write. True
            for a plain tensor.

    Examples:
        >>> local_boxes(torch.ones(2, 3)).is_first_replica
        True
    """

    boxes: tuple[tuple[Box, Tensor], ...]
    is_first_replica: bool


def local_boxes(tensor: Tensor) -> LocalBoxes:
    """Return the elements of a tensor that this rank stores, with their global indices.

    Communicates nothing.

    Args:
        tensor: A DTensor with any placements except `Partial`, a `RaggedTensor`, or a plain tensor,
            which this rank stores completely.

    Returns:
        The boxes with their elements, and whether this rank is the first replica. ``boxes`` is
        empty if this rank holds no elements or is not in the mesh of the tensor.

    Raises:
        LayoutError: The tensor has a `Partial` placement on an axis with several ranks.

    Examples:
        >>> local_boxes(torch.ones(2, 3)).boxes[0][0]
        ((0, 2), (0, 3))
    """
    if not isinstance(tensor, DTensor | RaggedTensor):
        everything = (tuple((0, length) for length in tensor.shape), tensor)
        return LocalBoxes((everything,) if tensor.numel() else (), True)
    spec = tensor_spec(tensor)
    layout = spec.layout
    axes = zip(layout.placements, layout.mesh_shape, strict=True)
    if any(isinstance(placement, Partial) and size > 1 for placement, size in axes):
        raise LayoutError(
            f"a tensor with placements {layout} has no final values; redistribute its Partial() "
            "axes to Replicate() or Shard(dim) first"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return LocalBoxes((), False)
    is_first_replica = all(
        index == 0
        for index, placement in zip(coordinate, layout.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    boxes = box_views(layout, spec.shape, coordinate, local_tensor_of(tensor))
    return LocalBoxes(tuple(boxes), is_first_replica)


class ChecksumReader(FileSystemReader):
    """Reads a distributed checkpoint and verifies its checksums.

    torch saves each tensor as a zip archive with one CRC-32 checksum per record. torch's reader
    ignores the checksums: a flipped bit becomes a wrong weight without an error. `ChecksumReader`
    verifies each item (a saved tensor or other value) that this rank loads, before reading it.

    Args:
        path: Folder of the checkpoint.

    Raises:
        ChecksumError: Raised by ``load`` if an item does not match its checksum, or has no
            checksum. torch's ``load`` raises it on all ranks, inside a ``CheckpointException``.

    Examples:
        >>> import tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(4)}
        >>> _ = dcp.save(state, checkpoint_id=folder, no_dist=True)
        >>> dcp.load(state, storage_reader=ChecksumReader(folder), no_dist=True)

    Note:
        Each item is read twice and is held in CPU memory for a short time. The file ``.metadata``
        has no checksum. Items that are not zip archives, such as safetensors and compressed items,
        raise `ChecksumError`.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Verify the checksums of the items in a load plan, then read the items.

        Args:
            plan: torch's load plan with the items to read.
            planner: torch's load planner, which receives the data.

        Returns:
            The future that torch's ``FileSystemReader.read_data`` returns.

        Raises:
            ChecksumError: An item does not match its checksum, or has no checksum.
        """
        by_file: dict[str, dict[tuple[int, int], str]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            parts = by_file.setdefault(stored.relative_path, {})
            parts[stored.offset, stored.length] = item.storage_index.fqn
        for name, parts in by_file.items():
            path = self.fs.concat_path(self.path, name)
            with self.fs.create_stream(path, "rb") as stream:
                for (offset, length), fqn in sorted(parts.items()):
                    stream.seek(offset)
                    if wrong := _wrong(stream.read(length)):
                        raise ChecksumError(
                            f"{path} is damaged: {wrong} in {fqn} (bytes {offset} to "
                            f"{offset + length}); load another checkpoint"
                        )
        return super().read_data(plan, planner)


def _wrong(content: bytes) -> str | None:
    """Return a description of the damage in a zip archive, or None if it is intact.

    An archive is intact if it can be read and all of its records match their checksums.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = archive.testzip()
    except Exception as error:  # noqa: BLE001 - zipfile raises many types if headers are damaged
        return f"no readable zip archive ({type(error).__name__}: {error})"
    return None if record is None else f"a wrong checksum of record {record}"
