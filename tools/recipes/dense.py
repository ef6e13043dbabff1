"""Train a dense model of transformers with fsdp x cp, packed documents and microbatches.

torchrun --nproc-per-node 4 tools/recipes/dense.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hp_cp import Zigzag, count_labels
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import check_same, clip_grad_norm_
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims

STEPS, MICROBATCHES, ROWS, LENGTH, VOCAB = 3, 2, 4, 48, 128


def build_model():
    torch.manual_seed(0)  # equal values on all ranks
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).train()


def load_microbatch(seed):
    """Return rows of two packed documents: the position ids of each document start at 0."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    ends = [LENGTH // 4 + 5 * row for row in range(ROWS)]
    positions = [torch.cat([torch.arange(end), torch.arange(LENGTH - end)]) for end in ends]
    labels = ids.masked_fill(ids < 20 * (seed + 1), -100)  # these tokens have no label
    return {"input_ids": ids, "position_ids": torch.stack(positions), "labels": labels}


def train():
    model = build_model()
    model.activation_checkpointing_enable()
    # The parallel part begins here.
    mesh = ParallelDims(cp=2).build_mesh()  # the other ranks have other rows
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    check_same(model, mesh["loss"])
    context_parallel(model, mesh["cp"], layout=Zigzag())
    for layer in model.model.layers:
        fully_shard(layer, mesh["fsdp"], gradient_reduction="sum")
    fully_shard(model, mesh["fsdp"], gradient_reduction="sum")
    # The parallel part ends here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        parts = [load_microbatch(i) for i in range(MICROBATCHES)]  # the same in each step
        # The parallel part begins here.
        parts = [{name: x.chunk(size)[rank] for name, x in part.items()} for part in parts]
        parts = [shard_batch(part, mesh["cp"], Zigzag()) for part in parts]
        count = count_labels(parts, mesh["loss"])
        # The parallel part ends here.
        total = torch.zeros(())
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == MICROBATCHES - 1)  # parallel
            loss = model(**{**part, "num_items_in_batch": count}).loss
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=mesh["loss"].get_group())  # parallel
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item(), norm.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, (loss, norm) in enumerate(train()):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
    dist.destroy_process_group()
