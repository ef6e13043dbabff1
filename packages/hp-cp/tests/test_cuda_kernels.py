"""What CUDA kernels are given and what is made of their results, as far as a CPU can tell."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_cp import ScoreOptions, _torch
from hp_cp._torch import BackwardInputs
from hp_cp.kernels._eager import EAGER
from hp_cp.kernels._sdpa import CUDNN, EFFICIENT, SDPA, FusedBackend
from hp_cp.kernels._varlen import VARLEN

from .strategies import inputs

PLAIN = ScoreOptions()
ALL = [
    (SDPA, torch.bfloat16),
    (SDPA, torch.float16),
    (EFFICIENT, torch.float32),
    (EFFICIENT, torch.bfloat16),
    (CUDNN, torch.bfloat16),
    (VARLEN, torch.bfloat16),
]


@pytest.mark.parametrize("value_size", [64, 48, 128])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(("backend", "dtype"), ALL, ids=lambda x: getattr(x, "name", str(x)))
def test_torchs_own_shape_rules_accept_the_calls(
    backend: FusedBackend, dtype: torch.dtype, kv_heads: int, value_size: int
) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 8, 40, 64, dtype=dtype, device="cuda")
        k = torch.empty(2, kv_heads, 24, 64, dtype=dtype, device="cuda")
        v = torch.empty(2, kv_heads, 24, value_size, dtype=dtype, device="cuda")
        out, lse = backend.forward(q, k, v, causal=False, options=PLAIN)
        grad = torch.empty_like(out)
        grads = backend.backward(grad, q, k, v, out, lse, causal=False, options=PLAIN)
    assert (out.shape, out.dtype, out.device.type) == ((2, 8, 40, value_size), dtype, "cuda")
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


def test_torchs_own_shape_rules_accept_stretches_of_rows() -> None:
    with FakeTensorMode():
        q = torch.empty(50, 8, 64, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(70, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        edges = torch.empty(4, dtype=torch.int32, device="cuda")
        stretches: Any = (edges, edges), (30, 40), True, None
        out, lse = _torch.varlen_cuda(q, k, v, *stretches)
        grads = _torch.varlen_cuda_backward(
            BackwardInputs(q, q, k, v, out, lse, True, None), *stretches[:2]
        )
    assert (out.shape, lse.shape) == (q.shape, (8, 50))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, p: float, causal: bool, **_: Any
) -> Any:
    """Stand in for the kernel: equal heads, and a log-sum-exp of whole groups of rows."""
    assert (with_lse, p, q.shape[1]) == (True, 0.0, k.shape[1])
    out, lse = _torch.flash_cpu(q, k, v, causal, None)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), None, None


def efficient_backward(*given: Any, scale: float | None) -> Any:
    """Stand in for the kernel, which wants the log-sum-exp as its forward made it."""
    grad, q, k, v, _, out, lse, _, _, p, wanted, causal = given
    assert (p, wanted, lse.shape[2] % 32, q.shape[1]) == (0.0, [True] * 3 + [False], 0, k.shape[1])
    assert bool((lse[:, :, q.shape[2] :] == torch.inf).all())
    lse = lse[:, :, : q.shape[2]]
    return *_torch.flash_cpu_backward(BackwardInputs(grad, q, k, v, out, lse, causal, scale)), None


@pytest.mark.parametrize("causal", [True, False])
def test_equal_heads_and_padded_sums_give_the_results_of_grouped_heads(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, grad = inputs(4, 2, 40)
    monkeypatch.setattr(_torch, "_efficient", efficient)
    monkeypatch.setattr(_torch, "_efficient_backward", efficient_backward)
    out, lse = _torch.efficient_cuda(q, k, v, causal, None)
    expected = _torch.flash_cpu(q, k, v, causal, None)
    grads = _torch.efficient_cuda_backward(BackwardInputs(grad, q, k, v, out, lse, causal, None))
    grads_expected = _torch.flash_cpu_backward(
        BackwardInputs(grad, q, k, v, *expected, causal, None)
    )
    for mine, right in zip((out, lse, *grads), (*expected, *grads_expected), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)


def stretches_of(x: Tensor, edges: Tensor) -> list[Tensor]:
    """Return ``[1, heads, rows, size]`` of each stretch of ``[rows, heads, size]``."""
    return [x[a:b].transpose(0, 1).unsqueeze(0) for a, b in pairwise(edges.tolist())]


def varlen(q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: float | None) -> Any:
    """Stand in for the kernel: stretch by stretch."""
    edges_q, edges_k, longest_q, longest_k, p, causal, _ = given
    assert (edges_q.dtype, edges_k.dtype, p) == (torch.int32, torch.int32, 0.0)
    assert (longest_q, longest_k) == tuple(int(x.diff().max()) for x in (edges_q, edges_k))
    parts = zip(*map(stretches_of, (q, k, v), (edges_q, edges_k, edges_k)), strict=True)
    done = [_torch.flash_cpu(a, b, c, causal, scale) for a, b, c in parts]
    out = torch.cat([out[0] for out, _ in done], 1).transpose(0, 1)
    return out.contiguous(), torch.cat([lse[0] for _, lse in done], 1), None


def varlen_backward(*given: Any, scale: float | None) -> Any:
    """Stand in for the kernel: stretch by stretch."""
    grad, q, k, v, out, lse, edges_q, edges_k, _, _, _, causal, _, _ = given
    edges = (edges_q, edges_q, edges_k, edges_k, edges_q)
    split = list(map(stretches_of, (grad, q, k, v, out), edges))
    sums = [lse[:, a:b].unsqueeze(0) for a, b in pairwise(edges_q.tolist())]
    done = []
    for g, a, b, c, o, sums_of in zip(*split, sums, strict=True):
        done.append(
            _torch.flash_cpu_backward(BackwardInputs(g, a, b, c, o, sums_of, causal, scale))
        )
    return [torch.cat([x[0] for x in xs], 1).transpose(0, 1) for xs in zip(*done, strict=True)]


def test_stretches_of_each_batch_row_are_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "_varlen", varlen)
    monkeypatch.setattr(_torch, "_varlen_backward", varlen_backward)
    rows, keys = [5, 1, 9], [7, 2, 3]
    q, _, _, grad = inputs(4, 2, 15)
    _, k, v, _ = inputs(4, 2, 12, seed=1)
    out, lse = VARLEN.forward_packed(
        q, k, v, rows, keys, causal=False, options=ScoreOptions(scale=0.3)
    )
    grads = VARLEN.backward_packed(
        grad, q, k, v, out, lse, rows, keys, causal=False, options=ScoreOptions(scale=0.3)
    )
    done = []
    stretches = (x.split(n, 2) for x, n in ((grad, rows), (q, rows), (k, keys), (v, keys)))
    for g, a, b, c in zip(*stretches, strict=True):
        result = _torch.flash_cpu(a, b, c, False, 0.3)
        finished = BackwardInputs(g, a, b, c, *result, False, 0.3)
        done.append((*result, *_torch.flash_cpu_backward(finished)))
    for mine, right in zip((out, lse, *grads), zip(*done, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(right, 2), rtol=0, atol=1e-13)


@pytest.mark.parametrize("value_size", [4, 12])
def test_stretches_with_values_of_another_size_are_those_of_the_definition(
    value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "_varlen", varlen)
    monkeypatch.setattr(_torch, "_varlen_backward", varlen_backward)
    rows, keys = [5, 4], [7, 2]
    q, _, _, _ = inputs(4, 2, 9)
    _, k, _, _ = inputs(4, 2, 9, seed=1)
    _, v, _, grad = inputs(4, 2, 9, seed=2, size=value_size)
    out, lse = VARLEN.forward_packed(q, k, v, rows, keys, causal=False, options=PLAIN)
    given = grad, q, k, v, out, lse
    grads = VARLEN.backward_packed(*given, rows, keys, causal=False, options=PLAIN)
    start = first = 0
    for length, count in zip(rows, keys, strict=True):
        mine, theirs = slice(start, start + length), slice(first, first + count)
        part = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        right, _ = EAGER.forward(*part, causal=False, options=PLAIN)
        torch.testing.assert_close(out[:, :, mine], right, rtol=0, atol=1e-13)
        rest = out[:, :, mine], lse[:, :, mine]
        expected = EAGER.backward(grad[:, :, mine], *part, *rest, causal=False, options=PLAIN)
        for found, other, at in zip(grads, expected, (mine, theirs, theirs), strict=True):
            torch.testing.assert_close(found[:, :, at], other, rtol=0, atol=1e-13)
        start, first = start + length, first + count


@pytest.mark.parametrize(("batch", "stretches"), [(1, 70_000), (2, 40_000)])
def test_more_stretches_than_a_grid_has_places_are_several_launches(
    batch: int, stretches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[int] = []

    def ones(q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: float | None) -> Any:
        """Stand in for the kernel, for stretches of one row each."""
        for edges in given[:2]:
            assert bool((edges.diff() == 1).all())
            assert (edges[0].item(), edges[-1].item()) == (0, q.shape[0])
        launches.append(len(given[0]) - 1)
        return v.clone(), (q * k).sum(-1).transpose(0, 1), None

    def ones_backward(*given: Any, scale: float | None) -> Any:
        """Stand in for the kernel: sums in which every tensor that it gets can be seen."""
        grad, q, k, v, out, lse, edges, *_ = given
        launches.append(len(edges) - 1)
        return grad + lse.transpose(0, 1)[:, :, None], q + out, k + v

    monkeypatch.setattr(_torch, "_varlen", ones)
    monkeypatch.setattr(_torch, "_varlen_backward", ones_backward)
    q, k, v, grad = inputs(2, 2, stretches, batch=batch, size=2)
    lengths = [1] * stretches
    out, lse = VARLEN.forward_packed(q, k, v, lengths, lengths, causal=True, options=PLAIN)
    right = v, (q * k).sum(-1)
    assert all(map(torch.equal, (out, lse), right))
    grads = VARLEN.backward_packed(
        grad, q, k, v, out, lse, lengths, lengths, causal=True, options=PLAIN
    )
    expected = grad + lse.unsqueeze(-1), q + out, k + v
    assert all(map(torch.equal, grads, expected))
    assert launches == [65_535, batch * stretches - 65_535] * 2


def test_one_key_goes_to_flash_which_cudnn_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []

    def note(name: str, kernel: Any, key: int) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            given.append((name, args[key].shape[2]))
            return kernel(*args, **options)

        return noted

    for name in ("_cudnn", "_flash"):
        monkeypatch.setattr(_torch, name, note(name, getattr(_torch, name), 1))
        backward = f"{name}_backward"
        monkeypatch.setattr(_torch, backward, note(backward, getattr(_torch, backward), 2))
    with FakeTensorMode():
        q = torch.empty(2, 8, 40, 64, dtype=torch.bfloat16, device="cuda")
        for keys in (1, 2):
            k = torch.empty(2, 8, keys, 64, dtype=torch.bfloat16, device="cuda")
            out, lse = CUDNN.forward(q, k, k, causal=False, options=PLAIN)
            CUDNN.backward(q, q, k, k, out, lse, causal=False, options=PLAIN)
    assert given == [("_flash", 1), ("_flash_backward", 1), ("_cudnn", 2), ("_cudnn_backward", 2)]


@pytest.mark.parametrize("rows_first", [True, False])
def test_cudnns_backward_is_given_dense_outputs_in_the_order_of_the_queries(
    rows_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []

    def noted(*args: Any, **_: Any) -> Any:
        given.extend(args[:6])
        return args[1:4]

    monkeypatch.setattr(_torch, "_cudnn_backward", noted)
    whole = torch.randn(1, 60, 8, 16).transpose(1, 2)  # [batch, heads, rows, size]
    part = whole[:, :, 20:40]
    q = part if rows_first else part.contiguous()
    lse = torch.randn(1, 20, 8).transpose(1, 2)
    _torch.cudnn_cuda_backward(BackwardInputs(part, q, q, q, part, lse, False, None))
    grad, _, _, _, out, sums = given
    assert grad.stride()[1:] == out.stride()[1:] == q.stride()[1:]
    assert sums.is_contiguous()
    assert [x.data_ptr() == part.data_ptr() for x in (grad, out)] == [rows_first] * 2
