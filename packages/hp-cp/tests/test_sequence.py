"""Sharding the sequence and putting it together again."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    Contiguous,
    DegreeError,
    InputError,
    Layout,
    LayoutError,
    MaskSpec,
    PerDocument,
    Zigzag,
    position_ids,
    shard_sequence,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives, SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, all_layouts, cp_mesh, layouts, masked


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (1, 3), (3, 2)]),
    masked(25),
    all_layouts,
    st.sampled_from([0, 1, -1, -2]),
)
def test_unshard_inverts_shard(
    world: tuple[int, ...], case: tuple[MaskSpec, int], layout: Layout, dim: int
) -> None:
    (mask, seq_len), n = case, math.prod(world)
    shape = [2, 3]
    shape.insert(dim % 3, seq_len)
    x = torch.arange(6 * seq_len, dtype=torch.float64).view(shape)

    def rank(_: int, door: SimulatedCollectives) -> tuple[int, Tensor]:
        mesh = door.mesh(world, ("outer", "ulysses")[-len(world) :])
        mine = shard_sequence(x, mesh, layout, dim, mask)
        given = seq_len if mask.cu_seqlens is None else None
        whole = unshard_sequence(mine, mesh, layout, dim, mask, seq_len=given, collectives=door)
        return mine.shape[dim], whole

    results = SimulatedWorld(n).run(rank)
    assert [r[0] for r in results] == [len(held) for held in layout.indices(n, seq_len, mask)]
    assert all(torch.equal(r[1], x) for r in results)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 12), layouts)
def test_the_gradient_of_unshard_sums_the_ranks_gradients(
    n: int, seq_len: int, layout: Layout
) -> None:
    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        mesh = door.mesh((n,), ("cp",))
        rows = position_ids(mesh, layout, seq_len).double().requires_grad_()
        whole = unshard_sequence(rows, mesh, layout, 0, seq_len=seq_len, collectives=door)
        (whole * torch.arange(seq_len) * (rank + 1)).sum().backward()
        assert rows.grad is not None
        return rows.grad

    grads = SimulatedWorld(n).run(rank)
    for held, grad in zip(layout.indices(n, seq_len), grads, strict=True):
        assert grad.tolist() == [i * n * (n + 1) / 2 for i in held]


@pytest.mark.parametrize(
    ("seq_len", "calls"),
    [(8, {"all_gather": 1, "reduce_scatter": 1}), (7, {"exchange": 1, "all_to_all": 1})],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_unshard_and_its_backward_make_the_documented_calls(
    layout: Layout, seq_len: int, calls: dict[str, int]
) -> None:
    def rank(_: int, door: SimulatedCollectives) -> dict[tuple[str, str], int]:
        record = RecordingCollectives(door)
        mesh = door.mesh((2,), ("cp",))
        rows = position_ids(mesh, layout, seq_len).double().requires_grad_()
        whole = unshard_sequence(rows, mesh, layout, 0, seq_len=seq_len, collectives=record)
        whole.sum().backward()
        return {call: traffic.calls for call, traffic in record.by_call.items()}

    expected = {("cp", name): number for name, number in calls.items()}
    assert SimulatedWorld(2).run(rank) == [expected] * 2


def cut_and_join(rank: int, layout: Layout, seq_len: int) -> tuple[Any, Any]:
    mesh = cp_mesh(2)
    x = torch.arange(2 * seq_len).view(2, seq_len)
    tree = {"x": x, "more": [x + 1, (None, "text")]}
    mine = shard_sequence(tree, mesh, layout, 1)
    return mine, unshard_sequence(mine, mesh, layout, 1, seq_len=seq_len)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("seq_len", [8, 7])
def test_trees_go_there_and_back_on_gloo(ranks: Any, layout: Layout, seq_len: int) -> None:
    x = torch.arange(2 * seq_len).view(2, seq_len)
    for rank, (mine, whole) in enumerate(ranks(2).run(cut_and_join, layout, seq_len)):
        held = list(layout.indices(2, seq_len)[rank])
        assert torch.equal(mine["x"], x[:, held])
        assert torch.equal(mine["more"][0], x[:, held] + 1)
        assert mine["more"][1] == (None, "text")
        assert torch.equal(whole["x"], x)
        assert torch.equal(whole["more"][0], x + 1)
        assert whole["more"][1] == (None, "text")


@pytest.mark.parametrize("seq_len", [8, 7])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_buffers_with_the_sequence_in_different_dims_are_cut_alike(
    layout: Layout, seq_len: int
) -> None:
    x = torch.arange(2 * seq_len).view(2, seq_len)
    tree = {"tokens": x, "rope": (x.T, None), "more": [x.view(1, 2, seq_len), "text"]}
    dims = {"tokens": 1, "rope": (0, 0), "more": [-1, 0]}

    def rank(rank: int, door: SimulatedCollectives) -> None:
        mesh = door.mesh((2,), ("cp",))
        mine = shard_sequence(tree, mesh, layout, dims)
        held = list(layout.indices(2, seq_len)[rank])
        assert torch.equal(mine["tokens"], x[:, held])
        assert torch.equal(mine["rope"][0], x.T[held])
        assert torch.equal(mine["more"][0], x[None, :, held])
        assert (mine["rope"][1], mine["more"][1]) == (None, "text")
        whole = unshard_sequence(mine, mesh, layout, dims, seq_len=seq_len, collectives=door)
        assert torch.equal(whole["tokens"], x)
        assert torch.equal(whole["rope"][0], x.T)
        assert torch.equal(whole["more"][0], x[None])

    SimulatedWorld(2).run(rank)


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((0, 1), "is not built as the tensors are"),
        ([0, [1]], "is not built as the tensors are"),
        ([0, None], r"shape \(4, 4\) has no dim None"),
        ([0, 2], r"shape \(4, 4\) has no dim 2"),
        (1.0, "is not built as the tensors are"),
    ],
    ids=str,
)
def test_dims_that_do_not_fit_the_tensors_are_refused_before_any_communication(
    dims: Any, said: str
) -> None:
    def rank(rank: int, door: SimulatedCollectives) -> None:
        record = RecordingCollectives(door)
        mesh, tree = door.mesh((2,), ("cp",)), [torch.zeros(4, 4), torch.zeros(4, 4)]
        with pytest.raises(InputError, match=said):
            shard_sequence(tree, mesh, Zigzag(), dims)
        with pytest.raises(InputError, match=said):
            unshard_sequence(tree, mesh, Zigzag(), dims, collectives=record)
        assert record.by_axis == {}

    SimulatedWorld(2).run(rank)


def test_a_tensor_without_the_dim_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"shape \(4,\) has no dim 1"):
        shard_sequence(torch.zeros(4), mesh, Contiguous(), 1)


@pytest.mark.parametrize("layout", ["zigzag", None, Zigzag])
def test_a_layout_that_is_none_is_refused_even_without_tensors(layout: Any) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    said = "layout must be a Layout, got"
    with pytest.raises(LayoutError, match=said):
        shard_sequence([], mesh, layout, 0)
    with pytest.raises(LayoutError, match=said):
        unshard_sequence([], mesh, layout, 0, collectives=door)
    with pytest.raises(LayoutError, match=said):
        position_ids(mesh, layout, 8)


def test_layouts_that_follow_the_mask_want_it() -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    x, layout = torch.zeros(4), PerDocument()
    with pytest.raises(LayoutError, match="give the mask"):
        shard_sequence(x, mesh, layout, 0)
    with pytest.raises(LayoutError, match="give the mask"):
        unshard_sequence(x, mesh, layout, 0, collectives=door)
    with pytest.raises(LayoutError, match="give the mask"):
        position_ids(mesh, layout, 8)


def test_a_length_that_the_layout_does_not_give_is_refused() -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"Zigzag\(n=2, S=9\) gives rank 0, 5"):
        unshard_sequence(torch.zeros(4), mesh, Zigzag(), 0, seq_len=9, collectives=door)


class Holed(Contiguous):
    """Leaves out a position."""

    __slots__ = ()

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return all positions but one."""
        return ((range(0, 3),), (range(4, seq_len),))


