"""Units that run before their root, lists as roots, and changes between two calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import ModuleError, StateError, fully_shard, sharded_optimizer

from .models import WIDTH, Gradients, full, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]


def layers(count: int) -> Any:
    return make(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))))


def batch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def expected(*passes: Callable[[Any, int], Tensor], count: int = 2) -> Gradients:
    """Return the gradients of one process, the mean over two ranks."""
    model = layers(count)
    for rank in range(2):
        for loss in passes:
            (loss(model, rank) / 2).backward()
    return gradients(model)


def whole(model: Any, rank: int) -> Tensor:
    made: Tensor = model(batch(rank)).pow(2).sum()
    return made


def replaced(rank: int, part_first: bool) -> list[bool]:
    """Replace the parameters of a part between two passes; the part may have trained before."""
    mesh, model = mesh_of((2,), ("fsdp",)), layers(2)
    fully_shard(model[0], mesh)
    if part_first:
        model[0](batch(rank)).sum().backward()
    fully_shard(model[1], mesh)
    fully_shard(model, mesh)
    seen = []
    with torch.no_grad():
        for _ in range(4):
            model(batch(rank))
            for name in ("weight", "bias"):
                setattr(model[0], name, nn.Parameter(torch.zeros_like(getattr(model[0], name))))
            seen.append(torch.equal(model(batch(rank))[0], full(model[1].bias)))
            for name in ("weight", "bias"):
                setattr(model[0], name, nn.Parameter(torch.ones_like(getattr(model[0], name))))
    return seen


@pytest.mark.parametrize("part_first", [False, True])
def test_a_replacement_counts_in_a_part_that_ran_before_its_root(
    ranks: Ranks, part_first: bool
) -> None:
    assert ranks(2).run(replaced, part_first) == [[True] * 4] * 2


class Failing(torch.autograd.Function):
    """The identity with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Raise."""
        raise ArithmeticError("in backward")


def failed_part(rank: int) -> Gradients:
    """Let a part fail in backward before there is a root; the root's reset is to help."""
    mesh, model = mesh_of((2,), ("fsdp",)), layers(2)
    for layer in model:
        fully_shard(layer, mesh)
    apply: Any = Failing.apply
    loss = model[0](apply(batch(rank).requires_grad_())).sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    fully_shard(model, mesh)
    model.reset()
    model.zero_grad()
    whole(model, rank).backward()
    return gradients(model)


def test_a_reset_reaches_parts_that_ran_before_their_root(ranks: Ranks) -> None:
    for found in ranks(2).run(failed_part):
        assert worst(found, expected(whole)) < 1e-12


def waiting_parts(rank: int, also: bool) -> Gradients:
    """Leave gradients waiting in parts, which ran alone, and maybe in one that has not."""
    mesh, model = mesh_of((2,), ("fsdp",)), layers(2)
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    with model.no_sync():
        if also:
            model[1](model[0](batch(rank))).pow(2).sum().backward()
        else:
            model[1](batch(rank)).pow(2).sum().backward()
    model.reduce_gradients()
    return gradients(model)


@pytest.mark.parametrize("also", [True, False])
def test_gradients_of_parts_are_reduced_by_their_root(ranks: Ranks, also: bool) -> None:
    def one(model: Any, rank: int) -> Tensor:
        made: Tensor = model[1](batch(rank)).pow(2).sum()
        return made

    for found in ranks(2).run(waiting_parts, also):
        assert worst(found, expected(whole if also else one)) < 1e-12


def contained(rank: int) -> str:
    """Give a list of modules one of which is in another."""
    model = layers(2)
    with pytest.raises(ModuleError) as caught:
        fully_shard([model, model[1]], mesh_of((2,), ("fsdp",)))
    return str(caught.value)


def test_a_list_has_no_modules_that_are_in_one_another(ranks: Ranks) -> None:
    for said in ranks(2).run(contained):
        assert "module[1], a Linear, is in module[0], a Sequential" in said
        assert "call fully_shard on module[1] first, alone" in said


class Predictor(nn.Module):
    """Predicts a second token with the head of the model."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        """Return the head's output of the projection."""
        return self.head(torch.tanh(self.project(x)))


