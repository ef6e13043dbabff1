"""Facts that torch's own tests of `fully_shard` check, for torch and for this package.

Each case runs with both libraries. Only the import differs. Results are compared with one process
in float64. ``torch_cases.md`` lists which of torch's tests each test restates.
"""

import gc
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from .libraries import LIBRARIES, Mlps, OwnMemory, input_of, mesh, net, wrap
from .models import (
    WIDTH,
    Block,
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
pytestmark = [
    # `nox -s long` also runs the cases with torch's `fully_shard`.
    pytest.mark.parametrize("by", ["ours", pytest.param("torch", marks=pytest.mark.long)]),
    pytest.mark.filterwarnings("default"),
]


# Module state and classes


def classes(rank: int, by: str) -> dict[str, bool]:
    model = net(by, 2)
    pair = wrap(by, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)
    listed = wrap(by, [nn.Linear(2, 2), nn.Linear(2, 2)], 2)
    return {
        "name": type(model).__name__ == "FSDPNet",
        "is": isinstance(model, LIBRARIES[by].FSDPModule) and isinstance(model, Net),
        "is torch's": isinstance(model, theirs.FSDPModule),
        "child": type(model.head) is nn.Linear,
        "slice": type(pair[:1]) is nn.Sequential,
        "list": isinstance(listed, list) and len(listed) == 2,
    }


@pytest.mark.nccl
def test_a_sharded_module_has_both_classes_and_its_children_stay(ranks: Ranks, by: str) -> None:
    for facts in ranks(2).run(classes, by):
        assert all(facts.values()), facts


def states(rank: int, by: str) -> int:
    model = net(by, 2)
    state = LIBRARIES[by].fully_shard.state  # as torch's contract of composable functions has it
    return len({id(state(each)) for each in (model, *model.blocks)})


def test_the_function_gives_the_state_of_each_call(ranks: Ranks, by: str) -> None:
    assert ranks(2).run(states, by) == [4, 4]


def internal_state(rank: int, by: str) -> int:
    model = net(by, 2)
    return len({id(each._get_fsdp_state()) for each in (model, *model.blocks)})


def test_each_call_has_an_internal_state_of_its_own(ranks: Ranks, by: str) -> None:
    assert ranks(2).run(internal_state, by) == [4, 4]


# Which parameters are managed


def gathered_by_root(rank: int, by: str) -> set[str]:
    model = net(by, 2)
    model.unshard()
    return {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def test_a_parent_manages_the_remaining_parameters(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(gathered_by_root, by):
        assert found == {"embedding.weight", "head.weight", "head.bias"}


def beside_replicate(rank: int, by: str) -> tuple[list[bool], Gradients]:
    """Shard a root. Its second block is replicated by torch's `replicate`."""
    model = make(Net)
    apply: Any = replicate
    apply(model.blocks[1])
    wrap(by, model, 2)
    plain = [isinstance(p, DTensor) for p in model.blocks[1].parameters()]
    if any(plain):
        return plain, {}
    loss_of(model, tokens(rank)).backward()
    return plain, gradients(model)


def test_replicated_modules_are_not_sharded_by_the_root(ranks: Ranks, by: str) -> None:
    for sharded, found in ranks(2).run(beside_replicate, by):
        assert not any(sharded)
        assert worst(found, reference(2)) < 1e-12


class Aliased(nn.Module):
    """One layer by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = self.one
        self.three = nn.Linear(WIDTH, WIDTH, bias=False)
        self.three.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        """Use all names."""
        return cast(Tensor, self.three(torch.tanh(self.two(torch.tanh(self.one(x))))))


def aliased(rank: int, by: str) -> tuple[bool, list[str], Gradients]:
    model: Any = wrap(by, make(Aliased), 2)
    same = model.two.weight is model.one.weight is model.three.weight
    model(input_of(rank)).pow(2).mean().backward()
    names = [name for name, _ in model.named_parameters()]
    return same and isinstance(model.three.weight, DTensor), names, gradients(model)


def test_a_layer_with_two_names_is_managed_once(ranks: Ranks, by: str) -> None:
    plain: Any = make(Aliased)
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for same, names, found in ranks(2).run(aliased, by):
        assert same
        assert names == ["one.weight", "one.bias"]
        assert worst(found, gradients(plain)) < 1e-12


def registered_anew(rank: int, by: str) -> Gradients:
    """Put a new Parameter in every place between sharding and the first forward."""
    model = net(by, 2)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(p.detach().clone() * 2))
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_parameters_registered_before_the_first_forward_count(ranks: Ranks, by: str) -> None:
    plain = make(Net)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    for rank in range(2):
        (loss_of(plain, tokens(rank)) / 2).backward()
    for found in ranks(2).run(registered_anew, by):
        assert worst(found, gradients(plain)) < 1e-12


def layer_by_layer(rank: int, by: str) -> Gradients:
    torch.manual_seed(0)
    model: Any = nn.Sequential()
    for _ in range(8):
        block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)).double()
        model.append(block)
        wrap(by, block, 2)
        gc.collect(1)  # collect the objects of this block only
    wrap(by, model, 2)
    model(input_of(rank)).pow(2).mean().backward()
    return gradients(model)


def test_blocks_may_be_made_and_sharded_one_by_one(ranks: Ranks, by: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)).double()
            for _ in range(8)
        )
    )
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for found in ranks(2).run(layer_by_layer, by):
        assert worst(found, gradients(plain)) < 1e-12


def negative(rank: int, by: str) -> tuple[int, bool, Tensor]:
    model: Any = wrap(by, make(lambda: nn.Linear(4, 6)), 2, shard_placement_fn=lambda _: Shard(-1))
    locals_ = (model.weight.to_local().shape, model.weight.stride())
    return model.weight.placements[0].dim, locals_ == ((6, 2), (4, 1)), full(model.weight)


def test_a_negative_dim_is_counted_from_the_end(ranks: Ranks, by: str) -> None:
    plain: Any = make(lambda: nn.Linear(4, 6))
    for dim, laid_out, whole in ranks(2).run(negative, by):
        assert dim == 1
        assert laid_out
        assert torch.equal(whole, plain.weight)


def contiguous(rank: int, by: str) -> dict[str, bool]:
    """Cut matrices along dim 1, biases along dim 0."""
    model: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)))
    place = {"shard_placement_fn": lambda p: Shard(1 if p.ndim > 1 else 0)}
    seen: dict[str, bool] = {}

    def look(module: nn.Module, _: object) -> None:
        for name, p in module.named_parameters():
            seen[f"{name} in forward"] = p.is_contiguous() and not isinstance(p, DTensor)

    for layer in model:
        wrap(by, layer, 4, **place)
        layer.register_forward_pre_hook(look)
    wrap(by, model, 4, **place)
    model(input_of(rank)).sum().backward()
    for name, p in model.named_parameters():
        seen[name] = p.is_contiguous() and p.to_local().is_contiguous()
        seen[f"{name} gradient"] = p.grad.is_contiguous() and p.grad.to_local().is_contiguous()
    return seen


@pytest.mark.nccl
def test_parameters_sharded_on_another_dim_are_contiguous(ranks: Ranks, by: str) -> None:
    for seen in ranks(4).run(contiguous, by):
        assert len(seen) == 10
        assert all(seen.values()), seen


# Parameter state across forward and backward


def between(rank: int, by: str) -> tuple[list[bool], Gradients, Gradients]:
    """Return parameters that are resharded to two ranks between forward and backward."""
    model = net(by, 4, reshard_after_forward=2)
    loss = loss_of(model, tokens(rank))
    blocks = dict(model.blocks.named_parameters())
    sharded = [isinstance(p, DTensor) for p in blocks.values()]
    values = {name: full(p) for name, p in blocks.items()}
    loss.backward()
    return sharded, values, gradients(model)


def test_kept_parts_are_dtensors_of_the_same_values(ranks: Ranks, by: str) -> None:
    for sharded, values, found in ranks(4).run(between, by):
        assert all(sharded)
        assert worst(values, parameters(make(Net).blocks)) == 0
        assert worst(found, reference(4)) < 1e-12


def converted(rank: int, by: str) -> tuple[set[torch.dtype], list[float], Gradients]:
    """Convert to float64 after sharding; return all dtypes, and the losses of ten steps."""
    model = make(Net, torch.float32)
    for block in model.blocks:
        wrap(by, block, 2)
    wrap(by, model, 2)
    model.to(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, dtypes = [], set()
    for step in range(10):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for p in model.parameters():
        for each in (p, p.grad):
            dtypes |= {each.dtype, each.to_local().dtype, each._spec.tensor_meta.dtype}
    return dtypes, losses, parameters(model)


def test_a_conversion_after_sharding_reaches_everything(ranks: Ranks, by: str) -> None:
    plain = make(Net, torch.float32).double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    expected: list[list[float]] = []
    for step in range(10):
        optimizer.zero_grad()
        expected.append([])
        for rank in range(2):
            loss = loss_of(plain, tokens(rank, step))
            (loss / 2).backward()
            expected[-1].append(loss.item())
        optimizer.step()
    for rank, (dtypes, losses, _) in enumerate(ranks(2).run(converted, by)):
        assert dtypes == {torch.float64}
        for found, wanted in zip(losses, expected, strict=True):
            assert abs(found - wanted[rank]) < 1e-12 * max(1.0, abs(wanted[rank]))


# Training parity


def whole_then_part(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of the whole in even steps, of one block alone in odd ones."""
    if step % 2 == 0:
        return loss_of(model, tokens(rank, step))
    return cast(Tensor, model.blocks[1](input_of(rank, step)).pow(2).mean())


def root_then_part(rank: int, by: str) -> list[Gradients]:
    model = net(by, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        whole_then_part(model, rank, step).backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen


def test_steps_of_the_root_and_of_a_part_alone_take_turns(ranks: Ranks, by: str) -> None:
    plain = make(Net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (whole_then_part(plain, rank, step) / 2).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for seen in ranks(2).run(root_then_part, by):
        for found, wanted in zip(seen, expected, strict=True):
            assert worst(found, wanted) < 1e-12


class Chunks(nn.Module):
    """A trunk, and a head that the loss calls separately for each part."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.broken = False
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor, head: bool = True) -> Tensor:
        """Return logits, or the input of the head if ``head`` is False."""
        x = self.body(self.embedding(batch))
        if self.broken:
            raise ArithmeticError
        x = self.norm(x)
        return cast(Tensor, self.head(x) if head else x)


class Tied(Chunks):
    """The same with one weight for both ends."""

    def __init__(self) -> None:
        super().__init__(True)


CHUNKS: dict[bool, Any] = {False: Chunks, True: Tied}


def chunks_of(by: str, tie: bool, grouped: bool = True, **options: Any) -> Any:
    model = make(CHUNKS[tie])
    wrap(by, model.body, 2)
    if tie:
        wrap(by, [model.embedding, model.norm, model.head], 2, **options)
    else:
        wrap(by, model.embedding, 2)
        for unit in [[model.norm, model.head]] if grouped else (model.norm, model.head):
            wrap(by, unit, 2, **options)
    return wrap(by, model, 2)


def by_chunks(model: Any, batch: Tensor, scale: float, toggled: bool) -> bool:
    """Run the head's backward per part, then the trunk's. Return if the head stayed unsharded."""
    x = model(batch, head=False)
    if toggled:
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
    found, stayed = [], True
    for part in x.detach().chunk(3):
        part = part.clone().requires_grad_()
        (model.head(part).pow(2).sum() * scale).backward()
        found.append(cast(Tensor, part.grad))
        stayed &= not isinstance(model.head.weight, DTensor)
    if toggled:
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
        stayed &= isinstance(model.head.weight, DTensor)
    x.backward(torch.cat(found))
    return stayed


def toggled(rank: int, by: str, tie: bool, option: bool) -> list[tuple[bool, Gradients]]:
    model = chunks_of(by, tie, reshard_after_forward=option)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        stayed = by_chunks(model, tokens(rank, step), 1.0, True)
        seen.append((stayed, gradients(model)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return seen


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("option", [False, True])
def test_a_head_stays_unsharded_between_chunks_if_requested(
    ranks: Ranks, by: str, tie: bool, option: bool
) -> None:
    plain = make(CHUNKS[tie])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            by_chunks(plain, tokens(rank, step), 0.5, False)
        expected.append(gradients(plain))
        optimizer.step()
    for seen in ranks(2).run(toggled, by, tie, option):
        for (stayed, found), wanted in zip(seen, expected, strict=True):
            assert stayed
            assert worst(found, wanted) < 1e-12


def chunked_microbatches(rank: int, by: str, grouped: bool, option: bool) -> Gradients:
    model = chunks_of(by, False, grouped, reshard_after_forward=option)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model.set_is_last_backward(step == 2)
        by_chunks(model, tokens(rank, step), 1.0, False)
    return gradients(model)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("option", [False, True])
def test_chunks_of_microbatches_add_up(ranks: Ranks, by: str, grouped: bool, option: bool) -> None:
    plain = make(Chunks)
    for step in range(3):
        for rank in range(2):
            by_chunks(plain, tokens(rank, step), 0.5, False)
    for found in ranks(2).run(chunked_microbatches, by, grouped, option):
        assert worst(found, gradients(plain)) < 1e-12


def two_without_head(rank: int, by: str) -> tuple[Gradients, list[str]]:
    model = make(Chunks)
    wrap(by, [model.norm, model.head], 2)
    wrap(by, model, 2)
    first = model(tokens(rank), head=False)
    second = model(tokens(rank, 1), head=False)
    (first.pow(3).sum() + second.pow(3).sum()).backward()
    return gradients(model), [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.nccl
def test_two_forwards_without_a_head_share_a_backward(ranks: Ranks, by: str) -> None:
    plain = make(Chunks)
    for rank in range(2):
        for step in range(2):
            (plain(tokens(rank, step), head=False).pow(3).sum() / 2).backward()
    for found, without in ranks(2).run(two_without_head, by):
        assert without == ["head.weight"]
        assert worst(found, gradients(plain)) < 1e-12


def after_exception(rank: int, by: str) -> Gradients:
    model = make(Chunks)
    wrap(by, [model.norm, model.head], 2)
    wrap(by, model, 2)
    model.broken = True
    with pytest.raises(ArithmeticError):
        model(tokens(rank), head=False)
    model.broken = False
    model.reset_iter_state()
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_after_an_exception_and_a_reset_the_step_is_clean(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(after_exception, by):
        assert worst(found, reference(2, Chunks)) < 1e-12


class Layer(nn.Module):
    """A block of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return cast(Tensor, self.two(self.one(self.norm(x))))


class Layers(Net):
    """The net with such blocks."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))


class Recomputed(Layer):
    """The same, which recomputes its units by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Run all, again in backward."""
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class RecomputedLayers(Net):
    """The net with such blocks."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Recomputed() for _ in range(3))


def preferred(rank: int, by: str, how: str, option: bool, prefetch: bool) -> Gradients:
    """Run two recomputed forwards of nested units before one backward."""
    model = make(RecomputedLayers if how == "itself" else Layers)
    for layer in model.blocks:
        if how == "composable, before":
            recompute(layer)
        for module in (layer.one, layer.two, layer):
            wrap(by, module, 2, reshard_after_forward=option)
        if how == "composable, after":
            recompute(layer)
    wrap(by, model, 2, reshard_after_forward=option)
    if prefetch:
        for n in range(2):
            model.blocks[n].set_modules_to_forward_prefetch([model.blocks[n + 1].one])
            model.blocks[n + 1].set_modules_to_backward_prefetch([model.blocks[n].two])
            model.blocks[n].one.set_modules_to_forward_prefetch([model.blocks[n].two])
    for step in range(2):
        model.zero_grad()
        (loss_of(model, tokens(rank, step)) - loss_of(model, tokens(rank, 7))).pow(2).backward()
    return gradients(model)


@pytest.mark.nccl
@pytest.mark.parametrize("how", ["itself", "composable, before", "composable, after"])
@pytest.mark.parametrize(("option", "prefetch"), [(False, False), (True, False), (True, True)])
def test_two_recomputed_forwards_of_nested_units_share_a_backward(
    ranks: Ranks, by: str, how: str, option: bool, prefetch: bool
) -> None:
    plain = make(Layers)
    for rank in range(2):
        loss = loss_of(plain, tokens(rank, 1)) - loss_of(plain, tokens(rank, 7))
        (loss.pow(2) / 2).backward()
    for found in ranks(2).run(preferred, by, how, option, prefetch):
        assert worst(found, gradients(plain)) < 1e-12


def composed(rank: int, by: str) -> list[Gradients]:
    """Give every block to torch's composable `checkpoint`, then shard it; two steps."""
    model = make(Net)
    for block in model.blocks:
        recompute(block)
        wrap(by, block, 2)
    wrap(by, model, 2)
    seen = []
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_blocks_may_have_torchs_composable_checkpoint(ranks: Ranks, by: str) -> None:
    for seen in ranks(2).run(composed, by):
        for step, found in enumerate(seen):
            assert worst(found, reference(2, steps=(step,))) < 1e-12


# Gradient accumulation


def calls(mode: CommDebugMode) -> dict[str, int]:
    found = {"gather": 0, "scatter": 0, "reduce": 0}
    for operator, count in mode.get_comm_counts().items():
        name = str(operator)
        for each, part in (("gather", "gather"), ("scatter", "scatter"), ("reduce", "allreduce")):
            found[each] += count if part in name else 0
    return found


def accumulated(
    rank: int, by: str, shape: tuple[int, ...], what: str, option: Any, reshard: bool, only: bool
) -> tuple[list[Gradients], dict[str, int]]:
    """Return the gradients of three steps, and the collectives of the last one."""
    model = net(by, *shape, kind=Mlps, reshard_after_forward=option)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    flags = {"all": [model], "root": [model], "some": list(model.blocks[:2])}[what]
    seen = []
    for step in range(3):
        counted = {"gather": 0, "scatter": 0, "reduce": 0}
        for micro in range(3):
            last = micro == 2
            for module in flags:
                extra: Any = {"recurse": what != "root"}
                if only:
                    module.set_requires_all_reduce(last, **extra)
                else:
                    module.set_requires_gradient_sync(last, **extra)
                if not reshard:
                    module.set_reshard_after_backward(last, **extra)
            with CommDebugMode() as mode:  # one per forward: it keeps a list of parents
                model(input_of(rank, 3 * step + micro)).pow(2).mean().backward()
            counted = {name: counted[name] + n for name, n in calls(mode).items()}
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 1)
    return seen, counted


ACCUMULATED = [
    # (shape, modules with the flags, reshard after forward, reshard after backward, whether only
    # the all-reduce is delayed, (all-gathers, reduce-scatters and all-reduces of a step))
    ((2,), "all", True, True, False, (24, 4, 0)),
    ((2,), "all", False, True, False, (12, 4, 0)),
    ((2,), "all", False, False, False, (4, 4, 0)),
    ((2,), "root", True, True, False, (24, 10, 0)),
    ((2,), "root", False, False, False, (10, 10, 0)),
    ((2,), "some", True, True, False, (24, 8, 0)),
    ((2, 2), "all", True, True, False, (24, 4, 4)),
    ((2, 2), "all", True, True, True, (24, 12, 4)),
    ((2, 2), "root", True, True, True, (24, 12, 10)),
    ((2, 2), "some", False, True, True, (12, 12, 8)),
    ((4,), "all", 2, True, False, (24, 4, 0)),
]


@pytest.mark.parametrize(("shape", "what", "option", "reshard", "only", "counts"), ACCUMULATED)
def test_microbatches_of_three_steps(
    ranks: Ranks,
    by: str,
    shape: tuple[int, ...],
    what: str,
    option: Any,
    reshard: bool,
    only: bool,
    counts: tuple[int, int, int],
) -> None:
    world = torch.Size(shape).numel()
    plain = make(Mlps)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            for rank in range(world):
                loss = plain(input_of(rank, 3 * step + micro)).pow(2).mean()
                (loss / world).backward()
        expected.append(gradients(plain))
        optimizer.step()
    results = ranks(world).run(accumulated, by, shape, what, option, reshard, only)
    for seen, found in results:
        # Adam divides by the root of tiny second moments: later gradients differ by more.
        assert worst(seen[0], expected[0]) < 1e-12
        assert max(map(worst, seen, expected)) < 1e-9
        assert (found["gather"], found["scatter"], found["reduce"]) == counts


def ahead(rank: int, by: str, explicit: bool, reshard: bool) -> tuple[list[float], Gradients]:
    """Gather all units ahead of three microbatches, of which the last is synchronised."""
    model = net(by, 2, reshard_after_forward=False)
    for module in (model, *model.blocks) if explicit else ():
        module.unshard(async_op=True)
    losses = []
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model.set_is_last_backward(micro == 2)
        if not reshard:
            model.set_reshard_after_backward(micro == 2)
        loss = loss_of(model, tokens(rank, micro))
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_one_forward_one_backward(ranks: Ranks, by: str, explicit: bool, reshard: bool) -> None:
    plain = make(Net)
    for rank, (losses, found) in enumerate(ranks(2).run(ahead, by, explicit, reshard)):
        assert worst(found, reference(2, steps=(0, 1, 2))) < 1e-12
        for micro, loss in enumerate(losses):
            assert abs(loss - loss_of(plain, tokens(rank, micro)).item()) < 1e-12


# Communication


def factor_of_root(rank: int, by: str, shape: tuple[int, ...], factor: float) -> Gradients:
    model = net(by, *shape)
    model.set_gradient_divide_factor(factor)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 1), (2, 2)])
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_divide_factor_holds_for_one_module(
    ranks: Ranks, by: str, shape: tuple[int, ...], factor: float
) -> None:
    world = torch.Size(shape).numel()
    if by == "torch" and shape[-1] == 1:
        pytest.xfail("torch 2.13 divides twice where there is one shard")
    expected = {
        name: value if name.startswith("blocks") else reference(world, divide=factor)[name]
        for name, value in reference(world).items()
    }
    for found in ranks(world).run(factor_of_root, by, shape, factor):
        assert worst(found, expected) < 1e-12


class Two(nn.Module):
    """Two layers, both or one of which give an output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Any:
        """Return one output or two."""
        y = torch.relu(self.one(x))
        return (y, torch.relu(self.two(x))) if both else y


def of_two(model: nn.Module, rank: int, step: int, what: str) -> Tensor:
    if what == "module":
        return cast(Tensor, model(input_of(rank, step), False).pow(2).mean())
    one, two = model(input_of(rank, step), True)
    return cast(Tensor, (one * two).sum() if step < 3 else one.sum())


def unused(rank: int, by: str, what: str, option: Any) -> Gradients:
    model = make(Two)
    wrap(by, model.one, 2, reshard_after_forward=option)
    if what == "module":
        wrap(by, model.two, 2, reshard_after_forward=option)
    wrap(by, model, 2, reshard_after_forward=option)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        of_two(model, rank, step, what).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return parameters(model)


@pytest.mark.parametrize("what", ["output", "module"])
@pytest.mark.parametrize("option", [True, False, 2])
def test_outputs_and_modules_may_be_unused(ranks: Ranks, by: str, what: str, option: Any) -> None:
    plain = make(Two)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        for rank in range(2):
            (of_two(plain, rank, step, what) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    for found in ranks(2).run(unused, by, what, option):
        assert worst(found, parameters(plain)) < 1e-12


def freeze(model: Any, step: int) -> None:
    """Freeze every second block until the fourth step."""
    for n, block in enumerate(model.blocks):
        block.requires_grad_(n % 2 == 0 or step >= 3)


def interleaved(rank: int, by: str, option: bool) -> list[Gradients]:
    model = net(by, 2, kind=Mlps, reshard_after_forward=option)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(6):
        freeze(model, step)
        if step == 1:
            with torch.no_grad():
                model(input_of(rank, 9))
        model(input_of(rank, step)).pow(2).mean().backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.nccl
@pytest.mark.parametrize("option", [True, False])
def test_frozen_blocks_between_others_are_thawed_later(ranks: Ranks, by: str, option: bool) -> None:
    plain = make(Mlps)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(6):
        freeze(plain, step)
        optimizer.zero_grad()
        for rank in range(2):
            (plain(input_of(rank, step)).pow(2).mean() / 2).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for seen in ranks(2).run(interleaved, by, option):
        assert max(map(worst, seen, expected)) < 1e-12


# Mixed precision


@dataclass
class Inner:
    """A tensor in a dataclass."""

    x: Tensor


@dataclass
class Outer:
    """A dataclass in a dataclass."""

    inner: Inner
    label: str


Named = namedtuple("Named", "x label")
INTO: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 1),
    "named": lambda x: Named(x, "label"),
    "dict": lambda x: {"x": x},
    "dataclass": lambda x: Inner(x),
    "nested": lambda x: Outer(Inner(x), "label"),
}
OUT_OF: dict[str, Callable[[Any], Tensor]] = {
    "list": lambda value: value[0],
    "tuple": lambda value: value[0],
    "named": lambda value: value.x,
    "dict": lambda value: value["x"],
    "dataclass": lambda value: value.x,
    "nested": lambda value: value.inner.x,
}


class Carrier(nn.Module):
    """A layer that takes and returns containers, and records the dtype of its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.seen: list[Any] = []

    def forward(self, value: Any) -> Any:
        """Return the layer's output."""
        x = OUT_OF[self.kind](value)
        self.seen.append(x.dtype)
        return INTO[self.kind](self.layer(x.to(self.layer.weight.dtype)))


def carried(rank: int, by: str, kind: str, precise: bool) -> tuple[Any, Any, Gradients]:
    model: Any = make(lambda: nn.Sequential(*(Carrier(kind) for _ in range(3))))
    policy = LIBRARIES[by].MixedPrecisionPolicy(
        **({} if precise else {"param_dtype": torch.bfloat16, "output_dtype": torch.float32})
    )
    for layer in model:
        wrap(by, layer, 2, mp_policy=policy)
    wrap(by, model, 2, mp_policy=policy)
    out = OUT_OF[kind](model(INTO[kind](input_of(rank))))
    out.pow(2).mean().backward()
    return [d for layer in model for d in layer.seen], out.dtype, gradients(model)


@pytest.mark.parametrize("kind", list(INTO))
def test_containers_are_hooked_and_cast(ranks: Ranks, by: str, kind: str) -> None:
    plain: Any = make(lambda: nn.Sequential(*(Carrier(kind) for _ in range(3))))
    for rank in range(2):
        (OUT_OF[kind](plain(INTO[kind](input_of(rank)))).pow(2).mean() / 2).backward()
    for _, _, found in ranks(2).run(carried, by, kind, True):
        assert worst(found, gradients(plain)) < 1e-12
    for seen, out, found in ranks(2).run(carried, by, kind, False):
        assert seen == [torch.bfloat16] * 3
        assert out is torch.float32
        assert worst(found, gradients(plain)) < 0.1  # bfloat16


def grouped_cast(rank: int, by: str) -> tuple[torch.dtype, bool]:
    """Cast between two modules of one unit to another dtype: the second casts back."""
    policy = LIBRARIES[by].MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.b(self.a(x).float()))

    model: Any = Model()
    wrap(by, [model.a, model.b], 2, mp_policy=policy)
    wrap(by, model, 2, mp_policy=policy)
    out = model(torch.ones(2, WIDTH))
    out.sum().backward()
    return out.dtype, all(p.grad is not None for p in model.parameters())


