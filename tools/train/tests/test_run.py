"""Whole runs of the program, in processes of their own."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import Ended, run_program
from torch.distributed.checkpoint.filesystem import FileSystemReader

from train.config import CATALOGUE
from train.options import parse

PROGRAM = str(Path(__file__).resolve().parents[1])
SUMMARY = {
    "steps",
    "first_loss",
    "final_loss",
    "reference_max_rel_diff",
    "tokens_per_second",
    "model_flops_per_second",
    "mfu",
    "peak_memory_bytes",
    "dims",
    "world_size",
    "torch",
    "bytes_by_axis",
    "checkpoint",
}


Losses = list[tuple[int, float, float]]


def _train(out: Path, *words: str, **environment: str) -> tuple[dict[str, Any], Losses, str]:
    done = run_program(PROGRAM, ["--out", str(out), *words], environment, timeout=500)
    assert done.status == 0, done.stderr
    # torch's profiler says on its own that it starts and stops.
    assert [x for x in done.stderr.splitlines() if "ActivityProfiler" not in x] == []
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return summary, [(r["step"], r["loss"], r["grad_norm"]) for r in records], done.stdout


def test_a_run_that_goes_on_repeats_the_undisturbed_run_bitwise(tmp_path: Path) -> None:
    small = ["--cp", "2", "--ep", "2", "--batch-size", "4", "--seq-len", "32"]
    whole, expected, _ = _train(tmp_path / "whole", "--compare", *small, *_two(3))
    _, first, _ = _train(tmp_path / "part", *small, *_two(2))
    part = tmp_path / "part"
    resumed, rest, shown = _train(
        tmp_path / "rest", "--resume", str(part), "--steps", "3", "--compare"
    )
    assert f"resuming from step 2 of {part / 'checkpoint'}: training 1 step of 128" in shown
    assert [step for step, _, _ in rest] == [3]
    assert first + rest == expected
    for summary in (whole, resumed):
        assert set(summary) == SUMMARY
        assert summary["reference_max_rel_diff"] < 1e-12
        assert {"cp", "ep", "fsdp", "loss"} <= set(summary["bytes_by_axis"])
        assert (Path(summary["checkpoint"]) / ".metadata").is_file()
    assert whole["final_loss"] < whole["first_loss"]


def test_the_reference_is_one_process_without_traffic(tmp_path: Path) -> None:
    summary, losses, _ = _train(tmp_path, "--reference", "--steps", "1")
    assert summary["bytes_by_axis"] == {}
    assert summary["reference_max_rel_diff"] is None
    assert [step for step, _, _ in losses] == [1]


def test_held_out_text_is_looked_at_in_the_end_too(tmp_path: Path) -> None:
    words = [*_tiny(tmp_path), "--reference", "--steps", "3", "--eval-every", "2"]
    _, _, shown = _train(tmp_path / "out", *words)
    records = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [record["eval_loss"] is not None for record in records] == [False, True, True]
    assert f"held-out loss {records[2]['eval_loss']:.4f}" in shown


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise ImportError('none here')", "ImportError: none here; pip install matplotlib"),
        ("def use(name):\n    raise OSError('no\\n[space] left')", "OSError: no [space] left"),
    ],
    ids=["missing", "broken"],
)
def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_summary_is_whole(
    tmp_path: Path, module: str, reason: str
) -> None:
    modules, out = tmp_path / "modules", tmp_path / "out"
    modules.mkdir()
    (modules / "matplotlib.py").write_text(module + "\n")
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    summary, losses, shown = _train(out, "--compare", *_two(1), PYTHONPATH=path)
    assert set(summary) == SUMMARY
    assert summary["reference_max_rel_diff"] < 1e-12
    assert summary["final_loss"] == losses[0][1]
    (line,) = (line for line in shown.splitlines() if line.startswith("curves"))
    assert line.split(maxsplit=1)[1] == f"not drawn: {reason}"
    assert "largest difference" in shown
    assert not [*out.glob("loss.*")]


def test_a_run_whose_parameters_are_not_sharded_over_cp_equals_one_process(tmp_path: Path) -> None:
    summary, _, _ = _train(tmp_path, "--compare", "--fsdp-folds-cp", "false", "--cp", "2", *_two(2))
    assert summary["dims"]["fsdp_folds_cp"] is False
    assert summary["reference_max_rel_diff"] < 1e-12
    assert summary["bytes_by_axis"]["replicate"]["bytes"] > 0


def _two(steps: int) -> list[str]:
    return ["--procs", "2", "--steps", str(steps)]


def _text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}. " for n in range(1500)))
    return path


def test_a_model_of_transformers_trains_on_text_of_ones_own_as_one_process_does(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    words = "--model qwen3-tiny --cp 2 --accumulate 2 --batch-size 4 --seq-len 32 --eval-every 2"
    data = ["--data", str(_text(tmp_path))]
    summary, _, shown = _train(tmp_path / "out", *data, *words.split(), "--compare", *_two(2))
    assert summary["reference_max_rel_diff"] < 1e-6  # its rotary positions are float32
    assert summary["bytes_by_axis"]["cp"]["bytes"] > 0
    records = [json.loads(x) for x in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [record["eval_loss"] is not None for record in records] == [False, True]
    assert f"held-out loss {records[1]['eval_loss']:.4f}" in shown


def test_rotary_positions_that_follow_the_length_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = json.loads((CATALOGUE / "llama-tiny.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10_000.0}
    model = tmp_path / "model.json"
    model.write_text(json.dumps({**fields, "rope_parameters": rope, "max_position_embeddings": 16}))
    words = ["--cp", "2", "--batch-size", "4", "--seq-len", "64", "--lr", "0.01", *_two(4)]
    found, *_ = _train(tmp_path / "out", "--model", str(model), *words, "--compare")
    assert found["reference_max_rel_diff"] < 1e-6  # they are float32


def test_experts_of_transformers_train_over_ranks_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = json.loads((CATALOGUE / "qwen3-moe-tiny.json").read_text())
    model = tmp_path / "model.json"  # whose auxiliary loss is large enough to be seen
    model.write_text(json.dumps({**fields, "router_aux_loss_coef": 1.0}))
    words = "--ep 2 --dp-shard 2 --cp 2 --accumulate 2 --batch-size 4 --seq-len 32 --steps 2"
    found, *_ = _train(tmp_path / "out", "--model", str(model), *words.split(), "--compare")
    assert found["reference_max_rel_diff"] < 1e-6  # the library's routers compute in float32
    assert {"ep", "efsdp", "fsdp", "cp"} <= set(found["bytes_by_axis"])


def test_a_model_with_state_space_layers_trains_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_d_state": 4}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    model = tmp_path / "model.json"
    fields = {"model_type": "jamba", **shape, **heads, **layers, "mamba_dt_rank": 4}
    model.write_text(json.dumps(fields))
    words = ["--dp-shard", "2", "--batch-size", "4", "--seq-len", "16", "--compare", *_two(2)]
    words += ["--model", str(model), "--out", str(out := tmp_path / "out")]
    done = run_program(PROGRAM, words, timeout=500)
    assert done.status == 0, done.stderr  # where the library says that it has no fast kernels
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reference_max_rel_diff"] < 1e-6  # its scans are float32
    assert "FLOP" not in done.stdout  # hp-mesh has no estimate for it
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert [record["model_flops_per_second"] for record in records] == [None, None]


def test_blocks_are_compiled_in_bfloat16_over_float32_weights(tmp_path: Path) -> None:
    words = "--dtype bfloat16 --compile aot_eager --ep 2 --batch-size 4 --seq-len 32 --compare"
    data = ["--data", str(_text(tmp_path))]
    summary, _, _ = _train(tmp_path / "out", *data, *words.split(), *_two(2))
    assert 0 < summary["reference_max_rel_diff"] < 1e-2
    saved = FileSystemReader(tmp_path / "out" / "checkpoint").read_metadata().state_dict_metadata
    experts = saved["model.blocks.1.mlp.experts.down_proj"]
    assert experts.properties.dtype == torch.float32  # type: ignore[union-attr]


def _log(out: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def test_a_run_saves_while_it_goes_on_is_traced_and_goes_on_by_itself(tmp_path: Path) -> None:
    small = ["--cp", "2", "--ep", "2", "--batch-size", "4", "--seq-len", "32"]
    small += ["--resume", "auto", "--checkpoint-every", "1"]
    _train(tmp_path, *small, "--profile", "2:2", *_two(2))
    first = _log(tmp_path)
    saved = json.loads((tmp_path / "checkpoint" / "run.json").read_text())
    assert saved["step"] == 2
    assert not [*tmp_path.glob("checkpoint.*")]
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"trace-{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {
            "all_gather over cp in blocks.0.attention.core",
            "all_to_all over cp in blocks.0.attention.core (backward)",
            "all_to_all over ep in blocks.1.mlp",
            "all_to_all over ep in blocks.1.mlp (backward)",
            "all_reduce over loss in blocks.1.mlp.router",
            "all_reduce over loss in the step",
            "hp_fsdp.all_gather blocks.0 over fsdp",
            "hp_fsdp.reduce_scatter blocks.0 over fsdp",
        } <= names
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "loss": 0.0}\n{"st')  # of a run that was cut off
    summary, losses, shown = _train(tmp_path, *small, "--compare", *_two(3))
    assert "resuming from step 2" in shown
    assert _log(tmp_path) == [*first, (3, losses[-1][1])]
    assert summary["reference_max_rel_diff"] < 1e-12


def test_a_pipeline_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    small = ["--pp", "2", "--batch-size", "4", "--seq-len", "32", "--out", str(tmp_path)]
    _train(tmp_path, *small, *_two(1))
    summary, _, _ = _train(tmp_path, "--resume", str(tmp_path), "--steps", "3", "--compare")
    assert [step for step, _ in _log(tmp_path)] == [1, 2, 3]
    assert summary["reference_max_rel_diff"] < 1e-12


def test_what_the_packages_refuse_of_a_model_is_one_message_of_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global"], 2]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"model_type": "gpt_neo", **shape}))
    words = ["--model", str(model), "--cp", "2", "--batch-size", "4", "--seq-len", "32", *_two(1)]
    done = run_program(PROGRAM, ["--out", str(tmp_path / "out"), *words], timeout=500)
    assert done.status == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "train: error: no module of GPTNeoForCausalLM takes its attention from the registry"
    )


TINY = {
    "model_type": "built-in",
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 16, "moe_intermediate_size": 8},
}


def _tiny(folder: Path) -> list[str]:
    """Return the words of a run of two ranks that takes no time."""
    model = folder / "tiny.json"
    model.write_text(json.dumps(TINY))
    return ["--model", str(model), "--batch-size", "4", "--seq-len", "16"]


def _refused(*words: str) -> str:
    """Return the one line of standard error of a run that ends with status 2."""
    done = run_program(PROGRAM, words, timeout=500)
    assert done.status == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_a_damaged_checkpoint_is_one_message_of_all_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _train(out, *_tiny(tmp_path), *_two(2), "--checkpoint-every", "1", "--keep", "2")
    damaged = out / "checkpoint" / "__1_0.distcp"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    line = _refused("--resume", str(out), "--out", str(tmp_path / "other"))
    assert line.startswith(f"train: error: {damaged} is damaged: ")
    assert re.search(r" \(bytes \d+ to \d+\); resume", line)
    remedy = f"; resume from another one in a new folder: --resume {out / 'checkpoint-1'} --out NEW"
    assert line.endswith(remedy)


# Files grow no larger than this: the model's cannot be written, the log can.
FULL = """
import resource, runpy, signal, sys
sys.dont_write_bytecode = True
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _ended_alike(out: Path, path: str, *words: str) -> str:
    """Return what two ranks said alike before they ended with status 1, without a traceback."""
    done = run_program(path, [*words, "--out", str(out), "--procs", "2"], timeout=500)
    assert done.status == 1
    ranks, line, *how = done.stderr.splitlines()
    assert how[0] == f"no checkpoint was saved in {out}"
    assert len(how) == 1
    assert ranks == "2 ranks failed with the same message and exit status 1"
    return line


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(tmp_path: Path) -> None:
    program, out = tmp_path / "full.py", tmp_path / "out"
    program.write_text(FULL)
    words = [*_tiny(tmp_path), "--steps", "39", "--checkpoint-every", "20"]
    line = _ended_alike(out, str(program), PROGRAM, *words)
    assert line.startswith("train: error: the checkpoint of step 20 was not written to ")
    assert line.endswith("; there is no previous one")
    assert not [*out.glob("checkpoint*")]
    assert 20 <= len((out / "log.jsonl").read_text().splitlines()) < 39  # told before the end