class Multi(nn.Module):
    """A norm, a head, and a predictor that contains the same head."""

    def __init__(self, uses_head: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.mtp = Predictor(self.head)
        self.uses_head = uses_head

    def forward(self, x: Tensor) -> Any:
        """Return the predictor's output, and with it the head's."""
        x = self.norm(self.body(x))
        second = self.mtp(x)
        return self.head(x) + second if self.uses_head else second


def advised(rank: int, uses_head: bool, layout: Any) -> tuple[str, list[Gradients]]:
    """Shard a head inside a list, then follow the advice of the error. Train two steps."""
    model, mesh = make(lambda: Multi(uses_head)), mesh_of((2,), ("fsdp",))
    with pytest.raises(ModuleError) as caught:
        fully_shard([model.norm, model.mtp, model.head], mesh)
    fully_shard(model.head, mesh, layout=layout)
    with pytest.raises(ModuleError, match="sharded already, so leave it out of the list"):
        fully_shard([model.norm, model.mtp, model.head], mesh, layout=layout)
    fully_shard([model.norm, model.mtp], mesh, layout=layout)
    fully_shard(model, mesh, layout=layout)
    return str(caught.value), two_steps(model, [rank])


def two_steps(model: Any, ranks_: list[int]) -> list[Gradients]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for rank in ranks_:
            (whole(model, rank) / len(ranks_)).backward()
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("uses_head", [True, False])
def test_an_inner_module_of_a_list_is_sharded_first_as_the_error_says(
    ranks: Ranks, uses_head: bool, layout: str
) -> None:
    expected_ = two_steps(make(lambda: Multi(uses_head)), [0, 1])
    for said, found in ranks(2).run(advised, uses_head, layout):
        assert "module[2], a Linear, is in module[1], a Predictor" in said
        assert "call fully_shard on module[2] first, alone" in said
        assert all(worst(a, b) < 1e-12 for a, b in zip(found, expected_, strict=True))


class Body(nn.Module):
    """Layers that are separate units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        made: Tensor = self.layers(x)
        return made


def list_root(rank: int, last: int) -> tuple[list[str], Gradients]:
    """Train a list with nested units in one module. Return the weights' types after forward."""
    mesh = mesh_of((2,), ("fsdp",))
    first, body = layers(1)[0], Body()
    for layer in body.layers:
        fully_shard(layer, mesh)
    both = [first, body] if last else [body, first]
    fully_shard(both, mesh)
    shown: list[str] = []
    for _ in range(3):
        for module in both:
            module.zero_grad()
        held = body(first(batch(rank))) if last else first(body(batch(rank)))
        shown = [type(layer.weight.data).__name__ for layer in body.layers]
        held.pow(2).sum().backward()
    found = {f"first.{n}": full(p.grad) for n, p in first.named_parameters() if p.grad is not None}
    return shown, found | gradients(body)


@pytest.mark.parametrize("last", [1, 0])
def test_units_inside_any_module_of_a_list_have_it_as_root(ranks: Ranks, last: int) -> None:
    first, body = layers(1)[0], Body()
    for rank in range(2):
        held = body(first(batch(rank))) if last else first(body(batch(rank)))
        (held.pow(2).sum() / 2).backward()
    whole = {f"first.{n}": p.grad for n, p in first.named_parameters()} | gradients(body)
    for shown, found in ranks(2).run(list_root, last):
        assert shown[:3] == ["DTensor"] * 3  # given up after forward, as under any root
        assert worst(found, whole) < 1e-12


def assigned(rank: int) -> list[str]:
    """Assign new parameters after a flat optimizer was created for the old ones."""
    model = fully_shard(layers(2), mesh_of((2,), ("fsdp",)))
    optimizer = sharded_optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    whole(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    said = []
    for _ in range(2):
        whole(model, rank).backward()
        with pytest.raises(StateError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    return said


def test_an_optimizer_of_parameters_that_were_replaced_says_so(ranks: Ranks) -> None:
    for said in ranks(2).run(assigned):
        assert all("create it again" in each for each in said)


def converted(rank: int, parts: str) -> str:
    """Convert parameters between forward and backward."""
    mesh = mesh_of((2,), ("fsdp",))

    def layer() -> nn.Module:
        return nn.LayerNorm(WIDTH) if parts == "norms" else nn.Linear(WIDTH, WIDTH)

    model: Any = make(lambda: nn.Sequential(*(layer() for _ in range(3))))
    for each in model:
        fully_shard(each, mesh)
    fully_shard(model, mesh)
    loss = whole(model, rank)
    model.to(torch.float32)
    with pytest.raises(StateError) as caught:
        loss.backward()
    model.reset()
    model.to(torch.float64)
    model.zero_grad()
    whole(model, rank).backward()
    return str(caught.value)


@pytest.mark.parametrize("parts", ["norms", "linear"])
def test_a_backward_of_parameters_that_were_converted_since_says_so(
    ranks: Ranks, parts: str
) -> None:
    for said in ranks(2).run(converted, parts):
        assert "2" in said
        assert "between its forward and its backward" in said


def thawed(rank: int, how: str) -> Gradients:
    """Unfreeze a parameter that an optimizer has, while the module has its unsharded one."""
    mesh, model = mesh_of((2,), ("fsdp",)), layers(2)
    model[0].weight.requires_grad_(False)
    fully_shard(model, mesh)
    held = model[0].weight
    if how == "kept after forward":
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            model(batch(rank))
    elif how == "kept after backward":
        model.set_reshard_after_backward(False)
        whole(model, rank).backward()
        model.zero_grad()
    else:
        model.unshard()
    held.requires_grad_(True)
    whole(model, rank).backward()
    model.reshard()
    return gradients(model)


@pytest.mark.parametrize("how", ["kept after forward", "kept after backward", "by hand"])
def test_a_parameter_unfrozen_while_sharded_trains_from_the_next_forward(
    ranks: Ranks, how: str
) -> None:
    for found in ranks(2).run(thawed, how):
        assert worst(found, expected(whole)) < 1e-12


def other_factor(rank: int) -> str:
    """Change how gradients are divided while scattered ones wait for an all-reduce."""
    model: Any = fully_shard(layers(2), mesh_of((2, 2), ("dp_replicate", "fsdp")))
    model.set_requires_all_reduce(False)
    whole(model, rank % 2).backward()
    model.zero_grad()  # only zeros wait
    model.set_force_sum_reduction_for_comms(True)
    model.set_requires_all_reduce(True)
    whole(model, rank % 2).backward()
    assert worst(gradients(model), expected(whole)) < 1e-12
    model.zero_grad()
    model.set_force_sum_reduction_for_comms(False)
    model.set_requires_all_reduce(False)
    whole(model, rank % 2).backward()
    model.set_force_sum_reduction_for_comms(True)
    model.set_requires_all_reduce(True)
    with pytest.raises(StateError) as caught:
        whole(model, rank % 2).backward()
    model.reset()
    model.zero_grad()
    whole(model, rank % 2).backward()
    assert worst(gradients(model), expected(whole)) < 1e-12
    return str(caught.value)


def test_waiting_sums_of_gradients_are_not_mixed_with_averages(ranks: Ranks) -> None:
    for said in ranks(4).run(other_factor):
        assert "wait for an all-reduce" in said


def thawed_while_waiting(rank: int, how: str) -> str:
    """Unfreeze a parameter that one rank uses, while gradients of others are added up."""
    model: Any = make(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model[1].weight.requires_grad_(False)
    fully_shard(model, mesh_of((2,), ("fsdp",)), grads="accumulate", direct_bytes=0)
    held = model[1].weight
    model.set_reshard_after_backward(how != "kept")
    with model.no_sync():
        whole(model, rank).backward()
    if how == "replaced":
        model[1].weight = nn.Parameter(held.detach().clone())
    else:
        held.requires_grad_(True)
    with pytest.raises(StateError) as caught:
        model(batch(rank))
    return str(caught.value)


@pytest.mark.parametrize("how", ["gathered anew", "kept", "replaced"])
def test_unfreezing_during_accumulation_raises_on_all_ranks(ranks: Ranks, how: str) -> None:
    for said in ranks(2).run(thawed_while_waiting, how):
        assert "['1.weight'] were frozen when gradients of others began to add up" in said
