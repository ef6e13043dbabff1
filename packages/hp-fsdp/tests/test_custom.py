"""Gathers and reductions by objects of a user's that have torch's interfaces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)
from torch.distributed.tensor import Shard

from hp_fsdp import ShardingError, StateError, fully_shard

from .gathering import EightBits, Layers
from .libraries import OwnMemory
from .models import (
    WIDTH,
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def step(model: Any, rank: int) -> Gradients:
    for microbatch in range(2):
        loss_of(model, tokens(rank, microbatch)).backward()
    return gradients(model)


def modes() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "default": ((2,), {}),
        "given up": ((4,), {"reshard_after_forward": True}),
        "to fewer": ((4,), {"reshard_after_forward": 2}),
        "ragged": ((2,), {"layout": "ragged", "reshard_after_forward": True}),
        "replicas": ((2, 2), {"grads": "accumulate"}),
        "half": ((2,), {"mp_policy": half}),
        "one rank": ((1,), {}),
    }


def compared(rank: int, mode: str, waits: bool) -> tuple[Gradients, Gradients, list[int]]:
    """Return gradients of two microbatches with and without such objects, and who was called."""
    shape, options = modes()[mode]
    found, gather, scatter = [], OwnMemory(waits=waits), OwnMemory(waits=waits)
    for custom in (True, False):
        model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]), **options)
        for module in (model, *model.blocks) if custom else ():
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
        found.append(step(model, rank))
    ranks = [*{size for _, size in gather.calls}, *{size for _, size in scatter.calls}]
    return found[0], found[1], [len(scatter.calls), *sorted(set(ranks))]


@pytest.mark.parametrize(
    ("mode", "waits", "called"),
    [
        ("default", False, [8, 2]),
        ("default", True, [8, 2]),
        ("given up", False, [8, 4]),
        ("to fewer", False, [8, 2, 4]),
        ("ragged", False, [8, 2]),
        ("replicas", False, [8, 2]),
        ("half", False, [8, 2]),
        ("one rank", False, [0]),
    ],
)
def test_gradients_are_bit_equal_to_those_without_custom_collectives(
    ranks: Ranks, mode: str, waits: bool, called: list[int]
) -> None:
    world = torch.Size(modes()[mode][0]).numel()
    for found, expected, calls in ranks(world).run(compared, mode, waits):
        assert worst(found, expected) == 0
        assert calls == called


def of_torch(rank: int) -> Gradients:
    """Communicate by torch's own objects, in memory that a process group would register."""
    mesh = mesh_of((2,), NAMES[1])
    model: Any = shard(make(Net), mesh)
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_custom_all_gather(ProcessGroupAllocAllGather(mesh.get_group()))
    model.set_custom_reduce_scatter(ProcessGroupAllocReduceScatter(mesh.get_group()))
    model.set_allocate_memory_from_process_group_for_comm(False)
    return step(model, rank)


def test_torchs_own_objects_are_taken(ranks: Ranks) -> None:
    for found in ranks(2).run(of_torch):
        assert worst(found, reference(2, steps=(0, 1))) < 1e-12


def with_hooks(rank: int) -> tuple[Gradients, Gradients, int]:
    found, gather = [], OwnMemory()
    for custom in (True, False):
        torch.manual_seed(0)
        model: Any = fully_shard(Layers(EightBits), mesh_of((2,), NAMES[1]))
        if custom:
            model.set_custom_all_gather(gather)
        model(torch.ones(3, 8) * (rank + 1)).pow(2).mean().backward()
        found.append(gradients(model))
    return found[0], found[1], len(gather.calls)


def test_parameters_with_hooks_of_their_own_go_that_way_too(ranks: Ranks) -> None:
    for found, expected, calls in ranks(2).run(with_hooks):
        assert worst(found, expected) == 0
        assert calls == 2  # of bytes, and of plain biases


def in_slots(rank: int, slots: int) -> tuple[str, Gradients]:
    """Return the error of a second step, which prefetches, if a slot is reused too early."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    gather = OwnMemory(slots)
    for module in (model, *model.blocks):
        module.set_custom_all_gather(gather)
    with torch.inference_mode():
        model(tokens(rank))
    said = ""
    try:
        loss_of(model, tokens(rank)).backward()
    except StateError as error:
        said = str(error)
    return said, gradients(model)


def test_memory_may_be_used_again_but_not_while_it_is_in_use(ranks: Ranks) -> None:
    for said, found in ranks(2).run(in_slots, 2):
        assert not said
        assert worst(found, reference(2)) < 1e-12
    for said, _ in ranks(2).run(in_slots, 1):
        assert "allocate of a OwnMemory returned memory that a collective in flight uses" in said


@dataclass
class Info:
    """Attributes of torch's ``FSDPMeshInfo`` for a mesh with one axis."""

    mesh: DeviceMesh
    shard_mesh_dim: int = 0
    replicate_mesh_dim: int | None = None


@dataclass
class Placed:
    """Torch's ``ShardPlacementResult``."""

    mesh_info: Info
    placement: Shard | None = None


class Large(OwnMemory):
    """Returns all that it has."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        """Return too much."""
        return torch.empty(2**14, dtype=dtype)


def too_large(rank: int) -> list[str]:
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    said = []
    for _ in range(2):
        model.set_custom_all_gather(Large())
        with pytest.raises(StateError) as caught:
            model(tokens(rank))
        said.append(str(caught.value))
        model.reset()
    return said


def test_memory_of_another_size_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks(2).run(too_large):
        assert said[0] == said[1]
        assert "allocate of a Large returned 16384 elements of torch.float64 on cpu" in said[0]


def refused(rank: int) -> list[str]:
    mesh = mesh_of((2, 2), NAMES[2])
    model: Any = shard(make(Net), mesh)
    two: Any = nn.Linear(WIDTH, WIDTH)
    bias, other = two.bias, Placed(Info(mesh["dp_replicate"]))
    place: Any = lambda p: other if p is bias else None  # noqa: E731
    fully_shard(two, mesh["fsdp"], shard_placement_fn=place)
    calls: list[Callable[[], object]] = [
        lambda: model.set_custom_all_gather(None),
        lambda: model.set_custom_reduce_scatter(OwnMemory),
        lambda: two.set_custom_all_gather(OwnMemory()),
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
    ]
    model.set_custom_all_gather(OwnMemory())
    said = []
    for call in calls:
        with pytest.raises(ShardingError) as caught:
            call()
        said.append(f"{[each.__name__ for each in type(caught.value).__mro__]} {caught.value}")
    return said


def test_invalid_custom_collectives_raise_with_their_name(ranks: Ranks) -> None:
    for said in ranks(4).run(refused):
        kinds = ["TypeError", "TypeError", "ValueError", "AssertionError"]
        assert [kind in text for kind, text in zip(kinds, said, strict=True)] == [True] * 4
        assert "comm is None; allowed: an object with allocate(" in said[0]
        assert "(output_tensor, input_tensor, group, op, async_op)" in said[1]
        assert "of ranks" in said[2]
        assert "communicates with a OwnMemory" in said[3]
