"""Which collectives a step issues, and in which order."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_dtensor import TorchCollectives
from hp_fsdp import fully_shard

from .models import WIDTH, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
BLOCKS = 3
Log = list[tuple[str, int]]
ROOT = BLOCKS  # how the log calls the root


class Logging(TorchCollectives):
    """Notes each collective, and of which unit it is; units differ in size."""

    def __init__(self) -> None:
        self.log: Log = []
        self.units: dict[int, int] = {}

    def _note(self, what: str, inputs: Any, ranks: int) -> None:
        numel = ranks * sum(each.numel() for each in inputs)
        # Reductions also have a few flags.
        self.log.append((what, self.units[max(size for size in self.units if size <= numel)]))

    def all_gather(self, axis: Any, inputs: Any, outputs: Any = None) -> Any:
        """Note and pass on."""
        self._note("gather", inputs, axis.size)
        return super().all_gather(axis, inputs, outputs)

    def reduce_scatter(self, axis: Any, inputs: Any, outputs: Any = None, op: Any = "sum") -> Any:
        """Note and pass on."""
        self._note("reduce", inputs, 1)
        return super().reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Any, tensors: Any, op: Any = "sum") -> Any:
        """Note and pass on."""
        self._note("sum", tensors, 1)
        return super().all_reduce(axis, tensors, op)


class Chain(nn.Module):
    """Blocks of different sizes, and a layer of the root's own after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH * (n + 1), bias=False),
                nn.Linear(WIDTH * (n + 1), WIDTH, bias=False),
            )
            for n in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, WIDTH * (2 * BLOCKS + 2), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return cast(Tensor, self.last(x))


def chain(
    shape: tuple[int, ...],
    option: bool | None = None,
    kind: Callable[[], nn.Module] = Chain,
    **options: Any,
) -> tuple[Any, Logging]:
    """Return a sharded chain and its log. ``options`` apply to the blocks only."""
    carrier = Logging()
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model: Any = make(kind)
    modules = [*model.blocks, model]
    for unit, module in enumerate(modules):
        more = {} if module is model else options
        fully_shard(module, mesh, reshard_after_forward=option, collectives=carrier, **more)
        carrier.units[2 * WIDTH * WIDTH * (unit + 1)] = unit
    return model, carrier


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def expected_of(world: int, kind: Callable[[], nn.Module] = Chain) -> Gradients:
    plain = make(kind)
    for rank in range(world):
        (plain(input_of(rank)).pow(2).mean() / world).backward()
    return gradients(plain)


