"""Tensors in nested inputs and outputs."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from rank_pool import WrappedMapping
from torch import Tensor

from hp_fsdp import ShardingError
from hp_fsdp._precision import map_tensors, tensors_with_gradient

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


class Labelled(Mapping[str, Any]):
    """A mapping that is made of a label, with one item."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.item = leaf(1.0)

    def __getitem__(self, key: str) -> Any:
        """Return the item."""
        return self.item

    def __iter__(self) -> Iterator[str]:
        """Iterate over the one key."""
        return iter(["x"])

    def __len__(self) -> int:
        """Return one."""
        return 1


MAPPINGS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x, "n": 3},
    "ordered": lambda x: collections.OrderedDict(x=x, n=3),
    "default": lambda x: collections.defaultdict(int, x=x, n=3),
    "user": lambda x: collections.UserDict(x=x, n=3),
    "chain": lambda x: collections.ChainMap({"n": 3}, {"x": x}),
    "wrapper": lambda x: WrappedMapping("a", {"x": x, "n": 3}),
    "wrapper of another": lambda x: WrappedMapping("b", collections.UserDict(x=x, n=3)),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_mapping_is_copied_and_the_one_given_keeps_its_items(kind: str) -> None:
    x = leaf(1.0)
    value = MAPPINGS[kind](x)
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is type(value)
    assert dict(mapped) == {"x": torch.tensor([2.0]), "n": 3}
    assert value["x"] is x
    assert getattr(mapped, "label", "") == getattr(value, "label", "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            WrappedMapping("a", WrappedMapping("b", {"x": leaf(1.0)})),
            "a copy.copy of it shares its items",
        ),
        (Labelled("a"), "its class makes another mapping of a dict"),
    ],
)
def test_a_mapping_that_cannot_be_copied_is_refused_and_keeps_its_items(
    value: Any, reason: str
) -> None:
    x = value["x"]
    kind = type(value).__name__
    with pytest.raises(ShardingError, match=rf"tensors in a {kind}, .*: {reason}; give a dict"):
        map_tensors(lambda tensor: tensor + 1, value)
    assert value["x"] is x
