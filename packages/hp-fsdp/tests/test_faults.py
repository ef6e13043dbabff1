"""Failures that meet pending collectives: no memory in use is freed, lent or shown."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, RaggedTensor, TorchCollectives
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateError,
    fully_shard,
)
from hp_fsdp._extensions import ExtendedFlatBuffer
from hp_fsdp.layout import FlatBuffer, ResizableBuffer
from hp_fsdp.layout._exact import ExactPlan
from hp_fsdp.layout._ragged import RaggedPlan

from .gathering import Blocks, Halved, Layers, Whole, Wrapped, elements_of_block
from .models import Gradients, Net, gradients, make, mesh_of, tokens, worst

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}
HALF = MixedPrecisionPolicy(param_dtype=torch.float32)


class Injected(RuntimeError):
    """An error that a test raises."""


class Interrupted(BaseException):
    """Stands for ``KeyboardInterrupt``."""


class Late(TorchCollectives):
    """Raises at the start of one collective. Odd ranks start late, so other ranks have it pending.

    ``when`` is before or after the real start, or between the starts of its parts. No work handle
    is returned for the parts that were started.
    """

    def __init__(self) -> None:
        self.kind, self.when, self.error = "", "", Injected("a start")
        self.delay = 0.0

    def _start(self, kind: str, function: Any, axis: Axis, *lists: Any, **rest: Any) -> Any:
        fails = kind == self.kind
        if axis.index % 2 and self.delay:
            time.sleep(self.delay)
        if not fails:
            return function(axis, *lists, **rest)
        self.kind = ""
        if self.when == "between":
            parts = [None if part is None else list(part)[:1] for part in lists]
            function(axis, *parts, **rest)
        elif self.when == "after":
            function(axis, *lists, **rest)
        raise self.error

    def all_gather(self, axis: Axis, inputs: Any, outputs: Any = None) -> Any:
        """Raise or pass on."""
        return self._start("all_gather", super().all_gather, axis, inputs, outputs)

    def reduce_scatter(self, axis: Axis, inputs: Any, outputs: Any = None, op: Any = "sum") -> Any:
        """Raise or pass on."""
        return self._start("reduce_scatter", super().reduce_scatter, axis, inputs, outputs, op=op)

    def all_reduce(self, axis: Axis, tensors: Any, op: Any = "sum") -> Any:
        """Raise or pass on."""
        return self._start("all_reduce", super().all_reduce, axis, tensors, op=op)


SIZE = 384
LOST: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "copy": ((2,), {}),
    "accumulate": ((2,), {"grads": "accumulate", "direct_bytes": 0}),
    "packed": ((2,), {"direct_bytes": math.inf}),
    "ragged": ((2,), {"layout": "ragged"}),
    "float32": ((2,), {"mp_policy": HALF}),
    "offload": ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": HALF}),
    "hsdp": ((2, 2), {}),
}


def lost_gathers(rank: int, mode: str, when: str, interrupt: bool) -> list[bool]:
    """Lose gathers that were started, and at once use all memory that could be taken from them."""
    shape, options = LOST[mode]
    mesh, carrier = mesh_of(shape, NAMES[len(shape)]), Late()
    model: Any = make(lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3))))
    expected = [layer.weight.detach().clone() for layer in model]
    if "mp_policy" in options:
        expected = [weight.float() for weight in expected]
    for layer in model:
        fully_shard(layer, mesh, collectives=carrier, **options)
    fully_shard(model, mesh, collectives=carrier)
    carrier.error = Interrupted() if interrupt else MemoryError()  # type: ignore[assignment]
    carrier.delay, carrier.when = 0.002, when
    equal = []
    for turn in range(6):
        carrier.kind = "all_gather"
        raised = False
        try:
            model[1].unshard()
        except (MemoryError, Interrupted):
            raised = True
        equal.append(raised and isinstance(model[1].weight, DTensor | RaggedTensor))
        if turn % 2:
            model.reset()
        other = model[2 if turn % 3 else 0]
        other.unshard()
        held = [torch.full((SIZE * SIZE,), 7.0) for _ in range(4)]
        model[1].unshard()
        for layer in (model[1], other):
            equal.append(torch.equal(layer.weight, expected[list(model).index(layer)]))
            layer.reshard()
        del held
    model(torch.ones(2, SIZE, dtype=torch.float64)).sum().backward()
    return equal


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("mode", LOST)
def test_memory_of_a_gather_without_a_handle_is_not_reused(
    ranks: Ranks, mode: str, when: str
) -> None:
    world = math.prod(LOST[mode][0])
    for equal in ranks(world).run(lost_gathers, mode, when, when == "after"):
        assert all(equal), equal


def lost_reductions(rank: int, kind: str, when: str) -> list[float]:
    """Lose reductions, and at once make other tensors in the memory that they had."""
    mesh, carrier = mesh_of((2, 2), NAMES[2]), Late()
    model: Any = make(lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3))))
    for layer in list(model)[:2]:
        fully_shard(layer, mesh, collectives=carrier, reshard_after_forward=True)
    fully_shard(model, mesh, collectives=carrier)
    x = torch.full((2, SIZE), 1.0 + rank, dtype=torch.float64)
    model(x).pow(2).mean().backward()
    expected = gradients(model)
    carrier.delay, carrier.when = 0.002, when
    carrier.error = MemoryError()  # type: ignore[assignment]
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x).pow(2).mean()
        carrier.kind = kind
        with pytest.raises(MemoryError):
            loss.backward()
        model.reset()
        model.zero_grad()
        model(x).pow(2).mean().backward()
        seen.append(worst(gradients(model), expected))
    return seen


@pytest.mark.nccl
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_step_after_a_lost_reduction_is_right(ranks: Ranks, kind: str, when: str) -> None:
    for seen in ranks(4).run(lost_reductions, kind, when):
        assert max(seen) < 1e-12


class FailingWork:
    """Waits, then raises, as a collective does that failed."""

    def __init__(self, work: Any, error: BaseException | None) -> None:
        self._work, self._error = work, error

    def wait(self) -> Any:
        """Raise once, before waiting; later calls wait."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._work.wait()


