"""How many operators a dispatch and its combine run, and how many bytes their backward moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_dtensor import Axis, Collectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, Dedup, Local, TokenDispatcher
from hp_ep.dispatch._cost import WORK
from hp_ep.dispatch._interface import start_dispatch

TOKENS, DIM, RANKS, EXPERTS, TOP_K = 64, 128, 4, 16, 4
FREE = {"empty", "new_empty", "empty_like", "detach", "alias", "lift_fresh", "promote_types"}


class _Operators(TorchDispatchMode):
    """Counts operators that compute or copy, not views and allocations, and the bytes they move."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0
        self.tensors = 0  # that operators take and return, also views
        self.bytes = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        free = func.is_view or func.overloadpacket.__name__ in FREE
        if not self.paused:
            leaves = tree_leaves((args, kwargs, result))
            self.tensors += sum(isinstance(t, Tensor) for t in leaves)
        if not (self.paused or free):
            self.number += 1
            used = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in used)
        return result


class _Alike:
    """Stands for the collectives of ranks that all do the same; each call is one operator."""

    def __init__(self, operators: _Operators) -> None:
        self._operators = operators

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send: Any = None,
        receive: Any = None,
        output: Tensor | None = None,
    ) -> "_Came":
        self._operators.number += 1
        self._operators.paused = True
        parts = input.chunk(axis.size) if send is None else input.split(send)
        came = torch.cat([parts[axis.index]] * axis.size)
        if receive is not None and len(came) != sum(receive):  # results, on their way back
            came = input.new_zeros(sum(receive), *input.shape[1:])
        if output is not None:
            came = output.copy_(came)
        self._operators.paused = False
        return _Came(came)


class _Came:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> list[Tensor]:
        return [self._tensor]


def _axis(ranks: int = RANKS) -> Axis:
    def rank(me: int, door: SimulatedCollectives) -> Axis:
        return door.axis("ep")

    return SimulatedWorld(ranks).run(rank)[1]


def _routing(experts: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator)
    ids = torch.rand(TOKENS, experts, generator=generator).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return x.requires_grad_(), weights.requires_grad_(), ids


Make = Callable[[Axis, Collectives], TokenDispatcher]
MOST: dict[str, tuple[Make, int]] = {
    "AllToAll": (lambda axis, door: AllToAll(axis, EXPERTS, door, validate=False), 30),
    "Dedup": (lambda axis, door: Dedup(axis, EXPERTS, door, validate=False), 50),
}


@pytest.mark.parametrize("weigh_rows", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_a_dispatch_and_its_combine_run_few_operators(name: str, weigh_rows: bool) -> None:
    make, most = MOST[name]
    operators = _Operators()
    door: Any = _Alike(operators)
    dispatcher, given = make(_axis(), door), _routing()
    with operators:
        rows, _, state = start_dispatch(dispatcher, *given, weigh_rows=weigh_rows).wait()
        assert operators.number > 10
        y = dispatcher.combine(rows, state)
    assert y.shape == (TOKENS, DIM)
    assert rows.shape[0] > 0
    assert operators.number <= most


@pytest.mark.parametrize("name", MOST)
def test_the_price_of_a_dispatcher_has_the_operators_that_it_runs(name: str) -> None:
    operators = _Operators()
    door: Any = _Alike(operators)
    dispatcher, given = MOST[name][0](_axis(), door), _routing()
    with operators, torch.autograd.set_multithreading_enabled(False):
        rows, _, state = dispatcher.dispatch(*given)
        dispatcher.combine(rows, state).sum().backward()
    kind: Any = {"AllToAll": "all_to_all", "Dedup": "dedup"}[name]
    assert operators.number == pytest.approx(WORK[kind].operators, rel=0.1)


def test_operators_and_their_tensors_do_not_grow_with_the_blocks_of_rows() -> None:
    def number(ranks: int) -> tuple[int, int]:
        experts, operators = 4 * ranks, _Operators()
        door: Any = _Alike(operators)
        dispatcher = AllToAll(_axis(ranks), experts, door, validate=False)
        given = _routing(experts)
        with operators, torch.autograd.set_multithreading_enabled(False):
            rows, _, state = dispatcher.dispatch(*given)
            dispatcher.combine(rows, state).sum().backward()
        return operators.number, operators.tensors

    assert number(16) == number(8)


def _moved(weigh_rows: bool) -> float:
    """Return the bytes per element of the rows that the backward of a combine reads and writes."""
    dispatcher = Local(EXPERTS, validate=False)
    x, weights, ids = _routing()
    rows, _, state = start_dispatch(dispatcher, x, weights, ids, weigh_rows=weigh_rows).wait()
    results = rows.detach().requires_grad_()
    y = dispatcher.combine(results, state)
    grad = torch.ones_like(y)
    operators = _Operators()
    with operators, torch.autograd.set_multithreading_enabled(False):
        y.backward(grad)
    assert results.grad is not None
    return operators.bytes / results.numel()


def test_a_combine_that_only_sums_moves_few_bytes_in_backward() -> None:
    assert _moved(weigh_rows=True) <= 12
    assert _moved(weigh_rows=False) > 24
