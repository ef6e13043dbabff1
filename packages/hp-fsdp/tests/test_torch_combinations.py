"""Combinations that torch's own tests of `fully_shard` check, for torch and for this package.

As in `test_torch_behaviour`, each case runs with both libraries. Only the import differs.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as per_parameter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .libraries import LIBRARIES, Mlps, input_of, net, wrap
from .models import (
    WIDTH,
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
BF16 = torch.bfloat16
RARE = pytest.param(False, marks=pytest.mark.long)  # other cases check the same fact
pytestmark = [
    # `nox -s long` also runs the cases with torch's `fully_shard`.
    pytest.mark.parametrize("by", ["ours", pytest.param("torch", marks=pytest.mark.long)]),
    pytest.mark.filterwarnings("default"),
]


def mean_of(kind: Callable[[], nn.Module], world: int, steps: int = 1) -> Gradients:
    """Return the gradients of one process for the inputs of all ranks in some steps."""
    plain = make(kind)
    for step in range(steps):
        for rank in range(world):
            (plain(input_of(rank, step)).pow(2).mean() / world).backward()
    return gradients(plain)


def policy(by: str, *dtypes: Any, **options: Any) -> Any:
    return LIBRARIES[by].MixedPrecisionPolicy(*dtypes, **options)


# Conversion


def converted(rank: int, by: str, swap: bool) -> tuple[set[torch.dtype], Gradients]:
    """Convert a sharded model. If ``swap`` is True, torch swaps the tensors."""
    model = make(Net, torch.float32)
    for block in model.blocks:
        wrap(by, block, 2)
    wrap(by, model, 2)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    loss_of(model, tokens(rank)).backward()
    dtypes = {each.dtype for p in model.parameters() for each in (p, p.to_local(), p.grad)}
    return dtypes, gradients(model)


@pytest.mark.parametrize("swap", [False, True])
def test_a_conversion_may_swap_the_tensors(ranks: Ranks, by: str, swap: bool) -> None:
    plain = make(Net, torch.float32).double()
    for rank in range(2):
        (loss_of(plain, tokens(rank)) / 2).backward()
    for dtypes, found in ranks(2).run(converted, by, swap):
        assert dtypes == {torch.float64}
        assert worst(found, gradients(plain)) < 1e-12


# Units of which a part runs


class Trunk(nn.Module):
    """An embedding, a body, and a unit of norm and head that the loss calls in parts."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor, head: bool = True) -> Tensor:
        """Return logits, or the input of the head if ``head`` is False."""
        x = self.norm(self.body(self.embedding(batch)))
        return cast(Tensor, self.head(x) if head else x)


def parts_of_loss(model: Any, batch: Tensor, scale: float) -> list[torch.dtype]:
    x = model(batch, head=False)
    seen, back = [x.dtype], []
    for part in x.detach().to(model.norm.weight.dtype).chunk(3):
        part = part.clone().requires_grad_()
        out = model.head(part)
        seen.append(out.dtype)
        (out.to(part.dtype).pow(2).sum() * scale).backward()
        back.append(cast(Tensor, part.grad))
    x.backward(torch.cat(back).to(x.dtype))
    return seen


def in_parts(
    rank: int, by: str, tie: bool, option: Any, cast_by: str, again: bool
) -> tuple[list[torch.dtype], Gradients]:
    model = make(lambda: Trunk(tie))
    double = torch.float64
    inner = {"mp_policy": policy(by, double, output_dtype=BF16)} if cast_by != "nobody" else {}
    outer = inner if cast_by == "all" else {"mp_policy": policy(by, double)}
    if again:
        recompute(model.body)
    common = {"reshard_after_forward": option}
    wrap(by, model.body, 2, **common, **outer)
    if tie:
        wrap(by, [model.embedding, model.norm, model.head], 2, **common, **inner)
    else:
        wrap(by, model.embedding, 2, **common, **outer)
        wrap(by, [model.norm, model.head], 2, **common, **inner)
    wrap(by, model, 2, **common, **outer)
    return parts_of_loss(model, tokens(rank), 1.0), gradients(model)


@pytest.mark.parametrize(
    ("tie", "option", "cast_by", "again"),
    [
        (False, True, "all", False),
        (False, False, "unit", False),
        (True, True, "unit", False),
        (True, False, "all", False),
        (False, True, "nobody", True),
        (False, 1, "nobody", False),
    ],
)
def test_outputs_of_one_module_of_a_unit_are_cast(
    ranks: Ranks, by: str, tie: bool, option: Any, cast_by: str, again: bool
) -> None:
    plain = make(lambda: Trunk(tie))
    for rank in range(2):
        parts_of_loss(plain, tokens(rank), 0.5)
    dtype = torch.float64 if cast_by == "nobody" else BF16
    for seen, found in ranks(2).run(in_parts, by, tie, option, cast_by, again):
        assert seen == [dtype] * 4
        assert worst(found, gradients(plain)) < (1e-12 if cast_by == "nobody" else 0.1)


