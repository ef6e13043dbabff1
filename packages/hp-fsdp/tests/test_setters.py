"""Effects and errors of the setters of a sharded module."""

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import RecordingCollectives
from hp_fsdp import ModuleError, ShardingError, StateError, UnsupportedError, fully_shard

from .models import (
    WIDTH,
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
# The package by whatever name it is imported: copies live under other roots.
ours: Any = sys.modules[fully_shard.__module__.rpartition(".")[0]]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def public(cls: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(cls, callable)
        if not name.startswith("_") and not hasattr(object, name)
    }


def test_every_public_method_of_torch_is_there_with_its_parameters() -> None:
    mine = public(ours.FSDPModule)
    for name, method in public(theirs.FSDPModule).items():
        wanted = inspect.signature(method).parameters
        given = inspect.signature(mine[name]).parameters
        assert list(wanted)[1:] == [each for each in given if each in wanted][1:], name
        assert all(
            given[each].default is not inspect.Parameter.empty
            for each in given
            if each not in wanted
        ), name


def test_every_public_name_of_torchs_second_version_is_there() -> None:
    from torch.distributed.fsdp import _fully_shard

    assert set(_fully_shard.__all__) <= set(ours.__all__)
    wanted = inspect.signature(theirs.fully_shard).parameters
    assert set(wanted) <= set(inspect.signature(fully_shard).parameters)


def refusals(rank: int) -> dict[str, str]:
    model: Any = shard(make(Net), mesh_of((2, 2), NAMES[2]))
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "set_symm_mem_for_comm": (UnsupportedError, model.set_symm_mem_for_comm),
        "reduce_scatter_unused_params": (
            UnsupportedError,
            lambda: model.set_reduce_scatter_unused_params(False),
        ),
        "max_input_buffers is 0": (
            ShardingError,
            lambda: model.set_reduce_scatter_max_input_buffers(0),
        ),
        "max_input_buffers is True": (
            ShardingError,
            lambda: model.set_reduce_scatter_max_input_buffers(True),
        ),
        "max_input_buffers is 2.0": (
            ShardingError,
            lambda: model.set_reduce_scatter_max_input_buffers(2.0),
        ),
        "reshard_after_backward is 1": (
            ShardingError,
            lambda: model.set_reshard_after_backward(1),
        ),
        "a module to prefetch is of type Linear": (
            ModuleError,
            lambda: model.set_modules_to_forward_prefetch([model.head]),
        ),
        "a stream for the hook": (
            ShardingError,
            lambda: model.set_all_reduce_hook(print, stream=cast(torch.Stream, 1)),
        ),
        "an event after an optimizer step": (
            StateError,
            lambda: model.set_post_optim_event(cast(torch.Event, 1)),
        ),
        "has no method 'generate'": (
            ModuleError,
            lambda: ours.register_fsdp_forward_method(model, "generate"),
        ),
        "to share streams with is of type Linear": (
            ModuleError,
            lambda: ours.share_comm_ctx([model.head]),
        ),
    }
    said = {}
    for name, (kind, call) in calls.items():
        with pytest.raises(kind) as caught:
            call()
        said[name] = str(caught.value)
    for enable in (True, False):
        model.set_allocate_memory_from_process_group_for_comm(enable)
    model.set_reduce_scatter_unused_params(True)
    ours.share_comm_ctx([model, *model.blocks])
    return said


def test_unsupported_setters_raise_with_their_name(ranks: Ranks) -> None:
    for said in ranks(4).run(refusals):
        assert all(name in message for name, message in said.items()), said


def counted(rank: int, setting: str, shape: tuple[int, ...]) -> tuple[Gradients, dict[str, int]]:
    """Return the gradients of three microbatches and the calls that they made."""
    record = RecordingCollectives()
    mesh = mesh_of(shape, NAMES[len(shape)])
    model: Any = shard(make(Net), mesh, collectives=record)
    for step in range(3):
        last = step == 2
        if setting == "no all-reduce":
            model.set_requires_all_reduce(last)
        elif setting == "no reduction":
            model.set_requires_gradient_sync(last)
        elif setting == "kept":
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
        elif setting == "not last":
            model.set_is_last_backward(last)
        elif setting == "root alone":
            model.set_requires_gradient_sync(last, recurse=False)
        elif setting == "by hand":
            model.set_requires_gradient_sync(False)
        elif setting == "rest by hand":
            model.set_requires_all_reduce(False)
        loss_of(model, tokens(rank, step)).backward()
        if setting in ("no all-reduce", "not last", "by hand", "rest by hand") and not last:
            assert not gradients(model)
    if setting.endswith("by hand"):
        model.reduce_gradients()
        model.reduce_gradients()
    return gradients(model), {name: t.calls for (_, name), t in record.by_call.items()}


