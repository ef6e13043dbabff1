"""Train 20 steps on a GPU and on a CPU with the trainer, and compare the losses.

    python tools/gpu_train.py                 on one GPU
    python tools/gpu_train.py --device cpu    the same code on CPUs

The models are the trainer's built-in mixture of experts and a tiny Qwen3-MoE of transformers, in
float32. With bfloat16 there are tokens/s and MFU, the share of the GPU's peak.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_rows import Result, Rows, World, main

TRAINER = Path(__file__).resolve().parent / "train"
BOUND = 1e-3  # of float32 losses after some steps: routing and AdamW enlarge what rounding changes
MODELS: dict[str, tuple[str, ...]] = {"built-in": (), "Qwen3-MoE": ("--model", "qwen3-moe-tiny")}
LARGE = ("--seq-len", "1024", "--batch-size", "32")


def run(words: Sequence[str]) -> tuple[list[float], dict[str, Any]]:
    """Run the trainer in a process of its own; return the losses and the summary."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, str(TRAINER), "--out", str(out), *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            lines = (ended.stderr or ended.stdout).strip().splitlines()
            raise RuntimeError(f"exit status {ended.returncode}: {lines[-1] if lines else ''}")
        steps = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
        losses = [step["loss"] for step in steps]
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return losses, summary


def losses(model: str, device: str, steps: int) -> Result:
    """Compare the losses of two runs, one of them on the CPU."""
    words = ("--steps", str(steps), "--dtype", "float32", "--procs", "1", *MODELS[model])
    found, summary = run((*words, "--device", device))
    right, _ = run((*words, "--device", "cpu", "--reference"))
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, right, strict=True))
    said = f"{len(found)} losses within {worst:.1e}, {summary['tokens_per_second']:,.0f} tokens/s"
    return Result(said, status="passed" if worst < BOUND else "failed")


def speed(model: str, device: str, steps: int, size: Sequence[str]) -> Result:
    """Report tokens/s and MFU in bfloat16."""
    words = ("--steps", str(steps), "--dtype", "bfloat16", "--procs", "1", *MODELS[model], *size)
    _, summary = run((*words, "--device", device))
    mfu = summary["mfu"]
    said = f"{summary['tokens_per_second']:,.0f} tokens/s"
    return Result(said if mfu is None else f"{said}, MFU {mfu:.2%}")


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows."""
    steps = 20 if device.type == "cuda" else 2
    for model in MODELS if device.type == "cuda" else ("built-in",):
        rows.add(f"{model}, losses", losses, model, device.type, steps)
        if large:
            rows.add(f"{model}, bfloat16", speed, model, device.type, steps, LARGE)


if __name__ == "__main__":
    sys.exit(main("trainer", __doc__, lambda _: [World("1 process", "")], checks))
