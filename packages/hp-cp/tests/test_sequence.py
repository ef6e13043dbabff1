"""Sharding the sequence and putting it together again."""

import math
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import WrappedMapping
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import register_pytree_node

from hp_cp import (
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    cp_loss,
    position_ids,
    shard_sequence,
    shift_labels,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, all_layouts, cp_mesh, layouts, masked


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (1, 3), (3, 2)]),
    masked(25),
    all_layouts,
    st.sampled_from([0, 1, -1, -2]),
)
def test_unshard_inverts_shard(
    world: tuple[int, ...], case: tuple[MaskSpec, int], layout: Layout, dim: int
) -> None:
    (mask, seq_len), n = case, math.prod(world)
    shape = [2, 3]
    shape.insert(dim % 3, seq_len)
    x = torch.arange(6 * seq_len, dtype=torch.float64).view(shape)

    def rank(_: int, door: SimulatedCollectives) -> tuple[int, Tensor]:
        mesh = door.mesh(world, ("outer", "ulysses")[-len(world) :])
        mine = shard_sequence(x, mesh, layout, dim, mask)
        given = seq_len if mask.cu_seqlens is None else None
        whole = unshard_sequence(mine, mesh, layout, dim, mask, seq_len=given, collectives=door)
        return mine.shape[dim], whole

    results = SimulatedWorld(n).run(rank)
    assert [r[0] for r in results] == [len(held) for held in layout.indices(n, seq_len, mask)]
    assert all(torch.equal(r[1], x) for r in results)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 12), layouts)
def test_the_gradient_of_unshard_sums_the_ranks_gradients(
    n: int, seq_len: int, layout: Layout
) -> None:
    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        mesh = door.mesh((n,), ("cp",))
        rows = position_ids(mesh, layout, seq_len).double().requires_grad_()
        whole = unshard_sequence(rows, mesh, layout, 0, seq_len=seq_len, collectives=door)
        (whole * torch.arange(seq_len) * (rank + 1)).sum().backward()
        assert rows.grad is not None
        return rows.grad

    grads = SimulatedWorld(n).run(rank)
    for held, grad in zip(layout.indices(n, seq_len), grads, strict=True):
        assert grad.tolist() == [i * n * (n + 1) / 2 for i in held]


