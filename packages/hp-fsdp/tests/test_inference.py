"""Forwards without gradients: weights stay unsharded if requested, and are never stale."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor, RecordingCollectives
from hp_fsdp import sharded_optimizer

from .models import (
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
)
from .models import worst as worst_of

Ranks = Callable[[int], RankPool]


def generate(rank: int, how: str) -> tuple[list[int], list[bool]]:
    """Return the gathers after each of four forwards, and which weights are unsharded."""
    record = RecordingCollectives()
    option = False if how in ("option", "inference mode") else None
    model = shard(make(lambda: Net(2)), mesh_of((2,), ("fsdp",)), collectives=record)
    model.set_reshard_after_forward(option)
    loss_of(model, tokens(rank)).backward()
    units = (*model.blocks, model)
    mode = torch.inference_mode if how == "inference mode" else torch.no_grad
    record.reset()
    if how == "unshard":
        for unit in units:
            unit.unshard()
    calls, unsharded = [], []
    with mode():
        for step in range(4):
            model(tokens(rank, step))
            calls.append(record.by_axis["fsdp"].calls)
            unsharded.append(not any(isinstance(p, DTensor) for p in model.parameters()))
    for unit in units:
        unit.reshard()
    unsharded.append(all(isinstance(p, DTensor) for p in model.parameters()))
    loss_of(model, tokens(rank)).backward()  # a step of training follows as ever
    unsharded.append(all(isinstance(p, DTensor) for p in model.parameters()))
    return calls, unsharded


@pytest.mark.parametrize("how", ["option", "inference mode", "unshard"])
def test_generation_gathers_each_unit_once(ranks: Ranks, how: str) -> None:
    for calls, unsharded in ranks(2).run(generate, how):
        assert calls == [3, 3, 3, 3]
        assert unsharded == [True] * 6


def evaluate(rank: int) -> tuple[int, bool]:
    record = RecordingCollectives()
    model = shard(make(lambda: Net(2)), mesh_of((2,), ("fsdp",)), collectives=record)
    with torch.no_grad():
        for step in range(4):
            model(tokens(rank, step))
    return record.by_axis["fsdp"].calls, all(isinstance(p, DTensor) for p in model.parameters())


def test_weights_are_freed_unless_retention_is_requested(ranks: Ranks) -> None:
    assert ranks(2).run(evaluate) == [(12, True)] * 2


class OldStyle(torch.optim.Optimizer):
    """An optimizer that writes to ``data``, which increments no version counter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add one half of the negative gradient."""
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.5)


def stepping(model: Any, how: str) -> Any:
    own = list(model.parameters())
    if how == "copy_":

        def copy() -> None:
            with torch.no_grad():
                for p in own:
                    p.copy_(p * 0.5)

        return copy
    if how == "local":

        def write() -> None:
            with torch.no_grad():
                for p in own:
                    p.to_local().mul_(0.5)

        return write
    if how == "load_state_dict":
        state = {name: (p * 0.5).detach() for name, p in model.named_parameters()}
        return lambda: model.load_state_dict(state)
    if how == "assign":
        state = {name: (p * 0.5).detach() for name, p in model.named_parameters()}
        return lambda: model.load_state_dict(state, assign=True)
    if how == "sharded_optimizer":
        return sharded_optimizer(torch.optim.AdamW, model, lr=0.1).step
    if how == "data":
        return OldStyle(own).step
    kind, _, way = how.partition(" ")
    chosen = {way: True} if way != "loop" else {"foreach": False}
    return getattr(torch.optim, kind)(own, lr=0.1, **chosen).step


def stepped(rank: int, how: str, keep: str, layout: str) -> list[float]:
    """Retain unsharded weights, change the shards, and compare both."""
    mesh = mesh_of((2,), ("fsdp",))
    model = shard(make(Net), mesh, layout=layout)
    step = stepping(model, how)
    loss_of(model, tokens(rank)).backward()
    found = []
    if keep == "option":
        model.set_reshard_after_forward(False)
    elif keep == "backward":
        model.set_reshard_after_backward(False)
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
    for turn in range(2):
        if keep == "unshard":
            for unit in (*model.blocks, model):
                unit.unshard()
        if keep == "discarded":
            model.set_reshard_after_forward(False)
            model(tokens(rank))
        elif keep != "backward" or turn:
            with torch.no_grad():
                model(tokens(rank))
        step()
        if keep == "discarded":
            for unit in (*model.blocks, model):
                unit.unshard()
                shown = [p.detach().clone() for p in unit.parameters(recurse=False)]
                unit.reshard()
                parts = [full_of(p) for p in unit.parameters(recurse=False)]
                found += [float((x - y).abs().max()) for x, y in zip(shown, parts, strict=True)]
        with torch.no_grad():
            logits = model(tokens(rank))
        for unit in (*model.blocks, model):
            unit.reshard()
        plain = make(Net)
        plain.load_state_dict(parameters(model))
        with torch.no_grad():
            found.append(float((logits - plain(tokens(rank))).abs().max()))
    return found


def full_of(tensor: Tensor) -> Tensor:
    whole: Any = tensor.detach()
    return cast(Tensor, whole.full_tensor())


STEPS = [
    *("SGD loop", "SGD foreach", "AdamW loop", "AdamW foreach", "AdamW fused"),
    *("sharded_optimizer", "data", "copy_", "local", "load_state_dict", "assign"),
]


@pytest.mark.parametrize(
    ("how", "keep"),
    [
        (how, keep)
        if keep == "option" or how in ("SGD foreach", "sharded_optimizer", "local")
        else pytest.param(how, keep, marks=pytest.mark.long)
        for how in STEPS
        for keep in ("option", "unshard", "backward", "discarded")
    ],
)
def test_weights_that_stay_are_never_older_than_the_shards(
    ranks: Ranks, how: str, keep: str
) -> None:
    for found in ranks(2).run(stepped, how, keep, "exact"):
        assert max(found) < 1e-12


@pytest.mark.parametrize(
    "how", ["SGD loop", "sharded_optimizer", "data", "local", "load_state_dict"]
)
def test_ragged_weights_that_stay_are_never_older_than_the_shards(ranks: Ranks, how: str) -> None:
    for found in ranks(2).run(stepped, how, "option", "ragged"):
        assert max(found) < 1e-12


def closure_evaluates(rank: int) -> float:
    """Evaluate inside of an optimizer's step, before it writes."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    loss_of(model, tokens(rank)).backward()

    def closure() -> float:
        with torch.no_grad():
            return float(model(tokens(rank)).mean())

    cast(Any, optimizer).step(closure)
    with torch.no_grad():
        logits = model(tokens(rank))
    model.reset()
    plain = make(Net)
    plain.load_state_dict(parameters(model))
    return float((logits - plain(tokens(rank))).abs().max().detach())


