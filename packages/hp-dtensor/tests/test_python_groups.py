"""Process groups written in Python: every collective calls the methods of the subclass."""

from collections import Counter, defaultdict
from collections.abc import Callable
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from rank_pool.threads import on_threads
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ret_work

from hp_dtensor import Axis, Layout, NonMember, TorchCollectives, redistribute
from hp_dtensor import Shard as Rows

Ranks = Callable[[int], RankPool]
# The new name of torch 2.13 and the older name of each method.
RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
LISTS = ("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "allreduce_coalesced")
SINGLES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")


def counting(inner: ProcessGroup, names: dict[str, str]) -> tuple[ProcessGroup, "Counter[str]"]:
    """Return a group without a backend that counts calls and passes them on, and the counts.

    ``names`` maps each overridden method to the method of ``inner`` that it calls.
    """
    calls: Counter[str] = Counter()

    def passing_on(name: str, target: str) -> Callable[..., Any]:
        def method(self: ProcessGroup, *args: Any) -> Any:
            calls[name] += 1
            return getattr(inner, target)(*args)

        return method

    methods = {name: passing_on(name, target) for name, target in names.items()}
    kind: Any = type("CountingGroup", (ProcessGroup,), methods)
    return kind(inner.rank(), inner.size()), calls


def known(name: str) -> str:
    """Return the name that this version of torch has for a method."""
    return name if hasattr(ProcessGroup, name) else RENAMED[name]


def overridden(old_names: bool, lists: bool) -> dict[str, str]:
    """Return the methods that a subclass overrides, with new or old names."""
    methods = [*SINGLES, "allreduce", "broadcast", "send", "recv", *(LISTS if lists else ())]
    return {
        (RENAMED.get(name, name) if old_names else known(name)): known(name) for name in methods
    }


def with_backend(rank: int) -> dict[str, int]:
    """Call a subclass that overrides two methods and has gloo as its backend."""
    inner: Any = dist.new_group()
    names = {known(name): known(name) for name in SINGLES[:2]}
    made: Any
    made, calls = counting(inner, names)
    cpu = torch.device("cpu")
    made._register_backend(cpu, ProcessGroup.BackendType.GLOO, inner._get_backend(cpu))
    axis, collectives = Axis("x", made, tuple(range(inner.size()))), TorchCollectives()
    (whole,) = collectives.all_gather(axis, [torch.full((2**19,), float(rank))]).wait()
    (part,) = collectives.reduce_scatter(axis, [torch.arange(4.0)]).wait()
    assert whole.sum() == 2**19
    assert part.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
    return dict(calls)


def test_a_subclass_with_gloo_keeps_its_methods(ranks: Ranks) -> None:
    for calls in ranks(2).run(with_backend):
        assert calls == {known(name): 1 for name in SINGLES[:2]}


def every_collective(rank: int, old_names: bool, lists: bool) -> tuple[dict[str, int], list[bool]]:
    inner: Any = dist.new_group()
    group, calls = counting(inner, overridden(old_names, lists))
    n = inner.size()
    # torch's functions look a group up in this table.
    groups: Any = dist.distributed_c10d._world
    groups.pg_map[group], groups.pg_group_ranks[group] = (
        ("counting", None),
        {r: r for r in range(n)},
    )
    groups.pg_names[group] = "counting"
    axis, collectives = Axis("x", group, tuple(range(n))), TorchCollectives()
    own, rows = torch.full((2,), float(rank)), torch.arange(2.0 * n)
    whole = torch.arange(float(n)).repeat_interleave(2)
    total = n * rows[2 * rank : 2 * rank + 2]
    same = []

    def check(found: list[Tensor], expected: list[Tensor]) -> None:
        same.append(all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)))

    out = torch.empty(2 * n)
    check(collectives.all_gather(axis, [own]).wait(), [whole])
    check(collectives.all_gather(axis, [own], [out]).wait(), [whole])
    collectives.prepare_all_gather(axis, own, out.zero_())().wait()
    check([out], [whole])
    two = [own, own + 1]
    check(collectives.all_gather(axis, two).wait(), [whole, whole + 1])
    part = torch.empty(2)
    check(collectives.reduce_scatter(axis, [rows]).wait(), [total])
    check(collectives.reduce_scatter(axis, [rows], [part]).wait(), [total])
    collectives.prepare_reduce_scatter(axis)(part.zero_(), rows).wait()
    check([part], [total])
    check(collectives.reduce_scatter(axis, [rows, rows + 1]).wait(), [total, total + n])
    check(collectives.all_reduce(axis, [torch.ones(3)]).wait(), [torch.full((3,), float(n))])
    parts = [torch.ones(3), torch.ones(2)]
    check(collectives.all_reduce(axis, parts).wait(), [x * n for x in map(torch.ones, (3, 2))])
    check(collectives.all_to_all(axis, torch.full((2 * n,), float(rank))).wait(), [whole])
    check(collectives.broadcast(axis, [own.clone()], source=1).wait(), [torch.ones(2)])
    right, left = (rank + 1) % n, (rank - 1) % n
    arrived = collectives.send_recv(axis, {right: own}, {left: torch.empty(2)}).wait()
    check(arrived, [torch.full((2,), float(left))])
    for table in (groups.pg_map, groups.pg_group_ranks, groups.pg_names):
        del table[group]
    return dict(calls), same


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("old_names", [True, False])
def test_every_collective_calls_the_methods_of_a_subclass(
    ranks: Ranks, old_names: bool, lists: bool
) -> None:
    for calls, same in ranks(2).run(every_collective, old_names, lists):
        assert all(same)
        named = {old: new for new, old in RENAMED.items()}
        found: Counter[str] = Counter()
        for name, count in calls.items():
            found[named.get(name, name)] += count
        singles = {"all_gather_single": 3, "reduce_scatter_single": 3, "all_to_all_single": 1}
        others = {"allreduce": 1, "broadcast": 1, "send": 1, "recv": 1}
        if lists:
            assert found == {**singles, **others, **dict.fromkeys(LISTS, 1)}
        else:  # a call for each of two tensors
            assert found == {
                **singles,
                **others,
                "all_gather_single": 5,
                "reduce_scatter_single": 5,
                "allreduce": 3,
            }
        assert set(calls) == set(overridden(old_names, lists))


