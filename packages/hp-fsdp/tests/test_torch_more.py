"""Further checks of torch's own tests of `fully_shard`, for torch and for this package.

As in `test_torch_behaviour`, each case runs with both libraries. Only the import differs. All cases
need two ranks. ``torch_cases.md`` lists which of torch's tests each test restates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from .gathering import Halved, Layers, Wrapped
from .libraries import LIBRARIES, Mlps, input_of, mesh, net, wrap
from .models import (
    WIDTH,
    Gradients,
    Net,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
pytestmark = [
    # `nox -s long` also runs the cases with torch's `fully_shard`.
    pytest.mark.parametrize("by", ["ours", pytest.param("torch", marks=pytest.mark.long)]),
    pytest.mark.filterwarnings("default"),
]


def trained(
    model: Any, ranks: list[int], loss: Callable[[Any, int, int], Tensor], steps: int = 3
) -> list[Gradients]:
    """Train a model with Adam. Return the gradients of each step and the last parameters.

    Args:
        model: Sharded model, or the reference of one process.
        ranks: Ranks for which this process computes losses: its own rank, or all of them.
        loss: Function of the model, the rank and the step.
        steps: Number of steps. Gradients are set to None and to zero alternately.

    Returns:
        Gradients of the steps, and the parameters after the last one.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for rank in ranks:
            (loss(model, rank, step) / len(ranks)).backward()
        seen.append(gradients(model))
        optimizer.step()
    return [*seen, parameters(model)]


def mean_square(model: Any, rank: int, step: int) -> Tensor:
    return cast(Tensor, model(input_of(rank, step)).pow(2).mean())


def largest_error(found: list[Gradients], expected: list[Gradients]) -> float:
    return max(map(worst, found, expected))


# Sharded parameters


def metadata(rank: int, by: str) -> dict[str, bool]:
    """Return facts about shards and gradients. Two ranks do not divide the sizes."""
    plain: Any = make(lambda: nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 3)))
    model: Any = make(lambda: nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 3)))
    wrap(by, model, 2)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    facts = {}
    for (name, p), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        for kind, each in (("", p), (" gradient", p.grad)):
            facts[f"{name}{kind} size"] = each.size() == own.size()
            facts[f"{name}{kind} stride"] = each.stride() == own.stride()
            facts[f"{name}{kind} mesh"] = each.device_mesh == mesh(2)
            facts[f"{name}{kind} placements"] = each.placements == (Shard(0),)
        facts[f"{name} shard"] = torch.equal(p.to_local(), own.chunk(2)[rank])
    return facts


def test_shards_and_gradients_have_the_global_size_and_stride(ranks: Ranks, by: str) -> None:
    for facts in ranks(2).run(metadata, by):
        assert all(facts.values()), facts


def containers(rank: int, by: str) -> list[str]:
    """Return the errors for containers without ``forward``."""
    texts = []
    for module in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="forward") as caught:
            wrap(by, module, 2)
        texts.append(str(caught.value))
    return texts


def test_containers_without_a_forward_raise(ranks: Ranks, by: str) -> None:
    for texts in ranks(2).run(containers, by):
        assert "ModuleList" in texts[0]
        assert "ModuleDict" in texts[1]


# Meta device