def test_every_module_of_a_list_casts_its_inputs(ranks: Ranks, by: str) -> None:
    assert ranks(2).run(grouped_cast, by) == [(torch.bfloat16, True)] * 2


def reduced_in(rank: int, by: str, how: str) -> list[torch.dtype]:
    """Return the dtypes of reduced gradients."""
    given = {"param_dtype": torch.bfloat16}
    if how in ("frozen first, fp32", "converted"):
        given["reduce_dtype"] = torch.float32
    policy = LIBRARIES[by].MixedPrecisionPolicy(**given)
    model: Any = nn.Linear(WIDTH, WIDTH)
    if how == "converted":
        model.bfloat16()
        policy = LIBRARIES[by].MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if how.startswith("frozen"):
        model.requires_grad_(False)
    wrap(by, model, 2, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.dtype))
    if how == "converted":
        model.float()
    if how.startswith("frozen"):
        model(torch.ones(2, WIDTH))
        model.requires_grad_(True)
    model(torch.ones(2, WIDTH)).float().sum().backward()
    return [*seen, model.weight.grad.dtype]


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("plain", torch.bfloat16),
        ("frozen first", torch.bfloat16),
        ("frozen first, fp32", torch.float32),
        ("converted", torch.bfloat16),
    ],
)
def test_gradients_are_reduced_in_the_dtype_of_the_policy(
    ranks: Ranks, by: str, how: str, dtype: torch.dtype
) -> None:
    if by == "torch" and how.startswith("frozen"):
        pytest.xfail("torch 2.13 takes the dtype from a forward in which all are frozen")
    assert ranks(2).run(reduced_in, by, how) == [[dtype, torch.float32]] * 2


