"""Checkpoints of ragged tensors load in other layouts, bit-equal."""

import copy
import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TheirShard

from hp_dtensor import Layout, NonMember, RaggedShard, RaggedTensor, Replicate, Shard

from .test_ragged import BATCH, Ragged, mesh_of, part_of, ragged_cases, ragged_of, whole

Pools = Callable[[int], RankPool]
SHAPES = {"rows": (10, 3), "runs": (4, 6)}
FOUR = {
    "rows": Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3)),
    "runs": Ragged(Layout((2, 2), (Replicate(), RaggedShard((0, 1), (7, 17)))), (4, 6)),
}
TWO = {
    "rows": Ragged(Layout((2,), (RaggedShard((0,), (0, 10)),)), (10, 3)),
    "runs": Ragged(Layout((2,), (RaggedShard((0, 1), (11, 13)),)), (4, 6)),
}
OTHERS = {
    "rows": Ragged(Layout((2, 2), (RaggedShard((0, 1), (2, 13)), Shard(0))), (10, 3)),
    "runs": Ragged(Layout((2, 2), (RaggedShard((0,), (1, 3)), Shard(1))), (4, 6)),
}


class Model(nn.Module):
    """Two parameters, as given."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def trained(tensors: dict[str, Tensor], steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def held(cases: dict[str, Ragged] | None, seed: int, rank: int) -> dict[str, Tensor]:
    """Return both tensors, ragged, or as torch's even shards of two ranks."""
    if cases is not None:
        return {name: ragged_of(whole(c.shape, seed), c, rank) for name, c in cases.items()}
    return {
        name: DTensor.from_local(whole(shape, seed).chunk(2)[rank], mesh_of((2,)), [TheirShard(0)])
        for name, shape in SHAPES.items()
    }


def saved(rank: int, path: str, cases: dict[str, Ragged] | None) -> None:
    model, optimizer = trained(held(cases, 1, rank), 3)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=path)


def loaded(rank: int, path: str, cases: dict[str, Ragged] | None) -> dict[str, Tensor]:
    """Return every tensor that training made elsewhere, whole."""
    model, optimizer = trained(held(cases, 2, rank), 1)
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    found = {}
    for name, parameter in model.named_parameters():
        moments: dict[str, Any] = optimizer.state[parameter]
        for key, x in {"value": parameter.detach(), **moments}.items():
            assert isinstance(x, RaggedTensor | DTensor) or key == "step"
            found[f"{name} {key}"] = x if key == "step" else x.full_tensor()
    return found


@pytest.mark.parametrize(
    ("world", "source", "others", "target"),
    [
        (4, FOUR, 2, None),
        (4, FOUR, 2, TWO),
        (4, FOUR, 4, OTHERS),
        (4, OTHERS, 4, FOUR),
        (2, None, 4, FOUR),
        (2, TWO, 4, OTHERS),
        (2, TWO, 2, None),
    ],
)
def test_parameters_and_moments_load_bit_for_bit_in_other_layouts(
    ranks: Pools,
    tmp_path: Path,
    world: int,
    source: dict[str, Ragged] | None,
    others: int,
    target: dict[str, Ragged] | None,
) -> None:
    model, optimizer = trained({name: whole(shape, 1) for name, shape in SHAPES.items()}, 3)
    ranks(world).run(saved, str(tmp_path), source)
    for result in ranks(others).run(loaded, str(tmp_path), target):
        assert len(result) == 8
        for name, parameter in model.named_parameters():
            for key, x in {"value": parameter.detach(), **optimizer.state[parameter]}.items():
                assert torch.equal(result[f"{name} {key}"], x), (name, key)


