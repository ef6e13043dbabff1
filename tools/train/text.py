"""The training text as tokens: the Python library's source, or files of one's own.

Loads no torch, and numpy where there is something to read only.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Part = NDArray[np.unsignedinteger[Any]]

TEXT_BYTES = 4 * 2**20  # enough for 2048 default steps in one pass, read in some 50 ms
BYTES = "bytes"  # the tokenizer that takes each byte for a token
TOKEN_DTYPES = ("uint16", "uint32")
ARRAYS, LINES = (".bin", ".npy"), (".jsonl", ".ndjson")
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_LOOKED_AT = 2**16  # bytes of a file that decide whether it is text
_END_TOKENS = 2**22  # at each end of a token array, which are looked at before the run
_END_BYTES = 2**20  # of each end of a token array, which with its size stand for the whole


class TextError(ValueError):
    """The text that the run needs is not on this machine, or is not what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where tokens come from: files or folders, none for the library; who makes them of text."""

    paths: tuple[Path, ...] = ()
    tokenizer: str | None = None
    token_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens in the order of the text, in one part or one per array file.

    ``vocab_size`` is that of the tokenizer, None where the files are tokens and no tokenizer was
    named; ``largest`` is the largest token at both ends of such files, else 0, and ``bin_dtype``
    what those of them that do not say it were read as. ``digest`` is a short name for the tokens: a
    run goes on from a checkpoint of the same ones only.
    """

    parts: "tuple[Part, ...]"
    digest: str
    vocab_size: int | None
    largest: int = 0
    bin_dtype: str | None = None
    unit: str = "byte"


@lru_cache(maxsize=1)
def read_corpus(source: Source) -> Corpus:
    """Return the tokens of ``source``; arrays are mapped into memory, text is read and encoded.

    Files with zero bytes are text only if the tokenizer `BYTES` is named. Kept, so that ranks that
    are forked from a launcher share what it has read. Raises `TextError`
    for files that are not there or not what their names say, and for an unknown tokenizer.
    """
    import numpy as np

    files = list(_files(source.paths)) if source.paths else []
    arrays = [path for path in files if path.suffix in ARRAYS]
    tokenizer = _tokenizer(source.tokenizer)
    if source.token_dtype is not None and not any(path.suffix == ".bin" for path in files):
        raise TextError(
            f"token-dtype={source.token_dtype} without .bin files, the only ones that do not say "
            "it themselves; leave it out"
        )
    if arrays:
        if others := [path for path in files if path.suffix not in ARRAYS]:
            raise TextError(
                f"data has token arrays ({arrays[0]}) and text ({others[0]}); give one kind"
            )
        dtype = source.token_dtype or TOKEN_DTYPES[0]
        parts = tuple(_tokens_of(path, dtype) for path in arrays)
        return Corpus(
            parts=parts,
            digest=_digest_of_arrays(parts),
            vocab_size=None if source.tokenizer is None else _vocabulary(tokenizer),
            largest=max(map(_largest, parts)),
            bin_dtype=dtype if any(path.suffix == ".bin" for path in arrays) else None,
            unit="token",
        )
    if tokenizer is None:
        look = source.tokenizer is None
        text = b"".join(_bytes_of(path, look) for path in files) if files else read_text()
        found = np.frombuffer(text, dtype=np.uint8)
        return Corpus(parts=(found,), digest=digest(text), vocab_size=256)
    texts = (text for path in files for text in _texts_of(path))
    encoded = _encode(texts if files else [read_text().decode(errors="replace")], tokenizer)
    return Corpus(
        parts=(encoded,),
        digest=digest(encoded.tobytes()),
        vocab_size=_vocabulary(tokenizer),
        unit="token",
    )


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


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that are given, and those below folders in path order, hidden ones not."""
    for path in paths:
        if path.is_file():
            yield path
            continue
        if not path.is_dir():
            raise TextError(f"data={path} is neither a file nor a folder; give one that is")
        below = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        seen = [file for file in sorted(below) if not any(p.startswith(".") for p in file.parts)]
        if not seen:
            raise TextError(f"data={path} is a folder without files; give one that has some")
        yield from (path / file for file in seen)


def _bytes_of(path: Path, look: bool) -> bytes:
    """Return a file's bytes; of JSON lines their texts, each with a line's end after it.

    With ``look`` bytes of what is no text are refused.
    """
    if path.suffix in LINES:
        return b"".join(text.encode() + b"\n" for text in _texts_of(path))
    return _check_text(path, _read(path)) if look else _read(path)


def _texts_of(path: Path) -> Iterator[str]:
    """Yield the documents of a file: those of its JSON lines, or the whole."""
    content = _read(path)
    if path.suffix not in LINES:
        try:
            yield content.decode()
        except UnicodeDecodeError as error:
            raise TextError(
                f"{path} is no UTF-8 text (byte {error.start}); token arrays are named "
                f"{' or '.join(ARRAYS)}, and --tokenizer {BYTES} takes any bytes"
            ) from error
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise TextError(f"{path}, line {number} is no JSON: {error}") from error
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise TextError(
                f"{path}, line {number} has no text; each line is an object whose field 'text' is "
                "a string"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"{path}, line {number} is no Unicode text: {error}") from error
        yield text


def _check_text(path: Path, content: bytes) -> bytes:
    """Return a file's content unless it looks like no text, as archives and tables do."""
    if b"\0" in content[:_LOOKED_AT]:
        raise TextError(
            f"{path} is no text (it has zero bytes); token arrays are named {' or '.join(ARRAYS)}, "
            f"and --tokenizer {BYTES} takes any bytes"
        )
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"data={path} cannot be read: {error.strerror}") from error


