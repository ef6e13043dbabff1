"""Clipped gradients of replicated experts are those of one process."""

import copy
import math
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_dtensor import Axis, RecordingCollectives, clip_grad_norm_
from hp_ep import ExpertParallel, MoE, Placement, migrate_experts

from .reference import assert_close, build_moe

PLACEMENTS = {
    "none": None,
    "home": Placement.contiguous(8, 2),
    "copies": Placement(num_ranks=2, num_experts=8, experts=(7, 6, 5, 4, 0, 1, 3, 2, 1, 0, 4, 7)),
    # Rank 1 has replicas alone: all that counts is on rank 0.
    "again": Placement(num_ranks=2, num_experts=8, experts=(*range(8), *range(8))),
}


def _mesh(efsdp: int) -> DeviceMesh:
    return cached(
        ("efsdp", efsdp),
        lambda: init_device_mesh("cpu", (efsdp, 2), mesh_dim_names=("efsdp", "ep")),
    )


def _tokens(parts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(parts)
    x = torch.randn(6 * parts, 4, generator=generator, dtype=torch.float64)
    return list(x.split(6))


def _build(kind: str, efsdp: int, dim: int) -> tuple[MoE, DeviceMesh]:
    mesh, layer = _mesh(efsdp), build_moe(3, experts=8, shared=1)
    ExpertParallel(placement=PLACEMENTS[kind], token_axes=mesh).apply(layer, mesh["ep"])
    if efsdp > 1:
        unit = fully_shard(
            layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim)
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return layer, mesh


def _clipped(
    rank: int, kind: str, efsdp: int, order: float, limit: float, dim: int
) -> dict[str, Tensor]:
    layer, mesh = _build(kind, efsdp, dim)
    (layer(_tokens(2 * efsdp)[rank]) ** 2).sum().backward()
    record = RecordingCollectives()
    for p in layer.parameters():
        if not isinstance(p, DTensor):  # what data parallelism does
            for axis in (Axis.of(mesh, 0), Axis.of(mesh, 1)):
                assert p.grad is not None
                (p.grad,) = record.all_reduce(axis, [p.grad]).wait()
    norm = clip_grad_norm_(layer.parameters(), limit, order)
    found = {"norm": norm}
    placement = PLACEMENTS[kind]
    for name, p in layer.named_parameters():
        grad = p.grad
        assert grad is not None
        found[name] = grad
        if isinstance(grad, DTensor):
            found[name] = slots = grad.full_tensor()
            if placement is not None:
                found[name] = slots[[s[0] for s in placement.slots_of]]
                assert torch.equal(slots, found[name][list(placement.experts)])
    return found


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("kind", "efsdp", "order", "dim"),
    [
        ("none", 1, 2.0, 1),
        ("home", 1, 2.0, 1),
        ("copies", 1, 2.0, 1),
        ("copies", 1, 1.0, 1),
        ("copies", 1, math.inf, 1),
        ("copies", 2, 2.0, 1),
        ("again", 1, 2.0, 1),
        ("copies", 2, 2.0, 0),  # replicas on both sides of the cut
        ("again", 2, math.inf, 0),
    ],
)
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_the_norm_counts_each_expert_once(
    ranks: Any, kind: str, efsdp: int, order: float, dim: int, limit: float
) -> None:
    layer = build_moe(3, experts=8, shared=1)
    (layer(torch.cat(_tokens(2 * efsdp))) ** 2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), limit, order)
    assert 0.5 < norm < 1e9
    for found in ranks(2 * efsdp).run(_clipped, kind, efsdp, order, limit, dim):
        assert_close(found.pop("norm"), norm)
        for name, p in layer.named_parameters():
            assert_close(found[name], p.grad)


def _marked(rank: int) -> dict[str, list[tuple[int, ...]]]:
    mesh, placement = _mesh(1), PLACEMENTS["copies"]
    assert placement is not None
    layer, found = build_moe(3, experts=8), {}

    def note(when: str) -> None:
        found[when] = [getattr(p, "repeated_rows", ()) for p in layer.experts.parameters()]

    note("whole")
    ExpertParallel(placement=placement).apply(layer, mesh["ep"])
    note("placed")
    layer.float()
    note("cast")
    layer = copy.deepcopy(layer)
    note("copied")
    layer.load_state_dict(layer.state_dict(), assign=True)
    note("assigned")
    layer.to(device="meta")
    layer.to_empty(device="cpu")
    note("new memory")
    fully_shard(layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
    note("sharded")
    turned = Placement(num_ranks=2, num_experts=8, experts=placement.experts[::-1])
    migrate_experts(layer, turned)
    note("migrated")
    return found


def test_parameters_say_their_replicas_whoever_makes_them(ranks: Any) -> None:
    for found in ranks(2).run(_marked):
        assert found.pop("whole") == [(), ()]
        assert found.pop("migrated") == [(6, 7, 8, 11)] * 2
        assert len(found) == 6
        assert all(rows == [(8, 9, 10, 11)] * 2 for rows in found.values())


def test_without_ranks_it_clips_as_torch_does() -> None:
    layers = [build_moe(3), build_moe(3)]
    for layer in layers:
        (layer(_tokens(1)[0]) ** 2).sum().backward()
    norm = clip_grad_norm_(layers[0].parameters(), 0.25)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(layers[1].parameters(), 0.25))
    for p, q in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert_close(p.grad, q.grad)
