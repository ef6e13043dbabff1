"""What a trainer reads from packed data, and what a call leaves of what it was given."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
    shard_sequence,
    shift_labels,
    unshard_sequence,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import dense_attention, inputs, leaves

SEQ_LEN = 23
PACKED = MaskSpec(causal=True, cu_seqlens=(0, 5, 6, 17, 23))
TOKENS = torch.randint(11, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
LABELS = shift_labels(TOKENS, PACKED)
TABLES = inputs(1, 1, 11, size=8)[0][:, 0]  # of inputs and of outputs, [2, 11, 8]


def log_probs(tokens: Tensor, labels: Tensor, tables: Tensor, attention: Any) -> Tensor:
    """Return the log-probability of each label, 0 where it is ignored."""
    x = tables[0][tokens].unflatten(-1, (2, 4)).transpose(1, 2)
    logits = attention(x).transpose(1, 2).flatten(2) @ tables[1].T
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view(labels.shape)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), PerDocument(), Greedy(2)], ids=repr)
@pytest.mark.parametrize("degree", [1, 2])
def test_log_probs_of_packed_tokens_are_those_of_one_process_on_every_rank(
    layout: Layout, degree: int
) -> None:
    weights = torch.randn(2, SEQ_LEN, generator=torch.Generator().manual_seed(4)).double()

    def rank(_: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        mesh = door.mesh((4,), ("cp",))
        tables = TABLES.clone().requires_grad_()
        mine, labels = shard_sequence((TOKENS, LABELS), mesh, layout, 1, PACKED)

        def attention(x: Tensor) -> Tensor:
            return context_parallel_attention(
                x,
                x,
                x,
                mesh,
                mask=PACKED,
                layout=layout,
                ulysses_degree=degree,
                seq_len=SEQ_LEN,
                collectives=door,
            )

        local = log_probs(mine, labels, tables, attention)
        whole = unshard_sequence(local, mesh, layout, 1, PACKED, collectives=door)
        # every rank has the whole sum, so each counts as one part of four
        (grad,) = torch.autograd.grad((whole * weights).sum() / 4, tables)
        return whole.detach(), grad

    tables = TABLES.clone().requires_grad_()
    expected = log_probs(TOKENS, LABELS, tables, lambda x: dense_attention(x, x, x, PACKED))
    (grad,) = torch.autograd.grad((expected * weights).sum(), tables)
    results = SimulatedWorld(4).run(rank)
    for whole, _ in results:
        torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(sum(part for _, part in results), grad, rtol=0, atol=1e-12)


class Counting(Contiguous):
    """Counts how often it is asked."""

    __slots__ = ("asked",)
    asked: list[int]

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return those of `Contiguous`."""
        self.asked.append(seq_len)
        return super().chunks(n, seq_len, mask)


def test_repeated_calls_ask_the_layout_once_and_change_nothing_that_they_are_given() -> None:
    layout = Counting()
    object.__setattr__(layout, "asked", [])
    tensors = inputs(4, 2, 8)

    def rank(rank: int, door: SimulatedCollectives) -> None:
        mesh = door.mesh((2,), ("cp",))
        tree: dict[str, Any] = {"q": tensors[0], "kv": [tensors[1], tensors[2]]}
        for _ in range(2):
            mine = shard_sequence(tree, mesh, layout, 2)
            local = leaves(mine["q"], *mine["kv"])
            copies = [x.detach().clone() for x in local]
            out = context_parallel_attention(
                *local, mesh, mask=MaskSpec(causal=True), layout=layout, collectives=door
            )
            unshard_sequence(out, mesh, layout, 2, collectives=door).sum().backward()
            assert all(map(torch.equal, local, copies))
            assert [x._version for x in local] == [0, 0, 0]
        assert list(tree) == ["q", "kv"]
        assert tree["q"] is tensors[0]
        assert [id(x) for x in tree["kv"]] == [id(tensors[1]), id(tensors[2])]

    for _ in range(2):
        SimulatedWorld(2).run(rank)
    # once with the mask of the attention and once without any, on whichever rank came first
    assert 2 <= len(layout.asked) <= 4
