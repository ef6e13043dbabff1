"""The style on real ranks: equal to one process, with torch's FSDP, recomputation and tensors."""

import copy
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Axis, RecordingCollectives
from hp_ep import AllToAll, ExpertParallel, Local, MoE

from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads

NAMES = ["router.weight", "experts.gate_up_proj", "experts.down_proj"]
SHARED = ["shared_experts.gate_up_proj", "shared_experts.down_proj"]
OPTIONS: dict[str, Any] = dict(shared=1, balance=0.2)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _tokens(counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    return list(torch.randn(sum(counts), 4, generator=generator, dtype=torch.float64).split(counts))


def _local(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.to_local() if isinstance(value, DTensor) else value


def _result(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    """Run one step and return the output and all gradients, of DTensors the local part."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (y**2).sum().backward()
    found = {name: _local(p.grad) for name, p in layer.named_parameters()}
    return dict(y=y.detach(), x=grads([leaf])[0], load=layer.router.load, **found)


def _check(
    results: list[dict[str, Tensor]], seed: int, counts: list[int], experts_from: int
) -> None:
    """Compare with one process; the first ``experts_from`` ranks hold all experts once."""
    layer, x = build_moe(seed, **OPTIONS), torch.cat(_tokens(counts)).requires_grad_()
    y = dense_moe(layer, x)
    ((y**2).sum() + dense_balance_loss(layer, x)).backward()
    assert_close(torch.cat([r["y"] for r in results]), y)
    assert_close(torch.cat([r["x"] for r in results]), x.grad)
    expected = {name: p.grad for name, p in layer.named_parameters()}
    assert sorted(expected) == sorted(NAMES + SHARED)
    for name, grad in expected.items():
        parts = [r[name] for r in results]
        if name.startswith("experts"):
            assert_close(torch.cat(parts[:experts_from]), grad)
        else:
            assert_close(torch.stack(parts).sum(0), grad)
    assert sum(int(r["load"].sum()) for r in results) == sum(counts) * layer.router.top_k


def _layer_step(rank: int, counts: list[int], recompute: bool) -> dict[str, Tensor]:
    size = len(counts)
    layer = build_moe(9, **OPTIONS)
    mesh = _mesh((size,), ("ep",))
    ExpertParallel(token_axes=mesh).apply(layer, mesh)
    assert isinstance(layer.dispatcher, AllToAll)
    if recompute:
        compute = layer.forward
        layer.forward = lambda x: checkpoint(  # type: ignore[assignment, method-assign, misc]
            compute, x, use_reentrant=False
        )
    return _result(layer, _tokens(counts)[rank])


@pytest.mark.nccl
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("counts", [[3, 5], [4, 0], [0, 0], [2, 7, 0, 1]], ids=str)
def test_a_layer_over_ranks_equals_one_process(
    ranks: Any, counts: list[int], recompute: bool
) -> None:
    results = ranks(len(counts)).run(_layer_step, counts, recompute)
    _check(results, 9, counts, len(counts))


def _one_rank_step(rank: int, counts: list[int]) -> dict[str, Tensor]:
    layer = build_moe(9, **OPTIONS)
    mesh = _mesh((2, 1), ("efsdp", "ep"))
    ExpertParallel(token_axes=[Axis.of(mesh, "efsdp")]).apply(layer, mesh)
    assert isinstance(layer.dispatcher, Local)
    return _result(layer, _tokens(counts)[rank])


def test_one_expert_rank_computes_at_home(ranks: Any) -> None:
    counts = [3, 2]
    results = ranks(2).run(_one_rank_step, counts)
    for name in NAMES[1:]:
        results[0][name] = results[0][name] + results[1][name]
    _check(results, 9, counts, 1)


def _fsdp_step(rank: int, counts: list[int]) -> dict[str, Tensor]:
    layer = build_moe(9, **OPTIONS)
    mesh = _mesh((2, 2), ("efsdp", "ep"))
    ExpertParallel(token_axes=mesh).apply(layer, mesh)
    experts = fully_shard(layer.experts, mesh=mesh["efsdp"])
    experts.set_gradient_divide_factor(1.0)
    experts.set_force_sum_reduction_for_comms(True)
    result = _result(layer, _tokens(counts)[rank])
    for name in NAMES[1:]:
        grad = layer.get_parameter(name).grad
        assert isinstance(grad, DTensor)
        result[name] = grad.full_tensor()
    return result


def test_torch_fsdp_shards_and_gathers_the_local_experts(ranks: Any) -> None:
    counts = [2, 0, 4, 3]
    results = ranks(4).run(_fsdp_step, counts)
    for result in results[1:]:
        for name in NAMES[1:]:
            assert torch.equal(result[name], results[0][name])
    _check(results, 9, counts, 1)


def _experts_step(rank: int, counts: list[int]) -> list[Tensor]:
    layer = build_moe(9)
    mesh = _mesh((2,), ("ep",))
    ExpertParallel().apply(layer.experts, mesh)
    assert isinstance(layer.dispatcher, Local)
    leaf = _tokens(counts)[rank].requires_grad_()
    y = layer(leaf)
    (y**2).sum().backward()
    return [y.detach(), *grads([leaf]), *(_local(p.grad) for p in layer.experts.parameters())]


@pytest.mark.parametrize("counts", [[3, 5], [4, 0], [0, 0]], ids=str)
def test_wrapped_experts_take_rows_and_counts_of_all_experts(ranks: Any, counts: list[int]) -> None:
    results = ranks(2).run(_experts_step, counts)
    layer, x = build_moe(9), torch.cat(_tokens(counts)).requires_grad_()
    y = dense_moe(layer, x)
    (y**2).sum().backward()
    expected = [y.detach(), *grads([x, *layer.experts.parameters()])]
    for i, whole in enumerate(expected):
        assert_close(torch.cat([r[i] for r in results]), whole)


def _parallelized(rank: int) -> list[str]:
    model = nn.ModuleDict({"first": build_moe(1), "second": build_moe(2)})
    model["first"].get_submodule("experts").get_parameter("down_proj").requires_grad_(False)
    plan: dict[str, ParallelStyle] = {"first": ExpertParallel(), "second.experts": ExpertParallel()}
    parallelize_module(model, _mesh((2,), ("ep",)), plan)
    found = []
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            assert p.placements == (Shard(0),)
            assert p.device_mesh.mesh_dim_names == ("ep",)
            whole = build_moe(1 if name.startswith("first") else 2).get_parameter(
                name.partition(".")[2]
            )
            assert p.shape == whole.shape
            assert torch.equal(p.to_local(), whole.chunk(2)[rank])
            found.append(f"{name} {p.requires_grad}")
    return found


def test_parallelize_module_takes_the_style_and_frozen_parameters_stay_frozen(ranks: Any) -> None:
    expected = [
        f"{layer}.experts.{name} {layer != 'first' or name != 'down_proj'}"
        for layer in ("first", "second")
        for name in ("gate_up_proj", "down_proj")
    ]
    assert ranks(2).run(_parallelized) == [expected] * 2


def _recorded(rank: int, counts: list[int]) -> tuple[dict[str, tuple[int, int]], int]:
    layer, recording = build_moe(9, **OPTIONS), RecordingCollectives()
    mesh = _mesh((2,), ("ep",))
    with CommDebugMode() as made:  # sees every collective that torch makes
        ExpertParallel(token_axes=mesh, collectives=recording).apply(layer, mesh)
        assert recording.by_call == {}  # the style itself communicates nothing
        _result(layer, _tokens(counts)[rank])
    calls = {name: (t.calls, t.bytes) for (_, name), t in recording.by_call.items()}
    return calls, made.get_total_counts()


def test_every_collective_goes_through_the_given_collectives(ranks: Any) -> None:
    for calls, made in ranks(2).run(_recorded, [3, 5]):
        assert made == sum(number for number, _ in calls.values())
        # Counts; tokens, weights and results there and back.
        assert calls["all_to_all"][0] == 1 + 2 * 3
        # Four counts and the number of tokens, summed: half of it twice.
        assert calls["all_reduce"] == (1, 5 * 8)
        assert sorted(calls) == ["all_reduce", "all_to_all"]


def _sequence_step(rank: int, counts: list[int]) -> dict[str, Tensor]:
    layer = build_moe(9, **OPTIONS)
    mesh = _mesh((2,), ("tp",))
    ExpertParallel(token_axes=mesh, sequence_mesh=mesh).apply(layer, mesh)
    result = _result(layer, _tokens(counts)[rank])
    for name in ["router.weight", *SHARED]:
        p = layer.get_parameter(name)
        assert isinstance(p, DTensor)
        assert p.placements == (Replicate(),)
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements[0].is_partial()
        result[name + " total"] = p.grad.full_tensor()
    return result


def test_weights_shared_by_a_split_sequence_have_partial_gradients(ranks: Any) -> None:
    counts = [3, 4]
    results = ranks(2).run(_sequence_step, counts)
    _check(results, 9, counts, 2)
    for name in ["router.weight", *SHARED]:
        assert_close(results[0][name + " total"], results[0][name] + results[1][name])


def _copied_experts(rank: int) -> list[Tensor]:
    experts = ExpertParallel().apply(build_moe(9).experts, _mesh((2,), ("ep",)))
    twin = copy.deepcopy(experts)
    rows, counts = torch.ones(4, 4, dtype=torch.float64), torch.tensor([1, 0, 2, 1])
    before = experts(rows, counts)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    result: Tensor = twin(rows, counts)
    result.sum().backward()
    assert all(p.grad is None for p in experts.parameters())
    assert len(grads(list(twin.parameters()))) == 2
    return [before.detach(), experts(rows, counts).detach(), result.detach()]


def test_a_deep_copy_of_experts_computes_with_its_own_weights(ranks: Any) -> None:
    for before, after, twin in ranks(2).run(_copied_experts):
        assert before.abs().min() > 0
        assert torch.equal(before, after)
        assert twin.count_nonzero() == 0
