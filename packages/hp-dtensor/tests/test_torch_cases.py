"""The values that torch's own tests of redistribution check on CPU, for torch and for hp-dtensor.

The cases are from ``test/distributed/tensor/test_redistribute.py`` of pytorch at commit 0133e92a.
torch and `hp_dtensor.redistribute` both run each case. Each result is compared with a slice of the
whole tensor. `CommDebugMode` and `RecordingCollectives` count collectives.

Cases with three axes or a (4, 2) mesh run on 8 ranks, all others on 4 ranks. Sweeps over shard
orders use every second to twelfth order. Large tensors are smaller here. Every fifth case of a
sweep always runs. `nox -s long` runs all cases.

Not restated:

- ``forward_dtype``: hp-dtensor has no such parameter. A cast before the call has the same effect,
  which is tested here.
- ``backward_dtype``: hp-dtensor has no such parameter. It sets the dtype in which a gradient is
  communicated. The gradient has the dtype of ``x`` in both libraries, which is tested here.
- ``Redistribute.apply`` from replicated to partial: private. The public call raises in both.
- ``shard_dim_alltoall``, ``_TransformInfo``, ``_optimize_transform_infos``, ``redistribute_cost``,
  the choice of a planner, traces of its steps, a view instead of a split after a gather: private
  functions of torch. Their results and numbers of collectives are tested here.
- The warning that a mesh has no flattened mesh: hp-dtensor does not warn. `explain` has a note.
- ``_MaskPartial`` as a target: torch skips its test. hp-dtensor raises, see
  ``test_torch_partials.py``.
- Local tensor mode, which simulates all ranks in one process: the cases are the same.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from hp_dtensor import (
    Layout,
    LayoutError,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    redistribute,
)

from .test_redistribute import OPS, slice_of, whole

Pools = Callable[[int], RankPool]
Shape = tuple[int, ...]
Dtypes = Sequence[torch.dtype]
Calls = dict[str, tuple[tuple[int, int], tuple[int, int]]]
KINDS: dict[str, Replicate | Shard | Partial] = {
    "R": Replicate(),
    **{f"S{dim}": Shard(dim) for dim in range(3)},
    "P": Partial(),
    **{f"P{op}": Partial(op) for op in ("avg", "min", "prod")},
}
MESHES: dict[int, Shape] = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}
GRAD_SEED = 7  # of the gradients of results


class Case(NamedTuple):
    """A change of layout."""

    name: str
    source: Layout
    target: Layout
    shape: Shape
    dtype: torch.dtype = torch.float64
    casts: Sequence[torch.dtype | None] = (None, None)  # torch's forward_dtype, backward_dtype
    flattened: tuple[str, ...] = ()  # axes of which the mesh has a flattened one


def case(
    name: str,
    shape: Shape,
    dtype: torch.dtype = torch.float64,
    *,
    mesh: Shape | None = None,
    orders: Sequence[dict[int, tuple[int, ...]]] = ({}, {}),
    **more: Any,
) -> Case:
    """Parse ``"S0,R -> R,P"``. ``orders`` are the shard orders before and after."""
    sides = [tuple(KINDS[word] for word in side.split(",")) for side in name.split(" -> ")]
    degrees = mesh or MESHES[len(sides[0])]
    source, target = (Layout(degrees, *side) for side in zip(sides, orders, strict=True))
    text = f"{source} -> {target}" if any(orders) else name
    return Case(text, source, target, shape, dtype, **more)


def values(shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    full = whole(shape, seed).to(dtype)
    return full * (1 + 2j) if dtype.is_complex else full


def term(layout: Layout, coordinate: Iterable[int]) -> int:
    """Return the seed of a rank's values: they differ along partial axes only."""
    pairs = zip(layout.placements, coordinate, strict=True)
    return sum(8**axis * at for axis, (p, at) in enumerate(pairs) if isinstance(p, Partial))


def mesh_of(shape: Shape, flattened: tuple[str, ...] = ()) -> DeviceMesh:
    def make() -> DeviceMesh:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
        for names in flattened:
            mesh[tuple(names)]._flatten(names)
        return mesh

    return cached(("torch cases", shape, flattened), make)


