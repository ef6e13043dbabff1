"""Parameters cut along other dimensions, kept whole, or DTensors on one mesh for everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool, fails_with_torch_2_11
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_dtensor import RecordingCollectives
from hp_fsdp import (
    DataParallelMeshDims,
    MeshError,
    ParameterError,
    ShardingError,
    fully_shard,
)

from .models import (
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]


def largest(parameter: nn.Parameter) -> Shard | None:
    """Shard the last dim if 4 divides its size."""
    return Shard(-1) if parameter.ndim > 1 and parameter.shape[-1] % 4 == 0 else None


def cut_elsewhere(rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, shard_placement_fn=largest)
    plain = dict(make(Net).named_parameters())
    before = {name: torch.equal(full(p), plain[name]) for name, p in model.named_parameters()}
    up = model.blocks[0].up.weight
    found = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
        model.zero_grad()
    model.unshard()
    return {
        "same": all(before.values()),
        "placements": up.placements,
        "local": tuple(up.to_local().shape),
        "contiguous": up.to_local().is_contiguous() and model.head.weight.is_contiguous(),
        "gradients": found,
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1,), (2, 1)], ids=lambda s: "x".join(map(str, s)))
def test_any_dimension_that_divides_may_be_cut(ranks: Ranks, shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world)
    for found in ranks(world).run(cut_elsewhere, shape):
        assert found["same"]
        assert found["placements"] == (Replicate(),) * (len(shape) - 1) + (Shard(1),)
        assert found["local"] == (36, 8 // shape[-1])
        assert found["contiguous"]
        assert all(worst(each, expected) < 1e-12 for each in found["gradients"])


def refused(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("fsdp",))
    said = []
    for answer in (Shard(1), Shard(2), Shard(-3), Replicate(), 1):
        linear = nn.Linear(3, 4, bias=False)
        function = cast(Callable[[nn.Parameter], Shard], lambda _, answer=answer: answer)
        try:
            fully_shard(linear, mesh, shard_placement_fn=function)
        except ParameterError as error:
            said.append(str(error))
        assert not isinstance(linear.weight, DTensor)
    return said


def test_cuts_that_cannot_be_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(refused):
        assert "dim 1 of weight, of size 3, does not divide over 2 ranks" in said[0]
        assert "weight has 2 dimensions, so it has no dim 2" in said[1]
        assert "weight has 2 dimensions, so it has no dim -3" in said[2]
        assert "shard_placement_fn gives something of type Replicate for weight" in said[3]
        assert "shard_placement_fn gives 1 for weight" in said[4]


@dataclass
class OnMesh:
    """Has the attributes of the class ``ShardPlacementResult`` of torch 2.12."""

    placement: Shard
    mesh_info: FSDPMeshInfo


def on_other_meshes(rank: int) -> list[str]:
    """Assign an invalid mesh to a parameter. Return the errors."""
    mesh = mesh_of((2, 2), ("a", "b"))
    said = []
    swapped = HSDPMeshInfo(mesh=mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    on_one = FSDPMeshInfo(mesh=mesh_of((4, 1), ("a", "b"))["b"], shard_mesh_dim=0)
    for info, fewer in ((swapped, None), (on_one, 2)):
        answer: Any = OnMesh(Shard(0), info)
        linear = nn.Linear(3, 4, bias=False)
        place = cast(Callable[[nn.Parameter], Shard], lambda _, answer=answer: answer)
        all_ranks = mesh_of((4,), ("all",))
        try:
            fully_shard(linear, all_ranks, shard_placement_fn=place, reshard_after_forward=fewer)
        except ShardingError as error:
            said.append(str(error))
            assert not isinstance(linear.weight, DTensor)
    return said


def test_a_mesh_of_a_parameters_own_that_cannot_be_is_refused(ranks: Ranks) -> None:
    for said in ranks(4).run(on_other_meshes):
        assert said[0].startswith("shard_placement_fn gives weight a mesh")
        assert "to replicate over axis 1 and to shard over axis 0" in said[0]
        assert "a divisor of the 1 ranks that are sharded over" in said[1]


def kept_whole(rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    record = RecordingCollectives()
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, min_shard_numel=100, collectives=record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, tokens(rank)).backward()
    found = gradients(model)
    optimizer.step()
    return {
        "gradients": found,
        "whole": {n for n, p in model.named_parameters() if p.placements[-1].is_replicate()},
        "small": {n for n, p in model.named_parameters() if p.numel() < 100},
        "after": parameters(model),
        "calls": {key: t.calls for key, t in record.by_call.items()},
        "report": {g.axes["fsdp"] for g in model.plan_report().groups},
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_small_parameters_stay_whole_and_are_all_reduced(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    expected = reference(4)
    results = ranks(4).run(kept_whole, shape)
    for found in results:
        assert worst(found["gradients"], expected) < 1e-12
        assert found["whole"] == found["small"]
        assert 0 < len(found["whole"]) < len(expected)
        assert worst(found["after"], results[0]["after"]) == 0
        assert found["calls"]["fsdp", "all_reduce"] == 4
        assert found["report"] == {shape[-1]}


def cut_unevenly(rank: int) -> list[Any]:
    """Shard parameters that are uneven on another axis. Return the results or errors."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    cases: list[tuple[tuple[int, int], int, dict[str, Any]]] = [
        ((3, 4), 0, {"min_shard_numel": 8}),
        ((3, 4), 0, {"min_shard_numel": 9}),
        ((4, 3), 1, {"shard_placement_fn": lambda _: Shard(1)}),
        ((4, 6), 1, {"shard_placement_fn": lambda _: Shard(1)}),
        ((4, 8), 1, {"shard_placement_fn": lambda _: Shard(1)}),
    ]
    found: list[Any] = []
    for shape, dim, options in cases:
        model: Any = nn.Linear(shape[1], shape[0], bias=False)
        whole = torch.randn(shape)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        try:
            fully_shard(model, mesh["dp"], **options)
            found.append(str(model.weight.placements))
        except ParameterError as error:
            found.append(str(error))
    return found


