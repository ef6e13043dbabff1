"""Exceptions anywhere in a step, one after another on one model: after reset() it trains on."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from hp_dtensor import TorchCollectives
from hp_fsdp import UnsupportedError, fully_shard, register_fsdp_forward_method

from .models import (
    WIDTH,
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}
OPTIONS: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
    "given up": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "fewer": {"reshard_after_forward": 2},
}


class Broken(RuntimeError):
    """Error that the tests raise."""


class Failing(TorchCollectives):
    """Raises instead of starting a collective of ``kind``, after ``left`` calls."""

    def __init__(self) -> None:
        self.kind, self.left = "", 0

    def _next(self, kind: str) -> None:
        self.left -= kind == self.kind
        if kind == self.kind and self.left < 0:
            self.kind = ""
            raise Broken(kind)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Raise or pass on."""
        self._next("all_gather")
        return super().all_gather(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """Raise or pass on."""
        self._next("reduce_scatter")
        return super().reduce_scatter(*args, **kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Raise or pass on."""
        self._next("all_reduce")
        return super().all_reduce(*args, **kwargs)


def fail(*_: Any) -> None:
    raise Broken


def break_once(model: Any, carrier: Failing, rank: int, where: str) -> bool:
    """Run a step that raises; return whether it did."""
    place, _, number = where.partition(" ")
    handle = None
    try:
        if place == "accumulated":
            with model.no_sync():
                loss_of(model, tokens(rank, 7)).backward()
        if place == "forward":
            handle = model.blocks[1].down.register_forward_hook(fail)
        elif place in ("backward", "accumulated"):
            handle = model.blocks[1].down.register_full_backward_hook(fail)
        elif place == "forward-gather":
            carrier.kind, carrier.left = "all_gather", int(number)
        loss = loss_of(model, tokens(rank, 8))
        if place in ("all_gather", "reduce_scatter", "all_reduce"):
            carrier.kind, carrier.left = place, int(number)
        loss.backward()
    except Broken:
        return True
    finally:
        carrier.kind = ""
        if handle is not None:
            handle.remove()
    return False


PLACES = [
    *("forward", "backward", "accumulated"),
    *("forward-gather 0", "forward-gather 1", "forward-gather 3"),
    *("all_gather 0", "all_gather 1", "reduce_scatter 0", "reduce_scatter 2"),
    *("all_reduce 0", "all_reduce 2"),
]


def broken_steps(rank: int, name: str, shape: tuple[int, ...]) -> dict[str, tuple[bool, Gradients]]:
    """Break a step in every place, reset, and return the gradients of each next step."""
    carrier = Failing()
    mesh = mesh_of(shape, NAMES[len(shape)])
    options: dict[str, Any] = {**OPTIONS[name], "collectives": carrier}
    model: Any = make(Net)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    seen = {}
    for where in PLACES:
        raised = break_once(model, carrier, rank, where)
        model.reset()
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        seen[where] = raised, gradients(model)
    return seen


CASES = [
    *((name, (2, 2)) for name in ("copy", "accumulate", "given up", "kept")),
    ("fewer", (4,)),
    ("ragged", (2,)),
    pytest.param("copy", (2,), marks=pytest.mark.long),
    pytest.param("ragged", (2, 2), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_the_step_after_an_exception_anywhere_is_right(
    ranks: Ranks, name: str, shape: tuple[int, ...]
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world)
    for seen in ranks(world).run(broken_steps, name, shape):
        quiet = {where for where, (raised, _) in seen.items() if not raised}
        # without replicas nothing is all-reduced, and kept parameters are not gathered again
        allowed = {"all_reduce 0", "all_reduce 2"} if len(shape) == 1 else set()
        allowed |= {"all_gather 0", "all_gather 1"} if name == "kept" else set()
        assert quiet == allowed
        for where, (_, found) in seen.items():
            assert worst(found, expected) < 1e-12, where


def part_after_failure(rank: int, whole: bool) -> Tensor:
    """Let a pass raise, of the root or of a part, then step the optimizer, then run the other."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), reshard_after_forward=False)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, tokens(rank)).backward()
    block = model.blocks[1]
    handle = block.down.register_forward_hook(fail)
    run: Any = (lambda: model(tokens(rank))) if whole else (lambda: block(x))
    with pytest.raises(Broken):
        run()
    handle.remove()
    optimizer.step()
    with torch.no_grad():
        return cast(Tensor, block(x) if whole else model(tokens(rank)))


@pytest.mark.parametrize("whole", [True, False])
def test_a_pass_after_one_that_raised_uses_no_old_weights(ranks: Ranks, whole: bool) -> None:
    plain = make(Net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for rank in range(2):
        (loss_of(plain, tokens(rank)) / 2).backward()
    optimizer.step()
    ones = torch.ones(2, WIDTH, dtype=torch.float64)
    for rank, found in enumerate(ranks(2).run(part_after_failure, whole)):
        expected = plain.blocks[1](ones) if whole else plain(tokens(rank))
        assert worst({"y": found}, {"y": expected.detach()}) < 1e-12


class Outside(Net):
    """A net with another way in."""

    def embedded(self, batch: Tensor) -> Tensor:
        """Run the blocks on the embeddings. Raise if the batch has one token."""
        x: Tensor = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        if len(batch) == 1:
            raise Broken
        return x


def method_that_raises(rank: int) -> Gradients:
    model: Any = shard(make(Outside), mesh_of((2,), NAMES[1]))
    register_fsdp_forward_method(model, "embedded")
    with pytest.raises(Broken):
        model.embedded(tokens(rank)[:1])
    model.blocks[1](torch.ones(1, WIDTH, dtype=torch.float64))
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_registered_method_may_raise(ranks: Ranks) -> None:
    for found in ranks(2).run(method_that_raises):
        assert worst(found, reference(2, Outside)) < 1e-12


def second_order(rank: int) -> tuple[str, Gradients]:
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = model.blocks[0](x).pow(2).sum()
    with pytest.raises(UnsupportedError) as caught:
        torch.autograd.grad(loss, [x], create_graph=True)
    model.reset()
    loss_of(model, tokens(rank)).backward()
    return str(caught.value), gradients(model)


def test_a_backward_to_differentiate_again_is_refused(ranks: Ranks) -> None:
    for said, found in ranks(2).run(second_order):
        assert "create_graph=True" in said
        assert worst(found, reference(2)) < 1e-12
