"""Which module runs, as traces name it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.profile import RunningModule


class _Say(torch.autograd.Function):
    """A tensor as it is; forward and backward note which module runs."""

    @staticmethod
    def forward(ctx: object, x: Tensor, say: Callable[[], None]) -> Tensor:
        say()
        ctx.say = say  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.say()  # type: ignore[attr-defined]
        return grads[0], None


class _Inner(nn.Module):
    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Say.apply(x * self.weight, self.say)  # type: ignore[no-untyped-call]
        return y * 2


class _Block(nn.Module):
    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__()
        self.first = _Inner(say)
        self.second = _Inner(say)  # what it returns is what the block returns

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class _Recomputed(nn.Module):
    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__()
        self.block = _Block(say)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@pytest.fixture
def said() -> list[str]:
    return []


def test_the_innermost_module_is_named_forward_and_backward(said: list[str]) -> None:
    running: list[RunningModule] = []

    def say() -> None:
        said.append(str(running[0]))

    block = _Block(say)
    other = _Inner(say)  # of no model
    running.append(RunningModule(block))
    for _ in range(2):
        say()
        other(block(torch.ones(3)))
        block(torch.ones(3)).sum().backward()
        say()
        assert said == [
            *("the step", "first", "second", "the step", "first", "second"),
            *("second (backward)", "first (backward)", "the step"),
        ]
        said.clear()
    running[0].remove()
    block(torch.ones(3))
    assert said == ["the step", "the step"]


def test_what_is_computed_again_in_backward_is_named_too(said: list[str]) -> None:
    running: list[RunningModule] = []
    model = _Recomputed(lambda: said.append(str(running[0])))
    running.append(RunningModule(model))
    x = torch.ones(3, requires_grad=True)
    model(x).sum().backward()
    # Torch computes again what it needs, when it needs it: the first module, for that before it.
    assert said == [
        *("block.first", "block.second"),
        *("block.second (backward)", "block.first (backward)", "block.first (backward)"),
    ]
    assert str(running[0]) == "the step"
    running[0].remove()
