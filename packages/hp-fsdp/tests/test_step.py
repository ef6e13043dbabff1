"""One step on real ranks against one process, and against torch's fully_shard bit by bit."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_fsdp import FSDPModule, ShardingError, fully_shard
from hp_fsdp._states import ParameterState
from hp_fsdp._unit import unit_of

from .models import (
    WIDTH,
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def one_step(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype, divide: float | None
) -> Gradients:
    model = shard(make(Net, dtype), mesh_of(shape, NAMES[len(shape)]))
    if divide is not None:
        model.set_gradient_divide_factor(divide, recurse=True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.nccl
@pytest.mark.parametrize(
    "shape",
    [(1, 2), (2, 1), (2,), (4,), (2, 2), (4, 1), (1, 4)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize("divide", [None, 1.0], ids=["mean", "sum"])
def test_gradients_equal_one_process(
    ranks: Ranks, shape: tuple[int, ...], divide: float | None
) -> None:
    world = torch.Size(shape).numel()
    for found in ranks(world).run(one_step, shape, torch.float64, divide):
        assert worst(found, reference(world, divide=divide)) < 1e-12


def test_fp32_gradients_equal_one_process_in_fp32(ranks: Ranks) -> None:
    expected = reference(2, dtype=torch.float32)
    for found in ranks(2).run(one_step, (2,), torch.float32, None):
        assert worst(found, expected) < 1e-5


def train(rank: int, theirs: bool) -> tuple[list[Gradients], Gradients]:
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net, torch.float32)
    if theirs:
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    else:
        shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, parameters(model)


@pytest.mark.nccl
def test_three_steps_are_bitwise_those_of_torch_on_two_ranks(ranks: Ranks) -> None:
    ours, theirs = ranks(2).run(train, False), ranks(2).run(train, True)
    for (our_steps, our_end), (their_steps, their_end) in zip(ours, theirs, strict=True):
        for mine, other in zip([*our_steps, our_end], [*their_steps, their_end], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine)


class Odd(nn.Module):
    """Fewer rows than ranks, an unused and a frozen parameter, tied weights, no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 11, bias=False)
        self.last = nn.Linear(WIDTH, 11, bias=False)
        self.last.weight = self.first.weight
        self.one = nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits."""
        x = self.first.weight[batch] * self.frozen * self.one
        return cast(Tensor, self.last(x))


def odd_step(rank: int, world: int, freeze_late: bool) -> dict[str, Any]:
    model = make(Odd)
    if freeze_late:
        model.frozen.requires_grad_(True)
    fully_shard(model, mesh_of((world,), ("fsdp",)))
    if freeze_late:
        model.frozen.requires_grad_(False)
    loss_of(model, tokens(rank)).backward()
    return {
        "gradients": gradients(model),
        "frozen": model.frozen.grad,
        "tied": model.first.weight is model.last.weight,
        "rows": model.one.to_local().shape[0],
        "names": [name for name, _ in model.named_parameters()],
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("freeze_late", [False, True])
def test_unused_frozen_tied_and_tiny_parameters(
    ranks: Ranks, world: int, freeze_late: bool
) -> None:
    expected = reference(world, Odd)
    del expected["frozen"], expected["empty"], expected["unused"]
    results = ranks(world).run(odd_step, world, freeze_late)
    for found in results:
        assert found["frozen"] is None
        assert found["tied"]
        assert worst(found["gradients"], expected) < 1e-12
        assert "last.weight" not in found["names"]
    assert [found["rows"] for found in results] == [1] + [0] * (world - 1)


class Repeated(nn.Module):
    """Calls one block twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(2)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits."""
        x = self.net.embedding(batch)
        for block in (self.net.blocks[0], self.net.blocks[1], self.net.blocks[0]):
            x = block(x)
        return cast(Tensor, self.net.head(x))


def repeated_steps(rank: int) -> list[Gradients]:
    model = make(Repeated)
    for block in model.net.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    seen = []
    for _ in range(3):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.nccl
def test_a_block_called_twice_gets_both_gradients(ranks: Ranks) -> None:
    expected = reference(2, Repeated)
    for steps in ranks(2).run(repeated_steps):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True] * 3


def layout(rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    plain = make(Net)
    model = shard(make(Net), mesh_of(shape, NAMES[len(shape)]))
    weight = model.blocks[0].up.weight
    same = all(
        torch.equal(full(p), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    whole = plain.embedding.weight
    index = mesh_of(shape, NAMES[len(shape)]).get_local_rank(len(shape) - 1)
    chunks = torch.chunk(whole, shape[-1])
    mine = chunks[index] if index < len(chunks) else whole[:0]
    loss_of(model, tokens(rank)).backward()
    return {
        "same": same,
        "placements": weight.placements,
        "gradient": weight.grad.placements,
        "chunk": torch.equal(model.embedding.weight.to_local(), mine),
        "is": isinstance(model, FSDPModule) and isinstance(model, Net),
        "child": isinstance(model.head, FSDPModule),
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_parameters_are_dtensors_cut_as_torch_chunk(ranks: Ranks, shape: tuple[int, ...]) -> None:
    expected = (Replicate(),) * (len(shape) - 1) + (Shard(0),)
    for found in ranks(4).run(layout, shape):
        assert found["same"]
        assert found["placements"] == expected
        assert found["gradient"] == expected
        assert found["chunk"]
        assert found["is"]
        assert not found["child"]


def states(rank: int, option: bool | None) -> list[list[bool]]:
    """Return which units are sharded after forward and after backward, for two steps."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), reshard_after_forward=option)
    seen = []
    for _ in range(2):
        loss = loss_of(model, tokens(rank))
        seen.append(sharded(model))
        loss.backward()
        seen.append(sharded(model))
    with torch.no_grad():
        model(tokens(rank))
    seen.append(sharded(model))
    return seen


