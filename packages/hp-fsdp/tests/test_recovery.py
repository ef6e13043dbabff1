"""Exceptions in the middle of a step, and explicit unshard, reshard and reset."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hp_dtensor import RecordingCollectives
from hp_fsdp import ParameterError, StateError, UnshardHandle, fully_shard

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


class Broken(RuntimeError):
    """Error that the tests raise."""


def fail(*_: Any) -> None:
    raise Broken


def failing_step(rank: int, where: str, warm: bool) -> tuple[Gradients, bool]:
    """Fail in one place with a prefetch in flight, reset, and run a step."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    if warm:
        loss_of(model, tokens(rank, 5)).backward()
        model.zero_grad()
    target = model.blocks[1].down
    if where == "forward":
        handle = target.register_forward_hook(fail)
        with pytest.raises(Broken):
            model(tokens(rank))
    else:
        handle = target.register_full_backward_hook(fail)
        with pytest.raises(Broken):
            loss_of(model, tokens(rank)).backward()
    handle.remove()
    refused = where == "forward"
    if where == "backward":
        with pytest.raises(StateError, match="reset"):
            model(tokens(rank))
        refused = True
    model.reset()
    clean = all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    return gradients(model), clean and refused


@pytest.mark.nccl
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("warm", [False, True])
def test_after_reset_the_next_step_is_clean(ranks: Ranks, where: str, warm: bool) -> None:
    expected = reference(2)
    for found, clean in ranks(2).run(failing_step, where, warm):
        assert clean
        assert worst(found, expected) < 1e-12


def by_hand(rank: int) -> dict[str, bool]:
    plain = dict(make(Net).named_parameters())
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    block = model.blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    waiting = isinstance(block.up.weight, DTensor)
    handle.wait()
    there = torch.equal(block.up.weight, plain["blocks.0.up.weight"])
    others = isinstance(model.head.weight, DTensor)
    block.reshard()
    block.reshard()
    handle.wait()
    back = isinstance(block.up.weight, DTensor)
    block.unshard(async_op=True)
    block.reset()
    after = isinstance(block.up.weight, DTensor)
    block.unshard()
    saved = all(isinstance(value, DTensor) for value in model.state_dict().values())
    return {"1": waiting, "2": there, "3": others, "4": back, "5": after, "6": saved}


def test_explicit_unshard_reshard_and_reset(ranks: Ranks) -> None:
    for found in ranks(2).run(by_hand):
        assert all(found.values()), found


def mixed_passes(rank: int) -> Gradients:
    """Evaluate, run a part alone, run in another order, then step."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    with torch.no_grad():
        model(tokens(rank, 3))
    model.blocks[2](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    loss_of(model, tokens(rank, 4)).backward()
    model.zero_grad()
    order = list(model.blocks)
    model.blocks = nn.ModuleList([order[2], order[0], order[1]])
    loss_of(model, tokens(rank, 4)).backward()
    model.zero_grad()
    model.blocks = nn.ModuleList(order)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_step_is_right_after_other_passes(ranks: Ranks) -> None:
    expected = reference(2)
    for found in ranks(2).run(mixed_passes):
        assert worst(found, expected) < 1e-12


def extra_pass(model: Any, batch: Tensor, how: str) -> None:
    if how == "evaluation":
        with torch.no_grad():
            model(batch)
    elif how == "discarded":
        model(batch)
    elif how == "exception":
        handle = model.blocks[1].down.register_forward_hook(fail)
        with pytest.raises(Broken):
            model(batch)
        handle.remove()


def pass_between(rank: int, how: str, option: bool | None) -> tuple[Gradients, Gradients]:
    """Run a pass without backward between backward and optimizer step, then the next step."""
    mesh = mesh_of((2,), ("fsdp",))
    model = shard(make(Net), mesh, reshard_after_forward=option)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        extra_pass(model, tokens(rank, 7), how)
        optimizer.step()
    optimizer.zero_grad()
    logits = model(tokens(rank, 2))
    logits.pow(2).mean().backward()
    return {"logits": full(logits)}, gradients(model)


@pytest.mark.parametrize("how", ["evaluation", "discarded", "exception"])
@pytest.mark.parametrize("option", [None, False])
def test_a_pass_without_backward_leaves_no_old_weights(
    ranks: Ranks, how: str, option: bool | None
) -> None:
    plain = make(Net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(plain, tokens(replica, step)) / 2).backward()
        if step < 2:
            optimizer.step()
    for rank, (logits, found) in enumerate(ranks(2).run(pass_between, how, option)):
        assert worst(logits, {"logits": full(plain(tokens(rank, 2)))}) < 1e-12
        assert worst(found, gradients(plain)) < 1e-12


def gathers_of_unsharded(rank: int) -> tuple[int, int]:
    """Return the all-gathers of a forward after an evaluation and ``unshard`` of the root."""
    record = RecordingCollectives()
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), collectives=record)
    with torch.no_grad():
        model(tokens(rank))
    model.unshard()
    record.reset()
    with torch.no_grad():
        model(tokens(rank))
    return record.by_axis["fsdp"].calls, len(list(model.blocks))


@pytest.mark.nccl
def test_units_unsharded_by_the_user_are_not_gathered_again(ranks: Ranks) -> None:
    for calls, blocks in ranks(2).run(gathers_of_unsharded):
        assert calls == blocks


def two_losses(rank: int) -> Gradients:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    (loss_of(model, tokens(rank, 0)) + loss_of(model, tokens(rank, 1))).backward()
    return gradients(model)


def test_two_forwards_may_share_a_backward(ranks: Ranks) -> None:
    expected = reference(2, steps=(0, 1))
    for found in ranks(2).run(two_losses):
        assert worst(found, expected) < 1e-12


class Listed(nn.Module):
    """Two modules of one unit, the second of which may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)
        self.extra = nn.Linear(11, 11)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits without the extra layer."""
        logits: Tensor = self.net(batch)
        return logits


class Both(Listed):
    """The same, with both modules running."""

    def forward(self, batch: Tensor) -> Tensor:
        """Return the extra layer's output."""
        logits: Tensor = self.extra(self.net(batch))
        return logits