@pytest.mark.nccl
def test_all_ranks_decide_equally_if_another_axis_shards_unevenly(ranks: Ranks) -> None:
    found = ranks(4).run(cut_unevenly)
    assert all(each == found[0] for each in found)
    cut, whole, uneven, too_few, even = found[0]
    assert ["Replicate" in each for each in (cut, whole, even)] == [False, True, False]
    assert "size 3, does not divide over 2 x 2 ranks" in uneven
    assert "size 6, does not divide over 2 x 2 ranks" in too_few


class Whole(nn.Module):
    """Two linear maps. Their weights are DTensors on the mesh of all ranks."""

    def __init__(self, mesh: DeviceMesh, tp: str | None) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()

        def placed(weight: Tensor, dim: int) -> nn.Parameter:
            places = [Shard(dim) if name == tp else Replicate() for name in names]
            return nn.Parameter(distribute_tensor(weight, mesh, places))

        torch.manual_seed(0)
        self.up = placed(torch.randn(12, 5), 0)
        self.down = placed(torch.randn(5, 12), 1)
        self.mesh = mesh
        self.data = [Shard(0) if name != tp else Replicate() for name in names]

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the result."""
        whole = DTensor.from_local(x, self.mesh, self.data, run_check=False)
        y = torch.tanh(whole @ self.up.t()) @ self.down.t()
        return cast(DTensor, y).redistribute(placements=self.data).to_local()


CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], str | None, dict[str, Any]]] = {
    "fsdp": ((2, 2), ("dp", "tp"), "tp", {"shard": "dp"}),
    "hsdp": ((2, 2), ("rep", "dp"), None, {"shard": "dp", "replicate": "rep"}),
    "ddp": ((2, 2), ("dp", "tp"), "tp", {"replicate": "dp"}),
    "folded": ((2, 2), ("dp", "cp"), None, {"shard": ("dp", "cp")}),
}


def on_one_mesh(rank: int, case: str, ours: bool) -> dict[str, Any]:
    shape, names, tp, dims = CASES[case]
    mesh = mesh_of(shape, names)
    model: Any = Whole(mesh, tp)
    if ours:
        fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    else:
        theirs.fully_shard(model, mesh=mesh, dp_mesh_dims=theirs.DataParallelMeshDims(**dims))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_rank = rank if tp is None else mesh.get_local_rank(0)
    steps = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + data_rank)
        model(torch.randn(3, 5, generator=generator)).pow(2).sum().backward()
        steps.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": steps, "placements": [p.placements for p in model.parameters()]}


@fails_with_torch_2_11("no DataParallelMeshDims to compare with")
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.filterwarnings("default")
def test_dtensors_on_one_mesh_train_as_under_torch(ranks: Ranks, case: str) -> None:
    for mine, other in zip(
        ranks(4).run(on_one_mesh, case, True), ranks(4).run(on_one_mesh, case, False), strict=True
    ):
        assert mine["placements"] == other["placements"]
        for one, two in zip(mine["steps"], other["steps"], strict=True):
            assert worst(one, two) < 1e-5


def compatible(rank: int) -> tuple[Gradients, Gradients]:
    """Name no axes: a slice of the parameters' own mesh says as much."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    found = []
    for dims in (None, DataParallelMeshDims(shard="dp")):
        model: Any = Whole(mesh, "tp")
        fully_shard(model, mesh["dp"] if dims is None else mesh, dp_mesh_dims=dims)
        generator = torch.Generator().manual_seed(mesh.get_local_rank(0))
        model(torch.randn(3, 5, generator=generator)).pow(2).sum().backward()
        found.append(gradients(model))
    return found[0], found[1]


def test_a_mesh_that_has_the_axes_of_data_already_is_used_as_it_is(ranks: Ranks) -> None:
    for by_slice, by_name in ranks(4).run(compatible):
        assert worst(by_slice, by_name) == 0


def wrong_dims(rank: int) -> list[str]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    said = []
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
        (lambda: Whole(mesh, "tp"), {"shard": "fsdp"}),
        (lambda: Whole(mesh, "tp"), {"shard": "dp", "replicate": "dp"}),
        (lambda: Whole(mesh, "tp"), {"shard": "tp"}),
        (lambda: nn.Linear(2, 2), {"shard": "dp"}),
        (lambda: Whole(mesh["dp"], "tp"), {"shard": "dp"}),
        (lambda: nn.Linear(2, 2), {}),
    ]
    for build, dims in cases:
        try:
            fully_shard(build(), mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
        except (MeshError, ParameterError) as error:
            said.append(str(error))
    return said


def test_axes_of_data_that_cannot_be_are_refused(ranks: Ranks) -> None:
    for said in ranks(4).run(wrong_dims):
        assert "no axis 'fsdp' in a mesh with axes ['dp', 'tp']" in said[0]
        assert "axes ['dp'] are in both shard and replicate" in said[1]
        assert "only Replicate() is allowed" in said[2]
        assert "weight is a plain tensor" in said[3]
        assert "up is a DTensor on" in said[4]
        assert "name at least one axis" in said[5]