def sharded(model: Any) -> list[bool]:
    units = [unit_of(module) for module in (*model.blocks, model)]
    return [
        all(g.state is ParameterState.SHARDED for g in unit.groups)
        and all(isinstance(p.owners[0].get(), DTensor) for g in unit.groups for p in g.parameters)
        for unit in units
        if unit is not None
    ]


@pytest.mark.parametrize(
    ("option", "first", "second", "evaluation"),
    [
        (True, [True] * 4, [True] * 4, [True] * 4),
        (False, [False] * 4, [False] * 4, [False] * 4),
        # the root keeps its parameters, and once the order is known the last block too
        (None, [True, True, True, False], [True, True, False, False], [True] * 4),
    ],
)
def test_units_that_reshard_after_forward(
    ranks: Ranks,
    option: bool | None,
    first: list[bool],
    second: list[bool],
    evaluation: list[bool],
) -> None:
    every = [True] * 4
    for found in ranks(2).run(states, option):
        assert found == [first, every, second, every, evaluation]


def chosen_later(rank: int) -> list[list[bool]]:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    seen = []
    for module, reshard, recurse in (
        (model, False, True),
        (model.blocks[1], True, True),
        (model, True, False),
    ):
        module.set_reshard_after_forward(reshard, recurse=recurse)
        loss = loss_of(model, tokens(rank))
        seen.append(sharded(model))
        loss.backward()
    return seen


def test_set_reshard_after_forward_holds_from_then_on(ranks: Ranks) -> None:
    for found in ranks(2).run(chosen_later):
        assert found == [[False] * 4, [False, True, False, False], [False, True, False, True]]


def divided(rank: int) -> tuple[list[str], Gradients]:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    refused = []
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        try:
            model.set_gradient_divide_factor(factor)
        except ShardingError as error:
            refused.append(str(error).split()[0])
    model.set_gradient_divide_factor(1.0, recurse=True)
    model.set_gradient_divide_factor(None, recurse=True)
    loss_of(model, tokens(rank)).backward()
    return refused, gradients(model)


def test_no_divide_factor_is_the_mean_again_and_bad_ones_are_refused(ranks: Ranks) -> None:
    for refused, found in ranks(2).run(divided):
        assert refused == ["factor=0.0", "factor=-1.0", "factor=nan", "factor=inf"]
        assert worst(found, reference(2)) < 1e-12


def default_mesh(rank: int) -> Gradients:
    model = make(Net)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_step_over_the_world_by_default(ranks: Ranks) -> None:
    for found in ranks(2).run(default_mesh):
        assert worst(found, reference(2)) < 1e-12


