"""Torch meshes on real gloo ranks: what groups reach, and refusals that keep no rank waiting."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from hp_mesh import (
    DEFAULT_ORDER,
    MeshError,
    ParallelDims,
    ParallelDimsError,
    ParallelMesh,
    Topology,
)
from hp_mesh import world as world_module
from hp_mesh.world import build_expert_parallel_mesh, build_world_mesh, reset_world_mesh

Pool = Callable[[int], RankPool]
ORDER = ("pp", "dp_replicate", "dp_shard")
CONFIGURATIONS = [
    ParallelDims(),
    ParallelDims(tp=2, etp=2, ep=2),
    ParallelDims(dp_shard=2, cp=2, ep=4, ulysses_degree=2),
    ParallelDims(dp_replicate=2, pp=2, dp_shard=1),
    ParallelDims(dp_shard=2, ep=2, ep_mode="peer"),
    ParallelDims(tp=2, etp=2, ep=2, ep_mode="peer", order=("tp", "ep", *ORDER[:3], "cp")),
    ParallelDims(cp=2, dp_replicate=2, ep=2, fsdp_folds_cp=False),
    ParallelDims(
        dp_replicate=2, dp_shard=2, ep=2, order=("ep", "dp_shard", "cp", *ORDER[1::-1], "tp")
    ),
    ParallelDims(dp_replicate=2, cp=2, ep=2, order=("cp", "tp", "dp_shard", "pp", "dp_replicate")),
    ParallelDims(
        dp_shard=2, tp=2, ep=2, order=("tp", "ep", "cp", "dp_shard", "pp", "dp_replicate")
    ),
]


def reduce_one_hot_ranks(rank: int, dims: ParallelDims) -> dict[str, list[int]]:
    mesh = dims.build_mesh(timeout=timedelta(seconds=60))
    members = {}
    for name in mesh.names:
        seen = torch.zeros(dist.get_world_size())
        seen[rank] = 1
        dist.all_reduce(seen, group=mesh.group(name))
        members[name] = [
            index for index, count in enumerate(seen.tolist()) for _ in range(int(count))
        ]
    mesh.close()
    return members


@pytest.mark.nccl
@pytest.mark.parametrize("dims", CONFIGURATIONS, ids=ParallelDims.summary)
def test_an_all_reduce_on_every_name_reaches_its_ranks(ranks: Pool, dims: ParallelDims) -> None:
    layout = dims.resolve(4).layout()
    for rank, members in enumerate(ranks(4).run(reduce_one_hot_ranks, dims)):
        expected = {name: [*layout.group(name, rank)] for name in layout.names}
        assert members == expected


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_replicate=2, cp=2, tp=2, ep=2, ulysses_degree=2),
        ParallelDims(tp=2, ep=2, etp=4, free_etp=True),
        ParallelDims(cp=2, ep=2, tp=2, etp=2, ep_mode="peer", order=DEFAULT_ORDER[::-1]),
    ],
    ids=ParallelDims.summary,
)
def test_an_all_reduce_on_every_name_reaches_its_ranks_among_eight(
    ranks: Pool, dims: ParallelDims
) -> None:
    layout = dims.resolve(8).layout()
    members = ranks(8).run(reduce_one_hot_ranks, dims)
    for rank, reached in enumerate(members):
        assert reached == {name: [*layout.group(name, rank)] for name in layout.names}


def build_after_an_uneven_group(rank: int) -> int:
    uneven = dist.new_group([0, 1])
    mesh = ParallelDims(tp=2).build_mesh(timeout=timedelta(seconds=20))
    seen = torch.tensor(2**rank)
    dist.all_reduce(seen, group=mesh.group("fsdp"))
    mesh.close()
    if rank < 2:
        dist.destroy_process_group(uneven)
    return int(seen)


def test_groups_that_only_some_ranks_are_in_do_not_make_the_build_hang(ranks: Pool) -> None:
    assert ranks(4).run(build_after_an_uneven_group) == [5, 10, 5, 10]


def rebuild_and_reduce(rank: int) -> list[int]:
    sums = []
    for tp in (2, 2, 4, 2):
        mesh = ParallelDims(tp=tp).build_mesh(timeout=timedelta(seconds=20))
        seen = torch.tensor(2**rank)
        dist.all_reduce(seen, group=mesh.group("tp"))
        sums.append(int(seen))
        mesh.close()
    return sums


def test_a_mesh_can_be_built_again_after_it_was_closed(ranks: Pool) -> None:
    low, high = [3, 3, 15, 3], [12, 12, 15, 12]
    assert ranks(4).run(rebuild_and_reduce) == [low, low, high, high]


def build_and_close(rank: int, orders: list[list[tuple[ParallelDims, int]]]) -> list[str]:
    """Build, or close the living mesh at an index, and reduce over all names; return failures."""
    failures = []
    for order in orders:
        living: list[ParallelMesh] = []
        for dims, close in order:
            if close < len(living):
                living.pop(close).close()
            else:
                try:
                    living.append(dims.build_mesh(timeout=timedelta(seconds=20)))
                except ValueError as error:
                    failures.append(str(error))
        for mesh in living:
            for name in mesh.names:
                seen = torch.tensor(2**rank)
                dist.all_reduce(seen, group=mesh.group(name))
                if int(seen) != sum(2**peer for peer in mesh.layout.group(name, rank)):
                    failures.append(f"{mesh.dims.summary()}: {name}")
        for mesh in living:
            mesh.close()
    return failures


FIRST, SECOND = ParallelDims(cp=2, tp=2), ParallelDims(dp_replicate=2, tp=2)
BUILD = 9  # no mesh has this index


def random_orders(count: int) -> list[list[tuple[ParallelDims, int]]]:
    choose = Random(11)
    return [
        [(choose.choice(CONFIGURATIONS), choose.choice((BUILD, 0, 1, 2))) for _ in range(8)]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "orders",
    [
        [[(FIRST, BUILD), (SECOND, BUILD), (FIRST, 0), (FIRST, BUILD)]],
        [[(FIRST, BUILD), (FIRST, BUILD), (FIRST, 0), (SECOND, BUILD), (SECOND, 0)]],
        random_orders(8),
    ],
    ids=["older closed", "equal ones", "random"],
)
def test_meshes_are_built_and_closed_in_any_order(
    ranks: Pool, orders: list[list[tuple[ParallelDims, int]]]
) -> None:
    assert ranks(4).run(build_and_close, orders) == [[]] * 4


def rebuild_where_one_rank_has_more_taken(rank: int) -> list[int]:
    """Leave one rank alone with a group of the name that torch gives its next one."""
    timeout = timedelta(seconds=20)
    alone = [
        dist.new_group([rank], use_local_synchronization=True, timeout=timeout) for _ in range(3)
    ]
    # All are in as many groups as the others; rank 2 keeps one that was named later.
    for index in (0, 2) if rank != 2 else (0, 1):
        dist.destroy_process_group(alone[index])
    sums = []
    with ParallelDims(dp_shard=2, tp=2).build_mesh(timeout=timeout) as mesh:
        for name in ("pp", "tp", "fsdp"):
            seen = torch.tensor(2**rank)
            dist.all_reduce(seen, group=mesh.group(name))
            sums.append(int(seen))
    dist.destroy_process_group(alone[1 if rank != 2 else 2])
    return sums


def test_ranks_agree_on_names_that_are_free_on_all_of_them(ranks: Pool) -> None:
    expected = [[1, 3, 5], [2, 3, 10], [4, 12, 5], [8, 12, 10]]
    assert ranks(4).run(rebuild_where_one_rank_has_more_taken) == expected


def build_world_again(rank: int) -> int:
    build_world_mesh(dp=2, tp=2)
    experts = build_expert_parallel_mesh(2)
    reset_world_mesh()
    world = build_world_mesh(dp=2, tp=2)
    seen = torch.tensor(2**rank)
    dist.all_reduce(seen, group=world.mesh.group("tp"))
    reset_world_mesh()
    experts.mesh.close()
    return int(seen)


def test_a_world_mesh_is_built_again_while_an_expert_mesh_lives(ranks: Pool) -> None:
    assert ranks(4).run(build_world_again) == [3, 3, 12, 12]


def build_what_differs(rank: int, degrees: dict[int, int], others: int) -> str:
    """Return the error of a rank whose tp is its own, or that of all others."""
    try:
        ParallelDims(tp=degrees.get(rank, others)).build_mesh()
    except (MeshError, ParallelDimsError) as error:
        return str(error)
    return "built"


def test_ranks_with_different_degrees_all_raise_and_say_what_each_has(ranks: Pool) -> None:
    messages = ranks(4).run(build_what_differs, {0: 4}, 2)
    assert all(message.startswith("ranks build different meshes") for message in messages)
    assert ["'tp': 4" in message for message in messages] == [True, False, False, False]


def test_a_rank_whose_degrees_are_illegal_alone_keeps_no_other_waiting(ranks: Pool) -> None:
    illegal = "tp=3 does not divide world_size=4; use 1, 2 or 4"
    first, *others = ranks(4).run(build_what_differs, {0: 3}, 2)
    assert first == illegal
    assert all(message.startswith("ranks build different meshes") for message in others)
    assert ranks(4).run(build_what_differs, {}, 3) == [illegal] * 4


def build_after_local_groups_were_destroyed(rank: int) -> list[int]:
    timeout = timedelta(seconds=20)
    column, row = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    # The sets of ranks of the mesh, in the order in which it creates their groups.
    groups = [
        dist.new_group(ranks, use_local_synchronization=True, timeout=timeout)
        for ranks in ([rank], column, row)
    ]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    for group in groups[::-1]:
        dist.destroy_process_group(group)
    mesh = ParallelDims(dp_shard=2, tp=2).build_mesh(timeout=timeout)
    sums = []
    for name in ("tp", "fsdp"):
        seen = torch.tensor(2**rank)
        dist.all_reduce(seen, group=mesh.group(name))
        sums.append(int(seen))
    mesh.close()
    return sums


def test_addresses_that_others_groups_left_behind_are_not_taken_for_those_of_the_mesh(
    ranks: Pool,
) -> None:
    expected = [[3, 5], [3, 10], [12, 5], [12, 10]]
    assert ranks(4).run(build_after_local_groups_were_destroyed) == expected


@dataclass
class Settings:
    """What a configuration says of one kind of parallelism."""

    degree: int | None


def build_what_one_rank_gets_wrong(rank: int, case: str) -> str:
    """Give rank 0's arguments to the case, and good ones to the others."""
    alone = rank == 0
    seconds: Any = 5 if alone else timedelta(seconds=30)
    nodes: Any = 4 if alone else Topology(ranks_per_node=2)
    none: Any = Settings(None if alone else 4)
    no_degree: Any = "two" if alone else 2
    builds: dict[str, Callable[[], object]] = {
        "topology": lambda: ParallelDims().build_mesh(topology=nodes),
        "timeout": lambda: ParallelDims().build_mesh(timeout=seconds),
        "device index": lambda: ParallelDims().build_mesh("cpu:0" if alone else "cpu"),
        "no device": lambda: ParallelDims().build_mesh("foo" if alone else "cpu"),
        "experts": lambda: build_expert_parallel_mesh(0 if alone else 2),
        "expert text": lambda: build_expert_parallel_mesh(no_degree),
        "degree": lambda: build_world_mesh(dp=-1, tp=no_degree),
        "configuration": lambda: build_world_mesh(dp=none),
        "no dp": lambda: build_world_mesh(dp=None if alone else 2, tp=2),
    }
    try:
        builds[case]()
    except (MeshError, ParallelDimsError) as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("topology", "topology=4 is not a Topology"),
        ("timeout", "timeout=5 is not a timedelta"),
        ("device index", "device_type='cpu:0' has an index"),
        ("no device", "device_type='foo' is no device type"),
        ("experts", "ep=0 is not a degree"),
        ("expert text", "ep='two' is not a degree"),
        ("degree", "tp='two' is not a degree"),
        ("configuration", "dp=None is not a degree"),
        ("no dp", "tp=2 given without dp"),
    ],
)
def test_wrong_input_on_one_rank_keeps_no_other_waiting(
    ranks: Pool, case: str, message: str
) -> None:
    first, *others = ranks(4).run(build_what_one_rank_gets_wrong, case)
    assert first.startswith(message)
    assert all(other.startswith("ranks build different meshes") for other in others)


