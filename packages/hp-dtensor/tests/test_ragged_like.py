"""``RaggedTensor.like``: a ragged tensor with the same layout, from a local tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rank_pool import RankPool, profile
from torch import Tensor

from hp_dtensor import Layout, LayoutError, RaggedShard

from .test_ragged import BATCH, Ragged, part_of, ragged_cases, ragged_of, whole

Pools = Callable[[int], RankPool]
UNEVEN = Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3))


class Made(NamedTuple):
    """Results of one rank."""

    full: Tensor
    same_layout: bool
    dtype: torch.dtype
    tracked: tuple[bool, bool]
    grad: Tensor


def made(rank: int, batch: list[Ragged]) -> list[Made]:
    results = []
    for case in batch:
        x: Any = ragged_of(whole(case.shape, 1), case, rank).requires_grad_()
        y = x.like(part_of(whole(case.shape, 2), case, rank))
        alike = y.placements == x.placements and y.device_mesh is x.device_mesh
        leaf = part_of(whole(case.shape, 3), case, rank).requires_grad_()
        z = x.like(leaf)
        (z.full_tensor() * whole(case.shape, 4)).sum().backward()
        assert leaf.grad is not None
        results.append(
            Made(
                full=y.full_tensor(),
                same_layout=alike and y.shape == x.shape,
                dtype=x.like(leaf.detach().bfloat16()).dtype,
                tracked=(y.requires_grad, z.requires_grad),
                grad=leaf.grad,
            )
        )
    return results


def test_it_has_the_same_layout_and_the_values_dtype_and_gradient_of_the_part(ranks: Pools) -> None:
    @settings(deadline=None, max_examples=2)
    @given(st.lists(ragged_cases((2, 2)), min_size=BATCH, max_size=BATCH))
    def check(batch: list[Ragged]) -> None:
        for rank, results in enumerate(ranks(4).run(made, batch)):
            for case, result in zip(batch, results, strict=True):
                assert torch.equal(result.full, whole(case.shape, 2))
                assert result.same_layout
                assert result.dtype == torch.bfloat16
                assert result.tracked == (False, True)
                assert torch.equal(result.grad, part_of(whole(case.shape, 4), case, rank))

    check()


def shared(rank: int) -> tuple[bool, bool, bool]:
    """Return whether memory is shared, writes are visible, and ``requires_grad`` is separate."""
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    local = part_of(whole(UNEVEN.shape, 2), UNEVEN, rank)
    y = x.like(local)
    local.zero_()
    local.requires_grad_()
    with torch.no_grad():
        part = y.to_local()
    return part.data_ptr() == local.data_ptr(), not part.any(), not part.requires_grad


def test_the_part_is_shared_but_not_the_object(ranks: Pools) -> None:
    assert ranks(4).run(shared) == [(True, True, True)] * 4


def wrong(rank: int) -> str:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    with pytest.raises(LayoutError) as info:
        x.like(torch.zeros(2, 3))
    return str(info.value)


def test_a_part_of_another_shape_is_refused_where_it_is(ranks: Pools) -> None:
    for rank, text in enumerate(ranks(4).run(wrong)):
        rows = (5, 1, 0, 4)[rank]
        assert "[2, 3] where (Ragged(0: [5, 1, 0, 4])) of [10, 3] on mesh [4]" in text
        assert text.endswith(f"gives rank {rank} of the mesh [{rows}, 3]")


def calls(rank: int) -> int:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    local = part_of(whole(UNEVEN.shape, 2), UNEVEN, rank)
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    profile(partial(x.like, local), note)
    return count


def test_it_costs_a_few_calls_however_large_the_layout(ranks: Pools) -> None:
    """The calls are `like`, a helper that `from_local` shares, and the constructor."""
    assert max(ranks(4).run(calls)) <= 6
