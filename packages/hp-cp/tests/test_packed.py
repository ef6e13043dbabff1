"""Blocks of one kind go to a backend in one call, where it takes several."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    ScoreOptions,
    context_parallel_attention,
    plan_attention,
)
from hp_cp.kernels._interface import PackedBackend
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import all_layouts, dense_attention, inputs, leaves, masked, single, with_gradients
from .test_backends import PlainBackend


class PackedPlain(PlainBackend):
    """The plain backend, stretch by stretch; counts calls, and the stretches of all."""

    name = "packed"

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[int] = []

    def forward_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        self.packed.append(len(rows))
        stretches = zip(q.split(rows, 2), k.split(keys, 2), v.split(keys, 2), strict=True)
        done = [self.forward(*parts, causal=causal, options=options) for parts in stretches]
        out, lse = (torch.cat(parts, 2) for parts in zip(*done, strict=True))
        return out, lse

    def backward_packed(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv."""
        lengths = (rows, rows, keys, keys, rows, rows)
        split = (x.split(n, 2) for x, n in zip((grad, q, k, v, out, lse), lengths, strict=True))
        done = [
            self.backward(*parts, causal=causal, options=options)
            for parts in zip(*split, strict=True)
        ]
        dq, dk, dv = (torch.cat(parts, 2) for parts in zip(*done, strict=True))
        return dq, dk, dv


@settings(deadline=None, max_examples=60)
@given(masked(24, 1), all_layouts, st.sampled_from([1, 2, 3]))
def test_packed_blocks_give_the_attention_and_gradients_of_one_process(
    case: tuple[MaskSpec, int], layout: Layout, n: int
) -> None:
    mask, seq_len = case
    q, k, v, grad = inputs(2, 2, seq_len)
    indices = layout.indices(n, seq_len, mask)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        mine = list(indices[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        backend: PackedBackend = PackedPlain()
        out = context_parallel_attention(
            *local,
            door.mesh((n,), ("cp",)),
            mask=mask,
            layout=layout,
            seq_len=seq_len,
            backend=backend,
            collectives=door,
        )
        return with_gradients(out, local, grad[:, :, mine])

    expected = single((q, k, v, grad), mask, dense_attention)
    for held, results in zip(indices, SimulatedWorld(n).run(rank), strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, list(held)], rtol=0, atol=1e-13)


def test_many_documents_are_one_call_per_kernel() -> None:
    documents = (0, 3, 4, 9, 15, 17, 24)
    mask = MaskSpec(causal=True, cu_seqlens=documents)
    backend = PackedPlain()
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    q, k, v, _ = inputs(2, 2, 24)
    mesh = door.mesh((1,), ("cp",))
    context_parallel_attention(q, k, v, mesh, mask=mask, backend=backend, collectives=door)
    blocks = plan_attention(mask, Contiguous(), 1, 24).blocks(0)
    assert backend.packed == [sum(block.tiles for block in blocks)] == [len(documents) - 1]


class Limited(PlainBackend):
    """The plain backend as a device has it that lays the batch over 65,535 places of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[int] = []

    def forward(self, q: Tensor, *rest: Any, **options: Any) -> Any:
        """Count, and compute."""
        self.launches.append(q.shape[0])
        return super().forward(q, *rest, **options)

    def backward(self, grad: Tensor, *rest: Any, **options: Any) -> Any:
        """Count, and compute."""
        self.launches.append(grad.shape[0])
        return super().backward(grad, *rest, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "documents"), [(1, 70_000), (2, 40_000), (70_000, 1)])
def test_more_squares_than_a_grid_has_places_are_several_launches(
    batch: int, documents: int
) -> None:
    mask = MaskSpec(causal=True, cu_seqlens=tuple(range(0, 2 * documents + 1, 2)))
    backend = Limited()
    collectives = SimulatedCollectives(SimulatedWorld(1), 0)
    tensors = inputs(2, 1, 2 * documents, batch=batch, size=2)
    local = leaves(*tensors[:3])
    out = context_parallel_attention(
        *local,
        collectives.mesh((1,), ("cp",)),
        mask=mask,
        backend=backend,
        collectives=collectives,
    )
    results = with_gradients(out, local, tensors[3])
    assert backend.launches == [65_535, batch * documents - 65_535] * 2

    # each document alone, as a further row of the batch
    def alone(x: Tensor) -> Tensor:
        rows: Tensor = x.unflatten(2, (documents, 2)).transpose(1, 2).flatten(0, 1)
        return rows

    whole = leaves(*map(alone, tensors[:3]))
    plain = dense_attention(*whole, MaskSpec(causal=True))
    expected = with_gradients(plain, whole, alone(tensors[3]))
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(alone(result), reference, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", PackedPlain()], ids=["alone", "packed"])
@pytest.mark.parametrize("layout", [Greedy(4), PerDocument()], ids=repr)
def test_sums_of_documents_cost_as_many_operations_for_few_as_for_many(
    layout: Layout, backend: Any
) -> None:
    counted = []
    for documents in (20, 60):
        ends = sorted(Random(documents).sample(range(1, 16 * documents), documents - 1))
        mask = MaskSpec(causal=True, cu_seqlens=(0, *ends, 16 * documents))
        indices = layout.indices(4, 16 * documents, mask)
        q, k, v, grad = inputs(2, 2, 16 * documents)

        def rank(
            rank: int,
            simulated: SimulatedCollectives,
            indices: Any = indices,
            mask: MaskSpec = mask,
            given: tuple[Tensor, ...] = (q, k, v, grad),
        ) -> tuple[int, int]:
            local = leaves(*(x[:, :, list(indices[rank])] for x in given[:3]))
            mesh = simulated.mesh((4,), ("cp",))
            options: Any = {"mask": mask, "layout": layout, "backend": backend}
            with Called() as called:
                out = context_parallel_attention(
                    *local, mesh, seq_len=len(given[0][0, 0]), collectives=simulated, **options
                )
                torch.autograd.grad(out, local, given[3][:, :, list(indices[rank])])
            sums = ("lerp", "logaddexp", "add_", "copy_", "index")
            kernels = sum(n for name, n in called.times.items() if "flash" in name)
            return kernels, sum(n for name, n in called.times.items() if any(map(name.count, sums)))

        counted.append(SimulatedWorld(4).run(rank)[0])
    (few, sums), (many, same) = counted
    assert backend != "sdpa" or many > few
    assert same <= 1.5 * sums
    assert same < 80
