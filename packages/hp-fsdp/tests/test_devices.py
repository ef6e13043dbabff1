"""Devices of parameters and groups, tested with CPU ranks in place of an accelerator."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pack_sequence

from hp_fsdp import _fully_shard, _schedule, fully_shard
from hp_fsdp._mesh import MeshInfo
from hp_fsdp._param import Owner, ShardedParameter
from hp_fsdp._precision import cast_floating, move_tensors

from .models import gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]


def resting_on_the_cpu(rank: int) -> list[str]:
    """Return the devices of a shard on the CPU, on a mesh of accelerators, and of its gradient."""
    info = MeshInfo.on(init_device_mesh("cuda", (2,)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        module: Any = nn.Linear(8, 8)
        owner = Owner(module, module._parameters, "weight")
        found = ShardedParameter(module.weight, [owner], "weight", info)
        found.build_sharded(torch.empty(4, 8))
        found.add_gradient(torch.empty(4, 8))
        given: Any = found.sharded
        return [str(x.device) for x in (given, found.part(given), given.grad)]


def test_shards_that_rest_on_the_cpu_are_there_for_their_optimizer(ranks: Ranks) -> None:
    for devices in ranks(2).run(resting_on_the_cpu):
        assert devices == ["cpu"] * 3


def test_buffers_that_modules_share_are_moved_together() -> None:
    table = torch.ones(4)
    modules = [nn.Module(), nn.Module()]
    for module in modules:
        module.register_buffer("table", table)
    _fully_shard._move_buffers([nn.ModuleList(modules)], torch.device("meta"))
    first, second = (module.get_buffer("table") for module in modules)
    assert first is second
    assert first.is_meta


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    given = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = move_tensors({"packed": [given]}, torch.device("meta"))["packed"][0]
    assert type(moved) is type(given)
    assert [x.device.type for x in moved] == ["meta", "cpu", "meta", "meta"]
    assert cast_floating(given, torch.float64).data.dtype == torch.float64
    assert cast_floating(given, torch.float32) is given


class Counting(nn.Module):
    """A layer, and frozen parameters of a dtype that not all backends support."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.counts = nn.Parameter(torch.arange(-6, 6, dtype=torch.int16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scale by all the numbers."""
        y: Tensor = self.layer(x)
        return y * self.counts.sum()


def counted(rank: int, options: dict[str, Any]) -> bool:
    torch.manual_seed(0)
    model: Any = Counting()
    expected = model(torch.ones(2, 4))
    fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
    found = model(torch.ones(2, 4))
    found.sum().backward()
    return torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_numbers_that_a_backend_may_not_know_travel_as_bytes(ranks: Ranks, layout: str) -> None:
    options = {"layout": layout, "reshard_after_forward": True}
    assert ranks(2).run(counted, options) == [True, True]


def made_again(rank: int) -> tuple[list[str], bool]:
    """Let group creation fail in the first forward. Return the errors and the next step."""

    def model_of() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(model: Any) -> dict[str, Tensor]:
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        return gradients(model)

    model, plain = make(model_of), make(model_of)
    for layer, kept in zip(model, (2, True), strict=True):
        fully_shard(layer, mesh_of((4,), ("fsdp",)), reshard_after_forward=kept)
    model[1](torch.ones(2, 4, dtype=torch.float64))
    model = fully_shard(model, mesh_of((4,), ("fsdp",)), reshard_after_forward=2)
    said = []
    with mock.patch.object(_schedule, "split_axis", side_effect=RuntimeError("no group")):
        for act in (lambda: step(model), model.reset, model.zero_grad):
            try:
                act()
            except RuntimeError as error:
                said.append(str(error))
    return said, worst(step(model), step(plain)) < 1e-12


def test_a_first_forward_that_made_no_groups_can_be_tried_again(ranks: Ranks) -> None:
    assert ranks(4).run(made_again) == [(["no group"], True)] * 4
