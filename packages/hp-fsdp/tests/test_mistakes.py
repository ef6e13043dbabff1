"""Common mistakes with `fully_shard` raise or warn, with advice."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.nn.parallel import DistributedDataParallel

from hp_fsdp import ModuleError, ParameterError, fully_shard

from .models import WIDTH, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
LAYOUTS = ["exact", "ragged"]
# DistributedDataParallel asks for lazily made names.
pytestmark = pytest.mark.filterwarnings("default")


def blocks() -> Any:
    return make(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)),
            nn.Linear(WIDTH, 3),
        )
    )


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def ours(module: Any, layout: Any = "exact") -> None:
    fully_shard(module, mesh_of((2,), ("fsdp",)), layout=layout)


def torchs(module: Any, layout: Any = "exact") -> None:
    torch.distributed.fsdp.fully_shard(module, mesh=mesh_of((2,), ("fsdp",)))


def said_by(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if "fully_shard" in str(each.message)]


def optimizer_before(rank: int, layout: str, how: str) -> list[list[str]]:
    """Return the warnings of two steps, and of a step with a new optimizer."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if how == "stepped":
        model(input_of(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ours(model[0], layout)
    if how == "between":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ours(model, layout)
    if how == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if how == "switched":  # as accelerate does
        optimizer.param_groups[0]["params"] = list(model.parameters())
    found = []
    for _ in range(2):
        model(input_of(rank)).sum().backward()
        found.append(said_by(optimizer.step))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("before", "0.weight, 0.bias and 4 more"),
        ("stepped", "0.weight, 0.bias and 4 more"),
        ("between", "1.0.weight, 1.0.bias and 2 more"),
        ("after", ""),
        ("switched", ""),
    ],
)
def test_an_optimizer_that_steps_replaced_parameters_warns_once(
    ranks: Ranks, layout: str, how: str, names: str
) -> None:
    for first, second in ranks(2).run(optimizer_before, layout, how):
        assert second == []
        assert len(first) == bool(names)
        for said in first:
            assert f"AdamW holds {names}" in said
            assert "make the optimizer after fully_shard" in said


def used_elsewhere(rank: int) -> list[str]:
    """Step a parameter that a module outside the sharded one still trains."""
    model, other = blocks(), nn.Linear(WIDTH, WIDTH).double()
    other.weight = model[0][0].weight
    ours(model[0])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(input_of(rank)).sum().backward()
    return said_by(optimizer.step)


def test_a_parameter_that_another_module_trains_does_not_warn(ranks: Ranks) -> None:
    assert ranks(2).run(used_elsewhere) == [[], []]


def wrapped(module: nn.Sequential, at: int) -> None:
    module[at] = DistributedDataParallel(module[at])


Step = Callable[[Any, str], object]
ORDERS: dict[str, tuple[list[Step], str]] = {
    "torch's root over blocks": (
        [lambda m, kind: ours(m[0], kind), lambda m, kind: torchs(m)],
        "Sequential was sharded by a fully_shard that is not torch's",
    ),
    "torch's root over both kinds": (
        [
            lambda m, kind: torchs(m[0]),
            lambda m, kind: ours(m[1], kind),
            lambda m, kind: torchs(m),
        ],
        "Sequential was sharded by a fully_shard that is not torch's",
    ),
    "torch's block in a root": (
        [lambda m, kind: ours(m, kind), lambda m, kind: torchs(m[0])],
        "Linear was sharded by a fully_shard that is not torch's",
    ),
    "torch's block in a unit": (
        [lambda m, kind: ours(m[0], kind), lambda m, kind: torchs(m[0][0])],
        "Linear was sharded by a fully_shard that is not torch's",
    ),
    "root over torch's blocks": (
        [lambda m, kind: torchs(m[0]), lambda m, kind: ours(m, kind)],
        "0, a FSDPSequential, was passed to torch's fully_shard",
    ),
    "root over both kinds": (
        [
            lambda m, kind: ours(m[0], kind),
            lambda m, kind: torchs(m[1]),
            lambda m, kind: ours(m, kind),
        ],
        "1, a FSDPSequential, was passed to torch's fully_shard",
    ),
    "block in torch's root": (
        [lambda m, kind: torchs(m), lambda m, kind: ours(m[0], kind)],
        "Sequential was passed to torch's fully_shard",
    ),
    "root over DistributedDataParallel": (
        [lambda m, kind: wrapped(m, 0), lambda m, kind: ours(m, kind)],
        "0 is a DistributedDataParallel",
    ),
    "of DistributedDataParallel": (
        [lambda m, kind: ours(DistributedDataParallel(m), kind)],
        "DistributedDataParallel",
    ),
}


def in_order(rank: int, order: str, layout: str) -> tuple[str, bool]:
    """Return the error of the last call, and whether the calls before raised none."""
    model = blocks()
    *before, last = ORDERS[order][0]
    for step in before:
        step(model, layout)
    with pytest.raises(ModuleError) as caught:
        last(model, layout)
    return str(caught.value), True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
