"""Ranks that run different units after the first pass raise an error and get no wrong gradients."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_dtensor import (
    Axis,
    CheckedCollectives,
    RankMismatchError,
    RecordingCollectives,
    TorchCollectives,
    Work,
)
from hp_fsdp import DisagreementError, _agreement, fully_shard
from hp_fsdp._tags import FLAG_BITS, TAG_BITS, number_of, tag_digits, tag_flags
from hp_fsdp._unit import UNIT_ATTRIBUTE

from .streams import Device, watched

Ranks = Callable[[int], RankPool]
WIDTH = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
SECONDS = 3.0
_meshes = count()
ALL = (0, 1, 2, 3, 4)


class Blocks(nn.Module):
    """Blocks of one size and a wide block. A forward runs some of them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.blocks.append(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, used: Iterable[int]) -> Tensor:
        """Apply the blocks ``used`` and the head."""
        for position in used:
            x = self.blocks[position](x)
        out: Tensor = self.head(x)
        return out


def new_mesh() -> DeviceMesh:
    """Return a mesh of two ranks over a new process group with a short timeout.

    Ranks that disagree can leave collectives that other ranks never start. The axis name is new
    too, because torch caches results by mesh, and equal meshes share them.
    """
    group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"fsdp_{next(_meshes)}",))


def sharded(mesh: DeviceMesh | None = None, **options: Any) -> Any:
    model = Blocks().double() if "mp_policy" not in options else Blocks()
    mesh = new_mesh() if mesh is None else mesh
    for module in (*model.blocks, model):
        fully_shard(module, mesh, **options)
    return model


def inputs(rank: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((2, WIDTH), rank + 1.0, dtype=dtype)


def after_a_good_step(model: Any, dtype: torch.dtype = torch.float64) -> None:
    for _ in range(2):
        model(inputs(dtype=dtype), ALL).sum().backward()
    model.zero_grad()


# Case -> (blocks that each rank runs in the third pass, units that the ranks then gather).
LAYER_DROP = {
    "each rank leaves other blocks out": (((0, 3, 4), (0, 2, 4)), (3, 2)),
    "one rank leaves blocks out": (((0, 1, 2, 3, 4), (0, 3, 4)), (2, 3)),
    "one rank swaps blocks": (((0, 1, 2, 3, 4), (0, 3, 2, 1, 4)), (2, 3)),
    # The rank has prefetched the skipped block, so only the gathers of backward differ.
    "one block left out": (((0, 1, 2, 3, 4), (0, 1, 3, 4)), (2, 1)),
}


def layer_drop(rank: int, case: str, train: bool, options: dict[str, Any]) -> tuple[str, bool]:
    dtype = torch.float32 if "mp_policy" in options else torch.float64
    model = sharded(**options)
    after_a_good_step(model, dtype)
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank, dtype), LAYER_DROP[case][0][rank], train)
    return str(caught.value), all(p.grad is None for p in model.blocks.parameters())


def run(model: Any, x: Tensor, used: Iterable[int], train: bool = True) -> None:
    """Run a forward, and a backward if ``train``."""
    with torch.set_grad_enabled(train):
        out = model(x, used)
    if train:
        out.sum().backward()


RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "training": (True, {}),
    "training in bfloat16": (True, {"mp_policy": BF16}),
    "training, accumulate": (True, {"grads": "accumulate"}),
    "no_grad": (False, {}),
    "no_grad in float16": (False, {"mp_policy": FP16}),
}


CASES = [*LAYER_DROP][:-1]
# In training each pair waits for a timeout: every case and every kind always runs.
ALWAYS = {
    *((case, kind) for case in CASES for kind in ("training", "no_grad")),
    (CASES[0], "training in bfloat16"),
    (CASES[1], "training, accumulate"),
    (CASES[2], "no_grad in float16"),
}
PAIRS = [
    pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.long)
    for pair in product(CASES, RUNS)
]


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_blocks_that_only_some_ranks_run_are_named_on_all_ranks(
    ranks: Ranks, case: str, kind: str
) -> None:
    train, options = RUNS[kind]
    assert_named(ranks, case, train, {"reshard_after_forward": True, **options})


def test_blocks_that_only_backward_gathers_in_another_order_are_named(ranks: Ranks) -> None:
    assert_named(ranks, "one block left out", True, {"reshard_after_forward": True})


