"""Which module is the root of a step, which units there are, and which meshes they may be on."""

import os
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hp_fsdp import FSDPModule, MeshError, UnshardHandle, fully_shard

from .models import (
    WIDTH,
    Block,
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

Ranks = Callable[[int], RankPool]


def part_first(rank: int) -> tuple[Gradients, Gradients]:
    """Train a block before its root has run, then the whole."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    block = model.blocks[1]
    block(torch.full((2, WIDTH), rank + 1.0, dtype=torch.float64)).pow(2).sum().backward()
    alone = gradients(block)
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    return alone, gradients(model)


def test_a_part_may_run_before_its_root(ranks: Ranks) -> None:
    plain = make(Net).blocks[1]
    for rank in range(2):
        x = torch.full((2, WIDTH), rank + 1.0, dtype=torch.float64)
        (plain(x).pow(2).sum() / 2).backward()
    for alone, found in ranks(2).run(part_first):
        assert worst(alone, gradients(plain)) < 1e-12
        assert worst(found, reference(2)) < 1e-12


def under_way(rank: int, root_first: bool) -> Gradients:
    """Leave a block's reductions under way, then run its root, the first time or not."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    if root_first:
        with torch.no_grad():
            model(tokens(rank))
    block = model.blocks[1]
    block.set_is_last_backward(False)
    block(torch.full((2, WIDTH), rank + 1.0, dtype=torch.float64)).pow(2).sum().backward()
    block.set_is_last_backward(True)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("root_first", [True, False])
def test_reductions_of_a_part_are_not_lost_to_its_root(ranks: Ranks, root_first: bool) -> None:
    plain = make(Net)
    for rank in range(2):
        x = torch.full((2, WIDTH), rank + 1.0, dtype=torch.float64)
        (plain.blocks[1](x).pow(2).sum() / 2).backward()
        (loss_of(plain, tokens(rank)) / 2).backward()
    for found in ranks(2).run(under_way, root_first):
        assert worst(found, gradients(plain)) < 1e-12


class Waited:
    """An event that counts who waits for it."""

    count = 0

    def wait(self) -> None:
        """Count."""
        self.count += 1


def event_of_a_part(rank: int) -> int:
    """Give a block that has run an event to wait for, then run its root."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    event = Waited()
    with torch.no_grad():
        model.blocks[0](torch.ones(2, WIDTH, dtype=torch.float64))
        model.blocks[0].set_post_optim_event(cast(torch.Event, event))
        model(tokens(rank))
    return event.count


def test_a_root_waits_for_the_event_that_a_part_was_given(ranks: Ranks) -> None:
    assert ranks(2).run(event_of_a_part) == [1, 1]


class Halves(nn.Module):
    """Two halves, each with blocks. The model itself is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(), Block())
        self.second = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        return cast(Tensor, self.second(self.first(x)))


def input_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def list_root(rank: int) -> list[Gradients]:
    model: Any = make(Halves)
    mesh = mesh_of((2,), ("fsdp",))
    for block in (*model.first, *model.second):
        fully_shard(block, mesh)
    fully_shard([model.first, model.second], mesh)
    seen = []
    for _ in range(2):
        model(input_of(rank)).pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_a_list_may_be_the_root(ranks: Ranks) -> None:
    plain = make(Halves)
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for steps in ranks(2).run(list_root):
        assert [worst(found, gradients(plain)) < 1e-12 for found in steps] == [True, True]


class NoInput(nn.Module):
    """Makes its own input, and has a part without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.act = nn.Tanh()

    def forward(self) -> Tensor:
        """Return the block's output for ones."""
        return cast(Tensor, self.act(self.block(torch.ones(2, WIDTH, dtype=torch.float64))))


def no_input(rank: int) -> tuple[Gradients, bool]:
    model: Any = make(NoInput)
    mesh = mesh_of((2,), ("fsdp",))
    for module in (model.block, model.act, model):
        fully_shard(module, mesh)
    handle = model.act.unshard(async_op=True)
    handle.wait()
    for _ in range(2):
        model.zero_grad()
        (model() * (rank + 1)).pow(2).mean().backward()
    return gradients(model), isinstance(handle, UnshardHandle)