def moved(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(32.0).view(8, 4)
    found = []
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)]):
        x = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        y = redistribute(redistribute(x, placements=placements), placements=[Shard(0), Shard(0)])
        found.append(torch.equal(y.to_local(), whole[2 * rank : 2 * rank + 2]))
    return found


def test_redistribute_runs_over_torchs_threaded_group() -> None:
    assert on_threads(4, moved) == [[True] * 3] * 4


class Arriving:
    """A receive that is completed by `wait`."""

    def __init__(self, tensor: Tensor, queue: "Queue[Tensor]") -> None:
        self.tensor, self.queue = tensor, queue

    def wait(self) -> None:
        """Copy the next tensor of the sender."""
        self.tensor.copy_(self.queue.get(timeout=60))


def test_redistribute_between_meshes_sends_over_a_python_group() -> None:
    queues: defaultdict[tuple[str, int, int], Queue[Tensor]] = defaultdict(Queue)

    def send(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        queues[self.pg_name, self.rank(), peer].put(tensors[0].clone())
        return ret_work(tensors)

    def recv(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Arriving:
        return Arriving(tensors[0], queues[self.pg_name, peer, self.rank()])

    def run(rank: int) -> bool:
        one, other = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [0, 1, 2]))
        whole = torch.arange(24.0).view(6, 4)
        layout = Layout((2,), (Rows(0),), ranks=(0, 1))
        x: Any = NonMember(layout, (6, 4), whole.dtype)
        if rank < 2:
            x = DTensor.from_local(whole[3 * rank :][:3], one, [Shard(0)], run_check=False)
        y = redistribute(x, mesh=other, placements=[Shard(0)])
        return torch.equal(y.to_local(), whole[2 * rank :][:2])

    with (
        mock.patch.object(ProcessLocalGroup, "send", send),
        mock.patch.object(ProcessLocalGroup, "recv", recv),
    ):
        assert on_threads(3, run) == [True] * 3


def test_collectives_run_over_torchs_threaded_group() -> None:
    def run(rank: int) -> list[list[float]]:
        axis, collectives = Axis.of(init_device_mesh("cpu", (2,))), TorchCollectives()
        own, rows = torch.full((1,), float(rank)), torch.arange(2.0)
        gathered = collectives.all_gather(axis, [own, own + 1]).wait()
        (part,) = collectives.reduce_scatter(axis, [rows], op="avg").wait()
        (sums,) = collectives.all_reduce(axis, [own.clone()]).wait()
        (exchanged,) = collectives.all_to_all(axis, own.repeat(2)).wait()
        return [x.tolist() for x in (*gathered, part, sums, exchanged)]

    expected = [[0.0, 1.0], [1.0, 2.0], [1.0], [0.0, 1.0]]
    for rank, (first, second, part, *others) in enumerate(on_threads(2, run)):
        assert [first, second, *others] == expected
        assert part == [float(rank)]
