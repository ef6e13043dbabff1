"""Train LoRA adapters of peft on a model of transformers with fsdp x cp.

torchrun --nproc-per-node 4 tools/recipes/lora.py
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hp_cp import Zigzag, count_labels
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import check_same, clip_grad_norm_
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims

STEPS, ROWS, LENGTH, VOCAB = 3, 4, 48, 128


def build_model():
    torch.manual_seed(0)  # equal values on all ranks
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, **sizes)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters).train()


def load_batch():
    """Return the rows of a step: the same in each step."""
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 20, -100)}


def train():
    model = build_model()
    # The parallel part begins here.
    mesh = ParallelDims(cp=2).build_mesh()  # the other ranks have other rows
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    check_same(model, mesh["loss"])
    llama = context_parallel(model.get_base_model(), mesh["cp"], layout=Zigzag())
    for layer in llama.model.layers:
        fully_shard(layer, mesh["fsdp"], gradient_reduction="sum")
    fully_shard(model, mesh["fsdp"], gradient_reduction="sum")
    # The parallel part ends here.
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-1)
    for _ in range(STEPS):
        batch = load_batch()
        # The parallel part begins here.
        rows = {name: x.chunk(size)[rank] for name, x in batch.items()}
        batch = shard_batch(rows, mesh["cp"], Zigzag())
        batch["num_items_in_batch"] = count_labels(batch, mesh["loss"])
        # The parallel part ends here.
        loss = model(**batch).loss
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total, group=mesh["loss"].get_group())  # parallel
        norm = clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item(), norm.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, (loss, norm) in enumerate(train()):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
    dist.destroy_process_group()
