"""Losses that use a sharded parameter outside its module's forward cause one warning."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import fully_shard, register_fsdp_forward_method

from .models import WIDTH, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "ragged": {"layout": "ragged"},
    "whole": {"min_shard_numel": 10**6},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
}


class Head(nn.Linear):
    """A linear layer with a method that returns a loss."""

    def loss(self, x: Tensor) -> Tensor:
        """Return a loss of the outputs."""
        return nn.functional.linear(x, self.weight, self.bias).sin().sum()


class Model(nn.Module):
    """A trunk, and a head that the forward leaves to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = Head(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the head."""
        return cast(Tensor, self.trunk(x))


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def sharded(layout: str) -> Any:
    model: Any = make(Model)
    options, mesh = LAYOUTS[layout], mesh_of((2,), ("fsdp",))
    fully_shard(model.trunk, mesh, **options)
    fully_shard(model.head, mesh, **options)
    return fully_shard(model, mesh, **options)


def chunked(model: Any, x: Tensor) -> Tensor:
    """Compute the loss as libraries do that skip the head's forward."""
    weight, bias = model.head.weight.full_tensor(), model.head.bias.full_tensor()
    return nn.functional.linear(model(x), weight, bias).sin().sum()


def said_by(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def outside(rank: int, layout: str) -> list[list[str]]:
    """Return the warnings of three steps. The first and the last use the head's weight."""
    model = sharded(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model.head.loss if step == 1 else None
        if loss is None:
            found.append(said_by(lambda: chunked(model, input_of(rank)).backward()))
        else:
            found.append(said_by(lambda: model.head(model(input_of(rank))).sum().backward()))
        optimizer.step()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_one_rank_warns_once_with_the_name(ranks: Ranks, layout: str) -> None:
    for first, second, third in ranks(2).run(outside, layout):
        (said,) = first
        assert "head.weight" in said or "head.bias" in said
        assert "register_fsdp_forward_method" in said
        assert second == third == []


def recommended(rank: int, layout: str, way: str) -> tuple[list[str], Gradients]:
    """Follow the warning: call the head, or register its method."""
    model = sharded(layout)
    if way == "method":
        register_fsdp_forward_method(model.head, "loss")

    def run() -> None:
        x = model(input_of(rank))
        (model.head.loss(x) if way == "method" else model.head(x).sin().sum()).backward()

    return said_by(run), gradients(model)


@pytest.mark.parametrize("way", ["method", "call"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ways_out_give_the_mean_and_do_not_warn(ranks: Ranks, layout: str, way: str) -> None:
    plain: Any = make(Model)
    for rank in range(2):
        (plain.head.loss(plain(input_of(rank))) / 2).backward()
    for said, found in ranks(2).run(recommended, layout, way):
        assert said == []
        assert worst(found, gradients(plain)) < 1e-12


def changed(rank: int, layout: str, how: str) -> tuple[list[str], list[str]]:
    """Change the parameters, train a usual step, then use one outside."""
    model = sharded(layout)
    model(input_of(rank)).sum().backward()
    if how == "assigned":
        state = {name: p.detach().clone() for name, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    elif how == "converted":
        model.float().double()
    elif how == "frozen":
        model.requires_grad_(False)
        model(input_of(rank))
        model.requires_grad_(True)
    elif how == "hooked":
        calls: list[Tensor] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(calls.append)
    usual = said_by(lambda: model.head(model(input_of(rank))).sum().backward())
    return usual, said_by(lambda: chunked(model, input_of(rank)).backward())


@pytest.mark.parametrize("how", ["assigned", "converted", "frozen", "hooked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changed_parameters_still_warn(ranks: Ranks, layout: str, how: str) -> None:
    for usual, said in ranks(2).run(changed, layout, how):
        assert usual == []
        assert len(said) == 1


def frozen_before(rank: int) -> list[str]:
    """Freeze the head before `fully_shard` and unfreeze it afterwards."""
    model: Any = make(Model)
    model.head.requires_grad_(False)
    fully_shard(model.head, mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    model.head.requires_grad_(True)
    return said_by(lambda: chunked(model, input_of(rank)).backward())


@pytest.mark.nccl
def test_parameters_that_were_frozen_warn_once_they_train(ranks: Ranks) -> None:
    for said in ranks(2).run(frozen_before):
        assert len(said) == 1


def copied(rank: int, layout: str) -> list[bool]:
    """Copy and save parameters; return whether copies are equal and hooks of a user remain."""
    model = sharded(layout)
    weight = model.head.weight
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded: Any = torch.load(buffer, weights_only=True)
    kept = copy.deepcopy(weight)
    return [
        torch.equal(kept.full_tensor(), weight.full_tensor()),
        torch.equal(loaded["head.weight"].full_tensor(), weight.full_tensor()),
        not weight._post_accumulate_grad_hooks,
        not weight._backward_hooks,
    ]


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_parameters_are_copied_and_saved_as_before(ranks: Ranks, layout: str) -> None:
    assert ranks(2).run(copied, layout) == [[True] * 4] * 2
