"""Ragged tensors are filled at random and reduced to one number, as initialisation needs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor import Layout, RaggedShard, RaggedTensor, Replicate, Shard

from .test_ragged import Ragged, ragged_of, whole

Pools = Callable[[int], RankPool]
CASES = [
    Ragged(Layout((4,), (RaggedShard((0,), (30, 10, 0, 24)),)), (64, 32)),
    Ragged(Layout((2, 2), (Replicate(), RaggedShard((0, 1), (700, 1348)))), (64, 32)),
    Ragged(Layout((2, 2), (Shard(1), RaggedShard((0,), (0, 64)))), (64, 32)),
    Ragged(Layout((2, 2), (RaggedShard((0,), (20, 44)), Replicate())), (64, 32)),
]
FILLS: dict[str, tuple[Callable[[Tensor], object], float, float]] = {
    "uniform_": (lambda x: nn.init.uniform_(x, -1.0, 3.0), 1.0, 4 / math.sqrt(12)),
    "normal_": (lambda x: nn.init.normal_(x, 2.0, 0.5), 2.0, 0.5),
    "trunc_normal_": (lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, -2.0, 2.0), 0.0, 0.8796),
    "kaiming_uniform_": (
        lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
        0.0,
        1 / math.sqrt(96),
    ),
    "kaiming_normal_": (lambda x: nn.init.kaiming_normal_(x), 0.0, 0.25),
    "xavier_uniform_": (lambda x: nn.init.xavier_uniform_(x), 0.0, math.sqrt(2 / 96)),
    "xavier_normal_": (lambda x: nn.init.xavier_normal_(x), 0.0, math.sqrt(2 / 96)),
    "Tensor.normal_": (lambda x: x.normal_(), 0.0, 1.0),
    "Tensor.uniform_": (lambda x: x.uniform_(), 0.5, 1 / math.sqrt(12)),
    "bernoulli_": (lambda x: x.bernoulli_(0.25), 0.25, math.sqrt(3) / 4),
    "exponential_": (lambda x: x.exponential_(), 1.0, 1.0),
}


def filled(rank: int, seeds: bool) -> list[tuple[Tensor, list[list[float]]]]:
    """Each fill of each case as the whole tensor, and the part of this rank."""
    results = []
    for case in CASES:
        for fill, *_ in FILLS.values():
            torch.manual_seed(5 + rank * seeds)
            x = ragged_of(torch.zeros(case.shape), case, rank)
            before = x._version
            fill(x)
            assert x._version > before
            results.append((x.full_tensor(), x.to_local().tolist()))
    return results


@pytest.mark.parametrize("seeds", [False, True])
def test_random_fills_are_equal_on_replicas_and_different_on_shards(
    ranks: Pools, seeds: bool
) -> None:
    """Random fills are right with equal seeds and with different seeds on the ranks."""
    answers = ranks(4).run(filled, seeds)
    for number in range(len(CASES) * len(FILLS)):
        name = list(FILLS)[number % len(FILLS)]
        _, mean, deviation = FILLS[name]
        fulls = [answer[number][0] for answer in answers]
        full = fulls[0]
        # A replica would show its own numbers, parts of one seed the same ones.
        assert all(torch.equal(full, other) for other in fulls)
        assert float(full.mean()) == pytest.approx(mean, abs=5 * deviation / math.sqrt(2048))
        assert float(full.std()) == pytest.approx(deviation, rel=0.1)
        if name != "bernoulli_":
            assert full.unique().numel() > 0.99 * 2048


def again(rank: int) -> tuple[bool, bool, bool, bool, bool]:
    case = CASES[1]

    def drawn(generator: torch.Generator | None = None) -> Tensor:
        x = ragged_of(torch.zeros(case.shape), case, rank)
        x.normal_(generator=generator)
        return x.to_local()

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    third = drawn()
    generator = torch.Generator().manual_seed(3)
    fourth, fifth = drawn(generator), drawn(generator)
    return (
        torch.equal(first, third),
        not torch.equal(first, second),
        torch.equal(first, fourth),
        torch.equal(second, fifth),
        generator.get_state().equal(torch.Generator().manual_seed(3).get_state()),
    )


def test_the_same_seed_gives_the_same_values_and_a_generator_advances(ranks: Pools) -> None:
    assert ranks(4).run(again) == [(True, True, True, True, False)] * 4


def initialised(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer that was made on the meta device, made real and reset."""
    with torch.device("meta"):
        layer = nn.Linear(32, 64)
    for name, sizes, shape in (
        ("weight", (30, 10, 0, 24), (64, 32)),
        ("bias", (0, 60, 4, 0), (64,)),
    ):
        case = Ragged(Layout((4,), (RaggedShard((0,), sizes),)), shape)
        empty = ragged_of(torch.empty(shape, device="meta"), case, rank)
        setattr(layer, name, nn.Parameter(empty))
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    weight, bias = layer.weight.data, layer.bias.data
    assert isinstance(weight, RaggedTensor)
    assert isinstance(bias, RaggedTensor)
    return weight.full_tensor(), bias.full_tensor(), layer.weight.norm().detach()


