"""The style makes a core-attention module attend over all ranks' rows."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hp_cp import (
    ContextParallel,
    Contiguous,
    Layout,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, cp_mesh, dense_attention, inputs, leaves, with_gradients


class Core(nn.Module):
    """SDPA's signature on ``[batch, rows, heads, size]``; remembers the shapes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend over the rows that were given."""
        self.seen.append(q.shape)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)


class Model(nn.Module):
    """A module around the core, which `parallelize_module` reaches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally."""
        out: Tensor = self.core(q, k, v, is_causal=True, scale=0.3)
        return out


def rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def parallelized(
    rank: int, n: int, degree: int | None, layout: Layout | None, tensors: tuple[Tensor, ...]
) -> tuple[list[Tensor], int, list[str]]:
    style = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, layout=layout)
    model = Model()
    assert parallelize_module(model, cp_mesh(n), {"core": style}) is model
    mine = list((layout or Contiguous()).indices(n, tensors[0].shape[1])[rank])
    q, k, v, grad = (x[:, mine] for x in tensors)
    local = leaves(q, k, v)
    before = sorted(vars(model.core))
    results = with_gradients(model(*local), local, grad)
    changed = sorted(set(vars(model.core)) - set(before))
    return results, len(model.core.seen), changed


@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=repr)
@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize("n", [2, 4])
def test_parallelize_module_gives_the_single_process_result(
    ranks: Any, n: int, degree: int | None, layout: Layout | None
) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(8, 4, 16))
    answers = ranks(n).run(parallelized, n, degree, layout, tensors)
    whole = leaves(*tensors[:3])
    expected = with_gradients(Model()(*whole), whole, tensors[3])
    own_forward_runs = degree is None and layout in (None, Contiguous())
    for i, (results, calls, changed) in enumerate(answers):
        mine = list((layout or Contiguous()).indices(n, 16)[i])
        for result, reference in zip(results, expected, strict=True):
            if degree is None:
                assert torch.equal(result, reference[:, mine])
            torch.testing.assert_close(result, reference[:, mine], rtol=0, atol=1e-13)
        assert calls == int(own_forward_runs)
        assert changed == []


def simulated(n: int, style_of: Any, call: Any, module_of: Any = Core) -> list[Any]:
    """Apply a style to a module of each simulated rank, and return what ``call`` makes of it."""

    def rank(rank: int, door: SimulatedCollectives) -> Any:
        module = module_of()
        style_of(door).apply(module, door.mesh((n,), ("cp",)))
        return call(rank, module)

    return SimulatedWorld(n).run(rank)


TENSORS = tuple(rows(x).contiguous() for x in inputs(4, 2, 12))


def expected(causal: bool) -> Tensor:
    q, k, v, _ = TENSORS
    out: Tensor = Core()(q, k, v, is_causal=causal)
    return out


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_the_call_decides_the_mask_where_the_style_has_none(
    degree: int | None, causal: bool
) -> None:
    outs = simulated(
        2,
        lambda door: ContextParallel(
            seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=door
        ),
        lambda r, m: m(*(x.chunk(2, 1)[r] for x in TENSORS[:3]), is_causal=causal),
    )
    torch.testing.assert_close(torch.cat(outs, 1), expected(causal), rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [None, 1])
def test_the_styles_mask_goes_before_the_forwards_default(degree: int | None) -> None:
    outs = simulated(
        2,
        lambda door: ContextParallel(
            seq_dim=1,
            head_dim=2,
            ulysses_degree=degree,
            mask=MaskSpec(causal=True),
            collectives=door,
        ),
        lambda r, m: m(*(x.chunk(2, 1)[r] for x in TENSORS[:3])),
    )
    torch.testing.assert_close(torch.cat(outs, 1), expected(True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [None, 1])
def test_keywords_by_the_forwards_own_names_and_by_given_names(degree: int | None) -> None:
    class Named(nn.Module):
        def forward(self, layer: int = 0, **tensors: Tensor) -> Tensor:
            assert layer == 0
            q, k, v = (tensors[name] for name in ("query", "key", "value"))
            out: Tensor = Core()(q, k, v, is_causal=True)
            return out

    def by_own(rank: int, module: nn.Module) -> Any:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        return module(q, v=v, k=k, is_causal=True)

    def by_given(rank: int, module: nn.Module) -> Any:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        return module(value=v, query=q, key=k)

    own = simulated(
        2,
        lambda d: ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=d),
        by_own,
    )
    given = simulated(
        2,
        lambda d: ContextParallel(
            seq_dim=1,
            head_dim=2,
            ulysses_degree=degree,
            qkv_indices=(5, 6, 7),
            qkv_kwarg_names=("query", "key", "value"),
            mask=None if degree is None else MaskSpec(causal=True),
            collectives=d,
        ),
        by_given,
        Named,
    )
    for outs in (own, given):
        torch.testing.assert_close(torch.cat(outs, 1), expected(True), rtol=0, atol=1e-13)


