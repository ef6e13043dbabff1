"""The parameters of groups and where modules have them, in lists that calls in C go through.

What gathers have to know of their parameters is asked of all groups under a root together, once a
pass: for each group alone it costs more than the rest of a gather.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import getitem, is_, setitem

from torch import Tensor

from ._param import ShardedParameter
from ._torch import storage_references

# Runs what an iterator does for each of many, without a call in Python for each.
_run: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)
_each = chain.from_iterable


class ParameterTable:
    """The parameters of one group, made anew where the group's parameters are.

    ``shown`` are those that modules have, at ``names`` of their ``registries``.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], shards: Sequence[Tensor], flat: Tensor | None
    ) -> None:
        """List ``parameters``, of one kind; ``shards`` are views of ``flat``, if there is one."""
        owners = [(each, owner) for each in parameters for owner in each.owners]
        self.sharded = [each.sharded for each in parameters]
        self.unsharded = [each.unsharded for each in parameters]
        self.registries = [owner.registry for _, owner in owners]
        self.names = [owner.name for _, owner in owners]
        self._sharded_at = [each.sharded for each, _ in owners]
        self._unsharded_at = [each.unsharded for each, _ in owners]
        self.shown = self._sharded_at
        self._part, self._parts = parameters[0].part, [each.local_view for each in parameters]
        self._shards = [] if flat is None else list(shards)
        self._addresses = list(map(Tensor.data_ptr, self._shards))
        # Each shard holds the memory that it is a part of, until it is moved elsewhere.
        self.storages = [] if flat is None else [flat.untyped_storage()]
        self.references = storage_references(self.storages)

    def show_sharded(self) -> None:
        """Register the sharded parameters with their modules."""
        _run(map(setitem, self.registries, self.names, self._sharded_at))
        self.shown = self._sharded_at

    def show_unsharded(self) -> None:
        """Register the unsharded parameters with their modules."""
        _run(map(setitem, self.registries, self.names, self._unsharded_at))
        self.shown = self._unsharded_at

    def has_parts(self) -> bool:
        """Return whether the sharded parameters have the local tensors that they were given."""
        return all(map(is_, self._parts, map(self._part, self.sharded)))

    def moved(self) -> bool:
        """Return whether the memory of a shard is no longer the flat shard's.

        Sending a tensor to another process moves its storage to shared memory, on the CPU.
        """
        references = storage_references(self.storages)
        if references == self.references:
            return False
        if list(map(Tensor.data_ptr, self._shards)) != self._addresses:
            return True
        self.references = references  # somebody made or dropped a view
        return False


def are_shown(tables: Sequence[ParameterTable]) -> bool:
    """Return whether modules have what was registered last, and nothing else."""
    registries = _each([table.registries for table in tables])
    names = _each([table.names for table in tables])
    try:
        found = map(getitem, registries, names)
        return all(map(is_, found, _each([table.shown for table in tables])))
    except KeyError:
        return False  # one was removed


def are_in_place(tables: Sequence[ParameterTable]) -> bool:
    """Return whether the sharded parameters have the memory of their shards, where it was."""
    if not all([table.has_parts() for table in tables]):
        return False
    references = storage_references(_each([table.storages for table in tables]))
    if references == list(_each([table.references for table in tables])):
        return True
    return not any([table.moved() for table in tables])
