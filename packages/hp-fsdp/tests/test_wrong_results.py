"""Public reports of wrong results with torch's `fully_shard`, recreated on gloo ranks.

Each test runs the case of one report twice: with torch, and with this package. It checks that this
package is right, warns, or raises a typed error. Then it checks that torch still has the fault. If
a newer torch has repaired it, the test fails with a text that says so. The reports that this
package does not solve have tests too. The page ``tools/docs/pages/wrong-results.md`` lists the
reports in the order of this file.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import TORCH_2_11, Pair, RankPool, expect_fault, outcome
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor import clip_grad_norm_
from hp_fsdp import MixedPrecisionPolicy, fully_shard

from .libraries import LIBRARIES, mesh, wrap
from .models import full, mesh_of

Ranks = Callable[[int], RankPool]


def unsolved(fault: bool, report: str) -> None:
    """Fail with a clear text if this package no longer has the fault of a report."""
    if not fault:
        pytest.fail(
            f"this package no longer has the fault of {report}, which is good news: move its row "
            "on the page wrong-results up, and test the right result"
        )


def by_both(case: Callable[..., Any], *arguments: Any) -> Pair:
    """Run a case with torch, then with this package, from equal weights."""
    found = []
    for by in ("torch", "ours"):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(outcome(lambda by=by: case(by, *arguments)))  # type: ignore[misc]
    return Pair(*found)


def warned(call: Callable[[], Any]) -> list[str]:
    """Return the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def local(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of this rank's part."""
    part: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return None if part is None else cast(Tensor, part.detach().clone())


def same(found: Any, *values: float) -> bool:
    """Return whether a result has these numbers, to the precision of float32."""
    if not isinstance(found, Tensor):
        return False
    expected = torch.tensor(values, dtype=torch.float64)
    flat = found.double().flatten()
    return flat.numel() % expected.numel() == 0 and torch.allclose(
        flat, expected.repeat(flat.numel() // expected.numel())
    )


def every(answers: list[Pair], condition: Callable[[Any], bool], side: str) -> bool:
    return all(condition(getattr(pair, side)) for pair in answers)


# Wrong numbers without an error.


class Either(nn.Module):
    """Two layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4, bias=False)
        self.right = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, use_left: bool) -> Tensor:
        """Return the output of the chosen layer."""
        return cast(Tensor, (self.left if use_left else self.right)(x))


def branches(by: str, rank: int) -> list[Tensor | None]:
    model = wrap(by, Either(), 2)
    model(torch.full((1, 4), 10.0**rank), rank == 0).sum().backward()
    return [local(parameter.grad) for parameter in model.parameters()]


def different_branches(rank: int) -> Pair:
    return by_both(branches, rank)


def test_ranks_may_use_different_parameters(ranks: Ranks) -> None:
    """pytorch/pytorch#158719: the gradients of two parameters are summed to one."""
    answers = ranks(2).run(different_branches)
    for pair in answers:
        assert same(pair.ours[0], 0.5)
        assert same(pair.ours[1], 5.0)
    mixed = [
        (same(pair.torchs[rank], 5.5), pair.torchs[1 - rank]) for rank, pair in enumerate(answers)
    ]
    expect_fault(mixed == [(True, None)] * 2, "pytorch/pytorch#158719")


class Scale(nn.Module):
    """Scales its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input."""
        return x * self.weight


def late_optimizer(by: str, gradients: bool, reshard: bool) -> tuple[Tensor, list[str]]:
    model = wrap(by, Scale(), 2)
    with torch.set_grad_enabled(gradients):
        model(torch.ones(8))
    if reshard:
        model.reshard()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(8)).sum().backward()
        optimizer.step()

    texts = warned(train)
    return full(model.weight), texts


def optimizer_after_a_forward(rank: int, gradients: bool, reshard: bool = False) -> Pair:
    return by_both(late_optimizer, gradients, reshard)


def test_an_optimizer_made_after_a_forward_without_gradients(ranks: Ranks) -> None:
    """pytorch/pytorch#149205: the optimizer has unsharded parameters and steps nothing."""
    answers = ranks(2).run(optimizer_after_a_forward, False)
    assert all(same(pair.ours[0], 0.5) for pair in answers)
    fault = all(same(pair.torchs[0], 1.0) and not pair.torchs[1] for pair in answers)
    expect_fault(fault, "pytorch/pytorch#149205")


class Moe(nn.Module):
    """A dense layer, and the expert of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.experts = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, routed: Tensor) -> Tensor:
        """Return this rank's share of a loss."""
        return cast(Tensor, self.dense(x).sum() + self.experts(routed).sum())


def expert_gradients(by: str, factor: float | None) -> tuple[Any, Any, list[str]]:
    experts: Any = mesh_of((2, 2), ("efsdp", "ep"))
    model = Moe()
    unit = LIBRARIES[by].fully_shard(model.experts, mesh=experts["efsdp"])
    if factor is not None:
        unit.set_gradient_divide_factor(factor)
    wrap(by, model, 4)
    x = torch.ones(1, 4)

    def step() -> None:
        # Each of the 4 ranks has one token per expert. This expert gets the tokens of two ranks.
        model(x, x.repeat(2, 1)).backward()

    texts = warned(step)
    return local(model.dense.weight.grad), local(model.experts.weight.grad), texts


def experts_on_fewer_ranks(rank: int, factor: float | None) -> Pair:
    return by_both(expert_gradients, factor)


def test_experts_are_divided_by_all_ranks_or_a_warning_says_so(ranks: Ranks) -> None:
    """pytorch/pytorch#160285: gradients of experts are larger by the expert-parallel degree."""
    answers = ranks(4).run(experts_on_fewer_ranks, None)
    for pair in answers:
        assert same(pair.ours[0], 1.0)
        assert any(
            "divide the sum of their gradients by different" in text for text in pair.ours[2]
        )
    for pair in ranks(4).run(experts_on_fewer_ranks, 4.0):
        assert same(pair.ours[1], 1.0)
        assert not pair.ours[2]
    fault = all(same(pair.torchs[1], 2.0) and not pair.torchs[2] for pair in answers)
    expect_fault(fault, "pytorch/pytorch#160285")


def late_adapter(by: str, rank: int) -> tuple[Any, list[str]]:
    model = wrap(by, Either(), 2)
    model.right = nn.Linear(4, 4, bias=False)  # as a library of adapters does
    texts = warned(lambda: model(torch.full((1, 4), 10.0**rank), False).sum().backward())
    return local(model.right.weight.grad), texts


def adapter_after_sharding(rank: int) -> Pair:
    return by_both(late_adapter, rank)


def test_parameters_that_are_added_later_are_warned_of(ranks: Ranks) -> None:
    """hao-ai-lab/FastVideo#1666: ranks have different gradients of new parameters."""
    answers = ranks(2).run(adapter_after_sharding)
    for rank, pair in enumerate(answers):
        assert same(pair.ours[0], 10.0**rank)
        assert any("were added after fully_shard" in text for text in pair.ours[1])
    fault = all(same(p.torchs[0], 10.0**rank) and not p.torchs[1] for rank, p in enumerate(answers))
    expect_fault(fault, "hao-ai-lab/FastVideo#1666")


def divided(by: str, shape: tuple[int, ...], force_sum: bool) -> Tensor | None:
    model = wrap(by, nn.Linear(4, 4, bias=False), *shape)
    model.set_force_sum_reduction_for_comms(force_sum)
    model.set_gradient_divide_factor(8.0)
    model(torch.ones(1, 4)).sum().backward()
    return local(model.weight.grad)


def divided_by_a_factor(rank: int, shape: tuple[int, ...], force_sum: bool) -> Pair:
    return by_both(divided, shape, force_sum)


def test_a_divide_factor_holds_with_one_shard_rank(ranks: Ranks) -> None:
    """pytorch/pytorch#167178: with forced sums the factor is used twice since this repair."""
    answers = ranks(4).run(divided_by_a_factor, (4, 1), True)
    assert every(answers, lambda found: same(found, 4 / 8), "ours")
    expect_fault(
        every(answers, lambda found: same(found, 4 / 8 / 8), "torchs"), "pytorch/pytorch#167178"
    )


def hybrid_gradient(by: str, rank: int) -> Tensor | None:
    model = wrap(by, nn.Linear(4, 4, bias=False), 2, 1)
    model(torch.full((1, 4), 10.0**rank)).sum().backward()
    return local(model.weight.grad)


def hybrid(rank: int) -> Pair:
    """FSDP1 with replicas and one shard rank, and ours."""

    def first_generation() -> Tensor:
        torch.manual_seed(0)
        model = theirs.FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False),
            device_mesh=mesh(2, 1),
            sharding_strategy=theirs.ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        model(torch.full((1, 4), 10.0**rank)).sum().backward()
        return cast(Tensor, next(iter(model.parameters())).grad).clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = outcome(first_generation)
    return Pair(torchs, outcome(lambda: hybrid_gradient("ours", rank)))