def test_a_module_made_on_the_meta_device_resets_its_parameters(ranks: Pools) -> None:
    bound = 1 / math.sqrt(32)
    for weight, bias, norm in ranks(4).run(initialised):
        assert weight.abs().max() <= bound
        assert bias.abs().max() <= bound
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert bias.unique().numel() == 64
        torch.testing.assert_close(norm, weight.norm())


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: x.norm(p=3.0),
    "norm inf": lambda x: x.norm(math.inf),
    "sum in float32": lambda x: x.sum(dtype=torch.float32),
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "torch.sum": torch.sum,
    "torch.mean": torch.mean,
    "torch.norm": torch.norm,
    "torch.linalg.vector_norm": torch.linalg.vector_norm,
    "any": lambda x: torch.any(x > 2.5),
    "all": lambda x: (x < 2.5).all(),
    "finite": lambda x: torch.isfinite(x).all(),
    "vector_norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "torch.linalg.vector_norm dtype": lambda x: torch.linalg.vector_norm(x, dtype=torch.double),
}


def reduced(rank: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    results = []
    for case in CASES:
        values, grads = [], []
        for take in NUMBERS.values():
            x: Any = ragged_of(whole(case.shape, 4), case, rank).requires_grad_()
            number = take(x)
            assert type(number) is Tensor
            (2 * number).backward()
            values.append(number.detach())
            grads.append(x.grad.full_tensor())
        plain = ragged_of(whole(case.shape, 4), case, rank)
        values += [take(plain) for take in FUNCTIONS.values()]
        with torch.no_grad():
            values.append(torch.sum(ragged_of(whole(case.shape, 4), case, rank).requires_grad_()))
        results.append((values, grads))
    return results


def test_sums_means_and_norms_and_their_gradients_equal_one_process(
    ranks: Pools,
) -> None:
    for results in ranks(4).run(reduced):
        for (values, grads), case in zip(results, CASES, strict=True):
            takes: list[Callable[[Any], Any]] = [*NUMBERS.values(), *FUNCTIONS.values(), torch.sum]
            for number, take in zip(values, takes, strict=True):
                expected = take(whole(case.shape, 4))
                assert number.dtype == expected.dtype
                torch.testing.assert_close(number, expected)
            for grad, take in zip(grads, NUMBERS.values(), strict=True):
                x = whole(case.shape, 4).requires_grad_()
                (2 * take(x)).backward()
                assert x.grad is not None
                torch.testing.assert_close(grad, x.grad)


def clipped_by_torch(rank: int) -> list[tuple[float, Tensor]]:
    results = []
    for case in CASES:
        owner: Any = nn.Parameter(ragged_of(whole(case.shape), case, rank))
        owner.grad = ragged_of(whole(case.shape, 7), case, rank)
        norm = nn.utils.clip_grad_norm_([owner], 1.0)
        results.append((float(norm), owner.grad.full_tensor()))
    return results


def test_torchs_own_clipping_takes_the_norm_of_the_whole(ranks: Pools) -> None:
    for results in ranks(4).run(clipped_by_torch):
        for (norm, grad), case in zip(results, CASES, strict=True):
            plain = nn.Parameter(whole(case.shape))
            plain.grad = whole(case.shape, 7)
            assert norm == pytest.approx(float(nn.utils.clip_grad_norm_([plain], 1.0)))
            torch.testing.assert_close(grad, plain.grad)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sum over a dim": lambda x: x.sum(0),
    "mean over a dim": lambda x: torch.mean(x, 1),
    "norm 0": lambda x: x.norm(0),
    "norm -inf": lambda x: x.norm(-math.inf),
    "a function with a gradient": lambda x: torch.sum(x.requires_grad_()),
    "random order": lambda x: x.random_(),
    "orthogonal": lambda x: nn.init.orthogonal_(x),
    "maximum": lambda x: x.max(),
}


