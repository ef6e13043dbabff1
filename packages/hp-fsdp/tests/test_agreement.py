"""Ranks that would do different things learn of it before they communicate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_dtensor import RecordingCollectives
from hp_fsdp import DisagreementError, fully_shard
from hp_fsdp._agreement import KEPT, Collective, History

from .models import Gradients, Net, gradients, loss_of, make, mesh_of, reference, tokens, worst

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


class Chosen(Net):
    """Runs the blocks in ``order``."""

    order: tuple[int, ...] = (0, 1, 2)
    silent: int | None = None  # a block whose gradients are not synchronised

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for position in self.order:
            x = self.blocks[position](x)
        logits: Tensor = self.head(x)
        return logits


DIFFERENT = {
    "other shapes": "shape (3, 8) sharded along dim 0, trains on rank 0, shape (4, 8) sharded",
    "frozen": "shape (3, 8) sharded along dim 0, trains on rank 0, shape (3, 8) sharded along "
    "dim 0, is",
}
# Case -> (attributes of the model on rank 1, expected words of the message).
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another order": ({"order": (0, 2, 1)}, "rank 1 is to gather blocks.2 for forward"),
    "one left out": ({"order": (0, 2)}, "rank 1 is to gather blocks.2 for forward"),
    "the last left out": ({"order": (0, 1)}, "rank 1 is to gather (root) for backward"),
    "one not synchronised": ({"silent": 1}, "rank 1 is to reduce the gradients of blocks.0"),
}


def test_a_history_forgets_collectives_that_no_unit_repeats() -> None:
    history = History()
    for _ in range(5 * KEPT):
        history.add(Collective(("all_gather", 1)), None)
    assert len(history._after_context) <= KEPT
    assert history.count == 5 * KEPT


def test_a_history_expects_what_followed_the_same_collectives() -> None:
    history, calls = History(), [Collective(("all_gather", i)) for i in range(3)]
    order = [calls[i] for i in (0, 1, 1, 1, 2, 0, 2)]  # one call of each kind has two successors
    unexpected = []
    for _ in range(5):
        unexpected.append(0)
        for call in order:
            unexpected[-1] += history.expected is not call
            history.add(call)
    assert unexpected[0] > 0
    assert unexpected[2:] == [0] * 3
    other = [calls[2], calls[1], calls[0]]
    missed = []
    for _ in range(3):  # another order and back, as an evaluation between training steps
        missed.append(0)
        for call in [*other, *order, *order]:
            missed[-1] += history.expected is not call
            history.add(call)
    assert missed[1:] == [0] * 2


def disagree(rank: int, case: str, shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Deviate on rank 1. Return the message, and the gradients of a step after a reset."""
    model: Any = make(Chosen)
    if case == "other shapes":
        torch.manual_seed(0)
        model.blocks[1].table = nn.Parameter(torch.randn(3 + rank % 2, 8).double())
    if case == "frozen":
        model.blocks[1].table.requires_grad_(rank % 2 == 0)
    if case in CASES and rank == 1:
        vars(model).update(CASES[case][0])
    for module in (*model.blocks, model):
        fully_shard(module, mesh_of(shape, NAMES[len(shape)]), **options)
    if model.silent is not None:
        model.blocks[model.silent].set_requires_gradient_sync(False)
    with pytest.raises(DisagreementError) as caught:
        loss_of(model, tokens(rank)).backward()
    model.reset()
    if case not in CASES:
        return str(caught.value), {}
    model.order = (0, 1, 2)
    model.set_requires_gradient_sync(True)
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    return str(caught.value), gradients(model)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_ranks_that_run_other_units_all_raise_and_can_start_again(
    ranks: Ranks, case: str, world: int
) -> None:
    results = ranks(world).run(disagree, case, (world,), {"reshard_after_forward": True})
    expected = reference(world, Chosen)
    assert len({said for said, _ in results}) == 1
    for said, found in results:
        assert CASES[case][1] in said
        assert "same units in the same order" in said
        assert worst(found, expected) < 1e-12


def test_units_with_parameters_that_stay_whole_are_compared_too(ranks: Ranks) -> None:
    for said, found in ranks(2).run(disagree, "another order", (2,), {"min_shard_numel": 100}):
        assert CASES["another order"][1] in said
        assert worst(found, reference(2, Chosen)) < 1e-12


def test_a_disagreement_that_only_reductions_show_is_found_on_all_replicas(ranks: Ranks) -> None:
    options = {"reshard_after_forward": False}
    results = ranks(4).run(disagree, "one not synchronised", (2, 2), options)
    for said, found in results:
        assert "rank 1 is to reduce the gradients of blocks.0" in said
        assert "ranks [0, 2, 3] are to reduce the gradients of blocks.1" in said
        assert worst(found, reference(4, Chosen)) < 1e-12


def moved(rank: int) -> str:
    """Exchange two blocks on rank 1 after sharding, before the first forward."""
    model: Any = make(Net)
    for module in (*model.blocks, model):
        fully_shard(module, mesh_of((2,), NAMES[1]))
    if rank == 1:
        model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]
    with pytest.raises(DisagreementError) as caught:
        loss_of(model, tokens(rank))
    return str(caught.value)


