"""The program: what ends it before a rank starts."""

import fcntl
import json
import re
from pathlib import Path

import pytest
import torch

from train.options import counted, parse
from train.program import LOCK_FILE, main
from train.run_folder import CHECKPOINT, RUN_FILE, SUMMARY_FILE


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of a run that must end with status 2 and start nothing."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").touch()
    line = _refusal(capsys, "--out", str(tmp_path / out))
    assert line.startswith(f"train: error: out={tmp_path / out} is no folder that can be written: ")


def test_a_folder_that_takes_no_files_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "out=/proc/x is no folder" in _refusal(capsys, "--out", "/proc/x")
    assert "out=/proc is no folder" in _refusal(capsys, "--out", "/proc")


@pytest.mark.parametrize(
    ("found", "words", "text"),
    [
        (0, "--procs 1", "procs=1: .* has 0 GPUs; use --device cpu"),
        (0, "--reference", "procs=1: .* has 0 GPUs; use --device cpu"),
        (1, "--procs 2", "procs=2: .* has 1 GPU; use --procs 1 or --device cpu"),
        (2, "", "procs=4: .* has 2 GPUs; use --procs 2 or fewer, or --device cpu"),
    ],
)
def test_too_few_gpus_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: int,
    words: str,
    text: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    out = tmp_path / "out"
    line = _refusal(capsys, "--device", "cuda", "--out", str(out), *words.split())
    assert re.search(text, line)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--procs 3 --dp-shard 2", "dp_shard=2 is not procs=3"),
        ("--procs 3", "dp_shard=3 does not divide batch-size=8; use 1, 2, 4 or 8"),
        ("--cp 4 --seq-len 250", "seq-len=250"),
    ],
)
def test_messages_have_the_names_of_options(
    capsys: pytest.CaptureFixture[str], words: str, text: str
) -> None:
    assert text in _refusal(capsys, *words.split())


def test_an_unknown_compiler_is_one_line_that_names_the_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = _refusal(capsys, "--compile", "nosuch", "--out", str(out))
    assert line.startswith("train: error: compile=nosuch is not a compiler of torch; use ")
    assert {"inductor", "eager", "aot_eager"} <= set(re.findall(r"\w+", line))
    assert not out.exists()


def test_one_thing_is_not_in_the_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_a_folder_in_use_takes_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / LOCK_FILE).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = ["--resume", "auto", "--out", str(tmp_path)]
        assert f"out={tmp_path} is in use by a run that has not ended" in _refusal(capsys, *words)


def test_a_finished_run_that_is_started_again_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {**parse([]).run_fields, "step": 7, "samples": 56}
    (tmp_path / CHECKPOINT).mkdir()
    (tmp_path / CHECKPOINT / RUN_FILE).write_text(json.dumps(fields))
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"steps": 7}))
    words = ["--resume", "auto", "--out", str(tmp_path), "--steps"]
    assert main([*words, "7"]) == 0
    assert capsys.readouterr().out == f"the run in {tmp_path} has made its 7 steps\n"
    assert "steps=6 is not beyond the checkpoint's step 7" in _refusal(capsys, *words, "6")
