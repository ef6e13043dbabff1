"""The three implementations of `Collectives` agree, and gradients are adjoints."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool, cached
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import (
    AutogradCollectives,
    Axis,
    Collectives,
    RecordingCollectives,
    TorchCollectives,
)
from hp_dtensor.collectives._c10d import _average
from hp_dtensor.collectives._uneven import start_uneven_reduce_scatter
from hp_dtensor.testing import SimulatedCollectives, SimulatedGroup, SimulatedWorld
from hp_dtensor.torch_compat import backend_of

Program = Callable[[Collectives, Axis], list[Tensor]]


def numbers(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, shape, generator=generator).double()


def gather(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.all_gather(axis, [numbers(axis.index, 3, 2)]).wait()


def gather_list(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.all_gather(
        axis, [numbers(axis.index, 3, 2), numbers(axis.index + 9, 1)]
    ).wait()


def gather_small_and_large(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [numbers(axis.index, 2), numbers(axis.index, 2**17), numbers(axis.index + 9, 1)]
    return collectives.all_gather(axis, parts).wait()


def gather_dtypes(collectives: Collectives, axis: Axis) -> list[Tensor]:
    exact = torch.tensor([2**53 + 1 + axis.index])  # no float has it
    parts = [exact, numbers(axis.index, 2).float(), exact + 4, numbers(axis.index, 3)]
    return collectives.all_gather(axis, parts).wait()


def gather_into(collectives: Collectives, axis: Axis) -> list[Tensor]:
    out = torch.zeros(3 * axis.size + 1, dtype=torch.double)
    collectives.all_gather(axis, [numbers(axis.index, 3)], [out[1:]]).wait()
    return [out]


def scatter(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.reduce_scatter(axis, [numbers(axis.index, 2 * axis.size, 3)]).wait()


def scatter_list(collectives: Collectives, axis: Axis) -> list[Tensor]:
    n = axis.size
    return collectives.reduce_scatter(
        axis, [numbers(axis.index, n), numbers(axis.index, 2 * n)]
    ).wait()


def scatter_mean_of_list(collectives: Collectives, axis: Axis) -> list[Tensor]:
    n, parts = axis.size, [(0,), (axis.size, 2), (3 * axis.size,)]
    outputs = [numbers(1, *(rows // n, *rest)) for rows, *rest in parts]
    inputs = [numbers(axis.index, *part) for part in parts]
    return collectives.reduce_scatter(axis, inputs, outputs, op="avg").wait()


def scatter_large(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [numbers(axis.index, axis.size * 2**17), numbers(axis.index, axis.size)]
    return collectives.reduce_scatter(axis, parts).wait()


def scatter_mean(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.reduce_scatter(axis, [numbers(axis.index, axis.size)], op="avg").wait()


def reduce_all(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return [collectives.all_reduce(axis, [numbers(axis.index, 5)], op).wait()[0] for op in OPS]


def reduce_list(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.all_reduce(
        axis, [numbers(axis.index, 5), numbers(axis.index + 4, 2, 2)]
    ).wait()


def reduce_dtypes(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [numbers(axis.index, 5).float(), torch.arange(2) + 2**53, numbers(axis.index, 3)]
    return collectives.all_reduce(axis, parts).wait()


def flags(rank: int, *shape: int) -> Tensor:
    return numbers(rank, *shape) % 2 == 0


def as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bools with a byte of 2 print and count as True, but do not equal it."""
    return [x.view(torch.uint8) if x.dtype == torch.bool else x for x in tensors]


