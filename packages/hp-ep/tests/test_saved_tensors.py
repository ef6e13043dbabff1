"""What backward needs is saved where checkpointing and offloading see it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import MoE, TopKRouter

from .dispatching import NAMES, make_dispatcher


def _nodes(y: Tensor) -> list[Any]:
    """Return all nodes of the graph of ``y``."""
    seen: dict[int, Any] = {}
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            todo += [following for following, _ in node.next_functions]
    return list(seen.values())


def _held(value: object, path: str) -> Iterator[str]:
    """Yield the paths of all tensors in ``value``, however deep in values of dataclasses."""
    if isinstance(value, Tensor):
        yield f"{path} {tuple(value.shape)}"
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _held(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _held(each, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _held(getattr(value, field.name), f"{path}.{field.name}")


def _found(name: str) -> list[str]:
    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        size = 1 if name == "Local" else 4
        router = TopKRouter(8, 8, 2, load_balance_loss=0.1, sequence_loss=0.1)
        layer = MoE(8, 16, 8, 2, router=router, num_shared_experts=1)
        layer.dispatcher = make_dispatcher(name, door.mesh, size, 8, door)
        layer.experts = MoE(8, 16, 8 // size, 2).experts
        x = torch.randn(6, 8, requires_grad=True)
        y = layer(x)
        found = [
            text
            for node in _nodes(y)
            for text in _held(getattr(node, "__dict__", {}), type(node).__name__)
        ]
        y.sum().backward()
        return found

    return SimulatedWorld(1 if name == "Local" else 4).run(rank)[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_node_of_the_graph_holds_a_tensor_by_itself(name: str) -> None:
    assert _found(name) == []


def _saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that the graph of ``forward`` keeps, but for parameters."""
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter) and not (x.requires_grad and x.is_leaf):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(held.values())


def test_a_layer_keeps_rows_and_one_product_of_each_assignment() -> None:
    torch.manual_seed(0)
    tokens, dim, hidden, experts, top_k = 256, 64, 64, 8, 4
    layer = MoE(dim, hidden, experts, top_k)
    x = torch.randn(tokens, dim)
    saved = _saved_bytes(lambda: layer(x))
    assignments = tokens * top_k
    # Rows, gate and up; neither what the down product takes nor its results.
    rows = 4 * assignments * (dim + 2 * hidden)
    # Weights and places of the assignments, scores of the tokens, the tokens for the router.
    small = assignments * 64 + tokens * experts * 16 + 4 * tokens * dim
    assert rows < saved <= rows + small + sum(4 * p.numel() for p in layer.parameters())
