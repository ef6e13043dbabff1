"""Replicas get one gradient of all calls, in chunks, recomputed and interleaved."""

import pytest

from hp_ep import Placement

from .in_flight import MODES, Case, Run, check_in_flight

TWO = Placement(num_ranks=2, num_experts=4, experts=(2, 0, 1, 3, 1, 0))
FOUR = Placement(num_ranks=4, num_experts=4, experts=(0, 1, 2, 0, 3, 1, 0, 2))
CASES = {
    "AllToAll": Case(name="AllToAll", placement=TWO),
    "Dedup": Case(name="Dedup", size=4, placement=FOUR),
    "Hierarchical": Case(name="Hierarchical", size=4, placement=FOUR),
    "Padded": Case(name="Padded", placement=TWO),
    "Summed(Dedup)": Case(name="Dedup", placement=TWO, cut=2),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("case", CASES)
def test_replicas_get_the_gradient_of_all_microbatches(case: str, run: Run, chunks: int) -> None:
    check_in_flight(CASES[case], chunks, run)
