"""Errors are subclasses of torch's errors in the same cases, and name the parameter."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool, fails_with_torch_2_11
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hp_fsdp import ModuleError, ShardingError, fully_shard

from .gathering import Halved
from .models import Net, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]


class Half(Halved):
    """Has one of the two hooks for gathering only."""

    @property
    def fsdp_post_all_gather(self) -> Any:
        """Raise, as a missing attribute does."""
        raise AttributeError


class Narrow(Halved):
    """Its hook takes two arguments."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:  # type: ignore[override]
        """Take two arguments, which no version of torch passes."""


def linear(bias: Tensor | None = None) -> Any:
    found = nn.Linear(6, 3)
    if bias is not None:
        found.bias = nn.Parameter(bias)
    return found


def twice(wrap: Any, mesh: Any) -> None:
    wrap(wrap(linear(), mesh=mesh), mesh=mesh)


def copied(wrap: Any, mesh: Any) -> None:
    copy.deepcopy(wrap(linear(), mesh=mesh))


def strided(wrap: Any, mesh: Any) -> None:
    wrap(linear(torch.zeros(6)[::2]), mesh=mesh)


def uneven(wrap: Any, mesh: Any) -> None:
    wrap(nn.Linear(3, 4, bias=False), mesh=mesh, shard_placement_fn=lambda _: Shard(1))


def no_dim(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh, shard_placement_fn=lambda _: Shard(2))


def no_placement(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh, shard_placement_fn=lambda _: "no")


def no_module(wrap: Any, mesh: Any) -> None:
    wrap(3, mesh=mesh)


def many_buffers(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh).set_reduce_scatter_max_input_buffers(1.5)


def true_buffers(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh).set_reduce_scatter_max_input_buffers(True)


def no_buffers(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh).set_reduce_scatter_max_input_buffers(0)


def no_state(wrap: Any, mesh: Any) -> None:
    bare = object.__new__(type(wrap(nn.Tanh(), mesh=mesh)))
    nn.Module.__init__(bare)
    bare.set_requires_all_reduce(True, recurse=False)


def one_hook(wrap: Any, mesh: Any) -> None:
    wrap(linear(Half(torch.zeros(3))), mesh=mesh).unshard()


def strange_hook(wrap: Any, mesh: Any) -> None:
    wrap(linear(Narrow(torch.zeros(3))), mesh=mesh).unshard()


def scalar(wrap: Any, mesh: Any) -> None:
    wrap(linear(torch.tensor(1.0)), mesh=mesh)


def container(wrap: Any, mesh: Any) -> None:
    wrap(nn.ModuleList([linear()]), mesh=mesh)


def reshard_to(wrap: Any, mesh: Any) -> None:
    wrap(linear(), mesh=mesh, reshard_after_forward=3)


def no_memory(wrap: Any, mesh: Any) -> None:
    wrap(linear().to("meta"), mesh=mesh)(torch.ones(1, 6))


CALLS: list[Callable[[Any, Any], None]] = [
    no_buffers,
    scalar,
    container,
    reshard_to,
    no_placement,
    no_memory,
    twice,
    copied,
    strided,
    uneven,
    no_dim,
    no_module,
    many_buffers,
    true_buffers,
    no_state,
    one_hook,
    strange_hook,
]


def raised(rank: int, call: Callable[[Any, Any], None]) -> tuple[bool, bool, str, str]:
    """Return whether our error is an instance of torch's error, and the names of both."""
    mesh = mesh_of((2,), ("fsdp",))
    caught: list[Exception] = []
    for wrap in (fully_shard, theirs.fully_shard):
        with pytest.raises(Exception) as info:  # noqa: PT011 - the type is checked below
            call(wrap, mesh)
        caught.append(info.value)
    ours, other = caught
    return (
        isinstance(ours, type(other)),
        isinstance(ours, ShardingError),
        type(ours).__name__,
        type(other).__name__,
    )


LACKING = {
    **dict.fromkeys(
        (no_buffers, many_buffers, true_buffers), "no set_reduce_scatter_max_input_buffers"
    ),
    no_placement: "another error",
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=fails_with_torch_2_11(LACKING[call])) if call in LACKING else call
        for call in CALLS
    ],
)
def test_errors_are_instances_of_the_errors_of_torch(
    ranks: Ranks, call: Callable[[Any, Any], None]
) -> None:
    for as_torch, own, ours, other in ranks(2).run(raised, call):
        assert as_torch, (ours, other)
        assert own


