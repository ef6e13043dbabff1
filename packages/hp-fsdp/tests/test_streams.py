"""Order between streams, and results that do not depend on the streams."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_fsdp._group import ParameterGroup
from hp_fsdp._reduction import Reduction, StreamedReduction
from hp_fsdp._streams import Begun, SideStream

from .models import WIDTH, Net, gradients, loss_of, make, mesh_of, parameters, shard, tokens, worst
from .streams import Device, descend, watched

Ranks = Callable[[int], RankPool]
MIXED = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
MODES: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate"},
    "ragged": {"layout": "ragged"},
    "ragged, accumulate": {"layout": "ragged", "grads": "accumulate"},
    "given up": {"reshard_after_forward": True},
    "mixed": {"mp_policy": MIXED},
    "ragged, mixed": {"layout": "ragged", "mp_policy": MIXED},
    "given up, mixed": {"reshard_after_forward": True, "mp_policy": MIXED},
    "offload": {"mp_policy": MIXED, "offload": True},
    "ragged, offload": {"layout": "ragged", "mp_policy": MIXED, "offload": True},
    "hook": {"hook": True},
    "reduced in another dtype": {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    },
    "two at once": {"in_flight": 2},
    "kept": {"reshard_after_forward": False},
    "fewer": {"reshard_after_forward": 1},
    "by own objects": {"own": True},
    "by own objects, mixed": {"own": True, "mp_policy": MIXED},
    "by own objects, timed": {"own": True, "timed": True},
}
SHAPES = [(1,), (2,), (2, 2), (2, 1)]
Break = Callable[[], Any]


def built(shape: tuple[int, ...], options: dict[str, Any], kind: type[Net] = Net) -> Any:
    options = dict(options)
    options.pop("offload", None)
    options.pop("own", None)
    timed = options.pop("timed", False)
    hook, in_flight = options.pop("hook", False), options.pop("in_flight", 1)
    axes = ("dp_replicate", "fsdp")[-len(shape) :]
    model: Any = shard(make(kind), mesh_of(shape, axes), **options)
    model.set_reduce_scatter_max_input_buffers(in_flight)
    if hook:
        for block in model.blocks:
            block.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    loss_of(model, tokens(0)).backward()
    model.zero_grad()
    model.set_comm_timing(timed)
    return model


def train(model: Any, rank: int, partial: bool) -> None:
    """Train three steps. If ``partial`` is True, a step has three microbatches."""
    for step in range(3):
        for part in range(3 if partial else 1):
            model.set_requires_all_reduce(not partial or part == 2)
            loss_of(model, tokens(rank, 3 * step + part)).backward()
        with torch.no_grad():
            loss_of(model, tokens(rank))
        for p in model.parameters():
            if p.grad is not None:
                descend(p)
        if step:
            model.zero_grad()


def compared(
    rank: int,
    shape: tuple[int, ...],
    options: dict[str, Any],
    partial: bool,
    broken: Break = nullcontext,
) -> tuple[float, list[str], list[tuple[str, str]]]:
    """Return the difference to steps without streams, the races, and the operators."""
    plain, beside = built(shape, options), built(shape, options)
    train(plain, rank, partial)
    device = Device()
    with broken(), watched(device, beside, "offload" in options, "own" in options):
        train(beside, rank, partial)
    return worst(parameters(beside), parameters(plain)), device.races, device.log


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        # On (2, 2) are all kinds of work; on other meshes there are fewer.
        (mode, shape)
        if shape == (2, 2) or mode in ("copy", "offload")
        else pytest.param(mode, shape, marks=pytest.mark.long)
        for mode in MODES
        for shape in SHAPES
    ],
    ids=str,
)
def test_a_step_on_several_streams_is_the_same_and_orders_all_it_shares(
    ranks: Ranks, mode: str, shape: tuple[int, ...]
) -> None:
    size = torch.Size(shape).numel()
    for difference, races, log in ranks(size).run(compared, shape, MODES[mode], False):
        assert races == []
        assert difference == 0
        assert size == 1 or ("reduce", "reduce_scatter") in log or shape == (2, 1)


@pytest.mark.parametrize(
    "mode",
    [
        *("copy", "mixed", "offload"),
        *(
            pytest.param(mode, marks=pytest.mark.long)
            for mode in ("accumulate", "ragged", "ragged, offload", "reduced in another dtype")
        ),
    ],
)
def test_sums_that_wait_for_an_all_reduce_stay_until_it_read_them(ranks: Ranks, mode: str) -> None:
    for difference, races, log in ranks(4).run(compared, (2, 2), MODES[mode], True):
        assert races == []
        assert difference == 0
        assert ("all_reduce", "all_reduce") in log


@pytest.mark.parametrize("mode", ["copy", "ragged", "offload"])
def test_a_sum_over_replicas_follows_its_reduce_scatter_without_the_computation(
    ranks: Ranks, mode: str
) -> None:
    for _, _, log in ranks(4).run(compared, (2, 2), MODES[mode], False):
        calls = [each for each in log if each[1] in ("reduce_scatter", "all_reduce")]
        pair = [("reduce", "reduce_scatter"), ("all_reduce", "all_reduce")]
        assert calls == pair * (len(calls) // 2)
        assert calls
        first = log.index(pair[0])
        between = [stream for stream, _ in log[first : log.index(pair[1], first)]]
        assert "compute" not in between


class Overlap(Device):
    """Counts the matrix products that the compute stream runs during each reduce-scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.during: list[int] = []
        self._ends: list[int] = []

    def access(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor] = (),
    ) -> None:
        """Count a product for each reduce-scatter that the compute stream has not waited for."""
        super().access(what, reads, writes, made)
        if what == "reduce_scatter":
            self._ends.append(self.clocks["nccl"]["nccl"])
            self.during.append(0)
        elif what == "mm" and self.stack[-1].name == "compute":
            for i, end in enumerate(self._ends):
                self.during[i] += self.clocks["compute"]["nccl"] < end


