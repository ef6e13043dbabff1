"""The style makes a core-attention module attend over all ranks' rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from hp_cp import (
    ContextParallel,
    ContextParallelError,
    Contiguous,
    DegreeError,
    InputError,
    Layout,
    LayoutError,
    MaskSpec,
    Zigzag,
)
from hp_dtensor import RecordingCollectives, SimulatedCollectives, SimulatedWorld

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
    style = ContextParallel(ulysses_degree=degree, layout=layout)
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
        lambda door: ContextParallel(ulysses_degree=degree, collectives=door),
        lambda r, m: m(*(x.chunk(2, 1)[r] for x in TENSORS[:3]), is_causal=causal),
    )
    torch.testing.assert_close(torch.cat(outs, 1), expected(causal), rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [None, 1])
def test_the_styles_mask_goes_before_the_calls(degree: int | None) -> None:
    outs = simulated(
        2,
        lambda door: ContextParallel(
            ulysses_degree=degree, mask=MaskSpec(causal=True), collectives=door
        ),
        lambda r, m: m(*(x.chunk(2, 1)[r] for x in TENSORS[:3]), is_causal=False),
    )
    torch.testing.assert_close(torch.cat(outs, 1), expected(True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("degree", [None, 1])
def test_keywords_by_the_forwards_own_names_and_by_given_names(degree: int | None) -> None:
    class Named(nn.Module):
        def forward(self, layer: int = 3, **tensors: Tensor) -> Tensor:
            assert layer == 3
            q, k, v = (tensors[name] for name in ("query", "key", "value"))
            out: Tensor = Core()(q, k, v, is_causal=True)
            return out

    def by_own(rank: int, module: nn.Module) -> Any:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        return module(q, v=v, k=k, is_causal=True)

    def by_given(rank: int, module: nn.Module) -> Any:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        return module(value=v, query=q, key=k)

    own = simulated(2, lambda d: ContextParallel(ulysses_degree=degree, collectives=d), by_own)
    given = simulated(
        2,
        lambda d: ContextParallel(
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
        lambda door: ContextParallel(qkv_indices=(1, 2, 3), collectives=door),
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
        return ContextParallel(ulysses_degree=degree, collectives=door)

    q, k, v, grad = TENSORS
    first, second = leaves(q, k, v), leaves(2 * q, k, v)
    right = with_gradients(Core()(*first, is_causal=True), first, grad)
    right += with_gradients(Core()(*second), second, grad)
    for parts, reference in zip(zip(*simulated(2, style, call), strict=True), right, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), reference, rtol=0, atol=1e-13)


def distributed_inputs(
    rank: int, degree: int | None, tensors: tuple[Tensor, ...]
) -> list[tuple[str, Tensor]]:
    """Pass DTensors whose lengths over the mesh are unequal."""
    mesh = cp_mesh(2)
    core = ContextParallel(ulysses_degree=degree).apply(Core(), mesh)
    parts = [
        DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        for x in tensors[:3]
    ]
    out = core(*parts, is_causal=True)
    try:
        core(*(DTensor.from_local(x, mesh, [Replicate()]) for x in tensors[:3]))
    except ContextParallelError as error:
        return [(type(out).__name__, out), (str(error), out)]
    return []


@pytest.mark.parametrize("degree", [None, 1])
def test_dtensors_are_taken_as_their_shards(ranks: Any, degree: int | None) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 7))
    answers = ranks(2).run(distributed_inputs, degree, tensors)
    reference = Core()(*tensors[:3], is_causal=True)
    assert [len(a) for a in answers] == [2, 2]
    assert [a[0][0] for a in answers] == ["Tensor", "Tensor"]
    assert all("is sharded on dim 1" in a[1][0] for a in answers)
    whole = torch.cat([a[0][1] for a in answers], 1)
    torch.testing.assert_close(whole, reference, rtol=0, atol=1e-13)


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
    style = ContextParallel(ulysses_degree=degree, layout=layout, seq_len=7)
    style.apply(model.core, cp_mesh(2))
    q, k, v, grad = (x[:, list(layout.indices(2, 7)[rank])] for x in tensors)
    local = leaves(q, k, v)
    return with_gradients(model(*local), local, grad)


def contradicted_by_dtensors(rank: int, tensors: tuple[Tensor, ...]) -> str:
    mesh = cp_mesh(2)
    core = ContextParallel(seq_len=8).apply(Core(), mesh)
    parts = [
        DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        for x in tensors[:3]
    ]
    try:
        core(*parts)
    except InputError as error:
        return str(error)
    return "served"


def test_a_whole_length_that_dtensors_contradict_is_refused(ranks: Any) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 7))
    for text in ranks(2).run(contradicted_by_dtensors, tensors):
        assert text == (
            "seq_len=8 was given to the style, but q is a DTensor of 7 tokens; "
            "use seq_len=7 or None"
        )


def test_one_rank_keeps_the_plain_module() -> None:
    core = Core()
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    assert ContextParallel().apply(core, mesh) is core
    assert "forward" not in vars(core)


def test_one_rank_attends_as_the_mask_of_the_style_says() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=(0, 5, 12))
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    for degree in (None, 1):
        core = ContextParallel(ulysses_degree=degree, mask=mask).apply(Core(), mesh)
        q, k, v = (rows(x) for x in TENSORS[:3])
        torch.testing.assert_close(rows(core(*TENSORS[:3])), dense_attention(q, k, v, mask))


# Errors.


@pytest.mark.parametrize("degree", [None, 1])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_mask": torch.ones(12, 12, dtype=torch.bool)}, "attn_mask is a dense mask"),
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported"),
        ({"k": torch.zeros(2, 3, 2, 8), "v": torch.zeros(2, 3, 2, 8)}, "cross attention"),
        ({"q": None}, "no argument at position 0 or as q="),
    ],
)
def test_calls_that_cannot_be_served_raise_on_every_rank(
    degree: int | None, change: dict[str, Any], said: str
) -> None:
    records = []

    def style(door: SimulatedCollectives) -> ContextParallel:
        records.append(RecordingCollectives(door))
        return ContextParallel(ulysses_degree=degree, collectives=records[-1])

    def call(rank: int, module: nn.Module) -> str:
        local = [x.chunk(2, 1)[rank].float() for x in TENSORS[:3]]
        given: dict[str, Any] = {**dict(zip("qkv", local, strict=True)), **change}
        with pytest.raises(InputError) as info:
            module(**{name: value for name, value in given.items() if value is not None})
        return str(info.value)

    texts = simulated(2, style, call)
    assert len(set(texts)) == 1
    assert said in texts[0]
    assert [record.by_axis for record in records] == [{}, {}]


def test_an_argument_that_only_the_replaced_forward_knows_is_refused() -> None:
    class Windowed(nn.Module):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, is_causal: bool = False
        ) -> Tensor:
            return q

    def call(rank: int, module: nn.Module) -> str:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        module(q, k, v, 0)
        with pytest.raises(InputError) as info:
            module(q, k, v, 5)
        return str(info.value)

    def style(door: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(ulysses_degree=1, collectives=door)

    texts = simulated(2, style, call, Windowed)
    assert all("arguments ['window'] have no meaning" in text for text in texts)


def test_arguments_equal_to_their_defaults_are_taken_and_of_another_type_or_value_refused() -> None:
    class Capped(nn.Module):
        def forward(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            softcap: float = 0.0,
            bias: Tensor | None = None,
            is_causal: bool = False,
        ) -> Tensor:
            return q

    def call(rank: int, module: nn.Module) -> list[str]:
        q, k, v = (x.chunk(2, 1)[rank] for x in TENSORS[:3])
        # Built at run time, so that it is equal to the default but not the same object.
        module(q, k, v, float("0.0"))
        module(q, k, v, softcap=float("0.0"), bias=None)
        texts = []
        for given in ({"softcap": 0}, {"softcap": 30.0}, {"bias": q}):
            with pytest.raises(InputError) as info:
                module(q, k, v, **given)
            texts.append(str(info.value).split(" have")[0])
        return texts

    def style(door: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(ulysses_degree=1, collectives=door)

    names = ("softcap", "softcap", "bias")
    assert simulated(2, style, call, Capped) == [[f"arguments ['{name}']" for name in names]] * 2


class Causal(nn.Module):
    """Causal without being told."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return q."""
        return q


