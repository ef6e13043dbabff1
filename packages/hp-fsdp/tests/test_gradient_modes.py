"""``grads="accumulate"``: gradients packed when they are ready."""

import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_fsdp import ShardingError, StateError, UnsupportedError, fully_shard

from .models import (
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    reference,
    shard,
    tokens,
    worst,
)
from .test_checkpoint import Recomputing, Reentrant
from .test_managed import Sharing
from .test_step import Again, Boxed, Odd, Silent
from .test_traffic import Copies, Pausing

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def microbatches(rank: int, shape: tuple[int, ...], how: str, layout: Any) -> list[Gradients]:
    mesh = mesh_of(shape, NAMES[len(shape)])
    model: Any = shard(make(Net), mesh, grads="accumulate", layout=layout)
    seen = []
    for _ in range(2):
        for step in range(3):
            last = step == 2
            if how == "no sync":
                model.set_requires_gradient_sync(last)
            elif how == "no all-reduce":
                model.set_requires_all_reduce(last)
            loss_of(model, tokens(rank, step)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("shape", "how", "layout"),
    [
        ((2,), "sync", "exact"),
        ((4,), "no sync", "exact"),
        ((2, 2), "no sync", "exact"),
        ((2, 2), "no all-reduce", "exact"),
        ((1,), "no sync", "exact"),
        ((2, 1), "no sync", "exact"),
        ((4,), "no sync", "ragged"),
        ((2, 2), "no all-reduce", "ragged"),
    ],
)
def test_gradients_of_microbatches_equal_one_process(
    ranks: Ranks, shape: tuple[int, ...], how: str, layout: Any
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world, steps=(0, 1, 2))
    for steps in ranks(world).run(microbatches, shape, how, layout):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": Sharing,
    "recomputed": Recomputing,
    "reentrant": Reentrant,
    "hidden": Boxed,
    "silent": Silent,
    "twice": Again,
}


def other_models(rank: int, kind: str) -> list[Gradients]:
    model: Any = make(KINDS[kind])
    mesh = mesh_of((2,), ("fsdp",))
    if kind in ("hidden", "silent", "twice"):
        for layer in (model.hidden.first, model.hidden.second):
            layer.bias = None  # nothing but the weights announces the backward
        fully_shard(model.hidden, mesh, grads="accumulate", direct_bytes=0)
    if kind == "tied":
        fully_shard(model.block, mesh, grads="accumulate", direct_bytes=0)
        fully_shard(model, mesh, grads="accumulate", direct_bytes=0)
    else:
        shard(model, mesh, grads="accumulate")
    seen = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def without_bias(kind: str) -> Gradients:
    plain = make(KINDS[kind])
    if kind in ("hidden", "silent", "twice"):
        for layer in (plain.hidden.first, plain.hidden.second):
            layer.bias = None
    for replica in range(2):
        loss_of(plain, tokens(replica)).backward()
    return {name: gradient / 2 for name, gradient in gradients(plain).items()}


@pytest.mark.nccl
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_gets_its_gradients(ranks: Ranks, kind: str) -> None:
    expected = without_bias(kind)
    for steps in ranks(2).run(other_models, kind):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def odd(rank: int, layout: Any) -> Gradients:
    model: Any = make(Odd)
    fully_shard(model, mesh_of((4,), ("fsdp",)), grads="accumulate", direct_bytes=0, layout=layout)
    loss_of(model, tokens(rank)).backward()
    return {name: g for name, g in gradients(model).items() if g.numel()}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_unused_frozen_tied_and_tiny_parameters(ranks: Ranks, layout: Any) -> None:
    expected = reference(4, Odd)
    del expected["frozen"], expected["empty"], expected["unused"]
    for found in ranks(4).run(odd, layout):
        assert worst(found, expected) < 1e-12


