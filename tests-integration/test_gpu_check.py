"""The tool that runs all GPU checks within a time limit, with parts of a few lines."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Part
from gpu_rows import Row

# What a part does: it adds rows that the file of --done lacks. It does not load torch.
SCRIPT = """
import argparse, json, os, sys, time

parser = argparse.ArgumentParser()
for name in ("--device", "--rows", "--done"):
    parser.add_argument(name)
given = parser.parse_args()
lines = open(given.done).readlines() if os.path.exists(given.done) else []
done = [row for row in map(json.loads, lines) if row["status"] in ("passed", "measured")]
failed = False

def add(check, ours, peer="-", ratio=None, status="passed"):
    global failed
    if any((row["part"], row["check"]) == ({part!r}, check) for row in done):
        return
    row = dict(part={part!r}, world="alone", check=check, ours=ours, peer=peer, ratio=ratio)
    with open(given.rows, "a") as out:
        out.write(json.dumps(row | dict(status=status)) + "\\n")
    failed |= status == "failed"

{checks}
sys.exit(failed)
"""
PASSES = 'add("right", "equal")'
TIMES = 'add("step", "2 ms", "4 ms", 0.5, "measured")'
FAILS = 'add("wrong", "ZeroDivisionError", status="failed")'
LACKS = 'add("pair", "it needs two GPUs", status="skipped")'
SLEEPS = "time.sleep(3600)"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Make the tool's parts, `first` and `second`, from lines that tests write."""
    files = {name: tmp_path / f"{name}.py" for name in ("first", "second")}
    every = tuple(Part(name, str(file), 60) for name, file in files.items())
    monkeypatch.setattr(gpu_check, "PARTS", every)
    return files


def write(file: Path, *checks: str) -> None:
    text = SCRIPT.format(checks="\n".join(checks), part=file.stem)
    file.write_text(text, encoding="utf-8")


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *map(str, words), "--device", "cpu"])
    return gpu_check.main()


def test_one_table_has_the_rows_of_all_parts(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES)
    write(parts["second"], TIMES)
    out = tmp_path / "out"
    assert call(monkeypatch, out) == 0
    table = (out / "table.md").read_text()
    assert "| first | alone | right | equal | - | - | yes |" in table
    assert "| second | alone | step | 2 ms | 4 ms | 0.500 | - |" in table
    content = json.loads((out / "table.json").read_text())
    assert [row["check"] for row in content["rows"] if row["ratio"]] == ["step"]
    assert content["machine"][0].startswith("date ")
    names = ["log.txt", "machine.txt", "picture.png", "rows.jsonl", "table.json", "table.md"]
    assert sorted(file.name for file in out.iterdir()) == names


def test_a_part_that_takes_too_long_is_ended_and_its_rows_are_kept(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES, SLEEPS)
    write(parts["second"], PASSES)
    out = tmp_path / "out"
    monkeypatch.setattr(gpu_check, "END", 0.0)
    assert call(monkeypatch, out, "--budget", 6) == 1
    table = (out / "table.md").read_text()
    assert "| first | alone | right | equal | - | - | yes |" in table
    assert "| first | - | whole world | ended at its limit of 6 s | - | - | **no** |" in table
    assert "| second | - | whole world | no time was left | - | - | **no** |" in table


def test_resume_runs_what_is_missing_or_failed(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES, TIMES)
    write(parts["second"], FAILS)
    old, new = tmp_path / "old", tmp_path / "new"
    assert call(monkeypatch, old) == 1
    write(parts["first"], 'add("right", "another")', TIMES)
    write(parts["second"], 'add("wrong", "mended")')
    assert call(monkeypatch, new, "--resume", old) == 0
    table = (new / "table.md").read_text()
    assert "| first | alone | right | equal | - | - | yes |" in table
    assert "| first | alone | step | 2 ms | 4 ms | 0.500 | - |" in table
    assert "| second | alone | wrong | mended | - | - | yes |" in table


