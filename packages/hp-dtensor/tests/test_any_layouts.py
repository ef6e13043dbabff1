"""On one mesh of eight real ranks, between layouts of any kind: slices, and gradients as slices."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from hypothesis import Phase, given, settings
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    Layout,
    LayoutError,
    RaggedTensor,
    RecordingCollectives,
    Replicate,
    StridedShard,
    explain,
    plan_transfer,
    redistribute,
)

from .strategies import Case, free_layouts
from .test_between_meshes import cut

_package = plan_transfer.__module__.rpartition("._")[0]
_convert: Any = import_module(f"{_package}._convert")

Pools = Callable[[int], RankPool]
WORLD = 8
MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]
BATCH = 16  # cases that travel to the ranks together: the trip costs more than the work


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b", "c")[: len(shape)]
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def spelled(layout: Layout) -> Any:
    """Return torch's placements without the ragged axis, or None if torch has none."""
    if layout.ragged is not None:
        if any(isinstance(p, StridedShard) for p in layout.placements):
            return None
        axis = layout.ragged[0]
        others = [Replicate() if a == axis else p for a, p in enumerate(layout.placements)]
        layout = Layout(layout.mesh_shape, tuple(others))
    try:
        return _convert.to_torch(layout)
    except LayoutError:
        return None


@st.composite
def drawn(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(0, 17), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.sampled_from(MESHES))
    known = free_layouts(mesh, shape).filter(lambda layout: spelled(layout) is not None)
    return Case(draw(known), draw(known), shape)


class Moved(NamedTuple):
    """Results of one rank: local tensor, gradient, received bytes and predicted bytes."""

    local: Tensor
    grad: Tensor
    received: int
    predicted: int


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def laid(full: Tensor, layout: Layout, rank: int) -> Any:
    mesh, local = mesh_of(layout.mesh_shape), cut(full, layout, rank)
    if layout.ragged is not None:
        return RaggedTensor.from_local(local, mesh, layout.placements, shape=full.shape)
    stride = full.stride()
    return DTensor.from_local(local, mesh, spelled(layout), shape=full.shape, stride=stride)


def moved(rank: int, batch: list[Case]) -> list[Moved]:
    results = []
    for source, target, shape in batch:
        x = laid(whole(shape, 0), source, rank).detach().requires_grad_()
        order, collectives = target.shard_order, RecordingCollectives()
        y: Any = redistribute(x, target.placements, shard_order=order, collectives=collectives)
        received = sum(traffic.bytes for traffic in collectives.by_axis.values())
        predicted = explain(x, target.placements, shard_order=order).bytes_received
        local = y.to_local()
        local.backward(cut(whole(shape, 1), target, rank))
        results.append(Moved(local.detach(), x.grad.to_local(), received, predicted))
    return results


# A rank that fails leaves the others waiting: each smaller example would take the deadline.
@settings(deadline=None, max_examples=2, phases=[Phase.generate])
@given(batch=st.lists(drawn(), min_size=BATCH, max_size=BATCH))
def test_any_two_layouts_of_eight_ranks_give_slices_both_ways(
    ranks: Pools, batch: list[Case]
) -> None:
    """Uneven, empty, in blocks, ragged, with dims split in any order."""
    for rank, results in enumerate(ranks(WORLD).run(moved, batch)):
        for case, result in zip(batch, results, strict=True):
            assert torch.equal(result.local, cut(whole(case.shape, 0), case.target, rank)), case
            assert torch.equal(result.grad, cut(whole(case.shape, 1), case.source, rank)), case
            assert result.received == result.predicted


def test_the_cases_are_of_every_kind() -> None:
    """The draws reach blocks, ragged runs and dims that later axes split first."""
    seen = set()

    @settings(deadline=None, max_examples=300, database=None)
    @given(drawn())
    def look(case: Case) -> None:
        for layout in case[:2]:
            if layout.ragged is not None:
                seen.add("ragged")
            elif not layout.is_plain:
                seen.add("blocks")
            elif layout.shard_order:
                seen.add("order")
            if math.prod(layout.mesh_shape) == WORLD and not layout.is_even(case.shape):
                seen.add("uneven")

    look()
    assert seen == {"ragged", "blocks", "order", "uneven"}
