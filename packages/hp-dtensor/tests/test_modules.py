"""Distributing tensors and modules, joining meshes, reducing partial values."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, cast

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hp_dtensor import (
    Layout,
    LayoutError,
    MeshError,
    Partial,
    RaggedShard,
    RaggedTensor,
    RecordingCollectives,
    Replicate,
    Shard,
    StridedShard,
    concatenate_meshes,
    distribute_module,
    distribute_tensor,
    redistribute,
    reduce_partial,
)

from .test_ragged import BATCH, Ragged, mesh_of, part_of, ragged_cases, whole

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@st.composite
def dense_cases(draw: st.DrawFn, mesh: tuple[int, ...]) -> Ragged:
    """Draw a layout without a ragged axis."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    kinds: list[Replicate | Shard | StridedShard] = [R]
    kinds += [StridedShard(0, 3), StridedShard(0, 5), *map(Shard, range(len(shape)))]
    return Ragged(Layout(mesh, tuple(draw(st.sampled_from(kinds)) for _ in mesh)), shape)


class Distributed(NamedTuple):
    """Results of one rank."""

    local: Tensor
    full: Tensor
    own: Tensor
    calls: tuple[int, int]
    is_leaf: bool
    requires_grad: bool


def distributed(rank: int, batch: list[Ragged]) -> list[Distributed]:
    results = []
    for case in batch:
        mesh = mesh_of(case.layout.mesh_shape)
        data = whole(case.shape) if rank == 0 else whole(case.shape, 99 + rank)
        mine = data.clone()
        with CommDebugMode() as shared:
            x = distribute_tensor(data.requires_grad_(), mesh, case.layout.placements)
        with CommDebugMode() as alone:
            y = distribute_tensor(mine, mesh, case.layout.placements, src_data_rank=None)
        assert isinstance(x, RaggedTensor) == (case.layout.ragged is not None)
        calls = (shared.get_total_counts(), alone.get_total_counts())
        # torch's full_tensor mixes up rows of dims that several axes split into blocks.
        local, full, own = (z.to_local().detach() for z in (x, redistribute(x), y))
        results.append(Distributed(local, full, own, calls, x.is_leaf, x.requires_grad))
    return results


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_the_values_of_the_source_win_and_none_means_no_communication(
    ranks: Pools, mesh: tuple[int, ...]
) -> None:
    @settings(deadline=None, max_examples=2)
    @given(
        st.lists(st.one_of(ragged_cases(mesh), dense_cases(mesh)), min_size=BATCH, max_size=BATCH)
    )
    def check(batch: list[Ragged]) -> None:
        for rank, results in enumerate(ranks(4).run(distributed, batch)):
            for case, result in zip(batch, results, strict=True):
                full = whole(case.shape)
                assert torch.equal(result.local, part_of(full, case, rank))
                assert torch.equal(result.full, full)
                mine = full if rank == 0 else whole(case.shape, 99 + rank)
                assert torch.equal(result.own, part_of(mine, case, rank))
                assert result.calls == (len(mesh), 0)
                assert result.is_leaf
                assert result.requires_grad

    check()


OTHER_SOURCE: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), (S0,)),
    ((2, 2), (S0, S1)),
    ((2, 2), (R, S1)),
    ((2, 2), (StridedShard(0, 2), S0)),
    ((4,), (RaggedShard((0,), (5, 1, 0, 2)),)),
]


def from_another_source(rank: int) -> list[Tensor]:
    found = []
    for shape, placements in OTHER_SOURCE:
        data = whole((8, 6), 50 + rank)
        x = distribute_tensor(data, mesh_of(shape), placements, src_data_rank=1)
        found.append(redistribute(x).to_local())
    return found


@pytest.mark.nccl
def test_the_source_is_a_coordinate_on_every_axis(ranks: Pools) -> None:
    """Coordinate 1 of each axis: rank 1 of a line, the last rank of a square."""
    for found in ranks(4).run(from_another_source):
        for (shape, _), full in zip(OTHER_SOURCE, found, strict=True):
            assert torch.equal(full, whole((8, 6), 50 + (1 if len(shape) == 1 else 3)))


def few_rows(rank: int) -> Tensor:
    return distribute_tensor(whole((3,), rank), mesh_of((4,)), (StridedShard(0, 3),)).to_local()


def test_strided_shards_of_fewer_rows_than_ranks_get_their_rows(ranks: Pools) -> None:
    assert [part.tolist() for part in ranks(4).run(few_rows)] == [whole((3,)).tolist(), [], [], []]


