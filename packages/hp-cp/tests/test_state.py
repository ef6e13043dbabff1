"""No state between calls: forwards in flight, exceptions in between, activation checkpointing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_cp import MaskSpec, context_parallel_attention
from hp_cp.backends._fused import SDPA

from .strategies import cp_mesh, inputs, leaves, single, with_gradients

CAUSAL = MaskSpec(causal=True)
MODES = [("gather", 1), ("direct", 1), ("ring", 1), ("direct", 2)]


def crossed(
    rank: int, n: int, schedule: Any, degree: int, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """Two forwards, then their backwards in the opposite order of a stack."""
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)
    calls = []
    for scale in (1.0, 0.5):
        local = leaves(q * scale, k, v)
        out = context_parallel_attention(
            *local, cp_mesh(n), mask=CAUSAL, schedule=schedule, ulysses_degree=degree
        )
        calls.append((out, local))
    return [x for out, local in calls for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize(("schedule", "degree"), MODES)
def test_two_forwards_in_flight_do_not_see_each_other(
    ranks: Any, schedule: str, degree: int
) -> None:
    tensors = inputs(4, 2, 16)
    per_rank = ranks(4).run(crossed, 4, schedule, degree, tensors)
    together = [torch.cat(parts, 2) for parts in zip(*per_rank, strict=True)]
    q, k, v, grad = tensors
    expected = [*single((q, k, v, grad), CAUSAL), *single((q * 0.5, k, v, grad), CAUSAL)]
    for result, reference in zip(together, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


class Failing:
    """A backend that fails on every rank at its ``at``-th block."""

    name = "failing"

    def __init__(self, inner: Any, at: int) -> None:
        self._inner = inner
        self._left = at

    def supports(self, *args: Any) -> None:
        """Support everything."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a kernel failed")
        return self._inner.forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        """Fail, or compute."""
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a kernel failed")
        return self._inner.backward(*args, **options)


def failing_once(
    rank: int, n: int, schedule: Any, degree: int, at: int, tensors: tuple[Tensor, ...]
) -> tuple[str, list[Tensor]]:
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)

    def run(backend: Any) -> list[Tensor]:
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(n),
            mask=MaskSpec(causal=False),
            schedule=schedule,
            ulysses_degree=degree,
            backend=backend,
        )
        return with_gradients(out, local, grad)

    try:
        run(Failing(SDPA, at))
    except RuntimeError as error:
        return str(error), run("sdpa")
    return "nothing failed", []


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("schedule", ["gather", "direct", "ring"])
def test_after_an_exception_in_forward_or_backward_the_next_call_is_right(
    ranks: Any, schedule: str, at: int
) -> None:
    tensors = inputs(4, 2, 16)
    answers = ranks(4).run(failing_once, 4, schedule, 1, at, tensors)
    assert [said for said, _ in answers] == ["a kernel failed"] * 4
    expected = single(tensors, MaskSpec(causal=False))
    for parts, reference in zip(
        zip(*(results for _, results in answers), strict=True), expected, strict=True
    ):
        torch.testing.assert_close(torch.cat(parts, 2), reference, rtol=0, atol=1e-13)


def checkpointed(
    rank: int, n: int, schedule: Any, degree: int, reentrant: bool, tensors: tuple[Tensor, ...]
) -> list[list[Tensor]]:
    q, k, v, grad = (x.chunk(n, 2)[rank] for x in tensors)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q, k, v, cp_mesh(n), mask=CAUSAL, schedule=schedule, ulysses_degree=degree
        )

    results = []
    for again in (False, True):
        local = leaves(q, k, v)
        out = checkpoint(attention, *local, use_reentrant=reentrant) if again else attention(*local)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in local if x.grad is not None)])
    return results


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("schedule", "degree"), MODES)
def test_activation_checkpointing_changes_nothing(
    ranks: Any, schedule: str, degree: int, reentrant: bool
) -> None:
    tensors = inputs(4, 2, 16)
    for plain, again in ranks(4).run(checkpointed, 4, schedule, degree, reentrant, tensors):
        assert len(plain) == 4
        assert all(map(torch.equal, plain, again))