def test_replicas_with_one_shard_rank_are_averaged(ranks: Ranks) -> None:
    """pytorch/pytorch#154888 and verl-project/verl#7493: FSDP1 does not reduce gradients."""
    answers = ranks(2).run(hybrid)
    assert every(answers, lambda found: same(found, 5.5), "ours")
    fault = all(same(pair.torchs, 10.0**rank / 2) for rank, pair in enumerate(answers))
    expect_fault(fault, "pytorch/pytorch#154888")


# Errors.


class View(nn.Linear):
    """A layer that returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a view of the outputs."""
        return super().forward(x).view(-1)


class AddsInPlace(nn.Module):
    """Adds to the output of a unit in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unit = View(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the unit plus one."""
        y = self.unit(self.first(x))
        y += 1
        return cast(Tensor, y)


def in_place(by: str, rank: int) -> list[Tensor | None]:
    model = AddsInPlace()
    wrap(by, model.unit, 2, reshard_after_forward=True)
    wrap(by, model, 2)
    model(torch.ones(1, 4) * (rank + 1)).pow(2).sum().backward()
    return [full(cast(Tensor, p.grad)) for p in model.parameters()]


def view_in_place(rank: int) -> Pair:
    return by_both(in_place, rank)


def mean_of_ranks(
    make: Callable[[], nn.Module], loss: Callable[[Any, int], Tensor]
) -> list[Tensor]:
    """Return the mean of the gradients that two ranks have in one process."""
    torch.manual_seed(0)
    model = make()
    for rank in range(2):
        (loss(model, rank) / 2).backward()
    return [cast(Tensor, p.grad) for p in model.parameters()]


