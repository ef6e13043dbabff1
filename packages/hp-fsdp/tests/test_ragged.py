"""The ragged layout: one buffer in equal shares, parameters as ragged tensors."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from hp_dtensor import RaggedTensor, RecordingCollectives, clip_grad_norm_
from hp_fsdp import ParameterError, ShardingError, fully_shard, sharded_optimizer
from hp_fsdp._tags import TAG_FLAGS

from .models import Gradients, Net, loss_of, make, mesh_of, reference, shard, tokens, worst
from .test_step import Odd

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        full: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return torch.as_tensor(full).clone()


def gradients(model: nn.Module) -> Gradients:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> Gradients:
    return {name: whole(p) for name, p in model.named_parameters()}


def row(parameter: nn.Parameter) -> int:
    return math.prod(parameter.shape[1:])


def stepped(rank: int, shape: tuple[int, ...], rows: bool, reshard: Any) -> dict[str, Any]:
    mesh = mesh_of(shape, NAMES[len(shape)])
    plain = dict(make(Net).named_parameters())
    model: Any = shard(
        make(Net),
        mesh,
        layout="ragged",
        granularity=row if rows else None,
        reshard_after_forward=reshard,
    )
    same = all(torch.equal(whole(p), plain[name]) for name, p in model.named_parameters())
    kinds = {type(p.data) for p in model.parameters()}
    seen = []
    for _ in range(2):
        with model.no_sync():
            loss_of(model, tokens(rank, 1)).backward()
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    plan = model.plan_report()
    return {
        "same": same,
        "ragged": kinds == {RaggedTensor} or shape[-1] == 1,
        "steps": seen,
        "padding": max(group.padding_bytes for group in plan.groups),
    }


@pytest.mark.nccl
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("shape", "reshard"), [((1,), None), ((2,), None), ((4,), True), ((4,), 2), ((2, 2), False)]
)
def test_gradients_equal_one_process(
    ranks: Ranks, shape: tuple[int, ...], rows: bool, reshard: Any
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world, steps=(0, 1))
    for found in ranks(world).run(stepped, shape, rows, reshard):
        assert found["same"]
        assert found["ragged"]
        assert [worst(step, expected) < 1e-12 for step in found["steps"]] == [True, True]
        if not rows and shape[-1] > 1:
            assert found["padding"] < 16 * shape[-1]


def odd_step(rank: int) -> tuple[Gradients, bool]:
    model: Any = fully_shard(make(Odd), mesh_of((4,), NAMES[1]), layout="ragged")
    loss_of(model, tokens(rank)).backward()
    return gradients(model), model.first.weight is model.last.weight


def test_unused_frozen_tied_and_empty_parameters(ranks: Ranks) -> None:
    expected = reference(4, Odd)
    del expected["frozen"], expected["empty"], expected["unused"]
    for found, tied in ranks(4).run(odd_step):
        assert tied
        assert worst({k: v for k, v in found.items() if v.numel()}, expected) < 1e-12


def traffic(rank: int) -> tuple[dict[str, int], int, int, int]:
    record = RecordingCollectives()
    model: Any = fully_shard(
        make(Net), mesh_of((4,), NAMES[1]), layout="ragged", collectives=record
    )
    loss_of(model, tokens(rank)).backward()
    group = model.plan_report().groups[0]
    counts = {name: t.bytes for (_, name), t in record.by_call.items()}
    # One flag per parameter (whether a rank used it) and the flags of the unit's tag.
    flags = 8 * (len(group.parameters) + TAG_FLAGS)
    return counts, group.shard_bytes, flags, record.by_call["fsdp", "all_gather"].calls


def test_communicated_bytes_equal_the_shares(ranks: Ranks) -> None:
    for counts, share, flags, gathers in ranks(4).run(traffic):
        assert counts == {"all_gather": 3 * share, "reduce_scatter": 3 * (share + flags)}
        assert gathers == 1


def trained(rank: int, kind: str) -> Gradients:
    """Train in mixed precision with clipping and one of three optimizers."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mp_policy": policy}
    if kind != "exact":
        options["layout"] = "ragged"
    model: Any = make(Net, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh_of((2,), NAMES[1]), **options)
    fully_shard(model, mesh_of((2,), NAMES[1]), **options)
    optimizer: Any = (
        sharded_optimizer(torch.optim.AdamW, model, lr=0.01)
        if kind == "flat"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def test_optimizers_equal_the_exact_layout(ranks: Ranks) -> None:
    expected = ranks(2).run(trained, "exact")[0]
    for kind in ("single", "flat"):
        for found in ranks(2).run(trained, kind):
            assert worst(found, expected) < 1e-6


def saved(rank: int, layout: Any, world: int, folder: str) -> Gradients:
    model: Any = shard(make(Net), mesh_of((world,), NAMES[1]), layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank)).backward()
    optimizer.step()
    names = {p: name for name, p in model.named_parameters()}
    moments = {f"{names[p]}.exp_avg": s["exp_avg"] for p, s in optimizer.state.items()}
    state_dict_saver.save({**model.state_dict(), **moments}, checkpoint_id=folder)
    dist.barrier()
    return {name: whole(value) for name, value in {**model.state_dict(), **moments}.items()}


