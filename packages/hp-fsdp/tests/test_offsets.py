"""How one parameter is sharded."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp.layout import ShardSpec


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """Draw a legal spec: dim 0 of any size, others of multiples of the degree."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    dim, degree = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 5))
    if dim:
        shape[dim] *= degree
    return ShardSpec(shape=tuple(shape), dim=dim, degree=degree)


def counted(spec: ShardSpec) -> torch.Tensor:
    return torch.arange(torch.Size(spec.shape).numel()).view(spec.shape)


@settings(deadline=None, max_examples=60)
@given(specs())
def test_the_shards_equal_torch_chunk_and_can_be_empty(spec: ShardSpec) -> None:
    whole = counted(spec)
    parts = [spec.part(whole, index) for index in range(spec.degree)]
    assert torch.equal(torch.cat(parts, spec.dim), whole)
    assert [tuple(part.shape) for part in parts] == [
        spec.local_shape(i) for i in range(spec.degree)
    ]
    if whole.shape[spec.dim]:
        chunks = torch.chunk(whole, spec.degree, spec.dim)
        assert all(torch.equal(*pair) for pair in zip(parts, chunks, strict=False))


@settings(deadline=None, max_examples=60)
@given(specs())
def test_read_by_rank_the_parts_follow_one_another(spec: ShardSpec) -> None:
    whole = counted(spec)
    parts = [spec.part(whole, index).flatten() for index in range(spec.degree)]
    assert torch.equal(spec.by_rank(whole).flatten(), torch.cat(parts))
    assert spec.numel == whole.numel()
    assert max(part.numel() for part in parts) == spec.shard_numel