NINE = MaskSpec(causal=True, cu_seqlens=(0, 4, 9))


@pytest.mark.parametrize(
    ("layout", "mask", "said"),
    [
        (Holed(), None, r"partition range\(8\)"),
        (Zigzag(), NINE, "cu_seqlens end at 9 but the sequence has 8"),
        (Contiguous(), NINE, "cu_seqlens end at 9 but the sequence has 8"),
        (Contiguous(), "causal", "mask must be a MaskSpec, got 'causal'"),
    ],
    ids=str,
)
def test_a_cut_that_loses_positions_or_is_of_another_length_is_refused_by_all_helpers(
    layout: Layout, mask: Any, said: str
) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    with pytest.raises(LayoutError, match=said):
        shard_sequence(torch.zeros(8), mesh, layout, 0, mask)
    with pytest.raises(LayoutError, match=said):
        unshard_sequence(torch.zeros(4), mesh, layout, 0, mask, seq_len=8, collectives=door)
    with pytest.raises(LayoutError, match=said):
        position_ids(mesh, layout, 8, mask)


@pytest.mark.parametrize("seq_len", [8.0, "8", -1])
def test_a_length_that_is_none_is_refused(seq_len: Any) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    said = f"n=2, seq_len={seq_len!r}"
    with pytest.raises(LayoutError, match=said):
        position_ids(mesh, Zigzag(), seq_len)
    with pytest.raises(LayoutError, match=said):
        unshard_sequence(torch.zeros(4), mesh, Zigzag(), 0, seq_len=seq_len, collectives=door)


def test_a_mesh_of_three_axes_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((1, 2, 2), ("dp", "cp", "u"))
    with pytest.raises(DegreeError, match=r"or of two, .*, got axes \['dp', 'cp', 'u'\]"):
        position_ids(mesh, Contiguous(), 8)