class Pair(NamedTuple):
    """An output with a second field."""

    out: Tensor
    extra: Any


@pytest.mark.parametrize("kind", [tuple, list, Pair])
def test_ulysses_keeps_containers_and_passes_other_arguments_and_outputs(kind: Any) -> None:
    class Several(nn.Module):
        def forward(self, tag: str, q: Tensor, k: Tensor, v: Tensor, *, flag: bool) -> Any:
            out = Core()(q, k, v, is_causal=True)
            return Pair(out, (tag, flag)) if kind is Pair else kind([out, (tag, flag)])

    results = simulated(
        2,
        lambda door: ContextParallel(
            seq_dim=1, head_dim=2, qkv_indices=(1, 2, 3), collectives=door
        ),
        lambda r, m: m("tag", *(x.chunk(2, 1)[r] for x in TENSORS[:3]), flag=True),
        Several,
    )
    assert [type(result) for result in results] == [kind] * 2
    assert [result[1] for result in results] == [("tag", True)] * 2
    torch.testing.assert_close(
        torch.cat([result[0] for result in results], 1), expected(True), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("degree", [None, 1])
def test_two_forwards_in_flight_on_one_module(degree: int | None) -> None:
    def call(rank: int, module: nn.Module) -> list[Tensor]:
        q, k, v, grad = (x.chunk(2, 1)[rank] for x in TENSORS)
        first, second = leaves(q, k, v), leaves(2 * q, k, v)
        outs = [module(*first, is_causal=True), module(*second)]
        results = with_gradients(outs[0], first, grad)
        return [*results, *with_gradients(outs[1], second, grad)]

    def style(door: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=door)

    q, k, v, grad = TENSORS
    first, second = leaves(q, k, v), leaves(2 * q, k, v)
    right = with_gradients(Core()(*first, is_causal=True), first, grad)
    right += with_gradients(Core()(*second), second, grad)
    for parts, reference in zip(zip(*simulated(2, style, call), strict=True), right, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), reference, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("degree", [None, 1])
def test_unequal_local_lengths_are_served_where_the_style_has_the_whole_length(
    ranks: Any, degree: int | None, layout: Layout
) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 7))
    whole = leaves(*tensors[:3])
    expected = with_gradients(Model()(*whole), whole, tensors[3])
    answers = ranks(2).run(with_whole_length, degree, layout, tensors)
    for held, results in zip(layout.indices(2, 7), answers, strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, list(held)], rtol=0, atol=1e-13)


def with_whole_length(
    rank: int, degree: int | None, layout: Layout, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    model = Model()
    style = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, layout=layout, seq_len=7)
    style.apply(model.core, cp_mesh(2))
    q, k, v, grad = (x[:, list(layout.indices(2, 7)[rank])] for x in tensors)
    local = leaves(q, k, v)
    return with_gradients(model(*local), local, grad)


def test_one_rank_keeps_the_plain_module() -> None:
    core = Core()
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    assert ContextParallel(seq_dim=1, head_dim=2).apply(core, mesh) is core
    assert "forward" not in vars(core)


def test_one_rank_attends_as_the_mask_of_the_style_says() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=(0, 5, 12))
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    for degree in (None, 1):
        core = ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, mask=mask).apply(
            Core(), mesh
        )
        q, k, v = (rows(x) for x in TENSORS[:3])
        torch.testing.assert_close(rows(core(*TENSORS[:3])), dense_attention(q, k, v, mask))