def forward_mode(rank: int, by: str, warm: bool) -> list[Tensor]:
    """Return the tangent of an output."""
    model = net(by, 2, kind=Mlps, reshard_after_forward=False).requires_grad_(False)
    if warm:
        model(input_of(rank))
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(input_of(rank), input_of(rank, 1))
        out = torch.autograd.forward_ad.unpack_dual(model(x))
        assert out.tangent is not None
        first = out.tangent.detach().clone()
    return [first]


@pytest.mark.parametrize("warm", [False, True])
def test_tangents_go_through_frozen_parameters(ranks: Ranks, by: str, warm: bool) -> None:
    plain = make(Mlps)
    for rank, (found,) in enumerate(ranks(2).run(forward_mode, by, warm)):
        jvp: Any = torch.func.jvp
        _, expected = jvp(plain, (input_of(rank),), (input_of(rank, 1),))
        assert worst({"": found}, {"": expected.detach()}) < 1e-12


# Clipping over two meshes


def clipped(rank: int, by: str, norm_type: float) -> tuple[float, Gradients]:
    whole = mesh_of((2, 2), ("dp", "tp"))
    model: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)))
    parallelize_module(model, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    LIBRARIES[by].fully_shard(model, mesh=whole["dp"])
    model(input_of(whole.get_local_rank("dp"))).pow(2).mean().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    return float(full(norm)), gradients(model)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_gradients_on_two_axes_are_clipped(ranks: Ranks, by: str, norm_type: float) -> None:
    plain: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)))
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type))
    for found, clip in ranks(4).run(clipped, by, norm_type):
        assert abs(found - norm) < 1e-12 * norm
        assert worst(clip, gradients(plain)) < 1e-12


