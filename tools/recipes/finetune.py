"""Fine-tune a published mixture of experts in bfloat16 with fsdp x ep, resume, export.

torchrun --nproc-per-node 4 tools/recipes/finetune.py MODEL OUT 2 3
torchrun --nproc-per-node 2 tools/recipes/finetune.py MODEL OUT 1 6

MODEL is a folder of save_pretrained. The numbers are the degree ep and the last step. The second
command continues from the last checkpoint in OUT, under other degrees.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from hp_dtensor import clip_grad_norm_
from hp_ep.transformers import checkpoint_sources, parallelize_experts
from hp_fsdp import fully_shard, load_safetensors, parameters_on_meta, save_safetensors
from hp_mesh import ParallelDims


def load_batch(step, vocab):
    """Return the rows of a step. A resumed run continues with the rows of the next step."""
    ids = torch.randint(vocab, (4, 32), generator=torch.Generator().manual_seed(step % 2))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)}


def train(folder, out, ep, steps, compute=torch.bfloat16, full=torch.float32):
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=full)
    # The parallel part begins here.
    mesh = ParallelDims(ep=ep).build_mesh()  # the other ranks have other rows
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    precision = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=full)}
    parallelize_experts(model, mesh["ep"], token_axes=mesh["loss"])
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):  # a layer may be dense
            fully_shard(layer.mlp.experts, mesh["efsdp"], gradient_reduction="sum", **precision)
        fully_shard(layer, mesh["fsdp"], gradient_reduction="sum", **precision)
    fully_shard(model, mesh["fsdp"], gradient_reduction="sum", **precision)
    load_safetensors(model, folder, sources=checkpoint_sources(model))
    # The parallel part ends here.
    optimizer, done = torch.optim.AdamW(model.train().parameters(), lr=1e-3), 0
    saved = sorted(out.glob("step-*/.metadata"))  # a complete checkpoint has this file
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        done = int(saved[-1].parent.name.removeprefix("step-"))
    for step in range(done, steps):
        batch = load_batch(step, model.config.vocab_size)
        batch = {name: x.chunk(size)[rank] for name, x in batch.items()}  # parallel
        loss = model(**batch).loss
        loss.backward()
        dist.all_reduce(total := loss.detach(), group=mesh["loss"].get_group())  # parallel
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step, total.item(), norm.item()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=out / f"step-{steps:06}")
    export, sources = out / f"export-{steps}", checkpoint_sources(model)
    save_safetensors(model, export, sources=sources, dtype=compute)  # parallel
    if dist.get_rank() == 0:
        AutoConfig.from_pretrained(folder).save_pretrained(export)
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folder, out, ep, steps = sys.argv[1:]
    for step, loss, norm in train(Path(folder), Path(out), int(ep), int(steps)):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
    dist.destroy_process_group()
