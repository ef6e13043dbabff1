"""Every dispatcher with experts apart, cut, and sharded over data: the step of one process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Axis
from hp_ep import (
    AllToAll,
    BaseExpertParallel,
    Dedup,
    ExpertParallel,
    ExpertTensorParallel,
    Hierarchical,
    MoE,
    Padded,
    TensorParallel,
    TokenDispatcher,
)
from hp_ep.dispatch._wrappers import Summed

from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads

OPTIONS: dict[str, Any] = dict(hidden=8, shared=1, balance=0.2)


@dataclass(frozen=True)
class Case:
    """Degrees, and the dispatcher's name."""

    efsdp: int
    ep: int
    etp: int
    dispatcher: str


def _cases(size: int) -> list[Case]:
    sizes = (1, 2, 4)
    degrees = [d for d in product(sizes, sizes, sizes) if d[0] * d[1] * d[2] == size]
    names = {1: ["auto"], 2: ["auto", "AllToAll", "Dedup", "Padded", "Hierarchical"]}
    return [Case(d[0], d[1], d[2], name) for d in degrees for name in names[min(d[1], 2)]]


TOKENS = {1: [5], 2: [3, 4], 4: [3, 0, 5, 1]}
"""Tokens of each rank that has its own, by how many such ranks there are."""


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _tokens(parts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(parts)
    x = torch.randn(sum(TOKENS[parts]), 4, generator=generator, dtype=torch.float64)
    return list(x.split(TOKENS[parts]))


def _dispatcher(case: Case, mesh: DeviceMesh) -> Any:
    if case.dispatcher == "auto":
        return "auto"
    if case.dispatcher == "Hierarchical":
        nodes = _mesh((case.efsdp, 2, case.ep // 2, case.etp), ("dp", "node", "inside", "etp"))
        return Hierarchical(nodes["node", "inside"], 4)
    if case.dispatcher == "Padded":
        return Padded(mesh, 4, capacity=5)
    return (Dedup if case.dispatcher == "Dedup" else AllToAll)(mesh, 4)


def _style(case: Case, mesh: DeviceMesh) -> tuple[BaseExpertParallel, DeviceMesh]:
    axes = [Axis.of(mesh, name) for name in ("efsdp", "ep")]
    dispatcher = _dispatcher(case, mesh)
    if case.etp == 1:
        return ExpertParallel(dispatcher, token_axes=axes), mesh["ep"]
    if case.ep == 1:
        return TensorParallel(dispatcher, token_axes=axes), mesh["etp"]
    return ExpertTensorParallel(dispatcher, token_axes=axes), mesh["ep", "etp"]


def _step(rank: int, case: Case, chunks: int) -> dict[str, Tensor]:
    mesh = _mesh((case.efsdp, case.ep, case.etp), ("efsdp", "ep", "etp"))
    layer = build_moe(9, **OPTIONS)
    layer.num_chunks = chunks
    style, over = _style(case, mesh)
    style.apply(layer, over)
    if case.efsdp > 1:
        experts = fully_shard(layer.experts, mesh=mesh["efsdp"])
        experts.set_gradient_divide_factor(1.0)
        experts.set_force_sum_reduction_for_comms(True)
    place = mesh.get_local_rank("efsdp") * case.ep + mesh.get_local_rank("ep")
    x = _tokens(case.efsdp * case.ep)[place].clone().requires_grad_()
    y = layer(x)
    (y**2).sum().backward()
    found = dict(y=y.detach(), x=grads([x])[0], place=torch.tensor(place))
    for name, p in layer.named_parameters():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def _steps(rank: int, size: int, chunks: int) -> list[dict[str, Tensor]]:
    return [_step(rank, case, chunks) for case in _cases(size)]


@pytest.mark.nccl
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_every_dispatcher_and_split_equals_one_process(ranks: Any, size: int, chunks: int) -> None:
    results = ranks(size).run(_steps, size, chunks)
    for i, case in enumerate(_cases(size)):
        parts = case.efsdp * case.ep
        layer, x = build_moe(9, **OPTIONS), torch.cat(_tokens(parts)).requires_grad_()
        y = dense_moe(layer, x)
        ((y**2).sum() + dense_balance_loss(layer, x)).backward()
        by_place: dict[int, list[dict[str, Tensor]]] = {}
        for r in results:
            by_place.setdefault(int(r[i]["place"]), []).append(r[i])
        for alike in by_place.values():
            assert len(alike) == case.etp
            for other in alike[1:]:  # ranks that hold the same tokens agree on all they share
                for name in ("y", "x", "router.weight", "shared_experts.gate_up_proj"):
                    assert torch.equal(alike[0][name], other[name])
        firsts = [by_place[p][0] for p in range(parts)]
        assert_close(torch.cat([r["y"] for r in firsts]), y)
        assert_close(torch.cat([r["x"] for r in firsts]), x.grad)
        for name, p in layer.named_parameters():
            if name.startswith("experts"):
                whole = [r[name] for r in firsts]
                # Without FSDP over it, one rank's experts saw its own data-parallel tokens only.
                assert_close(whole[0], p.grad)
            else:
                assert_close(torch.stack([r[name] for r in firsts]).sum(0), p.grad)


def _interleaved(rank: int, recompute: bool) -> list[list[Tensor]]:
    found = []
    for name in ("AllToAll", "Dedup", "Padded", "Hierarchical"):
        case = Case(1, 2, 1, name)
        mesh = _mesh((1, 2, 1), ("efsdp", "ep", "etp"))
        layer = build_moe(9, **OPTIONS)
        style, over = _style(case, mesh)
        style.apply(layer, over)
        leaves = [(_tokens(2)[rank] * sign).requires_grad_() for sign in (1, -2)]
        run: Callable[[Tensor], Tensor] = layer
        if recompute:
            run = partial(checkpoint, layer, use_reentrant=False)
        first, second = map(run, leaves)
        # The first to go is the first to come back, as in a pipeline, not the last as in a stack.
        (first**2).sum().backward()
        (second**2).sum().backward()
        found.append([first.detach(), second.detach(), *grads(leaves)])
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_microbatches_in_flight_do_not_see_each_other(ranks: Any, recompute: bool) -> None:
    results = ranks(2).run(_interleaved, recompute)
    for micro, sign in enumerate((1, -2)):
        layer = build_moe(9, **OPTIONS)
        x = (torch.cat(_tokens(2)) * sign).requires_grad_()
        y = dense_moe(layer, x)
        ((y**2).sum() + dense_balance_loss(layer, x)).backward()
        for dispatcher in range(4):
            parts = [r[dispatcher] for r in results]
            assert_close(torch.cat([p[micro] for p in parts]), y)
            assert_close(torch.cat([p[micro + 2] for p in parts]), x.grad)


def _experts_step(rank: int, tp: bool) -> list[Tensor]:
    mesh = _mesh((1, 4) if tp else (2, 2), ("experts", "inside"))
    layer = build_moe(9, hidden=8)
    if tp:
        TensorParallel().apply(layer.experts, mesh["inside"])
    else:
        ExpertTensorParallel().apply(layer.experts, mesh)
    leaf = _tokens(2 if not tp else 1)[mesh.get_local_rank("experts")].clone().requires_grad_()
    y = layer(leaf)
    (y**2).sum().backward()
    full = [p.grad.full_tensor() for p in layer.experts.parameters()]  # type: ignore[union-attr]
    return [y.detach(), *grads([leaf]), *full, torch.tensor(mesh.get_local_rank("inside"))]


@pytest.mark.parametrize("tp", [False, True])
def test_wrapped_experts_that_are_cut_equal_one_process(ranks: Any, tp: bool) -> None:
    results = ranks(4).run(_experts_step, tp)
    layer, x = build_moe(9, hidden=8), torch.cat(_tokens(1 if tp else 2)).requires_grad_()
    y = dense_moe(layer, x)
    (y**2).sum().backward()
    for inside in range(4 if tp else 2):
        alike = [r for r in results if int(r[4]) == inside]
        assert_close(torch.cat([r[0] for r in alike]), y)
        assert_close(torch.cat([r[1] for r in alike]), x.grad)
        for got, p in zip(alike[0][2:4], layer.experts.parameters(), strict=True):
            assert_close(got, p.grad)


def _chosen(rank: int) -> list[str]:
    flat, nodes = _mesh((4,), ("ep",)), _mesh((2, 2), ("node", "inside"))

    def kind(layer: MoE, style: BaseExpertParallel, mesh: DeviceMesh) -> str:
        style.apply(layer, mesh)
        dispatcher: TokenDispatcher = layer.dispatcher
        if isinstance(dispatcher, Summed):
            return f"Summed {type(dispatcher.inner).__name__}"
        return type(dispatcher).__name__

    wide: dict[str, Any] = dict(dim=64, experts=32, top_k=8)
    few: dict[str, Any] = dict(dim=64, experts=32, top_k=1)
    return [
        kind(build_moe(0, **wide), ExpertParallel(), flat),
        kind(build_moe(0, **few), ExpertParallel(), flat),
        kind(build_moe(0, **wide), ExpertParallel(node_mesh=nodes), flat),
        kind(build_moe(0, **few), ExpertParallel(node_mesh=nodes), flat),
        kind(build_moe(0, **wide), ExpertTensorParallel(), _mesh((4, 1), ("ep", "etp"))),
        kind(build_moe(0, **wide, hidden=8), TensorParallel(), flat),
    ]


def test_auto_takes_the_dispatcher_with_the_fewest_expected_bytes(ranks: Any) -> None:
    expected = ["Dedup", "AllToAll", "Hierarchical", "AllToAll", "Dedup", "Summed Local"]
    assert ranks(4).run(_chosen) == [expected] * 4
