"""Several backwards before a step."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional

from hp_fsdp import StateError, fully_shard, sharded_optimizer

from .models import (
    Gradients,
    Net,
    full,
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


def accumulate(rank: int, shape: tuple[int, ...], how: str) -> tuple[Gradients, int]:
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh)
    loss_of(model, tokens(rank, 7)).backward()
    model.zero_grad(set_to_none=how != "zeros")
    seen = -1
    for step in range(3):
        if how == "unsharded" and step < 2:
            with model.no_sync():
                loss_of(model, tokens(rank, step)).backward()
            seen = len(gradients(model))
        elif how == "setter" and step < 2:
            model.set_requires_gradient_sync(False)
            loss_of(model, tokens(rank, step)).backward()
            model.set_requires_gradient_sync(True)
        else:
            loss_of(model, tokens(rank, step)).backward()
    return gradients(model), seen


@pytest.mark.nccl
@pytest.mark.parametrize("how", ["sharded", "zeros", "unsharded", "setter"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=["fsdp", "ddp", "hsdp"])
def test_gradients_of_three_backwards_add_up(
    ranks: Ranks, shape: tuple[int, ...], how: str
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world, steps=(0, 1, 2))
    for found, before in ranks(world).run(accumulate, shape, how):
        assert worst(found, expected) < 1e-12
        assert before == (0 if how == "unsharded" else -1)


def keep_old(rank: int) -> bool:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    loss_of(model, tokens(rank, 0)).backward()
    kept = [(p.grad, p.grad.to_local().clone()) for p in model.parameters()]
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    return all(bool((gradient.to_local() == copy).all()) for gradient, copy in kept)


@pytest.mark.nccl
def test_gradients_that_someone_keeps_are_not_overwritten(ranks: Ranks) -> None:
    assert ranks(2).run(keep_old) == [True, True]


class Choosing(Net):
    """Runs only the blocks in ``chosen``."""

    chosen: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for index in self.chosen:
            x = self.blocks[index](x)
        return cast(Tensor, self.head(x))


def choosing(rank: int) -> tuple[Gradients, list[bool]]:
    """Skip in the synchronised backward a block that ran without; then once more, alone."""
    model = shard(make(Choosing), mesh_of((2,), ("fsdp",)))
    model.chosen = (0, 2)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    model.chosen = (1, 2)
    loss_of(model, tokens(rank, 1)).backward()
    seen = gradients(model)
    model.zero_grad()
    loss_of(model, tokens(rank, 2)).backward()
    return seen, [p.grad is None for p in model.blocks[0].parameters()]


def test_a_unit_that_the_synchronised_backward_skips_is_reduced_with_it(ranks: Ranks) -> None:
    plain = make(Choosing)
    for replica in range(2):
        for step, plain.chosen in enumerate([(0, 2), (1, 2)]):
            loss_of(plain, tokens(replica, step)).backward()
    expected = {name: gradient / 2 for name, gradient in gradients(plain).items()}
    for found, nothing_left in ranks(2).run(choosing):
        assert worst(found, expected) < 1e-12
        assert all(nothing_left)


def dropped(rank: int) -> Gradients:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    with model.no_sync():
        loss_of(model, tokens(rank, 9)).backward()
    model.reset()
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_reset_drops_the_gradients_of_no_sync(ranks: Ranks) -> None:
    expected = reference(2)
    for found in ranks(2).run(dropped):
        assert worst(found, expected) < 1e-12


OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "ragged": {"layout": "ragged"},
    "accumulate": {"grads": "accumulate"},
    "ragged, accumulate": {"layout": "ragged", "grads": "accumulate"},
}


def freeze(model: Any, frozen: bool) -> None:
    """Freeze, or thaw, some parameters of a unit, all of another, one of the root."""
    for part in (model.blocks[0].up, model.blocks[0].norm, model.blocks[1]):
        part.requires_grad_(not frozen)
    model.head.bias.requires_grad_(not frozen)


def forget(model: nn.Module) -> None:
    """Do as an optimizer's ``zero_grad``."""
    for p in model.parameters():
        p.grad = None


def freezing(rank: int, shape: tuple[int, ...], options: str, how: str) -> list[Gradients]:
    """Freeze between two microbatches, train frozen, thaw: the gradients of each step."""
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, **OPTIONS[options])
    synchronise = {
        "sync": model.set_requires_gradient_sync,
        "all-reduce": model.set_requires_all_reduce,
    }[how]
    seen = []
    for steps, frozen in (((0, 1), True), ((2,), True), ((3,), False)):
        for step in steps:
            synchronise(step == steps[-1])
            freeze(model, frozen and step > 0)
            loss_of(model, tokens(rank, step)).backward()
        seen.append(gradients(model))
        forget(model)
    return seen