# DTensors on one mesh


def int_on_one_mesh(rank: int, by: str) -> Gradients | str:
    """Keep a DTensor of two axes in one part between forward and backward."""
    whole = mesh_of((2, 2), ("dp", "tp"))
    model: Any = make(lambda: nn.Linear(WIDTH, 4, bias=False))
    placements = [Replicate(), Shard(0)]
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, whole, placements))
    library = LIBRARIES[by]
    dims = library.DataParallelMeshDims(shard="dp")
    try:
        library.fully_shard(model, mesh=whole, dp_mesh_dims=dims, reshard_after_forward=1)
    except NotImplementedError:
        return "refused"
    data = [Shard(0), Replicate()]
    x = DTensor.from_local(input_of(whole.get_local_rank("dp")), whole, data, run_check=False)
    model(x).redistribute(placements=data).to_local().pow(2).mean().backward()
    return gradients(model)


def test_an_int_to_reshard_to_is_refused_for_dtensors_or_right(ranks: Ranks, by: str) -> None:
    plain: Any = make(lambda: nn.Linear(WIDTH, 4, bias=False))
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for found in ranks(4).run(int_on_one_mesh, by):
        if isinstance(found, str):
            assert (by, found) == ("torch", "refused")
        else:
            assert worst(found, gradients(plain)) < 1e-12