class Resettable(nn.Module):
    """Linear layers without bias, and a buffer. ``reset_parameters`` initialises the buffer."""

    buffer: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.register_buffer("buffer", torch.empty(width))

    def reset_parameters(self) -> None:
        """Set the buffer to ones."""
        self.buffer.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers and the buffer."""
        return cast(Tensor, self.down(torch.tanh(self.up(x))) * self.buffer)


def initialised(model: Any, width: int) -> dict[str, bool]:
    """Allocate memory for a sharded model, initialise it and run a step. Return facts."""
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(1337.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    facts = {}
    for name, p in model.named_parameters():
        local = p.to_local()
        facts[f"{name} initialised"] = not (local == 1337.0).any()
        facts[f"{name} on the CPU"] = local.device.type == "cpu"
    for name, buffer in model.named_buffers():
        facts[f"{name} initialised"] = bool((buffer == 1.0).all())
    before = parameters(model)
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    after = parameters(model)
    facts["finite"] = all(bool(value.isfinite().all()) for value in after.values())
    facts["moved"] = any(not torch.equal(after[name], before[name]) for name in after)
    return facts


def from_meta(rank: int, by: str, width: int, half: bool, inside: bool) -> dict[str, bool]:
    library = LIBRARIES[by]
    options: dict[str, Any] = {}
    if half:
        options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if not inside:
        options["mesh"] = mesh(2)
    with torch.device("meta"):
        model: Any = nn.Sequential(Resettable(width), Resettable(width))
        for module in (*model, model) if inside else ():
            library.fully_shard(module, **options)
    for module in (*model, model) if not inside else ():
        library.fully_shard(module, **options)
    facts = {f"{name} on meta": p.device.type == "meta" for name, p in model.named_parameters()}
    torch.manual_seed(rank)
    return facts | initialised(model, width)


@pytest.mark.parametrize("width", [8, 3, 1])
@pytest.mark.parametrize(("half", "inside"), [(False, True), (True, False)])
def test_nested_units_on_the_meta_device_can_be_initialised(
    ranks: Ranks, by: str, width: int, half: bool, inside: bool
) -> None:
    """A width of 1 leaves one rank without elements."""
    for facts in ranks(2).run(from_meta, by, width, half, inside):
        assert all(facts.values()), facts


def tensor_parallel_from_meta(
    rank: int, by: str, width: int, shape: tuple[int, int]
) -> dict[str, bool]:
    whole = mesh_of(shape, ("dp", "tp"))
    with torch.device("meta"):
        model: Any = Resettable(width)
        parallelize_module(model, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for module in (model.up, model.down, model):
            LIBRARIES[by].fully_shard(module, mesh=whole["dp"])
    facts = {f"{name} on meta": p.device.type == "meta" for name, p in model.named_parameters()}
    torch.manual_seed(0)
    return facts | initialised(model, width)


@pytest.mark.parametrize("width", [8, 3])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["2x1", "1x2"])
def test_tensor_parallel_units_on_the_meta_device_can_be_initialised(
    ranks: Ranks, by: str, width: int, shape: tuple[int, int]
) -> None:
    for facts in ranks(2).run(tensor_parallel_from_meta, by, width, shape):
        assert all(facts.values()), facts


# Replicas


class Buffered(Net):
    """The net with a buffer that scales the logits."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(11))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scaled logits."""
        return super().forward(tokens) * self.scale


def broadcast_to_replicas(rank: int, by: str) -> tuple[bool, Gradients]:
    """Let replicas differ in parameters and buffers, then broadcast from replica 0."""
    model = net(by, 2, 1, kind=Buffered)
    whole = mesh(2, 1)
    if whole.get_local_rank("dp_replicate") > 0:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(1337.0)
    differs = bool((model.scale == 1337.0).all())
    group = whole.get_group("dp_replicate")
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.detach()
        dist.broadcast(
            local.to_local() if isinstance(local, DTensor) else local, group=group, group_src=0
        )
    loss_of(model, tokens(rank)).backward()
    return differs, gradients(model)


def test_parameters_and_buffers_can_be_broadcast_to_replicas(ranks: Ranks, by: str) -> None:
    results = ranks(2).run(broadcast_to_replicas, by)
    assert [differs for differs, _ in results] == [False, True]
    for _, found in results:
        assert worst(found, reference(2, Buffered)) < 1e-12


def stream_of_a_hook(rank: int, by: str) -> list[str]:
    """Give an all-reduce hook a stream, with replicas and without. Return the errors."""
    texts = []
    for shape in ((2, 1), (2,)):
        model = wrap(by, nn.Linear(4, 4), *shape)
        try:
            model.set_all_reduce_hook(lambda reduced: None, stream=cast(Any, torch.cpu.Stream()))
            model(torch.ones(1, 4)).sum().backward()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_hook_with_replicas_takes_no_stream(ranks: Ranks, by: str) -> None:
    for replicas, sharded in ranks(2).run(stream_of_a_hook, by):
        assert "stream" in replicas
        assert sharded == ""


# Training


class Twice(nn.Module):
    """Calls one layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the sum of both calls."""
        return cast(Tensor, self.outer(self.inner(x) + self.inner(x)))


def called_twice(rank: int, by: str, option: Any) -> list[Gradients]:
    model = make(Twice)
    wrap(by, model.inner, 2, reshard_after_forward=option)
    wrap(by, model, 2)
    return trained(model, [rank], mean_square, 6)


@pytest.mark.parametrize("option", [True, False, 1])
def test_a_layer_that_is_called_twice_trains(ranks: Ranks, by: str, option: Any) -> None:
    expected = trained(make(Twice), [0, 1], mean_square, 6)
    for found in ranks(2).run(called_twice, by, option):
        assert largest_error(found, expected) < 1e-9