def frozen_alone(world: int) -> list[Gradients]:
    """Return the gradients of one process after the same steps."""
    model = make(Net)
    seen = []
    for steps, frozen in (((0, 1), True), ((2,), True), ((3,), False)):
        for step in steps:
            freeze(model, frozen and step > 0)
            for replica in range(world):
                loss_of(model, tokens(replica, step)).backward()
        seen.append({name: gradient / world for name, gradient in gradients(model).items()})
        forget(model)
    return seen


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize(("shape", "how"), [((2,), "sync"), ((2, 2), "all-reduce")])
def test_parameters_frozen_between_microbatches_are_reduced_with_the_others(
    ranks: Ranks, shape: tuple[int, ...], how: str, options: str
) -> None:
    world = torch.Size(shape).numel()
    expected = frozen_alone(world)
    for steps in ranks(world).run(freezing, shape, options, how):
        for found, each in zip(steps, expected, strict=True):
            assert worst(found, each) < 1e-12


class Biased(Net):
    """Uses the bias of its head only if ``uses_bias`` is True."""

    uses_bias = True

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.blocks[0](self.embedding(tokens))
        return functional.linear(x, self.head.weight, self.head.bias if self.uses_bias else None)


def freezing_apart(rank: int, options: str) -> tuple[Gradients, bool]:
    """Freeze a parameter that only rank 0 used, then freeze all. Return the reduced gradients."""
    model = shard(make(Biased), mesh_of((2,), ("fsdp",)), **OPTIONS[options])
    model.uses_bias = rank == 0
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    model.head.bias.requires_grad_(False)
    loss_of(model, tokens(rank, 1)).backward()
    seen = gradients(model)
    forget(model)
    with model.no_sync():
        loss_of(model, tokens(rank, 2)).backward()
    model.requires_grad_(False)
    model.reduce_gradients()
    again = gradients(model)
    return seen, set(again) == set(seen) - {"head.bias"}


@pytest.mark.parametrize("options", list(OPTIONS))
def test_ranks_that_used_different_parameters_reduce_the_same_frozen_ones(
    ranks: Ranks, options: str
) -> None:
    plain = make(Biased)
    for replica in range(2):
        plain.uses_bias = replica == 0
        plain.head.bias.requires_grad_(True)
        loss_of(plain, tokens(replica, 0)).backward()
        plain.head.bias.requires_grad_(False)
        loss_of(plain, tokens(replica, 1)).backward()
    expected = {name: gradient / 2 for name, gradient in gradients(plain).items()}
    for found, without in ranks(2).run(freezing_apart, options):
        assert worst(found, expected) < 1e-12
        assert without


