"""torch's `fully_shard` and this package's, with models that a test can build with both."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn

from hp_fsdp import fully_shard

from .models import WIDTH, Net, make, mesh_of

# The package under the name by which it is imported. Vendored copies have other names.
LIBRARIES: dict[str, Any] = {
    "torch": theirs,
    "ours": sys.modules[fully_shard.__module__.rpartition(".")[0]],
}
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def mesh(*shape: int) -> Any:
    return mesh_of(shape, NAMES[len(shape)])


def wrap(by: str, module: Any, *shape: int, **options: Any) -> Any:
    return LIBRARIES[by].fully_shard(module, mesh=mesh(*shape), **options)


def net(by: str, *shape: int, kind: Any = Net, **options: Any) -> Any:
    """Return a model in which each block is a unit, and so is the root."""
    model = make(kind)
    for block in model.blocks:
        wrap(by, block, *shape, **options)
    return wrap(by, model, *shape, **options)


def input_of(rank: int, step: int = 0, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


class Mlps(nn.Module):
    """A layer that belongs to the root, and three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class OwnMemory:
    """Custom collectives that allocate their own memory and record each call."""

    def __init__(self, slots: int = 0, waits: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []  # elements sent, ranks
        self._memory = [torch.empty(2**14, dtype=torch.uint8) for _ in range(slots)]
        self._next = 0
        self._waits = waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory, or the memory of the next slot."""
        if not self._memory:
            return torch.full(tuple(size), -7, dtype=dtype, device=device)
        self._next += 1
        flat = self._memory[self._next % len(self._memory)]
        return flat[: torch.Size(size).numel() * dtype.itemsize].view(dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gather, or with ``op`` reduce and scatter."""
        self.calls.append((input_tensor.numel(), group.size()))
        use: Any = dist
        if op is not None:
            work = use.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        else:
            work = use.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        return work.wait() and None if self._waits else work
