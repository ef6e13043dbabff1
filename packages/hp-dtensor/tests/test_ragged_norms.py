"""Norms of ragged gradients count every element once."""

import math
from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from hp_dtensor import RaggedTensor, RecordingCollectives, clip_grad_norm_

from .test_ragged import mesh_of, part_of, ragged_of, whole
from .test_ragged_optimizers import CASES

Pools = Callable[[int], RankPool]


def clipped(rank: int, world: int, order: float) -> tuple[Tensor, list[Tensor], Tensor, int]:
    parameters = []
    for case in CASES[world]:
        parameters.append(nn.Parameter(ragged_of(torch.zeros(case.shape).double(), case, rank)))
        parameters[-1].grad = ragged_of(whole(case.shape, 5), case, rank)
    silent = nn.Parameter(ragged_of(whole(CASES[world][0].shape), CASES[world][0], rank))
    even = distribute_tensor(whole((8, 2), 6), mesh_of((world,)), [Shard(0)], src_data_rank=None)
    dense, plain = nn.Parameter(torch.zeros_like(even)), nn.Parameter(whole((3,)))
    dense.grad, plain.grad = even, whole((3,), 7)
    collectives = RecordingCollectives()
    given = [*parameters, silent, dense, plain, parameters[0]]
    norm = clip_grad_norm_(given, 1.5, order, collectives=collectives)
    parts = []
    for parameter in parameters:
        assert isinstance(parameter.grad, RaggedTensor)
        parts.append(parameter.grad.to_local())
    return norm, parts, plain.grad, sum(traffic.calls for traffic in collectives.by_axis.values())


@pytest.mark.nccl
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norm_and_gradients_equal_those_of_one_process(
    ranks: Pools, world: int, order: float
) -> None:
    alone = [nn.Parameter(torch.zeros(case.shape).double()) for case in CASES[world]]
    for parameter, case in zip(alone, CASES[world], strict=True):
        parameter.grad = whole(case.shape, 5)
    others = [nn.Parameter(torch.zeros(8, 2).double()), nn.Parameter(torch.zeros(3).double())]
    others[0].grad, others[1].grad = whole((8, 2), 6), whole((3,), 7)
    expected = nn.utils.clip_grad_norm_([*alone, *others], 1.5, order)
    for rank, (norm, parts, plain, calls) in enumerate(ranks(world).run(clipped, world, order)):
        assert type(norm) is Tensor
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0.0)
        for part, parameter, case in zip(parts, alone, CASES[world], strict=True):
            assert parameter.grad is not None
            wanted = part_of(parameter.grad, case, rank)
            torch.testing.assert_close(part, wanted, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(plain, others[1].grad)
        # The sets of ranks that share gradients: all, and with replicas half of them.
        assert calls == (2 if world == 4 else 1)
