"""Labels and losses do not depend on how tokens lie over ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    InputError,
    Layout,
    LayoutError,
    MaskSpec,
    cp_loss,
    position_ids,
    shard_sequence,
    shift_labels,
)
from hp_dtensor import RecordingCollectives, SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, layouts

ZIGZAG = LAYOUTS[1]


def test_each_position_gets_the_next_label_and_the_end_is_ignored() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
    assert shift_labels(labels, seq_dim=0, ignored=-1).tolist() == [[4, 5, 6], [-1, -1, -1]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_the_last_label_of_each_document_is_ignored() -> None:
    labels = torch.arange(1, 9).view(1, 8)
    mask = MaskSpec(causal=True, cu_seqlens=(0, 1, 4, 4, 8))
    assert shift_labels(labels, mask).tolist() == [[-100, 3, 4, -100, 6, 7, 8, -100]]
    with pytest.raises(LayoutError, match="cu_seqlens end at 8 but the sequence has 4"):
        shift_labels(labels[:, :4], mask)


def test_no_labels_shift_to_no_labels() -> None:
    assert shift_labels(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 20), layouts)
def test_shares_sum_to_the_mean_loss_and_its_gradient(n: int, seq_len: int, layout: Layout) -> None:
    generator = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(7, (2, seq_len + 1), generator=generator)[:, :seq_len]
    table = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    labels = shift_labels(tokens)

    def rank(_: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor, int]:
        mesh = door.mesh((n,), ("cp",))
        mine = shard_sequence({"x": tokens, "y": labels}, mesh, layout, 1)
        weight = table.clone().requires_grad_()
        logits = weight[mine["x"]].flatten(0, 1)
        loss_sum = F.cross_entropy(logits, mine["y"].flatten(), reduction="sum")
        record = RecordingCollectives(door)
        share = cp_loss(loss_sum, (mine["y"] != -100).sum(), mesh, collectives=record)
        (grad,) = torch.autograd.grad(share, weight)
        traffic = record.by_axis.get("cp")
        return share.detach(), grad, traffic.calls if traffic else 0

    results = SimulatedWorld(n).run(rank)
    weight = table.clone().requires_grad_()
    logits = weight[tokens].flatten(0, 1)
    mean = F.cross_entropy(logits, labels.flatten(), reduction="sum") / max(1, 2 * (seq_len - 1))
    (grad,) = torch.autograd.grad(mean, weight)
    torch.testing.assert_close(sum(r[0] for r in results), mean.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sum(r[1] for r in results), grad, rtol=1e-13, atol=1e-14)
    assert [r[2] for r in results] == [int(n > 1)] * n


def test_the_count_spans_every_axis_of_the_mesh() -> None:
    def rank(rank: int, door: SimulatedCollectives) -> float:
        mesh = door.mesh((2, 2), ("dp", "cp"))
        return cp_loss(torch.tensor(30.0), rank, mesh, collectives=door).item()

    assert SimulatedWorld(4).run(rank) == [5.0] * 4


def test_position_ids_are_the_layouts_indices() -> None:
    def rank(_: int, door: SimulatedCollectives) -> list[int]:
        return position_ids(door.mesh((2,), ("cp",)), ZIGZAG, 8).tolist()

    assert SimulatedWorld(2).run(rank) == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    "count", [1.5, True, "3", torch.tensor(2.0), torch.tensor([1, 2]), torch.tensor(True)], ids=str
)
def test_a_count_that_is_no_integer_is_refused(count: Any) -> None:
    def rank(_: int, door: SimulatedCollectives) -> str:
        record = RecordingCollectives(door)
        with pytest.raises(InputError) as info:
            cp_loss(torch.tensor(3.0), count, door.mesh((2,), ("cp",)), collectives=record)
        assert record.by_axis == {}
        return str(info.value)

    assert all("give the number of counted tokens" in said for said in SimulatedWorld(2).run(rank))
