"""Random training programs on several ranks: every gradient equals the gradient of one process."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_fsdp import FSDPModule, fully_shard, sharded_optimizer

from .models import full, mesh_of

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}
WIDTH = 6


class Failure(Exception):
    """Raised by a block on all ranks."""


class Block(nn.Module):
    """Parameters of several sizes. Returns a tensor, a tuple or a dict."""

    def __init__(self, hidden: int, output: str, inner: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=hidden % 2 == 0)
        self.down = nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH) if inner else None
        self.output = output
        self.fails = False

    def forward(self, x: Tensor) -> Any:
        """Return ``x`` and what the block adds, in the block's kind of output."""
        y = self.down(torch.tanh(self.up(x))) * self.scale
        if self.inner is not None:
            y = self.inner(y)
        if self.fails:
            raise Failure
        return {"tensor": x + y, "tuple": (x + y, y), "dict": {"out": x + y, "side": [y]}}[
            self.output
        ]


class Net(nn.Module):
    """Runs its blocks in any order, and any number of times."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(
            Block(
                choose.choice([3, 8, 16]),
                choose.choice(["tensor", "tuple", "dict"]),
                choose.random() < 0.3,
            )
            for _ in range(choose.randint(2, 4))
        )
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if choose.random() < 0.3:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, order: list[int], recompute: bool) -> tuple[Tensor, Tensor]:
        """Return logits, and the sum of the blocks' other outputs."""
        x = self.embedding(tokens)
        side = x.new_zeros(())
        for position in order:
            block = self.blocks[position]
            found = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            x = found if isinstance(found, Tensor) else next(_tensors(found))
            side = side + sum(other.sum() for other in list(_tensors(found))[1:])
        return self.head(x), side


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    else:
        for each in found.values() if isinstance(found, dict) else found:
            yield from _tensors(each)


