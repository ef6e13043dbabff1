"""The memory of reduced gradients: new in each step, and freed with the last gradient."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_dtensor import TorchCollectives
from hp_fsdp import fully_shard

from .models import Net, gradients, loss_of, make, mesh_of, reference, shard, tokens, worst

Ranks = Callable[[int], RankPool]
# Objects of a gradient that a user can keep over the next step.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the gradient": lambda gradient: gradient,
    "its local tensor": lambda gradient: gradient.to_local(),
    "a view of it": lambda gradient: gradient.to_local()[:1],
    "another wrapper": lambda gradient: gradient.detach(),
    "its storage": lambda gradient: gradient.to_local().untyped_storage(),
}


def steps(rank: int, layout: str, holder: str) -> tuple[list[bool], list[float]]:
    """Return whether the kept objects kept their values, and the errors of the gradients."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), layout=layout)
    kept, errors = [], []
    held: dict[str, Any] = {}
    for step in range(4):
        loss_of(model, tokens(rank, step)).backward()
        errors.append(worst(gradients(model), reference(2, steps=(step,))))
        with torch.no_grad():
            kept += [torch.equal(local(tensor), copy) for tensor, copy in held.values()]
            keep = {n: HOLDERS[holder](p.grad) for n, p in model.named_parameters()}
            held = {n: (t, local(t).clone()) for n, t in keep.items()}
        model.zero_grad()
    return kept, errors


def local(held: Any) -> Any:
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(held)
    return held.to_local() if hasattr(held, "to_local") else held


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("holder", list(HOLDERS))
def test_kept_gradients_keep_their_values(ranks: Ranks, layout: str, holder: str) -> None:
    for kept, errors in ranks(2).run(steps, layout, holder):
        assert all(kept)
        assert max(errors) < 1e-12


def marked(rank: int, layout: str) -> list[int]:
    """Set an attribute on one gradient of the first step. Return how many have it per step."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)), layout=layout)
    counts = []
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        found: list[Any] = [p.grad for p in model.parameters()]
        counts.append(sum("mark" in vars(each) for each in found))
        if step == 0:
            found[0].mark = True
        del found
        model.zero_grad()
    return counts


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_attributes_of_a_gradient_do_not_reach_the_next_step(ranks: Ranks, layout: str) -> None:
    assert ranks(2).run(marked, layout) == [[0, 0, 0]] * 2


def kept_by_a_hook(rank: int, width: int) -> list[bool]:
    """Keep the argument of an all-reduce hook over the next steps."""
    model: Any = nn.Linear(width, width)
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.set_all_reduce_hook(lambda reduced: kept.append((reduced, reduced.clone())))
    for step in range(3):
        model(torch.full((2, width), step + 1.0)).sum().backward()
        model.zero_grad()
    return [torch.equal(*pair) for pair in kept]


@pytest.mark.parametrize("width", [8, 512])
def test_reduced_gradients_that_a_hook_keeps_stay_unchanged(ranks: Ranks, width: int) -> None:
    assert ranks(2).run(kept_by_a_hook, width) == [[True] * 3] * 2


def after_inference_mode(rank: int) -> float:
    """Reduce under inference_mode, then train."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    with model.no_sync():
        loss_of(model, tokens(rank)).backward()
    with torch.inference_mode():
        model.reduce_gradients()
    for _ in range(2):
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return worst(gradients(model), reference(2))


def test_gradients_that_were_made_under_inference_mode_train_later_steps(ranks: Ranks) -> None:
    assert max(ranks(2).run(after_inference_mode)) < 1e-12


class Direct(nn.Linear):
    """Runs its forward without the hooks of a module."""

    def __call__(self, x: Any) -> Any:
        """Run forward."""
        return self.forward(x)


def direct(rank: int) -> bool:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), Direct(4, 4))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    for module in (*model, model):
        fully_shard(module, mesh_of((2,), ("fsdp",)))
    x = torch.arange(8.0).view(2, 4) + rank
    for _ in range(2):
        model.zero_grad()
        model(x).pow(2).sum().backward()
    for other in range(2):
        (plain(torch.arange(8.0).view(2, 4) + other).pow(2).sum() / 2).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    return all(e is not None and torch.allclose(found[n], e) for n, e in expected.items())


def test_a_class_that_calls_its_forward_without_hooks_trains(ranks: Ranks) -> None:
    assert ranks(2).run(direct) == [True] * 2


