"""Training over process groups written in Python, as torch's own threaded test group."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool.threads import on_threads
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from hp_fsdp import fully_shard

from .models import Block, Gradients, gradients, make, worst


def input_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, 8, generator=generator, dtype=torch.float64)


def sharded(model: Any, shape: tuple[int, ...], **options: Any) -> Any:
    names = ("dp_replicate", "fsdp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:
        fully_shard(block, mesh, **options)
        block.set_allocate_memory_from_process_group_for_comm(True)  # the group has no such memory
    return fully_shard(model, mesh, **options)


def trained(model: Any, rank: int) -> list[Gradients]:
    """Return the gradients of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(input_of(rank)).pow(2).mean().backward()
        found.append(gradients(model))
        optimizer.step()
    return found


def blocks() -> Any:
    return make(lambda: torch.nn.Sequential(Block(), Block()))


def expected(world: int) -> list[Gradients]:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            (model(input_of(rank)).pow(2).mean() / world).backward()
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {}),
        ((2,), {"layout": "ragged"}),
        ((2,), {"grads": "accumulate"}),
        ((4,), {"reshard_after_forward": 2}),
        ((2, 2), {}),
    ],
)
def test_training_over_torchs_threaded_group(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    world = torch.Size(shape).numel()
    models = [blocks() for _ in range(world)]  # made here: threads share the random numbers

    def run(rank: int) -> list[Gradients]:
        return trained(sharded(models[rank], shape, **options), rank)

    for found in on_threads(world, run):
        for mine, theirs in zip(found, expected(world), strict=True):
            assert worst(mine, theirs) < 1e-12


def test_every_step_calls_the_methods_of_the_subclass() -> None:
    calls: Counter[str] = Counter()
    names = [
        name
        for pair in (
            ("all_gather_single", "_allgather_base"),
            ("reduce_scatter_single", "_reduce_scatter_base"),
        )
        for name in pair
        if name in vars(ProcessLocalGroup)
    ]

    def counted(name: str) -> Any:
        method = getattr(ProcessLocalGroup, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    models = [blocks() for _ in range(2)]

    def run(rank: int) -> None:
        model = sharded(models[rank], (2,), reshard_after_forward=False)
        for _ in range(2):
            model(input_of(rank)).sum().backward()

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(ProcessLocalGroup, name, counted(name)))
        on_threads(2, run)
    # Each of two ranks gathers and reduces two blocks in two steps. Checks gather a few bytes more.
    assert set(calls) == set(names)
    assert min(calls.values()) >= 8