def odd_pair(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def odd_loss(width: int, model: Any, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, width, generator=generator, dtype=torch.float64)
    return cast(Tensor, model(x).pow(2).mean())


def recomputed_tensor_parallel(
    rank: int, by: str, width: int, shape: tuple[int, int], option: bool
) -> tuple[list[Any], list[Gradients]]:
    whole = mesh_of(shape, ("dp", "tp"))
    model: Any = make(lambda: nn.Sequential(odd_pair(width), odd_pair(width)))
    for pair in model:
        parallelize_module(pair, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        recompute(pair)
        LIBRARIES[by].fully_shard(pair, mesh=whole["dp"], reshard_after_forward=option)
    LIBRARIES[by].fully_shard(model, mesh=whole["dp"], reshard_after_forward=option)
    found = trained(model, [whole.get_local_rank("dp")], partial(odd_loss, width))
    names = [(p.device_mesh.mesh_dim_names, len(p.placements)) for p in model.parameters()]
    return names, found


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["2x1", "1x2"])
@pytest.mark.parametrize("option", [True, False])
def test_recomputed_blocks_train_under_tensor_parallelism(
    ranks: Ranks, by: str, width: int, shape: tuple[int, int], option: bool
) -> None:
    plain = make(lambda: nn.Sequential(odd_pair(width), odd_pair(width)))
    expected = trained(plain, list(range(shape[0])), partial(odd_loss, width))
    for names, found in ranks(2).run(recomputed_tensor_parallel, by, width, shape, option):
        assert names == [(("dp", "tp"), 2)] * 8
        assert largest_error(found, expected) < 1e-9


class Branches(nn.Module):
    """A trunk and two branches with separate outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of both branches."""
        x = torch.relu(self.trunk(x))
        return self.one(x), self.two(x)


def branch_by_branch(rank: int, by: str, option: bool) -> list[Gradients]:
    """Run backward through the second branch, then through the first one, in two steps."""
    model = make(Branches)
    for layer in (model.trunk, model.one, model.two, model):
        wrap(by, layer, 2, reshard_after_forward=option)
    seen = []
    for step in range(2):
        model.zero_grad()
        one, two = model(input_of(rank, step))
        model.set_is_last_backward(False)
        two.pow(2).mean().backward(retain_graph=True)
        model.set_is_last_backward(True)
        one.pow(2).mean().backward()
        seen.append(gradients(model))
    return seen


@pytest.mark.parametrize("option", [True, False])
def test_two_backwards_through_two_branches_share_a_trunk(
    ranks: Ranks, by: str, option: bool
) -> None:
    expected = []
    for step in range(2):
        plain = make(Branches)
        for rank in range(2):
            one, two = plain(input_of(rank, step))
            ((one.pow(2).mean() + two.pow(2).mean()) / 2).backward()
        expected.append(gradients(plain))
    for seen in ranks(2).run(branch_by_branch, by, option):
        assert largest_error(seen, expected) < 1e-12


def prefetch_lists(rank: int, by: str) -> list[Gradients]:
    """Prefetch one unit per block in the first step, two units in the second, none in the third."""
    model = net(by, 2, kind=Mlps, reshard_after_forward=True)
    blocks = list(model.blocks)
    seen = []
    for count in (1, 2, 0):
        for n, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[n + 1 : n + 1 + count])
            block.set_modules_to_backward_prefetch(blocks[max(n - count, 0) : n][::-1])
        model.zero_grad()
        mean_square(model, rank, count).backward()
        seen.append(gradients(model))
    return seen


def test_prefetch_lists_can_be_replaced_between_steps(ranks: Ranks, by: str) -> None:
    expected = []
    for count in (1, 2, 0):
        plain = make(Mlps)
        for rank in range(2):
            (mean_square(plain, rank, count) / 2).backward()
        expected.append(gradients(plain))
    for seen in ranks(2).run(prefetch_lists, by):
        assert largest_error(seen, expected) < 1e-12


# One rank


