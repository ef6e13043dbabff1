"""The estimate command, the options of a run, and what is told while and where a search fails."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_mesh import ParallelDims
from hp_mesh.cli import _plans, main
from hp_mesh.planner import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    Cluster,
    TrainSpec,
    compare,
    estimate,
    plan,
    smallest_world,
)
from hp_mesh.planner._result import GIB

from .test_cli import document, run

RUN = ["--model", "llama3-8b", "--seq-len", "8192", "--global-batch", "64"]
DEGREES = ["dp_shard=8", "tp=4", "pp=2"]
TRAIN: dict[str, Any] = {"seq_len": 8192, "global_batch": 64}
CLUSTER = Cluster(world_size=64, accelerator="H100")


def test_an_estimate_is_that_of_the_python_call_beside_the_best() -> None:
    told = document("estimate", *DEGREES, *RUN)
    dims = ParallelDims(dp_shard=8, tp=4, pp=2, world_size=64)
    found = compare(MODELS["llama3-8b"], CLUSTER, TrainSpec(**TRAIN), dims)
    for name, one in (("configuration", found.own), ("best", found.best)):
        assert ParallelDims.from_dict(told[name]["dims"]) == one.dims
        assert told[name]["time"]["total"] == one.time.total
        assert told[name]["memory"]["total"] == one.memory.total
        assert told[name]["trust"] == str(one.trust)
    assert told["slowdown"] == found.slowdown > 1
    assert told["more_time"] == dict(found.time)
    code, out, err = run("estimate", *DEGREES, *RUN)
    assert (code, err) == (0, "")
    assert f"yours takes {found.slowdown:.2f}x the time of the best" in out
    assert f"{found.own.memory.total / GIB:.1f} of {found.own.limit / GIB:.1f} GiB (fits)" in out
    for name, more in found.time.items():
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")][:1]
        assert line.split()[-1] == f"{more:+.3f}"


def test_the_best_configuration_is_told_to_be_it() -> None:
    best = plan(MODELS["llama3-8b"], CLUSTER, TrainSpec(**TRAIN)).best
    assert best is not None
    words = [f"{name}={getattr(best.dims, name)}" for name in ("dp_replicate", "dp_shard", "tp")]
    words += [f"{name}={getattr(best.dims, name)}" for name in ("cp", "pp")]
    code, out, _ = run("estimate", *words, *RUN)
    assert code == 0
    assert "this is the best configuration" in out


def test_what_does_not_fit_exits_with_1_and_says_by_how_much() -> None:
    argv = ["estimate", "dp_replicate=8", "dp_shard=1", "--model", "llama3-70b"]
    code, out, err = run(*argv, "--seq-len", "8192", "--global-batch", "64")
    assert (code, err) == (1, "")
    own = estimate(
        MODELS["llama3-70b"],
        Cluster(world_size=8, accelerator="H100"),
        TrainSpec(**TRAIN),
        ParallelDims(dp_replicate=8, dp_shard=1, world_size=8),
    )
    assert f"{(own.memory.total - own.limit) / GIB:.1f} GiB over the limit" in out


def test_degrees_that_break_rules_are_refused_with_everything_else() -> None:
    code, out, err = run("estimate", "tp=16", "tp=3", "--gpu", "h7", "--zero", "4", *RUN)
    assert (code, out) == (2, "")
    for part in ("tp is given twice", "'h7'", "zero=4"):
        assert part in err
    code, out, err = run("estimate", "tp=16", *RUN)
    assert (code, out) == (2, "")
    assert "tp=16 does not divide num_key_value_heads=8" in err


def test_options_of_a_run_reach_the_planner() -> None:
    argv = ["--schedule", "interleaved", "--virtual-stages", "2", "--zero", "1", "--fused-loss"]
    argv += ["--intra-gbs", "300", "--inter-gbs", "20", "--inter-us", "9", "--intra-us", "3"]
    argv += ["--memory-fraction", "0.8", "--gradient-dtype", "bfloat16", "--context", "all-gather"]
    argv += ["--moment-dtype", "bfloat16", "--attention", "flash-2", "--gpu", "h200"]
    expected = plan(
        MODELS["llama3-8b"],
        Cluster(
            world_size=64,
            accelerator="H200",
            intra_gbs=300,
            inter_gbs=20,
            inter_us=9,
            intra_us=3,
            memory_fraction=0.8,
        ),
        TrainSpec(
            seq_len=8192,
            global_batch=64,
            schedule="interleaved",
            virtual_stages=2,
            zero=1,
            fused_loss=True,
            gradient_dtype="bfloat16",
            moment_dtype="bfloat16",
            attention="flash-2",
            context="all-gather",
        ),
    )
    told = document("plan", "--gpus", "64", *RUN, *argv, "--top", "6")
    times = [entry["time"]["total"] for entry in told["candidates"]]
    assert times == [one.time.total for one in expected.candidates[:6]]
    assert [entry["schedule"] for entry in told["candidates"]] == [
        one.schedule for one in expected.candidates[:6]
    ]
    assert {entry["zero"] for entry in told["candidates"]} == {1}
    _, out, _ = run("plan", "--gpus", "64", *RUN, *argv, "--fix", "pp=2")
    assert "interleaved of 2 stages, ZeRO 1" in out


def test_options_take_what_the_python_call_takes() -> None:
    argv = ["estimate", *DEGREES, *RUN]
    usual = document(*argv)["configuration"]
    assert document(*argv, "--zero", "none")["configuration"] == usual
    free = document(*argv, "--intra-us", "0", "--inter-us", "0")["configuration"]
    cluster = Cluster(world_size=64, accelerator="H100", intra_us=0, inter_us=0)
    dims = ParallelDims(dp_shard=8, tp=4, pp=2, world_size=64)
    own = estimate(MODELS["llama3-8b"], cluster, TrainSpec(**TRAIN), dims)
    assert free["time"]["total"] == own.time.total < usual["time"]["total"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--intra-us", "-1", "intra_us=-1 given; use 0 or above"),
        ("--inter-us", "nan", "inter_us=nan given; use 0 or above"),
        ("--intra-gbs", "0", "intra_gbs=0 given; use a number above 0"),
        ("--intra-gbs", "inf", "intra_gbs=inf given; use a number above 0"),
        ("--inter-gbs", "1e99", "inter_gbs=1e+99 given; use at most"),
        ("--memory-fraction", "2", "memory_fraction=2 given; use 1 or below"),
        ("--memory-fraction", "half", "memory_fraction='half' given; use a number above 0"),
        ("--recompute-layers", "4", "recompute_layers=4 given; use None, or another recompute"),
        ("--zero", "4", "zero=4 given; use 0, 1, 2, 3, None or 'any'"),
    ],
)
def test_an_option_that_the_python_call_refuses_is_refused(
    option: str, value: str, message: str
) -> None:
    code, out, err = run("plan", "--gpus", "64", *RUN, "--recompute=none", f"{option}={value}")
    assert (code, out) == (2, "")
    assert message in err


def test_a_plan_of_borderline_configurations_alone_fits_nothing() -> None:
    model, train = MODELS["llama3-8b"], TrainSpec(**TRAIN)
    chip = ACCELERATORS["H100"]
    tight = Cluster(world_size=8, accelerator=chip, memory_fraction=0.01)
    least = plan(model, tight, train).candidates[0].memory.total
    share = least / 1.1 / chip.memory_gib / GIB
    found = plan(model, replace(tight, memory_fraction=share), train)
    assert not found.fits
    assert found.borderline
    argv = ["plan", "--gpus", "8", *RUN, "--memory-fraction", str(share)]
    code, out, _ = run(*argv)
    assert code == 1
    assert "NOTHING FITS; this is up to 15% above the memory limit" in out
    assert "the smallest number of GPUs on which a configuration fits: 16" in out
    told = json.loads(run(*argv, "--json")[1])
    assert told["smallest_world"] == 16


CHIP = {"name": "Mine", "memory_gib": 120, "tflops": 800, "hbm_gbs": 4000}


def chip_file(folder: Path, **fields: object) -> str:
    path = folder / "chip.toml"
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()))
    return str(path)


def test_an_accelerator_may_come_from_a_file(tmp_path: Path) -> None:
    path = chip_file(tmp_path, **CHIP, intra_gbs=300, inter_gbs=40, ranks_per_node=4)
    told = document("estimate", *DEGREES, *RUN, "--gpu", path, "--inter-gbs", "30")
    chip = Accelerator(name="Mine", memory_gib=120, tflops=800, hbm_gbs=4000)
    cluster = Cluster(
        world_size=64, accelerator=chip, ranks_per_node=4, intra_gbs=300, inter_gbs=30
    )
    dims = ParallelDims(dp_shard=8, tp=4, pp=2, world_size=64)
    own = estimate(MODELS["llama3-8b"], cluster, TrainSpec(**TRAIN), dims)
    assert told["configuration"]["time"]["total"] == own.time.total
    assert told["configuration"]["limit"] == own.limit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tflops": None}, "lacks tflops"),
        ({"speed": 3}, "has 'speed', which is none of name, memory_gib"),
        ({"tflops": -1}, "tflops=-1"),
        ({"name": ["x"]}, "name=['x'] given; use a word"),
        ({"name": "H100", "intra_gbs": None}, "bandwidth of a modified H100 is not known"),
        (
            {"intra_gbs": None},
            "intra_gbs=None given; use GB/s; the usual bandwidth of Mine",
        ),
    ],
)
def test_a_file_that_holds_no_accelerator_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    fields = {**CHIP, "intra_gbs": 300, "inter_gbs": 40, **change}
    path = chip_file(tmp_path, **{name: v for name, v in fields.items() if v is not None})
    code, out, err = run("plan", "--gpus", "64", *RUN, "--gpu", path)
    assert (code, out) == (2, "")
    assert message in err


def test_the_smallest_number_of_devices_is_told_where_nothing_fits() -> None:
    argv = ["plan", "--model", "llama3-70b", "--seq-len", "8192", "--global-batch", "64"]
    code, out, _ = run(*argv, "--gpus", "8", "--json")
    told = json.loads(out)
    train = TrainSpec(**TRAIN)
    expected = smallest_world(
        MODELS["llama3-70b"], Cluster(world_size=8, accelerator="H100"), train
    )
    assert (code, told["smallest_world"]) == (1, expected)
    assert (
        f"the smallest number of GPUs on which a configuration fits: {expected}"
        in run(*argv, "--gpus", "8")[1]
    )
    enough = run(*argv, "--gpus", str(expected), "--json")
    assert enough[0] == 0
    assert json.loads(enough[1])["smallest_world"] is None


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True, which a string's file does not."""
        return True