def overlapped(rank: int, options: dict[str, Any], dtypes: int = 1) -> list[int]:
    model = make(Net)
    for block in model.blocks if dtypes == 2 else ():
        block.table = torch.nn.Parameter(block.table.detach().float())
    shard(model, mesh_of((2,), ("fsdp",)), **options)
    loss_of(model, tokens(rank)).backward()
    model.zero_grad()
    device = Overlap()
    with watched(device, model):
        loss_of(model, tokens(rank)).backward()
    return device.during


@pytest.mark.parametrize("mode", ["copy", "accumulate"])
def test_the_whole_backward_of_a_block_runs_during_the_previous_reduce_scatter(
    ranks: Ranks, mode: str
) -> None:
    products = 4  # two linear layers, each with the gradients of its input and of its weight
    for last, middle, first, root in ranks(2).run(overlapped, MODES[mode]):
        assert (last, middle) == (products, products)
        assert (first, root) == (0, 0)  # the backward of the embedding has no product


def test_reduce_scatters_of_two_dtypes_run_during_the_same_backward(ranks: Ranks) -> None:
    for during in ranks(2).run(overlapped, {}, 2):
        last, middle = during[:2], during[2:4]
        assert (last, middle) == ([4, 4], [4, 4])


@contextmanager
def unordered() -> Any:
    """Begin side work without a wait for the current stream."""
    before = SideStream.after_current

    @contextmanager
    def begin(self: Any, what: str = "") -> Any:
        wait = self._stream.wait_stream
        self._stream.wait_stream = lambda other: None
        with before(self, what):
            self._stream.wait_stream = wait
            yield

    with mock.patch.object(SideStream, "after_current", begin):
        yield


def nothing(*_: Any) -> list[Any]:
    return []


def without(owner: Any, name: str) -> Break:
    return lambda: mock.patch.object(owner, name, nothing)  # a Mock would keep its arguments alive


def forgetful() -> Any:
    """Hold nothing that a side stream uses."""
    nothing = property(lambda self: [], lambda self, value: None)
    return mock.patch.object(StreamedReduction, "_held", nothing, create=True)


def early() -> Any:
    """Free packed gradients before the reduce-scatter has read them."""

    def finish(self: Reduction) -> None:
        self.scattering = None
        self._rows = None

    return mock.patch.object(StreamedReduction, "finish_scatter", finish)


WITHOUT_COPIES = without(ParameterGroup, "finish_copies")
# Case -> (fault, mode, whether sums are partial, words of an expected race).
BREAKS: dict[str, tuple[Break, str, bool, str]] = {
    "no wait before": (unordered, "mixed", False, "copy_ on gather beside"),
    "no wait before, reductions": (unordered, "copy", False, "reduce_scatter on nccl beside"),
    "no wait after": (without(Begun, "wait"), "mixed", False, "compute beside all_gather on nccl"),
    "no wait of the host": (without(Begun, "synchronize"), "offload", False, "on host beside"),
    "no wait for copies from the CPU": (WITHOUT_COPIES, "offload", False, "beside copy_ on gather"),
    "memory given up": (without(SideStream, "uses"), "offload", False, "lends memory again"),
    "packed gradients given back": (early, "copy", False, "again in which nccl has reduce_scatter"),
    "a sum given up": (forgetful, "copy", True, "again in which all_reduce has"),
}


