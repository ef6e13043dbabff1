"""A backend is an object that a caller can bring along."""

import pytest
import torch
from torch import Tensor

from hp_cp import AttentionBackend, BackendError, MaskSpec, Zigzag, context_parallel_attention
from hp_cp._bands import Kernel
from hp_dtensor import SimulatedCollectives, SimulatedWorld

from .strategies import dense_attention, inputs, leaves, with_gradients

CAUSAL = MaskSpec(causal=True)


class PlainBackend:
    """Attention by its definition, and the gradients of softmax by hand."""

    name = "plain"

    def __init__(self, kinds: tuple[Kernel, ...] = ("full", "causal")) -> None:
        self.kinds = kinds
        self.calls = 0

    def supports(self, kind: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
        """Refuse kinds that are not in the list."""
        return None if kind in self.kinds else f"it computes {self.kinds} only"

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
        """Return scaled and masked scores."""
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf) if causal else scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        self.calls += 1
        scores = self.scores(q, k, causal, scale)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv from the global out and lse."""
        weights = (self.scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        dscores = weights * (grad @ v.transpose(-1, -2) - delta)
        dscores *= q.shape[-1] ** -0.5 if scale is None else scale
        return dscores @ k, dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def test_a_backend_of_ones_own_computes_the_blocks() -> None:
    q, k, v, grad = inputs(2, 2, 12)
    backend: AttentionBackend = PlainBackend()

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        mine = list(Zigzag().indices(2, 12)[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            layout=Zigzag(),
            backend=backend,
            collectives=door,
        )
        return with_gradients(out, local, grad[:, :, mine])

    whole = leaves(q, k, v)
    expected = with_gradients(dense_attention(*whole, CAUSAL), whole, grad)
    for i, results in enumerate(SimulatedWorld(2).run(rank)):
        for result, reference in zip(results, expected, strict=True):
            right = reference[:, :, list(Zigzag().indices(2, 12)[i])]
            torch.testing.assert_close(result, right, rtol=0, atol=1e-13)
    assert isinstance(backend, PlainBackend)
    assert backend.calls == 4


@pytest.mark.parametrize(("kinds", "lacking"), [(("full",), "causal"), (("causal",), "full")])
def test_a_backend_that_lacks_a_kind_of_block_is_refused(
    kinds: tuple[Kernel, ...], lacking: str
) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    q, k, v, _ = inputs(2, 2, 12)
    with pytest.raises(BackendError, match=f"'plain' cannot compute {lacking} attention .* only"):
        context_parallel_attention(
            q,
            k,
            v,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            backend=PlainBackend(kinds),
            collectives=door,
        )