def reduce_bool(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return as_bytes(collectives.all_reduce(axis, [flags(axis.index, 6)]).wait())


def reduce_bool_and_number(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [flags(0, 6), numbers(axis.index, 3)]
    return as_bytes(collectives.all_reduce(axis, parts).wait())


def scatter_bool(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return as_bytes(collectives.reduce_scatter(axis, [flags(0, 3 * axis.size)]).wait())


def scatter_bool_into(collectives: Collectives, axis: Axis) -> list[Tensor]:
    output = torch.zeros(3, dtype=torch.bool)
    return as_bytes(collectives.reduce_scatter(axis, [flags(0, 3 * axis.size)], [output]).wait())


def scatter_bools(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [flags(axis.index, 2 * axis.size), flags(0, axis.size, 3)]
    return as_bytes(collectives.reduce_scatter(axis, parts).wait())


def scatter_bool_and_number(collectives: Collectives, axis: Axis) -> list[Tensor]:
    parts = [flags(0, 2 * axis.size), numbers(axis.index, axis.size)]
    return as_bytes(collectives.reduce_scatter(axis, parts).wait())


def swap_equal(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.all_to_all(axis, numbers(axis.index, 2 * axis.size, 3)).wait()


def swap_uneven(collectives: Collectives, axis: Axis) -> list[Tensor]:
    me, n = axis.index, axis.size
    send = [(me * 3 + peer) % 4 for peer in range(n)]
    receive = [(peer * 3 + me) % 4 for peer in range(n)]
    return collectives.all_to_all(axis, numbers(me, sum(send), 2), send, receive).wait()


def swap_in_pairs(collectives: Collectives, axis: Axis) -> list[Tensor]:
    """Every rank sends rows to itself only. Widths differ between ranks."""
    me, n = axis.index, axis.size
    rows = [3 if peer == me else 0 for peer in range(n)]
    return collectives.all_to_all(axis, numbers(me, 3, 2 + me), rows, rows).wait()


def send_onwards(collectives: Collectives, axis: Axis) -> list[Tensor]:
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    place = torch.empty(4, dtype=torch.double)
    return collectives.send_recv(axis, {after: numbers(axis.index, 4)}, {before: place}).wait()


def send_one_way(collectives: Collectives, axis: Axis) -> list[Tensor]:
    last = axis.size - 1
    sends = {last: numbers(0, 3)} if axis.index == 0 else {}
    receives = {0: torch.empty(3, dtype=torch.double)} if axis.index == last else {}
    return collectives.send_recv(axis, sends, receives).wait()


def send_pairs(collectives: Collectives, axis: Axis) -> list[Tensor]:
    me, n = axis.index, axis.size
    sends = {peer: (numbers(me, 3), numbers(me + peer, 2, 2)) for peer in (me, (me + 1) % n)}
    places = {
        peer: [torch.empty(3, dtype=torch.double), torch.empty(2, 2, dtype=torch.double)]
        for peer in (me, (me - 1) % n)
    }
    return collectives.send_recv(axis, sends, places).wait()


def spread(collectives: Collectives, axis: Axis) -> list[Tensor]:
    tensors = [numbers(axis.index, 3), numbers(axis.index + 5, 2)]
    return collectives.broadcast(axis, tensors, axis.size - 1).wait()


def reduce_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    whole = numbers(axis.index, 3, 4)
    collectives.all_reduce(axis, [whole[:, ::2]], "avg").wait()
    return [whole]


def swap_into_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    whole = numbers(axis.index, axis.size, 4)
    collectives.all_to_all(axis, numbers(axis.index, axis.size, 2), output=whole[:, ::2]).wait()
    return [whole]


def send_into_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    whole = numbers(axis.index, 3, 4)
    collectives.send_recv(axis, {after: numbers(axis.index, 3, 2)}, {before: whole[:, ::2]}).wait()
    return [whole]


def gather_into_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    outputs = [numbers(0, 2, 3 * axis.size).T, numbers(0, axis.size)]
    return collectives.all_gather(
        axis, [numbers(axis.index, 3, 2), numbers(axis.index + 9, 1)], outputs
    ).wait()


def scatter_into_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    n = axis.size
    outputs = [numbers(0, 1), numbers(0, 3, 2).T]
    inputs = [numbers(axis.index, n), numbers(axis.index, 2 * n, 3)]
    return collectives.reduce_scatter(axis, inputs, outputs).wait()


def spread_strided(collectives: Collectives, axis: Axis) -> list[Tensor]:
    whole = numbers(axis.index, 3, 4)
    # The source tensor has other strides than the tensors of its peers.
    part = whole.T[::2].T if axis.index else whole[:, ::2].clone()
    collectives.broadcast(axis, [part]).wait()
    return [whole[:, 1::2], part]


OPS: tuple[Any, ...] = ("sum", "avg", "max", "min", "prod")
PROGRAMS: list[Program] = [
    gather,
    gather_list,
    gather_small_and_large,
    gather_dtypes,
    gather_into,
    scatter,
    scatter_list,
    scatter_large,
    scatter_mean,
    scatter_mean_of_list,
    reduce_all,
    reduce_list,
    reduce_dtypes,
    reduce_bool,
    reduce_bool_and_number,
    scatter_bool,
    scatter_bool_into,
    scatter_bools,
    scatter_bool_and_number,
    swap_equal,
    swap_uneven,
    swap_in_pairs,
    send_onwards,
    send_one_way,
    send_pairs,
    spread,
    reduce_strided,
    swap_into_strided,
    send_into_strided,
    spread_strided,
    gather_into_strided,
    scatter_into_strided,
]
# Expected results of each program on each of n ranks.
EXPECTED: dict[Program, Callable[[int, int], list[Tensor]]] = {
    gather: lambda me, n: [torch.cat([numbers(r, 3, 2) for r in range(n)])],
    gather_list: lambda me, n: [
        torch.cat([numbers(r, 3, 2) for r in range(n)]),
        torch.cat([numbers(r + 9, 1) for r in range(n)]),
    ],
    gather_small_and_large: lambda me, n: [
        torch.cat([numbers(r, 2) for r in range(n)]),
        torch.cat([numbers(r, 2**17) for r in range(n)]),
        torch.cat([numbers(r + 9, 1) for r in range(n)]),
    ],
    gather_dtypes: lambda me, n: [
        torch.arange(n) + 2**53 + 1,
        torch.cat([numbers(r, 2) for r in range(n)]).float(),
        torch.arange(n) + 2**53 + 5,
        torch.cat([numbers(r, 3) for r in range(n)]),
    ],
    gather_into: lambda me, n: [
        torch.cat([torch.zeros(1).double(), *(numbers(r, 3) for r in range(n))])
    ],
    scatter: lambda me, n: [sum_of(n, 2 * n, 3)[2 * me : 2 * me + 2]],
    scatter_list: lambda me, n: [
        sum_of(n, n)[me : me + 1],
        sum_of(n, 2 * n)[2 * me : 2 * me + 2],
    ],
    scatter_large: lambda me, n: [
        sum_of(n, n * 2**17)[me * 2**17 : (me + 1) * 2**17],
        sum_of(n, n)[me : me + 1],
    ],
    scatter_mean: lambda me, n: [sum_of(n, n)[me : me + 1] / n],
    scatter_mean_of_list: lambda me, n: [
        torch.zeros(0).double(),
        sum_of(n, n, 2)[me : me + 1] / n,
        sum_of(n, 3 * n)[3 * me : 3 * me + 3] / n,
    ],
    reduce_all: lambda me, n: [
        sum_of(n, 5),
        sum_of(n, 5) / n,
        torch.stack([numbers(r, 5) for r in range(n)]).amax(0),
        torch.stack([numbers(r, 5) for r in range(n)]).amin(0),
        torch.stack([numbers(r, 5) for r in range(n)]).prod(0),
    ],
    reduce_list: lambda me, n: [
        sum_of(n, 5),
        torch.stack([numbers(r + 4, 2, 2) for r in range(n)]).sum(0),
    ],
    reduce_dtypes: lambda me, n: [
        sum_of(n, 5).float(),
        n * (torch.arange(2) + 2**53),
        sum_of(n, 3),
    ],
    reduce_bool: lambda me, n: [any_of([flags(r, 6) for r in range(n)])],
    reduce_bool_and_number: lambda me, n: [
        any_of([flags(0, 6)]),
        sum_of(n, 3),
    ],
    scatter_bool: lambda me, n: [any_of([flags(0, 3 * n)])[3 * me : 3 * me + 3]],
    scatter_bool_into: lambda me, n: [any_of([flags(0, 3 * n)])[3 * me : 3 * me + 3]],
    scatter_bools: lambda me, n: [
        any_of([flags(r, 2 * n) for r in range(n)])[2 * me : 2 * me + 2],
        any_of([flags(0, n, 3)])[me : me + 1],
    ],
    scatter_bool_and_number: lambda me, n: [
        any_of([flags(0, 2 * n)])[2 * me : 2 * me + 2],
        sum_of(n, n)[me : me + 1],
    ],
    swap_equal: lambda me, n: [
        torch.cat([numbers(r, 2 * n, 3)[2 * me : 2 * me + 2] for r in range(n)])
    ],
    swap_uneven: lambda me, n: [torch.cat([uneven_block(r, me, n) for r in range(n)])],
    swap_in_pairs: lambda me, n: [numbers(me, 3, 2 + me)],
    send_onwards: lambda me, n: [numbers((me - 1) % n, 4)],
    send_one_way: lambda me, n: [numbers(0, 3)] if me == n - 1 else [],
    send_pairs: lambda me, n: [
        part
        for peer in dict.fromkeys((me, (me - 1) % n))
        for part in (numbers(peer, 3), numbers(peer + me, 2, 2))
    ],
    spread: lambda me, n: [numbers(n - 1, 3), numbers(n - 1 + 5, 2)],
    reduce_strided: lambda me, n: [woven(sum_of(n, 3, 4)[:, ::2] / n, numbers(me, 3, 4))],
    swap_into_strided: lambda me, n: [
        woven(torch.stack([numbers(r, n, 2)[me] for r in range(n)]), numbers(me, n, 4))
    ],
    send_into_strided: lambda me, n: [woven(numbers((me - 1) % n, 3, 2), numbers(me, 3, 4))],
    gather_into_strided: lambda me, n: EXPECTED[gather_list](me, n),
    scatter_into_strided: lambda me, n: [
        sum_of(n, n)[me : me + 1],
        sum_of(n, 2 * n, 3)[2 * me : 2 * me + 2],
    ],
    spread_strided: lambda me, n: [numbers(me, 3, 4)[:, 1::2], numbers(0, 3, 4)[:, ::2]],
}


def any_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).any(0).view(torch.uint8)


def woven(even: Tensor, whole: Tensor) -> Tensor:
    """Return ``whole`` with other columns 0, 2 and so on."""
    return torch.stack([even, whole[:, 1::2]], dim=2).flatten(1)


def sum_of(n: int, *shape: int) -> Tensor:
    return torch.stack([numbers(r, *shape) for r in range(n)]).sum(0)


def uneven_block(source: int, target: int, n: int) -> Tensor:
    splits = [(source * 3 + peer) % 4 for peer in range(n)]
    block: Tensor = numbers(source, sum(splits), 2).split(splits)[target]
    return block


def check(program: Program, results: list[list[Tensor]]) -> None:
    for me, result in enumerate(results):
        expected = EXPECTED[program](me, len(results))
        assert len(result) == len(expected)
        for got, want in zip(result, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def world_axis() -> Axis:
    return cached(
        "world", lambda: Axis.of(init_device_mesh("cpu", (SIZE[0],), mesh_dim_names=("world",)))
    )


SIZE = [0]


def on_gloo(rank: int, program: Program, n: int) -> list[Tensor]:
    SIZE[0] = n
    return program(TorchCollectives(), world_axis())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_simulated_collectives_give_the_definition(program: Program, n: int) -> None:
    check(
        program,
        SimulatedWorld(n).run(lambda rank, collectives: program(collectives, collectives.axis())),
    )


@pytest.mark.nccl
@pytest.mark.parametrize("n", [2, 4])
def test_torch_collectives_give_the_definition(ranks: Callable[[int], RankPool], n: int) -> None:
    for program in PROGRAMS:
        check(program, ranks(n).run(on_gloo, program, n))


def prepared(rank: int, n: int, dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Start prepared collectives several times with different values."""
    SIZE[0] = n
    axis, carrier = world_axis(), TorchCollectives()
    own, whole = torch.zeros(3, dtype=dtype), torch.zeros(3 * n, dtype=dtype)
    gather = carrier.prepare_all_gather(axis, own, whole)
    found: dict[str, list[Tensor]] = {"gathered": [], "sum": [], "max": []}
    for step in range(3):
        own.copy_(numbers(rank + step, 3))
        work = gather()
        work.wait()
        work.wait()
        found["gathered"].append(whole.clone())
    for op in ("sum", "max") if dtype.is_floating_point else ("sum",):
        scatter = carrier.prepare_reduce_scatter(axis, op)
        for step in range(3):
            part = torch.zeros(2, dtype=dtype)
            scatter(part, numbers(rank + step, 2 * n).to(dtype)).wait()
            found[op].append(part)
    return found


@pytest.mark.nccl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("n", [2, 3])
def test_a_prepared_collective_communicates_at_each_start(
    ranks: Callable[[int], RankPool], n: int, dtype: torch.dtype
) -> None:
    for rank, found in enumerate(ranks(n).run(prepared, n, dtype)):
        for step, whole in enumerate(found["gathered"]):
            wanted = torch.cat([numbers(r + step, 3) for r in range(n)]).to(dtype)
            torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
        for step, total in enumerate(found["sum"]):
            rows = torch.stack([numbers(r + step, 2 * n) for r in range(n)]).to(dtype)
            own = rows[:, 2 * rank : 2 * rank + 2]
            torch.testing.assert_close(total, own.sum(0), rtol=0, atol=0)
            for most in found["max"][step : step + 1]:
                torch.testing.assert_close(most, own.amax(0), rtol=0, atol=0)


def test_nothing_is_prepared_for_one_rank_or_a_simulated_axis() -> None:
    for ranks_, said in ((1, "has one rank"), (2, "is simulated")):
        axis = SimulatedCollectives(SimulatedWorld(ranks_), 0).axis()
        with pytest.raises(ValueError, match=said):
            TorchCollectives().prepare_all_gather(axis, torch.zeros(1), torch.zeros(2))
        with pytest.raises(ValueError, match=said):
            TorchCollectives().prepare_reduce_scatter(axis)


def calls_of_lists(rank: int, program: Program, n: int, backend: str) -> list[str]:
    SIZE[0] = n
    group: Any = dist.new_group(list(range(n)), backend=backend)
    axis = Axis("a", group, tuple(range(n)))
    with torch.profiler.profile() as profile:
        program(TorchCollectives(), axis)
    return [event.name for event in profile.events() or () if event.name.startswith("c10d::")]


def gather_one_small(collectives: Collectives, axis: Axis) -> list[Tensor]:
    return collectives.all_gather(axis, [torch.ones(2**18), torch.ones(4)]).wait()


@pytest.mark.parametrize("program", [gather_list, gather_one_small, reduce_list, scatter_list])
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_no_call_whose_name_gloo_cannot_note_safely(
    ranks: Callable[[int], RankPool], program: Program, backend: str
) -> None:
    # Two coalesced all-gathers that end at once make gloo's threads free one string twice.
    for calls in ranks(2).run(calls_of_lists, program, 2, backend):
        assert calls
        assert not [call for call in calls if "allgather_into_tensor_coalesced" in call]


RECEIVED: dict[Program, Callable[[int, int], int]] = {
    gather: lambda me, n: (n - 1) * 48,
    gather_list: lambda me, n: (n - 1) * 56,
    gather_small_and_large: lambda me, n: (n - 1) * (16 + 2**20 + 8),
    gather_dtypes: lambda me, n: (n - 1) * (8 + 8 + 8 + 24),
    gather_into: lambda me, n: (n - 1) * 24,
    scatter: lambda me, n: (n - 1) * 48,
    scatter_list: lambda me, n: (n - 1) * 24,
    scatter_large: lambda me, n: (n - 1) * (2**20 + 8),
    scatter_mean: lambda me, n: (n - 1) * 8,
    scatter_mean_of_list: lambda me, n: (n - 1) * 40,
    reduce_all: lambda me, n: 5 * (2 * 40 * (n - 1) // n),
    reduce_list: lambda me, n: 2 * 72 * (n - 1) // n,
    reduce_dtypes: lambda me, n: 2 * 60 * (n - 1) // n,
    reduce_bool: lambda me, n: 2 * 6 * (n - 1) // n,
    reduce_bool_and_number: lambda me, n: 2 * 30 * (n - 1) // n,
    scatter_bool: lambda me, n: (n - 1) * 3,
    scatter_bool_into: lambda me, n: (n - 1) * 3,
    scatter_bools: lambda me, n: (n - 1) * 5,
    scatter_bool_and_number: lambda me, n: (n - 1) * 10,
    swap_equal: lambda me, n: (n - 1) * 48,
    swap_uneven: lambda me, n: 16 * sum((r * 3 + me) % 4 for r in range(n) if r != me),
    swap_in_pairs: lambda me, n: 0,
    send_onwards: lambda me, n: 32,
    send_one_way: lambda me, n: 24 if me == n - 1 else 0,
    send_pairs: lambda me, n: 56,
    spread: lambda me, n: 0 if me == n - 1 else 40,
    reduce_strided: lambda me, n: 2 * 48 * (n - 1) // n,
    swap_into_strided: lambda me, n: (n - 1) * 16,
    send_into_strided: lambda me, n: 48,
    spread_strided: lambda me, n: 0 if me == 0 else 48,
    gather_into_strided: lambda me, n: (n - 1) * 56,
    scatter_into_strided: lambda me, n: (n - 1) * 56,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("n", [2, 4])
def test_recording_counts_calls_and_received_bytes(program: Program, n: int) -> None:
    def counted(rank: int, collectives: SimulatedCollectives) -> tuple[int, int]:
        recording = RecordingCollectives(collectives)
        program(recording, collectives.axis("a"))
        calls = recording.by_call.values()
        assert recording.by_axis == {"a": tuple(map(sum, zip(*calls, strict=True)))}
        return recording.by_axis["a"]

    calls = len(OPS) if program is reduce_all else 1
    for me, traffic in enumerate(SimulatedWorld(n).run(counted)):
        assert traffic == (calls, RECEIVED[program](me, n))


def test_recording_starts_again_after_reset() -> None:
    def counted(rank: int, collectives: SimulatedCollectives) -> Any:
        recording = RecordingCollectives(collectives)
        gather(recording, collectives.axis("a"))
        recording.reset()
        return recording.by_axis

    assert SimulatedWorld(2).run(counted) == [{}, {}]


Map = Callable[[Tensor, Axis, Collectives], Tensor]


def adjoint_pairs(n: int, sizes: list[int]) -> list[tuple[Map, Callable[[int], tuple[int, ...]]]]:
    """Give each sharded-to-sharded map with the shape of its input on each rank."""
    total = sum(sizes)
    transposed = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    return [
        (
            lambda x, axis, collectives: AutogradCollectives(collectives).all_gather(
                x, axis, 1, sizes=sizes
            ),
            lambda me: (2, sizes[me]),
        ),
        (
            lambda x, axis, collectives: AutogradCollectives(collectives).reduce_scatter(
                x, axis, 1, sizes=sizes
            ),
            lambda me: (2, total),
        ),
        (
            lambda x, axis, collectives: AutogradCollectives(collectives).all_to_all(
                x, axis, transposed[axis.index], [row[axis.index] for row in transposed]
            ),
            lambda me: (sum(transposed[me]), 2),
        ),
    ]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_backward_is_the_adjoint_summed_over_ranks(sizes: list[int], which: int) -> None:
    """<A x, y> = <x, A' y>, inner products summed over all ranks."""
    n = len(sizes)
    apply, shape = adjoint_pairs(n, sizes)[which]

    def products(rank: int, collectives: SimulatedCollectives) -> tuple[float, float]:
        x = numbers(rank, *shape(rank)).requires_grad_()
        out = apply(x, collectives.axis(), collectives)
        y = numbers(rank + 50, *out.shape)
        (back,) = torch.autograd.grad(out, x, y)
        return (out * y).sum().item(), (x * back).sum().item()

    pairs = SimulatedWorld(n).run(products)
    assert sum(p[0] for p in pairs) == sum(p[1] for p in pairs)


def of_conjugates(rank: int) -> list[tuple[Tensor, Tensor]]:
    axis = Axis.of(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    z = torch.complex(numbers(rank, 4), numbers(rank + 2, 4))
    collectives = AutogradCollectives()
    found = []
    for apply in (
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_to_all,
        collectives.all_reduce,
        collectives.replicate,
    ):
        for x in (z.conj(), z.conj().resolve_conj()):
            x = x.detach().requires_grad_()
            result = apply(x, axis)
            (grad,) = torch.autograd.grad(result, x, result.detach().conj())
            found.append((result.detach(), grad))
    return found


def test_conjugates_that_are_not_worked_out_are_sent_as_their_values(
    ranks: Callable[[int], RankPool],
) -> None:
    for found in ranks(2).run(of_conjugates):
        for lazy, eager in zip(found[::2], found[1::2], strict=True):
            for got, want in zip(lazy, eager, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_replicate_and_all_reduce_compose_to_a_tensor_parallel_product() -> None:
    """x W1 W2 with W1 cut by columns and W2 by rows has the gradients of the whole product."""
    n = 3
    w1, w2, x = numbers(1, 4, 6), numbers(2, 6, 5), numbers(3, 2, 4)
    whole = [t.clone().requires_grad_() for t in (x, w1, w2)]
    (whole[0] @ whole[1] @ whole[2]).square().sum().backward()

    def cut(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
        axis = collectives.axis()
        leaves = [x.clone(), w1.chunk(n, 1)[rank].clone(), w2.chunk(n, 0)[rank].clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        hidden = AutogradCollectives(collectives).replicate(leaves[0], axis) @ leaves[1]
        AutogradCollectives(collectives).all_reduce(
            hidden @ leaves[2], axis
        ).square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    results = SimulatedWorld(n).run(cut)
    for grads in results:
        torch.testing.assert_close(grads[0], whole[0].grad, rtol=0, atol=0)
    joined = torch.cat([g[1] for g in results], 1), torch.cat([g[2] for g in results], 0)
    torch.testing.assert_close(joined[0], whole[1].grad, rtol=0, atol=0)
    torch.testing.assert_close(joined[1], whole[2].grad, rtol=0, atol=0)


COMPILED: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_gather": lambda x, axis: AutogradCollectives().all_gather(x, axis, 1),
    "all_gather sizes": lambda x, axis: AutogradCollectives().all_gather(
        x[: 1 + axis.index], axis, sizes=[1, 2]
    ),
    "reduce_scatter": lambda x, axis: AutogradCollectives().reduce_scatter(x, axis),
    "reduce_scatter sizes": lambda x, axis: AutogradCollectives().reduce_scatter(
        x, axis, sizes=[1, 3]
    ),
    "all_reduce": lambda x, axis: AutogradCollectives().all_reduce(x, axis),
    "replicate": lambda x, axis: AutogradCollectives().replicate(x, axis),
    "all_to_all": lambda x, axis: AutogradCollectives().all_to_all(x, axis),
    "all_to_all splits": lambda x, axis: AutogradCollectives().all_to_all(
        x, axis, [1, 3], [1 + 2 * axis.index] * 2
    ),
}


def compiled(rank: int, name: str) -> tuple[list[Tensor], list[Tensor], int, str]:
    """Return value and gradient as eager and as compiled, how many graphs, and the refusal."""
    SIZE[0] = 2
    axis = world_axis()

    def function(x: Tensor) -> Tensor:
        return COMPILED[name](x * 3, axis) * 2

    def graphs(module: Any, inputs: Any) -> Any:
        found.append(module)
        return lookup_backend("aot_eager")(module, inputs)

    found: list[Any] = []
    results = []
    torch._dynamo.reset()
    for call in (function, torch.compile(function, backend=graphs)):
        x = numbers(rank, 4, 2).requires_grad_()
        y = call(x)
        (y * y).sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad])
    try:
        torch.compile(function, backend="aot_eager", fullgraph=True)(numbers(rank, 4, 2))
    except torch._dynamo.exc.Unsupported as error:
        return results[0], results[1], len(found), str(error)
    return results[0], results[1], len(found), ""


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_function_has_each_call_between_two_graphs(
    ranks: Callable[[int], RankPool], name: str
) -> None:
    for eager, between, graphs, refusal in ranks(2).run(compiled, name):
        assert all(map(torch.equal, eager, between))
        assert graphs == 2
        assert "_communicate" in refusal


def test_second_derivatives_flow_through_the_collectives() -> None:
    def twice(rank: int, collectives: SimulatedCollectives) -> float:
        x = numbers(rank, 2).requires_grad_()
        out = AutogradCollectives(collectives).all_gather(x, collectives.axis())
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(first, 2 * 3 * x**2)
        torch.testing.assert_close(second, 2 * 6 * x)
        return second.sum().item()

    SimulatedWorld(2).run(twice)


def test_axis_of_reads_groups_and_ranks_from_a_mesh() -> None:
    def axes(rank: int, collectives: SimulatedCollectives) -> tuple[Any, ...]:
        mesh = collectives.mesh((2, 3), ("outer", "inner"))
        outer, inner = Axis.of(mesh, "outer"), Axis.of(mesh, 1)
        assert Axis.of(mesh["inner"]).ranks == inner.ranks
        return outer.ranks, outer.index, inner.ranks, inner.index, inner.name

    results = SimulatedWorld(6).run(axes)
    assert results[4] == ((1, 4), 1, (3, 4, 5), 1, "inner")


def copied_axis(rank: int) -> bool:
    mesh = cached("pair", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("world",)))
    axis = Axis.of(mesh)
    return copy.deepcopy({"axis": axis})["axis"] is axis


def test_a_copied_module_keeps_its_axis(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(copied_axis) == [True, True]


def test_axis_of_refuses_unknown_axes() -> None:
    def ask(rank: int, collectives: SimulatedCollectives) -> None:
        mesh = collectives.mesh((1,), ("a",))
        with pytest.raises(ValueError, match=r"no axis 'b' in a mesh with axes \['a'\]"):
            Axis.of(mesh, "b")
        with pytest.raises(ValueError, match="no axis 1"):
            Axis.of(mesh, 1)

    SimulatedWorld(1).run(ask)


def axis_of_permuted_mesh(rank: int) -> str:
    mesh = cached("permuted", lambda: DeviceMesh("cpu", [1, 0], mesh_dim_names=("x",)))
    with pytest.raises(ValueError, match="ascending ranks") as error:
        Axis.of(mesh)
    return str(error.value)


def test_a_mesh_in_another_order_than_its_group_is_refused(
    ranks: Callable[[int], RankPool],
) -> None:
    texts = ranks(2).run(axis_of_permuted_mesh)
    assert texts[0] == texts[1]
    assert "[1, 0]" in texts[0]
    assert "[0, 1]" in texts[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, a, d: AutogradCollectives(d).all_gather(x, a, sizes=[1, 2]), "sizes"),
        (lambda x, a, d: AutogradCollectives(d).reduce_scatter(x, a), "equal parts"),
        (lambda x, a, d: AutogradCollectives(d).reduce_scatter(x, a, sizes=[1, 1]), "sum to"),
        (lambda x, a, d: AutogradCollectives(d).all_to_all(x, a, [1, 2]), "both"),
        (lambda x, a, d: AutogradCollectives(d).all_to_all(x, a), "equal blocks"),
    ],
)
def test_bad_sizes_raise_before_communication(call: Map, message: str) -> None:
    def attempt(rank: int, collectives: SimulatedCollectives) -> None:
        recording = RecordingCollectives(collectives)
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(3, 2), collectives.axis(), recording)
        assert recording.by_axis == {}

    SimulatedWorld(2).run(attempt)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, a, d: d.all_gather(a, [x]),
        lambda x, a, d: d.all_gather(a, [x, x]),
        lambda x, a, d: d.reduce_scatter(a, [x]),
        lambda x, a, d: d.all_reduce(a, [x], "avg"),
        lambda x, a, d: d.all_to_all(a, x),
        lambda x, a, d: d.send_recv(a, {1: x}, {}),
        lambda x, a, d: d.broadcast(a, [x]),
        lambda x, a, d: AutogradCollectives().all_gather(x, a),
        lambda x, a, d: AutogradCollectives().reduce_scatter(x, a),
        lambda x, a, d: AutogradCollectives().all_reduce(x, a),
        lambda x, a, d: AutogradCollectives().all_to_all(x, a),
        lambda x, a, d: AutogradCollectives().replicate(x.requires_grad_(), a).sum().backward(),
    ],
)
def test_a_simulated_axis_asks_for_its_collectives(
    call: Callable[[Tensor, Axis, Collectives], Any],
) -> None:
    axis = SimulatedCollectives(SimulatedWorld(2), 0).axis("cp")
    with pytest.raises(ValueError, match="axis 'cp' is simulated; pass collectives="):
        call(torch.zeros(2, 2), axis, TorchCollectives())


def test_alone_a_simulated_rank_needs_no_collectives() -> None:
    axis = SimulatedCollectives(SimulatedWorld(1), 0).axis()
    x, y = torch.ones(2), torch.zeros(2)
    TorchCollectives().send_recv(axis, {0: x}, {0: y}).wait()
    assert torch.equal(y, x)
    assert torch.equal(AutogradCollectives().all_gather(x, axis), x)
    for splits in (([1], [2]), ([2], [1]), ([1, 1], [1, 1])):
        with pytest.raises(ValueError, match="of 2 rows over world, which has one rank"):
            TorchCollectives().all_to_all(axis, x, *splits)
    assert torch.equal(TorchCollectives().all_to_all(axis, x, [2], [2]).wait()[0], x)


def test_a_rank_that_ends_early_fails_its_peers_instead_of_hanging() -> None:
    def leave(rank: int, collectives: SimulatedCollectives) -> None:
        if rank:
            collectives.all_reduce(collectives.axis(), [torch.ones(1)]).wait()

    with pytest.raises(RuntimeError, match=r"ranks \[0\] ended without taking part in all_reduce"):
        SimulatedWorld(3).run(leave)


def test_different_calls_fail_instead_of_mixing() -> None:
    def disagree(rank: int, collectives: SimulatedCollectives) -> None:
        program = gather if rank else scatter
        program(collectives, collectives.axis("cp"))

    with pytest.raises(RuntimeError, match=r"over cp, rank .* where another rank calls"):
        SimulatedWorld(2).run(disagree)


def test_different_dtypes_fail_as_they_do_between_processes() -> None:
    def disagree(rank: int, collectives: SimulatedCollectives) -> None:
        dtype = torch.float64 if rank else torch.float32
        collectives.all_reduce(collectives.axis(), [torch.ones(1, dtype=dtype)]).wait()

    with pytest.raises(RuntimeError, match="where another rank calls"):
        SimulatedWorld(2).run(disagree)


def test_messages_of_another_dtype_fail_as_they_do_between_processes() -> None:
    def disagree(rank: int, collectives: SimulatedCollectives) -> None:
        if rank:
            collectives.send_recv(
                collectives.axis(), {}, {0: torch.zeros(2, dtype=torch.float64)}
            ).wait()
        else:
            collectives.send_recv(collectives.axis(), {1: torch.ones(2)}, {}).wait()

    with pytest.raises(RuntimeError, match=r"sent float32 \[2\] .* expects float64 \[2\]"):
        SimulatedWorld(2).run(disagree)


@pytest.mark.parametrize(
    ("sends", "receives"),
    [({}, [(2,)]), ([(2,)], {}), ([(1,)], [(2,)]), ([(2,), (2,)], [(2,)])],
)
def test_a_rank_receives_from_itself_exactly_the_tensors_it_sends(
    sends: Any, receives: Any
) -> None:
    """Without the check, parts would stay unchanged or be broadcast."""
    sent = {0: [torch.ones(shape) for shape in sends]} if sends else {}
    places = {0: [torch.zeros(shape) for shape in receives]} if receives else {}
    carriers = SimulatedCollectives(SimulatedWorld(1), 0), TorchCollectives()
    for carrier in carriers:
        with pytest.raises(ValueError, match=r"sends itself .* over world and receives"):
            carrier.send_recv(carriers[0].axis(), sent, places)


def test_rows_that_cannot_be_joined_fail_on_all_ranks_at_once() -> None:
    def disagree(rank: int, collectives: SimulatedCollectives) -> None:
        collectives.all_to_all(collectives.axis(), torch.ones(2, 1 + rank)).wait()

    with pytest.raises(RuntimeError, match="cannot be combined"):
        SimulatedWorld(2, timeout=3600).run(disagree)


def test_simulated_reduce_scatter_refuses_uneven_rows() -> None:
    def attempt(rank: int, collectives: SimulatedCollectives) -> None:
        with pytest.raises(ValueError, match="divisible by 2"):
            collectives.reduce_scatter(collectives.axis(), [torch.ones(3)])

    SimulatedWorld(2).run(attempt)


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [((2, 2), "all_gather", "reduce_scatter"), ((1, 3), "send_recv", "all_to_all")],
)
def test_each_direction_makes_the_one_call_that_its_docstring_names(
    sizes: tuple[int, int], forward: str, backward: str
) -> None:
    def counted(rank: int, collectives: SimulatedCollectives) -> None:
        recording = RecordingCollectives(collectives)
        x = numbers(rank, sizes[rank]).requires_grad_()
        out = AutogradCollectives(recording).all_gather(x, collectives.axis("a"), sizes=sizes)
        assert list(recording.by_call) == [("a", forward)]
        out.sum().backward()
        assert list(recording.by_call) == [("a", forward), ("a", backward)]
        assert recording.by_axis["a"].calls == 2

    SimulatedWorld(2).run(counted)


def test_a_ranks_own_error_is_shown_before_its_peers() -> None:
    def fail(rank: int, collectives: SimulatedCollectives) -> None:
        if rank == 2:
            raise KeyError("mine")
        gather(collectives, collectives.axis())

    with pytest.raises(KeyError, match="mine"):
        SimulatedWorld(3).run(fail)


def test_a_simulated_world_keeps_nothing_of_calls_that_are_over() -> None:
    world = SimulatedWorld(3)
    calls = 50

    def reduced(rank: int, collectives: SimulatedCollectives) -> float:
        axis, total = collectives.axis(), torch.zeros(8)
        for _ in range(calls):
            (total,) = collectives.all_reduce(axis, [torch.ones(8)]).wait()
        return float(total.sum())

    assert world.run(reduced) == [24.0] * 3
    assert len(world._meetings) <= 1


class Named:
    """A backend that has only a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Return it."""
        return self._name


class Served(dist.ProcessGroup):
    """A group of two ranks with the backend ``by`` for CPUs and none for other devices."""

    def __init__(self, by: str) -> None:
        super().__init__(0, 2)  # type: ignore[call-arg]
        self._by = by

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"no backend for device type {device.type}")
        return Named(self._by)


