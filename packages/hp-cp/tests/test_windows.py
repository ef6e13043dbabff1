"""Windows go whole to kernels that take them, and are cut into tiles for others."""

from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_cp import Block, Contiguous, Layout, MaskSpec, ScoreOptions, _torch, plan_attention
from hp_cp._plan import part_of
from hp_cp._torch import compiler_errors
from hp_cp.kernels import _flex
from hp_cp.kernels._choose import choose_backends
from hp_cp.kernels._eager import EAGER
from hp_cp.kernels._flex import FlexBackend, _attended, _plain
from hp_cp.kernels._interface import Places
from hp_cp.kernels._sdpa import SDPA, FusedBackend
from hp_cp.kernels._varlen import VARLEN

from .strategies import all_layouts, inputs, masked, visible
from .test_plan import shows as shows_tile

WINDOWED = MaskSpec(causal=True, window=9)


def shows(block: Block, i: int, j: int) -> bool:
    if block.kind != "window":
        return shows_tile(block, i, j)
    left, right = block.window
    distance = j - i - (len(block.keys) - len(block.queries))
    return (left is None or distance >= -left) and (right is None or distance <= right)


@settings(deadline=None, max_examples=150)
@given(masked(40), all_layouts, st.sampled_from([1, 2, 3, 5]))
def test_whole_windows_cover_the_mask_exactly_once(
    case: tuple[MaskSpec, int], layout: Layout, n: int
) -> None:
    mask, seq_len = case
    plan = plan_attention(mask, layout, n, seq_len)
    held = [[i for chunk in group for i in chunk] for group in plan.groups]
    found = []
    for rank in range(n):
        part, cut = part_of(plan, rank, windows=True), part_of(plan, rank)
        assert (part.receive_rows, part.send_rows) == (cut.receive_rows, cut.send_rows)
        for block in (block for blocks in part.blocks.values() for block in blocks):
            pairs = [
                (held[rank][row], held[block.source][key])
                for i, row in enumerate(block.queries)
                for j, key in enumerate(block.keys)
                if shows(block, i, j)
            ]
            assert len(pairs) == block.pairs
            # Kernels take no bound below 0, and every row and key is in some pair.
            assert all(side is None or side >= 0 for side in block.window)
            assert {i for i, _ in pairs} == {held[rank][row] for row in block.queries}
            assert {j for _, j in pairs} == {held[block.source][key] for key in block.keys}
            found += pairs
    assert sorted(found) == [(i, j) for i, j in visible(mask, seq_len).nonzero().tolist()]


def test_a_window_is_one_block_for_each_pair_of_stretches() -> None:
    plan = plan_attention(MaskSpec(causal=True, window=1000), Contiguous(), 4, 32_000)
    for rank in range(1, 4):
        blocks = part_of(plan, rank, windows=True).blocks
        (own,), (before,) = blocks[rank], blocks[rank - 1]
        assert (own.kind, own.window, len(own.queries)) == ("window", (999, 0), 8000)
        assert (before.kind, before.window) == ("window", (0, None))
        assert (len(before.queries), len(before.keys)) == (999, 999)
        assert len(part_of(plan, rank).blocks[rank]) > 1


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "windows"),
    [
        ("auto", "cpu", torch.float32, False),
        ("eager", "cpu", torch.float32, True),
        ("auto", "cuda", torch.bfloat16, True),
        ("varlen", "cuda", torch.bfloat16, True),
        ("auto", "cuda", torch.float32, False),
        ("flex", "cuda", torch.float32, True),
    ],
)
def test_windows_go_whole_to_backends_that_take_them(
    backend: str, device: str, dtype: torch.dtype, windows: bool
) -> None:
    plan = plan_attention(WINDOWED, None, 2, 64, head_size=64)
    chosen = choose_backends(backend, plan, torch.device(device), dtype, ScoreOptions())
    assert chosen.windows is windows


def windowed(q: Tensor, k: Tensor, scale: float | None, left: int, right: int) -> ScoreOptions:
    bounds = (None if left < 0 else left), (None if right < 0 else right)
    return ScoreOptions(scale=scale, window=bounds)


