"""Activations, losses and gradients of ragged tensors equal the results with whole tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from torch import Tensor

from hp_dtensor import Layout, RaggedShard, RaggedTensor

from .test_ragged import Ragged, part_of, ragged_of, whole

Pools = Callable[[int], RankPool]
CASES = [
    Ragged(Layout((2,), (RaggedShard((0, 1), (7, 23)),)), (5, 6)),
    Ragged(Layout((2,), (RaggedShard((0,), (0, 5)),)), (5, 6)),
]
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(F, name)
    for name in (
        *("leaky_relu", "elu", "selu", "celu", "softplus", "mish", "hardtanh", "relu6"),
        *("hardsigmoid", "hardshrink", "softshrink", "hardswish", "logsigmoid", "silu", "gelu"),
    )
}
IN_PLACE = ("leaky_relu", "elu", "selu", "celu", "hardtanh", "relu6", "hardswish", "hardsigmoid")
LOSSES: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth l1": F.smooth_l1_loss,
    "l1": F.l1_loss,
    "binary cross entropy": lambda x, y, **named: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), **named
    ),
    "cross entropy with logits": lambda x, y, **named: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), **named
    ),
}


def weighted(activate: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: activate(x) * y


def in_place(activate: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: activate(x * y, inplace=True)


EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: weighted(activate) for name, activate in ACTIVATIONS.items()},
    **{f"{name} in place": in_place(ACTIVATIONS[name]) for name in IN_PLACE},
    **{name: partial(loss, reduction="none") for name, loss in LOSSES.items()},
    "copysign": lambda x, y: torch.copysign(x, -y.detach()) * y,
    "sgn": lambda x, y: torch.sgn(x.detach()) * y + x,
    "sign": lambda x, y: torch.sign(x) * y + x,
}


def results(make: Callable[[int], Any], name: str) -> list[Any]:
    """Return the value of an expression of two tensors, and their gradients."""
    x, y = make(1).requires_grad_(), make(2).requires_grad_()
    value = EXPRESSIONS[name](x, y)
    (value * make(3)).sum().backward()
    return [value, x.grad, y.grad]


def computed(rank: int, name: str) -> list[list[Tensor]]:
    found = []
    for case in CASES:
        values = results(partial(made, case, rank), name)
        assert all(type(x) is RaggedTensor for x in values)
        with torch.no_grad():
            found.append([x.to_local() for x in values])
    return found


def made(case: Ragged, rank: int, seed: int) -> RaggedTensor:
    return ragged_of(whole(case.shape, seed), case, rank)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_values_and_gradients_are_those_of_the_whole_tensor(ranks: Pools, name: str) -> None:
    for rank, found in enumerate(ranks(2).run(computed, name)):
        for case, parts in zip(CASES, found, strict=True):
            expected = results(partial(whole, case.shape), name)
            for part, full in zip(parts, expected, strict=True):
                torch.testing.assert_close(part, part_of(full.detach(), case, rank))


def refused(rank: int) -> list[str]:
    case = CASES[0]
    x: Any = made(case, rank, 1).requires_grad_()
    y = made(case, rank, 2).requires_grad_()
    calls: list[Callable[[], Any]] = [
        *(lambda f=f: f(x, y) for f in LOSSES.values() if f is not F.l1_loss),
        lambda: F.mse_loss(x, y, reduction="sum"),
        lambda: torch.sgn(x),
        lambda: x.clone().sgn_(),
        lambda: torch.copysign(x, y),
    ]
    texts = []
    for call in calls:
        with pytest.raises(TypeError) as info:
            call()
        texts.append(str(info.value))
    with torch.no_grad():
        signs: Any = torch.sgn(x)
        assert torch.equal(signs.to_local(), x.to_local().sgn())
    return texts


def test_losses_that_reduce_and_plain_gradients_are_refused(ranks: Pools) -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    *losses, sign, sign_in_place, copied = first
    assert len(losses) == 6
    assert all("use reduction='none' and the result's mean()" in text for text in losses)
    assert "use torch.sign(x), or torch.no_grad()" in sign
    assert "use x.sign_(), or torch.no_grad()" in sign_in_place
    assert "use torch.copysign(x, y.detach()), or torch.no_grad()" in copied
