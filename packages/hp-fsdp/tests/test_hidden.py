"""Units with outputs that cannot have hooks, and parameters that are frozen while in use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import StateError, fully_shard

from .models import Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
WIDTH = 4


class Box:
    """An object that nobody can look into."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Hiding(nn.Module):
    """Returns its result in a box, keeps it to itself, or shows it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Any) -> Any:
        """Compute twice."""
        held = x.held if isinstance(x, Box) else x
        made = self.second(torch.tanh(self.first(held)))
        if self.how == "kept":
            self.result = made
            return None
        return made if self.how == "shown" else Box(made)


class Model(nn.Module):
    """One layer, then two blocks, the second of which may take the box of the first."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Hiding(first), Hiding(second)])

    def forward(self, x: Tensor, unpack: bool) -> Tensor:
        """Apply all of them; ``unpack`` the results before they are handed on."""
        found: Any = self.first(x)
        for block in self.blocks:
            made = block(found)
            found = block.result if block.how == "kept" else made
            if unpack and isinstance(found, Box):
                found = found.held
        held: Tensor = found.held if isinstance(found, Box) else found
        return held


def model_of(first: str, second: str, **options: Any) -> Any:
    model: Any = make(lambda: Model(first, second))
    for block in model.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)), **options)
    return fully_shard(model, mesh_of((2,), ("fsdp",)), **options)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: Any, rank: int, step: int, unpack: bool = True) -> Tensor:
    found: Tensor = model(batch(rank, step), unpack).pow(2).sum()
    return found


KINDS = [
    ("boxed", "boxed", True),
    ("boxed", "boxed", False),
    ("boxed", "shown", True),
    ("boxed", "shown", False),
    ("kept", "shown", True),
    ("shown", "kept", True),
]


def hidden_steps(
    rank: int, kind: tuple[str, str, bool], frozen: int | None, options: dict[str, Any]
) -> list[Gradients]:
    model = model_of(kind[0], kind[1], **options)
    found = []
    for step in range(3):
        if frozen is not None:
            model.blocks[frozen].requires_grad_(step == 2)
        loss_of(model, rank, step, kind[2]).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


def alone(kind: tuple[str, str, bool], frozen: int | None) -> list[Gradients]:
    model: Any = make(lambda: Model(kind[0], kind[1]))
    found = []
    for step in range(3):
        if frozen is not None:
            model.blocks[frozen].requires_grad_(step == 2)
        for rank in range(2):
            (loss_of(model, rank, step, kind[2]) / 2).backward()
        found.append(gradients(model))
        model.zero_grad()
    return found


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[2]}")
def test_units_with_hidden_outputs_have_their_parameters_in_backward(
    ranks: Ranks, kind: tuple[str, str, bool], frozen: int | None
) -> None:
    for options in ({}, {"direct_bytes": 0}, {"layout": "ragged"}, {"grads": "accumulate"}):
        for found in ranks(2).run(hidden_steps, kind, frozen, options):
            for one, other in zip(found, alone(kind, frozen), strict=True):
                assert worst(one, other) < 1e-12


def two_backwards(rank: int, announced: bool, frozen: bool) -> tuple[str, Gradients]:
    """Run backward twice on one graph. Return the error, and the gradients of the next step."""
    model = model_of("shown", "boxed")
    model.blocks[1].requires_grad_(not frozen)
    loss = loss_of(model, rank, 0)
    said = ""
    if announced:
        model.set_is_last_backward(False)
    loss.backward(retain_graph=True)
    model.set_is_last_backward(True)
    try:
        loss.backward()
    except StateError as error:
        said = str(error)
        model.reset()
        model.zero_grad()
        loss_of(model, rank, 0).backward()
    return said, gradients(model)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("announced", [False, True])
def test_a_second_backward_of_a_hidden_output_is_announced_or_refused(
    ranks: Ranks, announced: bool, frozen: bool
) -> None:
    model: Any = make(lambda: Model("shown", "boxed"))
    model.blocks[1].requires_grad_(not frozen)
    for rank in range(2):
        ((1 + announced) * loss_of(model, rank, 0) / 2).backward()
    for said, found in ranks(2).run(two_backwards, announced, frozen):
        assert ("set_is_last_backward(False)" in said) is not announced
        assert ("blocks.1" in said) is not announced
        assert worst(found, gradients(model)) < 1e-12


def two_forwards(rank: int) -> Gradients:
    """Go through the units twice, then backward once for each forward."""
    model = model_of("boxed", "boxed")
    losses = [loss_of(model, rank, step) for step in range(2)]
    model.set_is_last_backward(False)
    losses[0].backward()
    model.set_is_last_backward(True)
    losses[1].backward()
    return gradients(model)


