"""Optimizers that step on flat shards."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

from hp_dtensor import clip_grad_norm_
from hp_fsdp import ModuleError, ShardingError, StateError, fully_shard, sharded_optimizer
from hp_fsdp._optimizer import ELEMENTWISE

from .models import Gradients, Net, full, loss_of, make, mesh_of, parameters, shard, tokens, worst

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.01},
}


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> Gradients:
    return {
        f"{name}.{key}": full(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor)
    }


def train(
    rank: int, kind: str, shape: tuple[int, ...], flat: bool, frozen: bool
) -> tuple[Gradients, Gradients]:
    """Return parameters and moments after steps with clipping, accumulation and a schedule."""
    model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]), ignored_params=set())
    if frozen:
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[2].requires_grad_(False)
    cls = getattr(torch.optim, kind)
    options = OPTIONS.get(kind, {})
    optimizer: Any = (
        sharded_optimizer(cls, model, **options) if flat else cls(model.parameters(), **options)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        for micro in range(2):
            loss_of(model, tokens(rank, 2 * step + micro)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return parameters(model), moments(optimizer, model)


@pytest.mark.parametrize("kind", [cls.__name__ for cls in ELEMENTWISE])
def test_elementwise_optimizers_equal_their_steps_on_single_parameters(
    ranks: Ranks, kind: str
) -> None:
    flat = ranks(2).run(train, kind, (2,), True, False)
    single = ranks(2).run(train, kind, (2,), False, False)
    for (mine, my_moments), (theirs, their_moments) in zip(flat, single, strict=True):
        assert worst(mine, theirs) < 1e-12
        assert worst(my_moments, their_moments) < 1e-12


@pytest.mark.parametrize(
    ("frozen", "shape"),
    [
        *((True, (2, 2)), (True, (2,)), (False, (1,))),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(True, (1,)), (True, (4,)), (False, (2,)), (False, (4,)), (False, (2, 2))]
        ),
    ],
    ids=str,
)
def test_on_any_mesh_and_with_frozen_parameters(
    ranks: Ranks, shape: tuple[int, ...], frozen: bool
) -> None:
    world = torch.Size(shape).numel()
    flat = ranks(world).run(train, "AdamW", shape, True, frozen)
    single = ranks(world).run(train, "AdamW", shape, False, frozen)
    for (mine, my_moments), (theirs, their_moments) in zip(flat, single, strict=True):
        assert worst(mine, theirs) < 1e-12
        assert worst(my_moments, their_moments) < 1e-12


def kernels(rank: int, layout: str) -> tuple[int, bool, bool]:
    """Count the tensors of the inner optimizer, and check the memory of gradients."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), layout=layout)
    optimizer: Any = sharded_optimizer(torch.optim.AdamW, model)
    loss_of(model, tokens(rank)).backward()
    flats = [p for group in optimizer._inner.param_groups for p in group["params"]]
    inside = True
    for segment in optimizer._segments:
        segment.take_gradients()
        memory = segment.flat.grad.untyped_storage().data_ptr()
        for piece in segment.pieces:
            part = piece.owner.part(piece.parameter.grad)
            held = segment.flat.grad[piece.start : piece.start + part.numel()]
            inside &= torch.equal(held, part.view(-1))
            inside &= not part.numel() or part.untyped_storage().data_ptr() == memory
    model.unshard()
    optimizer.step()
    seen = model(tokens(rank))  # the parameters gathered before the step are stale
    plain: Any = Net().double()
    plain.load_state_dict(parameters(model))
    return len(flats), inside, torch.allclose(seen, plain(tokens(rank)), rtol=1e-12)


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_there_is_one_tensor_for_each_group_and_no_copy_of_gradients(
    ranks: Ranks, layout: str
) -> None:
    for count, inside, fresh in ranks(2).run(kernels, layout):
        assert count == 4  # units
        assert inside
        assert fresh


