"""`FSDPModule.comm_stats` and `FSDPModule.set_comm_timing`."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_dtensor import RecordingCollectives
from hp_fsdp import CommStats, MixedPrecisionPolicy, fully_shard
from hp_fsdp._stats import UnitComm

from .gathering import EightBits, Layers
from .models import Net, loss_of, make, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]
Totals = dict[str, tuple[int, int]]
UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def totals(stats: CommStats) -> Totals:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in stats.rows:
        counts[row.collective] += row.count
        sizes[row.collective] += row.bytes
    return {name: (counts[name], sizes[name]) for name in counts}


def trained(
    rank: int, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[CommStats, Totals, CommStats]:
    """Return the stats of two steps, the recorded calls, and the stats after a reset."""
    recorded = RecordingCollectives()
    axes = ("dp_replicate", "fsdp")[-len(shape) :]
    model: Any = shard(make(Net), mesh_of(shape, axes), collectives=recorded, **options)
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
    by_call: Totals = {}
    for (_, name), found in recorded.by_call.items():
        calls, size = by_call.get(name, (0, 0))
        by_call[name] = calls + found.calls, size + found.bytes
    return model.comm_stats(reset=True), by_call, model.comm_stats()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {}),
        ((2,), {"direct_bytes": 0}),
        ((2,), {"layout": "ragged"}),
        ((2,), {"grads": "accumulate", "direct_bytes": 0}),
        ((2,), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        ((4,), {"reshard_after_forward": 2}),
        ((2, 2), {}),
        ((2, 2), {"min_shard_numel": 40}),
    ],
    ids=str,
)
def test_the_counts_equal_those_of_recording_collectives(
    ranks: Ranks, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    for stats, recorded, after in ranks(torch.Size(shape).numel()).run(trained, shape, options):
        assert totals(stats) == recorded
        assert list(dict.fromkeys(row.unit for row in stats.rows)) == UNITS
        assert all(row.seconds is None for row in stats.rows)
        assert after.rows == ()


def with_extensions(rank: int) -> tuple[Totals, int]:
    """Return the stats of two forwards, and the bytes of the first that extensions exchange."""
    recorded = RecordingCollectives()
    model: Any = Layers(EightBits)
    fully_shard(model, mesh_of((2,), ("fsdp",)), collectives=recorded)
    first = []
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 8))
        first.append(recorded.by_call["fsdp", "all_gather"])
    return totals(model.comm_stats()), first[1].bytes - first[0].bytes


def test_the_first_all_gather_of_extensions_is_counted(ranks: Ranks) -> None:
    for counted, size in ranks(2).run(with_extensions):
        assert size > 0
        assert counted["all_gather"][1] == 2 * size


def one_rank(rank: int) -> int:
    model: Any = shard(make(Net), mesh_of((1,), ("fsdp",)))
    loss_of(model, tokens(rank)).backward()
    return len(model.comm_stats().rows)


def test_one_rank_has_no_collectives(ranks: Ranks) -> None:
    assert ranks(1).run(one_rank) == [0]


def of_a_part(rank: int) -> tuple[list[str], list[str]]:
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]], mesh)
    fully_shard(model, mesh)
    model(torch.ones(1, 4)).sum().backward()
    part = model[0].comm_stats(reset=True)
    return [row.unit for row in part.rows], [row.unit for row in model.comm_stats().rows]


def test_a_part_reports_and_resets_its_own_unit(ranks: Ranks) -> None:
    for part, whole in ranks(2).run(of_a_part):
        assert part == ["(root)"] * 2
        assert whole == ["(root)"] * 2


class Slow:
    """A collective whose ``wait`` returns 20 ms after its start or later."""

    def __init__(self, work: Any) -> None:
        self._work, self._end = work, time.perf_counter() + 0.02

    def wait(self) -> Any:
        """Wait for both."""
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return self._work.wait()


class SlowCollectives(RecordingCollectives):
    """Start collectives that take 20 ms."""

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Start it."""
        return Slow(super().all_gather(*args, **kwargs))

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """Start it."""
        return Slow(super().reduce_scatter(*args, **kwargs))


def timed(rank: int) -> tuple[CommStats, CommStats, str]:
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), collectives=SlowCollectives())
    model.set_comm_timing(True)
    loss_of(model, tokens(rank)).backward()
    stats = model.comm_stats(reset=True)
    model.set_comm_timing(False)
    loss_of(model, tokens(rank)).backward()
    return stats, model.comm_stats(), str(stats)


def test_timing_sums_the_time_from_start_to_the_end_of_wait(ranks: Ranks) -> None:
    for stats, untimed, table in ranks(2).run(timed):
        assert len(stats.rows) == 8
        for row in stats.rows:
            assert row.seconds is not None
            assert row.seconds >= 0.02 * row.count
        assert all(row.count and row.seconds is None for row in untimed.rows)
        lines = table.splitlines()
        assert lines[0].split() == ["unit", "collective", "count", "bytes", "seconds"]
        assert len(lines) == 9
        first = stats.rows[0]
        assert lines[1].split()[:4] == ["(root)", "all_gather", str(first.count), str(first.bytes)]


class Clock:
    """Events of an accelerator on which each recorded event is 3 ms after the one before."""

    now = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing
        self.device, self._at = device, 0

    def record(self) -> None:
        """Read the clock."""
        Clock.now += 3
        self._at = Clock.now

    def query(self) -> bool:
        """Return that the device has not got there yet."""
        return False

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, after: "Clock") -> float:
        """Return milliseconds."""
        return after._at - self._at


def test_accelerators_read_the_time_between_two_events() -> None:
    comm, axis = UnitComm(torch.device("cuda")), mock.Mock(size=2)
    axis.name = "fsdp"
    comm.timing = True
    with mock.patch.object(torch, "Event", Clock):
        works = [comm.start("all_gather", axis, mock.Mock(nbytes=8), mock.Mock) for _ in range(2)]
        for work in works:
            work.wait()
            work.wait()
    (row,) = comm.stats("(root)")
    assert (row.count, row.bytes) == (2, 8)
    assert row.seconds == pytest.approx(0.012)


def test_counting_takes_less_than_a_microsecond() -> None:
    comm, axis = UnitComm(torch.device("cpu")), mock.Mock(size=2)
    axis.name = "fsdp"

    def nothing() -> None: ...

    def seconds(function: Callable[[], object], times: int = 10_000) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            function()
        return (time.perf_counter() - begin) / times

    output = torch.empty(2)
    counted = min(
        seconds(lambda: comm.start("all_gather", axis, output, nothing)) for _ in range(20)
    )
    assert counted < 5e-6  # about 1e-6 on a machine without other work, of which counting is half
    assert comm.stats("")[0].count == 200_000


@pytest.mark.parametrize("call", ["comm_stats(reset=1)", "set_comm_timing('yes')"])
def test_a_wrong_argument_is_refused(ranks: Ranks, call: str) -> None:
    assert all(ranks(1).run(refused, call))


def refused(rank: int, call: str) -> bool:
    model: Any = fully_shard(nn.Linear(4, 4), mesh_of((1,), ("fsdp",)))
    with pytest.raises(TypeError):
        eval(f"model.{call}", {"model": model})
    return True