def assert_named(ranks: Ranks, case: str, train: bool, options: dict[str, Any]) -> None:
    said = ranks(2).run(layer_drop, case, train, options)
    assert said[0] == said[1]
    text, without_gradients = said[0]
    for rank, gathered in enumerate(LAYER_DROP[case][1]):
        assert f"rank {rank} gathered blocks.{gathered}" in text
    assert without_gradients


def experts(rank: int, first: bool) -> str:
    """Run a different expert unit on each rank, in the first pass or later."""
    mesh = new_mesh()
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)).double()
    for expert in model:
        fully_shard(expert, mesh)
    for expert in () if first else (*model, *model):
        expert(inputs()).sum().backward()
    with pytest.raises(DisagreementError) as caught:
        model[rank](inputs()).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("first", [True, False], ids=["first pass", "third pass"])
def test_different_experts_without_a_common_root_raise(ranks: Ranks, first: bool) -> None:
    said = ranks(2).run(experts, first)
    assert said[0] == said[1]
    told = (
        "the number of the fully_shard call over these ranks"
        if first
        else "rank 0 gathered (root) (L"
    )
    assert told in said[0]


def silent(rank: int, options: dict[str, Any]) -> tuple[str, bool]:
    """Leave the gradients of another block unsynchronised on one rank, after a good step."""
    model = sharded(**options)
    after_a_good_step(model)
    model.blocks[1 + (rank == 1)].set_requires_gradient_sync(False)
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank), ALL)
    mixed = (*model.blocks[1].parameters(), *model.blocks[2].parameters())
    return str(caught.value), all(p.grad is None for p in mixed)


@pytest.mark.parametrize("options", [{}, {"layout": "ragged"}], ids=["exact", "ragged"])
def test_reductions_of_different_units_put_no_gradients(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    said = ranks(2).run(silent, {"reshard_after_forward": False, **options})
    assert said[0] == said[1]
    assert "rank 0 reduced blocks.2" in said[0][0]
    assert "rank 1 reduced blocks.1" in said[0][0]
    assert said[0][1]


UNEQUAL: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "another size": (ALL, (0, 4, 1, 2, 3), {}),
    "left out before another size": (ALL, (0, 1, 4), {}),
    "the last left out": (ALL, (0, 1, 2, 3), {}),
    "ragged": (ALL, (0, 3, 2, 1, 4), {"layout": "ragged"}),
}


def of_unequal_size(rank: int, case: str) -> str:
    *orders, options = UNEQUAL[case]
    model = sharded(reshard_after_forward=True, **options)
    after_a_good_step(model)
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank), orders[rank])
    return str(caught.value)


@pytest.mark.gloo  # it raises if messages have unequal sizes
@pytest.mark.parametrize("case", list(UNEQUAL))
def test_units_of_unequal_size_end_with_an_error_at_the_timeout(ranks: Ranks, case: str) -> None:
    said = ranks(2).run(of_unequal_size, case)
    assert said[0] == said[1]
    assert "rank 0 waited to" in said[0]
    assert "rank 1 waited to" in said[0]
    assert "gather blocks." in said[0]


def alone(rank: int) -> list[str]:
    """Run a forward on rank 0 alone."""
    model = sharded()
    after_a_good_step(model)
    if rank == 1:
        return []
    soon = mock.patch.object(_agreement, "REPORT_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out") as caught, torch.no_grad(), soon:
        model(inputs(), ALL)
    return list(caught.value.__notes__)


def test_a_rank_that_waits_in_vain_says_for_whom(ranks: Ranks) -> None:
    where, note = ranks(2).run(alone)[0]
    assert where.startswith("in the collective to gather (root)")
    assert " over axis 'fsdp_" in where
    assert "rank 0 waited to gather (root)" in note
    assert "rank 1 did not report" in note


def left_by_reset(rank: int) -> str:
    """Raise on rank 1 alone before the last equal block, reset there, and begin a new step."""
    model = sharded(reshard_after_forward=True)
    after_a_good_step(model)
    if rank == 1:
        hook = model.blocks[3].register_forward_pre_hook(mock.Mock(side_effect=ArithmeticError))
        with pytest.raises(ArithmeticError):
            model(inputs(), ALL)
        hook.remove()
        model.reset()
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(), ALL)
    return str(caught.value)


