"""World meshes on fake groups, and which ranks to expect in their parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod

import pytest
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_mesh.world import reset_world_mesh

from .fakes import fake_world

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@contextmanager
def one_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be ``rank`` of ``size`` ranks and forget the world mesh at the end."""
    with fake_world(size, rank):
        try:
            yield
        finally:
            reset_world_mesh()


@contextmanager
def no_new_groups() -> Iterator[None]:
    """Let nothing create a process group until the block ends."""

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("a group was created")

    with pytest.MonkeyPatch.context() as patch:
        for module in (dist, distributed_c10d, device_mesh):
            for name in ("new_group", "split_group"):
                patch.setattr(module, name, refuse)
        yield


def plain(**sizes: int) -> DeviceMesh:
    """Return torch's own mesh, axes outermost first."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def peers(shape: dict[str, int], rank: int, along: tuple[str, ...]) -> list[int]:
    """Return the ranks that differ from one only along some axes, those outermost first."""
    places = list(product(*(range(size) for size in shape.values())))
    moves = [name in along for name in shape]
    return [
        other
        for other, place in enumerate(places)
        if all(move or a == b for move, a, b in zip(moves, place, places[rank], strict=True))
    ]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, int], int]:
    """Give the sizes of five axes, outermost first, and a rank."""
    shape = {name: draw(st.integers(1, 3)) for name in AXES}
    return shape, draw(st.integers(0, prod(shape.values()) - 1))
