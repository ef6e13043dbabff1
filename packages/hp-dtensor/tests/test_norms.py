"""The norm of gradients on several meshes equals the norm in one process."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.tensor as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool, cached, profile
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_dtensor import (
    Axis,
    LayoutError,
    RaggedShard,
    RaggedTensor,
    RecordingCollectives,
    TorchCollectives,
    Work,
    clip_grad_norm_,
    mark_repeated_rows,
    redistribute,
)

Pools = Callable[[int], RankPool]
R, S0, S1 = theirs.Replicate(), theirs.Shard(0), theirs.Shard(1)
SHAPES = [(8, 3), (5, 4), (6, 6), (4, 2, 3), (7,), (1, 9)]
LAYOUTS: list[tuple[tuple[str, ...], tuple[theirs.Placement, ...]] | None] = [
    (("fsdp",), (S0,)),
    (("dp", "tp"), (S0, S1)),
    (("dp", "tp"), (R, S0)),
    (("efsdp", "ep"), (S1, S0)),
    None,
    (("fsdp",), (S0,)),
]
ORDERS = [1.0, 2.0, 3.0, math.inf]


def mesh_of(names: tuple[str, ...]) -> DeviceMesh:
    shape = (4,) if len(names) == 1 else (2, 2)
    return cached(("norms", names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in SHAPES]


def parameters() -> list[nn.Parameter]:
    made = []
    for grad, layout in zip(gradients(), LAYOUTS, strict=True):
        value = torch.zeros_like(grad)
        if layout is not None:
            names, placements = layout
            value = distribute_tensor(value, mesh_of(names), placements, src_data_rank=None)
            grad = distribute_tensor(grad, mesh_of(names), placements, src_data_rank=None)
        made.append(nn.Parameter(value))
        made[-1].grad = grad
    return made


def clipped(rank: int, order: float) -> tuple[Tensor, list[Tensor], int]:
    given = parameters()
    silent = nn.Parameter(torch.zeros(3))
    collectives = RecordingCollectives()
    norm = clip_grad_norm_([*given, silent, given[0]], 1.5, order, collectives=collectives)
    after = []
    for parameter in given:
        assert parameter.grad is not None
        grad = parameter.grad
        after.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return norm, after, sum(traffic.calls for traffic in collectives.by_axis.values())


@pytest.mark.nccl
@pytest.mark.parametrize("order", ORDERS)
def test_norm_and_gradients_equal_those_of_one_process(ranks: Pools, order: float) -> None:
    alone = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for parameter, grad in zip(alone, gradients(), strict=True):
        parameter.grad = grad
    expected = nn.utils.clip_grad_norm_(alone, 1.5, order)
    for norm, after, calls in ranks(4).run(clipped, order):
        assert type(norm) is Tensor
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0.0)
        for mine, parameter in zip(after, alone, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=0.0)
        # Three sets of ranks: the whole world (fsdp, dp x tp, efsdp x ep), tp, none.
        assert calls == 2


REPEATED = [0, 1, 2, 1, 3, 0, 0, 4, 2]  # which of five rows each of nine is


def repeating(rank: int, order: float, foreach: bool) -> tuple[Tensor, list[Tensor], int]:
    whole = torch.randn(5, 4, generator=torch.Generator().manual_seed(7)).double()[REPEATED]
    mesh = mesh_of(("efsdp", "ep"))
    grads: list[Tensor] = [whole.clone()]
    for names, placements in [
        (("fsdp",), (S0,)),  # uneven, and nothing on the last rank
        (("fsdp",), (S1,)),
        (("dp", "tp"), (R, S0)),
        (("efsdp", "ep"), (S1, S0)),
    ]:
        grads.append(distribute_tensor(whole, mesh_of(names), placements, src_data_rank=None))
    both = distribute_tensor(whole, mesh, (S0, S0), src_data_rank=None)
    grads += [both, redistribute(both, (S0, S0), shard_order={0: (1, 0)})]
    given = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(given, grads, strict=True):
        parameter.grad = grad
        mark_repeated_rows(parameter, [3, 5, 6, 8])
    carrier = RecordingCollectives()
    norm = clip_grad_norm_(given, 1.5, order, False, foreach, collectives=carrier)
    calls = sum(traffic.calls for traffic in carrier.by_axis.values())
    return norm, [whole_gradient(parameter) for parameter in given], calls


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_repeat_others_are_scaled_and_count_once(
    ranks: Pools, order: float, foreach: bool
) -> None:
    once = torch.randn(5, 4, generator=torch.Generator().manual_seed(7)).double()
    alone = [nn.Parameter(torch.zeros_like(once)) for _ in range(7)]
    for parameter in alone:
        parameter.grad = once.clone()
    expected = nn.utils.clip_grad_norm_(alone, 1.5, order)
    wanted = whole_gradient(alone[0])[REPEATED]
    for norm, after, calls in ranks(4).run(repeating, order, foreach):
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0.0)
        assert len(after) == 7
        for grad in after:
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0.0)
        assert calls == 2


def test_a_parameter_says_which_of_its_rows_repeat_others() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    mark_repeated_rows(weight, [3, 1, 3])
    assert vars(weight)["repeated_rows"] == (1, 3)
    mark_repeated_rows(weight, [])
    assert vars(weight)["repeated_rows"] == ()
    for wrong in (weight, nn.Parameter(torch.zeros(()))):
        with pytest.raises(LayoutError, match=r"rows \[-1, 4\] of a parameter of shape"):
            mark_repeated_rows(wrong, [-1, 4])


def with_one_rank_silent(rank: int) -> tuple[Tensor, list[torch.dtype]]:
    mesh = mesh_of(("fsdp",))
    value = torch.zeros(8, dtype=torch.float64)
    parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
    if rank != 2:
        grad = torch.arange(8, dtype=torch.float64)
        parameter.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
    spy = Dtypes()
    return clip_grad_norm_([parameter], 1e9, collectives=spy), spy.sent


class Dtypes(TorchCollectives):
    """Note the dtypes that are all-reduced."""

    def __init__(self) -> None:
        self.sent: list[torch.dtype] = []

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: Any = "sum") -> Work:
        """Note and pass on."""
        self.sent += [tensor.dtype for tensor in tensors]
        return super().all_reduce(axis, tensors, op)


def test_a_rank_without_gradient_exchanges_the_same_dtype(ranks: Pools) -> None:
    """Ranks that send different dtypes would end gloo without a Python error."""
    expected = torch.tensor([0, 1, 2, 3, 6, 7], dtype=torch.float64).norm()
    for norm, sent in ranks(4).run(with_one_rank_silent):
        assert sent == [torch.float64]
        torch.testing.assert_close(norm, expected)


def staged(rank: int) -> Tensor:
    stages = cached("stages", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    whole = torch.full((4, 2), 1.0 + rank // 2)
    parameter = nn.Parameter(
        distribute_tensor(torch.zeros(4, 2), stages["dp"], [S0], src_data_rank=None)
    )
    parameter.grad = distribute_tensor(whole, stages["dp"], [S0], src_data_rank=None)
    return clip_grad_norm_(parameter, 1e9, pp=stages["pp"])


def test_stages_of_a_pipeline_add_up(ranks: Pools) -> None:
    for norm in ranks(4).run(staged):
        assert norm.item() == pytest.approx(math.sqrt(8 * 1.0 + 8 * 4.0), rel=1e-6)


def refused(rank: int) -> list[str]:
    mesh = mesh_of(("fsdp",))
    names = []
    partial = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [R]))
    partial.grad = DTensor.from_local(torch.zeros(2), mesh, [theirs.Partial()])
    broken = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [S0], src_data_rank=None))
    only_rank_2 = torch.zeros(2)
    only_rank_2[0] = math.nan if rank == 2 else 1.0
    broken.grad = DTensor.from_local(only_rank_2, mesh, [S0])
    runs = (RaggedShard((0,), (2, 2, 2, 2)),)
    ragged = nn.Parameter(RaggedTensor.from_local(torch.zeros(2), mesh, runs, shape=(8,)))
    ragged.grad = RaggedTensor.from_local(torch.ones(2), mesh, runs, shape=(8,))
    mark_repeated_rows(ragged, [7])
    calls: list[Callable[[], Tensor]] = [
        lambda: clip_grad_norm_(partial, 1.0),
        lambda: clip_grad_norm_(ragged, 1.0),
        lambda: clip_grad_norm_(broken, 1.0, error_if_nonfinite=True),
        lambda: clip_grad_norm_(broken, 1.0, 0.0),
    ]
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            names.append(type(error).__name__)
    names.append(str(broken.grad.to_local()[0].item()))
    return names


def test_every_rank_raises_and_scales_nothing(ranks: Pools) -> None:
    errors = [kind.__name__ for kind in (LayoutError, LayoutError, RuntimeError, ValueError)]
    for rank, names in enumerate(ranks(4).run(refused)):
        assert names == [*errors, "nan" if rank == 2 else "1.0"]


def poisoned(
    rank: int, kind: str, order: float, value: float, where: int
) -> tuple[str, float, int]:
    """Return the error or the norm, and the calls, if one rank has a bad gradient."""
    mesh, pp = mesh_of(("fsdp",)), None
    local = torch.tensor([1.0, value if rank == where else 2.0])
    if kind == "plain":
        grad, pp = local, mesh
    elif kind == "ragged":
        runs = (RaggedShard((0,), (2, 2, 2, 2)),)
        grad = RaggedTensor.from_local(local, mesh, runs, shape=(8,))
    else:
        grad = DTensor.from_local(local, mesh, [S0])
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    collectives = RecordingCollectives()
    try:
        clip_grad_norm_(
            parameter, 1.0, order, error_if_nonfinite=True, pp=pp, collectives=collectives
        )
        error = ""
    except RuntimeError as found:
        error = str(found)
    norm = clip_grad_norm_(parameter, 1.0, order, pp=pp)
    return error, norm.item(), sum(traffic.calls for traffic in collectives.by_axis.values())


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", ["dtensor", "ragged", "plain"])
def test_a_norm_that_is_not_finite_is_so_on_every_rank(
    ranks: Pools, kind: str, order: float, value: float
) -> None:
    for where in (0, 1, 3):
        for error, norm, calls in ranks(4).run(poisoned, kind, order, value, where):
            assert f"norm of order {order} is {'inf' if value == math.inf else 'nan'};" in error
            assert norm == value or (math.isnan(norm) and math.isnan(value))
            assert calls == 1


def test_one_process_needs_no_group() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1).bfloat16())
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0]).bfloat16()
    norm = clip_grad_norm_([first, second, first], 1.0)
    assert norm.item() == 5.0
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0.0]))
    assert clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize("wrong", ["1", -1, math.nan, None])
def test_a_largest_norm_is_a_number_of_zero_or_more(wrong: Any) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match=r"max_norm=.* give a number of 0 or more"):
        clip_grad_norm_(parameter, wrong)
    assert parameter.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("order", ["x", None, 0, -1.0, math.nan, [2]])
def test_an_order_is_a_number_above_zero(order: Any) -> None:
    with pytest.raises(ValueError, match=r"norm_type=.* is no norm; use a positive number"):
        clip_grad_norm_(nn.Parameter(torch.zeros(2)), 1.0, order)


LIMITS: list[Any] = [
    torch.tensor(0.5),
    torch.tensor([0.5], dtype=torch.float64),
    np.float32(0.5),
    np.float64(0.5),
    np.int64(1),
    nn.Parameter(torch.tensor(0.5)),
]


def limited(rank: int) -> list[tuple[float, list[Tensor]]]:
    results = []
    for limit in LIMITS:
        for foreach in (None, True, False):
            given = parameters()
            norm = clip_grad_norm_(given, limit, 2.0, False, foreach)
            results.append((float(norm), [whole_gradient(p) for p in given]))
    return results


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    grad: Any = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


def test_the_limit_may_be_a_tensor_or_a_number_of_numpy_as_in_torchs(ranks: Pools) -> None:
    cases = [limit for limit in LIMITS for _ in range(3)]
    for results in ranks(4).run(limited):
        for (norm, grads), limit in zip(results, cases, strict=True):
            plain = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
            for parameter, grad in zip(plain, gradients(), strict=True):
                parameter.grad = grad
            expected = torch.nn.utils.clip_grad_norm_(plain, limit)
            assert norm == pytest.approx(float(expected), rel=1e-12)
            for mine, parameter in zip(grads, plain, strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.parametrize("limit", [torch.ones(2), torch.ones(1) * 1j, np.float32(-1), "1", None])
def test_a_limit_that_is_no_one_number_is_refused(limit: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="max_norm=") as info:
        clip_grad_norm_([parameter], limit)
    assert "0-dim tensor" in str(info.value)


def test_without_foreach_each_gradient_is_scaled_by_itself() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    found = []
    for foreach in (None, True, False):
        parameter.grad = torch.ones(2, dtype=torch.float64)
        with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as scale:
            norm = clip_grad_norm_(parameter, 1.0, foreach=foreach)
        found.append((scale.call_count, float(norm), parameter.grad.tolist()))
    assert [count for count, *_ in found] == [1, 1, 0]
    assert found[0][1:] == found[1][1:] == found[2][1:]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_complex_gradients_are_clipped_as_torchs_function_does(order: float, foreach: bool) -> None:
    torch.manual_seed(0)
    first = torch.randn(5, dtype=torch.complex128, requires_grad=True)
    second = torch.randn(3, dtype=torch.float64, requires_grad=True)
    first.grad, second.grad = torch.randn_like(first), torch.randn_like(second)
    grads = first.grad.clone(), second.grad.clone()
    norm = clip_grad_norm_([first, second], 0.5, order, foreach=foreach)
    mine = first.grad, second.grad
    first.grad, second.grad = grads
    expected = torch.nn.utils.clip_grad_norm_([first, second], 0.5, order)
    torch.testing.assert_close(norm, expected.to(norm.dtype))
    torch.testing.assert_close(mine[0], first.grad)
    torch.testing.assert_close(mine[1], second.grad)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([1.0, 2.0, math.inf]),
)
def test_adjacent_and_separate_gradients_are_clipped_equally(
    kinds: list[tuple[int, bool]], order: float
) -> None:
    flat = torch.randn(sum(size for size, _ in kinds), dtype=torch.float64)
    views = flat.split([size for size, _ in kinds])
    gradients = [
        [view.clone() for view in views],
        [view.clone() if alone else view for view, (_, alone) in zip(views, kinds, strict=True)],
    ]
    norms = []
    for each in gradients:
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in each]
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient
        norms.append(clip_grad_norm_(parameters, 0.1, order))
    assert torch.allclose(norms[0], norms[1], rtol=1e-12, atol=0)
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=0)


def test_small_gradients_side_by_side_are_measured_in_one_call() -> None:
    flat = torch.randn(2 * 2**16)
    parameters = [nn.Parameter(torch.zeros(2**10)) for _ in range(2**7)]
    for parameter, gradient in zip(parameters, flat.split(2**10), strict=True):
        parameter.grad = gradient
    with mock.patch("torch._foreach_norm", wraps=torch._foreach_norm) as measured:
        norm = clip_grad_norm_(parameters, math.inf)
    (tensors, *_), _ = measured.call_args
    assert len(tensors) == 2  # as much as is joined, twice
    assert torch.allclose(norm, flat.norm())


def calls_of(count: int, size: int, kind: Callable[[Tensor], Tensor]) -> int:
    """Return the number of Python and C calls of a clip. Gradients are adjacent in memory."""
    flat, found = torch.ones(count, size), [0]
    parameters = [nn.Parameter(kind(torch.zeros(size))) for _ in range(count)]
    for parameter, gradient in zip(parameters, flat, strict=True):
        parameter.grad = kind(gradient)

    def note(frame: Any, event: str, arg: Any) -> None:
        found[0] += event in ("call", "c_call")

    clip_grad_norm_(parameters, 1.0)
    profile(lambda: clip_grad_norm_(parameters, 1.0), note)
    return found[0]


def calls_of_each(rank: int) -> list[float]:
    mesh, sizes = init_device_mesh("cpu", (2,)), (5, 3)
    runs = RaggedShard((0,), sizes)
    kinds: list[tuple[int, Callable[[Tensor], Tensor]]] = [
        (8, lambda local: local),
        (8, lambda local: DTensor.from_local(local, mesh, [Shard(0)], run_check=False)),
        (sizes[rank], lambda local: RaggedTensor.from_local(local, mesh, [runs], shape=(8,))),
    ]
    return [(calls_of(60, *kind) - calls_of(20, *kind)) / 40 for kind in kinds]


def test_a_clip_makes_few_calls_for_each_parameter(ranks: Pools) -> None:
    for plain, *sharded in ranks(2).run(calls_of_each):
        assert plain <= 7
        assert max(sharded) <= 12


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_frozen_parameter_in_float8_does_not_count(dtype: torch.dtype) -> None:
    frozen = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    weights = [nn.Parameter(torch.zeros(4, dtype=x)) for x in (torch.bfloat16, torch.float32)]
    for chosen in ([frozen], [frozen, weights[0]], [frozen, *weights]):
        for weight in weights:
            weight.grad = torch.full_like(weight, 3.0)
        norm = clip_grad_norm_(chosen, 1.0)
        assert norm.dtype == torch.float32
        assert norm == pytest.approx(6.0 * math.sqrt(len(chosen) - 1))