@pytest.mark.gloo  # with NCCL, an all-gather of 8 bytes would meet one of a shard
def test_a_rank_that_raised_alone_and_was_reset_is_known_by_the_message(ranks: Ranks) -> None:
    said = ranks(2).run(left_by_reset)
    assert said[0] == said[1]
    first, _, second = said[0].partition("rank 1 waited to")
    assert "rank 0 waited to" in first
    assert "reset()" not in first
    assert " and 1 reset()" in second


def left_before_backward(rank: int) -> str:
    """Raise on rank 1 alone in the loss, outside of the model, reset there, begin a new step."""
    model = sharded(reshard_after_forward=True)
    after_a_good_step(model)
    if rank == 1:
        model(inputs(), ALL)
        model.reset()
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(), ALL)
    return str(caught.value)


@pytest.mark.gloo  # with NCCL, an all-gather of 8 bytes would meet one of a shard
def test_a_rank_that_was_reset_between_forward_and_backward_is_known_too(ranks: Ranks) -> None:
    said = ranks(2).run(left_before_backward)
    assert said[0] == said[1]
    assert " and 1 reset()" in said[0].partition("rank 1 waited to")[2]


def all_reset_after_one_raised(rank: int) -> bool:
    """Raise on rank 1 alone after the last gather of a forward; reset on all ranks, and go on."""
    model = sharded(reshard_after_forward=True)
    after_a_good_step(model)
    if rank == 1:
        hook = model.blocks[-1].register_forward_hook(mock.Mock(side_effect=ArithmeticError))
        with pytest.raises(ArithmeticError):
            model(inputs(), ALL)
        hook.remove()
    else:
        model(inputs(), ALL)
    model.reset()
    run(model, inputs(), ALL)
    return all(p.grad is not None for p in model.parameters())


def test_ranks_that_are_all_reset_go_on_where_one_of_them_raised(ranks: Ranks) -> None:
    assert ranks(2).run(all_reset_after_one_raised) == [True, True]


