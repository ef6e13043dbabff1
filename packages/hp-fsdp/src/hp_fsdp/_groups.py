"""The parameter groups of one unit, and the operations that apply to all of them."""

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from ._errors import ParameterError, first_error
from ._group import RESTING, ParameterGroup
from ._param import ShardedParameter, are_shown
from ._states import ParameterState
from ._stats import UnitComm

# Called for all groups several times per forward, by functions that make no calls in Python.
_RESTING = frozenset(RESTING)
_state_of, _is_stale, _trains = attrgetter("state"), attrgetter("stale"), attrgetter("trains")


class ParameterGroups(tuple[ParameterGroup, ...]):
    """The parameter groups of one unit: one for each dtype and set of ranks.

    Attributes:
        comm: Counts the collectives of the unit.
        retained: Whether parameters stayed unsharded, or sharded over fewer ranks, since the last
            all-gather, while user code may write to the shards.
    """

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.comm = self[0].comm if self else UnitComm(torch.device("cpu"))
        for group in self:
            group.comm = self.comm
        self.retained = False

    @property
    def parameters(self) -> list[ShardedParameter]:
        """Return the parameters of all groups."""
        return [parameter for group in self for parameter in group.parameters]

    @property
    def sharded(self) -> bool:
        """Return whether any group is sharded."""
        return not _RESTING.isdisjoint(map(_state_of, self))

    @property
    def gathering(self) -> bool:
        """Return whether any all-gather is in flight."""
        return ParameterState.GATHERING in map(_state_of, self)

    @property
    def unsharded(self) -> bool:
        """Return whether all groups are unsharded."""
        return all([group.unsharded for group in self])

    @property
    def stale(self) -> bool:
        """Return whether shards were written to since `retain`."""
        return any(map(_is_stale, self))

    @property
    def trains(self) -> bool:
        """Return whether any unsharded parameter requires grad."""
        return any(map(_trains, self))

    def gather(self) -> None:
        """Start the all-gathers of all sharded groups."""
        self.retained = False
        for group in self:
            group.gather()

    def read_tags(self) -> None:
        """Check the tags of the all-gathers in flight when they have ended."""
        for group in self:
            group.reads_tags = True

    def unshard(self) -> None:
        """Wait for the all-gathers, and register the unsharded parameters with the modules."""
        for group in self:
            group.unshard()

    def retain(self) -> None:
        """Keep the parameters as they are, and detect writes to the shards from now on."""
        self.retained = True
        for group in self:
            group.note_writes()

    def reshard(self) -> None:
        """Register the sharded parameters, and free the unsharded ones."""
        if len(self) == 1:
            self[0].reshard()
        elif (error := first_error([group.reshard for group in self])) is not None:
            raise error

    def reshard_to_fewer(self) -> None:
        """Reshard to the number of ranks that an integer ``reshard_after_forward`` selects."""
        self.retained = True
        for group in self:
            group.reshard_to_fewer()
            group.note_writes()

    def reset(self) -> None:
        """Reshard from any state, and drop the gradients that are not reduced yet."""
        if (error := first_error([group.reset for group in self])) is not None:
            raise error

    def train_as_shown(self) -> None:
        """Copy ``requires_grad`` of the registered unsharded parameters to the sharded ones."""
        for group in self:
            group.train_as_shown()

    def train_as_sharded(self, backward: bool = False) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the unsharded ones.

        With ``backward``, no parameter stops to require grad: a parameter that was frozen after its
        forward still gets a gradient, which is not reduced.
        """
        for group in self:
            group.train_as_sharded(backward)

    def stop_frozen(self) -> None:
        """Let parameters that were frozen after an earlier backward get no more gradients."""
        for group in self:
            if group.waiting:
                group.stop_frozen()

    def check_unfrozen(self) -> None:
        """Raise `StateError` if parameters were unfrozen while gradients wait for a reduction."""
        for group in self:
            group.check_unfrozen()

    def finish_copies(self) -> None:
        """Wait on the host for copies from the CPU."""
        for group in self:
            group.finish_copies()

    def reduced(self) -> list[list[int]]:
        """Return the positions of the parameters that the next reduction includes, per group."""
        return list(map(ParameterGroup.reduced, self))

    def hold_gradients(self) -> None:
        """Convert gradients that wait for a later reduction to the dtype of the reduction."""
        for group in self:
            group.hold_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients that are not reduced yet."""
        for group in self:
            group.drop_gradients()

    def were_replaced(self, backward: bool) -> bool:
        """Return whether user code replaced or moved parameters of a sharded group.

        With ``backward``, moved memory does not count, because backward gathers the parameters of
        its forward.
        """
        return any(
            not (are_shown([group.table]) if backward else group.in_place)
            for group in self
            if group.state in RESTING
        )

    def take_replacements(self, final: bool) -> bool:
        """Copy parameters that user code replaced or converted back to the flat shards.

        If one cannot be used, none is copied. With ``final``, the parameters from before are then
        registered again, except for removed ones. Without, the next all-gather checks again.

        Returns:
            Whether unsharded parameters were created again.

        Raises:
            ParameterError: A parameter cannot be used, and ``final`` is True.
            StateError: Parameters were converted while their gradients wait for a reduction.
        """
        refusals = [refusal for group in self for refusal in group.refusals()]
        if refusals and final:
            for group in self:
                group.undo_replacements()
            raise ParameterError("; ".join(refusals))
        if refusals:
            return False
        for group in self:
            group.check_converted()
        before = [parameter.unsharded for parameter in self.parameters]
        for group in self:
            group.reset_sharded()
        now = [parameter.unsharded for parameter in self.parameters]
        return not all(map(is_, before, now))
