"""Parameters that some ranks, or none, use in a step."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from hp_dtensor import clip_grad_norm_
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    sharded_optimizer,
)

from .models import WIDTH, Gradients, full, gradients, make, mesh_of, parameters, shard, worst

Ranks = Callable[[int], RankPool]
Uses = dict[int, str]  # block -> the branches that it runs
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


class Branches(nn.Module):
    """Three branches, each with a large and a small parameter, and one that all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Linear(WIDTH, 36))
        self.down = nn.Linear(36, WIDTH, bias=False)
        self.table = nn.Embedding(11, 36)
        self.chosen = "abc"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the outputs of the chosen branches."""
        y = x.new_zeros(len(x), 36)
        for name in self.chosen:
            branch: Any = self.table if name == "t" else getattr(self, name)
            y = y + (branch(torch.arange(len(x))) if name == "t" else branch(x))
        return x + torch.tanh(self.down(y))


class Model(nn.Module):
    """Blocks of branches. A forward uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Branches() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.spare = nn.Parameter(torch.randn(3, 2))
        self.skipped: tuple[int, ...] = ()

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(batch)
        for index, block in enumerate(self.blocks):
            y = block(x)
            if index not in self.skipped:
                x = y
        return cast(Tensor, self.head(x))

    def choose(self, uses: Uses, skipped: Iterable[int] = ()) -> None:
        """Run other branches from now on."""
        for index, block in enumerate(self.blocks):
            cast(Branches, block).chosen = uses.get(index, "abt")
        self.skipped = tuple(skipped)


def uses_of(rank: int, step: int) -> Uses:
    """Return the branches that a rank uses in a step. No rank uses ``c`` of block 0."""
    return {
        0: "abt" if rank == 0 else "b",
        1: "ab" if step % 2 == 0 else "c",
        2: "c" if rank == step % 4 else "",
        3: "t" if step == 1 else "a",
    }


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randint(0, 11, (6,), generator=generator)
    return cast(Tensor, model(batch).pow(2).mean())


def reference(world: int, steps: Iterable[int]) -> Gradients:
    """Return one process's gradients of all losses. Unused parameters have no gradient."""
    model: Any = make(Model)
    for step in steps:
        for rank in range(world):
            model.choose(uses_of(rank, step))
            (loss_of(model, rank, step) / world).backward()
    return gradients(model)


def run_step(model: Any, rank: int, step: int) -> None:
    model.choose(uses_of(rank, step))
    loss_of(model, rank, step).backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate"},
    "ragged": {"layout": "ragged"},
    "ragged rows": {
        "layout": "ragged",
        "granularity": lambda p: p.shape[-1],
        "grads": "accumulate",
    },
    "ragged accumulate": {"layout": "ragged", "grads": "accumulate"},
    "packed": {"direct_bytes": float("inf"), "grads": "accumulate"},
    "reshard to two": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": False},
    "last dim": {"shard_placement_fn": lambda p: Shard(p.ndim - 1 if p.shape[-1] % 4 == 0 else 0)},
    "small ones whole": {"min_shard_numel": 50},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def sharded(shape: tuple[int, ...], name: str, **more: Any) -> Any:
    options = {**OPTIONS[name], **more}
    return shard(make(Model), mesh_of(shape, NAMES[len(shape)]), **options)


HOWS = ["once", "added sharded", "not synchronised", "summed over replicas once", "not last"]

CASES = [
    *(((4,), name) for name in OPTIONS),
    *(((2, 2), name) for name in ("copy", "accumulate", "ragged accumulate", "small ones whole")),
    *((shape, name) for shape in [(1,), (2, 1)] for name in ("copy", "accumulate", "ragged")),
]
# Cases that always run. `nox -s long` runs the others, and the cases of (4,) on two ranks.
OFTEN = [
    *(((4,), name) for name in ("copy", "ragged")),
    *(((2, 2), name) for name in ("copy", "ragged accumulate")),
    *(((1,), "accumulate"), ((2, 1), "accumulate")),
]