def test_a_plan_that_takes_long_shows_how_far_it_is_on_a_terminal_and_wipes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["plan", "--gpus", "64", *RUN]
    monkeypatch.setattr(_plans, "SILENT", 1e9)
    with redirect_stderr(Terminal()) as quick, redirect_stdout(io.StringIO()):
        assert main(argv) == 0
    assert quick.getvalue() == ""
    monkeypatch.setattr(_plans, "SILENT", -1.0)
    with redirect_stderr(Terminal()) as shown, redirect_stdout(io.StringIO()):
        assert main(argv) == 0
    lines = shown.getvalue().split("\r")
    assert lines[0] == ""
    assert all(line.startswith("planning: ") for line in lines[1:-1])
    done, total = lines[-2].split()[1::2]
    assert done == total
    assert lines[-1] == "\x1b[K"
    assert run(*argv)[2] == ""


def test_an_error_during_a_plan_wipes_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, progress: Callable[[int, int], None], **__: object) -> None:
        progress(0, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(_plans, "SILENT", -1.0)
    monkeypatch.setattr(_plans, "plan", fails)
    with redirect_stderr(Terminal()) as shown:
        assert main(["plan", "--gpus", "64", *RUN]) == 130
    assert shown.getvalue() == "\rplanning: 0 of 2\r\x1b[K"


def test_an_expert_tensor_degree_that_estimates_do_not_know_is_refused() -> None:
    argv = ["--model", "mixtral-8x7b", "--seq-len", "4096", "--global-batch", "64"]
    code, out, err = run("estimate", "dp_shard=8", "ep=2", "etp=4", "free_etp=true", *argv)
    assert (code, out) == (2, "")
    assert "etp=4 is neither 1 nor tp=1, and estimates need one of them" in err


def test_a_hop_may_take_no_time_and_the_usual_stage_has_a_name() -> None:
    free = document("estimate", *DEGREES, *RUN, "--intra-us", "0", "--zero", "none")
    usual = document("estimate", *DEGREES, *RUN)
    assert free["configuration"]["time"]["tp"] < usual["configuration"]["time"]["tp"]
    assert free["configuration"]["zero"] is None
    code, _, err = run("estimate", *DEGREES, *RUN, "--intra-gbs", "0")
    assert (code, "intra_gbs=0 given; use a number above 0" in err) == (2, True)
    code, _, err = run("estimate", *DEGREES, *RUN, "--intra-us", "-1")
    assert (code, "intra_us=-1 given; use 0 or above" in err) == (2, True)


def test_layers_that_recompute_need_something_to_recompute() -> None:
    options = ["--recompute", "none", "--recompute-layers", "4"]
    code, out, err = run("estimate", *DEGREES, *RUN, *options)
    assert (code, out) == (2, "")
    assert "recompute_layers=4 given; use None, or another recompute than 'none'" in err


@pytest.mark.parametrize("name", ['["x"]', "{a=1}", "5", '""'])
def test_an_accelerator_is_called_by_a_word(name: str, tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_text(f"name = {name}\nmemory_gib = 80\ntflops = 900\nhbm_gbs = 3000\n")
    code, out, err = run("estimate", *DEGREES, *RUN, "--gpu", str(path))
    assert (code, out) == (2, "")
    assert "use a word" in err


@pytest.mark.parametrize("name", ["noext", "."])
def test_a_picture_is_written_where_it_is_said_to_be(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    code, _, err = run("show", "tp=8", "--picture", path)
    assert (code, f"cannot write {path}" in err) == (2, True)
    assert [*tmp_path.iterdir()] == []


def test_a_framework_s_table_is_read_from_a_file_and_words_replace_its_degrees(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[parallelism]\ntensor_parallel_degree = 4\ndata_parallel_shard_degree = -1\n"
        "[mesh]\nseq_len = 1000000\n"
    )
    place = f"{path}:parallelism"
    assert document("check", "--config", place, "--world", "16")["dims"]["tp"] == 4
    told = document("check", "tp=8", "--config", place, "--world", "16")["dims"]
    assert (told["tp"], told["dp_shard"]) == (8, 2)
    code, _, err = run("check", "--config", f"{path}:mesh", "--world", "16")
    assert (code, "'seq_len' is not a field" in err) == (2, True)