@pytest.mark.parametrize(
    ("setting", "reductions", "sums"),
    [
        ("no all-reduce", 12, 4),
        ("no reduction", 4, 4),
        ("kept", 4, 4),
        ("not last", 12, 12),
        ("root alone", 10, 10),
        ("by hand", 4, 4),
        ("rest by hand", 16, 4),
    ],
)
def test_microbatches_follow_the_synchronisation_flags(
    ranks: Ranks, setting: str, reductions: int, sums: int
) -> None:
    expected = reference(4, steps=(0, 1, 2))
    for found, calls in ranks(4).run(counted, setting, (2, 2)):
        assert worst(found, expected) < 1e-12
        assert calls["reduce_scatter"] == reductions
        assert calls["all_reduce"] == sums
        if setting == "kept":
            assert calls["all_gather"] == 4


def changed_between(rank: int) -> tuple[Gradients, bool]:
    """Step an optimizer while parameters are kept gathered: the next forward must see it."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, tokens(rank)).backward()
    kept = not isinstance(model.head.weight, DTensor)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    for module in (model, *model.blocks):
        module.reshard()  # gathered parameters have no gradients
    return gradients(model), kept


def test_retained_parameters_are_gathered_again_after_an_optimizer_step(ranks: Ranks) -> None:
    plain = make(Net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(plain, tokens(replica, step)) / 2).backward()
        if step == 0:
            optimizer.step()
    for found, kept in ranks(2).run(changed_between):
        assert kept
        assert worst(found, gradients(plain)) < 1e-12


class Order(RecordingCollectives):
    """Notes how many bytes each gather sends, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def all_gather(self, axis: Any, inputs: Any, outputs: Any = None) -> Any:
        """Note and pass on."""
        self.sent.append(sum(each.numel() for each in inputs))
        return super().all_gather(axis, inputs, outputs)


def prefetched(
    rank: int, explicit: bool, restored: bool = False
) -> tuple[list[list[int]], Gradients]:
    """Return which of three units of one layer each were gathered by when a layer ran."""
    carrier = Order()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH * (n + 1), bias=False) for n in range(4)]
    back = [nn.Linear(WIDTH * (n + 1), WIDTH, bias=False) for n in range(4)]
    model: Any = nn.Sequential(*(nn.Sequential(*pair) for pair in zip(layers, back, strict=True)))
    for block in model:
        fully_shard(block, mesh_of((2,), NAMES[1]), collectives=carrier)
    fully_shard(model, mesh_of((2,), NAMES[1]), collectives=carrier)
    if explicit:
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
        model[3].set_modules_to_backward_prefetch([model[2], model[1], model[0]])
    if restored:
        model[0].set_modules_to_forward_prefetch(None)
        model[3].set_modules_to_backward_prefetch(None)
    seen: list[list[int]] = []
    for block in model:
        block[0].register_forward_pre_hook(lambda *_: seen.append(list(carrier.sent)))
    x = torch.ones(1, WIDTH, requires_grad=True)
    y = model(x)
    seen.append(list(carrier.sent))
    carrier.sent.clear()
    model[2][1].register_full_backward_hook(lambda *_: seen.append(list(carrier.sent)))
    y.sum().backward()
    seen.append(list(carrier.sent))
    return seen, gradients(model)


