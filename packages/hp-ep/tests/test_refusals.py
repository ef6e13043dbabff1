"""What a style or a layer refuses because it would compute something else, on all ranks alike."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import RecordingCollectives
from hp_ep import (
    AllToAll,
    BaseExpertParallel,
    Dedup,
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    Hierarchical,
    Local,
    MoE,
    Padded,
    Placement,
    RoutingError,
    TensorParallel,
    TopKRouter,
    parallelize_experts,
)
from hp_ep.dispatch._wrappers import Placed, Summed

from .reference import build_moe


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _text(style: BaseExpertParallel, mesh: DeviceMesh, layer: MoE | None = None) -> str:
    layer = build_moe(0, hidden=8) if layer is None else layer
    with pytest.raises(ExpertConfigError) as error:
        style.apply(layer, mesh)
    assert not any(isinstance(p, DTensor) for p in layer.parameters())
    assert isinstance(layer.dispatcher, Local)
    return str(error.value)


def _noisy() -> MoE:
    return MoE(4, 8, 4, 2, router=TopKRouter(4, 4, 2, noise=0.5))


def _noise(rank: int) -> list[str]:
    flat, grid = _mesh((2,), ("tp",)), _mesh((1, 2), ("ep", "etp"))
    ExpertParallel().apply(_noisy(), flat)  # whole experts: each rank has its own tokens
    TensorParallel().apply(_noisy(), _mesh((2, 1), ("dp", "tp"))["tp"])
    return [
        _text(TensorParallel(), flat, _noisy()),
        _text(ExpertTensorParallel(), grid, _noisy()),
    ]


def test_router_noise_is_refused_where_ranks_must_choose_alike(ranks: Any) -> None:
    results = ranks(2).run(_noise)
    assert results[0] == results[1]
    for text, axis in zip(results[0], ("tp", "etp"), strict=True):
        assert text == (
            f"noise=0.5 is drawn on each rank, but the ranks of {axis} have a part of every expert "
            "and must choose alike; use noise=0, or whole experts"
        )


def _other_dispatchers(rank: int) -> list[str]:
    grid, flat = _mesh((2, 2), ("dp", "ep")), _mesh((4,), ("all",))
    ep, dp = grid["ep"], grid["dp"]
    swapped = cached(
        "swapped", lambda: DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    )
    odd = cached("odd", lambda: DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("c", "d")))
    placed = Placement(num_ranks=2, num_experts=4, experts=(0, 1, 2, 3, 0, 1))
    inner = AllToAll(ep, 4)
    return [
        _text(ExpertParallel(AllToAll(dp, 4)), ep),
        _text(ExpertParallel(Dedup(ep, 8)), ep),
        _text(ExpertParallel(Padded(flat, 4, capacity=3)), ep),
        _text(ExpertParallel(Local(4)), ep),
        _text(TensorParallel(inner), ep),
        _text(ExpertParallel(Hierarchical(swapped, 4)), flat),
        _text(ExpertParallel(inner, placement=placed), ep),
        _text(ExpertParallel(Placed(AllToAll(ep, 6), placed)), ep),
        _text(TensorParallel(Summed(Local(4), AllToAll(odd["d"], 4)._exchange.axis)), odd["d"]),
        _text(TensorParallel(placement=Placement.contiguous(4, 1)), ep),
    ]


def test_a_dispatcher_that_does_not_suit_the_split_is_refused(ranks: Any) -> None:
    results = ranks(4).run(_other_dispatchers)
    blind = [[text.partition(" ranks ")[0] for text in r] for r in results]
    assert blind == [blind[0]] * 4
    suits = "make it over the axis that splits experts, in its order"
    expected = [
        f"AllToAll over ranks [0, 2], but the blocks of experts lie on [0, 1]; {suits}",
        "Dedup for 8 experts in a layer that has 4 experts or slots of a placement; make it for",
        f"Padded over ranks [0, 1, 2, 3], but the blocks of experts lie on [0, 1]; {suits}",
        f"Local over ranks [], but the blocks of experts lie on [0, 1]; {suits}",
        f"AllToAll over ranks [0, 1], but the blocks of experts lie on each rank; {suits}",
        "Hierarchical over ranks [0, 2, 1, 3], but the blocks of experts lie on [0, 1, 2, 3]; make",
        "AllToAll for 4 experts in a layer that has 6 experts or slots of a placement",
        "the style puts a Placed around the dispatcher where one is due; give it the inner one",
        "the style puts a Summed around the dispatcher where one is due; give it the inner one",
        "a placement says which rank holds which experts, but no axis splits them here",
    ]
    for text, start in zip(results[0], expected, strict=True):
        assert text.startswith(start), text


def _width(rank: int, name: str) -> list[str]:
    mesh = _mesh((2,), ("ep",))
    given: Any = {
        "AllToAll": AllToAll(mesh, 4),
        "Dedup": Dedup(mesh, 4),
        "Hierarchical": Hierarchical(_mesh((2, 1), ("node", "inside")), 4),
    }[name]
    layer = build_moe(0, balance=0.1, shared=1)
    layer.num_chunks = 2
    ExpertParallel(given, token_axes=mesh).apply(layer, mesh)
    texts = []
    for wide in (4 + rank, 5):
        with pytest.raises((RoutingError, ExpertConfigError)) as error:
            layer(torch.ones(3, 2, wide, dtype=torch.float64))
        texts.append(f"{type(error.value).__name__}: {error.value}")
    y = layer(torch.ones(3, 4, dtype=torch.float64))  # nobody is left behind
    return [*texts, str(tuple(y.shape))]


@pytest.mark.parametrize("name", ["AllToAll", "Dedup", "Hierarchical"])
def test_an_input_of_another_width_on_one_rank_is_told_to_all(ranks: Any, name: str) -> None:
    expected = [
        "RoutingError: all ranks must give rows of one length and dtype, also without tokens; got "
        "rank 0: 4 of torch.float64; rank 1: 5 of torch.float64",
        "ExpertConfigError: the input has shape (3, 2, 5); its last dimension must be dim=4",
        "(3, 4)",
    ]
    for texts in ranks(2).run(_width, name):
        assert texts == expected


BOTH = ("gate_up_proj", "down_proj")


def _frozen(rank: int, frozen: tuple[str, ...]) -> list[Any]:
    mesh, record = _mesh((2,), ("ep",)), RecordingCollectives()
    layer = build_moe(0)
    for name in frozen:
        layer.experts.get_parameter(name).requires_grad_(False)
    copies = Placement(num_ranks=2, num_experts=4, experts=(0, 1, 2, 3, 0, 1))
    ExpertParallel(placement=copies, collectives=record).apply(layer, mesh)
    y = layer(torch.ones(3, 4, dtype=torch.float64, requires_grad=True))
    record.reset()
    y.sum().backward()
    made = record.by_call[("ep", "all_to_all")]
    have = [name for name, p in layer.experts.named_parameters() if p.grad is not None]
    return [made.calls, made.bytes, have]


def test_frozen_weights_of_replicas_are_not_sent(ranks: Any) -> None:
    every: Callable[..., Any] = ranks(2).run
    ((all_calls, all_bytes, all_have),) = {tuple(map(str, r)) for r in every(_frozen, ())}
    ((calls, sent, have),) = {tuple(map(str, r)) for r in every(_frozen, ("down_proj",))}
    ((none, least, left),) = {tuple(map(str, r)) for r in every(_frozen, BOTH)}
    assert [all_have, have, left] == [str(list(BOTH)), "['gate_up_proj']", "[]"]
    assert int(all_calls) == int(calls) == int(none) + 1
    assert 2 * (int(all_bytes) - int(sent)) == int(sent) - int(least) > 0


@pytest.mark.parametrize(
    ("mesh", "style", "words"),
    [
        (None, ExpertParallel(), "None is no mesh"),
        ("ep", ExpertParallel(), "'ep' is no mesh"),
        (SimpleNamespace(ndim=1), ExpertParallel, "is no style; pass one, as ExpertParallel()"),
    ],
)
def test_what_is_no_mesh_and_no_style_is_named(mesh: Any, style: Any, words: str) -> None:
    with pytest.raises(ExpertConfigError, match=re.escape(words)):
        parallelize_experts(build_moe(0, hidden=8), mesh, style)