class Grouped(nn.Module):
    """Embeddings for tokens and positions, blocks, and a head. ``tie`` ties the head."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.places = nn.Embedding(6, WIDTH)
        self.blocks = Mlps().blocks
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(batch) + self.places(torch.arange(len(batch)))
        for block in self.blocks:
            x = x + block(x)
        return cast(Tensor, self.head(self.norm(x)))


def regrouped(rank: int, by: str, how: str, units: str, option: bool) -> list[Gradients]:
    """Recompute blocks; make units of the blocks, of several modules, or of both ends."""
    tie = units != "few"
    model: Any = make(lambda: Grouped(tie))
    for n, block in enumerate(model.blocks):
        if how == "composable":
            recompute(block)
        else:
            model.blocks[n] = wrapping.checkpoint_wrapper(block)
    options = {"reshard_after_forward": option}
    blocks = list(model.blocks)
    if units == "few":
        wrap(by, blocks[0], 2, **options)
        wrap(by, blocks[1:], 2, **options)
        wrap(by, [model.embedding, model.places], 2, **options)
        model.embedding.set_unshard_in_backward(False)
        wrap(by, [model.norm, model.head], 2, **options)
    else:
        if units == "both ends":
            wrap(by, [model.embedding, model.head], 2, **options)
        for block in blocks:
            wrap(by, block, 2, **options)
    wrap(by, model, 2, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        found = gradients(model)
        seen.append({n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found.items()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return seen


@pytest.mark.parametrize("how", ["composable", "wrapper"])
@pytest.mark.parametrize("units", ["blocks", "few", "both ends"])
@pytest.mark.parametrize("option", [True, False])
def test_recomputed_blocks_may_be_units_in_any_way(
    ranks: Ranks, by: str, how: str, units: str, option: bool
) -> None:
    plain = make(lambda: Grouped(units != "few"))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(plain, tokens(rank, step)) / 2).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for seen in ranks(2).run(regrouped, by, how, units, option):
        assert max(map(worst, seen, expected)) < 1e-12


# Other communication in the same step


class Reducing(nn.Module):
    """Starts a sum of its output over all ranks and returns it under way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output and the handle of an all-reduce."""
        y = torch.relu(x @ self.weight)
        return y, dist.all_reduce(y.detach(), async_op=True)


class Waiting(nn.Module):
    """Waits for each pending all-reduce just before the output is used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, found: list[tuple[Tensor, Any]]) -> Tensor:
        """Return the sum of all parts."""
        total = torch.zeros_like(found[0][0])
        for part, (x, work) in zip(self.parts, found, strict=True):
            work.wait()
            total = total + part(x)
        return total


class Overlapping(nn.Module):
    """Gathers each later part while the sum before it is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Reducing() for _ in range(3))
        self.rest = Waiting()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the parts' outputs."""
        found = []
        for module, part in zip(self.first, self.rest.parts, strict=True):
            found.append(module(x))
            if isinstance(part, theirs.FSDPModule):
                cast(Any, part).unshard(async_op=True)
        return cast(Tensor, self.rest(found))


def overlapping(rank: int, by: str, sharded: bool) -> list[float]:
    model: Any = make(Overlapping)
    if sharded:
        for part in model.rest.parts:
            wrap(by, part, 2, reshard_after_forward=False)
        wrap(by, model.rest, 2)
    apply: Any = replicate
    apply(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        loss = model(input_of(rank, step)).sum()
        loss.backward()
        with implicit_replication():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_explicit_unshards_overlap_other_communication(ranks: Ranks, by: str) -> None:
    expected = ranks(2).run(overlapping, by, False)
    for found, wanted in zip(ranks(2).run(overlapping, by, True), expected, strict=True):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-9


def summed_by_hook(rank: int, by: str) -> Gradients:
    """Shard over two ranks, and average over the replicas in a hook of the user's."""
    whole = mesh_of((2, 2), ("dp_replicate", "fsdp"))
    across = whole.get_group("dp_replicate")
    model: Any = make(Mlps)
    for module in (*model.blocks, model):
        LIBRARIES[by].fully_shard(module, mesh=whole["fsdp"])

    def average(reduced: Tensor) -> None:
        dist.all_reduce(reduced, group=across)
        reduced.div_(2)

    for module in (*model.blocks, model):
        module.set_all_reduce_hook(average)
    model(input_of(rank)).pow(2).mean().backward()
    return gradients(model)


def test_a_hook_may_average_over_the_replicas_itself(ranks: Ranks, by: str) -> None:
    for found in ranks(4).run(summed_by_hook, by):
        assert worst(found, mean_of(Mlps, 4)) < 1e-12


# Frozen and trained parameters


class Mixed(nn.Module):
    """Layers that run several times, with and without gradient, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers three times, and add outputs that have no gradient."""
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(torch.relu(self.trained(x)))
            with torch.no_grad():
                x += torch.relu(self.trained(x))
        return x


def mixed(rank: int, by: str, option: Any) -> list[Gradients]:
    model = make(Mixed)
    for layer in (model.first, model.frozen, model.trained, model):
        wrap(by, layer, 2, reshard_after_forward=option)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(input_of(rank, step)).pow(2).mean().backward()
        seen.append(gradients(model))
        optimizer.step()
    return seen


@pytest.mark.parametrize("option", [True, False, 2])
def test_layers_run_with_and_without_gradient_in_one_forward(
    ranks: Ranks, by: str, option: Any
) -> None:
    plain = make(Mixed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(input_of(rank, step)).pow(2).mean() / 2).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for seen in ranks(2).run(mixed, by, option):
        assert max(map(worst, seen, expected)) < 1e-12


class WithIndex(nn.Module):
    """Two layers, and whole numbers that never train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.index = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pick by the numbers."""
        y: Tensor = self.layers(x)
        return y[:, self.index.long()]


def whole_numbers(rank: int, by: str) -> list[torch.dtype]:
    """Freeze all for a first forward. Return the dtypes of reductions and of gradients."""
    torch.manual_seed(0)
    model: Any = wrap(by, WithIndex(), 2, mp_policy=policy(by, BF16, torch.float32))
    seen: list[torch.dtype] = []
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.dtype))
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    model.layers.requires_grad_(True)
    model(torch.ones(2, WIDTH)).float().sum().backward()
    return [*seen, *(p.grad.dtype for p in model.layers.parameters())]