def spelled(layout: Layout) -> tuple[theirs.Placement, ...]:
    """Return torch's placements; an order of axes becomes strided shards."""
    result: list[theirs.Placement] = []
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            axes, dim = layout.shard_axes(placement.dim), placement.dim
            before = axes[: axes.index(axis)]
            factor = math.prod(layout.mesh_shape[other] for other in before if other > axis)
            blocks = _StridedShard(dim, split_factor=factor)
            result.append(theirs.Shard(dim) if factor == 1 else blocks)
        elif isinstance(placement, Partial):
            result.append(theirs.Partial(placement.op))
        else:
            result.append(theirs.Replicate())
    return tuple(result)


def laid_out(full: Tensor, layout: Layout, rank: int, flattened: tuple[str, ...] = ()) -> DTensor:
    mesh, local = mesh_of(layout.mesh_shape, flattened), slice_of(full, layout, rank)
    shape, stride = full.shape, full.stride()
    x = DTensor.from_local(local, mesh, spelled(layout), shape=shape, stride=stride)
    return cast(DTensor, x.detach())


class Result(NamedTuple):
    """Results of one rank, and its collectives in forward and backward."""

    local: Tensor
    labels: str
    grad: Tensor
    grad_labels: str
    calls: tuple[int, int]
    untouched: bool


def redistributed(rank: int, cases: list[Case], by: tuple[str, ...]) -> list[list[Result]]:
    return [[one(rank, given, each) for each in by] for given in cases]


def one(rank: int, given: Case, by: str) -> Result:
    """Redistribute and go back, by ``"torch"``, ``"ours"`` or ``"ours, async"``."""
    _, source, target, shape, dtype, (forward, backward), flattened = given
    x = laid_out(
        values(shape, dtype, term(source, source.coordinate(rank))), source, rank, flattened
    )
    grad_output = laid_out(values(shape, forward or dtype, GRAD_SEED), target, rank, flattened)
    before, recorder = x.to_local().clone(), RecordingCollectives()
    x.requires_grad_()
    call: Any = partial(redistribute, collectives=recorder, shard_order=target.shard_order)
    with CommDebugMode() as forward_mode:
        if by == "torch":
            dtypes: Any = {"forward_dtype": forward, "backward_dtype": backward}
            y: Any = x.redistribute(x.device_mesh, spelled(target), **dtypes)
        else:
            converted = x.to(forward) if forward else x
            y = call(converted, x.device_mesh, target.placements, async_op=by == "ours, async")
            y = y.wait() if by == "ours, async" else y
    calls = calls_of(forward_mode, recorder)
    with CommDebugMode() as backward_mode:
        torch.autograd.backward(y, grad_output)
    grad: Any = x.grad
    return Result(
        y.to_local().detach(),
        str(y.placements),
        grad.to_local(),
        str(grad.placements),
        (calls, calls_of(backward_mode, recorder)),
        torch.equal(before, x.to_local()),
    )


def calls_of(mode: CommDebugMode, recorder: RecordingCollectives) -> int:
    """Return the larger count: torch's does not see point-to-point, ours not torch's calls."""
    recorded = sum(traffic.calls for traffic in recorder.by_axis.values())
    recorder.reset()
    return max(mode.get_total_counts(), recorded)


def expected(given: Case, rank: int) -> Tensor:
    """Return a rank's slice of the reduced tensor. Axes that stay partial are not reduced."""
    source, target = given.source, given.target
    axes = zip(source.placements, target.placements, strict=True)
    reduced = [old.op if isinstance(old, Partial) and old != new else None for old, new in axes]
    coordinates = [
        range(degree) if op else [at]
        for op, degree, at in zip(reduced, source.mesh_shape, source.coordinate(rank), strict=True)
    ]
    seeds = [term(source, coordinate) for coordinate in itertools.product(*coordinates)]
    terms = torch.stack([values(given.shape, given.dtype, seed) for seed in seeds])
    terms = terms.view(*map(len, coordinates), *given.shape)
    for op in reduced:
        terms = OPS[op](terms) if op else terms[0]
    return slice_of(terms.to(given.casts[0] or given.dtype), target, rank)


