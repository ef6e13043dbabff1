"""Peak memory of a step above the memory between steps, compared with torch.

The test counts the allocations of torch's CPU allocator in a fake process group.
``benchmarks/bench_memory.py`` does the same with blocks of usual width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import TORCH_2_11
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_fsdp import _reduction, fully_shard

WIDTH, BLOCKS, RANKS = 128, 8, 8
PARAMETERS = 12  # of a block
# Bytes that torch does not send. A reduction has a flag for each parameter and 24 for the unit. The
# result of each block has them once. In the exact layout, the packed gradients of one block also
# have them for each rank, and each of two unsharded blocks has 16 bytes from each rank.
FLAGS = 4 * (PARAMETERS + 24)
EXTRA = (RANKS + BLOCKS) * FLAGS + 2 * RANKS * 16


class Block(nn.Module):
    """A transformer block's linear layers, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix channels twice."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q) * torch.tanh(k) * v)
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    if TORCH_2_11:  # a fake group writes no sums there, nor the flags by which ranks find mix-ups
        monkeypatch.setattr(_reduction, "flags_agree", lambda _: True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def levels(shard: Callable[[nn.Module], object], tokens: int) -> tuple[int, int]:
    """Return bytes of a third step above those before it: at the peak, and after ``zero_grad``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        shard(block)
    shard(model)
    batch = torch.randn(tokens, WIDTH)
    for _ in range(2):
        model(batch).pow(2).mean().backward()
        model.zero_grad()
    with profile(use_device=None, profile_memory=True) as report:
        model(batch).pow(2).mean().backward()
        model.zero_grad()
    events: Any = report.kineto_results
    level = highest = 0
    for event in sorted(events.events(), key=lambda event: event.start_ns()):
        level += event.nbytes() if event.name() == "[memory]" else 0
        highest = max(highest, level)
    return highest, level


@pytest.mark.parametrize(
    ("options", "few", "many", "extra"),
    [
        ({}, 1.0, 1.0, EXTRA),
        ({"layout": "ragged"}, 1.0, 1.0, BLOCKS * FLAGS),
        ({"grads": "accumulate"}, 0.87, 0.95, 0),
        ({"grads": "accumulate", "layout": "ragged"}, 0.87, 0.95, 0),
    ],
    ids=["copy", "ragged", "accumulate", "ragged, accumulate"],
)
def test_a_step_has_no_more_memory_at_once_than_under_torchs(
    mesh: DeviceMesh, options: dict[str, Any], few: float, many: float, extra: int
) -> None:
    for tokens, most in ((WIDTH // 32, few), (WIDTH // 2, many)):
        theirs, _ = levels(lambda module: fsdp.fully_shard(module, mesh=mesh), tokens)
        own, left = levels(
            lambda module: fully_shard(module, mesh, direct_bytes=0, **options), tokens
        )
        assert own <= most * theirs + extra
        assert left <= 0  # not even the memory of small gradients
