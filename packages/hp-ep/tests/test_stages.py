"""Layers on pipeline stages: saved by one grid of stages and expert ranks, loaded by another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import ModuleDict

from hp_ep import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
    parallelize_experts,
)

from .reference import build_moe

GRIDS = [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)]
"""Degrees of pp, ep and etp."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _mesh(grid: tuple[int, ...]) -> DeviceMesh:
    names = ("pp", "ep", "etp")
    return cached((grid, names), lambda: init_device_mesh("cpu", grid, mesh_dim_names=names))


def _build(grid: tuple[int, int, int], seed: int) -> tuple[ModuleDict, torch.optim.Optimizer]:
    """Return this rank's stage: one of two layers, or both, under the names of the whole model."""
    mesh, (pp, ep, etp) = _mesh(grid), grid
    layers = {name: build_moe(seed + i, hidden=4) for i, name in enumerate(("first", "second"))}
    if pp == 2:
        name = list(layers)[mesh.get_local_rank("pp")]
        layers = {name: layers[name]}
    model = ModuleDict(layers)
    style: BaseExpertParallel = ExpertParallel() if etp == 1 else TensorParallel()
    over = mesh["ep"] if etp == 1 else mesh["etp"]
    if ep > 1 and etp > 1:
        style, over = ExpertTensorParallel(), mesh["ep", "etp"]
    parallelize_experts(model, over, style)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    for layer in model.values():
        (layer(torch.ones(3, 4, dtype=torch.float64)) ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _states(model: ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def _whole(states: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors, whole; those of another stage are not there."""
    values = {f"{kind}.{key}": v for kind, state in states.items() for key, v in state.items()}
    return {
        key: (v.full_tensor() if isinstance(v, DTensor) else v).clone()
        for key, v in values.items()
        if isinstance(v, Tensor)
    }


def _save_and_load(rank: int, folder: str, old: tuple[int, int, int]) -> list[Any]:
    model, optimizer = _build(old, seed=0)
    _step(model, optimizer)
    states = _states(model, optimizer)
    state_dict_saver.save(states, checkpoint_id=folder)
    loaded = []
    for grid in GRIDS:
        other, fresh = _build(grid, seed=5)
        _step(other, fresh)
        found = _states(other, fresh)
        state_dict_loader.load(found, checkpoint_id=folder)
        set_model_state_dict(other, found["model"])
        set_optimizer_state_dict(other, fresh, found["optimizer"], options=FLAT)
        loaded.append(_whole(_states(other, fresh)))
    names = [name for name in states["model"] if not name.endswith("_extra_state")]
    held = {k.removeprefix("state.").rpartition(".")[0] for k in states["optimizer"]}
    held = {name.removeprefix("param_groups.") for name in held}
    return [_whole(states), loaded, sorted(names) == sorted(held), names]


@pytest.mark.parametrize("old", GRIDS, ids=str)
def test_what_one_grid_of_stages_saves_every_grid_loads(
    ranks: Any, tmp_path: Path, old: tuple[int, int, int]
) -> None:
    results = ranks(4).run(_save_and_load, str(tmp_path), old)
    saved: dict[str, Tensor] = {}
    for mine, _, alike, _ in results:
        assert alike  # the optimizer's keys are the model's
        saved |= mine
    # Two layers: three weights; step and two moments of each weight.
    assert len(saved) == 2 * (3 + 3 * 3)
    for i, grid in enumerate(GRIDS):
        found: dict[str, Tensor] = {}
        for _, loaded, _, _ in results:
            assert len(loaded[i]) == len(saved) // grid[0]
            found |= loaded[i]
        assert found.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(found[name], value), name
    names = [r[3] for r in results]
    assert (names[0] == names[3]) == (old[0] == 1)  # each stage lists its own experts only
    # One chunk for each part of an expert weight, whoever else has a copy.
    metadata = FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    stored: Any = metadata["model.first.experts.gate_up_proj"]
    assert len(stored.chunks) == 4 // old[0]
