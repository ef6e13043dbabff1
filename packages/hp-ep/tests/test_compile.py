"""The layer in ``torch.compile``, in every dtype that eager takes: one graph on one rank."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis
from hp_ep import (
    AllToAll,
    Dedup,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    Padded,
    TopKRouter,
)

from .reference import assert_close, grads

# Dynamo and inductor use parts of torch that torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MOST_GRAPHS = 13  # four fences around what travels, three around the sums of the losses
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def _layer(dtype: torch.dtype, **options: Any) -> MoE:
    torch.manual_seed(0)
    router = TopKRouter(
        16, 4, 2, load_balance_loss=0.1, z_loss=0.01, sequence_loss=0.1, bias_rate=0.1, dtype=dtype
    )
    return MoE(16, 8, 4, 2, router=router, dtype=dtype, num_shared_experts=1, **options)


def _step(layer: MoE, call: Any, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 16, generator=generator).to(dtype).requires_grad_()
    layer.zero_grad()
    layer.router.load.zero_()
    y = call(x)
    y.square().sum().backward()
    found = [y.detach(), *grads([x, *layer.parameters()]), layer.router.load.clone()]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]


COMPILED = [(dtype, backend) for backend in ("eager", "aot_eager") for dtype in TOLERANCES]
COMPILED.append((torch.float32, "inductor"))
LONGER = [(torch.float64, "inductor"), (torch.bfloat16, "inductor")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [*COMPILED, *(pytest.param(*case, marks=pytest.mark.long) for case in LONGER)],
)
def test_a_layer_on_one_rank_is_one_graph_with_the_values_of_eager(
    dtype: torch.dtype, backend: str
) -> None:
    layer = _layer(dtype)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for mine, eager in zip(_step(layer, compiled, dtype), _step(layer, layer, dtype), strict=True):
        assert mine.dtype == eager.dtype
        assert_close(mine.double(), eager.double(), TOLERANCES[dtype])


def test_lengths_that_no_grouped_product_takes_compile_too() -> None:
    torch.manual_seed(0)
    layer = MoE(5, 3, 4, 2, num_chunks=2)
    x = torch.randn(7, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), layer(x), 1e-5)


def test_experts_with_every_option_are_one_graph() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(
        16, 8, 3, bias=True, activation="clamped_swiglu", row_multiple=8, dtype=torch.float64
    )
    counts, weights = torch.tensor([3, 0, 2]), torch.rand(5, dtype=torch.float64)

    def step(call: Any) -> list[Tensor]:
        experts.zero_grad()
        rows = torch.linspace(-1, 1, 80, dtype=torch.float64).view(5, 16).requires_grad_()
        w = weights.clone().requires_grad_()
        y = call(rows, counts, w)
        y.square().sum().backward()
        return [y.detach(), *grads([rows, w, *experts.parameters()])]

    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(step(compiled), step(experts), strict=True):
        assert_close(mine, eager)


def _fenced(rank: int, name: str, dtype: torch.dtype, etp: bool) -> list[Any]:
    shape, names = ((2, 2), ("ep", "etp")) if etp else ((2,), ("ep",))
    mesh = cached((name, shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))
    layers = [_layer(dtype) for _ in range(2)]
    style: Any = ExpertTensorParallel if etp else ExpertParallel
    for layer in layers:
        axes = [Axis.of(mesh, 0)]
        kind: Any = Dedup if name == "Dedup" else AllToAll
        style(kind(Axis.of(mesh, 0), 4), token_axes=axes).apply(layer, mesh)
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    compiled, eager = layers
    results = [
        _step(compiled, torch.compile(compiled, backend=backend), dtype),
        _step(eager, eager, dtype),
    ]
    before = len(graphs)
    _step(compiled, torch.compile(compiled, backend=backend), dtype)
    return [before, len(graphs) - before, results]


@pytest.mark.parametrize(
    ("name", "dtype", "etp"),
    [
        ("Dedup", torch.bfloat16, False),
        ("AllToAll", torch.float64, True),
    ],
)
def test_what_communicates_is_fenced_and_the_rest_is_compiled(
    ranks: Any, name: str, dtype: torch.dtype, etp: bool
) -> None:
    for graphs, again, (mine, eager) in ranks(4 if etp else 2).run(_fenced, name, dtype, etp):
        assert graphs <= MOST_GRAPHS
        assert again == 0
        for got, expected in zip(mine, eager, strict=True):
            assert_close(got.double(), expected.double(), TOLERANCES[dtype])


def _compiled(rank: int, name: str, backend: str) -> list[list[Tensor]]:
    mesh = cached("compiled", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    torch.compiler.reset()
    found = []
    for compiles in (True, False):
        layer, axis = _layer(torch.float64), Axis.of(mesh, 0)
        dispatcher = Dedup(axis, 4) if name == "Dedup" else Padded(axis, 4, capacity=12)
        ExpertParallel(dispatcher, token_axes=[axis]).apply(layer, mesh)
        call = torch.compile(layer, backend=backend) if compiles else layer
        found.append([value for _ in range(2) for value in _step(layer, call, torch.float64)])
    return found


@pytest.mark.parametrize(
    ("name", "backend"),
    [("Padded", "eager"), pytest.param("Dedup", "inductor", marks=pytest.mark.long)],
)
def test_a_spread_layer_compiles_with_the_values_of_eager(
    ranks: Any, name: str, backend: str
) -> None:
    for mine, eager in ranks(2).run(_compiled, name, backend):
        for got, expected in zip(mine, eager, strict=True):
            assert_close(got, expected)
