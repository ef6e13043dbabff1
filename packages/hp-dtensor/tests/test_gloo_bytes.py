"""Large all-gathers over gloo receive in the output, and calls with unusual tensors."""

from collections import Counter
from collections.abc import Callable
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
            assert len(errors) == 3


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