def listed(rank: int, kind: type[Listed]) -> list[Gradients]:
    model = make(kind)
    fully_shard([model.net.head, model.extra], mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    seen = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", [Listed, Both])
def test_a_list_is_one_unit_even_if_half_of_it_runs(ranks: Ranks, kind: type[Listed]) -> None:
    expected = reference(2, kind)
    if kind is Listed:  # unused modules have no gradient
        del expected["extra.weight"], expected["extra.bias"]
    for steps in ranks(2).run(listed, kind):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def converted(rank: int) -> tuple[bool, bool, Gradients]:
    """Convert and load after sharding. Parameters must be in the flat shard again."""
    model = shard(make(Net, torch.float32), mesh_of((2,), ("fsdp",)))
    before = list(model.parameters())
    model.double()
    same = all(x is y for x, y in zip(before, model.parameters(), strict=True))
    source = dict(make(Net).named_parameters())
    whole = {
        name: full(p) for name, p in shard(make(Net), mesh_of((2,), ("fsdp",))).named_parameters()
    }
    donor = shard(make(Net), mesh_of((2,), ("fsdp",)))
    model.load_state_dict(donor.state_dict(), assign=True)
    equal = all(torch.equal(full(p), source[name]) for name, p in model.named_parameters())
    equal &= all(torch.equal(whole[name], source[name]) for name in source)
    loss_of(model, tokens(rank)).backward()
    return same, equal, gradients(model)


def test_conversion_and_assigned_state_end_in_the_flat_shard(ranks: Ranks) -> None:
    expected = reference(2)
    for same, equal, found in ranks(2).run(converted):
        assert same
        assert equal
        assert worst(found, expected) < 1e-12


def assigned(rank: int, what: str) -> dict[str, Any]:
    """Load a state dict with one invalid entry. Return the error and the state after it."""
    mesh: DeviceMesh = mesh_of((1, 2), ("other", "fsdp"))
    model = shard(make(Net), mesh["fsdp"])
    before = [*model.blocks[0].parameters()]
    state = model.state_dict()
    name = "blocks.0.norm.bias"
    if what == "dtype":
        state[name] = state[name].float()
    elif what == "placement":
        state[name] = DTensor.from_local(full(state[name]), mesh["fsdp"], [Replicate()])
    elif what == "mesh":
        local = state[name].to_local()
        state[name] = DTensor.from_local(
            local, mesh, [Replicate(), *state[name].placements], run_check=False
        )
    else:
        state[name] = full(state[name])
    try:
        model.load_state_dict(state, assign=True)
        message = ""
    except ParameterError as error:
        message = str(error)
    same = all(x is y for x, y in zip(before, model.blocks[0].parameters(), strict=True))
    loss_of(model, tokens(rank)).backward()
    return {"message": message, "same": same, "gradients": gradients(model)}


@pytest.mark.nccl
@pytest.mark.parametrize("what", ["dtype", "placement", "mesh", "plain"])
def test_an_assigned_parameter_that_does_not_fit_is_refused_by_name(
    ranks: Ranks, what: str
) -> None:
    expected = reference(2)
    for found in ranks(2).run(assigned, what):
        assert "norm.bias" in found["message"]
        assert found["same"]
        assert worst(found["gradients"], expected) < 1e-12


def set_to_none(linear: Any) -> None:
    linear.bias = None


def registered_as_none(linear: nn.Linear) -> None:
    del linear.bias
    linear.register_parameter("bias", None)


def deleted(linear: nn.Linear) -> None:
    del linear.bias


def parametrized(linear: nn.Linear) -> None:
    torch.nn.utils.parametrizations.weight_norm(linear)


REMOVALS: dict[str, tuple[Callable[[nn.Linear], None], str]] = {
    "None": (set_to_none, "up.bias was set to None after fully_shard"),
    "registered as None": (registered_as_none, "up.bias was set to None after fully_shard"),
    "deleted": (deleted, "up.bias was removed after fully_shard"),
    "parametrized": (parametrized, "up.weight was parametrized"),
}


def removed(rank: int, how: str, ran: bool, layout: str) -> tuple[list[str], int, Gradients]:
    """Remove a parameter. Return errors and calls of two forwards, and a step after a reset."""
    record = RecordingCollectives()
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), layout=layout, collectives=record)
    if ran:
        loss_of(model, tokens(rank, 5)).backward()
        model.zero_grad()
    record.reset()
    REMOVALS[how][0](model.blocks[0].up)
    said = []
    for _ in range(2):
        with pytest.raises(ParameterError) as caught:
            model.blocks[0](torch.ones(2, 8, dtype=torch.float64))
        said.append(str(caught.value))
    calls = sum(traffic.calls for traffic in record.by_axis.values())
    if how == "parametrized":
        return said, calls, {}
    model.reset()
    loss_of(model, tokens(rank)).backward()
    return said, calls, gradients(model)


