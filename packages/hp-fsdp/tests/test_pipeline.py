"""Pipeline stages of torch with modules that are sharded over another axis."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules, stage

from hp_fsdp import FSDPModule, UnsupportedError, fully_shard

from .models import WIDTH, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
MICROBATCHES, REPLICAS, DEPTH = 4, 2, 2
# How many stages a rank has, and whether backward is split in two.
SCHEDULES: dict[str, tuple[int, bool]] = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, True),
    "ScheduleZBVZeroBubble": (2, True),
}


class Layer(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 36)
        self.down = nn.Linear(36, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the output of the layers."""
        return cast(Tensor, x + self.down(torch.tanh(self.up(x))))


class Stage(nn.Sequential):
    """Two layers, and a second forward method."""

    def twice(self, x: Tensor) -> Tensor:
        """Return twice the output of the layers."""
        return cast(Tensor, 2 * self[1](self[0](x)))


def stages_of(number: int) -> Any:
    """Return the whole model with ``number`` stages of two layers."""
    return make(lambda: nn.Sequential(*(Stage(Layer(), Layer()) for _ in range(number))))


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def run_stages(
    rank: int, name: str, options: dict[str, Any], by_hand: bool = True
) -> list[Gradients]:
    """Return the gradients of this rank's stages in two steps of a schedule.

    Reduced ``by_hand``, or by the schedule, which takes the stages for torch's sharded modules.
    """
    per_rank, split = SCHEDULES[name]
    mesh = mesh_of((DEPTH, REPLICAS), ("pp", "dp"))
    at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    number = DEPTH * per_rank
    own = [at, number - 1 - at] if "ZBV" in name else list(range(at, number, DEPTH))
    whole = stages_of(number)
    for index in own:
        for module in (*whole[index], whole[index]):
            fully_shard(module, mesh["dp"], **options)
        if not by_hand:
            continue
        whole[index].set_requires_gradient_sync(False)
        whole[index].set_gradient_divide_factor(REPLICAS * MICROBATCHES, recurse=True)
        if split:  # the second half of a backward looks for the parameters of the first
            whole[index].set_reshard_after_forward(False)
            whole[index].set_reshard_after_backward(False)
    stages = [
        pipelining.PipelineStage(
            whole[index], index, number, torch.device("cpu"), group=mesh.get_group("pp")
        )
        for index in own
    ]
    cls: Any = getattr(schedules, name)
    given = stages if per_rank > 1 else stages[0]
    schedule = cls(given, MICROBATCHES, loss_fn=loss_of, scale_grads=not by_hand)
    seen = []
    for step in range(2):
        x, target = batch_of(step, replica)
        inputs = (x,) if 0 in own else ()
        last = {"target": target, "losses": []} if number - 1 in own else {}
        schedule.step(*inputs, **last)
        found: Gradients = {}
        for index in own:
            if by_hand:
                whole[index].reduce_gradients()
                for module in (*whole[index], whole[index]):
                    module.reshard()
            found |= {f"{index}.{key}": g for key, g in gradients(whole[index]).items()}
            whole[index].zero_grad()
        seen.append(found)
    return seen


def expected_of(number: int, step: int) -> Gradients:
    whole = stages_of(number)
    for replica in range(REPLICAS):
        x, target = batch_of(step, replica)
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (loss_of(whole(part), wanted) / MICROBATCHES / REPLICAS).backward()
    return gradients(whole)


OPTIONS: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
    "kept": {"reshard_after_forward": False},
    "all given up": {"reshard_after_forward": True},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(SCHEDULES, ["copy", "accumulate"]),
        ("Schedule1F1B", "ragged"),
        ("ScheduleZBVZeroBubble", "ragged"),
    ],
)
def test_gradients_of_a_schedule_equal_one_process(ranks: Ranks, name: str, options: str) -> None:
    number = DEPTH * SCHEDULES[name][0]
    expected = [expected_of(number, step) for step in range(2)]
    results = ranks(DEPTH * REPLICAS).run(run_stages, name, OPTIONS[options])
    seen: set[str] = set()
    for steps in results:
        for found, wanted in zip(steps, expected, strict=True):
            assert worst(found, {key: wanted[key] for key in found}) < 1e-12
            seen |= found.keys()
    assert seen == expected[0].keys()


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        if options == "copy" or name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble")
        else pytest.param(name, options, marks=pytest.mark.long)
        for name in SCHEDULES
        for options in OPTIONS
    ],
)
def test_a_schedule_reduces_the_gradients_of_its_stages(
    ranks: Ranks, name: str, options: str
) -> None:
    """Includes schedules that reshard between the forward and a backward in two halves."""
    number = DEPTH * SCHEDULES[name][0]
    expected = [expected_of(number, step) for step in range(2)]
    seen: set[str] = set()
    for steps in ranks(DEPTH * REPLICAS).run(run_stages, name, OPTIONS[options], False):
        for found, wanted in zip(steps, expected, strict=True):
            assert worst(found, {key: wanted[key] for key in found}) < 1e-12
            seen |= found.keys()
    assert seen == expected[0].keys()


