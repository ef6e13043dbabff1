"""Parameters that tensor or expert parallelism placed before."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_dtensor import (
    AutogradCollectives,
    Axis,
    RecordingCollectives,
    mark_repeated_rows,
)
from hp_fsdp import MeshError, fully_shard
from hp_fsdp._unit import unit_of

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


class Scale(nn.Module):
    """Scales tokens that are sharded over ``mesh``, so the gradient of the weight is Partial."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * weight``, computed on each rank's tokens only."""
        if self.mesh is None:
            return x * self.weight
        whole = DTensor.from_local(x, self.mesh, [Replicate()])
        split = whole.redistribute(placements=[Shard(0)])
        scaled = cast(DTensor, split * self.weight)
        return scaled.redistribute(placements=[Replicate()]).to_local()


class Scaled(Net):
    """The net with a scale after the blocks, in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.scale(block(x))
        return cast(Tensor, self.head(x))


def with_tensor_parallel(mesh: DeviceMesh) -> Any:
    model = make(Scaled)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.scale.mesh = mesh
    weight = distribute_tensor(model.scale.weight.data, mesh, [Replicate()])
    model.scale.weight = nn.Parameter(weight)
    return model


def data_mesh(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh, int]:
    """Return the mesh to shard over, tensor parallel's, and which replica of the data this is."""
    root = mesh_of(shape, ("dp_replicate", "fsdp", "tp")[-len(shape) :])
    data = root["fsdp"] if len(shape) == 2 else root["dp_replicate", "fsdp"]
    replica = 0
    for axis in range(data.ndim):
        replica = replica * data.size(axis) + data.get_local_rank(axis)
    return data, root["tp"], replica


def describe(model: nn.Module) -> dict[str, Any]:
    placed = {name: cast(DTensor, p) for name, p in model.named_parameters()}
    return {
        name: (p.device_mesh.mesh_dim_names, p.device_mesh.mesh.tolist(), str(p.placements))
        for name, p in placed.items()
    }


def tensor_parallel_step(rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    data, tp, replica = data_mesh(shape)
    plain = dict(make(Scaled).named_parameters())
    model = shard(with_tensor_parallel(tp), data)
    right = [name for name, p in model.named_parameters() if torch.equal(full(p), plain[name])]
    loss_of(model, tokens(replica)).backward()
    return {
        "right": right == list(plain),
        "layout": describe(model),
        "gradient layout": all(
            p.grad.placements == p.placements and p.grad.device_mesh == p.device_mesh
            for p in model.parameters()
        ),
        "gradients": gradients(model),
    }


def torch_layout(rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    data, tp, _ = data_mesh(shape)
    model = with_tensor_parallel(tp)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=data)
    torch.distributed.fsdp.fully_shard(model, mesh=data)
    return describe(model)


def assigned_step(rank: int) -> Gradients:
    """Step after another model's state was put in place of the own."""
    data, tp, replica = data_mesh((2, 2))
    donor, model = (shard(with_tensor_parallel(tp), data) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(donor.state_dict(), assign=True)
    loss_of(model, tokens(replica)).backward()
    return gradients(model)


def test_state_on_a_joint_mesh_can_be_assigned(ranks: Ranks) -> None:
    for found in ranks(4).run(assigned_step):
        assert worst(found, reference(2, Scaled)) < 1e-12


SHAPES = [(2, 1), (1, 2), (2, 2), (2, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_step_with_torch_tensor_parallel(ranks: Ranks, shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world // shape[-1], Scaled)
    for found in ranks(world).run(tensor_parallel_step, shape):
        assert found["right"]
        assert found["gradient layout"]
        assert worst(found["gradients"], expected) < 1e-12


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2)], ids=["fsdp-tp", "hsdp-tp"])
def test_meshes_and_placements_are_torchs(ranks: Ranks, shape: tuple[int, ...]) -> None:
    ours, theirs = ranks(4).run(tensor_parallel_step, shape), ranks(4).run(torch_layout, shape)
    assert [found["layout"] for found in ours] == theirs


def gradient_elsewhere(rank: int) -> tuple[bool, dict[str, int]]:
    """Return whether a gradient that is sharded over tp is gathered, and the calls."""
    mesh = mesh_of((1, 2), ("fsdp", "tp"))
    record = RecordingCollectives()
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["tp"], [Replicate()]))
    fully_shard(linear, mesh["fsdp"], collectives=record)
    unit = unit_of(linear)
    assert unit is not None
    (parameter,) = unit.groups[0].parameters
    whole = torch.arange(16.0).view(4, 4)
    parameter.unsharded.grad = DTensor.from_local(
        whole.chunk(2, 1)[rank].contiguous(), mesh["tp"], [Shard(1)]
    )
    record.reset()
    taken = parameter.take_gradient(record)
    assert taken is not None
    return torch.equal(taken, whole), {axis: t.calls for axis, t in record.by_axis.items()}


def test_a_gradient_sharded_on_another_dim_is_gathered_and_counted(ranks: Ranks) -> None:
    assert ranks(2).run(gradient_elsewhere) == [(True, {"tp": 1})] * 2


class Experts(nn.Module):
    """``count`` experts, of which each rank of ``axis`` computes its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(count, WIDTH))
        self.axis: Axis | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the sum over experts of ``tanh(x @ weight + bias)``."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if self.axis is None:
            return x + torch.tanh(torch.einsum("tw,ewv->etv", x, weight) + bias[:, None]).sum(0)
        weight, bias = cast(DTensor, weight).to_local(), cast(DTensor, bias).to_local()
        seen = AutogradCollectives().replicate(x, self.axis)
        part = torch.tanh(torch.einsum("tw,ewv->etv", seen, weight) + bias[:, None]).sum(0)
        return x + AutogradCollectives().all_reduce(part, self.axis)


class MixtureNet(Net):
    """The net with experts in every block's place."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Experts(count) for _ in range(2))


