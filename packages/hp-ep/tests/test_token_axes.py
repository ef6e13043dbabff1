"""Ranks that split experts must hold different tokens: what says otherwise is refused at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, RecordingCollectives
from hp_ep import (
    BalanceLoss,
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
    collect_loads,
)

from .reference import assert_close, build_moe, grads


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _claims(rank: int) -> list[str]:
    grid, flat = _mesh((2, 2), ("dp", "tp")), _mesh((4,), ("ep",))
    claims: list[Any] = [grid["dp"], [Axis.of(grid, "dp")], grid["tp"], (), grid, flat, None]
    texts = []
    for claim in claims:
        layer = build_moe(0, balance=0.0 if claim is None else 0.1)
        try:
            ExpertParallel(token_axes=claim).apply(layer, flat)
        except ExpertConfigError as error:
            texts.append(str(error))
            assert not isinstance(layer.experts.gate_up_proj, DTensor)
        else:
            texts.append("taken")
    return texts


def test_ranks_that_split_experts_and_share_tokens_are_refused_on_every_rank(ranks: Any) -> None:
    every = ranks(4).run(_claims)
    for texts in every:
        assert [text == "taken" for text in texts] == [False] * 4 + [True] * 3
        for text, names in zip(texts, (["dp"], ["dp"], ["tp"], []), strict=False):
            assert f"token_axes {names} " in text
            assert "ep=4" in text
            assert "token_axes=" in text.split(";")[-1]


def _alike(rank: int) -> list[str]:
    grid = _mesh((2, 2), ("ep", "tp"))
    found = []
    for style, mesh in (
        (ExpertTensorParallel(token_axes=grid["ep"]), grid),
        (TensorParallel(token_axes=()), grid["tp"]),
        (ExpertParallel(token_axes=grid["ep"]), grid["ep"]),
    ):
        style.apply(build_moe(0, hidden=8, balance=0.1), mesh)
        found.append("taken")
    return found


def test_ranks_that_share_tokens_and_cut_experts_inside_are_taken(ranks: Any) -> None:
    assert ranks(4).run(_alike) == [["taken"] * 3] * 4


def _overlapping(rank: int) -> list[str]:
    """Say that ranks which cut experts inside hold different tokens, in all ways there are."""
    grid, flat = _mesh((2, 2), ("ep", "tp")), _mesh((4,), ("ep",))
    odd = cached(
        "diagonal", lambda: DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "tp"))
    )
    both, tensor = ExpertTensorParallel, TensorParallel
    told = build_moe(0, hidden=8, balance=0.1)
    told.router.split_tokens_over(grid)
    after, quiet = build_moe(0, hidden=8), build_moe(0, hidden=8)
    tensor().apply(after, grid["tp"])
    record = RecordingCollectives()
    cases: list[Callable[[], object]] = [
        *(
            lambda style=style, mesh=mesh, axes=axes: style(
                token_axes=axes, collectives=record
            ).apply(quiet, mesh)
            for style, mesh, axes in (
                (tensor, flat, flat),
                (tensor, grid["tp"], grid["tp"]),
                (tensor, odd["tp"], grid),
                (both, grid, grid),
                (both, grid, [Axis.of(grid, "ep"), Axis.of(grid, "tp")]),
                (both, grid, flat),
            )
        ),
        lambda: both(collectives=record).apply(told, grid),
        lambda: after.router.split_tokens_over(grid, record),
        lambda: collect_loads(after, grid, record),
        lambda: BalanceLoss(after, grid, record),
    ]
    texts = []
    for case in cases:
        with pytest.raises(ExpertConfigError) as error:
            case()
        texts.append(str(error.value))
    assert not isinstance(quiet.experts.gate_up_proj, DTensor)
    assert not isinstance(told.experts.gate_up_proj, DTensor)
    assert not record.by_call
    return texts


def test_token_axes_over_ranks_that_cut_experts_inside_are_refused(ranks: Any) -> None:
    every = ranks(4).run(_overlapping)
    assert every == [every[0]] * 4
    for text in every[0]:
        assert text.startswith("token axes [")
        assert "whose ranks cut experts inside and hold the same tokens: loads and losses" in text
        assert "out of them, () where no other axis splits tokens" in text


def _counted_twice(rank: int) -> list[str]:
    """Say in all ways there are that tokens are split twice between the same ranks."""
    grid, flat = _mesh((2, 2), ("dp", "cp")), _mesh((4,), ("ep",))
    dp, cp, ep = Axis.of(grid, "dp"), Axis.of(grid, "cp"), Axis.of(flat, 0)
    layer, record = build_moe(0, balance=0.1), RecordingCollectives()
    cases: list[Callable[[], object]] = [
        lambda: ExpertParallel(token_axes=[ep, ep], collectives=record).apply(layer, flat),
        lambda: ExpertParallel(token_axes=[dp, ep], collectives=record).apply(layer, flat),
        lambda: layer.router.split_tokens_over([ep, cp], record),
        lambda: collect_loads(layer, [cp, dp, cp], record),
        lambda: BalanceLoss(layer, [ep, ep], record),
    ]
    texts = []
    for case in cases:
        with pytest.raises(ExpertConfigError) as error:
            case()
        texts.append(str(error.value))
    assert not isinstance(layer.experts.gate_up_proj, DTensor)
    assert not record.by_call
    layer.router.split_tokens_over([dp, cp], record)  # they share this rank alone
    return texts


def test_axes_that_split_tokens_twice_between_the_same_ranks_are_refused(ranks: Any) -> None:
    for texts in ranks(4).run(_counted_twice):
        assert len(texts) == 5
        for text in texts:
            assert "share ranks, whose tokens would count twice" in text


def _untold(rank: int) -> list[str]:
    """Spread layers without a word about their tokens, and ask for numbers of all tokens."""
    mesh = _mesh((2,), ("ep",))
    layer, told, cut, whole, alone = (build_moe(0) for _ in range(5))
    ExpertParallel().apply(layer, mesh)
    ExpertParallel(token_axes=mesh).apply(told, mesh)
    TensorParallel().apply(cut, mesh)
    ExpertParallel().apply(whole, _mesh((2, 1), ("dp", "ep"))["ep"])
    texts = []
    asked: list[Callable[..., object]] = [collect_loads, BalanceLoss]
    for ask in asked:
        for model in (layer, layer.router):
            with pytest.raises(ExpertConfigError) as error:
                ask(model)
            texts.append(str(error.value))
    for model in (told, cut, whole, alone):
        collect_loads(model)
        BalanceLoss(model)
    collect_loads(layer, mesh)
    BalanceLoss(layer, mesh)
    return texts


def test_numbers_of_all_tokens_are_refused_where_nobody_said_who_has_them(ranks: Any) -> None:
    every = ranks(2).run(_untold)
    assert every == [every[0]] * 2
    for text, name in zip(every[0], ("router", "") * 2, strict=True):
        assert text.startswith(f"routers {[name]} were not told which axes split their tokens")
        assert text.endswith("; pass axes, or give the style token_axes")


def _tokens(dp: int) -> Tensor:
    generator = torch.Generator().manual_seed(dp)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def _uncut(rank: int, cut: tuple[bool, bool], width: int) -> tuple[str, list[int], Tensor | None]:
    """Return the first error, the calls of each step, and the gradient of an expert weight."""
    grid, record = _mesh((2, 2), ("dp", "tp")), RecordingCollectives()
    layer, flat = build_moe(0, shared=1, balance=0.1), _mesh((4,), ("ep",))
    style = ExpertParallel(token_axes=grid, sequence_mesh=grid["tp"], collectives=record)
    style.apply(layer, flat)
    dp, tp = divmod(rank, 2)
    x = _tokens(dp)
    if cut[dp]:
        x = x.chunk(2)[tp]
    x = x[:, :width] if rank == 0 else x
    with torch.no_grad():
        layer(_tokens(dp)) if width == 4 else None  # nothing is learned from it
    calls: list[int] = []
    for _ in range(3):
        before = sum(int(traffic.calls) for traffic in record.by_call.values())
        try:
            (layer(x) ** 2).sum().backward()
        except ValueError as error:
            return str(error), calls, None
        calls.append(sum(int(traffic.calls) for traffic in record.by_call.values()) - before)
    w1: Any = layer.experts.gate_up_proj
    return "", calls, w1.grad.full_tensor() / 3


@pytest.mark.parametrize("cut", [(False, False), (True, False), (False, True)])
def test_an_input_that_is_not_cut_by_sequence_is_refused_on_every_rank(
    ranks: Any, cut: tuple[bool, bool]
) -> None:
    every = ranks(4).run(_uncut, cut, 4)
    texts = [text for text, _, _ in every]
    assert texts == [texts[0]] * 4
    assert texts[0].startswith("the same 6 tokens on several ranks of tp=2")
    assert "cut the input by sequence over tp" in texts[0]


def _twice(rank: int) -> list[str]:
    """Give whole sequences in two steps, then parts of them in two more."""
    layer, flat = build_moe(0), _mesh((2,), ("ep",))
    ExpertParallel(token_axes=flat, sequence_axes=flat).apply(layer, flat)
    texts = []
    for x in (_tokens(0), _tokens(1), _tokens(0).chunk(2)[rank], _tokens(1)):
        try:
            layer(x)
        except ExpertConfigError as error:
            texts.append(str(error))
        else:
            texts.append("taken")
    return texts


@pytest.mark.nccl
def test_inputs_are_compared_until_they_are_cut_once(ranks: Any) -> None:
    for texts in ranks(2).run(_twice):
        assert [text[:17] for text in texts] == ["the same 6 tokens"] * 2 + ["taken"] * 2


def test_a_cut_input_is_compared_in_the_first_step_alone(ranks: Any) -> None:
    layer = build_moe(0, shared=1, balance=0.1)
    x = torch.cat([_tokens(0), _tokens(1)])
    (layer(x) ** 2).sum().backward()
    for text, calls, grad in ranks(4).run(_uncut, (True, True), 4):
        assert text == ""
        assert_close(grad, grads([layer.experts.gate_up_proj])[0])
        assert calls[0] > calls[1] == calls[2]


def test_an_input_of_another_width_on_one_rank_still_raises_on_all(ranks: Any) -> None:
    for text, _, _ in ranks(4).run(_uncut, (True, True), 3):
        assert text