@pytest.mark.parametrize(
    ("seq_len", "calls"),
    [(8, {"all_gather": 1, "reduce_scatter": 1}), (7, {"send_recv": 1, "all_to_all": 1})],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_unshard_and_its_backward_make_the_documented_calls(
    layout: Layout, seq_len: int, calls: dict[str, int]
) -> None:
    def rank(_: int, door: SimulatedCollectives) -> dict[tuple[str, str], int]:
        record = RecordingCollectives(door)
        mesh = door.mesh((2,), ("cp",))
        rows = position_ids(mesh, layout, seq_len).double().requires_grad_()
        whole = unshard_sequence(rows, mesh, layout, 0, seq_len=seq_len, collectives=record)
        whole.sum().backward()
        return {call: traffic.calls for call, traffic in record.by_call.items()}

    expected = {("cp", name): number for name, number in calls.items()}
    assert SimulatedWorld(2).run(rank) == [expected] * 2


def cut_and_join(rank: int, layout: Layout, seq_len: int) -> tuple[Any, Any]:
    mesh = cp_mesh(2)
    x = torch.arange(2 * seq_len).view(2, seq_len)
    tree = {"x": x, "more": [x + 1, (None, "text")]}
    mine = shard_sequence(tree, mesh, layout, 1)
    return mine, unshard_sequence(mine, mesh, layout, 1, seq_len=seq_len)


@pytest.mark.nccl
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("seq_len", [8, 7])
def test_trees_go_there_and_back_on_gloo(ranks: Any, layout: Layout, seq_len: int) -> None:
    x = torch.arange(2 * seq_len).view(2, seq_len)
    for rank, (mine, whole) in enumerate(ranks(2).run(cut_and_join, layout, seq_len)):
        held = list(layout.indices(2, seq_len)[rank])
        assert torch.equal(mine["x"], x[:, held])
        assert torch.equal(mine["more"][0], x[:, held] + 1)
        assert mine["more"][1] == (None, "text")
        assert torch.equal(whole["x"], x)
        assert torch.equal(whole["more"][0], x + 1)
        assert whole["more"][1] == (None, "text")


@pytest.mark.parametrize("seq_len", [8, 7])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_buffers_with_the_sequence_in_different_dims_are_cut_alike(
    layout: Layout, seq_len: int
) -> None:
    x = torch.arange(2 * seq_len).view(2, seq_len)
    tree = {"tokens": x, "rope": (x.T, None), "more": [x.view(1, 2, seq_len), "text"]}
    dims = {"tokens": 1, "rope": (0, 0), "more": [-1, 0]}

    def rank(rank: int, door: SimulatedCollectives) -> None:
        mesh = door.mesh((2,), ("cp",))
        mine = shard_sequence(tree, mesh, layout, dims)
        held = list(layout.indices(2, seq_len)[rank])
        assert torch.equal(mine["tokens"], x[:, held])
        assert torch.equal(mine["rope"][0], x.T[held])
        assert torch.equal(mine["more"][0], x[None, :, held])
        assert (mine["rope"][1], mine["more"][1]) == (None, "text")
        whole = unshard_sequence(mine, mesh, layout, dims, seq_len=seq_len, collectives=door)
        assert torch.equal(whole["tokens"], x)
        assert torch.equal(whole["rope"][0], x.T)
        assert torch.equal(whole["more"][0], x[None])

    SimulatedWorld(2).run(rank)


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((0, 1), "is not built as the tensors are"),
        ([0, [1]], "is not built as the tensors are"),
        ([0, None], r"shape \(4, 4\) has no dim None"),
        ([0, 2], r"shape \(4, 4\) has no dim 2"),
        (1.0, "is not built as the tensors are"),
    ],
    ids=str,
)
def test_dims_that_do_not_fit_the_tensors_are_refused_before_any_communication(
    dims: Any, said: str
) -> None:
    def rank(rank: int, door: SimulatedCollectives) -> None:
        record = RecordingCollectives(door)
        mesh, tree = door.mesh((2,), ("cp",)), [torch.zeros(4, 4), torch.zeros(4, 4)]
        with pytest.raises(InputError, match=said):
            shard_sequence(tree, mesh, Zigzag(), dims)
        with pytest.raises(InputError, match=said):
            unshard_sequence(tree, mesh, Zigzag(), dims, collectives=record)
        assert record.by_axis == {}

    SimulatedWorld(2).run(rank)


def test_a_tensor_without_the_dim_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"shape \(4,\) has no dim 1"):
        shard_sequence(torch.zeros(4), mesh, Contiguous(), 1)


@pytest.mark.parametrize("layout", ["zigzag", Zigzag])
def test_a_layout_that_is_none_is_refused_even_without_tensors(layout: Any) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    said = "layout must be a Layout, got"
    with pytest.raises(InputError, match=said):
        shard_sequence([], mesh, layout, 0)
    with pytest.raises(InputError, match=said):
        unshard_sequence([], mesh, layout, 0, collectives=door)
    with pytest.raises(InputError, match=said):
        position_ids(mesh, layout, 8)


def test_layouts_that_follow_the_mask_want_it() -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    x, layout = torch.zeros(4), PerDocument()
    with pytest.raises(InputError, match="give the mask"):
        shard_sequence(x, mesh, layout, 0)
    with pytest.raises(InputError, match="give the mask"):
        unshard_sequence(x, mesh, layout, 0, collectives=door)
    with pytest.raises(InputError, match="give the mask"):
        position_ids(mesh, layout, 8)


