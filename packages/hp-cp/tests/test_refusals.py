"""What a call cannot serve is refused on every rank, before any communication."""

import re
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from hp_cp import (
    BackendError,
    ContextParallel,
    ContextParallelError,
    Contiguous,
    DoubleRing,
    InputError,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    cp_loss,
    position_ids,
    shard_sequence,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import Three

CAUSAL = MaskSpec(causal=True)
NINE = MaskSpec(causal=True, cu_seqlens=(0, 4, 9))
FLEX = "backend 'flex' cannot .* it has no backward on cpu; use 'sdpa'"


class Unhashable(Contiguous):
    """A layout that cannot be looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash([])


NO_HASH = Unhashable()


def refused(n: int, call: Any) -> tuple[type[ContextParallelError], str]:
    """Return the error that every rank of a simulated world raises, having called nothing."""
    caught: list[tuple[type[ContextParallelError], str]] = []

    def rank(rank: int, door: SimulatedCollectives) -> None:
        record = RecordingCollectives(door)
        with pytest.raises(ContextParallelError) as info:
            call(door.mesh((n,), ("cp",)), record)
        caught.append((info.type, str(info.value)))
        assert record.by_axis == {}

    SimulatedWorld(n).run(rank)
    assert len(caught) == n
    assert len(set(caught)) == 1
    return caught[0]


def shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None) -> Three:
    return torch.zeros(q), torch.zeros(k), torch.zeros(k if v is None else v)


@pytest.mark.parametrize(
    ("tensors", "options", "kind", "said"),
    [
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"ulysses_degree": 3}, InputError, "use 1, 2 or 4"),
        (shapes((1, 2, 8, 8), (1, 2, 8, 8)), {"ulysses_degree": 4}, InputError, "a head"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"schedule": DoubleRing(3)}, InputError, "inner=3"),
        (shapes((1, 4, 8, 8), (1, 3, 8, 8)), {}, InputError, "multiple"),
        (shapes((1, 4, 8, 8), (1, 4, 4, 8)), {}, InputError, "cross attention"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 4), (1, 4, 8, 8)), {}, InputError, "head sizes"),
        (shapes((4, 8, 8), (4, 8, 8)), {}, InputError, "4-D"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"seq_dim": 1}, InputError, "different dims"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"seq_dim": 3}, InputError, "different dims"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"schedule": "x"}, InputError, "'gather'"),
        (
            shapes((1, 4, 8, 8), (1, 4, 8, 8)),
            {"layout": "zigzag"},
            InputError,
            "use Contiguous\\(\\)",
        ),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": True}, InputError, r"use MaskSpec\("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": None}, InputError, r"use MaskSpec\("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": "causal"}, InputError, r"use MaskSpec\("),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"backend": "x"}, BackendError, "'sdpa'"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"backend": 3}, BackendError, "'auto'"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"backend": "flex"}, BackendError, FLEX),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"mask": NINE}, InputError, "end at 9 but .* 32"),
        (shapes((1, 4, 8, 8), (1, 4, 8, 8)), {"layout": NO_HASH}, InputError, "has no hash"),
    ],
)
def test_what_does_not_fit_is_named_before_any_communication(
    tensors: Three, options: dict[str, Any], kind: type[ContextParallelError], said: str
) -> None:
    options = {"mask": CAUSAL, **options}

    def call(mesh: Any, door: Any) -> None:
        context_parallel_attention(*tensors, mesh, collectives=door, **options)

    raised, text = refused(4, call)
    assert raised is kind
    assert re.search(said, text)


def test_a_length_that_the_layout_does_not_give_names_both_on_its_rank() -> None:
    def call(rank: int, door: SimulatedCollectives) -> str:
        record = RecordingCollectives(door)
        with pytest.raises(InputError) as info:
            context_parallel_attention(
                *shapes((1, 1, 1024, 8), (1, 1, 1024, 8)),
                door.mesh((4,), ("cp",)),
                mask=CAUSAL,
                layout=Zigzag(),
                seq_len=8192,
                collectives=record,
            )
        assert record.by_axis == {}
        return str(info.value)

    for rank, said in enumerate(SimulatedWorld(4).run(call)):
        assert said.startswith(
            f"q has 1024 local tokens but Zigzag(n=4, S=8192) gives rank {rank} 2048; "
            f"shard with shard_sequence first"
        )


@pytest.mark.parametrize(
    "mesh", [None, "cp", ProcessGroup(HashStore(), 0, 1)], ids=["None", "text", "group"]
)
def test_what_is_no_mesh_is_refused_by_all_helpers(mesh: Any) -> None:
    said = r"mesh must be a DeviceMesh, got .*; make one with init_device_mesh and .* mesh\['cp'\]"
    for call in (
        lambda: shard_sequence(torch.zeros(4), mesh, Zigzag(), 0),
        lambda: unshard_sequence(torch.zeros(4), mesh, Zigzag(), 0),
        lambda: position_ids(mesh, Zigzag(), 8),
        lambda: cp_loss(torch.tensor(1.0), 2, mesh),
        lambda: ContextParallel(seq_dim=1, head_dim=2).apply(torch.nn.Identity(), mesh),
        lambda: context_parallel_attention(*shapes((1, 1, 4, 8), (1, 1, 4, 8)), mesh, mask=CAUSAL),
    ):
        with pytest.raises(InputError, match=said):
            call()


def test_unequal_dtypes_are_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = shapes((1, 4, 8, 8), (1, 4, 8, 8))
        context_parallel_attention(q.double(), k, v, mesh, mask=CAUSAL, collectives=door)

    assert refused(2, call)[0] is InputError


def test_a_dtype_without_kernel_is_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = (x.to(torch.complex64) for x in shapes((1, 4, 8, 8), (1, 4, 8, 8)))
        context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=door)

    raised, text = refused(2, call)
    assert raised is BackendError
    assert "'sdpa' cannot compute causal attention of torch.complex64 on cpu" in text


def test_a_mesh_of_three_axes_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((1, 2, 2), ("dp", "outer", "ulysses"))
    with pytest.raises(InputError, match="one axis, or of two"):
        context_parallel_attention(
            *shapes((1, 4, 8, 8), (1, 4, 8, 8)), mesh, mask=CAUSAL, layout=Contiguous()
        )


def test_autocast_leaves_integers_to_be_refused() -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = (x.int() for x in shapes((1, 4, 8, 8), (1, 4, 8, 8)))
        with torch.autocast("cpu", torch.bfloat16):
            context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=door)

    assert refused(2, call)[0] is BackendError


@pytest.mark.parametrize("degree", [1, 2])
def test_tensors_without_storage_are_refused(degree: int) -> None:
    def call(mesh: Any, door: Any) -> None:
        q, k, v = (x.to("meta") for x in shapes((1, 4, 8, 8), (1, 4, 8, 8)))
        context_parallel_attention(
            q, k, v, mesh, mask=CAUSAL, ulysses_degree=degree, collectives=door
        )

    raised, text = refused(2, call)
    assert raised is BackendError
    assert "kernels with log-sum-exp for cpu and cuda, not for meta" in text