class Expert(nn.Module):
    """A layer for all data, and one that is an expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return cast(Tensor, self.expert(torch.tanh(self.dense(x))))


def shared_streams(rank: int, by: str) -> Gradients:
    """Let two roots share their communication streams."""
    first, second = net(by, 2, kind=Mlps), net(by, 2, kind=Mlps)
    LIBRARIES[by].share_comm_ctx([first, second])
    for step in range(2):
        first.zero_grad()
        second.zero_grad()
        second(first(input_of(rank, step))).pow(2).mean().backward()
    return gradients(nn.Sequential(first, second))


def test_two_roots_may_share_streams(ranks: Ranks, by: str) -> None:
    plain = nn.Sequential(make(Mlps), make(Mlps))
    for rank in range(2):
        (plain(input_of(rank, 1)).pow(2).mean() / 2).backward()
    for found in ranks(2).run(shared_streams, by):
        assert worst(found, gradients(plain)) < 1e-12


def with_caps(rank: int, by: str) -> Gradients:
    model = net(by, 2)
    model.blocks[0].set_reduce_scatter_max_input_buffers(1)
    model.blocks[1].set_reduce_scatter_max_input_buffers(3)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_numbers_of_packed_gradients_change_no_value(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(with_caps, by):
        assert worst(found, reference(2)) < 1e-12


def replicated_and_ignored(rank: int, by: str) -> Gradients:
    """Give one block to torch's `replicate`, and say so."""
    model = make(Net)
    apply: Any = replicate
    apply(model.blocks[1])
    ignored = set(model.blocks[1].parameters())
    wrap(by, model.blocks[0], 2)
    wrap(by, model, 2, ignored_params=ignored)
    seen = {}
    for _ in range(2):
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        seen = gradients(model)
    return seen


