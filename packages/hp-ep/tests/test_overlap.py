"""Chunks and calls that overlap: the same results, begun earlier and awaited later."""

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    DispatchStateError,
    ExpertConfigError,
    GroupedExperts,
    MoE,
)
from hp_ep.dispatch import _exchange
from hp_ep.dispatch._interface import start_dispatch

from .dispatching import OVER_RANKS, make_dispatcher
from .logged import logged
from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads


def _layer(
    name: str, me: int, door: SimulatedCollectives, through: Collectives, chunks: int
) -> MoE:
    layer = build_moe(7, shared=1, balance=0.2)
    local = GroupedExperts(4, 6, 2, dtype=torch.float64)
    with torch.no_grad():
        for mine, every in zip(local.parameters(), layer.experts.parameters(), strict=True):
            mine.copy_(every.chunk(2)[me])
    layer.experts = local
    layer.dispatcher = make_dispatcher(name, door.mesh, 2, 4, through)
    layer.router.split_tokens_over(door.mesh((2,), ("ep",)), through)
    layer.num_chunks = chunks
    return layer


def _tokens(counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    return list(torch.randn(sum(counts), 4, generator=generator, dtype=torch.float64).split(counts))


@pytest.mark.parametrize("name", OVER_RANKS)
@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=2), st.integers(1, 4))
def test_chunks_change_nothing(name: str, counts: list[int], chunks: int) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        layer = _layer(name, me, door, door, chunks)
        x = _tokens(counts)[me].clone().requires_grad_()
        y = layer(x)
        (y**2).sum().backward()
        return [y.detach(), *grads([x, *layer.parameters()])]

    results = SimulatedWorld(2).run(rank)
    layer, x = build_moe(7, shared=1, balance=0.2), torch.cat(_tokens(counts)).requires_grad_()
    y = dense_moe(layer, x)
    ((y**2).sum() + dense_balance_loss(layer, x)).backward()
    whole = [y.detach(), *grads([x, *layer.parameters()])]
    for i, expected in enumerate(whole):
        parts = [r[i] for r in results]
        shared = i == 2 or i > 4  # the router's and the shared experts': each rank has a part
        assert_close(torch.stack(parts).sum(0) if shared else torch.cat(parts), expected)


def _log_computing(module: torch.nn.Module, what: str, log: list[str]) -> None:
    module.register_forward_hook(lambda *_: log.append(what))
    module.register_full_backward_hook(lambda *_: log.append(what + " back"))


def test_the_next_chunk_travels_while_the_experts_compute() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[list[str]]:
        log: list[str] = []
        numbers = count()

        def label(axis: Axis, tensor: Tensor) -> str | None:
            rows = tensor.is_floating_point() and tensor.dim() == 2  # not the weights beside them
            return str(next(numbers)) if rows else None

        layer = _layer("AllToAll", me, door, logged(door, log, label), 2)
        _log_computing(layer.experts, "experts", log)
        assert layer.shared_experts is not None
        _log_computing(layer.shared_experts, "shared", log)
        x = _tokens([4, 4])[me].requires_grad_()
        y = layer(x)
        forward, log[:], numbers = list(log), [], count()
        y.sum().backward()
        return [forward, log]

    for forward, backward in SimulatedWorld(2).run(rank):
        # 0 and 1 bring the two chunks, 2 and 3 return them.
        assert forward == [
            *("start 0", "shared", "wait 0", "start 1", "experts", "start 2", "wait 1"),
            *("experts", "start 3", "wait 2", "wait 3"),
        ]
        at = {entry: i for i, entry in enumerate(backward)}
        first = backward.index("experts back")
        # Both results' gradients have started before the first experts' backward, and the first
        # rows' gradients travel during the second's.
        assert at["start 0"] < at["start 1"] < first < at["start 2"]
        assert at["start 2"] < backward.index("experts back", first + 1) < at["wait 2"]


def test_tokens_that_are_not_valid_are_left_out_of_everything() -> None:
    padded, plain = build_moe(1, shared=1, balance=0.2), build_moe(1, shared=1, balance=0.2)
    x = _tokens([6])[0].view(2, 3, 4)
    valid = torch.tensor([[True, False, True], [False, False, True]])
    filled = torch.where(valid[..., None], x, torch.nan).requires_grad_()
    leaf = x[valid].clone().requires_grad_()
    y, expected = padded(filled, valid), plain(leaf)
    assert torch.equal(y[valid], expected)
    assert not y[~valid].any()
    (y**2).sum().backward()
    (expected**2).sum().backward()
    assert filled.grad is not None
    assert leaf.grad is not None
    assert torch.equal(filled.grad[valid], leaf.grad)
    assert not filled.grad[~valid].any()
    for a, b in zip(grads([*padded.parameters()]), grads([*plain.parameters()]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(padded.router.load, plain.router.load)


@pytest.mark.parametrize("valid", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool)])
def test_a_mask_of_another_kind_is_refused(valid: Tensor) -> None:
    with pytest.raises(ExpertConfigError, match=r"must be torch.bool of shape \(2, 3\)"):
        build_moe(1)(torch.zeros(2, 3, 4, dtype=torch.float64), valid)


