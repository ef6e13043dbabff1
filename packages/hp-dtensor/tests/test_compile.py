"""`redistribute` inside compiled functions: values, gradients, the graph, sizes, refusals."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from rank_pool import TORCH_2_11, RankPool, cached, fails_with_torch_2_11
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    AlphaBeta,
    Layout,
    NonMember,
    RaggedShard,
    Replicate,
    Shard,
    TorchCollectives,
    explain,
    plan_transfer,
    redistribute,
)

from .strategies import Case, cases

_package = plan_transfer.__module__.rpartition("._")[0]
Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("mesh", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def part(full: Tensor, layout: Layout, rank: int) -> Tensor:
    box = layout.box_at(tuple(full.shape), layout.coordinate(rank))
    return full[tuple(slice(lo, hi) for lo, hi in box)].clone()


def leaf(full: Tensor, layout: Layout, rank: int) -> DTensor:
    placements = [
        theirs.Shard(p.dim) if isinstance(p, Shard) else theirs.Replicate()
        for p in layout.placements
    ]
    x = DTensor.from_local(
        part(full, layout, rank),
        mesh_of(layout.mesh_shape),
        placements,
        shape=full.shape,
        stride=full.stride(),
    )
    return cast(DTensor, x.detach().requires_grad_())


def there_and_back(x: Any) -> Any:
    y = redistribute(x * 3 + 1, (S1,))
    return redistribute(y * y, (R,), async_op=True).wait() * 5


def compiled_and_not(rank: int, backend: str) -> list[Any]:
    torch._dynamo.reset()
    layout = Layout((2,), (S0,))
    results: list[Any] = []
    for function in (
        there_and_back,
        torch.compile(there_and_back, backend=backend, fullgraph=True),
    ):
        x = leaf(whole((7, 6)), layout, rank)
        y = function(x)
        (y * y).sum().backward()
        assert isinstance(x.grad, DTensor)
        results.append(
            (y.to_local().detach(), y.placements, x.grad.to_local(), x.grad.placements, y.stride())
        )
    return results


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_values_and_gradients_are_bit_equal_to_eager(ranks: Pools, backend: str) -> None:
    full = whole((7, 6)).requires_grad_()
    y = full * 3 + 1
    whole_result = y * y * 5
    (whole_result * whole_result).sum().backward()
    assert full.grad is not None
    for rank, results in enumerate(ranks(2).run(compiled_and_not, backend)):
        (eager, kept, grad, back, strides), compiled = results
        assert torch.equal(compiled[0], eager)
        assert torch.equal(eager, whole_result.detach())
        assert torch.equal(compiled[2], grad)
        assert torch.equal(grad, part(full.grad, Layout((2,), (S0,)), rank))
        assert (compiled[1], compiled[3], compiled[4]) == (kept, back, strides)


def graphs(rank: int) -> list[str]:
    """Return the code of the forward and of the backward graph."""
    torch._dynamo.reset()
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph.code)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def function(x: Any) -> Any:
        return redistribute(redistribute(x * 2, (S1,)) * 3, (S0,))

    x = leaf(whole((4, 4)), Layout((2,), (S0,)), rank)
    torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
    return seen


def test_each_graph_has_one_opaque_op_in_order_for_each_redistribution(ranks: Pools) -> None:
    for seen in ranks(2).run(graphs):
        assert [code.count("execute_plan") for code in seen] == [2, 2]
        assert not any("c10d" in code for code in seen)
        assert all(code.count("with_effects(") == 2 for code in seen)


def priced(rank: int) -> list[str]:
    """Return the backward graphs of a change for two models."""
    texts = []
    for cost in (AlphaBeta(alpha=1.0, beta=0.0), AlphaBeta(alpha=0.0, beta=1.0)):
        torch._dynamo.reset()
        seen: list[str] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any, seen: list[str] = seen) -> Any:
            seen.append(graph.code)
            return graph

        def function(x: Any, cost: AlphaBeta = cost) -> Any:
            return redistribute(x * 2, (S0, R), cost=cost)

        x = leaf(whole((4, 4)), Layout((2, 2), (S1, S0)), rank)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
        texts.append(seen[1])
    return texts


def test_the_way_back_in_a_graph_is_the_cheapest_under_the_same_cost(ranks: Pools) -> None:
    """One axis if calls are expensive. Both axes, with fewer bytes, if bytes are expensive."""
    for calls, bytes_ in ranks(4).run(priced):
        assert '"kind":"all_to_all","axes":[0]' in calls
        assert '"kind":"direct","axes":[0,1]' in bytes_


CHANGES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((S1, R), {}),
    ((S0, S0), {"shard_order": {0: (1, 0)}}),
    ((theirs.Replicate(), theirs.Shard(-1)), {"max_bytes": 10**6, "cost": AlphaBeta(alpha=1e-4)}),
    ((S1,), {"mesh": (4,)}),
]


def changed(x: Any) -> list[Tensor]:
    results = []
    for placements, options in CHANGES:
        doubled = (x * 2).detach() if "mesh" in options else x * 2  # no gradients between meshes
        options = {k: mesh_of(v) if k == "mesh" else v for k, v in options.items()}
        moved = redistribute(doubled, placements, **options)
        results.append(moved.to_local() * 5)
    mesh = x.device_mesh
    summed = DTensor.from_local(x.to_local().sum() * torch.ones(5, 3), mesh, [theirs.Partial()] * 2)
    return [*results, redistribute(summed, (S0, S1)).to_local()]


def many(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    torch._dynamo.reset()
    found = []
    for function in (changed, torch.compile(changed, backend="aot_eager", fullgraph=True)):
        mesh_of((4,))
        x = leaf(whole((5, 6)), Layout((2, 2), (S0, S1)), rank)
        results = function(x)
        torch.stack([(y * y).sum() for y in results]).sum().backward()
        assert isinstance(x.grad, DTensor)
        found.append([*(y.detach() for y in results), x.grad.to_local()])
    return found[0], found[1]


@fails_with_torch_2_11("Dynamo refuses a mesh and torch's placements as arguments")
def test_every_kind_of_target_compiles_on_a_mesh_of_two_axes(ranks: Pools) -> None:
    full = whole((5, 6))
    for rank, (eager, compiled) in enumerate(ranks(4).run(many)):
        assert len(eager) == len(compiled) == len(CHANGES) + 2
        assert all(map(torch.equal, eager, compiled))
        ordered = Layout((2, 2), (S0, S0), {0: (1, 0)})
        layouts = [Layout((2, 2), (S1, R)), ordered, Layout((2, 2), (R, S1)), Layout((4,), (S1,))]
        for result, layout in zip(compiled, layouts, strict=False):
            assert torch.equal(result, 10 * part(full, layout, rank))
        ones = torch.full((5, 3), full.sum().item(), dtype=torch.float64)
        assert torch.equal(compiled[-2], part(ones, Layout((2, 2), (S0, S1)), rank))


def sizes(rank: int) -> list[Tensor]:
    torch._dynamo.reset()
    layout = Layout((2,), (S0,))

    def function(x: Any) -> Any:
        return redistribute(x, (S1,)) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    xs = [leaf(whole((rows, 6)), layout, rank) for rows in (4, 8, 4, 6)]
    with torch.no_grad():
        without = [compiled(x).to_local() for x in xs]
    return [*without, *(compiled(x).to_local().detach() for x in xs)]


def test_another_size_is_planned_again_with_and_without_gradients(ranks: Pools) -> None:
    for rank, results in enumerate(ranks(2).run(sizes)):
        for rows, result in zip((4, 8, 4, 6) * 2, results, strict=True):
            expected = 2 * part(whole((rows, 6)), Layout((2,), (S1,)), rank)
            assert torch.equal(result, expected)


def twice(rank: int) -> Tensor:
    torch._dynamo.reset()
    x = leaf(whole((4, 4)), Layout((2,), (S0,)), rank)
    moved = torch.compile(lambda x: redistribute(x, (S1,)), backend="eager", fullgraph=True)
    y = moved(x)
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert isinstance(second, DTensor)
    return second.full_tensor().detach()


def test_second_derivatives_pass_where_the_backend_has_them(ranks: Pools) -> None:
    for second in ranks(2).run(twice):
        assert torch.equal(second, 6 * whole((4, 4)))


def refused(rank: int) -> list[str]:
    x = leaf(whole((4, 4)), Layout((2, 2), (S0, R)), rank)
    line, other = x.device_mesh["b"], mesh_of((4,))
    absent = NonMember(Layout((2,), (S0,)), (4, 4), torch.float32)
    collectives = TorchCollectives()
    wrong = DTensor.from_local(
        torch.zeros(3, 4), x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
    )
    calls: list[Callable[[], Any]] = [
        lambda: redistribute(x, (S0,)),
        lambda: redistribute(x, (R, R), max_bytes=100),
        lambda: redistribute(x, (RaggedShard((0,), (1, 3)), R)),
        lambda: redistribute(x, (R, R), collectives=collectives),
        lambda: redistribute(absent, (S0,)),
        lambda: redistribute(x, (S0,), mesh=line),
        lambda: redistribute(wrong, (R, R)),
        lambda: redistribute(x, (S0,), mesh=other),
    ]
    texts = []
    for call in calls:
        torch._dynamo.reset()
        try:
            torch.compile(call, backend="eager", fullgraph=True)()
            texts.append("nothing raised")
        except (RuntimeError, ValueError) as error:  # dynamo wraps our errors in its own
            texts.append(str(error))
    return texts


def test_unsupported_calls_in_a_graph_raise_on_every_rank_with_the_reason(ranks: Pools) -> None:
    reasons = [
        "LayoutError('1 placements for a mesh of shape (2, 2); give 2",
        "NoPlanError('no plan from",
        "cannot hold the RaggedTensor that a RaggedShard makes; redistribute to it outside",
        "cannot be part of a compiled function; leave it out",
        "starts from a DTensor, got an object of type NonMember; redistribute it outside",
        "Failed to convert args/kwargs to proxy"  # the mesh
        if TORCH_2_11
        else "are in one of the two meshes only; a compiled function needs a tensor on every rank",
        "LayoutError('the local tensor has shape [3, 4]",
        "Failed to convert args/kwargs to proxy"
        if TORCH_2_11
        else "gradients do not pass between meshes",
    ]
    for texts in ranks(4).run(refused):
        for text, reason in zip(texts, reasons, strict=True):
            assert reason in text


@settings(deadline=None, max_examples=50)
@given(case=st.sampled_from([(2,), (4,), (2, 2), (2, 3)]).flatmap(lambda mesh: cases(mesh=mesh)))
def test_a_plan_can_be_read_from_its_text(case: Case) -> None:
    written = import_module(f"{_package}._compile")
    stages = import_module(f"{_package}._groups")
    group = type("Group", (), {"group_name": "7"})()

    def find(step: Any) -> Any:
        name = "_".join(map(str, step.axes))
        axis = type("Axis", (), {"name": name, "group": group})()
        return stages.AxisGroup(lambda: axis, range(step.ranks), step.ranks)

    plan = explain(case.source, case.target, shape=case.shape, rank=1)
    groups = {step: find(step) for step in plan.steps if step.kind != "slice"}
    again, read = written.read_plan(written.write_plan(plan, groups))
    assert again == replace(plan, why="", note="")
    for step in plan.steps:
        if step.kind != "slice":
            assert read[step].members == tuple(range(step.ranks))
            assert read[step].size == step.ranks