def expected_grad(given: Case, rank: int, keeps: bool) -> tuple[Tensor, str]:
    """Return a rank's gradient and placements. It is replicated if the source is partial.

    If ``keeps`` is True, as in torch, it is partial if the target is partial too.
    """
    source, scale, back = given.source, 1, []
    for degree, old, new in zip(
        source.mesh_shape, source.placements, given.target.placements, strict=True
    ):
        stays = keeps and isinstance(new, Partial)
        scale *= degree if isinstance(new, Partial) and not stays else 1
        back.append(KINDS["R"] if isinstance(old, Partial) and not stays else old)
    layout = Layout(source.mesh_shape, tuple(back), source.shard_order)
    full = scale * values(given.shape, given.dtype, GRAD_SEED)
    return slice_of(full, layout, rank), str(spelled(layout))


def calls_of_right_results(ranks: Pools, cases: list[Case], *by: str) -> Calls:
    """Check every result, torch's too; return torch's collectives and ours, forward and back."""
    calls: Calls = {}
    for rank, results in enumerate(ranks(cases[0].source.size).run(redistributed, cases, by)):
        for given, found in zip(cases, results, strict=True):
            local, text = expected(given, rank), str(spelled(given.target))
            for got in found:
                assert torch.equal(got.local, local), given
                grad, labels = expected_grad(given, rank, keeps=got is found[0])
                assert torch.equal(got.grad, grad), given
                assert (got.labels, got.grad_labels) == (text, labels), given
                assert got.untouched
            torchs, ours = (got.calls for got in found[:2])
            assert all(got.calls == ours for got in found[1:])
            name = f"{given.name} of {given.shape}" if 0 in given.shape else given.name
            assert calls.setdefault(name, (torchs, ours)) == (torchs, ours), given
    return calls


def cases_of(
    names: str, shapes: Sequence[Shape], dtypes: Dtypes = (torch.float64,), **more: Any
) -> list[Case]:
    every = itertools.product(names.split("; "), shapes, dtypes)
    return [case(name, shape, dtype, **more) for name, shape, dtype in every]