def test_the_modules_own_forward_may_change_its_arguments_in_place() -> None:
    class InPlace(Core):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            for x in (q, k, v):
                x.mul_(2)
            return super().forward(q, k, v, **options)

    def call(rank: int, module: nn.Module) -> list[Tensor]:
        q, k, v, grad = (x.chunk(2, 1)[rank] for x in TENSORS)
        local = leaves(q, k, v)
        return with_gradients(module(*(1 * x for x in local), is_causal=True), local, grad)

    whole = leaves(*TENSORS[:3])
    right = with_gradients(Core()(*(2 * x for x in whole), is_causal=True), whole, TENSORS[3])
    answers = simulated(
        2, lambda d: ContextParallel(seq_dim=1, head_dim=2, collectives=d), call, InPlace
    )
    for parts, reference in zip(zip(*answers, strict=True), right, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), reference, rtol=0, atol=1e-13)


class PassingOn(nn.Module):
    """Hands its arguments to SDPA as they come, on ``[batch, heads, rows, size]``."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend."""
        out: Tensor = F.scaled_dot_product_attention(*args, **kwargs)
        return out


class PassingRest(nn.Module):
    """Names q, k and v, and hands on the rest."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Attend."""
        out: Tensor = F.scaled_dot_product_attention(q, k, v, *rest, **options)
        return out


@pytest.mark.parametrize("module_of", [PassingOn, PassingRest])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("degree", [1, 2])
def test_what_a_call_hands_on_to_sdpa_is_read_by_position_and_by_keyword(
    module_of: Any, causal: bool, degree: int
) -> None:
    q, k, v, grad = inputs(4, 4, 12)

    def call(rank: int, module: nn.Module) -> list[Tensor]:
        mine = list(Zigzag().indices(2, 12)[rank])
        results = []
        for args, options in (
            ((None, 0.0, causal), {"scale": 0.3}),
            ((None,), {"is_causal": causal, "scale": 0.3, "dropout_p": 0.0}),
            ((), {"is_causal": causal, "scale": 0.3, "enable_gqa": False}),
        ):
            local = leaves(*(x[:, :, mine] for x in (q, k, v)))
            out = module(*local, *args, **options)
            results += with_gradients(out, local, grad[:, :, mine])
        return results

    def style(collectives: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(
            seq_dim=2, head_dim=1, ulysses_degree=degree, layout=Zigzag(), collectives=collectives
        )

    whole = leaves(q, k, v)
    out = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=0.3)
    expected = with_gradients(out, whole, grad) * 3
    for rank, results in enumerate(simulated(2, style, call, module_of)):
        mine = list(Zigzag().indices(2, 12)[rank])
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, mine], rtol=0, atol=1e-13)


def test_an_is_causal_by_position_agrees_with_the_styles_mask() -> None:
    q, k, v, _ = inputs(4, 4, 12)
    outs = simulated(
        2,
        lambda door: ContextParallel(
            seq_dim=2, head_dim=1, ulysses_degree=1, mask=MaskSpec(causal=True), collectives=door
        ),
        lambda r, m: m(*(x.chunk(2, 2)[r] for x in (q, k, v)), None, 0.0, True),
        PassingOn,
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_call_may_give_sinks_and_a_seed_for_dropout(degree: int) -> None:
    q, k, v, _ = inputs(4, 2, 12)
    options: dict[str, Any] = {"sinks": q[0, :, 0, 0], "dropout_p": 0.3, "dropout_seed": 5}

    def call(rank: int, module: nn.Module) -> Tensor:
        mine = list(Zigzag().indices(2, 12)[rank])
        out: Tensor = module(*(x[:, :, mine] for x in (q, k, v)), is_causal=True, **options)
        return out

    def style(collectives: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(
            seq_dim=2, head_dim=1, ulysses_degree=degree, layout=Zigzag(), collectives=collectives
        )

    def alone(rank: int, collectives: SimulatedCollectives) -> Tensor:
        mesh, mask = collectives.mesh((1,), ("cp",)), MaskSpec(causal=True)
        out: Tensor = context_parallel_attention(
            q, k, v, mesh, mask=mask, collectives=collectives, **options
        )
        return out

    (expected,) = SimulatedWorld(1).run(alone)
    for rank, out in enumerate(simulated(2, style, call, PassingOn)):
        mine = list(Zigzag().indices(2, 12)[rank])
        torch.testing.assert_close(out, expected[:, :, mine], rtol=0, atol=1e-13)