def test_explicit_prefetch_gathers_the_given_modules(ranks: Ranks) -> None:
    tag = 1  # one element says which unit it is
    sizes = [WIDTH * WIDTH * (n + 1) + tag for n in range(4)]
    for (plain, expected), (told, found) in zip(
        ranks(2).run(prefetched, False), ranks(2).run(prefetched, True), strict=True
    ):
        # without explicit prefetch, the first pass prefetches nothing
        assert plain[:4] == [sizes[:1], sizes[:2], sizes[:3], sizes]
        assert told[:4] == [sizes[:3], sizes[:3], sizes[:3], sizes]
        assert plain[4] == told[4] == sizes
        backward = told[-1]
        assert backward[:4] == [sizes[3], sizes[2], sizes[1], sizes[0]]
        assert sorted(backward) == sorted(plain[-1])
        assert worst(found, expected) == 0


def test_explicit_prefetch_can_be_taken_back(ranks: Ranks) -> None:
    for (plain, _), (restored, _) in zip(
        ranks(2).run(prefetched, False), ranks(2).run(prefetched, True, True), strict=True
    ):
        assert restored == plain


def without_hook(rank: int) -> Gradients:
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    model.set_all_reduce_hook(Tensor.zero_)
    model.set_all_reduce_hook(None)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_hook_on_the_reduction_can_be_taken_back(ranks: Ranks) -> None:
    for found in ranks(2).run(without_hook):
        assert worst(found, reference(2)) < 1e-12


def hooked(rank: int, shape: tuple[int, ...], kind: Any) -> tuple[Gradients, list[int], int]:
    """Double the gradients of the root in a hook."""
    model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]))
    seen: list[int] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.numel())
        reduced.mul_(2)

    # A CPU has no streams to choose from; torch takes one there too.
    stream = kind() if len(shape) == 1 else None
    model.set_all_reduce_hook(double, stream=stream)
    loss_of(model, tokens(rank)).backward()
    rows = [p.to_local().numel() for p in (model.head.weight, model.head.bias)]
    return gradients(model), seen, sum(rows)


@pytest.mark.parametrize("kind", [partial(torch.Stream, "cpu"), torch.cpu.Stream])
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_a_hook_on_the_reduction_edits_the_gradients(
    ranks: Ranks, shape: tuple[int, ...], kind: Any
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world)
    for name in ("embedding.weight", "head.weight", "head.bias"):
        expected[name] = 2 * expected[name]
    for found, seen, least in ranks(world).run(hooked, shape, kind):
        assert worst(found, expected) < 1e-12
        assert len(seen) == 1
        assert seen[0] >= least


class Waited(torch.cpu.Event):
    """An event that counts the waits for it."""

    count = 0

    def wait(self, stream: object = None) -> None:
        """Count."""
        self.count += 1


def with_events(rank: int) -> tuple[list[int], list[Gradients]]:
    """Set events of torch.cpu between steps; return the waits for each and the gradients."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    model.set_post_optim_event(None)  # also before the first forward
    given, dropped = Waited(), Waited()
    found = []
    cpu: Any = torch.cpu
    for events in ([cpu.current_stream().record_event()], [dropped, None], [given], []):
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
        for event in events:
            model.set_post_optim_event(event)
    return [given.count, dropped.count], found


def test_events_of_a_cpu_are_accepted_and_none_removes_one(ranks: Ranks) -> None:
    for counts, found in ranks(2).run(with_events):
        assert counts == [1, 0]
        for each in found:
            assert worst(each, reference(2)) < 1e-12


def summed(rank: int, shape: tuple[int, ...]) -> list[Gradients]:
    found = []
    for factor in (None, 3.0):
        model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]))
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_reduce_scatter_divide_factor(factor)
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_sums_are_divided_afterwards(ranks: Ranks, shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    for mean, third in ranks(world).run(summed, shape):
        assert worst(mean, reference(world)) < 1e-12
        assert worst(third, reference(world, divide=3.0)) < 1e-12


def one_factor(rank: int) -> Gradients:
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    model.blocks[0].set_gradient_divide_factor(1.0)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_divide_factor_is_of_its_module_only(ranks: Ranks) -> None:
    mean, total = reference(2), reference(2, divide=1.0)
    expected = {name: (total if name.startswith("blocks.0.") else mean)[name] for name in mean}
    for found in ranks(2).run(one_factor):
        assert worst(found, expected) < 1e-12


def no_gather(rank: int) -> tuple[Gradients, int, int]:
    """Do not gather an embedding for its backward."""
    calls = []
    for needed in (True, False):
        record = RecordingCollectives()
        model: Any = make(Net)
        mesh = mesh_of((2,), NAMES[1])
        fully_shard(model.embedding, mesh, collectives=record, reshard_after_forward=True)
        fully_shard(model, mesh, collectives=record)
        model.embedding.set_unshard_in_backward(needed)
        loss_of(model, tokens(rank)).backward()
        calls.append(record.by_call["fsdp", "all_gather"].calls)
    return gradients(model), calls[0], calls[1]


def test_units_that_backward_does_not_need_are_not_gathered(ranks: Ranks) -> None:
    for found, with_it, without in ranks(2).run(no_gather):
        assert worst(found, reference(2)) < 1e-12
        assert without == with_it - 1


def own_group(rank: int) -> Gradients:
    model: Any = shard(make(Net), mesh_of((4,), NAMES[1]))
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(1)
    loss_of(model, tokens(rank)).backward()
    first = gradients(model)
    model.zero_grad()
    model.set_separate_reduce_scatter_group(False)
    loss_of(model, tokens(rank)).backward()
    again = gradients(model)
    assert worst(again, first) == 0
    before = len(dist.distributed_c10d._world.pg_map)
    for module in (model, model.blocks[0], model):
        module.set_separate_reduce_scatter_group()
    assert len(dist.distributed_c10d._world.pg_map) == before
    return first


def test_reductions_may_have_groups_of_their_own(ranks: Ranks) -> None:
    for found in ranks(4).run(own_group):
        assert worst(found, reference(4)) < 1e-12


class Branching(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)
        self.other = nn.Linear(11, 3)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return both heads' outputs."""
        logits = self.net(batch)
        return logits, self.other(logits.detach())


