"""Same results as torch's DTensor: numbers of collectives, local tensors, placements, copies."""

import copy
import io
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode

from hp_dtensor import (
    Layout,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    StridedShard,
    distribute_module,
    distribute_tensor,
    explain,
    redistribute,
)

from .test_redistribute import as_dtensor, leaf, mesh_of, slice_of, whole

Pools = Callable[[int], RankPool]
Placements = tuple[Replicate | Shard | Partial, ...]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


class Counted(NamedTuple):
    """A pair of placements, and the collectives that it takes forward and backward."""

    source: Placements
    target: Placements
    forward: int
    backward: int


ONE_AXIS = [
    Counted((S0,), (R,), 1, 0),
    Counted((S1,), (R,), 1, 0),
    Counted((R,), (S0,), 0, 1),
    Counted((R,), (S1,), 0, 1),
    Counted((P,), (R,), 1, 0),
    Counted((P,), (S0,), 1, 1),
    Counted((P,), (S1,), 1, 1),
    Counted((R,), (R,), 0, 0),
    Counted((P,), (P,), 0, 1),  # the gradient is partial and is reduced in backward
    Counted((S0,), (S1,), 1, 1),
]
ONE_RANK_ON_AN_AXIS = [
    Counted((R, S0), (R, S1), 0, 0),
    Counted((R, S0), (R, R), 0, 0),
    Counted((R, P), (R, R), 0, 0),
    Counted((S0, P), (S0, S0), 0, 0),
    Counted((S0, R), (S0, S1), 0, 0),
]
TWO_AXES = [
    Counted((S0, S1), (S0, S0), 1, 1),
    Counted((S0, S1), (S1, S0), 1, 1),
    Counted((S0, S0), (S1, S1), 1, 1),
    Counted((S0, S0), (R, R), 1, 0),
    Counted((S0, S1), (R, R), 1, 0),
    Counted((P, P), (R, R), 1, 0),
    Counted((P, P), (S0, S0), 1, 1),
]


class Moved(NamedTuple):
    """Results of one rank: local tensor, gradient, their placements, and the calls."""

    local: Tensor
    grad: Tensor
    labels: tuple[str, str]
    calls: tuple[int, int]
    uncounted: int


def moved(
    rank: int, mesh: tuple[int, ...], cases: list[Counted], size: int, dtype: torch.dtype
) -> list[Moved]:
    results = []
    for source, target, *_ in cases:
        x = leaf(as_dtensor(whole((size, size)).to(dtype), Layout(mesh, source), rank))
        ascent = as_dtensor(whole((size, size), 1).to(dtype), Layout(mesh, target), rank)
        collectives, calls = RecordingCollectives(), []
        with CommDebugMode() as beside:
            y = redistribute(x, target, collectives=collectives)
            calls.append(sum(each.calls for each in collectives.by_axis.values()))
            collectives.reset()
            torch.autograd.backward(y, ascent)
            calls.append(sum(each.calls for each in collectives.by_axis.values()))
        grad = x.grad
        assert isinstance(grad, DTensor)
        labels = (str(y.placements), str(grad.placements))
        # torch's own collectives of functional form would be counted by neither.
        functional = sum(
            count for op, count in beside.get_comm_counts().items() if "functional" in str(op)
        )
        results.append(
            Moved(y.to_local().detach(), grad.to_local(), labels, (calls[0], calls[1]), functional)
        )
    return results


@pytest.mark.parametrize(
    ("mesh", "cases"), [((4,), ONE_AXIS), ((4, 1), ONE_RANK_ON_AN_AXIS), ((2, 2), TWO_AXES)]
)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(12, torch.float64), (13, torch.float64), (14, torch.complex64), (3, torch.float64)],
)
def test_each_change_takes_one_collective_at_most_each_way(
    ranks: Pools, mesh: tuple[int, ...], cases: list[Counted], size: int, dtype: torch.dtype
) -> None:
    full, ascent = (whole((size, size), seed).to(dtype) for seed in (0, 1))
    for rank, results in enumerate(ranks(4).run(moved, mesh, cases, size, dtype)):
        for case, result in zip(cases, results, strict=True):
            terms = given = 1
            for degree, before, after in zip(mesh, case.source, case.target, strict=True):
                terms *= degree if before == P and after != P else 1
                given *= degree if after == P else 1
            back: Placements = tuple(R if p == P else p for p in case.source)
            assert torch.equal(
                result.local, slice_of(terms * full, Layout(mesh, case.target), rank)
            )
            assert torch.equal(result.grad, slice_of(given * ascent, Layout(mesh, back), rank))
            assert result.labels == (labels_of(case.target), labels_of(back)), case
            assert result.calls == (case.forward, case.backward), case
            assert result.uncounted == 0


def labels_of(placements: Placements) -> str:
    names = {R: theirs.Replicate(), S0: theirs.Shard(0), S1: theirs.Shard(1), P: theirs.Partial()}
    return str(tuple(names[p] for p in placements))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((S0, S0, S0), (S1, S1, S1)),
        ((S1, S0, S0), (R, S0, S0)),
        ((S0, S1, Shard(2)), (Shard(2), S1, S0)),
    ],
)
def test_three_axes_change_in_one_collective(source: Placements, target: Placements) -> None:
    plan = explain(Layout((2, 2, 2), source), Layout((2, 2, 2), target), shape=(64, 64, 64))
    assert len(plan.steps) == 1


