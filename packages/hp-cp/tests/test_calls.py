"""Calls: which collectives, and what they receive, by every way of counting."""

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from rank_pool import profile

from hp_cp import (
    Contiguous,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_cp._routes import SCHEDULES, ScheduleName
from hp_cp._schedules import MOVEMENTS, PendingWork
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import UnrealMesh, cp_mesh, inputs, leaves, single, with_gradients
from .test_first_calls import Listed, Shapes

CAUSAL = MaskSpec(causal=True)


def test_every_name_of_a_schedule_is_planned_and_carried_out() -> None:
    names = set(get_args(ScheduleName))
    assert set(SCHEDULES) == names
    assert set(MOVEMENTS) == names


def counted(
    rank: int, n: int, seq_len: int, options: dict[str, Any]
) -> tuple[dict[tuple[str, str], int], int]:
    """Return the calls of a forward and backward, and the bytes that they received."""
    tensors = inputs(4, 4, seq_len)
    mine = list(Zigzag().indices(n, seq_len)[rank])
    q, k, v, grad = (x[:, :, mine] for x in tensors)
    record = RecordingCollectives()
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=CAUSAL,
        layout=Zigzag(),
        seq_len=seq_len,
        collectives=record,
        **options,
    )
    out.backward(grad)
    received = sum(traffic.bytes for traffic in record.by_axis.values())
    return {key: traffic.calls for key, traffic in record.by_call.items()}, received


@pytest.mark.parametrize(
    ("options", "seq_len", "calls"),
    [
        ({"schedule": "gather"}, 16, {"all_gather": 1, "all_to_all": 1}),
        ({"schedule": "gather"}, 15, {"send_recv": 1, "all_to_all": 1}),
        ({"schedule": "gather", "keep_kv": False}, 16, {"all_gather": 2, "all_to_all": 1}),
        ({"schedule": "direct"}, 16, {"send_recv": 9}),
        ({"schedule": "direct", "keep_kv": True}, 16, {"send_recv": 6}),
        ({"schedule": "ring"}, 16, {"send_recv": 9}),
        ({"schedule": "double_ring"}, 16, {"send_recv": 9}),
        ({"ulysses_degree": 4}, 16, {"all_to_all": 4}),
        ({"ulysses_degree": 2}, 16, {"all_to_all": 4, "send_recv": 3}),
    ],
)
def test_a_forward_and_backward_make_the_documented_calls_and_receive_the_planned_bytes(
    ranks: Any, options: dict[str, Any], seq_len: int, calls: dict[str, int]
) -> None:
    shape: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 4, "head_size": 8, "itemsize": 8}
    plan = plan_attention(
        CAUSAL, Zigzag(), 4, seq_len, **{"schedule": "direct", **options}, **shape
    )
    answers = ranks(4).run(counted, 4, seq_len, options)
    for rank, (made, received) in enumerate(answers):
        assert made == {("cp", name): number for name, number in calls.items()}
        assert received == plan.bytes_received(rank)


def forward_only(rank: int, schedule: Any) -> tuple[int, bool]:
    record = RecordingCollectives()
    q, k, v, _ = (x.chunk(4, 2)[rank] for x in inputs(4, 4, 16))
    with torch.no_grad():
        out = context_parallel_attention(
            q.requires_grad_(),
            k,
            v,
            cp_mesh(4),
            mask=CAUSAL,
            schedule=schedule,
            seq_len=16,
            collectives=record,
        )
    return sum(traffic.calls for traffic in record.by_axis.values()), out.requires_grad


@pytest.mark.parametrize(("schedule", "calls"), [("gather", 1), ("direct", 3), ("ring", 3)])
def test_without_gradients_only_the_forward_communicates(
    ranks: Any, schedule: str, calls: int
) -> None:
    assert ranks(4).run(forward_only, schedule) == [(calls, False)] * 4