def _tokens_of(path: Path, dtype: str) -> "Part":
    import numpy as np

    found: Part
    try:
        if path.suffix == ".npy":
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        elif os.path.getsize(path) % np.dtype(dtype).itemsize:
            raise ValueError(f"{os.path.getsize(path)} bytes are no row of {dtype}")
        else:
            found = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError, EOFError) as error:
        reason = "it is no .npy file, or one of objects" if "pickle" in str(error) else error
        raise TextError(
            f"{path} is no array of tokens: {reason}; give an array of integers"
        ) from error
    if found.ndim != 1 or str(found.dtype) not in TOKEN_DTYPES or not len(found):
        raise TextError(
            f"{path} has shape {found.shape} of {found.dtype}; an array of tokens has one "
            f"dimension of {' or '.join(TOKEN_DTYPES)}, and at least one token"
        )
    return found


def _largest(part: "Part") -> int:
    """Return the largest token at the ends of an array; a step looks at those that it takes."""
    return int(max(part[:_END_TOKENS].max(), part[-_END_TOKENS:].max()))


def _digest_of_arrays(parts: "Sequence[Part]") -> str:
    """Return a short name that does not take reading all: sizes, and both ends of each array."""
    found = hashlib.sha256()
    for part in parts:
        ends = _END_BYTES // part.dtype.itemsize
        found.update(f"{part.dtype} {len(part)};".encode())
        found.update(part[:ends].tobytes() + part[-ends:].tobytes())
    return found.hexdigest()[:16]


def _tokenizer(name: str | None) -> Any:
    """Return a tokenizer of transformers that is on this machine, None for bytes."""
    if name in (None, BYTES):
        return None
    if find_spec("transformers") is None:
        raise TextError(
            f"tokenizer={name} needs transformers: pip install transformers, or use {BYTES}"
        )
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # ranks are forked from a process without threads
    )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            fast: Any = PreTrainedTokenizerFast
            return fast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TextError(
            f"tokenizer={name} is no tokenizer on this machine: {reason}; give a tokenizer.json, "
            f"a folder that has one, or {BYTES}"
        ) from error


def _vocabulary(tokenizer: Any) -> int:
    return 256 if tokenizer is None else len(tokenizer)


def _encode(texts: "Iterator[str] | Sequence[str]", tokenizer: Any) -> "Part":
    """Return the tokens of all texts, each with the end of text after it where there is one."""
    import numpy as np

    kind = np.dtype(TOKEN_DTYPES[_vocabulary(tokenizer) > 2**16])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [
        np.array([*tokenizer.encode(text, add_special_tokens=False), *end], dtype=kind)
        for text in texts
    ]
    return np.concatenate(rows) if rows else np.array([], dtype=kind)
