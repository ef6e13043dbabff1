"""The kernel in torch operations equals attention by its definition, tile by tile."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import InputError, ScoreOptions
from hp_cp.kernels import _eager
from hp_cp.kernels._eager import EAGER
from hp_cp.kernels._flex import FlexBackend
from hp_cp.kernels._sdpa import SDPA

from .strategies import leaves

OPTIONS = (ScoreOptions(), ScoreOptions(scale=0.7), ScoreOptions(scale=0.7, softcap=1.5))


def defined(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: ScoreOptions) -> Tensor:
    """Return attention by its definition, of ``[batch, heads, rows, size]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda elements: monkeypatch.setattr(_eager, "_ELEMENTS", elements)


@settings(deadline=None, max_examples=120)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1)]),
    batch=st.integers(0, 3),
    rows=st.integers(0, 9),
    keys=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    causal=st.booleans(),
    options=st.sampled_from(OPTIONS),
    elements=st.sampled_from([1, 16, 100, 2**22]),
)
def test_tiles_of_any_size_give_the_attention_and_its_gradients(
    heads: tuple[int, int],
    batch: int,
    rows: int,
    keys: int,
    sizes: tuple[int, int],
    causal: bool,
    options: ScoreOptions,
    elements: int,
) -> None:
    keys = rows if causal else keys
    q, k = random(batch, heads[0], rows, sizes[0]), random(batch, heads[1], keys, sizes[0])
    v, grad = random(batch, heads[1], keys, sizes[1]), random(batch, heads[0], rows, sizes[1])
    local = leaves(q, k, v)
    expected = defined(*local, causal, options)
    gradients = torch.autograd.grad(expected, local, grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_eager, "_ELEMENTS", elements)
        out, lse = EAGER.forward(q, k, v, causal=causal, options=options)
        shares = EAGER.backward(grad, q, k, v, out, lse, causal=causal, options=options)
    for mine, right in zip((out, *shares), (expected, *gradients), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_exact_as_the_fused_kernel(dtype: torch.dtype, causal: bool) -> None:
    options = ScoreOptions()
    q, k, v, grad = (random(2, h, 64, 32).roll(h + i, 2) for i, h in enumerate((4, 2, 2, 4)))
    local = leaves(q, k, v)
    exact = defined(*local, causal, options)
    gradients = torch.autograd.grad(exact, local, grad)
    grad, q, k, v = (x.to(dtype) for x in (grad, q, k, v))
    errors = []
    for backend in (EAGER, SDPA):
        out, lse = backend.forward(q, k, v, causal=causal, options=options)
        found = backend.backward(grad, q, k, v, out, lse, causal=causal, options=options)
        assert [x.dtype for x in (out, *found)] == [dtype] * 4
        assert lse.dtype == torch.float32
        pairs = zip((out, *found), (exact, *gradients), strict=True)
        errors.append([(a - b).square().mean().sqrt().item() for a, b in pairs])
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= 1.5 * theirs


def test_scores_of_a_tile_are_all_that_is_held(tile: Callable[[int], None]) -> None:
    shapes: set[tuple[int, ...]] = set()
    tile(2 * 8 * 32)
    for each in _eager._tiles(random(5, 8, 33, 4), random(5, 2, 32, 4), (None, None)):
        rows = random(5, 8, 33, 1)[each.rows]
        shapes.add(tuple(rows.shape[:3]))
    assert shapes == {(1, 8, 2), (1, 8, 1)}
    tile(3 * 8 * 33 * 32)
    tiles = _eager._tiles(random(5, 8, 33, 4), random(5, 2, 32, 4), (None, None))
    assert [each.rows[0] for each in tiles] == [slice(0, 3), slice(3, 5)]


@pytest.mark.filterwarnings("ignore")  # flex_attention warns where it is not compiled
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_bounds_scores_alike(causal: bool) -> None:
    q, k, v = (random(2, h, 16, 8).float() for h in (4, 2, 2))
    options = ScoreOptions(softcap=0.5)
    found = FlexBackend().forward(q, k, v, causal=causal, options=options)
    expected = EAGER.forward(q, k, v, causal=causal, options=options)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [0, -1.0, float("inf"), float("nan"), "30", True])
def test_a_softcap_that_is_no_bound_is_refused(softcap: float) -> None:
    with pytest.raises(InputError, match=r"softcap=.* is no finite number above 0; pass a float"):
        ScoreOptions(softcap=softcap)