def replicas(rank: int) -> str:
    """Let the two replicas reduce different blocks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    model = sharded(mesh, reshard_after_forward=False)
    after_a_good_step(model)
    model.blocks[1 + rank // 2].set_requires_gradient_sync(False)
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank), ALL)
    return str(caught.value)


def test_replicas_that_sum_different_units_raise(ranks: Ranks) -> None:
    said = ranks(4).run(replicas)
    for each in said:
        assert "reduced blocks.1 (" in each
        assert "reduced blocks.2 (" in each
        assert "over 'dp_replicate'" in each


def dropped_alike(rank: int, options: dict[str, Any]) -> tuple[list[float], int]:
    """Leave blocks out by a seed that all ranks share; count the extra collectives."""
    record = RecordingCollectives()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("legal",))
    model = sharded(mesh, collectives=record, reshard_after_forward=True, **options)
    plain = Blocks().double()
    after_a_good_step(model)
    generator = torch.Generator().manual_seed(1)
    worst, extra = [], 0
    for _ in range(6):
        used = [i for i in range(4) if torch.rand((), generator=generator) < 0.6]
        record.reset()
        with torch.profiler.profile() as profile:
            model(inputs(rank), (*used, 4)).sum().backward()
        names = [event.name for event in profile.events() or ()]
        started = sum(name.startswith("gloo:") for name in names)
        extra += started - sum(traffic.calls for traffic in record.by_axis.values())
        (sum(plain(inputs(each), (*used, 4)).sum() for each in range(2)) / 2).backward()
        for own, right in zip(model.parameters(), plain.parameters(), strict=True):
            found = torch.zeros_like(right) if own.grad is None else own.grad.full_tensor()
            expected = torch.zeros_like(right) if right.grad is None else right.grad
            worst.append((found - expected).abs().max().item())
        model.zero_grad()
        plain.zero_grad()
    return worst, extra


def test_blocks_that_all_ranks_leave_out_need_no_comparison(ranks: Ranks) -> None:
    for worst, extra in ranks(2).run(dropped_alike, {}):
        assert max(worst) < 1e-12
        assert extra <= 6  # the wide block and the head follow blocks of another size


def test_ragged_blocks_that_all_ranks_leave_out_train(ranks: Ranks) -> None:
    for worst, _ in ranks(2).run(dropped_alike, {"layout": "ragged"}):
        assert max(worst) < 1e-12


def checked(rank: int) -> str:
    model = sharded(collectives=CheckedCollectives(deadline=20))
    after_a_good_step(model)
    with pytest.raises(RankMismatchError) as caught, torch.no_grad():
        model(inputs(rank), LAYER_DROP["each rank leaves other blocks out"][0][rank])
    return str(caught.value)


def test_checked_collectives_compare_the_name_of_the_unit(ranks: Ranks) -> None:
    said = ranks(2).run(checked)
    assert said[0] == said[1]
    assert "rank 0 calls gather for forward blocks.3" in said[0]
    assert "rank 1 calls gather for forward blocks.2" in said[0]


def on_an_accelerator(rank: int, difference: str) -> tuple[str, int]:
    """Disagree in the fourth step on simulated streams. Return the error and its step."""
    model = sharded(reshard_after_forward=difference == "gathered")
    after_a_good_step(model)
    orders = ((0, 1, 3, 4), (0, 2, 3, 4))  # backward gathers equally many units of each size
    with watched(Device(), model):
        for step in range(2, 6):
            if step == 3 and difference == "reduced":
                model.blocks[1 + rank].set_requires_gradient_sync(False)
            used = orders[rank] if step == 3 and difference == "gathered" else ALL
            try:
                out = model(inputs(rank), used)
            except DisagreementError as error:
                return str(error), step
            out.sum().backward()
            for block in model.blocks:
                block.set_requires_gradient_sync(True)
    return "", -1


@pytest.mark.nccl
@pytest.mark.parametrize("difference", ["gathered", "reduced"])
def test_on_accelerators_the_next_forward_says_which_gradients_are_wrong(
    ranks: Ranks, difference: str
) -> None:
    said = ranks(2).run(on_an_accelerator, difference)
    assert said[0] == said[1]
    text, step = said[0]
    assert step == 4
    assert text.startswith("the gradients of backward 4 are wrong: ")
    assert f"rank 0 {difference} blocks." in text


@given(st.integers(0, 2**TAG_BITS - 1), st.sampled_from([1, 2, 4, 8]))
def test_the_digits_of_a_tag_are_exact_in_every_dtype(number: int, itemsize: int) -> None:
    dtypes = {
        1: [torch.float8_e4m3fn, torch.float8_e5m2],
        2: [torch.float16, torch.bfloat16],
        4: [torch.float32],
        8: [torch.float64],
    }
    digits = torch.tensor(tag_digits(number, itemsize), dtype=torch.float64)
    for dtype in dtypes[itemsize]:
        assert number_of(digits.to(dtype).double().tolist(), itemsize) == number


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**FLAG_BITS - 1), min_size=2, max_size=600),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_summed_flags_say_whether_all_numbers_are_equal(
    numbers: list[int], equal: bool, dtype: torch.dtype, averaged: bool
) -> None:
    if equal:
        numbers = numbers[:1] * len(numbers)
    total = torch.zeros(2 * FLAG_BITS, dtype=dtype)
    for number in numbers:  # one after the other, as a ring adds, with all its rounding
        own = torch.tensor(tag_flags(number), dtype=dtype)
        total += own / len(numbers) if averaged else own
    zeros = total.tolist().count(0.0)
    assert (zeros == FLAG_BITS) == (len(set(numbers)) == 1)
    assert zeros <= FLAG_BITS


# Programs that repeat: what all ranks do in each step.
PROGRAMS: dict[str, Callable[[Any, int], None]] = {}


def program(step: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    PROGRAMS[step.__name__] = step
    return step


@program
def freeze_in_turn(model: Any, step: int) -> None:
    for position, block in enumerate(model.blocks):
        block.requires_grad_(position % 2 == step % 2)
    run(model, inputs(), ALL)


@program
def evaluate_in_between(model: Any, step: int) -> None:
    run(model, inputs(), ALL)
    run(model, inputs(), ALL, train=False)


@program
def run_a_block_of_another_size_three_times(model: Any, step: int) -> None:
    run(model, inputs(), (4, 0, 1, 4, 2, 3, 4))


@program
def accumulate_gradients(model: Any, step: int) -> None:
    model.set_requires_gradient_sync(False)
    run(model, inputs(), ALL)
    model.set_requires_gradient_sync(True)
    run(model, inputs(), ALL)


@program
def change_the_divide_factor(model: Any, step: int) -> None:
    model.set_gradient_divide_factor(2.0 + step, recurse=True)
    run(model, inputs(), ALL)


def extra_collectives(rank: int, name: str) -> int:
    """Run a program twelve times; return the collectives of the last four that nobody asked for."""
    record = RecordingCollectives()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("legal",))
    model = sharded(mesh, collectives=record)
    for step in range(8):
        PROGRAMS[name](model, step)
    record.reset()
    with torch.profiler.profile() as profile:
        for step in range(8, 12):
            PROGRAMS[name](model, step)
    names = [event.name for event in profile.events() or ()]
    started: int = sum(name.startswith("gloo:") for name in names)
    recorded: int = sum(traffic.calls for traffic in record.by_axis.values())
    return started - recorded


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_that_repeats_itself_needs_no_comparison(ranks: Ranks, name: str) -> None:
    assert ranks(2).run(extra_collectives, name) == [0, 0]


def replicated(rank: int, options: dict[str, Any], what: str) -> str:
    """Differ on one rank from the first step on, with parameters that stay whole."""
    torch.manual_seed(0)
    model: Any = nn.Linear(WIDTH, WIDTH).double()
    if what == "frozen":
        model.bias.requires_grad_(rank == 0)
    shape = (2,) if options else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "fsdp")[: len(shape)])
    fully_shard(model, mesh, **options)
    if what == "factor":
        model.set_gradient_divide_factor(2.0 + rank)
    with pytest.raises(DisagreementError) as caught:
        model(inputs(rank)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"min_shard_numel": 100}], ids=["replicas", "whole"])
@pytest.mark.parametrize("what", ["frozen", "factor"])
def test_units_that_are_only_replicated_are_compared_too(
    ranks: Ranks, options: dict[str, Any], what: str
) -> None:
    said = ranks(2).run(replicated, options, what)
    assert said[0] == said[1]
    assert {"frozen": "is frozen", "factor": "the divisor of gradients: 2"}[what] in said[0]


def unsharded_first(rank: int) -> str:
    """Gather another unit on each rank before any forward."""
    model = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
    mesh = new_mesh()
    for unit in model:
        fully_shard(unit, mesh)
    chosen: Any = model[rank]
    with pytest.raises(DisagreementError) as caught:
        chosen.unshard()
    return str(caught.value)


def test_units_that_are_gathered_before_the_first_forward_are_compared(ranks: Ranks) -> None:
    said = ranks(2).run(unsharded_first)
    assert said[0] == said[1]
    assert (
        "the number of the fully_shard call over these ranks: 0 on rank 0, 1 on rank 1" in said[0]
    )


class Compressed(TorchCollectives):
    """Sends half as many bits, so the received values are not exact."""

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Gather in bfloat16 plus noise."""
        noisy = [x.bfloat16().double() + 1e-6 * (1 + axis.index) for x in inputs]
        return super().all_gather(axis, noisy, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: Any = "sum",
    ) -> Work:
        """Reduce with noise."""
        noisy = [x + 1e-6 * (1 + axis.index) for x in inputs]
        return super().reduce_scatter(axis, noisy, outputs, op)


