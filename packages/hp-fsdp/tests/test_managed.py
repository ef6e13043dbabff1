"""Which parameters are managed, and parameters that get their memory later."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hp_dtensor import RecordingCollectives
from hp_fsdp import StateError, fully_shard
from hp_fsdp._tags import TAG_FLAGS

from .models import (
    Block,
    Gradients,
    Net,
    full,
    gradients,
    in_one_run,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]


def with_ignored(rank: int) -> dict[str, Any]:
    """Leave a block's two parameters and one of the root alone."""
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net)
    ignored = {model.blocks[1].table, model.blocks[1].norm.bias, model.head.bias}
    before = {id(p) for p in ignored}
    for block in model.blocks:
        fully_shard(block, mesh, ignored_params=ignored)
    fully_shard(model, mesh, ignored_params=ignored)
    loss_of(model, tokens(rank)).backward()
    left = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    own = {name: p.grad.clone() for name, p in left.items()}
    for p in left.values():
        torch.distributed.all_reduce(p.grad)
        p.grad /= 2
    return {
        "left": sorted(left),
        "same": {id(p) for p in left.values()} == before,
        "gradients": gradients(model),
        "own": own,
    }


def test_ignored_parameters_stay_as_they_are(ranks: Ranks) -> None:
    expected = reference(2)
    results = ranks(2).run(with_ignored)
    names = ["blocks.1.norm.bias", "blocks.1.table", "head.bias"]
    for found in results:
        assert found["left"] == names
        assert found["same"]
        assert worst(found["gradients"], expected) < 1e-12
    for name in names:  # not reduced by anyone
        assert not torch.equal(results[0]["own"][name], results[1]["own"][name])