def close(found: Any, expected: list[Tensor]) -> bool:
    return isinstance(found, list) and all(
        torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True)
    )


def test_a_view_may_be_changed_in_place(ranks: Ranks) -> None:
    """pytorch/pytorch#181832: the hook of the output is lost, so nothing is gathered."""
    expected = mean_of_ranks(
        AddsInPlace, lambda model, rank: model(torch.ones(1, 4) * (rank + 1)).pow(2).sum()
    )
    answers = ranks(2).run(view_in_place)
    assert every(answers, lambda found: close(found, expected), "ours"), answers
    expect_fault(
        every(answers, lambda f: "storage of size 0" in str(f), "torchs"), "pytorch/pytorch#181832"
    )


class Shared(nn.Module):
    """A norm and a head that a second branch uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.kept = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, and keep the logits of the second branch."""
        x = self.body(x)
        logits = self.head(self.norm(x))
        self.kept = self.head(x)
        return cast(Tensor, logits)


def shared_loss(model: Any, rank: int) -> Tensor:
    logits = model(torch.tensor([[1.0, 2.0, -1.0, 0.5]]) * (rank + 1))
    return cast(Tensor, logits.pow(2).sum() + model.kept.pow(2).sum())


def reused(by: str, rank: int) -> list[Tensor]:
    model = Shared()
    wrap(by, [model.norm, model.head], 2)
    wrap(by, model, 2)
    shared_loss(model, rank).backward()
    return [full(cast(Tensor, p.grad)) for p in model.parameters()]


def grouped_modules_reused(rank: int) -> Pair:
    return by_both(reused, rank)


def test_a_module_of_a_list_may_run_again(ranks: Ranks) -> None:
    """pytorch/pytorch#183702: the list's parameters are freed before the second use's backward."""
    expected = mean_of_ranks(Shared, shared_loss)
    answers = ranks(2).run(grouped_modules_reused)
    assert every(answers, lambda found: close(found, expected), "ours"), answers
    error = "RuntimeError: "
    expect_fault(
        every(answers, lambda f: str(f).startswith(error), "torchs"), "pytorch/pytorch#183702"
    )


class Sum(nn.Module):
    """Two gains, of which the second one is used by some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(4))
        self.later = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, use_later: bool) -> Tensor:
        """Return the scaled input."""
        y = x * self.always
        return y + x * self.later if use_later else y


def accumulated(by: str) -> list[Tensor | None]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap(by, Sum(), 2, mp_policy=policy)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(torch.ones(4), last).sum().backward()
    return [local(p.grad) for p in model.parameters()]


def used_in_the_last_microbatch(rank: int) -> Pair:
    return by_both(accumulated)


def test_a_parameter_may_be_used_in_the_last_microbatch_only(ranks: Ranks) -> None:
    """pytorch/pytorch#196996: accumulated and new gradients have two dtypes."""
    answers = ranks(2).run(used_in_the_last_microbatch)
    for pair in answers:
        assert same(pair.ours[0], 2.0)
        assert same(pair.ours[1], 1.0)
    error = "AssertionError: FSDP reduce-scatter expects uniform gradient dtype"
    expect_fault(
        every(answers, lambda f: str(f).startswith(error), "torchs"), "pytorch/pytorch#196996"
    )


