"""Small models, and functions to build them, run them and compare them with one process."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from unittest import mock

import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor
from hp_fsdp import fully_shard
from hp_fsdp.layout import _offsets

TOKENS, WIDTH = 6, 8
Gradients = dict[str, Tensor]


class Block(nn.Module):
    """Parameters that are uneven, smaller than the group, gathered directly (``up``), or packed."""

    def __init__(self, hidden: int = 36) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.table = nn.Parameter(torch.randn(3, WIDTH))
        self.one = nn.Parameter(torch.randn(1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the output of the layers."""
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return cast(Tensor, x + y * self.one + x * self.table.sum(0))


class Net(nn.Module):
    """Embedding, blocks and a head; the root keeps embedding and head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


def make(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """Build the same module on every rank."""
    torch.manual_seed(0)
    return kind().to(dtype)


def tokens(replica: int, step: int = 0) -> Tensor:
    """Return the batch of one data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, 11, (TOKENS,), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cast(Tensor, model(batch).pow(2).mean())


def mesh_of(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return this rank process's mesh of that shape, made once."""
    key = ("mesh", tuple(shape), tuple(names))
    return cached(key, lambda: init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names)))


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Shard every block, then the root. Even parameters of 256 bytes are gathered directly."""
    table: Any = mock.patch.object(_offsets, "DIRECT_BYTES_OF", {})
    with mock.patch.object(_offsets, "DIRECT_BYTES", 256), table:
        for block in model.blocks:
            fully_shard(block, mesh, **options)
        return fully_shard(model, mesh, **options)


def full(tensor: Tensor) -> Tensor:
    """Return a copy of the unsharded tensor."""
    found = tensor.detach()
    whole: Any = found.full_tensor() if isinstance(found, DTensor | RaggedTensor) else found
    return cast(Tensor, whole.clone())


def gradients(model: nn.Module) -> Gradients:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def in_one_run(sharded: Iterable[Any]) -> bool:
    """Return whether this rank's shards are in one buffer, judged by the memory they span."""
    starts, ends, room = [], [], 0
    for p in sharded:
        local = p.to_local()
        rows = -(-p.shape[0] // p.device_mesh.size())
        room += rows * math.prod(p.shape[1:]) * p.element_size() + 16  # padded rows, and alignment
        if local.numel():
            starts.append(local.data_ptr())
            ends.append(local.data_ptr() + local.nbytes)
    return max(ends, default=0) - min(starts, default=0) <= room


def parameters(model: nn.Module) -> Gradients:
    return {name: full(p) for name, p in model.named_parameters()}


def reference(
    replicas: int,
    kind: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.float64,
    steps: Sequence[int] = (0,),
    divide: float | None = None,
) -> Gradients:
    """Return one process's gradients of the losses of all replicas, summed and divided."""
    model = make(kind, dtype)
    for step in steps:
        for replica in range(replicas):
            loss_of(model, tokens(replica, step)).backward()
    factor = float(replicas) if divide is None else divide
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad) / factor
        for name, p in model.named_parameters()
    }


def worst(found: Gradients, expected: Gradients) -> float:
    """Return the largest difference relative to each tensor's largest value, NaN if any is NaN.

    Names and shapes must agree.
    """
    if found.keys() != expected.keys():
        raise AssertionError(f"names differ: {sorted(found.keys() ^ expected.keys())}")
    shapes = {name: (found[name].shape, expected[name].shape) for name in expected}
    if any(one != other for one, other in shapes.values()):
        raise AssertionError(f"shapes differ: {shapes}")
    # torch's max passes NaN on; Python's drops it.
    differences = [
        ((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(1e-6))
        for name in expected
    ]
    return float(torch.stack([d.double() for d in differences]).max())