def on_one_rank(rank: int) -> tuple[list[int], list[bool]]:
    """Return the sizes of the inner optimizer's tensors, and which gradients are not copies."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 600))
    fully_shard(model, mesh_of((1,), NAMES[1]))
    optimizer: Any = sharded_optimizer(torch.optim.AdamW, model)
    model(torch.randn(4, 512)).sum().backward()
    shared = []
    for segment in optimizer._segments:
        segment.take_gradients()
        memory = segment.flat.grad.untyped_storage().data_ptr()
        for piece in segment.pieces:
            part = piece.owner.part(piece.parameter.grad)
            held = segment.flat.grad[piece.start : piece.start + part.numel()]
            assert torch.equal(held, part.view(-1))
            if part.numel() > 1000:
                shared.append(part.untyped_storage().data_ptr() == memory)
    return [len(segment.flat) for segment in optimizer._segments], shared


def test_on_one_rank_large_gradients_are_not_copied(ranks: Ranks) -> None:
    """Gradients of one rank are not packed, so that each one has memory of its own."""
    sizes, shared = ranks(1).run(on_one_rank)[0]
    assert sum(sizes) == 512 * 512 + 512 + 2 * 512 + 600 * 512 + 600
    assert shared == [True, True]
    assert len(sizes) < 6  # the small ones are stepped together


def state_moves(rank: int) -> dict[str, bool]:
    """Load states from one kind of optimizer into the other, and go on."""
    mesh = mesh_of((2,), NAMES[1])
    models: list[Any] = [shard(make(Net), mesh) for _ in range(2)]
    flat: Any = sharded_optimizer(torch.optim.AdamW, models[0], lr=0.01)
    single = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for model, optimizer in zip(models, (flat, single), strict=True):
        for step in range(2):
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    result = {"same keys": flat.state_dict().keys() == single.state_dict().keys()}
    other: Any = sharded_optimizer(torch.optim.AdamW, models[1], lr=1.0)
    other.load_state_dict(single.state_dict())
    back = torch.optim.AdamW(models[0].parameters(), lr=1.0)
    back.load_state_dict(flat.state_dict())
    result["rate"] = other.param_groups[0]["lr"] == back.param_groups[0]["lr"] == 0.01
    result["views"] = all(isinstance(s["exp_avg"], DTensor) for s in other.state.values())
    for model, optimizer in zip(models, (back, other), strict=True):
        loss_of(model, tokens(rank, 5)).backward()
        optimizer.step()
    result["end"] = worst(parameters(models[0]), parameters(models[1])) < 1e-12
    result["moments"] = worst(moments(back, models[0]), moments(other, models[1])) < 1e-12
    return result


def test_states_equal_the_optimizer_on_single_parameters(ranks: Ranks) -> None:
    for found in ranks(2).run(state_moves):
        assert all(found.values()), found


def refusals(rank: int) -> list[str]:
    mesh = mesh_of((2,), NAMES[1])
    model: Any = shard(make(Net, torch.float32), mesh)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: sharded_optimizer(torch.optim.LBFGS, model),
        lambda: sharded_optimizer(cast(Any, "AdamW"), model),
        lambda: sharded_optimizer(torch.optim.SGD, nn.Linear(2, 2)),
    ]
    optimizer = sharded_optimizer(torch.optim.SGD, model)
    for call in calls:
        try:
            call()
        except (ShardingError, ModuleError, StateError) as error:
            said.append(str(error))
    model.double()
    try:
        optimizer.step()
    except StateError as error:
        said.append(str(error))
    return said


def test_unsupported_optimizers_raise(ranks: Ranks) -> None:
    for said in ranks(2).run(refusals):
        assert said[0].startswith("LBFGS is not known to update each element separately")
        assert said[1].startswith("AdamW is not known")
        assert said[2] == "Linear has no sharded parameter that trains"
        assert said[3].endswith("create it again")


class Plain(nn.Module):
    """A unit with a parameter that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use both."""
        y: torch.Tensor = self.inner(x).sum() * self.alone.sum()
        return y


def with_ignored(rank: int) -> tuple[bool, int]:
    model: Any = Plain()
    fully_shard(model, mesh_of((2,), NAMES[1]), ignored_params={model.alone})
    optimizer: Any = sharded_optimizer(torch.optim.AdamW, model, lr=0.1)
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    return bool((model.alone != 1).all()), len(optimizer.state)


def test_ignored_parameters_are_stepped_as_they_are(ranks: Ranks) -> None:
    assert ranks(2).run(with_ignored) == [(True, 3)] * 2


def grown(rank: int, layout: str, flat: bool) -> dict[str, Any]:
    """Thaw layers and add them, and a tensor of another module, while training."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), layout=layout)
    late = [model.head.weight, model.head.bias, model.blocks[0].up.weight]
    for p in late:
        p.requires_grad_(False)
    beside = nn.Parameter(torch.ones(3, dtype=torch.float64))
    cls = torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizer: Any = (
        sharded_optimizer(cls, model, **options)
        if flat
        else cls([p for p in model.parameters() if p.requires_grad], **options)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(3):
        if step == 1:
            for p in late:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": late, "lr": 0.1})
            optimizer.add_param_group({"params": beside})
        (loss_of(model, tokens(rank, step)) * beside.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    said = ""
    try:
        optimizer.add_param_group({"params": [model.head.bias]})
    except ValueError as error:
        said = str(error)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    loss_of(model, tokens(rank, 9)).backward()
    optimizer.step()
    end = {**parameters(model), "beside": beside.detach().clone()}
    return {
        "end": end,
        "moments": moments(optimizer, model),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "numbers": [group["params"] for group in state["param_groups"]],
        "said": said,
    }


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_added_parameters_are_stepped_as_the_optimizer_itself_does(
    ranks: Ranks, layout: str
) -> None:
    flat = ranks(2).run(grown, layout, True)
    single = ranks(2).run(grown, layout, False)
    for mine, other in zip(flat, single, strict=True):
        assert worst(mine["end"], other["end"]) < 1e-12
        assert worst(mine["moments"], other["moments"]) < 1e-12
        assert mine["rates"] == other["rates"]
        assert list(map(len, mine["numbers"])) == list(map(len, other["numbers"]))
        assert mine["said"] == other["said"] != ""


def cleared(optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state.clear()


def emptied(optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state = defaultdict(dict)


def forgotten(optimizer: Any, p: nn.Parameter) -> None:
    del optimizer.state[p]


def forgotten_inside(optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state[p].clear()


def restarted(optimizer: Any, p: nn.Parameter) -> None:
    for key, value in optimizer.state[p].items():
        optimizer.state[p][key] = torch.zeros_like(value)


def zeroed(optimizer: Any, p: nn.Parameter) -> None:
    for key in {"momentum_buffer", "exp_avg"} & optimizer.state[p].keys():
        optimizer.state[p][key].zero_()


def read(optimizer: Any, p: nn.Parameter) -> None:
    assert optimizer.state[torch.nn.Parameter(torch.zeros(1))] == {}


Change = Callable[[Any, nn.Parameter], None]
CHANGES: list[Change] = [cleared, emptied, forgotten, forgotten_inside, restarted, zeroed, read]


def changed_state(
    rank: int, kind: str, layout: str, change: Change, flat: bool
) -> tuple[Gradients, Gradients]:
    """Change the optimizer's state or options of parameters between its steps."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]), layout=layout)
    cls, options = getattr(torch.optim, kind), OPTIONS[kind]
    optimizer: Any = (
        sharded_optimizer(cls, model, **options) if flat else cls(model.parameters(), **options)
    )
    for step in range(4):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            change(optimizer, model.blocks[1].norm.weight)
    return parameters(model), moments(optimizer, model)


@pytest.mark.nccl
@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_counts_as_under_the_optimizer_itself(
    ranks: Ranks, change: Change, kind: str, layout: str
) -> None:
    flat = ranks(2).run(changed_state, kind, layout, change, True)
    single = ranks(2).run(changed_state, kind, layout, change, False)
    for (mine, my_moments), (theirs, their_moments) in zip(flat, single, strict=True):
        assert worst(mine, theirs) < 1e-12
        assert worst(my_moments, their_moments) < 1e-12


def changed_groups(rank: int) -> list[str]:
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    said = []
    for how in ("removed", "added", "another"):
        optimizer: Any = sharded_optimizer(torch.optim.SGD, model, lr=0.1)
        listed = optimizer.param_groups[0]["params"]
        if how == "removed":
            del listed[3]
        elif how == "added":
            listed.append(nn.Parameter(torch.ones(2)))
        else:
            optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2)), *listed[1:]]
        try:
            optimizer.step()
        except StateError as error:
            said.append(str(error))
    return said


def test_parameters_taken_from_a_group_are_no_longer_stepped_without_a_word(ranks: Ranks) -> None:
    for said in ranks(2).run(changed_groups):
        assert len(said) == 3
        assert all("the parameters of group 0 were changed" in each for each in said)