def differentiated_twice(by: str, retain: bool) -> Tensor:
    model = wrap(by, nn.Sequential(nn.Linear(4, 4, bias=False)), 2)
    if retain:
        model.set_reshard_after_backward(False)
    x = torch.ones(1, 4, requires_grad=True)
    y = model(x)
    weights = torch.ones_like(y, requires_grad=True)
    (first,) = torch.autograd.grad(y, x, weights, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weights)
    return second.detach()


def second_order(rank: int, retain: bool) -> Pair:
    return by_both(differentiated_twice, retain)


def test_a_second_derivative_is_right_or_names_the_setting(ranks: Ranks) -> None:
    """pytorch/pytorch#172543: the second backward finds freed memory."""
    answers = ranks(2).run(second_order, False)
    for pair in answers:
        assert str(pair.ours).startswith("UnsupportedError")
        assert "set_reshard_after_backward(False)" in pair.ours
    expect_fault(
        every(answers, lambda f: "storage of size 0" in str(f), "torchs"), "pytorch/pytorch#172543"
    )
    for pair in ranks(2).run(second_order, True):
        torch.testing.assert_close(pair.ours, pair.torchs)


# Reports that this package does not solve.


class Gain(nn.Module):
    """Scales its input by a weight that tensor parallelism replicates."""

    def __init__(self, tensor_parallel: Any) -> None:
        super().__init__()
        ones = distribute_tensor(torch.ones(2), tensor_parallel, [Replicate()], src_data_rank=None)
        self.weight = nn.Parameter(ones)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input; the gradient of the weight is partial."""
        weight: Any = self.weight
        return x * cast(Tensor, weight.to_local(grad_placements=[Partial()]))


def reduced_over_two_meshes(by: str, param_dtype: torch.dtype | None) -> Tensor | None:
    whole: Any = mesh_of((2, 2), ("fsdp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = LIBRARIES[by].fully_shard(Gain(whole["tp"]), mesh=whole["fsdp"], mp_policy=policy)
    first = whole.get_local_rank("tp") == 0
    model(torch.full((2,), 256.0 if first else 1.0)).sum().backward()
    return local(model.weight.grad)


def partial_gradients(rank: int, param_dtype: torch.dtype | None) -> Pair:
    return by_both(reduced_over_two_meshes, param_dtype)


def test_the_sum_over_tensor_parallelism_has_the_dtype_of_the_parameter(ranks: Ranks) -> None:
    """pytorch/pytorch#190626: the sum over tensor parallelism is rounded, 256 instead of 257."""
    answers = ranks(4).run(partial_gradients, torch.bfloat16)
    unsolved(every(answers, lambda found: same(found, 256.0), "ours"), "pytorch/pytorch#190626")
    expect_fault(
        every(answers, lambda found: same(found, 256.0), "torchs"), "pytorch/pytorch#190626"
    )
    full_precision = ranks(4).run(partial_gradients, None)
    assert every(full_precision, lambda found: same(found, 257.0), "ours")


def test_an_optimizer_made_after_a_forward_with_gradients(ranks: Ranks) -> None:
    """pytorch/pytorch#149205: the root has unsharded parameters until backward."""
    answers = ranks(2).run(optimizer_after_a_forward, True)
    unsolved(all(same(pair.ours[0], 1.0) for pair in answers), "pytorch/pytorch#149205")
    expect_fault(all(same(pair.torchs[0], 1.0) for pair in answers), "pytorch/pytorch#149205")
    resharded = ranks(2).run(optimizer_after_a_forward, True, True)
    assert all(same(pair.ours[0], 0.5) for pair in resharded)


class Keeps(nn.Module):
    """Computes an output, and keeps an intermediate value for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.kept = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the second layer."""
        self.kept = self.first(x)
        return cast(Tensor, self.second(self.kept))


class Returns(Keeps):
    """Returns the intermediate value too."""

    def forward(self, x: Tensor) -> Any:
        """Return the output of the second layer and the intermediate value."""
        return super().forward(x), self.kept