class SoftCapped(nn.Module):
    """Capped and windowed without being told."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softcap: float = 50.0,
        window: tuple[int, int] = (-1, 0),
    ) -> Tensor:
        """Return q."""
        return q


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Causal, "no is_causal, so that nothing tells"),
        (SoftCapped, r"the defaults \['softcap=50.0', 'window=\(-1, 0\)'\]"),
    ],
)
@pytest.mark.parametrize("options", [{"ulysses_degree": 1}, {"layout": Zigzag()}], ids=str)
def test_a_forward_that_does_more_than_it_is_told_is_not_replaced(
    module: type[nn.Module], said: str, options: dict[str, Any]
) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=said):
        ContextParallel(**options).apply(module(), mesh)
    assert ContextParallel().apply(plain := module(), mesh) is plain  # it runs itself


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda q: q.flatten(2), r"a tensor of shape \(2, 12, 16\)"),
        (
            lambda q: (q[:, :1], None),
            r"a tuple of \[a tensor of shape \(2, 1, 2, 8\), a NoneType\]",
        ),
        (lambda q: {"out": q}, "a dict"),
    ],
)
def test_a_forward_that_returns_nothing_shaped_like_q_is_refused(
    returned: Callable[[Tensor], Any], said: str
) -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return returned(q)

    def call(rank: int, module: nn.Module) -> None:
        with pytest.raises(InputError, match=rf"returned {said}, .* shaped like .*\(2, 12, 2, 8\)"):
            module(*(x.chunk(2, 1)[rank] for x in TENSORS[:3]))

    simulated(2, lambda door: ContextParallel(collectives=door), call, Other)


@pytest.mark.parametrize("degree", [3, 8, 0])
def test_a_degree_that_does_not_divide_is_refused_when_applied(degree: int) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((4,), ("cp",))
    with pytest.raises(DegreeError, match=rf"ulysses_degree={degree} .* use 1, 2 or 4"):
        ContextParallel(ulysses_degree=degree).apply(Core(), mesh)


def test_another_degree_than_that_of_the_meshs_last_axis_is_refused_when_applied() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(6), 0).mesh((2, 3), ("outer", "ulysses"))
    said = r"ulysses_degree=2 on a mesh of outer \(2 ranks\) and ulysses \(3\).*ulysses_degree=3"
    with pytest.raises(DegreeError, match=said):
        ContextParallel(ulysses_degree=2).apply(Core(), mesh)


def test_a_mesh_of_three_axes_is_refused_when_applied() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((1, 2, 2), ("dp", "outer", "ulysses"))
    with pytest.raises(DegreeError, match="one axis, or of two"):
        ContextParallel().apply(Core(), mesh)


def test_applying_twice_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    core = ContextParallel().apply(Core(), mesh)
    with pytest.raises(InputError, match="already"):
        ContextParallel(layout=Zigzag()).apply(core, mesh)


def test_one_rank_may_apply_again_since_nothing_was_replaced() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    core = ContextParallel().apply(Core(), mesh)
    assert ContextParallel().apply(core, mesh) is core
    assert "forward" not in vars(core)


def test_two_names_for_three_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="give three"):
        ContextParallel(qkv_kwarg_names=("q", "k"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask": True}, r"mask must be a MaskSpec, got True; use MaskSpec\("),
        ({"mask": "causal"}, r"mask must be a MaskSpec, got 'causal'; use MaskSpec\("),
        ({"layout": "zigzag"}, r"layout must be a Layout, got 'zigzag'; use Contiguous\(\)"),
        ({"layout": Zigzag}, r"layout must be a Layout, got the class Zigzag; use Contiguous\(\)"),
    ],
)
def test_a_mask_or_layout_of_another_kind_makes_no_style(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        ContextParallel(**options)