def test_a_log_that_cannot_be_written_ends_the_run_with_one_line(tmp_path: Path) -> None:
    program, out = tmp_path / "full.py", tmp_path / "out"
    program.write_text(FULL)
    words = [PROGRAM, *_tiny(tmp_path), "--reference", "--steps", "500", "--out", str(out)]
    done = run_program(str(program), words, timeout=500)
    assert done.status == 1
    line, how = done.stderr.splitlines()
    assert how == f"no checkpoint was saved in {out}"
    whole = (out / "log.jsonl").read_text().count("\n")
    assert line.startswith(f"train: error: step {whole + 1} was not written to ")
    assert f"{out / 'log.jsonl'} (File too large), where " in line


def test_a_log_that_cannot_be_written_ends_all_ranks_alike(tmp_path: Path) -> None:
    program, out = tmp_path / "full.py", tmp_path / "out"
    program.write_text(FULL)
    line = _ended_alike(out, str(program), PROGRAM, *_tiny(tmp_path), "--steps", "500")
    assert line.startswith("train: error: step ")
    assert f" was not written to {out / 'log.jsonl'} (File too large), where " in line


def test_a_run_that_diverges_ends_with_one_line(tmp_path: Path) -> None:
    words = ["--lr", "1e30", "--warmup-steps", "0", "--steps", "30"]
    line = _ended_alike(tmp_path / "out", PROGRAM, *_tiny(tmp_path), *words)
    assert line.startswith("train: error: the gradients' norm was ")
    assert line.endswith("resume from an older checkpoint")