@pytest.mark.parametrize(("by", "op", "divides"), [("nccl", "avg", False), ("gloo", "sum", True)])
def test_a_mean_is_left_to_the_backend_that_has_it_whatever_the_group_is_called(
    by: str, op: str, divides: bool
) -> None:
    axis = Axis("data", Served(by), (0, 1))
    found, finishes = _average(axis, [torch.ones(2)])
    assert found == op
    assert len(finishes) == divides


def by_a_registered_name(rank: int) -> tuple[str, list[Tensor]]:
    """Create a gloo group with a registered backend name."""

    def make() -> dist.ProcessGroup:
        def create(store: Any, index: int, size: int, timeout: Any) -> Any:
            return dist.ProcessGroupGloo(store, index, size, timeout)

        dist.Backend.register_backend("mine", create, devices=["cpu"])
        made: dist.ProcessGroup = dist.new_group(backend="mine")
        return made

    group = cached("a group by a registered name", make)
    axis = Axis("data", group, (0, 1))
    small = [numbers(axis.index, 2), numbers(axis.index + 9, 4)]  # gloo gathers them packed
    gathered = TorchCollectives().all_gather(axis, small).wait()
    mean = TorchCollectives().all_reduce(axis, [numbers(axis.index, 3)], "avg").wait()
    return backend_of(group, torch.device("cpu")), [*gathered, *mean]


