"""Experts saved under one split load under any other, optimizer and router biases with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_ep import (
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    Placement,
    TensorParallel,
    TopKRouter,
    migrate_experts,
)

SPLITS = [(1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 1, 2)]
"""Degrees of efsdp, ep and etp."""


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("efsdp", "ep", "etp")
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _build(
    split: tuple[int, int, int], seed: int, placement: Placement | None = None
) -> tuple[MoE, torch.optim.Optimizer]:
    mesh = _mesh(split)
    efsdp, ep, etp = split
    torch.manual_seed(seed)
    router = TopKRouter(4, 8, 2, score="sigmoid", bias_rate=0.1, dtype=torch.float64)
    layer = MoE(4, 4, 8, 2, router=router, dtype=torch.float64)
    options: dict[str, Any] = dict(token_axes=mesh["efsdp", "ep"], placement=placement)
    if etp == 1:
        ExpertParallel(**options).apply(layer, mesh["ep"])
    elif ep == 1:
        TensorParallel(**options).apply(layer, mesh["etp"])
    else:
        ExpertTensorParallel(**options).apply(layer, mesh["ep", "etp"])
    if efsdp > 1:
        fully_shard(layer.experts, mesh=mesh["efsdp"])
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)


def _train(layer: MoE, optimizer: torch.optim.Optimizer) -> None:
    x = torch.ones(3, 4, dtype=torch.float64) * torch.arange(1.0, 4.0)[:, None]
    for _ in range(2):
        optimizer.zero_grad()
        (layer(x) ** 2).sum().backward()
        optimizer.step()
    assert layer.router.bias is not None
    layer.router.bias.copy_(torch.arange(8.0))


def _values(layer: MoE, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all values, whole."""
    found: dict[str, Tensor] = dict(layer.state_dict())
    for name, p in layer.named_parameters():
        found |= {f"{name}.{k}": v for k, v in optimizer.state[p].items()}
    return {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for k, v in found.items()
    }


def _save_and_load(rank: int, folder: str, old: tuple[int, int, int]) -> list[bool]:
    layer, optimizer = _build(old, seed=0)
    _train(layer, optimizer)
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    state_dict_saver.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder
    )
    expected = _values(layer, optimizer)
    equal = []
    for new in SPLITS:
        other, fresh = _build(new, seed=1)
        model_state, optimizer_state = get_state_dict(other, fresh)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(
            other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        got = _values(other, fresh)
        equal.append(got.keys() == expected.keys())
        equal += [torch.equal(got[name], value) for name, value in expected.items()]
    return equal


@pytest.mark.parametrize("old", SPLITS)
def test_what_one_split_saves_every_split_loads(
    ranks: Any, tmp_path: Path, old: tuple[int, int, int]
) -> None:
    for equal in ranks(4).run(_save_and_load, str(tmp_path), old):
        # Three weights and the bias; step and two moments of each weight.
        assert equal == [True] * len(SPLITS) * (1 + 4 + 3 * 3)


def _placements(rank: int) -> list[list[str]]:
    found = []
    for ep, etp in ((2, 2), (1, 4), (4, 1)):
        experts = GroupedExperts(4, 4, 8, bias=True)
        ExpertTensorParallel().apply(experts, _mesh((1, ep, etp))["ep", "etp"])
        kinds = {type(p) for w in experts.parameters() for p in getattr(w, "placements", ())}
        found.append(sorted(kind.__name__ for kind in kinds))
    return found


def test_cut_experts_are_plain_shards_as_every_checkpoint_knows_them(ranks: Any) -> None:
    """A strided shard that stands alone is taken for one block of rows by torch's checkpoints."""
    assert ranks(4).run(_placements) == [[["Replicate", "Shard"]] * 3] * 4


def _old_names(rank: int) -> list[bool]:
    layer, fresh = (_build((1, 2, 2), seed=seed)[0] for seed in (0, 1))
    state = layer.experts.state_dict()
    gate, up = state["gate_up_proj"].unbind(1)
    fresh.experts.load_state_dict({"w1": gate, "w3": up, "w2": state["down_proj"]})
    alike = [
        torch.equal(fresh.experts.state_dict()[k].to_local(), state[k].to_local()) for k in state
    ]
    sharded = all(p.placements == (Shard(0), Shard(n)) for p, n in ((gate, 1), (up, 1)))
    return [*alike, sharded]


def test_old_names_of_sharded_weights_load_part_by_part(ranks: Any) -> None:
    assert ranks(4).run(_old_names) == [[True] * 3] * 4


def _whole_loaded(rank: int) -> list[bool]:
    torch.manual_seed(3)
    router = TopKRouter(4, 8, 2, score="sigmoid", bias_rate=0.1, dtype=torch.float64)
    state = MoE(4, 4, 8, 2, router=router, dtype=torch.float64).state_dict()
    options = StateDictOptions(full_state_dict=True)
    equal = []
    for split in SPLITS:
        layer, _ = _build(split, seed=1)
        set_model_state_dict(layer, {k: v.clone() for k, v in state.items()}, options=options)
        for name, value in get_model_state_dict(layer, options=options).items():
            equal.append(isinstance(value, Tensor) and torch.equal(value, state[name]))
    return equal


def test_whole_tensors_load_under_every_split(ranks: Any) -> None:
    for equal in ranks(4).run(_whole_loaded):
        assert equal == [True] * len(SPLITS) * 4


def _placed_and_back(rank: int) -> list[bool]:
    split = (1, 4, 1)
    home = Placement.contiguous(8, 4)
    moved = Placement(num_ranks=4, num_experts=8, experts=(7, 6, 5, 4, 3, 2, 1, 0))
    layer, optimizer = _build(split, 0, home)
    _train(layer, optimizer)
    before = _values(layer, optimizer)
    migrate_experts(layer, moved, optimizer)
    away = _values(layer, optimizer)
    migrate_experts(layer, home, optimizer)
    after = _values(layer, optimizer)
    differs = any(not torch.equal(away[k], before[k]) for k in before)
    return [differs, *(torch.equal(after[k], before[k]) for k in before)]


def test_experts_that_moved_come_home_bitwise(ranks: Any) -> None:
    for found in ranks(4).run(_placed_and_back):
        assert all(found)
