"""Backwards with `create_graph=True` through sharded modules: gradient penalties and the like."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import grad
from torch.utils.checkpoint import checkpoint

from hp_fsdp import UnsupportedError, fully_shard

from .models import WIDTH, Block, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
MODES: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
}


class Two(nn.Module):
    """Two blocks and a head. The root unit has the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output for the blocks' output."""
        return cast(Tensor, self.head(self.second(self.first(x))))


class Words(Two):
    """The same after an embedding, so the root's input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output for the embeddings, and keep the embeddings."""
        ids = x.detach().abs().sum(1).long() % 11
        self.embedded = self.embedding(ids)
        return super().forward(self.embedded)


def input_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def penalty(y: Tensor, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    return cast(Tensor, (g.norm(dim=1) - 1).pow(2).sum())


def penalty_and_loss(model: Any, x: Tensor) -> None:
    y = model(x)
    (y.sin().sum() + penalty(y, x)).backward()


def penalty_alone(model: Any, x: Tensor) -> None:
    penalty(model(x), x).backward()


def penalty_after_loss(model: Any, x: Tensor) -> None:
    y = model(x)
    second = penalty(y, x)
    y.sin().sum().backward(retain_graph=True)
    second.backward()


def another_forward_between(model: Any, x: Tensor) -> None:
    second = penalty(model(x), x)
    (model(x.detach().cos()).sum() + second).backward()


def another_step_between(model: Any, x: Tensor) -> None:
    y = model(x)
    second = penalty(y, x)
    y.sin().sum().backward(retain_graph=True)
    model(x.detach().cos()).sum().backward()
    second.backward()


def third_derivative(model: Any, x: Tensor) -> None:
    (g,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
    h.sin().sum().backward()


def between_blocks(model: Any, x: Tensor) -> None:
    kept = []
    handle = model.first.register_forward_hook(lambda *given: kept.append(given[2]))
    y = model(x)
    handle.remove()
    penalty(y, kept[0]).backward()


def hessian_product(model: Any, x: Tensor) -> None:
    y = model(x)
    parameters = list(model.parameters())
    found = torch.autograd.grad(y.sin().sum(), parameters, create_graph=True)
    sum(g.sin().sum() for g in found).backward()  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Using backward")
def backward_with_graph(model: Any, x: Tensor) -> None:
    y = model(x)
    y.pow(2).sum().backward(create_graph=True)
    (g,) = [cast(Tensor, x.grad).clone()]
    x.grad = None
    g.pow(2).sum().backward()


def recomputed(model: Any, x: Tensor) -> None:
    h: Any = checkpoint(model.first, x, use_reentrant=False)
    penalty(model.second(h), x).backward()


def blocks_alone(model: Any, x: Tensor) -> None:
    y = model.second(model.first(x))
    (y.sum() + penalty(y, x)).backward()


def microbatches(model: Any, x: Tensor) -> None:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            penalty_and_loss(model, x)
    else:
        penalty_and_loss(model, x)
    other = x.detach().sin().requires_grad_()
    penalty_and_loss(model, other)


USES = {
    use.__name__: use
    for use in (
        penalty_and_loss,
        penalty_alone,
        penalty_after_loss,
        another_forward_between,
        another_step_between,
        third_derivative,
        between_blocks,
        hessian_product,
        backward_with_graph,
        recomputed,
        blocks_alone,
        microbatches,
    )
}


def sharded(mode: str, kind: Callable[[], nn.Module] = Two, **options: Any) -> Any:
    model: Any = make(kind)
    mesh = mesh_of((2,), ("fsdp",))
    given = {"reshard_after_forward": False, **MODES[mode], **options}
    root = {k: v for k, v in given.items() if k != "reshard_after_forward"}
    for block in (model.first, model.second):
        fully_shard(block, mesh, **given)
    fully_shard(model, mesh, **root)
    model.set_reshard_after_backward(False)
    return model


def steps(model: Any, use: Callable[[Any, Tensor], None], ranks_: list[int]) -> list[Gradients]:
    """Train two steps with penalties and one without; of several ranks take the mean."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks_:
            x = input_of(10 * step + rank)
            if step < 2:
                use(model, x)
            else:
                model(x).sum().backward()
        if len(ranks_) == 1:
            for each in (model, model.first, model.second):
                each.reshard()
        else:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad.detach() / len(ranks_)
        found.append(gradients(model))
        optimizer.step()
    return found


def trained(rank: int, mode: str, use: str) -> list[Gradients]:
    return steps(sharded(mode), USES[use], [rank])


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_of_a_backward_is_differentiated_as_in_one_process(
    ranks: Ranks, mode: str, use: str
) -> None:
    expected = steps(make(Two), USES[use], [0, 1])
    for found in ranks(2).run(trained, mode, use):
        for ours, plain in zip(found, expected, strict=True):
            assert ours.keys() == plain.keys()
            assert worst(ours, plain) < 1e-11


def words(model: Any, x: Tensor) -> None:
    penalty(model(x), model.embedded).backward()


def words_sharded(rank: int, mode: str) -> list[Gradients]:
    return steps(sharded(mode, Words), words, [rank])


@pytest.mark.parametrize("mode", MODES)
def test_a_root_without_gradients_of_its_input_takes_part(ranks: Ranks, mode: str) -> None:
    expected = steps(make(Words), words, [0, 1])
    for found in ranks(2).run(words_sharded, mode):
        for ours, plain in zip(found, expected, strict=True):
            assert worst(ours, plain) < 1e-11


def in_half(rank: int) -> Gradients:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return steps(sharded("copy", mp_policy=policy), penalty_and_loss, [rank])[0]


def test_penalties_work_in_mixed_precision(ranks: Ranks) -> None:
    expected = steps(make(Two), penalty_and_loss, [0, 1])[0]
    for found in ranks(2).run(in_half):
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert 1e-6 < error.item() < 0.1


def resharded_between(rank: int, use: str) -> tuple[str, Gradients]:
    """Free the parameters before the second backward, then run a step."""
    model = sharded("copy")
    x = input_of(rank)
    second = penalty(model(x), x)
    if use == "reset":
        model.reset()
    elif use == "state_dict":
        model.state_dict()
    else:
        model.second.reshard()
    with pytest.raises(RuntimeError) as caught:
        second.backward()
    del second
    model.reset()
    model.zero_grad()
    model(input_of(rank)).sum().backward()
    model.reset()
    return str(caught.value), gradients(model)


@pytest.mark.parametrize("use", ["reshard", "state_dict", "reset"])
def test_a_second_backward_through_freed_parameters_raises(ranks: Ranks, use: str) -> None:
    plain = make(Two)
    for rank in range(2):
        (plain(input_of(rank)).sum() / 2).backward()
    for said, found in ranks(2).run(resharded_between, use):
        assert "modified by an inplace operation" in said
        assert worst(found, gradients(plain)) < 1e-12


REFUSED: dict[str, tuple[bool | int | None, bool]] = {
    "default": (None, True),
    "freed after forward": (True, False),
    "freed after backward": (False, True),
    "two of four ranks": (2, False),
}


def refused(rank: int, how: str) -> tuple[str, dict[str, Tensor], Gradients, Gradients]:
    """Try create_graph=True, then torch.func.grad, then a usual step."""
    after_forward, after_backward = REFUSED[how]
    model: Any = make(Two)
    mesh = mesh_of((4,), ("fsdp",))
    for block in (model.first, model.second):
        fully_shard(block, mesh, reshard_after_forward=after_forward)
    fully_shard(model, mesh)
    model.set_reshard_after_backward(after_backward)
    x = input_of(rank)
    with pytest.raises(UnsupportedError) as caught:
        penalty(model(x), x)
    model.reset()
    value = grad(lambda x: model(x).pow(2).sum())(x)
    (value.norm(dim=1) - 1).pow(2).sum().backward()
    model.reset()
    by_func = gradients(model)
    model.zero_grad()
    model(input_of(rank)).sum().backward()
    model.reset()
    return str(caught.value), {"value": value.detach()}, by_func, gradients(model)


@pytest.mark.parametrize("how", REFUSED)
def test_freed_parameters_refuse_create_graph_and_func_grad_works(ranks: Ranks, how: str) -> None:
    plain, usual = make(Two), make(Two)
    for rank in range(4):
        x = input_of(rank)
        (penalty(plain(x), x) / 4).backward()
        (usual(input_of(rank)).sum() / 4).backward()
    for rank, (said, value, by_func, after) in enumerate(ranks(4).run(refused, how)):
        assert "create_graph=True" in said
        assert "torch.func.grad" in said
        assert "reshard_after_forward=False" in said
        assert "set_reshard_after_backward(False)" in said
        x = input_of(rank)
        (expected,) = torch.autograd.grad(make(Two)(x).pow(2).sum(), x)
        assert worst(value, {"value": expected}) < 1e-12
        assert worst(by_func, gradients(plain)) < 1e-11
        assert worst(after, gradients(usual)) < 1e-12


def hooked(rank: int) -> list[bool]:
    """Return whether hooks on gradients stay after steps with and without penalties."""
    model = sharded("copy")
    found = []
    for use in (penalty_and_loss, None, None):
        x = input_of(rank)
        if use is None:
            model(x).sum().backward()
        else:
            use(model, x)
        parameters = list(model.first.parameters())
        found.append(any(p._post_accumulate_grad_hooks for p in parameters))
        model.zero_grad()
    return found


def test_hooks_on_gradients_go_with_the_graph(ranks: Ranks) -> None:
    assert ranks(2).run(hooked) == [[True, False, False]] * 2


def dual(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return forward-mode derivatives of the outputs, and of the gradients."""
    found = {}
    for name, given in (("plain", x.detach()), ("of leaf", x), ("of other", x * 1)):
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(given, given.detach().cos()))
            tangent: Any = forward_ad.unpack_dual(y).tangent
            found[name] = tangent.detach().clone()
    with forward_ad.dual_level():  # a Hessian times a vector
        given = forward_ad.make_dual(x, x.detach().cos())
        (g,) = torch.autograd.grad(model(given).sin().sum(), given)
        tangent = forward_ad.unpack_dual(g).tangent
        found["of gradient"] = tangent.detach().clone()
    with torch.no_grad(), forward_ad.dual_level():
        y = model(forward_ad.make_dual(x.detach(), x.detach().cos()))
        tangent = forward_ad.unpack_dual(y).tangent
        found["no_grad"] = tangent.clone()
    return found


def dual_sharded(rank: int, mode: str) -> tuple[dict[str, Tensor], Gradients]:
    model = sharded("copy", reshard_after_forward=True, **MODES[mode])
    model.set_reshard_after_backward(True)
    found = dual(model, input_of(rank))
    with forward_ad.dual_level():
        model(forward_ad.make_dual(input_of(rank), torch.ones(3, WIDTH).double())).sum().backward()
    return found, gradients(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("mode", MODES)
def test_dual_tensors_pass_through_sharded_modules(ranks: Ranks, mode: str) -> None:
    plain = make(Two)
    for rank in range(2):
        (plain(input_of(rank)).sum() / 2).backward()
    for rank, (found, after) in enumerate(ranks(2).run(dual_sharded, mode)):
        assert worst(found, dual(make(Two), input_of(rank))) < 1e-12
        assert worst(after, gradients(plain)) < 1e-12
