"""The plan command: what to run, what it costs, why the others lose."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_mesh import ParallelDims
from hp_mesh.cli import _plans
from hp_mesh.cli._plans import (
    format_count,
    format_seconds,
    rejections_by_rule,
    why_it_loses,
)
from hp_mesh.planner import (
    MODELS,
    Cluster,
    Hint,
    MemorySplit,
    Plan,
    TimeSplit,
    TrainSpec,
    hints,
    plan,
)
from hp_mesh.planner._result import GIB

from .test_cli import document, run

ARGV = ["plan", "--model", "llama3-70b", "--gpus", "256", "--gpu", "h100"]
ARGV += ["--seq-len", "8192", "--global-batch", "512"]
HUGE = ["plan", "--model", "llama3-405b", "--gpus", "8", "--seq-len", "8192", "--global-batch", "8"]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(
        MODELS["llama3-70b"],
        Cluster(world_size=256, accelerator="H100"),
        TrainSpec(seq_len=8192, global_batch=512),
    )


def test_the_document_has_what_the_python_call_finds(planned: Plan) -> None:
    told = document(*ARGV, "--top", "5")
    assert told["counts"] == {
        "considered": planned.considered,
        "fits": len(planned.fits),
        "borderline": len(planned.borderline),
        "does not fit": len(planned.too_large),
        "rejected": len(planned.rejected),
    }
    assert len(told["candidates"]) == 5
    for entry, candidate in zip(told["candidates"], planned.candidates, strict=False):
        assert ParallelDims.from_dict(entry["dims"]) == candidate.dims
        assert entry["fit"] == candidate.fit
        assert entry["memory"]["total"] == candidate.memory.total
        assert entry["time"]["total"] == candidate.time.total
        assert entry["micro_batch"] == candidate.micro_batch
        assert entry["tokens_per_second_per_gpu"] == candidate.tokens_per_second_per_gpu


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("llama3-70b", "70.6B parameters"),
        ("deepseek-v3", "671B parameters, 37.6B of them active in one token"),
    ],
)
def test_plan_and_estimate_tell_the_parameters_in_all_and_of_one_token(
    model: str, line: str
) -> None:
    shape = MODELS[model]
    options = ["--model", model, "--gpu", "h200", "--seq-len", "4096", "--global-batch", "256"]
    words = ["dp_shard=256", f"ep={64 if shape.experts else 1}"]
    for argv in (["plan", "--gpus", "256"], ["estimate", *words, "--recompute", "full"]):
        _, out, err = run(*argv, *options)
        assert err == ""
        assert out.splitlines()[1] == line
        told = document(*argv, *options)
        assert told["parameters"] == shape.parameters
        assert told["active_parameters"] == shape.active_parameters


def test_the_parts_of_a_candidate_sum_up(planned: Plan) -> None:
    for candidate in planned.candidates[:50]:
        assert sum(candidate.memory.parts.values()) == pytest.approx(candidate.memory.total)
        assert sum(candidate.time.parts.values()) == pytest.approx(candidate.time.total)


def test_the_winner_is_a_line_to_paste(planned: Plan) -> None:
    code, out, err = run(*ARGV)
    assert (code, err) == (0, "")
    (line,) = [line.strip() for line in out.splitlines() if line.startswith("  ParallelDims(")]
    best = planned.best
    assert best is not None
    assert eval(line) == best.dims
    assert f"{best.memory.total / GIB:.1f} of {best.limit / GIB:.1f} GiB" in out
    (seconds,) = re.findall(r"estimated (\S+) s per step", out)
    assert float(seconds) == pytest.approx(best.time.total, rel=0.005)
    assert all(name in out for name in (*best.memory.parts, *best.time.parts))


def test_the_counts_and_the_rejecting_rules_are_told(planned: Plan) -> None:
    _, out, _ = run(*ARGV)
    assert f"{planned.considered} considered: {len(planned.fits)} fit" in out
    groups = rejections_by_rule(planned.rejected)
    assert groups
    for rule, cases in groups.items():
        assert cases[0][1].reason in out
        having = [r for r in planned.rejected if rule in {v.rule for v in r.violations}]
        assert len(cases) == len(having)


def test_every_loser_has_a_reason(planned: Plan) -> None:
    best = planned.best
    assert best is not None
    for candidate in planned.candidates[1:200]:
        reason = why_it_loses(candidate, best, 8)
        if candidate.memory.total > candidate.limit:
            over = (candidate.memory.total - candidate.limit) / GIB
            assert reason.endswith(f"{over:.1f} GiB over the limit")
            assert reason.split()[0] in candidate.memory.parts
        else:
            assert "limit" not in reason
            assert set(reason.split()) & {*candidate.time.parts, "recomputes"}


def test_a_reason_names_what_the_best_has_less_of(planned: Plan) -> None:
    some = planned.fits[0]
    time = TimeSplit(compute=8.0, communication={"tp": 0.5}, bubble=1.0, optimizer=0.5)
    memory = MemorySplit(
        parameters=20 * GIB, gradients=0, optimizer=9 * GIB, activations=GIB, logits=0, buffers=0
    )
    dims = ParallelDims(tp=8, world_size=16)
    best = replace(some, dims=dims, recompute="none", time=time, memory=memory, limit=40 * GIB)

    def reason(**changes: Any) -> str:
        return why_it_loses(replace(best, **changes), best, 8)

    assert reason(time=replace(time, bubble=3.0)) == "bubble 25%"
    assert reason(time=replace(time, communication={"tp": 1.5})) == "exposed tp 14%"
    assert reason(time=replace(time, communication={"tp": 0.5, "cp": 0.05})) == "exposed cp 0.5%"
    wide = ParallelDims(tp=16, world_size=16)
    crossing = reason(dims=wide, time=replace(time, communication={"tp": 1.5}))
    assert crossing == "tp crosses nodes, 14% exposed"
    assert reason(time=replace(time, compute=10.0)) == "compute 25% slower"
    assert reason(time=replace(time, compute=10.0), recompute="full") == "recomputes full"
    large = replace(memory, activations=52 * GIB)
    assert reason(memory=large) == "activations 41.0 GiB over the limit"
    quicker, larger = replace(time, compute=7.9), replace(memory, logits=2 * GIB)
    assert reason(time=quicker, memory=larger) == "2.0 GiB more memory"


def test_options_reach_the_planner() -> None:
    told = document(*ARGV, "--float8", "--micro-batch", "2", "--ranks-per-node", "4")
    expected = plan(
        MODELS["llama3-70b"],
        Cluster(world_size=256, accelerator="H100", ranks_per_node=4),
        TrainSpec(seq_len=8192, global_batch=512, float8=True, micro_batch=2),
    )
    assert told["counts"]["considered"] == expected.considered
    times = [entry["time"]["total"] for entry in told["candidates"]]
    assert times == [candidate.time.total for candidate in expected.candidates[:10]]
    assert {entry["micro_batch"] for entry in told["candidates"]} == {2}
    told = document(*ARGV, "--recompute", "full")
    assert {entry["recompute"] for entry in told["candidates"]} == {"full"}


def test_what_fits_nowhere_exits_with_1_and_names_the_nearest() -> None:
    code, out, err = run(*HUGE)
    assert (code, err) == (1, "")
    assert "NOTHING FITS" in out
    assert "over the limit" in out


def test_a_run_without_any_configuration_says_so() -> None:
    argv = ["plan", "--model", "gpt-22b", "--gpus", "7919", "--seq-len", "8191"]
    code, out, _ = run(*argv, "--global-batch", "3")
    assert code == 1
    assert "no configuration keeps all rules" in out
    assert "does not divide" in out


def test_a_model_may_be_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config: dict[str, Any] = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    path.write_text(json.dumps(config))
    argv = [str(path) if word == "llama3-70b" else word for word in ARGV]
    assert document(*argv)["candidates"] == document(*ARGV)["candidates"]
    path.write_text(json.dumps({"hidden_size": 8192}))
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "num_hidden_layers" in err


def test_everything_wrong_with_a_plan_is_in_one_message() -> None:
    argv = ["plan", "--model", "llama9", "--gpus", "0", "--gpu", "h7", "--seq-len", "x"]
    argv += ["--global-batch", "8", "--micro-batch", "-1", "--recompute", "some", "--top", "0"]
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    for part in ("llama9", "--world '0'", "'h7'", "seq_len='x'", "micro_batch=-1"):
        assert part in err
    for part in ("'some'", "--top '0'"):
        assert part in err
    assert "Traceback" not in err


def test_fix_restricts_the_search_as_the_python_argument_does() -> None:
    told = document(*ARGV, "--fix", "tp=8", "--fix", "pp=2")
    expected = plan(
        MODELS["llama3-70b"],
        Cluster(world_size=256, accelerator="H100"),
        TrainSpec(seq_len=8192, global_batch=512),
        fix={"tp": 8, "pp": 2},
    )
    assert told["counts"]["considered"] == expected.considered > 0
    assert {(each["dims"]["tp"], each["dims"]["pp"]) for each in told["candidates"]} == {(8, 2)}
    times = [entry["time"]["total"] for entry in told["candidates"]]
    assert times == [candidate.time.total for candidate in expected.candidates[:10]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tp=7"], "tp=7 does not divide world_size=256; use 1, 2, 4"),
        (["tp=0"], "tp=0 is not a positive integer"),
        (["tp=many"], "tp='many' is not a positive integer"),
        (["tensor=8"], "'tensor' is not a field"),
        (["dp=8"], "use pp, dp_replicate, dp_shard, cp, tp, ep or etp\n"),
        (["order=tp"], "no degree 'order'; use pp, dp_replicate"),
        (["tp8"], "'tp8' is not NAME=VALUE"),
        (["tp=2", "tp=4"], "tp is given twice"),
    ],
)
def test_a_wrong_fix_is_refused(words: list[str], message: str) -> None:
    code, out, err = run(*ARGV, *(part for word in words for part in ("--fix", word)))
    assert (code, out) == (2, "")
    assert message in err


def test_without_a_fitting_configuration_a_fix_is_to_blame_and_not_the_world() -> None:
    code, out, _ = run(*HUGE, "--fix", "tp=8")
    assert code == 1
    assert "NOTHING FITS" in out
    assert "smallest number of GPUs" not in out


def test_one_line_names_the_option_that_helps_most(planned: Plan) -> None:
    hint = hints(planned)[0]
    best = planned.best
    assert best is not None
    assert (hint.field, hint.value) == ("fused_loss", True)
    now, then = (f"{seconds:.1f} s" for seconds in (best.time.total, hint.step_seconds))
    line = f"with --fused-loss the best plan takes {then} instead of {now}"
    assert line in run(*ARGV)[1].splitlines()
    with_it = document(*ARGV, "--fused-loss")["recommended"]
    assert with_it["time"]["total"] == hint.step_seconds


def test_a_hint_with_a_value_and_one_that_makes_a_plan_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = Hint(field="zero", value=1, step_seconds=2.5)
    monkeypatch.setattr(_plans, "hints", lambda *_, **__: (hint,))
    assert "with --zero 1 the best plan takes 2.5 s instead of " in run(*ARGV)[1]
    assert "with --zero 1 a configuration fits, and takes 2.5 s" in run(*HUGE)[1]
    monkeypatch.setattr(_plans, "hints", lambda *_, **__: ())
    assert "with --" not in run(*ARGV)[1]


def test_programs_do_not_wait_for_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_plans, "hints")
    assert run(*ARGV, "--json")[0] == 0
    assert run(*ARGV, "--as-code")[0] == 0


def test_words_of_degrees_are_not_ignored_by_plan() -> None:
    code, _, err = run(*ARGV, "tp=8")
    assert code == 2
    assert "unrecognized arguments: tp=8" in err


def test_a_wrong_number_of_devices_is_told_by_both_names_of_its_option() -> None:
    argv = ["plan", "--model", "llama3-8b", "--gpus", "0", "--seq-len", "8", "--global-batch", "8"]
    code, _, err = run(*argv)
    assert code == 2
    assert "--gpus/--world '0' is not a positive integer" in err


def test_numbers_and_names_of_a_plan_stay_short(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 100, "hidden_size": 2**15, "num_attention_heads": 256}
    sizes |= {"intermediate_size": 2**17, "vocab_size": 2**10}
    path.write_text(json.dumps({**sizes, "_name_or_path": "large\nmodel" + "x" * 5000}))
    argv = ["plan", "--model", str(path), "--gpus", "1", "--seq-len", "1", "--global-batch", "1"]
    _, out, _ = run(*argv)
    title, count = out.splitlines()[:2]
    assert title.startswith("large modelx")
    assert len(title) < 200
    assert title.endswith("; 1 sequence of 1 token per step")
    assert count == "1.72T parameters"
    assert format_seconds(117109035539.3) == "1.17e+11"
    assert format_count(1.25e12) == "1.25T"
    assert format_count(999.9e9) == "1T"
