"""The length of the whole sequence where none is given: of documents, or of equal local lengths."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_cp import (
    ContextParallel,
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Pinned,
    Zigzag,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_dtensor import CheckedCollectives, RankMismatchError, RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import ALL_LAYOUTS, dense_attention, inputs
from .test_style import Core

CAUSAL = MaskSpec(causal=True)
PACKED = MaskSpec(causal=True, cu_seqlens=(0, 4, 11, 23))


def told(mask: MaskSpec, layout: Layout, shape: tuple[int, ...]) -> list[tuple[Tensor, Any]]:
    """Attend in all ways to 23 positions whose length nobody gives; return what was called too."""
    tensors, n = inputs(4, 2, 23), torch.Size(shape).numel()

    def rank(_: int, door: SimulatedCollectives) -> tuple[Tensor, Any]:
        record = RecordingCollectives(door)
        mesh = door.mesh(shape, ("outer", "ulysses")[-len(shape) :])
        q, k, v = shard_sequence(tensors[:3], mesh, layout, 2, PACKED)
        options: dict[str, Any] = {"layout": layout, "mask": mask, "collectives": record}
        one = context_parallel_attention(q, k, v, mesh, ulysses_degree=shape[-1], **options)
        style = ContextParallel(seq_dim=1, head_dim=2, **options)
        core = style.apply(Core(), mesh)
        other = core(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
        whole = unshard_sequence([one, other], mesh, layout, 2, mask, collectives=record)
        return torch.stack(whole), {name for _, name in record.by_call}

    return SimulatedWorld(n).run(rank)


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=repr)
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_documents_give_the_length_wherever_a_mask_has_them(
    layout: Layout, shape: tuple[int, ...]
) -> None:
    q, k, v, _ = inputs(4, 2, 23)
    for mask, laid in ((PACKED, layout), (CAUSAL, Pinned(layout, PACKED))):
        expected = dense_attention(q, k, v, mask)
        for results, calls in told(mask, laid, shape):
            assert "all_reduce" not in calls
            for whole in results:
                torch.testing.assert_close(whole, expected, rtol=0, atol=1e-13)


def unequal(
    call: Callable[[list[Tensor], Any, Any], object], lengths: tuple[int, ...], shape: Any
) -> list[str]:
    """Return what each rank of a world says to rows of these lengths."""

    def rank(rank: int, door: SimulatedCollectives) -> str:
        mesh = door.mesh(shape, ("outer", "ulysses")[-len(shape) :])
        rows = [torch.zeros(1, 4, lengths[rank], 8) for _ in range(3)]
        with pytest.raises(InputError) as caught:
            call(rows, mesh, door)
        return str(caught.value)

    return SimulatedWorld(len(lengths)).run(rank)


def of_function(**options: Any) -> Any:
    def call(rows: list[Tensor], mesh: Any, door: Any) -> object:
        q, k, v = rows
        return context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=door, **options)

    return call


def of_style(**options: Any) -> Any:
    def call(rows: list[Tensor], mesh: Any, door: Any) -> object:
        style = ContextParallel(seq_dim=2, head_dim=1, collectives=door, **options)
        return style.apply(Core(), mesh)(*rows, is_causal=True)

    return call


def of_unshard(rows: list[Tensor], mesh: Any, door: Any) -> object:
    return unshard_sequence(rows, mesh, Contiguous(), 2, collectives=door)


CALLS = {
    "function": of_function(),
    "zigzag": of_function(layout=Zigzag()),
    "greedy": of_function(layout=Greedy(2)),
    "per document": of_function(layout=PerDocument()),
    "gather": of_function(schedule="gather"),
    "own forward": of_style(),
    "halves": of_style(ulysses_degree=1, load_balance=True),
    "unshard": of_unshard,
}


@pytest.mark.parametrize("lengths", [(8, 7), (7, 8), (8, 8, 8, 5), (4, 0)], ids=str)
@pytest.mark.parametrize("name", list(CALLS))
def test_unequal_lengths_raise_one_error_on_every_rank(name: str, lengths: tuple[int, ...]) -> None:
    said = unequal(CALLS[name], lengths, (len(lengths),))
    assert len(set(said)) == 1
    assert f"unequal local lengths, {min(lengths)} to {max(lengths)}" in said[0]
    assert "give seq_len" in said[0]


def test_an_equal_length_that_makes_no_plan_is_refused_as_where_it_is_given() -> None:
    def rank(rank: int, door: SimulatedCollectives) -> str:
        with pytest.raises(InputError) as caught:
            CALLS["halves"]([torch.zeros(1, 4, 7, 8)] * 3, door.mesh((2,), ("cp",)), door)
        return str(caught.value)

    assert all("but 14 positions on 2" in said for said in SimulatedWorld(2).run(rank))


@pytest.mark.parametrize("lengths", [(8, 8, 7, 7), (8, 7, 8, 7), (8, 8, 8, 7), (7, 9, 8, 8)])
def test_two_axes_are_compared_as_one(lengths: tuple[int, ...]) -> None:
    for call in (of_function(ulysses_degree=2), of_style(), of_unshard):
        said = unequal(call, lengths, (2, 2))
        assert len(set(said)) == 1
        assert f"{min(lengths)} to {max(lengths)}" in said[0]


def test_of_several_tensors_those_that_differ_are_named() -> None:
    def rank(rank: int, door: SimulatedCollectives) -> str:
        mesh = door.mesh((2,), ("cp",))
        tree = {"a": torch.zeros(4), "b": torch.zeros(6 + rank), "c": torch.zeros(3 - rank)}
        with pytest.raises(InputError) as caught:
            unshard_sequence(tree, mesh, Contiguous(), 0, collectives=door)
        return str(caught.value)

    assert all("lengths, 6 to 7, 2 to 3, from" in said for said in SimulatedWorld(2).run(rank))


def new_mesh() -> DeviceMesh:
    """Return a mesh of both ranks over a group of its own, which has compared nothing."""
    return DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("cp",))


def lengths_in_turn(rank: int, turns: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    """Return what each call of a sequence of calls did, and how often lengths were compared."""
    mesh = new_mesh()
    done = []
    for lengths in turns:
        record = RecordingCollectives()
        q = torch.zeros(1, 2, lengths[rank], 8)
        try:
            context_parallel_attention(q, q, q, mesh, mask=CAUSAL, collectives=record)
            said = "served"
        except InputError as error:
            said = str(error)[:40]
        calls = [call.calls for (_, name), call in record.by_call.items() if name == "all_reduce"]
        done.append((said, sum(calls)))
    return done


def test_a_length_is_compared_once_by_a_group(ranks: Any) -> None:
    turns = [(8, 8), (8, 8), (6, 6), (8, 8), (5, 4), (6, 6), (5, 4), (5, 5), (4, 3), (5, 5)]
    refused = "ranks hold unequal local lengths, "
    expected = [1, 0, 1, 0, refused + "4 to 5", 0, refused + "4 to 5", 1, refused + "3 to 4", 0]
    for done in ranks(2).run(lengths_in_turn, turns):
        for (said, compared), wanted in zip(done, expected, strict=True):
            if isinstance(wanted, str):
                assert (said, compared) == (wanted, 1)
            else:
                assert (said, compared) == ("served", wanted)


def one_changes(rank: int, first: tuple[int, int], then: tuple[int, int]) -> str:
    """Let lengths of which one rank knows its own differ, and return what is said."""
    mesh = new_mesh()
    checked = CheckedCollectives(deadline=60)
    for lengths in (first, first[::-1]):
        q = torch.zeros(1, 2, lengths[0], 8)
        context_parallel_attention(
            q, q, q, mesh, mask=CAUSAL, schedule="gather", collectives=checked
        )
    q = torch.zeros(1, 2, then[rank], 8)
    try:
        context_parallel_attention(
            q, q, q, mesh, mask=CAUSAL, schedule="gather", collectives=checked
        )
    except RankMismatchError as error:
        return str(error)
    return "served"


@pytest.mark.parametrize(
    ("first", "then"), [((8, 8), (8, 6)), ((8, 8), (6, 8)), ((8, 6), (8, 6)), ((8, 6), (6, 8))]
)
def test_a_length_that_one_rank_alone_knows_is_found_by_checked_collectives(
    ranks: Any, first: tuple[int, int], then: tuple[int, int]
) -> None:
    said = ranks(2).run(one_changes, first, then)
    assert said[0] == said[1]
    assert said[0] != "served"


def bounded(rank: int) -> tuple[list[int], bool]:
    """Return the comparisons of each of many lengths, and whether the group is kept alive."""
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    made = []
    for length in (*range(1, 80), 79, 16, 15, 79):
        record = RecordingCollectives()
        unshard_sequence(torch.zeros(length), mesh, None, 0, collectives=record)
        made.append(sum(call.calls for (_, name), call in record.by_call.items() if "re" in name))
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    return made, seen() is None


def test_what_was_compared_is_bounded_and_keeps_no_group_alive(ranks: Any) -> None:
    for made, gone in ranks(2).run(bounded):
        assert made == [*[1] * 79, 0, 0, 1, 0]
        assert gone


@dataclass(frozen=True)
class Even(Layout):
    """A layout that needs four rows of each rank."""

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return the stretches of `Contiguous`."""
        if seq_len % (4 * n):
            raise InputError(f"{seq_len} is no multiple of {4 * n}")
        return Contiguous().chunks(n, seq_len, mask)


@pytest.mark.parametrize("lengths", [(4, 5), (5, 4), (5, 6)], ids=str)
def test_a_layout_that_refuses_one_ranks_length_is_asked_with_the_others(
    lengths: tuple[int, ...],
) -> None:
    def call(rows: list[Tensor], mesh: Any, door: Any) -> object:
        return unshard_sequence(rows, mesh, Even(), 2, collectives=door)

    said = unequal(call, lengths, (len(lengths),))
    assert len(set(said)) == 1
    assert f"unequal local lengths, {min(lengths)} to {max(lengths)}" in said[0]


def test_an_equal_length_that_a_layout_refuses_is_refused_by_the_layout() -> None:
    def rank(rank: int, door: SimulatedCollectives) -> None:
        with pytest.raises(InputError, match="10 is no multiple of 8"):
            unshard_sequence(torch.zeros(5), door.mesh((2,), ("cp",)), Even(), 0, collectives=door)

    SimulatedWorld(2).run(rank)
