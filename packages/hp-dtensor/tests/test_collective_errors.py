"""Collectives that fail in part. No operation is in flight when the error is raised."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from hp_dtensor import Axis, TorchCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .meshes import world_axis

Ranks = Callable[[int], RankPool]
LARGE = 2**19  # of float32: over gloo, each rank broadcasts such tensors one by one
# NCCL gathers several tensors in one call.
KINDS = [pytest.param("all_gather", marks=pytest.mark.gloo), "broadcast"]


class Broken(RuntimeError):
    """Error that the tests raise."""


class Watched:
    """A c10d work handle. ``wait`` can raise after the operation has completed."""

    def __init__(self, work: Any, fails: bool) -> None:
        self.work, self.fails = work, fails

    def wait(self) -> None:
        """Wait, then raise if ``fails`` is True."""
        self.work.wait()
        if self.fails:
            raise Broken("wait")


def failing(function: Any, start: int | None, wait: int | None, seen: list[Watched]) -> Any:
    """Return a function with one start or wait that raises. Odd ranks start late."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() % 2:
            time.sleep(0.02)
        if len(seen) == start:
            raise Broken("start")
        seen.append(Watched(function(*args, **kwargs), len(seen) == wait))
        return seen[-1]

    return call


def part_fails(rank: int, kind: str, start: int | None, wait: int | None) -> dict[str, Any]:
    """Gather or broadcast three large tensors, of which one fails."""
    axis, seen = world_axis(), list[Watched]()
    calls = axis.size if kind == "all_gather" else 1  # per tensor; the first one of them fails
    start, wait = (None if at is None else at * calls for at in (start, wait))
    inputs = [torch.full((LARGE,), 10.0 * i + rank) for i in range(3)]
    outputs: list[Tensor]
    said = []
    if kind == "all_gather":
        outputs = [torch.zeros(LARGE * axis.size) for _ in inputs]
        where: Any = dist.ProcessGroup
        expected = [
            torch.cat([torch.full((LARGE,), 10.0 * i + r) for r in range(axis.size)])
            for i in range(3)
        ]
    else:
        outputs, where = inputs, dist
        expected = [torch.full((LARGE,), 10.0 * i) for i in range(3)]
    with mock.patch.object(where, "broadcast", failing(where.broadcast, start, wait, seen)):
        carrier = TorchCollectives()
        try:
            if kind == "all_gather":
                work = carrier.all_gather(axis, inputs, outputs)
            else:
                work = carrier.broadcast(axis, inputs)
        except Broken as error:
            return {"at once": str(error), "started": len(seen)}
    complete = []
    for _ in range(2):
        try:
            work.wait()
        except Broken as error:
            said.append(str(error))
            complete = [
                torch.equal(x, y)
                for x, y in list(zip(outputs, expected, strict=True))[: len(seen) // calls]
            ]
    return {"said": said, "complete": complete}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_start_that_raises_leaves_nothing_under_way(ranks: Ranks, kind: str, start: int) -> None:
    for found in ranks(2).run(part_fails, kind, start, None):
        if start == 0:
            assert found == {"at once": "start", "started": 0}
        else:
            assert found == {"said": ["start", "start"], "complete": [True] * start}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wait", [0, 1])
def test_waiting_waits_for_all_and_raises_the_first_error_every_time(
    ranks: Ranks, kind: str, wait: int
) -> None:
    for found in ranks(2).run(part_fails, kind, None, wait):
        assert found == {"said": ["wait", "wait"], "complete": [True] * 3}


def abandoned(rank: int, kind: str) -> list[bool]:
    """Drop works and tensors under way, use memory of that size at once, then communicate on."""
    axis, carrier, seen = world_axis(), TorchCollectives(), []
    for _ in range(20):
        if rank:
            time.sleep(0.001)
        x = torch.full((2 * LARGE,), 1.0 + rank)
        if kind == "all_gather":
            carrier.all_gather(axis, [x])
        elif kind == "all_to_all":
            carrier.all_to_all(axis, x)
        elif kind == "all_reduce":
            carrier.all_reduce(axis, [x])
        else:
            carrier.reduce_scatter(axis, [x])
        del x
        held = [torch.full((2 * LARGE,), 7.0) for _ in range(3)]
        (told,) = carrier.all_reduce(axis, [torch.ones(4)]).wait()
        dist.barrier()
        seen += [bool((each == 7.0).all()) for each in held]
        seen.append(bool((told == 2).all()))
    return seen


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "all_reduce", "reduce_scatter"])
def test_memory_that_is_dropped_under_way_lives_as_long_as_it_is_used(
    ranks: Ranks, kind: str
) -> None:
    for seen in ranks(2).run(abandoned, kind):
        assert all(seen)


