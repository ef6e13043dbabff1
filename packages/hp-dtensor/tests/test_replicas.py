"""Initial values are equal on all ranks that hold the same tensor or the same shard of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_dtensor import (
    RaggedShard,
    RaggedTensor,
    RankMismatchError,
    RecordingCollectives,
    check_same,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

Pools = Callable[[int], RankPool]


class Model(nn.Module):
    """Two parameters and a buffer with given values."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        self.register_buffer("steps", values.pop("steps", torch.zeros(2, dtype=torch.int32)))
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def said_on_each(make: Callable[[int], nn.Module], shape: tuple[int, ...] = (4,)) -> list[str]:
    """Return the error of each simulated rank, or an empty text."""
    names = ("dp", "tp")[-len(shape) :]

    def rank(index: int, door: SimulatedCollectives) -> str:
        try:
            check_same(make(index), door.mesh(shape, names), collectives=door)
        except RankMismatchError as error:
            return str(error)
        return ""

    return SimulatedWorld(4).run(rank)


def test_equal_values_pass_with_two_small_collectives_per_axis() -> None:
    def rank(_: int, door: SimulatedCollectives) -> dict[str, tuple[int, int]]:
        recorded = RecordingCollectives(door)
        model = Model(weight=values(0, 300, 7), bias=values(1, 5, dtype=torch.bfloat16))
        check_same(model, door.mesh((2, 2), ("dp", "tp")), collectives=recorded)
        return {name: (x.calls, x.bytes) for name, x in recorded.by_axis.items()}

    for calls in SimulatedWorld(4).run(rank):
        assert {name: number for name, (number, _) in calls.items()} == {"dp": 2, "tp": 2}
        assert sum(size for _, size in calls.values()) < 1000


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_other_values_are_named_with_their_ranks_on_all_ranks(shape: tuple[int, ...]) -> None:
    def make(rank: int) -> nn.Module:
        steps = torch.tensor([0, int(rank == 3)], dtype=torch.int32)
        return Model(weight=values(rank // 2, 4, 4), bias=values(0, 4), steps=steps)

    (said,) = set(said_on_each(make, shape))
    assert said.startswith("2 of 3 parameters and buffers differ between ranks")
    assert "'weight': ranks 0, 1 and 2, 3; 'steps': ranks 0, 1, 2 and 3; " in said
    assert "bias" not in said
    assert "torch.manual_seed" in said


def test_one_bit_a_swap_and_opposite_signs_are_found() -> None:
    base = values(0, 1000, dtype=torch.float64)
    swapped, opposite = base.clone(), base.clone()
    swapped[[3, 515]] = swapped[[515, 3]]
    opposite[[3, 7]] *= -1
    bit = base.clone()
    bit.view(torch.int64)[999] ^= 1
    same = base.clone()
    for other in (swapped, opposite, bit, base.flip(0)):
        assert set(said_on_each(lambda rank, x=other: Model(w=x if rank else base))) != {""}  # type: ignore[misc]
    assert set(said_on_each(lambda rank: Model(w=same if rank else base))) == {""}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_tensors_of_every_dtype_and_length_are_compared(dtype: torch.dtype) -> None:
    for length in (0, 1, 5, 16):
        zero = torch.zeros(length).to(dtype)
        one = torch.ones(length).to(dtype)
        assert set(said_on_each(lambda _, x=zero: Model(steps=x))) == {""}  # type: ignore[misc]
        said = set(said_on_each(lambda r, x=zero, y=one: Model(steps=y if r == 2 else x)))  # type: ignore[misc]
        assert ("" in said) is (length == 0)


def test_long_tensors_are_hashed_in_several_parts() -> None:
    long = torch.zeros(2**22 + 3, dtype=torch.uint8).repeat(3)  # more than one chunk of words
    other = long.clone()
    other[-1] = 1
    assert set(said_on_each(lambda rank: Model(steps=long))) == {""}
    assert set(said_on_each(lambda rank: Model(steps=other if rank == 1 else long))) != {""}


def test_other_names_or_shapes_are_an_error_on_all_ranks() -> None:
    for make in (
        lambda rank: Model(**({"b": values(0, 3)} if rank == 2 else {"a": values(0, 3)})),
        lambda rank: Model(a=values(0, 4 if rank == 2 else 3)),
        lambda rank: nn.Identity() if rank == 2 else Model(a=values(0, 3)),
    ):
        (said,) = set(said_on_each(make))
        assert said.startswith("ranks 2 have other names, shapes, dtypes or placements")


def test_a_long_list_of_names_is_shortened() -> None:
    def make(rank: int) -> nn.Module:
        return Model(**{f"w{i}": values(rank, 3) for i in range(20)})

    (said,) = set(said_on_each(make))
    assert "'w7'" in said
    assert "'w8'" not in said
    assert "and 12 more" in said


def test_a_model_without_values_is_refused_before_communication() -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    recorded = RecordingCollectives(door)
    for model in (meta, nn.LazyLinear(3)):
        with pytest.raises(ValueError, match="weight, bias have no values yet; load or initialize"):
            check_same(model, door.mesh((1,), ("dp",)), collectives=recorded)
    assert not recorded.by_axis


def _empty(rank: int, ranks_without: list[int]) -> str:
    mesh = _mesh()
    with torch.device("meta" if rank in ranks_without else "cpu"):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
    with pytest.raises((ValueError, RankMismatchError)) as caught:
        check_same(model, mesh)
    return str(caught.value)


def test_ranks_without_values_raise_on_all(ranks: Pools) -> None:
    """A common mistake: rank 0 loads the weights, and the other ranks stay on the meta device."""
    for message in ranks(4).run(_empty, [1, 2, 3]):
        assert "ranks 1, 2, 3 have other names, shapes" in message
        assert "or no values" in message
    for message in ranks(4).run(_empty, [0, 1, 2, 3]):
        assert message.startswith("weight, bias have no values yet")


def _mesh() -> DeviceMesh:
    names = ("dp", "tp")
    return cached("replicas", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _sharded(rank: int, kind: str, wrong: int | None) -> str:
    """Return the error message if one rank holds other values of a tensor sharded over tp."""
    mesh = _mesh()
    whole = values(0, 6, 4)
    x: Any
    if kind == "ragged":
        runs = RaggedShard((0,), (4, 2))
        local = whole[4:] if rank % 2 else whole[:4]
        x = RaggedTensor.from_local(local.clone(), mesh, (Replicate(), runs), shape=(6, 4))
    else:
        over = mesh["tp"] if kind == "tp" else mesh
        placements = [Shard(0)] if kind == "tp" else [Replicate(), Shard(0)]
        if kind == "everywhere":
            placements = [Shard(1), Shard(0)]
        x = distribute_tensor(whole, over, placements, src_data_rank=None)
    if rank == wrong:
        x.to_local().detach().view(-1)[0] += 1
    model = Model(weight=x, bias=values(0, 4))
    try:
        check_same(model, mesh)
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["tp", "both", "ragged"])
def test_shards_are_compared_with_their_replicas_only(ranks: Pools, kind: str) -> None:
    assert ranks(4).run(_sharded, kind, None) == [""] * 4
    (said,) = set(ranks(4).run(_sharded, kind, 3))
    assert "1 of 3 parameters" in said
    assert "'weight': ranks 1 and 3; " in said


def test_a_tensor_without_replicas_is_never_different(ranks: Pools) -> None:
    assert ranks(4).run(_sharded, "everywhere", 3) == [""] * 4


def test_invalid_collectives_raise_with_their_type() -> None:
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    wrong: Any = "gloo"
    with pytest.raises(ValueError, match="'gloo' does not have the methods of Collectives"):
        check_same(Model(w=torch.ones(2)), door.mesh((1,), ("dp",)), collectives=wrong)


def test_lazily_conjugated_negated_and_sparse_buffers_are_compared() -> None:
    base = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    same: list[tuple[Tensor, Tensor]] = [
        (base.conj(), base.conj().resolve_conj()),
        (base.conj().imag, base.conj().imag.resolve_neg()),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    ]
    for first, other in same:
        made = said_on_each(lambda rank, pair=(first, other): Model(steps=pair[rank % 2]))  # type: ignore[misc]
        assert made == [""] * 4
    differing = [(base, base.conj()), (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse())]
    for first, other in differing:
        made = said_on_each(lambda rank, pair=(first, other): Model(steps=pair[rank % 2]))  # type: ignore[misc]
        assert all("'steps': ranks 0, 2 and 1, 3" in text for text in made)
