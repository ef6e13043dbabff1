"""What one rank alone can see to be wrong is raised by all; what differs is evened out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import AxisMesh
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    AllToAll,
    ExpertConfigError,
    ExpertParallel,
    GroupedExperts,
    MoE,
    RoutingError,
    TensorParallel,
    TokenDispatcher,
    TopKRouter,
)
from hp_ep._styles import _over_ranks as over_ranks
from hp_ep.dispatch._all_to_all import RowExchange
from hp_ep.dispatch._interface import start_dispatch

from .dispatching import OVER_RANKS, error_of, make_dispatcher
from .reference import assert_close
from .strategies import MISFITS

FAULTS = [([[0, 4]], "expert id 4 is not one of 0 .. 3"), ([[2, 2]], "a token names expert 2")]


@pytest.mark.parametrize("name", OVER_RANKS)
@pytest.mark.parametrize("guilty", range(4))
def test_a_fault_on_one_rank_is_raised_by_all_and_names_it(name: str, guilty: int) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = make_dispatcher(name, door.mesh, 4, 4, door)
        found = []
        for ids, _ in FAULTS:
            mine = torch.tensor([[0, 1], [2, 3]] if me != guilty else ids)
            x, w = torch.ones(len(mine), 2), torch.ones(mine.shape)
            found.append(error_of(lambda x=x, w=w, mine=mine: dispatcher.dispatch(x, w, mine)))  # type: ignore[misc]
        shapes = [(2, 1), (2, 1), (2, 1)] if me != guilty else [(3, 1), (2, 1), (3, 1)]
        x, w, i = (torch.zeros(s) for s in shapes)
        found.append(error_of(lambda: dispatcher.dispatch(x, w, i.long())))
        wide = torch.ones(2, 3 + (me == guilty))
        two = torch.zeros(2, 1)
        found.append(error_of(lambda: dispatcher.dispatch(wide, two, two.long())))
        found.append(error_of(lambda: dispatcher.dispatch(two, two, two.long())))
        return found

    results = SimulatedWorld(4).run(rank)
    assert results == [results[0]] * 4
    starts = [f"rank {guilty}: {text}" for _, text in FAULTS]
    starts += [f"rank {guilty}: weights are for 2 tokens, but x has 3"]
    starts += ["all ranks must give rows of one length and dtype", "no error"]
    for found, start in zip(results[0], starts, strict=True):
        assert found.startswith(start)
    assert f"rank {guilty}: 4 of torch.float32" in results[0][3]


@pytest.mark.parametrize("name", OVER_RANKS[1:])
@pytest.mark.parametrize(("x", "weights", "ids", "text"), MISFITS)
def test_shapes_that_do_not_fit_are_raised_by_all(
    name: str, x: tuple[int, ...], weights: tuple[int, ...], ids: tuple[int, ...], text: str
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        dispatcher = make_dispatcher(name, door.mesh, 3, 3, door)
        shapes = (x, weights, ids) if me == 1 else ((2, 1),) * 3
        a, b, c = (torch.zeros(s) for s in shapes)
        return error_of(lambda: dispatcher.dispatch(a, b, c.long()))

    errors = SimulatedWorld(3).run(rank)
    assert errors == [errors[0]] * 3
    assert errors[0].startswith("rank 1: " + text)


def _gloo_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> AxisMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _wide_weights(me: int, dispatcher: TokenDispatcher) -> str:
    x, ids = torch.ones(2, 3), torch.tensor([[0, 1], [2, 3]])
    weights = torch.ones(2, 2, dtype=torch.float64 if me else torch.float32)
    return error_of(lambda: dispatcher.dispatch(x, weights, ids))


def _wide_weights_on_gloo(me: int) -> list[str]:
    dispatchers = [make_dispatcher(name, _gloo_mesh, 2, 4, None) for name in OVER_RANKS]
    return [_wide_weights(me, dispatcher) for dispatcher in dispatchers]


WIDE = (
    "all ranks must give weights of one dtype, also without tokens; got rank 0: torch.float32; "
    "rank 1: torch.float64"
)


@pytest.mark.parametrize("name", OVER_RANKS)
def test_weights_of_another_dtype_on_one_rank_are_refused_by_all(name: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        return _wide_weights(me, make_dispatcher(name, door.mesh, 2, 4, door))

    assert SimulatedWorld(2).run(rank) == [WIDE] * 2


@pytest.mark.nccl
def test_real_ranks_refuse_weights_of_another_dtype_together(ranks: Any) -> None:
    assert ranks(2).run(_wide_weights_on_gloo) == [[WIDE] * len(OVER_RANKS)] * 2


def _other_dispatcher(me: int) -> list[str]:
    """Return what layers say whose dispatchers are of another kind on rank 1, and of one kind."""
    mesh: Any = _gloo_mesh((2,), ("ep",))
    found = []
    for first, second in (*permutations(("AllToAll", "Dedup", "Padded"), 2), ("Dedup", "Dedup")):
        for experts in (2, 4):
            dispatcher = make_dispatcher((first, second)[me], _gloo_mesh, 2, experts, None)
            layer = MoE(4, 6, experts, 1)
            ExpertParallel(dispatcher, token_axes=mesh).apply(layer, mesh)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(me))
            found.append(error_of(partial(layer, x)))
    return found


def test_ranks_with_dispatchers_of_different_kinds_raise_together(ranks: Any) -> None:
    first, second = ranks(2).run(_other_dispatcher)
    assert first == second
    assert (
        first[:2]
        == [
            "all ranks must give their experts one kind of dispatcher, also without tokens; "
            "got rank 0: AllToAll; rank 1: Dedup"
        ]
        * 2
    )
    assert all("one kind of dispatcher" in text for text in first[:-2])
    assert first[-2:] == ["no error"] * 2


class _Own(AllToAll):
    """A dispatcher of a user's own, which has the checks of this package under its own name."""

    def __init__(self, mesh: AxisMesh, num_experts: int, door: SimulatedCollectives) -> None:
        super().__init__(mesh, num_experts, door)
        self._config = replace(self._config, kind="DeepEP")


