"""A reader of distributed checkpoints that compares the checksums in them."""

import io
import zipfile
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

__all__ = ["ChecksumError", "ChecksumReader"]


class ChecksumError(ValueError):
    """A part of a checkpoint does not match its checksum, or has none."""


class ChecksumReader(FileSystemReader):
    """Reads a checkpoint of ``torch.distributed.checkpoint`` and compares its checksums.

    torch saves each tensor as a zip archive with a CRC-32 for each record, but its own reader does
    not compare them: a flipped bit becomes a wrong weight without an error. This reader checks the
    tensors and objects that a rank reads, before it reads them.

    Args:
        path: The folder of the checkpoint.

    Raises:
        ChecksumError: An item does not match its checksum, or has none. `load` of torch raises it
            on all ranks, inside a ``CheckpointException``.

    Example:
        >>> from hp_dtensor.checkpoint import ChecksumReader
        >>> dcp.load(state, storage_reader=ChecksumReader("checkpoint"))

    Note:
        Each item is read twice and is held in CPU memory once more meanwhile. The file
        ``.metadata`` has no checksum. Items that torch did not write as zip archives, such as
        safetensors and compressed ones, are refused.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Check the items of a plan, then read them; see ``StorageReader.read_data``."""
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