@pytest.mark.gloo
def test_a_group_by_a_registered_name_is_served_as_its_backend_is(
    ranks: Callable[[int], RankPool],
) -> None:
    for name, found in ranks(2).run(by_a_registered_name):
        assert name == "gloo"
        assert torch.equal(found[0], torch.cat([numbers(0, 2), numbers(1, 2)]))
        assert torch.equal(found[1], torch.cat([numbers(9, 4), numbers(10, 4)]))
        assert torch.equal(found[2], (numbers(0, 3) + numbers(1, 3)) / 2)


@pytest.mark.parametrize("op", OPS)
def test_blocks_of_different_lengths_are_reduced_as_their_definition_says(op: Any) -> None:
    sizes = (2, 0, 3)

    def reduced(rank: int, collectives: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        axis, rows = collectives.axis(), numbers(rank, 5, 2)
        part = start_uneven_reduce_scatter(collectives, axis, rows, sizes, op)()
        (whole,) = collectives.all_reduce(axis, [rows.clone()], op).wait()
        return part, whole.split(list(sizes))[rank]

    for part, expected in SimulatedWorld(3).run(reduced):
        torch.testing.assert_close(part, expected)


def averaged_leaves(rank: int) -> tuple[list[Tensor], list[str]]:
    """Average and copy into parameters and inference tensors, and refuse integers."""
    mesh = cached("two ranks", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("two",)))
    axis, collectives = Axis.of(mesh), TorchCollectives()
    with torch.inference_mode():
        inferred = torch.full((2,), float(rank))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    scattered = torch.nn.Parameter(torch.zeros(1))
    collectives.all_reduce(axis, [inferred], "avg").wait()
    collectives.all_reduce(axis, [parameter], "avg").wait()
    collectives.reduce_scatter(axis, [torch.tensor([1.0, 4.0])], [scattered], "avg").wait()
    sent = torch.nn.Parameter(torch.zeros(2))
    collectives.send_recv(axis, {rank: torch.ones(2)}, {rank: sent}).wait()
    alone = Axis("alone", SimulatedGroup((rank,), rank), (rank,))
    copied = torch.nn.Parameter(torch.zeros(2))
    collectives.all_gather(alone, [torch.ones(2)], [copied]).wait()
    texts = []
    whole = torch.tensor([rank, 3])
    calls: list[Callable[[], Any]] = [
        lambda: collectives.all_reduce(axis, [whole], "avg"),
        lambda: collectives.reduce_scatter(axis, [whole], op="avg"),
        lambda: collectives.all_reduce(axis, [whole > 1], "avg"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="floating-point or complex") as info:
            call()
        texts.append(str(info.value))
    results = [inferred.clone(), parameter, scattered, sent, copied, whole]
    return [x.detach() for x in results], texts


@pytest.mark.gloo
def test_averages_and_copies_write_to_parameters_and_inference_tensors(
    ranks: Callable[[int], RankPool],
) -> None:
    for rank, (found, texts) in enumerate(ranks(2).run(averaged_leaves)):
        values = [[0.5, 0.5], [0.5, 0.5], [[1.0], [4.0]][rank], [1.0, 1.0], [1.0, 1.0], [rank, 3]]
        assert [x.tolist() for x in found] == values
        assert [
            dtype in text for dtype, text in zip(("int64", "int64", "bool"), texts, strict=True)
        ]
        assert all("axis" in text or "over" in text for text in texts)
