"""What every dispatcher starts, and what it waits for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import Placement, TokenDispatcher
from hp_ep.dispatch._interface import start_combine, start_dispatch
from hp_ep.dispatch._wrappers import Placed, Summed

from .dispatching import make_dispatcher
from .logged import logged


def _label(axis: Axis, tensor: Tensor) -> str:
    kinds = {torch.int64: "counts", torch.int32: "slots"}
    kind = kinds.get(tensor.dtype, "weights" if tensor.dim() == 1 else "rows")
    return f"{kind} {axis.name}"


Make = Callable[[SimulatedCollectives, Collectives], TokenDispatcher]
Log = list[str]


def _named(name: str) -> Make:
    return lambda door, noted: make_dispatcher(name, door.mesh, 4, 8, noted)


def _placed(name: str) -> Make:
    return lambda door, noted: Placed(_named(name)(door, noted), Placement.contiguous(8, 4))


def _summed(door: SimulatedCollectives, noted: Collectives) -> TokenDispatcher:
    mesh = door.mesh((2, 2), ("ep", "tp"))
    return Summed(
        make_dispatcher("AllToAll", lambda *_: mesh, 2, 8, noted), Axis.of(mesh, 1), noted
    )


def _steps(make: Make) -> list[Log]:
    """Return what one rank logs in both halves of dispatch and combine, and in backward."""

    def rank(me: int, door: SimulatedCollectives) -> list[Log]:
        steps: list[Log] = []
        log: Log = []

        def step() -> None:
            steps.append(list(log))
            log.clear()

        dispatcher = make(door, logged(door, log, _label))
        x, w = torch.ones(8, 3, requires_grad=True), torch.ones(8, 2, requires_grad=True)
        ids = torch.stack([torch.arange(8), (torch.arange(8) + 3) % 8], 1)
        going = start_dispatch(dispatcher, x, w, ids)
        step()
        rows, _, state = going.wait()
        step()
        coming = start_combine(dispatcher, rows * 2, state)
        step()
        y = coming.wait()
        step()
        y.sum().backward()
        step()
        return steps

    every = SimulatedWorld(4).run(rank)
    assert every == [every[0]] * 4
    return every[0]


def _calls(text: str) -> Log:
    """Return calls written with ``+`` for start and ``-`` for wait."""
    signs = {"+": "start ", "-": "wait "}
    return [signs[call[0]] + call[1:].replace("@", " ") for call in text.split()]


FLAT = [
    "+counts@ep -counts@ep +rows@ep",
    "-rows@ep",
    "+rows@ep",
    "-rows@ep",
    "+rows@ep -rows@ep +rows@ep -rows@ep",
]
ONCE = [
    "+counts@ep -counts@ep +slots@ep +rows@ep",
    "-slots@ep -rows@ep",
    "+rows@ep",
    "-rows@ep",
    "+rows@ep -rows@ep +rows@ep +weights@ep -rows@ep -weights@ep",
]
NODES = [
    "+counts@node -counts@node +counts@inside -counts@inside +slots@node +rows@node",
    "-slots@node -rows@node +slots@inside +rows@inside -slots@inside -rows@inside",
    "+rows@inside -rows@inside +rows@node",
    "-rows@node",
    "+rows@node -rows@node +rows@inside -rows@inside "
    "+rows@inside +weights@inside -rows@inside -weights@inside "
    "+rows@node +weights@node -rows@node -weights@node",
]
SUMMED = [
    "+counts@ep -counts@ep +rows@ep",
    "-rows@ep",
    "+rows@ep",
    "-rows@ep +rows@tp -rows@tp",
    "+rows@ep -rows@ep +rows@ep -rows@ep +rows@tp -rows@tp +rows@tp -rows@tp",
]


CASES: dict[str, tuple[Make, list[str]]] = {
    "Local": (_named("Local"), [""] * 5),
    "AllToAll": (_named("AllToAll"), FLAT),
    "Padded": (_named("Padded"), FLAT),
    "Dedup": (_named("Dedup"), ONCE),
    "Hierarchical": (_named("Hierarchical"), NODES),
    "Placed(AllToAll)": (_placed("AllToAll"), FLAT),
    "Placed(Dedup)": (_placed("Dedup"), ONCE),
    "Placed(Hierarchical)": (_placed("Hierarchical"), NODES),
    "Summed(AllToAll)": (_summed, SUMMED),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_under_way_when_start_returns_and_awaited_by_wait(case: str) -> None:
    make, expected = CASES[case]
    assert _steps(make) == [_calls(text) for text in expected]
