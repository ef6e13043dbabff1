"""A reader of distributed checkpoints that verifies their checksums."""

import io
import zipfile
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

__all__ = ["ChecksumError", "ChecksumReader"]


class ChecksumError(ValueError):
    """Raised if an item of a checkpoint does not match its checksum, or has no checksum."""


class ChecksumReader(FileSystemReader):
    """Reads a distributed checkpoint and verifies its checksums.

    torch saves each tensor as a zip archive with one CRC-32 per record, but torch's reader does not
    check it: a flipped bit becomes a wrong weight without an error. `ChecksumReader` verifies the
    items that this rank loads before reading them.

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
            A future, as `StorageReader.read_data` of torch returns it.

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
    """Return how a zip archive is damaged, None if its records match their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = archive.testzip()
    except Exception as error:  # noqa: BLE001 - zipfile raises many types for damaged headers
        return f"no readable zip archive ({type(error).__name__}: {error})"
    return None if record is None else f"a wrong checksum of record {record}"
