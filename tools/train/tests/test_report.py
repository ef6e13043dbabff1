"""What a run leaves for other programs to show."""

import json
import math
import re
import shutil
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from train.checkpoint import WriteError
from train.loop import StepResult
from train.options import parse
from train.report import Report


class _Writer:
    """Keeps what TensorBoard's writer would write."""

    made: ClassVar[list["_Writer"]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.closed, self.purge_step = folder, False, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def _install(writer: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TensorBoard be installed, with this writer."""
    for name in ("tensorboard", "torch.utils.tensorboard"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(module, "SummaryWriter", writer, raising=False)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


def test_the_log_of_a_run_without_a_checkpoint_is_kept_beside_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["--resume", "auto", "--out", str(tmp_path), "--steps", "2"])
    (tmp_path / "log.1.jsonl").write_text("older\n")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    report = Report(options)
    numbers = {"loss": 5.0, "grad_norm": 2.0, "learning_rate": 0.1}
    result = StepResult(step=1, samples=8, tokens=64, seconds=0.5, eval_loss=None, **numbers)
    report.step(result, 0, {})
    report.finish()
    assert "after step 2, before its first checkpoint" in capsys.readouterr().out
    assert (tmp_path / "log.2.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "log.1.jsonl").read_text() == "older\n"
    assert json.loads((tmp_path / "log.jsonl").read_text())["loss"] == 5.0


def test_numbers_of_a_step_go_to_tensorboard_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(_Writer, monkeypatch)
    monkeypatch.setattr(_Writer, "made", [])
    report = Report(parse(["--out", str(tmp_path), "--steps", "2", "--seq-len", "32"]))
    numbers = {"loss": 5.0, "grad_norm": 2.0, "learning_rate": 0.1}
    tokens = 8 * 32
    for step, held_out in ((1, None), (2, 4.0)):
        result = StepResult(
            step=step, samples=8, tokens=tokens, seconds=0.5, eval_loss=held_out, **numbers
        )
        report.step(result, 0, {})
    report.finish()
    (writer,) = _Writer.made
    assert writer.purge_step == 1
    assert (writer.folder, writer.closed) == (str(tmp_path), True)
    speed = {"tokens_per_second": tokens / 0.5}
    for step, extra in ((1, {}), (2, {"eval_loss": 4.0})):
        found = {name: value for name, value, at in writer.scalars if at == step}
        assert found == {**numbers, **speed, **extra}


def _result(step: int, loss: float, norm: float = 1.0, held_out: float | None = None) -> StepResult:
    return StepResult(
        step=step,
        loss=loss,
        grad_norm=norm,
        learning_rate=0.1,
        samples=8 * step,
        tokens=256,
        seconds=0.5,
        eval_loss=held_out,
    )


def test_a_log_goes_on_where_the_run_was_saved_and_the_summary_is_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path), "--seq-len", "32", "--steps", "4"]
    first = Report(parse(words))
    for step in (1, 2, 3):
        first.step(_result(step, 6.0 - step, held_out=4.5 if step == 2 else None), 0, {})
    first.finish()
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"st')  # of a run that was cut off
    options = parse(["--seq-len", "32"])
    (tmp_path / "checkpoint").mkdir()
    saved = {**options.run_fields, "step": 2, "samples": 16}
    (tmp_path / "checkpoint" / "run.json").write_text(json.dumps(saved))
    again = Report(parse([*words, "--resume", "auto"]), 2)
    again.step(_result(3, 2.5), 0, {})
    again.step(_result(4, math.nan, math.inf), 0, {})
    again.finish()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [(record["step"], record["loss"]) for record in records] == [
        (1, 5.0),
        (2, 4.0),
        (3, 2.5),
        (4, None),
    ]
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert (summary["first_loss"], summary["final_loss"], summary["steps"]) == (5.0, None, 4)
    printed = capsys.readouterr().out
    assert "no update: not finite" in printed
    assert re.search(r"held-out loss +4\.5000", printed)


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ([1, 4, 5], "lacks 2 steps before step 6, the first is 2; curves and summary"),
        ([], "lacks 5 steps before step 6, the first is 1; curves and summary"),
        ([3, 4, 5], ""),  # it began from a checkpoint of another run
        ([1, 2, 3, 4, 5], ""),
    ],
)
def test_steps_that_a_log_has_lost_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logged: list[int], said: str
) -> None:
    options = parse(["--seq-len", "32"])
    (tmp_path / "checkpoint").mkdir()
    saved = {**options.run_fields, "step": 5, "samples": 40}
    (tmp_path / "checkpoint" / "run.json").write_text(json.dumps(saved))
    lines = [f'{{"step": {step}, "loss": 2.0}}\n' for step in logged]
    (tmp_path / "log.jsonl").write_text("".join(lines))
    words = ["--out", str(tmp_path), "--seq-len", "32", "--resume", "auto"]
    report = Report(parse(words), 5)
    report.finish()
    printed = capsys.readouterr().out
    assert ("lacks" in printed, said in printed) == (bool(said), True)


def test_the_time_to_the_end_counts_what_is_between_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(parse(["--out", str(tmp_path), "--seq-len", "32", "--steps", "12"]))
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in (1, 2, 3):
        report.step(_result(step, 5.0), 0, {})
        now += 60.0  # a step takes half a second, and its evaluation and checkpoint the rest
    assert "step  3/12" in (line := capsys.readouterr().out.splitlines()[-1])
    assert "  0:09:00 left  " in line
    report.finish()


def test_a_run_that_was_stopped_says_after_which_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(parse(["--out", str(tmp_path), "--seq-len", "32", "--steps", "12"]))
    report.step(_result(1, 5.0), 0, {})
    report.finish()
    assert re.search(r"stopped +by SIGTERM after step 1, and saved", capsys.readouterr().out)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


def test_a_comparison_that_was_cut_off_says_how_far_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path), "--seq-len", "32", "--steps", "2", "--compare", "2"]
    report = Report(parse(words))
    for step in (1, 2):
        report.step(_result(step, 5.0), 0, {})
    report.reference_step(_result(1, 5.0))
    report.finish()
    printed = capsys.readouterr().out
    assert re.search(r"compared +1 of 2 steps, then SIGTERM", printed)
    assert re.search(r"largest difference +0\.0e\+00", printed)


class _WriterThread(threading.Thread):
    """Fails as TensorBoard's own does on a full disk: on a thread, and in the next call."""

    __module__ = "tensorboard.summary.writer.event_file_writer"

    def run(self) -> None:
        raise OSError("no space left")


class _FullWriter(_Writer):
    """Finds the disk full at a step of the run, or when it is made (step 0)."""

    full_at = 0

    def __init__(self, folder: str, purge_step: int) -> None:
        super().__init__(folder, purge_step)
        self._fail(0)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._fail(step)

    def close(self) -> None:
        self._fail(9)

    def _fail(self, step: int) -> None:
        if step >= self.full_at:
            thread = _WriterThread()
            thread.start()
            thread.join()
            raise OSError("no space left")


@pytest.mark.parametrize("full_at", [0, 2, 9])
def test_a_run_goes_on_without_events_that_cannot_be_written(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    full_at: int,
) -> None:
    _install(_FullWriter, monkeypatch)
    monkeypatch.setattr(_FullWriter, "full_at", full_at)
    report = Report(parse(["--out", str(tmp_path), "--seq-len", "32", "--steps", "3"]))
    for step in (1, 2, 3):
        report.step(_result(step, 5.0), 0, {})
    report.finish()
    printed = capfd.readouterr()
    assert printed.out.count("no more events for TensorBoard: no space left\n") == 1
    assert printed.err == ""
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_a_folder_that_is_removed_is_noticed_at_the_next_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = Report(parse(["--out", str(out), "--seq-len", "32", "--steps", "3"]))
    report.step(_result(1, 5.0), 0, {})
    shutil.rmtree(out)
    with pytest.raises(WriteError, match=r"step 2 was not written to .*has been removed\), where"):
        report.step(_result(2, 5.0), 0, {})
    with pytest.raises(WriteError, match=r"summary.json was not written \(No such file"):
        report.finish()


def test_a_summary_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    report = Report(parse(["--out", str(tmp_path), "--seq-len", "32", "--steps", "1"]))
    report.step(_result(1, 5.0), 0, {})
    (tmp_path / "summary.json.partial").mkdir()
    with pytest.raises(WriteError, match=r"summary.json was not written \(Is a directory\), where"):
        report.finish()
