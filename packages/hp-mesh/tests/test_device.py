"""Device types: which is taken, which are refused, and where ranks compare."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from hp_mesh import MeshError, ParallelDims, _groups
from hp_mesh.world import build_expert_parallel_mesh, build_world_mesh

from .fakes import fake_world


def there_is(monkeypatch: pytest.MonkeyPatch, kind: str | None, available: bool) -> None:
    """Let torch be built for a kind of accelerator, with or without one in the machine."""

    def current(check_available: bool = False) -> torch.device | None:
        found = kind is not None and (available or not check_available)
        return torch.device(cast(str, kind)) if found else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, "cuda", available=True)


def backends(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """Let the default group have backends such as ``cpu:gloo,cuda:nccl``."""
    names = {pair.partition(":")[2] for pair in config.split(",")}
    backend = names.pop() if len(names) == 1 else "undefined"
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("config", "default", "comparison"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu"),
    ],
)
def test_meshes_are_on_the_accelerator_but_for_gloo_and_ranks_compare_on_the_cpu_with_it(
    monkeypatch: pytest.MonkeyPatch, config: str, default: str, comparison: str
) -> None:
    backends(monkeypatch, config)
    assert _groups.default_device_type() == default
    assert _groups.comparison_device_type() == comparison


def test_without_an_accelerator_all_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    there_is(monkeypatch, None, available=False)
    backends(monkeypatch, "cpu:mpi")
    assert _groups.default_device_type() == _groups.comparison_device_type() == "cpu"


def test_an_accelerator_that_torch_was_built_for_and_that_is_not_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the usual build of torch on a machine without a GPU."""
    there_is(monkeypatch, "cuda", available=False)
    backends(monkeypatch, "cpu:gloo,cuda:nccl")
    assert _groups.default_device_type() == _groups.comparison_device_type() == "cpu"


@pytest.mark.parametrize(
    ("device_type", "reason"),
    [
        ("cuda:0", "has an index; give 'cuda' without it"),
        ("cpu:0", "has an index; give 'cpu' without it"),
        ("foo", "is no device type of torch"),
        ("CPU", "is no device type of torch"),
        ("", "is no device type of torch"),
        (5, "is no string"),
        (torch.device("cpu"), "is no string"),
    ],
)
def test_what_is_no_device_type_is_refused_with_those_of_the_world(
    device_type: Any, reason: str
) -> None:
    with fake_world(2):
        for build in (ParallelDims().build_mesh, lambda kind: build_world_mesh(device_type=kind)):
            with pytest.raises(MeshError) as caught:
                build(device_type)
            assert str(caught.value).startswith(f"device_type={device_type!r} {reason}; ")
            assert "'cpu', 'cuda'" in str(caught.value)
        with pytest.raises(MeshError, match=r"^device_type="):
            build_expert_parallel_mesh(-1, device_type)


def test_a_device_type_without_a_backend_in_this_world_is_refused_before_a_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("a group was created")

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "new_group", refuse)
        for build in (ParallelDims().build_mesh, lambda kind: build_world_mesh(device_type=kind)):
            with pytest.raises(MeshError) as caught:
                build("xpu")
            assert str(caught.value) == (
                "device_type='xpu' has no backend in this world; this world has backends for "
                "'cpu' or 'cuda', and None takes the default"
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "device_type"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:mpi,hpu:hccl", "cpu"),
    ],
)
def test_the_default_device_type_has_a_backend(
    monkeypatch: pytest.MonkeyPatch, config: str, device_type: str
) -> None:
    there_is(monkeypatch, "cuda", available=True)
    backends(monkeypatch, config)
    assert _groups.default_device_type() == device_type