def two_branches(rank: int) -> tuple[Gradients, bool]:
    """Run backward through one head, then through the other."""
    mesh = mesh_of((2,), NAMES[1])
    model: Any = make(Branching)
    fully_shard(model.other, mesh)
    shard(model.net, mesh)
    fully_shard(model, mesh)
    trunk, head = model(tokens(rank))
    model.set_is_last_backward(False)
    head.pow(2).mean().backward()
    early = any(p.grad is not None for p in model.parameters())
    model.set_is_last_backward(True)
    trunk.pow(2).mean().backward()
    return gradients(model), early


def test_backward_through_branches_ends_with_the_last(ranks: Ranks) -> None:
    plain = make(Branching)
    for replica in range(2):
        for output in plain(tokens(replica)):
            (output.pow(2).mean() / 2).backward()
    for found, early in ranks(2).run(two_branches):
        assert not early
        assert worst(found, gradients(plain)) < 1e-12


class Generating(Net):
    """A model with another way in than forward."""

    def generate(self, batch: Tensor, *, scale: float) -> Tensor:
        """Return scaled logits."""
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x) * scale)

    def twice(self, batch: Tensor) -> Tensor:
        """Run forward two times."""
        return cast(Tensor, self(batch) + self(batch))


def generated(rank: int) -> Gradients:
    model: Any = shard(make(Generating), mesh_of((2,), NAMES[1]))
    ours.register_fsdp_forward_method(model, "generate")
    ours.register_fsdp_forward_method(model.embedding, "not sharded, so not looked for")
    with torch.no_grad():
        model.generate(tokens(rank), scale=1.0)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    assert sharded
    ours.register_fsdp_forward_method(model, "twice")
    with torch.no_grad():
        model.twice(tokens(rank))
    model.generate(tokens(rank), scale=2.0).pow(2).mean().backward()
    return gradients(model)


def test_another_method_may_be_a_forward(ranks: Ranks) -> None:
    expected = {name: 4 * value for name, value in reference(2, Generating).items()}
    for found in ranks(2).run(generated):
        assert worst(found, expected) < 1e-12