# The launcher hears SIGTERM when all steps of the run, and the first of the comparison, are made.
ENDED = """
import os, runpy, signal, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from train.report import Report

step = Report.reference_step
def stop(self, result):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1.0)
    step(self, result)
Report.reference_step = stop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_what_is_left_after_the_last_step_is_made_though_the_run_is_told_to_end(
    tmp_path: Path,
) -> None:
    program, out = tmp_path / "ended.py", tmp_path / "out"
    program.write_text(ENDED)
    words = [PROGRAM, *_tiny(tmp_path), *_two(2), "--compare", "--out", str(out)]
    done = run_program(str(program), words, timeout=500)
    saved = f"all 2 steps are made and saved in {out}\n"
    assert (done.status, done.stderr) == (143, f"SIGTERM: ending 2 ranks\n{saved}")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["reference_max_rel_diff"] < 1e-12
    assert "1 of 2 steps, then SIGTERM" in done.stdout
    assert str(out / "checkpoint") in done.stdout
    assert (out / "loss.png").is_file()


# Each rank is a node with a disk of its own: the same words name another folder on each.
APART = """
import os, runpy, sys
folder = os.path.join(sys.argv[1], "node" + os.environ["RANK"])
os.makedirs(folder, exist_ok=True)
os.chdir(folder)
if sys.argv[2] == "unchecked":
    sys.path.insert(0, os.path.dirname(sys.argv[3]))
    import train.rank
    train.rank.check_shared = lambda out: None
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _on_nodes(program: str, *words: str) -> list[Ended]:
    """Return how the two ranks of a cluster ended, each of which is a node of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run(rank: int) -> Ended:
        return run_program(program, words, {**world, "RANK": str(rank)}, timeout=500)

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(run, range(2)))


@pytest.mark.parametrize("check", ["checked", "unchecked"])
def test_nodes_that_do_not_share_the_folder_end_with_one_message(
    tmp_path: Path, check: str
) -> None:
    program = tmp_path / "apart.py"
    program.write_text(APART)
    words = [PROGRAM, *_tiny(tmp_path), "--dp-shard", "2", "--steps", "2", "--out", "out"]
    first, second = _on_nodes(str(program), str(tmp_path), check, *words)
    assert (first.status, second.status) == ((2, 2) if check == "checked" else (1, 1))
    assert second.stderr == ""  # the first rank of a cluster says it for all
    line, *how = first.stderr.splitlines()
    written = tmp_path / "node0" / "out"
    assert how == ([] if check == "checked" else ["no checkpoint was saved in out"])
    if check == "checked":
        assert line.startswith(f"train: error: out={written} of rank 0 is not seen by rank 1 ")
        assert str(tmp_path / "node1" / "out") in line
    else:
        assert line.startswith("train: error: the checkpoint of step 2 was not written to ")
        assert "(rank 1: " in line
        assert line.endswith("; there is no previous one")
    assert not [*written.glob("checkpoint*")]


# One rank alone hears SIGTERM, after step 2; the first takes its time to draw.
ONE_HEARS = """
import os, runpy, signal, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train.report
from train.loop import Trainer