def test_a_length_that_the_layout_does_not_give_is_refused() -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"Zigzag\(n=2, S=9\) gives rank 0, 5"):
        unshard_sequence(torch.zeros(4), mesh, Zigzag(), 0, seq_len=9, collectives=door)


class Holed(Contiguous):
    """Leaves out a position."""

    __slots__ = ()

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return all positions but one."""
        return ((range(0, 3),), (range(4, seq_len),))


NINE = MaskSpec(causal=True, cu_seqlens=(0, 4, 9))


@pytest.mark.parametrize(
    ("layout", "mask", "said"),
    [
        (Holed(), None, r"partition range\(8\)"),
        (Zigzag(), NINE, "cu_seqlens end at 9 but the sequence has 8"),
        (Contiguous(), NINE, "cu_seqlens end at 9 but the sequence has 8"),
        (Contiguous(), "causal", "mask must be a MaskSpec, got 'causal'"),
    ],
    ids=str,
)
def test_a_cut_that_loses_positions_or_is_of_another_length_is_refused_by_all_helpers(
    layout: Layout, mask: Any, said: str
) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    with pytest.raises(InputError, match=said):
        shard_sequence(torch.zeros(8), mesh, layout, 0, mask)
    with pytest.raises(InputError, match=said):
        unshard_sequence(torch.zeros(4), mesh, layout, 0, mask, seq_len=8, collectives=door)
    with pytest.raises(InputError, match=said):
        position_ids(mesh, layout, 8, mask)


@pytest.mark.parametrize("seq_len", [8.0, "8", -1])
def test_a_length_that_is_none_is_refused(seq_len: Any) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    said = f"n=2, seq_len={seq_len!r}"
    with pytest.raises(InputError, match=said):
        position_ids(mesh, Zigzag(), seq_len)
    with pytest.raises(InputError, match=said):
        unshard_sequence(torch.zeros(4), mesh, Zigzag(), 0, seq_len=seq_len, collectives=door)


def test_a_mesh_of_three_axes_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((1, 2, 2), ("dp", "cp", "u"))
    with pytest.raises(InputError, match=r"or of two, .*, got axes \['dp', 'cp', 'u'\]"):
        position_ids(mesh, Contiguous(), 8)


class Named(NamedTuple):
    """A tuple with names."""

    x: Tensor
    note: str


@dataclass(frozen=True)
class Batch:
    """A dataclass that is registered nowhere."""

    x: Tensor
    note: str = "text"


class Registered:
    """A type that pytree knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Opaque:
    """A type that nothing knows."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    """No container either, without a dict of attributes."""

    __slots__ = ("unset", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Inherited(Slotted):
    """One whose class inherits its slots."""

    __slots__ = ()


@dataclass
class Partly:
    """A dataclass with a field that nobody sets."""

    x: Tensor
    rest: int = field(init=False)


register_pytree_node(Registered, lambda r: ([r.x], None), lambda new, _: Registered(*new))

X = torch.arange(16).view(2, 8)


@pytest.mark.parametrize(
    ("tree", "find"),
    [
        ({"x": X}, lambda t: t["x"]),
        (OrderedDict(x=X), lambda t: t["x"]),
        (defaultdict(lambda: X, x=X), lambda t: t["x"]),
        (UserDict(x=X), lambda t: t["x"]),
        (WrappedMapping("a dict", {"x": X}), lambda t: t["x"]),
        (WrappedMapping("another", UserDict(x=X)), lambda t: t["x"]),
        (ChainMap({"x": X}, {"y": X}), lambda t: t["x"]),
        (MappingProxyType({"x": X}), lambda t: t["x"]),
        (Batch(X), lambda t: t.x),
        (Named(X, "text"), lambda t: t.x),
        (Registered(X), lambda t: t.x),
        (deque([X]), lambda t: t[0]),
        ([UserDict(x=[Batch(X)])], lambda t: t[0]["x"][0].x),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_type_and_their_tensors_are_cut(
    tree: Any, find: Callable[[Any], Tensor]
) -> None:
    def rank(rank: int, door: SimulatedCollectives) -> None:
        mesh = door.mesh((2,), ("cp",))
        mine = shard_sequence(tree, mesh, Zigzag(), 1)
        whole = unshard_sequence(mine, mesh, Zigzag(), 1, collectives=door)
        assert type(mine) is type(whole) is type(tree)
        assert torch.equal(find(mine), X[:, list(Zigzag().indices(2, 8)[rank])])
        assert torch.equal(find(whole), X)
        assert torch.equal(find(tree), torch.arange(16).view(2, 8))

    SimulatedWorld(2).run(rank)


def test_the_dims_of_any_mapping_may_be_given_in_a_dict() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    mine = shard_sequence(UserDict(a=X, b=X.T), mesh, None, {"b": 0, "a": 1})
    assert torch.equal(mine["a"], X[:, :4])
    assert torch.equal(mine["b"], X.T[:4])


class Fixed(Mapping[str, Any]):
    """A mapping that is not made of a mapping."""

    def __init__(self, *, x: Tensor) -> None:
        self._x = x

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor."""
        if key != "x":
            raise KeyError(key)
        return self._x

    def __iter__(self) -> Iterator[str]:
        """Iterate over the one key."""
        return iter(["x"])

    def __len__(self) -> int:
        """Return one."""
        return 1


