"""Second derivatives: refused where gradients have no graph, there where they have one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    ExpertParallel,
    MoE,
    Placement,
    UnsupportedError,
    gather_rows,
    permute,
    scatter_rows,
    unpermute,
)

from .dispatching import NAMES, make_dispatcher
from .reference import assert_close, build_moe, grads

START = "a backward with create_graph=True through a mixture of experts is not supported: its "


def _refused(y: Tensor, leaves: list[Tensor]) -> str:
    with pytest.raises(UnsupportedError) as error:
        torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return str(error.value)


def _tokens(number: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, 4, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "which", ["x", "router.weight", "experts.gate_up_proj", "experts.down_proj"]
)
def test_a_gradient_of_any_input_alone_is_refused_with_a_graph(which: str) -> None:
    layer, x = build_moe(0), _tokens()
    leaf = x if which == "x" else layer.get_parameter(which)
    assert _refused(layer(x), [leaf]).startswith(START)
    (layer(x) ** 2).sum().backward()  # and the layer is as it was
    grads([x, *layer.parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_every_dispatcher_refuses_a_graph_of_gradients_on_every_rank(name: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        size = 1 if name == "Local" else 4
        dispatcher = make_dispatcher(name, door.mesh, size, 8, door)
        ids = torch.tensor([[0, 3], [5, 1], [7, 2]])
        x, weights = _tokens(3), torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
        rows, _, state = dispatcher.dispatch(x, weights, ids)
        texts = [_refused(rows, [x])]
        rows, _, state = dispatcher.dispatch(x, weights, ids)
        return [*texts, _refused(dispatcher.combine(rows, state), [weights])]

    results = SimulatedWorld(1 if name == "Local" else 4).run(rank)
    assert all(text.startswith(START) for texts in results for text in texts)


def _copies(rank: int) -> list[str]:
    mesh = cached("flat", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    layer, x = build_moe(0), _tokens()
    placement = Placement(num_ranks=2, num_experts=4, experts=(0, 1, 2, 3, 0, 1))
    ExpertParallel(placement=placement).apply(layer, mesh)
    w1: Any = layer.experts.gate_up_proj
    shared = layer.experts.replicas
    assert shared is not None
    (weight,) = shared.share((w1.to_local(),))
    return [_refused(layer(x), [x]), _refused(weight, [w1])]


def test_sums_over_replicas_refuse_a_graph_of_gradients(ranks: Any) -> None:
    for texts in ranks(2).run(_copies):
        assert all(text.startswith(START) for text in texts)


@pytest.mark.parametrize("weighted", [False, True])
def test_gathered_and_summed_rows_refuse_a_graph_of_gradients(weighted: bool) -> None:
    order, places = torch.tensor([2, 0, 3, 1]), torch.tensor([[1, 3], [0, 2]])
    x, rows = _tokens(2), _tokens(4)
    weights = torch.ones(2, 2, dtype=torch.float64) if weighted else None
    assert _refused(gather_rows(x, order, places), [x]).startswith(START)
    assert _refused(scatter_rows(rows, order, places, weights), [rows]).startswith(START)


@pytest.mark.parametrize("reorder", [permute, unpermute])
def test_permutations_have_derivatives_of_every_order(
    reorder: Callable[[Tensor, Tensor], Tensor],
) -> None:
    indices = torch.tensor([2, 0, 3, 1])
    assert torch.autograd.gradgradcheck(lambda rows: reorder(rows, indices) ** 3, (_tokens(4),))


def _run(how: str, layer: MoE, x: Tensor) -> Tensor:
    if how == "compiled":
        compiled: Callable[[Tensor], Tensor] = torch.compile(layer, backend="aot_eager")
        return compiled(x)
    y: Tensor = (
        layer(x) if how == "kept" else checkpoint(layer, x, use_reentrant=how == "reentrant")
    )
    return y


@pytest.mark.filterwarnings("ignore")  # those of torch.compile about its own work
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "kept", "compiled"])
def test_recomputed_kept_and_compiled_graphs_are_differentiated_as_ever(how: str) -> None:
    plain, layer = build_moe(1, balance=0.1), build_moe(1, balance=0.1)
    x, other = _tokens(), _tokens()
    (plain(x) ** 2).sum().backward()
    loss = (_run(how, layer, other) ** 2).sum()
    if how == "kept":
        loss.backward(retain_graph=True)
        layer.zero_grad()
        other.grad = None
    loss.backward()
    for got, expected in zip(
        grads([other, *layer.parameters()]), grads([x, *plain.parameters()]), strict=True
    ):
        assert_close(got, expected)
