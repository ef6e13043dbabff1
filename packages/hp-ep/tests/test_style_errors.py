"""What styles refuse, the same on every rank, and what they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hp_dtensor import Axis
from hp_ep import (
    AllToAll,
    BaseExpertParallel,
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    Hierarchical,
    Local,
    MoE,
    TensorParallel,
    parallelize_experts,
)

from .reference import build_moe


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _errors(rank: int) -> list[str]:
    mesh, flat = _mesh((2, 1), ("dp", "tp")), _mesh((2,), ("ep",))
    style = ExpertParallel()
    done = style.apply(build_moe(0), flat)
    experts = style.apply(GroupedExperts(4, 6, 2), flat)
    uneven, wrapped = GroupedExperts(4, 6, 3), GroupedExperts(4, 6, 2)
    wrapped.forward = lambda rows, counts, weights=None: rows  # type: ignore[method-assign]
    small, real = (torch.int32, torch.float32) if rank else (torch.int64, torch.int64)
    texts = [
        _text(lambda: style.apply(uneven, flat)),
        _text(lambda: style.apply(nn.Linear(2, 2), flat)),
        _text(lambda: style.apply(build_moe(0), mesh)),
        _text(lambda: style.apply(done, flat)),
        _text(lambda: ExpertParallel("dedup")),  # type: ignore[arg-type]
        _text(lambda: ExpertParallel(Local(2)).apply(GroupedExperts(4, 6, 2), flat)),
        _text(lambda: ExpertParallel(token_axes=()).apply(GroupedExperts(4, 6, 2), flat)),
        _text(lambda: ExpertParallel(sequence_mesh=flat).apply(GroupedExperts(4, 6, 2), flat)),
        _text(lambda: style.apply(wrapped, flat)),
        _text(lambda: experts(torch.zeros(2, 4), torch.tensor([2, 0][: 2 - rank]))),
        _text(lambda: experts(torch.zeros(2, 4 + rank), torch.tensor([1, 1]))),
        _text(lambda: experts(torch.zeros([2, 4, 1][: 2 + rank]), torch.tensor([1, 1]))),
        _text(lambda: experts(torch.zeros(2, 4), torch.tensor([1, 1], dtype=real))),
        _text(lambda: experts(torch.zeros(2, 4), torch.tensor([1, 1], dtype=small))),
        _text(lambda: experts(torch.zeros(2, 4), torch.tensor([1, 1 + rank]))),
        _text(lambda: experts(torch.zeros(2, 4), torch.tensor([3 * rank + 1, 1 - 3 * rank]))),
    ]
    assert not isinstance(uneven.gate_up_proj, DTensor)
    return texts


def test_errors_are_the_same_on_every_rank_and_say_what_would_do(ranks: Any) -> None:
    first, second = ranks(2).run(_errors)
    assert first == second
    expected = [
        "ExpertConfigError: ep=2 does not divide num_experts=3; use one of [1, 3] ranks",
        "ExpertConfigError: expert parallelism takes a MoE or a GroupedExperts, not Linear",
        "ExpertConfigError: no axis 'ep' in a mesh with axes ['dp', 'tp']; pass the 1-D mesh",
        "ExpertConfigError: gate_up_proj is already a DTensor",
        "ExpertConfigError: dispatcher='dedup' is not 'auto' or a TokenDispatcher",
        "ExpertConfigError: a dispatcher moves tokens of a whole MoE",
        "ExpertConfigError: token_axes, sequence_axes and sequence_mesh are for",
        "ExpertConfigError: token_axes, sequence_axes and sequence_mesh are for",
        "ExpertConfigError: forward of this GroupedExperts was replaced",
        "RoutingError: rank 1: counts are not a vector with one number for each of the 2 experts",
        "RoutingError: rank 1: rows have 5 numbers each; these experts take 4",
        "RoutingError: rank 1: the tokens or rows have 3 dimensions; give a matrix",
        "RoutingError: rank 1: counts are torch.float32; they must be torch.int64 or torch.int32",
        "no error",
        "RoutingError: rank 1: counts sum to 3, but 2 rows were given; they must be equal",
        "RoutingError: rank 1: a count is -2; counts must be at least 0",
    ]
    for text, start in zip(first, expected, strict=True):
        assert text.startswith(start)


def _refused_layers(rank: int) -> list[str]:
    """Apply styles that do not suit; no refused layer may have changed."""
    flat, grid = _mesh((2,), ("ep",)), _mesh((2, 1), ("dp", "tp"))

    def refused(style: ExpertParallel, change: Callable[[MoE], None], mesh: DeviceMesh) -> str:
        layer = build_moe(0, shared=1, balance=0.2)
        change(layer)
        before = {name: id(value) for name, value in layer.named_parameters()}
        dispatcher = layer.dispatcher
        text = _text(lambda: style.apply(layer, mesh))
        assert before == {name: id(value) for name, value in layer.named_parameters()}
        assert layer.dispatcher is dispatcher
        assert layer.router.token_axes is None
        return text

    def distribute(module: nn.Module, name: str) -> None:
        value = module.get_parameter(name).detach()
        whole = DTensor.from_local(value, flat, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))

    def router(layer: MoE) -> None:
        distribute(layer.router, "weight")

    def shared(layer: MoE) -> None:
        assert layer.shared_experts is not None
        distribute(layer.shared_experts, "gate_up_proj")

    def nothing(layer: MoE) -> None:
        pass

    sequence = ExpertParallel(token_axes=flat, sequence_mesh=flat)
    on_grid = ExpertParallel(token_axes=flat, sequence_mesh=grid)
    names = ExpertParallel(token_axes=["ep"])  # type: ignore[list-item]
    return [
        refused(sequence, router, flat),
        refused(sequence, shared, flat),
        refused(on_grid, nothing, flat),
        refused(names, nothing, flat),
        refused(ExpertParallel(), nothing, flat),
    ]


def test_a_layer_that_a_style_refuses_is_left_as_it_was(ranks: Any) -> None:
    first, second = ranks(2).run(_refused_layers)
    assert first == second
    expected = [
        "ExpertConfigError: weight is already a DTensor",
        "ExpertConfigError: gate_up_proj is already a DTensor",
        "ExpertConfigError: sequence_mesh has axes ('dp', 'tp'); pass the 1-D mesh",
        "ExpertConfigError: token axes ['ep'] are not a mesh or a sequence of Axis",
        "ExpertConfigError: load_balance_loss=0.2 is the loss of the whole batch; say which axes "
        "split its tokens: token_axes=mesh for all of a mesh, or token_axes=() for none",
    ]
    for text, start in zip(first, expected, strict=True):
        assert text.startswith(start)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return twice the weight."""
        return 2 * weight


