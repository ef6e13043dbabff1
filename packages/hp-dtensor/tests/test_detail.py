"""Under torch's TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares collectives too, all goes on."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from rank_pool import RankPool, cached
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import (
    Axis,
    CheckedCollectives,
    Layout,
    NonMember,
    Partial,
    Replicate,
    Shard,
    TorchCollectives,
    clip_grad_norm_,
    redistribute,
)

KINDS: tuple[Any, ...] = (Replicate(), Shard(0), Shard(1), Partial())
VALUES = torch.arange(35.0, dtype=torch.double).view(5, 7)


def changes(rank: int) -> list[str]:
    """Return the changes of layout that do not give the whole tensor back, there and back."""
    c10d: Any = dist
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)  # groups that are made from here on are wrapped
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mesh["a", "b"]._flatten("ab")
    finally:
        c10d.set_debug_level_from_env()
    wrong = []
    for old, new in itertools.product(itertools.product(KINDS, repeat=2), repeat=2):
        if any(isinstance(q, Partial) and p != q for p, q in zip(old, new, strict=True)):
            continue
        share = 2 ** sum(isinstance(p, Partial) for p in old)
        plain = [Replicate() if isinstance(p, Partial) else p for p in old]
        cut = dt.distribute_tensor(VALUES, mesh, [spelled(p) for p in plain], src_data_rank=None)
        x = dt.DTensor.from_local(
            (cut.to_local() / share).requires_grad_(),
            mesh,
            [spelled(p) for p in old],
            shape=VALUES.shape,
            stride=VALUES.stride(),
        )
        for collectives in (None, CheckedCollectives(deadline=200)):
            y = redistribute(x, new, collectives=collectives)
            whole = redistribute(y).to_local()
            whole.sum().backward()
            if not torch.equal(whole, VALUES):
                wrong.append(f"{old} -> {new}")
    parameter = torch.nn.Parameter(dt.distribute_tensor(VALUES, mesh, [dt.Shard(0), dt.Shard(1)]))
    parameter.grad = parameter.detach().clone()
    norm = clip_grad_norm_([parameter], 1.0)
    return [*wrong, *(["norm"] if abs(norm - VALUES.norm()) > 1e-9 else [])]


def spelled(placement: Any) -> dt.Placement:
    if isinstance(placement, Shard):
        return dt.Shard(placement.dim)
    return dt.Partial() if isinstance(placement, Partial) else dt.Replicate()


def test_all_changes_on_one_mesh_pass_the_checks_of_detail(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(4).run(changes) == [[]] * 4


def unequal(rank: int) -> str:
    """Reduce-scatter tensors whose sizes differ between the ranks."""
    c10d: Any = dist
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    try:
        group: Any = dist.new_group()
    finally:
        c10d.set_debug_level_from_env()
    axis = Axis("x", group, (0, 1))
    try:
        TorchCollectives().reduce_scatter(axis, [torch.ones(16 * (2 - rank))]).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_detail_compares_the_sizes_of_reduce_scatters(ranks: Callable[[int], RankPool]) -> None:
    for error in ranks(2).run(unequal):
        assert "mismatch" in error


MESHES = {"two": [0, 1], "three": [1, 2, 3], "all": [[0, 1], [2, 3]], "one": [3]}


def transfers(rank: int) -> list[str]:
    """Return the moves between meshes that fail, and collectives that fail after them."""
    c10d: Any = dist
    meshes = {
        name: cached(("detail", name), lambda at=at: DeviceMesh("cpu", torch.tensor(at)))  # type: ignore[misc]
        for name, at in MESHES.items()
    }
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    try:
        world = dist.new_group([0, 1, 2, 3])
        some = dist.new_group([1, 2, 3])
    finally:
        c10d.set_debug_level_from_env()
    wrong = []
    for there, back in itertools.product(meshes, repeat=2):
        old, new = meshes[there], meshes[back]
        members = {*old.mesh.flatten().tolist(), *new.mesh.flatten().tolist()}
        group = {(0, 1, 2, 3): world, (1, 2, 3): some}.get(tuple(sorted(members)))
        if there == back or group is None or rank not in members:
            continue
        cut = Layout(tuple(old.shape), (Shard(0),) * old.ndim, ranks=old.mesh.flatten().tolist())
        x: Any = NonMember(cut, tuple(VALUES.shape), VALUES.dtype)
        if old.get_coordinate() is not None:
            x = dt.distribute_tensor(VALUES, old, [dt.Shard(0)] * old.ndim, src_data_rank=None)
        y = redistribute(x, [Shard(1)] * new.ndim, mesh=new, groups=[group])
        total = torch.ones(1)
        dist.all_reduce(total, group=group)  # torch compares the number of earlier calls
        if not isinstance(y, NonMember) and not torch.equal(redistribute(y).to_local(), VALUES):
            wrong.append(f"{there} -> {back}")
    return wrong


def test_transfers_between_meshes_pass_the_checks_of_detail(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(4).run(transfers) == [[]] * 4
