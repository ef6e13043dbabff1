"""`local_boxes`: the boxes of all ranks make up the tensor, and first replicas write it once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as TheirShard

from hp_dtensor import (
    LayoutError,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from hp_dtensor.checkpoint import local_boxes

from .test_checkpoint_layouts import mesh_of
from .test_ragged import whole

Pools = Callable[[int], RankPool]
SHAPE = (10, 6)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "strided": ((2, 2), (StridedShard(0, 2), Shard(0))),
    "both dims": ((2, 2), (Shard(0), Shard(1))),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
    "uneven rows": ((4,), (Shard(0),)),
    "empty shard": ((4,), (Shard(1),)),
    "ragged rows": ((4,), (RaggedShard((0,), (1, 0, 7, 2)),)),
    "ragged elements": ((2, 2), (Replicate(), RaggedShard((0, 1), (7, 53)))),
    "ragged in columns": ((2, 2), (RaggedShard((0, 1), (5, 25)), Shard(1))),
}


def held(rank: int, name: str) -> tuple[list[tuple[Any, Tensor]], bool]:
    shape, placements = LAYOUTS[name]
    data = whole(SHAPE)
    tensor = distribute_tensor(data, mesh_of(shape), placements, src_data_rank=None)
    found = local_boxes(tensor)
    return [(box, view.clone()) for box, view in found.boxes], found.is_first_replica


def written(rank: int, name: str) -> Tensor:
    """Write global indices into every box, and return the tensor gathered."""
    shape, placements = LAYOUTS[name]
    tensor = distribute_tensor(whole(SHAPE), mesh_of(shape), placements, src_data_rank=None)
    numbers = torch.arange(60, dtype=torch.double).view(SHAPE)
    for box, view in local_boxes(tensor).boxes:
        view.copy_(numbers[tuple(slice(*interval) for interval in box)])
    result: Tensor = tensor.full_tensor()
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_first_replicas_write_each_element_once(ranks: Pools, name: str) -> None:
    expected = whole(SHAPE)
    count = torch.zeros(SHAPE)
    for boxes, is_first in ranks(4).run(held, name):
        for box, data in boxes:
            place = tuple(slice(*interval) for interval in box)
            assert torch.equal(data, expected[place])
            assert data.numel() > 0
            count[place] += is_first
    assert torch.equal(count, torch.ones(SHAPE))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_views_share_memory_with_the_tensor(ranks: Pools, name: str) -> None:
    numbers = torch.arange(60, dtype=torch.double).view(SHAPE)
    for found in ranks(4).run(written, name):
        assert torch.equal(found, numbers)


def refused(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(LayoutError) as caught:
        local_boxes(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    return str(caught.value)


def outside(rank: int) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    inside = local_boxes(DTensor.from_local(torch.ones(2), mesh, [TheirShard(0)]))
    return len(inside.boxes), inside.is_first_replica


def partial_on_one_rank(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [TheirShard(0), Partial()])
    return [box for box, _ in local_boxes(tensor).boxes]


def test_partial_values_of_one_rank_are_final(ranks: Pools) -> None:
    expected = [[((0, 2), (0, 3))], [((2, 4), (0, 3))]]
    assert ranks(2).run(partial_on_one_rank) == expected


def test_partial_values_are_refused(ranks: Pools) -> None:
    for message in ranks(2).run(refused):
        assert "Partial" in message
        assert "redistribute" in message


def test_each_sub_mesh_has_a_first_replica(ranks: Pools) -> None:
    assert ranks(2).run(outside) == [(1, True), (1, True)]


def test_a_plain_tensor_is_one_box() -> None:
    tensor = torch.ones(2, 3)
    (found,) = local_boxes(tensor).boxes
    assert found[0] == ((0, 2), (0, 3))
    assert found[1].data_ptr() == tensor.data_ptr()
    assert local_boxes(torch.ones(0, 3)).boxes == ()
    ((box, view),) = local_boxes(torch.tensor(2.0)).boxes
    assert (box, view.shape) == ((), torch.Size([]))