class FailingWaits(TorchCollectives):
    """All gathers from now on raise when they are awaited, while they are still pending."""

    error: BaseException | None = None

    def all_gather(self, axis: Axis, *args: Any) -> Any:
        """Start, late on odd ranks."""
        if axis.index % 2:
            time.sleep(0.002)
        return FailingWork(super().all_gather(axis, *args), self.error)


def failed_waits(rank: int, interrupt: bool) -> list[bool]:
    carrier = FailingWaits()
    model: Any = make(lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3))))
    expected = [layer.weight.detach().clone() for layer in model]
    for layer in model:
        fully_shard(layer, mesh_of((2,), NAMES[1]), collectives=carrier)
    fully_shard(model, mesh_of((2,), NAMES[1]), collectives=carrier)
    seen = []
    for _ in range(3):
        carrier.error = Interrupted() if interrupt else Injected()
        for how in ("unshard", "reshard"):
            model[1].unshard(async_op=True)
            try:
                model[1].unshard() if how == "unshard" else model[1].reshard()
                seen.append(False)
            except (Injected, Interrupted):
                seen.append(isinstance(model[1].weight, DTensor))
            model.reset()
        carrier.error = None
        held = [torch.full((SIZE * SIZE,), 7.0) for _ in range(4)]
        for layer, weight in zip(model, expected, strict=True):
            layer.unshard()
            seen.append(torch.equal(layer.weight, weight))
            layer.reshard()
        del held
    return seen


@pytest.mark.parametrize("interrupt", [False, True])
def test_after_a_wait_that_raised_weights_are_gathered_again(ranks: Ranks, interrupt: bool) -> None:
    for seen in ranks(2).run(failed_waits, interrupt):
        assert all(seen), seen


