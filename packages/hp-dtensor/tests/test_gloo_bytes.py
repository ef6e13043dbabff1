"""Large collectives over gloo receive no more bytes than they need, and no copy of the output."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import Axis, TorchCollectives

from .meshes import world_axis

Pools = Callable[[int], RankPool]
LARGE = 2**18 + 3  # elements of a block, above the 1 MiB from which blocks are broadcast
SUMMED = 2**16  # elements of a block of 256 KiB, from which on blocks are summed locally


class Operations(TorchDispatchMode):
    """Counts the operations of c10d."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def gathered(rank: int) -> tuple[list[Tensor], Counter[str]]:
    axis, collectives = world_axis(), TorchCollectives()
    block = torch.arange(float(LARGE)) + rank
    whole = nn.Parameter(torch.zeros(axis.size * LARGE))
    with Operations() as operations:
        results = [
            *collectives.all_gather(axis, [block]).wait(),
            *collectives.all_gather(axis, [block], [whole]).wait(),
            *collectives.all_gather(axis, [block.to(torch.complex64)]).wait(),
            *collectives.all_gather(axis, [block, block.to(torch.int64)]).wait(),
        ]
        own = torch.empty(axis.size * LARGE)
        start = collectives.prepare_all_gather(axis, block, own)
        start().wait()
        block += 1
        start().wait()
        results.append(own)
    return [x.detach() for x in results], operations.found


@pytest.mark.parametrize("size", [2, 4])
def test_large_blocks_are_broadcast_into_the_output(ranks: Pools, size: int) -> None:
    right = torch.cat([torch.arange(float(LARGE)) + rank for rank in range(size)])
    dtypes = [torch.float32, torch.float32, torch.complex64, torch.float32, torch.int64]
    for results, operations in ranks(size).run(gathered):
        assert operations == {"broadcast_": 7 * size}
        *others, last = results
        for found, dtype in zip(others, dtypes, strict=True):
            assert torch.equal(found, right.to(dtype))
        assert torch.equal(last, right + 1)


def reduced(rank: int) -> tuple[list[Tensor], Counter[str]]:
    axis, collectives = world_axis(), TorchCollectives()
    rows = torch.arange(float(axis.size * SUMMED)) * (rank + 1)
    out = nn.Parameter(torch.zeros(SUMMED))
    with Operations() as operations:
        results = [
            *collectives.reduce_scatter(axis, [rows]).wait(),
            *collectives.reduce_scatter(axis, [rows], op="avg").wait(),
            *collectives.reduce_scatter(axis, [rows], [out]).wait(),
            *collectives.reduce_scatter(axis, [rows.to(torch.complex64)]).wait(),
            *collectives.reduce_scatter(axis, [rows.double()]).wait(),
        ]
        own = torch.empty(SUMMED)
        handle = collectives.prepare_reduce_scatter(axis)(own, rows.requires_grad_())
        handle.wait()
        handle.wait()  # changes nothing
        results.append(own)
    return [x.detach() for x in results], operations.found


@pytest.mark.parametrize("size", [2, 4])
def test_large_sums_are_an_all_to_all_of_blocks(ranks: Pools, size: int) -> None:
    total = size * (size + 1) // 2
    factors = [total, total / size, total, total, total, total]
    kinds = [torch.float32] * 3 + [torch.complex64, torch.float64, torch.float32]
    for rank, (results, operations) in enumerate(ranks(size).run(reduced)):
        assert operations == {"alltoall_base_": 2 * 6}  # one of the sizes, one of the blocks
        block = torch.arange(float(size * SUMMED))[rank * SUMMED :][:SUMMED]
        for found, factor, dtype in zip(results, factors, kinds, strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found, (block * factor).to(dtype), rtol=1e-6, atol=0)


def others(rank: int) -> tuple[list[Tensor], Counter[str]]:
    axis, collectives = world_axis(), TorchCollectives()
    rows = torch.arange(axis.size * SUMMED) % 7 + rank
    with Operations() as operations:
        results = [
            *collectives.reduce_scatter(axis, [rows]).wait(),
            *collectives.reduce_scatter(axis, [rows.float()], op="max").wait(),
            *collectives.reduce_scatter(axis, [rows.float()[: (SUMMED - 1) * axis.size]]).wait(),
        ]
    return results, operations.found


