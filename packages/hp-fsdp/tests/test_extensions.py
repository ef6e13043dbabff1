"""Parameters of tensor classes with all-gather extensions."""

import math
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from hp_dtensor import RecordingCollectives
from hp_fsdp import FSDPModule, ParameterError, fully_shard, sharded_optimizer

from .gathering import (
    Blocks,
    EightBits,
    Halved,
    Layers,
    Whole,
    Wrapped,
    elements_of_block,
    rounded,
)
from .models import Gradients, gradients, mesh_of, worst

Ranks = Callable[[int], RankPool]
Kind = type[Wrapped]


class Careless(Halved):
    """Writes with autograd, which is not allowed."""

    def write(self, out: Tensor, values: Tensor) -> None:
        """Write in place, which increments the version counter."""
        out.copy_(values)


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator)


def build(kind: Kind | None, hidden: int = 12) -> Any:
    torch.manual_seed(0)
    return Layers(kind, hidden)


def sharded(
    kind: Kind,
    shape: tuple[int, ...] = (2,),
    hidden: int = 12,
    by: Callable[..., Any] = fully_shard,
    **options: Any,
) -> Any:
    model = build(kind, hidden)
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    for layer in (model.up, model.down):
        by(layer, mesh=mesh, **options)
    return by(model, mesh=mesh, **options)


def local(model: Any) -> Wrapped:
    """Return this rank's rows of the first weight."""
    model.reshard()
    model.up.reshard()
    return cast(Wrapped, model.up.weight._local_tensor)


def plain(gradient: Any) -> Tensor:
    return cast(Tensor, gradient.full_tensor())