class Box:
    """An object that nobody looks into."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Boxing(nn.Module):
    """Two layers, so that a backward needs a weight; returns a box, or keeps the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.boxed = True
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Box | None:
        """Return an output that autograd hooks cannot see."""
        y = self.second(torch.tanh(self.first(x)))
        self.kept = [y]
        return Box(y) if self.boxed else None


class Boxed(Net):
    """The net with a block that hides its output."""

    boxed = True

    def __init__(self) -> None:
        super().__init__(1)
        self.hidden = Boxing()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.blocks[0](self.embedding(tokens))
        self.hidden.boxed = self.boxed
        box = self.hidden(x)
        return cast(Tensor, self.head(self.hidden.kept[0] if box is None else box.content))


class Silent(Boxed):
    """The same, with a block that returns nothing."""

    boxed = False


class Again(Boxed):
    """The same, with the block called twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.blocks[0](self.embedding(tokens))
        return cast(Tensor, self.head(self.hidden(self.hidden(x).content).content))


def boxed_steps(rank: int, kind: type[Boxed]) -> list[Gradients]:
    model = make(kind)
    fully_shard(model.hidden, mesh_of((2,), ("fsdp",)))
    shard(model, mesh_of((2,), ("fsdp",)))
    seen = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", [Boxed, Silent, Again])
def test_outputs_that_hooks_cannot_see_give_right_gradients(
    ranks: Ranks, kind: type[Boxed]
) -> None:
    expected = reference(2, kind)
    for steps in ranks(2).run(boxed_steps, kind):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def boxed_root(rank: int) -> list[tuple[Gradients, bool]]:
    """Return the gradients of a root that alone is a unit and hides its output, for two steps."""
    model: Any = make(Boxing)
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    seen = []
    for _ in range(2):
        model(input_of(rank)).content.pow(2).mean().backward()
        seen.append((gradients(model), all(p.grad is not None for p in model.parameters())))
        model.zero_grad()
    return seen


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def test_a_root_may_hide_its_output(ranks: Ranks) -> None:
    plain = make(Boxing)
    for replica in range(2):
        plain(input_of(replica)).content.pow(2).mean().backward()
    expected = {name: gradient / 2 for name, gradient in gradients(plain).items()}
    for steps in ranks(2).run(boxed_root):
        assert [(worst(found, expected) < 1e-12, every) for found, every in steps] == [
            (True, True)
        ] * 2


class Fancy(nn.Module):
    """A block with keyword, nested and plain inputs and outputs, none of them only a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FancyBlock()

    def forward(self, batch: Tensor) -> Tensor:
        """Return the inner block's two outputs, added."""
        x = self.inner.weight_of(batch)
        out = self.inner({"x": (x, "label")}, scale=2.0)
        return cast(Tensor, out["y"][0] + out["y"][1])


class FancyBlock(nn.Module):
    """Takes and returns containers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def weight_of(self, batch: Tensor) -> Tensor:
        """Return the batch one-hot, as an input that takes a gradient."""
        return torch.nn.functional.one_hot(batch % WIDTH, WIDTH).double().requires_grad_()

    def forward(self, inputs: dict[str, Any], *, scale: float) -> dict[str, Any]:
        """Return the scaled linear map and the input, in a list in a dict."""
        x, _ = inputs["x"]
        return {"y": [self.lin(x) * scale, x], "note": None}


def fancy_step(rank: int) -> Gradients:
    model = make(Fancy)
    fully_shard(model.inner, mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_nested_and_plain_inputs_and_outputs(ranks: Ranks) -> None:
    expected = reference(2, Fancy)
    for found in ranks(2).run(fancy_step):
        assert worst(found, expected) < 1e-12


def left_after_conversion(rank: int) -> list[bool]:
    """Return which flat shards are still there once a trained model has another dtype."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    loss_of(model, tokens(rank)).backward()
    units = [unit_of(module) for module in (*model.blocks, model)]
    shards = [weakref.ref(g.layout.shard) for unit in units if unit for g in unit.groups]
    model.float()
    gc.collect()
    return [shard() is not None for shard in shards]


def test_a_converted_model_does_not_keep_its_old_shards(ranks: Ranks) -> None:
    for left in ranks(2).run(left_after_conversion):
        assert len(left) == 4
        assert not any(left)
