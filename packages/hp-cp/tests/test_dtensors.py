"""DTensors are taken as their local rows, where these are whole rows of the sequence."""

import re
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention

from hp_cp import (
    ContextParallel,
    ContextParallelError,
    InputError,
    MaskSpec,
    context_parallel_attention,
)
from hp_dtensor import RecordingCollectives

from .strategies import cp_mesh, inputs, single
from .test_style import Core, rows


def distributed_inputs(
    rank: int, degree: int | None, tensors: tuple[Tensor, ...]
) -> list[tuple[str, Tensor]]:
    """Pass DTensors whose lengths over the mesh are unequal."""
    mesh = cp_mesh(2)
    core = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree).apply(Core(), mesh)
    parts = [
        DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        for x in tensors[:3]
    ]
    out = core(*parts, is_causal=True)
    try:
        core(*(DTensor.from_local(x, mesh, [Replicate()]) for x in tensors[:3]))
    except ContextParallelError as error:
        return [(type(out).__name__, out), (str(error), out)]
    return []


@pytest.mark.parametrize("degree", [None, 1])
def test_dtensors_are_taken_as_their_shards(ranks: Any, degree: int | None) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 7))
    answers = ranks(2).run(distributed_inputs, degree, tensors)
    reference = Core()(*tensors[:3], is_causal=True)
    assert [len(a) for a in answers] == [2, 2]
    assert [a[0][0] for a in answers] == ["Tensor", "Tensor"]
    assert all("is sharded on dim 1" in a[1][0] for a in answers)
    whole = torch.cat([a[0][1] for a in answers], 1)
    torch.testing.assert_close(whole, reference, rtol=0, atol=1e-13)


def contradicted_by_dtensors(rank: int, tensors: tuple[Tensor, ...]) -> str:
    mesh = cp_mesh(2)
    core = ContextParallel(seq_dim=1, head_dim=2, seq_len=8).apply(Core(), mesh)
    parts = [
        DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        for x in tensors[:3]
    ]
    try:
        core(*parts)
    except InputError as error:
        return str(error)
    return "served"


def test_a_whole_length_that_dtensors_contradict_is_refused(ranks: Any) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 7))
    for text in ranks(2).run(contradicted_by_dtensors, tensors):
        assert text == (
            "seq_len=8 was given to the style, but the DTensors have 7 tokens; "
            "use seq_len=7 or None"
        )


Asked = tuple[tuple[str, ...], tuple[str, ...], list[Placement], int | None]

HEADS, BATCH, SEQ, SIZE = Shard(2), Shard(0), Shard(1), Shard(3)


