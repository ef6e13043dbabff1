"""A started redistribution ends as one that is not, whatever its steps."""

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import (
    Layout,
    Partial,
    RaggedShard,
    RaggedTensor,
    Replicate,
    Shard,
    TorchCollectives,
    Work,
    explain,
    redistribute,
)

Pools = Callable[[int], RankPool]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Way = tuple[Layout, Layout, tuple[int, ...]]
WAYS: dict[tuple[str, ...], Way] = {
    (): (Layout((4,), (S0,)), Layout((4,), (S0,)), (8, 4)),
    ("slice",): (Layout((4,), (R,)), Layout((4,), (S0,)), (5, 4)),
    ("all_gather",): (Layout((4,), (S0,)), Layout((4,), (R,)), (8, 4)),
    ("all_to_all",): (Layout((4,), (S0,)), Layout((4,), (S1,)), (8, 4)),
    ("all_reduce",): (Layout((4,), (P,)), Layout((4,), (R,)), (8, 4)),
    ("reduce_scatter",): (Layout((4,), (P,)), Layout((4,), (S0,)), (8, 4)),
    ("direct",): (Layout((2, 2), (S0, S1)), Layout((2, 2), (S1, S0)), (5, 3)),
    ("reduce_scatter", "direct"): (Layout((2, 2), (P, S1)), Layout((2, 2), (S1, R)), (8, 4)),
    ("transfer",): (Layout((4,), (S0,)), Layout((2, 2), (S0, S1)), (6, 4)),
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def part(full: Tensor, layout: Layout, rank: int) -> Tensor:
    box = layout.box_at(tuple(full.shape), layout.coordinate(rank))
    return full[tuple(slice(lo, hi) for lo, hi in box)].clone()


def spelled(layout: Layout) -> list[theirs.Placement]:
    kinds = {"Replicate": theirs.Replicate, "Partial": theirs.Partial}
    return [
        theirs.Shard(p.dim) if isinstance(p, Shard) else kinds[type(p).__name__]()
        for p in layout.placements
    ]


def leaf(source: Layout, shape: tuple[int, ...], rank: int) -> DTensor:
    full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    x = DTensor.from_local(
        part(full, source, rank),
        mesh_of(source.mesh_shape),
        spelled(source),
        shape=full.shape,
        stride=full.stride(),
    )
    return cast(DTensor, x.detach().requires_grad_())


Answer = tuple[tuple[str, ...], Tensor, Tensor, list[Tensor], bool]


def both(rank: int, source: Layout, target: Layout, shape: tuple[int, ...]) -> Answer:
    """Return the kinds of steps, results and gradients at once and waited for, and wait() twice."""
    mesh = mesh_of(target.mesh_shape)
    kinds = tuple(
        step.kind for step in explain(leaf(source, shape, rank), target.placements, mesh=mesh).steps
    )
    locals_, grads = [], []
    again = True
    crosses = source.mesh_shape != target.mesh_shape  # gradients do not pass between meshes
    for later in (False, True):
        x = cast(DTensor, leaf(source, shape, rank).requires_grad_(not crosses))
        if later:
            pending = redistribute(x, target.placements, mesh=mesh, async_op=True)
            y = pending.wait()
            again = pending.wait() is y
        else:
            y = redistribute(x, target.placements, mesh=mesh)
        assert isinstance(y, DTensor)
        locals_.append(y.to_local().detach())
        if not crosses:
            (y * y).sum().backward()
            assert isinstance(x.grad, DTensor)
            grads.append(x.grad.to_local())
    return kinds, locals_[0], locals_[1], grads, again


@pytest.mark.nccl
@pytest.mark.parametrize("kinds", WAYS, ids="+".join)
def test_every_kind_of_plan_can_be_waited_for(ranks: Pools, kinds: tuple[str, ...]) -> None:
    source, target, shape = WAYS[kinds]
    terms = math.prod(
        n for n, p in zip(source.mesh_shape, source.placements, strict=True) if p == P
    )
    full = terms * torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    for rank, answer in enumerate(ranks(4).run(both, source, target, shape)):
        found, at_once, waited, grads, again = answer
        assert found == kinds
        assert torch.equal(at_once, part(full, target, rank))
        assert torch.equal(waited, at_once)
        assert len(grads) == (0 if "transfer" in kinds else 2)
        assert all(torch.equal(grad, 2 * part(full, source, rank)) for grad in grads)
        assert again


def written_into(rank: int, source: Layout, target: Layout, shape: tuple[int, ...]) -> list[str]:
    """Write to the inputs of pending results. Return the errors, with and without gradients."""
    found, given = [], (source, shape, rank)
    crosses = source.mesh_shape != target.mesh_shape  # gradients do not pass between meshes
    for grad in (not crosses, False):
        x = cast(DTensor, leaf(*given).mul(1) if grad else leaf(*given).detach())
        mesh = mesh_of(target.mesh_shape)
        pending = redistribute(x, target.placements, mesh=mesh, async_op=True)
        with torch.no_grad():
            x.zero_()
        try:
            pending.wait()
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kinds", [kinds for kinds in WAYS if kinds], ids="+".join)
def test_tensors_in_flight_must_not_be_written(ranks: Pools, kinds: tuple[str, ...]) -> None:
    for found in ranks(4).run(written_into, *WAYS[kinds]):
        assert len(found) == 2
        assert all("written into between redistribute" in words for words in found)


def ragged(rank: int) -> tuple[Tensor, Tensor]:
    x = leaf(Layout((4,), (S0,)), (6, 2), rank)
    runs = redistribute(x, (RaggedShard((0,), (1, 0, 3, 2)),), async_op=True).wait()
    assert isinstance(runs, RaggedTensor)
    back = redistribute(runs, (S0,), async_op=True).wait()
    assert isinstance(back, DTensor)
    return runs.to_local().detach(), back.to_local().detach()


@pytest.mark.nccl
def test_ragged_runs_can_be_waited_for_both_ways(ranks: Pools) -> None:
    full = torch.arange(12, dtype=torch.float64).view(6, 2)
    starts = (0, 1, 1, 4, 6)
    for rank, (runs, back) in enumerate(ranks(4).run(ragged)):
        assert torch.equal(runs, full[starts[rank] : starts[rank + 1]])
        assert torch.equal(back, part(full, Layout((4,), (S0,)), rank))


class Late:
    """A call under way, that is over only once it is waited for."""

    def __init__(self, collectives: "LateCollectives", work: Work) -> None:
        self._door, self._work = collectives, work

    def wait(self) -> list[Tensor]:
        """Return the outputs."""
        self._door.waited += 1
        return self._work.wait()


class LateCollectives(TorchCollectives):
    """Collectives that count starts and waits."""

    def __init__(self) -> None:
        self.started = self.waited = 0


def _late(name: str) -> Callable[..., Late]:
    def call(self: LateCollectives, *args: Any, **options: Any) -> Late:
        self.started += 1
        return Late(self, getattr(super(LateCollectives, self), name)(*args, **options))

    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
    setattr(LateCollectives, _name, _late(_name))


@pytest.fixture
def nothing_moves() -> Iterator[None]:
    """Create a fake world of four ranks. Its collectives complete at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kinds", WAYS, ids="+".join)
@pytest.mark.usefixtures("nothing_moves")
def test_a_call_returns_while_its_first_collective_is_under_way(kinds: tuple[str, ...]) -> None:
    source, target, shape = WAYS[kinds]
    meshes = {
        layout.mesh_shape: init_device_mesh(
            "cpu", layout.mesh_shape, mesh_dim_names=("a", "b")[: len(layout.mesh_shape)]
        )
        for layout in (source, target)
    }
    x = DTensor.from_local(
        part(torch.zeros(shape), source, 1),
        meshes[source.mesh_shape],
        spelled(source),
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )
    collectives = LateCollectives()
    calls = [kind for kind in kinds if kind != "slice"]
    pending = redistribute(
        x,
        target.placements,
        mesh=meshes[target.mesh_shape],
        collectives=collectives,
        async_op=True,
    )
    assert (collectives.started, collectives.waited) == (min(1, len(calls)), 0)
    pending.wait()
    pending.wait()
    assert (collectives.started, collectives.waited) == (len(calls), len(calls))


class FailingCollectives(LateCollectives):
    """Collectives of which one call fails when it is waited for."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails


class Failing(Late):
    """A call under way that may fail."""

    def wait(self) -> list[Tensor]:
        """Return the outputs, or raise."""
        outputs = super().wait()
        if isinstance(self._door, FailingCollectives) and self._door.waited == self._door.fails:
            raise ConnectionError("the peer is gone")
        return outputs


def _failing(name: str) -> Callable[..., Late]:
    def call(self: FailingCollectives, *args: Any, **options: Any) -> Late:
        self.started += 1
        return Failing(self, getattr(TorchCollectives, name)(self, *args, **options))

    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
    setattr(FailingCollectives, _name, _failing(_name))


@pytest.mark.parametrize("fails", [1, 2])
@pytest.mark.usefixtures("nothing_moves")
def test_after_a_failure_every_wait_raises_the_same_error(fails: int) -> None:
    source, target, shape = WAYS["reduce_scatter", "direct"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = DTensor.from_local(
        part(torch.zeros(shape), source, 1),
        mesh,
        spelled(source),
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )
    collectives = FailingCollectives(fails)
    pending = redistribute(x, target.placements, collectives=collectives, async_op=True)
    errors = []
    for _ in range(3):
        with pytest.raises(ConnectionError, match="the peer is gone") as info:
            pending.wait()
        errors.append(info.value)
    assert errors[0] is errors[1] is errors[2]
    # Every started collective was waited for, and none was started again.
    assert collectives.started == collectives.waited == fails