def test_modules_that_changed_places_on_one_rank_are_found_before_their_weights_mix(
    ranks: Ranks,
) -> None:
    said = ranks(2).run(moved)
    assert said[0] == said[1]
    assert "rank 1 is to gather blocks.1 for forward" in said[0]
    assert "order of the fully_shard calls: 1 on rank 0, 2 on rank 1" in said[0]


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize(
    ("case", "act"), [("other shapes", "gather"), ("frozen", "reduce the gradients of")]
)
def test_units_that_differ_between_ranks_are_named(
    ranks: Ranks, case: str, act: str, layout: str
) -> None:
    for said, _ in ranks(2).run(disagree, case, (2,), {"layout": layout}):
        assert f"rank 0 is to {act} blocks.1" in said
        assert f"rank 1 is to {act} blocks.1" in said
        assert f"its parameters there differ in table: {DIFFERENT[case]}" in said


def compared(rank: int, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the calls of the collectives that two steps made, by the user and by c10d's record."""
    record = RecordingCollectives()
    model: Any = make(Net)
    for module in (*model.blocks, model):
        fully_shard(module, mesh_of(shape, NAMES[len(shape)]), collectives=record)
    recorded, profiled = [], []
    for step in range(2):
        record.reset()
        with torch.profiler.profile() as profile:
            loss_of(model, tokens(rank, step)).backward()
        recorded.append(sum(traffic.calls for traffic in record.by_axis.values()))
        names = [event.name for event in profile.events() or ()]
        profiled.append(sum(name.startswith("gloo:") for name in names))
    return recorded, profiled


def test_it_costs_one_small_gather_per_act_of_a_unit_and_axis_in_the_first_step(
    ranks: Ranks,
) -> None:
    for recorded, profiled in ranks(4).run(compared, (2, 2)):
        # 4 units: forward over one axis, reductions over two; 3 of them are gathered for backward
        assert profiled[0] - recorded[0] == 4 + 3 + 2 * 4
        assert profiled[1] == recorded[1]


def never_alone(rank: int) -> Gradients:
    """Run an unsharded unit on rank 0 only, which needs no communication."""
    model: Any = make(Net)
    for module in (*model.blocks, model):
        fully_shard(module, mesh_of((2,), NAMES[1]))
    for module in (*model.blocks, model):
        module.unshard()
    if rank == 0:
        with torch.no_grad():
            model.blocks[0](torch.ones(1, 8, dtype=torch.float64))
    model.reset()
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_unit_that_is_gathered_already_may_run_on_one_rank(ranks: Ranks) -> None:
    for found in ranks(2).run(never_alone):
        assert worst(found, reference(2)) < 1e-12


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "granularity": lambda rank: {"layout": "ragged", "granularity": 1 + 2 * rank},
    "layout": lambda rank: {"layout": ("exact", "ragged")[rank]},
    "reduction": lambda rank: {"gradient_reduction": ("mean", "sum")[rank]},
}


SAID = {
    "granularity": "the offsets: ...",
    "layout": "the layout: exact on rank 0, ragged on rank 1, and 1 more",
    "reduction": "the divisor of gradients: 2 on rank 0, 1 on rank 1",
}


def differently(rank: int, option: str) -> str:
    """Shard layers with equal shard sizes, with a different option on each rank."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    fully_shard(model, mesh_of((2,), ("fsdp",)), **OPTIONS[option](rank))
    with pytest.raises(DisagreementError) as caught:
        model(torch.ones(2, 4)).sum().backward()
    model.reset()
    return str(caught.value)


def named_as_a_fact(rank: int) -> str:
    """Freeze a parameter on one rank. Its name is also a word of the error message."""
    model: Any = nn.Linear(2, 4)
    for name in ("layout", "dtypes", "offsets"):
        setattr(model, name, nn.Parameter(torch.ones(4)))
    model.layout.requires_grad_(rank == 0)
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    with pytest.raises(DisagreementError) as caught:
        model(torch.ones(2, 2)).sum().backward()
    model.reset()
    return str(caught.value)


@pytest.mark.nccl
def test_a_parameter_of_any_name_is_compared(ranks: Ranks) -> None:
    for said in ranks(2).run(named_as_a_fact):
        assert "layout: shape (4,) sharded along dim 0, trains on rank 0" in said


class Ordered(nn.Module):
    """Two parameters of equal shape, registered in a given order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Apply both, in one order."""
        children = dict(self.named_children())
        out: Tensor = children["b"](children["a"](x))
        return out


def registered_in_order(rank: int) -> str:
    model: Any = fully_shard(Ordered(("ab", "ba")[rank]), mesh_of((2,), ("fsdp",)))
    with pytest.raises(DisagreementError) as caught:
        model(torch.ones(2, 4))
    return str(caught.value)


def test_equal_parameters_in_another_order_are_found(ranks: Ranks) -> None:
    said = ranks(2).run(registered_in_order)
    assert said[0] == said[1]
    order = "'a.weight', 'b.weight' on rank 0, 'b.weight', 'a.weight' on rank 1"
    assert f"differ in the order of parameters: {order}" in said[0]


@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_that_differ_between_ranks_are_found(ranks: Ranks, option: str) -> None:
    said = ranks(2).run(differently, option)
    assert said[0] == said[1]
    assert f"its parameters there differ in {SAID[option]}" in said[0]
