"""Parameters that user code ties, replaces or steps at another time than usual."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import ParameterError, StateError, fully_shard

from .models import full, make, mesh_of

Ranks = Callable[[int], RankPool]


def pair() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh()
    )


def batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8) + rank


def sharded(by_layer: bool, layout: Any = "exact", **options: Any) -> Any:
    model: Any = make(pair)
    mesh = mesh_of((2,), ("fsdp",))
    for layer in (model[0], model[2]) if by_layer else ():
        fully_shard(layer, mesh, layout=layout, **options)
    return fully_shard(model, mesh, layout=layout, **options)


def tied(rank: int, by_layer: bool, layout: str, grads: str) -> list[float]:
    """Tie two layers after `fully_shard`; return the errors of the gradients of three steps."""
    model: Any = sharded(by_layer, layout, grads=grads)
    plain: Any = make(pair)
    for each in (model, plain):
        each[2].weight = each[0].weight
    own = torch.optim.SGD(model.parameters(), lr=0.01)
    one = torch.optim.SGD(plain.parameters(), lr=0.01)
    errors = []
    for _ in range(3):
        model(batch(rank)).pow(2).sum().backward()
        for other in range(2):
            (plain(batch(other)).pow(2).sum() / 2).backward()
        error = full(model[0].weight.grad) - plain[0].weight.grad
        errors.append(error.abs().max().item())
        for optimizer in (own, one):
            optimizer.step()
            optimizer.zero_grad()
    return errors


# In a ragged unit, the two parameters have different shards, so that the tie is refused.
@pytest.mark.parametrize("grads", ["copy", "accumulate"])
@pytest.mark.parametrize(
    ("by_layer", "layout"), [(False, "exact"), (True, "exact"), (True, "ragged")]
)
def test_ties_made_after_fully_shard_add_the_gradients_of_all_uses(
    ranks: Ranks, by_layer: bool, layout: str, grads: str
) -> None:
    for errors in ranks(2).run(tied, by_layer, layout, grads):
        assert max(errors) < 1e-12


def put_back(rank: int) -> str:
    """Compute with other weights for one forward, then with the earlier parameters."""
    model = sharded(True)
    other: Any = {name: nn.Parameter(p.detach() / 2) for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, other, (batch(rank),))
        with pytest.raises(ParameterError) as caught:
            model(batch(rank))
    return str(caught.value)


def test_parameters_that_are_registered_again_after_a_replacement_are_refused(
    ranks: Ranks,
) -> None:
    for said in ranks(2).run(put_back):
        assert "weight was replaced, and then the earlier parameter was registered again" in said


def exchanged(rank: int) -> str:
    model = sharded(True)
    model[0].weight, model[2].weight = model[2].weight, model[0].weight
    with pytest.raises(ParameterError) as caught:
        model(batch(rank))
    return str(caught.value)


def test_exchanged_parameters_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(exchanged):
        assert "were exchanged" in said


CHANGES: dict[str, Callable[[Any], object]] = {
    "replaced": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(8, 8).double())),
    "None": lambda m: setattr(m, "weight", None),
    "deleted": lambda m: delattr(m, "weight"),
}


def while_unsharded(rank: int, change: str, how: str) -> str:
    """Change a parameter while the unit is unsharded."""
    model = sharded(False, reshard_after_forward=False)
    if how == "unshard":
        model.unshard()
    elif how == "forward":
        model(batch(rank))
    else:
        model.set_reshard_after_backward(False)
        model(batch(rank)).sum().backward()
    CHANGES[change](model[0])
    with pytest.raises(ParameterError) as caught:
        model(batch(rank))
    return str(caught.value)


@pytest.mark.parametrize("how", ["unshard", "forward", "backward"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_unsharded_parameters_that_change_are_refused(ranks: Ranks, change: str, how: str) -> None:
    for said in ranks(2).run(while_unsharded, change, how):
        assert "replaced or removed while they were unsharded; call reshard()" in said


def too_early(rank: int) -> list[str]:
    """Return the warnings of an optimizer that was created between forward and backward."""
    model = sharded(False)
    loss = model(batch(rank)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in caught]


def test_an_optimizer_of_unsharded_parameters_warns(ranks: Ranks) -> None:
    for said in ranks(2).run(too_early):
        assert any("SGD holds 0.weight" in each for each in said)


def stepped(rank: int, reshard: bool) -> str:
    """Step an optimizer between a forward and its backward."""
    model = sharded(True, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank)).sum().backward()
    loss = model(batch(rank)).sum()
    optimizer.step()
    try:
        loss.backward()
    except StateError as error:
        model.reset()
        return str(error)
    return ""


@pytest.mark.parametrize("reshard", [False, True])
def test_a_step_between_forward_and_backward_is_refused_if_parameters_are_gathered_again(
    ranks: Ranks, reshard: bool
) -> None:
    for said in ranks(2).run(stepped, reshard):
        assert ("between its forward and its backward" in said) is reshard


def saved(rank: int) -> list[bool]:
    """Save and load single parameters, sharded and unsharded."""
    model = sharded(False)
    found = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(model[0].weight, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        found.append(torch.equal(full(loaded), full(model[0].weight)))
        model.unshard()
    return found


def test_single_parameters_can_be_saved(ranks: Ranks) -> None:
    assert ranks(2).run(saved) == [[True, True]] * 2
