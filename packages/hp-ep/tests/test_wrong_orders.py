"""Orders and counts of rows that the public moves refuse instead of computing something else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_ep import ExpertConfigError, gather_rows, permute_indices, scatter_rows


def _gather(order: Tensor, places: Tensor) -> Tensor:
    return gather_rows(torch.zeros(2, 1), order, places)


def _sum(order: Tensor, places: Tensor) -> Tensor:
    return scatter_rows(torch.zeros(4, 1), order, places)


@pytest.mark.parametrize("move", [_gather, _sum])
@pytest.mark.parametrize(
    ("order", "places", "text"),
    [
        (
            [1, 2, 0, 3],
            [1, 2, 0, 3],
            "assignment 0 is row 1, but order has assignment 2",
        ),
        ([0, 1, 2, 3], [0, 1, 2, 4], "no permutation of 4 rows: 3 is not"),
        (
            [0, 1, 2, 9],
            [0, 1, 2, 3],
            "assignment 3 is row 3, but order has assignment 9",
        ),
    ],
)
def test_places_that_do_not_invert_the_order_are_refused(
    move: Callable[[Tensor, Tensor], Tensor], order: list[int], places: list[int], text: str
) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        move(torch.tensor(order), torch.tensor(places).view(2, 2))


@pytest.mark.parametrize("move", [_gather, _sum])
def test_orders_of_another_dtype_are_refused(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ExpertConfigError, match=r"order is torch.int32 and places are torch.int64"):
        move(torch.arange(4, dtype=torch.int32), torch.arange(4).view(2, 2))


@pytest.mark.parametrize(
    ("counts", "num_rows", "text"),
    [
        (torch.tensor([1.7, 1, 2, 2]), None, "counts are torch.float32; they must be torch.int64"),
        (torch.tensor([1, -1, 2, 2]), None, r"counts \[1, -1, 2, 2\] must be at least 0$"),
        (torch.tensor([1, 1, 2, 2]), 5, r"must be at least 0 and sum to num_rows=5$"),
    ],
)
def test_counts_that_split_no_rows_are_refused(
    counts: Tensor, num_rows: int | None, text: str
) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        permute_indices(counts, 2, 2, num_rows=num_rows)