def build_where_one_rank_has_a_world_mesh(rank: int) -> str:
    build_world_mesh(dp=4)
    with pytest.MonkeyPatch.context() as patch:
        if rank != 0:
            patch.setattr(world_module, "_world_mesh", None)
        try:
            build_world_mesh(dp=4)
            message = "built"
        except MeshError as error:
            message = str(error)
    reset_world_mesh()
    return message


def test_a_rank_that_has_a_world_mesh_already_keeps_no_other_waiting(ranks: Pool) -> None:
    first, *others = ranks(4).run(build_where_one_rank_has_a_world_mesh)
    assert first.startswith("there is a world mesh already")
    assert all(other.startswith("ranks build different meshes") for other in others)


def build_with_one_topology(rank: int) -> str:
    try:
        nodes = None if rank == 0 else Topology(ranks_per_node=2)
        ParallelDims().build_mesh(topology=nodes)
    except MeshError as error:
        return str(error)
    return "built"


@pytest.mark.nccl
def test_ranks_that_differ_in_topology_all_raise(ranks: Pool) -> None:
    for message in ranks(4).run(build_with_one_topology):
        assert message.startswith(
            "ranks build different meshes: topology differs between ranks; this rank has {"
        )


def test_the_error_names_the_degrees_that_differ_and_the_rank_that_refuses(ranks: Pool) -> None:
    for message in ranks(4).run(build_what_differs, {0: 4}, 2):
        assert ": dp_shard and tp differ between ranks; " in message
    messages = ranks(4).run(build_what_differs, {1: 3}, 2)
    assert messages.pop(1).startswith("tp=3 does not divide")
    for message in messages:
        assert ": rank 1 refuses its arguments and builds none, its own error " in message
        assert "differ between" not in message
