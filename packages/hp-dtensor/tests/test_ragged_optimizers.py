"""Optimizers step ragged parameters as they step the same elements in one process."""

import math
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
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 1, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
SCALARS = ("step", "eta", "mu", "mu_product")
FUSED = ("Adagrad", "Adam", "AdamW", "AdamW, amsgrad", "SGD")
WAYS = {"lists": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, Optimize] = {
    f"{name}, {way}": partial(kind, **settings, **how)
    for name, (kind, settings) in CLASSES.items()
    for way, how in WAYS.items()
    if way != "fused" or name in FUSED
}
OPTIMIZERS["AdamW, maximize"] = partial(torch.optim.AdamW, lr=0.1, maximize=True)
OPTIMIZERS["AdamW, fused, tensor rate"] = lambda given: torch.optim.AdamW(
    given, lr=torch.tensor(0.1), fused=True
)


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


Make = Callable[[Tensor, Ragged], Tensor]  # returns the local part of a case's whole tensor


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
def test_steps_are_bit_equal_to_one_process_on_the_same_elements(
    ranks: Pools, name: str, world: int
) -> None:
    for rank, results in enumerate(ranks(world).run(stepped, name, world)):
        expected = trained(*inputs(world, partial(part_of, rank=rank)), OPTIMIZERS[name])
        for place, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            assert result.keys() == wanted.keys()
            for key, value in wanted.items():
                kind, local = result[key]
                assert torch.equal(local, value), (name, place, key)
                assert kind is (Tensor if place == 1 or key in SCALARS else RaggedTensor)


@pytest.mark.nccl
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_a_step_are_parts_of_the_step_on_the_whole(ranks: Pools, name: str) -> None:
    first, _, *rest = trained(*inputs(4, lambda full, case: full), OPTIMIZERS[name])
    for rank, results in enumerate(ranks(4).run(stepped, name, 4)):
        ours = [results[0], *results[2:]]
        for case, result, wanted in zip(CASES[4], ours, [first, *rest], strict=True):
            for key, value in wanted.items():
                part = value if key in SCALARS else part_of(value, case, rank)
                # The last elements of a tensor are computed with other instructions.
                torch.testing.assert_close(result[key][1], part, rtol=1e-14, atol=1e-16)


def refused(rank: int) -> list[str]:
    case = CASES[4][0]
    texts = []

    def loss(parameter: Tensor) -> Tensor:
        assert isinstance(parameter, RaggedTensor)
        square: Any = parameter * parameter
        value: Tensor = square.to_local().sum()
        value.backward()
        return value

    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
        parameter = nn.Parameter(ragged_of(whole(case.shape, 1), case, rank))
        parameter.grad = ragged_of(whole(case.shape, 2), case, rank)
        optimizer: Any = kind([parameter])
        with pytest.raises(TypeError) as info:
            optimizer.step(partial(loss, parameter))
        texts.append(str(info.value))
        left: Any = parameter.detach()
        assert torch.equal(left.to_local(), part_of(whole(case.shape, 1), case, rank))
    return texts


def test_optimizers_that_look_beyond_an_element_are_refused_before_they_change_anything(
    ranks: Pools,
) -> None:
    first, *others = ranks(4).run(refused)
    assert others == [first] * 3
    assert all("redistribute" in text for text in first)


def scaled(rank: int, bad: int | None, fused: bool) -> list[tuple[float, bool, bool]]:
    """Step twice with a gradient scaler; one rank's part of a gradient may have an infinity."""
    cases = CASES[4]
    parameters = [nn.Parameter(ragged_of(whole(case.shape, 1), case, rank)) for case in cases]
    parameters.append(nn.Parameter(whole((3,), 7)))
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for step in range(2):
        for parameter in parameters:
            parameter.grad = scaler.scale(parameter.detach().clone())
        if step == 0 and rank == bad:
            first: Any = parameters[0].grad
            first.to_local()[0, 0] = math.inf
        before = [parameter.detach().clone() for parameter in parameters]
        scaler.unscale_(optimizer)
        if step:
            for parameter, old in zip(parameters, before, strict=True):
                assert parameter.grad is not None
                assert torch.equal(local(parameter.grad), local(old))
        scaler.step(optimizer)
        scaler.update()
        pairs = [(local(a), local(b)) for a, b in zip(before, parameters, strict=True)]
        moved = [not torch.equal(old, new) for old, new in pairs if new.numel()]
        found.append((scaler.get_scale(), any(moved), all(moved)))
    return found


def local(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.to_local() if isinstance(x, RaggedTensor) else x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_a_gradient_scaler_skips_a_step_on_all_ranks(
    ranks: Pools, bad: int | None, fused: bool
) -> None:
    stepped = (4.0, True, True) if bad is None else (2.0, True, True)
    skipped = stepped if bad is None else (2.0, False, False)
    for found in ranks(4).run(scaled, bad, fused):
        assert found == [skipped, stepped]
