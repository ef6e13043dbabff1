"""What the ranks of a run say when one of them does not answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store

from train import peers
from train.peers import Peers

LATE = "[/gloo/unbound_buffer.cc:85] Timed out waiting 3000ms for recv operation to complete"
GONE = "[/gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:4000. This is typically caused by"


class Waiting(nn.Module):
    """A module whose forward loses a peer."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor) -> Tensor:
        """Raise as a collective does."""
        error = RuntimeError(self.text)
        error.add_note("in all_gather over axis 'cp' (ranks 0, 1, 2)")
        raise error


def _lost(text: str) -> RuntimeError:
    try:
        nn.Sequential(nn.Sequential(Waiting(text)))(None)
    except RuntimeError as error:
        return error
    raise AssertionError


def _explained(ranks: list[int], text: str, store: Store | None) -> list[str | None]:
    """Return what ranks of a world of three say, in order."""

    def explain(rank: int) -> str | None:
        own = Peers()
        if store is not None:
            own.join(store, rank, 3)
        return own.explain(_lost(text))

    with ThreadPoolExecutor(3) as pool:
        return sorted(pool.map(explain, ranks), key=str)


WHERE = "in all_gather over axis 'cp' (ranks 0, 1, 2), before the first step, in 0.0"


def test_one_rank_names_the_one_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REPORT_SECONDS", 0.3)
    silent, said = _explained([0, 2], LATE, HashStore())
    assert silent == ""
    assert said is not None
    rank = said.partition("; rank ")[2][0]
    assert said == (
        f"rank 1 did not answer, stopped or cut off; rank {rank} waited {WHERE}: "
        "Timed out waiting 3000ms for recv operation to complete"
    )


def test_ranks_that_all_waited_are_one_message() -> None:
    *silent, said = _explained([0, 1, 2], LATE, HashStore())
    assert silent == ["", ""]
    assert said is not None
    assert [f"rank {rank} waited {WHERE}" in said for rank in range(3)] == [True] * 3
    assert said.endswith("; all ranks waited: a link is down or the order differs")


def test_a_lost_connection_is_told_at_once() -> None:
    assert _explained([2], GONE, HashStore()) == [
        f"rank 2 waited {WHERE}: Connection closed by peer [127.0.0.1]:4000"
    ]


def test_a_rank_without_a_store_speaks_for_itself() -> None:
    (said,) = _explained([0], LATE, None)
    assert said is not None
    assert said.startswith(f"rank 0 waited {WHERE}: Timed out")


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("timed out")])
def test_other_errors_are_none_of_its_business(error: Exception) -> None:
    assert Peers().explain(error) is None
