"""Transforms of torch.func over sharded modules, and training steps around them."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import grad, hessian, jacrev, jvp, vmap

from hp_fsdp import fully_shard

from .models import WIDTH, Block, Gradients, gradients, make, mesh_of, worst

# torch 2.13 uses torch.jit.script for jvp.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
Ranks = Callable[[int], RankPool]
vjp: Any = torch.func.vjp
MODES: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
    "given up": {"reshard_after_forward": True},
}


class Two(nn.Module):
    """Two blocks, the first of which some inputs do not need a gradient of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the second block for the output of the first one."""
        return cast(Tensor, self.second(self.first(x)))


def input_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def sharded(mode: str, **options: Any) -> Any:
    model: Any = make(Two)
    mesh = mesh_of((2,), ("fsdp",))
    given = {**MODES[mode], **options}
    for block in (model.first, model.second):
        fully_shard(block, mesh, **given)
    return fully_shard(model, mesh, **given)


def scalar(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: cast(Tensor, model(x).pow(2).sum())


def transformed(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the result of each transform of the model at ``x``."""
    found: dict[str, Any] = {
        "grad": grad(scalar(model))(x),
        "jvp": jvp(model, (x,), (torch.cos(x),))[1],
        "vmap": vmap(model)(x),
        "rows": vmap(grad(scalar(model)))(x),
        "jacrev": jacrev(scalar(model))(x),
        "twice": hessian(scalar(model))(x[:1]),
    }
    output, back = vjp(model, x)
    found["vjp"] = back(torch.sin(output))[0]
    with torch.no_grad():
        found["no_grad"] = jvp(model, (x,), (torch.cos(x),))[1]
    return {name: value.detach().clone() for name, value in found.items()}


def around(rank: int, mode: str) -> tuple[dict[str, Tensor], Gradients, dict[str, Tensor]]:
    """Transform, train a step, and transform again with the new parameters."""
    model = sharded(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = transformed(model, input_of(rank))
    optimizer.zero_grad()
    model(input_of(rank)).pow(2).sum().backward()
    found = gradients(model)
    optimizer.step()
    return before, found, transformed(model, input_of(rank))


@pytest.mark.parametrize("mode", MODES)
def test_transforms_equal_one_process_and_leave_no_trace(ranks: Ranks, mode: str) -> None:
    plain: Any = make(Two)
    expected = [transformed(plain, input_of(rank)) for rank in range(2)]
    for rank in range(2):
        (plain(input_of(rank)).pow(2).sum() / 2).backward()
    grads = gradients(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for rank, (before, found, after) in enumerate(ranks(2).run(around, mode)):
        assert worst(before, expected[rank]) < 1e-12
        assert worst(found, grads) < 1e-12
        assert worst(after, transformed(plain, input_of(rank))) < 1e-12


def in_half(rank: int) -> dict[str, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = sharded("copy", mp_policy=policy)
    x = input_of(rank)
    return {
        "grad": grad(scalar(model))(x).detach(),
        "jvp": jvp(model, (x,), (torch.cos(x),))[1].detach(),
    }


def test_transforms_compute_in_the_dtype_of_the_policy(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(2).run(in_half)):
        x, plain = input_of(rank), make(Two)
        exact = {"grad": grad(scalar(plain))(x), "jvp": jvp(plain, (x,), (torch.cos(x),))[1]}
        for name, value in found.items():
            error = (value - exact[name]).norm() / exact[name].norm()
            assert 1e-6 < error.item() < 2e-2


def late(rank: int, mode: str) -> dict[str, Tensor]:
    """Run the backward of a transform after a whole step of the usual kind."""
    model = sharded(mode)
    x = input_of(rank)
    output, back = vjp(model, x)
    model(x).pow(2).sum().backward()
    return {"vjp": back(torch.sin(output))[0].detach()}


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_after_other_backwards_gathers_again(ranks: Ranks, mode: str) -> None:
    for rank, found in enumerate(ranks(2).run(late, mode)):
        output, back = vjp(make(Two), input_of(rank))
        assert worst(found, {"vjp": back(torch.sin(output))[0].detach()}) < 1e-12


def by_parameters(rank: int, mode: str) -> Gradients:
    """Return the parameters' gradients of a penalty on the input's gradient."""
    model = sharded(mode)
    grad(scalar(model))(input_of(rank)).pow(2).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("mode", ["copy", "ragged"])
def test_results_of_a_transform_have_gradients_of_the_parameters(ranks: Ranks, mode: str) -> None:
    plain: Any = make(Two)
    for rank in range(2):
        (grad(scalar(plain))(input_of(rank)).pow(2).sum() / 2).backward()
    for found in ranks(2).run(by_parameters, mode):
        assert worst(found, gradients(plain)) < 1e-11
