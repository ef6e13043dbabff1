"""Dispatchers tell how many experts they serve, on which ranks."""

from torch import Tensor

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    AllToAll,
    Dedup,
    DispatchState,
    Hierarchical,
    Local,
    Padded,
    Placement,
    TokenDispatcher,
)
from hp_ep.dispatch._interface import ShardedDispatcher
from hp_ep.dispatch._wrappers import Placed, Summed

Told = tuple[int | None, tuple[int, ...] | None]


def _told(dispatcher: TokenDispatcher) -> Told:
    assert isinstance(dispatcher, ShardedDispatcher)
    return dispatcher.num_experts, dispatcher.ranks


def test_dispatchers_tell_their_experts_and_the_ranks_in_the_order_of_the_blocks() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> dict[str, Told]:
        mesh = door.mesh((2, 2), ("efsdp", "ep"))
        nodes = door.mesh((2, 2), ("node", "inside"))
        flat = AllToAll(mesh, 4, door)
        made: dict[str, TokenDispatcher] = {
            "AllToAll": flat,
            "Dedup": Dedup(mesh, 4, door),
            "Padded": Padded(mesh, 4, door, capacity=1),
            "Hierarchical": Hierarchical(nodes, 8, door),
            "Local": Local(4),
            "Placed": Placed(flat, placement, me % 2),
            "Summed": Summed(flat, door.axis("tp", [me % 2, me % 2 + 2]), door),
        }
        return {name: _told(dispatcher) for name, dispatcher in made.items()}

    for me, told in enumerate(SimulatedWorld(4).run(rank)):
        row = (me // 2 * 2, me // 2 * 2 + 1)
        same = dict.fromkeys(["AllToAll", "Dedup", "Padded", "Summed"], (4, row))
        assert told == {
            **same,
            "Hierarchical": (8, (0, 1, 2, 3)),
            "Local": (4, ()),
            "Placed": (3, row),
        }


class _Silent:
    def dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor
    ) -> tuple[Tensor, Tensor, DispatchState]:
        raise NotImplementedError

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        raise NotImplementedError


def test_what_is_around_a_dispatcher_that_does_not_tell_does_not_either() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Told]:
        silent = _Silent()
        assert not isinstance(silent, ShardedDispatcher)
        placement = Placement.contiguous(3, 1)
        return [_told(Placed(silent, placement)), _told(Summed(silent, door.axis(), door))]

    assert SimulatedWorld(1).run(rank) == [[(3, None), (None, None)]]
