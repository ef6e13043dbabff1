"""Mixed precision: dtypes of the computation, the reduction, the shards and the outputs."""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from hp_dtensor import RecordingCollectives
from hp_fsdp import fully_shard

from .models import Gradients, Net, full, gradients, loss_of, make, mesh_of, shard, tokens, worst

Ranks = Callable[[int], RankPool]
BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "compute": MixedPrecisionPolicy(param_dtype=BF16),
    "compute, reduce fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "reduce bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "output fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
}


def train(rank: int, policy: str, sync_last: bool, ours: bool) -> tuple[list[Gradients], Any]:
    """Return the gradients of two steps of three microbatches, and the logits' dtype."""
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net, FP32)
    wrap: Any = fully_shard if ours else theirs.fully_shard
    inner = dataclasses.replace(POLICIES[policy], output_dtype=None)
    for block in model.blocks:
        wrap(block, mesh=mesh, mp_policy=inner)
    wrap(model, mesh=mesh, mp_policy=POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(2):
        for micro in range(3):
            if sync_last:
                model.set_requires_gradient_sync(micro == 2)
            loss_of(model, tokens(rank, 3 * step + micro)).backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen, model(tokens(rank)).dtype


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("sync_last", [False, True])
def test_gradients_are_bitwise_those_of_torch(ranks: Ranks, policy: str, sync_last: bool) -> None:
    ours = ranks(2).run(train, policy, sync_last, True)
    theirs_ = ranks(2).run(train, policy, sync_last, False)
    for (our_steps, our_dtype), (their_steps, their_dtype) in zip(ours, theirs_, strict=True):
        assert our_dtype == their_dtype
        for mine, other in zip(our_steps, their_steps, strict=True):
            assert mine.keys() == other.keys()
            assert {g.dtype for g in mine.values()} == {FP32}
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def manual(rank: int) -> dict[str, Any]:
    """Compute in bf16 and reduce in fp32 without FSDP, and compare."""
    plain = make(Net, FP32)
    total: Gradients = {}
    for replica in range(4):
        copy = make(Net, FP32).to(BF16)
        loss_of(copy, tokens(replica)).backward()
        for name, gradient in gradients(copy).items():
            total[name] = total.get(name, torch.zeros(())) + gradient.float() / 4
    mesh = mesh_of((2, 2), ("dp_replicate", "fsdp"))
    model = shard(make(Net, FP32), mesh, mp_policy=POLICIES["compute, reduce fp32"])
    model.unshard()
    computing = model.head.weight.dtype
    loss_of(model, tokens(rank)).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return {
        "difference": worst(gradients(model), total),
        "computing": computing,
        "stored": {p.dtype for p in model.parameters()},
        "moments": {s["exp_avg"].dtype for s in optimizer.state.values()},
        "names": gradients(model).keys() == dict(plain.named_parameters()).keys(),
    }


def test_bf16_with_fp32_reduction_equals_a_manual_reference(ranks: Ranks) -> None:
    for found in ranks(4).run(manual):
        assert found["difference"] < 1e-6
        assert found["computing"] is BF16
        assert found["stored"] == found["moments"] == {FP32}
        assert found["names"]


def bytes_moved(rank: int) -> list[int]:
    seen = []
    for policy in (MixedPrecisionPolicy(), POLICIES["compute"], POLICIES["compute, reduce fp32"]):
        record = RecordingCollectives()
        mesh = mesh_of((2,), ("fsdp",))
        model = fully_shard(make(Net, FP32), mesh, mp_policy=policy, collectives=record)
        loss_of(cast(nn.Module, model), tokens(rank)).backward()
        seen += [record.by_call["fsdp", name].bytes for name in ("all_gather", "reduce_scatter")]
    return seen


def test_half_the_bytes_travel_in_half_the_precision(ranks: Ranks) -> None:
    for gather, reduce, half_gather, half_reduce, mixed_gather, mixed_reduce in ranks(2).run(
        bytes_moved
    ):
        assert abs(2 * half_gather - gather) < 64  # up to alignment
        assert abs(2 * half_reduce - reduce) < 64
        assert mixed_gather == half_gather
        assert abs(mixed_reduce - reduce) < 64


class Mixed(nn.Module):
    """Parameters of three dtypes, one of them of integers, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, dtype=BF16))
        self.usual = nn.Parameter(torch.randn(5))
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Use all of them."""
        y: Tensor = (x @ self.wide.to(x.dtype).t()) * self.usual.to(x.dtype)
        return y + (self.narrow.to(x.dtype) * x).sum() + self.whole


def mixed_step(rank: int, policy: MixedPrecisionPolicy, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain: Any = Mixed()
    torch.manual_seed(0)
    model: Any = fully_shard(Mixed(), mesh_of((world,), ("fsdp",)), mp_policy=policy)
    x = torch.ones(2, 3)
    model(x).float().pow(2).sum().backward()
    if policy.param_dtype is not None:
        for p in (plain.wide, plain.narrow, plain.usual):
            p.data = p.data.to(policy.param_dtype)
        x = x.to(policy.param_dtype)
    plain(x).float().pow(2).sum().backward()
    return {
        "same": all(
            torch.equal(full(p.grad), dict(plain.named_parameters())[name].grad.to(p.dtype))
            for name, p in model.named_parameters()
            if p.requires_grad
        ),
        "dtypes": [p.grad.dtype for p in (model.wide, model.narrow, model.usual)],
        "whole": torch.equal(full(model.whole), torch.arange(5)),
    }


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), POLICIES["compute, reduce fp32"]])
@pytest.mark.parametrize("world", [1, 2])
def test_one_unit_may_hold_parameters_of_several_dtypes(
    ranks: Ranks, policy: MixedPrecisionPolicy, world: int
) -> None:
    for found in ranks(world).run(mixed_step, policy, world):
        assert found["same"]
        assert found["dtypes"] == [torch.float64, BF16, FP32]
        assert found["whole"]


