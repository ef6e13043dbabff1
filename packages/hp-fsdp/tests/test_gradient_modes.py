"""Gradients packed at the end, as they come, or by the matrix product itself."""

import re
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_fsdp import ParameterError, Resize, Ring, ShardingError, StateError, fully_shard

from .gathering import Halved
from .models import (
    Gradients,
    Net,
    full,
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
MODES = ["accumulate", "fused"]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def microbatches(
    rank: int, shape: tuple[int, ...], mode: Any, how: str, layout: Any
) -> list[Gradients]:
    model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]), grads=mode, layout=layout)
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


@pytest.mark.parametrize("mode", MODES)
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
    ranks: Ranks, shape: tuple[int, ...], mode: Any, how: str, layout: Any
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world, steps=(0, 1, 2))
    for steps in ranks(world).run(microbatches, shape, mode, how, layout):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": Sharing,
    "recomputed": Recomputing,
    "reentrant": Reentrant,
    "hidden": Boxed,
    "silent": Silent,
    "twice": Again,
}


def other_models(rank: int, kind: str, mode: Any) -> list[Gradients]:
    model: Any = make(KINDS[kind])
    mesh = mesh_of((2,), ("fsdp",))
    if kind in ("hidden", "silent", "twice"):
        for layer in (model.hidden.first, model.hidden.second):
            layer.bias = None  # nothing but fused weights announces the backward
        fully_shard(model.hidden, mesh, grads=mode, direct_bytes=0)
    if kind == "tied":
        fully_shard(model.block, mesh, grads=mode, direct_bytes=0)
        fully_shard(model, mesh, grads=mode, direct_bytes=0)
    else:
        shard(model, mesh, grads=mode)
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
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_gets_its_gradients(ranks: Ranks, kind: str, mode: Any) -> None:
    expected = without_bias(kind)
    for steps in ranks(2).run(other_models, kind, mode):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def odd(rank: int, mode: Any, layout: Any) -> Gradients:
    model: Any = make(Odd)
    fully_shard(model, mesh_of((4,), ("fsdp",)), grads=mode, direct_bytes=0, layout=layout)
    loss_of(model, tokens(rank)).backward()
    return {name: g for name, g in gradients(model).items() if g.numel()}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("mode", MODES)
def test_unused_frozen_tied_and_tiny_parameters(ranks: Ranks, mode: Any, layout: Any) -> None:
    expected = reference(4, Odd)
    del expected["frozen"], expected["empty"], expected["unused"]
    for found in ranks(4).run(odd, mode, layout):
        assert worst(found, expected) < 1e-12


def mixed(rank: int, mode: Any) -> tuple[Gradients, Gradients]:
    """Compare two microbatches in bf16, reduced in fp32, with the copying mode."""
    found = []
    for each in (mode, "copy"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = mesh_of((2,), ("fsdp",))
        model: Any = shard(make(Net, torch.float32), mesh, mp_policy=policy, grads=each)
        with model.no_sync():
            loss_of(model, tokens(rank, 1)).backward()
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
    return found[0], found[1]


@pytest.mark.nccl
@pytest.mark.parametrize("mode", MODES)
def test_microbatches_add_up_in_the_dtype_of_the_reduction(ranks: Ranks, mode: Any) -> None:
    for found, expected in ranks(2).run(mixed, mode):
        assert worst(found, expected) == 0


def thawed(rank: int) -> tuple[list[str], Gradients]:
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), grads="fused")
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
        assert said[1] == "grads is 'fast'; legal are ['copy', 'accumulate', 'fused']"
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
    """Return the bytes that a second step copies above those of a local step, and P."""
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


def test_copied_bytes_are_the_gradients_or_next_to_nothing(ranks: Ranks) -> None:
    for bytes_copied, whole in ranks(2).run(copied, "copy"):
        assert 1.0 <= bytes_copied / whole <= 1.08  # with the biases, which travel packed
    for bytes_copied, whole in ranks(2).run(copied, "fused"):
        assert bytes_copied / whole < 0.1  # the biases: 3% of these small layers, three times
    for bytes_copied, whole in ranks(2).run(copied, "fused", "ragged"):
        assert bytes_copied / whole < 0.04  # the biases once: they are gathered in place


