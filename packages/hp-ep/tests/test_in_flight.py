"""Several calls of a layer in flight, recomputed and interleaved: each as if it were alone."""

import pytest

from .in_flight import MODES, Case, Run, check_in_flight

CASES = {
    "Local": Case(name="Local"),
    "AllToAll": Case(name="AllToAll"),
    "Dedup": Case(name="Dedup"),
    "Hierarchical": Case(name="Hierarchical", size=4),
    "Padded": Case(name="Padded"),
    "Summed(AllToAll)": Case(name="AllToAll", cut=2),
    "Summed(Dedup)": Case(name="Dedup", cut=2),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize("case", CASES)
def test_microbatches_in_flight_do_not_see_each_other(case: str, run: Run, chunks: int) -> None:
    check_in_flight(CASES[case], chunks, run)