def in_every_way(rank: int, shape: tuple[int, ...], name: str) -> dict[str, Gradients]:
    """Return the gradients of one step, and of two microbatches in several ways."""
    model = sharded(shape, name)
    found = {}
    for how in HOWS:
        model.zero_grad()
        if how != "once":
            if how == "not synchronised":
                model.set_requires_gradient_sync(False)
            elif how == "summed over replicas once":
                model.set_requires_all_reduce(False)
            elif how == "not last":
                model.set_is_last_backward(False)
            run_step(model, rank, 1)
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)
        run_step(model, rank, 0)
        found[how] = gradients(model)
    return found


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *OFTEN,
        *(((2,), name) for name in OPTIONS if ((4,), name) not in OFTEN),
        *(pytest.param(*case, marks=pytest.mark.long) for case in CASES if case not in OFTEN),
    ],
    ids=str,
)
def test_unused_parameters_have_no_gradient_and_others_equal_one_process(
    ranks: Ranks, shape: tuple[int, ...], name: str
) -> None:
    world = torch.Size(shape).numel()
    once, both = reference(world, (0,)), reference(world, (0, 1))
    assert 0 < len(once) < len(both) < len(list(Model().parameters()))
    for found in ranks(world).run(in_every_way, shape, name):
        for how in HOWS:
            assert worst(found[how], once if how == "once" else both) < 1e-12, how


def in_low_precision(
    rank: int, param: torch.dtype | None, reduce: torch.dtype | None, factor: float | None
) -> tuple[list[str], Gradients]:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    model: Any = make(Model, torch.float32)
    model = shard(model, mesh_of((2, 2), NAMES[2]), mp_policy=policy)
    model.set_gradient_divide_factor(factor, recurse=True)
    for step in (1, 0):
        model.set_requires_all_reduce(step == 0)
        run_step(model, rank, step)
    return sorted(gradients(model)), gradients(model)


@pytest.mark.parametrize(
    ("param", "reduce", "factor"),
    [
        (torch.bfloat16, None, None),
        (torch.bfloat16, torch.float32, 3.0),
        (None, torch.float16, None),
        (None, torch.float16, 2.0**60),
    ],
    ids=str,
)
def test_used_parameters_are_known_for_every_dtype_and_factor(
    ranks: Ranks, param: Any, reduce: Any, factor: float | None
) -> None:
    expected = reference(4, (0, 1))
    for names, found in ranks(4).run(in_low_precision, param, reduce, factor):
        assert names == sorted(expected)
        if factor is None:
            assert worst(found, {k: v.float() for k, v in expected.items()}) < 0.1


def hooked(rank: int, layout: str) -> tuple[list[bool], list[str], bool]:
    """Write zeros in a hook. The hook sees gradients only, not the flags of used parameters."""
    model = sharded((4,), layout)
    block = model.blocks[0]
    seen: list[tuple[int, float]] = []

    def clear(reduced: Tensor) -> None:
        seen.append((reduced.numel(), float(reduced.abs().max())))
        reduced.zero_()

    block.set_all_reduce_hook(clear)
    run_step(model, rank, 0)
    kept = [p.grad is not None for p in block.parameters()]
    held = sum(p.to_local().numel() for p in block.parameters())
    zero = all(not full(p.grad).any() for p in block.parameters() if p.grad is not None)
    fits = all(numel >= held for numel, _ in seen)
    return kept, [str(value) for _, value in seen if value == 1.0], zero and fits and bool(seen)


@pytest.mark.nccl
@pytest.mark.parametrize("layout", ["copy", "ragged"])
def test_hooks_on_the_reduction_do_not_see_it(ranks: Ranks, layout: str) -> None:
    expected = [name.startswith(("a.", "b.", "down", "table")) for name, _ in named(Branches())]
    for kept, ones, zero in ranks(4).run(hooked, layout):
        assert kept == expected
        assert not ones
        assert zero


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def frozen_and_noticed(rank: int) -> tuple[list[str], list[str]]:
    """Freeze a branch; note for which parameters hooks after the gradient run."""
    model = sharded((2,), "copy")
    model.blocks[1].a.requires_grad_(False)
    noticed: list[str] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: noticed.append(name))
    run_step(model, rank, 0)
    return noticed, list(gradients(model))


