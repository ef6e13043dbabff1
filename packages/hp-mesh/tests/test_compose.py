"""Torch's FSDP, tensor parallel, DTensor and checkpoints take these meshes and combine them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_mesh import ParallelDims, ParallelMesh

from .fakes import fake_world
from .strategies import dims

Pool = Callable[[int], RankPool]
# The first of these imports FSDP, DTensor and the compiler on four ranks at once, which takes 15 s
# on two idle cores and minutes on busy ones.
INNER_TP = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
OUTER_TP = ("tp", "pp", "cp", "dp_shard", "dp_replicate", "ep")


def full(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def dense_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def samples() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def parallelize(model: nn.Module, mesh: ParallelMesh) -> nn.Module:
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_replicate", "fsdp"])
    return model


def train_on_two_views(rank: int, dims: ParallelDims) -> list[Tensor]:
    mesh = cached(("compose", dims), dims.build_mesh)
    model = dense_model(0)
    tp = mesh.view("base")["tp"]
    parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh.view("dense")["dp_replicate", "fsdp"])
    batch = mesh["batch"]
    model(samples().chunk(batch.size())[batch.get_local_rank()]).square().mean().backward()
    return [full(parameter.grad) for parameter in model.parameters()]


def test_fsdp_on_the_dense_view_combines_with_tensor_parallel_on_the_base_view(
    ranks: Pool,
) -> None:
    reference = dense_model(0)
    reference(samples()).square().mean().backward()
    for gradients in ranks(4).run(train_on_two_views, ParallelDims(tp=2)):
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


def train_dense(rank: int, dims: ParallelDims, folder: str) -> tuple[list[Tensor], bool]:
    mesh = cached(("compose", dims), dims.build_mesh)
    model = parallelize(dense_model(0), mesh)
    batch = mesh["batch"]
    model(samples().chunk(batch.size())[batch.get_local_rank()]).square().mean().backward()
    gradients = [full(parameter.grad) for parameter in model.parameters()]
    state_dict_saver.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    other = parallelize(dense_model(7), mesh)
    state = get_model_state_dict(other)
    state_dict_loader.load({"model": state}, checkpoint_id=folder)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    equal = all(torch.equal(full(a), full(b)) for a, b in pairs)
    return gradients, equal


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_shard=2, tp=2, order=INNER_TP),
        ParallelDims(dp_shard=2, tp=2, order=OUTER_TP),
        ParallelDims(dp_replicate=2, dp_shard=2, order=INNER_TP),
        ParallelDims(dp_replicate=2, dp_shard=2, order=OUTER_TP),
        ParallelDims(dp_replicate=2, tp=2),
    ],
    ids=lambda dims: f"{dims.summary()} {dims.order[0]} first",
)
def test_fsdp_over_tensor_parallel_trains_and_checkpoints_like_one_process(
    ranks: Pool, dims: ParallelDims, tmp_path: Path
) -> None:
    reference = dense_model(0)
    reference(samples()).square().mean().backward()
    for gradients, equal in ranks(4).run(train_dense, dims, str(tmp_path)):
        assert equal
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


class Attended(nn.Module):
    """Each position with the mean of all before it, which a part of a sequence cannot see alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(8, 6).double()
        self.outer = nn.Linear(6, 4).double()

    def forward(self, inputs: Tensor, start: int, stop: int) -> Tensor:
        """Return ``[samples, stop - start, 4]`` for the positions from ``start`` to ``stop``."""
        hidden = self.inner(inputs).tanh()
        counts = torch.arange(1, hidden.size(1) + 1, dtype=hidden.dtype)[:, None]
        output: Tensor = self.outer((hidden.cumsum(1) / counts)[:, start:stop])
        return output


def sequences() -> Tensor:
    return torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def train_on_parts_of_sequences(rank: int, dims: ParallelDims) -> list[Tensor]:
    mesh = cached(("compose", dims), dims.build_mesh)
    model = Attended()
    fully_shard(model, mesh=mesh["replicate", "fsdp"])
    batch, cp = mesh["batch"], mesh["cp"]
    size = 6 // cp.size()
    mine = sequences().chunk(batch.size())[batch.get_local_rank()]
    start = cp.get_local_rank() * size
    model(mine, start, start + size).square().mean().backward()
    return [full(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(cp=2, fsdp_folds_cp=False),
        ParallelDims(cp=2, dp_replicate=2, fsdp_folds_cp=False),
        ParallelDims(cp=2, ep=2, ep_mode="peer", fsdp_folds_cp=False),
        ParallelDims(cp=2, ep=2, ep_mode="peer"),
        ParallelDims(cp=2),
    ],
    ids=ParallelDims.summary,
)
def test_gradients_of_ranks_that_saw_parts_of_sequences_are_reduced_folded_or_not(
    ranks: Pool, dims: ParallelDims
) -> None:
    reference = Attended()
    reference(sequences(), 0, 6).square().mean().backward()
    for gradients in ranks(4).run(train_on_parts_of_sequences, dims):
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


class Experts(nn.Module):
    """All of a rank's samples through each of the experts that live on it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[experts, samples, width]``."""
        weight = self.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return torch.einsum("sh,ehw->esw", inputs, local)


def expert_weight() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 8, 3, generator=generator, dtype=torch.float64)


def place_experts(weight: Tensor, mesh: ParallelMesh) -> Experts:
    experts = Experts(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["dp_replicate", "efsdp"])
    return experts