step, draw = Trainer.train_step, train.report.plot_losses
def stop(self, data):
    found = step(self, data)
    if os.environ["RANK"] == "1" and self.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return found
def slowly(*words):
    time.sleep(1.5)
    draw(*words)
Trainer.train_step = stop
train.report.plot_losses = slowly
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sigterm_to_one_rank_saves_and_ends_the_run_in_order(tmp_path: Path) -> None:
    program, out = tmp_path / "one.py", tmp_path / "out"
    program.write_text(ONE_HEARS)
    words = [PROGRAM, *_tiny(tmp_path), *_two(9), "--out", str(out)]
    done = run_program(str(program), words, timeout=500)
    assert done.status == 143
    saved, command = done.stderr.splitlines()
    assert saved == "step 2 is saved; continue with"
    assert shlex.split(command)[2:] == ["--resume", "auto", "--out", str(out), "--steps", "9"]
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    assert (out / "loss.png").is_file()
    assert (out / "checkpoint" / ".metadata").is_file()


# The first rank is killed where the run has made its last step: when it renames a checkpoint for
# the last time (all that stays and the one before, with its own name), and when it draws.
KILLED = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[2]))
import train.checkpoint, train.report

def die(*words, **options):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "drawing":
    train.report.plot_losses = die
else:
    retire = train.checkpoint.Checkpoints._retire
    def last(self):
        die() if self._fields["step"] == 4 else retire(self)
    train.checkpoint.Checkpoints._retire = last
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("moment", ["renaming", "drawing"])
def test_a_run_that_was_killed_after_its_last_step_is_completed(
    tmp_path: Path, moment: str
) -> None:
    program, out = tmp_path / "killed.py", tmp_path / "out"
    program.write_text(KILLED)
    words = [*_tiny(tmp_path), *_two(4), "--checkpoint-every", "1", "--keep", "2", "--compare", "4"]
    words += ["--resume", "auto", "--profile", "2:2"]
    killed = [moment, PROGRAM, *words, "--out", str(out)]
    done = run_program(str(program), killed, timeout=500)
    assert (done.status, (out / "summary.json").exists()) == (1, False)
    logged = [record for _, record in sorted(_log(out))]
    summary, losses, shown = _train(out, *words)
    assert f"resuming from step 4 of {out / 'checkpoint'}: all 4 steps are made" in shown
    assert [loss for _, loss, _ in losses] == logged
    assert set(summary) == SUMMARY
    assert (summary["steps"], summary["final_loss"]) == (4, logged[-1])
    assert summary["reference_max_rel_diff"] < 1e-12
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 2**20
    assert summary["bytes_by_axis"]["fsdp"]["bytes"] > 0
    assert (out / "loss.svg").is_file()
    assert sorted(path.name for path in out.glob("checkpoint*")) == ["checkpoint", "checkpoint-3"]
    _, _, shown = _train(out, *words)
    assert shown == f"the run in {out} has made its 4 steps\n"