def compressed(rank: int, checked: bool) -> bool:
    inner: Any = Compressed()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("legal",))
    model = sharded(mesh, collectives=CheckedCollectives(inner) if checked else inner)
    after_a_good_step(model)
    run(model, inputs(rank), ALL)
    return all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("checked", [False, True])
def test_user_collectives_may_change_the_sent_values(ranks: Ranks, checked: bool) -> None:
    assert all(ranks(2).run(compressed, checked))


def saved_at_once(rank: int) -> str:
    """Mix up reductions in the last step on simulated streams, then ask for the state."""
    model = sharded(reshard_after_forward=False)
    after_a_good_step(model)
    with watched(Device(), model):
        model.blocks[1 + rank].set_requires_gradient_sync(False)
        run(model, inputs(rank), ALL)
        with pytest.raises(DisagreementError) as caught:
            model.state_dict()
    return str(caught.value)


@pytest.mark.nccl
def test_a_mix_up_in_the_last_step_is_not_saved(ranks: Ranks) -> None:
    said = ranks(2).run(saved_at_once)
    assert said[0] == said[1]
    assert "rank 0 reduced blocks.2" in said[0]


def left_out(rank: int, options: dict[str, Any]) -> str:
    """Leave blocks out on rank 1, so that a reduction of another size follows a mix-up."""
    model = sharded(**options)
    equal = (0, 1, 2)
    for _ in range(2):
        run(model, inputs(), equal)
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank), equal[: 3 - rank])
    return str(caught.value)


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("kept", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
def test_another_size_after_a_mix_up_does_not_end_the_process(
    ranks: Ranks, layout: str, kept: dict[str, Any]
) -> None:
    said = ranks(2).run(left_out, {"layout": layout, **kept})
    assert said[0] == said[1]
    assert "rank 0 " in said[0]
    assert "rank 1 " in said[0]


def reversed_blocks(rank: int) -> str:
    """Run blocks of the ragged layout in another order on rank 1."""
    model = sharded(layout="ragged", reshard_after_forward=True)
    for _ in range(2):
        run(model, inputs(), (0, 1, 2, 3))
    with pytest.raises(DisagreementError) as caught:
        run(model, inputs(rank), (0, 1, 2, 3)[:: 1 - 2 * rank])
    return str(caught.value)


@pytest.mark.gloo
def test_reversed_ragged_blocks_end_with_an_error_at_the_timeout(ranks: Ranks) -> None:
    said = ranks(2).run(reversed_blocks)
    assert said[0] == said[1]
    assert "rank 0 waited to " in said[0]
    assert "rank 1 waited to " in said[0]


def one_replica_has_another_model(rank: int) -> float:
    """Shard another model over the ranks of one replica only; return the worst gradient error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    if rank < 2:
        for _ in range(3):
            fully_shard(nn.Linear(WIDTH, WIDTH), mesh["part"])
    model = sharded(mesh)
    for _ in range(3):
        model.zero_grad()
        run(model, inputs(rank), ALL)
    expected = Blocks().double()
    for each in range(4):
        (expected(inputs(each), ALL).sum() / 4).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - e.grad).abs().max()) for p, e in pairs)


def test_replicas_train_if_their_ranks_shard_other_models_too(ranks: Ranks) -> None:
    for worst in ranks(4).run(one_replica_has_another_model):
        assert worst < 1e-12


def dropped_sums(rank: int) -> bool:
    """Drop gradients that wait for an all-reduce, then reduce. The result is zero."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    model = sharded(mesh)
    model.set_requires_all_reduce(False)
    run(model, inputs(rank), ALL)
    model.zero_grad()
    model.reduce_gradients()
    model.set_requires_all_reduce(True)
    run(model, inputs(rank), ALL)
    return all(p.grad is not None for p in model.parameters())


def test_sums_that_all_ranks_dropped_are_no_mix_up(ranks: Ranks) -> None:
    assert all(ranks(4).run(dropped_sums))


def kept_alive(rank: int) -> bool:
    """Run a new order without gradients, and drop the model; return whether a block is alive."""
    model = sharded(init_device_mesh("cpu", (2,), mesh_dim_names=("part",)))
    after_a_good_step(model)
    run(model, inputs(), (0, 1, 3), train=False)
    block = weakref.ref(model.blocks[3])
    del model
    gc.collect()
    return block() is not None


def test_a_process_group_keeps_no_model_alive(ranks: Ranks) -> None:
    assert not any(ranks(2).run(kept_alive))


def two_errors(rank: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"part_{next(_meshes)}",))
    order = _agreement.CollectiveOrder(Axis.of(mesh), dist.new_group([0, 1]))
    return str(order.conclude("first")), str(order.conclude("second"))


def test_a_second_mix_up_has_a_text_of_its_own(ranks: Ranks) -> None:
    assert ranks(2).run(two_errors) == [("first", "second")] * 2


def signatures(rank: int) -> list[tuple[object, ...]]:
    """Return the signatures of ragged reductions of one parameter, and of two halves."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    found = []
    for rows in ([64], [32, 32]):
        model = nn.Sequential(*(nn.Linear(64, n, bias=False) for n in rows))
        unit: Any = vars(fully_shard(model, mesh, layout="ragged"))[UNIT_ATTRIBUTE]
        found.append(unit.groups[0].reduction_signature(range(len(rows))))
    return found


def test_ragged_reductions_with_other_numbers_of_flags_are_unlike(ranks: Ranks) -> None:
    for one, other in ranks(2).run(signatures):
        assert one != other
