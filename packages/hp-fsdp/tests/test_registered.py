"""Parameters that are registered with modules while units are unsharded, frozen or moved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import ParameterError, fully_shard

from .models import Gradients, Net, gradients, loss_of, make, mesh_of, reference, shard, tokens
from .models import worst as worst_of

Ranks = Callable[[int], RankPool]


def refrozen(rank: int, layout: str) -> dict[str, Any]:
    """Freeze between forward and backward, train frozen, thaw."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), layout=layout)
    frozen = model.blocks[1].up.weight
    name = "blocks.1.up.weight"
    seen: list[Gradients] = []
    loss = loss_of(model, tokens(rank))
    frozen.requires_grad_(False)
    loss.backward()
    seen.append(gradients(model))
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    seen.append(gradients(model))
    model.zero_grad()
    model.unshard()
    trains = model.blocks[1].up.weight.requires_grad, model.blocks[0].up.weight.requires_grad
    model.reshard()
    frozen.requires_grad_(True)
    loss_of(model, tokens(rank)).backward()
    seen.append(gradients(model))
    return {"seen": seen, "name": name, "trains": trains}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_freezing_counts_from_the_next_forward_and_its_reduction(ranks: Ranks, layout: str) -> None:
    expected = reference(2)
    for result in ranks(2).run(refrozen, layout):
        without = {n: g for n, g in expected.items() if n != result["name"]}
        first, second, third = result["seen"]
        for found in (first, second):
            assert set(found) == set(without)
            assert worst_of(found, without) < 1e-12
        assert result["trains"] == (False, True)
        assert worst_of(third, expected) < 1e-12


def users(rank: int, layout: str) -> tuple[bool, bool]:
    """Hold a gradient over the next step."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), layout=layout)
    loss_of(model, tokens(rank)).backward()
    held = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        before = {name: g.to_local().clone() for name, g in held.items()}
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    with torch.no_grad():
        kept = all(torch.equal(g.to_local(), before[name]) for name, g in held.items())
    fresh = all(p.grad is not held[name] for name, p in model.named_parameters())
    return kept, fresh


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_a_gradient_that_a_user_holds_is_not_written_to(ranks: Ranks, layout: str) -> None:
    assert ranks(2).run(users, layout) == [(True, True)] * 2


def registered(rank: int) -> list[bool]:
    """Return the kinds of parameters in forward, between forward and backward, and in backward."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    linear = model.blocks[0].up
    sharded = linear.weight
    seen = []

    def look(*_: Any) -> None:
        seen.append(linear.weight is not sharded and type(linear.weight) is nn.Parameter)

    linear.register_forward_hook(look)
    linear.register_full_backward_hook(look)
    loss = loss_of(model, tokens(rank))
    seen.append(linear.weight is sharded)
    loss.backward()
    seen.append(linear.weight is sharded)
    return seen


def test_modules_have_whole_tensors_while_they_compute_and_the_same_shards_else(
    ranks: Ranks,
) -> None:
    assert ranks(2).run(registered) == [[True] * 4] * 2


class TiedTwice(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


def replaced_in_one_place(rank: int, place: str, layout: Any) -> list[float]:
    """Put three times the weight in one of its places; return how far both are from it."""
    model: Any = TiedTwice().double()
    before = model.a.weight.detach().clone()
    x = torch.ones(2, 8, dtype=torch.float64)
    wanted = (torch.tanh(x @ (3 * before).t()) @ (3 * before).t()).detach()
    fully_shard(model, mesh_of((2,), ("fsdp",)), layout=layout)
    if place == "both":  # as a load with assign=True: the last counts
        model.a.weight = nn.Parameter(model.a.weight.detach() * 5)
        model.b.weight = nn.Parameter(model.b.weight.detach() * 3)
    else:
        module = getattr(model, place)
        module.weight = nn.Parameter(module.weight.detach() * 3)
    with torch.no_grad():
        out = model(x)
    return [float((out - wanted).abs().max()), float(model.a.weight is not model.b.weight)]


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("place", ["a", "b", "both"])
def test_a_tied_weight_may_be_replaced_in_any_of_its_places(
    ranks: Ranks, place: str, layout: str
) -> None:
    for far, apart in ranks(2).run(replaced_in_one_place, place, layout):
        assert far < 1e-12
        assert not apart


def replaced_by_another_shape(rank: int, place: str) -> str:
    model: Any = fully_shard(TiedTwice().double(), mesh_of((2,), ("fsdp",)))
    model.a.weight = nn.Parameter(model.a.weight.detach() * 3)
    getattr(model, place).weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    with pytest.raises(ParameterError) as caught, torch.no_grad():
        model(torch.ones(2, 8, dtype=torch.float64))
    return str(caught.value)


@pytest.mark.parametrize("place", ["a", "b"])
def test_invalid_replacements_of_a_tied_weight_raise_for_each_name(
    ranks: Ranks, place: str
) -> None:
    for said in ranks(2).run(replaced_by_another_shape, place):
        assert "a.weight was replaced by a plain tensor of shape (3, 3)" in said
