"""Clipping over several meshes: which groups it reduces over, in one order on all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import (
    Axis,
    MeshError,
    RaggedShard,
    RaggedTensor,
    Replicate,
    Shard,
    TorchCollectives,
    Work,
    clip_grad_norm_,
    distribute_tensor,
    redistribute,
)

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of(*names: str) -> DeviceMesh:
    return cached(names, lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


class Noting(TorchCollectives):
    """Note which axes are used, with their ranks."""

    def __init__(self) -> None:
        self.axes: list[tuple[str, tuple[int, ...]]] = []

    def _note(self, axis: Axis) -> None:
        self.axes.append((axis.name, axis.ranks))

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: Any = "sum") -> Work:
        """Note and pass on."""
        self._note(axis)
        return super().all_reduce(axis, tensors, op)

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Note and pass on."""
        self._note(axis)
        return super().all_gather(axis, inputs, outputs)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Note and pass on."""
        self._note(axis)
        return super().all_to_all(axis, input, send_splits, receive_splits, output)

    def send_recv(
        self,
        axis: Axis,
        sends: Mapping[int, Tensor | Sequence[Tensor]],
        receives: Mapping[int, Tensor | Sequence[Tensor]],
    ) -> Work:
        """Note and pass on."""
        self._note(axis)
        return super().send_recv(axis, sends, receives)


def parameter(mesh: DeviceMesh, placements: Sequence[Any], seed: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(4, 6, generator=generator, dtype=torch.double)
    made = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in (grad * 0, grad)]
    result = nn.Parameter(made[0])
    result.grad = made[1]
    return result


def ordered(rank: int) -> tuple[Tensor, list[tuple[str, tuple[int, ...]]]]:
    """Clip parameters on rows and columns of two meshes of the same ranks, in this rank's order."""
    first, second = mesh_of("dp", "tp"), mesh_of("efsdp", "ep")
    given = [
        parameter(first, (R, S0), 1),
        parameter(second, (R, S1), 2),
        parameter(first, (S0, R), 3),
        parameter(second, (S1, R), 4),
        parameter(second, (R, RaggedShard((0,), (3, 1))), 5),
    ]
    collectives = Noting()
    norm = clip_grad_norm_(given if rank in (0, 3) else given[::-1], 1e9, collectives=collectives)
    return norm, collectives.axes


def test_ranks_that_list_parameters_in_another_order_reduce_in_the_same_one(ranks: Pools) -> None:
    grads = []
    for seed in range(1, 6):
        generator = torch.Generator().manual_seed(seed)
        grads.append(torch.randn(4, 6, generator=generator, dtype=torch.double))
    expected = torch.stack(grads).norm()
    for rank, (norm, axes) in enumerate(ranks(4).run(ordered)):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
        row, column = (2 * (rank // 2), 2 * (rank // 2) + 1), (rank % 2, rank % 2 + 2)
        # In the order of the ranks; of two groups with the same ranks, the first by name.
        wanted = {row: ("ep", row), column: ("dp", column)}
        assert axes == [wanted[ranks] for ranks in sorted(wanted)]


@pytest.fixture
def eight() -> Iterator[DeviceMesh]:
    """Return a mesh of eight pretended ranks that has a group over all of its axes together."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh._flatten("abc")
        yield mesh
    finally:
        dist.destroy_process_group()


def test_a_group_with_ranks_outside_the_mesh_is_not_used(eight: DeviceMesh) -> None:
    """The ranks of the other half of the world do not make the call."""
    half = eight["a", "b"]
    inside = set(half.mesh.flatten().tolist())
    x = DTensor.from_local(torch.ones(2, 3), half, [theirs.Shard(0), theirs.Shard(1)])
    weight = nn.Parameter(torch.zeros_like(x))
    weight.grad = x
    collectives = Noting()
    clip_grad_norm_(weight, 1e9, collectives=collectives)
    assert [name for name, _ in collectives.axes] == ["a", "b"]
    redistribute(x, (R, R), collectives=collectives)
    assert len(collectives.axes) > 2
    assert all(inside.issuperset(ranks) for _, ranks in collectives.axes)


def groupless(rank: int) -> str:
    names = ("i", "j")
    mesh = DeviceMesh(
        "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    weight = nn.Parameter(
        RaggedTensor.from_local(torch.ones(3), mesh, (RaggedShard((0,), (3, 3)), R), shape=(6,))
    )
    weight.grad = weight.detach().clone()
    with pytest.raises(MeshError) as info:
        clip_grad_norm_(weight, 1e-3)
    assert isinstance(weight.grad, RaggedTensor)
    assert weight.grad.to_local().tolist() == [1.0] * 3
    return str(info.value)


def test_an_axis_without_a_group_of_its_own_is_named_and_the_worlds_is_not_taken(
    ranks: Pools,
) -> None:
    """The world has more ranks than the axis: its sum would count every part twice."""
    first, *others = ranks(4).run(groupless)
    assert others == [first] * 3
    assert "the ranks of axis 0 of" in first


@pytest.mark.parametrize("wrong", ["gloo", object(), TorchCollectives])
def test_invalid_collectives_raise_with_their_type(wrong: Any) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match=r"collectives=.*use TorchCollectives\(\)"):
        clip_grad_norm_(weight, 1.0, collectives=wrong)
    assert weight.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("wrong", ["pp", 0])
def test_an_invalid_axis_of_stages_raises(wrong: Any, eight: DeviceMesh) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    for pp in (wrong, eight, eight["a", "b"]):
        with pytest.raises(MeshError, match=r"pp=.* is no axis; .* mesh\['pp'\]"):
            clip_grad_norm_(weight, 1.0, pp=pp)
    assert weight.grad.tolist() == [3.0, 4.0]
