"""World meshes on real gloo ranks: what each getter's groups reach, and FSDP over them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_mesh import MeshError, ParallelDimsError
from hp_mesh import world as world_module
from hp_mesh.world import (
    HybridShard,
    WorldMesh,
    build_expert_parallel_mesh,
    build_world_mesh,
    get_cp_mesh,
    get_dp_mesh,
    get_dp_model_mesh,
    get_dp_process_group,
    get_dp_replicate_mesh,
    get_dp_shard_mesh,
    get_ep_mesh,
    get_pp_mesh,
    get_pp_stage_mesh,
    get_tp_mesh,
    reset_world_mesh,
)

from .worlds import AXES, peers

Pool = Callable[[int], RankPool]
# The first use of FSDP imports it on four ranks at once, which takes minutes on busy cores.

GETTERS = {
    "dp_model": get_dp_model_mesh,
    "dp": get_dp_mesh,
    "dp_shard": get_dp_shard_mesh,
    "dp_replicate": get_dp_replicate_mesh,
    "cp": get_cp_mesh,
    "tp": get_tp_mesh,
    "pp": get_pp_mesh,
    "pp_stage": get_pp_stage_mesh,
}
ALONG = {
    "dp_model": ("dp_replicate", "dp_shard", "cp"),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard": ("dp_shard", "cp"),
    "pp_stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}


def reduce_over_each_axis(rank: int, degrees: dict[str, int]) -> dict[str, list[float]]:
    """Sum one-hot ranks over all axes of every getter's mesh."""
    data = HybridShard(replicas=degrees["dp_replicate"])
    world = build_world_mesh(dp=data, cp=degrees["cp"], tp=degrees["tp"], pp=degrees["pp"])
    sums = {}
    for name, getter in GETTERS.items():
        seen = torch.zeros(4)
        seen[rank] = 1
        for group in getter(world).get_all_groups():
            dist.all_reduce(seen, group=group)
        sums[name] = seen.tolist()
    seen = torch.zeros(4)
    seen[rank] = 1
    dist.all_reduce(seen, group=get_dp_process_group(world))
    sums["dp_group"] = seen.tolist()
    reset_world_mesh()
    return sums


@pytest.mark.parametrize(
    "several", [("dp_replicate", "dp_shard"), ("dp_shard", "cp"), ("pp", "dp_replicate"), ("tp",)]
)
def test_an_all_reduce_over_the_mesh_of_every_getter_reaches_its_ranks(
    ranks: Pool, several: tuple[str, ...]
) -> None:
    shape = {name: (2 if len(several) == 2 else 4) if name in several else 1 for name in AXES}
    for rank, sums in enumerate(ranks(4).run(reduce_over_each_axis, shape)):
        for name, seen in sums.items():
            along = ALONG["dp"] if name == "dp_group" else ALONG.get(name, (name,))
            members = peers(shape, rank, along)
            assert seen == [float(other in members) for other in range(4)], name


def reduce_over_experts(rank: int) -> list[list[float]]:
    world = build_world_mesh(dp=HybridShard(replicas=1), tp=2, ep=2)
    experts = build_expert_parallel_mesh(2)
    sums = []
    for mesh in (get_ep_mesh(world), get_ep_mesh(experts), get_dp_model_mesh(experts)):
        seen = torch.zeros(4)
        seen[rank] = 1
        dist.all_reduce(seen, group=mesh.get_group())
        sums.append(seen.tolist())
    experts.mesh.close()
    reset_world_mesh()
    return sums


def test_an_all_reduce_over_expert_meshes_reaches_their_ranks(ranks: Pool) -> None:
    odd, even, everyone = [0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]
    low, high = [1, 1, 0, 0], [0, 0, 1, 1]
    expected = [[even, low, everyone], [odd, low, everyone]]
    expected += [[even, high, everyone], [odd, high, everyone]]
    assert ranks(4).run(reduce_over_experts) == expected


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def samples() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def keep_a_world(data: int | HybridShard, tp: int) -> WorldMesh:
    """Build a world mesh without storing it. DTensor caches the groups of equal meshes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "_world_mesh", None)
        return build_world_mesh(dp=data, tp=tp)


def train(rank: int, data: int | HybridShard, tp: int) -> list[Tensor]:
    world = cached(("world", data, tp), partial(keep_a_world, data, tp))
    net = model()
    parallelize_module(net, get_tp_mesh(world), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=get_dp_model_mesh(world))
    loader = get_dp_mesh(world)
    net(samples().chunk(loader.size())[loader.get_local_rank()]).square().mean().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    return [g.full_tensor().detach() for g in gradients if isinstance(g, DTensor)]


@pytest.mark.parametrize(
    ("data", "tp"), [(HybridShard(replicas=2), 1), (HybridShard(replicas=1), 2), (-1, 2)]
)
def test_fsdp_takes_the_model_mesh_and_trains_like_one_process(
    ranks: Pool, data: int | HybridShard, tp: int
) -> None:
    reference = model()
    reference(samples()).square().mean().backward()
    expected = [parameter.grad for parameter in reference.parameters()]
    for gradients in ranks(4).run(train, data, tp):
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-14)


def build_on_uneven_nodes(rank: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3" if rank == 0 else "2")
        try:
            build_world_mesh(dp=HybridShard())
        except (MeshError, ParallelDimsError) as error:
            return str(error)
    return "built"


def test_a_rank_that_counts_its_node_differently_keeps_no_other_waiting(ranks: Pool) -> None:
    first, *others = ranks(4).run(build_on_uneven_nodes)
    assert first.startswith("LOCAL_WORLD_SIZE=3 does not divide world_size=4")
    assert all(message.startswith("ranks build different meshes") for message in others)