def test_ignored_parameters_may_belong_to_replicate(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(replicated_and_ignored, by):
        assert worst(found, reference(2)) < 1e-12


# State dicts


def state_of_a_part(rank: int, by: str) -> dict[str, Any]:
    """Take and load the state of a module inside of a unit, while the unit is gathered."""
    model = net(by, 2, reshard_after_forward=False)
    before = {name: full(p) for name, p in model.head.named_parameters()}
    loss_of(model, tokens(rank))
    state = model.head.state_dict()
    kinds = all(isinstance(value, DTensor) for value in state.values())
    same = all(torch.equal(full(value), before[name]) for name, value in state.items())
    facts = {"DTensors": kinds, "same": same}
    kept = {name: full(value) for name, value in state.items()}
    for module in (model, *model.blocks):
        module.reshard()
    facts["stays"] = all(value.numel() == kept[name].numel() for name, value in state.items())
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        facts[f"{name} has memory"] = local.untyped_storage().nbytes() >= local.nbytes
    return facts


def test_the_state_of_a_module_inside_of_a_unit_is_sharded(ranks: Ranks, by: str) -> None:
    for facts in ranks(2).run(state_of_a_part, by):
        assert all(facts.values()), facts


def loaded_while_gathered(rank: int, by: str, part: bool) -> Gradients:
    """Load twice the values right after a forward that kept parameters."""
    model = net(by, 2, reshard_after_forward=False)
    target = model.head if part else model
    new = {name: value * 2 for name, value in target.state_dict().items()}
    loss_of(model, tokens(rank))
    target.load_state_dict(new)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("part", [False, True])
def test_values_loaded_while_parameters_are_unsharded_are_used(
    ranks: Ranks, by: str, part: bool
) -> None:
    plain = make(Net)
    with torch.no_grad():
        for p in (plain.head if part else plain).parameters():
            p.mul_(2)
    for rank in range(2):
        (loss_of(plain, tokens(rank)) / 2).backward()
    for found in ranks(2).run(loaded_while_gathered, by, part):
        assert worst(found, gradients(plain)) < 1e-12


# Storage, and parameters that no rank used


def offloaded(rank: int, by: str) -> Gradients:
    policy = LIBRARIES[by].CPUOffloadPolicy(pin_memory=False)
    model = net(by, 2, offload_policy=policy)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, tokens(rank, micro)).backward()
    return gradients(model)


