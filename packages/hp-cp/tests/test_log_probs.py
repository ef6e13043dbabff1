"""What a trainer reads from packed data, and what a call leaves of what it was given."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import (
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
    shard_sequence,
    shift_labels,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives
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


REDUCTIONS = {True: torch.sum, False: torch.mean}  # of gradients over ranks, by replicated_loss


@pytest.mark.parametrize("replicated_loss", REDUCTIONS)
@pytest.mark.parametrize("layout", [Contiguous(), Greedy(2)], ids=repr)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_loss_that_every_rank_computes_has_the_gradients_of_one_process(
    shape: tuple[int, ...], layout: Layout, replicated_loss: bool
) -> None:
    """Preference losses take sums of log-probabilities that no rank has whole."""

    def loss_of(whole: Tensor) -> Tensor:
        chosen, rejected = whole.sum(1)
        return -F.logsigmoid(0.1 * (chosen - rejected))

    def rank(_: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        mesh = door.mesh(shape, ("outer", "cp")[-len(shape) :])
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
                ulysses_degree=shape[-1] if len(shape) == 2 else 1,
                collectives=door,
            )

        whole = unshard_sequence(
            log_probs(mine, labels, tables, attention),
            mesh,
            layout,
            1,
            PACKED,
            replicated_loss=replicated_loss,
            collectives=door,
        )
        loss = loss_of(whole)
        (grad,) = torch.autograd.grad(loss, tables)
        return loss.detach(), grad

    tables = TABLES.clone().requires_grad_()
    expected = loss_of(
        log_probs(TOKENS, LABELS, tables, lambda x: dense_attention(x, x, x, PACKED))
    )
    (grad,) = torch.autograd.grad(expected, tables)
    losses, grads = zip(*SimulatedWorld(4).run(rank), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-13)
    reduced = REDUCTIONS[replicated_loss](torch.stack(grads), 0)
    torch.testing.assert_close(reduced, grad, rtol=0, atol=1e-13)


def test_the_backward_of_a_replicated_loss_communicates_nothing() -> None:
    def rank(_: int, door: SimulatedCollectives) -> tuple[bool, Tensor]:
        calls = RecordingCollectives(door)
        x, mesh = torch.ones(2, 3, requires_grad=True), door.mesh((2,), ("cp",))
        whole = unshard_sequence(
            [x, 2 * x], mesh, None, 1, seq_len=6, replicated_loss=True, collectives=calls
        )
        before = calls.by_call
        (grad,) = torch.autograd.grad(whole[0].sum() + whole[1].sum(), x)
        return calls.by_call == before, grad

    for nothing, grad in SimulatedWorld(2).run(rank):
        assert nothing
        assert torch.equal(grad, torch.full((2, 3), 3.0))


@pytest.mark.parametrize("given", [None, 1, "sum"])
def test_a_replicated_loss_that_is_no_bool_is_refused(given: Any) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2, timeout=0.1), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=f"replicated_loss={given!r} is no bool; use True if"):
        unshard_sequence(torch.ones(3), mesh, None, 0, seq_len=6, replicated_loss=given)


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