def test_a_checkpoint_has_each_element_once_and_no_empty_chunk(
    ranks: Pools, tmp_path: Path
) -> None:
    ranks(4).run(saved, str(tmp_path), FOUR)
    found = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for name, chunks in (("rows", 3), ("runs", 4)):
        entry = found[f"model.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        volumes = [math.prod(chunk.sizes) for chunk in entry.chunks]
        assert len(volumes) == chunks
        assert 0 not in volumes
        assert sum(volumes) == math.prod(SHAPES[name])
        assert entry.size == torch.Size(SHAPES[name])


def without_elements(rank: int, path: str) -> None:
    none = Ragged(Layout((4,), (RaggedShard((0, 1), (0, 0, 0, 0)),)), (3, 0, 2))
    state = {"none": ragged_of(whole(none.shape), none, rank)}
    save(state, checkpoint_id=path)
    load(state, checkpoint_id=path)


def test_a_tensor_without_elements_is_found_again(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(without_elements, str(tmp_path))
    entry = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["none"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size((3, 0, 2))


def absent(rank: int, path: str) -> float:
    """Save and load a tensor of ranks 0 and 1; elsewhere an `NonMember` is saved for it."""
    pair = Layout((2,), (Shard(0),))
    mesh = cached("first two", lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",)))
    if rank > 1:
        there: Any = NonMember(pair, (4, 2), torch.double)
        save({"x": there}, checkpoint_id=path)
        load({}, checkpoint_id=path)
        return 0.0
    mine = whole((4, 2)).chunk(2)[rank]
    x = DTensor.from_local(mine.clone(), mesh, [TheirShard(0)])
    save({"x": x}, checkpoint_id=path)
    x.zero_()
    load({"x": x}, checkpoint_id=path)
    return float((x.to_local() - mine).abs().sum())


def test_ranks_outside_the_mesh_save_an_absent(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(absent, str(tmp_path)) == [0.0] * 4


def round_trip(rank: int, path: str, batch: list[tuple[Ragged, Ragged]]) -> list[Tensor]:
    state = {str(i): ragged_of(whole(a.shape, i), a, rank) for i, (a, _) in enumerate(batch)}
    save(state, checkpoint_id=path)
    target = {
        str(i): ragged_of(torch.full(a.shape, math.nan).double(), b, rank)
        for i, (a, b) in enumerate(batch)
    }
    load(target, checkpoint_id=path)
    return [x.to_local() for x in target.values()]


def with_other_runs(data: st.DataObject, case: Ragged) -> Ragged:
    """Draw other runs in the frames of a case."""
    ragged = case.layout.ragged
    assert ragged is not None
    axis, runs = ragged
    count = sum(runs.sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=3, max_size=3)))
    edges = [0, *cuts[: len(runs.sizes) - 1], count]
    sizes = tuple(hi - lo for lo, hi in itertools.pairwise(edges))
    placements = list(case.layout.placements)
    placements[axis] = RaggedShard(runs.dims, sizes)
    return Ragged(Layout(case.layout.mesh_shape, tuple(placements)), case.shape)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_random_runs_load_into_random_runs(
    ranks: Pools, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    paths = (str(tmp_path / str(number)) for number in itertools.count())

    @settings(deadline=None, max_examples=2)
    @given(st.lists(ragged_cases(mesh), min_size=BATCH, max_size=BATCH), st.data())
    def check(batch: list[Ragged], data: st.DataObject) -> None:
        pairs = [(case, with_other_runs(data, case)) for case in batch]
        for rank, locals_ in enumerate(ranks(4).run(round_trip, next(paths), pairs)):
            for i, ((_, target), local) in enumerate(zip(pairs, locals_, strict=True)):
                assert torch.equal(local, part_of(whole(target.shape, i), target, rank))

    check()


def copied(rank: int) -> None:
    case = FOUR["rows"]
    x, values = ragged_of(whole(case.shape), case, rank), part_of(whole(case.shape), case, rank)
    module: Any = Model({"weight": x})
    module.weight.grad = x.detach().clone()

    twin: Any = copy.deepcopy(module)
    stream = io.BytesIO()
    torch.save(module.weight, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for other in (twin.weight, loaded):
        assert isinstance(other, RaggedTensor)
        assert isinstance(other, nn.Parameter)
        assert other.placements == x.placements
        assert torch.equal(other.to_local(), values)
    with torch.no_grad():
        twin.weight.zero_()
        twin.weight.grad.zero_()
    assert torch.equal(module.weight.to_local(), values)
    assert torch.equal(module.weight.grad.to_local(), values)

    module.to(torch.float32)
    for tensor in (module.weight, module.weight.grad):
        assert tensor.dtype == tensor.to_local().dtype == torch.float32
        assert torch.equal(tensor.to_local(), values.float())
    with pytest.raises(TypeError, match="of the same layout, or use copy_"):
        module.weight.data = torch.zeros(10, 3)


def test_copies_loads_and_conversions_keep_part_and_layout(ranks: Pools) -> None:
    ranks(4).run(copied)
