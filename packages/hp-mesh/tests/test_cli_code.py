"""``plan --as-code``: what it prints can be read back."""

import re
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims
from hp_mesh.cli import main
from hp_mesh.planner import MODELS, Candidate, Cluster, TrainSpec, estimate, plan

from .test_cli import document, run

PACKAGE = main.__module__.partition(".cli")[0]


def parts(out: str) -> tuple[str, str, str]:
    """Give the Python, the TOML and the flags of an output."""
    found = re.split(r"^# (?:torchtitan|Megatron-LM): .*\n", out, flags=re.MULTILINE)
    assert len(found) == 3
    return found[0], found[1], found[2]


def flags(text: str) -> dict[str, Any]:
    """Give Megatron-LM's flags as its argument parser would store them."""
    lines = [line.rstrip(" \\") for line in text.splitlines() if line.startswith("--")]
    found: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.removeprefix("--").partition(" ")
        assert name not in found
        found[name.replace("-", "_")] = int(value) if value.isdecimal() else value or True
    return found


def python(text: str) -> dict[str, Any]:
    """Run the Python of an output and give its names."""
    assert f"from {PACKAGE} import ParallelDims, TrainSpec" in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert isinstance(names["dims"], ParallelDims)
    assert isinstance(names["train"], TrainSpec)
    return names


@given(
    st.sampled_from(("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")),
    st.sampled_from((8, 16, 64)),
    st.sampled_from((64, 256)),
    st.sampled_from(("h100", "b200")),
    st.sampled_from(("", "--zero any", "--schedule any --zero 1", "--schedule interleaved")),
)
@settings(deadline=None, max_examples=12)
def test_every_form_of_a_plan_gives_its_degrees_back(
    model: str, world: int, batch: int, gpu: str, options: str
) -> None:
    argv = ["plan", "--model", model, "--gpus", str(world), "--gpu", gpu, "--seq-len", "4096"]
    argv += ["--global-batch", str(batch), *options.split()]
    code, out, _ = run(*argv, "--as-code")
    told = document(*argv)["recommended"] if code == 0 else None
    if told is None:
        return
    dims = ParallelDims.from_dict(told["dims"])
    source, toml, line = parts(out)
    assert python(source)["dims"] == dims
    titan = tomllib.loads(toml)
    assert ParallelDims.from_config(titan["parallelism"], world) == dims
    assert ParallelDims.from_config(flags(line), world) == dims


FITTING = ["--model", "llama3-70b", "--gpu", "h100", "--seq-len", "8192"]


@pytest.mark.parametrize(
    "options",
    [
        "--gpus 64 --global-batch 512",
        "--gpus 64 --global-batch 512 --schedule interleaved --zero 1 --float8 --fused-loss",
        "--gpus 64 --global-batch 256 --schedule any --zero any --context all-gather",
        "--gpus 32 --global-batch 64 --recompute full --recompute-layers 4 --zero 2",
    ],
)
def test_the_python_form_estimates_the_same(options: str) -> None:
    code, out, err = run("plan", *FITTING, *options.split(), "--as-code")
    assert (code, err) == (0, "")
    names = python(parts(out)[0])
    world = names["dims"].world_size
    cluster = Cluster(world_size=world, accelerator="H100")
    told = document("plan", *FITTING, *options.split())["recommended"]
    own = estimate(MODELS["llama3-70b"], cluster, names["train"], names["dims"])
    assert own.time.total == told["time"]["total"]
    assert own.memory.total == told["memory"]["total"]


def best_of(**options: Any) -> tuple[Candidate, TrainSpec]:
    train = TrainSpec(seq_len=8192, global_batch=512, **options)
    best = plan(MODELS["llama3-70b"], Cluster(world_size=64, accelerator="H100"), train).best
    assert best is not None
    return best, train