def stepping_in_backward(rank: int, backwards: int) -> tuple[bool, Gradients]:
    """Step each parameter by a hook as soon as its gradient is there."""
    model: Any = shard(make(Net), mesh_of((2,), NAMES[1]))
    before = {name: full(p) for name, p in model.named_parameters()}

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.add_(cast(Tensor, p.grad), alpha=-0.5)
        p.grad = None

    with ExitStack() as stack:
        for p in model.parameters():
            stack.callback(p.register_post_accumulate_grad_hook(step).remove)
        for part in range(backwards):
            model.set_is_last_backward(part == backwards - 1)
            loss_of(model, tokens(rank, part)).backward()
    found = {name: (before[name] - full(p)) / 0.5 for name, p in model.named_parameters()}
    return not gradients(model), found


def test_hooks_after_gradients_run_on_the_sharded_parameters(ranks: Ranks) -> None:
    for none_left, found in ranks(2).run(stepping_in_backward, 1):
        assert none_left
        assert worst(found, reference(2)) < 1e-9  # a difference of parameters


def test_hooks_step_no_parameter_that_the_last_backward_has_yet_to_gather(ranks: Ranks) -> None:
    for none_left, found in ranks(2).run(stepping_in_backward, 2):
        assert none_left
        assert worst(found, reference(2, steps=(0, 1))) < 1e-9  # a difference of parameters


def order_of_hooks(rank: int, shape: tuple[int, ...], layout: str) -> list[str]:
    """Return the order of the blocks' backwards and of the hooks on reduced gradients."""
    model: Any = shard(make(lambda: Net(5)), mesh_of(shape, NAMES[len(shape)]), layout=layout)
    events: list[str] = []
    for at, block in enumerate(model.blocks):
        block.norm.register_full_backward_pre_hook(lambda *_, at=at: events.append(f"block {at}"))
        block.table.register_post_accumulate_grad_hook(
            lambda p, at=at: events.append(f"{'' if p.grad is None else 'gradient'} {at}")
        )
    loss_of(model, tokens(rank)).backward()
    return events


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_hooks_after_gradients_run_while_backward_goes_on(
    ranks: Ranks, shape: tuple[int, ...], layout: str
) -> None:
    """At most two units have reduced gradients then: an optimizer in backward frees the others."""
    for events in ranks(torch.Size(shape).numel()).run(order_of_hooks, shape, layout):
        assert [e for e in events if e.startswith("gradient")] == [
            f"gradient {at}" for at in (4, 3, 2, 1, 0)
        ]
        for at in (4, 3):
            assert events.index(f"gradient {at}") < events.index(f"block {at - 3}")