def test_microbatches_of_offloaded_shards(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(offloaded, by):
        assert worst(found, reference(2, steps=(0, 1, 2))) < 1e-12


def not_used(rank: int, by: str, everyone: bool) -> tuple[str, Gradients]:
    """Leave a layer of the unit out, on all ranks or on one, and reduce it all the same."""
    model = wrap(by, make(Two), 2)
    model.set_reduce_scatter_unused_params(True)
    left_out = everyone or rank == 1
    of_two(model, rank, 0, "module" if left_out else "output").backward()
    gradient = model.two.weight.grad
    kind = "none" if gradient is None else "zeros" if not full(gradient).any() else "values"
    return kind, gradients(model)


@pytest.mark.parametrize("everyone", [False, True])
def test_unused_parameters_are_reduced_with_zeros(ranks: Ranks, by: str, everyone: bool) -> None:
    """A parameter that no rank used has a zero gradient under torch, and None here."""
    plain = make(Two)
    for rank in range(2):
        what = "module" if everyone or rank == 1 else "output"
        (of_two(plain, rank, 0, what) / 2).backward()
    for kind, found in ranks(2).run(not_used, by, everyone):
        assert kind == ("values" if not everyone else "none" if by == "ours" else "zeros")
        used = {name: found[name] for name in gradients(plain)}
        assert worst(used, gradients(plain)) < 1e-12


# Which module runs first


def part_before_root(rank: int, by: str) -> str:
    model = net(by, 2)
    try:
        model.blocks[1](input_of(rank))
        model(tokens(rank))
    except RuntimeError as error:
        return str(error)
    return "taken"


def test_a_part_that_runs_before_its_root_is_refused_by_torch_alone(ranks: Ranks, by: str) -> None:
    for said in ranks(2).run(part_before_root, by):
        assert (said == "taken") == (by == "ours")


def tied_apart(rank: int, by: str) -> str:
    model = make(Tied)
    try:
        wrap(by, model.embedding, 2)
        wrap(by, model.head, 2)
        wrap(by, model, 2)
        model(tokens(rank))
    except ValueError as error:
        return str(error)
    return ""


def test_tied_weights_of_two_units_are_refused(ranks: Ranks, by: str) -> None:
    for said in ranks(2).run(tied_apart, by):
        assert "weight" in said


def seen_by_hooks(rank: int, by: str) -> dict[str, bool]:
    """Return the kinds of parameters in hooks registered before and after sharding."""
    model = make(Net)
    seen: dict[str, bool] = {}

    def look(when: str) -> Callable[..., None]:
        return lambda module, *_: seen.update({when: isinstance(module.up.weight, DTensor)})

    block = model.blocks[0]
    block.register_forward_pre_hook(look("before, on the way in"))
    block.register_forward_hook(look("before, on the way out"))
    for each in model.blocks:
        wrap(by, each, 2, reshard_after_forward=True)
    wrap(by, model, 2)
    block.register_forward_pre_hook(look("after, on the way in"))
    block.register_forward_hook(look("after, on the way out"))
    loss_of(model, tokens(rank)).backward()
    return seen


def test_user_hooks_see_the_same_parameters_as_with_torch(ranks: Ranks, by: str) -> None:
    for seen in ranks(2).run(seen_by_hooks, by):
        assert seen == {
            "before, on the way in": False,
            "before, on the way out": False,
            "after, on the way in": False,
            "after, on the way out": True,
        }


def by_own_objects(rank: int, by: str) -> tuple[Gradients, tuple[int, int]]:
    """Let objects of a user's gather and reduce, in memory of theirs; ask for other memory then."""
    model = net(by, 2, reshard_after_forward=True)
    gather, scatter = OwnMemory(), OwnMemory()
    for each in (model, *model.blocks):
        each.set_allocate_memory_from_process_group_for_comm(True)
        each.set_custom_all_gather(gather)
        each.set_custom_reduce_scatter(scatter)
        with pytest.raises(AssertionError):
            each.set_allocate_memory_from_process_group_for_comm(True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model), (len(gather.calls), len(scatter.calls))


def test_objects_of_a_users_may_communicate(ranks: Ranks, by: str) -> None:
    for found, calls in ranks(2).run(by_own_objects, by):
        assert calls == (8, 4)
        assert worst(found, reference(2)) < 1e-12


def leaf_by_leaf(rank: int, by: str) -> Gradients:
    """Give memory to every module that has parameters, one after another."""
    with torch.device("meta"):
        model: Any = Mlps().double()
    for block in model.blocks:
        wrap(by, block, 2)
    wrap(by, model, 2)
    source = make(Mlps).state_dict()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.to_empty(device="cpu")
            with torch.no_grad():
                for name, p in module.named_parameters():
                    whole, each = source[f"{path}.{name}"], cast(Any, p)
                    each.copy_(distribute_tensor(whole, each.device_mesh, each.placements))
    model(input_of(rank)).pow(2).mean().backward()
    return gradients(model)


@pytest.mark.nccl
def test_modules_may_get_memory_one_by_one(ranks: Ranks, by: str) -> None:
    plain = make(Mlps)
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for found in ranks(2).run(leaf_by_leaf, by):
        assert worst(found, gradients(plain)) < 1e-12


def converted_leaf_by_leaf(rank: int, by: str) -> Gradients:
    model = make(Mlps, torch.float32)
    for block in model.blocks:
        wrap(by, block, 2)
    wrap(by, model, 2)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.double()
    model(input_of(rank)).pow(2).mean().backward()
    return gradients(model)


def test_modules_may_be_converted_one_by_one_before_the_first_forward(
    ranks: Ranks, by: str
) -> None:
    plain = make(Mlps, torch.float32).double()
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for found in ranks(2).run(converted_leaf_by_leaf, by):
        assert worst(found, gradients(plain)) < 1e-12


def scaled(rank: int, by: str) -> tuple[list[bool], list[float]]:
    """Scale losses; in the second step one element of one rank's gradients is infinite."""
    model = net(by, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    moved, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens(rank, step))).backward()
        if step == 1 and rank == 1:
            model.head.bias.grad.to_local()[0] = float("inf")
        before = parameters(model)
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(full(p), before[n]) for n, p in model.named_parameters()))
        scales.append(scaler.get_scale())
    return moved, scales


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks: Ranks, by: str) -> None:
    assert ranks(2).run(scaled, by) == [([True, False, True], [4.0, 2.0, 2.0])] * 2


