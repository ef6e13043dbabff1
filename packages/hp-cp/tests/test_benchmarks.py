"""Scripts beside the package: what they do without measuring."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_cp import MaskSpec

from .strategies import dense_attention, inputs

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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the script for GPUs."""
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    return runpy.run_path(str(DRAW_PLANS.with_name("gpu.py")), run_name="gpu")


def test_the_gpu_script_checks_on_a_cpu_what_is_there(script: dict[str, Any]) -> None:
    rows = script["Rows"]("hp-cp", script["World"]("kernels", ""))
    script["kernels"](torch.device("cpu"), script["SMALL"], rows)
    found = {row.check: row for row in rows.found}
    assert {row.status for row in rows.found} == {"passed", "skipped"}
    kinds = ("full", "causal", "window", "function", "soft cap", "other values")
    dtypes = ("float32", "bfloat16")
    eager = {f"eager, {kind}, {dtype}" for kind in kinds for dtype in dtypes}
    assert {found[name].status for name in eager} == {"passed"}
    assert found["sdpa, causal, bfloat16"].ours.startswith("error")


@pytest.mark.parametrize("causal", [True, False])
def test_the_gpu_script_knows_windows_by_their_definition(
    script: dict[str, Any], causal: bool
) -> None:
    mask = MaskSpec(causal=causal, window=3)
    given = inputs(2, 2, 12)
    found = script["dense"](list(given), script["shown"](mask, 2, 12, torch.device("cpu")))
    torch.testing.assert_close(found[0], dense_attention(*given[:3], mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", range(4))
def test_the_gpu_script_fails_where_an_output_or_a_gradient_is_no_number(
    script: dict[str, Any], bad: int
) -> None:
    right = [torch.ones(4, dtype=torch.float64) for _ in range(4)]
    found = [x.float() for x in right]
    assert script["error_of"](found, right, torch.float32).status == "passed"
    found[bad] = torch.full((4,), torch.nan)
    assert script["error_of"](found, right, torch.float32).status == "failed"
