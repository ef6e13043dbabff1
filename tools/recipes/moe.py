"""Train a mixture of experts of transformers with fsdp x cp x ep and its auxiliary loss.

torchrun --nproc-per-node 4 tools/recipes/moe.py
"""

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hp_cp import Zigzag, count_labels
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import check_same, clip_grad_norm_
from hp_ep.transformers import parallelize_experts
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims

STEPS, ROWS, LENGTH, VOCAB = 3, 4, 48, 128


def build_model():
    torch.manual_seed(0)  # equal values on all ranks
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    config = Qwen3MoeConfig(vocab_size=VOCAB, **sizes, **heads, **experts)
    return Qwen3MoeForCausalLM(config).train()


def load_batch():
    """Return the rows of a step: the same in each step."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 20, -100)}


def train():
    model = build_model()
    # The parallel part begins here.
    mesh = ParallelDims(cp=2, ep=2).build_mesh()  # the other ranks have other rows
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    check_same(model, mesh["loss"])
    parallelize_experts(model, mesh["ep"], token_axes=mesh["loss"])  # before context_parallel
    context_parallel(model, mesh["cp"], layout=Zigzag())
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):  # a layer may be dense
            fully_shard(layer.mlp.experts, mesh["efsdp"], gradient_reduction="sum")
        fully_shard(layer, mesh["fsdp"], gradient_reduction="sum")
    fully_shard(model, mesh["fsdp"], gradient_reduction="sum")
    # The parallel part ends here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        batch = load_batch()
        # The parallel part begins here.
        rows = {name: x.chunk(size)[rank] for name, x in batch.items()}
        batch = shard_batch(rows, mesh["cp"], Zigzag())
        batch["num_items_in_batch"] = count_labels(batch, mesh["loss"])
        # The parallel part ends here.
        output = model(**batch)
        output.loss.backward()  # with the auxiliary loss
        losses = torch.stack([output.loss.detach(), output.aux_loss.detach()])
        dist.all_reduce(losses, group=mesh["loss"].get_group())  # parallel
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield *losses.tolist(), norm.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, (loss, auxiliary, norm) in enumerate(train()):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, auxiliary {auxiliary:.4f}, norm {norm:.4f}")
    dist.destroy_process_group()