def ringed(rank: int, slots: int, mode: Any) -> dict[str, Any]:
    """Count what is allocated for gathered parameters and packed gradients in a third step."""
    counts = {}
    found: Gradients = {}
    for name, ring in (("ring", Ring(slots)), ("resize", Resize())):
        model: Any = make(lambda: Net(4))
        for block in model.blocks:
            fully_shard(block, mesh_of((2,), ("fsdp",)), buffers=ring, grads=mode)
        fully_shard(model, mesh_of((2,), ("fsdp",)))
        calls: list[int] = []
        real, empty = torch.UntypedStorage.resize_, torch.empty

        def resize(self: Any, size: int, real: Any = real, calls: Any = calls) -> Any:
            if size:
                calls.append(size)
            return real(self, size)

        def make_empty(*args: Any, empty: Any = empty, calls: Any = calls, **kwargs: Any) -> Any:
            made = empty(*args, **kwargs)
            if made.numel():
                calls.append(made.numel())
            return made

        for step in range(3):
            calls.clear()
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", resize),
                mock.patch.object(torch, "empty", make_empty),
            ):
                loss_of(model, tokens(rank, step)).backward()
            seen = gradients(model)
            model.zero_grad()
        counts[name] = len(calls)
        if found:
            assert worst(seen, found) == 0
        found = seen
    return {"counts": counts, "found": found}


@pytest.mark.nccl
@pytest.mark.parametrize("mode", ["copy", "fused"])
def test_a_ring_allocates_nothing_for_its_units(ranks: Ranks, mode: Any) -> None:
    for result in ranks(2).run(ringed, 2, mode):
        # the root's own: one gather, one packed gradient
        assert result["counts"]["ring"] == 2
        # each block's: gathered for forward and for backward but the last, and packed once
        assert result["counts"]["resize"] == 2 + 2 * 4 - 1 + 4
        # by hand: one process, the third step
        plain = make(lambda: Net(4))
        for replica in range(2):
            loss_of(plain, tokens(replica, 2)).backward()
        expected = {name: g / 2 for name, g in gradients(plain).items()}
        assert worst(result["found"], expected) < 1e-12


def crowded(rank: int) -> tuple[str, bool, Gradients]:
    """Keep all blocks gathered in a ring that has two slots."""
    model: Any = make(Net)
    ring = Ring(2)
    mesh = mesh_of((2,), ("fsdp",))
    for block in model.blocks:
        fully_shard(block, mesh, buffers=ring, reshard_after_forward=False)
    fully_shard(model, mesh)
    message = ""
    try:
        model(tokens(rank))
    except StateError as error:
        message = str(error)
    model.reset()
    model.set_reshard_after_forward(True)
    # told to prefetch all, it prefetches what has a slot
    model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks))
    loss_of(model, tokens(rank)).backward()
    right = torch.equal(full(model.head.bias), make(Net).head.bias)
    return message, right, gradients(model)


def test_a_ring_that_is_too_small_says_so(ranks: Ranks) -> None:
    for message, right, found in ranks(2).run(crowded):
        assert "a ring of 2 slots, and two groups of one slot are needed at once" in message
        assert right
        assert worst(found, reference(2)) < 1e-12


@pytest.mark.parametrize("slots", [0, 1, True, "2"])
def test_a_ring_needs_two_slots(slots: Any) -> None:
    with pytest.raises(ShardingError, match="legal are 2, 3"):
        Ring(slots)


def test_a_ring_lends_what_it_got_back() -> None:
    ring, device = Ring(2), torch.device("cpu")
    first = ring.take(8, torch.float32, device)
    place = first.data_ptr()
    ring.give(first)
    assert ring.take(4, torch.float64, device).data_ptr() == place
    assert ring.take(4, torch.float64, device).data_ptr() != place