class Started(RecordingCollectives):
    """Notes which collectives are started, in order, and over which axis."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def all_gather(self, axis: Any, inputs: Any, outputs: Any = None) -> Any:
        """Note and pass on."""
        self.calls.append(("all_gather", axis.name))
        return super().all_gather(axis, inputs, outputs)

    def reduce_scatter(self, axis: Any, inputs: Any, outputs: Any = None, op: Any = "sum") -> Any:
        """Note and pass on."""
        self.calls.append(("reduce_scatter", axis.name))
        return super().reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Any, tensors: Any, op: Any = "sum") -> Any:
        """Note and pass on."""
        self.calls.append(("all_reduce", axis.name))
        return super().all_reduce(axis, tensors, op)


Calls = list[tuple[str, str]]


def started(rank: int, in_flight: int) -> tuple[Calls, Calls, bool]:
    """Return the calls of a backward without and with hooks, and whether all hooks ran."""
    found: list[Calls] = []
    ran = parameters = 0
    for hooked in (False, True):
        record = Started()
        mesh = mesh_of((2, 2), NAMES[2])
        model: Any = shard(make(Net), mesh, collectives=record, min_shard_numel=20)
        model.set_reduce_scatter_max_input_buffers(in_flight)

        def hook(_: Tensor) -> None:
            nonlocal ran
            ran += 1

        for p in model.parameters() if hooked else ():
            p.register_post_accumulate_grad_hook(hook)
            parameters += 1
        loss_of(model, tokens(rank)).backward()
        found.append(record.calls)
    return found[0], found[1], ran == parameters


@pytest.mark.parametrize("in_flight", [1, 2])
def test_hooks_after_gradients_change_no_collective(ranks: Ranks, in_flight: int) -> None:
    """One rank alone may have them."""
    for without, with_hooks, all_ran in ranks(4).run(started, in_flight):
        assert all_ran
        assert ("all_reduce", "fsdp") in without  # of parameters that every rank keeps whole
        assert with_hooks == without


def summed_by_default(
    rank: int, shape: tuple[int, ...], layout: str, grads: str
) -> list[Gradients]:
    """Reduce by a sum, by a sum with a divide factor, and by a sum again."""
    model = shard(
        make(Net),
        mesh_of(shape, NAMES[len(shape)]),
        layout=layout,
        grads=grads,
        gradient_reduction="sum",
    )
    seen = []
    for factor in (None, 3.0, None):
        model.set_gradient_divide_factor(factor, recurse=True)
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(
    ("layout", "grads"), [("exact", "copy"), ("exact", "accumulate"), ("ragged", "copy")]
)
def test_gradients_may_be_summed(
    ranks: Ranks, shape: tuple[int, ...], layout: str, grads: str
) -> None:
    world = torch.Size(shape).numel()
    for total, third, again in ranks(world).run(summed_by_default, shape, layout, grads):
        assert worst(total, reference(world, divide=1.0)) < 1e-12
        assert worst(third, reference(world, divide=3.0)) < 1e-12
        assert worst(again, reference(world, divide=1.0)) < 1e-12


def other_reduction(rank: int) -> str:
    wrap: Any = fully_shard
    try:
        wrap(nn.Linear(2, 2), mesh_of((2,), NAMES[1]), gradient_reduction="avg")
    except ShardingError as error:
        return str(error)
    return ""


def test_other_reductions_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(other_reduction):
        assert said == "gradient_reduction is 'avg'; allowed: ['mean', 'sum']"


def scaled(rank: int, how: str) -> list[list[str]]:
    """Return the warnings of two steps and an evaluation, one list each."""
    mesh = mesh_of((2,), NAMES[1])
    model = shard(make(Net), mesh)
    if how == "root":
        model.set_gradient_divide_factor(1.0)
    elif how == "all":
        model.set_gradient_divide_factor(1.0, recurse=True)
    elif how == "the mean by another name":
        model.set_gradient_divide_factor(2.0)
    elif how == "frozen":
        model.blocks[1].set_gradient_divide_factor(1.0)
        model.blocks[1].requires_grad_(False)
    seen = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model, tokens(rank)).backward()
            seen.append([str(each.message) for each in caught])
    return seen


@pytest.mark.parametrize("how", ["root", "all", "default", "frozen", "the mean by another name"])
def test_units_that_divide_by_different_numbers_are_warned_of_once(ranks: Ranks, how: str) -> None:
    for first, second in ranks(2).run(scaled, how):
        assert second == []
        if how != "root":
            assert first == []
            continue
        assert len(first) == 1
        assert "(root) by 1" in first[0]
        assert "blocks.0, blocks.1, blocks.2 by 2" in first[0]
        assert "gradient_reduction" in first[0]


def other_optimizer(rank: int) -> list[int]:
    """Count all-gathers of forwards after steps of another optimizer, and of the own one."""
    mesh = mesh_of((2,), ("fsdp",))
    models: list[Any] = [fully_shard(nn.Linear(8, 8), mesh) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.set_reshard_after_backward(False)
        model(torch.ones(2, 8)).sum().backward()
    counts = []
    for optimizer in (optimizers[1], optimizers[0]):
        optimizer.step()
        models[0].comm_stats(reset=True)
        with torch.no_grad():
            models[0](torch.ones(2, 8))
        rows = models[0].comm_stats().rows
        counts.append(sum(row.count for row in rows if row.collective == "all_gather"))
    return counts


def test_only_steps_with_its_parameters_make_a_unit_gather_again(ranks: Ranks) -> None:
    assert ranks(2).run(other_optimizer) == [[0, 1]] * 2


def in_meta_context(rank: int) -> list[float]:
    """Shard a module that has memory, while new tensors are created on the meta device."""
    model: Any = make(Net)
    with torch.device("meta"):
        shard(model, mesh_of((2,), ("fsdp",)))
    loss_of(model, tokens(rank)).backward()
    return [worst(gradients(model), reference(2))]


def test_modules_are_sharded_under_a_default_device_of_meta(ranks: Ranks) -> None:
    for errors in ranks(2).run(in_meta_context):
        assert max(errors) < 1e-12
