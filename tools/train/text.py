"""The training text as tokens: source code of Python's library, or files of the user.

Loads no torch, and numpy only when it reads.
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
BYTES = "bytes"  # tokenizer: each byte is a token
TOKEN_DTYPES = ("uint16", "uint32")
ARRAYS, LINES = (".bin", ".npy"), (".jsonl", ".ndjson")
_OTHER_KINDS = (
    f"names of token arrays end in {' or '.join(ARRAYS)}, and --tokenizer {BYTES} takes any bytes"
)
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_CHECKED_BYTES = 2**16  # bytes of a file that must be text
_END_TOKENS = 2**22  # tokens at each end of an array that are checked before the run
_END_BYTES = 2**20  # bytes at each end of an array, which with its size make its digest


class TextError(ValueError):
    """The text or the tokenizer is missing, or a file has the wrong format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files or folders (none: Python's library), tokenizer, and dtype of ``.bin`` files."""

    paths: tuple[Path, ...] = ()
    tokenizer: str | None = None
    token_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens in the order of the text.

    Attributes:
        parts: One array per token file, or one array for text.
        digest: Short name of the tokens. A run resumes only from a checkpoint with the same one.
        vocab_size: Size of the tokenizer. None for token files without a tokenizer.
        largest: Largest token at both ends of token files, 0 for text.
        bin_dtype: dtype as which ``.bin`` files were read, None without such files.
        unit: Name of a token.
    """

    parts: "tuple[Part, ...]"
    digest: str
    vocab_size: int | None
    largest: int = 0
    bin_dtype: str | None = None
    unit: str = "byte"


@lru_cache(maxsize=1)
def read_corpus(source: Source) -> Corpus:
    """Return the tokens of a source. Arrays are mapped into memory, text is read and encoded.

    The result is memoized, so that forks of a launcher share it. Files with zero bytes are text
    only if the tokenizer `BYTES` is given.

    Raises:
        TextError: A file is missing or has the wrong format, or the tokenizer is unknown.
    """
    import numpy as np

    files = list(_files(source.paths)) if source.paths else []
    arrays = [path for path in files if path.suffix in ARRAYS]
    tokenizer = load_tokenizer(source.tokenizer)
    vocab_size = 256 if tokenizer is None else len(tokenizer)
    has_bin = any(path.suffix == ".bin" for path in files)
    if source.token_dtype is not None and not has_bin:
        raise TextError(
            f"token-dtype={source.token_dtype} without .bin files; leave it out, since other "
            "files have no dtype or contain it"
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
            vocab_size=None if source.tokenizer is None else vocab_size,
            largest=max(map(_largest, parts)),
            bin_dtype=dtype if has_bin else None,
            unit="token",
        )
    if tokenizer is None:
        check = source.tokenizer is None
        text = b"".join(_bytes_of(path, check) for path in files) if files else read_text()
        tokens = np.frombuffer(text, dtype=np.uint8)
        return Corpus(parts=(tokens,), digest=digest(text), vocab_size=vocab_size)
    texts = (text for path in files for text in _texts_of(path))
    encoded = _encode(texts if files else [read_text().decode(errors="replace")], tokenizer)
    name = digest(encoded.tobytes())
    return Corpus(parts=(encoded,), digest=name, vocab_size=vocab_size, unit="token")


def read_text(root: Path | None = None, limit: int = TEXT_BYTES) -> bytes:
    """Return the first bytes of the ``.py`` files in a folder, joined in path order.

    Without tests and installed packages, so that the result depends only on the Python version.

    Args:
        root: The folder. Defaults to the standard library of this Python.
        limit: Number of bytes.

    Raises:
        TextError: There is no such file.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    text = bytearray()
    for path in _sources(folder):
        text += path.read_bytes()
        if len(text) >= limit:
            return bytes(text[:limit])
    if not text:
        raise TextError(f"no .py files in {folder}; this Python has no library source code")
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
    """Return a short name for the text."""
    return hashlib.sha256(text).hexdigest()[:16]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the given files, and the files in given folders, in path order without hidden ones."""
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


def _bytes_of(path: Path, check: bool) -> bytes:
    """Return the bytes of a file, or the texts of JSON lines, each with a newline.

    With ``check`` raise for files that are no text, such as archives.
    """
    if path.suffix in LINES:
        return b"".join(text.encode() + b"\n" for text in _texts_of(path))
    content = _read(path)
    if check and b"\0" in content[:_CHECKED_BYTES]:
        raise TextError(f"{path} is no text (it has zero bytes); {_OTHER_KINDS}")
    return content


def _texts_of(path: Path) -> Iterator[str]:
    """Yield the documents of a file: each line of JSON lines, or the whole file."""
    content = _read(path)
    if path.suffix not in LINES:
        try:
            yield content.decode()
        except UnicodeDecodeError as error:
            raise TextError(
                f"{path} is no UTF-8 text (byte {error.start}); {_OTHER_KINDS}"
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
            raise ValueError(f"{os.path.getsize(path)} bytes are not a multiple of {dtype}")
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
    """Return the largest token at the ends of an array. Each step checks its own tokens."""
    return int(max(part[:_END_TOKENS].max(), part[-_END_TOKENS:].max()))


def _digest_of_arrays(parts: "Sequence[Part]") -> str:
    """Return a short name made of sizes and both ends of each array, not of all tokens."""
    found = hashlib.sha256()
    for part in parts:
        ends = _END_BYTES // part.dtype.itemsize
        found.update(f"{part.dtype} {len(part)};".encode())
        found.update(part[:ends].tobytes() + part[-ends:].tobytes())
    return found.hexdigest()[:16]


def load_tokenizer(name: str | None) -> Any:
    """Return a tokenizer of transformers from this machine, None for bytes."""
    if name in (None, BYTES):
        return None
    if find_spec("transformers") is None:
        raise TextError(
            f"tokenizer={name} needs transformers: pip install transformers, or use {BYTES}"
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process with threads cannot be forked
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


def _encode(texts: "Iterator[str] | Sequence[str]", tokenizer: Any) -> "Part":
    """Return the tokens of all texts, each followed by the end-of-text token, if any."""
    import numpy as np

    kind = np.dtype(TOKEN_DTYPES[len(tokenizer) > 2**16])
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [
        np.array([*tokenizer.encode(text, add_special_tokens=False), *end], dtype=kind)
        for text in texts
    ]
    return np.concatenate(rows) if rows else np.array([], dtype=kind)
