"""No state between calls: forwards in flight, exceptions in between, activation checkpointing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_cp import ContextParallel, MaskSpec, context_parallel_attention
from hp_cp.kernels._sdpa import SDPA
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh, dense_attention, inputs, leaves, single, with_gradients
from .test_style import Core, rows

CAUSAL, FULL = MaskSpec(causal=True), MaskSpec(causal=False)
# Documents that cross ranks; each rank has three blocks or more in its first step.
PACKED = MaskSpec(causal=False, cu_seqlens=(0, 1, 4, 10, 11, 18, 19, 26, 27, 32))
Mode = tuple[str, dict[str, Any]]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

SCHEDULED: list[Mode] = [
    ("function", {"schedule": "gather"}),
    ("function", {"schedule": "direct"}),
    ("function", {"schedule": "ring"}),
    ("function", {"schedule": "double_ring"}),
    ("function", {"schedule": "gather", "keep_kv": False}),
    ("function", {"schedule": "direct", "keep_kv": True}),
    ("function", {"schedule": "double_ring", "keep_kv": True}),
    ("style", {"schedule": "ring", "ulysses_degree": 1}),
    ("style", {"load_balance": True, "ulysses_degree": 1}),
]
MODES: list[Mode] = [
    *SCHEDULED,
    ("function", {"ulysses_degree": 4}),
    ("function", {"ulysses_degree": 2, "schedule": "direct"}),
    ("function", {"ulysses_degree": 2, "schedule": "double_ring"}),
    ("style", {"ulysses_degree": 2}),
    ("style", {"ulysses_degree": None}),
]


def attention_of(mode: Mode, mesh: Any, mask: MaskSpec, **options: Any) -> Attention:
    """Return an attention on ``[batch, heads, rows, size]``, by the function or by one module."""
    way, given = mode
    if way == "function":
        return lambda q, k, v: context_parallel_attention(
            q, k, v, mesh, mask=mask, **given, **options
        )
    own = None if mask.cu_seqlens is None else mask
    module = ContextParallel(seq_dim=1, head_dim=2, mask=own, **given, **options).apply(
        Core(), mesh
    )
    return lambda q, k, v: rows(module(rows(q), rows(k), rows(v), is_causal=mask.causal))


def together(per_rank: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts, 2) for parts in zip(*per_rank, strict=True)]


def check(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


def crossed(rank: int, mode: Mode, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Two forwards, then their backwards in the opposite order of a stack."""
    q, k, v, grad = (x.chunk(4, 2)[rank] for x in tensors)
    attention, calls = attention_of(mode, cp_mesh(4), CAUSAL), []
    for scale in (1.0, 0.5):
        local = leaves(q * scale, k, v)
        calls.append((attention(*local), local))
    return [x for out, local in calls for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_forwards_in_flight_do_not_see_each_other(ranks: Any, mode: Mode) -> None:
    q, k, v, grad = tensors = inputs(4, 2, 16)
    expected = [*single(tensors, CAUSAL), *single((q * 0.5, k, v, grad), CAUSAL)]
    check(together(ranks(4).run(crossed, mode, tensors)), expected)


class Failing:
    """A backend that fails at its ``at``-th block, forward and backward counted together."""

    name = "failing"

    def __init__(self, at: int) -> None:
        self._inner = SDPA
        self._left = at

    def supports(self, *args: Any) -> None:
        """Support everything."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._count()
        return self._inner.forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._count()
        return self._inner.backward(*args, **options)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a kernel failed")


def failing_once(
    rank: int, mode: Mode, mask: MaskSpec, at: list[int], tensors: tuple[Tensor, ...]
) -> tuple[str, list[Tensor]]:
    """Fail at this rank's block, then call again."""
    q, k, v, grad = (x.chunk(4, 2)[rank] for x in tensors)

    def run(backend: Any) -> list[Tensor]:
        local = leaves(q, k, v)
        out = attention_of(mode, cp_mesh(4), mask, backend=backend)(*local)
        return with_gradients(out, local, grad)

    try:
        run(Failing(at[rank]))
    except RuntimeError as error:
        return str(error), run("sdpa")
    return "nothing failed", []


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("mode", SCHEDULED, ids=str)
def test_after_an_exception_in_forward_or_backward_the_next_call_is_right(
    ranks: Any, mode: Mode, at: int
) -> None:
    if mode[1].get("schedule") == "gather" or "load_balance" in mode[1]:
        at = {2: 1, 5: 2}[at]  # all keys are attended in one launch, forward and backward
    tensors = inputs(4, 2, 16)
    answers = ranks(4).run(failing_once, mode, FULL, [at] * 4, tensors)
    assert [said for said, _ in answers] == ["a kernel failed"] * 4
    check(together([results for _, results in answers]), single(tensors, FULL))


@pytest.mark.parametrize(
    ("mode", "at"),
    [
        (("function", {"ulysses_degree": 4}), 2),
        (("function", {"ulysses_degree": 4}), 12),
        (("style", {"ulysses_degree": 4}), 12),
        (("function", {"ulysses_degree": 2, "schedule": "direct"}), 2),
        (("function", {"ulysses_degree": 2, "schedule": "direct"}), 9),
        (("style", {"ulysses_degree": 2, "schedule": "ring"}), 9),
    ],
    ids=str,
)
def test_after_an_exception_between_exchanges_of_heads_the_next_call_is_right(
    ranks: Any, mode: Mode, at: int
) -> None:
    check_next_call(ranks, mode, [at] * 4)


class FailingCore(Core):
    """Fails once, in its own forward."""

    failing = True

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Fail, or attend."""
        if self.failing:
            self.failing = False
            raise RuntimeError("a module failed")
        return super().forward(*args, **options)


def module_failing_once(rank: int, tensors: tuple[Tensor, ...]) -> tuple[str, list[Tensor]]:
    q, k, v, grad = (x.chunk(4, 2)[rank] for x in tensors)
    module, local = (
        ContextParallel(seq_dim=1, head_dim=2).apply(FailingCore(), cp_mesh(4)),
        leaves(q, k, v),
    )

    def attend() -> Tensor:
        return rows(module(*map(rows, local), is_causal=True))

    with pytest.raises(RuntimeError) as info:
        attend()
    return str(info.value), with_gradients(attend(), local, grad)


def test_after_an_exception_in_the_modules_own_forward_the_next_call_is_right(ranks: Any) -> None:
    tensors = inputs(4, 4, 16)
    answers = ranks(4).run(module_failing_once, tensors)
    assert [said for said, _ in answers] == ["a module failed"] * 4
    check(together([results for _, results in answers]), single(tensors, CAUSAL))


@pytest.mark.parametrize("at", [[1, 2, 3, 2], [3, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("mode", SCHEDULED, ids=str)
def test_after_exceptions_at_different_blocks_of_a_step_the_next_call_is_right(
    ranks: Any, mode: Mode, at: list[int]
) -> None:
    check_next_call(ranks, mode, at)


def check_next_call(ranks: Any, mode: Mode, at: list[int]) -> None:
    tensors = inputs(4, 4, 32)
    answers = ranks(4).run(failing_once, mode, PACKED, at, tensors)
    assert [said for said, _ in answers] == ["a kernel failed"] * 4
    expected = single(tensors, PACKED, dense_attention)
    check(together([results for _, results in answers]), expected)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("mode", MODES[:-1], ids=str)
def test_after_an_exception_on_one_rank_alone_the_next_call_is_right(
    mode: Mode, failing: int
) -> None:
    tensors, world = inputs(4, 2, 16), SimulatedWorld(4)

    def run(rank: int, door: SimulatedCollectives, backend: Any) -> list[Tensor]:
        q, k, v, grad = (x.chunk(4, 2)[rank] for x in tensors)
        local = leaves(q, k, v)
        mesh = door.mesh((4,), ("cp",))
        attention = attention_of(mode, mesh, FULL, backend=backend, collectives=door)
        return with_gradients(attention(*local), local, grad)

    with pytest.raises(RuntimeError, match="a kernel failed"):
        world.run(lambda rank, door: run(rank, door, Failing(1) if rank == failing else "sdpa"))
    check(together(world.run(lambda rank, door: run(rank, door, "sdpa"))), single(tensors, FULL))


def checkpointed(
    rank: int, mode: Mode, reentrant: bool, tensors: tuple[Tensor, ...]
) -> list[list[Tensor]]:
    q, k, v, grad = (x.chunk(4, 2)[rank] for x in tensors)
    attention, results = attention_of(mode, cp_mesh(4), CAUSAL), []
    for again in (False, True):
        local = leaves(q, k, v)
        out = checkpoint(attention, *local, use_reentrant=reentrant) if again else attention(*local)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in local if x.grad is not None)])
    return results


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_activation_checkpointing_changes_nothing(ranks: Any, mode: Mode, reentrant: bool) -> None:
    tensors = inputs(4, 2, 16)
    for plain, again in ranks(4).run(checkpointed, mode, reentrant, tensors):
        assert len(plain) == 4
        assert all(map(torch.equal, plain, again))
