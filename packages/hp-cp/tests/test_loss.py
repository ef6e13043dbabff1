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
    MaskSpec,
    count_labels,
    cp_loss,
    position_ids,
    shard_sequence,
    shift_labels,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
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
    with pytest.raises(InputError, match="cu_seqlens end at 8 but the sequence has 4"):
        shift_labels(labels[:, :4], mask)


def test_the_ends_of_all_documents_are_ignored_at_once() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=tuple(range(0, 4097, 8)))
    with Called() as called:
        shifted = shift_labels(torch.ones(1, 4096, dtype=torch.int64), mask)
    assert (shifted == -100).sum() == 512
    assert called.times.total() < 10


@pytest.mark.parametrize(
    ("labels", "options", "kind", "said"),
    [
        ([[1, 2]], {}, InputError, "labels must be a tensor, got an object of type list"),
        (
            torch.ones(2, 4),
            {"seq_dim": 5},
            InputError,
            r"\(2, 4\) has no dim 5 .* \[-2, -1, 0, 1\]",
        ),
        (torch.ones(2, 4), {"seq_dim": "1"}, InputError, r"\(2, 4\) has no dim '1'"),
        (
            torch.ones(2, 4, dtype=torch.uint8),
            {},
            InputError,
            "ignored=-100 is no torch.uint8, and would become a label; .* from 0 to 255",
        ),
        (
            torch.ones(2, 4),
            {"ignored": None},
            InputError,
            "ignored=None is no label; give a number",
        ),
        (torch.ones(2, 4), {"ignored": "x"}, InputError, "ignored='x' is no label; give a number"),
        (
            torch.ones(2, 4, dtype=torch.int64),
            {"ignored": 1.5},
            InputError,
            "ignored=1.5 is no torch.int64, and would become a label",
        ),
        (torch.ones(2, 4), {"mask": (0, 4)}, InputError, "mask must be a MaskSpec, got"),
        (
            torch.ones(2, 4),
            {"mask": "causal"},
            InputError,
            "mask must be a MaskSpec, got 'causal'",
        ),
    ],
    ids=str,
)
def test_labels_that_cannot_be_shifted_are_refused(
    labels: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        shift_labels(labels, **options)


@pytest.mark.parametrize("count", [3, torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_no_count_changes_the_shape_of_the_loss_or_is_changed(count: Any) -> None:
    def rank(_: int, door: SimulatedCollectives) -> Tensor:
        return cp_loss(torch.tensor(6.0), count, door.mesh((2,), ("cp",)), collectives=door)

    shares = SimulatedWorld(2).run(rank)
    assert [share.shape for share in shares] == [torch.Size()] * 2
    assert [share.item() for share in shares] == [1.0] * 2
    assert int(count) == 3


def test_a_count_that_is_an_int_is_filled_in_where_the_loss_is_and_not_copied_there() -> None:
    def rank(_: int, door: SimulatedCollectives) -> set[str]:
        loss_sum, mesh = torch.tensor(6.0), door.mesh((1,), ("cp",))
        with Called() as called:
            cp_loss(loss_sum, 3, mesh, collectives=door)
        return set(called.times)

    (names,) = SimulatedWorld(1).run(rank)
    assert "aten.full.default" in names
    assert not names & {"aten.lift_fresh.default", "aten._to_copy.default"}


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"loss_sum must be a tensor, got 2\.0; use cross_entropy"):
        cp_loss(2.0, 3, mesh)  # type: ignore[arg-type]


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
    "count",
    [1.5, True, "3", -1, torch.tensor(2.0), torch.tensor([1, 2]), torch.tensor(True)],
    ids=str,
)
def test_a_count_that_is_no_integer_is_refused(count: Any) -> None:
    def rank(_: int, door: SimulatedCollectives) -> str:
        record = RecordingCollectives(door)
        with pytest.raises(InputError) as info:
            cp_loss(torch.tensor(3.0), count, door.mesh((2,), ("cp",)), collectives=record)
        assert record.by_axis == {}
        return str(info.value)

    assert all("give the number of counted tokens" in said for said in SimulatedWorld(2).run(rank))


def test_labels_of_all_ranks_and_microbatches_are_counted() -> None:
    def rank(index: int, door: SimulatedCollectives) -> tuple[Tensor, dict[str, int]]:
        labels = torch.arange(6).view(2, 3).masked_fill(torch.arange(3) < index, -100)
        batch = {"shift_labels": labels, "input_ids": torch.zeros(2, 3, dtype=torch.int64)}
        recorded = RecordingCollectives(door)
        mesh = door.mesh((2, 2), ("dp", "cp"))
        count = count_labels([batch, labels[0]], mesh, collectives=recorded)
        return count, {name: stats.calls for name, stats in recorded.by_axis.items()}

    counts, calls = zip(*SimulatedWorld(4).run(rank), strict=True)
    # Ranks have 3, 2, 1 and 0 labels in each of 3 rows.
    assert [count.item() for count in counts] == [18] * 4
    assert counts[0].shape == ()
    assert counts[0].dtype == torch.int64
    assert list(calls) == [{"dp": 1, "cp": 1}] * 4


def test_one_microbatch_needs_no_list_and_another_label_can_be_ignored() -> None:
    mesh, door = _one_rank()
    labels = torch.tensor([0, 5, 7, 0])
    assert count_labels(labels, mesh, collectives=door).item() == 4
    assert count_labels(labels, mesh, ignored=0, collectives=door).item() == 2


def test_a_batch_without_labels_has_a_denominator_that_gives_no_nan() -> None:
    mesh, door = _one_rank()
    assert count_labels(torch.full((2, 3), -100), mesh, collectives=door).item() == 1


@pytest.mark.parametrize(
    ("microbatches", "said"),
    [
        ([], "microbatches is empty; give the labels of at least one microbatch"),
        (
            {"labels": torch.ones(2)},
            r"with \['labels'\] has no shift_labels; give what shard_batch",
        ),
        ([3], "a microbatch is 3; give an integer tensor of labels from shift_labels"),
        (torch.ones(2), "a microbatch is a tensor of torch.float32; give an integer tensor"),
    ],
    ids=str,
)
def test_what_has_no_labels_is_refused_before_communication(microbatches: Any, said: str) -> None:
    mesh, door = _one_rank()
    recorded = RecordingCollectives(door)
    with pytest.raises(InputError, match=said):
        count_labels(microbatches, mesh, collectives=recorded)
    assert not recorded.by_axis


def test_a_count_needs_a_mesh() -> None:
    with pytest.raises(InputError, match="mesh"):
        count_labels(torch.ones(2, dtype=torch.int64), "loss")  # type: ignore[arg-type]


def _one_rank() -> tuple[Any, SimulatedCollectives]:
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    return door.mesh((1,), ("loss",)), door
