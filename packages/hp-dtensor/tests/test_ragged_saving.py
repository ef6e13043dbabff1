"""Ragged tensors in pickle, torch.save and asynchronous checkpoints."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import (
    Layout,
    LayoutError,
    RaggedShard,
    RaggedTensor,
    Replicate,
    Shard,
    StridedShard,
)

from .test_ragged import Ragged, part_of, ragged_of, whole

Pools = Callable[[int], RankPool]
CASES = [
    Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3)),
    Ragged(Layout((2, 2), (Replicate(), RaggedShard((0, 1), (7, 17)))), (4, 6)),
    Ragged(Layout((2, 2), (Shard(2), RaggedShard((0,), (3, 1)))), (4, 2, 6)),
]
LOAD = """
import sys, warnings
import torch
from {package} import {name}
for path in sys.argv[1:]:
    for x in torch.load(path, weights_only=True):
        kind = type(x).__name__, isinstance(x, torch.nn.Parameter), x.requires_grad
        print(*kind, list(x.shape), x.placements, (2 * x).to_local().flatten().tolist(), sep="|")
"""


def tensors(rank: int) -> list[Any]:
    """Return a tensor, a parameter, and one that is trained without being a parameter."""
    first, second, third = (ragged_of(whole(case.shape), case, rank) for case in CASES)
    frozen: Any = nn.Parameter(second, requires_grad=False)
    return [first, frozen, third.requires_grad_()]


def saved(rank: int, path: str) -> list[Any]:
    torch.save(tensors(rank), path + str(rank))
    return [x.placements for x in tensors(rank)]


def test_a_process_without_groups_loads_weights_only(ranks: Pools, tmp_path: Path) -> None:
    placements = ranks(4).run(saved, str(tmp_path / "rank"))
    script = LOAD.format(
        package=RaggedTensor.__module__.rpartition(".ragged")[0], name="RaggedTensor"
    )
    files = [str(tmp_path / f"rank{rank}") for rank in range(4)]
    call = subprocess.run(
        [sys.executable, "-c", script, *files], capture_output=True, text=True, check=True
    )
    lines = iter(call.stdout.splitlines())
    for rank in range(4):
        kinds = [(False, False), (True, False), (False, True)]
        for case, kind, where in zip(CASES, kinds, placements[rank], strict=True):
            values = (2 * part_of(whole(case.shape), case, rank)).flatten().tolist()
            found = next(lines)
            wanted = ["RaggedTensor", *kind, list(case.shape), where, values]
            assert found == "|".join(map(str, wanted))
    assert next(lines, None) is None


def strangers(rank: int, path: str) -> str:
    torch.save(tensors(rank), path + str(rank))
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(pickle.UnpicklingError) as info:
            torch.load(path + str(rank), weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)
    return str(info.value)


def test_a_load_that_does_not_know_the_class_names_its_module(ranks: Pools, tmp_path: Path) -> None:
    for text in ranks(4).run(strangers, str(tmp_path / "rank")):
        assert f"Unsupported global: GLOBAL {RaggedTensor.__module__}." in text


def copied(rank: int) -> list[tuple[bool, ...]]:
    """Return whether each copy has the same layout, type and values, and separate memory."""
    facts: list[tuple[bool, ...]] = []
    for case, x in zip(CASES, tensors(rank), strict=True):
        for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            values = y.detach().clone()
            with torch.no_grad():
                y.zero_()
            facts.append(
                (
                    y.placements == x.placements and y.device_mesh == x.device_mesh,
                    type(y) is type(x)
                    and isinstance(y, nn.Parameter) == isinstance(x, nn.Parameter),
                    y.requires_grad == x.requires_grad and y.shape == x.shape,
                    torch.equal(values.to_local(), part_of(whole(case.shape), case, rank)),
                    torch.equal(x.detach().to_local(), values.to_local()),
                )
            )
    return facts


def test_deep_copies_and_pickles_are_tensors_of_their_own(ranks: Pools) -> None:
    for facts in ranks(4).run(copied):
        assert facts == [(True,) * 5] * 6


def odd_frames(rank: int) -> tuple[bool, bool]:
    """Return whether a pickle keeps a shard order of the other axes."""
    mesh: DeviceMesh = cached(
        "order", lambda: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    )
    runs = RaggedShard((0,), (3,))

    def make(*frames: Any) -> RaggedTensor:
        return RaggedTensor.from_local(torch.ones(3, 2), mesh, (runs, *frames), shape=(3, 8))

    # Blocks of the later axis: it splits first.
    x = make(StridedShard(1, 2), Shard(1))
    y = pickle.loads(pickle.dumps(x))
    return y.placements == x.placements, y.placements == make(Shard(1), Shard(1)).placements


def test_a_pickle_keeps_the_order_in_which_axes_cut_the_frames(ranks: Pools) -> None:
    assert ranks(4).run(odd_frames) == [(True, False)] * 4


def staged(rank: int, path: str) -> list[Tensor]:
    """Change tensors during an asynchronous save. Return the loaded values."""
    state = {str(i): x.detach() for i, x in enumerate(tensors(rank))}
    future: Any = async_save(dict(state), checkpoint_id=path)
    for x in state.values():
        x.zero_()
    future.result()
    load(state, checkpoint_id=path)
    return [x.to_local() for x in state.values()]


def test_an_asynchronous_checkpoint_has_the_values_of_its_call(
    ranks: Pools, tmp_path: Path
) -> None:
    for rank, parts in enumerate(ranks(4).run(staged, str(tmp_path))):
        for case, part in zip(CASES, parts, strict=True):
            assert torch.equal(part, part_of(whole(case.shape), case, rank))


def gathered(rank: int, offload: bool) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 10, bias=False), nn.Linear(6, 4, bias=False))
    for layer, case in zip(model, CASES, strict=False):
        layer.weight = nn.Parameter(ragged_of(whole(case.shape), case, rank))
    model.register_buffer("steps", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    for parameter, case in zip(model.parameters(), CASES, strict=False):
        parameter.data.copy_(ragged_of(whole(case.shape), case, rank))
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state = get_model_state_dict(model, options=options)
    both = get_state_dict(model, optimizer, options=options)
    moments: Any = both[1].get("state", {})
    shards = get_model_state_dict(model)
    assert isinstance(shards["0.weight"], RaggedTensor)
    assert both[0].keys() == state.keys()
    return {
        **state,
        "moments": {name: moments[name]["exp_avg"] for name in moments},
        "kinds": {type(value) for value in state.values()},
    }


@pytest.mark.parametrize("offload", [False, True])
def test_a_full_state_dict_has_whole_tensors(ranks: Pools, offload: bool) -> None:
    for rank, state in enumerate(ranks(4).run(gathered, offload)):
        if offload and rank:
            assert state == {"moments": {}, "kinds": set()}
            continue
        assert state["kinds"] == {Tensor}
        assert int(state["steps"]) == 3
        for number, case in enumerate(CASES[:2]):
            name = f"{number}.weight"
            assert torch.equal(state[name], whole(case.shape))
            torch.testing.assert_close(state["moments"][name], 0.1 * whole(case.shape))


def model_of(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of ragged weights and a plain bias, and an optimizer that has stepped."""
    model = nn.Sequential(nn.Linear(3, 10), nn.Linear(6, 4, bias=False))
    for layer, case in zip(model, CASES, strict=False):
        layer.weight = nn.Parameter(ragged_of(whole(case.shape, seed), case, rank))
    bias: Any = model[0].bias
    nn.init.constant_(bias, float(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def loaded(rank: int, broadcast: bool) -> list[tuple[str, bool]]:
    """Load the full state of one model into another; return which tensors and steps are equal."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = model_of(rank, 1)
    weights, state = get_state_dict(model, optimizer, options=options)
    other, others = model_of(rank, 2)
    if broadcast:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        weights, state = (weights, state) if rank == 0 else ({}, {})
    # torch keeps references to whole tensors, so copy them.
    set_model_state_dict(other, copy.deepcopy(weights), options=options)
    set_optimizer_state_dict(other, others, copy.deepcopy(state), options=options)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad, b.grad = a.detach().clone(), a.detach().clone()
    found = same([*model.parameters()], [*other.parameters()], "loaded")
    for a, b in zip(optimizer.state.values(), others.state.values(), strict=True):
        found += same([a["exp_avg"], a["step"]], [b["exp_avg"], b["step"]], "state")
    for each in (optimizer, others):
        each.step()
    return found + same([*model.parameters()], [*other.parameters()], "after a step")


def same(first: list[Tensor], second: list[Tensor], when: str) -> list[tuple[str, bool]]:
    found = []
    for a, b in zip(first, second, strict=True):
        assert type(a) is type(b)
        if isinstance(a, RaggedTensor) and isinstance(b, RaggedTensor):
            assert a.placements == b.placements
            a, b = a.to_local(), b.to_local()
            assert b.untyped_storage().nbytes() == b.numel() * b.itemsize
        found.append((when, torch.equal(a, b)))
    return found


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_full_state_dict_loads_into_ragged_parameters_and_their_state(
    ranks: Pools, broadcast: bool
) -> None:
    for found in ranks(4).run(loaded, broadcast):
        assert len(found) == 3 + 6 + 3
        assert all(equal for _, equal in found), found


def wrongly_loaded(rank: int) -> str:
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = model_of(rank, 1)
    _, state = get_state_dict(model, optimizer, options=options)
    moments: Any = state["state"]
    moments["0.weight"]["exp_avg"] = torch.zeros(3, 10)
    with pytest.raises(LayoutError) as info:
        set_optimizer_state_dict(model, optimizer, state, options=options)
    return str(info.value)


def test_a_full_tensor_of_another_shape_raises_on_every_rank(ranks: Pools) -> None:
    first, *others = ranks(4).run(wrongly_loaded)
    assert others == [first] * 3
    assert "0.weight" in first
    assert "of shape [3, 10], which loads into a ragged tensor of shape [10, 3]" in first