UNEVEN = [(12, 3), (13, 3), (14, 3)]
UNEVEN_COLUMNS = [(3, 12), (3, 13), (3, 14)]
PLANES = [(8, 8), (8, 8, 8), (8, 5), (5, 8), (5, 5)]
REAL_AND_COMPLEX = (torch.float32, torch.complex64)
DTYPES = (torch.bfloat16, torch.float32, None)
GROUPS: dict[str, list[Case]] = {
    "one axis": [
        *cases_of("S0 -> R; R -> S0; P -> S0", UNEVEN, REAL_AND_COMPLEX),
        *cases_of("S1 -> R; R -> S1; P -> S1", UNEVEN_COLUMNS, REAL_AND_COMPLEX),
        *cases_of("R -> R; P -> R", [(12, 3)], REAL_AND_COMPLEX),
        *cases_of("S0 -> S1; S1 -> S0", PLANES, REAL_AND_COMPLEX),
    ],
    "other dtypes": [
        each
        for casts in itertools.product(DTYPES, DTYPES)
        for names, shapes in (("R -> R; S0 -> R", UNEVEN), ("S1 -> R", UNEVEN_COLUMNS))
        for each in cases_of(names, shapes, [torch.float32], casts=casts)
    ],
    "partial values that stay": [
        *cases_of("P -> P", [(12, 3)], REAL_AND_COMPLEX, mesh=(4,)),
        *cases_of("P,S0 -> P,S0; P,S0 -> P,S1; S0,P -> R,P", [(12, 8)]),
    ],
    "empty parts": cases_of(
        "S0 -> R; R -> S0; P -> S0; S0 -> S1; P -> R", [(0, 3), (1, 3), (2, 0), (3, 2)]
    ),
    "an axis of one rank": cases_of(
        "; ".join(f"S0,{old} -> S0,{new}" for old in ("S1", "R", "P") for new in ("S0", "S1", "R")),
        [(16, 8)],
        mesh=(4, 1),
    ),
    "two axes": [
        *cases_of("S0,S0 -> R,R; S0,S1 -> R,R", [(10, 5), (9, 5), (3, 5), (1, 3)]),
        *cases_of("S0,S1 -> S0,S0; S0,S1 -> S1,S0; S0,S0 -> S1,S1", PLANES, REAL_AND_COMPLEX),
        *cases_of("S0,S2 -> S1,S0; S1,S1 -> S1,S2", [(8, 8, 8)], REAL_AND_COMPLEX),
        *cases_of("S1,S1 -> S1,R; S2,S2 -> S2,R", [(1, 8, 6), (4, 8, 6)]),
    ],
    "three axes": cases_of(
        "S0,S0,S0 -> S1,S1,S1; S0,S1,S0 -> S1,S0,S0; S0,S1,S2 -> S2,S1,S0; S1,S0,S0 -> R,S0,S0; "
        "S1,R,S0 -> R,S0,S0; S0,S0,S1 -> S0,S1,S2; S0,S0,S0 -> R,S0,S0; S0,S0,R -> R,S1,S0",
        [(8, 8, 8)],
    ),
    "shard orders": [
        case("S0,S0,S0 -> R,S0,S0", (8, 8, 8), orders=({0: (1, 0, 2)}, {})),
        case("S0,S0,S0 -> S0,S0,R", (8, 8, 8), orders=({0: (1, 0, 2)}, {})),
        case("R,R -> S0,S0", (8, 4), mesh=(4, 2), orders=({}, {0: (1, 0)})),
    ],
    "flattened meshes": [
        *cases_of(
            "P,P -> R,R; P,P -> S0,S0; P,P -> S0,S1; S0,S0 -> R,R; S0,S1 -> R,R; P,Pavg -> R,R",
            [(16, 16, 16)],
            mesh=(4, 2),
            flattened=("ab",),
        ),
        *cases_of(
            "P,P,S0 -> S0,S0,S0; P,P,P -> R,R,R; P,P,R -> R,R,R; P,S0,P -> R,R,R; "
            "P,R,P -> R,R,R; P,P,R -> S0,S1,R",
            [(16, 16, 16)],
            flattened=("ab", "ac", "abc"),
        ),
    ],
}
# Collectives of torch and of ours, each forward and backward, in the cases where they differ.
DIFFERENT: dict[str, Calls] = {
    # hp-dtensor needs more: if the result is partial, torch's gradient is partial, ours is reduced.
    "partial values that stay": {
        "P -> P": ((0, 0), (0, 1)),
        "P,S0 -> P,S0": ((0, 0), (0, 1)),
        "P,S0 -> P,S1": ((1, 1), (1, 2)),
        "S0,P -> R,P": ((1, 0), (1, 1)),
    },
    # Ours sends nothing for a tensor without elements.
    "empty parts": {
        f"{name} of {shape}": (torchs, (0, 0))
        for shape in ((0, 3), (2, 0))
        for names, torchs in (("S0 -> R; P -> R", (1, 0)), ("P -> S0; S0 -> S1", (1, 1)))
        for name in names.split("; ")
    }
    | {f"R -> S0 of {shape}": ((0, 1), (0, 0)) for shape in ((0, 3), (2, 0))},
    # Ours changes several axes in one collective.
    "two axes": {
        "S0,S0 -> R,R": ((2, 0), (1, 0)),
        "S0,S1 -> R,R": ((2, 0), (1, 0)),
        "S0,S1 -> S1,S0": ((2, 2), (1, 1)),
        "S0,S0 -> S1,S1": ((2, 2), (1, 1)),
        "S0,S2 -> S1,S0": ((2, 2), (1, 1)),
    },
    "three axes": {
        "S0,S0,S0 -> S1,S1,S1": ((3, 3), (1, 1)),
        "S0,S1,S0 -> S1,S0,S0": ((3, 3), (1, 1)),
        "S1,R,S0 -> R,S0,S0": ((2, 2), (1, 1)),
        "S0,S0,S0 -> R,S0,S0": ((3, 2), (1, 1)),
        "S0,S0,R -> R,S1,S0": ((2, 2), (1, 1)),
    },
    "shard orders": {
        "(S(0), S(0), S(0)) dim 0 by axes (1, 0, 2) -> (S(0), S(0), R)": ((3, 2), (1, 1)),
        "(R, R) -> (S(0), S(0)) dim 0 by axes (1, 0)": ((0, 2), (0, 1)),
    },
    "flattened meshes": {
        "P,P -> S0,S1": ((2, 2), (1, 1)),
        "S0,S1 -> R,R": ((2, 0), (1, 0)),
        "P,P,S0 -> S0,S0,S0": ((3, 1), (2, 1)),
        "P,S0,P -> R,R,R": ((3, 0), (2, 0)),
        "P,P,R -> S0,S1,R": ((2, 2), (1, 1)),
    },
}