def refused(rank: int) -> list[tuple[str, str]]:
    square, line, nameless = mesh_of((2, 2)), mesh_of((4,)), DeviceMesh("cpu", [0, 1, 2, 3])
    data: Any = whole((8, 4))
    grown = data.clone().requires_grad_() * 2
    held = distribute_tensor(data, line, (S0,), src_data_rank=None)
    assert distribute_tensor(held, line, (theirs.Shard(-2),)) is held
    runs = RaggedShard((0,), (8, 0, 0, 0))
    ragged = distribute_tensor(data, line, (runs,), src_data_rank=None)
    assert distribute_tensor(ragged, line, (runs,)) is ragged
    calls: list[Callable[[], Any]] = [
        lambda: distribute_tensor(data, "cpu", (S0, R)),  # type: ignore[call-overload]
        lambda: distribute_tensor([1.0], square, (S0, R)),  # type: ignore[call-overload]
        lambda: distribute_tensor(data, square, S0),  # type: ignore[call-overload]
        lambda: distribute_tensor(data, square, (S0,)),
        lambda: distribute_tensor(data, square, ("rows", R)),  # type: ignore[arg-type]
        lambda: distribute_tensor(data, square, (Shard(2), R)),
        lambda: distribute_tensor(data, square, (Partial("sum"), Partial("max"))),
        lambda: distribute_tensor(data, line, (RaggedShard((0,), (4, 3, 2, 1)),)),
        lambda: distribute_tensor(grown, square, (S0, R)),
        lambda: distribute_tensor(data, square, (S0, R), src_data_rank=2),
        lambda: distribute_tensor(held, line, (S1,)),
        lambda: distribute_tensor(held, square, (S0, R)),
        lambda: distribute_tensor(ragged, line, (S0,)),
        lambda: distribute_module(nn.Linear(2, 2), "cpu"),  # type: ignore[arg-type]
        lambda: distribute_module(data, square),
        lambda: concatenate_meshes([]),
        lambda: concatenate_meshes(["a"]),  # type: ignore[list-item]
        lambda: concatenate_meshes([square["a"], square["a"]]),
        lambda: concatenate_meshes([nameless]),
        lambda: reduce_partial(data),
        lambda: reduce_partial(cast(Any, ragged)),
        lambda: distribute_tensor(data, square, (StridedShard(0, 3), Partial())),
        lambda: distribute_tensor(data, square, (S0, R), src_data_rank=cast(Any, "0")),
    ]
    texts = []
    with CommDebugMode() as counted:
        for call in calls:
            with pytest.raises(LayoutError) as info:
                call()
            texts.append((info.type.__name__, str(info.value)))
    assert counted.get_total_counts() == 0
    return texts


def test_wrong_arguments_raise_on_every_rank_before_communication(ranks: Pools) -> None:
    first, *others = ranks(4).run(refused)
    assert others == [first] * 3
    kinds: list[type[LayoutError]] = [MeshError, LayoutError, LayoutError]
    kinds += [LayoutError, LayoutError, LayoutError, LayoutError]
    kinds += [LayoutError, LayoutError, MeshError, *[LayoutError] * 3]
    kinds += [MeshError, LayoutError, *[MeshError] * 4, LayoutError]
    kinds += [LayoutError, LayoutError, MeshError]
    assert [name for name, _ in first] == [kind.__name__ for kind in kinds]
    texts = [text for _, text in first]
    assert "use 0 to 1, or None" in texts[9]
    assert all("use redistribute" in text for text in texts[10:13])
    assert "use different axes of one mesh" in texts[17]
    assert "meshes with names for their axes" in texts[18]
    assert issubclass(MeshError, RuntimeError)


class Tied(nn.Module):
    """A model with one weight for embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Linear(4, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight
        self.norm.weight.requires_grad_(False)
        self.register_buffer("steps", torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores ``[tokens, 8]``."""
        result: Tensor = self.out(self.norm(self.embed(tokens)))
        return result


def place(module: nn.Module, mesh: DeviceMesh, placement: Shard | RaggedShard) -> None:
    weight = distribute_tensor(module.get_parameter("weight").detach(), mesh, (placement,))
    module.register_parameter("weight", nn.Parameter(weight))