class Resettable(nn.Module):
    """Fewer rows than ranks, rows that do not divide, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))
        self.few = nn.Parameter(torch.empty(1, 3))
        self.register_buffer("scale", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill everything with ones."""
        with torch.no_grad():
            for each in (self.weight, self.few, self.scale):
                each.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Use everything."""
        y: Tensor = (x * self.scale * self.few) @ self.weight.t()
        return y


def from_meta(rank: int, world: int, inside: bool) -> dict[str, Any]:
    """Build and shard without memory, then fill and step."""
    with torch.device("meta"):
        model: Any = Resettable()
        if inside:
            fully_shard(model)
    if not inside:
        fully_shard(model, mesh_of((world,), ("fsdp",)))
    before = [id(p) for p in model.parameters()]
    try:
        model(torch.ones(2, 3))
        message = ""
    except StateError as error:
        message = str(error)
    model.to_empty(device="cpu")
    model.reset_parameters()
    same = before == [id(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    after = parameters(model)
    one_buffer = in_one_run(model.parameters())
    return {"message": message, "same": same, "after": after, "one buffer": one_buffer}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inside", [False, True])
def test_parameters_may_get_memory_after_sharding(ranks: Ranks, world: int, inside: bool) -> None:
    for found in ranks(world).run(from_meta, world, inside):
        assert found["message"].startswith("['weight', 'few'] are on the meta device")
        assert found["same"]
        assert found["one buffer"]
        # the loss is the sum over 2 x 5 outputs of 3 products of ones
        assert torch.equal(found["after"]["weight"], torch.full((5, 3), 1.0 - 0.5 * 2))
        assert torch.equal(found["after"]["few"], torch.full((1, 3), 1.0 - 0.5 * 10))


def loaded(rank: int, how: str) -> Gradients:
    """Load into a sharded model without memory, whole or in two pieces."""
    mesh = mesh_of((2,), ("fsdp",))
    with torch.device("meta"):
        model: Any = Net().double()
    shard(model, mesh)
    source = make(Net).state_dict()
    state = {
        name: distribute_tensor(source[name], p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    if how == "pieces":
        names = sorted(state)
        for part in (names[::2], names[1::2]):
            piece = {name: state[name] for name in part}
            model.load_state_dict(piece, strict=False, assign=True)
    else:
        if how == "half":
            half = {name: value for name, value in state.items() if "norm.bias" not in name}
            model.load_state_dict(half, strict=False, assign=True)
            with pytest.raises(StateError, match=r"'norm.bias'\] are on the meta device"):
                model(tokens(rank))
            model.reset()
        model.load_state_dict(state, assign=True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["whole", "pieces", "half"])
def test_a_state_dict_gives_memory_before_the_first_forward(ranks: Ranks, how: str) -> None:
    expected = reference(2)
    for found in ranks(2).run(loaded, how):
        assert worst(found, expected) < 1e-12


class Sharing(nn.Module):
    """An embedding tied to the head, with rows that do not divide, across two units of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = Block()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits."""
        y: Tensor = self.head(self.block(self.embedding(batch)))
        return y


def shared_steps(rank: int) -> tuple[Gradients, bool, bool, int]:
    mesh = mesh_of((4,), ("fsdp",))
    record = RecordingCollectives()
    model: Any = make(Sharing)
    fully_shard(model.block, mesh)
    fully_shard([model.embedding, model.head], mesh, collectives=record)
    fully_shard(model, mesh)
    before = full(model.head.weight)
    loss_of(model, tokens(rank)).backward()
    found = gradients(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    tied = model.head.weight is model.embedding.weight
    changed = (full(model.head.weight) != before).any(1)
    return found, tied, bool(changed.all()), record.by_call["fsdp", "reduce_scatter"].calls


def test_tied_weights_of_a_list_are_one_parameter_and_every_row_moves(ranks: Ranks) -> None:
    expected = reference(4, Sharing)
    for found, tied, every_row, reductions in ranks(4).run(shared_steps):
        assert worst(found, expected) < 1e-12
        assert tied
        assert every_row
        assert reductions == 1


class Added(nn.Module):
    """A linear layer plus two small matrices, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.ones(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.ones(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        y: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return y


def with_added(rank: int, how: str) -> list[list[str]]:
    """Add parameters after sharding; return the warnings of two steps."""
    mesh = mesh_of((2,), ("fsdp",))
    if how == "ignored":
        model = make(Net)
        fully_shard(model, mesh, ignored_params=set(model.head.parameters()))
    else:
        model = shard(make(Net), mesh)
    if how in ("added", "frozen"):
        model.blocks[1].up = Added(model.blocks[1].up)
    if how == "frozen":
        model.blocks[1].requires_grad_(False)
    elif how in ("replaced", "sharded"):
        model.head = nn.Linear(8, 11).double()
        if how == "sharded":
            fully_shard(model.head, mesh)
    elif how == "a new name":
        model.scale = nn.Parameter(torch.ones(2))
    elif how == "gathered":
        model.blocks[0].unshard()
    seen = []
    for step in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model, tokens(rank, step)).backward()
        seen.append([str(each.message) for each in caught])
    return seen


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("added", "blocks.1.up.down, blocks.1.up.up train"),
        ("replaced", "head.weight, head.bias train"),
        ("a new name", "scale train"),
        ("sharded", None),
        ("frozen", None),
        ("ignored", None),
        ("gathered", None),
    ],
)
def test_parameters_that_are_added_after_sharding_are_warned_of_once(
    ranks: Ranks, how: str, names: str | None
) -> None:
    for first, second in ranks(2).run(with_added, how):
        assert second == []
        assert len(first) == (names is not None)
        assert names is None or first[0].startswith(names)


def frozen_units(rank: int) -> tuple[list[int], Gradients, Gradients]:
    """Freeze all but biases, step, then thaw everything and step again."""
    mesh = mesh_of((2,), ("fsdp",))
    record = RecordingCollectives()
    model = shard(make(Net), mesh, collectives=record)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    model.blocks[1].requires_grad_(False)
    loss_of(model, tokens(rank)).backward()
    frozen = gradients(model)
    calls = [record.by_call["fsdp", "reduce_scatter"].calls]
    calls.append(record.by_call["fsdp", "reduce_scatter"].bytes)
    model.zero_grad()
    model.requires_grad_(True)
    loss_of(model, tokens(rank)).backward()
    return calls, frozen, gradients(model)


def test_only_gradients_of_trained_parameters_are_reduced(ranks: Ranks) -> None:
    expected = reference(2)
    biases = {
        name: value
        for name, value in expected.items()
        if name.endswith("bias") and not name.startswith("blocks.1.")
    }
    numel = 0
    for unit in ("head", "blocks.0", "blocks.2"):
        rows = [-(-len(value) // 2) for name, value in biases.items() if name.startswith(unit)]
        # A row has one flag per parameter and the flags of the tag, padded to 16 bytes.
        numel += -(-(sum(rows) + len(rows) + TAG_FLAGS) // 2) * 2
    for calls, frozen, thawed in ranks(2).run(frozen_units):
        assert calls == [3, numel * 8]
        assert worst(frozen, biases) < 1e-12
        assert worst(thawed, expected) < 1e-12