def loss_of_kept(by: str, returned: bool, reshard: bool) -> list[Tensor | None]:
    model = wrap(by, Returns() if returned else Keeps(), 2, reshard_after_forward=reshard)
    output = model(torch.ones(1, 4, requires_grad=True))
    (output[1] if returned else model.kept).sum().backward()
    return [local(p.grad) for p in model.parameters()]


def kept_intermediate(rank: int, returned: bool, reshard: bool = True) -> Pair:
    return by_both(loss_of_kept, returned, reshard)


def test_a_loss_of_a_kept_intermediate_finds_freed_parameters(ranks: Ranks) -> None:
    """pytorch/pytorch#173709: backward does not pass the output of the unit."""
    answers = ranks(2).run(kept_intermediate, False)
    text = "storage of size 0"
    unsolved(every(answers, lambda f: text in str(f), "ours"), "pytorch/pytorch#173709")
    expect_fault(every(answers, lambda f: text in str(f), "torchs"), "pytorch/pytorch#173709")
    for pair in ranks(2).run(kept_intermediate, False, False):  # with retained parameters
        assert same(pair.ours[0], 1.0)
        assert pair.ours[2] is None
        assert same(pair.torchs[0], 1.0)
    for pair in ranks(2).run(kept_intermediate, True):
        assert same(pair.ours[0], 1.0)
        assert pair.ours[2] is None