def test_whole_numbers_in_a_unit_that_was_frozen_first(ranks: Ranks, by: str) -> None:
    if by == "torch":
        pytest.xfail("torch 2.13 takes the dtype from a forward in which all are frozen")
    assert ranks(2).run(whole_numbers, by) == [[torch.float32] * 5] * 2


# Memory


def alive() -> int:
    """Return how many elements plain tensors that live have in all."""
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter, DTensor)]
    return sum(each.numel() for each in found)


def grown(rank: int, by: str, shape: tuple[int, ...]) -> int:
    """Return the growth of the live tensors over some steps without garbage collection."""
    model = net(by, *shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)

    def step(number: int) -> None:
        loss_of(model, tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for number in range(5):
            step(number)
        return alive() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_steps_leave_nothing_behind_where_cycles_are_not_collected(
    ranks: Ranks, by: str, shape: tuple[int, ...]
) -> None:
    for more in ranks(torch.Size(shape).numel()).run(grown, by, shape):
        assert more <= 0


def deleted(rank: int, by: str) -> list[bool]:
    """Return which of some tensors live on after their model was deleted."""
    model = net(by, 2, reshard_after_forward=False)
    loss_of(model, tokens(rank)).backward()
    loss_of(model, tokens(rank, 1))
    found = [*model.parameters(), *(p for block in model.blocks for p in block.parameters())]
    for module in (model, *model.blocks):
        module.reshard()
    found += [p.to_local() for p in model.parameters()] + list(model.parameters())
    watched = [weakref.ref(each) for each in found]
    del model, found, module
    gc.collect()
    return [each() is not None for each in watched]


def test_a_deleted_model_leaves_no_tensor_behind(ranks: Ranks, by: str) -> None:
    for lives in ranks(2).run(deleted, by):
        assert not any(lives)


# Offload


def one_of(rank: int, by: str, offload: bool, shape: tuple[int, ...], what: str) -> Gradients:
    """Return gradients of float32 shards that rest on the CPU, or do not."""
    library = LIBRARIES[by]
    options: dict[str, Any] = {}
    if offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=False)
    if what == "half":
        options["mp_policy"] = policy(by, BF16, torch.float32)
    if what == "kept":
        options["reshard_after_forward"] = False
    model = make(Mlps, torch.float32)
    for block in model.blocks:
        if what == "recomputed":
            recompute(block)
        wrap(by, block, *shape, **options)
    wrap(by, model, *shape, **options)
    seen: Gradients = {}
    if what == "hooks":
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.update({name: full(p.grad)})
            )
    if what == "reduction hook":
        model.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(3):
            last = micro == 2
            if what == "synchronised last":
                model.set_requires_gradient_sync(last)
            if what == "ended last":
                model.set_is_last_backward(last)
            x = input_of(rank, 3 * step + micro).float()
            model(x).float().pow(2).mean().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert offload <= all(p.grad.device.type == "cpu" for p in model.parameters())
    return seen or gradients(model)


WHAT = ["half", "kept", "recomputed", "hooks", "synchronised last", "ended last"]


@pytest.mark.parametrize(
    ("shape", "what"),
    [*(((2, 2), what) for what in WHAT), ((2,), "reduction hook"), ((2,), "hooks")],
)
def test_offloaded_shards_get_the_gradients_of_others(
    ranks: Ranks, by: str, shape: tuple[int, ...], what: str
) -> None:
    world = torch.Size(shape).numel()
    expected = ranks(world).run(one_of, by, False, shape, what)
    for found, wanted in zip(
        ranks(world).run(one_of, by, True, shape, what), expected, strict=True
    ):
        assert worst(found, wanted) == 0