def received_bytes() -> int:
    """Return the bytes that the TCP connections of this process have received so far.

    As the kernel counts them for each connection: no other process, no header and nothing that was
    sent again is in them.
    """
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # what was closed since, and sockets that are not TCP's
            if stat.S_ISSOCK(file.stat().st_mode):
                with socket.socket(fileno=os.dup(int(file.name))) as connection:
                    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("Q", state, 128)[0]  # tcpi_bytes_received
    return total


def carried(rank: int, seq_len: int, schedule: Any, degree: int) -> tuple[int, int]:
    """Return what the connections carried for one forward and backward, and what was counted."""
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in inputs(4, 4, seq_len, size=64))
    record = RecordingCollectives()

    def once(collectives: RecordingCollectives) -> None:
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(2),
            mask=MaskSpec(causal=True, window=8),
            ulysses_degree=degree,
            schedule=schedule,
            collectives=collectives,
        )
        out.backward(grad)

    once(RecordingCollectives())  # connects
    dist.barrier()
    before = received_bytes()
    dist.barrier()
    once(record)
    after = received_bytes()
    dist.barrier()
    return after - before, sum(traffic.bytes for traffic in record.by_axis.values())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's counters")
@pytest.mark.parametrize(("schedule", "degree"), [("gather", 1), ("ring", 1), ("direct", 2)])
def test_connections_carry_what_is_counted(ranks: Any, schedule: str, degree: int) -> None:
    for seen, payload in ranks(2).run(carried, 4096, schedule, degree):
        assert payload <= seen <= 1.01 * payload  # each message has a header, and so has a barrier


def test_one_rank_is_sdpa_without_communication() -> None:
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    record = RecordingCollectives(door)
    q, k, v, grad = inputs(4, 2, 9)
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local, door.mesh((1,), ("cp",)), mask=CAUSAL, layout=Zigzag(), collectives=record
    )
    results = with_gradients(out, local, grad)
    assert all(map(torch.equal, results, single((q, k, v, grad), CAUSAL)))
    assert record.by_axis == {}


class Waiting:
    """A work, and peers that start it; waiting takes note, and fails where it is told to."""

    def __init__(self, *fail: bool) -> None:
        self.fail = list(fail)
        self.waited = 0

    def exchange(self, sends: Any, receives: Any) -> "Waiting":
        """Start nothing."""
        return self

    def wait(self) -> list[Any]:
        """Fail or not."""
        self.waited += 1
        if self.fail.pop(0):
            raise RuntimeError("timed out")
        return []


def failed(peers: Any, *, waits: bool, error: Exception | None) -> BaseException:
    """Return what a pass of two calls raises that waits for the first, or raises, or both."""
    try:
        with PendingWork(peers) as calls:
            first, _ = calls.exchange({}, {}), calls.exchange({}, {})
            if waits:
                first.wait()
            if error is not None:
                raise error
    except (RuntimeError, ZeroDivisionError) as caught:
        return caught
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("waits", [False, True])
def test_a_pass_that_fails_waits_for_each_call_once(waits: bool) -> None:
    peers, error = Waiting(False, False), ZeroDivisionError()
    assert failed(peers, waits=waits, error=error) is error
    assert peers.waited == 2


def test_a_call_that_fails_while_it_is_waited_for_keeps_the_first_error_and_ends_the_waiting() -> (
    None
):
    peers, error = Waiting(True, False), ZeroDivisionError()
    assert failed(peers, waits=False, error=error) is error
    assert error.__notes__ == ["while waiting for the peers' calls: timed out"]
    assert peers.waited == 1


def test_after_a_timeout_inside_the_pass_no_other_call_is_waited_for() -> None:
    peers = Waiting(True, True)
    assert str(failed(peers, waits=True, error=None)) == "timed out"
    assert peers.waited == 1