def plainly_loaded(rank: int, by: str) -> Gradients | str:
    """Load whole plain values into a module inside of a unit that is gathered."""
    model = net(by, 2, reshard_after_forward=False)
    new = {name: p.detach() * 2 for name, p in make(Net).head.named_parameters()}
    loss_of(model, tokens(rank))
    try:
        model.head.load_state_dict(new)
    except RuntimeError as error:
        return str(error)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_plain_values_loaded_while_gathered_count_or_are_refused(ranks: Ranks, by: str) -> None:
    plain = make(Net)
    with torch.no_grad():
        for p in plain.head.parameters():
            p.mul_(2)
    for rank in range(2):
        (loss_of(plain, tokens(rank)) / 2).backward()
    for found in ranks(2).run(plainly_loaded, by):
        if isinstance(found, str):
            assert "head" in found or "Linear" in found
        else:
            assert worst(found, gradients(plain)) < 1e-12


def beside_newer_replicate(rank: int, by: str) -> Gradients:
    """Apply torch's newer `replicate`, which is built on FSDP, to one block."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as newer

    model = make(Net)
    newer(model.blocks[1], mesh=mesh(2))
    wrap(by, model, 2)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.nccl
def test_modules_of_the_newer_replicate_are_not_sharded_by_the_root(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(beside_newer_replicate, by):
        assert worst(found, reference(2)) < 1e-12


def inside_of_replicate(rank: int, by: str) -> Gradients:
    """Shard a block inside a module that torch's `replicate` replicates."""
    model = make(Net)
    wrap(by, model.blocks[1], 2)
    apply: Any = replicate
    apply(model)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_replicate_around_a_sharded_block_leaves_it_alone(ranks: Ranks, by: str) -> None:
    for found in ranks(2).run(inside_of_replicate, by):
        assert worst(found, reference(2)) < 1e-12