def in_pieces(rank: int, by: str) -> tuple[set[str], Tensor]:
    """Give offloaded shards on the meta device their values piece by piece."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    offload = LIBRARIES[by].CPUOffloadPolicy(pin_memory=False)
    for layer in (*model, model):
        wrap(by, layer, 2, offload_policy=offload)
    for name, p in list(model.named_parameters()):
        value = torch.arange(16.0).view(4, 4) * (1 + float(name.startswith("1")))
        piece = {name: distribute_tensor(value, p.device_mesh, p.placements)}
        model.load_state_dict(piece, assign=True, strict=False)
    out = model(torch.ones(1, 4))
    return {value.device.type for value in model.state_dict().values()}, out.detach()


def test_offloaded_shards_may_be_loaded_in_pieces(ranks: Ranks, by: str) -> None:
    value = torch.arange(16.0).view(4, 4)
    for devices, out in ranks(2).run(in_pieces, by):
        assert devices == {"cpu"}
        assert torch.equal(out, torch.ones(1, 4) @ value.t() @ (2 * value).t())


# Several roots, prefetch, packed gradients


def three_roots(rank: int, by: str, shape: tuple[int, ...]) -> list[Gradients]:
    """Run the forwards of three models on one mesh, then their backwards."""
    models = [net(by, *shape, kind=Mlps) for _ in range(3)]
    losses = [model(input_of(rank, n)).pow(2).mean() for n, model in enumerate(models)]
    for loss in losses:
        loss.backward()
    return [gradients(model) for model in models]


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_three_roots_on_one_mesh_are_independent(
    ranks: Ranks, by: str, shape: tuple[int, ...]
) -> None:
    expected = []
    for n in range(3):
        plain = make(Mlps)
        for rank in range(4):
            (plain(input_of(rank, n)).pow(2).mean() / 4).backward()
        expected.append(gradients(plain))
    for seen in ranks(4).run(three_roots, by, shape):
        assert max(map(worst, seen, expected)) < 1e-12


def prefetching(rank: int, by: str, shape: tuple[int, ...]) -> list[Gradients]:
    """Let every unit prefetch the next two units, in forward and in backward."""
    model = net(by, *shape, kind=Mlps)
    blocks = list(model.blocks)
    for n in range(len(blocks)):
        blocks[n].set_modules_to_forward_prefetch(blocks[n + 1 : n + 3])
        blocks[n].set_modules_to_backward_prefetch(blocks[max(n - 2, 0) : n][::-1])
    seen = []
    for _ in range(2):
        model(input_of(rank)).pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.nccl
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_explicit_prefetch_changes_no_gradient(
    ranks: Ranks, by: str, shape: tuple[int, ...]
) -> None:
    world = torch.Size(shape).numel()
    for seen in ranks(world).run(prefetching, by, shape):
        assert max(worst(found, mean_of(Mlps, world)) for found in seen) < 1e-12


def with_asynchronous_unshard(rank: int, by: str) -> list[Gradients]:
    model = net(by, 2, kind=Mlps)
    model._set_unshard_async_op(True)
    seen = []
    for step in range(2):
        model(input_of(rank, step)).pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_gathers_may_be_asked_to_be_asynchronous(ranks: Ranks, by: str) -> None:
    expected = []
    for step in range(2):
        plain = make(Mlps)
        for rank in range(2):
            (plain(input_of(rank, step)).pow(2).mean() / 2).backward()
        expected.append(gradients(plain))
    for seen in ranks(2).run(with_asynchronous_unshard, by):
        assert max(map(worst, seen, expected)) < 1e-12


def with_buffers(rank: int, by: str, shape: tuple[int, ...], option: bool, most: int) -> Gradients:
    options = {"mp_policy": policy(by, BF16, BF16), "reshard_after_forward": option}
    model = make(Mlps, torch.float32)
    for block in model.blocks:
        wrap(by, block, *shape, **options)
    wrap(by, model, *shape, **options)
    if most:
        model.set_reduce_scatter_max_input_buffers(most)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(input_of(rank, step).float()).float().sum().backward()
        optimizer.step()
    return {**gradients(model), **{f"{n} after": v for n, v in parameters(model).items()}}


@pytest.mark.nccl
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("option", [True, RARE])
def test_the_number_of_packed_gradients_changes_no_bit(
    ranks: Ranks, by: str, shape: tuple[int, ...], option: bool
) -> None:
    expected = ranks(4).run(with_buffers, by, shape, option, 0)
    for most in (1, 2):
        results = ranks(4).run(with_buffers, by, shape, option, most)
        for found, wanted in zip(results, expected, strict=True):
            assert worst(found, wanted) == 0


# Clipping and scaling


def clipped(rank: int, by: str, shape: tuple[int, ...], norm_type: float) -> tuple[float, int, int]:
    """Return the norm, the sums that it took, and over how many axes it is spread."""
    if len(shape) == 1:
        model = net(by, *shape, kind=Mlps)
        x = input_of(rank)
    else:
        whole = mesh_of(shape, ("dp", "tp"))
        model = make(Mlps)
        first = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, whole["tp"], {"first": first})
        for block in model.blocks:
            parallelize_module(block, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for module in (*model.blocks, model):
            LIBRARIES[by].fully_shard(module, mesh=whole["dp"])
        x = input_of(whole.get_local_rank("dp"))
    model(x).pow(2).mean().backward()
    with CommDebugMode() as mode:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=True)
    sums = sum(n for op, n in mode.get_comm_counts().items() if "all_reduce" in str(op))
    return float(full(norm)), sums, len(norm.placements)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "fsdp-tp"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_a_clip_takes_one_sum_for_each_axis(
    ranks: Ranks, by: str, shape: tuple[int, ...], norm_type: float
) -> None:
    expected = mean_of(Mlps, 2)
    norm = float(nn.utils.get_total_norm(expected.values(), norm_type))
    for found, sums, axes in ranks(torch.Size(shape).numel()).run(clipped, by, shape, norm_type):
        assert abs(found - norm) < 1e-12 * norm
        assert sums == axes == len(shape)


def scaled(rank: int, by: str, infinite: bool) -> tuple[list[float], bool, float]:
    """Scale a loss under tensor parallelism; one rank's gradient may have one infinite element."""
    whole = mesh_of((2, 2), ("dp", "tp"))
    model: Any = make(lambda: nn.Sequential(*Mlps().blocks), torch.float32)
    for block in model:
        parallelize_module(block, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        LIBRARIES[by].fully_shard(block, mesh=whole["dp"])
    LIBRARIES[by].fully_shard(model, mesh=whole["dp"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = model(input_of(whole.get_local_rank("dp")).float()).sum()
    cast(Tensor, scaler.scale(loss)).backward()
    first = next(model.parameters())
    if infinite and rank == 1:
        first.grad.to_local()[0, 0] = float("inf")
    before = first.grad.to_local().clone()
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    halved = torch.equal(first.grad.to_local(), before * 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert bool(optimizer.state) != infinite
    return [float(full(each)) for each in found.values()], halved, scaler.get_scale()


@pytest.mark.parametrize("infinite", [True, False])
def test_every_rank_of_two_axes_learns_of_an_infinite_gradient(
    ranks: Ranks, by: str, infinite: bool
) -> None:
    expected = ([float(infinite)], True, 1.0 if infinite else 2.0)
    assert ranks(4).run(scaled, by, infinite) == [expected] * 4


# Meta device, and parameters that are registered before the first forward


class Norms(nn.Module):
    """Two layers, and a parameter with the norms of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.norms = nn.Parameter(torch.empty(3))

    def init_norms(self) -> None:
        """Register a new parameter that is computed from sharded parameters."""
        with torch.no_grad():
            norms = torch.linalg.norm(self.one.weight, dim=1)
            norms = norms + torch.linalg.norm(self.two.weight, dim=1)
            self.norms = nn.Parameter(norms)

    def forward(self, x: Tensor) -> Tensor:
        """Use all three."""
        y: Tensor = self.two(self.one(x)).sum() + self.norms.sum()
        return y


def from_shards(rank: int, by: str) -> Gradients:
    with torch.device("meta"):
        model: Any = Norms()
    for module in (model.one, model.two, model):
        wrap(by, module, 2)
    for layer in (model.one, model.two):
        layer.to_empty(device="cpu")
        nn.init.ones_(layer.weight)
    model.init_norms()
    model(torch.full((2, 3), rank + 1.0)).backward()
    return gradients(model)


def test_a_parameter_made_of_shards_may_be_registered(ranks: Ranks, by: str) -> None:
    plain = Norms()
    for layer in (plain.one, plain.two):
        nn.init.ones_(layer.weight)
    plain.init_norms()
    for rank in range(2):
        (plain(torch.full((2, 3), rank + 1.0)) / 2).backward()
    for found in ranks(2).run(from_shards, by):
        assert worst(found, gradients(plain)) < 1e-6


# Precision


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    "batch": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)),
    "image": lambda: nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)),
}


def normalised(rank: int, by: str, kind: str, how: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model: Any = NORMS[kind]()
    low = policy(by, dtype)
    norm = policy(by, output_dtype=dtype) if how == "its own policy" else low
    wrap(by, model[1], 2, mp_policy=norm)
    for module in (model[0], model[2], model):
        wrap(by, module, 2, mp_policy=low)
    if how == "buffers":
        model[1].running_mean = model[1].running_mean.to(dtype)
        model[1].running_var = model[1].running_var.to(dtype)
    try:
        out = model(torch.randn(3, 1, 9, 9) if kind == "image" else torch.randn(4, 8))
        out.sum().backward()
    except RuntimeError:
        return "refused"
    return out.dtype if all(p.grad is not None for p in model.parameters()) else None


@pytest.mark.parametrize(
    ("kind", "how", "works"),
    [
        ("layer", "", True),
        ("batch", "", False),  # torch casts no buffers, and its CPU kernels take one dtype
        ("batch", "buffers", True),
        ("image", "", False),
        ("image", "buffers", True),
        ("image", "its own policy", True),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_norms_run_in_low_precision(
    ranks: Ranks, by: str, kind: str, how: str, works: bool, dtype: torch.dtype
) -> None:
    expected = dtype if works else "refused"
    assert ranks(2).run(normalised, by, kind, how, dtype) == [expected] * 2


def outside_inputs(rank: int, by: str, inner: bool) -> list[torch.dtype]:
    """Give a part an input that its parent did not get; return all dtypes that arrive."""
    seen: list[torch.dtype] = []

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            seen.extend([x.dtype, y.dtype])
            return cast(Tensor, self.layer(x))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(4, 4), Part()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return cast(Tensor, self.part(self.first(x), torch.ones(2, 4)))

    model: Any = Whole()
    wrap(by, model.part, 2, mp_policy=policy(by, BF16, cast_forward_inputs=inner))
    wrap(by, model, 2, mp_policy=policy(by, BF16))
    model(torch.zeros(2, 4)).sum().backward()
    return seen


@pytest.mark.parametrize("inner", [True, False])
def test_inputs_from_outside_are_cast_where_the_part_says_so(
    ranks: Ranks, by: str, inner: bool
) -> None:
    expected = [BF16, BF16, BF16 if inner else torch.float32]
    assert ranks(2).run(outside_inputs, by, inner) == [expected] * 2


def tangent(rank: int, by: str) -> tuple[Tensor, Tensor]:
    """Return the jvp of a root's first forward for an unused input."""
    with torch.device("meta"):
        layers = [nn.Linear(8, 12, bias=False), nn.Linear(12, 10, bias=False)]
    low = policy(by, BF16, torch.float32)
    for layer in layers:
        wrap(by, layer, 2, mp_policy=low, reshard_after_forward=False)
        layer.to_empty(device="cpu")
        nn.init.constant_(layer.weight, 0.5)
    hidden = layers[0](torch.ones(8, dtype=BF16))
    given = torch.ones(10, dtype=BF16, requires_grad=True)
    jvp: Any = torch.func.jvp
    out, found = jvp(lambda _: layers[1](hidden), (given,), (torch.ones(10, dtype=BF16),))
    return out.detach(), found.detach()


def test_the_tangent_of_an_unused_input_is_zero(ranks: Ranks, by: str) -> None:
    for out, found in ranks(2).run(tangent, by):
        assert torch.equal(out, torch.full((10,), 24.0, dtype=BF16))
        assert torch.equal(found, torch.zeros(10, dtype=BF16))


def divided(rank: int, by: str, factor: float) -> Gradients:
    model = make(Mlps, torch.float32)
    low = policy(by, BF16, torch.float32)
    for block in model.blocks:
        wrap(by, block, 2, mp_policy=low)
    wrap(by, model, 2, mp_policy=low)
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no other for torch's
    model(input_of(rank).to(BF16)).float().sum().backward()
    return gradients(model)


def test_a_divide_factor_holds_in_mixed_precision(ranks: Ranks, by: str) -> None:
    expected = ranks(2).run(divided, by, 2.0)
    for found, mean in zip(ranks(2).run(divided, by, 8.0), expected, strict=True):
        wanted = {n: g if n.startswith("blocks") else g / 4 for n, g in mean.items()}
        assert worst(found, wanted) == 0  # powers of two


# Meshes for everything


WHOLE: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "fsdp": ((4,), ("dp",), {"shard": "dp"}),
    "ddp": ((4,), ("dp",), {"replicate": "dp"}),
    "two replicas": ((1, 2, 2), ("a", "b", "dp"), {"shard": "dp", "replicate": ("a", "b")}),
    "fsdp-tp": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "hsdp-tp": ((1, 2, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
}


def other_dim(parameter: Any) -> Shard:
    """Cut along the first dimension that tensor parallelism leaves whole."""
    taken = [each.dim for each in parameter.placements if isinstance(each, Shard)]
    return Shard(1 if 0 in taken and parameter.ndim > 1 else 0)


def on_one_mesh(rank: int, by: str, case: str, option: bool) -> tuple[list[Any], list[Gradients]]:
    shape, names, dims = WHOLE[case]
    whole = mesh_of(shape, names)
    model: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)))
    data = [Shard(0) if name != "tp" else Replicate() for name in names]
    for n in (0, 2):
        for name, p in list(model[n].named_parameters(recurse=False)):
            dim = Shard(0 if n == 0 else 1) if name == "weight" else Replicate()
            places = [dim if axis == "tp" else Replicate() for axis in names]
            model[n].register_parameter(name, nn.Parameter(distribute_tensor(p, whole, places)))
    library = LIBRARIES[by]
    library.fully_shard(
        model,
        mesh=whole,
        dp_mesh_dims=library.DataParallelMeshDims(**dims),
        reshard_after_forward=option,
        shard_placement_fn=other_dim if "tp" in names and "shard" in dims else None,
    )
    replica = rank // 2 if "tp" in names else rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        x = DTensor.from_local(input_of(replica, step), whole, data, run_check=False)
        out = model(x).redistribute(placements=data).to_local()
        out.pow(2).mean().backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [p.placements for p in model.parameters()], seen


@pytest.mark.parametrize("case", list(WHOLE))
@pytest.mark.parametrize("option", [True, RARE])
def test_dtensors_on_a_mesh_for_everything_train(
    ranks: Ranks, by: str, case: str, option: bool
) -> None:
    plain = make(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)))
    world = 2 if "tp" in case else 4
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            (plain(input_of(rank, step)).pow(2).mean() / world).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for placements, seen in ranks(4).run(on_one_mesh, by, case, option):
        assert max(map(worst, seen, expected)) < 1e-12
        if case == "fsdp":
            assert all(each == (Shard(0),) for each in placements)
        if case == "fsdp-tp":
            assert placements == [
                (Shard(1), Shard(0)),
                (Shard(0), Replicate()),
                (Shard(0), Shard(1)),
                (Shard(0), Replicate()),
            ]


