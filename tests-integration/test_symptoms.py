"""Each mistake on the page *symptom and cause* has the symptom that the page shows."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import RankError, RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from hp_cp import (
    ContextParallel,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    count_labels,
    position_ids,
    shard_sequence,
    shift_labels,
)
from hp_dtensor.testing import compare_with_one_process
from hp_ep import ExpertParallel, MoE, parallelize_experts
from hp_fsdp import FSDPModule, fully_shard
from hp_mesh import ParallelDims, ParallelMesh

PAGE = Path(__file__).resolve().parents[1] / "tools" / "docs" / "pages" / "symptoms.md"
Reduction = Literal["mean", "sum"]
ROWS, LENGTH, VOCAB, WIDTH, MICROBATCHES = 8, 16, 24, 16, 2


class Core(nn.Module):
    """Attention without parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """Attend."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Model(nn.Module):
    """A transformer of one layer with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.core = nn.Linear(WIDTH, 3 * WIDTH), Core()
        self.moe = MoE(WIDTH, WIDTH, 4, top_k=2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.positions(positions)
        heads = self.qkv(x).unflatten(-1, (-1, 3, 8)).transpose(1, 2).unbind(-2)
        x = x + self.core(*heads, is_causal=True).transpose(1, 2).flatten(2)
        logits: Tensor = self.head(x + self.moe(x))
        return logits


def _mesh() -> ParallelMesh:
    return cached("symptoms", lambda: ParallelDims(dp_shard=2, cp=2, ep=2).build_mesh("cpu"))


def _batch(labelled: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, shift_labels(tokens.masked_fill(tokens < labelled, -100))


def _loss_sum(model: nn.Module, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _loss(model: nn.Module) -> Tensor:
    tokens, labels = _batch()
    return _loss_sum(model, tokens, torch.arange(LENGTH), labels) / (labels != -100).sum()


def _parallelize(model: Model, mistake: str) -> None:
    mesh = _mesh()
    dense: Reduction = "mean" if mistake in ("mean", "mean of dense") else "sum"
    experts: Reduction = "mean" if mistake in ("mean", "mean of experts") else "sum"
    parallelize_experts(model, mesh["ep"], ExpertParallel(token_axes=mesh["loss"]))
    if mistake != "no context parallel":
        style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, layout=Zigzag())
        parallelize_module(model.core, mesh["cp"], style)
    fully_shard(model.moe.experts, mesh["efsdp"], gradient_reduction=experts)
    fully_shard(model, mesh["fsdp"], gradient_reduction=dense)


def _share(model: nn.Module, mistake: str) -> Tensor:
    mesh, (tokens, labels) = _mesh(), _batch(VOCAB if mistake == "no labels" else 3)
    rank, size = mesh["batch"].get_local_rank(), mesh["batch"].size()
    if mistake == "same rows":
        rank = 0
    positions = position_ids(mesh["cp"], Zigzag(), LENGTH)
    if mistake == "positions":
        positions = torch.arange(LENGTH // 2)
    parts = []
    for part in zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        rows = [x.chunk(size)[rank] for x in part]
        x, y = shard_sequence(rows, mesh["cp"], Zigzag(), seq_dim=1)
        parts.append((x, shift_labels(x) if mistake == "shifted after sharding" else y))
    count = count_labels([y for _, y in parts], mesh["loss"])
    total = torch.zeros(())
    for i, (x, y) in enumerate(parts):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(i == MICROBATCHES - 1)
        if mistake == "count of a microbatch":
            count = count_labels(y, mesh["loss"])
        elif mistake in ("count of a rank", "no labels"):
            count = (y != -100).sum() * MICROBATCHES
        loss = _loss_sum(model, x, positions, y) / count
        loss.backward()
        total = total + loss.detach()
    return total


def _compared(rank: int, mistake: str) -> str:
    torch.manual_seed(rank if mistake == "seed" else 0)
    model = Model()
    try:
        compare_with_one_process(
            model,
            lambda model: _parallelize(model, mistake),  # type: ignore[arg-type]
            _loss,
            lambda model: _share(model, mistake),
            _mesh()["loss"],
        )
    except AssertionError as error:
        return str(error)
    return ""


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "none": ([], []),
    "mean": (
        ["head.weight: 0.25 times", r"moe.experts\S*: 0.5 times", "1/4 times: a mean over 4"],
        ["the loss"],
    ),
    "mean of dense": (["head.weight: 0.25 times"], ["the loss", "moe.experts"]),
    "mean of experts": ([r"moe.experts\S*: 0.5 times"], ["the loss", "head"]),
    "count of a microbatch": (
        ["the loss: 2 times", "head.weight: 2 times", "2 times: labels are counted for one"],
        [],
    ),
    "count of a rank": (["the loss: 3.99", "the loss about 4 times: each of 4 ranks"], []),
    "no labels": (["the loss: relative error inf, not finite"], []),
    "no context parallel": (["the loss: ", "head.weight: relative error", "no common"], []),
    "positions": (["the loss: ", "positions.weight: relative error"], []),
    "shifted after sharding": (["the loss: ", "head.weight: relative error"], []),
    "same rows": (["the loss: ", "head.weight: relative error"], []),
    "seed": (["the loss of one process is .* on ranks 1, 2, 3; give equal models"], []),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_its_symptom(ranks: Any, mistake: str) -> None:
    shown, absent = MISTAKES[mistake]
    (said,) = set(ranks(4).run(_compared, mistake))
    if not shown:
        assert said == ""
    head, _, _ = said.partition("no common factor")
    for phrase in shown:
        assert re.search(phrase, said), said
    for phrase in absent:
        assert f"  {phrase}" not in head, said


def _impatient_mesh(name: str) -> DeviceMesh:
    """Return a mesh whose collectives wait 3 seconds for other ranks."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def _steps(rank: int, steps: tuple[int, int]) -> str:
    """Train some steps, another number on each rank; return the error of this rank."""
    mesh = _impatient_mesh("fsdp")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    try:
        for _ in range(steps[rank]):
            model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


# gloo looks for 10 seconds what the other rank waits for.
@pytest.mark.long
@pytest.mark.parametrize("steps", [(1, 0), (2, 1)])
def test_a_rank_without_a_batch_lets_the_others_wait(steps: tuple[int, int]) -> None:
    pool = RankPool(2)
    try:
        first, second = pool.run(_steps, steps, timeout=60)
    finally:
        pool.close()
    assert re.search("Timed out waiting|Application timeout caused pair closure", first), first
    assert second == ""


def _other_documents(rank: int, ends: tuple[tuple[int, ...], ...]) -> None:
    mesh = _impatient_mesh("cp")
    mask = MaskSpec(causal=True, cu_seqlens=ends[rank])
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    q, k, v = shard_sequence([q, q, q], mesh, Zigzag(), seq_dim=2)
    context_parallel_attention(q, k, v, mesh, mask=mask, layout=Zigzag(), seq_len=16)


@pytest.mark.long
def test_ranks_with_other_documents_wait_if_they_send_other_blocks() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="Timed out waiting") as error:
            pool.run(_other_documents, ((0, 12, 16), (0, 4, 16)), timeout=60)
    finally:
        pool.close()
    assert "over axis 'cp' (ranks 0, 1)" in str(error.value)


def test_ranks_with_other_documents_that_send_equal_blocks_raise_no_error() -> None:
    pool = RankPool(2)
    try:
        pool.run(_other_documents, ((0, 16), (0, 10, 16)), timeout=60)
    finally:
        pool.close()


def test_the_page_has_a_row_for_each_mistake() -> None:
    table, _, _ = PAGE.read_text("utf-8").partition("Other symptoms")
    rows = re.findall(r"^\|.*\| `([^`]+)` \|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(MISTAKES.keys() - {"none"})
