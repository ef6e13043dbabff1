"""Parameters of unusual dtypes and sizes, also with tensor parallelism."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hp_fsdp import ShardingError, fully_shard

from .models import Gradients, full, gradients, make, mesh_of, parameters, worst

Ranks = Callable[[int], RankPool]


class Quantised(nn.Module):
    """A frozen weight of eight bits and a trained one of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        frozen = torch.randn(6, 4).to(torch.float8_e4m3fn)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.trained = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Use the sum of both."""
        return x @ (self.frozen.to(x.dtype) + self.trained).t()


def input_of(rank: int, width: int) -> Tensor:
    return torch.arange(2.0 * width).view(2, width) / 10 + rank


def quantised(rank: int, layout: Any) -> Gradients:
    torch.manual_seed(0)
    model: Any = Quantised()
    fully_shard(model, mesh_of((2,), ("fsdp",)), layout=layout)
    model(input_of(rank, 4)).pow(2).mean().backward()
    found = gradients(model)
    model.unshard()  # gloo could not gather it elsewhere
    return {**found, "frozen": model.frozen.detach().float()}


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_frozen_int8_weights_and_trained_weights_share_a_unit(ranks: Ranks, layout: str) -> None:
    torch.manual_seed(0)
    plain = Quantised()
    for rank in range(2):
        (plain(input_of(rank, 4)).pow(2).mean() / 2).backward()
    expected = {**gradients(plain), "frozen": plain.frozen.detach().float()}
    for found in ranks(2).run(quantised, layout):
        assert worst(found, expected) < 1e-5


class Perceptron(nn.Module):
    """Two layers to split over a tensor-parallel axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the second layer's output."""
        return cast(Tensor, self.down(torch.relu(self.up(x))))


def other_dim(parameter: nn.Parameter) -> Shard | None:
    """Cut a matrix along the dimension that tensor parallelism leaves whole."""
    if parameter.ndim < 2 or not isinstance(parameter, DTensor):
        return None
    return Shard(1 - cast(Shard, parameter.placements[0]).dim)


def joined(rank: int, width: int, placed: bool) -> tuple[Gradients, Gradients, list[Any]]:
    mesh = mesh_of((1, 2, 2), ("pp", "dp", "tp"))
    model: Any = make(lambda: nn.Sequential(Perceptron(width), Perceptron(width)), torch.float64)
    for layer in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh["dp"], shard_placement_fn=other_dim if placed else None)
    fully_shard(model, mesh["dp"], shard_placement_fn=other_dim if placed else None)
    before = parameters(model)
    x = input_of(mesh.get_local_rank("dp"), width).double()
    model(x).pow(2).mean().backward()
    names = [p.device_mesh.mesh_dim_names for p in model.parameters()]
    dims = [tuple(each.dim for each in p.placements) for p in model.parameters() if p.ndim > 1]
    return before, gradients(model), [names, dims]


@pytest.mark.parametrize(
    ("width", "placed"), [(3, False), (5, False), (16, False), (17, False), (16, True)]
)
def test_sizes_that_no_axis_divides_train_under_tensor_parallelism(
    ranks: Ranks, width: int, placed: bool
) -> None:
    plain = make(lambda: nn.Sequential(Perceptron(width), Perceptron(width)), torch.float64)
    for rank in range(2):
        (plain(input_of(rank, width).double()).pow(2).mean() / 2).backward()
    for before, found, (names, dims) in ranks(4).run(joined, width, placed):
        assert set(names) == {("dp", "tp")}
        if placed:
            assert all(one != other for one, other in dims)
        assert worst(before, parameters(plain)) == 0
        assert worst(found, gradients(plain)) < 1e-12


def refused(rank: int, kind: str) -> tuple[str, list[str]]:
    """Shard an unsupported module. Return the error, and the hooks and classes that remain."""
    made: dict[str, Callable[[], nn.Module]] = {
        "sparse": lambda: nn.Embedding(8, 4, sparse=True),
        "sparse bag": lambda: nn.EmbeddingBag(8, 4, sparse=True, mode="sum"),
        "renormalised": lambda: nn.Embedding(8, 4, max_norm=1.0),
        "lazy": lambda: nn.LazyLinear(3),
        "script": lambda: torch.jit.script(nn.Linear(3, 3)),
        "inside": lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3))),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of scripts
        model = nn.Sequential(nn.Linear(2, 2), made[kind]())
    with pytest.raises(ShardingError) as caught:
        fully_shard(model, mesh_of((2,), ("fsdp",)))
    left = [type(model).__name__, *(type(p).__name__ for p in model[0].parameters())]
    return str(caught.value), left


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sparse", "1.weight is of an Embedding with sparse=True, whose gradients"),
        ("sparse bag", "1.weight is of an EmbeddingBag with sparse=True, whose gradients"),
        ("renormalised", "1.weight is of an Embedding with max_norm=1.0, which writes"),
        ("lazy", "1.weight has no shape yet"),
        ("script", "1.weight is of a ScriptModule"),
        ("inside", "1.0.weight is of a ScriptModule"),
    ],
)
def test_unsupported_modules_raise_with_their_name(ranks: Ranks, kind: str, said: str) -> None:
    for found, left in ranks(2).run(refused, kind):
        assert said in found
        assert left == ["Sequential", "Parameter", "Parameter"]


class Scaled(nn.Embedding):
    """A frozen table with a scale that trains."""

    def __init__(self) -> None:
        super().__init__(8, 4, max_norm=1.0)
        self.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scaled rows of the table."""
        return super().forward(ids) * self.scale


class Overridden(nn.Embedding):
    """An embedding with another ``forward``."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up, without sparse gradients."""
        return nn.functional.embedding(ids, self.weight)


def accepted(rank: int, kind: str) -> bool:
    """Shard and run similar modules that are supported."""
    frozen = nn.Embedding(8, 4, max_norm=1.0).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's of scripts
        script = torch.jit.script(nn.Linear(4, 4).double() if kind == "ignored" else nn.ReLU())
    table = {"frozen": frozen, "scaled": Scaled(), "overridden": Overridden(8, 4, sparse=True)}
    first = table.get(kind, nn.Embedding(8, 4)).double()
    model: Any = nn.Sequential(first, nn.Linear(4, 4).double(), script)
    fully_shard(model, mesh_of((2,), ("fsdp",)), ignored_params=set(script.parameters()))
    ids = torch.arange(8)
    model(ids).sum().backward()
    return torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("kind", ["frozen", "scaled", "overridden", "no parameters", "ignored"])
def test_similar_supported_modules_are_sharded(ranks: Ranks, kind: str) -> None:
    assert ranks(2).run(accepted, kind) == [True, True]


def one_rank(rank: int) -> bool:
    """Renormalise on one rank, whose shard is the whole table."""
    table = nn.Embedding(8, 4, max_norm=0.1)
    fully_shard(table, mesh_of((1,), ("fsdp",)))
    table(torch.arange(8))
    return bool((full(table.weight.detach()).norm(dim=1) <= 0.1001).all())


def test_on_one_rank_a_table_may_renormalise(ranks: Ranks) -> None:
    assert ranks(1).run(one_rank) == [True]
