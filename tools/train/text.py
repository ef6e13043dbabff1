"""The training text: the source of the Python standard library, as bytes."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TEXT_BYTES = 4 * 2**20  # enough for 2048 default steps in one pass, read in some 50 ms
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class TextError(ValueError):
    """The text that the run needs is not on this machine."""


def read_text(root: Path | None = None, limit: int = TEXT_BYTES) -> bytes:
    """Return the first ``limit`` bytes of the ``.py`` files under ``root``, joined in path order.

    ``root`` is this Python's standard library unless given. Tests and installed packages are left
    out, so that the result depends on the Python version only. Raises `TextError` without files.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    text = bytearray()
    for path in _sources(folder):
        text += path.read_bytes()
        if len(text) >= limit:
            return bytes(text[:limit])
    if not text:
        raise TextError(f"no .py files under {folder}; this Python ships no library source")
    return bytes(text)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _NOT_LIBRARY:
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def digest(text: bytes) -> str:
    """Return a short name for the text; a run goes on from a checkpoint of the same text only."""
    return hashlib.sha256(text).hexdigest()[:16]