def waits_twice(rank: int, carrier: SimulatedCollectives) -> int:
    """Make another call than the peer, and return how many of two waits raise."""
    work = carrier.all_gather(carrier.axis(), [torch.ones(2 + rank, dtype=torch.float64)])
    raised = 0
    for _ in range(2):
        try:
            work.wait()
        except RuntimeError:
            raised += 1
    return raised


def test_a_simulated_collective_that_failed_raises_at_every_wait() -> None:
    assert SimulatedWorld(2).run(waits_twice) == [2, 2]


def peer_ends(rank: int, single: bool) -> list[str]:
    """Wait for a rank that does not join the second collective; return the notes of the error."""
    group: Any = dist.new_group(backend="gloo")
    axis = Axis("lost", group, (0, 1))
    TorchCollectives().all_reduce(axis, [torch.ones(1)]).wait()  # with NCCL's rules: all connect
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.5))
    found: list[str] = []
    if rank == 0:
        outputs = [torch.zeros(4)] if single else None
        work = TorchCollectives().all_gather(axis, [torch.ones(2)], outputs)
        for _ in range(2):
            try:
                work.wait()
            except RuntimeError as error:
                found = error.__notes__
    dist.barrier()
    return found


@pytest.mark.parametrize("single", [False, True])
def test_an_error_says_collective_axis_and_ranks_once(ranks: Ranks, single: bool) -> None:
    notes, _ = ranks(2).run(peer_ends, single)
    assert notes == ["in all_gather over axis 'lost' (ranks 0, 1)"]


def receives_nothing(rank: int) -> float:
    """Shorten the timeout of a group in use; return how long a receive waits for a silent rank."""
    group = dist.new_group(timeout=timedelta(seconds=60), backend="gloo")
    axis = Axis("lost", group, (0, 1))
    other, calls = 1 - rank, TorchCollectives()
    calls.send_recv(axis, {other: torch.ones(2)}, {other: torch.zeros(2)}).wait()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.5))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 500ms"):
            calls.send_recv(axis, {}, {1: torch.zeros(2)}).wait()
    waited = time.monotonic() - start
    dist.barrier()
    return waited


@pytest.mark.gloo
def test_a_new_timeout_of_a_group_holds_for_a_receive_too(ranks: Ranks) -> None:
    waited, _ = ranks(2).run(receives_nothing)
    assert 0.5 <= waited < 20


def sent_lazily(rank: int) -> list[bool]:
    """Exchange lazily conjugated and lazily negated tensors."""
    axis, peer = world_axis(), 1 - rank
    value = torch.tensor([1 + 2j]) * (rank + 1)
    sent = [torch.full((1,), float(rank)), value.conj(), value.conj().imag]
    arriving = [torch.zeros(1), torch.zeros(1, dtype=torch.complex64).conj(), torch.zeros(1)]
    TorchCollectives().send_recv(axis, {peer: sent}, {peer: arriving}).wait()
    expected = (torch.tensor([1 + 2j]) * (peer + 1)).conj().resolve_conj()
    return [
        bool((arriving[0] == peer).all()),
        torch.equal(arriving[1].resolve_conj(), expected),
        torch.equal(arriving[2], expected.imag.resolve_neg()),
    ]


def test_lazily_conjugated_tensors_are_sent_and_received(ranks: Ranks) -> None:
    assert ranks(2).run(sent_lazily) == [[True, True, True]] * 2


def send_fails(rank: int) -> tuple[list[str], bool]:
    """Start a receive, then a send that raises on rank 0."""
    axis, said = world_axis(), []
    x, arriving = torch.full((4,), 5.0 + rank), torch.zeros(4)

    def send(*args: Any) -> Any:
        raise Broken("start")

    if rank:
        time.sleep(0.05)
        TorchCollectives().send_recv(axis, {0: x}, {}).wait()
        return ["start", "start"], True
    with mock.patch.object(dist.ProcessGroup, "send", send):
        work = TorchCollectives().send_recv(axis, {1: x}, {1: arriving})
    for _ in range(2):
        try:
            work.wait()
        except Broken as error:
            said.append(str(error))
    return said, bool((arriving == 6).all())


@pytest.mark.gloo
def test_a_send_that_raises_leaves_no_receive_in_flight(ranks: Ranks) -> None:
    assert ranks(2).run(send_fails) == [(["start", "start"], True)] * 2
