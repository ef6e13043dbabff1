"""What is ordered between the side stream of counts, the computation and NCCL's stream."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool, cached
from rank_pool.streams import Device, Event, Nccl, Stream, as_cuda
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import Axis, TorchCollectives
from hp_ep import GroupedExperts, MoE
from hp_ep.dispatch import _exchange

from .dispatching import make_dispatcher
from .reference import build_moe, grads

Ranks = Callable[[int], RankPool]
Break = Callable[[], Any]
SIDE = "counts"


def meshes(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def layer_of(rank: int, name: str, collectives: Any, chunks: int) -> MoE:
    layer = build_moe(7, shared=1, balance=0.2)
    layer.dispatcher = make_dispatcher(name, meshes, 2, 4, collectives, validate=False)
    whole = list(layer.experts.parameters())
    layer.experts = GroupedExperts(4, whole[1].shape[2], 2, dtype=torch.float64)
    with torch.no_grad():
        for mine, part in zip(layer.experts.parameters(), whole, strict=True):
            mine.copy_(part.chunk(2)[rank])
    layer.num_chunks = chunks
    return layer


def step(layer: MoE, rank: int) -> list[Tensor]:
    found = []
    for i in range(2):
        generator = torch.Generator().manual_seed(10 * i + rank)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        (y**2).sum().backward()
        found += [y.detach(), *grads([x])]
    return found + grads(list(layer.parameters()))


def simulated(
    rank: int, name: str, chunks: int = 1, broken: Break | None = None
) -> tuple[float, list[str], set[str]]:
    """Return the difference to plain steps, the races, and the streams that worked."""
    expected = step(layer_of(rank, name, TorchCollectives(), chunks), rank)
    device = Device(SIDE)
    layer = layer_of(rank, name, Nccl(device, TorchCollectives()), chunks)
    with as_cuda(device, SIDE):
        side = _exchange._CudaSide(0)
        with mock.patch.object(_exchange, "side_of", return_value=side):
            if broken is None:
                found = step(layer, rank)
            else:
                with broken():
                    found = step(layer, rank)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return worst, device.races, {stream for stream, _ in device.log}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("AllToAll", 1), ("AllToAll", 3), ("Dedup", 2), ("Hierarchical", 1), ("Padded", 2)],
)
def test_a_step_leaves_nothing_unordered(ranks: Ranks, name: str, chunks: int) -> None:
    for worst, races, streams in ranks(2).run(simulated, name, chunks):
        assert worst == 0
        assert races == []
        assert (SIDE in streams) == (name != "Padded")


def no_wait_for_the_computation() -> Any:
    """Let the side stream read counts that are not yet computed."""
    return mock.patch.object(Stream, "wait_stream", return_value=None)


def no_wait_for_the_side() -> Any:
    """Let the computation go on without the numbers that the side stream received."""
    wait = Stream.wait_event

    def only_on_sides(self: Stream, event: Event) -> None:
        if self.name != "compute" or event.clock["compute"] == 0:
            wait(self, event)

    return mock.patch.object(Stream, "wait_event", only_on_sides)


def no_synchronization() -> Any:
    """Let the host read counts that are not yet there."""
    return mock.patch.object(Event, "synchronize", return_value=None)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (no_wait_for_the_computation, "cat on counts beside"),
        (no_wait_for_the_side, "on compute beside"),
        (no_synchronization, "tolist on host beside copy_ on counts"),
    ],
)
def test_a_planted_mistake_is_found(ranks: Ranks, broken: Break, words: str) -> None:
    found = [races for _, races, _ in ranks(2).run(simulated, "AllToAll", 3, broken)]
    assert any(words in race for races in found for race in races), found


def reused(rank: int, adopts: bool) -> list[str]:
    """Drop rows that came by the side stream, where the next rows may come to the same memory."""
    axis, device = Axis.of(meshes((2,), ("ep",))), Device(SIDE)
    carrier: Any = Nccl(device, TorchCollectives())
    with as_cuda(device, SIDE):
        side = _exchange._CudaSide(0)
        if not adopts:
            side.adopt = lambda tensor: None  # type: ignore[method-assign]
        first, second = (
            _exchange.AsyncAllToAll(torch.ones(4, 3), axis, carrier, side=side) for _ in range(2)
        )
        rows = first.start(None, None).wait()
        total = rows.sum()
        del first, rows
        total += second.start(None, None).wait().sum()
    assert total == 24
    return device.races


def test_memory_that_is_reused_too_early_is_found(ranks: Ranks) -> None:
    assert ranks(2).run(reused, True) == [[], []]
    for races in ranks(2).run(reused, False):
        assert f"{SIDE} lends memory again in which compute has sum" in races
