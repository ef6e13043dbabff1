"""Buffers that are cut in place inside a block, and whole again after it."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hp_cp import (
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    cp_loss,
    shard_sequence,
    sharded_buffers,
    shift_labels,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import ALL_LAYOUTS, cp_mesh

CAUSAL = MaskSpec(causal=True)


def mesh_of(n: int = 2, rank: int = 0) -> Any:
    return SimulatedCollectives(SimulatedWorld(n), rank).mesh((n,), ("cp",))


def state(x: Tensor) -> tuple[Any, ...]:
    """Return all that a tensor is: its memory, how it lies there, and the bits."""
    bits = x.contiguous().view(torch.uint8).flatten().tolist()
    return x.data_ptr(), x.shape, x.stride(), x.storage_offset(), x.dtype, bits


def some_buffers() -> list[Tensor]:
    """Return buffers of several dtypes, one a view, one that lies transposed, one expanded."""
    tokens, rope = torch.arange(26).view(2, 13), torch.randn(20, 4)
    rope[3, 1] = torch.nan
    transposed = torch.randn(3, 13, dtype=torch.bfloat16).T
    return [tokens, rope[5:18], transposed, torch.ones(1, 13, dtype=torch.bool).expand(4, 13)]


DIMS = [1, 0, -2, -1]


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=repr)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_buffers_hold_this_ranks_rows_inside_and_are_the_same_outside(
    n: int, layout: Layout
) -> None:
    mask = MaskSpec(causal=True, cu_seqlens=(0, 2, 9, 13))
    for rank, held in enumerate(layout.indices(n, 13, mask)):
        buffers = some_buffers()
        before = [state(x) for x in buffers]
        wanted = [
            x.index_select(dim, torch.tensor(held)) for x, dim in zip(buffers, DIMS, strict=True)
        ]
        with sharded_buffers(mesh_of(n, rank), buffers, DIMS, layout=layout, mask=mask):
            for x, part, old in zip(buffers, wanted, before, strict=True):
                torch.testing.assert_close(x, part, rtol=0, atol=0, equal_nan=True)
                assert x.is_contiguous()
                assert x.data_ptr() != old[0] or x.numel() == 0
        assert [state(x) for x in buffers] == before


def test_one_dim_serves_all_and_the_default_layout_is_contiguous() -> None:
    x, y = torch.arange(6), torch.arange(6) * 2
    with sharded_buffers(mesh_of(2, 1), (x, y), 0):
        assert (x.tolist(), y.tolist()) == ([3, 4, 5], [6, 8, 10])
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10])


def test_an_exception_and_what_the_block_writes_leave_no_trace() -> None:
    buffers = some_buffers()
    before = [state(x) for x in buffers]

    def spoil() -> None:
        with sharded_buffers(mesh_of(), buffers, DIMS):
            buffers[0].zero_()
            buffers[1].resize_(100)
            buffers[2].requires_grad_()
            raise KeyError

    with pytest.raises(KeyError):
        spoil()
    buffers[2].requires_grad_(False)
    assert [state(x) for x in buffers] == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_stays_cut_and_lets_its_memory_go(fails: bool) -> None:
    x, y = torch.arange(6), torch.arange(6)
    memory = weakref.ref(x.untyped_storage())
    try:
        with sharded_buffers(mesh_of(), [x, y], 0, layout=Zigzag(), keep=[x]):
            gc.collect()
            assert memory() is None
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert (x.tolist(), y.tolist()) == ([0, 1, 5], [0, 1, 2, 3, 4, 5])
    with sharded_buffers(mesh_of(), [x], 0):
        assert x.tolist() == [0, 1]


def test_blocks_nest_over_different_buffers_and_are_entered_again() -> None:
    x, y = torch.arange(4), torch.arange(6)
    for _ in range(2):
        with sharded_buffers(mesh_of(), [x], 0):
            with sharded_buffers(mesh_of(), [y], 0, layout=Zigzag()):
                assert (x.tolist(), y.tolist()) == ([0, 1], [0, 1, 5])
            assert (x.tolist(), y.tolist()) == ([0, 1], list(range(6)))
            with (
                pytest.raises(InputError, match=r"buffer 1 of shape \(2,\) is cut by an enclosing"),
                sharded_buffers(mesh_of(), [y, x], 0),
            ):
                pass
            assert (x.tolist(), y.tolist()) == ([0, 1], list(range(6)))
        assert x.tolist() == [0, 1, 2, 3]


Refused = tuple[Callable[[Tensor], dict[str, Any]], type[Exception], str]
REFUSED: dict[str, Refused] = {
    "parameter": (
        lambda x: {"buffers": [x, nn.Parameter(torch.zeros(4), requires_grad=False)]},
        InputError,
        r"buffer 1 is a parameter of shape \(4,\)",
    ),
    "gradient": (
        lambda x: {"buffers": [x, torch.zeros(4, requires_grad=True)]},
        InputError,
        r"buffer 1 of shape \(4,\) requires gradients",
    ),
    "graph": (
        lambda x: {"buffers": [x, torch.zeros(4, requires_grad=True) * 2]},
        InputError,
        "requires gradients",
    ),
    "view": (lambda x: {"buffers": [x, x[2:]]}, InputError, "buffers 0 and 1 share memory"),
    "twice": (lambda x: {"buffers": [x, x]}, InputError, "buffers 0 and 1 are one tensor"),
    "no memory": (
        lambda x: {"buffers": [x, *[torch.zeros(0)] * 2]},
        InputError,
        "buffers 1 and 2 are one tensor",
    ),
    "sparse": (
        lambda x: {"buffers": [x, torch.eye(4).to_sparse()]},
        InputError,
        "buffer 1 is a Tensor with layout torch.sparse_coo",
    ),
    "array": (lambda x: {"buffers": [x, [1, 2]]}, InputError, "buffer 1 is no tensor, but"),
    "alone": (lambda x: {"buffers": x}, InputError, "buffers must be a list of tensors"),
    "dim": (lambda x: {"seq_dims": [1]}, InputError, "has no dim 1 for the sequence"),
    "flag": (lambda x: {"seq_dims": True}, InputError, "has no dim True for the sequence"),
    "dims": (lambda x: {"seq_dims": [0, 0]}, InputError, r"\[0, 0\] has 2 dims for 1 buffers"),
    "no dims": (lambda x: {"seq_dims": None}, InputError, "has no dim None"),
    "keep": (lambda x: {"keep": [x.clone()]}, InputError, "keep holds .* none of the buffers"),
    "kept alone": (lambda x: {"keep": x}, InputError, r"use keep=\[x\]"),
    "layout": (lambda x: {"layout": "zigzag"}, InputError, "layout must be a Layout"),
    "no mask": (lambda x: {"layout": Greedy(2)}, InputError, "give the mask"),
    "documents": (
        lambda x: {"mask": MaskSpec(causal=True, cu_seqlens=(0, 9))},
        InputError,
        "end at 9 but the sequence has 8",
    ),
    "mesh": (lambda x: {"mesh": None}, InputError, "mesh must be a DeviceMesh"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_cut_in_place_is_refused_before_anything_changes(name: str) -> None:
    x = torch.arange(8.0)
    before = state(x)
    changed, error, said = REFUSED[name]
    options = {"mesh": mesh_of(), "buffers": [x], "seq_dims": 0, **changed(x)}
    entered = False
    with pytest.raises(error, match=said), sharded_buffers(**options):
        entered = True
    assert not entered
    assert state(x) == before
    with sharded_buffers(mesh_of(), [x], 0):  # nothing is left of the attempt
        assert len(x) == 4


def test_a_mesh_of_three_axes_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(8), 0).mesh((2, 2, 2), ("a", "b", "c"))
    with pytest.raises(InputError, match="one axis, or of two"), sharded_buffers(mesh, [], 0):
        pass


def of_dtensor(rank: int) -> str:
    mesh = cp_mesh(2)
    x = DTensor.from_local(torch.zeros(4), mesh, [Replicate()])
    try:
        with sharded_buffers(mesh, [x], 0):
            return "entered"
    except InputError as error:
        return str(error)


def test_dtensors_are_refused(ranks: Any) -> None:
    assert all("buffer 0 is a DTensor" in said for said in ranks(2).run(of_dtensor))


def test_tensors_of_inference_mode_are_cut_there_only() -> None:
    with torch.inference_mode():
        x = torch.arange(4)
        with sharded_buffers(mesh_of(), [x], 0):
            assert x.tolist() == [0, 1]
        assert x.tolist() == [0, 1, 2, 3]
    with (
        pytest.raises(InputError, match="was made in inference mode"),
        sharded_buffers(mesh_of(), [x], 0),
    ):
        pass


@pytest.mark.parametrize("kept", [False, True])
def test_a_cut_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    x, y = torch.arange(4), torch.arange(6)
    before, real = [state(x), state(y)], Tensor.set_

    def failing(self: Tensor, source: Tensor) -> Tensor:
        if self is y and len(source) == 3:
            raise MemoryError
        return real(self, source)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Tensor, "set_", failing)
    with pytest.raises(MemoryError), sharded_buffers(mesh_of(), [x, y], 0, keep=[x] * kept):
        pass
    assert [state(x), state(y)] == before


def test_a_backward_that_comes_too_late_says_so() -> None:
    x, weight = torch.arange(4.0), torch.ones(2, requires_grad=True)
    with sharded_buffers(mesh_of(), [x], 0):
        loss = (x * weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Small(nn.Module):
    """One attention between an embedding with positions from a buffer, and logits."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 32).double()
        self.out = nn.Linear(32, 11).double()
        self.register_buffer("positions", torch.randn(24, 32, dtype=torch.float64))

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Return logits."""
        x = (self.embed(tokens) + self.positions).unflatten(-1, (4, 8)).transpose(1, 2)
        logits: Tensor = self.out(attend(x, x, x).transpose(1, 2).flatten(2))
        return logits


def test_a_model_whose_buffers_are_cut_trains_as_one_process() -> None:
    tokens = torch.randint(11, (2, 24), generator=torch.Generator().manual_seed(1))
    made = Small()  # once: simulated ranks are threads, which share the generator

    def trained(mesh: Any, attend: Callable[..., Tensor], door: Any) -> list[Tensor]:
        model, mine = deepcopy(made), tokens.clone()
        labels = shift_labels(mine)
        with sharded_buffers(mesh, [mine, labels, model.positions], [1, 1, 0], layout=Zigzag()):
            logits = model(mine, attend).flatten(0, 1)
            total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            cp_loss(total, (labels != -100).sum(), mesh, collectives=door).backward()
        assert model.positions.shape == (24, 32)
        assert torch.equal(mine, tokens)
        return [p.grad for p in model.parameters() if p.grad is not None]

    def rank(_: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh = door.mesh((2,), ("cp",))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = {"mask": CAUSAL, "layout": Zigzag(), "seq_len": 24}
            out: Tensor = context_parallel_attention(q, k, v, mesh, collectives=door, **options)
            return out

        return trained(mesh, attend, door)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    world = SimulatedWorld(1)
    (expected,) = world.run(lambda _, door: trained(door.mesh((1,), ("cp",)), whole, door))
    for parts, reference in zip(
        zip(*SimulatedWorld(2).run(rank), strict=True), expected, strict=True
    ):
        torch.testing.assert_close(sum(parts), reference, rtol=0, atol=1e-13)


def test_the_cut_is_that_of_shard_sequence() -> None:
    x = torch.randn(3, 10)
    mine = shard_sequence(x, mesh_of(2, 1), Contiguous(), 1)
    with sharded_buffers(mesh_of(2, 1), [x], 1):
        assert torch.equal(x, mine)


def test_what_is_kept_may_come_from_a_generator() -> None:
    x, y = torch.arange(6), torch.arange(6)
    with sharded_buffers(mesh_of(), [x, y], 0, keep=(kept for kept in [x])):
        pass
    assert (len(x), len(y)) == (3, 6)
