"""Backwards that reach only a part of a model, or more than once, or ask for no parameter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard

from .models import WIDTH, Block, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
Loss = Callable[[Any, Tensor], Tensor]
MODES = ["copy", "accumulate"]


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


class Pair(NamedTuple):
    """A named tuple with one tensor."""

    x: Tensor
    label: str


@dataclass
class Inner:
    """A dataclass inside another dataclass."""

    x: Tensor


@dataclass
class Outer:
    """A dataclass with nested tensors."""

    inner: Inner
    more: list[Tensor]


class Wrapping(nn.Module):
    """A block with containers as input and output. Its output has an unused tensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.kind = "tensor"

    def forward(self, value: Any) -> Any:
        """Return the block's output for the tensor in ``value``, in a container."""
        if isinstance(value, Outer):
            value = value.inner.x
        elif isinstance(value, Pair):
            value = value.x
        elif isinstance(value, dict):
            value = value["x"]
        elif isinstance(value, list | tuple):
            value = value[0]
        y = self.block(value)
        unused = y * 3
        made: dict[str, Any] = {
            "list": [y, unused],
            "tuple": (y, None),
            "named": Pair(y, "label"),
            "dict": {"x": y, "unused": unused},
            "dataclass": Outer(Inner(y), [unused]),
        }
        return made[self.kind]


class Model(nn.Module):
    """Units in a row, one that never runs, and two heads of which one unit is made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(3))
        self.idle = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def trunk(self, x: Tensor, kind: str) -> Tensor:
        """Run the blocks, which talk in containers of one kind."""
        value: Any = x
        for block in cast("list[Wrapping]", self.blocks):
            block.kind = kind
            value = block(value)
        if isinstance(value, Outer):
            return value.inner.x
        if isinstance(value, Pair):
            return value.x
        return cast(Tensor, value["x"] if isinstance(value, dict) else value[0])

    def forward(self, x: Tensor, how: str = "dict") -> Tensor:
        """Return the outputs of the heads in the way that ``how`` names."""
        if how == "no head":
            return self.trunk(x, "list")
        if how == "chunks":
            y = self.norm(self.trunk(x, "tuple"))
            return torch.cat([self.head(part) for part in y.chunk(2)])
        if how == "with and without grad":
            with torch.no_grad():
                offset = self.trunk(x, "list")
            y = self.trunk(x + offset, "list")
            with torch.no_grad():
                offset = self.trunk(x, "list")
            return cast(Tensor, self.head(self.norm(y + offset)))
        if how == "recomputed":
            y = checkpoint(self.trunk, x, "tuple", use_reentrant=False)
            return cast(Tensor, self.head(self.norm(y)))
        return cast(Tensor, self.head(self.norm(self.trunk(x, how))))


def one(how: str) -> Loss:
    return lambda model, x: model(x, how).pow(2).mean()


def two(first: str, second: str) -> Loss:
    """Return a loss of two forwards, like the policy and the reference model in DPO."""
    return lambda model, x: (model(x, first) - model(2 * x, second).tanh()).pow(2).mean()


LOSSES: dict[str, Loss] = {
    **{kind: one(kind) for kind in ("list", "tuple", "named", "dict", "dataclass")},
    "a head called for each chunk": one("chunks"),
    "heads that do not run": one("no head"),
    "with and without grad": one("with and without grad"),
    "two forwards, one backward": two("list", "dict"),
    "two forwards, recomputed": two("recomputed", "recomputed"),
    "two forwards without heads": two("no head", "no head"),
}


def sharded(grads: Any, **options: Any) -> Any:
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = make(Model)
    for unit in (*model.blocks, model.idle, [model.norm, model.head], model):
        fully_shard(unit, mesh, grads=grads, direct_bytes=0, **options)
    return model


def steps(rank: int, name: str, grads: str, option: bool | None) -> list[Gradients]:
    model = sharded(grads, reshard_after_forward=option)
    seen = []
    for _ in range(2):
        LOSSES[name](model, input_of(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(
    ("grads", "option"), [("copy", None), ("accumulate", True)], ids=lambda v: str(v)
)
def test_every_way_through_a_model_gives_the_gradients_of_one_process(
    ranks: Ranks, name: str, grads: str, option: bool | None
) -> None:
    plain: Any = make(Model)
    for rank in range(2):
        (LOSSES[name](plain, input_of(rank)) / 2).backward()
    expected = gradients(plain)
    for seen in ranks(2).run(steps, name, grads, option):
        for found in seen:
            used = {key: value for key, value in found.items() if key in expected}
            assert worst(used, expected) < 1e-12
            # Unused parameters have zero gradients, or None if their unit never ran.
            assert not any(found[key].any() for key in found.keys() - expected.keys())


def retained(rank: int, grads: str) -> Gradients:
    """Run backward twice through one graph."""
    model = sharded(grads)
    loss = model(input_of(rank)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("grads", MODES)
def test_a_graph_may_be_gone_through_twice(ranks: Ranks, grads: str) -> None:
    plain: Any = make(Model)
    for rank in range(2):
        plain(input_of(rank)).pow(2).mean().backward()  # twice the mean of two ranks
    for found in ranks(2).run(retained, grads):
        assert worst(found, gradients(plain)) < 1e-12


def other_backwards(rank: int, grads: Any) -> tuple[Gradients, dict[str, Tensor]]:
    """Differentiate by the input alone, then by a weight alone, then for all parameters."""
    model: Any = make(Block)
    fully_shard(model, mesh_of((2,), ("fsdp",)), grads=grads, direct_bytes=0)
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    with model.no_sync():
        (by_input,) = torch.autograd.grad(model(x).pow(2).sum(), [x])
        y = model(x)
        (by_weight,) = torch.autograd.grad(y.pow(2).sum(), [model.up.weight])
    model(x.detach() * (rank + 1)).pow(2).mean().backward()
    return gradients(model), {"x": by_input, "up.weight": by_weight}


@pytest.mark.parametrize("grads", MODES)
def test_backwards_for_other_tensors_leave_no_gradient_behind(ranks: Ranks, grads: str) -> None:
    plain: Any = make(Block)
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    by_input, by_weight = torch.autograd.grad(plain(x).pow(2).sum(), [x, plain.up.weight])
    for rank in range(2):
        (plain(x.detach() * (rank + 1)).pow(2).mean() / 2).backward()
    for found, alone in ranks(2).run(other_backwards, grads):
        assert worst(alone, {"x": by_input, "up.weight": by_weight}) < 1e-12
        assert worst(found, gradients(plain)) < 1e-12