def partial_gradients(rank: int) -> list[tuple[Tensor, int]]:
    results = []
    for source in ((S0,), (P,)):
        x = leaf(as_dtensor(whole((6, 2)), Layout((4,), source), rank))
        collectives = RecordingCollectives()
        y = redistribute(x, (R,), collectives=collectives).to_local(
            grad_placements=[theirs.Partial()]
        )
        collectives.reset()
        torch.autograd.backward((y * whole((6, 2), 1 + rank)).sum())
        assert isinstance(x.grad, DTensor)
        results.append(
            (x.grad.to_local(), sum(each.calls for each in collectives.by_axis.values()))
        )
    return results


@pytest.mark.nccl
def test_gradients_said_to_be_partial_are_reduced_in_one_collective(ranks: Pools) -> None:
    total = torch.stack([whole((6, 2), 1 + rank) for rank in range(4)]).sum(0)
    for rank, (rows, everything) in enumerate(ranks(4).run(partial_gradients)):
        assert torch.equal(rows[0], slice_of(total, Layout((4,), (S0,)), rank))
        assert torch.equal(everything[0], total)
        assert (rows[1], everything[1]) == (1, 1)


@pytest.mark.parametrize("mesh", [(8,), (2, 4), (2, 2, 2)])
def test_boxes_are_torchs_local_shapes_and_offsets(mesh: tuple[int, ...]) -> None:
    kinds: dict[Replicate | Shard, theirs.Placement] = {
        R: theirs.Replicate(),
        S0: theirs.Shard(0),
        S1: theirs.Shard(1),
    }
    for placements in itertools.product(kinds, repeat=len(mesh)):
        layout = Layout(mesh, placements)
        for shape in itertools.product((1, 2, 3, 5, 8, 9), (1, 4, 7)):
            for rank in range(8):
                sizes, offsets = _compute_local_shape_and_global_offset(
                    shape, mesh, list(layout.coordinate(rank)), [kinds[p] for p in placements]
                )
                box = tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))
                # torch puts empty parts at the end of a dim; here they are no boxes.
                assert layout.boxes(shape, rank) == (() if 0 in sizes else (box,))


def test_replicas_of_fsdp_over_tp_hold_the_same_rows() -> None:
    layout = Layout((2, 4, 2), (R, S0, S0), {0: (2, 1)})
    for rank in range(16):
        _, dp, tp = layout.coordinate(rank)
        first = 2 * (4 * tp + dp)
        assert layout.boxes((15,), rank) == (((first, min(first + 2, 15)),),)


def strided_rows(rank: int) -> list[Tensor]:
    mesh = mesh_of((2, 2))
    results = []
    for rows in (2, 3, 5, 11):
        x = distribute_tensor(whole((rows,)), mesh, (StridedShard(0, 2), S0), src_data_rank=None)
        results += [redistribute(x).to_local(), x.full_tensor()]
    return results


def test_few_rows_in_strided_shards_come_back_in_order(ranks: Pools) -> None:
    expected = [whole((rows,)) for rows in (2, 3, 5, 11) for _ in range(2)]
    for results in ranks(4).run(strided_rows):
        assert all(map(torch.equal, results, expected))


def labelled(rank: int) -> tuple[bool, bool, bool]:
    mesh = mesh_of((2, 2))
    x = as_dtensor(whole((4, 4)), Layout((2, 2), (S0, S1)), rank)
    target = [theirs.Shard(-1), theirs.Replicate()]
    y = redistribute(x, target)
    target[0] = theirs.Shard(0)
    stream = io.BytesIO()
    torch.save(y, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    same = torch.equal(loaded.to_local(), y.to_local()) and loaded.placements == y.placements
    kept = y.placements == (theirs.Shard(1), theirs.Replicate()) and y.device_mesh == mesh
    with torch.no_grad():
        return kept, same, y.to_local() is y.to_local()


def test_results_keep_their_layout_and_can_be_saved(ranks: Pools) -> None:
    assert ranks(4).run(labelled) == [(True, True, True)] * 4


def test_placements_differ_by_kind_and_value_and_keep_both_when_copied() -> None:
    values = [Shard(3), Shard(4), StridedShard(3, 2), StridedShard(3, 4), P, Partial("max"), R]
    assert len(set(values)) == len(values)
    for value in values:
        assert copy.deepcopy(value) == value
        assert type(copy.deepcopy(value)) is type(value)


def materialise(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters(recurse=False)):
            filled = torch.full_like(parameter, 2.0, device="cpu")
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(filled, mesh, (S0,), src_data_rank=None))
            )


def made_on_meta(rank: int) -> tuple[str, tuple[int, ...], float]:
    model = distribute_module(nn.Linear(4, 8, device="meta"), mesh_of((4,)), materialise)
    weight = model.get_parameter("weight")
    assert isinstance(weight, DTensor)
    return weight.device.type, tuple(weight.to_local().shape), weight.to_local().sum().item()


def test_parameters_on_meta_get_their_parts_from_the_partition(ranks: Pools) -> None:
    assert ranks(4).run(made_on_meta) == [("cpu", (2, 4), 16.0)] * 4
