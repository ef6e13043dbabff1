"""Modules that are called from their own forward, or from a registered method."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor
from hp_fsdp import fully_shard, register_fsdp_forward_method

from .models import WIDTH, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
Sharded = (DTensor, RaggedTensor)
Results = tuple[list[Tensor], list[Gradients]]


class Again(nn.Module):
    """A layer that calls itself, and has parameters for before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.after = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        """Apply the layer, itself in its middle."""
        y = torch.tanh(x @ self.before)
        y = self(y, depth - 1) if depth else y
        return torch.tanh(y @ self.after)


class Root(nn.Module):
    """A model with methods that call the model and then use its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([Again(), Again()])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x * self.scale)
        return x

    def scaled(self, x: Tensor) -> Tensor:
        """Go on after two forwards."""
        return cast(Tensor, self(self(x)) * self.scale)

    def trained(self, x: Tensor) -> Tensor:
        """Run forward and backward two times."""
        losses = []
        for _ in range(2):
            losses.append(self(x).pow(2).mean())
            losses[-1].backward()
        return torch.stack(losses).detach()

    def failed(self, x: Tensor) -> Tensor:
        """Raise within a forward that is called from here, go on, and raise."""
        try:
            self(x[:, 1:])
        except RuntimeError:
            (self(x) * self.scale).sum()
        raise ZeroDivisionError


def batch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def calls(model: Any, batches: list[Tensor]) -> Results:
    """Return outputs and gradients of all entry points. Gradients are means over batches."""
    values, found = [], []
    with torch.no_grad():
        values += [model.scaled(x) for x in batches * 2]
    for takes_gradient in (True, False):
        for x in batches:
            y = model.scaled(x.clone().requires_grad_(takes_gradient))
            (y.pow(2).mean() / len(batches)).backward()
            values.append(y.detach())
        found.append(gradients(model))
        model.zero_grad()
    values += [model.trained(x) for x in batches]
    found.append({name: g / len(batches) for name, g in gradients(model).items()})
    return values, found


def called(rank: int, layout: Any, reshard: bool | None, units: bool) -> tuple[Results, bool]:
    model: Any = make(Root)
    for part in (*model.layers, model) if units else (model,):
        fully_shard(part, mesh_of((2,), ("fsdp",)), layout=layout, reshard_after_forward=reshard)
    for method in ("scaled", "trained", "failed"):
        register_fsdp_forward_method(model, method)
    results = calls(model, [batch(rank)])
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        model.failed(batch(rank))
    again = calls(model, [batch(rank)])
    equal = all(map(torch.equal, results[0], again[0])) and all(
        torch.equal(one[name], other[name])
        for one, other in zip(results[1], again[1], strict=True)
        for name in one
    )
    return results, equal and all(isinstance(p, Sharded) for p in model.parameters())


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize(
    ("layout", "reshard"), [("exact", None), ("exact", True), ("exact", False), ("ragged", None)]
)
def test_the_outer_call_keeps_its_parameters_to_its_end(
    ranks: Ranks, layout: str, reshard: bool | None, units: bool
) -> None:
    plain = make(Root)
    expected = calls(plain, [batch(0), batch(1)])
    for rank, ((values, found), clean) in enumerate(ranks(2).run(called, layout, reshard, units)):
        assert clean
        for value, wanted in zip(values, expected[0][rank::2], strict=True):
            assert torch.allclose(value, wanted, rtol=1e-12, atol=0)
        for one, other in zip(found, expected[1], strict=True):
            assert worst(one, other) < 1e-12
