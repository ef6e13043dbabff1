"""Experts that move while they are trained learn what they would have learnt at home."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_dtensor import Axis, RecordingCollectives, TorchCollectives
from hp_ep import (
    AllToAll,
    BaseExpertParallel,
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    MoE,
    Placement,
    collect_loads,
    migrate_experts,
    parallelize_experts,
    plan_placement,
)

from .reference import assert_close, build_moe

STEPS = 6
TOKENS = [5, 3]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _batch(step: int, parts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(parts), 4, generator=generator, dtype=torch.float64)
    x[:, step % 4] += 2.0  # another direction, and so other experts, every step
    return list(x.split(parts))


def _optimizer(kind: str, layer: MoE) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    eps = {"adamw": 1e-8, "large eps": 1e-3}[kind]
    return torch.optim.AdamW(layer.parameters(), lr=1e-2, eps=eps)


# Where a gradient is zero but for rounding, 1e-14 here, a step of Adam is lr / eps times as long.
GROWTH = {"sgd": 1.0, "large eps": 1.0, "adamw": STEPS * 1e-2 / 1e-8 * 1e-2}


def _learn(
    layer: MoE, optimizer: torch.optim.Optimizer, x: Tensor, axes: Sequence[Axis] = ()
) -> None:
    (layer(x.clone()) ** 2).sum().backward()
    gradient = layer.router.weight.grad
    assert gradient is not None
    for axis in axes:  # what data parallelism does: a rank's router saw its own tokens
        (gradient,) = TorchCollectives().all_reduce(axis, [gradient]).wait()
    layer.router.weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def _logical(layer: MoE, placement: Placement) -> dict[str, Tensor]:
    """Return the weights of all experts in order; replicas must have one value."""
    found = {"router": layer.router.weight.detach().clone()}
    for name, p in layer.experts.named_parameters():
        assert isinstance(p, DTensor)
        slots = p.full_tensor().detach()
        first = [s[0] for s in placement.slots_of]
        found[name] = slots[first]
        assert torch.equal(slots, found[name][list(placement.experts)])
    return found


def _train(
    rank: int, size: int, etp: int, replicas: int, moves: bool, efsdp: int, kind: str
) -> tuple[dict[str, Tensor], int]:
    ep = size // etp // efsdp
    mesh = _mesh((efsdp, ep, etp), ("efsdp", "ep", "etp"))
    layer = build_moe(3, hidden=8, experts=8)
    load = [1.0] * 8
    placement = plan_placement(load, ep, num_replicas=replicas)
    if not replicas:
        placement = Placement.contiguous(8, ep)
    inner = AllToAll(mesh, len(placement.experts))  # keeps the order of an expert's rows
    options: dict[str, Any] = dict(placement=placement, token_axes=mesh["efsdp", "ep"])
    style: BaseExpertParallel = ExpertParallel(inner, **options)
    if etp > 1:
        style = ExpertTensorParallel(inner, **options)
    style.apply(layer, mesh["ep"] if etp == 1 else mesh["ep", "etp"])
    if efsdp > 1:
        unit = fully_shard(layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer = _optimizer(kind, layer)
    axes = [Axis.of(mesh, name) for name in ("efsdp", "ep")]
    moved = 0
    parts = TOKENS * (efsdp * ep // 2)
    place = mesh.get_local_rank("efsdp") * ep + mesh.get_local_rank("ep")
    for step in range(STEPS):
        _learn(layer, optimizer, _batch(step, parts)[place], axes)
        loads = collect_loads(layer)["router"].tolist()
        if moves:
            near = placement if step % 2 else None
            placement = plan_placement(loads, ep, num_replicas=replicas, near=near)
            moved += migrate_experts(layer, placement, optimizer).moved
    return _logical(layer, placement), moved


def _both(rank: int, size: int, etp: int, replicas: int, efsdp: int, kind: str) -> list[Any]:
    return [_train(rank, size, etp, replicas, moves, efsdp, kind) for moves in (False, True)]


@pytest.mark.nccl
@pytest.mark.parametrize("kind", ["sgd", "large eps", "adamw"])
@pytest.mark.parametrize(
    ("size", "etp", "replicas", "efsdp"),
    [
        (2, 1, 0, 1),
        (4, 1, 0, 1),
        (4, 2, 0, 1),
        (4, 1, 4, 1),
        (4, 2, 2, 1),
        (4, 1, 0, 2),
        (4, 1, 2, 2),
    ],
)
def test_training_with_migration_equals_training_without(
    ranks: Any, size: int, etp: int, replicas: int, efsdp: int, kind: str
) -> None:
    alone = build_moe(3, hidden=8, experts=8)
    start = alone.router.weight.detach().clone()
    optimizer = _optimizer(kind, alone)
    for step in range(STEPS):
        _learn(alone, optimizer, torch.cat(_batch(step, TOKENS * (size // etp // 2))))
    for (still, none), (moving, moved) in ranks(size).run(_both, size, etp, replicas, efsdp, kind):
        assert none == 0
        assert moved > 0
        assert not torch.equal(alone.router.weight, start)
        learnt = {"router": alone.router.weight, **dict(alone.experts.named_parameters())}
        assert still.keys() == moving.keys() == learnt.keys()
        for name, p in learnt.items():
            if replicas:  # the parts of an expert's gradient are added in another order
                assert_close(moving[name], still[name], 1e-12 * GROWTH[kind])
            else:
                assert torch.equal(moving[name], still[name])
            assert_close(moving[name], p.detach(), 1e-12 * GROWTH[kind])


def _recorded(rank: int) -> list[Any]:
    mesh, record = _mesh((2,), ("ep",)), RecordingCollectives()
    layer = build_moe(3, experts=4)
    old = Placement.contiguous(4, 2)
    ExpertParallel(placement=old, collectives=record).apply(layer, mesh)
    optimizer = _optimizer("adamw", layer)
    _learn(layer, optimizer, _batch(0, TOKENS)[rank])
    record.reset()
    same = [id(p) for p in layer.experts.parameters()]
    new = Placement(num_ranks=2, num_experts=4, experts=(0, 3, 2, 1))
    moves = migrate_experts(layer, new, optimizer)
    assert same == [id(p) for p in layer.experts.parameters()]
    traffic = record.by_call[("ep", "all_to_all")]
    texts = []
    wide = Placement(num_ranks=2, num_experts=4, experts=(0, 1, 2, 3, 0, 1))
    plain = build_moe(3)
    sharded = build_moe(3, experts=4)
    grid = _mesh((2, 1), ("dp", "ep"))
    one = Placement.contiguous(4, 1)
    ExpertParallel(placement=one).apply(sharded, grid["ep"])
    fully_shard(sharded.experts, mesh=grid["dp"])
    cases: list[Callable[[], object]] = [
        lambda: migrate_experts(layer, wide),
        lambda: migrate_experts(plain, old),
        lambda: migrate_experts(sharded, one),
        lambda: ExpertParallel(placement=wide).apply(build_moe(3), grid["ep"]),
    ]
    for case in cases:
        with pytest.raises(ExpertConfigError) as error:
            case()
        texts.append(str(error.value))
    return [moves.moved, moves.bytes(3 * 24 * 8 * 3), traffic.calls, traffic.bytes, texts]


def test_bytes_are_those_of_the_plan_and_wrong_moves_are_refused(ranks: Any) -> None:
    for moved, planned, calls, received, texts in ranks(2).run(_recorded):
        assert moved == 2  # experts 3 and 1 change places
        assert calls == 6  # two weights, and the two moments of each
        assert 2 * received == planned
        starts = [
            "a placement on 6 slots cannot take the place of one on 4; use as many replicas",
            "the experts have no placement",
            "gate_up_proj has shape (4, 2, 6, 4) and placements (Shard(dim=0), Shard(dim=0)); ",
            "a placement of 4 experts on 2 ranks does not fit 4 experts on 1 ranks",
        ]
        for text, start in zip(texts, starts, strict=True):
            assert text.startswith(start), text


def _differing(rank: int) -> list[str]:
    """Give rank 1 other placements, with as many slots and with others."""
    mesh, grid = _mesh((4,), ("ep",)), _mesh((2, 2), ("ep", "etp"))
    here = Placement.contiguous(8, 4)
    swapped = Placement(num_ranks=4, num_experts=8, experts=(1, 0, 2, 3, 4, 5, 6, 7))
    wide = Placement(num_ranks=4, num_experts=8, experts=(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3))
    few = Placement.contiguous(4, 4)
    half = Placement.contiguous(8, 2)
    back = Placement(num_ranks=2, num_experts=8, experts=(4, 5, 6, 7, 0, 1, 2, 3))
    layer = build_moe(3, experts=8)
    ExpertParallel(placement=here).apply(layer, mesh)
    fresh = build_moe(3, hidden=8, experts=8)
    cut = build_moe(3, hidden=8, experts=8)
    ExpertTensorParallel(placement=half).apply(cut, grid)
    cases: list[Callable[[], object]] = [
        *(
            lambda other=other: ExpertParallel(placement=other if rank == 1 else here).apply(
                fresh, mesh
            )
            for other in (swapped, wide, few)
        ),
        lambda: parallelize_experts(
            torch.nn.Sequential(fresh), mesh, ExpertParallel(placement=wide if rank == 1 else here)
        ),
        lambda: ExpertTensorParallel(placement=back if rank == 1 else half).apply(fresh, grid),
        *(
            lambda other=other: migrate_experts(layer, other if rank == 1 else here)
            for other in (swapped, wide, few)
        ),
        lambda: migrate_experts(cut, back if rank == 1 else half),
        lambda: migrate_experts(layer, [0, 1] if rank == 1 else here),  # type: ignore[arg-type]
    ]
    texts = []
    for case in cases:
        with pytest.raises(ExpertConfigError) as error:
            case()
        texts.append(str(error.value))
    assert not isinstance(fresh.experts.gate_up_proj, DTensor)
    for changed, placement in ((layer, here), (cut, half)):
        assert changed.experts.replicas is not None
        assert changed.experts.replicas.placement == placement
    return texts


def test_placements_that_differ_between_ranks_are_refused_by_all(ranks: Any) -> None:
    results = ranks(4).run(_differing)
    assert results == [results[0]] * 4
    for text in results[0]:
        assert text.startswith("2 placements were given, each by the ranks in one of these lists:")
        assert ": [0, 2, 3]; [1]; all ranks must give the same" in text


def _unmovable(rank: int) -> list[str]:
    mesh = _mesh((4,), ("ep",))
    away = Placement(num_ranks=4, num_experts=8, experts=(7, 6, 5, 4, 3, 2, 1, 0))
    layer = build_moe(3, hidden=8, experts=8)
    ExpertParallel(placement=Placement.contiguous(8, 4), token_axes=mesh).apply(layer, mesh)
    experts = [*layer.experts.parameters()]
    trained = torch.optim.AdamW(experts)
    others = torch.optim.AdamW([layer.router.weight])
    (layer(_batch(0, [5, 3, 1, 2])[rank]) ** 2).sum().backward()
    trained.step()
    before = [p.to_local().clone() for p in experts if isinstance(p, DTensor)]
    if rank == 1:
        layer.zero_grad()
    texts = []
    for optimizer in (others, trained):
        with pytest.raises(ExpertConfigError) as error:
            migrate_experts(layer, away, optimizer)
        texts.append(str(error.value))
    after = [p.to_local() for p in experts if isinstance(p, DTensor)]
    assert all(map(torch.equal, before, after))
    layer.zero_grad()
    migrate_experts(layer, away, trained)
    return texts


def test_what_would_stay_or_move_on_some_ranks_alone_is_refused_by_all(ranks: Any) -> None:
    found = ranks(4).run(_unmovable)
    assert found == [found[0]] * 4
    assert found[0][0].startswith("the optimizer has no gate_up_proj of these experts")
    assert found[0][1].startswith("other tensors would move on the ranks in each of these lists: ")
    assert "[0, 2, 3]; [1]" in found[0][1]


def _unlike(rank: int) -> list[str]:
    """Migrate with optimizers that do not know the experts, and tensors that rank 1 alone has."""
    mesh, record = _mesh((2,), ("ep",)), RecordingCollectives()
    layer = build_moe(3, experts=4)
    ExpertParallel(placement=Placement.contiguous(4, 2), collectives=record).apply(layer, mesh)
    fresh, trained = _optimizer("adamw", layer), _optimizer("adamw", layer)
    rest = torch.optim.AdamW([layer.router.weight, layer.experts.down_proj])
    _learn(layer, trained, _batch(0, TOKENS)[rank])
    before = [p.full_tensor() for p in layer.experts.parameters() if isinstance(p, DTensor)]
    new = Placement(num_ranks=2, num_experts=4, experts=(3, 2, 1, 0))
    record.reset()

    def migrate(first: torch.optim.Optimizer | None, second: torch.optim.Optimizer | None) -> str:
        with pytest.raises(ExpertConfigError) as error:
            migrate_experts(layer, new, second if rank else first)
        return str(error.value)

    texts = [migrate(rest, rest), migrate(rest, None), migrate(None, trained)]
    texts.append(migrate(trained, fresh))
    if rank:
        layer.experts.down_proj.grad = torch.zeros_like(layer.experts.down_proj)
    texts.append(migrate(None, None))
    assert ("ep", "all_to_all") not in record.by_call
    after = [p.full_tensor() for p in layer.experts.parameters() if isinstance(p, DTensor)]
    assert all(map(torch.equal, after, before))
    return texts


def test_tensors_that_differ_between_ranks_or_would_stay_behind_are_refused(ranks: Any) -> None:
    first, second = ranks(2).run(_unlike)
    assert first == second
    assert first[0].startswith("the optimizer has no gate_up_proj of these experts")
    for text in first[1:]:
        assert text.startswith("other tensors would move on the ranks in each of these lists")
        assert ": [0]; [1]; " in text