def reported(rank: int, layout: str, grads: str, ranks: int) -> dict[str, str]:
    """Return what the plan says of the root's and one block's gradients."""
    model: Any = shard(make(Net), mesh_of((ranks,), ("fsdp",)), layout=layout, grads=grads)
    groups = model.plan_report().groups
    return {f"{g.unit}.{p.name}": p.unfused for g in groups[:2] for p in g.parameters} | {
        "fused": ", ".join(p.name for p in groups[1].parameters if p.fused),
        "text": str(model.plan_report()),
    }


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_the_plan_says_which_gradients_are_fused_and_why_others_are_not(
    ranks: Ranks, layout: str
) -> None:
    for found in ranks(2).run(reported, layout, "fused", 2):
        assert found["fused"] == "up.weight, down.weight"
        assert found["blocks.0.norm.weight"] == "fewer than direct_bytes per rank"
        assert found["(root).embedding.weight"] == ""
        line = r"up\.weight \[36, 8\]: \d+ rows per rank, direct, gradient fused\n"
        assert re.search(line, found["text"])
        assert "gradient not fused: fewer than direct_bytes per rank" in found["text"]
    for found in ranks(2).run(reported, layout, "copy", 2):
        assert found["blocks.0.up.weight"] == "grads='copy'"
    (found,) = ranks(1).run(reported, layout, "fused", 1)
    assert found["blocks.0.up.weight"] == "one rank, so nothing is packed"


def converted(rank: int) -> list[dict[str, str]]:
    """Return what the plan says of gradients before and after conversions of the module."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    options: Any = {"grads": "fused", "direct_bytes": 0, "mp_policy": policy}
    fully_shard(model[1], mesh_of((2,), NAMES[1]), **options)
    fully_shard(model, mesh_of((2,), NAMES[1]), **options)
    said = []
    for change in (model.float, model.double, model.float):
        change()
        model(torch.arange(8)).sum().backward()
        groups = model.plan_report().groups
        said.append({f"{g.unit}.{p.name}": p.unfused for g in groups for p in g.parameters})
    return said


def test_the_plan_says_after_a_conversion_what_holds_then(ranks: Ranks) -> None:
    as_made = {"(root).0.weight": "", "1.weight": ""}
    apart = dict.fromkeys(as_made, "computed in float64, reduced in float32")
    for found in ranks(2).run(converted):
        assert found == [as_made, apart, as_made]


class Tied(nn.Module):
    """A head and a table of one weight, the head first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(8, 8, bias=False), nn.Embedding(8, 8)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return cast(torch.Tensor, self.head(self.table(ids)))


def converted_tied(rank: int) -> list[str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = Tied()
    fully_shard(model, mesh_of((2,), NAMES[1]), grads="fused", direct_bytes=0, mp_policy=policy)
    said = []
    for change in (model.float, model.double, model.float):
        change()
        said += [p.unfused for p in model.plan_report().groups[0].parameters]
    return said


def test_a_tied_weight_is_fused_where_one_of_its_layers_is(ranks: Ranks) -> None:
    for found in ranks(2).run(converted_tied):
        assert found == ["", "", ""]


class Losing(Halved):
    """Loses its class when a rank takes its rows, which is an error."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give new memory without the class."""
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made.plain if str(func) == "aten.new_zeros.default" else made


def refused_late(rank: int) -> tuple[str, list[str], list[str]]:
    """Shard a module with a parameter that its group refuses, then without it."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8), nn.Identity())
    model[2].weight = nn.Parameter(Losing(torch.ones(8, 8)))
    options: Any = {"grads": "fused", "direct_bytes": 0}
    said = ""
    try:
        fully_shard(model, mesh_of((2,), NAMES[1]), **options)
    except ParameterError as error:
        said = str(error)
    left = [name for layer in model for name in vars(layer) if name == "forward"]
    del model[2]
    fully_shard(model, mesh_of((2,), NAMES[1]), **options)
    report = model.plan_report()
    return said, left, [p.name for each in report.groups for p in each.parameters if p.fused]


@pytest.mark.nccl
def test_a_call_that_is_refused_leaves_no_fused_products(ranks: Ranks) -> None:
    for said, left, fused in ranks(2).run(refused_late):
        assert "rows of 2.weight are a Tensor without" in said
        assert not left
        assert fused == ["0.weight", "1.weight"]
