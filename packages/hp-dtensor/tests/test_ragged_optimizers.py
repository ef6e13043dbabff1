"""Optimizers step ragged parameters as they step the same elements in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_dtensor import Layout, RaggedShard, RaggedTensor, Replicate, Shard

from .test_ragged import Ragged, part_of, ragged_of, whole

Pools = Callable[[int], RankPool]
Optimize = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 3
CASES = {
    2: [
        Ragged(Layout((2,), (RaggedShard((0,), (7, 2)),)), (9, 5)),
        Ragged(Layout((2,), (RaggedShard((0, 1), (0, 24)),)), (4, 6)),
    ],
    4: [
        Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3)),
        Ragged(Layout((4,), (RaggedShard((0, 1), (7, 11, 2, 4)),)), (4, 6)),
        Ragged(Layout((2, 2), (Replicate(), RaggedShard((0, 1), (9, 6)))), (5, 3)),
        Ragged(Layout((2, 2), (RaggedShard((0,), (1, 4)), Shard(1))), (5, 4)),
    ],
}
OPTIMIZERS: dict[str, Optimize] = {
    "AdamW, lists": lambda given: torch.optim.AdamW(given, lr=0.1, foreach=True),
    "AdamW, one by one": lambda given: torch.optim.AdamW(given, lr=0.1, foreach=False),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, lr=0.1, fused=True),
    "AdamW, amsgrad": lambda given: torch.optim.AdamW(given, lr=0.1, amsgrad=True, foreach=True),
    "SGD, lists": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
}


def trained(
    parameters: list[nn.Parameter], gradients: list[list[Tensor]], optimize: Optimize
) -> list[dict[str, Tensor]]:
    """Return each parameter, its gradient and its moments after some steps."""
    optimizer = optimize(parameters)
    for step in gradients:
        for parameter, grad in zip(parameters, step, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    found = []
    for parameter in parameters:
        state: dict[str, Any] = optimizer.state[parameter]
        tensors = {"value": parameter, "grad": parameter.grad}
        tensors |= {name: x for name, x in state.items() if isinstance(x, Tensor)}
        found.append({name: x.detach() for name, x in tensors.items() if x is not None})
    return found


Make = Callable[[Tensor, Ragged], Tensor]  # what a rank holds of the whole tensor of a case


def inputs(world: int, make: Make) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """Return parameters and the gradients of each step: of all cases, with a plain one between."""
    cases = CASES[world]
    values = [make(whole(case.shape, 1), case) for case in cases]
    gradients = []
    for step in range(STEPS):
        grads = [make(whole(case.shape, 10 + step), case) for case in cases]
        gradients.append([grads[0], whole((3, 2), 20 + step), *grads[1:]])
    return [nn.Parameter(x) for x in [values[0], whole((3, 2), 7), *values[1:]]], gradients


def stepped(rank: int, name: str, world: int) -> list[dict[str, tuple[type, Tensor]]]:
    parameters, gradients = inputs(world, partial(ragged_of, rank=rank))
    return [
        {
            key: (type(x), x.to_local() if isinstance(x, RaggedTensor) else x)
            for key, x in each.items()
        }
        for each in trained(parameters, gradients, OPTIMIZERS[name])
    ]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_bitwise_those_of_one_process_on_the_same_elements(
    ranks: Pools, name: str, world: int
) -> None:
    for rank, results in enumerate(ranks(world).run(stepped, name, world)):
        expected = trained(*inputs(world, partial(part_of, rank=rank)), OPTIMIZERS[name])
        for place, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            assert result.keys() == wanted.keys()
            for key, value in wanted.items():
                kind, local = result[key]
                assert torch.equal(local, value), (name, place, key)
                assert kind is (Tensor if place == 1 or key == "step" else RaggedTensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_a_step_are_parts_of_the_step_on_the_whole(ranks: Pools, name: str) -> None:
    first, _, *rest = trained(*inputs(4, lambda full, case: full), OPTIMIZERS[name])
    for rank, results in enumerate(ranks(4).run(stepped, name, 4)):
        ours = [results[0], *results[2:]]
        for case, result, wanted in zip(CASES[4], ours, [first, *rest], strict=True):
            for key, value in wanted.items():
                part = value if key == "step" else part_of(value, case, rank)
                # The last elements of a tensor are computed with other instructions.
                torch.testing.assert_close(result[key][1], part, rtol=1e-14, atol=1e-16)