def _hear_interrupts() -> None:
    """Undo what a shell does to jobs in the background, where tests may run: ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=_hear_interrupts,
    )


@pytest.mark.parametrize("processes", [["--procs", "2"], ["--reference"]], ids=["two", "alone"])
def test_after_ctrl_c_the_last_lines_say_how_to_resume(
    tmp_path: Path, processes: list[str]
) -> None:
    out = tmp_path / "out"
    words = [*_tiny(tmp_path), "--checkpoint-every", "1", "--steps", "100000", *processes]
    process = _start(*words, "--out", str(out))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step ") and (out / "checkpoint").exists():
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    saved, command = errors.splitlines()[-2:]
    names = [out / name for name in ("checkpoint", "checkpoint.previous")]
    folder = next(folder for folder in names if folder.exists())
    latest = json.loads((folder / "run.json").read_text())
    assert saved == f"step {latest['step']} is saved; continue with"
    assert "Traceback" not in errors
    start, *again = shlex.split(command)
    assert (start, again[0]) == ("python", PROGRAM)
    options = parse(again[1:])
    assert (options.resumes_in_place, options.done) == (True, latest["step"])
    assert (options.steps, options.reference) == (100000, "--reference" in words)


def test_ctrl_c_before_the_first_checkpoint_says_that_nothing_is_saved(tmp_path: Path) -> None:
    process = _start(
        *_tiny(tmp_path), "--reference", "--steps", "99999", "--out", str(tmp_path / "out")
    )
    assert process.stdout is not None
    assert any(line == f"writing to {tmp_path / 'out'}\n" for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    said = f"no checkpoint was saved in {tmp_path / 'out'}\n"
    assert (process.returncode, errors) == (130, said)


@pytest.mark.parametrize("module", ["hp_mesh", "hp_cp"])
def test_ctrl_c_while_modules_are_imported_prints_nothing(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = _start("--procs", "2", "--out", str(tmp_path / "out"), PYTHONPATH=path)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (-signal.SIGINT, "")