def over_two_axes(rank: int, asked: Asked, tensors: tuple[Tensor, ...]) -> tuple[str, Tensor, int]:
    """Return what was said or computed on this rank, and the calls that were made."""
    cp, over, placements, degree = asked
    mesh = cached("two", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    record = RecordingCollectives()
    style = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=record)
    core = style.apply(Core(), mesh[cp] if cp != ("a", "b") else mesh)
    given = []
    for x in tensors[:3]:
        local, where = x, mesh[over] if over != ("a", "b") else mesh
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                parts = local.chunk(2, placement.dim)
                at = where.get_local_rank(axis)
                local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
        given.append(DTensor.from_local(local, where, placements, shape=x.shape, stride=x.stride()))
    try:
        out = core(*given, is_causal=True)
    except InputError as error:
        return str(error), torch.empty(0), len(record.by_call)
    return "served", out, len(record.by_call)


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize(
    ("cp", "over", "placements", "said"),
    [
        (("b",), ("a", "b"), [HEADS, Replicate()], "is sharded on dim 1 over all of its ranks"),
        (("b",), ("a", "b"), [SEQ, Replicate()], "axis 'a' .* must leave rows whole"),
        (("b",), ("a", "b"), [SEQ, SEQ], "axis 'a' .* must leave rows whole"),
        (("b",), ("a", "b"), [SIZE, SEQ], r"axis 'a' .* got S\(3\)"),
        (("b",), ("a", "b"), [Partial(), SEQ], r"axis 'a' .* got P\(sum\)"),
        (("b",), ("b",), [Partial()], "is sharded on dim 1 over all of its ranks"),
        (("b",), ("a",), [Partial()], "axis 'a' .* must leave rows whole"),
        (("b",), ("a",), [SEQ], "axis 'a' .* must leave rows whole"),
        (("a", "b"), ("b",), [SEQ], "is sharded on dim 1 over all of its ranks"),
    ],
    ids=str,
)
def test_shards_that_are_no_whole_rows_are_refused_on_every_rank(
    ranks: Any,
    degree: int | None,
    cp: tuple[str, ...],
    over: tuple[str, ...],
    placements: list[Placement],
    said: str,
) -> None:
    if degree == 1 and len(cp) == 2:
        degree = 2
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 4, 8))
    answers = ranks(4).run(over_two_axes, (cp, over, placements, degree), tensors)
    assert [calls for *_, calls in answers] == [0] * 4
    for text, *_ in answers:
        assert re.search(said, text), text


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize("seq_len", [8, 7])
@pytest.mark.parametrize("first", [HEADS, BATCH, Replicate()], ids=str)
def test_a_mesh_with_axes_of_heads_or_of_the_batch_tells_the_whole_length(
    ranks: Any, first: Placement, seq_len: int, degree: int | None
) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 4, seq_len))
    asked = (("b",), ("a", "b"), [first, SEQ], degree)
    expected = Core()(*tensors[:3], is_causal=True)
    for rank, (text, out, _) in enumerate(ranks(4).run(over_two_axes, asked, tensors)):
        mine = expected if not isinstance(first, Shard) else expected.chunk(2, first.dim)[rank // 2]
        assert text == "served"
        torch.testing.assert_close(out, mine.chunk(2, 1)[rank % 2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("seq_len", [6, 7, 8])
def test_shards_of_shards_are_served_where_they_are_as_long_as_the_layout_says(
    ranks: Any, seq_len: int
) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 4, seq_len))
    expected = Core()(*tensors[:3], is_causal=True)
    asked = (("a", "b"), ("a", "b"), [SEQ, SEQ], None)
    answers = ranks(4).run(over_two_axes, asked, tensors)
    if seq_len == 6:
        said = r"axes of 2 x 2 ranks, has local lengths \(2, 1, 2, 1\), where .* \(2, 2, 2, 0\)"
        assert all(re.search(said, text) for text, *_ in answers)
        assert [calls for *_, calls in answers] == [0] * 4
    else:
        whole = torch.cat([out for _, out, _ in answers], 1)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-13)


def of_two_lengths(rank: int, lengths: tuple[int, ...]) -> str:
    core = ContextParallel(seq_dim=1, head_dim=2).apply(Core(), cp_mesh(2))
    shapes = [torch.Size((1, length, 2, 8)) for length in lengths]
    q, k, v = (
        DTensor.from_local(
            torch.zeros(shape).chunk(2, 1)[rank],
            cp_mesh(2),
            [SEQ],
            shape=shape,
            stride=torch.zeros(shape).stride(),
        )
        for shape in shapes
    )
    try:
        core(q, k, v)
    except InputError as error:
        return str(error)
    return "served"


def test_dtensors_of_unequal_lengths_are_refused_though_one_rank_has_equal_rows(ranks: Any) -> None:
    for text in ranks(2).run(of_two_lengths, (7, 8, 8)):
        assert "DTensors of [7, 8, 8] tokens" in text


def given_dtensors(rank: int) -> str:
    x = DTensor.from_local(torch.zeros(1, 2, 4, 8), cp_mesh(2), [Shard(2)])
    local = torch.zeros(1, 2, 4, 8)
    try:
        context_parallel_attention(local, x, local, cp_mesh(2), mask=MaskSpec(causal=True))
    except InputError as error:
        return str(error)
    return "served"


def test_the_function_takes_local_rows_only(ranks: Any) -> None:
    for text in ranks(2).run(given_dtensors):
        assert text.startswith("k is a DTensor with ")
        assert "k.to_local()" in text


def without_context_parallelism(rank: int, tensors: tuple[Tensor, ...]) -> Tensor:
    """Return torch's attention over sharded rows, in a process that uses the style."""
    # Not picklable, as a module-level name would have to be.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = tuple(x.chunk(2, 2)[rank] for x in tensors[:3])
    module = ContextParallel(seq_dim=1, head_dim=2).apply(Core(), cp_mesh(2))
    module(*map(rows, tensors))
    q, k, v = (DTensor.from_local(x, cp_mesh(2), [Shard(2)]) for x in tensors)
    with sdpa_kernel(SDPBackend.MATH):  # the one that DTensors have a rule for on CPU
        out: Any = scaled_dot_product_attention(q, k, v)
    whole: Tensor = out.full_tensor()
    return whole


def test_torchs_own_attention_of_sharded_rows_is_left_alone(ranks: Any) -> None:
    tensors = inputs(4, 4, 8)
    expected = single(tensors, MaskSpec(causal=False))[0]
    for out in ranks(2).run(without_context_parallelism, tensors):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
