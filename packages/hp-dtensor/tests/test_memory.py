"""The measured peak memory of a plan is at most the predicted one."""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rank_pool import FinishedWork
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import (
    Axis,
    Layout,
    Partial,
    Replicate,
    Shard,
    TorchCollectives,
    Work,
    plan_transfer,
)

Placement = Replicate | Shard | Partial
_package = plan_transfer.__module__.rpartition("._")[0]
_execute: Any = import_module(f"{_package}._execute")
_prepare: Any = import_module(f"{_package}._prepare")

KINDS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())


class Held(TorchDispatchMode):
    """Adds up the bytes of tensors that are alive, views of the same memory once."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, list[int]] = {}  # address: bytes, tensors
        self._now = 0
        self.most = 0
        self._add(given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, Tensor):
                self._add(item)
        return out

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0:
            return
        if address not in self._alive:
            self._alive[address] = [size, 0]
            self._now += size
            self.most = max(self.most, self._now)
        self._alive[address][1] += 1
        weakref.finalize(x, self._drop, address)

    def _drop(self, address: int) -> None:
        entry = self._alive[address]
        entry[1] -= 1
        if entry[1] == 0:
            self._now -= entry[0]
            del self._alive[address]


class Allocating(TorchCollectives):
    """torch's collectives with an ``all_to_all`` that works in a fake group."""

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Exchange row blocks."""
        if input.numel() or receive_splits is None:
            return super().all_to_all(axis, input, send_splits, receive_splits, output)
        return FinishedWork([input.new_empty(sum(receive_splits))])


@pytest.fixture(scope="module", params=["in order", "turned round"])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Return a mesh over a fake group, which allocates outputs and moves no data.

    Ranks ascend within a group. Their order in the mesh is the same or the reverse.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    if request.param == "in order":
        yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    else:
        ranks = torch.arange(8).reshape(2, 4).flip(0, 1)
        yield DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def spelled(placement: object) -> theirs.Placement:
    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    return theirs.Partial() if isinstance(placement, Partial) else theirs.Replicate()


@pytest.mark.parametrize("shape", [(64, 64), (63, 62)])
@pytest.mark.parametrize("source", list(itertools.product(KINDS, repeat=2)))
def test_a_plan_holds_at_most_what_it_says(
    mesh: DeviceMesh, source: tuple[Placement, Placement], shape: tuple[int, int]
) -> None:
    rank = mesh.mesh.flatten().tolist().index(1)
    local = torch.ones(Layout((2, 4), source).local_shape(shape, rank))
    x = DTensor.from_local(
        local, mesh, [spelled(p) for p in source], shape=torch.Size(shape), stride=(shape[1], 1)
    )
    for target in itertools.product(KINDS[:3], repeat=2):
        prepared = _prepare.prepare(x, target, None, _prepare.NO_OPTIONS)
        if prepared.unchanged:
            continue
        with Held(local) as mode:
            result = _execute.start(prepared.steps, local, Allocating())()
        assert mode.most <= prepared.plan.peak_bytes, str(prepared.plan)
        assert mode.most >= local.nbytes + result.nbytes
        del result