def _tied(rank: int) -> list[str]:
    """Apply a style to models whose layers share what is to be replaced; none may change."""
    mesh = _mesh((2,), ("ep",))
    texts = []

    def refused(change: Callable[[MoE, MoE], None], style: ExpertParallel) -> None:
        model = nn.ModuleList([build_moe(2), build_moe(0, shared=1), build_moe(1, shared=1)])
        first, second = model[1], model[2]
        assert isinstance(first, MoE)
        assert isinstance(second, MoE)
        change(first, second)
        before = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
        dispatchers = [layer.dispatcher for layer in model]
        texts.append(_text(lambda: parallelize_experts(model, mesh, style)))
        after = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
        assert before == after
        assert dispatchers == [layer.dispatcher for layer in model]

    def experts(first: MoE, second: MoE) -> None:
        second.experts = first.experts

    def weight(first: MoE, second: MoE) -> None:
        second.experts.down_proj = first.experts.down_proj

    def inside(first: MoE, second: MoE) -> None:
        first.experts.down_proj = first.experts.gate_up_proj

    def elsewhere(first: MoE, second: MoE) -> None:
        second.extra = first.experts.gate_up_proj

    def router(first: MoE, second: MoE) -> None:
        second.router = first.router

    def parametrized(first: MoE, second: MoE) -> None:
        torch.nn.utils.parametrize.register_parametrization(
            first.experts, "gate_up_proj", Doubled()
        )

    plain = ExpertParallel(token_axes=mesh)
    for change in (experts, weight, inside, elsewhere, parametrized):
        refused(change, plain)
    refused(router, ExpertParallel(token_axes=mesh, sequence_mesh=mesh))
    shared = build_moe(0)
    assert parallelize_experts(nn.Sequential(shared, shared), mesh, plain) == ["0"]
    several = nn.Sequential(build_moe(0), build_moe(1))
    router(several[0], several[1])  # type: ignore[arg-type]
    assert parallelize_experts(several, mesh, plain) == ["0", "1"]
    return texts