@pytest.mark.nccl
def test_a_root_may_take_no_input_and_a_unit_have_no_parameters(ranks: Ranks) -> None:
    plain = make(NoInput)
    for rank in range(2):
        ((plain() * (rank + 1)).pow(2).mean() / 2).backward()
    for found, handled in ranks(2).run(no_input):
        assert handled
        assert worst(found, gradients(plain)) < 1e-12


def on_mesh(rank: int, how: str) -> Gradients:
    """Step on a mesh without names, or made of groups that are there already."""
    if how == "unnamed":
        mesh = cached(how, lambda: DeviceMesh("cpu", torch.arange(4).view(2, 2)))
    elif how == "group":
        mesh = cached(
            how, lambda: DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), "cpu")
        )
    else:
        own = mesh_of((2, 2), ("dp_replicate", "fsdp"))
        mesh = cached(
            how,
            lambda: DeviceMesh.from_group(
                own.get_all_groups(),
                "cpu",
                mesh=own.mesh,
                mesh_dim_names=("dp_replicate", "fsdp"),
            ),
        )
    model: Any = shard(make(Net), mesh)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["unnamed", "group", "two groups"])
def test_a_mesh_needs_no_names_and_may_be_made_of_groups(ranks: Ranks, how: str) -> None:
    for found in ranks(4).run(on_mesh, how):
        assert worst(found, reference(4)) < 1e-12


def elsewhere(rank: int) -> str:
    """Shard a module with a DTensor on a mesh of another device type."""
    other = DeviceMesh("meta", [rank], _init_backend=False, _rank=0)
    linear = nn.Linear(4, 4)
    whole = torch.empty(4, device="meta")
    linear.bias = nn.Parameter(DTensor.from_local(whole, other, [Replicate()], run_check=False))
    with pytest.raises(MeshError) as caught:
        fully_shard(linear, mesh_of((2,), ("fsdp",)))
    return str(caught.value)


def test_meshes_of_two_types_of_device_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(elsewhere):
        assert "bias is a DTensor on a meta mesh" in said
        assert "a cpu mesh" in said


def outside(rank: int) -> str:
    """Shard over a mesh of half the ranks, on the others; it has no process groups."""
    linear = nn.Linear(8, 8)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",), _init_backend=False)
    if rank < 2:
        return ""
    try:
        fully_shard(linear, mesh)
    except MeshError as error:
        return str(error)
    return ""


def test_a_rank_outside_of_the_mesh_raises(ranks: Ranks) -> None:
    said = ranks(4).run(outside)
    for rank in (2, 3):
        assert said[rank].startswith(f"rank {rank} is not in DeviceMesh")
        assert said[rank].endswith("only on the ranks [0, 1] of the mesh")


def three_axes(rank: int) -> str:
    with pytest.raises(MeshError) as caught:
        fully_shard(nn.Linear(2, 2), mesh_of((2, 1, 1), ("a", "b", "c")))
    return str(caught.value)


def test_a_mesh_of_three_axes_raises_with_the_legal_values(ranks: Ranks) -> None:
    for said in ranks(2).run(three_axes):
        assert said.startswith("a mesh of 3 axes; give one axis to shard over, or two")


