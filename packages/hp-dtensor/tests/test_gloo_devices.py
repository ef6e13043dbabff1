"""Collectives over gloo of tensors that are not on the CPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_dtensor import TorchCollectives

from .accelerator import OnAccelerator, recorded
from .meshes import world_axis

Ranks = Callable[[int], RankPool]
pytestmark = pytest.mark.gloo
CASES: dict[str, Callable[[int], list[Tensor]]] = {
    "one": lambda rank: [torch.full((3,), float(rank))],
    "two dtypes": lambda rank: [torch.full((3,), float(rank)), torch.full((2, 2), rank)],
    "complex": lambda rank: [torch.full((3,), rank + 1j)],
    "no elements": lambda rank: [torch.empty(0)],
}


def sent(rank: int, case: str, strided: bool) -> tuple[list[str], bool, bool]:
    """Send to the next rank. Return the operators that gloo got, and whether values are right.

    Every second element of a strided output must stay unchanged.
    """
    axis = world_axis()
    right, left = (rank + 1) % axis.size, (rank - 1) % axis.size
    given, expected = CASES[case](rank), CASES[case](left)
    memory = [torch.zeros((*x.shape, 2), dtype=x.dtype) for x in given]
    places = [x[..., 0] if strided else x[..., 0].contiguous() for x in memory]
    sends = {right: [OnAccelerator(x) for x in given]}
    receives = {left: [OnAccelerator(x) for x in places]}
    with recorded() as reached:
        work = TorchCollectives().send_recv(axis, sends, receives)
        for _ in range(2):
            outputs: Any = work.wait()
        kept = all(out is place for out, place in zip(outputs, receives[left], strict=True))
        arrived = all(torch.equal(x, y) for x, y in zip(places, expected, strict=True))
        return list(reached), kept and arrived, all(not x[..., 1].any() for x in memory)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", sorted(CASES))
def test_only_cpu_memory_reaches_send_and_receive(ranks: Ranks, case: str, strided: bool) -> None:
    for reached, arrived, rest in ranks(2).run(sent, case, strided):
        assert reached == []
        assert arrived
        assert rest


def sent_under_inference(rank: int) -> bool:
    axis, peer = world_axis(), 1 - rank
    with torch.inference_mode():
        place = torch.zeros(2)
        own = OnAccelerator(torch.full((2,), float(rank)))
        work = TorchCollectives().send_recv(axis, {peer: own}, {peer: OnAccelerator(place)})
    work.wait()
    return bool((place == peer).all())


def test_tensors_of_inference_mode_are_staged_too(ranks: Ranks) -> None:
    assert all(ranks(2).run(sent_under_inference))


class Broken(RuntimeError):
    """Error that the test raises."""


class Failing:
    """A work that has ended with an error."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, *timeout: Any) -> None:
        """Wait, then raise."""
        self.work.wait(*timeout)
        raise Broken("wait")


def failed(rank: int) -> tuple[list[str], bool]:
    """Let the second of two receives fail; return the errors, and if the outputs are unchanged."""
    axis, peer = world_axis(), 1 - rank
    recv, calls = ProcessGroup.recv, list[Any]()

    def failing(*args: Any) -> Any:
        calls.append(args)
        work = recv(*args)
        return Failing(work) if len(calls) == 2 else work

    memory = [torch.zeros(2), torch.zeros(2)]
    places = [OnAccelerator(x) for x in memory]
    own = [OnAccelerator(torch.ones(2)) for _ in memory]
    with mock.patch.object(ProcessGroup, "recv", failing):
        work = TorchCollectives().send_recv(axis, {peer: own}, {peer: places})
    said = []
    for _ in range(2):
        try:
            work.wait()
        except Broken as error:
            said.append(str(error))
    return said, not any(x.any() for x in memory)


def test_after_an_error_of_a_wait_nothing_is_copied_back(ranks: Ranks) -> None:
    for said, unchanged in ranks(2).run(failed):
        assert said == ["wait", "wait"]
        assert unchanged


def reduced(rank: int) -> tuple[list[str], list[bool]]:
    axis, collectives = world_axis(), TorchCollectives()
    n, total = axis.size, sum(range(axis.size))
    parts = [torch.full((3,), float(rank)), torch.full((2,), rank), torch.full((2,), rank + 1j)]
    expected = [
        torch.full((3,), float(total)),
        torch.full((2,), total),
        torch.full((2,), total + n * 1j),
    ]
    right = []
    with recorded() as reached:
        collectives.all_reduce(axis, [OnAccelerator(x) for x in parts]).wait()
        right += [torch.equal(x, y) for x, y in zip(parts, expected, strict=True)]
        more = [torch.full((3,), float(rank)), torch.full((2,), rank + 1.0)]
        collectives.all_reduce(axis, [OnAccelerator(x) for x in more], "avg").wait()
        right += [bool((more[0] == total / n).all()), bool((more[1] == total / n + 1).all())]
        return sorted(set(reached)), right


def test_lists_are_reduced_one_by_one(ranks: Ranks) -> None:
    for reached, right in ranks(2).run(reduced):
        assert reached == ["allreduce_"]
        assert all(right)


def memory_of(x: Any) -> Tensor:
    memory: Tensor = x.memory
    return memory


def others(rank: int) -> tuple[list[str], list[bool]]:
    """Run the other collectives on one tensor and on two."""
    axis, collectives = world_axis(), TorchCollectives()
    n = axis.size
    own, rows = torch.full((2,), float(rank)), torch.arange(2.0 * n)
    whole = torch.arange(float(n)).repeat_interleave(2)
    right: list[bool] = []
    with recorded() as reached:
        for count in (1, 2):
            outputs = collectives.all_gather(
                axis, [OnAccelerator(own) for _ in range(count)]
            ).wait()
            right += [torch.equal(memory_of(x), whole) for x in outputs]
            outputs = collectives.reduce_scatter(
                axis, [OnAccelerator(rows) for _ in range(count)]
            ).wait()
            right += [torch.equal(memory_of(x), n * rows[2 * rank :][:2]) for x in outputs]
        outputs = collectives.all_to_all(axis, OnAccelerator(own.repeat(n))).wait()
        right += [torch.equal(memory_of(x), whole) for x in outputs]
        return sorted(set(reached)), right


def test_other_collectives_are_operators_that_gloo_supports_on_cuda(ranks: Ranks) -> None:
    supported = ["_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"]
    for reached, right in ranks(2).run(others):
        assert reached == supported
        assert all(right)
