"""Train your own PyTorch transformer with tp x fsdp x cp.

torchrun --nproc-per-node 8 tools/recipes/own_model.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hp_cp import ContextParallel, Zigzag, count_labels, position_ids, shard_sequence, shift_labels
from hp_dtensor import check_same, clip_grad_norm_
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims


class Core(nn.Module):
    def forward(self, q, k, v, is_causal):  # [rows, heads, positions, head size]
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.core = nn.LayerNorm(32), Core()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 8)).transpose(1, 2)
        return x + self.out(self.core(*heads.unbind(-2), is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, 32), nn.Embedding(48, 32)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(32, 128, bias=False)

    def forward(self, tokens, positions):
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))


def train():
    torch.manual_seed(0)  # equal initial values and equal tokens on all ranks
    model, tokens = Transformer(), torch.randint(128, (4, 48))
    # The parallel part begins here.
    mesh = ParallelDims(tp=2, cp=2).build_mesh()  # the other ranks have other rows
    check_same(model, mesh["loss", "tp"])
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, layout=Zigzag())
    for block in model.blocks:
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        parallelize_module(block.core, mesh["cp"], style)
        fully_shard(block, mesh["fsdp"], gradient_reduction="sum")
    fully_shard(model, mesh["fsdp"], gradient_reduction="sum")
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    rows = [x.chunk(size)[rank] for x in (tokens, shift_labels(tokens))]
    inputs, labels = shard_sequence(rows, mesh["cp"], Zigzag(), seq_dim=1)
    positions = position_ids(mesh["cp"], Zigzag(), seq_len=48)
    count = count_labels(labels, mesh["loss"])
    # The parallel part ends here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits = model(inputs, positions)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        dist.all_reduce(total := loss.detach(), group=mesh["loss"].get_group())  # parallel
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
