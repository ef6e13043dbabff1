"""A running average of a layer follows its migration when it is migrated too."""

from typing import Any

import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from hp_ep import ExpertParallel, MoE, Placement, migrate_experts

from .reference import build_moe

TURNED = Placement(num_ranks=2, num_experts=4, experts=(3, 1, 2, 0))


def _by_expert(layer: MoE, placement: Placement) -> Tensor:
    w1 = layer.experts.gate_up_proj
    assert isinstance(w1, DTensor)
    return w1.full_tensor().detach()[[slots[0] for slots in placement.slots_of]]


def _averaged(rank: int, moves: str) -> Tensor:
    mesh = cached("ep", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    home = Placement.contiguous(4, 2)
    layer = build_moe(0)
    ExpertParallel(placement=home).apply(layer, mesh)
    average = AveragedModel(layer, avg_fn=get_ema_avg_fn(0.5))
    average.update_parameters(layer)
    copied = average.module
    assert isinstance(copied, MoE)
    with torch.no_grad():
        for p in layer.experts.parameters():
            p.mul_(3)
    if moves:
        migrate_experts(layer, TURNED)
        if moves == "both":
            migrate_experts(copied, TURNED)
    average.update_parameters(layer)
    return _by_expert(copied, TURNED if moves else home)


def test_an_average_that_migrates_with_its_layer_is_the_one_without_migration(ranks: Any) -> None:
    still, both, one = (ranks(2).run(_averaged, moves) for moves in ("", "both", "layer alone"))
    for a, b, c in zip(still, both, one, strict=True):
        assert torch.equal(a, 2 * build_moe(0).experts.gate_up_proj)
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
