"""The share of an accelerator's peak that a run reports."""

import json
from pathlib import Path

import pytest
import torch

from train.accelerators import peak_flops
from train.loop import StepResult
from train.options import parse
from train.report import Report


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA GeForce GTX 1080", "bfloat16", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_dtype(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops(dtype) == peak


def test_the_log_and_the_summary_have_the_share_of_the_peak_of_all_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    words = ["--device", "cuda", "--procs", "2", "--dtype", "bfloat16", "--out", str(tmp_path)]
    report = Report(parse(words))
    numbers = {"loss": 5.0, "grad_norm": 2.0, "learning_rate": 0.1}
    report.step(
        StepResult(step=1, samples=8, tokens=2048, seconds=0.5, eval_loss=None, **numbers), 0, {}
    )
    report.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    (step,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert step["mfu"] == step["model_flops_per_second"] / (2 * 989e12) > 0
    assert summary["mfu"] == step["mfu"]


def test_a_run_on_cpus_has_no_peak(tmp_path: Path) -> None:
    report = Report(parse(["--procs", "1", "--out", str(tmp_path)]))
    numbers = {"loss": 5.0, "grad_norm": 2.0, "learning_rate": 0.1}
    report.step(
        StepResult(step=1, samples=8, tokens=2048, seconds=0.5, eval_loss=None, **numbers), 0, {}
    )
    report.finish()
    assert json.loads((tmp_path / "summary.json").read_text())["mfu"] is None