def test_parameters_gathered_by_an_optimizer_closure_are_stale_after_the_step(ranks: Ranks) -> None:
    assert max(ranks(2).run(closure_evaluates)) < 1e-12


def stepped_under_way(rank: int) -> bool:
    """Write to the shards between an explicit ``unshard(async_op=True)`` and its wait."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    block = model.blocks[1]
    handle = block.unshard(async_op=True)
    with torch.no_grad():
        block.up.weight.mul_(2)
    expected = full_of(block.up.weight)
    handle.wait()
    return torch.equal(block.up.weight, expected)


@pytest.mark.nccl
def test_a_gather_that_was_under_way_during_a_write_is_made_again(ranks: Ranks) -> None:
    assert all(ranks(2).run(stepped_under_way))


def fewer_then_by_hand(rank: int) -> bool:
    """Run a forward that reshards to fewer ranks, write to the shards, and call ``unshard``."""
    model = shard(make(Net), mesh_of((4,), ("fsdp",)), reshard_after_forward=2)
    block = model.blocks[1]
    model(tokens(rank))
    with torch.no_grad():
        block.up.weight.mul_(2)
    expected = full_of(block.up.weight)
    block.unshard()
    return torch.equal(block.up.weight, expected)


def test_parts_that_were_kept_are_not_gathered_after_a_write(ranks: Ranks) -> None:
    assert all(ranks(4).run(fewer_then_by_hand))


def gradients_cleared(rank: int, to_none: bool, layout: str) -> tuple[bool, Gradients, Gradients]:
    """Clear gradients by way of the module while it has its unsharded parameters."""
    mesh = mesh_of((2,), ("fsdp",))
    model = shard(make(Net), mesh, reshard_after_forward=False, layout=layout)
    loss_of(model, tokens(rank)).backward()
    expected = gradients(model)
    with torch.no_grad():
        model(tokens(rank))
    kept = not any(isinstance(p, DTensor | RaggedTensor) for p in model.parameters())
    model.zero_grad(set_to_none=to_none)
    loss_of(model, tokens(rank)).backward()
    return kept, gradients(model), expected


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_clears_sharded_gradients_while_weights_stay(
    ranks: Ranks, to_none: bool, layout: str
) -> None:
    for kept, found, expected in ranks(2).run(gradients_cleared, to_none, layout):
        assert kept
        assert worst_of(found, expected) < 1e-12


def sharded_inside(rank: int, outside: bool, layout: Any) -> tuple[bool, Gradients]:
    """Shard under ``torch.inference_mode``, generate there, and train outside."""
    mesh = mesh_of((2,), ("fsdp",))
    with torch.inference_mode():
        if outside:
            with torch.inference_mode(False):
                model: Any = make(Net)
        else:
            model = make(Net)
        shard(model, mesh, layout=layout)
        same = torch.equal(model(tokens(rank)), make(Net)(tokens(rank)))
    loss_of(model, tokens(rank)).backward()
    return same, gradients(model)


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("outside", [True, False], ids=["made outside", "made inside"])
def test_a_module_may_be_sharded_in_inference_mode(
    ranks: Ranks, outside: bool, layout: str
) -> None:
    for same, found in ranks(2).run(sharded_inside, outside, layout):
        assert same
        assert worst_of(found, reference(2)) < 1e-12
