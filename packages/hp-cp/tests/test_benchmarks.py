"""Scripts beside the package: what they do without measuring."""

import runpy
from pathlib import Path

import pytest

DRAW_PLANS = Path(__file__).parents[1] / "benchmarks" / "draw_plans.py"


def test_asking_how_plans_are_drawn_draws_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["draw_plans.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DRAW_PLANS), run_name="__main__")
    assert ended.value.code == 0
    assert "the SVG file to write" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_plans_are_drawn_into_the_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["draw_plans.py", str(tmp_path / "plans.svg")])
    runpy.run_path(str(DRAW_PLANS), run_name="__main__")
    assert (tmp_path / "plans.svg").read_text().startswith("<svg")