def refusals(rank: int) -> list[str]:
    said = []
    for take in REFUSED.values():
        with pytest.raises(TypeError) as info:
            take(ragged_of(whole(CASES[0].shape, 4), CASES[0], rank))
        said.append(str(info.value))
    return said


def test_other_reductions_are_refused_and_the_text_says_what_works(ranks: Pools) -> None:
    first, *others = ranks(4).run(refusals)
    assert others == [first] * 3
    texts = dict(zip(REFUSED, first, strict=True))
    for name in ("sum over a dim", "mean over a dim"):
        assert "all elements" in texts[name]
    assert "x.sum()" in texts["a function with a gradient"]


def accumulated(rank: int) -> list[Tensor]:
    """Return gradients of a sum and a mean that were taken twice, whole."""
    case = Ragged(Layout((2,), (RaggedShard((0,), (3, 1)),)), (4,))
    grads: list[Tensor] = []
    takes: list[Callable[[Any], Any]] = [lambda x: x.sum(), lambda x: x.mean()]
    for take in takes:
        x = ragged_of(whole(case.shape, 4), case, rank).requires_grad_()
        for _ in range(2):
            take(x).backward()
        grad: Any = x.grad
        grads.append(grad.full_tensor())
    return grads


def test_gradients_of_numbers_accumulate(ranks: Pools) -> None:
    for total, mean in ranks(2).run(accumulated):
        assert torch.equal(total, torch.full((4,), 2.0, dtype=total.dtype))
        assert torch.equal(mean, torch.full((4,), 0.5, dtype=mean.dtype))


def drawn_in_another_order(rank: int) -> Tensor:
    mesh = DeviceMesh("cpu", [[[0], [3]], [[2], [1]]], mesh_dim_names=("a", "b", "c"))
    layout = (Replicate(), Replicate(), RaggedShard((0,), (4,)))
    torch.manual_seed(rank)
    x = RaggedTensor.from_local(torch.zeros(4), mesh, layout, shape=(4,))
    x.normal_()
    return x.to_local()


def test_replicas_draw_equal_numbers_on_a_mesh_in_any_order(ranks: Pools) -> None:
    first, *others = ranks(4).run(drawn_in_another_order)
    assert all(torch.equal(first, other) for other in others)


def norm_of_integers(rank: int) -> str:
    case = Ragged(Layout((2,), (RaggedShard((0,), (3, 1)),)), (4,))
    x = ragged_of(torch.arange(4), case, rank)
    with pytest.raises(TypeError) as info:
        x.norm()
    return str(info.value)


def test_integers_have_no_norm_without_a_dtype(ranks: Pools) -> None:
    assert set(ranks(2).run(norm_of_integers)) == {
        "the norm of torch.int64 has no dtype; give a floating one, dtype=..."
    }
