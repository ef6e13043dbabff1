"""How one parameter is cut."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp._cut import Cut


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draw a legal cut: dim 0 of any size, others of multiples of the degree."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    dim, degree = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 5))
    if dim:
        shape[dim] *= degree
    return Cut(shape=tuple(shape), dim=dim, degree=degree)


def counted(cut: Cut) -> torch.Tensor:
    return torch.arange(torch.Size(cut.shape).numel()).view(cut.shape)


@settings(deadline=None, max_examples=60)
@given(cuts())
def test_the_parts_are_those_of_chunk_and_empty_ones(cut: Cut) -> None:
    whole = counted(cut)
    parts = [cut.part(whole, index) for index in range(cut.degree)]
    assert torch.equal(torch.cat(parts, cut.dim), whole)
    assert [tuple(part.shape) for part in parts] == [cut.local_shape(i) for i in range(cut.degree)]
    if whole.shape[cut.dim]:
        chunks = torch.chunk(whole, cut.degree, cut.dim)
        assert all(torch.equal(*pair) for pair in zip(parts, chunks, strict=False))


@settings(deadline=None, max_examples=60)
@given(cuts())
def test_read_by_rank_the_parts_follow_one_another(cut: Cut) -> None:
    whole = counted(cut)
    parts = [cut.part(whole, index).flatten() for index in range(cut.degree)]
    assert torch.equal(cut.by_rank(whole).flatten(), torch.cat(parts))
    assert torch.Size(cut.planned_shape).numel() == whole.numel()
    assert len(cut.by_rank(whole)) == cut.planned_shape[0]
