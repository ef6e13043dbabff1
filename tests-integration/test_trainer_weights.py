"""The trainer from published weights to exported ones, and from the export of a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train.config import TrainConfig
from train.data import Samples
from train.text import Source, read_corpus

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN, BATCH = 32, 8
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def published(folder: Path, kind: str, fields: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def train(*words: object, status: int = 0) -> str:
    command = [sys.executable, str(ROOT / "tools" / "train"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(out: Path) -> dict[int, float]:
    lines = (out / "log.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def loss_of(folder: Path, step: int) -> float:
    """Return the loss of a step's batch, of the model that one process loads from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    data = Samples(read_corpus(Source()).parts, SEQ_LEN, TrainConfig().seed)
    batch = data.batch((step - 1) * BATCH, BATCH)
    with torch.no_grad():
        logits = model(input_ids=batch.tokens, use_cache=False).logits
    flat, labels = logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(flat, labels))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize(
    ("kind", "fields", "degrees"),
    [
        ("qwen3_moe", EXPERTS, "--dp-shard 2 --cp 2 --ep 4"),
        pytest.param(
            "llama",
            {"tie_word_embeddings": True},
            "--dp-shard 2 --tp 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_from_published_weights_to_exported_ones(
    tmp_path: Path, kind: str, fields: dict[str, Any], degrees: str
) -> None:
    source = published(tmp_path / "source", kind, fields)
    run, export = tmp_path / "run", tmp_path / "export"
    words = ["--init-from", source, "--seq-len", SEQ_LEN, "--steps", 2, "--compare", 2]
    train(*words, *degrees.split(), "--out", run, "--export", export)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reference_max_rel_diff"] <= 1e-12
    assert loss_of(source, 1) != pytest.approx(loss_of(export, 1), rel=1e-3)  # it was trained
    # Another run continues on two ranks. Its first loss is that of the exported weights.
    other = tmp_path / "other"
    train("--resume", run, "--steps", 3, "--procs", 2, "--dp-shard", 2, "--out", other)
    assert losses(other)[3] == pytest.approx(loss_of(export, 3), rel=1e-12)
    # The checkpoint has the same weights, and its export trains nothing.
    again = tmp_path / "again"
    printed = train("--resume", run, "--export", again, "--out", tmp_path / "none")
    assert f"exported the weights to {again}" in printed
    assert not (tmp_path / "none").exists()
    kept = [folder / "generation_config.json" for folder in (source, export, other, again)]
    assert all(path.read_text() == kept[0].read_text() for path in kept)
    found, expected = tensors(again), tensors(export)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert tensors(source).keys() == expected.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}  # as it was trained


@pytest.mark.long
def test_the_built_in_model_starts_from_its_export(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["--seq-len", SEQ_LEN, "--steps", 1, "--procs", 2]
    train(*words, "--dp-shard", 2, "--ep", 2, "--out", first, "--export", tmp_path / "weights")
    train(*words, "--init-from", tmp_path / "weights", "--pp", 2, "--out", second, "--compare")
    assert losses(second)[1] < losses(first)[1]
    summary = json.loads((second / "summary.json").read_text())
    assert summary["reference_max_rel_diff"] <= 1e-12


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = published(tmp_path / "source", "qwen3_moe", EXPERTS)
    index = source / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    del found["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(found))
    words = ["--init-from", source, "--seq-len", SEQ_LEN, "--steps", 1]
    message = train(*words, "--procs", 2, "--dp-shard", 2, "--out", tmp_path / "run", status=2)
    assert message.count("train: error:") == 1
    assert "missing in the files: lm_head.weight" in message
    assert not (tmp_path / "run" / "log.jsonl").exists() or not losses(tmp_path / "run")
