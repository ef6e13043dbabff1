"""State dicts: views of the shards, loaded in place, and whole ones on one rank."""

import copy
import io
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

from hp_fsdp import sharded_optimizer

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
    """Return facts about a state dict, and about one that was kept through a step."""
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
    after = model.state_dict()  # reshards the parameters that forward left unsharded
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


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(value: object) -> Any:
    return torch.load(io.BytesIO(saved(value)), weights_only=True)


def stepped(rank: int, layout: str, flat: bool = False, steps: int = 1) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), layout=layout)
    cls = torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.1}
    optimizer = (
        sharded_optimizer(cls, model, **options) if flat else cls(model.parameters(), **options)
    )
    for step in range(steps):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def copied_models(rank: int, layout: str, how: str) -> dict[str, bool]:
    """Copy a model's state, or save and load it, and give it to a fresh model."""
    model, _ = stepped(rank, layout)
    wanted = parameters(model)
    state = model.state_dict()
    found = copy.deepcopy(state) if how == "deepcopy" else loaded(state)
    facts = {
        "kinds": all(type(found[name]) is type(state[name]) for name in state),
        "values": all(torch.equal(full(found[name]), wanted[name]) for name in wanted),
        "placements": all(found[name].placements == state[name].placements for name in state),
    }
    loss_of(model, tokens(rank, 5)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    facts["own memory"] = all(torch.equal(full(found[name]), wanted[name]) for name in wanted)
    fresh, _ = stepped(rank, layout, steps=0)
    fresh.load_state_dict(found)
    facts["loads"] = all(torch.equal(full(p), wanted[n]) for n, p in fresh.named_parameters())
    return facts


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_a_state_dict_can_be_copied_and_saved(ranks: Ranks, layout: str, how: str) -> None:
    for facts in ranks(2).run(copied_models, layout, how):
        assert all(facts.values()), facts


def copied_optimizers(rank: int, layout: str, flat: bool, how: str) -> dict[str, bool]:
    """Copy an optimizer's state, or save and load it, and go on from it."""
    model, optimizer = stepped(rank, layout, flat)
    state = optimizer.state_dict()
    found = copy.deepcopy(state) if how == "deepcopy" else loaded(state)
    fresh, its = stepped(rank, layout, flat, steps=0)
    fresh.load_state_dict(model.state_dict())
    its.load_state_dict(found)
    for each, own in ((model, optimizer), (fresh, its)):
        loss_of(each, tokens(rank, 5)).backward()
        own.step()
    one, other = parameters(model), parameters(fresh)
    return {
        "numbers": list(found["state"]) == list(state["state"]),
        "next step": all(torch.equal(one[name], other[name]) for name in one),
    }


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("flat", [False, True])
def test_the_state_of_an_optimizer_can_be_copied_and_saved(
    ranks: Ranks, layout: str, flat: bool, how: str
) -> None:
    for facts in ranks(2).run(copied_optimizers, layout, flat, how):
        assert all(facts.values()), facts


def saved_alone(rank: int, layout: str, flat: bool) -> dict[str, tuple[int, int]]:
    """Return for each tensor the bytes of a file of it alone, and of one of its clone."""
    model, optimizer = stepped(rank, layout, flat)
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        found[name] = value.to_local()
        found[f"{name}, parameter"] = model.get_parameter(name).detach().to_local()
        found[f"{name}, moment"] = optimizer.state[model.get_parameter(name)]["exp_avg"].to_local()
    return {name: (len(saved(each)), len(saved(each.clone()))) for name, each in found.items()}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_shard_that_is_saved_alone_takes_the_room_of_its_own_bytes(
    ranks: Ranks, layout: str, flat: bool
) -> None:
    for found in ranks(2).run(saved_alone, layout, flat):
        for name, (alone, clone) in found.items():
            assert alone <= clone + 128, name


def sent(rank: int, layout: str, flat: bool, move: bool) -> Gradients:
    """Move shards to shared memory, as sending them to another process does; train on."""
    model, _ = stepped(rank, layout)
    for value in model.state_dict().values() if move else ():
        value.to_local().share_memory_()
    optimizer: Any = (
        sharded_optimizer(torch.optim.AdamW, model, lr=0.1)
        if flat
        else torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    for step in (7, 8):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, tokens(rank, 9)).backward()
    return {**parameters(model), **{f"{n}.grad": g for n, g in gradients(model).items()}}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("flat", [False, True])
def test_shards_in_shared_memory_still_train(ranks: Ranks, layout: str, flat: bool) -> None:
    expected = ranks(2).run(sent, layout, flat, False)
    for found, wanted in zip(ranks(2).run(sent, layout, flat, True), expected, strict=True):
        assert worst(found, wanted) < 1e-12