def test_the_settings_of_a_run_are_those_of_the_frameworks() -> None:
    options = "--gpus 64 --global-batch 512 --zero 1 --schedule interleaved --micro-batch 1"
    _, out, _ = run("plan", *FITTING, *options.split(), "--as-code")
    best, _ = best_of(zero=1, schedule="interleaved", micro_batch=1)
    _, toml, line = parts(out)
    titan, megatron = tomllib.loads(toml), flags(line)
    dp = best.dims.dp_size
    assert titan["training"]["seq_len"] == megatron["seq_length"] == 8192
    assert titan["training"]["global_batch_size"] == megatron["global_batch_size"] == 512
    sequences = titan["training"]["local_batch_size"]
    assert sequences == best.micro_batch * (best.microbatches if best.dims.pp > 1 else 1)
    assert sequences * dp * (1 if best.dims.pp > 1 else best.microbatches) == 512
    assert megatron["micro_batch_size"] == best.micro_batch
    assert megatron["use_distributed_optimizer"] is True
    assert megatron["num_virtual_stages_per_pipeline_rank"] == best.virtual_stages
    assert "zero=1" in toml  # torchtitan has no such stage


def test_an_option_without_an_equivalent_is_listed() -> None:
    options = "--gpus 64 --global-batch 512 --fused-loss --attention flash-2"
    _, out, _ = run("plan", *FITTING, *options.split(), "--as-code")
    _, toml, line = parts(out)
    for text in (toml, line):
        assert "# not translated: " in text
        assert "fused_loss=True" in text
        assert "attention='flash-2'" in text


def test_what_a_framework_does_otherwise_is_said() -> None:
    options = ["--gpus", "64", "--global-batch", "512", "--fix", "pp=4", "--fix", "tp=4"]
    _, toml, line = parts(run("plan", *FITTING, *options, "--as-code")[1])
    assert "# torchtitan's pipelines keep a receive buffer for each microbatch" in toml
    assert "# Megatron-LM needs" not in line  # 80 layers on 4 stages
    options += ["--receive-buffers", "all"]
    _, toml, line = parts(run("plan", *FITTING, *options, "--as-code")[1])
    assert "receive" not in toml
    assert "receive_buffers='all'" in line
    argv = ["plan", "--model", "llama3-405b", "--gpus", "2048", "--seq-len", "8192"]
    argv += ["--global-batch", "2048", "--fix", "pp=32", "--as-code"]
    said = "# Megatron-LM needs a multiple of 32 layers, and the model has 126: add"
    assert said in run(*argv)[1]


@pytest.mark.parametrize(
    "options", ["--schedule interleaved --virtual-stages 4", "--schedule dualpipe"]
)
def test_code_without_pipeline_stages_has_no_schedule(options: str) -> None:
    argv = ["plan", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "4096"]
    argv += ["--global-batch", "64", "--fix", "pp=1"]
    _, plain, _ = run(*argv, "--as-code")
    code, out, _ = run(*argv, "--as-code", *options.split())
    assert (code, out) == (0, plain)
    assert run(*argv, *options.split()) == run(*argv)


def test_code_of_a_plan_that_does_not_fit_says_so() -> None:
    argv = ["plan", "--model", "llama3-405b", "--gpus", "8", "--seq-len", "8192"]
    code, out, _ = run(*argv, "--global-batch", "8", "--as-code")
    assert code == 1
    assert out.startswith("# does not fit: needs ")
    argv = ["plan", "--model", "gpt-22b", "--gpus", "7919", "--seq-len", "8191"]
    code, out, err = run(*argv, "--global-batch", "3", "--as-code")
    assert (code, out) == (1, "")
    assert "no configuration keeps all rules" in err


def test_code_and_json_exclude_each_other() -> None:
    argv = ["plan", *FITTING, "--gpus", "64", "--global-batch", "512", "--as-code", "--json"]
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "not allowed with argument" in err


def test_layers_to_recompute_are_listed_if_megatron_cannot_limit_them() -> None:
    argv = ["plan", "--model", "llama3-70b", "--gpus", "64", "--seq-len", "8192"]
    argv += ["--global-batch", "512", "--recompute", "selective", "--recompute-layers", "4"]
    code, out, _ = run(*argv, "--as-code")
    assert code == 0
    listed = [line for line in parts(out)[2].splitlines() if line.startswith("# not translated")]
    assert listed == ["# not translated: recompute_layers=4"]