@pytest.mark.parametrize("guard", list(BREAKS))
def test_each_guard_is_needed(ranks: Ranks, guard: str) -> None:
    """Without the guard there are races, and the simulated device reports them."""
    broken, mode, partial, words = BREAKS[guard]
    for _, races, _ in ranks(4).run(compared, (2, 2), MODES[mode], partial, broken):
        assert any(words in race for race in races), races


def stepped_in_backward(rank: int, options: dict[str, Any]) -> tuple[float, list[str]]:
    """Step each parameter in backward, by a hook that frees its gradient."""

    def step(p: torch.Tensor) -> None:
        descend(p)
        p.grad = None

    plain, beside = built((2, 2), options), built((2, 2), options)
    for p in (*plain.parameters(), *beside.parameters()):
        p.register_post_accumulate_grad_hook(step)
    train(plain, rank, False)
    device = Device()
    with watched(device, beside, offloaded="offload" in options):
        train(beside, rank, False)
    return worst(parameters(beside), parameters(plain)), device.races


@pytest.mark.parametrize("mode", ["copy", "ragged", "offload"])
def test_an_optimizer_in_backward_waits_for_its_gradients(ranks: Ranks, mode: str) -> None:
    assert ranks(4).run(stepped_in_backward, MODES[mode]) == [(0.0, [])] * 4


class TwoHeads(Net):
    """A net with two heads, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor, both: bool = True) -> torch.Tensor:
        """Return the logits of the first head, or the sum of both."""
        x = self.blocks[0](self.embedding(tokens))
        return self.head(x) + self.other(x) if both else self.head(x)  # type: ignore[no-any-return]


def left_out(rank: int, options: dict[str, Any], everywhere: bool) -> tuple[bool, list[str]]:
    """Leave a head out on rank 0, or on all ranks; compare with the same without streams."""
    model, found = built((2,), options, TwoHeads), []
    device = Device()
    for context in (nullcontext(), watched(device, model, offloaded="offload" in options)):
        with context:
            model(tokens(rank), rank > 0 and not everywhere).pow(2).mean().backward()
        if everywhere and model.other.weight.grad is not None:
            raise AssertionError("a gradient that no rank has")
        found.append(gradients(model))
        model.zero_grad()
    return worst(*found) == 0, device.races


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("mode", ["copy", "accumulate", "ragged", "offload"])
def test_unused_parameters_of_a_rank_are_found_after_the_reduction(
    ranks: Ranks, mode: str, everywhere: bool
) -> None:
    assert ranks(2).run(left_out, MODES[mode], everywhere) == [(True, [])] * 2


def ranges(rank: int) -> set[str]:
    """Return the names in a profile of a step with offloaded shards."""
    model = built((2, 2), MODES["offload"])
    device = Device()
    with watched(device, model, offloaded=True), torch.profiler.profile() as profiler:
        loss_of(model, tokens(rank)).backward()
    return {e.key for e in profiler.key_averages() if e.key.startswith("hp_fsdp.")}


def test_a_profile_names_copies_and_sums_with_their_modules(ranks: Ranks) -> None:
    expected = {
        f"hp_fsdp.{what} {module}{over}"
        for module in ("blocks.0", "blocks.1", "blocks.2", "(root)")
        for what, over in (
            *(("copy_shard", ""), ("all_gather", " over fsdp"), ("copy_gradients", "")),
            *(("reduce_scatter", " over fsdp"), ("all_reduce", " over dp_replicate")),
            *(("wait_all_gather", ""), ("wait_reduce_scatter", ""), ("wait_reduction", "")),
            *(("register_unsharded", ""), ("pack_gradients", ""), ("wait_all_reduce", "")),
        )
    }
    for found in ranks(4).run(ranges):
        assert found == expected


def dropped(rank: int) -> list[str]:
    """Drop sums that wait for an all-reduce while a backward goes on."""
    model = built((2, 2), {})
    device = Device()
    with watched(device, model):
        model.set_requires_all_reduce(False)
        loss_of(model, tokens(rank)).backward()
        model.blocks[0].register_full_backward_hook(lambda *_: model.zero_grad())
        loss_of(model, tokens(rank)).backward()
    return device.races


def test_sums_that_are_dropped_in_backward_are_waited_for(ranks: Ranks) -> None:
    assert ranks(4).run(dropped) == [[]] * 4