class CountingMesh:
    """A mesh that counts how often it is asked for its group."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.asked = 0

    def get_group(self, mesh_dim: Any = None) -> Any:
        """Return the group."""
        self.asked += 1
        return self._mesh.get_group(mesh_dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


def test_a_known_attention_asks_for_its_group_once_and_is_planned_once() -> None:
    cuts = []

    class Counted(Zigzag):
        def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
            cuts.append(n)
            return super().chunks(n, seq_len, mask)

    tensors = inputs(4, 4, 16)

    def rank(rank: int, collectives: SimulatedCollectives) -> tuple[list[int], int]:
        mesh, asked = CountingMesh(collectives.mesh((2,), ("cp",))), []
        q, k, v, _ = (x.chunk(2, 2)[rank] for x in tensors)
        planning = 0
        for _ in range(3):
            before = mesh.asked
            calls: list[str] = []
            call = partial(
                context_parallel_attention,
                q,
                k,
                v,
                mesh,
                mask=CAUSAL,
                layout=Counted(),
                seq_len=16,
                collectives=collectives,
            )
            profile(call, partial(note, calls))
            names = [Path(file).name for file in calls]
            planning = sum(name in ("_plan.py", "_layouts.py", "_masks.py") for name in names)
            asked.append(mesh.asked - before)
        return asked, planning

    for asked, planning in SimulatedWorld(2).run(rank):
        assert asked == [1, 1, 1]
        assert planning <= 40  # functions called in these files; a new plan takes hundreds
    assert len(cuts) <= 2  # both ranks may be the first at once


def note(calls: list[str], frame: Any, event: str, _: Any) -> None:
    """Add the file of a function that is called."""
    if event == "call":
        calls.append(frame.f_code.co_filename)


def known_call(n: int, options: dict[str, Any]) -> Callable[[], None]:
    """Return a call of an attention on ``n`` ranks that was made before."""
    mesh, backend, collectives = UnrealMesh((n,), 0), Shapes(), Listed()
    q = torch.empty(1, 8, 16, 8, device="meta")

    def call() -> None:
        context_parallel_attention(
            q,
            q,
            q,
            mesh,
            mask=MaskSpec(causal=True),
            seq_len=16 * n,
            backend=backend,
            collectives=collectives,
            **options,
        )

    call()
    return call


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"schedule": "direct", "layout": Zigzag()}, 185),
        ({"schedule": "ring", "layout": Zigzag()}, 245),
        ({"schedule": "gather", "layout": Zigzag()}, 90),
        ({"ulysses_degree": 8, "layout": Contiguous()}, 120),
    ],
    ids=["direct", "ring", "gather", "ulysses"],
)
def test_a_known_call_is_one_look_up_and_a_loop_over_launches_and_sends(
    options: dict[str, Any], most: int
) -> None:
    call, files = known_call(8, options), list[str]()
    profile(call, partial(note, files))
    assert sum("hp_cp" in file for file in files) <= most


def operators(n: int, options: dict[str, Any]) -> int:
    """Return how many operators a known call on ``n`` ranks has, without communication."""
    call = known_call(n, options)
    with Called() as called:
        call()
    return sum(called.times.values())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        # Two to receive into, two views of keys, three of the backend here, four of a merge.
        ({"schedule": "direct", "layout": Zigzag(), "ulysses_degree": None}, 11),
        ({"schedule": "ring", "layout": Zigzag(), "ulysses_degree": None}, 11),
        ({"schedule": "gather", "layout": Zigzag(), "ulysses_degree": None}, 0),
        # Heads of all ranks are packed at once.
        ({"layout": Contiguous(), "ulysses_degree": 8}, 0),
    ],
    ids=["direct", "ring", "gather", "ulysses"],
)
def test_a_further_rank_adds_the_operators_of_one_block_and_its_merge(
    options: dict[str, Any], most: int
) -> None:
    few, many = (
        operators(n, {**options, "ulysses_degree": n if options["ulysses_degree"] else 1})
        for n in (4, 8)
    )
    assert many - few <= 4 * most