def test_two_kinds_of_sharding_in_one_model_raise_at_the_second_call(
    ranks: Ranks, order: str, layout: str
) -> None:
    for said, _ in ranks(2).run(in_order, order, layout):
        assert ORDERS[order][1] in said


def replicated(rank: int, order: str, layout: Any) -> Gradients:
    """Replicate the other modules with torch, around or inside sharded modules."""
    model, mesh = blocks(), mesh_of((2,), ("fsdp",))
    by: Any = {
        "fsdp": lambda m: replicate_fsdp(m, mesh=mesh),
        "ddp": lambda m: replicate_ddp(m),
    }[order.split()[0]]
    if order.endswith("around"):
        ours(model[0], layout)
        by(model)
    else:
        by(model[0])
        ours(model, layout)
    model(input_of(rank)).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["fsdp around", "fsdp inside", "ddp around", "ddp inside"])
def test_torchs_replicate_works_around_and_inside(ranks: Ranks, order: str, layout: str) -> None:
    plain = blocks()
    for rank in range(2):
        (plain(input_of(rank)).sum() / 2).backward()
    for found in ranks(2).run(replicated, order, layout):
        assert worst(found, gradients(plain)) < 1e-12


def ignored(rank: int, order: str, layout: Any) -> Gradients:
    """Pass the parameters of the first library as ignored parameters to the second."""
    model, mesh = blocks(), mesh_of((2,), ("fsdp",))
    if order == "torch's root":
        ours(model[0], layout)
        taken = set(model[0].parameters())
        torch.distributed.fsdp.fully_shard(model, mesh=mesh, ignored_params=taken)
    elif order == "torch's block":
        torchs(model[0])
        fully_shard(model, mesh, layout=layout, ignored_params=set(model[0].parameters()))
    else:
        wrapped(model, 0)
        fully_shard(model, mesh, layout=layout, ignored_params=set(model[0].parameters()))
    model(input_of(rank)).sum().backward()
    return {name.replace("module.", ""): g for name, g in gradients(model).items()}


@pytest.mark.nccl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["torch's root", "torch's block", "DistributedDataParallel"])
def test_each_kind_may_ignore_the_parameters_of_the_other(
    ranks: Ranks, order: str, layout: str
) -> None:
    plain = blocks()
    for rank in range(2):
        (plain(input_of(rank)).sum() / 2).backward()
    for found in ranks(2).run(ignored, order, layout):
        assert worst(found, gradients(plain)) < 1e-12


def copied(rank: int) -> list[bool]:
    """Copy an inner module of a unit and give it to torch's; use a composable checkpoint."""
    model = blocks()
    checkpoint(model[1])
    ours(model[0])
    ours(model)
    made = copy.deepcopy(model[2])
    for name, p in list(made.named_parameters()):
        setattr(made, name, nn.Parameter(p.detach().full_tensor()))
    loaded = pickle.loads(pickle.dumps(made))
    torchs(made)
    torchs(loaded)
    model(input_of(rank)).sum().backward()
    return [isinstance(each, torch.distributed.fsdp.FSDPModule) for each in (made, loaded)]


def test_a_copy_of_an_inner_module_belongs_to_no_unit(ranks: Ranks) -> None:
    assert ranks(2).run(copied) == [[True, True]] * 2


def converted_frozen(rank: int, layout: Any) -> list[str]:
    """Convert a frozen model, as a whole and after `fully_shard`; return its dtypes then."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    for module in (model[0], model):
        fully_shard(module, mesh_of((2,), ("fsdp",)), layout=layout)
    out = model.double()(torch.ones(1, 8, dtype=torch.float64))
    return [str(p.dtype) for p in model.parameters()] + [str(out.dtype)]


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_a_frozen_model_may_be_converted(ranks: Ranks, layout: str) -> None:
    for dtypes in ranks(2).run(converted_frozen, layout):
        assert {*dtypes} == {"torch.float64"}


def called_with_others(rank: int, layout: Any) -> tuple[str, float]:
    """Call a model with other parameters, as averages; return the error and the own's change."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    for module in (model[0], model):
        fully_shard(module, mesh_of((2,), ("fsdp",)), layout=layout)
    others = {name: p.detach() * 0 for name, p in model.named_parameters()}
    with pytest.raises(ParameterError) as caught, torch.no_grad():
        torch.func.functional_call(model, others, (torch.ones(1, 8),))
    now = [p.full_tensor() for p in model.parameters()]
    return str(caught.value), max(
        float((a - b).abs().max()) for a, b in zip(before, now, strict=True)
    )


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_a_call_with_other_parameters_is_refused_and_keeps_the_own(
    ranks: Ranks, layout: str
) -> None:
    for text, change in ranks(2).run(called_with_others, layout):
        assert ".weight was replaced by a tensor that is not an nn.Parameter" in text
        assert "functional_call" in text
        assert change == 0