def mixed(rank: int) -> tuple[Gradients, Gradients]:
    """Compare two microbatches in bf16, reduced in fp32, with the copying mode."""
    found = []
    for each in ("accumulate", "copy"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = mesh_of((2,), ("fsdp",))
        model: Any = shard(make(Net, torch.float32), mesh, mp_policy=policy, grads=each)
        with model.no_sync():
            loss_of(model, tokens(rank, 1)).backward()
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
    return found[0], found[1]


@pytest.mark.nccl
def test_microbatches_add_up_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    for found, expected in ranks(2).run(mixed):
        assert worst(found, expected) == 0


def thawed(rank: int) -> tuple[list[str], Gradients]:
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), grads="accumulate")
    said = []
    model.blocks[0].up.weight.requires_grad_(False)
    with model.no_sync():
        loss_of(model, tokens(rank, 5)).backward()
    model.blocks[0].up.weight.requires_grad_(True)
    try:
        loss_of(model, tokens(rank, 5)).backward()
    except StateError as error:
        said.append(str(error))
    model.reset()
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    try:
        fully_shard(nn.Linear(2, 2), grads=cast(Any, "fast"))
    except ShardingError as error:
        said.append(str(error))
    return said, gradients(model)


def test_thawing_while_gradients_wait_is_refused_and_reset_is_clean(ranks: Ranks) -> None:
    for said, found in ranks(2).run(thawed):
        assert "unfreeze parameters only after a reduction" in said[0]
        assert said[1] == "grads is 'fast'; allowed: ['copy', 'accumulate']"
        assert worst(found, reference(2)) < 1e-12


def thawed_alone(rank: int) -> str:
    """Unfreeze while gradients wait that only rank 0 has: its loss alone passes the block."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), grads="accumulate")
    model.blocks[1].up.weight.requires_grad_(False)
    with model.no_sync():
        loss = loss_of(model, tokens(rank))
        (loss if rank == 0 else 0 * loss + model.embedding(tokens(rank)).sum()).backward()
    model.blocks[1].up.weight.requires_grad_(True)
    with pytest.raises(StateError) as caught:
        loss_of(model, tokens(rank)).backward()
    model.reset()
    return str(caught.value)


def test_thawing_is_refused_on_all_ranks_whichever_has_gradients(ranks: Ranks) -> None:
    said = ranks(2).run(thawed_alone)
    assert said[0] == said[1]
    assert "['up.weight'] were frozen when gradients of others began to add up" in said[0]


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(4)))


def copied(rank: int, mode: Any, layout: Any = "exact") -> tuple[int, int]:
    """Return the bytes that a second step copies in addition to a local step, and P."""
    counts = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: Any = layers()
        carrier = Pausing()
        if sharded:
            options: dict[str, Any] = {"grads": mode, "direct_bytes": 256, "collectives": carrier}
            options["layout"] = layout
            for block in model:
                fully_shard(block, mesh_of((2,), ("fsdp",)), **options)
            fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
        for _ in range(2):
            carrier.copies = Copies()
            with carrier.copies:
                model(torch.ones(3, 32)).sum().backward()
            model.zero_grad()
        counts.append(carrier.copies.bytes)
    whole = sum(p.numel() * p.element_size() for p in layers().parameters())
    return counts[1] - counts[0], whole


@pytest.mark.parametrize("grads", ["copy", "accumulate"])
def test_copied_bytes_are_the_gradients(ranks: Ranks, grads: str) -> None:
    for bytes_copied, whole in ranks(2).run(copied, grads):
        assert 1.0 <= bytes_copied / whole <= 1.08  # with the biases, which travel packed


def removed(rank: int) -> list[str]:
    """Use the removed options. Return the errors."""
    call: Any = fully_shard
    said = []
    for option in ({"grads": "fused"}, {"buffers": 2}, {"buffers": object()}):
        module = nn.Linear(2, 2)
        with pytest.raises(UnsupportedError) as caught:
            call(module, mesh_of((2,), ("fsdp",)), **option)
        said.append(str(caught.value))
        assert type(module) is nn.Linear
    return said


def test_removed_options_name_the_replacement(ranks: Ranks) -> None:
    for fused, *buffers in ranks(2).run(removed):
        assert fused.startswith("grads='fused' was removed in 0.3.0; use grads='accumulate'")
        for said in buffers:
            assert said.startswith("buffers= was removed in 0.3.0; leave it out: each unit frees")


@pytest.mark.parametrize("name", ["Ring", "Resize"])
def test_removed_names_name_the_replacement(name: str) -> None:
    package = sys.modules[fully_shard.__module__.rpartition(".")[0]]
    with pytest.raises(ImportError, match=f"{name} was removed in 0.3.0: each unit frees"):
        exec(f"from {package.__name__} import {name}")
    with pytest.raises(AttributeError, match="has no attribute 'Rings'"):
        _ = package.Rings
