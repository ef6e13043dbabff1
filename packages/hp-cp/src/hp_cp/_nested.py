"""Find and replace the tensors in what a model reads."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import Tensor

from hp_dtensor.torch_compat import pytree_node

from ._errors import InputError, described

_PLAIN = (dict, OrderedDict, defaultdict, list, tuple)  # which pytree knows too
_PASSING = (str, bytes, bytearray, range)  # hold no tensors


class _Node(NamedTuple):
    """A container: its kind, what it holds by name or place, and what makes another of it."""

    kind: object
    items: dict[Any, Any]
    rebuild: Callable[[dict[Any, Any]], Any]


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return ``tree`` with every tensor replaced by what ``function`` makes of it, in order.

    ``function`` also gets what ``others``, which are built alike, hold there. Looks into lists,
    tuples, mappings, dataclasses and the types that are registered with torch's pytree; other
    values stay as they are.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    node = _node_of(tree)
    if node is None:
        return tree
    held = [_items_of(other) for other in others]
    return node.rebuild(
        {
            key: map_tensors(function, item, *(items[key] for items in held))
            for key, item in node.items.items()
        }
    )


def each_tensor(tree: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield every tensor of ``tree`` and what ``others`` hold there."""
    if isinstance(tree, Tensor):
        yield (tree, *others)
    elif (node := _node_of(tree)) is not None:
        held = [_items_of(other) for other in others]
        for key, item in node.items.items():
            yield from each_tensor(item, *(items[key] for items in held))


def share_structure(tree: Any, other: Any) -> bool:
    """Return whether two trees are built of the same containers; all mappings are alike."""
    node, like = _node_of(tree), _node_of(other)
    if node is None or like is None:
        return node is like
    return (
        node.kind == like.kind
        and node.items.keys() == like.items.keys()
        and all(share_structure(item, like.items[key]) for key, item in node.items.items())
    )


def check_tree(tree: Any) -> None:
    """Raise `InputError` for a tree whose tensors would not all be found, or not be put back.

    Without any tensor it may hold nothing but None.
    """
    leaves = list(_leaves(tree))
    for leaf in leaves:
        if _hides_tensors(leaf):
            raise InputError(
                f"{described(leaf)} is no tensor and would not be cut; give tensors (of an array: "
                f"torch.from_numpy), alone or in lists, tuples, mappings, dataclasses or types "
                f"registered with torch.utils._pytree"
            )
    given = [leaf for leaf in leaves if leaf is not None]
    if given and not any(isinstance(leaf, Tensor) for leaf in given):
        raise InputError(
            f"{described(tree)} holds no tensor, so that nothing would be cut; give tensors, "
            f"alone or in lists, tuples, mappings or dataclasses"
        )
    try:
        map_tensors(lambda x: x.detach(), tree)
    except (TypeError, AttributeError) as error:
        raise InputError(_no_copy(tree, str(error))) from error


def _leaves(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    node = None if isinstance(tree, Tensor) else _node_of(tree)
    if node is None:
        yield tree
        return
    if any(tree is container for container in above):
        raise InputError(f"{described(tree)} holds itself; give tensors in containers that end")
    for item in node.items.values():
        yield from _leaves(item, (*above, tree))


def _hides_tensors(leaf: object) -> bool:
    """Return whether a value that is no known container holds tensors or is an array.

    An iterator holds what nobody can see; of other iterables only collections are looked into:
    asking a loader of data for its batches would use them up, or start processes.
    """
    if leaf is None or isinstance(leaf, (Tensor, type, *_PASSING)):
        return False
    if hasattr(leaf, "__array__") and hasattr(leaf, "ndim"):
        return bool(leaf.ndim != 0)
    if isinstance(leaf, Iterator):
        return True
    inside = [*getattr(leaf, "__dict__", {}).values(), *_in_slots(leaf)]
    if isinstance(leaf, Collection):
        inside += leaf
    seen: dict[int, Any] = {}
    return any(_holds_tensor(item, seen) for item in inside)


def _in_slots(value: object) -> Iterator[object]:
    """Yield what an object holds in the ``__slots__`` of its classes; runs no code of theirs."""
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):  # as functions, whose members are their globals
            continue
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # one that is not set
                    yield slot.__get__(value)


def _holds_tensor(value: Any, seen: dict[int, Any]) -> bool:
    """Return whether a tensor is found in ``value``; ``seen`` keeps alive what was looked into."""
    if isinstance(value, Tensor):
        return True
    node = None if id(value) in seen else _node_of(value)
    seen[id(value)] = value
    return node is not None and any(_holds_tensor(item, seen) for item in node.items.values())


def _items_of(value: Any) -> dict[Any, Any]:
    node = _node_of(value)
    return {} if node is None else node.items


def _node_of(value: Any) -> _Node | None:
    kind = type(value)
    if kind not in _PLAIN and (found := pytree_node(value)) is not None:
        children, again = found
        return _Node(kind, dict(enumerate(children)), lambda new: again(list(new.values())))
    if isinstance(value, Mapping):
        return _Node(Mapping, dict(value.items()), lambda new: _mapping_like(value, new))
    if isinstance(value, (list, tuple)):
        return _Node(kind, dict(enumerate(value)), lambda new: _sequence_like(value, new))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        items = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _Node(kind, items, lambda new: _fields_like(value, new))
    return None


def _mapping_like(value: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return new
    if not isinstance(value, MutableMapping):
        made = type(value)(new)  # type: ignore[call-arg]
        if not _holds(made, new):
            raise InputError(_no_copy(value, "its class makes another mapping of a dict"))
        return made
    changed = _copy_of(value)
    for key, item in new.items():
        old = value[key]
        changed[key] = item  # some have no update(), or fields that follow their items
        if item is not old and value[key] is item:
            value[key] = old
            raise InputError(_no_copy(value, "a copy.copy of it shares its items"))
    return changed


def _holds(made: Mapping[Any, Any], new: dict[Any, Any]) -> bool:
    return made.keys() == new.keys() and all(
        made[key] is item for key, item in new.items() if isinstance(item, Tensor)
    )


def _copy_of(value: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a copy of a mapping and, where it wraps mappings, of these."""
    changed = copy.copy(value)
    held = getattr(value, "__dict__", {})
    for name, inner in held.items():
        if isinstance(inner, MutableMapping) and vars(changed).get(name) is inner:
            vars(changed)[name] = copy.copy(inner)
    return changed


def _no_copy(tree: object, reason: str) -> str:
    return (
        f"{described(tree)} holds a container that cannot be made again: {reason}; give a dict of "
        f"its tensors"
    )


def _sequence_like(value: Any, new: dict[Any, Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new.values())
    return type(value)(new.values())


def _fields_like(value: Any, new: dict[Any, Any]) -> Any:
    changed = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)  # frozen dataclasses too
    return changed
