"""The load-balancing loss of each sequence alone, however batches and sequences are cut."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import Axis, RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, ExpertParallel, MoE, TopKRouter
from hp_ep._losses import sequence_balancing_share

from .reference import assert_close, grads

COEFFICIENT = 0.3


def _build(score: Any = "softmax", **options: Any) -> MoE:
    router = TopKRouter(
        4, 6, 2, score=score, sequence_loss=COEFFICIENT, dtype=torch.float64, **options
    )
    layer = MoE(4, 5, 6, 2, router=router, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, 4, generator=generator, dtype=torch.float64)
    valid = torch.rand(4, 8, generator=generator) < 0.7
    valid[1, 4:] = False  # half of a sequence
    valid[2] = False  # a sequence of padding alone
    return x, valid


def _loss(layer: MoE, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean over sequences, written as the paper's equations 17 to 20 are."""
    router, total = layer.router, torch.zeros((), dtype=torch.float64)
    for i, sequence in enumerate(x):
        tokens = sequence if valid is None else sequence[valid[i]]
        if not len(tokens):
            continue
        logits = tokens @ router.weight.t()
        scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        chosen = scores.topk(2).indices
        for e in range(6):
            f = 6 / (2 * len(tokens)) * float((chosen == e).sum())
            total = total + f * shares[:, e].mean()
    return COEFFICIENT * total / len(x)


def _aside(layer: MoE, x: Tensor, valid: Tensor | None = None) -> list[Tensor]:
    """Return the gradients of input and router where the main loss says nothing."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf) if valid is None else layer(leaf, valid)
    (y.sum() * 0).backward()
    return grads([leaf, layer.router.weight])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_is_that_of_the_mean_over_sequences(score: str, masked: bool) -> None:
    x, valid = _batch()
    mask = valid if masked else None
    layer, leaf = _build(score), x.clone().requires_grad_()
    _loss(layer, leaf, mask).backward()
    expected = grads([leaf, layer.router.weight])
    assert expected[1].abs().max() > 1e-3
    for got, want in zip(_aside(_build(score), x, mask), expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_the_mean_over_micro_batches_is_that_over_the_batch(size: int, masked: bool) -> None:
    x, valid = _batch()
    whole = _aside(_build(), x, valid if masked else None)
    layer, parts = _build(), []
    number = len(x) // size
    for part, mask in zip(x.split(size), valid.split(size), strict=True):
        parts.append(_aside(layer, part, mask if masked else None)[0] / number)
    assert_close(torch.cat(parts), whole[0])
    assert_close(grads([layer.router.weight])[0] / number, whole[1])


def test_of_one_sequence_it_is_the_loss_of_the_batch() -> None:
    x = _batch()[0][:1]
    batch = TopKRouter(4, 6, 2, load_balance_loss=COEFFICIENT, dtype=torch.float64)
    with torch.no_grad():
        batch.weight.copy_(_build().router.weight)
    leaf = x[0].clone().requires_grad_()
    (batch(leaf)[0].sum() * 0).backward()
    expected = grads([leaf, batch.weight])
    for shape in (x.shape, x.shape[1:]):  # without a batch dimension all tokens are of one
        got = _aside(_build(), x.view(shape))
        assert_close(got[0].view(8, 4), expected[0])
        assert_close(got[1], expected[1])


def test_uniform_routing_has_a_loss_of_exactly_one() -> None:
    probabilities = torch.full((8, 4), 0.25, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    counts = torch.full((2, 4), 2)
    share = sequence_balancing_share(probabilities, ids, counts, torch.tensor(2), 2)
    assert share.item() == 1.0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_ranks_that_cut_batches_and_sequences_have_their_slices(
    grid: tuple[int, int], masked: bool
) -> None:
    x, valid = _batch()
    expected = _aside(_build(), x, valid if masked else None)

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh, layer = door.mesh(grid, ("dp", "cp")), _build()
        layer.router.split_tokens_over(mesh, door, sequence_axes=mesh["cp"])
        dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
        part, mask = (t.chunk(grid[0])[dp].chunk(grid[1], 1)[cp] for t in (x, valid))
        return _aside(layer, part, mask if masked else None)

    results = SimulatedWorld(4).run(rank)
    rows = [
        torch.cat([results[dp * grid[1] + cp][0] for cp in range(grid[1])], 1)
        for dp in range(grid[0])
    ]
    assert_close(torch.cat(rows), expected[0])
    assert_close(torch.stack([r[1] for r in results]).sum(0), expected[1])


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (0, 0, 4), (0, 4)])
def test_a_batch_without_tokens_has_gradients_of_zero(shape: tuple[int, ...]) -> None:
    layer, x = _build(), torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    for gradient in grads([x, layer.router.weight]):
        assert not gradient.any()


def _idle(rank: int) -> list[Tensor]:
    """Give rank 1 no sequences."""
    layer, mesh = _build(), _flat()
    ExpertParallel(token_axes=mesh).apply(layer, mesh)
    x = _batch()[0]
    return _aside(layer, x if rank == 0 else x[:0])


def test_a_rank_without_sequences_leaves_the_mean_to_the_others(ranks: Any) -> None:
    expected = _aside(_build(), _batch()[0])
    (x, weight), (_, idle) = ranks(2).run(_idle)
    assert_close(x, expected[0])
    assert_close(weight, expected[1])
    assert not idle.any()


def _flat() -> DeviceMesh:
    return cached("flat", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))


def _styled(rank: int) -> list[Any]:
    x, _ = _batch()
    mesh, record = _flat(), RecordingCollectives()
    layer = _build()
    style = ExpertParallel(token_axes=mesh, sequence_axes=mesh, collectives=record)
    style.apply(layer, mesh)
    found = _aside(layer, x.chunk(2, 1)[rank])
    texts = []
    several: list[dict[str, Any]] = [{}, dict(token_axes=(), sequence_axes=mesh)]
    for options in several:
        with pytest.raises(ExpertConfigError) as error:
            ExpertParallel(**options).apply(_build(), mesh)
        texts.append(str(error.value))
    with pytest.raises(ExpertConfigError, match="are not among"):
        _build().router.split_tokens_over((), sequence_axes=[Axis.of(mesh, "ep")])
    return [*found, record.by_call[("ep", "all_reduce")].calls, texts]


def test_a_style_tells_the_router_what_cuts_sequences(ranks: Any) -> None:
    expected = _aside(_build(), _batch()[0])
    results = ranks(2).run(_styled)
    assert_close(torch.cat([r[0] for r in results], 1), expected[0])
    assert_close(results[0][1] + results[1][1], expected[1])
    for _, _, calls, texts in results:
        assert calls == 1
        assert texts[0].startswith("sequence_loss=0.3 is the mean over all sequences; say which")
        assert texts[1].startswith("sequence axes ['ep'] are not among the token axes []; what")
