"""The training text."""

import json
from pathlib import Path

import numpy as np
import pytest

from train.text import Corpus, Source, TextError, digest, read_corpus, read_text


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_sources_are_joined_in_path_order_without_tests_and_packages(tmp_path: Path) -> None:
    files = {"b.py": "B", "a/z.py": "Z", "a/b.py": "b", "c.txt": "-", "test/t.py": "-"}
    _write(tmp_path, {**files, "a/tests/t.py": "-", "site-packages/p.py": "-"})
    assert read_text(tmp_path) == b"bZB"


def test_the_text_ends_at_the_limit(tmp_path: Path) -> None:
    _write(tmp_path, {"a.py": "abc", "b.py": "def"})
    assert read_text(tmp_path, limit=4) == b"abcd"


def test_a_folder_without_sources_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=str(tmp_path)):
        read_text(tmp_path)


def test_this_python_has_a_text_and_it_is_the_same_every_time() -> None:
    first = read_text()
    assert len(first) > 2**20
    assert digest(first) == digest(read_text()) != digest(first[1:])


def _corpus(*paths: Path, **options: str) -> Corpus:
    return read_corpus(Source(paths=paths, **options))


def test_files_folders_and_json_lines_are_read_in_path_order(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": text, "id": 3}) for text in ("één", "two"))
    _write(tmp_path, {"b/z.txt": "Z", "b/a.md": "A", "b/.git/x": "-", "one.jsonl": lines + "\n\n"})
    found = _corpus(tmp_path / "b", tmp_path / "one.jsonl")
    assert found.parts[0].tobytes() == "AZéén\ntwo\n".encode()
    assert (found.vocab_size, found.unit) == (256, "byte")
    assert found.digest != _corpus(tmp_path / "b").digest


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_arrays_are_mapped_and_say_how_far_they_reach(tmp_path: Path, dtype: str) -> None:
    tokens = np.array([5, 60_000, 7], dtype=dtype)
    np.save(tmp_path / "a.npy", tokens)
    tokens[:2].tofile(tmp_path / "b.bin")
    found = _corpus(tmp_path / "a.npy", tmp_path / "b.bin", token_dtype=dtype)
    assert [part.tolist() for part in found.parts] == [[5, 60_000, 7], [5, 60_000]]
    assert all(isinstance(part, np.memmap) for part in found.parts)
    assert (found.vocab_size, found.largest, found.unit) == (None, 60_000, "token")
    assert found.digest != _corpus(tmp_path / "a.npy").digest


def test_a_tokenizer_encodes_documents_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "a": 1, "cat": 2, "sat": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, {"t/1.txt": "a cat", "t/2.txt": "a dog sat"})
    found = _corpus(tmp_path / "t", tokenizer=str(tmp_path / "tokenizer.json"))
    assert found.parts[0].tolist() == [1, 2, 1, 0, 3]
    assert (found.vocab_size, found.unit) == (4, "token")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("absent", None, "neither a file nor a folder"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}', "line 2 has no text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1 is no JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 is no Unicode text"),
        ("a.bin", b"123", "is no array of tokens: 3 bytes are not a multiple of uint16"),
        ("a.npy", b"text", "is no array of tokens"),
        (
            "a.gz",
            b"\x1f\x8b\x08\0\0",
            "is no text .*; names of token arrays .*--tokenizer bytes",
        ),
    ],
)
def test_data_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=f"{tmp_path / name}.*{text}"):
        _corpus(tmp_path / name)


def test_arrays_of_another_kind_and_mixtures_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), dtype=np.int64))
    _write(tmp_path, {"t.txt": "text"})
    with pytest.raises(TextError, match=r"shape \(2, 2\) of int64; .* uint16 or uint32"):
        _corpus(tmp_path / "a.npy")
    with pytest.raises(TextError, match=r"token arrays .* and text .*; give one kind"):
        _corpus(tmp_path)


def test_an_unknown_tokenizer_is_named() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TextError, match="tokenizer=nowhere/none is no tokenizer on this machine"):
        _corpus(tokenizer="nowhere/none")