def test_resume_keeps_rows_of_the_earlier_run_that_are_not_run_again(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES, TIMES, LACKS)
    write(parts["second"], PASSES, LACKS, FAILS)
    old, new, last = tmp_path / "old", tmp_path / "new", tmp_path / "last"
    assert call(monkeypatch, old) == 1
    write(parts["first"])  # all checks of its world were run before
    write(parts["second"], 'add("pair", "equal")', 'add("wrong", "mended")')
    assert call(monkeypatch, new, "--resume", old) == 0
    kept = (
        "| first | alone | right | equal | - | - | yes |",
        "| first | alone | step | 2 ms | 4 ms | 0.500 | - |",
        "| first | alone | pair | it needs two GPUs | - | - | skipped |",
        "| second | alone | right | equal | - | - | yes |",
    )
    table = (new / "table.md").read_text()
    assert all(line in table for line in kept)
    assert "| second | alone | pair | equal | - | - | yes |" in table
    assert table.count("| pair |") == 2
    assert call(monkeypatch, last, "--resume", new, "--parts", "second") == 0
    assert (last / "table.md").read_text() == table


def test_resume_keeps_failed_rows_of_parts_that_are_not_chosen(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES, FAILS)
    write(parts["second"], FAILS)
    old, new = tmp_path / "old", tmp_path / "new"
    assert call(monkeypatch, old) == 1
    write(parts["second"], 'add("wrong", "mended")')
    assert call(monkeypatch, new, "--resume", old, "--parts", "second") == 1
    table = (new / "table.md").read_text()
    assert "| first | alone | wrong | ZeroDivisionError | - | - | **no** |" in table
    assert "| second | alone | wrong | mended | - | - | yes |" in table


def test_a_script_that_ends_without_a_row_failed(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts["first"].write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    out = tmp_path / "out"
    assert call(monkeypatch, out, "--parts", "first") == 1
    assert "exit status 3; see log.txt" in (out / "table.md").read_text()


REFUSED = {
    "full": "full is not empty; give a new folder",
    "file": "file is not a folder; give a new one",
    "file/out": "cannot use file/out: Not a directory",
    "file/deep/out": "cannot use file/deep/out: Not a directory",
    "new --budget -5": "argument --budget: -5 is not a number of seconds above 0",
    "new --budget 0": "argument --budget: 0 is not a number of seconds above 0",
    "new --budget nan": "argument --budget: nan is not a number of seconds above 0",
    "new --budget long": "argument --budget: long is not a number of seconds above 0",
    "new --resume full": "--resume full has no rows.jsonl with a row that passed",
    "new --resume file": "--resume file has no rows.jsonl with a row that passed",
    "new --resume damaged": "--resume damaged: a line of rows.jsonl is not a row",
    "new --resume other": "--resume other has rows of a GPU, and --device is cpu",
    "new --parts third": "--parts third names no part; use first, second",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_arguments_are_refused_with_one_message_before_anything_is_written(
    tmp_path: Path,
    parts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    row = json.dumps(asdict(Row("first", "alone", "right", "equal", "-", None, "passed")))
    for folder in ("full", "damaged", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kept").touch()
    (tmp_path / "damaged" / "rows.jsonl").write_text(row + "\n" + row[:20], encoding="utf-8")
    (tmp_path / "other" / "rows.jsonl").write_text(row + "\n", encoding="utf-8")
    (tmp_path / "other" / "machine.txt").write_text("torch\nGPU 0: some\n", encoding="utf-8")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *words.split())
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert [line.partition("error: ")[2] for line in errors] == [REFUSED[words]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "file", "full", "other"]


def test_the_machine_of_earlier_rows_stays_in_the_table(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(parts["first"], PASSES)
    write(parts["second"], PASSES)
    old, new = tmp_path / "old", tmp_path / "new"
    assert call(monkeypatch, old) == 0
    (old / "machine.txt").write_text("date 2026-01-02\nanother machine\n", encoding="utf-8")
    assert call(monkeypatch, new, "--resume", old) == 0
    first, *_ = (new / "table.md").read_text().splitlines()
    assert first.startswith("date ")
    assert first.endswith("; rows of an earlier run: date 2026-01-02; another machine")
