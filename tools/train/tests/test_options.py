"""The command line: defaults, and what is refused before anything starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_mesh import ParallelDimsError
from train.config import SEED_STRIDE, SEEDS
from train.options import CHECKPOINT, LOG_FILE, RUN_FILE, Options, OptionsError, parse


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
        ("--etp 2", "etp=2 is neither 1 nor tp=1; use 1"),
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
        ("--procs 0", "procs=0"),
        ("--steps 0", "use 1 or more"),
        ("--reference --procs 2", "--reference is one process"),
        ("--reference --tp 2", "tp=2 with --reference, which is one process .*; use 1"),
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
    with pytest.raises(OptionsError, match="same processes, degrees, order, seed and dtype"):
        parse(["--resume", str(tmp_path), *words.split()])


@pytest.mark.parametrize(
    ("words", "had", "has"),
    [
        (
            "--order cp,tp,pp,dp_replicate,dp_shard",
            "order=pp,dp_replicate,dp_shard,ep,cp,tp",
            "order=cp,tp,pp,dp_replicate,dp_shard",
        ),
        ("--seed 8 --dtype float32", "seed=7 dtype=float64", "seed=8 dtype=float32"),
        ("--cp 2 --seed 8", "cp=1 tp=2 seed=7", "cp=2 tp=1 seed=8"),
        ("--procs 4 --tp 4 --seed 8", "tp=2 world_size=2 seed=7", "tp=4 world_size=4 seed=8"),
    ],
)
def test_all_that_differs_from_the_checkpoint_is_named(
    tmp_path: Path, words: str, had: str, has: str
) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--seed", "7"]))
    with pytest.raises(OptionsError) as raised:
        parse(["--resume", str(tmp_path), *words.split()])
    named = str(raised.value).partition(";")[0].partition(" has ")[2]
    ours, _, theirs = named.partition(", this run ")
    assert (set(ours.split()), set(theirs.split())) == (set(had.split()), set(has.split()))


@pytest.mark.parametrize("content", ["", '{"world_size": 2, "dims"', "[]", '{"step": 5}'])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(OptionsError, match=f"{tmp_path / RUN_FILE} .*; the checkpoint is damaged"):
        parse(["--resume", str(tmp_path)])


@pytest.mark.parametrize("name", ["world_size", "dims", "seed", "dtype", "text", "step", "samples"])
def test_a_field_that_a_checkpoint_lacks_is_named(tmp_path: Path, name: str) -> None:
    _checkpoint(tmp_path, parse([]))
    path = tmp_path / CHECKPOINT / RUN_FILE
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key != name}
    path.write_text(json.dumps(kept))
    with pytest.raises(OptionsError, match=f"lacks a valid {name}"):
        parse(["--resume", str(tmp_path)])


@pytest.mark.parametrize("held", [LOG_FILE, CHECKPOINT])
def test_a_folder_that_holds_a_run_takes_no_other(tmp_path: Path, held: str) -> None:
    _checkpoint(tmp_path, parse([]))
    other = tmp_path / "other"
    (other / held).mkdir(parents=True)
    for words in ([], ["--resume", str(tmp_path)]):
        with pytest.raises(OptionsError, match=f"out={other} holds a run already; give another"):
            parse(["--out", str(other), *words])


def test_a_run_goes_on_in_its_own_folder_however_it_is_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    (tmp_path / LOG_FILE).touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for out in (str(tmp_path), os.path.relpath(tmp_path), str(link)):
        assert parse(["--resume", str(tmp_path), "--out", out]).goes_on_in_place
    assert not parse(["--resume", str(tmp_path)]).goes_on_in_place
    assert not parse([]).goes_on_in_place


def test_every_legal_seed_orders_a_pass_within_64_bits() -> None:
    for seed in (SEEDS[0], SEEDS[-1]):
        assert parse(["--seed", str(seed)]).train.seed == seed
        for index in (0, SEED_STRIDE - 1):
            assert -(2**63) <= seed * SEED_STRIDE + index < 2**63
    for seed in (SEEDS[0] - 1, SEEDS[-1] + 1, 2**64):
        with pytest.raises(OptionsError, match=f"seed={seed} .*; use {SEEDS[0]} to {SEEDS[-1]}"):
            parse(["--seed", str(seed)])


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
