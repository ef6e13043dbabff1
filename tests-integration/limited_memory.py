"""Train a published model under a limit of the address space, and print each rank's memory.

``python tests-integration/limited_memory.py`` prints the table: one process without a limit, one
process with it, and four ranks with the limit each. Linux only.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
LIMIT = 1300  # MiB
# glibc reserves 64 MiB of the address space per thread, and keeps freed memory; not with these.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
STEPS = 2
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}


def publish(folder: Path) -> int:
    """Write the model in files of at most 20 MB, in a process of its own; return its parameters."""
    code = (
        "import json, sys; from transformers import AutoModelForCausalLM, LlamaConfig;"
        "model = AutoModelForCausalLM.from_config(LlamaConfig(**json.loads(sys.argv[2])));"
        "model.save_pretrained(sys.argv[1], max_shard_size='20MB');"
        "print(sum(p.numel() for p in model.parameters()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(SIZES)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def run(folder: Path, ranks: int, limit: int | None) -> tuple[list[dict[str, int]], str]:
    """Return what each rank printed, in order of rank, and the errors; limit in MiB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, str(folder), str(limit or 0)]
    environment = {**os.environ, **MALLOC}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    return sorted(found, key=lambda row: row["rank"]), done.stderr


def memory() -> dict[str, int]:
    """Return the peaks of this process's address space and of its resident memory, in MiB."""
    status = Path("/proc/self/status").read_text()
    sizes = {name: int(size) // 1024 for name, size in re.findall(r"(Vm\w+):\s+(\d+) kB", status)}
    return {"space": sizes["VmPeak"], "resident": sizes["VmHWM"]}


def train(folder: str, limit: int) -> None:
    """Load the model on this rank, train it, and print the rank's memory."""
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit * MEBIBYTE, limit * MEBIBYTE))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, LlamaForCausalLM

    from hp_fsdp import fully_shard, load_safetensors, parameters_on_meta

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    row: dict[str, Any] = {"rank": dist.get_rank(), "base": memory()["space"]}
    config = AutoConfig.from_pretrained(folder)
    with parameters_on_meta():
        model: Any = LlamaForCausalLM(config)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh)
    load_safetensors(model, folder)
    row["loading"] = memory()["space"]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(STEPS):
        ids = torch.randint(512, (1, 32))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    row |= {"training": memory()["space"], "resident": memory()["resident"]}
    os.write(1, f"{json.dumps(row)}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        number = publish(folder)
        print(f"{number / 1e6:.1f} million parameters, {16 * number / MEBIBYTE:.0f} MiB with")
        print("gradients and AdamW's states in float32; peaks of the address space in MiB")
        print("| ranks | limit | rank | base | loading | training |\n|---|---|---|---|---|---|")
        for ranks, limit in ((1, None), (1, LIMIT), (4, LIMIT)):
            rows, errors = run(folder, ranks, limit)
            start = f"| {ranks} | {limit or 'none'}"
            for row in rows:
                print(
                    start,
                    *(row[k] for k in ("rank", "base", "loading", "training")),
                    sep=" | ",
                    end=" |\n",
                )
            if not rows:
                found = re.findall(r"^.*(?:allocate|MemoryError).*$", errors, re.MULTILINE)
                reason = found[0].strip()[:80] if found else errors[-200:]
                print(f"{start} | 0 | fails: {reason} | | |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        main()