def test_layers_that_share_experts_are_refused_before_any_is_changed(ranks: Any) -> None:
    first, second = ranks(2).run(_tied)
    assert first == second
    expected = [
        "ExpertConfigError: layers ['1', '2'] share a module whose parameters are to be spread",
        "ExpertConfigError: ['1.experts.down_proj', '2.experts.down_proj'] are one parameter, ",
        "ExpertConfigError: ['1.experts.gate_up_proj', '1.experts.down_proj'] are one parameter, ",
        "ExpertConfigError: ['1.experts.gate_up_proj', '2.extra'] are one parameter, ",
        "ExpertConfigError: layer '1': ['gate_up_proj'] are parametrized; spread the experts first",
        "ExpertConfigError: layers ['1', '2'] share a module whose parameters are to be spread",
    ]
    for text, start in zip(first, expected, strict=True):
        assert text.startswith(start), text


def _accepted_axes(rank: int) -> list[Any]:
    mesh, found = _mesh((2,), ("ep",)), []
    styles: list[BaseExpertParallel] = [
        TensorParallel(token_axes=()),
        ExpertParallel(token_axes=[Axis.of(mesh, "ep")]),
        ExpertParallel(token_axes=mesh),
    ]
    for style in styles:
        layer = build_moe(0, balance=0.2)
        style.apply(layer, mesh)
        found.append([axis.name for axis in layer.router.token_axes or ()])
    given = build_moe(0, balance=0.2)
    given.router.split_tokens_over(mesh)
    ExpertParallel().apply(given, mesh)  # the router was told before
    return found


@pytest.mark.nccl
def test_no_axes_some_axes_or_a_mesh_may_split_the_tokens(ranks: Any) -> None:
    assert ranks(2).run(_accepted_axes) == [[[], ["ep"], ["ep"]]] * 2


def _given_dispatcher(rank: int) -> bool:
    mesh, layer = _mesh((2,), ("ep",)), build_moe(0)
    dispatcher = AllToAll(mesh, 4, validate=False)
    ExpertParallel(dispatcher).apply(layer, mesh)
    return layer.dispatcher is dispatcher


def test_a_given_dispatcher_is_used(ranks: Any) -> None:
    assert ranks(2).run(_given_dispatcher) == [True, True]


def _refused_splits(rank: int) -> list[str]:
    flat, grid = _mesh((4,), ("ep",)), _mesh((2, 2), ("ep", "etp"))
    nodes = _mesh((2, 2), ("node", "inside"))
    model = torch.nn.ModuleDict({"a": build_moe(0), "b": build_moe(0, experts=6)})
    layer = build_moe(0, hidden=6)
    cases: list[Callable[[], object]] = [
        lambda: TensorParallel().apply(layer, flat),
        lambda: TensorParallel().apply(layer, grid),
        lambda: ExpertTensorParallel().apply(layer, flat),
        lambda: ExpertTensorParallel(sequence_mesh=flat).apply(build_moe(0, hidden=8), grid),
        lambda: ExpertParallel(Local(4), node_mesh=nodes).apply(layer, flat),
        lambda: ExpertParallel(node_mesh=nodes).apply(layer, grid),
        lambda: parallelize_experts(model, flat, ExpertParallel()),
        lambda: parallelize_experts(torch.nn.Linear(1, 1), flat, ExpertParallel()),
        lambda: Hierarchical(flat, 4),
    ]
    texts = []
    for case in cases:
        with pytest.raises(ExpertConfigError) as error:
            case()
        texts.append(str(error.value))
    untouched = [*layer.parameters(), *model.parameters()]
    assert not any(isinstance(p, DTensor) for p in untouched)
    assert parallelize_experts(model["a"], grid, ExpertTensorParallel()) == [""]
    return texts


def test_splits_that_cannot_be_are_refused_and_leave_all_as_it_was(ranks: Any) -> None:
    results = ranks(4).run(_refused_splits)
    assert results == [results[0]] * 4
    starts = [
        "ep=4 does not divide hidden_dim=6; use one of [1, 2, 3, 6] ranks",
        "a mesh with axes ('ep', 'etp'); pass the 1-D mesh of the axis that cuts experts",
        "a mesh with axes ('ep',); pass a 2-D mesh of the axis that splits experts and the",
        "sequence_mesh is for whole experts, but etp=2 cuts them; its ranks must hold the same",
        "node_mesh is for dispatcher='auto'",
        "node_mesh has ranks [[0, 1], [2, 3]]; it must be nodes x ranks inside one of the ranks",
        "layer 'b': ep=4 does not divide num_experts=6; use one of [1, 2, 3, 6] ranks",
        "Linear has no MoE",
        "a mesh with axes ('ep',) is not nodes and the ranks inside one",
    ]
    for text, start in zip(results[0], starts, strict=True):
        assert text.startswith(start), text