def kept_in_a_second_backward(rank: int) -> list[tuple[Tensor | None, Tensor | None]]:
    plain: Any = Keeps()
    model: Any = copy.deepcopy(plain)
    fully_shard(model, mesh_of((2,), ("fsdp",)), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for each in (plain, model):
        output = each(torch.ones(1, 4, requires_grad=True))
        if each is model:
            model.set_is_last_backward(False)
        output.sum().backward(retain_graph=True)
        if each is model:
            model.set_is_last_backward(True)
        each.kept.sum().backward()
    model.reshard()
    grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return [(None if own is None else full(own), other) for own, other in grads]


def test_a_second_backward_of_a_kept_intermediate_is_reduced(ranks: Ranks) -> None:
    for pairs in ranks(2).run(kept_in_a_second_backward):
        for own, expected in pairs:
            assert own is not None
            assert expected is not None
            assert torch.equal(own, expected)


# Repaired in torch 2.13, or with another cause.


class Nested(nn.Module):
    """A recomputed block that has a unit in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the inner unit."""
        return cast(Tensor, self.inner(torch.tanh(self.first(x))))


class Twice(nn.Module):
    """Recomputes its block in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Nested()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        return cast(Tensor, checkpoint(self.block, x, use_reentrant=False))


def two_forwards_loss(model: Any, rank: int) -> Tensor:
    x = torch.ones(1, 4, requires_grad=True) * (rank + 1)
    return cast(Tensor, model(x).pow(2).sum() - model(x * 2).sum())


def two_forwards(by: str, rank: int) -> list[Tensor]:
    model = Twice()
    wrap(by, model.block.inner, 2)
    wrap(by, model.block, 2)
    wrap(by, model, 2)
    two_forwards_loss(model, rank).backward()
    return [full(cast(Tensor, p.grad)) for p in model.parameters()]


def two_recomputed_forwards(rank: int) -> Pair:
    return by_both(two_forwards, rank)


def test_two_recomputed_forwards_share_a_backward(ranks: Ranks) -> None:
    """pytorch/pytorch#153354: the recomputation mixed tensors and DTensors."""
    expected = mean_of_ranks(Twice, two_forwards_loss)
    answers = ranks(2).run(two_recomputed_forwards)
    assert every(answers, lambda found: close(found, expected), "ours"), answers
    if not TORCH_2_11:
        assert every(answers, lambda found: close(found, expected), "torchs"), answers


def averaged(by: str, shape: tuple[int, ...], rank: int) -> Tensor | None:
    model = wrap(by, nn.Linear(4, 4, bias=False), *shape)
    model(torch.full((1, 4), float(rank))).sum().backward()
    return local(model.weight.grad)


def averages(rank: int, shape: tuple[int, ...]) -> Pair:
    return by_both(averaged, shape, rank)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_gradients_are_means_over_gloo(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """pytorch/pytorch#162338: averages over gloo were wrong."""
    size = 4 if len(shape) == 2 else shape[0]
    for pair in ranks(size).run(averages, shape):
        assert same(pair.ours, (size - 1) / 2)
        if not TORCH_2_11:
            assert same(pair.torchs, (size - 1) / 2), "torch has the fault of #162338 again"


class Small(nn.Module):
    """A gain of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input."""
        return x * self.gain


def one_small(by: str) -> Tensor | None:
    model = nn.Sequential(Small(), Small())
    for each in model:
        wrap(by, each, 1)
    wrap(by, model, 1)
    model(torch.full((3,), 2.0)).sum().backward()
    return local(cast(Small, model[0]).gain.grad)


def small_on_one_rank(rank: int) -> Pair:
    return by_both(one_small)


def test_a_small_parameter_trains_on_one_rank(ranks: Ranks) -> None:
    """pytorch/pytorch#144045: the gradient of a parameter of one element was zero."""
    (pair,) = ranks(1).run(small_on_one_rank)
    assert same(pair.ours, 6.0)
    if not TORCH_2_11:
        assert same(pair.torchs, 6.0), "torch has the fault of #144045 again"


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return cast(Tensor, self.head(self.embedding(tokens)))


class Tied5(Tied):
    """Five rows, which two ranks share unevenly."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def tied_rows(by: str, rank: int) -> tuple[str, list[Tensor]]:
    model, apart = Tied5(), Tied5()

    def separately() -> None:
        wrap(by, apart.embedding, 2)
        wrap(by, apart.head, 2)
        wrap(by, apart, 2)
        apart(torch.arange(5))

    refused = str(outcome(separately))
    wrap(by, [model.embedding, model.head], 2)
    wrap(by, model, 2)
    model(torch.arange(5)).sum().backward()
    return refused, [full(cast(Tensor, p.grad)) for p in model.parameters()]


def tied_uneven(rank: int) -> Pair:
    return by_both(tied_rows, rank)


def test_every_row_of_a_tied_weight_trains(ranks: Ranks) -> None:
    """pytorch/pytorch#176076: the rows of the last rank were never updated."""
    expected = mean_of_ranks(Tied5, lambda model, _: model(torch.arange(5)).sum())
    for pair in ranks(2).run(tied_uneven):
        assert pair.ours[0].startswith("ParameterError")
        assert close(pair.ours[1], expected)
        if not TORCH_2_11:
            assert pair.torchs[0].startswith("ValueError")
            assert close(pair.torchs[1], expected)


def norm(by: str) -> float:
    model = wrap(by, nn.Linear(15, 4), 2)
    model(torch.ones(1, 15)).sum().backward()
    clip: Any = nn.utils.clip_grad_norm_ if by == "torch" else clip_grad_norm_
    return cast(float, clip(model.parameters(), 100.0).item())


def norm_as_a_number(rank: int) -> Pair:
    return by_both(norm)


def test_the_norm_of_gradients_as_a_number(ranks: Ranks) -> None:
    """pytorch/pytorch#170862: item() returned the norm of this rank's part."""
    answers = ranks(2).run(norm_as_a_number)
    assert all(pair.ours == 8.0 for pair in answers)
    if not TORCH_2_11:
        assert all(pair.torchs == 8.0 for pair in answers), "torch has the fault of #170862 again"


def tied_gradients(by: str) -> tuple[bool, Any]:
    with torch.device("meta"):
        model = Tied()
    wrap(by, [model.embedding, model.head], 2)
    wrap(by, model, 2)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            cast(Any, parameter).to_local().fill_(1.0)
    model(torch.tensor([0, 1, 2, 3, 4, 5])).sum().backward()
    return model.embedding.weight is model.head.weight, local(model.embedding.weight.grad)


def tied_after_to_empty(rank: int) -> Pair:
    return by_both(tied_gradients)


def test_to_empty_keeps_ties(ranks: Ranks) -> None:
    """verl-project/verl#7834: the embedding got only a part of its gradient."""
    for pair in ranks(2).run(tied_after_to_empty):
        assert pair.ours[0]
        assert same(pair.ours[1], 12.0)  # 6 of the embedding and 6 of the head
        if not TORCH_2_11:
            assert pair.torchs[0]
            assert same(pair.torchs[1], 12.0), "torch has the fault of verl#7834 again"


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_divide_factor_means_the_same_with_replicas(ranks: Ranks, shape: tuple[int, ...]) -> None:
    """pytorch/pytorch#155903: the factor had another meaning with replicas."""
    for pair in ranks(4).run(divided_by_a_factor, shape, True):  # gloo cannot divide otherwise
        assert same(pair.ours, 4 / 8)
        if not TORCH_2_11:
            assert same(pair.torchs, 4 / 8), "torch has the fault of #155903 again"
