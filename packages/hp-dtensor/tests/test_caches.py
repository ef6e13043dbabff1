"""Caches hold no mesh and no group, have a bounded size, and can be cleared."""

import gc
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import (
    RaggedShard,
    Replicate,
    Shard,
    clip_grad_norm_,
    explain,
    plan_transfer,
    redistribute,
)
from hp_dtensor.testing import clear_caches

R, S0, S1 = Replicate(), Shard(0), Shard(1)
_prepare: Any = import_module(plan_transfer.__module__.rpartition("._")[0] + "._prepare")


@pytest.fixture(autouse=True)
def nothing_moves() -> Iterator[None]:
    """Create a fake world of eight ranks. Its collectives complete at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield
    dist.destroy_process_group()


def cube(name: str = "a") -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=(name, "b", "c"))
    mesh[name, "b"]._flatten("both")
    return mesh


def source(mesh: DeviceMesh) -> Any:
    placements = [theirs.Shard(0), theirs.Shard(1), theirs.Replicate()]
    shape = torch.Size((8, 8))
    return DTensor.from_local(torch.zeros(4, 4), mesh, placements, shape=shape, stride=(8, 1))


USES: dict[str, Callable[[Any], object]] = {
    "one mesh": lambda x: redistribute(x, (S1, S0, R)),
    "ragged": lambda x: redistribute(x, (RaggedShard((0,), (3, 5)), R, R)),
    "from ragged": lambda x: redistribute(redistribute(x, (RaggedShard((0,), (3, 5)), R, R))),
    "two meshes": lambda x: redistribute(
        x, (S0,), mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("d",))
    ),
    "gradient": lambda x: _with_gradient(x),
    "norm": lambda x: clip_grad_norm_(_graded(x), 1.0),
    "groups": lambda x: redistribute(x, (S1, S0, R), groups=(dist.new_group(range(4)),)),
}


# Operators of torch would keep the mesh in torch's own caches.
def _graded(x: Any) -> Any:
    x.requires_grad_().grad = source(x.device_mesh)
    return [x]


def _with_gradient(x: Any) -> None:
    y: Any = redistribute(x.requires_grad_(), (S1, S0, R))
    mesh, shape = x.device_mesh, torch.Size((8, 8))
    grad = DTensor.from_local(torch.ones(4, 4), mesh, y.placements, shape=shape, stride=(8, 1))
    torch.autograd.grad(y, x, grad)


@pytest.mark.parametrize("use", USES)
def test_a_mesh_goes_when_its_last_tensor_does(use: str) -> None:
    mesh = cube(use)  # equal meshes would be found under each other's keys
    x = source(mesh)
    USES[use](x)
    gone = weakref.ref(mesh)
    del mesh, x
    gc.collect()
    assert gone() is None


def test_calls_plan_again_after_the_caches_were_cleared() -> None:
    mesh = cube()
    x = source(mesh)
    first = explain(x, (S1, S0, R))
    assert explain(x, (S1, S0, R)) is first
    clear_caches()
    again = explain(x, (S1, S0, R))
    assert again is not first
    assert again == first


def test_every_cache_has_a_bound() -> None:
    package = plan_transfer.__module__.rpartition("._")[0]
    cached = [each for each in gc.get_objects() if _is_cache(each, package)]
    assert cached
    assert [each for each in cached if each.cache_parameters()["maxsize"] is None] == []


def _is_cache(value: object, package: str) -> bool:
    kind = type(value)
    if kind.__name__ != "_lru_cache_wrapper":
        return False
    return str(getattr(value, "__module__", "")).startswith(package)


def test_the_oldest_entry_goes_from_a_full_cache_and_all_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clear_caches()
    monkeypatch.setattr(_prepare, "_MOST_PREPARED", 2)
    x = source(cube())
    targets = [(S1, S0, R), (R, R, R), (S0, R, R)]
    plans = [explain(x, target) for target in targets]
    assert kept() == plans[1:]
    clear_caches()
    assert kept() == []


def kept() -> list[Any]:
    return [prepared.plan for _, prepared in _prepare._prepared.values()]