def split(x: Tensor, edges: Tensor | None) -> list[Tensor]:
    """Return ``[batch, heads, rows, size]`` of each stretch, or of a batch, rows first."""
    if edges is None:
        return [x.transpose(1, 2)]
    return [x[a:b].transpose(0, 1).unsqueeze(0) for a, b in pairwise(edges.tolist())]


def varlen(q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: Any, **window: int) -> Any:
    """Stand in for the kernel, in both of its forms."""
    edges_q, edges_k, *_ = given
    options = windowed(q, k, scale, window["window_size_left"], window["window_size_right"])
    parts = zip(*map(split, (q, k, v), (edges_q, edges_k, edges_k)), strict=True)
    done = [EAGER.forward(*part, causal=False, options=options) for part in parts]
    if edges_q is None:
        ((out, lse),) = done
        return out.transpose(1, 2), lse, None
    out = torch.cat([out[0] for out, _ in done], 1).transpose(0, 1)
    return out.contiguous(), torch.cat([lse[0] for _, lse in done], 1), None


def varlen_backward(*given: Any, scale: Any, **window: int) -> Any:
    """Stand in for the kernel, in both of its forms."""
    grad, q, k, v, out, lse, edges_q, edges_k, *_ = given
    options = windowed(q, k, scale, window["window_size_left"], window["window_size_right"])
    edges = (edges_q, edges_q, edges_k, edges_k, edges_q)
    parts = list(map(split, (grad, q, k, v, out), edges))
    sums = [lse]
    if edges_q is not None:
        sums = [lse[:, a:b].unsqueeze(0) for a, b in pairwise(edges_q.tolist())]
    done = [
        EAGER.backward(*part, causal=False, options=options)
        for part in zip(*parts, sums, strict=True)
    ]
    if edges_q is None:
        return [x.transpose(1, 2) for x in done[0]]
    return [torch.cat([x[0] for x in xs], 1).transpose(0, 1) for xs in zip(*done, strict=True)]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "_varlen", varlen)
    monkeypatch.setattr(_torch, "_varlen_backward", varlen_backward)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("window", [(3, 0), (0, None), (None, 2), (2, 4)])
@pytest.mark.parametrize("value_size", [8, 4])
def test_the_flash_kernels_are_given_a_windows_bounds(window: Any, value_size: int) -> None:
    rows, keys = [5, 6], [7, 6]
    q, _, _, _ = inputs(4, 2, 11)
    _, k, _, _ = inputs(4, 2, 13, seed=1)
    _, v, _, _ = inputs(4, 2, 13, seed=2, size=value_size)
    _, _, _, grad = inputs(4, 2, 11, seed=3, size=value_size)
    options = ScoreOptions(scale=0.3, window=window)
    out, lse = VARLEN.forward_packed(q, k, v, rows, keys, causal=False, options=options)
    grads = VARLEN.backward_packed(
        grad, q, k, v, out, lse, rows, keys, causal=False, options=options
    )
    parts = zip(*(x.split(n, 2) for x, n in ((q, rows), (k, keys), (v, keys))), strict=True)
    for i, part in enumerate(parts):
        mine, theirs = (slice(sum(n[:i]), sum(n[: i + 1])) for n in (rows, keys))
        right = EAGER.forward(*part, causal=False, options=options)
        given: Any = grad[:, :, mine], *part, *right
        expected = EAGER.backward(*given, causal=False, options=options)
        found: list[Tensor] = [out[:, :, mine], lse[:, :, mine], grads[0][:, :, mine]]
        found += [x[:, :, theirs] for x in grads[1:]]
        for x, y in zip(found, (*right, *expected), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    # one block, of all rows of the batch
    kernels = FusedBackend("cpu", {"cpu": SDPA.kernels["cuda"]})
    for backend in (kernels, EAGER):
        out, lse = backend.forward(q, k, v, causal=False, options=options)
        grads = backend.backward(grad, q, k, v, out, lse, causal=False, options=options)
        if backend is kernels:
            found = [out, lse, *grads]
    for x, y in zip(found, (out, lse, *grads), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", [SDPA, VARLEN], ids=lambda x: x.name)
def test_torchs_own_shape_rules_accept_windows(backend: FusedBackend) -> None:
    options = ScoreOptions(window=(5, 0))
    with FakeTensorMode():
        q = torch.empty(2, 8, 40, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 2, 24, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = backend.forward(q, k, k, causal=False, options=options)
        grads = backend.backward(q, q, k, k, out, lse, causal=False, options=options)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
        given: Any = q, k, k, [10, 30], [14, 10]
        out, lse = VARLEN.forward_packed(*given, causal=False, options=options)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])


@pytest.mark.filterwarnings("ignore")  # flex_attention warns where it is not compiled
def test_flex_attention_takes_windows_and_functions() -> None:
    q, k, v, _ = inputs(4, 2, 24, dtype=torch.float32)
    q, batch = q[:, :, :20], torch.arange(2).view(-1, 1, 1)
    places = Places(
        batch.expand(-1, 1, 20),
        torch.arange(40, 60).expand(2, 1, -1),
        torch.arange(30, 54).expand(2, 1, -1),
        torch.arange(4, 8),
    )

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx - h + b) & (q_idx != 45)

    for options in (
        ScoreOptions(window=(6, 1)),
        ScoreOptions(mask_mod=function, places=places, softcap=2.0),
    ):
        found = FlexBackend().forward(q, k, v, causal=False, options=options)
        expected = EAGER.forward(q, k, v, causal=False, options=options)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore")  # flex_attention warns where it is not compiled