def by_hand(rank: int) -> bool:
    """Reshard after a forward that kept everything."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), reshard_after_forward=False)
    before = {name: full(p) for name, p in make(Net).named_parameters()}
    model(tokens(rank))
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    same = all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    return plain and sharded and same


def test_explicit_reshard_changes_no_value(ranks: Ranks) -> None:
    assert all(ranks(2).run(by_hand))


def without_mesh(rank: int) -> dict[str, bool]:
    """Shard without a mesh, and compare with torch."""
    model: Any = make(Net)
    other: Any = make(Net)
    for sharded, wrap in ((model, fully_shard), (other, theirs.fully_shard)):
        for block in (*sharded.blocks, sharded):
            wrap(block)
    facts = {
        "mesh": all(p.device_mesh == init_device_mesh("cpu", (2,)) for p in model.parameters()),
        "no names": all(p.device_mesh.mesh_dim_names is None for p in model.parameters()),
    }
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    model.load_state_dict(other.state_dict())
    facts["loaded"] = all(
        torch.equal(full(one), full(two))
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )
    with torch.no_grad():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.copy_(two + 1.0)
    loss_of(model, tokens(rank)).backward()
    loss_of(other, tokens(rank)).backward()
    both = [p.grad for p in (*model.parameters(), *other.parameters())]
    norm = nn.utils.get_total_norm(cast(Any, both))
    wanted = torch.stack([full(each).norm() for each in cast(Any, both)]).norm()
    facts["clipped together"] = torch.allclose(full(norm), wanted)
    return facts


def test_without_a_mesh_parameters_are_on_the_same_mesh_as_with_torch(ranks: Ranks) -> None:
    for facts in ranks(2).run(without_mesh):
        assert all(facts.values()), facts


def without_group(rank: int) -> tuple[bool, int]:
    """Shard before a process group exists. The environment variables describe the group."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    model: Any = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return dist.is_initialized(), model.weight.device_mesh.size()


def test_without_a_mesh_the_process_group_is_initialised() -> None:
    pool = RankPool(1)  # a new pool, so that the groups of other pools are kept
    try:
        assert pool.run(without_group) == [(True, 1)]
    finally:
        pool.close()


class InPlace(nn.Module):
    """Has an in-place module without parameters, and a module that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(12, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run all parts."""
        return cast(Tensor, self.parts(x))


def in_place(rank: int) -> list[Gradients]:
    model: Any = make(InPlace)
    mesh = mesh_of((2,), ("fsdp",))
    for part in model.parts:
        fully_shard(part, mesh)
    fully_shard(model, mesh)
    seen = []
    for _ in range(3):
        model(input_of(rank)).pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_a_unit_without_parameters_may_work_in_place(ranks: Ranks) -> None:
    plain = make(InPlace)
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for steps in ranks(2).run(in_place):
        assert [worst(found, gradients(plain)) < 1e-12 for found in steps] == [True] * 3


class Table(nn.Module):
    """Returns its parameter and the square of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> dict[str, Tensor]:
        """Return both."""
        return {"weight": self.weight, "square": self.weight.square()}


class Tied(nn.Module):
    """Computes with the tensors that a child module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use both tensors of the table."""
        found = self.table()
        return cast(Tensor, self.head(x @ found["weight"] + x @ found["square"]))


def leaf_hooks(rank: int) -> tuple[list[Gradients], set[int]]:
    """Return the gradients of some steps, and how many hooks the unit's parameter has in each."""
    model: Any = make(Tied)
    mesh = mesh_of((2,), ("fsdp",))
    fully_shard(model.table, mesh, reshard_after_forward=False)
    fully_shard(model, mesh)
    seen, counts = [], set()
    for _ in range(3):
        output = model(input_of(rank))
        counts.add(len(model.table.weight._backward_hooks or ()))
        output.pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen, counts


def test_a_unit_that_returns_its_parameter_leaves_no_hooks_on_it(ranks: Ranks) -> None:
    plain = make(Tied)
    for rank in range(2):
        (plain(input_of(rank)).pow(2).mean() / 2).backward()
    for steps, counts in ranks(2).run(leaf_hooks):
        assert counts == {0}
        assert [worst(found, gradients(plain)) < 1e-12 for found in steps] == [True] * 3


def given_back(rank: int) -> tuple[int, bool]:
    """Give a unit without parameters a leaf, which it returns."""
    identity = fully_shard(nn.Identity(), mesh_of((2,), ("fsdp",)))
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        cast(Any, identity)(x).sum().backward()
    found: Any = x
    return len(found._backward_hooks or ()), bool(found.grad.eq(3).all())


def test_a_unit_leaves_no_hooks_on_a_leaf_that_it_gives_back(ranks: Ranks) -> None:
    assert ranks(2).run(given_back) == [(0, True)] * 2