def test_hooks_of_parameters_run_where_there_is_a_gradient(ranks: Ranks) -> None:
    expected = {n for n in reference(2, (0,)) if not n.startswith("blocks.1.a")}
    for noticed, found in ranks(2).run(frozen_and_noticed):
        assert set(noticed) == set(found) == expected
        assert len(noticed) == len(found)


# Ten optimizer steps. If all ranks use the same parameters, torch skips unused ones too.


def alike(_: int, step: int) -> Uses:
    return uses_of(step % 3, step)


def trained(rank: int, world: int, kind: str, differ: bool) -> Gradients:
    model: Any = make(Model)
    wrap: Any = torch.distributed.fsdp.fully_shard if kind == "torch" else fully_shard
    options = {"layout": "ragged"} if kind == "ragged" else {}
    for block in model.blocks:
        wrap(block, mesh=mesh_of((world,), NAMES[1]), **options)
    wrap(model, mesh=mesh_of((world,), NAMES[1]), **options)
    settings: Any = {"lr": 0.02, "weight_decay": 0.1}
    optimizer: Any = (
        sharded_optimizer(torch.optim.AdamW, model, **settings)
        if kind != "torch" and kind != "exact"
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    for step in range(10):
        model.choose((uses_of if differ else alike)(rank, step))
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def trained_alone(world: int, differ: bool) -> Gradients:
    model: Any = make(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(10):
        for rank in range(world):
            model.choose((uses_of if differ else alike)(rank, step))
            (loss_of(model, rank, step) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ten_steps_of_adamw_are_those_of_one_process_and_of_torch(ranks: Ranks, world: int) -> None:
    expected = trained_alone(world, False)
    theirs = ranks(world).run(trained, world, "torch", False)
    for kind in ("exact", "flat", "ragged"):
        for found, other in zip(ranks(world).run(trained, world, kind, False), theirs, strict=True):
            assert worst(found, expected) < 1e-12
            assert worst(found, other) < 1e-12
            if kind == "exact" and world == 2:
                assert all(torch.equal(found[name], other[name]) for name in other)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["exact", "flat", "ragged"])
def test_ten_steps_equal_one_process_if_ranks_use_different_parameters(
    ranks: Ranks, world: int, kind: str
) -> None:
    expected = trained_alone(world, True)
    for found in ranks(world).run(trained, world, kind, True):
        assert worst(found, expected) < 1e-12


def stepped(rank: int, name: str, flat: bool) -> tuple[Gradients, Gradients, list[bool]]:
    """Train with one optimizer, move its state to a new one of the other kind, and go on."""
    model = sharded((2,), "copy")
    cls = getattr(torch.optim, name)
    settings: dict[str, Any] = {"lr": 0.01}
    if name in ("SGD", "RMSprop"):
        settings["momentum"] = 0.9

    def new(is_flat: bool) -> Any:
        if is_flat:
            return sharded_optimizer(cls, model, **settings)
        return cls(model.parameters(), **settings)

    optimizer = new(flat)
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = new(not flat)
            optimizer.load_state_dict(state)
        run_step(model, rank, step)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moments = {
        f"{key}.{kind}": full(value)
        for key, p in model.named_parameters()
        for kind, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }
    return parameters(model), moments, [p in optimizer.state for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "RMSprop"])
def test_optimizers_on_flat_shards_skip_parameters_without_gradient(
    ranks: Ranks, name: str
) -> None:
    flat, single = (ranks(2).run(stepped, name, is_flat) for is_flat in (True, False))
    for (mine, my_moments, mine_known), (theirs, their_moments, known) in zip(
        flat, single, strict=True
    ):
        assert worst(mine, theirs) < 1e-12
        assert worst(my_moments, their_moments) < 1e-12
        assert mine_known == known
        assert not all(known)


def clipped(rank: int) -> tuple[float, float]:
    norms = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        model = sharded((4,), "copy")
        run_step(model, rank, 0)
        norms.append(float(full(cast(Any, clip)(model.parameters(), 1e-3))))
    return norms[0], norms[1]


def test_all_ranks_take_part_in_clipping(ranks: Ranks) -> None:
    expected = torch.stack([g.norm() for g in reference(4, (0,)).values()]).norm().item()
    for ours, theirs in ranks(4).run(clipped):
        assert abs(ours - expected) < 1e-12 * expected
        assert abs(theirs - expected) < 1e-12 * expected


# Units that the loss does not depend on: on one rank, on several ranks, on all ranks.


def leaves_out(rank: int, pattern: str, step: int) -> tuple[int, ...]:
    last = rank % 2 == 1
    chosen: dict[str, tuple[int, ...]] = {
        "all": (1,),
        "one rank": (1,) if last else (),
        "two in a row": (1, 2) if last else (),
        "the first": (0, 1) if last else (),
        "the last": (2, 3) if last else (),
        "crosswise": (1,) if last else (2,),
        "from the second step on": (0, 2) if last and step else (),
        "later on all": (0, 1) if step else (),
    }
    return chosen[pattern]


PATTERNS = ["all", "one rank", "two in a row", "the first", "the last", "crosswise"]
PATTERNS += ["from the second step on", "later on all"]


def skipping(rank: int, pattern: str, name: str, shape: tuple[int, ...]) -> list[Gradients]:
    model = sharded(shape, name)
    seen = []
    for step in range(3):
        if step == 2:
            model.choose({}, leaves_out(rank, pattern, step + 1))
            with model.no_sync():
                loss_of(model, rank, step + 1).backward()
        model.choose({}, leaves_out(rank, pattern, step))
        loss_of(model, rank, step).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("pattern", "name", "shape"),
    [
        *((pattern, "copy", (2,)) for pattern in PATTERNS),
        *(("two in a row", name, (2,)) for name in ("kept", "accumulate", "ragged accumulate")),
        ("crosswise", "accumulate", (2, 2)),
    ],
    ids=str,
)
def test_a_unit_that_the_loss_of_some_ranks_needs_is_reduced_on_all(
    ranks: Ranks, pattern: str, name: str, shape: tuple[int, ...]
) -> None:
    world = torch.Size(shape).numel()
    expected = []
    for steps in ([0], [1], [3, 2]):
        plain: Any = make(Model)
        for step in steps:
            for rank in range(world):
                plain.choose({}, leaves_out(rank, pattern, step))
                (loss_of(plain, rank, step) / world).backward()
        expected.append(gradients(plain))
    for seen in ranks(world).run(skipping, pattern, name, shape):
        for found, wanted in zip(seen, expected, strict=True):
            assert worst(found, wanted) < 1e-12


