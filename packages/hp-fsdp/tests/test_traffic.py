"""Bytes that a step communicates and copies. On one rank there are none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from rank_pool import RankPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import Axis, RecordingCollectives, Work
from hp_fsdp import GroupReport, PlanReport
from hp_fsdp._tags import TAG_FLAGS

from .models import Net, loss_of, make, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]
Counts = dict[tuple[str, str], tuple[int, int]]


def counted(rank: int, shape: tuple[int, ...]) -> tuple[Counts, PlanReport]:
    """Return the traffic of a second step, and the plan."""
    record = RecordingCollectives()
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, collectives=record)
    for step in range(2):
        record.reset()
        loss_of(model, tokens(rank, step)).backward()
    return {key: (t.calls, t.bytes) for key, t in record.by_call.items()}, model.plan_report()


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_traffic_equals_the_plan(ranks: Ranks, shape: tuple[int, ...]) -> None:
    degree = shape[-1]
    for counts, plan in ranks(4 if len(shape) == 2 else degree).run(counted, shape):
        # report order: the root, then the blocks; root and last block are gathered once
        gathered = [g.parameter_bytes + g.padding_bytes for g in plan.groups]
        once, twice = [gathered[0], gathered[-1]], gathered[1:-1]
        received = (sum(once) + 2 * sum(twice)) // degree * (degree - 1)
        reduced = sum(map(reduced_bytes, plan.groups))
        expected: Counts = {
            ("fsdp", "all_gather"): (len(once) + 2 * len(twice), received),
            ("fsdp", "reduce_scatter"): (len(gathered), reduced * (degree - 1)),
        }
        if len(shape) == 2:
            replicas = shape[0]
            total = sum(2 * reduced_bytes(g) * (replicas - 1) // replicas for g in plan.groups)
            expected["dp_replicate", "all_reduce"] = (len(gathered), total)
        assert counts == expected


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["shard=1", "replicate=1"])
def test_an_axis_of_one_rank_carries_nothing(ranks: Ranks, shape: tuple[int, ...]) -> None:
    for counts, _ in ranks(2).run(counted, shape):
        assert {axis for axis, _ in counts} == {"dp_replicate" if shape[0] == 2 else "fsdp"}


class Copies(TorchDispatchMode):
    """Counts the bytes that copying operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the written bytes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = "" if self.paused else str(func)
        if "split_with_sizes_copy" in name:
            self.bytes += sum(t.numel() * t.element_size() for t in kwargs["out"])
        elif "_chunk_cat" in name or "index_select" in name:
            self.bytes += kwargs["out"].numel() * kwargs["out"].element_size()
        elif any(word in name for word in ("copy_", "aten.clone", "aten.cat", "_to_copy")):
            written = args[0] if "copy_" in name else [result]
            written = written if isinstance(written, list) else [written]
            self.bytes += sum(t.numel() * t.element_size() for t in written)
        return result


class Pausing(RecordingCollectives):
    """Collectives without a count of their internal copies, such as the packing for gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Pass on, uncounted."""
        with self.paused():
            return PausedWork(super().all_gather(axis, inputs, outputs), self)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: Any = "sum",
    ) -> Work:
        """Pass on, uncounted."""
        with self.paused():
            return PausedWork(super().reduce_scatter(axis, inputs, outputs, op), self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count copies inside the context."""
        self.copies.paused = True
        try:
            yield
        finally:
            self.copies.paused = False


class PausedWork:
    """A work handle with a ``wait`` that is not counted."""

    def __init__(self, work: Work, owner: Pausing) -> None:
        self._work = work
        self._owner = owner

    def wait(self) -> list[Tensor]:
        """Wait, uncounted."""
        with self._owner.paused():
            return self._work.wait()


def copied(rank: int, shape: tuple[int, ...], axis: str) -> int:
    """Return the bytes that a second step copies in addition to an unsharded step."""
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])[axis]
    counts = []
    for sharded in (False, True):
        carrier = Pausing()
        model = shard(make(Net), mesh, collectives=carrier) if sharded else make(Net)
        for step in range(2):
            carrier.copies = Copies()
            with carrier.copies:
                loss_of(model, tokens(rank, step)).backward()
            model.zero_grad()
        counts.append(carrier.copies.bytes)
    return counts[1] - counts[0]


def test_a_step_copies_the_gradients_and_the_packed_parameters(ranks: Ranks) -> None:
    plan = ranks(2).run(counted, (2,))[0][1]
    packed = 0
    for position, group in enumerate(plan.groups):
        gathers = 1 if position in (0, len(plan.groups) - 1) else 2
        rows = sum(p.rows_per_rank * (_row(p.shape)) for p in group.parameters if not p.direct)
        packed += gathers * 2 * rows * 8
    gradients = 2 * sum(map(reduced_bytes, plan.groups))
    assert packed < gradients / 2
    assert ranks(2).run(copied, (2,), "fsdp") == [gradients + packed] * 2


@pytest.mark.nccl
def test_one_rank_copies_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(copied, (2, 1), "fsdp") == [0, 0]


def reduced_bytes(group: GroupReport) -> int:
    """Return the bytes of a rank's gradients, a flag per parameter and the tag, to 16 bytes."""
    held = sum(p.rows_per_rank * _row(p.shape) for p in group.parameters)
    return -(-(held + len(group.parameters) + TAG_FLAGS) * 8 // 16) * 16


def _row(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape[1:]:
        numel *= size
    return numel