def options_of(choose: random.Random, world: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Choose a mesh and options of `fully_shard`."""
    shape = choose.choice([(2,)] if world == 2 else [(4,), (2, 2)])
    divisors = [2] if shape[-1] == 4 else []
    options: dict[str, Any] = {
        "reshard_after_forward": choose.choice([None, True, False, *divisors]),
        "grads": choose.choice(["copy", "accumulate"]),
        "direct_bytes": choose.choice([None, 0, 256]),
        "min_shard_numel": choose.choice([0, 0, 10]),
    }
    if choose.random() < 0.4:
        options |= {"layout": "ragged", "granularity": choose.choice([1, 3])}
    return shape, options


def sharded(net: Net, choose: random.Random, world: int) -> Any:
    """Shard a copy's blocks, some inner layers, and the root."""
    shape, options = options_of(choose, world)
    mesh = mesh_of(shape, NAMES[len(shape)])
    blocks: Any = net.blocks
    for block in blocks:
        if block.inner is not None and choose.random() < 0.5:
            fully_shard(block.inner, mesh, **options)
        if choose.random() < 0.9:
            fully_shard(block, mesh, **options)
    model: Any = fully_shard(net, mesh, **options)
    model.set_reshard_after_backward(choose.random() < 0.8)
    model.set_reduce_scatter_max_input_buffers(choose.choice([1, 1, 3]))
    return model


class Step:
    """What all ranks do in one microbatch, drawn from a seed."""

    def __init__(self, choose: random.Random, blocks: int, number: int) -> None:
        length = choose.randint(1, blocks + 1)
        self.order = [choose.randrange(blocks) for _ in range(length)]
        self.recompute = choose.random() < 0.2
        self.forwards = choose.choice([1, 1, 1, 2])  # before one backward
        self.partly = choose.random() < 0.3  # odd ranks leave the other outputs out of the loss
        self.fails = choose.random() < 0.1
        self.seed = number

    def loss(self, model: Any, rank: int) -> Tensor:
        """Return the loss of one rank."""
        total = torch.zeros((), dtype=torch.float64)
        for forward in range(self.forwards):
            generator = torch.Generator().manual_seed(100 * self.seed + 10 * forward + rank)
            tokens = torch.randint(0, 7, (3,), generator=generator)
            logits, side = model(tokens, self.order, self.recompute)
            total = total + logits.pow(2).mean()
            if not (self.partly and rank % 2):
                total = total + 0.1 * side
        return total


def run(rank: int, seed: int, world: int) -> str:
    """Run one program on this rank, and the losses of all ranks on a plain model.

    Returns a description of the first difference, or "".
    """
    choose = random.Random(seed)
    torch.manual_seed(seed)
    plain: Any = Net(choose).double()
    torch.manual_seed(seed)
    model = sharded(Net(random.Random(seed)).double(), choose, world)
    flat = choose.random() < 0.4
    settings: dict[str, Any] = {"lr": 0.003, "momentum": 0.9}
    expected = torch.optim.SGD(plain.parameters(), **settings)
    own: Any = torch.optim.SGD(model.parameters(), **settings)
    if flat:
        own = sharded_optimizer(torch.optim.SGD, model, **settings)
    for number in range(choose.randint(2, 4)):
        if problem := _step(choose, number, rank, world, model, plain):
            return f"seed {seed}, step {number}: {problem}"
        own.step()
        expected.step()
        to_none = choose.random() < 0.7
        model.zero_grad(to_none)
        plain.zero_grad(to_none)
        if choose.random() < 0.2:
            model.load_state_dict(model.state_dict(), assign=choose.random() < 0.3)
            if flat or any(
                a is not b
                for a, b in zip(own.param_groups[0]["params"], model.parameters(), strict=True)
            ):
                own = torch.optim.SGD(model.parameters(), **settings)
                expected = torch.optim.SGD(plain.parameters(), **settings)
                flat = False
        if choose.random() < 0.2 and not flat:
            name = choose.choice([name for name, _ in plain.named_parameters()])
            trains = choose.random() < 0.5
            plain.get_parameter(name).requires_grad_(trains)
            model.get_parameter(name).requires_grad_(trains)
    return ""


def _step(choose: random.Random, number: int, rank: int, world: int, model: Any, plain: Any) -> str:
    microbatches = choose.randint(1, 3)
    accumulates = choose.choice(["no_sync", "set_requires_all_reduce", "sync"])
    for position in range(microbatches):
        step = Step(choose, len(plain.blocks), 10 * number + position)
        last = position == microbatches - 1
        if choose.random() < 0.15:
            with torch.no_grad():
                _same_forward(step, rank, model, plain)
        if step.fails and position == 0:
            _fail(step, rank, model, plain, choose.randrange(len(plain.blocks)))
        context: Any = nullcontext()
        if not last and accumulates == "no_sync":
            context = model.no_sync()
        if accumulates == "set_requires_all_reduce":
            model.set_requires_all_reduce(last)
        model.set_is_last_backward(last or choose.random() < 0.5)
        with context:
            step.loss(model, rank).backward()
        for other in range(world):
            (step.loss(plain, other) / world).backward()
    model.set_is_last_backward(True)
    return _difference(model, plain)


def _same_forward(step: Step, rank: int, model: Any, plain: Any) -> None:
    torch.testing.assert_close(step.loss(model, rank), step.loss(plain, rank))


def _fail(step: Step, rank: int, model: Any, plain: Any, block: int) -> None:
    """Raise in a block on all ranks, and start the step again."""
    model.blocks[block].fails = True
    try:
        step.loss(model, rank).backward()
    except Failure:
        model.reset()
    model.blocks[block].fails = False
    model.zero_grad()
    plain.zero_grad()


def _difference(model: Any, plain: Any) -> str:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # shows the sharded parameters if they are kept after backward
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        own, right = found[name], parameter.grad
        if (error := _error(full(own), parameter)) > 1e-11:
            return f"{name} differs by {error}"
        if right is None or own.grad is None:
            zero = torch.zeros_like(parameter)
            left = zero if own.grad is None else full(own.grad)
            if not torch.equal(left, zero if right is None else right):
                return f"the gradient of {name} is {own.grad}, and {right} on one process"
            continue
        if (error := _error(full(own.grad), right)) > 1e-11:
            return f"the gradient of {name}, at most {right.abs().max()}, differs by {error}"
    return ""


def _error(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest value or 1e-6."""
    return (found - right).abs().max().item() / max(right.abs().max().item(), 1e-6)


def programs(rank: int, world: int, seeds: range) -> list[str]:
    """Return the descriptions of programs in which a gradient or parameter differs."""
    found = []
    for seed in seeds:
        found.append(run(rank, seed, world))
    return [each for each in found if each]


@pytest.mark.parametrize("world", [2, 4])
def test_random_programs_equal_one_process(ranks: Ranks, world: int) -> None:
    assert ranks(world).run(programs, world, range(25)) == [[]] * world


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_many_random_programs_equal_one_process(ranks: Ranks, world: int) -> None:
    for first in range(25, 250, 25):
        found = ranks(world).run(programs, world, range(first, first + 25))
        assert cast(Any, found) == [[]] * world