class Nested(nn.Module):
    """An outer unit with two inner ones, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, way: str) -> Tensor:
        """Use all, or run inner units for nothing."""
        x = self.before(x)
        y = self.outer["b"](torch.tanh(self.outer["a"](x)))
        if way == "bias alone":
            return self.bias + torch.zeros_like(x)
        return x * self.bias + (0 if way == "inner unused" else y)


class Outside(nn.Module):
    """Calls a nested unit twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.nested = Nested()
        self.outlet = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, way: str) -> Tensor:
        """Return the output that ``way`` selects."""
        first = self.inlet(x)
        second = self.nested(first, "inner unused")
        third = self.nested(second, way)
        return cast(Tensor, self.outlet(first if way == "all unused" else third))


WAYS = ["all used", "inner unused", "bias alone", "all unused"]


def nested(rank: int) -> list[Gradients]:
    model: Any = make(Outside)
    inner = model.nested
    for module in (model.inlet, inner.before, *inner.outer.values(), inner, model.outlet, model):
        fully_shard(module, mesh_of((4,), NAMES[1]), reshard_after_forward=True)
    seen = []
    for step in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).double()
        way = WAYS[(rank + step) % 4] if step else "inner unused"
        model(x, way).pow(2).mean().backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_nested_units_and_units_that_run_twice_are_reduced_equally(ranks: Ranks) -> None:
    expected = []
    for step in range(3):
        plain: Any = make(Outside)
        for rank in range(4):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).double()
            way = WAYS[(rank + step) % 4] if step else "inner unused"
            (plain(x, way).pow(2).mean() / 4).backward()
        expected.append(gradients(plain))
    for seen in ranks(4).run(nested):
        for found, wanted in zip(seen, expected, strict=True):
            assert worst(found, wanted) < 1e-12