@pytest.mark.parametrize("group", GROUPS)
def test_values_gradients_and_layouts_are_torchs(ranks: Pools, group: str) -> None:
    calls = calls_of_right_results(ranks, GROUPS[group], "torch", "ours", "ours, async")
    differ = {name: pair for name, pair in calls.items() if pair[0] != pair[1]}
    assert differ == DIFFERENT.get(group, {})


def orders(ndim: int) -> list[Layout]:
    """Return all layouts of a (2, 2, 2) mesh with three sharded axes, in all orders."""
    found = []
    for dims in itertools.product(range(ndim), repeat=3):
        axes = [[axis for axis in range(3) if dims[axis] == dim] for dim in range(ndim)]
        for chosen in itertools.product(*map(itertools.permutations, axes)):
            order = {dim: tuple(chain) for dim, chain in enumerate(chosen) if chain}
            found.append(Layout((2, 2, 2), tuple(map(Shard, dims)), order))
    return found


def all_pairs() -> list[Case]:
    pairs = [",".join(kinds) for kinds in itertools.product(("R", "S0", "S1", "P"), repeat=2)]
    names = [f"{old} -> {new}" for old in pairs for new in pairs if "P" not in new]
    return cases_of("; ".join(names), [(16, 24)])


def all_orders() -> list[Case]:
    shapes = {(16, 8): 2, (17, 5): 2, (8, 16, 32): 6, (33, 16, 8, 1): 12}
    return [
        Case(f"{source} -> {target}", source, target, shape)
        for shape, step in shapes.items()
        for source, target in itertools.pairwise(orders(len(shape))[::step])
    ]


def partial_to_orders() -> list[Case]:
    found = []
    shapes = {(16, 8): 1, (17, 5): 2, (8, 16, 32): 1, (13, 2, 13): 2, (33, 16, 8, 1): 1}
    for shape, count in shapes.items():
        targets = itertools.cycle(orders(len(shape))[::5])
        for names in itertools.combinations(("S0", "S1", "S2", "P", "Pmin", "R"), 3):
            if {"P", "Pmin"} <= {*names} or ("S2" in names and len(shape) == 2):
                continue
            source = Layout((2, 2, 2), tuple(KINDS[name] for name in names))
            for target in itertools.islice(targets, count):
                found.append(Case(f"{source} -> {target}", source, target, shape))
    return found


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("sweep", [all_pairs, all_orders, partial_to_orders])
def test_sweeps_give_torchs_values_in_no_more_collectives(
    ranks: Pools, sweep: Callable[[], list[Case]], every: int
) -> None:
    calls = calls_of_right_results(ranks, sweep()[::every], "torch", "ours")
    for name, (torchs, ours) in calls.items():
        assert all(map(operator.le, ours, torchs)), (name, torchs, ours)


def test_all_shard_orders_are_as_many_as_torch_counts() -> None:
    assert [len(set(orders(ndim))) for ndim in (2, 3, 4)] == [24, 60, 120]