def loaded(rank: int, layout: Any, world: int, folder: str) -> Gradients:
    torch.manual_seed(99)
    model: Any = shard(Net().double(), mesh_of((world,), NAMES[1]), layout=layout)
    moments = {f"{n}.exp_avg": torch.zeros_like(p) for n, p in model.named_parameters()}
    state = {**model.state_dict(), **moments}
    state_dict_loader.load(state, checkpoint_id=folder)
    loss_of(model, tokens(rank)).backward()
    return {name: whole(value) for name, value in state.items()}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("ragged", 4), ("ragged", 2)),
        (("ragged", 2), ("exact", 4)),
        (("exact", 4), ("ragged", 2)),
    ],
    ids=str,
)
def test_checkpoints_go_between_layouts_and_numbers_of_ranks(
    ranks: Ranks, source: tuple[str, int], target: tuple[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved")
        expected = ranks(source[1]).run(saved, *source, path)[0]
        results = ranks(target[1]).run(loaded, *target, path)
    for found in results:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Experts(nn.Module):
    """Six stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(6, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Run all of them one after another."""
        for each in self.stacked:
            x = x + torch.tanh(x @ each)
        return x


def whole_experts(rank: int) -> tuple[tuple[int, ...], float]:
    torch.manual_seed(0)
    model: Any = Experts()
    fully_shard(model, mesh_of((4,), NAMES[1]), layout="ragged", granularity=16)
    torch.manual_seed(0)
    plain = Experts()
    for each in (model, plain):
        each(torch.ones(2, 4)).pow(2).sum().backward()
    with torch.no_grad():
        part = tuple(model.stacked.to_local().shape)
    return part, worst(gradients(model), {"stacked": plain.stacked.grad.clone()})  # type: ignore[union-attr]


def test_atoms_stay_on_one_rank(ranks: Ranks) -> None:
    results = ranks(4).run(whole_experts)
    assert [part for part, _ in results] == [(2, 4, 4), (2, 4, 4), (2, 4, 4), (0, 4, 4)]
    assert all(difference < 1e-5 for _, difference in results)


def refused(rank: int) -> list[str]:
    said = []
    mesh = mesh_of((2,), NAMES[1])
    cases: list[dict[str, Any]] = [
        {"layout": "round"},
        {"granularity": 2},
        {"layout": "ragged", "granularity": 0},
        {"layout": "ragged", "granularity": lambda _: 1.5},
        {"layout": "ragged", "shard_placement_fn": lambda _: Shard(1)},
    ]
    for options in cases:
        try:
            fully_shard(nn.Linear(2, 2), mesh, **options)
        except (ParameterError, ShardingError) as error:
            said.append(str(error))
    return said


def test_unsupported_uses_of_the_ragged_layout_raise(ranks: Ranks) -> None:
    for said in ranks(2).run(refused):
        assert said[0] == "layout is 'round'; allowed: 'exact' and 'ragged'"
        assert said[1].startswith("granularity has a meaning in the ragged layout only")
        assert said[2].startswith("granularity gives 0 for weight")
        assert said[3].startswith("granularity gives 1.5 for weight")
        assert said[4].startswith("shard_placement_fn has no meaning")


def full_state(rank: int, offload: bool) -> dict[str, Tensor]:
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), layout="ragged")
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state: Any = get_model_state_dict(model, options=options)
    return dict(state)


@pytest.mark.parametrize("offload", [False, True])
def test_a_full_state_dict_is_that_of_the_plain_model(ranks: Ranks, offload: bool) -> None:
    plain = make(Net).state_dict()
    for rank, state in enumerate(ranks(2).run(full_state, offload)):
        if offload and rank:
            assert state == {}
            continue
        assert state.keys() == plain.keys()
        for name, tensor in state.items():
            assert type(tensor) is Tensor
            assert torch.equal(tensor, plain[name])