class Seen(nn.Module):
    """Notes the dtypes that reach it, also when it is run again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.seen: list[Any] = []
        self.again = again

    def forward(self, x: Tensor, *, ids: Tensor) -> dict[str, Tensor]:
        """Return the layer's output in a dict."""
        self.seen.append((x.dtype, ids.dtype))
        return {"y": self.lin(x.to(self.lin.weight.dtype))}


class Policies(nn.Module):
    """Three modules of three policies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Seen(), Seen(), Seen()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Run them in a row, the last one recomputed."""
        x = self.first(x, ids=ids)["y"]
        self.between = x.dtype
        x = self.second(x, ids=ids)["y"]
        y = checkpoint(lambda each: self.third(each, ids=ids)["y"], x, use_reentrant=False)
        return cast(Tensor, y)


def nested_policies(rank: int) -> dict[str, Any]:
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = Policies()
    fully_shard(model.first, mesh, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float64))
    fully_shard(model.second, mesh, mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=False))
    fully_shard(model.third, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    fully_shard(model, mesh)
    out = model(torch.ones(2, 4), torch.ones(2, dtype=torch.long))
    out.sum().backward()
    return {
        "first": model.first.seen,
        "between": model.between,
        "second": model.second.seen,
        "third": model.third.seen,
        "out": out.dtype,
    }


def test_inputs_and_outputs_are_cast_as_each_module_says(ranks: Ranks) -> None:
    for found in ranks(2).run(nested_policies):
        assert found["first"] == [(BF16, torch.int64)]
        assert found["between"] is torch.float64
        assert found["second"] == [(torch.float64, torch.int64)]
        assert found["third"] == [(torch.float16, torch.int64)] * 2  # the second in backward
        assert found["out"] is torch.float16


def fp16_sum(rank: int) -> Tensor:
    """Reduce gradients. Their sum over the ranks overflows in float16."""
    model: Any = nn.Linear(2, 4, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    fully_shard(model, mesh_of((4,), ("fsdp",)), mp_policy=policy)
    (model(torch.ones(1, 2)) * 30000.0).sum().backward()
    return full(model.weight.grad)


@pytest.mark.nccl
def test_a_mean_in_float16_does_not_overflow(ranks: Ranks) -> None:
    for found in ranks(4).run(fp16_sum):
        assert torch.equal(found, torch.full((4, 2), 30000.0).half().float())


def complex_step(layer: nn.Linear, rank: int) -> Tensor:
    """Run a step of complex numbers; return the gradient."""
    x = torch.tensor([[1 + 2j, rank - 1j]], dtype=torch.complex64)
    layer(x).abs().square().sum().backward()
    return full(cast(Tensor, layer.weight.grad))


def complex_gradients(rank: int) -> tuple[Tensor, Tensor]:
    """Return the gradient with a policy for real dtypes, and the expected mean."""
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 4, bias=False, dtype=torch.complex64)
    expected = sum(complex_step(copy.deepcopy(model), each) for each in range(2)) / 2
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(model, mesh_of((2,), ("fsdp",)), mp_policy=policy)
    return complex_step(model, rank), cast(Tensor, expected)


def test_complex_parameters_keep_their_dtype_whatever_the_policy(ranks: Ranks) -> None:
    for found, expected in ranks(2).run(complex_gradients):
        torch.testing.assert_close(found, expected)


def widened(rank: int) -> tuple[Any, Any]:
    """Convert a sharded model to float64: the reduction stays in the dtype that was asked for."""
    record = RecordingCollectives()
    policy = MixedPrecisionPolicy(reduce_dtype=FP32)
    model: Any = make(Net, FP32)
    fully_shard(model, mesh_of((2,), ("fsdp",)), mp_policy=policy, collectives=record)
    loss_of(model, tokens(rank)).backward()
    before = record.by_call["fsdp", "reduce_scatter"].bytes
    model.double()
    model.zero_grad()
    record.reset()
    loss_of(model, tokens(rank)).backward()
    return before - record.by_call["fsdp", "reduce_scatter"].bytes, model.head.weight.grad.dtype


def test_the_reduction_keeps_its_dtype_when_the_model_is_converted(ranks: Ranks) -> None:
    assert ranks(2).run(widened) == [(0, torch.float64)] * 2


@dataclasses.dataclass
class Fixed(collections.OrderedDict):  # type: ignore[type-arg]
    """A mapping with its fields as items. ``update`` raises.

    Some libraries return model outputs of this kind.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        """Have the fields as items."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        """Change the field too."""
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        """Make a copy of the fields."""
        return type(self), tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise TypeError("no update")


class Registered(Fixed):
    """The same, known to torch's pytree."""


class View(Mapping[str, Any]):
    """A mapping that is no dict and cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        """Hold the items."""
        self.held = dict(items)

    def __getitem__(self, key: str) -> Any:
        """Return an item."""
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        """Return the keys."""
        return iter(self.held)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.held)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "fields": lambda y: Fixed(y, (y + 1,)),
    "registered": lambda y: Registered(y, (y + 1,)),
    "user": lambda y: collections.UserDict({"logits": y, "hidden": (y + 1,)}),
    "proxy": lambda y: MappingProxyType({"logits": y, "hidden": (y + 1,)}),
    "own": lambda y: View({"logits": y, "hidden": (y + 1,)}),
}


class Answers(nn.Module):
    """A layer that returns a mapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, and another."""
        return OUTPUTS[self.kind](self.lin(x))


def mapping_outputs(rank: int, kind: str, sharded: bool) -> dict[str, Any]:
    """Return the outputs of a forward with ``output_dtype``, and the gradient of the input."""
    if Registered not in torch.utils._pytree.SUPPORTED_NODES:
        torch.utils._pytree.register_pytree_node(
            Registered,
            lambda value: (list(value.values()), list(value)),
            lambda values, keys: Registered(**dict(zip(keys, values, strict=True))),
        )
    torch.manual_seed(0)
    model: Any = Answers(kind)
    if sharded:
        policy = MixedPrecisionPolicy(output_dtype=torch.float64)
        fully_shard(model, mesh_of((2,), ("fsdp",)), mp_policy=policy)
    out = model(torch.ones(2, 4))
    (out["logits"].sum() + out["hidden"][0].pow(2).sum()).backward()
    return {
        "type": type(out).__name__,
        "keys": list(out),
        "dtypes": [out["logits"].dtype, out["hidden"][0].dtype],
        "fields": not isinstance(out, Fixed) or out.logits is out["logits"],
        "values": {"logits": out["logits"].detach(), "hidden": out["hidden"][0].detach()},
        "gradients": gradients(model),
    }


@pytest.mark.parametrize("kind", list(OUTPUTS))
def test_outputs_in_mappings_of_any_kind_are_cast(ranks: Ranks, kind: str) -> None:
    plain = mapping_outputs(0, kind, False)
    for found in ranks(2).run(mapping_outputs, kind, True):
        assert found["type"] == plain["type"]
        assert found["keys"] == plain["keys"] == ["logits", "hidden"]
        assert found["dtypes"] == [torch.float64, torch.float64]
        assert found["fields"]
        assert all(
            torch.equal(found["values"][k], plain["values"][k].double()) for k in plain["values"]
        )
        assert worst(found["gradients"], plain["gradients"]) < 1e-6