def with_replaced_names(rank: int, name: str) -> list[Gradients]:
    """Run a schedule as if its modules had imported this package's names from torch's module."""
    with ExitStack() as stack:
        for module in (theirs, stage, schedules):
            for ours in (FSDPModule, fully_shard):
                if hasattr(module, ours.__name__):
                    stack.enter_context(mock.patch.object(module, ours.__name__, ours))
        return run_stages(rank, name, {}, by_hand=False)


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_schedules_take_this_packages_names_in_place_of_torchs(ranks: Ranks, name: str) -> None:
    expected = [expected_of(DEPTH * SCHEDULES[name][0], step) for step in range(2)]
    for steps in ranks(DEPTH * REPLICAS).run(with_replaced_names, name):
        for found, wanted in zip(steps, expected, strict=True):
            assert worst(found, {key: wanted[key] for key in found}) < 1e-12


def read_by_torch(rank: int) -> tuple[bool, bool, list[str], list[str], Gradients]:
    """Return the facts that torch's functions and trainers read from a sharded module."""
    model: Any = stages_of(1)[0]
    for module in (*model, model):
        fully_shard(module, mesh_of((2,), ("fsdp",)))
    texts = []
    for name in ("_comm_ctx", "_fsdp_params"):
        with pytest.raises(UnsupportedError) as info:
            getattr(theirs.fully_shard.state(model), name)  # type: ignore[attr-defined]
        texts.append(str(info.value))
    theirs.register_fsdp_forward_method(model, "twice")
    model.twice(batch_of(0, rank)[0]).pow(2).sum().backward()
    found = gradients(model)
    with pytest.raises(UnsupportedError):
        theirs.share_comm_ctx([model])
    own = [type(module).__name__ for module in model.modules()][:2]
    is_sharded = [isinstance(module, theirs.FSDPModule) for module in (model, model[0])]
    return all(is_sharded), isinstance(model[0].up, theirs.FSDPModule), own, texts, found


def test_callers_in_torch_work_or_raise(ranks: Ranks) -> None:
    plain = stages_of(1)[0]
    for replica in range(2):
        (plain(batch_of(0, replica)[0]).mul(2).pow(2).sum() / 2).backward()
    for sharded, leaf, own, texts, found in ranks(2).run(read_by_torch):
        assert sharded
        assert not leaf
        assert own == ["FSDPStage", "FSDPLayer"]
        assert all("this package's functions" in text for text in texts)
        assert worst(found, gradients(plain)) < 1e-12


def reduced_by_older_stages(rank: int) -> Gradients:
    """Make the calls of torch 2.11 and 2.12 stages around the backwards of two microbatches."""
    model: Any = stages_of(1)[0]
    for module in (*model, model):
        fully_shard(module, mesh_of((2,), ("fsdp",)))
    for step in range(2):
        loss = model(batch_of(step, rank)[0]).pow(2).sum()
        for last in (False, True) if step == 1 else (False,):
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            if not last:
                loss.backward()
    state = theirs.fully_shard.state(model)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        if each._fsdp_param_group:
            each._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()
    return gradients(model)


def test_pipeline_stages_of_older_versions_work(ranks: Ranks) -> None:
    plain = stages_of(1)[0]
    for step, replica in itertools.product(range(2), range(2)):
        (plain(batch_of(step, replica)[0]).pow(2).sum() / 2).backward()
    for found in ranks(2).run(reduced_by_older_stages):
        assert worst(found, gradients(plain)) < 1e-12