def alive(rank: int, width: int) -> tuple[list[int], list[int], int]:
    """Count the local gradients that are alive after backwards, and in forwards after them.

    Also count the storages that the gradients of two units have.
    """
    model: Any = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for layer in model:
        fully_shard(layer, mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    locals_: list[Any] = []  # weak references, because strong ones keep the gradients alive
    inside: list[int] = []
    model.register_forward_pre_hook(
        lambda *_: inside.append(sum(each() is not None for each in locals_))
    )
    after, storages = [], set()
    for _ in range(3):
        model(torch.ones(2, width)).sum().backward()
        with torch.no_grad():
            locals_ = [weakref.ref(p.grad.to_local()) for p in model.parameters()]
        storages = {each().untyped_storage().data_ptr() for each in locals_}
        after.append(sum(each() is not None for each in locals_))
        model.zero_grad()
    return after, inside[1:], len(storages)


@pytest.mark.parametrize("width", [8, 512])
def test_gradients_of_a_unit_have_one_memory_which_ends_with_them(ranks: Ranks, width: int) -> None:
    assert ranks(2).run(alive, width) == [([4] * 3, [0] * 2, 2)] * 2


class Failing(TorchCollectives):
    """Reduces, and once reports a failure when it is waited for, or at once."""

    def __init__(self, after: str, at_once: bool) -> None:
        self.armed = False
        self.after = after
        self.at_once = at_once
        self.written: list[Any] = []  # outputs that a failed collective may still write

    def _maybe(self, name: str, work: Any, written: Any) -> Any:
        if not self.armed or name != self.after:
            return work
        self.armed = False
        self.written += written
        work.wait()
        if self.at_once:
            raise RuntimeError("it failed")
        return mock.Mock(spec=["wait"], wait=mock.Mock(side_effect=RuntimeError("it failed")))

    def reduce_scatter(self, axis: Any, inputs: Any, outputs: Any = None, op: Any = "sum") -> Any:
        """Pass on."""
        work = super().reduce_scatter(axis, inputs, outputs, op)
        return self._maybe("reduce_scatter", work, outputs)

    def all_reduce(self, axis: Any, tensors: Any, op: Any = "sum") -> Any:
        """Pass on."""
        return self._maybe("all_reduce", super().all_reduce(axis, tensors, op), tensors)


def failed(rank: int, shape: tuple[int, ...], after: str, at_once: bool) -> tuple[bool, float]:
    """Fail once; return whether the memory of that was used again, and the next step's error."""
    carrier = Failing(after, at_once)
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model: Any = shard(make(Net), mesh, collectives=carrier)
    loss_of(model, tokens(rank)).backward()
    model.zero_grad()
    carrier.armed = True
    with pytest.raises(RuntimeError, match="it failed"):
        loss_of(model, tokens(rank)).backward()
    model.reset()
    model.zero_grad()
    lost = {tensor.untyped_storage().data_ptr() for tensor in carrier.written}
    again = False
    for _ in range(2):
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        found = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        again |= bool(found & lost)
    return again, worst(gradients(model), reference(torch.Size(shape).numel()))


@pytest.mark.parametrize(
    ("shape", "after"),
    [((2,), "reduce_scatter"), ((2, 2), "reduce_scatter"), ((2, 2), "all_reduce")],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_memory_that_a_failed_reduction_may_write_to_is_not_used_again(
    ranks: Ranks, shape: tuple[int, ...], after: str, at_once: bool
) -> None:
    for again, error in ranks(torch.Size(shape).numel()).run(failed, shape, after, at_once):
        assert not again
        assert error < 1e-12


def twice_in_one_backward(rank: int) -> float:
    """Reduce a unit twice before the first of its reductions is finished."""
    model: Any = make(Net)
    for block in model.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    model.set_reduce_scatter_max_input_buffers(4)
    for _ in range(2):
        model.zero_grad()
        (loss_of(model, tokens(rank)) + loss_of(model, tokens(rank))).backward()
    doubled = {name: 2 * gradient for name, gradient in reference(2).items()}
    return worst(gradients(model), doubled)


def test_reductions_under_way_at_once_have_memory_of_their_own(ranks: Ranks) -> None:
    assert max(ranks(2).run(twice_in_one_backward)) < 1e-12