def test_a_dispatcher_of_another_name_is_checked_as_those_of_the_package() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Any]:
        own = _Own(door.mesh((2,), ("ep",)), 4, door)
        other = own if me else make_dispatcher("AllToAll", door.mesh, 2, 4, door)
        x, w = torch.ones(2, 3), torch.ones(2, 2)
        good, stray = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 4 - me]])
        rows, counts, state = own.dispatch(x, w, good)
        return [
            counts.tolist(),
            own.combine(rows, state).tolist(),
            error_of(lambda: own.dispatch(x, w, stray)),
            error_of(lambda: other.dispatch(x, w, good)),
        ]

    first, second = SimulatedWorld(2).run(rank)
    assert first == second
    assert first[0] == [2, 2]
    assert first[1] == [[2.0] * 3] * 2
    assert first[2] == "rank 0: expert id 4 is not one of 0 .. 3"
    start = "all ranks must give their experts one kind of dispatcher, also without tokens; got "
    assert first[3].startswith(start + "rank 0: AllToAll; rank 1: a dispatcher of another package")


ONE_SIDED: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (
        lambda: torch.ones(2, 3, 4, dtype=torch.int64),
        "rank 1: the tokens or rows are torch.int64",
    ),
    "a list": (
        lambda: [1.0],
        "rank 1: the tokens or rows are no tensor on the device of the layer",
    ),
    "meta": (
        lambda: torch.ones(2, 3, 4, device="meta"),
        "rank 1: the tokens or rows are no tensor on the",
    ),
    "width": (
        lambda: torch.ones(2, 3, 5),
        "all ranks must give rows of one length and dtype",
    ),
    "no width": (
        lambda: torch.ones(2, 3, 0),
        "all ranks must give rows of one length and dtype",
    ),
    "one number": (
        lambda: torch.ones(()),
        "all ranks must give rows of one length and dtype",
    ),
    "complex": (
        lambda: torch.ones(2, 3, 4, dtype=torch.complex128),
        "rank 1: the tokens or rows are torch.complex128",
    ),
    "float8": (
        lambda: torch.ones(2, 3, 4).to(torch.float8_e4m3fn),
        "all ranks must give rows of one length and dtype",
    ),
}


@pytest.mark.parametrize("name", OVER_RANKS)
@pytest.mark.parametrize("case", ONE_SIDED)
def test_an_input_that_no_layer_takes_on_one_rank_is_raised_by_all(name: str, case: str) -> None:
    given, start = ONE_SIDED[case]

    def rank(me: int, door: SimulatedCollectives) -> str:
        router = TopKRouter(4, 4, 2, load_balance_loss=0.1, sequence_loss=0.1)
        layer = MoE(4, 6, 4, 2, router=router)
        layer.router.split_tokens_over(door.mesh((2,), ("ep",)), door)
        layer.dispatcher = make_dispatcher(name, door.mesh, 2, 4, door)
        return error_of(lambda: layer(given() if me else torch.ones(2, 3, 4)))

    errors = SimulatedWorld(2).run(rank)
    assert errors == [errors[0]] * 2
    assert errors[0].startswith(start)