# Another mesh for some parameters of a unit


class OnMesh(NamedTuple):
    """Has the attributes of ``ShardPlacementResult``, which torch 2.11 lacks."""

    placement: Shard
    mesh_info: Any


class Moe(nn.Module):
    """A dense layer, and experts that are sharded over the expert-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.ep: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs of all experts."""
        x = torch.tanh(self.dense(x))
        weight = self.experts
        if self.ep is None:
            return torch.einsum("tw,ewv->tv", x, weight)
        # Every rank sends its rows to the others and receives the outputs of their experts.
        exchange, back = cast(Any, _Exchange).apply, cast(Any, _Return).apply
        rows = exchange(x, self.ep)
        local = cast(DTensor, weight).to_local()
        return cast(Tensor, back(torch.einsum("tw,ewv->tv", rows, local), self.ep))


class _Exchange(torch.autograd.Function):
    """Gather the rows of all ranks. Backward sums the gradients for each source rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Gather."""
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum, and keep the own rows."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.rows)[dist.get_rank(ctx.group)], None


class _Return(torch.autograd.Function):
    """Sum the outputs of all ranks' experts, and return this rank's rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        """Sum and keep."""
        ctx.group = group
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Gather the gradients of all rows."""
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Moes(nn.Module):
    """Two such layers and one of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Moe() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Run all."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def experts_apart(
    rank: int, by: str, replicas: int, option: Any, offload: bool
) -> tuple[bool, list[Gradients]]:
    """Shard experts over other ranks than the rest of their unit, by one call for both."""
    shape = (replicas, 4 // replicas // 2, 2)
    names = ("rep", "efsdp", "ep")
    sparse = mesh_of(shape, names)
    if replicas == 1:
        data = cached("moe data", lambda: sparse["efsdp", "ep"]._flatten("dp"))
        dense = per_parameter.FSDPMeshInfo(data, shard_mesh_dim=0)
        apart = per_parameter.FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0)
    else:
        data = mesh_of((replicas, 4 // replicas), ("rep", "dp"))
        dense = per_parameter.HSDPMeshInfo(data, shard_mesh_dim=1, replicate_mesh_dim=0)
        over = sparse["rep", "efsdp"]
        apart = per_parameter.HSDPMeshInfo(over, shard_mesh_dim=1, replicate_mesh_dim=0)
    model: Any = make(Moes)
    on_mesh: Any = getattr(per_parameter, "ShardPlacementResult", OnMesh)
    options: dict[str, Any] = {}
    if offload:
        options["offload_policy"] = LIBRARIES[by].CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        block.ep = sparse.get_group("ep")
        whole = distribute_tensor(block.experts.data, sparse["ep"], [Shard(0)])
        block.experts = nn.Parameter(whole)
        experts = {block.experts}
        LIBRARIES[by].fully_shard(
            block,
            mesh=data,
            shard_placement_fn=lambda p, experts=experts: on_mesh(
                Shard(0), apart if p in experts else dense
            ),
            **options,
        )
    LIBRARIES[by].fully_shard(model, mesh=data, reshard_after_forward=option, **options)
    plain = parameters(make(Moes))
    same = all(torch.equal(full(p), plain[name]) for name, p in model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(input_of(rank, step)).pow(2).mean().backward()
        seen.append(gradients(model))
        optimizer.step()
    return same, seen


@pytest.mark.parametrize(
    ("replicas", "option", "offload"),
    [(1, False, False), (1, True, False), (1, 2, False), (2, True, False), (2, False, True)],
)
def test_experts_of_a_unit_may_have_a_mesh_of_their_own(
    ranks: Ranks, by: str, replicas: int, option: Any, offload: bool
) -> None:
    plain = make(Moes)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(4):
            (plain(input_of(rank, step)).pow(2).mean() / 4).backward()
        # Gradients of experts are means over the ranks that hold them, not over the `ep` ranks.
        for name, p in plain.named_parameters():
            if "experts" in name and p.grad is not None:
                p.grad *= 2
        expected.append(gradients(plain))
        optimizer.step()
    for same, seen in ranks(4).run(experts_apart, by, replicas, option, offload):
        assert same
        assert max(map(worst, seen, expected)) < 1e-12


# State dicts


def saved_and_loaded(rank: int, by: str, case: str, width: int, option: bool) -> dict[str, bool]:
    """Load new values into shards. Return facts about the state dict and its memory."""
    shape, names = {
        "fsdp": ((4,), ("fsdp",)),
        "hsdp": ((2, 2), ("dp_replicate", "fsdp")),
        "fsdp-tp": ((2, 2), ("fsdp", "tp")),
        "hsdp-tp": ((1, 2, 2), ("dp_replicate", "fsdp", "tp")),
        "cut elsewhere": ((4,), ("fsdp",)),
    }[case]
    whole = mesh_of(shape, names)
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(2))
    )
    data = whole
    if "tp" in names:
        data = whole["fsdp"] if len(names) == 2 else whole[names[:2]]
        for pair in model:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(pair, whole["tp"], plan)

    def largest(p: nn.Parameter) -> Shard:
        return Shard(p.shape.index(max(p.shape)))

    place = largest if case == "cut elsewhere" else None
    for module in (*model, model):
        LIBRARIES[by].fully_shard(
            module, mesh=data, reshard_after_forward=option, shard_placement_fn=place
        )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
        if case in ("fsdp", "hsdp", "cut elsewhere"):
            model(torch.ones(2, width))  # keeps parameters gathered, or does not
    state = model.state_dict()
    own = dict(model.named_parameters())
    pointers = {name: p.to_local().data_ptr() for name, p in own.items()}
    facts = {
        "keys": list(state) == list(own),
        "DTensors": all(isinstance(value, DTensor) for value in state.values()),
        "sizes": all(value.size() == own[name].size() for name, value in state.items()),
        "no copy": all(v.to_local().data_ptr() == pointers[n] for n, v in state.items()),
    }
    model.load_state_dict({n: v.detach().clone().fill_(42.0 + rank) for n, v in state.items()})
    for name, p in model.named_parameters():
        local = p.to_local()
        facts[f"{name} loaded"] = bool((local == 42.0 + rank).all())
        if local.size(0) * p.device_mesh.size() == p.size(0):
            facts[f"{name} stays"] = local.data_ptr() == pointers[name]
    return facts


@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize(
    ("case", "width"),
    [
        ("fsdp", 3),
        ("fsdp", 5),
        ("hsdp", 3),
        ("cut elsewhere", 16),
        ("fsdp-tp", 4),
        ("fsdp-tp", 6),
        ("hsdp-tp", 10),
    ],
)
def test_a_state_dict_is_loaded_in_place(
    ranks: Ranks, by: str, case: str, width: int, option: bool
) -> None:
    for facts in ranks(4).run(saved_and_loaded, by, case, width, option):
        assert all(facts.values()), facts


def kept_state(rank: int, by: str) -> list[bool]:
    """Return step by step whether a state dict that is kept has the memory of the shards."""
    torch.manual_seed(0)
    model: Any = wrap(by, nn.Linear(5, 5, bias=False), 2, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = model.state_dict()
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(5, 5) * step).sum().backward()
        optimizer.step()
        one, other = state["weight"].to_local(), model.weight.to_local()
        seen.append(one.data_ptr() == other.data_ptr() and torch.equal(one, other))
    return seen


def test_a_state_dict_that_is_kept_follows_the_steps(ranks: Ranks, by: str) -> None:
    assert ranks(2).run(kept_state, by) == [[True] * 3] * 2


# Hybrid sharding


def with_replicas(
    rank: int, by: str, width: int, option: bool, again: bool, sync: bool
) -> list[tuple[Gradients, Gradients]]:
    """Train layers of odd sizes on two axes, with microbatches."""
    model: Any = make(lambda: odd_layers(width))
    offload = LIBRARIES[by].CPUOffloadPolicy(pin_memory=False)
    for layer in model:
        if again:
            recompute(layer)
        wrap(by, layer, 2, 2, reshard_after_forward=option, offload_policy=offload)
    wrap(by, model, 2, 2, reshard_after_forward=option, offload_policy=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(2):
        for micro in range(3):
            if sync:
                model.set_requires_gradient_sync(micro == 2)
            model(odd_input(rank, 3 * step + micro, width)).pow(2).mean().backward()
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        seen.append((found, parameters(model)))
    return seen


def odd_layers(width: int) -> nn.Module:
    def pair(times: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, times * width), nn.ReLU(), nn.Linear(times * width, width)
        )

    return nn.Sequential(nn.LayerNorm(width, bias=False), pair(3), pair(4), pair(3))


def odd_input(rank: int, step: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("width", [3, pytest.param(16, marks=pytest.mark.long), 17])
@pytest.mark.parametrize(
    ("option", "again", "sync"), [(True, True, True), (False, False, False), (True, False, True)]
)
def test_offloaded_replicas_train_with_microbatches(
    ranks: Ranks, by: str, width: int, option: bool, again: bool, sync: bool
) -> None:
    plain = make(lambda: odd_layers(width))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    expected = []
    for step in range(2):
        for micro in range(3):
            for rank in range(4):
                loss = plain(odd_input(rank, 3 * step + micro, width)).pow(2).mean()
                (loss / 4).backward()
        found = gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((found, parameters(plain)))
    for seen in ranks(4).run(with_replicas, by, width, option, again, sync):
        for (found, after), (wanted, wanted_after) in zip(seen, expected, strict=True):
            assert worst(found, wanted) < 1e-12
            assert worst(after, wanted_after) < 1e-12


# Calls that only one of the two libraries accepts


def taken(rank: int, by: str, case: str) -> str:
    """Return the result or the error of a call that torch rejects."""
    library = LIBRARIES[by]
    model: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    try:
        if case == "no names":
            unnamed = cached("unnamed", lambda: init_device_mesh("cpu", (1, 2)))
            library.fully_shard(model, mesh=unnamed)
        elif case == "a list as root":
            wrap(by, list(model), 2)
        else:
            one, other = (init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)) for _ in "12")
            for layer in model:
                for name, p in list(layer.named_parameters()):
                    whole = distribute_tensor(p.detach(), one, [Replicate()])
                    layer.register_parameter(name, nn.Parameter(whole))
            dims = library.DataParallelMeshDims(shard="fsdp")
            library.fully_shard(model, mesh=other, dp_mesh_dims=dims)
            return "taken"
        model(input_of(rank)).sum().backward()
    except (AssertionError, RuntimeError, ValueError):
        return "refused"
    return "taken"


@pytest.mark.parametrize("case", ["no names", "a list as root", "an equal mesh"])
def test_torch_alone_refuses(ranks: Ranks, by: str, case: str) -> None:
    assert ranks(2).run(taken, by, case) == ["taken" if by == "ours" else "refused"] * 2
