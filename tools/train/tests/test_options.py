"""The command line: defaults, and what is refused before anything starts."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest

from hp_mesh import ParallelDimsError
from train.config import CATALOGUE, SEED_STRIDE, SEEDS, ModelConfig, ModelError
from train.options import NO_COMPILER, TABLE, Options, parse
from train.run_folder import (
    CHECKPOINT,
    CHECKSUMS_FILE,
    LOG_FILE,
    PREVIOUS,
    RUN_FILE,
    SUMMARY_FILE,
    OptionsError,
)

FIELDS = ["world_size", "dims", "seed", "dtype", "text", "step", "samples", "model", "options"]


def _degrees(options: Options) -> dict[str, int]:
    degrees = options.dims.to_dict()
    return {name: n for name, n in degrees.items() if isinstance(n, int) and n > 1}


def _checkpoint(run: Path, options: Options, step: int = 5) -> None:
    (run / "checkpoint").mkdir()
    fields = {**options.run_fields, "step": step, "samples": 40}
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
        ("--pp 8 --procs 8", "pp=8 is more stages than num_hidden_layers=4; use 1, 2 or 4"),
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
        ("--procs 0", "procs=0"),
        ("--free-etp true --etp 2 --ep 2", "etp=2 with tp=1: .*; use etp=1$"),
        ("--steps 0", "steps=0 is out of range; use 1 or more"),
        ("--reference --procs 2", "--reference is one process"),
        ("--reference --tp 2", "tp=2 with --reference, which is one process .*; use 1"),
        ("--resume nowhere", "no checkpoint in nowhere"),
        ("--comm-timeout inf", "comm-timeout=inf is out of range; use 1 to 1000000"),
        (
            "--weight-decay inf",
            "weight-decay=inf is out of range; use a finite number of at least 0",
        ),
        ("--out=", "--out= is empty; give a value, or leave it out"),
    ],
)
def test_what_the_trainer_does_not_have_is_said(words: str, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        parse(words.split())


@pytest.mark.parametrize("name", ["--out", "--resume", "--data", "--model"])
def test_an_empty_word_is_no_path(name: str) -> None:
    with pytest.raises(OptionsError, match=f"^{name}= is empty; give a value, or leave it out"):
        parse(["--steps", "2", name, ""])


def test_a_word_that_is_no_option_is_answered_in_two_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--procs", "x"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: train [--OPTION VALUE ...]; --help lists the options"
    assert error == "train: error: argument --procs: invalid int value: 'x'"


def test_a_checkpoint_brings_its_own_options(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--seed", "7"]))
    for folder in (tmp_path, tmp_path / "checkpoint"):
        options = parse(["--resume", str(folder)])
        assert options.resume == tmp_path / "checkpoint"
        assert _degrees(options) == {"tp": 2, "world_size": 2}
        assert (options.train.seed, options.steps) == (7, 65)
        assert parse(["--resume", str(folder), "--tp", "2", "--steps", "6"]).steps == 6


@pytest.mark.parametrize(
    ("words", "degrees"),
    [
        ("--cp 2", {"cp": 2, "world_size": 2}),
        ("--procs 4", {"dp_shard": 2, "tp": 2, "world_size": 4}),
        ("--procs 4 --tp 4", {"tp": 4, "world_size": 4}),
        ("--procs 1 --tp 1", {}),
        ("--procs 2 --pp 2", {"pp": 2, "world_size": 2}),
    ],
)
def test_a_resumed_run_may_have_other_degrees(
    tmp_path: Path, words: str, degrees: dict[str, int]
) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--accumulate", "2"]))
    options = parse(["--resume", str(tmp_path), *words.split()])
    assert _degrees(options) == degrees
    assert options.train.accumulate == 2


def test_defaults_that_depend_on_degrees_stay_those_of_the_checkpoint(tmp_path: Path) -> None:
    before = parse(
        ["--pp", "2", "--tp", "3", "--procs", "6", "--model", _thirds(tmp_path), "--seq-len", "96"]
    )
    _checkpoint(tmp_path, before)
    after = parse(["--resume", str(tmp_path), "--procs", "2", "--dp-shard", "2"])
    assert (before.train.accumulate, after.train.accumulate) == (2, 2)
    assert before.model.vocab_size == after.model.vocab_size == 384
    with pytest.raises(OptionsError, match="accumulate=2 is not a multiple of pp=4"):
        parse(["--resume", str(tmp_path), "--procs", "4", "--pp", "4"])


def test_degrees_that_do_not_fit_another_number_of_processes(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--procs", "4", "--dp-shard", "2", "--cp", "2"]))
    assert _degrees(parse(["--resume", str(tmp_path), "--procs", "8"]))["dp_shard"] == 4
    with pytest.raises(OptionsError, match=r"do not fit procs=1 .*for example --dp-shard 1"):
        parse(["--resume", str(tmp_path), "--procs", "1"])


def test_a_vocabulary_that_tp_does_not_divide_is_refused(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--procs", "2", "--tp", "2", "--vocab-size", "258"]))
    with pytest.raises(ParallelDimsError, match="tp=4 does not divide vocab_size=258"):
        parse(["--resume", str(tmp_path), "--procs", "4", "--tp", "4"])


def _thirds(folder: Path) -> str:
    """Return the path of a model whose numbers 3 divides."""
    path = folder / "thirds.json"
    fields = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 24}
    path.write_text(json.dumps({"model_type": "built-in", **fields, **sizes}))
    return str(path)


@pytest.mark.parametrize("words", ["--seed 8", "--dtype float32"])
def test_a_checkpoint_goes_on_as_it_was_only(tmp_path: Path, words: str) -> None:
    _checkpoint(tmp_path, parse(["--tp", "2", "--procs", "2", "--seed", "7"]))
    with pytest.raises(OptionsError, match="has the same seed, dtype, model and samples"):
        parse(["--resume", str(tmp_path), *words.split()])


@pytest.mark.parametrize(
    ("words", "had", "has"),
    [
        ("--seed 8", "seed=7", "seed=8"),
        ("--seed 8 --dtype float32", "seed=7 dtype=float64", "seed=8 dtype=float32"),
        ("--cp 2 --seed 8", "seed=7", "seed=8"),
        ("--procs 4 --tp 4 --dtype float32", "dtype=float64", "dtype=float32"),
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


def test_of_a_damaged_checkpoint_the_others_are_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    for step in (9, 10):
        shutil.copytree(tmp_path / CHECKPOINT, tmp_path / f"{CHECKPOINT}-{step}")
    (tmp_path / CHECKPOINT / RUN_FILE).write_text("{")
    others = [str(tmp_path / f"{CHECKPOINT}-{step}") for step in (10, 9)]
    remedy = f"; resume from another one in a new folder: --resume {' or '.join(others)} --out NEW"
    with pytest.raises(OptionsError, match=remedy):
        parse(["--resume", str(tmp_path)])
    with pytest.raises(OptionsError) as raised:
        parse(["--resume", others[0], "--out", str(tmp_path)])
    assert str(raised.value) == (
        f"out={tmp_path} has a run already; give another folder, or go back to this checkpoint: "
        f"move the later ones away, rename {others[0]} to {tmp_path / CHECKPOINT}, and give "
        f"--resume auto --out {tmp_path}"
    )


def test_the_latest_checkpoint_is_what_a_run_in_its_folder_goes_on_from(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    with pytest.raises(OptionsError, match=f"checkpoint: --resume auto --out {tmp_path}$"):
        parse(["--out", str(tmp_path)])
    assert parse(["--resume", "auto", "--out", str(tmp_path)]).resumes_in_place


def test_damaged_checksums_are_not_blamed_on_another_file(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    path = tmp_path / CHECKPOINT / CHECKSUMS_FILE
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(OptionsError, match=f"^{path} cannot be read: .*; the checkpoint is"):
            parse(["--resume", str(tmp_path)])


def test_auto_ends_at_the_same_step_each_time_it_is_started(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    auto = ["--resume", "auto", "--out", str(tmp_path)]
    assert (parse(auto).done, parse(auto).steps) == (5, 60)
    assert parse(["--resume", "auto", "--out", str(tmp_path / "new")]).steps == 60


def test_a_summary_without_a_checkpoint_is_no_new_run(tmp_path: Path) -> None:
    (tmp_path / SUMMARY_FILE).write_text('{"steps": 6}')
    with pytest.raises(OptionsError, match=f"no checkpoint in .*, but {tmp_path / SUMMARY_FILE}"):
        parse(["--resume", "auto", "--out", str(tmp_path)])


@pytest.mark.parametrize("name", FIELDS)
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
        with pytest.raises(OptionsError, match=f"out={other} has a run already; give another"):
            parse(["--out", str(other), *words])


def test_a_folder_of_a_run_that_made_no_step_takes_another(tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).touch()
    assert parse(["--out", str(tmp_path)]).out == tmp_path


def test_a_run_goes_on_in_its_own_folder_however_it_is_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    (tmp_path / LOG_FILE).touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for out in (str(tmp_path), os.path.relpath(tmp_path), str(link)):
        assert parse(["--resume", str(tmp_path), "--out", out]).resumes_in_place
    assert not parse(["--resume", str(tmp_path)]).resumes_in_place
    assert not parse([]).resumes_in_place


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
        json.dumps({**options.run_fields, "text": "other", "step": 1, "samples": 8})
    )
    with pytest.raises(OptionsError, match="library text of another Python version"):
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
    assert done.stderr == "train: error: tp=3 does not divide procs=4; use 1, 2 or 4\n"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", 60),
        ("--steps 5000 --seed 3 --out there", 60),
        ("--compare 0", 0),
        ("--tp 2", 0),
        ("--tp 2 --compare", 60),
        ("--tp 2 --compare 7", 7),
        ("--reference", 0),
    ],
)
def test_the_demonstration_alone_is_compared_unasked(words: str, steps: int) -> None:
    assert parse(words.split()).compare == steps


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--compare -1", "compare=-1 is out of range; use 0 or more"),
        ("--reference --compare", "--compare with --reference"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(words: str, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        parse(words.split())


def test_a_run_that_goes_on_compares_steps_of_its_own(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]), step=5)
    assert parse(["--resume", str(tmp_path)]).compare == 0
    assert parse(["--resume", str(tmp_path), "--compare", "6"]).compare == 6
    with pytest.raises(OptionsError, match="step 5; use 0, or 6 or more"):
        parse(["--resume", str(tmp_path), "--compare", "5"])


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 2000)
    return str(tmp_path / "text.txt")


def test_what_a_run_trains_on_and_how_is_said(text: str) -> None:
    words = f"--data {text} --batch-size 16 --accumulate 2 --seq-len 64 --lr 1e-3 --eval-every 5"
    options = parse([*words.split(), "--decay-steps", "100", "--dtype", "bfloat16", "--compile"])
    train = options.train
    assert (train.batch_size, train.accumulate, train.seq_len) == (16, 2, 64)
    assert (train.learning_rate, train.warmup_steps, train.decay_steps) == (1e-3, 10, 100)
    assert (options.dtype, options.compile, options.eval_every) == ("bfloat16", "inductor", 5)
    assert options.digest != parse([]).digest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size 0", "batch-size=0 is out of range; use 1 or more"),
        ("--lr 0", "lr=0.0 is out of range; use a finite number above 0"),
        ("--lr nan", "lr=nan is out of range"),
        ("--weight-decay inf", "weight-decay=inf is out of range"),
        ("--accumulate 3", "accumulate=3 does not divide batch-size=8; use 1 or 2 or 4 or 8"),
        (
            "--accumulate 8",
            "batch-size=8 .* accumulate=8 microbatches for 2 .* multiple of 16",
        ),
        ("--decay-steps 10", "decay-steps=10 is within warmup-steps=10; use 11 or more"),
        ("--eval-every 0", "eval-every=0 is out of range"),
        ("--seq-len 9999999", "has 0 samples of seq-len=9999999; give more data or a smaller"),
        ("--vocab-size 100", "vocab-size=100 is too small for tokens up to 255; use 256 or more"),
        ("--reference --compile", "compile with --reference"),
        ("--reference --checkpoint-activations", "checkpoint-activations with --reference"),
    ],
)
def test_numbers_that_cannot_be_are_refused(words: str, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        parse(words.split())


def test_the_vocabulary_is_that_of_the_tokens_in_a_size_that_can_be_cut(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(5000, dtype=np.uint16) % 300)
    words = ["--data", str(tmp_path / "t.npy")]
    with pytest.raises(OptionsError, match="vocab-size=256 is too small for tokens up to 299"):
        parse(words)
    (np.arange(5000, dtype=np.uint16) % 300).tofile(tmp_path / "t.bin")
    wide = ["--data", str(tmp_path / "t.bin"), "--token-dtype", "uint32"]
    hint = r", or the --token-dtype of \.bin files \(read as uint32\)$"
    with pytest.raises(OptionsError, match=hint):
        parse(wide)
    asked = parse([*words, "--vocab-size", "301"])
    assert isinstance(asked.model, ModelConfig)
    assert asked.model.vocab_size == 301
    with pytest.raises(ParallelDimsError, match="tp=2 does not divide vocab_size=301"):
        parse([*words, "--vocab-size", "301", "--tp", "2"])


def test_a_run_that_goes_on_keeps_its_options_unless_they_are_given_anew(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", "text.txt", "--lr", "1e-3", "--batch-size", "16"]
    first = parse([*words, "--model", "built-in-tied"])
    _checkpoint(tmp_path, first)
    monkeypatch.chdir("/")
    again = parse(["--resume", str(tmp_path)])
    assert (again.train, again.model, again.digest) == (first.train, first.model, first.digest)
    assert parse(["--resume", str(tmp_path), "--lr", "2e-3"]).train.learning_rate == 2e-3
    for words in (["--seq-len", "128"], ["--eval-every", "3"], ["--vocab-size", "512"]):
        with pytest.raises(OptionsError, match=r"a resumed run has the same .* model and samples"):
            parse(["--resume", str(tmp_path), *words])
    (tmp_path / "other.txt").write_text("another text. " * 2000)
    with pytest.raises(OptionsError, match="was trained on other tokens"):
        parse(["--resume", str(tmp_path), "--data", str(tmp_path / "other.txt")])


@pytest.mark.parametrize("name", [path.stem for path in sorted(CATALOGUE.glob("*.json"))])
def test_each_model_of_the_catalogue_can_be_named(name: str) -> None:
    pytest.importorskip("transformers")
    options = parse(["--model", name, "--dp-shard", "2", "--procs", "2"])
    assert options.model.vocab_size == 256
    assert options.model.shape is not None
    assert options.model.shape.parameters > 10**5


def test_a_model_is_found_by_its_file_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "built-in", "num_hidden_layers": 3}))
    for name in (tmp_path, path):
        assert parse(["--model", str(name)]).model == ModelConfig(num_hidden_layers=3)
    for content, message in (
        ('{"model_type": "built-in", "layers": 3}', "has layers, which the built-in model has not"),
        ('{"model_type": "built-in", "num_experts": "8"}', "num_experts='8', which is no int"),
        ('{"model_type": "built-in", "num_attention_heads": 5}', "heads of an even width"),
        ('{"model_type": "built-in", "rms_norm_eps": NaN}', "rms_norm_eps=nan; use a number above"),
        ('{"model_type": "built-in", "router_aux_loss_coef": -1}', "-1; use a number of 0 or more"),
        ('{"hidden_size": 3}', "has no model_type"),
        ("{", "cannot be read"),
    ):
        path.write_text(content)
        with pytest.raises(ModelError, match=message):
            parse(["--model", str(path)])
    with pytest.raises(ModelError, match=r"model=gpt is neither .* or built-in-tied, gpt-oss-tiny"):
        parse(["--model", "gpt"])


def test_models_of_transformers_are_refused_where_they_cannot_be_spread(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for words, message in (
        ("qwen3-moe-tiny --tp 2", r"tp=2 with .* \(qwen3_moe\) .* has moe_tp_experts.* use tp=1"),
        ("qwen3-tiny --pp 2", r"pp=2 with .* \(qwen3\); only .* use pp=1"),
        ("qwen3-tiny --ep 2", r"ep=2 with .* \(qwen3\) without experts; use ep=1"),
    ):
        with pytest.raises(OptionsError, match=message):
            parse(["--model", *words.split()])
    with pytest.raises(ParallelDimsError, match="ep=3 does not divide num_experts=8"):
        parse(["--model", "qwen3-moe-tiny", "--ep", "3", "--procs", "3"])
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "no such family"}')
    with pytest.raises(ModelError, match="is no model of transformers"):
        parse(["--model", str(path)])


def test_a_pipeline_takes_its_batch_in_as_many_parts_as_it_has_ranks() -> None:
    options = parse(["--pp", "2"])
    assert (options.train.accumulate, options.pp_schedule, options.stages_per_rank) == (
        2,
        "1f1b",
        1,
    )
    options = parse(["--pp", "2", "--pp-schedule", "interleaved", "--accumulate", "4"])
    assert (options.train.accumulate, options.stages_per_rank) == (4, 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--pp 2 --stages-per-rank 2", "stages-per-rank=2 with pp-schedule=1f1b; use 1, or"),
        (
            "--pp 2 --pp-schedule interleaved --stages-per-rank 1",
            "stages-per-rank=1 with pp-schedule=interleaved; use 2 or more, or pp-schedule=1f1b",
        ),
        (
            "--pp 2 --pp-schedule interleaved --stages-per-rank 3",
            "pp=2 with stages-per-rank=3 has more stages than num_hidden_layers=4",
        ),
        ("--pp 4 --accumulate 2", "accumulate=2 is not a multiple of pp=4: .* use 4 or another"),
        ("--pp 2 --accumulate 8", "accumulate=8 microbatches for 2 .*; use a multiple of 16"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(words: str, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        parse(words.split())


def test_auto_goes_on_where_the_run_was_saved_and_else_starts_one(tmp_path: Path) -> None:
    words = ["--resume", "auto", "--out", str(tmp_path)]
    (tmp_path / LOG_FILE).touch()  # a run that was cut off before its first checkpoint
    assert parse(words).resume is None
    _checkpoint(tmp_path, parse(["--lr", "1e-3"]))
    options = parse([*words, "--steps", "6"])
    assert options.resumes_in_place
    assert options.train.learning_rate == 1e-3
    (tmp_path / CHECKPOINT).rename(tmp_path / PREVIOUS)  # cut off between two renamings
    assert parse([*words, "--steps", "6"]).resume == tmp_path / PREVIOUS
    with pytest.raises(OptionsError, match="resume=auto continues the run in --out"):
        parse(["--resume", "auto"])


@pytest.mark.parametrize("word", ["3", "0:2", "5:4", "a:b", ":"])
def test_steps_to_profile_are_a_range(word: str) -> None:
    assert parse(["--profile", "10:12"]).profile == range(10, 13)
    with pytest.raises(OptionsError, match=f"profile={word} is not a range of steps; use A:B"):
        parse(["--profile", word])


def test_the_vocabulary_of_a_tokenizer_is_rounded_up_so_that_tp_cuts_it(tmp_path: Path) -> None:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "built-in", **shape, "intermediate_size": 96}))
    words = ["--model", str(path), "--procs", "3", "--tp", "3", "--seq-len", "96"]
    options = parse(words)
    assert options.model.vocab_size == 384  # of 256 bytes, a multiple of 64 and of 3
    _checkpoint(tmp_path, options)
    assert parse(["--resume", str(tmp_path)]).model == options.model
    with pytest.raises(ParallelDimsError, match="tp=3 does not divide vocab_size=256"):
        parse([*words, "--vocab-size", "256"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "--pp-schedule interleaved",
            "pp-schedule=interleaved without a pipeline .*; give --pp",
        ),
        ("--stages-per-rank 2 --tp 2", "stages-per-rank=2 without a pipeline"),
        ("--profile 70:80", "profile=70:80 has no step of this run; use steps of 1:60"),
        ("--keep 0", "keep=0 is out of range; use 1 or more"),
        ("--comm-timeout 0.5", "comm-timeout=0.5 is out of range; use 1 to 1000000"),
        ("--comm-timeout nan", "comm-timeout=nan is out of range; use 1 to 1000000"),
        ("--comm-timeout 1e7", "comm-timeout=10000000.0 is out of range; use 1 to 1000000"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: str, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        parse(words.split())


def test_a_comparison_is_of_the_steps_that_were_made(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--lr", "1e-3"]))
    words = ["--resume", str(tmp_path), "--compare"]
    assert parse([*words, "--lr", "1e-3"]).compare == 60
    with pytest.raises(OptionsError, match=r"were made without batch-size=4, lr=0.002; leave"):
        parse([*words, "--lr", "2e-3", "--batch-size", "4"])


def test_a_run_goes_on_where_it_was_and_as_safely(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse(["--device", "cuda", "--keep", "3"]))
    again = parse(["--resume", str(tmp_path), "--profile", "6:7"])
    assert (again.device, again.keep, again.dtype) == ("cuda", 3, "float32")
    with pytest.raises(OptionsError, match="has no step of this run; use steps of 6:65"):
        parse(["--resume", str(tmp_path), "--profile", "1:5"])


def test_what_differs_in_a_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "built-in", "num_hidden_layers": 3}
    path.write_text(json.dumps(fields))
    _checkpoint(tmp_path, parse(["--model", str(path)]))
    path.write_text(json.dumps({**fields, "num_hidden_layers": 4, "rope_theta": 5.0}))
    had = "has model.num_hidden_layers=3 model.rope_theta=10000.0, this run "
    has = "model.num_hidden_layers=4 model.rope_theta=5.0; a resumed run has the same"
    with pytest.raises(OptionsError) as raised:
        parse(["--resume", str(tmp_path)])
    assert had + has in str(raised.value)
    saved = tmp_path / CHECKPOINT / RUN_FILE
    older = {name: x for name, x in json.loads(saved.read_text()).items() if name != "model_fields"}
    saved.write_text(json.dumps(older))
    with pytest.raises(
        OptionsError, match=r" has model=built-in-\w+, this run model=built-in-\w+;"
    ):
        parse(["--resume", str(tmp_path)])


def test_what_a_model_lacks_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = json.loads((CATALOGUE / "llama-tiny.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    _checkpoint(tmp_path, parse(["--model", str(path), "--procs", "1"]))
    path.write_text(json.dumps({**fields, "rms_norm_eps": 0.5}))
    with pytest.raises(
        OptionsError, match=r"no model\.rms_norm_eps, this run model\.rms_norm_eps=0"
    ):
        parse(["--resume", str(tmp_path)])


def test_what_ranks_must_agree_on_tells_other_texts_steps_and_rates_apart(text: str) -> None:
    plain = parse([]).shared_values
    assert parse([]).shared_values == plain
    for words in (["--data", text], ["--steps", "9"], ["--lr", "1"], ["--eval-every", "2"]):
        assert parse(words).shared_values != plain
    assert parse(["--out", "somewhere"]).shared_values == plain


def test_a_run_goes_on_from_the_one_before_where_the_latest_is_damaged(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]))
    (tmp_path / CHECKPOINT).rename(tmp_path / PREVIOUS)
    (tmp_path / CHECKPOINT).mkdir()
    (tmp_path / CHECKPOINT / RUN_FILE).touch()  # as after a loss of power
    assert parse(["--resume", str(tmp_path)]).resume == tmp_path / PREVIOUS


def test_zero_is_given_and_no_compiler_is_none() -> None:
    assert parse(["--weight-decay", "0"]).compare == 0
    assert parse(["--reference", "--compile", "none"]).compile == NO_COMPILER


def test_numbers_that_a_configuration_leaves_out_are_those_of_the_library(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    fields = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 16}
    path.write_text(json.dumps({"model_type": "mistral", "num_hidden_layers": 2, **fields}))
    words = ["--model", str(path), "--procs", "1"]
    shape = parse(words).model.shape
    assert shape is not None
    assert shape.kv_heads == 8  # the library's, and not one for each head
    path.write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 2, **fields}))
    with pytest.raises(ModelError, match="bert with is_decoder=False, which sees the tokens"):
        parse(words)


def test_dropout_is_refused_where_it_cannot_be_that_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 4}
    words = ["--model", str(path), "--procs", "2"]

    def write(**fields: float) -> None:
        path.write_text(json.dumps({"model_type": "gpt2", **shape, **fields}))

    write()  # the library's default is 0.1
    with pytest.raises(OptionsError) as raised:
        parse([*words, "--compare"])
    said = str(raised.value)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert f" {name}=0.1" in said
    assert said.endswith("; leave --compare out, or set it to 0 in the configuration of the model")
    assert parse(words).compare == 0
    with pytest.raises(
        OptionsError, match=r"^cp=2 with attn_pdrop=0\.1: attention dropout .*; use cp=1, or"
    ):
        parse([*words, "--cp", "2"])
    write(attn_pdrop=0, scale_attn_dropped=True)  # which is no probability
    assert parse([*words, "--cp", "2"]).dims.cp == 2
    write(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0.0)
    assert parse([*words, "--compare"]).compare == 60
    fields = json.loads((CATALOGUE / "qwen3-moe-tiny.json").read_text())
    path.write_text(json.dumps({**fields, "model_type": "mixtral", "router_jitter_noise": 0.5}))
    with pytest.raises(OptionsError, match=r"--compare with router_jitter_noise=0\.5: "):
        parse([*words, "--compare"])


@pytest.mark.parametrize("name", [n for n, each in TABLE.items() if each.type in (int, float)])
def test_numbers_out_of_range_name_the_option_and_the_legal_values(name: str) -> None:
    option = TABLE[name]
    illegal: list[float] = [0 if option.positive else option.least - 1]
    illegal += [option.most + 1] if option.most < math.inf else []
    for value in map(option.type, map(str, illegal)):
        with pytest.raises(OptionsError) as raised:
            parse([f"--{option.flag}={value}"])
        assert str(raised.value).startswith(f"{option.flag}={value} is out of range; use ")


def test_the_help_text_has_each_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in TABLE.values():
        assert f" --{option.flag}" in shown
        default = option.type is not bool and option.default is not None
        assert f"{option.help} (default {option.default})" in shown or not default


# Options that are fields of a checkpoint by themselves: a run that goes on takes them too.
SAVED_APART = {"procs": 2, "seed": 3, "dtype": "float32"}
# Options that a run which goes on does not take from the run before it.
OF_ONE_RUN = {"init_from", "export", "steps", "out", "resume", "profile", "compare", "reference"}
# A value of each inherited option that is not its default.
OTHER_VALUES = {
    "device": "cuda",
    "model": "built-in-tied",
    "vocab_size": 320,
    "data": "",  # the test's own text
    "tokenizer": "bytes",
    "token_dtype": "uint32",
    "seq_len": 32,
    "batch_size": 16,
    "accumulate": 4,
    "lr": 1e-4,
    "warmup_steps": 7,
    "decay_steps": 90,
    "weight_decay": 0.3,
    "eval_every": 4,
    "comm_timeout": 60.0,
    "checkpoint_every": 6,
    "keep": 5,
    "compile": "eager",
    "checkpoint_activations": None,
    "pp_schedule": "interleaved",
    "stages_per_rank": 2,
}


def test_a_resumed_run_has_every_option_of_the_run_before_it(tmp_path: Path) -> None:
    text = tmp_path / "t.bin"
    (np.arange(9000, dtype=np.uint32) % 300).tofile(text)
    inherited = {option.name for option in TABLE.values() if option.on_resume == "inherit"}
    assert set(OTHER_VALUES) == inherited
    assert set(TABLE) == {*inherited, *SAVED_APART} | OF_ONE_RUN
    values = {**OTHER_VALUES, **SAVED_APART, "data": text, "pp": 2}
    words = ["--checkpoint-activations"]
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    first = parse(words)
    _checkpoint(tmp_path, first)
    again, plain = parse(["--resume", str(tmp_path)]), parse([])
    for field in fields(Options):
        if field.name in ("steps", "out", "resume", "done"):
            continue
        value = getattr(again, field.name)
        assert value == getattr(first, field.name), field.name
        if field.name not in (OF_ONE_RUN | {"out_given", "unit"}):
            assert value != getattr(plain, field.name), field.name
    differing = {n for n, v in asdict(again.train).items() if v != asdict(plain.train)[n]}
    assert {"seed", "batch_size", "seq_len", "accumulate", "learning_rate"} <= differing
    assert {"warmup_steps", "decay_steps", "weight_decay"} <= differing


def _keep(run: Path, *steps: int) -> list[str]:
    """Copy the checkpoint of a run to ones that are kept; return their paths, the latest first."""
    for step in steps:
        kept = run / f"{CHECKPOINT}-{step}"
        shutil.copytree(run / CHECKPOINT, kept)
        fields = json.loads((kept / RUN_FILE).read_text())
        (kept / RUN_FILE).write_text(json.dumps({**fields, "step": step}))
    return [str(run / f"{CHECKPOINT}-{step}") for step in sorted(steps, reverse=True)]


def _lose_folder(run: Path) -> None:
    shutil.rmtree(run / CHECKPOINT)


def _lose_run_file(run: Path) -> None:
    (run / CHECKPOINT / RUN_FILE).unlink()


@pytest.mark.parametrize("lose", [_lose_folder, _lose_run_file])
@pytest.mark.parametrize("logged", [True, False])
def test_a_run_that_lost_its_latest_checkpoint_does_not_begin_anew(
    tmp_path: Path, lose: Callable[[Path], None], logged: bool
) -> None:
    _checkpoint(tmp_path, parse([]))
    kept = " or ".join(_keep(tmp_path, 15, 18))
    lose(tmp_path)
    if logged:
        (tmp_path / LOG_FILE).write_text('{"step": 1}\n')
    ways = [["--resume", "auto", "--out", str(tmp_path)], ["--resume", str(tmp_path)]]
    ways += [["--resume", str(tmp_path / CHECKPOINT)]]
    for words in ways:
        with pytest.raises(OptionsError) as raised:
            parse(words)
        assert str(tmp_path / CHECKPOINT / RUN_FILE) in str(raised.value)
        remedy = f"; resume from another one in a new folder: --resume {kept} --out NEW"
        assert str(raised.value).endswith(remedy)
    with pytest.raises(OptionsError, match=f"out={tmp_path} has a run already; .*{kept}$"):
        parse(["--out", str(tmp_path)])


def test_auto_does_not_begin_over_a_log_or_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--resume", "auto", "--out", str(tmp_path), "--checkpoint-every", "3"]
    (tmp_path / CHECKPOINT).mkdir()
    with pytest.raises(OptionsError, match=f"{tmp_path / CHECKPOINT / RUN_FILE} .* no other"):
        parse(words)
    (tmp_path / CHECKPOINT).rmdir()
    log = tmp_path / LOG_FILE
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    with pytest.raises(OptionsError, match=f"no checkpoint.* but {log} has 7 steps, .*put it back"):
        parse(words)
    # torchrun starts its ranks anew: the first of them found no log here.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert parse(words).resume is None
    log.unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert parse(words).resume is None
    # With fewer steps, the first checkpoint need not have been whole when the run was killed.
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 7)))
    assert parse(words).resume is None
    (tmp_path / SUMMARY_FILE).write_text("{}")  # of a run that made all its steps
    with pytest.raises(OptionsError, match=f"no checkpoint.* but {log} has 6 steps"):
        parse(words[:4])


def test_a_run_does_not_go_on_beside_later_checkpoints(tmp_path: Path) -> None:
    _checkpoint(tmp_path, parse([]), step=15)
    _keep(tmp_path, 10, 15)
    words = ["--resume", "auto", "--out", str(tmp_path)]
    assert parse(words).done == 15
    later = " or ".join(_keep(tmp_path, 18, 20))
    with pytest.raises(OptionsError) as raised:
        parse(words)
    assert str(raised.value).startswith(
        f"{tmp_path / CHECKPOINT} is of step 15, but its folder has "
    )
    assert str(raised.value).endswith(
        f"; move them away, or resume from one of them: --resume {later}"
    )
    assert parse(["--resume", str(tmp_path)]).done == 15  # in another folder


MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


def test_a_model_without_an_estimate_is_trained_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MAMBA))
    for words in (["--reference"], ["--dp-shard", "2", "--procs", "2"]):
        options = parse(["--model", str(path), *words])
        assert (options.model.shape, options.model.vocab_size) == (None, 256)
    path.write_text(json.dumps({**MAMBA, "vocab_size": 0}))
    np.save(tmp_path / "t.npy", np.arange(5000, dtype=np.uint16) % 300)  # which has no tokenizer
    with pytest.raises(ModelError, match="vocab_size=0 is no number of tokens; use 1 or more"):
        parse(["--model", str(path), "--data", str(tmp_path / "t.npy")])
