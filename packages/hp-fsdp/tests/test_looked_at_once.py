"""Checks that run once for the parameters of all units find changes in each unit."""

import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from hp_fsdp import StateError, fully_shard, sharded_optimizer
from hp_fsdp._groups import ParameterGroups
from hp_fsdp._unit import Unit

from .models import Gradients, full, gradients, mesh_of, worst

Ranks = Callable[[int], RankPool]


def layers(bias: bool = True) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=bias) for _ in range(3))).double()


def sharded(model: Any, **options: Any) -> Any:
    for layer in model:
        fully_shard(layer, mesh_of((2,), ("fsdp",)), **options)
    return fully_shard(model, mesh_of((2,), ("fsdp",)), **options)


def features() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def send(module: nn.Module) -> None:
    """Move the shards to shared memory, as sending them to another process does."""
    for parameter in module.parameters():
        local: Any = parameter
        ForkingPickler.dumps(local.to_local().detach())


def moved_under_a_graph(rank: int) -> tuple[Gradients, Gradients]:
    """Move a unit's shards before its backward, and run another unit meanwhile."""
    found = []
    for model in (sharded(layers()), layers()):
        model(features()).sum().backward()
        model.zero_grad()
        first = model(features()).sum()
        if model.__class__ is not nn.Sequential:
            send(model[0])
        (first + model[2](features()).sum()).backward()
        found.append({n: full(p.grad) for n, p in model.named_parameters()})
    return found[0], found[1]


def test_a_forward_of_other_units_does_not_reallocate_a_unit_in_a_graph(ranks: Ranks) -> None:
    for found, expected in ranks(2).run(moved_under_a_graph):
        assert worst(found, expected) < 1e-12


def another_units_fault(rank: int) -> bool:
    model = sharded(layers())
    model[1].weight = None
    model[0](features()).sum().backward()
    return model[0].weight.grad is not None


def test_a_unit_runs_alone_if_another_unit_is_invalid(ranks: Ranks) -> None:
    assert ranks(2).run(another_units_fault) == [True, True]


def moved_behind_an_optimizer(rank: int) -> str:
    """Create an optimizer with views of the flat shards, then move a unit's only parameter."""
    model = sharded(layers(bias=False))
    optimizer = sharded_optimizer(torch.optim.SGD, model, lr=0.1)
    send(model)
    model(features()).sum().backward()
    with pytest.raises(StateError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_sees_that_a_shard_has_moved(ranks: Ranks) -> None:
    for said in ranks(2).run(moved_behind_an_optimizer):
        assert "create it again" in said


def thawed_under_way(rank: int, interrupted: bool) -> list[bool]:
    """Unfreeze a unit while its gather is under way, or before a forward that is interrupted."""
    model = sharded(layers())
    model[1].requires_grad_(False)
    model(features()).sum().backward()
    model.zero_grad()
    if not interrupted:
        model[1].unshard(async_op=True)
    model[1].requires_grad_(True)
    if interrupted:
        for owner, name in ((Unit, "check_parameters"), (ParameterGroups, "unshard")):
            stop = mock.patch.object(owner, name, side_effect=KeyboardInterrupt)
            with stop, pytest.raises(KeyboardInterrupt):
                model[1].unshard()
            model.reset()
    model(features()).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]


def frozen_again(rank: int) -> list[list[bool]]:
    """Unfreeze a recomputed unit for one backward. Return which parameters train later."""
    model = sharded(layers(bias=False), reshard_after_forward=True)
    model[1].requires_grad_(False)
    seen: list[list[bool]] = []
    for unfrozen in (True, False):
        output = model[2](checkpoint(model[1], model[0](features()), use_reentrant=False))
        model[1].requires_grad_(unfrozen)
        output.sum().backward()
        model[1].requires_grad_(False)
        if unfrozen:
            model[1].register_forward_pre_hook(lambda _m, _x: seen.append(model_flags(model[1])))
    return seen


def model_flags(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module.parameters(recurse=False)]


def test_a_unit_unfrozen_for_one_backward_is_frozen_again(ranks: Ranks) -> None:
    for seen in ranks(2).run(frozen_again):
        assert seen == [[False]] * 2


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_unfrozen_unit_trains_after_other_forwards(ranks: Ranks, interrupted: bool) -> None:
    for found in ranks(2).run(thawed_under_way, interrupted):
        assert all(found)


def marked(rank: int) -> list[bool]:
    """Let a gradient require one, and drop it; return whether later ones do."""
    model, found = sharded(layers()), []
    for _ in range(3):
        model(features()).sum().backward()
        found += [bool(p.grad.requires_grad) for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad.requires_grad_()
        model.zero_grad()
    return found


def test_changes_of_a_gradient_do_not_reach_the_next_one(ranks: Ranks) -> None:
    for found in ranks(2).run(marked):
        assert not any(found)


def recast(rank: int, reentrant: bool) -> Gradients:
    """Recompute a unit. A user hook changes its output after the cast."""
    model = layers().float()
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    fully_shard(model[1], mesh_of((2,), ("fsdp",)), mp_policy=policy)
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    model[1].register_forward_hook(lambda module, args, output: output.float())

    def segment(x: Tensor) -> Tensor:
        return torch.tanh(model[1](x))

    x = features().float().requires_grad_()
    found: Any = checkpoint(segment, x, use_reentrant=reentrant)
    found.sum().backward()
    return gradients(model[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_unit_is_cast_before_a_users_hook(ranks: Ranks, reentrant: bool) -> None:
    alone = layers().float()[1]
    torch.tanh(alone(features().float())).sum().backward()
    expected = {name: full(p.grad) for name, p in alone.named_parameters()}
    for found in ranks(2).run(recast, reentrant):
        assert worst(found, expected) < 1e-6


def trained_later(rank: int, added: bool) -> list[str]:
    """Unfreeze parameters that were frozen at the creation of the optimizer. Return warnings."""
    model = sharded(layers())
    model[0].requires_grad_(False)
    optimizer = sharded_optimizer(torch.optim.AdamW, model, lr=0.1)
    model[0].requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(features()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("added", [False, True])
def test_a_sharded_optimizer_warns_of_parameters_without_a_step(ranks: Ranks, added: bool) -> None:
    for said in ranks(2).run(trained_later, added):
        assert len(said) == (not added)
        assert all("['0.weight', '0.bias'] train, and this optimizer does not" in s for s in said)
