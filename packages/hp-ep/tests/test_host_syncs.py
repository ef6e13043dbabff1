"""How often the host waits for the device: once per forward, if at all.

Reads of values are counted on the meta device, and copies from the host's memory, which wait too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    GroupedExperts,
    MoE,
    Placement,
    TokenDispatcher,
)
from hp_ep._styles import _over_ranks as over_ranks
from hp_ep._torch import run_function
from hp_ep.dispatch._all_to_all import RowExchange
from hp_ep.dispatch._wrappers import Placed, Summed
from hp_ep.placement._replicas import ReplicaSum

from .dispatching import NAMES, make_dispatcher
from .meta import META, SHAPES, Waits


class _CopiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.tensor([1.0, 2.0], device=META)


def _copy_in_backward(x: Tensor) -> None:
    run_function(_CopiesInBackward, x.requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1, 2], device=META),
        lambda x: torch.zeros(2).to(META),
        lambda x: x.copy_(torch.zeros(2)),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.index_select(0, torch.tensor([0, 1])),
        lambda x: x.tolist(),
        _copy_in_backward,
    ],
)
def test_reads_and_copies_are_seen(wait: Callable[[Tensor], object]) -> None:
    with Waits() as waits:
        wait(torch.empty(2, device=META))
    assert waits.number == 1


@pytest.mark.parametrize(
    "read",
    [
        Tensor.item,
        Tensor.cpu,
        Tensor.nonzero,
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_other_reads_fail(read: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)), Waits():
        read(torch.empty(2, device=META))


@pytest.mark.parametrize(
    "free",
    [
        lambda x: torch.full((2,), 3, device=META),
        lambda x: torch.where(x > 0, x, 2.0),
        lambda x: x[:, None] * 2,
    ],
)
def test_what_the_device_does_alone_is_no_wait(free: Callable[[Tensor], object]) -> None:
    with Waits() as waits:
        free(torch.empty(2, device=META))
    assert waits.number == 0


def _over_ranks(make: Callable[[SimulatedCollectives], Any]) -> Any:
    """Return what the second of four ranks makes."""
    return SimulatedWorld(4).run(lambda me, door: make(door))[1]


def _routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.empty(tokens, 4, device=META, requires_grad=True)
    w = torch.empty(tokens, 2, device=META, requires_grad=True)
    return x, w, torch.empty(w.shape, dtype=torch.int64, device=META)


def _steps(dispatcher: TokenDispatcher, tokens: int) -> list[int]:
    """Return the waits of a dispatch, of its combine, and of their backward."""
    with Waits() as waits:
        dispatcher.dispatch(*_routing(5))
        dispatched, waits.number = waits.number, 0
        x, w, ids = _routing(tokens)
        rows, _, state = dispatcher.dispatch(x, w, ids)
        waits.number = 0
        y = dispatcher.combine(rows * 2, state)
        combined, waits.number = waits.number, 0
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    return [dispatched, combined, waits.number]


WAITS = {"Local": 0, "AllToAll": 1, "Dedup": 1, "Hierarchical": 1, "Padded": 0}
PLACEMENT = Placement(num_ranks=4, num_experts=6, experts=(0, 1, 2, 3, 4, 5, 0, 1))


def _made(name: str, around: str, validate: bool, **options: Any) -> TokenDispatcher:
    def make(door: SimulatedCollectives) -> TokenDispatcher:
        inner = make_dispatcher(name, door.mesh, 4, 8, SHAPES, validate=validate, **options)
        if around == "Placed":
            return Placed(inner, PLACEMENT, 1, device=META)
        return Summed(inner, door.axis("tp"), SHAPES) if around == "Summed" else inner

    found: TokenDispatcher = _over_ranks(make)
    return found


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("around", ["", "Placed", "Summed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_dispatch_waits_at_most_once(name: str, around: str, validate: bool) -> None:
    number = WAITS[name] or int(validate)
    # Where counts are read they are zeros here: no results come back for tokens.
    tokens = 5 if WAITS[name] == 0 else 0
    assert _steps(_made(name, around, validate), tokens) == [number, 0, 0]


def test_refusing_an_overflow_waits_once() -> None:
    assert _steps(_made("Padded", "", False, overflow="error"), 5) == [1, 0, 0]


class _Layer(MoE):
    """A layer on the second of four ranks, two of eight experts or slots each."""

    def __init__(self, name: str, around: str, **options: Any) -> None:
        experts = 6 if around == "Placed" else 8
        # The only dtype whose grouped product the meta device knows.
        kind: Any = dict(device=META, dtype=torch.bfloat16)
        super().__init__(8, 16, experts, 2, num_shared_experts=1, load_balance_loss=0.1, **kind)
        self.dispatcher = _made(name, around, **options)
        self.router.split_tokens_over([_over_ranks(lambda door: door.axis("ep"))], SHAPES)
        self.experts = GroupedExperts(8, 16, 8 if name == "Local" else 2, **kind)
        if around == "Placed" and name != "Local":
            axis = _over_ranks(lambda door: door.axis("ep"))
            self.experts.replicas = ReplicaSum(axis, PLACEMENT, SHAPES, device=META)


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("around", ["", "Placed", "Summed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_waits_as_often_as_its_dispatcher(name: str, around: str, validate: bool) -> None:
    layer = _Layer(name, around, validate=validate)
    x = torch.empty(
        (5 if WAITS[name] == 0 else 0, 8), device=META, dtype=torch.bfloat16
    ).requires_grad_()
    with Waits() as waits:
        y = layer(x)
        forward = waits.number
        y.sum().backward()
    assert [forward, waits.number - forward] == [WAITS[name] or int(validate), 0]
    assert all(p.grad is not None for p in layer.parameters())


def test_experts_that_take_the_rows_of_all_wait_once() -> None:
    axis = _over_ranks(lambda door: door.axis("ep"))
    experts = GroupedExperts(8, 16, 2, device=META, dtype=torch.bfloat16)
    forward = over_ranks(GroupedExperts.forward, RowExchange(axis, 8, SHAPES))
    rows = torch.empty(0, 8, device=META, dtype=torch.bfloat16, requires_grad=True)
    with Waits() as waits:
        y = forward(experts, rows, torch.empty(8, device=META, dtype=torch.int64))
        assert waits.number == 1
        y.sum().backward()
    assert waits.number == 1
