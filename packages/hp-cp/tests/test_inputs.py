"""Any order of dims, any scale, autocast, compiled callers, layers with several masks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import (
    Auto,
    ContextParallel,
    Greedy,
    InputError,
    MaskSpec,
    PerDocument,
    Pinned,
    Zigzag,
    context_parallel_attention,
    shard_sequence,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh, dense_attention, inputs, leaves, single, with_gradients

CAUSAL = MaskSpec(causal=True)


def other_dims(
    rank: int, n: int, degree: int, seq_dim: int, head_dim: int, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    back = [order.index(dim) for dim in range(4)]
    q, k, v, grad = (x.chunk(n, 2)[rank].permute(back) for x in tensors)
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=CAUSAL,
        ulysses_degree=degree,
        scale=0.3,
        seq_dim=seq_dim,
        head_dim=head_dim,
    )
    return [x.permute(order) for x in with_gradients(out, local, grad)]


@pytest.mark.nccl
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("seq_dim", "head_dim"), [(1, 2), (0, 2), (0, 1)])
def test_any_order_of_dims_and_any_scale(
    ranks: Any, degree: int, seq_dim: int, head_dim: int
) -> None:
    q, k, v, grad = inputs(4, 2, 16, batch=3)
    per_rank = ranks(2).run(other_dims, 2, degree, seq_dim, head_dim, (q, k, v, grad))
    whole = leaves(q, k, v)
    reference = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    expected = with_gradients(reference, whole, grad)
    for parts, right in zip(zip(*per_rank, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right, rtol=0, atol=1e-13)


def under_autocast(rank: int, degree: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in tensors)
    local = leaves(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*local, cp_mesh(2), mask=CAUSAL, ulysses_degree=degree)
    return with_gradients(out, local, grad.to(out.dtype))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_as_it_casts_sdpa(ranks: Any, dtype: torch.dtype, degree: int) -> None:
    tensors = inputs(2, 2, 8, dtype=dtype)
    whole = leaves(*tensors[:3])
    with torch.autocast("cpu", torch.bfloat16):
        reference = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = with_gradients(reference, whole, tensors[3].to(reference.dtype))
    parts = zip(*ranks(2).run(under_autocast, degree, tensors), strict=True)
    # Values up to 4 have a last place of 2 eps; both sides round, to q, k, v's and to this dtype.
    atol = 1e-13 if dtype == torch.float64 else 4 * torch.finfo(torch.bfloat16).eps
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(part, 2), right, rtol=0, atol=atol)


class Core(torch.nn.Module):
    """A core attention without weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        """Return the attention."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def compiled(rank: int, degree: int, lengths: list[int]) -> list[list[Tensor]]:
    """Return the results of a caller as it is and compiled, for every mask and length in turn."""
    mesh = cp_mesh(2)
    style = ContextParallel(
        seq_dim=2, head_dim=1, ulysses_degree=degree, mask=MaskSpec(causal=True, window=3)
    )
    core = style.apply(Core(), mesh)

    def caller(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        out = context_parallel_attention(2 * q, k, v, mesh, mask=mask, ulysses_degree=degree)
        result: Tensor = core(out, k, v) * 3
        return result

    results = []
    for call in (caller, torch.compile(caller, backend="eager")):
        for length in lengths:
            packed = MaskSpec(causal=True, cu_seqlens=(0, 3, length))
            for mask in (MaskSpec(causal=True), MaskSpec(causal=True, window=2), packed):
                q, k, v, grad = (x.chunk(2, 2)[rank] for x in inputs(4, 2, length))
                local = leaves(q, k, v)
                results.append(with_gradients(call(*local, mask), local, grad))
    return results


@pytest.mark.parametrize("degree", [1, 2])
def test_a_compiled_caller_gets_the_same_bits_whatever_the_mask_and_length(
    ranks: Any, degree: int
) -> None:
    for results in ranks(2).run(compiled, degree, [16, 12, 20]):
        plain, traced = results[: len(results) // 2], results[len(results) // 2 :]
        for expected, found in zip(plain, traced, strict=True):
            assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("scale", ["0.1", torch.tensor(0.3), float("nan"), True])
def test_a_scale_that_is_no_number_is_refused(scale: Any) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    mesh = door.mesh((2,), ("cp",))
    q, k, v, _ = inputs(2, 2, 8)
    with pytest.raises(InputError, match=r"scale=.* is no finite number"):
        context_parallel_attention(q, k, v, mesh, mask=CAUSAL, scale=scale, collectives=door)


def test_layers_with_other_masks_share_the_cut_of_one() -> None:
    cut_by, seq_len = CAUSAL, 37
    whole = inputs(2, 2, seq_len)
    packed = MaskSpec(causal=False, cu_seqlens=(0, 20, 37))
    masks = [MaskSpec(causal=True, window=5), packed, cut_by]
    for layout in (Greedy(2), Greedy(8), Auto(), PerDocument()):
        pinned = Pinned(layout, cut_by)
        indices = layout.indices(3, seq_len, cut_by)
        for mask in masks:

            def rank(
                rank: int, door: SimulatedCollectives, mask: MaskSpec = mask, pinned: Any = pinned
            ) -> list[Tensor]:
                mesh = door.mesh((3,), ("cp",))
                q, k, v, grad = shard_sequence(whole, mesh, pinned, 2)
                local = leaves(q, k, v)
                out = context_parallel_attention(
                    *local, mesh, mask=mask, layout=pinned, seq_len=seq_len, collectives=door
                )
                return with_gradients(out, local, grad)

            expected = single(whole, mask, dense_attention)
            for held, results in zip(indices, SimulatedWorld(3).run(rank), strict=True):
                for result, reference in zip(results, expected, strict=True):
                    right = reference[:, :, list(held)]
                    torch.testing.assert_close(result, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("parts", [(3, CAUSAL), (Zigzag(), (0, 8))])
def test_a_pinned_layout_wants_a_layout_and_a_mask(parts: Any) -> None:
    with pytest.raises(InputError, match="must be a"):
        Pinned(*parts)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_changes_no_operation_of_the_attention_itself(inside: bool) -> None:
    tensors = [5 * torch.randn(1, 2, 64, 16).bfloat16().float() for _ in range(3)]

    def results(autocast: bool, dtype: torch.dtype) -> list[Any]:
        def rank(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
            mine = [x.chunk(2, 2)[rank].to(dtype).clone().requires_grad_() for x in tensors]
            q, k, v = mine
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out, lse = context_parallel_attention(
                    q,
                    k,
                    v,
                    collectives.mesh((2,), ("cp",)),
                    mask=MaskSpec(causal=True),
                    softcap=50.0,
                    return_lse=True,
                    collectives=collectives,
                )
                if inside:
                    out.backward(torch.ones_like(out))
            if not inside:
                out.backward(torch.ones_like(out))
            grads = [x.grad for x in mine]
            return [out.detach(), lse, *(g.bfloat16() for g in grads if g is not None)]

        return SimulatedWorld(2).run(rank)

    pairs = zip(results(True, torch.float32), results(False, torch.bfloat16), strict=True)
    for found, expected in pairs:
        assert len(found) == 5
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dims", [(2, 1), (1, 2)])
@pytest.mark.parametrize("n", [1, 2])
def test_an_output_without_gradients_may_be_changed_in_place(n: int, dims: tuple[int, int]) -> None:
    seq_dim, head_dim = dims
    whole = torch.randn(1, 2, 16, 4).transpose(2, seq_dim).contiguous()

    def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
        x = whole.chunk(n, seq_dim)[rank]
        out = context_parallel_attention(
            x,
            x,
            x,
            collectives.mesh((n,), ("cp",)),
            mask=MaskSpec(causal=True),
            seq_dim=seq_dim,
            head_dim=head_dim,
            collectives=collectives,
        )
        expected, gate = out.clone().sum((0, 1, 2)), torch.ones(4, requires_grad=True)
        out.mul_(gate)
        (grad,) = torch.autograd.grad(out.sum(), gate)
        return grad - expected

    assert all(difference.abs().max() < 1e-5 for difference in SimulatedWorld(n).run(rank))


@pytest.mark.parametrize("options", [{}, {"schedule": "gather"}, {"ulysses_degree": 2}], ids=str)
def test_a_graph_of_gradients_is_refused_on_every_rank(options: Any) -> None:
    whole = inputs(2, 2, 16)[0]

    def rank(rank: int, collectives: SimulatedCollectives) -> None:
        weight = torch.ones(whole.shape[3], dtype=whole.dtype, requires_grad=True)
        x = whole.chunk(2, 2)[rank] * weight
        out = context_parallel_attention(
            x,
            x,
            x,
            collectives.mesh((2,), ("cp",)),
            mask=MaskSpec(causal=True),
            collectives=collectives,
            **options,
        )
        with pytest.raises(InputError, match=r"create_graph=True .* is not supported"):
            torch.autograd.grad(out.sum(), weight, create_graph=True)

    SimulatedWorld(2).run(rank)


@pytest.mark.parametrize("options", [{}, {"schedule": "gather"}, {"ulysses_degree": 2}], ids=str)
@pytest.mark.parametrize("dims", [(2, 1), (1, 2)])
def test_a_residual_may_be_added_in_place_to_an_output_as_to_that_of_sdpa(
    options: Any, dims: tuple[int, int]
) -> None:
    seq_dim, head_dim = dims
    whole = inputs(2, 2, 16)[0].transpose(2, seq_dim).contiguous()

    def rank(rank: int, collectives: SimulatedCollectives) -> None:
        x = whole.chunk(2, seq_dim)[rank].clone().requires_grad_()
        out = context_parallel_attention(
            x,
            x,
            x,
            collectives.mesh((2,), ("cp",)),
            mask=MaskSpec(causal=True),
            seq_dim=seq_dim,
            head_dim=head_dim,
            collectives=collectives,
            **options,
        )
        expected = out.detach() + x.detach()
        out += x
        assert torch.equal(out, expected)

    SimulatedWorld(2).run(rank)
