"""Devices of shards, and the choice between packed and direct communication."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import nn

from hp_dtensor import Axis, TorchCollectives
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
)
from hp_fsdp.layout import FlatBuffer, ShardSpec, _offsets, plan_exact

from .models import (
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]


def offloaded(rank: int, pinned: bool, ours: bool) -> tuple[Gradients, Gradients, set[str]]:
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net, torch.float32)
    wrap: Any = fully_shard if ours else torch.distributed.fsdp.fully_shard
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=pinned and ours)}
    for block in model.blocks:
        wrap(block, mesh=mesh, **options)
    wrap(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    devices = {p.to_local().device.type for p in model.parameters()}
    return found, parameters(model), devices


@pytest.mark.parametrize("pinned", [False, True])
def test_offloaded_shards_train_as_torchs(ranks: Ranks, pinned: bool) -> None:
    for (found, end, devices), (their_found, their_end, _) in zip(
        ranks(2).run(offloaded, pinned, True), ranks(2).run(offloaded, pinned, False), strict=True
    ):
        assert worst(found, their_found) == worst(end, their_end) == 0
        assert devices == {"cpu"}


def staged(rank: int, degree: int) -> list[bool]:
    """Gather from shards that rest in another dtype than they travel in, several times."""
    axis = Axis.of(mesh_of((degree,), ("fsdp",)))
    wholes = [torch.arange(12.0).view(6, 2) + 1, torch.arange(5.0)]
    specs = [ShardSpec(shape=tuple(whole.shape), dim=0, degree=degree) for whole in wholes]
    locals_ = [spec.part(whole, axis.index) for spec, whole in zip(specs, wholes, strict=True)]
    layout = FlatBuffer(
        locals_,
        plan_exact(specs, degree, 2, 0),
        axis,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    layout.free()
    seen = []
    for step in range(2):
        layout.shard.add_(step)
        work = layout.gather(axis, TorchCollectives())
        if work is not None:
            layout.wait(work)
        layout.finish_gather(work)
        seen += [
            torch.equal(full, (whole + step).bfloat16())
            for full, whole in zip(layout.unsharded, wholes, strict=True)
        ]
        layout.free()
        seen.append(all(full.untyped_storage().nbytes() == 0 for full in layout.unsharded))
    return seen


@pytest.mark.parametrize("degree", [1, 2])
def test_offloaded_shards_are_copied_to_the_device_of_the_gather(ranks: Ranks, degree: int) -> None:
    for seen in ranks(degree).run(staged, degree):
        assert seen == [True] * 6


def thresholds(rank: int, direct_bytes: float) -> tuple[Gradients, list[tuple[int, bool]]]:
    model: Any = make(Net)
    mesh = mesh_of((2,), ("fsdp",))
    for block in model.blocks:
        fully_shard(block, mesh, direct_bytes=direct_bytes)
    plan = fully_shard(model, mesh, direct_bytes=direct_bytes).plan_report()
    loss_of(model, tokens(rank)).backward()
    parts = [
        (p.rows_per_rank * math.prod(p.shape[1:]) * 8, p.direct)
        for group in plan.groups
        for p in group.parameters
    ]
    return gradients(model), parts


@pytest.mark.parametrize("direct_bytes", [0, 512, math.inf])
def test_the_threshold_decides_which_parameters_are_packed(
    ranks: Ranks, direct_bytes: float
) -> None:
    for found, parts in ranks(2).run(thresholds, direct_bytes):
        assert worst(found, reference(2)) < 1e-12
        for size, direct in parts:
            assert direct == (size % 16 == 0 and size >= direct_bytes)


def by_backend(rank: int) -> dict[str, tuple[bool, ...]]:
    """Return which weights of 64 and 128 KiB per rank are gathered directly."""

    def direct(**options: Any) -> tuple[bool, ...]:
        model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Linear(64, 1024, bias=False))
        sharded = fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
        return tuple(p.direct for p in sharded.plan_report().groups[0].parameters)

    found = {"as measured": direct()}
    with mock.patch.dict(_offsets.DIRECT_BYTES_OF, {"gloo": 2**17, "nccl": 0}):
        found |= {"by the table": direct(), "by the caller": direct(direct_bytes=math.inf)}
    return found


@pytest.mark.gloo
def test_the_threshold_is_that_of_the_backend_unless_it_is_given(ranks: Ranks) -> None:
    for found in ranks(2).run(by_backend):
        assert found["as measured"] == (True, True)
        assert found["by the table"] == (False, True)
        assert found["by the caller"] == (False, False)


def refused(rank: int) -> list[str]:
    said = []
    cases: list[dict[str, Any]] = [
        {"direct_bytes": -1},
        {"direct_bytes": math.nan},
        {"offload_policy": "cpu"},
        {"offload_policy": MixedPrecisionPolicy()},
        {"min_shard_numel": -1},
        {"min_shard_numel": 1.5},
    ]
    for options in cases:
        try:
            fully_shard(torch.nn.Linear(2, 2), mesh_of((2,), ("fsdp",)), **options)
        except ShardingError as error:
            said.append(str(error))
    return said


def test_wrong_numbers_and_policies_are_named(ranks: Ranks) -> None:
    for said in ranks(2).run(refused):
        assert [message.split(";")[0] for message in said] == [
            "direct_bytes is -1",
            "direct_bytes is nan",
            "offload_policy is 'cpu'",
            "offload_policy is of type MixedPrecisionPolicy",
            "min_shard_numel is -1",
            "min_shard_numel is 1.5",
        ]