def train_experts(rank: int, dims: ParallelDims, folder: str) -> tuple[Tensor, bool]:
    mesh = cached(("compose", dims), dims.build_mesh)
    experts = place_experts(expert_weight(), mesh)
    experts(samples().chunk(4)[rank]).square().sum().backward()
    gradient = full(experts.weight.grad)
    state_dict_saver.save({"experts": get_model_state_dict(experts)}, checkpoint_id=folder)
    others = place_experts(torch.zeros_like(expert_weight()), mesh)
    state_dict_loader.load({"experts": get_model_state_dict(others)}, checkpoint_id=folder)
    return gradient, torch.equal(full(others.weight), expert_weight())


@pytest.mark.nccl
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(ep=2, dp_shard=4),
        ParallelDims(ep=2, cp=2, dp_shard=2),
        ParallelDims(ep=2, dp_replicate=2, dp_shard=2),
        ParallelDims(ep=2, tp=2, dp_shard=2, order=OUTER_TP),
        ParallelDims(ep=4, dp_shard=4),
        ParallelDims(ep=2, dp_shard=2, ep_mode="peer"),
        ParallelDims(ep=2, dp_replicate=2, dp_shard=1, ep_mode="peer", order=OUTER_TP),
    ],
    ids=lambda dims: f"{dims.summary()} {dims.order[0]} first",
)
def test_fsdp_over_experts_averages_over_the_ranks_that_hold_the_same_and_checkpoints_them(
    ranks: Pool, dims: ParallelDims, tmp_path: Path
) -> None:
    layout = dims.layout()
    expected = torch.zeros(4, 8, 3, dtype=torch.float64)
    for rank in range(4):
        here = Experts(expert_weight())
        here(samples().chunk(4)[rank]).square().sum().backward()
        assert here.weight.grad is not None
        mine = slice(
            layout.coordinate("ep", rank) * 4 // dims.ep,
            (layout.coordinate("ep", rank) + 1) * 4 // dims.ep,
        )
        expected[mine] += here.weight.grad[mine] / (4 // dims.ep)
    for gradient, equal in ranks(4).run(train_experts, dims, str(tmp_path)):
        assert equal
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@given(dims(max_world=64))
@settings(deadline=None, max_examples=40)
def test_fsdp_concatenates_its_mesh_with_tp_or_ep_in_every_order(dims: ParallelDims) -> None:
    layout = dims.layout()
    rank = layout.world_size - 1
    with fake_world(layout.world_size, rank):
        mesh = dims.build_mesh()
        outer = "dp_replicate" if dims.fsdp_folds_cp else "replicate"
        for replicas, data, model in ((outer, "fsdp", "tp"), ("dp_replicate", "efsdp", "ep")):
            layer = nn.Linear(4, 12 * layout.size(model), bias=False)
            weight = DTensor.from_local(
                torch.zeros(12, 4), mesh[model], [Shard(0)], run_check=False
            )
            layer.weight = nn.Parameter(weight)
            fully_shard(layer, mesh=mesh[replicas, data])
            assert isinstance(layer.weight, DTensor)
            joint = layer.weight.device_mesh
            assert joint.mesh_dim_names == (replicas, data, model)
            assert joint.get_coordinate() == tuple(
                layout.coordinate(name, rank) for name in (replicas, data, model)
            )


UNEVEN = [
    (ParallelDims(cp=2, tp=2), ("cp", "tp")),
    (ParallelDims(dp_replicate=2), ("dp_replicate", "fsdp")),
]


def gather_rows(rank: int, dims: ParallelDims, axes: tuple[str, str]) -> list[tuple[bool, bool]]:
    """Return whether torch gathers tensors of so many rows right, and their gradients."""
    mesh = cached(("compose", dims), dims.build_mesh)
    right = []
    for rows in (1, 3, 4, 5, 6, 7, 8):
        expected = torch.arange(3.0 * rows).view(rows, 3)
        sharded = distribute_tensor(expected, mesh[axes], [Shard(0), Shard(0)])
        sharded.requires_grad_()
        gathered = sharded.full_tensor()
        gathered.square().sum().backward()
        right.append(
            (torch.equal(gathered, expected), torch.equal(full(sharded.grad), 2 * expected))
        )
    return right


@pytest.mark.parametrize(("dims", "axes"), UNEVEN, ids=["cp tp", "dp_replicate fsdp"])
def test_torch_gathers_rows_that_two_axes_do_not_divide(
    ranks: Pool, dims: ParallelDims, axes: tuple[str, str]
) -> None:
    assert ranks(4).run(gather_rows, dims, axes) == [[(True, True)] * 7] * 4


def train_uneven_rows(rank: int, dims: ParallelDims, axes: tuple[str, str]) -> list[Tensor]:
    """Return the loss, the output and the gradient of a linear layer with a weight of six rows."""
    mesh = cached(("compose", dims), dims.build_mesh)[axes]
    weight, inputs = linear_layer()
    sharded = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Shard(0)]))
    replicated = distribute_tensor(inputs, mesh, [Replicate(), Replicate()])
    output = torch.tanh(replicated @ sharded.T)
    loss = output.pow(3).sum()
    loss.backward()
    return [full(loss), full(output), full(sharded.grad)]


def linear_layer() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((6, 3), (4, 3))
    weight, inputs = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return weight, inputs


@pytest.mark.parametrize(("dims", "axes"), UNEVEN, ids=["cp tp", "dp_replicate fsdp"])
def test_a_linear_layer_with_uneven_rows_over_two_axes_trains_like_one_process(
    ranks: Pool, dims: ParallelDims, axes: tuple[str, str]
) -> None:
    weight, inputs = linear_layer()
    weight.requires_grad_()
    output = torch.tanh(inputs @ weight.T)
    loss = output.pow(3).sum()
    loss.backward()
    for values in ranks(4).run(train_uneven_rows, dims, axes):
        for value, expected in zip(values, (loss, output, weight.grad), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
