"""State dicts: views of the shards, loaded in place, and whole ones on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .models import (
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def views(rank: int) -> dict[str, bool]:
    """Return what holds of a state dict, and of one that was kept through a step."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), reshard_after_forward=False)
    kept = model.state_dict()
    pointers = {name: value.to_local().data_ptr() for name, value in kept.items()}
    facts = {
        "keys": list(kept) == list(make(Net).state_dict()),
        "DTensors": all(isinstance(value, DTensor) for value in kept.values()),
        "no copy": all(
            p.to_local().data_ptr() == pointers[name] for name, p in model.named_parameters()
        ),
    }
    loss = loss_of(model, tokens(rank))
    after = model.state_dict()  # reshards what forward left
    same = parameters(make(Net))
    facts["after forward"] = all(torch.equal(full(after[name]), same[name]) for name in same)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    facts["follows"] = all(
        torch.equal(kept[name].to_local(), p.to_local()) for name, p in model.named_parameters()
    )
    new = {name: value + 1 for name, value in kept.items()}
    wanted = {name: full(value) for name, value in new.items()}
    model.load_state_dict(new)
    facts["loaded"] = all(torch.equal(full(p), wanted[n]) for n, p in model.named_parameters())
    facts["in place"] = all(
        p.to_local().data_ptr() == pointers[name] for name, p in model.named_parameters()
    )
    return facts


def test_a_state_dict_is_the_shards_themselves(ranks: Ranks) -> None:
    for facts in ranks(2).run(views):
        assert all(facts.values()), facts


def whole(rank: int, shape: tuple[int, ...]) -> tuple[Gradients, Gradients, Any]:
    """Gather a trained state to rank 0, and give it to an empty model of all ranks from there."""
    mesh = mesh_of(shape, NAMES[len(shape)])
    model: Any = shard(make(Net), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank)).backward()
    optimizer.step()
    trained = parameters(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    found = {name: value.clone() for name, value in state.items()}  # loading changes the dict
    with torch.device("meta"):
        other: Any = Net().double()
    shard(other, mesh)
    other.to_empty(device="cpu")
    its = torch.optim.AdamW(other.parameters(), lr=0.1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=options)
    set_optimizer_state_dict(other, its, moments, options=options)
    assert worst(parameters(other), trained) == 0
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full(its.state[q][key]), full(optimizer.state[p][key]))
    return found, trained, list(state)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_a_whole_state_goes_to_rank_0_and_from_there_to_all(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    results = ranks(torch.Size(shape).numel()).run(whole, shape)
    for rank, (state, trained, keys) in enumerate(results):
        assert keys == (list(make(Net).state_dict()) if rank == 0 else [])
        if rank == 0:
            assert not any(isinstance(value, DTensor) for value in state.values())
            assert worst(state, trained) == 0


def sent_by_rank_0(rank: int) -> Gradients:
    """Give a model without memory the values that rank 0 has, parameter by parameter."""
    mesh = mesh_of((2,), NAMES[1])
    with torch.device("meta"):
        model: Any = Net().double()
    shard(model, mesh)
    source = make(Net).state_dict()
    state = {}
    for name, p in model.named_parameters():
        value = source[name] if rank == 0 else torch.empty_like(source[name])
        dist.broadcast(value, 0)
        state[name] = distribute_tensor(value, p.device_mesh, p.placements)
    model.load_state_dict(state, assign=True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_rank_0_may_have_the_only_weights(ranks: Ranks) -> None:
    for found in ranks(2).run(sent_by_rank_0):
        assert worst(found, reference(2)) < 1e-12


def replicas(rank: int) -> tuple[float, Gradients]:
    """Let replicas differ, then copy the local shards of the first to the others."""
    mesh = mesh_of((2, 2), NAMES[2])
    model: Any = shard(make(Net), mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(rank // 2)
    differs = float(model.head.bias.to_local().sum())
    group = mesh.get_group("dp_replicate")
    for value in model.state_dict().values():
        dist.broadcast(value.to_local(), group=group, group_src=0)
    loss_of(model, tokens(rank)).backward()
    return differs, gradients(model)


def test_local_shards_may_be_broadcast_to_replicas(ranks: Ranks) -> None:
    results = ranks(4).run(replicas)
    assert results[0][0] != results[2][0]
    for _, found in results:
        assert worst(found, reference(4)) < 1e-12


def joint(rank: int, shape: tuple[int, ...]) -> tuple[bool, Gradients]:
    """Return the whole tensors of a state dict of FSDP, or HSDP, and tensor parallelism."""
    names = ("dp_replicate", "fsdp", "tp")[-len(shape) :]
    mesh = mesh_of(shape, names)
    model: Any = make(Net)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    shard(model, mesh[names[:-1]] if len(names) > 2 else mesh["fsdp"])
    state = model.state_dict()
    on = state["blocks.0.up.weight"].device_mesh.mesh_dim_names == names
    return on, {name: full(value) for name, value in state.items()}


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2)], ids=["fsdp-tp", "hsdp-tp"])
def test_state_on_joint_meshes_is_the_whole_models(ranks: Ranks, shape: tuple[int, ...]) -> None:
    for on, found in ranks(4).run(joint, shape):
        assert on
        assert worst(found, parameters(make(Net))) == 0
