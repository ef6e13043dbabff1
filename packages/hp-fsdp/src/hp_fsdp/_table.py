"""Parameters and where modules have them, in lists that one call in C goes through."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import getitem, is_, setitem

from torch import Tensor

from ._param import ShardedParameter
from ._torch import any_hooks_after_gradient, storage_references, training

# Runs what an iterator does for each of many, without a call in Python for each.
_run: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)


class ParameterTable:
    """The parameters of a group, sharded and unsharded, and where modules have them.

    Made anew where a group's parameters are. One table may join those of all groups under a root:
    what gathers have to know of their parameters is asked of it once a pass, because for each group
    alone it costs more than the rest of a gather.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        shards: Sequence[Tensor],
        flat: Sequence[Tensor] = (),
        joined: "Sequence[ParameterTable]" = (),
    ) -> None:
        """List ``parameters``; ``shards`` are those that are views of a ``flat`` one.

        ``joined`` are the tables that it joins.
        """
        owners = [(each, owner) for each in parameters for owner in each.owners]
        self.sharded = [each.sharded for each in parameters]
        self.unsharded = [each.unsharded for each in parameters]
        self._parameters = list(parameters)
        self._registries = [owner.registry for _, owner in owners]
        self._names = [owner.name for _, owner in owners]
        self._sharded_at = [each.sharded for each, _ in owners]
        self._unsharded_at = [each.unsharded for each, _ in owners]
        self._shown = self._sharded_at
        kinds = dict.fromkeys(type(each).part for each in parameters)
        alike = [(part, [p for p in parameters if type(p).part is part]) for part in kinds]
        self._parts = [
            (part, [each.local_view for each in same], [each.sharded for each in same])
            for part, same in alike
        ]
        self._shards = list(shards)
        self._flat = list(flat)
        # Of the memory that shards are parts of: each holds it, until it is moved elsewhere.
        self._storages = [each.untyped_storage() for each in flat]
        self._references = storage_references(self._storages)
        self._addresses = list(map(Tensor.data_ptr, shards))
        self._joined = list(joined)
        self._training: list[bool] = []

    @staticmethod
    def join(tables: "Sequence[ParameterTable]") -> "ParameterTable":
        """Return the table of the parameters of all ``tables``, each of which goes on by itself."""
        parameters = [each for table in tables for each in table._parameters]
        shards = [each for table in tables for each in table._shards]
        flat = [each for table in tables for each in table._flat]
        made = ParameterTable(parameters, shards, flat, tables)
        # As they were when the tables were made: a shard may have moved since.
        made._references = [each for table in tables for each in table._references]
        made._addresses = [each for table in tables for each in table._addresses]
        return made

    def joins(self, tables: "Sequence[ParameterTable]") -> bool:
        """Return whether these are the tables that it was made of."""
        return self._joined == tables

    def show_sharded(self) -> None:
        """Register the sharded parameters with their modules."""
        _run(map(setitem, self._registries, self._names, self._sharded_at))
        self._shown = self._sharded_at

    def show_unsharded(self) -> None:
        """Register the unsharded parameters with their modules."""
        _run(map(setitem, self._registries, self._names, self._unsharded_at))
        self._shown = self._unsharded_at

    def is_shown(self) -> bool:
        """Return whether modules have what was registered last, and nothing else."""
        tables = self._joined or [self]
        shown = chain.from_iterable([table._shown for table in tables])
        try:
            return all(map(is_, map(getitem, self._registries, self._names), shown))
        except KeyError:
            return False  # one was removed

    def is_in_place(self) -> bool:
        """Return whether the sharded parameters have the memory of their shards, where it was."""
        same = [all(map(is_, parts, map(part, found))) for part, parts, found in self._parts]
        return all(same) and not self.moved()

    def moved(self) -> bool:
        """Return whether the memory of a shard is no longer the flat shard's.

        Sending a tensor to another process moves its storage to shared memory, on the CPU.
        """
        references = storage_references(self._storages)
        if references == self._references:
            return False
        if list(map(Tensor.data_ptr, self._shards)) != self._addresses:
            return True
        self._references = references  # somebody made or dropped a view
        return False

    def note_training(self) -> bool:
        """Note which sharded parameters train; return whether others did when this was called."""
        before, self._training = self._training, training(self.sharded)
        return before != self._training

    def training_changed(self) -> bool:
        """Return whether others train now than those that `note_training` noted."""
        return training(self.sharded) != self._training

    def hooked(self) -> bool:
        """Return whether there are hooks that run when a gradient is reduced."""
        return any_hooks_after_gradient(self.sharded)