class Divisions(TorchDispatchMode):
    """Records the operators that scale a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its name."""
        name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
        if name in ("div", "mul"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def divisions(rank: int, by: str, factor: float | None) -> tuple[int, Tensor]:
    model: Any = wrap(by, nn.Linear(8, 4, bias=False), 1)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    loss = model(torch.ones(3, 8)).sum()
    with Divisions() as mode, CommDebugMode() as calls:
        loss.backward()
    assert calls.get_total_counts() == 0
    return len(mode.names), model.weight.grad.to_local()


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_at_most_once(ranks: Ranks, by: str, factor: float | None) -> None:
    if by == "torch" and factor is not None:
        pytest.xfail("torch 2.13 divides once if the factor is 1, and twice for other factors")
    ((count, gradient),) = ranks(1).run(divisions, by, factor)
    assert count == (factor == 2.0)
    assert torch.equal(gradient, torch.full((4, 8), 3 / (factor or 1.0)))


# Frozen parameters


def train_biases(
    rank: int, by: str, before: bool, again: bool, option: bool
) -> tuple[list[int], list[Gradients]]:
    """Train biases only. Return the elements of each reduce-scatter's output."""
    model: Any = make(Mlps)

    def freeze() -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))

    if before:
        freeze()
    seen: list[int] = []
    for block in model.blocks:
        if again:
            recompute(block)
        wrap(by, block, 2, reshard_after_forward=option)
        block.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
    wrap(by, model, 2, reshard_after_forward=option)
    if not before:
        freeze()
    return seen, trained(model, [rank], mean_square)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("option", [True, False])
def test_units_in_which_only_biases_train(
    ranks: Ranks, by: str, before: bool, again: bool, option: bool
) -> None:
    plain = make(Mlps)
    for name, p in plain.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    expected = trained(plain, [0, 1], mean_square)
    shards = (12 + WIDTH) // 2
    for seen, found in ranks(2).run(train_biases, by, before, again, option):
        assert len(seen) == 3 * 3
        # This package adds flags and alignment. With the weights there would be 96 elements more.
        assert all(shards <= numel < shards + 32 for numel in seen)
        assert largest_error(found, expected) < 1e-9


def alternate(model: Any, frozen: bool) -> None:
    for n, layer in enumerate(model):
        layer.requires_grad_(not frozen or n % 2 == 1)


def separate_roots(rank: int, by: str, option: bool, unfreeze: bool) -> list[Gradients]:
    """Shard each layer without a common root. Every second layer is frozen."""
    model: Any = make(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
    for layer in model:
        wrap(by, layer, 2, reshard_after_forward=option)
    alternate(model, True)
    seen = []
    for step in range(3):
        model.zero_grad()
        if step == 1:
            with torch.no_grad():
                model(input_of(rank, step))
            continue
        if step == 2:
            alternate(model, not unfreeze)
        mean_square(model, rank, step).backward()
        seen.append(gradients(model))
    return seen


@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize("unfreeze", [True, False])
def test_layers_without_a_common_root_may_be_frozen_alternately(
    ranks: Ranks, by: str, option: bool, unfreeze: bool
) -> None:
    expected = []
    for step in (0, 2):
        plain: Any = make(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))))
        alternate(plain, step == 0 or not unfreeze)
        for rank in range(2):
            (mean_square(plain, rank, step) / 2).backward()
        expected.append(gradients(plain))
    for seen in ranks(2).run(separate_roots, by, option, unfreeze):
        assert largest_error(seen, expected) < 1e-12


# Mixed precision


def in_float16(rank: int, by: str, option: Any, dim: int) -> tuple[Any, list[Gradients]]:
    policy = LIBRARIES[by].MixedPrecisionPolicy(param_dtype=torch.float16)
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": option}
    if dim:
        options["shard_placement_fn"] = lambda p: Shard(dim if p.ndim > 1 else 0)
    model = net(by, 2, kind=Mlps, **options).float()
    reduced: set[torch.dtype] = set()
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda x: reduced.add(x.dtype))
    found = trained(model, [rank], lambda m, r, s: m(input_of(r, s).half()).float().pow(2).mean())
    return (reduced, {p.grad.dtype for p in model.parameters()}), found