class UnevenNet(MixtureNet):
    """Three experts on two ranks."""

    def __init__(self) -> None:
        super().__init__(3)


def expert_step(rank: int, shape: tuple[int, int], kind: type[MixtureNet]) -> dict[str, Any]:
    mesh = mesh_of(shape, ("efsdp", "ep"))
    model = make(kind)
    plain = dict(make(kind).named_parameters())
    for experts in model.blocks:
        experts.axis = Axis.of(mesh, "ep")
        for name in ("weight", "bias"):
            whole = getattr(experts, name).data
            setattr(experts, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    shard(model, mesh["efsdp"])
    right = [name for name, p in model.named_parameters() if torch.equal(full(p), plain[name])]
    loss_of(model, tokens(mesh.get_local_rank("efsdp"))).backward()
    return {"right": right == list(plain), "gradients": gradients(model)}


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", [MixtureNet, UnevenNet], ids=["even", "uneven"])
def test_step_with_experts_on_another_axis(
    ranks: Ranks, shape: tuple[int, int], kind: type[MixtureNet]
) -> None:
    expected = reference(shape[0], kind)
    for found in ranks(4).run(expert_step, shape, kind):
        assert found["right"]
        assert worst(found["gradients"], expected) < 1e-12


def overlapping(rank: int) -> str:
    mesh = mesh_of((2, 1), ("fsdp", "tp"))
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["fsdp"], [Shard(0)]))
    try:
        fully_shard(linear, mesh["fsdp"])
    except MeshError as error:
        return str(error)
    return ""


def test_a_parameter_on_the_same_axis_is_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(overlapping):
        assert "weight is a DTensor on a mesh with axes ['fsdp'], which share ['fsdp']" in message


def experts_that_were_not_sharded_first(rank: int, shape: tuple[int, int]) -> tuple[str, bool]:
    """Shard blocks over all ranks. Their experts are on an axis of another mesh."""
    mesh, over = mesh_of(shape, ("efsdp", "ep")), mesh_of((4,), ("fsdp",))
    block = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"experts": nn.Linear(4, 4)}))
    experts = cast(Any, block[1])["experts"]
    for name in ("weight", "bias"):
        whole = getattr(experts, name).data
        setattr(experts, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    message = ""
    try:
        fully_shard(block, over)
    except MeshError as error:
        message = str(error)
    # As the message says: shard the experts first, then the block.
    fully_shard(experts, mesh["efsdp"])
    fully_shard(block, over)
    return message, isinstance(experts.weight, DTensor)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=lambda s: "x".join(map(str, s)))
def test_experts_that_were_not_sharded_first_are_named_with_the_call_that_mends_it(
    ranks: Ranks, shape: tuple[int, int]
) -> None:
    for message, mended in ranks(4).run(experts_that_were_not_sharded_first, shape):
        assert "1.experts.weight is on axes ['ep'], which cannot be joined with ['fsdp']" in (
            message
        )
        assert message.endswith(
            "; if fully_shard was forgotten for 1.experts, call fully_shard(1.experts, mesh) "
            "first, over other axes of the mesh that has ['ep'], such as those over which experts "
            "are replicated"
        )
        assert mended


# Shapes of parameters, the dim that two ranks of another axis shard, and the dim that four ranks of
# data shard then.
STACKS: list[tuple[tuple[int, ...], int, int]] = [
    ((8, 3, 4), 0, 0),  # a row for each of the ranks
    ((4, 3, 8), 0, 2),  # too few rows, and three do not divide
    ((4, 8, 8), 0, 1),
    ((4, 8), 0, 1),
    ((4, 3), 0, 0),  # nothing divides
    ((2, 8), 1, 0),  # the other axis does not shard rows
]


def stacked(rank: int) -> list[tuple[int | None, Tensor]]:
    mesh = mesh_of((4, 2), ("efsdp", "ep"))
    found: list[tuple[int | None, Tensor]] = []
    for shape, own, _ in STACKS:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        module: Any = nn.Identity()
        placed = distribute_tensor(whole, mesh["ep"], [Shard(own)], src_data_rank=None)
        module.weight = nn.Parameter(placed)
        mark_repeated_rows(module.weight, [1])
        fully_shard(module, mesh["efsdp"])
        assert getattr(module.weight, "repeated_rows", ()) == (1,)
        placement = module.weight.placements[0]
        found.append((placement.dim, full(module.weight)))
    return found


def test_rows_fewer_than_ranks_are_cut_along_another_dim(ranks: Ranks) -> None:
    for found in ranks(8).run(stacked):
        assert [dim for dim, _ in found] == [dim for _, _, dim in STACKS]
        for (shape, _, _), (_, whole) in zip(STACKS, found, strict=True):
            assert torch.equal(whole, torch.arange(float(whole.numel())).view(shape))


def marked(rank: int, layout: Any) -> list[tuple[int, ...]]:
    model: Any = make(Net)
    for parameter in model.parameters():
        mark_repeated_rows(parameter, [0])
    shard(model, mesh_of((2,), ("fsdp",)), layout=layout)
    found = [getattr(parameter, "repeated_rows", ()) for parameter in model.parameters()]
    model.float()
    return found + [getattr(parameter, "repeated_rows", ()) for parameter in model.parameters()]


@pytest.mark.nccl
@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_sharded_parameters_repeat_the_rows_of_the_original_ones(ranks: Ranks, layout: str) -> None:
    for found in ranks(2).run(marked, layout):
        assert found
        assert set(found) == {(0,)}
