"""Small classes that the tests of several packages use in place of real ones."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor


class FinishedWork:
    """A collective that has already completed, with its outputs."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def wait(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs


class WrappedMapping(MutableMapping[str, Any]):
    """A mapping that stores its items in another mapping.

    ``copy.copy`` of it shares the items with the original.

    Args:
        label: Value of the attribute ``label``.
        items: Mapping that stores the items.
    """

    def __init__(self, label: str, items: MutableMapping[str, Any]) -> None:
        self.label = label
        self._items = items

    def __getitem__(self, key: str) -> Any:
        """Return an item."""
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an item."""
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        """Remove an item."""
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self._items)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)