def manual_float16() -> list[Gradients]:
    """Compute in float16 with float32 weights in Adam. Return results like `trained`."""
    master = make(Mlps, torch.float32)
    optimizer = torch.optim.Adam(master.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        total: Gradients = {}
        for rank in range(2):
            half = make(Mlps, torch.float16)
            half.load_state_dict(master.state_dict())
            half(input_of(rank, step).half()).float().pow(2).mean().backward()
            for name, gradient in gradients(half).items():
                total[name] = total.get(name, torch.zeros(())) + gradient.float() / 2
        for name, p in master.named_parameters():
            p.grad = total[name]
        seen.append(gradients(master))
        optimizer.step()
    return [*seen, parameters(master)]


@pytest.mark.parametrize(("option", "dim"), [(True, 0), (False, 1), (1, 0)])
def test_training_in_float16_reduces_in_float16(
    ranks: Ranks, by: str, option: Any, dim: int
) -> None:
    expected = manual_float16()
    for (reduced, dtypes), found in ranks(2).run(in_float16, by, option, dim):
        assert reduced == {torch.float16}
        assert dtypes == {torch.float32}
        assert worst(found[0], expected[0]) < 2e-3  # float16


# State dicts


def after_conversion(rank: int, by: str) -> list[bool]:
    """Keep a state dict, convert the model and train. Return facts."""
    model: Any = wrap(by, nn.Linear(6, 6, bias=False), 2)
    kept = model.state_dict()["weight"].to_local()
    before = kept.clone()
    aliased = [kept.data_ptr() == model.weight.to_local().data_ptr()]
    model.double()
    aliased.append(kept.data_ptr() != model.weight.to_local().data_ptr())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    new = model.state_dict()["weight"].to_local()
    moved = not torch.equal(new.float(), before)
    return [*aliased, torch.equal(kept, before), new.dtype is torch.float64, moved]


def test_a_kept_state_dict_does_not_follow_a_converted_model(ranks: Ranks, by: str) -> None:
    for facts in ranks(2).run(after_conversion, by):
        assert all(facts), facts


# Extensions


def with_extension(rank: int, by: str, option: bool, fused: bool) -> list[Tensor]:
    """Train weights with all-gather extensions. Return the losses."""
    torch.manual_seed(0)
    kind: type[Wrapped] = Halved
    model: Any = Layers(kind, 5)
    for layer in (model.up, model.down, model):
        wrap(by, layer, 2, reshard_after_forward=option)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 8, generator=generator)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def rounded_reference() -> list[list[Tensor]]:
    """Return the losses of two ranks in one process that rounds weights to bfloat16."""
    torch.manual_seed(0)
    master = Layers(None, 5)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.01)
    batches = [
        torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)
    ]
    seen: list[list[Tensor]] = [[], []]
    for _ in range(4):
        optimizer.zero_grad()
        model = Layers(None, 5)
        model.load_state_dict(master.state_dict())
        with torch.no_grad():
            for layer in (model.up, model.down):
                layer.weight.copy_(layer.weight.bfloat16())
        for rank, x in enumerate(batches):
            loss = model(x).pow(2).mean()
            seen[rank].append(loss.detach())
            (loss / 2).backward()
        for p, own in zip(master.parameters(), model.parameters(), strict=True):
            p.grad = own.grad
        optimizer.step()
    return seen


@pytest.mark.parametrize(("option", "fused"), [(True, False), (False, False), (False, True)])
def test_extensions_train_with_retained_parameters_and_a_fused_optimizer(
    ranks: Ranks, by: str, option: bool, fused: bool
) -> None:
    expected = rounded_reference()
    for found, wanted in zip(
        ranks(2).run(with_extension, by, option, fused), expected, strict=True
    ):
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-5, atol=0.0)


# Ignored parameters


class Inner(nn.Module):
    """A layer, a child that sharding ignores, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.ignored = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all of them."""
        return cast(Tensor, self.layer(self.ignored(x)) - self.offset)


class Outer(nn.Module):
    """The inner module and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        return cast(Tensor, self.inner(x) + self.offset)


def inside_of_ddp(rank: int, by: str) -> Gradients:
    """Shard a child of a DDP module. DDP reduces the parameters that sharding ignores."""
    model: Any = make(Outer)
    ignored = set(model.inner.ignored.parameters())
    wrap(by, model.inner.layer, 2, ignored_params=ignored)
    wrap(by, model.inner, 2, ignored_params=ignored)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    replicated: Any = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.Adam(replicated.parameters(), lr=0.01)
    for step in range(3):
        mean_square(replicated, rank, step).backward()
        with implicit_replication():
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def test_ddp_reduces_the_ignored_parameters_of_a_sharded_child(ranks: Ranks, by: str) -> None:
    expected = trained(make(Outer), [0, 1], mean_square)[-1]
    for found in ranks(2).run(inside_of_ddp, by):
        assert worst(found, expected) < 1e-9