def freezing_late(rank: int, options: str) -> tuple[Gradients, Gradients]:
    """Freeze a parameter of the root, which stays gathered, between forward and backward."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), **OPTIONS[options])
    frozen = model.head.weight
    loss = loss_of(model, tokens(rank, 0))
    frozen.requires_grad_(False)
    loss.backward()
    seen = gradients(model)
    frozen.requires_grad_(True)
    forget(model)
    loss_of(model, tokens(rank, 1)).backward()
    return seen, gradients(model)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_the_gradient_of_a_parameter_frozen_after_forward_is_dropped(
    ranks: Ranks, options: str
) -> None:
    without = {name: value for name, value in reference(2).items() if name != "head.weight"}
    for found, after in ranks(2).run(freezing_late, options):
        assert worst(found, without) < 1e-12
        assert worst(after, reference(2, steps=(1,))) < 1e-12


def cleared(rank: int, shape: tuple[int, ...], options: str, how: str) -> Gradients:
    """Drop a microbatch by ``zero_grad``, the module's or the optimizer's, then do a step."""
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, **OPTIONS[options])
    optimizer = sharded_optimizer(torch.optim.SGD, model, lr=1.0)
    if how == "no all-reduce":
        model.set_requires_all_reduce(False)
    elif how == "not the last":
        model.set_is_last_backward(False)
    else:
        model.set_requires_gradient_sync(False)
    loss_of(model, tokens(rank, 9)).backward()
    if how == "optimizer":
        optimizer.zero_grad()
    else:
        model.zero_grad(set_to_none=how != "zeros")
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("shape", "how", "options"),
    [
        ((2,), "zeros", "exact"),
        ((2,), "optimizer", "exact"),
        ((2,), "not the last", "exact"),
        ((2, 2), "no all-reduce", "exact"),
        ((2, 2), "no all-reduce", "ragged, accumulate"),
        *(((2,), "module", options) for options in OPTIONS),
    ],
)
def test_zero_grad_drops_unreduced_gradients(
    ranks: Ranks, shape: tuple[int, ...], how: str, options: str
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world)
    for found in ranks(world).run(cleared, shape, options, how):
        assert worst(found, expected) < 1e-12


def cleared_on_one(rank: int, options: str) -> Gradients:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), **OPTIONS[options])
    with model.no_sync():
        loss_of(model, tokens(rank)).backward()
    if rank == 1:
        model.zero_grad()
    model.reduce_gradients()
    return gradients(model)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_one_rank_may_drop_its_unreduced_gradients(ranks: Ranks, options: str) -> None:
    expected = {name: gradient / 2 for name, gradient in reference(1).items()}
    for found in ranks(2).run(cleared_on_one, options):
        assert worst(found, expected) < 1e-12


def converted(rank: int, options: str, shape: tuple[int, ...], what: str) -> tuple[str, Gradients]:
    """Convert a module with unreduced gradients. If that raises, undo it and continue."""
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model: Any = shard(make(Net, torch.float32), mesh, **OPTIONS[options])
    if what == "under way":
        model.set_is_last_backward(False)
    elif what == "scattered":
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    loss_of(model, tokens(rank)).backward()
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    if what == "dropped":
        model.zero_grad()
    said = ""
    try:
        model.double()
    except StateError as error:
        said = str(error)
        model.float()
    loss_of(model, tokens(rank, 1)).backward()
    return said, gradients(model)


@pytest.mark.parametrize("what", ["unsharded", "scattered", "dropped", "under way"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_a_conversion_loses_no_gradients_that_wait(ranks: Ranks, options: str, what: str) -> None:
    shape = (2, 2) if what == "scattered" else (2,)
    world = torch.Size(shape).numel()
    steps = (1,) if what == "dropped" else (0, 1)
    refused = what in ("unsharded", "scattered")
    expected = reference(world, dtype=torch.float32, steps=steps)
    for said, found in ranks(world).run(converted, options, shape, what):
        assert ("wait for a reduction" in said) == refused
        assert worst(found, expected) < 1e-5


def frozen_as_shown(model: Any, shown_by: str, replicas: list[int]) -> list[Gradients]:
    """Freeze, then unfreeze, the registered parameters. Return the gradients after each."""
    seen = []
    for frozen in (True, False):
        if shown_by == "unshard" and hasattr(model, "unshard"):
            for module in (model, *model.blocks):
                module.unshard()
        elif shown_by == "a forward without backward":
            with torch.no_grad():
                loss_of(model, tokens(0, 9))
        if shown_by == "forward":
            losses = [loss_of(model, tokens(replica, 0)) for replica in replicas]
            freeze(model, frozen)
        else:
            freeze(model, frozen)
            losses = [loss_of(model, tokens(replica, 0)) for replica in replicas]
        torch.stack(losses).sum().backward()
        seen.append(gradients(model))
        trains = [p.requires_grad for p in model.parameters()]
        seen.append({str(i): torch.tensor(float(each)) for i, each in enumerate(trains)})
        forget(model)
    return seen


def shown_and_frozen(rank: int, options: str, shown_by: str) -> list[Gradients]:
    how = {**OPTIONS[options], "reshard_after_forward": shown_by != "forward"}
    return frozen_as_shown(shard(make(Net), mesh_of((2,), ("fsdp",)), **how), shown_by, [rank])


@pytest.mark.parametrize("shown_by", ["unshard", "a forward without backward", "forward"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_parameters_frozen_while_unsharded_stay_frozen(
    ranks: Ranks, options: str, shown_by: str
) -> None:
    expected = frozen_as_shown(make(Net), shown_by, [0, 1])
    for found in ranks(2).run(shown_and_frozen, options, shown_by):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            scale = 1 if i % 2 else 2
            assert worst(one, {name: each / scale for name, each in other.items()}) < 1e-12


class Branches(nn.Module):
    """Two branches, of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the sum of the branches."""
        return torch.stack([getattr(self, name)(x) for name in names]).sum()


def one_branch_last(rank: int, how: str) -> list[float]:
    """Return the errors of all gradients after a last microbatch that leaves a branch out."""
    plain: Any = make(Branches)
    model: Any = make(Branches)
    mesh = mesh_of((2, 2), ("dp_replicate", "fsdp"))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh)
    both, last = ("first", "second"), ("second",)
    inputs = [torch.full((2, 8), each + 1.0, dtype=torch.float64) for each in range(4)]
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(how != "in flight")
    model(inputs[rank], both).backward()
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    if how == "reached":
        model(inputs[rank], last).backward()
    else:
        model.reduce_gradients()
    for each in inputs:
        (plain(each, both) / 4).backward()
        if how == "reached":
            (plain(each, last) / 4).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [(full(own.grad) - right.grad).abs().max().item() for own, right in pairs]


@pytest.mark.parametrize("how", ["reached", "waiting", "in flight"])
def test_sums_that_wait_for_replicas_are_finished_if_the_last_backward_skips_their_unit(
    ranks: Ranks, how: str
) -> None:
    for errors in ranks(4).run(one_branch_last, how):
        assert max(errors) < 1e-12
