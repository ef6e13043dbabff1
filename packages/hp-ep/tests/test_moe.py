"""The layer in one process, and over ranks that hold different tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, ExpertConfigError, GroupedExperts, MoE

from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 6), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**31))
def test_one_process_equals_the_dense_layer(
    tokens: int, top_k: int, shared: int, seed: int
) -> None:
    layer = build_moe(seed, top_k=top_k, shared=shared, balance=0.2)
    reference = build_moe(seed, top_k=top_k, shared=shared, balance=0.2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 4, generator=generator, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(mine)
    expected = dense_moe(reference, theirs)
    assert_close(y, expected)
    (y**2).sum().backward()
    ((expected**2).sum() + dense_balance_loss(reference, theirs)).backward()
    leaves = [mine, *layer.parameters()], [theirs, *reference.parameters()]
    for a, b in zip(grads(leaves[0]), grads(leaves[1]), strict=True):
        assert_close(a, b)


def test_any_leading_dimensions_are_kept() -> None:
    layer = build_moe(1)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    y = layer(x)
    assert y.shape == x.shape
    assert_close(y.view(6, 4), layer(x.view(6, 4)))
    assert layer(x[0, 0]).shape == (4,)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 1), (0, 3), (5,), ()])
def test_an_input_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ExpertConfigError, match=r"its last dimension must be dim=4") as caught:
        build_moe(1)(torch.zeros(shape, dtype=torch.float64))
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", 0),
        ("hidden_dim", 2.5),
        ("num_experts", -1),
        ("top_k", "2"),
        ("load_balance_loss", -0.1),
        ("num_shared_experts", -1),
        ("num_shared_experts", 0.5),
    ],
)
def test_numbers_that_make_no_layer_are_refused_by_name(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"dim": 4, "hidden_dim": 6, "num_experts": 3, "top_k": 2}
    with pytest.raises(ExpertConfigError, match=f"^{name}={value!r} "):
        MoE(**{**numbers, name: value})


def test_the_output_has_the_dtype_of_the_input() -> None:
    layer = build_moe(1, dim=8, hidden=16, shared=1, dtype=torch.bfloat16)
    assert layer(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_float32_is_within_1e_5_of_the_dense_layer() -> None:
    layer, reference = build_moe(2, 8, 16, dtype=torch.float32), build_moe(2, 8, 16)
    with torch.no_grad():
        for wide, narrow in zip(reference.parameters(), layer.parameters(), strict=True):
            wide.copy_(narrow)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    assert_close(layer(x).double(), dense_moe(reference, x.double()), 1e-5)


def test_uninitialised_memory_never_reaches_a_result_or_a_gradient(
    nan_in_new_memory: None,
) -> None:
    layer = build_moe(3, dim=8, hidden=16, experts=16, shared=1, balance=0.1, dtype=torch.float32)
    for tokens in (0, 2, 9):  # fewer tokens than experts: some get none
        layer.zero_grad()
        x = torch.ones(tokens, 8).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert all(t.isfinite().all() for t in (y, *grads([x, *layer.parameters()])))


@pytest.mark.parametrize("top_k", [1, 3])
def test_copies_of_one_network_as_experts_are_that_network(top_k: int) -> None:
    layer, x = build_moe(4, top_k=top_k), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():  # what upcycling a dense model does
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
    gate, up = (x @ half.t() for half in layer.experts.gate_up_proj[0])
    dense = (nn.functional.silu(gate) * up) @ layer.experts.down_proj[0].t()
    assert_close(layer(x), dense)


def test_experts_are_called_as_a_module() -> None:
    layer = build_moe(1)
    calls: list[str] = []
    layer.experts.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.experts.register_forward_hook(lambda *_: calls.append("after"))
    layer(torch.zeros(3, 4, dtype=torch.float64))
    assert calls == ["before", "after"]


def test_recomputed_layers_have_the_same_gradients_and_load() -> None:
    plain, recomputed = build_moe(5, balance=0.3), build_moe(5, balance=0.3)
    x = torch.randn(7, 4, dtype=torch.float64)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    (plain(first) ** 2).sum().backward()
    y: Tensor = checkpoint(recomputed, second, use_reentrant=False)
    (y**2).sum().backward()
    leaves = [first, *plain.parameters()], [second, *recomputed.parameters()]
    for a, b in zip(grads(leaves[0]), grads(leaves[1]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(plain.router.load, recomputed.router.load)


def test_state_dict_holds_the_weights_under_these_names() -> None:
    names = ["router.weight", "experts.gate_up_proj", "experts.down_proj"]
    assert list(build_moe(0).state_dict()) == names
    shared = ["shared_experts.gate_up_proj", "shared_experts.down_proj"]
    assert list(build_moe(0, shared=1).state_dict()) == names + shared


def _spread(whole: MoE, rank: int, door: SimulatedCollectives, mesh: Any, axes: Any) -> MoE:
    """Give ``rank`` its block of the experts, as plain tensors."""
    size = mesh.size()
    local = GroupedExperts(4, 6, whole.experts.num_experts // size, dtype=torch.float64)
    with torch.no_grad():
        pairs = zip(local.parameters(), whole.experts.parameters(), strict=True)
        for mine, every in pairs:
            mine.copy_(every.chunk(size)[rank % size])
    whole.experts = local
    whole.dispatcher = AllToAll(mesh, whole.router.num_experts, door)
    whole.router.split_tokens_over(axes, door)
    return whole


def _layer_result(layer: nn.Module, x: Tensor) -> list[Tensor]:
    mine = x.clone().requires_grad_()
    y = layer(mine)
    (y**2).sum().backward()
    return [y.detach(), *grads([mine, *layer.parameters()])]


def _dense_result(seed: int, x: Tensor, **options: Any) -> list[Tensor]:
    layer, leaf = build_moe(seed, **options), x.clone().requires_grad_()
    y = dense_moe(layer, leaf)
    ((y**2).sum() + dense_balance_loss(layer, leaf)).backward()
    return [y.detach(), *grads([leaf, *layer.parameters()])]


def _compare(results: Sequence[list[Tensor]], expected: list[Tensor], ep: int) -> None:
    """Tokens concatenate over ranks, the router's gradients add up, the experts' do both."""
    for i, whole in enumerate(expected):
        parts = [r[i] for r in results]
        if i < 2:
            assert_close(torch.cat(parts), whole)
        elif i == 2 or i > 4:
            assert_close(torch.stack(parts).sum(0), whole)
        else:
            blocks = [torch.stack(parts[e::ep]).sum(0) for e in range(ep)]
            assert_close(torch.cat(blocks), whole)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**31),
)
def test_any_number_of_expert_ranks_equals_the_dense_layer(
    tokens: list[int], top_k: int, ep: int, seed: int
) -> None:
    options: dict[str, Any] = dict(top_k=top_k, shared=1, balance=0.2)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(tokens), 4, generator=generator, dtype=torch.float64)

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh = door.mesh((4 // ep, ep), ("efsdp", "ep"))
        layer = _spread(build_moe(seed, **options), me, door, mesh["ep"], mesh)
        return _layer_result(layer, x.split(tokens)[me])

    _compare(SimulatedWorld(4).run(rank), _dense_result(seed, x, **options), ep)


def _snapshot(value: Any, path: str, found: dict[str, Any], alive: list[Any]) -> None:
    """Record in ``found``, by path, everything that ``value`` holds.

    Tensors are recorded by value, objects of this package by their attributes, and all else by
    identity. ``alive`` keeps the objects, so that ids stay unique.
    """
    alive.append(value)
    found[path] = value.tolist() if isinstance(value, Tensor) else id(value)
    inside: dict[Any, Any] = {}
    package = MoE.__module__.rpartition(".")[0]
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, (list, tuple, set)):
        inside = dict(enumerate(value))
    elif isinstance(value, nn.Module) or type(value).__module__.startswith(package):
        slots = getattr(type(value), "__slots__", ())
        inside = (
            vars(value) if hasattr(value, "__dict__") else {s: getattr(value, s) for s in slots}
        )
    for key, each in inside.items():
        _snapshot(each, f"{path}.{key}", found, alive)


def test_nothing_of_a_call_stays_on_the_layer() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[dict[str, Any]]:
        mesh = door.mesh((2,), ("ep",))
        layer = _spread(build_moe(1, balance=0.1), me, door, mesh, mesh)
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        alive: list[Any] = []
        _snapshot(layer, "layer", before, alive)
        y = layer(torch.ones(me + 1, 4, dtype=torch.float64, requires_grad=True))
        _snapshot(layer, "layer", after, alive)
        assert y.requires_grad  # the call is still in flight
        return [before, after]

    for before, after in SimulatedWorld(2).run(rank):
        assert {
            "layer.dispatcher._exchange._collectives",
            "layer._modules.router._buffers.load",
            "layer._modules.experts._parameters.gate_up_proj",
        } <= set(before)
        assert before == after


@pytest.mark.parametrize("tokens", [[3, 0], [0, 0], [2, 5]])
def test_two_forwards_before_their_backwards_do_not_see_each_other(tokens: list[int]) -> None:
    options: dict[str, Any] = dict(balance=0.2)
    x = torch.randn(sum(tokens), 4, generator=torch.Generator().manual_seed(1)).double()

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh = door.mesh((2,), ("ep",))
        layer = _spread(build_moe(4, **options), me, door, mesh, mesh)
        first = x.split(tokens)[me].clone().requires_grad_()
        second = (-x.split(tokens)[me]).requires_grad_()
        y1, y2 = layer(first), layer(second)
        (y1**2).sum().backward()
        layer.zero_grad()  # keep only what the second backward adds
        (y2**2).sum().backward()
        return [y2.detach(), *grads([second, *layer.parameters()])]

    _compare(SimulatedWorld(2).run(rank), _dense_result(4, -x, **options), 2)