def _compared(me: int) -> dict[str, str]:
    """Return the first error of a layer that compares inputs, with a wrong one on rank 1."""
    mesh: Any = _gloo_mesh((2,), ("ep",))
    found = {}
    for case, (wrong, _) in ONE_SIDED.items():
        layer = MoE(4, 6, 4, 2, load_balance_loss=0.1)
        ExpertParallel(token_axes=mesh, sequence_axes=mesh).apply(layer, mesh)
        with pytest.raises(RoutingError) as error:
            layer(wrong() if me else torch.ones(2, 3, 4))
        found[case] = str(error.value)
    return found


def test_a_wrong_input_is_raised_by_all_ranks_that_compare_their_inputs(ranks: Any) -> None:
    first, second = ranks(2).run(_compared)
    assert first == second
    for case, (_, start) in ONE_SIDED.items():
        assert first[case].startswith(start)


@pytest.mark.parametrize("case", ONE_SIDED)
def test_one_process_refuses_an_input_that_no_layer_takes(case: str) -> None:
    with pytest.raises(ExpertConfigError, match=r"^the input "):
        MoE(4, 6, 4, 2)(ONE_SIDED[case][0]())


@pytest.mark.parametrize("name", OVER_RANKS)
def test_autocast_on_one_rank_is_refused_by_all(name: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        dispatcher = make_dispatcher(name, door.mesh, 2, 4, door)
        x, ids = torch.ones(2, 3), torch.tensor([[0, 1], [2, 3]])
        with torch.autocast("cpu", torch.bfloat16, enabled=me == 1):
            return error_of(lambda: dispatcher.dispatch(x, torch.ones(2, 2), ids))

    assert (
        SimulatedWorld(2).run(rank)
        == [
            "all ranks must give rows that autocast, on all ranks or on none, has computed in one "
            "dtype, also without tokens; got rank 0: torch.float32; rank 1: torch.bfloat16"
        ]
        * 2
    )


def _idle_step(
    me: int,
    idle: int,
    dispatcher: TokenDispatcher,
    leaves: tuple[bool, bool],
    weigh_rows: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of tokens and weights, of which rank ``idle`` has none and needs none.

    ``leaves`` says which of the two need a gradient elsewhere; the experts double each row.
    """
    tokens = 0 if me == idle else 3
    x, w = torch.full((tokens, 2), 2.0), torch.full((tokens, 2), 0.5)
    x.requires_grad_(leaves[0] and me != idle)
    w.requires_grad_(leaves[1] and me != idle)
    ids = torch.tensor([[0, 1], [1, 3], [3, 2]])[:tokens]
    rows, _, state = start_dispatch(dispatcher, x, w, ids, weigh_rows=weigh_rows).wait()
    gain = torch.full((), 2.0, requires_grad=True)  # as experts' weights do
    results = rows * gain
    if state.row_weights is not None:
        results = results * state.row_weights[:, None]
    y = dispatcher.combine(results, state)
    (y**2).sum().backward()
    return x.grad, w.grad


def _check_idle(results: list[Any], idle: int, leaves: tuple[bool, bool]) -> None:
    for me, (gx, gw) in enumerate(results):
        if me == idle:
            continue
        x, w = torch.full((3, 2), 2.0), torch.full((3, 2), 0.5)
        x.requires_grad_()
        w.requires_grad_()
        ((2 * x * w.sum(1, keepdim=True)) ** 2).sum().backward()
        for needed, found, expected in zip(leaves, (gx, gw), (x.grad, w.grad), strict=True):
            if needed:
                assert_close(found, expected)


LEAVES = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize(
    ("name", "validate"),
    [(name, True) for name in OVER_RANKS] + [(name, False) for name in OVER_RANKS[:-1]],
)
def test_a_rank_that_needs_no_gradient_takes_part_in_its_peers_backward(
    name: str, leaves: tuple[bool, bool], validate: bool
) -> None:
    for idle in range(4):

        def rank(me: int, door: SimulatedCollectives, idle: int = idle) -> Any:
            dispatcher = make_dispatcher(name, door.mesh, 4, 4, door, validate=validate)
            return _idle_step(me, idle, dispatcher, leaves)

        _check_idle(SimulatedWorld(4).run(rank), idle, leaves)


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_rank_that_needs_no_gradient_takes_part_where_the_experts_weigh(
    name: str, leaves: tuple[bool, bool]
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> Any:
        dispatcher = make_dispatcher(name, door.mesh, 4, 4, door)
        return _idle_step(me, 1, dispatcher, leaves, weigh_rows=True)

    _check_idle(SimulatedWorld(4).run(rank), 1, leaves)


def _idle_on_gloo(me: int) -> list[Any]:
    return [
        _idle_step(me, 1, make_dispatcher(name, _gloo_mesh, 2, 4, None), leaves)
        for name in OVER_RANKS
        for leaves in LEAVES
    ]


def test_real_ranks_that_need_no_gradient_take_part_in_their_peers_backward(ranks: Any) -> None:
    first, second = ranks(2).run(_idle_on_gloo)
    for i, leaves in enumerate(LEAVES * len(OVER_RANKS)):
        _check_idle([first[i], second[i]], 1, leaves)


def test_experts_of_a_rank_without_rows_take_part_in_the_backward_of_the_others_rows() -> None:
    def rank(me: int, door: SimulatedCollectives) -> Tensor:
        experts = GroupedExperts(3, 5, 1, dtype=torch.float64)
        forward = over_ranks(GroupedExperts.forward, RowExchange(door.axis("ep"), 2, door))
        rows = torch.ones(2 * me, 3, dtype=torch.float64, requires_grad=me > 0)
        forward(experts, rows, torch.tensor([me, me])).sum().backward()
        return rows

    idle, busy = SimulatedWorld(2).run(rank)
    assert idle.grad is None
    assert busy.grad is not None
    assert busy.grad.all()


@pytest.mark.parametrize("early", [False, True])
def test_weights_that_are_not_one_for_each_row_are_told_to_all(early: bool) -> None:
    """Where a style was applied to experts alone."""

    def rank(me: int, door: SimulatedCollectives) -> str:
        experts = GroupedExperts(3, 5, 1, score_before_experts=early)
        forward = over_ranks(GroupedExperts.forward, RowExchange(door.axis("ep"), 2, door))
        weights = torch.ones((1,) if me else (2,))
        return error_of(lambda: forward(experts, torch.ones(2, 3), torch.tensor([1, 1]), weights))

    text = "rank 1: weights are not a vector with one number for each of the 2 rows, but 1 numbers"
    assert SimulatedWorld(2).run(rank) == [text] * 2


def _cut(rank: int) -> list[str]:
    mesh, texts = _gloo_mesh((2,), ("tp",)), []
    for style, on in ((TensorParallel(), mesh), (ExpertParallel(), mesh)):
        experts = GroupedExperts(4, 6, 2)
        style.apply(experts, on)  # type: ignore[arg-type]
        for shape in ((1,), (2, 1)):
            with pytest.raises((ExpertConfigError, RoutingError)) as error:
                experts(torch.ones(2, 4), torch.tensor([1, 1]), torch.ones(shape))
            texts.append(str(error.value))
    return texts


def test_experts_that_a_style_has_spread_refuse_weights_of_another_shape(ranks: Any) -> None:
    for texts in ranks(2).run(_cut):
        assert texts[0].startswith("weights (1,) must have one number per row: (2,)")
        assert texts[1].startswith("weights (2, 1) must have one number per row: (2,)")
        assert all(text.startswith("rank 0: weights are not a vector") for text in texts[2:])


def test_where_ranks_do_not_hear_of_each_other_weights_that_need_a_gradient_are_enough() -> None:
    def rank(me: int, door: SimulatedCollectives) -> Tensor:
        dispatcher = make_dispatcher("Padded", door.mesh, 2, 2, door, validate=False)
        x = torch.ones(2 if me else 0, 3, requires_grad=me > 0)
        w = torch.ones(x.shape[0], 1, requires_grad=True)
        rows, _, state = dispatcher.dispatch(x, w, torch.zeros(w.shape, dtype=torch.int64))
        dispatcher.combine(rows, state).sum().backward()
        return x

    _, x = SimulatedWorld(2).run(rank)
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("name", OVER_RANKS)
def test_no_rank_is_given_a_backward_that_none_needs(name: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> bool:
        dispatcher = make_dispatcher(name, door.mesh, 2, 2, door)
        one, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
        with torch.no_grad():
            x, w = one.clone().requires_grad_(), one.clone().requires_grad_()
            rows, _, state = dispatcher.dispatch(x, w, ids)
            y = dispatcher.combine(rows, state)
        rows, _, state = dispatcher.dispatch(one, one, ids)
        return y.requires_grad or rows.requires_grad

    assert SimulatedWorld(2).run(rank) == [False, False]
