"""Tensors in nested inputs and outputs."""

import collections
import dataclasses
from typing import Any

import torch
from torch import Tensor

from hp_fsdp._nested import map_tensors, tensors_with_gradient

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Box:
    """A dataclass with something in it."""

    content: Any
    label: str = "box"


def leaf(value: float, grad: bool = True) -> Tensor:
    return torch.tensor([value], requires_grad=grad)


def test_tensors_are_found_in_every_container_in_order() -> None:
    inner = Box({"a": leaf(2.0), "b": [Pair(leaf(3.0), 7)]})
    value = (leaf(1.0), {"k": inner}, "text", None, leaf(9.0, grad=False))
    assert [t.item() for t in tensors_with_gradient(value)] == [1.0, 2.0, 3.0]


def test_mapping_rebuilds_the_same_types_and_leaves_the_rest() -> None:
    value = {"k": Box(Pair([leaf(1.0)], "x")), "n": 3}
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped["k"]) is Box
    assert type(mapped["k"].content) is Pair
    assert mapped["k"].content.left[0].item() == 2.0
    assert mapped["k"].label == "box"
    assert mapped["n"] == 3
    assert value["k"].content.left[0].item() == 1.0  # type: ignore[attr-defined]


def test_containers_without_change_come_back_as_they_are() -> None:
    value = [Box((leaf(1.0), "x")), {"a": 1}]
    assert map_tensors(lambda tensor: tensor, value) is value
