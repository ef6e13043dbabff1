"""Steps after any change of a model are bit-equal to the same steps of a new model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .models import TOKENS, WIDTH, Net, full, loss_of, make, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]
Change = Callable[[Any, int], object]
OPTIONS: dict[str, dict[str, Any]] = {
    "copy": {},
    "kept": {"reshard_after_forward": False},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
}


def features() -> Tensor:
    return torch.ones(TOKENS, WIDTH, requires_grad=True)


def double(reduced: Tensor) -> None:
    reduced.mul_(2)


def double_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def without_sync(model: Any, rank: int) -> None:
    with model.no_sync():
        loss_of(model, tokens(rank, 5)).backward()


def not_the_last(model: Any, rank: int) -> None:
    model.set_is_last_backward(False)
    loss_of(model, tokens(rank, 5)).backward()
    model.set_is_last_backward(True)


def frozen_in_between(model: Any, rank: int) -> None:
    parameter = model.blocks[1].up.weight
    loss = loss_of(model, tokens(rank, 5))
    parameter.requires_grad_(False)
    loss.backward()


def thawed(model: Any, rank: int) -> None:
    parameter = model.blocks[1].up.weight
    parameter.requires_grad_(False)
    loss_of(model, tokens(rank, 5)).backward()
    model.zero_grad()
    parameter.requires_grad_(True)


def evaluated(model: Any, rank: int) -> None:
    model.eval()
    with torch.no_grad():
        model(tokens(rank, 5))


def fails(*_: Any) -> None:
    raise RuntimeError("injected")


def failing_forward(model: Any, rank: int) -> None:
    handle = model.blocks[1].up.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="injected"):
        model(tokens(rank, 5))
    handle.remove()


def failing_backward(model: Any, rank: int) -> None:
    handle = model.blocks[1].up.register_forward_hook(lambda *a: a[2].register_hook(fails) and None)
    loss = loss_of(model, tokens(rank, 5))
    with pytest.raises(RuntimeError, match="injected"):
        loss.backward()
    handle.remove()
    model.reset()
    model.zero_grad()


def lost(model: Any, rank: int) -> None:
    loss_of(model, tokens(rank, 5))


def replaced(model: Any, rank: int) -> None:
    linear = model.blocks[1].up
    linear.weight = nn.Parameter(linear.weight.detach() * 3)


def written(model: Any, rank: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def written_after_forward(model: Any, rank: int) -> None:
    parameters = list(model.parameters())
    loss_of(model, tokens(rank, 5))
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5)


def stepped(model: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded(model: Any, rank: int) -> None:
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def moved(model: Any, rank: int) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.to_local().share_memory_()


def moved_and_written(model: Any, rank: int) -> None:
    moved(model, rank)
    written(model, rank)


def held(model: Any, rank: int) -> None:
    loss_of(model, tokens(rank, 5)).backward()
    model.held = [(p.grad, full(p.grad)) for p in model.parameters()]
    model.zero_grad()


def marked(model: Any, rank: int) -> None:
    loss_of(model, tokens(rank, 5)).backward()
    for parameter in model.parameters():
        parameter.grad.scale = 2
    model.zero_grad()


def zeros(model: Any, rank: int) -> None:
    loss_of(model, tokens(rank, 5)).backward()
    model.zero_grad(set_to_none=False)


def zeros_of_parameters(model: Any, rank: int) -> None:
    loss_of(model, tokens(rank, 5)).backward()
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)


def given(model: Any, rank: int) -> None:
    for parameter in model.blocks[0].parameters():
        parameter.grad = torch.ones_like(parameter)


def twice(model: Any, rank: int) -> None:
    loss = loss_of(model, tokens(rank, 5))
    loss.backward(retain_graph=True)
    loss.backward()


def reused(model: Any, rank: int) -> None:
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], *model.blocks])


def left_out(model: Any, rank: int) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: args[0])


def recomputed(model: Any, rank: int) -> None:
    block = model.blocks[1]
    own = block.forward
    block.forward = lambda x: checkpoint(own, x, use_reentrant=False)


def recomputed_whole(model: Any, rank: int) -> None:
    checkpoint(model.blocks[1], features(), use_reentrant=False).sum().backward()


def hooked(model: Any, rank: int) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.register_post_accumulate_grad_hook(double_gradient)


CHANGES: dict[str, Change] = {
    "reshard after forward": lambda m, _: m.set_reshard_after_forward(True),
    "no reshard after forward": lambda m, _: m.set_reshard_after_forward(False),
    "no reshard after backward": lambda m, _: m.set_reshard_after_backward(False),
    "divide": lambda m, _: m.set_gradient_divide_factor(3.0, recurse=True),
    "divide one": lambda m, _: m.blocks[1].set_gradient_divide_factor(3.0),
    "sum": lambda m, _: m.blocks[0].set_force_sum_reduction_for_comms(True),
    "all-reduce hook": lambda m, _: m.blocks[1].set_all_reduce_hook(double),
    "forward prefetch": lambda m, _: m.set_modules_to_forward_prefetch([m.blocks[2]]),
    "backward prefetch": lambda m, _: m.blocks[2].set_modules_to_backward_prefetch([m.blocks[0]]),
    "two buffers": lambda m, _: m.set_reduce_scatter_max_input_buffers(2),
    "groups of their own": lambda m, _: m.set_separate_reduce_scatter_group(True),
    "no sync": without_sync,
    "not the last backward": not_the_last,
    "freeze one": lambda m, _: m.blocks[1].down.bias.requires_grad_(False),
    "freeze a block": lambda m, _: m.blocks[1].requires_grad_(False),
    "freeze in between": frozen_in_between,
    "thaw": thawed,
    "evaluate": evaluated,
    "forward hook": lambda m, _: m.blocks[1].register_forward_hook(lambda _, a, y: 2 * y),
    "forward pre-hook": lambda m, _: m.blocks[1].register_forward_pre_hook(lambda _, a: 2 * a[0]),
    "hook inside": lambda m, _: m.blocks[1].up.register_forward_hook(lambda _, a, y: 2 * y),
    "gradient hook": hooked,
    "failing forward": failing_forward,
    "failing backward": failing_backward,
    "lost forward": lost,
    "replace": replaced,
    "write": written,
    "write after forward": written_after_forward,
    "step": stepped,
    "load": loaded,
    "move": moved,
    "move and write": moved_and_written,
    "hold gradients": held,
    "mark gradients": marked,
    "zero gradients": zeros,
    "zero gradients by an optimizer": zeros_of_parameters,
    "give gradients": given,
    "backward twice": twice,
    "reuse a block": reused,
    "leave a block out": left_out,
    "recompute": recomputed,
    "recompute a unit": recomputed_whole,
    "unshard": lambda m, _: m.blocks[1].unshard(),
    "block alone": lambda m, _: m.blocks[1](features()).sum().backward(),
    "one dtype": lambda m, _: m.double(),
    "another dtype": lambda m, _: m.bfloat16(),
}


def steps(model: Any, rank: int) -> list[dict[str, Tensor | None]]:
    """Return outputs and gradients of two steps."""
    found: list[dict[str, Tensor | None]] = []
    for number in range(2):
        output = model(tokens(rank, number))
        found.append({"output": output.detach()})
        output.float().pow(2).mean().backward()
        for unit in (*model.blocks, model) if number else ():
            unit.reshard()  # those that keep their parameters show the gradients now
        named = {name: p.grad for name, p in model.named_parameters()}
        found.append({name: None if g is None else full(g) for name, g in named.items()})
        model.zero_grad()
    return found


def compare(rank: int, options: str) -> list[str]:
    """Return the changes after which a model that has trained differs from one that has not."""
    unlike = []
    for name, change in CHANGES.items():
        results = []
        for before in (0, 3):
            model = shard(make(Net, torch.float32), mesh_of((2,), ("fsdp",)), **OPTIONS[options])
            for number in range(before):
                loss_of(model, tokens(rank, number)).backward()
                model.zero_grad()
            if options == "ragged" and name in ("move", "replace", "load"):
                model.reshard()  # these changes do not exist for that layout
            else:
                change(model, rank)
            results.append(steps(model, rank))
            held = vars(model).get("held", [])
            if not all(torch.equal(full(gradient), was) for gradient, was in held):
                unlike.append(f"{name}: held gradients")
        if not all(map(alike, *results)):
            unlike.append(name)
    return unlike


def alike(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["copy", *(pytest.param(o, marks=pytest.mark.long) for o in OPTIONS if o != "copy")]
)
def test_steps_after_a_change_have_the_bits_of_first_steps(ranks: Ranks, options: str) -> None:
    for unlike in ranks(2).run(compare, options):
        assert not unlike