def test_units_with_hidden_outputs_wait_for_the_last_backward(ranks: Ranks) -> None:
    model: Any = make(lambda: Model("boxed", "boxed"))
    for rank in range(2):
        ((loss_of(model, rank, 0) + loss_of(model, rank, 1)) / 2).backward()
    for found in ranks(2).run(two_forwards):
        assert worst(found, gradients(model)) < 1e-12


def frozen_under_way(model: Any, when: str, replicas: list[int]) -> list[Gradients]:
    """Freeze a block between forward and backward, or after an explicit unshard."""
    found = []
    for step in range(2):
        if when == "unsharded" and step == 0 and hasattr(model, "unshard"):
            model.blocks[0].unshard()
        if when == "unsharded" and step == 0:
            model.blocks[0].requires_grad_(False)
        losses = [loss_of(model, replica, step) for replica in replicas]
        if when == "between" and step == 0:
            model.blocks[0].requires_grad_(False)
        torch.stack(losses).mean().backward()
        trains = {name: torch.tensor(p.requires_grad) for name, p in model.named_parameters()}
        found += [gradients(model), {name: each.double() for name, each in trains.items()}]
        model.zero_grad()
    return found


def frozen_on_ranks(rank: int, first: str, when: str) -> list[Gradients]:
    return frozen_under_way(model_of(first, "shown"), when, [rank])


@pytest.mark.parametrize("when", ["unsharded", "between"])
@pytest.mark.parametrize("first", ["shown", "boxed"])
def test_parameters_frozen_while_gathered_stay_frozen(ranks: Ranks, first: str, when: str) -> None:
    expected = frozen_under_way(make(lambda: Model(first, "shown")), when, [0, 1])
    for found in ranks(2).run(frozen_on_ranks, first, when):
        for one, other in zip(found, expected, strict=True):
            assert worst(one, other) < 1e-12


def frozen_after_one(model: Any, replicas: list[int]) -> Gradients:
    """Accumulate gradients, then freeze their parameter before the next backward."""
    set_sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
    set_sync(False)
    torch.stack([loss_of(model, replica, 0) for replica in replicas]).sum().backward()
    set_sync(True)
    losses = [loss_of(model, replica, 1) for replica in replicas]
    frozen = dict(model.named_parameters())["blocks.0.first.weight"]
    frozen.requires_grad_(False)
    torch.stack(losses).sum().backward()
    return gradients(model)


def waiting_on_ranks(rank: int, options: dict[str, Any]) -> Gradients:
    return frozen_after_one(model_of("shown", "shown", **options), [rank])


@pytest.mark.parametrize("grads", ["copy", "accumulate"])
def test_to_gradients_that_wait_none_are_added_once_their_parameter_is_frozen(
    ranks: Ranks, grads: str
) -> None:
    expected = frozen_after_one(make(lambda: Model("shown", "shown")), [0, 1])
    for direct in (0, None):
        options = {"grads": grads, "direct_bytes": direct, "reshard_after_forward": True}
        for found in ranks(2).run(waiting_on_ranks, options):
            assert worst(found, {name: each / 2 for name, each in expected.items()}) < 1e-12


def seen_and_hidden(rank: int, first: bool) -> Gradients:
    """Run one block twice, once with a hidden output."""
    model = model_of("shown", "shown")
    losses = []
    for hidden in (first, not first):
        model.blocks[1].how = "boxed" if hidden else "shown"
        losses.append(loss_of(model, rank, int(hidden)))
    torch.stack(losses).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("first", [False, True])
def test_a_unit_that_is_seen_and_hidden_ends_with_the_backward(ranks: Ranks, first: bool) -> None:
    model: Any = make(lambda: Model("shown", "shown"))
    for rank in range(2):
        ((loss_of(model, rank, 0) + loss_of(model, rank, 1)) / 2).backward()
    for found in ranks(2).run(seen_and_hidden, first):
        assert worst(found, gradients(model)) < 1e-12


def between(rank: int, what: str) -> list[str]:
    """Return the errors if parameters are freed between a forward and its backward."""
    model = model_of("shown", "boxed")
    said = []
    for _ in range(2):
        loss = loss_of(model, rank, 0)
        if what == "load":
            model.load_state_dict(model.state_dict())
        else:
            model.double()
        with pytest.raises(StateError) as caught:
            loss.backward()
        model.reset()
        said.append(str(caught.value))
    model.zero_grad()
    loss_of(model, rank, 0).backward()  # and goes on
    return said


@pytest.mark.parametrize("what", ["load", "convert"])
def test_a_load_before_the_backward_of_a_hidden_output_raises(ranks: Ranks, what: str) -> None:
    for said in ranks(2).run(between, what):
        assert ["a backward reached blocks.1" in each for each in said] == [True, True]
