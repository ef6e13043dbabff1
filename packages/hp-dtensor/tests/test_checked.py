"""Ranks that make different calls raise one error on all of them instead of hanging."""

import re
import threading
import time
from collections.abc import Callable
from hashlib import sha1
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from rank_pool import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import (
    AutogradCollectives,
    Axis,
    CheckedCollectives,
    RankMismatchError,
    RecordingCollectives,
    Replicate,
    TorchCollectives,
    redistribute,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedGroup, SimulatedWorld

Ranks = Callable[[int], RankPool]
DEADLINE = 1.5


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def errors(
    rank: int, call: Callable[[int, CheckedCollectives, DeviceMesh], Any], *shape: int
) -> str:
    """Return the error text of this rank's call, or an empty text."""
    mesh = mesh_of(*shape)
    try:
        call(rank, CheckedCollectives(deadline=DEADLINE), mesh)
    except RankMismatchError as error:
        return str(error)
    return ""


def other_operation(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    if rank == 1:
        checked.all_reduce(axis, [torch.ones(4)]).wait()
    else:
        checked.all_gather(axis, [torch.ones(4)]).wait()


def other_name(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    named = Axis("dp" if rank == 1 else "tp", axis.group, axis.ranks)
    checked.all_reduce(named, [torch.ones(4)]).wait()


def other_reduction(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.all_reduce(Axis.of(mesh, "tp"), [torch.ones(4)], "max" if rank == 1 else "sum").wait()


def other_shape(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.all_reduce(Axis.of(mesh, "tp"), [torch.ones(4 + (rank == 1))]).wait()


def other_dtype(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    dtype = torch.float64 if rank == 1 else torch.float32
    checked.reduce_scatter(Axis.of(mesh, "tp"), [torch.ones(4, dtype=dtype)]).wait()


def other_splits(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    sent = [1] * (axis.size - 1) + [2]
    checked.all_to_all(axis, torch.ones(axis.size + 1), sent, [1] * axis.size).wait()


def other_source(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.broadcast(Axis.of(mesh, "tp"), [torch.ones(2)], source=int(rank == 1)).wait()


def other_message(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    peer = axis.index ^ 1
    sent, received = torch.ones(2 + rank % 2), torch.empty(2)
    checked.send_recv(axis, {peer: sent}, {peer: received}).wait()


DIFFERENT = {
    other_operation: ("all_gather float32 [4]", "all_reduce sum float32 [4]"),
    other_name: ("over axis 'tp', ranks", "over axis 'dp', ranks"),
    other_reduction: ("all_reduce sum", "all_reduce max"),
    other_shape: ("float32 [4]", "float32 [5]"),
    other_dtype: ("reduce_scatter sum float32 [4]", "reduce_scatter sum float64 [4]"),
    other_splits: ("rank 0 sends 2 rows to rank", "which expects 1"),
    other_source: ("broadcast from 0", "broadcast from 1"),
    other_message: ("send from rank 1 to rank 0 of float32 [3]", "float32 [2]"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", DIFFERENT, ids=lambda call: call.__name__)
def test_a_different_call_is_one_error_on_all_ranks(
    ranks: Ranks, size: int, call: Callable[..., Any]
) -> None:
    found = ranks(size).run(errors, call, size)
    if call is other_message:  # between pairs: every rank has one
        assert all(found)
        found = found[:2]
    assert len(set(found)) == 1
    for words in (*DIFFERENT[call], "axis 'tp'", "rank 0"):
        assert words in found[0]


def goes_on(rank: int) -> list[str]:
    mesh = mesh_of(2)
    checked, found = CheckedCollectives(deadline=60), []
    for call in (other_shape, other_operation):
        try:
            call(rank, checked, mesh)
        except RankMismatchError as error:
            found.append(str(error))
    axis = Axis.of(mesh, "tp")
    CheckedCollectives(deadline=60).all_reduce(axis, [torch.ones(2)]).wait()
    return found


def test_an_object_that_a_call_ended_says_so_and_another_goes_on(ranks: Ranks) -> None:
    for first, second in ranks(2).run(goes_on):
        assert second.startswith("an earlier call ended this object")
        assert second.endswith(first)


def one_call_less(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    for _ in range(3 - (rank == 1)):
        checked.all_reduce(Axis.of(mesh, "tp"), [torch.ones(4)]).wait()


def missing_rank(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    if rank != 1:
        checked.all_reduce(Axis.of(mesh, "tp"), [torch.ones(4)]).wait()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (one_call_less, "ranks [1]: all_reduce sum float32 [4] over axis 'tp', ranks"),
        (missing_rank, "ranks [1]: "),
    ],
)
def test_all_that_wait_for_a_rank_say_what_it_did_last(
    ranks: Ranks, size: int, call: Callable[..., Any], words: str
) -> None:
    pool = ranks(size)
    found = pool.run(errors, call, size)
    assert found[1] == ""
    waiting = [text for rank, text in enumerate(found) if rank != 1]
    assert len(set(waiting)) == 1
    assert words in waiting[0]
    assert f"call {3 if call is one_call_less else 1}" in waiting[0]


def other_axis(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.all_reduce(Axis.of(mesh, "dp" if rank == 3 else "tp"), [torch.ones(4)]).wait()


def test_ranks_that_wait_in_different_groups_see_each_other(ranks: Ranks) -> None:
    found = ranks(4).run(errors, other_axis, 2, 2)
    # ranks 0 and 1 meet; 2 waits for 3 over tp, 3 for 1 over dp
    assert found[:2] == ["", ""]
    assert found[2] == found[3]
    assert "ranks [2]: all_reduce sum float32 [4] over axis 'tp', ranks [2, 3], call 1" in found[2]
    assert "ranks [3]: all_reduce sum float32 [4] over axis 'dp', ranks [1, 3], call 1" in found[2]


def all_calls(rank: int, collectives: Any, axis: Axis) -> list[torch.Tensor]:
    size = axis.size
    x = torch.arange(2.0 * size) + rank
    found = [*collectives.all_gather(axis, [x, x[:2]]).wait()]
    found += collectives.reduce_scatter(axis, [x, x * 2]).wait()
    found += collectives.all_reduce(axis, [x.clone()], "max").wait()
    found += collectives.all_to_all(axis, x).wait()
    to = {(rank + 1) % size: [x, x[:1]]}
    come = {(rank - 1) % size: [torch.empty(2 * size), torch.empty(1)]}
    found += collectives.send_recv(axis, to, come).wait()
    return [*found, *collectives.broadcast(axis, [x.clone()], size - 1).wait()]


def both(rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    axis = Axis.of(mesh_of(size), "tp")
    plain = all_calls(rank, RecordingCollectives(), axis)  # groups leave keys when they are used
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    checked = CheckedCollectives(RecordingCollectives(), deadline=60)
    found = [all_calls(rank, checked, axis) for _ in range(5)][-1]
    dist.barrier()
    return found, plain, store.num_keys() - before


@pytest.mark.parametrize("size", [2, 4])
def test_equal_calls_pass_through_and_leave_few_keys(ranks: Ranks, size: int) -> None:
    for checked, plain, keys in ranks(size).run(both, size):
        for mine, expected in zip(checked, plain, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        # each rank's last call, count of objects and newest call; their list, and that it began
        assert keys <= 3 * size + 2


def late(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    if rank == 1:
        time.sleep(2 * DEADLINE)
    checked.all_reduce(Axis.of(mesh, "tp"), [torch.ones(4)]).wait()


@pytest.mark.parametrize("size", [2, 4])
def test_a_late_rank_raises_the_error_of_its_peers(ranks: Ranks, size: int) -> None:
    found = ranks(size).run(errors, late, size)
    assert len(set(found)) == 1
    assert "ranks have waited" in found[0]


def no_part(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    if rank == 1:
        checked.send_recv(axis, {}, {}).wait()
    else:
        checked.all_reduce(axis, [torch.ones(4)]).wait()


def short_splits(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    splits = [1] * (axis.size + (rank == 1))
    checked.all_to_all(axis, torch.ones(len(splits)), splits, splits).wait()


def uneven_rows(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.all_to_all(Axis.of(mesh, "tp"), torch.ones(4 + rank)).wait()


def more_than_its_rows(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    checked.all_to_all(Axis.of(mesh, "tp"), torch.ones(2 + rank), [1, 1], [1, 1]).wait()


def short_output(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    out = torch.empty(4 - rank)
    checked.all_gather(Axis.of(mesh, "tp"), [torch.ones(2)], [out]).wait()


def no_outputs(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    outs = [] if rank else [torch.empty(1)]
    checked.reduce_scatter(Axis.of(mesh, "tp"), [torch.ones(2)], outs).wait()


def output_of_other_dtype(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    out = torch.empty(2, dtype=torch.float64 if rank else torch.float32)
    checked.all_to_all(Axis.of(mesh, "tp"), torch.ones(2), output=out).wait()


FAULTS = {
    uneven_rows: "it would send 4 rows in 2 blocks and has 5",
    more_than_its_rows: "it would send 2 rows in 2 blocks and has 3",
    short_output: "its output is float32 [3], which must have 4 elements of float32",
    no_outputs: "it gives 0 outputs for 1 inputs",
    output_of_other_dtype: "its output is float64 [2], which must have 2 elements of float32",
}


@pytest.mark.parametrize("call", FAULTS, ids=lambda call: call.__name__)
def test_a_wrong_argument_on_one_rank_is_one_error_on_all_ranks(
    ranks: Ranks, call: Callable[..., Any]
) -> None:
    found = ranks(2).run(errors, call, 2)
    assert len(set(found)) == 1
    assert "rank 1 cannot take part" in found[0]
    assert FAULTS[call] in found[0]


def test_ranks_without_a_call_and_wrong_splits_raise(ranks: Ranks) -> None:
    found = ranks(2).run(errors, no_part, 2)
    assert "ranks have waited" in found[0]
    assert found[1] == ""
    found = ranks(2).run(errors, short_splits, 2)
    assert len(set(found)) == 1
    assert "splits must have 2 lengths" in found[0]


def own_message(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis, peer = Axis.of(mesh, "tp"), 1 - rank
    sends = {peer: torch.ones(2), rank: torch.ones(2 + rank)}
    checked.send_recv(axis, sends, {to: torch.empty(2) for to in (0, 1)}).wait()


@pytest.mark.nccl
def test_a_wrong_send_of_a_rank_to_itself_is_an_error_on_its_peers_too(ranks: Ranks) -> None:
    for text in ranks(2).run(errors, own_message, 2):
        assert "rank 1 sends itself float32 [3] over tp and receives float32 [2]" in text


def some_then_all(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    if rank < 2:
        parts = {1 - rank: torch.ones(2)}, {1 - rank: torch.empty(2)}
        checked.send_recv(axis, *parts).wait()
        time.sleep(DEADLINE / 3)
    CheckedCollectives(deadline=60).all_reduce(axis, [torch.ones(4)]).wait()


def test_an_object_that_some_ranks_did_not_use_leaves_the_next_alone(ranks: Ranks) -> None:
    assert ranks(4).run(errors, some_then_all, 4) == [""] * 4


def made_by_one(rank: int) -> str:
    """Rank 1 alone makes one more object before the one that all use."""
    if rank == 1:
        CheckedCollectives()
    try:
        CheckedCollectives(deadline=3.0).check(Axis.of(mesh_of(2)), "plan", "alike")
    except RankMismatchError as error:
        return str(error)
    return ""


def test_objects_out_of_step_are_named_by_their_numbers() -> None:
    pool = RankPool(2)
    try:
        first, other = pool.run(made_by_one)
    finally:
        pool.close()
    assert first == other
    assert "call 1 of CheckedCollectives object 1; ranks [1]" in first
    assert "call 1 of CheckedCollectives object 2; all ranks" in first


def wrong_part_recorded(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    wrong_part(rank, RecordingCollectives(checked), mesh)  # type: ignore[arg-type]


def wrong_part(rank: int, checked: CheckedCollectives, mesh: DeviceMesh) -> None:
    local = torch.ones(2 + (rank == 1), 3)
    x = dt.DTensor.from_local(
        local, mesh, [dt.Shard(0)], shape=torch.Size((2 * mesh.size(), 3)), stride=(3, 1)
    )
    redistribute(x, [Replicate()], collectives=checked)


@pytest.mark.parametrize("call", [wrong_part, wrong_part_recorded])
@pytest.mark.parametrize("size", [2, 4])
def test_a_wrong_local_shape_is_the_same_error_on_all_ranks(
    ranks: Ranks, size: int, call: Callable[..., Any]
) -> None:
    found = ranks(size).run(errors, call, size)
    assert len(set(found)) == 1
    assert "rank 1" in found[0]
    assert "the local tensor has shape [3, 3]" in found[0]


def test_a_shared_store_checks_a_simulated_world() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def live(rank: int, collectives: SimulatedCollectives) -> str:
        checked = CheckedCollectives(collectives, store=store, deadline=20)
        try:
            checked.all_reduce(collectives.axis(), [torch.ones(1 + rank // 2)])
        except RankMismatchError as error:
            return str(error)
        return ""

    found = SimulatedWorld(3).run(live)
    assert len(set(found)) == 1
    assert "rank 2 calls all_reduce sum float32 [2]" in found[0]
    assert threading.active_count() < 50


class Noting:
    """Forwards calls to other collectives and records their names."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.noted = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.noted.append(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("recording_is_outside", [True, False])
def test_a_refused_call_is_counted_outside_the_check_and_reaches_nothing_inside(
    recording_is_outside: bool,
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def live(rank: int, simulated: SimulatedCollectives) -> tuple[list[int], list[str]]:
        recorder: Any = Noting(simulated)
        wrapped: RecordingCollectives | CheckedCollectives
        if recording_is_outside:
            counted = RecordingCollectives(CheckedCollectives(recorder, store=store, deadline=20))
            wrapped = counted
        else:
            counted = RecordingCollectives(recorder)
            wrapped = CheckedCollectives(counted, store=store, deadline=20)
        recorder.noted.clear()  # wrappers look the methods up
        axis, calls = simulated.axis(), []
        wrapped.all_reduce(axis, [torch.ones(1)]).wait()
        calls.append(counted.by_axis["world"].calls)
        with pytest.raises(RankMismatchError, match="ranks make different calls"):
            wrapped.broadcast(axis, [torch.ones(1 + rank)])
        calls.append(counted.by_axis["world"].calls)
        return calls, recorder.noted

    counts = [1, 2] if recording_is_outside else [1, 1]
    assert SimulatedWorld(2).run(live) == [(counts, ["all_reduce"])] * 2


@pytest.mark.parametrize("deadline", [0, -1.0, float("inf"), float("nan"), "x"])
def test_a_deadline_is_a_time(deadline: Any) -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        CheckedCollectives(deadline=deadline)


def groups_in_turn(rank: int, crossed: bool) -> str:
    """Call over two groups of the same ranks, in one order, or crosswise on rank 1."""
    axes = [Axis("tp", dist.new_group([0, 1]), (0, 1)) for _ in range(2)]
    checked = CheckedCollectives(deadline=60)
    try:
        for axis in axes[:: -1 if crossed and rank == 1 else 1]:
            checked.all_reduce(axis, [torch.ones(4)]).wait()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_calls_over_two_groups_of_the_same_ranks_are_distinguished(ranks: Ranks) -> None:
    assert ranks(2).run(groups_in_turn, False) == ["", ""]
    first, other = ranks(2).run(groups_in_turn, True)
    assert first == other
    assert "ranks make different calls" in first
    numbers = re.findall(r"in process group (\d+) of these ranks", first)
    assert int(numbers[1]) == int(numbers[0]) + 1


def one_destroyed_early(rank: int) -> str:
    """Rank 1 destroys an older group of the same ranks before the call, rank 0 after it."""
    old, new = (dist.new_group([0, 1]) for _ in range(2))
    checked = CheckedCollectives(deadline=60)
    if rank == 1:
        dist.destroy_process_group(old)
    try:
        checked.all_reduce(Axis("tp", new, (0, 1)), [torch.ones(4)]).wait()
    except RankMismatchError as error:
        return str(error)
    if rank == 0:
        dist.destroy_process_group(old)
    return ""


def test_a_group_that_one_rank_destroyed_earlier_makes_no_difference(ranks: Ranks) -> None:
    assert ranks(2).run(one_destroyed_early) == ["", ""]


def split_groups(rank: int, crossed: bool) -> str:
    """Call over two groups with names as ``split_group`` makes them, which gloo does not have."""
    axes = []
    for number in range(2):
        group: Any = dist.new_group([0, 1])
        # torch derives the name from the ranks and the number of groups.
        group._set_group_name(sha1(f"0_1_{2 + number + 5 * rank}".encode()).hexdigest())
        group._set_group_desc(f"default_pg:split:{number}")
        axes.append(Axis("tp", group, (0, 1)))
    checked = CheckedCollectives(deadline=60)
    try:
        for axis in axes[:: -1 if crossed and rank == 1 else 1]:
            checked.check(axis, "plan", "equal")
    except RankMismatchError as error:
        return str(error)
    return ""


def test_split_groups_are_distinguished_by_their_description(ranks: Ranks) -> None:
    assert ranks(2).run(split_groups, False) == ["", ""]
    first, other = ranks(2).run(split_groups, True)
    assert first == other
    assert "in process group default_pg:split:0 of these ranks" in first
    assert "in process group default_pg:split:1 of these ranks" in first


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all", "send_recv"])
def test_tensors_on_different_devices_raise(operation: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def live(rank: int, collectives: SimulatedCollectives) -> str:
        checked = CheckedCollectives(collectives, store=store, deadline=20)
        axis, x = collectives.axis(), torch.ones(2, device="meta" if rank else "cpu")
        try:
            if operation == "all_reduce":
                checked.all_reduce(axis, [torch.ones(1), x])
            elif operation == "all_to_all":
                checked.all_to_all(axis, x)
            else:
                checked.send_recv(axis, {} if rank else {1: x}, {0: x} if rank else {})
        except RankMismatchError as error:
            return str(error)
        return ""

    first, other = SimulatedWorld(2).run(live)
    assert first == other
    assert "rank 0 " in first
    assert "on cpu" in first
    assert "meta" in first


class Sizes:
    """A store that notes the length of the longest value."""

    def __init__(self) -> None:
        self.longest = 0
        self._store = dist.HashStore()  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        """Note the length, then pass on."""
        self.longest = max(self.longest, len(value))
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(
    "many",
    [
        tuple(range(512)),
        tuple(range(0, 4096, 8)),
        tuple(64 * i + j for i in range(64) for j in range(8)),
        (5, 0, 9, 2, 7),
    ],
)
def test_fingerprints_of_many_ranks_are_short_and_tell_all_of_them(many: tuple[int, ...]) -> None:
    store = Sizes()
    axis = Axis("dp", SimulatedGroup(many, many[0]), many)
    checked = CheckedCollectives(store=store, deadline=0.05)
    with pytest.raises(RankMismatchError) as caught:
        checked.all_reduce(axis, [torch.ones(4)])
    assert f"over axis 'dp', ranks {list(many)}, call 1" in str(caught.value)
    assert store.longest < 1200


@pytest.mark.parametrize("wrap", [RecordingCollectives, CheckedCollectives, AutogradCollectives])
def test_a_wrapper_refuses_an_object_that_is_no_collectives(wrap: Any) -> None:
    for inner in (3, AutogradCollectives(), TorchCollectives):
        with pytest.raises(ValueError, match="does not have the methods of Collectives"):
            wrap(inner)