def shard_tied(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if name in ("embed", "out"):
        place(module, mesh, S1)
    if name == "scale":
        place(module, mesh, RaggedShard((0,), (3, 0, 1, 0)))


def shard_embedding_only(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if name == "embed":
        place(module, mesh, S1)


def spread(module: nn.Module, given: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(given[0], mesh)


def whole_again(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.full_tensor()


def modules(rank: int) -> tuple[Tensor, str]:
    mesh = mesh_of((4,))
    model = Tied()
    plain: Any = distribute_module(Tied(), mesh)
    assert plain.out.weight is plain.embed.weight
    assert distribute_module(model, mesh, shard_tied, spread, whole_again) is model
    assert model.out.weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.placements == (theirs.Shard(1),)
    assert isinstance(model.scale.weight, RaggedTensor)
    assert isinstance(model.scale.weight, nn.Parameter)
    for replicated in (model.norm.weight, model.scale.bias, model.steps):
        assert isinstance(replicated, DTensor)
        assert replicated.placements == (theirs.Replicate(),)
    assert not model.norm.weight.requires_grad
    assert model.norm.bias.requires_grad
    assert list(dict(model.named_parameters())) == list(dict(Tied().named_parameters()))
    scores = model(torch.arange(8))
    scores.sum().backward()
    grad = model.embed.weight.grad
    assert isinstance(grad, DTensor)
    with pytest.raises(LayoutError) as info:
        distribute_module(Tied(), mesh, shard_embedding_only)
    return torch.cat([scores, grad.full_tensor()], dim=1).detach(), str(info.value)


def test_modules_are_distributed_with_their_shared_parameters(ranks: Pools) -> None:
    alone = Tied()
    scores = alone(torch.arange(8))
    scores.sum().backward()
    assert alone.embed.weight.grad is not None
    expected = torch.cat([scores, alone.embed.weight.grad], dim=1).detach()
    for found, text in ranks(4).run(modules):
        torch.testing.assert_close(found, expected)
        assert "embed.weight and out.weight are one parameter" in text


def joined(rank: int) -> tuple[bool, bool, list[int]]:
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    both = concatenate_meshes([root["dp"], root["tp"]])
    same_groups = [both.get_group(a) is root.get_group(a) for a in ("dp", "tp")]
    return both == root["dp", "tp"], all(same_groups), both.mesh.flatten().tolist()


def test_joined_axes_are_the_slice_of_the_root_with_its_groups(ranks: Pools) -> None:
    assert ranks(4).run(joined) == [(True, True, [0, 1, 2, 3])] * 4


THEIR_R = theirs.Replicate()
PARTIALS: list[tuple[tuple[theirs.Placement, ...], tuple[theirs.Placement, ...]]] = [
    ((theirs.Partial(), theirs.Shard(0)), (THEIR_R, theirs.Shard(0))),
    ((theirs.Shard(1), theirs.Partial("max")), (theirs.Shard(1), THEIR_R)),
    ((theirs.Partial(), THEIR_R), (THEIR_R, THEIR_R)),
    ((theirs.Partial("avg"), theirs.Partial("avg")), (THEIR_R, THEIR_R)),
    ((theirs.Shard(0), THEIR_R), (theirs.Shard(0), THEIR_R)),
]


def reduced(rank: int) -> list[tuple[str, Tensor, Tensor, bool, int]]:
    results = []
    for placements, _ in PARTIALS:
        x = DTensor.from_local(whole((4, 4), rank).round(), mesh_of((2, 2)), placements)
        collectives = RecordingCollectives()
        y = reduce_partial(x, collectives=collectives)
        calls = sum(traffic.calls for traffic in collectives.by_axis.values())
        results.append((str(y.placements), y.full_tensor(), x.full_tensor(), y is x, calls))
    return results


def test_partial_values_are_reduced_and_nothing_else_moves(ranks: Pools) -> None:
    for results in ranks(4).run(reduced):
        for (source, target), found in zip(PARTIALS, results, strict=True):
            placements, full, expected, same, calls = found
            assert placements == str(target)
            assert torch.equal(full, expected)
            assert same == (source == target)
            assert (calls == 0) == same


def ordered(rank: int) -> tuple[bool, str, list[bool], Tensor, str]:
    """Use tensors with a shard order in the spec that the placements do not have."""
    made: list[DTensor] = []
    entry = import_module("torch.distributed.tensor._dtensor_spec").ShardOrderEntry
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("x", "y", "z"))
    for own in (mesh_of((2, 2)), cube):
        kinds = [theirs.Shard(0), *[theirs.Partial()] * (own.ndim - 2), theirs.Shard(0)]
        x = DTensor.from_local(torch.full((1, 2), float(rank)), own, kinds)
        x._spec.shard_order = (entry(0, (own.ndim - 1, 0)),)
        made.append(x)
    x, y = made
    with pytest.raises(LayoutError, match="use redistribute") as info:
        distribute_tensor(x, x.device_mesh, (S0, S0))
    needs = cast(DTensor, x.detach().requires_grad_())
    unchanged = [reduce_partial(x) is x, reduce_partial(needs) is needs]
    same = distribute_tensor(x, x.device_mesh, (StridedShard(0, 2), S0)) is x
    z = reduce_partial(y)
    return same, str(info.value), unchanged, z.to_local(), str(z.placements)


def test_the_shard_order_of_a_spec_counts(ranks: Pools) -> None:
    for rank, (same, text, unchanged, local, placements) in enumerate(ranks(4).run(ordered)):
        assert same
        assert "dim 0 by axes (1, 0)" in text
        assert unchanged == [True, False]  # A recorded change brings the gradient back.
        assert torch.equal(local, torch.full((1, 2), float(rank)))  # Nothing moves.
        assert "StridedShard" in placements
