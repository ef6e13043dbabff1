"""Positions of a rank's rows, in the sequence or in their documents."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import Contiguous, Layout, MaskSpec, PerDocument, Zigzag, position_ids
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import all_layouts, masked


def test_positions_count_from_the_start_of_the_sequence_or_of_the_document() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    documents = MaskSpec(causal=True, cu_seqlens=(0, 6, 8))
    assert position_ids(mesh, Zigzag(), 8).tolist() == [0, 1, 6, 7]
    assert position_ids(mesh, Zigzag(), 8, documents).tolist() == [0, 1, 0, 1]
    held = PerDocument().indices(2, 8, documents)[0]
    expected = [i if i < 6 else i - 6 for i in held]
    assert position_ids(mesh, PerDocument(), 8, documents).tolist() == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), masked(25), all_layouts)
def test_positions_are_those_of_the_layout_less_the_start_of_their_document(
    n: int, case: tuple[MaskSpec, int], layout: Layout
) -> None:
    mask, seq_len = case
    starts = [document.start for document in mask.documents(seq_len) for _ in document]

    def rank(_: int, door: SimulatedCollectives) -> Tensor:
        return position_ids(door.mesh((n,), ("cp",)), layout, seq_len, mask)

    for held, ids in zip(
        layout.indices(n, seq_len, mask), SimulatedWorld(n).run(rank), strict=True
    ):
        assert ids.dtype == torch.int64
        assert ids.tolist() == [i - starts[i] for i in held]


def test_positions_of_other_ranks_are_not_made() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 1).mesh((4,), ("cp",))
    documents = MaskSpec(causal=True, cu_seqlens=tuple(range(0, 4097, 8)))
    with Called() as called:
        position_ids(mesh, Contiguous(), 4096, documents)
    assert called.times["aten.arange.start"] == 128  # documents of this rank
    assert called.times["aten.cat.default"] == 1
    assert called.times.total() < 132
