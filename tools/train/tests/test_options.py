"""The command line: defaults, and what is refused before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hp_mesh import ParallelDimsError
from train.options import RUN_FILE, Options, OptionsError, parse


def _degrees(options: Options) -> dict[str, int]:
    degrees = options.dims.to_dict()
    return {name: n for name, n in degrees.items() if isinstance(n, int) and n > 1}


def _checkpoint(run: Path, options: Options, step: int = 5) -> None:
    (run / "checkpoint").mkdir()
    fields = {**options.identity, "step": step, "samples": 40}
    (run / "checkpoint" / RUN_FILE).write_text(json.dumps(fields))


def test_nothing_to_configure() -> None:
    options = parse([])
    assert _degrees(options) == {"dp_shard": 2, "cp": 2, "ep": 4, "world_size": 4}
    assert (options.steps, options.world_size, options.dtype) == (60, 4, "float64")


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        ("--tp 2", {"dp_shard": 2, "tp": 2}),
        ("--tp 2 --cp 2", {"cp": 2, "tp": 2}),
        ("--ep 4", {"dp_shard": 4, "ep": 4}),
        ("--dp-replicate 2", {"dp_replicate": 2, "dp_shard": 2}),
        ("--dp-shard 4", {"dp_shard": 4}),
        ("--ulysses-degree 2", {"dp_shard": 2, "cp": 2, "ep": 4, "ulysses_degree": 2}),
    ],
)
def test_one_given_degree_leaves_one_for_the_others(words: str, degrees: dict[str, int]) -> None:
    assert _degrees(parse(words.split())) == {**degrees, "world_size": 4}


@pytest.mark.parametrize(("processes", "shard"), [("1", {}), ("2", {"dp_shard": 2})])
def test_other_numbers_of_processes_shard_data(processes: str, shard: dict[str, int]) -> None:
    options = parse(["--procs", processes])
    assert options.world_size == int(processes)
    assert {n: d for n, d in _degrees(options).items() if n != "world_size"} == shard


def test_a_cluster_gives_the_world_size() -> None:
    assert _degrees(parse(["--tp", "2"], 8)) == {"dp_shard": 4, "tp": 2, "world_size": 8}
    with pytest.raises(OptionsError, match="WORLD_SIZE=8"):
        parse(["--procs", "4"], 8)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--tp 3", "tp=3 does not divide world_size=4; use 1, 2 or 4"),
        ("--cp 3", "cp=3 does not divide world_size=4; use 1, 2 or 4"),
        ("--ep 5", "ep=5 does not divide .*=4 .*; use 1, 2 or 4"),
        ("--dp-shard 0", "dp_shard='0' is not a degree; use a positive integer"),
        ("--procs 3", "dp_shard=3 does not divide global_batch=8; use 1, 2, 4 or 8"),
        ("--tp 8 --procs 8", "tp=8 does not divide num_key_value_heads=4; use 1, 2 or 4"),
        ("--ulysses-degree 3", "ulysses_degree=3 does not divide cp=2; use 1 or 2"),
    ],
)
def test_wrong_degrees_name_the_legal_ones(words: str, text: str) -> None:
    with pytest.raises(ParallelDimsError, match=text):
        parse(words.split())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--pp 2", "pp=2: this trainer has no pipeline parallelism; use 1"),
        ("--etp 2", "etp=2: this trainer has no tensor parallelism inside experts; use 1"),
        ("--cp 4 --ulysses-degree 2", "use 1 or 4"),
        ("--procs 0", "procs=0"),
        ("--steps 0", "use 1 or more"),
        ("--reference --procs 2", "--reference is one process"),
        ("--resume nowhere", "no checkpoint in nowhere"),
    ],
)
def test_what_the_trainer_does_not_have_is_said(words: str, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        parse(words.split())


def test_a_checkpoint_brings_its_own_options(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--seed", "7"]))
    for folder in (tmp_path, tmp_path / "checkpoint"):
        options = parse(["--resume", str(folder)])
        assert options.resume == tmp_path / "checkpoint"
        assert _degrees(options) == {"tp": 2, "world_size": 2}
        assert (options.train.seed, options.steps) == (7, 65)
        assert parse(["--resume", str(folder), "--tp", "2", "--steps", "6"]).steps == 6


@pytest.mark.parametrize("words", ["--cp 2", "--procs 4", "--seed 8", "--dtype float32"])
def test_a_checkpoint_goes_on_as_it_was_only(tmp_path: Path, words: str) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--seed", "7"]))
    with pytest.raises(OptionsError, match="same processes, degrees, seed and dtype"):
        parse(["--resume", str(tmp_path), *words.split()])


def test_a_finished_run_has_no_steps_left(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]), step=60)
    with pytest.raises(OptionsError, match=r"steps=60 is not beyond .* 60; use 61 or more"):
        parse(["--resume", str(tmp_path), "--steps", "60"])


def test_another_text_is_refused(tmp_path: Path) -> None:
    options = parse([])
    (tmp_path / RUN_FILE).write_text(
        json.dumps({**options.identity, "text": "other", "step": 1, "samples": 8})
    )
    with pytest.raises(OptionsError, match="another Python's library text"):
        parse(["--resume", str(tmp_path)])


def test_wrong_degrees_end_with_status_2_before_torch_is_loaded() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from train.program import main; "
        "status = main(sys.argv[1:]); print(status, 'torch' in sys.modules)"
    )
    tools = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, tools, "--tp", "3"], capture_output=True, text=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr == "train: error: tp=3 does not divide world_size=4; use 1, 2 or 4\n"
