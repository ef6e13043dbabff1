"""Which faces of a group's parameters its modules have: what every gather and reshard changes."""

from collections.abc import Sequence
from operator import is_

from ._parameters import ShardedParameter


class Faces:
    """The sharded and the unsharded faces of parameters, with the places to register them in.

    Laid out once as flat lists, because each gather and each reshard goes through all of them. Made
    anew when faces are.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        """Register nothing."""
        self._both = [(each.sharded, each.unsharded) for each in parameters]
        places = [(each, owner) for each in parameters for owner in each.owners]
        self._places = [(owner.registry, owner.name) for _, owner in places]
        self._sharded = [each.sharded for each, _ in places]
        self._unsharded = [each.unsharded for each, _ in places]

    def show_sharded(self) -> None:
        """Register the sharded faces."""
        for (registry, name), face in zip(self._places, self._sharded, strict=True):
            registry[name] = face

    def show_unsharded(self) -> None:
        """Register the unsharded faces, which train if the sharded ones do.

        In backward too: autograd drops the gradient of what was frozen since its forward.
        """
        for sharded, unsharded in self._both:
            if unsharded.requires_grad is not sharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
        for (registry, name), face in zip(self._places, self._unsharded, strict=True):
            registry[name] = face

    @property
    def sharded_shown(self) -> bool:
        """Return whether the sharded faces, and nothing else, are registered."""
        try:
            shown = [registry[name] for registry, name in self._places]
        except KeyError:
            return False  # one was removed
        return all(map(is_, shown, self._sharded))
