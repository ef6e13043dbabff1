"""Where packed gradients lie, and what one rank gets of them."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_fsdp._cut import Cut
from hp_fsdp._packing import Packing, pack_by_rank
from hp_fsdp._plan import plan_group
from hp_fsdp._ragged_plan import plan_ragged
from hp_fsdp._sink import Sink
from hp_fsdp._torch import pack_rank_major

SHAPES = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return gradients in which no value is there twice."""
    total = sum(map(math.prod, shapes))
    flat = torch.arange(1.0, total + 1, dtype=torch.float64)
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def written(packing: Packing, gradients: list[Tensor]) -> Tensor:
    """Return the packed gradients as they are written one by one, over noise."""
    sink = packing.sink
    flat = torch.full((sink.degree * sink.width,), torch.nan, dtype=torch.float64)
    into = Sink(sink, flat)
    for i, gradient in enumerate(gradients):
        into.add(i, gradient)
    return into.finish()


def packed(packing: Packing, gradients: list[Tensor]) -> Tensor:
    """Return the packed gradients as one call packs them."""
    sink = packing.sink
    pieces = list(gradients)
    for i, cut in packing.rearranged:
        pieces[i] = cut.by_rank(pieces[i]).contiguous()
    for i, start, end in reversed(sink.gaps):
        pieces.insert(i, torch.zeros(sink.degree, end - start, dtype=torch.float64))
    flat = torch.full((sink.degree * sink.width,), torch.nan, dtype=torch.float64)
    pieces = [piece for piece in pieces if piece.numel()]
    if pieces:
        pack_rank_major(pieces, sink.degree, flat.view(sink.degree, sink.width))
    return flat


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_rank_gets_its_part_of_rows_that_lie_by_rank(
    shapes: list[tuple[int, ...]], degree: int, random: Any
) -> None:
    cuts = []
    for shape in shapes:
        dim = random.randrange(len(shape))
        if dim:
            shape = (*shape[:dim], shape[dim] * degree, *shape[dim + 1 :])
        cuts.append(Cut(shape=shape, dim=dim, degree=degree))
    slots = plan_group([cut.planned_shape for cut in cuts], degree, 8).slots
    gradients = numbered([cut.shape for cut in cuts])
    rows = []
    for index in range(degree):
        held = [cut.local_shape(index) for cut in cuts]
        packing = pack_by_rank(slots, cuts, held, 8)
        flat = written(packing, gradients)
        rows.append(flat)
        assert torch.equal(flat, packed(packing, gradients))
        parts = packing.row.views(flat.view(degree, -1)[index])
        for cut, gradient, part in zip(cuts, gradients, parts, strict=True):
            assert torch.equal(part, cut.part(gradient, index))
    assert all(torch.equal(row, rows[0]) for row in rows)


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(2, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_rank_gets_its_run_of_a_buffer_in_which_some_are_frozen(
    shapes: list[tuple[int, ...]], degree: int, atom: int, random: Any
) -> None:
    atoms = [atom if math.prod(shape) % atom == 0 else 1 for shape in shapes]
    plan = plan_ragged(shapes, atoms, degree, 8)
    chosen = [i for i in range(len(shapes)) if random.random() < 0.7]
    gradients = [gradient for i, gradient in enumerate(numbered(shapes)) if i in chosen]
    for index in range(degree):
        packing = plan.packing(chosen, index)
        flat = written(packing, gradients)
        assert torch.equal(flat, packed(packing, gradients)) or not chosen
        share = flat.view(degree, -1)[index]
        parts = packing.row.views(share)
        assert sum(packing.row.widths) == len(share)
        for i, gradient, part in zip(chosen, gradients, parts, strict=True):
            first, end = plan.span(i, index)
            assert torch.equal(part.flatten(), gradient.flatten()[first:end])
            assert part.shape[1:] == gradient.shape[plan.leading(i) :]
        assert share.sum() == sum(part.sum() for part in parts)  # the rest is zero
