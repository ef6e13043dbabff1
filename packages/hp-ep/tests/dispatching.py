"""One step through a dispatcher, each rank's part of it, and the same in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hp_dtensor import AxisMesh, Collectives
from hp_dtensor.testing import SimulatedCollectives
from hp_ep import (
    AllToAll,
    Dedup,
    GroupedExperts,
    Hierarchical,
    Local,
    Padded,
    RoutingError,
    TokenDispatcher,
)
from hp_ep.dispatch._interface import start_dispatch

from .reference import assert_close, dense_combine, grads
from .strategies import Routing

Result = dict[str, Tensor]
Meshes = Callable[[tuple[int, ...], tuple[str, ...]], AxisMesh]

OVER_RANKS = ["AllToAll", "Dedup", "Hierarchical", "Padded"]
NAMES = ["Local", *OVER_RANKS]


def make_dispatcher(
    name: str, meshes: Meshes, ranks: int, experts: int, door: Collectives | None, **options: Any
) -> TokenDispatcher:
    """Return a dispatcher over ``ranks``, by name; two nodes where their number is even."""
    if name == "Local":
        return Local(experts, **options)
    if name == "Hierarchical":
        nodes = 2 if ranks % 2 == 0 else ranks
        mesh = meshes((nodes, ranks // nodes), ("node", "inside"))
        return Hierarchical(mesh, experts, door, **options)
    mesh = meshes((ranks,), ("ep",))
    if name == "Padded":
        return Padded(mesh, experts, door, **{"capacity": 7, **options})
    if name == "Dedup":
        return Dedup(mesh, experts, door, **options)
    return AllToAll(mesh, experts, door, **options)


def simulated(
    name: str, door: SimulatedCollectives, routing: Routing, **options: Any
) -> TokenDispatcher:
    """Return a dispatcher for a routing, over the ranks of a simulated world."""
    sizes = routing.num_ranks, routing.num_experts
    return make_dispatcher(name, door.mesh, *sizes, door, **options)


def error_of(call: Callable[[], object]) -> str:
    """Return what the `RoutingError` of ``call`` says."""
    try:
        call()
    except RoutingError as error:
        return str(error)
    return "no error"


def weights_of(num_experts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_experts)
    shapes = (num_experts, 2, 5, 3), (num_experts, 3, 5)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def rank_result(
    rank: int,
    dispatcher: TokenDispatcher,
    routing: Routing,
    held: tuple[int, ...] | None = None,
    *,
    weigh_rows: bool = False,
) -> Result:
    """Return what one rank gets, with experts ``held`` or its block of them."""
    local = routing.num_experts // routing.num_ranks
    mine = range(rank * local, (rank + 1) * local) if held is None else held
    experts = GroupedExperts(3, 5, len(mine), dtype=torch.float64)
    with torch.no_grad():
        for p, whole in zip(experts.parameters(), weights_of(routing.num_experts), strict=True):
            p.copy_(whole[list(mine)])
    x = routing.x[rank].clone().requires_grad_()
    w = routing.weights[rank].clone().requires_grad_()
    given = x, w, routing.expert_ids[rank]
    rows, counts, state = start_dispatch(dispatcher, *given, weigh_rows=weigh_rows).wait()
    results = experts(rows, counts)
    if state.row_weights is not None:
        results = results * state.row_weights[:, None]
    y = dispatcher.combine(results, state)
    (y * torch.arange(1.0, 4.0)).sum().backward()
    gx, gw, g1, g2 = grads([x, w, *experts.parameters()])
    sums = rows.detach().sum(0)
    return dict(y=y.detach(), x=gx, w=gw, gate_up=g1, down=g2, counts=counts, sums=sums)


def check(routing: Routing, results: list[Result], *, counted: bool = True) -> None:
    """Compare what the ranks return, put together, with one process that has all tokens."""
    x = torch.cat(routing.x).requires_grad_()
    w = torch.cat(routing.weights).requires_grad_()
    ids = torch.cat(routing.expert_ids)
    gate_up, down = (p.requires_grad_() for p in weights_of(routing.num_experts))
    y = dense_combine(x, w, ids, gate_up, down)
    (y * torch.arange(1.0, 4.0)).sum().backward()
    assert_close(torch.cat([r["y"] for r in results]), y)
    for name, leaf in dict(x=x, w=w, gate_up=gate_up, down=down).items():
        assert_close(torch.cat([r[name] for r in results]), leaf.grad)
    total = x.detach().sum(0) * routing.top_k  # every token arrives once per choice, unchanged
    assert_close(torch.stack([r["sums"] for r in results]).sum(0), total)
    if not counted:  # rows that nobody uses are counted too
        return
    counts = torch.cat([r["counts"] for r in results])
    assert counts.tolist() == [int((ids == e).sum()) for e in range(routing.num_experts)]


def fixed_routing(tokens: list[int], experts: int, top_k: int, load: float = 0.0) -> Routing:
    generator = torch.Generator().manual_seed(sum(tokens))
    logits = torch.randn(sum(tokens), experts, generator=generator, dtype=torch.float64)
    ids = (logits - load * torch.arange(experts)).topk(top_k).indices
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(sum(tokens), 3, generator=generator, dtype=torch.float64)
    return Routing(
        num_ranks=len(tokens),
        num_experts=experts,
        top_k=top_k,
        x=list(x.split(tokens)),
        weights=list(weights.split(tokens)),
        expert_ids=list(ids.split(tokens)),
    )


ROUTINGS = {
    "one rank": fixed_routing([5], 4, 3),
    "uneven": fixed_routing([5, 2], 4, 2),
    "no token on rank 1": fixed_routing([4, 0], 4, 2),
    "no tokens": fixed_routing([0, 0], 4, 2),
    "one expert for all": fixed_routing([3, 4], 4, 1, load=100.0),
    "all experts for each": fixed_routing([2, 3], 4, 4),
    "four ranks": fixed_routing([3, 0, 5, 1], 8, 3),
    "many experts per rank": fixed_routing([9, 0, 7, 4], 32, 3),
    "one expert per rank": fixed_routing([1, 2, 3, 4], 4, 2),
}