class Labelled(Fixed):
    """A mapping that is made of a label."""

    def __init__(self, label: str) -> None:
        super().__init__(x=X)
        self.label = label


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (X.numpy(), "type ndarray is no tensor and would not be cut"),
        ({"x": X, "y": X.numpy()}, "type ndarray is no tensor and would not be cut"),
        (Opaque(X), "type Opaque is no tensor and would not be cut"),
        ([X, Slotted(X)], "type Slotted is no tensor and would not be cut"),
        ([X, Inherited([X])], "type Inherited is no tensor and would not be cut"),
        ([X, Opaque([X])], "type Opaque is no tensor and would not be cut"),
        ({X}, "type set is no tensor and would not be cut"),
        (UserList([X]), "type UserList is no tensor and would not be cut"),
        ({"x": X}.values(), "type dict_values is no tensor and would not be cut"),
        (iter([X]), "type list_iterator is no tensor and would not be cut"),
        ({"x": [[1, 2, 3]]}, "type dict holds no tensor"),
        (3, "3 holds no tensor"),
        (Fixed(x=X), "type Fixed holds a container that cannot be made again"),
        (
            WrappedMapping("a", WrappedMapping("b", {"x": X})),
            "a copy.copy of it shares its items; give a dict",
        ),
        (Labelled("a"), "its class makes another mapping of a dict; give a dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_be_cut_is_refused(tree: Any, said: str) -> None:
    def rank(_: int, door: SimulatedCollectives) -> None:
        record = RecordingCollectives(door)
        mesh = door.mesh((2,), ("cp",))
        with pytest.raises(InputError, match=said):
            shard_sequence(tree, mesh, Zigzag(), 1)
        with pytest.raises(InputError, match=said):
            unshard_sequence(tree, mesh, Zigzag(), 1, collectives=record)
        assert record.by_axis == {}

    SimulatedWorld(2).run(rank)


def test_a_refused_mapping_keeps_its_items() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    tree = WrappedMapping("a", WrappedMapping("b", {"x": X, "y": X.T}))
    for seq_dim in (0, {"x": 0, "y": 1}):
        with pytest.raises(InputError):
            shard_sequence(tree, mesh, None, seq_dim)
        assert tree["x"] is X


def test_a_dataclass_may_have_fields_that_are_not_set() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    mine = shard_sequence(Partly(X), mesh, None, 1)
    assert isinstance(mine, Partly)
    assert torch.equal(mine.x, X.chunk(2, 1)[0])
    assert not hasattr(mine, "rest")


def test_leaves_without_rows_pass() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    rest = {"name": "text", "n": 3, "size": X.numpy()[0, 0], "set": {1}, "range": range(3)}
    mine = shard_sequence({"x": X, **rest}, mesh, Zigzag(), 1)
    assert {key: mine[key] for key in rest} == rest
    empty: list[Any] = [[], {}, None, [None, (None,)]]
    for nothing in empty:
        assert shard_sequence(nothing, mesh, Zigzag(), 1) == nothing


class Loader:
    """An iterable whose batches are made when they are asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        """Refuse: nobody asked."""
        raise AssertionError("the batches were asked for")

    def __len__(self) -> int:
        """Return the number of batches."""
        return 3


def test_leaves_are_looked_into_without_asking_them_for_anything() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    around: dict[str, Any] = {"n": 3}
    around["itself"] = [around]
    leaves = {
        "loader": Loader(),
        "object": Opaque(around),
        "slots": Slotted(around),
        "function": cut_and_join,
    }
    mine = shard_sequence({"x": X, **leaves}, mesh, None, 1)
    assert {key: mine[key] for key in leaves} == leaves
    around["x"] = X
    with pytest.raises(InputError, match="type Opaque is no tensor and would not be cut"):
        shard_sequence({"x": X, **leaves}, mesh, None, 1)


def test_a_container_that_holds_itself_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    tree: dict[str, Any] = {"x": X}
    tree["all"] = [tree]
    with pytest.raises(InputError, match="an object of type dict holds itself"):
        shard_sequence(tree, mesh, None, 1)
    twice = [X]
    assert shard_sequence([twice, twice], mesh, None, 1)[1][0].shape == (2, 4)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS, Greedy(2)], ids=repr)
def test_every_rank_gets_contiguous_tensors_with_memory_of_their_own(
    layout: Layout, dim: int, n: int
) -> None:
    source = torch.arange(5 * 6 * 8).view(5, 6, 8).transpose(0, 1)
    images = torch.zeros(1, 4, 7, 5).to(memory_format=torch.channels_last)

    def rank(_: int, door: SimulatedCollectives) -> None:
        mesh, mask = door.mesh((n,), ("cp",)), MaskSpec(causal=True)
        for x in (source, images, source.contiguous()):
            mine = shard_sequence(x, mesh, layout, dim, mask)
            mine.view(-1)
            assert mine.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()

    SimulatedWorld(n).run(rank)


def test_no_layout_is_contiguous() -> None:
    def rank(rank: int, door: SimulatedCollectives) -> None:
        mesh = door.mesh((2,), ("cp",))
        mine = shard_sequence(X, mesh, None, 1)
        assert torch.equal(mine, X[:, 4 * rank : 4 * rank + 4])
        assert torch.equal(unshard_sequence(mine, mesh, None, 1, collectives=door), X)
        assert position_ids(mesh, None, 8).tolist() == [*range(4 * rank, 4 * rank + 4)]

    SimulatedWorld(2).run(rank)


def helpers_of_dtensors(rank: int) -> list[str]:
    mesh, said = cp_mesh(2), []
    for placement in (Shard(1), Replicate()):
        x = distribute_tensor(X, mesh, [placement])
        one = DTensor.from_local(torch.ones(()), mesh, [Replicate()])
        for call in (
            lambda x=x: shard_sequence({"x": x}, mesh, Zigzag(), 1),
            lambda x=x: unshard_sequence([x], mesh, Zigzag(), 1),
            lambda x=x: shift_labels(x),
            lambda one=one: cp_loss(one, 1, mesh),
            lambda one=one: cp_loss(torch.ones(()), one.long(), mesh),
        ):
            with pytest.raises(InputError) as info:
                call()
            said.append(str(info.value))
    return said


def test_dtensors_are_refused_by_all_helpers(ranks: Any) -> None:
    first, second = ranks(2).run(helpers_of_dtensors)
    assert first == second
    assert all("is a DTensor with (" in said and "to_local()" in said for said in first)