def test_a_compiled_flex_attention_serves_all_lengths_and_windows() -> None:
    """With a program for each window, the compiler would soon reach its limit and give up."""
    counter: Any = CompileCounter()
    compiled: Any = (torch.compile(x, backend=counter, dynamic=True) for x in _plain())
    attention: Any = partial(_attended, *compiled)
    for rows, keys, window in (
        (24, 24, (6, 1)),
        (20, 24, (3, 0)),
        (33, 57, (9, 4)),
        (7, 30, (0, 5)),
    ):
        q, k, v, _ = inputs(4, 2, 60, dtype=torch.float32)
        q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
        options = ScoreOptions(window=window)
        expected = EAGER.forward(q, k, v, causal=False, options=options)
        for mine, right in zip(attention(q, k, v, False, options), expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)
    assert counter.frame_count <= 3  # one of each function, and one for as many rows as keys


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_mask_function_that_does_not_compile_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's compiler is replaced by one that refuses everything."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise compiler_errors()[0]("no kernel for this")

    q, k, v, _ = inputs(4, 2, 24, dtype=torch.float32)
    options = ScoreOptions(window=(6, 1))
    monkeypatch.setattr(_flex, "_TILE", 1)
    monkeypatch.setattr(_flex, "_FAILED", set())
    monkeypatch.setattr(_flex, "_compiled", lambda: (refuse, refuse))
    monkeypatch.setattr(_flex, "_compiles_on", lambda device: True)
    with pytest.warns(UserWarning, match="runs uncompiled .*float32 here: no kernel for this"):
        found = FlexBackend().forward(q, k, v, causal=False, options=options)
    expected = EAGER.forward(q, k, v, causal=False, options=options)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)
    assert {(id(None), torch.float32)} == _flex._FAILED


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_blocks_beyond_the_compilers_limit_run_uncompiled_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself, the compiler would write one line to its log, and hold all scores from then on."""
    compiled = [torch.compile(x, backend="eager", dynamic=True) for x in _plain()]
    monkeypatch.setattr(_flex, "_TILE", 1)
    monkeypatch.setattr(_flex, "_FAILED", set())
    monkeypatch.setattr(_flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(_flex, "_compiles_on", lambda device: True)
    options = ScoreOptions(window=(6, 1))
    q, k, v, _ = inputs(4, 2, 24, dtype=torch.float32)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        mock.patch.object(_torch, "PROGRAMS", 1),
        pytest.warns(UserWarning, match="runs uncompiled .*raise torch._dynamo.config.recompile"),
    ):
        found = FlexBackend().forward(q, k, v, causal=False, options=options)
    expected = EAGER.forward(q, k, v, causal=False, options=options)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)