@pytest.mark.nccl
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    ("how", "layout"), [*((how, "exact") for how in REMOVALS), ("None", "ragged")]
)
def test_a_removed_parameter_is_refused_by_name_until_a_reset(
    ranks: Ranks, how: str, ran: bool, layout: str
) -> None:
    expected = reference(2) if how != "parametrized" else {}
    for said, calls, found in ranks(2).run(removed, how, ran, layout):
        assert [REMOVALS[how][1] in each for each in said] == [True, True]
        assert ["in blocks.0: " in each for each in said] == [ran, ran]
        assert calls == 0
        assert not expected or worst(found, expected) < 1e-12


def converted_parts(rank: int, what: str) -> tuple[str, Gradients]:
    """Convert a float32 model to float64 in parts."""
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net, torch.float32)
    if what == "list":
        fully_shard(list(model.blocks), mesh)
    shard_root: Any = fully_shard if what == "list" else shard
    shard_root(model, mesh)
    message = ""
    if what == "children":
        model.blocks[0].norm.double()
        try:
            model(tokens(rank))
        except ParameterError as error:
            message = str(error)
        model.reset()
        model.double()
    elif what == "list":
        model.blocks[0].double()
        model.double()
    else:
        for module in (*model.blocks, model.embedding, model.head):
            module.double()
    # The values were float32 once: bring both sides to the same ones.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.float32))
    loss_of(model, tokens(rank)).backward()
    return message, gradients(model)


@pytest.mark.parametrize("what", ["children", "list", "all parts"])
def test_conversion_of_parts_is_taken_whole_or_refused_by_name(ranks: Ranks, what: str) -> None:
    plain = make(Net, torch.float32).double()
    for replica in range(2):
        loss_of(plain, tokens(replica)).backward()
    expected = {name: gradient / 2 for name, gradient in gradients(plain).items()}
    for message, found in ranks(2).run(converted_parts, what):
        assert ("['norm.weight', 'norm.bias'] of torch.float64" in message) == (what == "children")
        assert worst(found, expected) < 1e-12


def thawed(rank: int, where: str, to: bool, reset: bool) -> bool:
    """Freeze or unfreeze registered parameters after an exception. Return if they train."""
    model: Any = make(Net)
    weight = model.blocks[1].down.weight
    weight.requires_grad_(not to)
    shard(model, mesh_of((2,), ("fsdp",)))
    target = model.blocks[1].down
    handle = target.register_forward_hook(
        fail if where == "forward" else lambda _, __, out: out.register_hook(fail) and None
    )
    with pytest.raises(Broken):
        loss_of(model, tokens(rank)).backward()
    handle.remove()
    target.weight.requires_grad_(to)
    if reset:
        model.reset()
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    return target.weight.grad is not None


@pytest.mark.parametrize("to", [True, False])
@pytest.mark.parametrize(
    ("where", "reset"), [("forward", True), ("forward", False), ("backward", True)]
)
def test_parameters_frozen_after_an_exception_stay_frozen(
    ranks: Ranks, where: str, reset: bool, to: bool
) -> None:
    assert ranks(2).run(thawed, where, to, reset) == [to, to]