def log_steps(rank: int, option: bool | None, what: str) -> list[tuple[Log, Log, Gradients]]:
    """Return the collectives of forward and backward in two steps, and their gradients."""
    model, carrier = chain((2,), option)
    if what == "root reshards":
        model.set_reshard_after_forward(True, recurse=False)
    if what == "misprefetch":
        model.set_modules_to_forward_prefetch([model.blocks[2]])
        model.blocks[0].set_modules_to_backward_prefetch([model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    seen = []
    for _ in range(2):
        loss = model(input_of(rank)).pow(2).mean()
        forward, carrier.log = carrier.log, []
        if what == "resharded by hand":
            for module in (*model.blocks, model):
                module.reshard()
        loss.backward()
        backward, carrier.log = carrier.log, []
        seen.append((forward, backward, gradients(model)))
        model.zero_grad()
    return seen


def gathers(log: Log) -> list[int]:
    return [unit for what, unit in log if what == "gather"]


@pytest.mark.parametrize(
    ("option", "what", "first", "second"),
    [
        # which units backward gathers, in the first step and once the order is known
        (True, "as it is", [3, 2, 1, 0], [3, 2, 1, 0]),
        (None, "as it is", [2, 1, 0], [1, 0]),
        (False, "as it is", [], []),
        (False, "resharded by hand", [3, 2, 1, 0], [3, 2, 1, 0]),
        (None, "root reshards", [3, 2, 1, 0], [3, 1, 0]),
    ],
)
def test_forward_gathers_every_unit_once_and_backward_the_resharded_ones(
    ranks: Ranks, option: bool | None, what: str, first: list[int], second: list[int]
) -> None:
    for steps in ranks(2).run(log_steps, option, what):
        assert [log for log, _, _ in steps] == [[("gather", n) for n in (ROOT, 0, 1, 2)]] * 2
        assert [gathers(log) for _, log, _ in steps] == [first, second]
        for _, log, found in steps:
            assert [unit for what, unit in log if what == "reduce"] == [2, 1, 0, ROOT]
            assert worst(found, expected_of(2)) < 1e-12


class Fork(nn.Module):
    """A layer with two outputs, which backward reaches one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        x = torch.tanh(self.layers(x))
        return x, torch.sin(x)


class Again(Chain):
    """Blocks of two outputs, of which the second runs again after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fork(WIDTH * (n + 1)) for n in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        for n in (0, 1, 2, 1):
            first, second = self.blocks[n](x)
            x = first + second
        return cast(Tensor, self.last(x))


def log_forks(rank: int) -> list[tuple[Log, Gradients]]:
    model, carrier = chain((2,), True, Again)
    seen = []
    for _ in range(2):
        loss = model(input_of(rank)).pow(2).mean()
        carrier.log = []
        loss.backward()
        backward, carrier.log = carrier.log, []
        seen.append((backward, gradients(model)))
        model.zero_grad()
    return seen


def test_a_unit_of_two_outputs_is_reached_once(ranks: Ranks) -> None:
    expected = expected_of(2, Again)
    for steps in ranks(2).run(log_forks):
        for log, found in steps:
            assert gathers(log) == [3, 1, 2, 1, 0]
            assert worst(found, expected) < 1e-12


def test_backward_gathers_a_unit_before_the_one_after_it_is_reduced(ranks: Ranks) -> None:
    for steps in ranks(2).run(log_steps, True, "as it is"):
        for _, log, _ in steps:
            for unit in range(BLOCKS - 1):
                assert log.index(("gather", unit)) < log.index(("reduce", unit + 1))


def log_ends(rank: int, grads: str) -> list[Log]:
    """Return the collectives of two backwards, and the ends of the blocks' backwards."""
    model, carrier = chain((2,), True, grads=grads, direct_bytes=0)
    for unit, block in enumerate(model.blocks):

        def note(*_: Any, unit: int = unit) -> None:
            carrier.log.append(("end", unit))

        block[0].register_full_backward_hook(note)
    seen = []
    for _ in range(2):
        loss = model(input_of(rank)).pow(2).mean()
        carrier.log = []
        loss.backward()
        log, carrier.log = carrier.log, []
        seen.append(log)
        assert worst(gradients(model), expected_of(2)) < 1e-12
        model.zero_grad()
    return seen


@pytest.mark.parametrize(("grads", "late"), [("copy", False), ("accumulate", True)])
def test_units_that_accumulate_prefetch_the_next_unit_at_their_end(
    ranks: Ranks, grads: str, late: bool
) -> None:
    for steps in ranks(2).run(log_ends, grads):
        for log in steps:
            assert gathers(log) == [3, 2, 1, 0]
            for unit in (1, 2):
                gathered = log.index(("gather", unit - 1))
                assert (gathered > log.index(("end", unit))) == late
                assert gathered < log.index(("reduce", unit))


def test_prefetching_another_unit_changes_no_gradient(ranks: Ranks) -> None:
    for steps in ranks(2).run(log_steps, True, "misprefetch"):
        for forward, _, found in steps:
            assert gathers(forward) == [ROOT, 2, 0, 1]
            assert worst(found, expected_of(2)) < 1e-12


def interleaved(rank: int) -> tuple[Log, Gradients, Gradients]:
    """Freeze the middle block, do a pass without gradient, step; then thaw and step."""
    model, carrier = chain((2,), True)
    model.blocks[1].requires_grad_(False)
    with torch.no_grad():
        model(input_of(rank))
    loss = model(input_of(rank)).pow(2).mean()
    carrier.log = []
    loss.backward()
    log, carrier.log = carrier.log, []
    frozen = gradients(model)
    model.zero_grad()
    model.blocks[1].requires_grad_(True)
    model(input_of(rank)).pow(2).mean().backward()
    return log, frozen, gradients(model)


def test_frozen_units_are_gathered_and_others_reduced_during_backward(ranks: Ranks) -> None:
    expected = expected_of(2)
    trained = {name: value for name, value in expected.items() if "blocks.1." not in name}
    for log, frozen, thawed in ranks(2).run(interleaved):
        assert gathers(log) == [ROOT, 2, 1, 0]
        assert [unit for what, unit in log if what == "reduce"] == [2, 0, ROOT]
        assert log.index(("reduce", 2)) < log.index(("gather", 0))
        assert worst(frozen, trained) < 1e-12
        assert worst(thawed, expected) < 1e-12


def alone(rank: int, shape: tuple[int, ...]) -> tuple[Log, Gradients]:
    model, carrier = chain(shape)
    model(input_of(rank)).pow(2).mean().backward()
    return carrier.log, gradients(model)


def test_one_rank_communicates_nothing_and_replicas_only_sum(ranks: Ranks) -> None:
    ((log, found),) = ranks(1).run(alone, (1,))
    assert log == []
    assert worst(found, expected_of(1)) < 1e-12
    for log, found in ranks(2).run(alone, (2, 1)):
        assert log == [("sum", 2), ("sum", 1), ("sum", 0), ("sum", ROOT)]
        assert worst(found, expected_of(2)) < 1e-12


class Chunked(Chain):
    """A chain with a head that is called separately for each part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH * (2 * BLOCKS + 2), 10, bias=False)


Events = list[tuple[str, int]]


def chunked(rank: int, beside: str) -> tuple[list[Events], list[Events], Gradients]:
    """Return the gathered and the executed units, forward and backward, in three steps."""
    carrier = Logging()
    model: Any = make(Chunked)
    mesh = mesh_of((2,), ("fsdp",))
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh, reshard_after_forward=True, collectives=carrier)
    for unit, module in enumerate((*model.blocks, model.last, model.head)):
        carrier.units[sum(p.numel() for p in module.parameters())] = unit
    for unit, module in enumerate((*model.blocks, model)):
        module.register_forward_pre_hook(lambda *_, unit=unit: carrier.log.append(("run", unit)))
    forwards, backwards = [], []
    for _ in range(3):
        model.zero_grad()
        carrier.log = []
        y = model(input_of(rank))
        forward, carrier.log = carrier.log, []
        if beside == "another root":
            z = model.blocks[1](input_of(rank + 7)).pow(2).mean()
        else:
            z = torch.zeros((), dtype=torch.float64)
        loss = sum((model.head(part).pow(2).sum() for part in y.chunk(2)), z)
        carrier.log = []
        cast(Tensor, loss).backward()
        forwards.append(forward)
        backwards.append(carrier.log)
    return forwards, backwards, gradients(model)


def chunked_plainly(beside: str) -> Gradients:
    plain: Any = make(Chunked)
    for rank in range(2):
        loss = plain.head(plain(input_of(rank))).pow(2).sum()
        if beside == "another root":
            loss = loss + plain.blocks[1](input_of(rank + 7)).pow(2).mean()
        (loss / 2).backward()
    return gradients(plain)


@pytest.mark.parametrize("beside", ["head", "another root"])
def test_a_unit_that_is_called_alone_leaves_the_learned_order_to_its_root(
    ranks: Ranks, beside: str
) -> None:
    expected = chunked_plainly(beside)
    for forwards, backwards, found in ranks(2).run(chunked, beside):
        assert worst(found, expected) < 1e-12
        for log in forwards[1:]:  # each gather is started before the unit ahead of it runs
            assert log.index(("gather", 0)) < log.index(("run", ROOT))
            assert log.index(("gather", 1)) < log.index(("run", 0))
            assert log.index(("gather", 2)) < log.index(("run", 1))
        for log in backwards:
            log.reverse()  # the head runs first in backward
            assert log.index(("gather", 1)) > log.index(("reduce", 2))
            assert log.index(("gather", 0)) > log.index(("reduce", 1))