def trained(
    rank: int, kind: Kind, hidden: int, half: bool, ours: bool
) -> tuple[list[Tensor], list[Gradients], list[str], list[str]]:
    """Return the results of three steps of AdamW with torch's `fully_shard` or ours."""
    by = fully_shard if ours else torch.distributed.fsdp.fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    model = sharded(kind, hidden=hidden, by=by, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, seen = [], []
    for step in range(3):
        loss = model(batch(rank, step)).float().pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        seen.append({name: plain(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    held = local(model)
    kinds = [type(each._local_tensor).__name__ for each in model.state_dict().values()]
    return losses, seen, held.notes, kinds


@pytest.mark.parametrize(
    ("kind", "hidden", "half"),
    [
        (Halved, 12, False),
        (Halved, 5, False),
        (Halved, 5, True),
        (EightBits, 12, False),
        (EightBits, 12, True),
        (Whole, 12, False),
    ],
)
def test_three_steps_have_the_bits_of_torch(
    ranks: Ranks, kind: Kind, hidden: int, half: bool
) -> None:
    theirs = ranks(2).run(trained, kind, hidden, half, False)
    ours = ranks(2).run(trained, kind, hidden, half, True)
    for one, other in zip(ours, theirs, strict=True):
        assert [x.tolist() for x in one[0]] == [x.tolist() for x in other[0]]
        for found, expected in zip(one[1], other[1], strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert one[3] == other[3]
        assert kind.__name__ in one[3]
        assert one[2].count("post") == 1  # later gathers write into the face of the first
        assert one[2].count("post out") >= 2
        assert {each for each in one[2] if each.startswith("pre")} == {
            each for each in other[2] if each.startswith("pre")
        }


def stepped(
    rank: int, kind: Kind, hidden: int, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[Gradients, list[str]]:
    """Return the gradients of two equal microbatches, which are one's."""
    model = sharded(kind, shape, hidden, **options)
    for _ in range(2):
        (model(batch(rank)).pow(2).mean() / 2).backward()
    found = {name: plain(p.grad) for name, p in model.named_parameters()}
    return found, local(model).notes


def expected_of(kind: Kind, hidden: int, replicas: int, shards: int) -> Gradients:
    model = build(None, hidden)
    with torch.no_grad():
        for layer in (model.up, model.down):
            layer.weight.copy_(rounded(kind, layer.weight, shards))
    for rank in range(replicas):
        (model(batch(rank)).pow(2).mean() / replicas).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("kind", "hidden", "shape", "options"),
    [
        (Halved, 12, (4,), {}),
        (Halved, 5, (4,), {"grads": "accumulate"}),  # one rank has two rows, one has none
        (Careless, 3, (4,), {"reshard_after_forward": True}),
        (EightBits, 12, (4,), {"grads": "accumulate"}),
        (EightBits, 12, (4,), {"reshard_after_forward": 2}),
        (Halved, 5, (2, 2), {"reshard_after_forward": True}),
        (EightBits, 12, (2, 2), {}),
        (Whole, 12, (2, 2), {"reshard_after_forward": True}),
    ],
)
def test_gradients_on_four_ranks_are_those_of_one_process(
    ranks: Ranks, kind: Kind, hidden: int, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    expected = expected_of(kind, hidden, 4, shape[-1])
    for found, notes in ranks(4).run(stepped, kind, hidden, shape, options):
        assert worst(found, expected) < 1e-5
        assert kind is Whole or notes[0].startswith(f"pre over {shape[-1]} of 1-D")


def alone(rank: int) -> tuple[Gradients, list[str]]:
    return stepped(rank, EightBits, 12, (2, 1), {})


def test_one_rank_gathers_nothing_and_calls_the_hooks_all_the_same(ranks: Ranks) -> None:
    expected = expected_of(EightBits, 12, 2, 1)
    for found, notes in ranks(2).run(alone):
        assert worst(found, expected) < 1e-5
        assert {"post", "post out"} <= set(notes)


def measured(rank: int) -> tuple[tuple[int, int], list[int]]:
    record = RecordingCollectives()
    model = sharded(EightBits, collectives=record, reshard_after_forward=True)
    model(batch(rank)).sum().backward()
    before = record.by_call["fsdp", "all_gather"]
    with torch.no_grad():
        model(batch(rank))
    after = record.by_call["fsdp", "all_gather"]
    model.up.unshard()
    face = model.up.weight.untyped_storage()
    sizes = [face.nbytes()]
    model.up.reshard()
    return (after.calls - before.calls, after.bytes - before.bytes), [*sizes, face.nbytes()]


def test_weights_travel_as_bytes_and_their_memory_goes(ranks: Ranks) -> None:
    for traffic, sizes in ranks(2).run(measured):
        # For each layer a gather of values and a scale, and one of a bias and a tag; both ranks
        # have as many.
        assert traffic == (4, (48 + 4) * 2 + 6 * 4 + 4 * 4 + 2 * 4)
        assert sizes == [12 * 8 * 4, 0]


def failing(rank: int, kind: Kind, what: str, reset: bool) -> tuple[str, Gradients, Gradients]:
    """Fail in a hook, then run a step. Do the same with a model that never failed."""
    model, other = sharded(kind), sharded(kind)
    for _ in range(2 if what == "post out" else 0):
        for each in (model, other):
            each(batch(rank, 1)).sum().backward()
            each.zero_grad()
    local(model).notes.append(f"fail {what}")
    said = "nothing"
    try:
        model(batch(rank)).sum().backward()
    except ArithmeticError as error:
        said = str(error)
    if reset:
        model.reset()
    for each in (model, other):
        each.zero_grad()
        each(batch(rank)).pow(2).mean().backward()
    found = [
        {name: plain(p.grad) for name, p in each.named_parameters()} for each in (model, other)
    ]
    return said, found[0], found[1]


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("what", ["pre over 2 of 1-D", "post", "post out"])
def test_a_clean_step_follows_a_hook_that_fails(ranks: Ranks, what: str, reset: bool) -> None:
    for said, found, expected in ranks(2).run(failing, EightBits, what, reset):
        assert said == what
        assert worst(found, expected) == 0


class Unpadded(Halved):
    """Gathers rows without padding, which is wrong for uneven rows."""

    padded = False


def said_of(run: Callable[[], object]) -> tuple[str, str]:
    try:
        run()
    except ValueError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def unpadded(rank: int) -> tuple[str, str]:
    model = sharded(Unpadded, hidden=5)
    return said_of(lambda: model(batch(rank)))


def test_all_ranks_refuse_rows_that_one_did_not_pad(ranks: Ranks) -> None:
    first, second = ranks(2).run(unpadded)
    assert first == second
    assert first[0] == "DisagreementError"
    assert "weight [48, 32]" in first[1]


class TwoArguments(Wrapped):
    """Has a hook with a signature that is none of the two."""

    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:
        """Never be called."""
        raise AssertionError

    def fsdp_post_all_gather(self, *args: Any) -> Any:
        """Never be called."""
        raise AssertionError


class OneHook(Wrapped):
    """Has a pre-all-gather hook but no post-all-gather hook."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Never be called."""
        raise AssertionError


def last_dim(parameter: Tensor) -> Shard:
    return Shard(parameter.ndim - 1)


def refused(rank: int) -> list[tuple[str, str]]:
    mesh = mesh_of((2,), ("fsdp",))
    found = []
    for kind, options in (
        (TwoArguments, {}),
        (OneHook, {}),
        (Halved, {"min_shard_numel": 1000}),
        (Halved, {"shard_placement_fn": last_dim}),
    ):
        model = build(kind)
        given: Any = options
        found.append(said_of(partial(fully_shard, model, mesh, **given)))
        found.append(("kept", type(model.up.weight).__name__))
    return found


def test_invalid_extensions_raise(ranks: Ranks) -> None:
    for found in ranks(2).run(refused):
        errors = found[::2]
        assert {name for name, _ in errors} == {ParameterError.__name__}
        texts = [text for _, text in errors]
        assert "(mesh: Any, module: Any)" in texts[0]
        assert "define both" in texts[1]
        assert "replicated" in texts[2]
        assert "sharded along dim 1" in texts[3]
        assert [kept for _, kept in found[1::2]] == [
            "TwoArguments",
            "OneHook",
            "Halved",
            "Halved",
        ]


def pre(self: Tensor, mesh: Any) -> Any:
    """Never be called."""
    raise AssertionError


def post(self: Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    """Never be called."""
    raise AssertionError


def attach(tensor: Any) -> None:
    """Put an all-gather extension on one tensor, as torch's own tests do."""
    tensor.fsdp_pre_all_gather = MethodType(pre, tensor)
    tensor.fsdp_post_all_gather = MethodType(post, tensor)


def detach(tensor: Any) -> None:
    del tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather


def late(rank: int, layout: str, on_rows: bool) -> tuple[list[tuple[str, str]], int, bool]:
    """Attach an extension to a sharded parameter; return errors, collectives, and whether it ends.

    A step before and a step after it are equal.
    """
    record, options = RecordingCollectives(), {"layout": layout, "reshard_after_forward": True}
    model: Any = build(None)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh_of((2,), ("fsdp",)), collectives=record, **cast(Any, options))
    fully_shard(model, mesh_of((2,), ("fsdp",)), collectives=record, **cast(Any, options))

    def step() -> Gradients:
        model.zero_grad()
        model(batch(rank)).pow(2).mean().backward()
        return {name: plain(p.grad) for name, p in model.named_parameters()}

    def calls() -> int:
        return sum(each.calls for each in record.by_call.values())

    before = step()
    weight = model.up.weight
    tensor = weight
    if on_rows:
        tensor = weight._local_tensor if layout == "exact" else weight.local
    loss = model(batch(rank)).pow(2).mean()
    attach(tensor)
    said = [said_of(loss.backward)]
    model.reset()
    made = calls()
    said += [said_of(partial(model, batch(rank))) for _ in range(2)]
    said += [said_of(model.up.unshard)]
    made = calls() - made
    detach(tensor)
    return said, made, worst(step(), before) == 0


@pytest.mark.parametrize("on_rows", [True, False])
@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_an_extension_after_fully_shard_is_refused_by_the_next_all_gather(
    ranks: Ranks, layout: str, on_rows: bool
) -> None:
    for said, made, ended in ranks(2).run(late, layout, on_rows):
        assert {kind for kind, _ in said} == {ParameterError.__name__}
        assert all("weight has gained" in text for _, text in said)
        assert all("attach them before fully_shard" in text for _, text in said)
        assert made == 0
        assert ended


class Padded(Whole):
    """Gathers padded rows. The unsharded tensor is a view without the padding."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the rows, padded with zeros."""
        rows = torch.zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
        rows[: len(self.plain)] = self.plain
        return (rows,), None


def in_one_unit(rank: int, kind: Kind, hidden: int) -> tuple[Gradients, list[list[int]]]:
    """Gather two weights in one buffer, twice; return gradients and the shapes of the weights."""
    model: Any = fully_shard(build(kind, hidden), mesh_of((4,), ("fsdp",)))
    for _ in range(2):
        (model(batch(rank)).pow(2).mean() / 2).backward()
    found = {name: plain(p.grad) for name, p in model.named_parameters()}
    model.unshard()
    return found, [list(model.up.weight.shape), list(model.down.weight.shape)]


@pytest.mark.parametrize(("kind", "hidden"), [(Padded, 5), (Whole, 12), (EightBits, 12)])
def test_weights_of_one_unit_share_a_buffer(ranks: Ranks, kind: Kind, hidden: int) -> None:
    expected = expected_of(kind, hidden, 4, 4)
    for found, shapes in ranks(4).run(in_one_unit, kind, hidden):
        assert worst(found, expected) < 1e-5
        assert shapes == [[hidden, 8], [8, hidden]]


def inferred(rank: int) -> Gradients:
    model = sharded(EightBits)
    with torch.inference_mode():
        model(batch(rank))
    model(batch(rank)).pow(2).mean().backward()
    return {name: plain(p.grad) for name, p in model.named_parameters()}


def test_the_first_forward_may_run_in_inference_mode(ranks: Ranks) -> None:
    expected = expected_of(EightBits, 12, 2, 2)
    for found in ranks(2).run(inferred):
        assert worst(found, expected) < 1e-5


Steps = tuple[list[Gradients], Gradients]


def in_blocks(
    rank: int, kind: Kind, shape: tuple[int, ...], options: dict[str, Any], how: str
) -> tuple[Steps, list[int]]:
    """Train two steps in the ragged layout; return gradients, unsharded weights and rows."""
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    options = {"layout": "ragged", "granularity": elements_of_block, **options}

    def made() -> Any:
        model = build(kind, 20)
        if how != "one unit":
            fully_shard(model.up, mesh, **options)
        return fully_shard(model, mesh, **options)

    model = made()
    if how == "meta":
        state = model.state_dict()
        with torch.device("meta"):
            model = made()
        model.to_empty(device="cpu")
        model.load_state_dict(state)
    rows = [len(model.up.weight.local), len(model.down.weight.local)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    for step in range(2):
        model(batch(rank, step)).pow(2).mean().backward()
        seen.append({name: plain(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    for inner in model.modules():
        if isinstance(inner, FSDPModule):
            inner.unshard()
    weights = {
        name: torch.as_tensor(getattr(p, "plain", p)).detach().clone()
        for name, p in model.named_parameters()
    }
    return (seen, weights), rows


def one_process(kind: Kind, world: int) -> Steps:
    """Return the results of `in_blocks`, computed by one process."""
    held = build(None, 20)
    seen = []
    for step in range(3):
        model = build(None, 20)
        with torch.no_grad():
            for p, own in zip(model.parameters(), held.parameters(), strict=True):
                p.copy_(rounded(kind, own, 1) if own.ndim > 1 else own)
        for rank in range(world if step < 2 else 0):
            (model(batch(rank, step)).pow(2).mean() / world).backward()
        seen.append(gradients(model))
        with torch.no_grad():
            for own, p in zip(held.parameters(), model.parameters(), strict=True):
                if p.grad is not None:
                    own.sub_(p.grad)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return seen[:2], weights


@pytest.mark.parametrize(
    ("kind", "shape", "options", "how"),
    [
        (Blocks, (2,), {"grads": "accumulate"}, "units"),
        (Blocks, (3,), {}, "units"),
        (Blocks, (3,), {"direct_bytes": 0}, "one unit"),
        (Blocks, (4,), {}, "meta"),
        (Blocks, (4,), {"reshard_after_forward": 2}, "units"),
        (Blocks, (2, 2), {"reshard_after_forward": True}, "units"),
        (Whole, (3,), {"granularity": 1, "reshard_after_forward": True}, "units"),
        (Whole, (4,), {"granularity": None}, "one unit"),
    ],
)
def test_blocks_stay_whole_in_the_ragged_layout(
    ranks: Ranks, kind: Kind, shape: tuple[int, ...], options: dict[str, Any], how: str
) -> None:
    world = math.prod(shape)
    steps, weights = one_process(kind, world)
    results = ranks(world).run(in_blocks, kind, shape, options, how)
    for (seen, found), rows in results:
        assert [worst(*each) < 1e-5 for each in zip(seen, steps, strict=True)] == [True, True]
        assert worst(found, weights) < 1e-5
        assert kind is Whole or all(count % Blocks.ROWS == 0 for count in rows)
    if kind is Blocks:
        held = [rows[0] for _, rows in results[: shape[-1]]]
        assert sum(held) == 20
        assert len(set(held)) > 1  # uneven


def flat_stepped(rank: int) -> tuple[Gradients, Gradients]:
    """Return the parameters after two steps of the flat optimizer, and of torch's."""
    found = []
    for flat in (True, False):
        model = sharded(Halved)
        optimizer = (
            sharded_optimizer(torch.optim.AdamW, model, lr=0.1)
            if flat
            else torch.optim.AdamW(model.parameters(), lr=0.1)
        )
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
        found.append(
            {
                name: torch.as_tensor(getattr(p._local_tensor, "plain", p._local_tensor)).detach()
                for name, p in model.named_parameters()
            }
        )
    return found[0], found[1]


def test_the_flat_optimizer_steps_them_one_by_one(ranks: Ranks) -> None:
    for found, expected in ranks(2).run(flat_stepped):
        assert worst(found, expected) < 1e-6


def from_meta(rank: int) -> tuple[Gradients, list[str]]:
    with torch.device("meta"):
        model: Any = Layers(Halved)
    mesh = mesh_of((2,), ("fsdp",))
    fully_shard(model, mesh)
    model.to_empty(device="cpu")
    kinds = [type(p._local_tensor).__name__ for p in model.parameters()]
    source = sharded(Halved)
    model.load_state_dict(source.state_dict())
    model(batch(rank)).pow(2).mean().backward()
    return {name: plain(p.grad) for name, p in model.named_parameters()}, kinds


def test_weights_on_the_meta_device_get_memory_and_values_later(ranks: Ranks) -> None:
    expected = expected_of(Halved, 12, 2, 2)
    for found, kinds in ranks(2).run(from_meta):
        assert kinds == ["Halved", "Tensor", "Halved", "Tensor"]
        assert worst(found, expected) < 1e-5


def replaced(rank: int) -> tuple[Gradients, Gradients, tuple[str, str]]:
    """Convert to float64 and step, load with assign and step, then load plain values."""
    model = sharded(Halved)
    model(batch(rank)).sum().backward()
    model.zero_grad()
    model.double()
    model(batch(rank).double()).pow(2).mean().backward()
    first = {name: plain(p.grad) for name, p in model.named_parameters()}
    other = sharded(Halved)
    other(batch(rank)).sum().backward()
    model = sharded(Halved)
    model.load_state_dict(other.state_dict(), assign=True)
    model(batch(rank)).pow(2).mean().backward()
    second = {name: plain(p.grad) for name, p in model.named_parameters()}
    bare = sharded(Careless)
    state = dict(bare.state_dict())
    held = state["up.weight"]
    state["up.weight"] = DTensor.from_local(
        held._local_tensor.plain, held.device_mesh, held.placements
    )
    return first, second, said_of(lambda: bare.load_state_dict(state, assign=True))


def test_only_the_same_class_can_take_its_place(ranks: Ranks) -> None:
    expected = expected_of(Halved, 12, 2, 2)
    for first, second, (error, text) in ranks(2).run(replaced):
        assert worst({name: g.float() for name, g in first.items()}, expected) < 1e-5
        assert worst(second, expected) < 1e-5
        assert error == "ParameterError"
        assert "only a Careless can take its place" in text
