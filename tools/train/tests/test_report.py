"""What a run leaves for other programs to show."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from train.loop import StepResult
from train.options import parse
from train.report import Report


class _Writer:
    """Keeps what TensorBoard's writer would write."""

    made: ClassVar[list["_Writer"]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.closed = folder, False
        self.scalars: list[tuple[str, float, int]] = []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_numbers_of_a_step_go_to_tensorboard_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "torch.utils.tensorboard"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(module, "SummaryWriter", _Writer, raising=False)
    monkeypatch.setattr(_Writer, "made", [])
    report = Report(parse(["--out", str(tmp_path), "--steps", "2", "--seq-len", "32"]))
    numbers = {"loss": 5.0, "grad_norm": 2.0, "learning_rate": 0.1}
    for step, held_out in ((1, None), (2, 4.0)):
        result = StepResult(step=step, samples=8, seconds=0.5, eval_loss=held_out, **numbers)
        report.step(result, 0, {})
    report.finish()
    (writer,) = _Writer.made
    assert (writer.folder, writer.closed) == (str(tmp_path), True)
    speed = {"tokens_per_second": 8 * 32 / 0.5}
    for step, extra in ((1, {}), (2, {"eval_loss": 4.0})):
        found = {name: value for name, value, at in writer.scalars if at == step}
        assert found == {**numbers, **speed, **extra}