def test_integers_other_reductions_and_small_tensors_use_gloos_reduce_scatter(ranks: Pools) -> None:
    for rank, (results, operations) in enumerate(ranks(2).run(others)):
        assert not any("alltoall" in name for name in operations)
        rows = torch.arange(2 * SUMMED) % 7
        block = rows[rank * SUMMED :][:SUMMED]
        assert torch.equal(results[0], 2 * block + 1)
        assert torch.equal(results[1], block + 1.0)
        assert torch.equal(results[2], 2.0 * rows[(SUMMED - 1) * rank :][: SUMMED - 1] + 1)


def in_half_precision(rank: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rank)
    rows = torch.randn(4 * 2 * SUMMED, generator=gen).bfloat16()
    (found,) = TorchCollectives().reduce_scatter(world_axis(), [rows]).wait()
    return found, rows


def test_sums_of_bfloat16_are_rounded_once(ranks: Pools) -> None:
    results = ranks(4).run(in_half_precision)
    rows = torch.stack([rows for _, rows in results]).float()
    for rank, (found, _) in enumerate(results):
        block = rows[:, rank * 2 * SUMMED :][:, : 2 * SUMMED]
        assert torch.equal(found, block.sum(0).bfloat16())


def in_subgroup(rank: int) -> tuple[list[Tensor], list[str]]:
    group: Any = dist.new_group([1, 2])
    if rank == 0:
        return [], []
    axis, collectives = Axis("some", group, (1, 2)), TorchCollectives()
    block = torch.full((LARGE,), float(rank))
    with torch.inference_mode():
        whole = torch.empty(2 * LARGE)
    results = [
        *collectives.all_gather(axis, [block], [whole]).wait(),
        *collectives.reduce_scatter(axis, [torch.arange(4.0) * rank]).wait(),
    ]
    errors = []
    calls: list[Callable[[], Any]] = [
        lambda: collectives.all_gather(axis, [block], [whole.double()]),
        lambda: collectives.all_gather(axis, [block], [torch.empty(3 * LARGE)]),
        lambda: collectives.reduce_scatter(axis, [block.double()[:4]], [torch.empty(2)]),
        lambda: collectives.prepare_reduce_scatter(axis)(torch.empty(3), block[:4]),
    ]
    for call in calls:
        try:
            call().wait()
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
    return [x.clone() for x in results], errors


def test_some_ranks_of_the_world_and_wrong_outputs(ranks: Pools) -> None:
    whole = torch.tensor([1.0, 2.0]).repeat_interleave(LARGE)
    for rank, (results, errors) in enumerate(ranks(3).run(in_subgroup)):
        if rank > 0:
            gathered, part = results
            assert torch.equal(gathered, whole)
            assert part.tolist() == [[0.0, 3.0], [6.0, 9.0]][rank - 1]
            assert len(errors) == 4


SIZES = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from hp_dtensor import Axis, TorchCollectives
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[1], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=5))
axis = Axis("all", dist.group.WORLD, (0, 1, 2))
try:
    TorchCollectives().reduce_scatter(axis, [torch.ones(3 * (int(sys.argv[3]) - rank % 2))]).wait()
    print("no error")
except RuntimeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("size", [4, 400000])
def test_ranks_with_inputs_of_other_sizes_do_not_get_wrong_sums(tmp_path: Path, size: int) -> None:
    """Each rank is a process of its own, because gloo ends the one with the smaller input.

    The others raise gloo's error if that process ended before it sent its size. The small tensors
    use gloo's own reduce-scatter, which has no other error.
    """
    command = [sys.executable, "-c", SIZES, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    texts = [process.communicate(timeout=60)[0] for process in ranks]
    found = "rank 0 has 1200000 elements, rank 1 has 1199997 elements, rank 2 has 1200000"
    for text in (texts[0], texts[2]):
        assert text.startswith("RankMismatchError" if found in text else "RuntimeError")


def conjugated(rank: int) -> list[Tensor]:
    collectives, axis = TorchCollectives(), world_axis()
    x = torch.complex(torch.ones(4), torch.full((4,), float(rank))).conj()
    needs_grad = torch.ones(3, requires_grad=True)
    return [
        *collectives.reduce_scatter(axis, [x]).wait(),
        *collectives.all_gather(axis, [x]).wait(),
        *[collectives.all_gather(axis, [needs_grad]).wait()[0].detach() for _ in range(5)],
    ]


def test_lazy_conjugates_and_inputs_that_require_grad(ranks: Pools) -> None:
    for part, whole, *ones in ranks(2).run(conjugated):
        assert part.tolist() == [2 - 1j] * 2
        assert whole.tolist() == [1 + 0j] * 4 + [1 - 1j] * 4
        assert all(torch.equal(x, torch.ones(6)) for x in ones)