class Failed:
    """A collective that failed: waiting for it raises every time."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> Any:
        """Wait, and raise."""
        self._work.wait()
        raise Injected("a collective")


class Fails(TorchCollectives):
    """The next collective of one kind fails."""

    kind = ""

    def _maybe(self, kind: str, work: Any) -> Any:
        if kind != self.kind:
            return work
        self.kind = ""
        return Failed(work)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Start, and maybe fail."""
        return self._maybe("all_gather", super().all_gather(*args, **kwargs))

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """Start, and maybe fail."""
        return self._maybe("reduce_scatter", super().reduce_scatter(*args, **kwargs))

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Start, and maybe fail."""
        return self._maybe("all_reduce", super().all_reduce(*args, **kwargs))


def failed_collectives(rank: int, kind: str) -> tuple[list[str], Gradients, Gradients]:
    """Let a collective fail in backward, then one that nobody waits for but reset."""
    carrier = Fails()
    mesh = mesh_of((2, 2), NAMES[2])
    model: Any = make(Net)
    for block in model.blocks:
        fully_shard(block, mesh, collectives=carrier, reshard_after_forward=True)
    fully_shard(model, mesh, collectives=carrier)
    model(tokens(rank)).pow(2).mean().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = model(tokens(rank)).pow(2).mean()
    carrier.kind = kind
    said = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
            said.append("")
        except Injected as error:
            said.append(str(error))

    attempt(loss.backward)
    attempt(model.reset)
    carrier.kind = "all_gather"
    model.blocks[0].unshard(async_op=True)
    attempt(model.reset)
    attempt(model.reset)
    model.zero_grad()
    model(tokens(rank)).pow(2).mean().backward()
    return said, gradients(model), expected


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_reset_raises_only_errors_that_were_not_raised_before(ranks: Ranks, kind: str) -> None:
    for said, found, expected in ranks(4).run(failed_collectives, kind):
        assert said == ["a collective", "", "a collective", ""]
        assert worst(found, expected) < 1e-12


def old_graph(rank: int, when: str) -> tuple[str, Gradients, Gradients]:
    """Run forward, lose a gather of a unit that the graph goes through, then run backward."""
    mesh, carrier = mesh_of((2,), NAMES[1]), Late()
    model: Any = make(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    for layer in model:
        fully_shard(layer, mesh, collectives=carrier, reshard_after_forward=True)
    fully_shard(model, mesh, collectives=carrier)
    x = torch.full((2, 16), 1.0 + rank, dtype=torch.float64)
    model(x).pow(2).mean().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = model(x).pow(2).mean()
    model[0].reshard()
    carrier.kind, carrier.when = "all_gather", when
    with pytest.raises(Injected):
        model[0].unshard()
    said = ""
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
        model.reset()
        model.zero_grad()
        model(x).pow(2).mean().backward()
    return said, gradients(model), expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_graph_over_freed_memory_is_right_or_raises(ranks: Ranks, when: str) -> None:
    for said, found, expected in ranks(2).run(old_graph, when):
        assert said == "" or "modified by an inplace operation" in said
        assert worst(found, expected) < 1e-12


def reset_calls(rank: int, place: str) -> int:
    """Return how many collectives a reset starts when an exception left reductions pending."""
    model: Any = make(Net)
    for block in model.blocks:
        fully_shard(block, mesh_of((2, 2), NAMES[2]))
    fully_shard(model, mesh_of((2, 2), NAMES[2]))
    model(tokens(rank)).pow(2).mean().backward()

    def fail(*_: Any) -> None:
        raise Injected

    target = model.blocks[0].down
    if place == "no_sync":
        model(tokens(rank)).pow(2).mean().backward()  # gradients that wait for an all-reduce
    forward = place == "forward"
    hook: Any = target.register_forward_hook if forward else target.register_full_backward_hook
    handle = hook(fail)
    with pytest.raises(Injected), model.no_sync() if place == "no_sync" else nullcontext():
        model(tokens(rank)).pow(2).mean().backward()
    handle.remove()
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            wrapped = counted(getattr(TorchCollectives, name))
            stack.enter_context(mock.patch.object(TorchCollectives, name, wrapped))
        model.reset()
    return calls


@pytest.mark.parametrize("place", ["forward", "backward", "no_sync"])
def test_reset_communicates_nothing(ranks: Ranks, place: str) -> None:
    assert ranks(4).run(reset_calls, place) == [0, 0, 0, 0]


def reduction_by_hand(rank: int) -> tuple[list[str], Gradients, Gradients]:
    """Let ``reduce_gradients`` raise half way; go on without and with a reset."""
    carrier = Late()
    model: Any = make(Net)
    for block in model.blocks:
        fully_shard(block, mesh_of((2,), NAMES[1]), collectives=carrier)
    fully_shard(model, mesh_of((2,), NAMES[1]), collectives=carrier)
    model(tokens(rank)).pow(2).mean().backward()
    expected = gradients(model)
    model.zero_grad()
    with model.no_sync():
        model(tokens(rank, 1)).pow(2).mean().backward()
    model.blocks[2].reduce_gradients()
    carrier.kind, carrier.when = "reduce_scatter", "after"
    said = []
    for attempt in (model.reduce_gradients, model.reduce_gradients, lambda: model(tokens(rank))):
        try:
            attempt()
        except (Injected, StateError) as error:
            said.append(str(error))
    model.reset()
    model.zero_grad()
    model(tokens(rank)).pow(2).mean().backward()
    return said, gradients(model), expected


def test_after_a_failed_explicit_reduction_a_reset_is_required(ranks: Ranks) -> None:
    for said, found, expected in ranks(2).run(reduction_by_hand):
        assert said[0] == "a start"
        assert len(said) == 3
        assert all("call reset()" in each for each in said[1:])
        assert worst(found, expected) < 1e-12


class Injection:
    """Raises at one call of many, before or after it is made."""

    def __init__(self) -> None:
        self.armed, self.count, self.at, self.after = False, 0, -1, False
        self.error: BaseException = Injected()

    def around(self, function: Any) -> Any:
        """Return a function that is counted, and fails if it is its turn."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.armed:
                return function(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            if number != self.at:
                return function(*args, **kwargs)
            self.armed = False
            if self.after:
                function(*args, **kwargs)
            raise self.error

        return call

    def works(self, function: Any) -> Any:
        """Return a function whose works also fail in ``wait``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            work = function(*args, **kwargs)
            return mock.Mock(spec=["wait"], wait=self.around(work.wait))

        return call

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Count calls into collectives, works, buffers and layouts."""
        inside = ("allocate", "free")
        outside = (
            "gather",
            "gather_block",
            "save_block",
            "drop_block",
            "wait",
            "finish_gather",
            "free",
        )
        with ExitStack() as stack:
            for kinds, names in (
                ((ResizableBuffer,), inside),
                ((FlatBuffer, ExtendedFlatBuffer), outside),
                ((ExactPlan, RaggedPlan), ("gradient_rows",)),
            ):
                for kind, name in itertools.product(kinds, names):
                    if name in vars(kind):
                        wrapped = self.around(vars(kind)[name])
                        stack.enter_context(mock.patch.object(kind, name, wrapped))
            for name in ("all_gather", "reduce_scatter", "all_reduce"):
                wrapped = self.around(self.works(vars(TorchCollectives)[name]))
                stack.enter_context(mock.patch.object(TorchCollectives, name, wrapped))
            yield


class Stack(nn.Module):
    """Blocks with weights that have all-gather extensions."""

    def __init__(self, kind: type[Wrapped]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layers(kind) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features of the tokens."""
        x = torch.sin(tokens[:, None] + torch.arange(8.0))
        for block in self.blocks:
            x = block(x)
        return x


EVERYWHERE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "copy": ((2,), {}),
    "direct": ((2,), {"direct_bytes": 256}),
    "accumulate": ((2,), {"grads": "accumulate", "direct_bytes": 0}),
    "ragged": ((2,), {"layout": "ragged"}),
    "given up": ((2,), {"reshard_after_forward": True}),
    "ragged, accumulate": ((2,), {"layout": "ragged", "grads": "accumulate", "direct_bytes": 0}),
    "kept": ((2,), {"reshard_after_forward": False}),
    "float32": ((2,), {"mp_policy": HALF}),
    "offload": ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "hsdp": ((2, 2), {}),
    "partial": ((2, 2), {"grads": "accumulate", "direct_bytes": 0}),
    "fewer": ((4,), {"reshard_after_forward": 2}),
    "Whole": ((2,), {}),
    "Halved": ((2,), {}),
    "Blocks": ((2,), {"layout": "ragged", "granularity": elements_of_block}),
}
EXTENDED: dict[str, type[Wrapped]] = {"Whole": Whole, "Halved": Halved, "Blocks": Blocks}
# From one call that fails to the next; repeated runs fill in those between.
STRIDES = [19, pytest.param(3, marks=pytest.mark.long)]


def run_step(model: Any, rank: int, mode: str) -> None:
    if mode == "partial":
        model.set_requires_all_reduce(False)
        model(tokens(rank, 1)).pow(2).mean().backward()
        model.set_requires_all_reduce(True)
    if mode == "hsdp":
        with model.no_sync():
            model(tokens(rank, 1)).pow(2).mean().backward()
    model(tokens(rank)).pow(2).mean().backward()


def shown(model: Any) -> dict[str, Tensor]:
    """Return the unsharded parameters that modules have."""
    return {
        name: getattr(p, "plain", p).detach().clone()
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor | RaggedTensor)
    }


def fail_everywhere(rank: int, mode: str, stride: int) -> tuple[int, list[str]]:
    """Let a step fail at many calls. Return the number of calls, and the wrong results."""
    shape, options = EVERYWHERE[mode]
    mesh, injection = mesh_of(shape, NAMES[len(shape)]), Injection()
    kind = EXTENDED.get(mode)
    model: Any = make(Net) if kind is None else make(lambda: Stack(kind), torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    run_step(model, rank, mode)
    expected = gradients(model)
    values: dict[str, Tensor] = {}
    for block in (*model.blocks, model):
        block.unshard()
        values |= shown(model)
        block.reshard()
    wrong: list[str] = []

    def compare(when: str) -> None:
        for name, value in shown(model).items():
            if not torch.equal(value, values[name]):
                wrong.append(f"{when}: {name}")

    with injection.everywhere():
        injection.armed, injection.count = True, 0
        run_step(model, rank, mode)
        injection.armed, total = False, injection.count
        first = next(cached(("turns", mode), itertools.count)) % stride
        for number in range(first, total, stride):
            for after in (False, True):
                model.zero_grad()
                injection.armed, injection.count = True, 0
                injection.at, injection.after = number, after
                injection.error = Injected() if number % 3 else Interrupted()
                raised = False
                try:
                    run_step(model, rank, mode)
                except (Injected, Interrupted):
                    raised = True
                injection.armed = False
                when = f"{'after' if after else 'before'} call {number} of {total}"
                if not raised:
                    wrong.append(f"{when}: nothing raised")
                compare(when)
                for block in (*model.blocks, model) if number % 2 else ():
                    try:
                        block.unshard()
                        compare(f"{when}, by hand")
                        block.reshard()
                    except (StateError, Injected):
                        pass  # a wait may fail
                model.reset()
                if shown(model):
                    wrong.append(f"{when}: unsharded after reset")
                model.zero_grad()
                run_step(model, rank, mode)
                difference = worst(gradients(model), expected)
                if not difference < 1e-12:
                    wrong.append(f"{when}: gradients off by {difference}")
    return total, wrong


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("mode", EVERYWHERE)
def test_an_exception_at_any_call_leaves_no_wrong_weight_and_a_right_next_step(
    ranks: Ranks, mode: str, stride: int
) -> None:
    world = math.prod(EVERYWHERE[mode][0])
    for total, wrong in ranks(world).run(fail_everywhere, mode, stride):
        assert total > stride
        assert wrong == []
