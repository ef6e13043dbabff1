"""No plan costs more than the plans of torch's planners with the same cost model."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute as their_planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import AlphaBeta, Layout, Partial, Replicate, Shard, plan_transfer

_package = plan_transfer.__module__.rpartition("._")[0]
_plan: Any = import_module(f"{_package}._planner")

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Replicate | Shard | Partial, ...]
SHAPE = (64, 64)
MODELS = [
    AlphaBeta(alpha=1e-6, beta=1e-9),
    AlphaBeta(alpha=0.0, beta=1.0),
    AlphaBeta(alpha=1.0, beta=0.0),
    AlphaBeta(alpha=1e-6, beta=(1e-8, 1e-9, 1e-9, 1e-10)),
    AlphaBeta(alpha=(1e-6, 1e-5, 1e-6, 1e-7), beta=(1e-9, 1e-9, 1e-7, 1e-8)),
]


@contextmanager
def fake_mesh(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Give a mesh of ranks that move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=math.prod(shape))
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c", "d")[: len(shape)])
    finally:
        dist.destroy_process_group()


def spec(mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    kinds: dict[Any, theirs.Placement] = {
        R: theirs.Replicate(),
        S0: theirs.Shard(0),
        S1: theirs.Shard(1),
        P: theirs.Partial(),
    }
    meta = TensorMeta(torch.Size(SHAPE), (SHAPE[1], 1), torch.float32)
    return DTensorSpec(mesh, tuple(kinds[p] for p in placements), tensor_meta=meta)


def their_price(
    mesh: DeviceMesh, source: Placements, target: Placements, graph: bool, model: AlphaBeta
) -> float:
    """Price the steps of torch's planner for even lengths as ours are priced."""
    steps = their_planner._gen_transform_infos_non_cached(
        spec(mesh, source), spec(mesh, target), use_graph_based_transform=graph
    )
    total = 0.0
    for step in steps:
        old, new = step.src_dst_placements
        n = mesh.size(step.mesh_dim)
        size = math.prod(step.logical_shape) * 4
        if old == new or isinstance(old, theirs.Replicate):
            continue
        received = size * (n - 1) / n
        if isinstance(old, theirs.Shard) and isinstance(new, theirs.Shard):
            received /= n
        elif isinstance(old, theirs.Partial) and isinstance(new, theirs.Replicate):
            received *= 2
        total += model.seconds((step.mesh_dim,), n, received)
    return total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("shape", "examples"),
    [
        *[((2, 4), 15), ((2, 2, 2), 15), ((2, 2, 2, 2), 2)],
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [((2, 4), 144), ((2, 2, 2), 200), ((2, 2, 2, 2), 20), ((2, 4, 2, 2), 10)]
        ),
    ],
)
@pytest.mark.parametrize("single", [True, False])
def test_no_plan_is_dearer_than_torchs_greedy_or_min_cost_one(
    shape: tuple[int, ...], examples: int, model: AlphaBeta, single: bool
) -> None:
    """Includes meshes with groups for single axes only, as torch's steps use."""
    generator = torch.Generator().manual_seed(len(shape))
    kinds = (R, S0, S1, P)
    pairs = [
        (source, target)
        for source in itertools.product(kinds, repeat=len(shape))
        for target in itertools.product(kinds[:3], repeat=len(shape))
    ]
    groups: frozenset[tuple[int, ...]] | None = frozenset() if single else None
    with fake_mesh(shape) as mesh:
        for place in torch.randperm(len(pairs), generator=generator)[:examples].tolist():
            source, target = pairs[place]
            pair = Layout(shape, source), Layout(shape, target)
            ours = _plan.make_plan(*pair, SHAPE, 0, 4, model, groups)
            for graph in (False, True):
                bound = their_price(mesh, source, target, graph, model)
                assert ours.time <= bound * (1 + 1e-9) + 1e-12, (source, target, str(ours), graph)
