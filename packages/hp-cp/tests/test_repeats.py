"""Unequal groups of query heads: kv heads once per query head, without an index from a list."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import ContextParallel, MaskSpec, context_parallel_attention
from hp_cp._blockwise import repeat_heads, sum_heads
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import inputs, leaves, single, with_gradients
from .test_style import Core, rows

CAUSAL = MaskSpec(causal=True)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_heads_are_repeated_as_repeat_interleave_does_and_summed_as_its_gradient(
    repeats: list[int],
) -> None:
    x = torch.arange(24.0 * len(repeats), dtype=torch.float64).view(2, 3, len(repeats), 4)
    y = x.clone().requires_grad_()
    expected = y.repeat_interleave(torch.tensor(repeats), 2)
    assert torch.equal(repeat_heads(x, repeats), expected)
    grad = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
    assert torch.equal(sum_heads(grad, repeats), torch.autograd.grad(expected, y, grad)[0])


@pytest.mark.parametrize("way", ["function", "module"])
def test_no_list_is_an_index_where_heads_are_uneven(way: str) -> None:
    tensors = inputs(9, 3, 8)  # on two ranks groups of 3 and 2 query heads, and of 1 and 3

    def rank(rank: int, door: SimulatedCollectives) -> tuple[list[Tensor], set[str]]:
        q, k, v, grad = (x.chunk(2, 2)[rank] for x in tensors)
        local, mesh = leaves(q, k, v), door.mesh((2,), ("cp",))
        style = ContextParallel(seq_dim=1, head_dim=2, collectives=door)
        with Called() as called:
            if way == "module":
                module = style.apply(Core(), mesh)
                out = rows(module(*map(rows, local), is_causal=True))
            else:
                out = context_parallel_attention(
                    *local, mesh, mask=CAUSAL, ulysses_degree=2, collectives=door
                )
            return with_gradients(out, local, grad), set(called.times)

    answers = SimulatedWorld(2).run(rank)
    for i, expected in enumerate(single(tensors, CAUSAL)):
        parts = torch.cat([results[i] for results, _ in answers], 2)
        torch.testing.assert_close(parts, expected, rtol=0, atol=1e-13)
    for _, names in answers:
        assert "aten.expand.default" in names
        assert not [name for name in names if name.startswith(("aten.index", "aten._index"))]
