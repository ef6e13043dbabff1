"""The branches for NCCL give the right values, and ranks with its rules find planted mistakes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, cached, nccl
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, TorchCollectives, redistribute
from hp_dtensor.collectives import _c10d

Ranks = Callable[[int], RankPool]


def mesh(size: int) -> DeviceMesh:
    return cached(
        f"mesh of {size}", lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    )


def world(size: int) -> Axis:
    return Axis.of(mesh(size), "x")


def new_group(size: int) -> Any:
    """Return a group of all ranks that has not communicated yet."""
    return dist.new_group(list(range(size)))


@contextmanager
def counted(*names: str) -> Iterator[Counter[str]]:
    """Count the calls of ``ProcessGroup``'s methods, by name."""
    calls = Counter[str]()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(ProcessGroup, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    with ExitStack() as stack:
        for name in filter(partial(hasattr, ProcessGroup), names):
            stack.enter_context(mock.patch.object(ProcessGroup, name, counting(name)))
        yield calls


def joined(rank: int, n: int) -> tuple[bool, bool, bool, bool, dict[str, int]]:
    axis, carrier = world(n), TorchCollectives()
    mixed = [
        torch.full((3,), float(rank)),
        torch.full((2, 2), rank + 0.5j),
        torch.full((1,), rank),
    ]
    with counted("_allgather_base", "all_gather_single", "send", "_end_coalescing") as calls:
        gathered = carrier.all_gather(axis, mixed).wait()
        scattered = carrier.reduce_scatter(
            axis, [torch.arange(4.0 * n) + rank, torch.ones(n, 2, dtype=torch.float64)], op="avg"
        ).wait()
        sums = carrier.all_reduce(axis, [torch.ones(2), torch.full((3,), float(rank))]).wait()
        right, left = (rank + 1) % n, (rank - 1) % n
        places = [torch.empty(4), torch.empty(2, dtype=torch.complex64)]
        sent = [torch.full((4,), float(rank)), torch.full((2,), 1j * rank)]
        carrier.send_recv(axis, {right: sent}, {left: places}).wait()
    whole = [torch.cat([x - rank + r for r in range(n)]) for x in mixed]
    mean = (torch.arange(4.0 * n) + (n - 1) / 2)[4 * rank : 4 * rank + 4]
    return (
        all(map(torch.equal, gathered, whole)),
        torch.equal(scattered[0], mean) and bool((scattered[1] == 1).all()),
        bool((sums[0] == n).all()) and bool((sums[1] == sum(range(n))).all()),
        bool((places[0] == left).all()) and bool((places[1] == 1j * left).all()),
        dict(calls),
    )


def test_several_tensors_travel_together_and_sends_and_receives_in_one_batch(
    nccl_ranks: Ranks,
) -> None:
    expected = True, True, True, True, {"send": 2, "_end_coalescing": 1}
    assert nccl_ranks(3).run(joined, 3) == [expected] * 3


def refused(rank: int, dtype: torch.dtype, op: str) -> str:
    x, ops = torch.ones(2, dtype=dtype), dist.ReduceOp
    try:
        if op == "send":
            dist.isend(x, 1 - rank)
        elif op == "gather":
            dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
        else:
            dist.all_reduce(x, getattr(ops, op))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("dtype", "op", "words"),
    [
        (torch.int16, "send", "data type is not supported"),
        (torch.int16, "gather", "data type is not supported"),
        (torch.uint64, "SUM", "data type is not supported"),
        (torch.bool, "AVG", "with Boolean inputs"),
        (torch.int32, "BXOR", "Cannot use"),
        (torch.float8_e4m3fn, "SUM", "reduces no"),
        (torch.bool, "SUM", "nothing"),
        (torch.int64, "AVG", "nothing"),
    ],
)
def test_calls_that_nccl_does_not_support_raise(
    nccl_ranks: Ranks, dtype: torch.dtype, op: str, words: str
) -> None:
    assert all(words in found for found in nccl_ranks(2).run(refused, dtype, op))


def complex_rows(rank: int, broken: bool) -> str:
    x = DTensor.from_local(torch.full((2,), 1j * rank), mesh(2), [Shard(0)])
    unchanged: Any = mock.patch.object(_c10d, "_real", lambda tensor, op=None: tensor)
    try:
        with unchanged if broken else nullcontext():
            return str(redistribute(x, [Replicate()]).to_local().tolist())
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (False, "[0j, 0j, 1j, 1j]"),
        (
            True,
            "Input tensor data type is not supported for NCCL process group: torch.complex64",
        ),
    ],
)
def test_complex_numbers_that_are_not_viewed_as_real_ones_are_refused(
    nccl_ranks: Ranks, broken: bool, expected: str
) -> None:
    assert nccl_ranks(2).run(complex_rows, broken) == [expected] * 2


def early(rank: int) -> tuple[bool, bool, bool]:
    x, out = torch.ones(2), torch.zeros(4)
    work: Any = dist.all_gather_into_tensor(out, x, async_op=True)
    before = bool(out.isnan().all())
    work.wait()
    after = bool((out == 1).all())
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    x.zero_()
    work.wait()
    return before, after, bool(out.isnan().any())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_outputs_are_undefined_until_the_wait_and_if_the_input_changes_before(
    nccl_ranks: Ranks,
) -> None:
    assert nccl_ranks(2).run(early) == [(True, True, True)] * 2


def unwaited(rank: int, forgets: bool) -> Tensor:
    x = DTensor.from_local(torch.full((2,), float(rank)), mesh(2), [Shard(0)])
    forget: Any = mock.patch.object(_c10d._PendingWork, "wait", lambda self: self._outputs)
    if not forgets:
        return redistribute(x, [Replicate()]).to_local()
    with forget:
        return redistribute(x, [Replicate()]).to_local().clone()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_result_that_was_not_waited_for_is_wrong(nccl_ranks: Ranks, forgets: bool) -> None:
    for found in nccl_ranks(2).run(unwaited, forgets):
        assert torch.equal(found, torch.tensor([0.0, 0.0, 1.0, 1.0])) is not forgets


def some(rank: int, connected: bool) -> str:
    group, out = new_group(3), torch.zeros(2)
    if connected:
        dist.barrier()
        dist.all_reduce(out.clone(), group=group)
    try:
        with mock.patch.object(nccl, "CONNECT_SECONDS", 0.5):
            if rank == 0:
                operations = [dist.P2POp(dist.isend, out + 1, 1, group)]
            elif rank == 1:
                operations = [dist.P2POp(dist.irecv, out, 0, group)]
            else:
                return ""
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    except RuntimeError as error:
        return str(error)
    return str(out.tolist())


def test_the_first_batch_of_a_group_needs_all_its_ranks(nccl_ranks: Ranks) -> None:
    first, second, _ = nccl_ranks(3).run(some, False)
    assert "ranks [2] of group" in first
    assert "ranks [2] of group" in second
    assert nccl_ranks(3).run(some, True) == ["[0.0, 0.0]", "[1.0, 1.0]", ""]