STAY = cases_of("S0,Pprod -> R,Pprod; Pprod,S0 -> Pprod,S1", [(12, 8)])
REFUSED = cases_of(
    "R -> P; P -> Pavg; S0,R -> S0,P; S0,R -> R,P; S0,S1 -> R,P; S0,Pprod -> R,P", [(12, 8)]
)


def to_partial(rank: int) -> list[str]:
    """Return the placements of results that stay partial; targets that make partials raise."""
    for given in REFUSED:
        x = laid_out(whole((12, 8)), given.source, rank)
        with pytest.raises(RuntimeError, match="Can not redistribute"):
            x.redistribute(x.device_mesh, spelled(given.target))
        with pytest.raises(LayoutError):
            redistribute(x, x.device_mesh, given.target.placements)
    held = [(laid_out(whole((12, 8)), each.source, rank), spelled(each.target)) for each in STAY]
    return [str(redistribute(x, to).placements) for x, to in held]


def test_partial_values_stay_but_are_not_made(ranks: Pools) -> None:
    assert ranks(4).run(to_partial) == [[str(spelled(each.target)) for each in STAY]] * 4


def partial_gradients(rank: int, torchs: bool) -> tuple[Tensor, int, int]:
    full, to = torch.ones(12, 3, dtype=torch.complex64), [theirs.Replicate()]
    x: Any = laid_out(full, Layout((4,), (KINDS["R"],)), rank).requires_grad_()
    recorder = RecordingCollectives()
    with CommDebugMode() as forward_mode:
        y = x.redistribute(placements=to) if torchs else redistribute(x, to, collectives=recorder)
        local = y.to_local(grad_placements=[theirs.Partial()])
    calls = calls_of(forward_mode, recorder)
    with CommDebugMode() as backward_mode:
        local.backward((rank + 1) * full)
    return cast(DTensor, x.grad).to_local(), calls, calls_of(backward_mode, recorder)


@pytest.mark.nccl
@pytest.mark.parametrize("torchs", [True, False])
def test_a_partial_gradient_is_summed_in_one_collective(ranks: Pools, torchs: bool) -> None:
    for grad, *calls in ranks(4).run(partial_gradients, torchs):
        assert torch.equal(grad, torch.full((12, 3), 10, dtype=torch.complex64))
        assert calls == [0, 1]


def negative(rank: int) -> list[tuple[str, bool]]:
    """Return the placements for negative dims, and whether the memory of x is shared."""
    results = []
    for old, dim in (("S1", -1), ("S0", -1), ("S1", -2)):
        x = laid_out(whole((12, 3)), Layout((4,), (KINDS[old],)), rank)
        to = [theirs.Shard(dim)]
        for y in (x.redistribute(placements=to), redistribute(x, to)):
            results.append((str(y.placements), y.to_local().data_ptr() == x.to_local().data_ptr()))
    return results


def strided(rank: int) -> list[Tensor]:
    """Return torch's and our result for a strided shard with a negative dim."""
    full, mesh = whole((8, 4)), mesh_of((4, 2))
    to = [_StridedShard(-2, split_factor=2), theirs.Shard(-2)]
    x = laid_out(full, Layout((4, 2), (KINDS["R"], KINDS["R"])), rank)
    return [theirs.distribute_tensor(full, mesh, to).to_local(), redistribute(x, to).to_local()]


def test_a_strided_shard_from_the_end_is_the_shard_order(ranks: Pools) -> None:
    layout = Layout((4, 2), (Shard(0), Shard(0)), {0: (1, 0)})
    for rank, locals_ in enumerate(ranks(8).run(strided)):
        part = slice_of(whole((8, 4)), layout, rank)
        assert all(torch.equal(local, part) for local in locals_)


def test_negative_dims_count_from_the_end_and_unchanged_layouts_are_not_copied(
    ranks: Pools,
) -> None:
    last, first = (str((theirs.Shard(dim),)) for dim in (1, 0))
    wanted = [*[(last, True)] * 2, *[(last, False)] * 2, *[(first, False)] * 2]
    assert ranks(4).run(negative) == [wanted] * 4
