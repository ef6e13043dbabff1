"""The parameter groups of one unit, and the operations that apply to all of them."""

from collections.abc import Sequence
from operator import is_

import torch

from ._errors import ParameterError
from ._group import GATHERABLE, ParameterGroup
from ._param import ShardedParameter, are_unchanged
from ._stats import UnitComm


class ParameterGroups(tuple[ParameterGroup, ...]):
    """The parameter groups of one unit: one for each dtype and set of ranks.

    Attributes:
        comm: Starts and counts the collectives of the unit.
        retained: Whether the parameters were left unsharded, or sharded over fewer ranks, at the
            end of forward or backward. User code may then write to the shards, so `stale` has to be
            checked before the parameters are used again.
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
        return any([group.state in GATHERABLE for group in self])

    @property
    def replicated(self) -> bool:
        """Return whether gradients are all-reduced over replicas."""
        return any([axis.size > 1 for group in self for axis in group.axes.replicate])

    @property
    def stale(self) -> bool:
        """Return whether an optimizer stepped, or code wrote to the shards, since `retain`."""
        return any([group.stale for group in self])

    def unshard(self) -> None:
        """Wait for the all-gathers, and register the unsharded parameters with the modules.

        If an all-gather has not been started, it is started here.
        """
        for group in self:
            group.unshard()

    def retain(self) -> None:
        """Keep the unsharded parameters, and detect writes to the shards from now on."""
        self.retained = True
        for group in self:
            group.note_writes()

    def reshard_to_fewer(self) -> None:
        """Reshard to the number of ranks that an integer ``reshard_after_forward`` selects."""
        self.retained = True
        for group in self:
            group.reshard_to_fewer()
            group.note_writes()

    def copy_requires_grad_to_sharded(self) -> None:
        """Copy ``requires_grad`` of the registered unsharded parameters to the sharded ones."""
        for group in self:
            group.copy_requires_grad_to_sharded()

    def copy_requires_grad_to_unsharded(self, backward: bool = False) -> None:
        """Copy ``requires_grad`` of the sharded parameters to the unsharded ones.

        If ``backward`` is True, ``requires_grad`` is never changed from True to False. Autograd
        then still computes the gradient of a parameter that was frozen after its forward. This
        gradient is dropped instead of reduced.
        """
        for group in self:
            group.copy_requires_grad_to_unsharded(backward)

    def check_registered(self) -> None:
        """Raise `ParameterError` if user code replaced or removed unsharded parameters."""
        for group in self:
            if group.unsharded and not are_unchanged([group.table], backward=True):
                where = group.comm.path or "the root module"
                raise ParameterError(
                    f"parameters of {where} were replaced or removed while they were unsharded; "
                    "call reshard() on the module before you change its parameters"
                )

    def check_unfrozen(self) -> None:
        """Raise `StateError` if parameters were unfrozen while gradients wait for a reduction."""
        for group in self:
            group.check_unfrozen()

    def finish_copies(self) -> None:
        """Block the host until copies from pinned shards to the device are finished."""
        for group in self:
            group.finish_copies()

    def drop_gradients(self) -> None:
        """Drop the gradients that are not reduced yet."""
        for group in self:
            group.drop_gradients()

    def take_replacements(self, final: bool) -> bool:
        """Copy parameters that user code replaced or converted back to the flat shards.

        If one of them cannot be used, none is copied.

        Args:
            final: Whether to raise if a parameter cannot be used. If True, the previous sharded
                parameters are registered again first, except in place of removed ones. If False,
                this method returns, and the next all-gather checks again.

        Returns:
            Whether unsharded parameters were created again.

        Raises:
            ParameterError: A parameter cannot be used, and ``final`` is True.
            StateError: Parameters were converted while their gradients wait for a reduction.
        """
        errors = [error for group in self for error in group.replacement_errors()]
        if errors and final:
            for group in self:
                group.undo_replacements()
            raise ParameterError("; ".join(errors))
        if errors:
            return False
        for group in self:
            group.check_converted()
        before = [parameter.unsharded for parameter in self.parameters]
        for group in self:
            group.reset_sharded()
        now = [parameter.unsharded for parameter in self.parameters]
        return not all(map(is_, before, now))
