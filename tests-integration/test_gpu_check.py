"""The tool that runs all GPU checks within a time limit, with parts of a few lines."""

import json
import sys
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Part

# What a part does: it adds rows that the file of --done lacks. It does not load torch.
SCRIPT = """
import argparse, json, os, sys, time

parser = argparse.ArgumentParser()
for name in ("--device", "--rows", "--done"):
    parser.add_argument(name)
given = parser.parse_args()
lines = open(given.done).readlines() if os.path.exists(given.done) else []
done = [json.loads(line) for line in lines]
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


def test_a_script_that_ends_without_a_row_failed(
    tmp_path: Path, parts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts["first"].write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    out = tmp_path / "out"
    assert call(monkeypatch, out, "--parts", "first") == 1
    assert "exit status 3; see log.txt" in (out / "table.md").read_text()


def test_a_folder_with_files_and_an_old_one_without_rows_are_refused(
    tmp_path: Path,
    parts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, said in (
        ((tmp_path / "full",), "is not empty; give a new folder"),
        ((tmp_path / "new", "--resume", tmp_path / "full"), "has no rows.jsonl with a row"),
    ):
        with pytest.raises(SystemExit) as ended:
            call(monkeypatch, *words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
