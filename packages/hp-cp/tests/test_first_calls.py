"""The first call on a group: all of its ranks must take part in it, as NCCL connects them there."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from rank_pool import FinishedWork
from torch import Tensor

from hp_cp import (
    ContextParallel,
    Contiguous,
    DoubleRing,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    _blockwise,
    context_parallel_attention,
)

from .strategies import UnrealMesh
from .test_style import Core

Call = tuple[tuple[int, ...], str, bool]


@pytest.fixture(autouse=True)
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the sums of what was not computed, which are slow without numbers."""
    monkeypatch.setattr(_blockwise, "merge", lambda *parts, **options: None)


class Listed:
    """`Collectives` that move nothing, and list each call: ranks, name, whether it moves a thing.

    A collective is joined by every rank, a batch of sends and receives by those that have some.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def _listed(
        self, axis: Any, name: str, outputs: Sequence[Tensor], joins: bool = True
    ) -> FinishedWork:
        if axis.size > 1:
            self.calls.append((axis.ranks, name, joins))
        return FinishedWork(list(outputs))

    def all_gather(
        self, axis: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> FinishedWork:
        """List."""
        assert outputs is not None
        return self._listed(axis, "all_gather", outputs)

    def reduce_scatter(self, axis: Any, *args: Any, **options: Any) -> FinishedWork:
        """List."""
        raise NotImplementedError

    def all_reduce(self, axis: Any, tensors: Sequence[Tensor], op: str = "sum") -> FinishedWork:
        """List."""
        return self._listed(axis, "all_reduce", tensors)

    def all_to_all(
        self,
        axis: Any,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> FinishedWork:
        """List."""
        assert receive_splits is not None
        received = input.new_empty((sum(receive_splits), *input.shape[1:]))
        return self._listed(axis, "all_to_all", [received])

    def send_recv(
        self, axis: Any, sends: Mapping[int, Any], receives: Mapping[int, Any]
    ) -> FinishedWork:
        """List."""
        joins = any(peer != axis.index for peer in (*sends, *receives))
        return self._listed(axis, "send_recv", [], joins)

    def broadcast(self, axis: Any, *args: Any, **options: Any) -> FinishedWork:
        """List."""
        raise NotImplementedError


class Shapes:
    """A backend of shapes, not of numbers."""

    name = "shapes"

    def supports(self, *args: Any) -> None:
        """Support everything."""

    def forward(self, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return an output and a log-sum-exp."""
        return torch.empty_like(q), q[..., 0].float()

    def backward(self, *args: Any, **options: Any) -> Any:
        """Nothing asks for gradients."""
        raise NotImplementedError


# Documents that end where ranks do, on 2, 3 and 4 ranks and on their groups: nothing moves.
ALONE = MaskSpec(causal=True, cu_seqlens=(0, 6, 8, 12, 16, 18, 24))
MASKS = (
    MaskSpec(causal=True),
    MaskSpec(causal=False),
    MaskSpec(causal=True, window=1),
    MaskSpec(causal=True, window=3),
    ALONE,
    MaskSpec(causal=True, cu_seqlens=(0, 3, 19, 24)),
)
LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), PerDocument(), Greedy(2))
SCHEDULES: tuple[Any, ...] = ("direct", "ring", "double_ring", "gather", DoubleRing(1))
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((2,), 1),
    ((3,), 1),
    ((4,), 1),
    ((4,), 2),
    ((4,), 4),
    ((2, 2), 2),
)


def check_first_calls(per_rank: list[list[Call]]) -> None:
    """Assert that all ranks of a group make the same first call on it, and take part."""
    groups = {ranks for calls in per_rank for ranks, *_ in calls}
    for group in groups:
        first = [next(call for call in per_rank[i] if call[0] == group) for i in members(group)]
        assert len(set(first)) == 1
        assert first[0][2]


def members(group: tuple[int, ...]) -> Iterator[int]:
    yield from group


def attended(rank: int, mesh: UnrealMesh, collectives: Listed, **options: Any) -> None:
    """Attend to 24 positions without gradients."""
    n = sum(map(len, mesh.mesh.tolist())) if mesh.ndim == 2 else len(mesh.mesh.tolist())
    rows = len(options["layout"].indices(n, 24, options["mask"])[rank])
    q = torch.empty(1, 4, rows, 8, device=mesh.device_type)
    context_parallel_attention(
        q, q, q, mesh, seq_len=24, backend=Shapes(), collectives=collectives, **options
    )


@pytest.mark.parametrize("schedule", ["direct"])
@pytest.mark.parametrize(("shape", "degree"), [x for x in SHAPES if x[1] == 1 or len(x[0]) == 2])
def test_every_rank_joins_the_first_call_of_each_group_where_little_moves(
    shape: tuple[int, ...], degree: int, schedule: str
) -> None:
    check_all(shape, degree, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("shape", "degree"), SHAPES)
def test_every_rank_joins_the_first_call_of_each_group(
    shape: tuple[int, ...], degree: int, schedule: Any
) -> None:
    if schedule != "direct" or (degree > 1 and len(shape) == 1):
        check_all(shape, degree, schedule)


def check_all(shape: tuple[int, ...], degree: int, schedule: Any) -> None:
    options = {"schedule": schedule, "ulysses_degree": degree}
    n = torch.Size(shape).numel()
    for mask in MASKS:
        for layout in LAYOUTS:
            per_rank = []
            for rank in range(n):
                collectives = Listed()
                mesh = UnrealMesh(shape, rank)
                attended(rank, mesh, collectives, mask=mask, layout=layout, **options)
                per_rank.append(collectives.calls)
            check_first_calls(per_rank)


def styled(n: int, calls: int) -> list[list[Call]]:
    """Return each rank's calls when a style is applied to two modules, and they are called."""
    per_rank = []
    for rank in range(n):
        collectives, mesh = Listed(), UnrealMesh((n,), rank)
        style = ContextParallel(
            seq_dim=1,
            head_dim=2,
            ulysses_degree=1,
            load_balance=True,
            backend=Shapes(),
            collectives=collectives,
        )
        modules = [style.apply(Core(), mesh) for _ in range(2)]
        q = torch.empty(1, 4, 4, 8, device=mesh.device_type)
        for module in modules[:calls]:
            module(q, q, q, is_causal=True)
        per_rank.append(collectives.calls)
    return per_rank


@pytest.mark.parametrize("n", [2, 3])
def test_a_style_connects_its_group_once_when_it_is_applied(n: int) -> None:
    applied = styled(n, 0)
    assert [len(calls) for calls in applied] == [1] * n
    check_first_calls(applied)
    called = styled(n, 2)
    assert [calls[0] for calls in called] == [calls[0] for calls in applied]
    # per module: half of the queries there, the keys, half of the output back
    assert [len(calls) for calls in called] == [1 + 2 * 3] * n


def test_a_group_is_connected_once_and_not_where_the_own_forward_runs() -> None:
    collectives, mesh = Listed(), UnrealMesh((2,), 0)
    for _ in range(3):
        options: dict[str, Any] = {"mask": ALONE, "layout": Contiguous()}
        attended(0, mesh, collectives, **options)
    # one that connects, and one that each call makes, with nothing to move
    ranks = (0, 1)
    assert collectives.calls == [(ranks, "send_recv", True), *[(ranks, "send_recv", False)] * 3]
    own = Listed()
    ContextParallel(seq_dim=1, head_dim=2, collectives=own).apply(Core(), UnrealMesh((2,), 0))
    assert own.calls == []