COPIES: list[Callable[[Any], object]] = [
    copy.deepcopy,
    copy.copy,
    pickle.dumps,
    lambda model: torch.save(model, io.BytesIO()),
    lambda model: pickle.dumps({"model": nn.Sequential(model)}),
]


def not_copied(rank: int) -> list[tuple[str, str]]:
    model: Any = shard(Net(), mesh_of((2,), ("fsdp",)))
    model(tokens(rank)).sum().backward()
    said = []
    for call in COPIES:
        with pytest.raises(ShardingError) as caught:
            call(model)
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


def test_no_copy_and_no_pickle_of_a_sharded_module(ranks: Ranks) -> None:
    text = "FSDPNet cannot be copied or pickled: its shards are views of one buffer"
    for said in ranks(2).run(not_copied):
        assert [(kind, text in each) for kind, each in said] == [("ModuleError", True)] * 5


class Deep(nn.Module):
    """A part with a parameter that can be no shard."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Module())
        self.inner[1].scale = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


def named(rank: int) -> dict[str, str]:
    """Return the errors for parameters in lists and in nested modules."""
    mesh = mesh_of((2,), ("fsdp",))
    said = {}
    with torch.device("meta"):
        empty: Any = Net()
    shard(empty, mesh)
    for own in (empty.embedding, empty.head):
        own.to_empty(device="cpu")
    calls: dict[str, Callable[[], object]] = {
        "module": lambda: fully_shard(Deep(torch.tensor(1.0)), mesh),
        "list": lambda: fully_shard([Deep(torch.ones(2)), Deep(torch.tensor(1.0))], mesh),
        "part": empty.blocks[2].unshard,
        "forward": lambda: empty(tokens(rank)),
    }
    for name, call in calls.items():
        try:
            call()
        except ShardingError as error:
            said[name] = str(error)
    return said


def test_a_parameter_is_named_by_its_path_from_the_module_that_was_given(ranks: Ranks) -> None:
    for said in ranks(2).run(named):
        assert said["module"].startswith("inner.1.scale is a scalar")
        assert said["list"].startswith("[1].inner.1.scale is a scalar")
        assert said["part"].startswith("['table', 'one', 'up.weight'")
        assert said["forward"].startswith("in blocks.0: ['table', 'one', 'up.weight'")


class Recurrent(nn.Linear):
    """Has a method that a sharded module has too, as recurrent modules may."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps = self._units = self._unit = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count the steps."""
        self.steps += 1
        return super().forward(x)

    def reset(self) -> None:
        """Forget the steps."""
        self.steps = 0


class Typed(nn.Linear, theirs.FSDPModule):
    """Inherits torch's ``FSDPModule`` for type checkers, and has private names of the package."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._units = self._unit = self._edit = self._groups_for = self._finish_pipeline = 0

    def __new__(cls) -> Any:
        """Create an object of this class, unlike torch's ``FSDPModule``."""
        return object.__new__(cls)


def of_one_name(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("fsdp",))
    gate, marked = nn.Linear(4, 4), nn.Linear(4, 4)
    gate.reset = nn.Linear(4, 4)
    cast(Any, marked).no_sync = True
    said = []
    for module in (Recurrent(), gate, marked, nn.Sequential(Recurrent()), Typed()):
        kind = type(module)
        try:
            sharded: Any = fully_shard(module, mesh)
        except ModuleError as error:
            said.append(str(error))
            assert type(module) is kind
            assert not isinstance(next(module.parameters()), DTensor)
        else:
            sharded(torch.ones(2, 4)).sum().backward()
            sharded.zero_grad()
            sharded.reset()
            said.append(repr(sharded.float() is module))
    return said


def test_names_of_the_modules_own_that_would_be_hidden_are_refused(ranks: Ranks) -> None:
    """For example ``reset()`` of a recurrent module."""
    for own, gate, marked, *inside in ranks(2).run(of_one_name):
        assert own == (
            "Recurrent has ['reset'] of its own, which a sharded module has too and which would be "
            "hidden; rename them"
        )
        assert "Linear has ['reset'] of its own" in gate
        assert "Linear has ['no_sync'] of its own" in marked
        assert inside == ["True", "True"]