@pytest.mark.parametrize("chunks", [0, 1.5, True])
def test_chunks_are_a_positive_integer(chunks: Any) -> None:
    with pytest.raises(ExpertConfigError, match=f"num_chunks={chunks!r} must be"):
        MoE(4, 6, 4, 2, num_chunks=chunks)


class _Side:
    """Stands for a stream beside the one that computes: notes what is put there."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        (received,) = work.wait()
        numbers = torch.cat([t.reshape(-1) for t in (*others, received)])
        self._log.append("copy to host")

        def wait() -> list[int]:
            self._log.append("host waits")
            found: list[int] = numbers.tolist()
            return found

        return received, wait

    def mark(self) -> object:
        self._log.append("mark")
        return None

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        self._log.append("aside")
        return call()

    def adopt(self, tensor: Tensor) -> None:
        self._log.append("adopt")


def _beside(name: str, chunks: int, side: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    def rank(me: int, door: SimulatedCollectives) -> list[Any]:
        log: list[str] = []
        sides[threading.get_ident()] = _Side(log) if side else None

        def label(axis: Axis, tensor: Tensor) -> str | None:
            if tensor.dim() == 1:
                return None  # routing weights, and the counts of the router's loss
            return "rows" if tensor.is_floating_point() else "counts"

        layer = _layer(name, me, door, logged(door, log, label), chunks)
        _log_computing(layer.experts, "experts", log)
        assert layer.shared_experts is not None
        _log_computing(layer.shared_experts, "shared", log)
        x = _tokens([4, 4])[me].requires_grad_()
        y = layer(x)
        forward, log[:] = list(log), []
        y.sum().backward()
        return [forward, list(log), y.detach(), *grads([x, *layer.parameters()])]

    sides: dict[int, _Side | None] = {}
    monkeypatch.setattr(_exchange, "side_of", lambda device: sides[threading.get_ident()])
    return SimulatedWorld(2).run(rank)


def _call(text: str) -> list[str]:
    return text.split(", ")


def test_counts_travel_to_the_host_while_the_shared_experts_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, aside = (_beside("AllToAll", 1, side, monkeypatch) for side in (False, True))
    for mine, theirs in zip(plain, aside, strict=True):
        assert mine[0] == _call(
            "start counts, wait counts, start rows, shared, wait rows, experts, start rows, "
            "wait rows"
        )
        assert theirs[0] == _call(
            "start counts, wait counts, copy to host, mark, mark, shared, host waits, aside, "
            "aside, start rows, adopt, wait rows, adopt, experts, start rows, wait rows"
        )
        back = [entry for entry in theirs[1] if entry in mine[1]]
        assert back == mine[1]  # the shared experts still overlap with the gradients of the rows
        assert back.index("shared back") < len(back) - 1 - back[::-1].index("wait rows")
        for a, b in zip(mine[2:], theirs[2:], strict=True):
            assert torch.equal(a, b)


def test_the_next_chunk_leaves_before_results_return_where_counts_are_copied_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, aside = (_beside("AllToAll", 2, side, monkeypatch) for side in (False, True))
    for mine, theirs in zip(plain, aside, strict=True):
        assert theirs[0] == _call(
            "start counts, wait counts, copy to host, mark, mark, shared, host waits, aside, "
            "aside, start rows, adopt, wait rows, adopt, start counts, wait counts, "
            "copy to host, mark, mark, experts, host waits, aside, aside, start rows, "
            "start rows, adopt, wait rows, adopt, experts, start rows, wait rows, wait rows"
        )
        for a, b in zip(mine[2:], theirs[2:], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["Dedup", "Hierarchical"])
def test_dispatchers_that_need_counts_to_pick_rows_read_them_aside(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, aside = (_beside(name, 1, side, monkeypatch) for side in (False, True))
    for mine, theirs in zip(plain, aside, strict=True):
        assert [e for e in theirs[0] if e in mine[0]] == mine[0]
        assert theirs[0].count("copy to host") == theirs[0].count("host waits") == 1
        assert theirs[0].index("host waits") < theirs[0].index("start rows")
        for a, b in zip(mine[2:], theirs[2:], strict=True):
            assert torch.equal(a, b)


def test_a_result_is_waited_for_once() -> None:
    def rank(me: int, door: SimulatedCollectives) -> None:
        dispatcher = make_dispatcher("AllToAll", door.mesh, 2, 4, door)
        ids, x = torch.tensor([[0, 3]]), torch.ones(1, 3)
        pending = start_dispatch(dispatcher, x, torch.ones(1, 2), ids)
        pending.wait()
        with pytest.raises(DispatchStateError, match="was waited for before"):
            pending.wait()

    SimulatedWorld(2).run(rank)
