"""What the style cannot serve is refused: when made, when applied, or by every call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import (
    BackendError,
    ContextParallel,
    InputError,
    MaskSpec,
    Zigzag,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh, inputs
from .test_style import TENSORS, Core, PassingOn, PassingRest, simulated


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
        return ContextParallel(
            seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=records[-1]
        )

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


@pytest.mark.parametrize("module_of", [Core, PassingOn, PassingRest])
def test_grouped_heads_that_the_call_denies_are_refused_as_sdpa_does(module_of: Any) -> None:
    records = []

    def style(door: SimulatedCollectives) -> ContextParallel:
        records.append(RecordingCollectives(door))
        return ContextParallel(
            seq_dim=2, head_dim=1, ulysses_degree=1, seq_len=8, collectives=records[-1]
        )

    def call(rank: int, module: nn.Module) -> str:
        q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8)
        with pytest.raises(InputError) as info:
            module(q, k, k, is_causal=True, enable_gqa=False)
        return str(info.value)

    texts = simulated(2, style, call, module_of)
    said = (
        "enable_gqa=False, but q has 4 heads and k and v have 2; call with enable_gqa=True, or "
        "give q, k and v equally many heads"
    )
    assert texts == [said] * 2
    assert [record.by_axis for record in records] == [{}, {}]


@pytest.mark.parametrize(
    ("kv_heads", "said"), [(2, {"enable_gqa": True}), (2, {}), (1, {"enable_gqa": False})], ids=str
)
def test_heads_that_sdpa_takes_are_served(kv_heads: int, said: dict[str, bool]) -> None:
    q, k, v, _ = inputs(4, kv_heads, 8)

    def call(rank: int, module: nn.Module) -> Tensor:
        local = (x.chunk(2, 2)[rank] for x in (q, k, v))
        out: Tensor = module(*local, is_causal=True, **said)
        return out

    def style(door: SimulatedCollectives) -> ContextParallel:
        return ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, collectives=door)

    grouped = said.get("enable_gqa", True)
    whole = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    together = torch.cat(simulated(2, style, call, PassingOn), 2)
    torch.testing.assert_close(together, whole, rtol=0, atol=1e-13)


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
        return ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1, collectives=door)

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
        return ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1, collectives=door)

    names = ("softcap", "softcap", "bias")
    assert simulated(2, style, call, Capped) == [[f"arguments ['{name}']" for name in names]] * 2


SLOPES = torch.zeros(2)  # of several elements, which have no truth


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


class EarlyCapped(nn.Module):
    """Asks for more before v, and by a tensor."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        softcap: float = 50.0,
        v: Tensor | None = None,
        is_causal: bool = False,
        slopes: Tensor = SLOPES,
        sinks: int = 0,
        temperature: float = 0.0,
    ) -> Tensor:
        """Return q."""
        return q


@pytest.mark.parametrize("names", [(), ("q", "k", "v")], ids=str)
def test_a_default_with_a_meaning_is_seen_before_v_and_where_it_is_a_tensor(
    names: tuple[str, ...],
) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    style = ContextParallel(
        seq_dim=1, head_dim=2, ulysses_degree=1, qkv_indices=(0, 1, 3), qkv_kwarg_names=names
    )
    said = r"the defaults \['softcap=50.0', 'slopes=tensor\(\[0., 0.\]\)'\]"
    with pytest.raises(InputError, match=said):
        style.apply(EarlyCapped(), mesh)


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
        ContextParallel(seq_dim=1, head_dim=2, **options).apply(module(), mesh)
    assert (
        ContextParallel(seq_dim=1, head_dim=2).apply(plain := module(), mesh) is plain
    )  # it runs itself


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

    simulated(2, lambda door: ContextParallel(seq_dim=1, head_dim=2, collectives=door), call, Other)


@pytest.mark.parametrize("degree", [3, 8])
def test_a_degree_that_does_not_divide_is_refused_when_applied(degree: int) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((4,), ("cp",))
    with pytest.raises(InputError, match=rf"ulysses_degree={degree} .* use 1, 2 or 4"):
        ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree).apply(Core(), mesh)


def test_another_degree_than_that_of_the_meshs_last_axis_is_refused_when_applied() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(6), 0).mesh((2, 3), ("outer", "ulysses"))
    said = r"ulysses_degree=2 on a mesh of outer \(2 ranks\) and ulysses \(3\).*ulysses_degree=3"
    with pytest.raises(InputError, match=said):
        ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=2).apply(Core(), mesh)


def test_a_mesh_of_three_axes_is_refused_when_applied() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(4), 0).mesh((1, 2, 2), ("dp", "outer", "ulysses"))
    with pytest.raises(InputError, match="one axis, or of two"):
        ContextParallel(seq_dim=1, head_dim=2).apply(Core(), mesh)


def test_applying_twice_is_refused() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    core = ContextParallel(seq_dim=1, head_dim=2).apply(Core(), mesh)
    with pytest.raises(InputError, match="already"):
        ContextParallel(seq_dim=1, head_dim=2, layout=Zigzag()).apply(core, mesh)


def test_one_rank_may_apply_again_since_nothing_was_replaced() -> None:
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    core = ContextParallel(seq_dim=1, head_dim=2).apply(Core(), mesh)
    assert ContextParallel(seq_dim=1, head_dim=2).apply(core, mesh) is core
    assert "forward" not in vars(core)


def test_two_names_for_three_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="give three"):
        ContextParallel(seq_dim=1, head_dim=2, qkv_kwarg_names=("q", "k"))


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
    with pytest.raises(InputError, match=said):
        ContextParallel(seq_dim=1, head_dim=2, **options)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"backend": "typo"}, BackendError, r"no backend 'typo'; use one of \['auto', 'sdpa'"),
        ({"backend": 3}, BackendError, "a backend is a name or an AttentionBackend object, got 3"),
        ({"qkv_indices": (0, 1)}, InputError, r"got \(0, 1\); give three different"),
        ({"qkv_indices": (0, 1, 1)}, InputError, r"got \(0, 1, 1\); give three different"),
        ({"qkv_indices": (-1, 0, 1)}, InputError, r"got \(-1, 0, 1\); give three different"),
        ({"qkv_indices": ("q", "k", "v")}, InputError, "give three different ints from 0 on"),
        ({"qkv_kwarg_names": ("q", "q", "v")}, InputError, "give three different ones"),
        ({"qkv_kwarg_names": ("q", "k", 2)}, InputError, "give three different ones"),
        ({"qkv_kwarg_names": "qkv"}, InputError, "got 'qkv'; give three different ones"),
        ({"ulysses_degree": 0}, InputError, "ulysses_degree=0 is no number of ranks"),
        ({"ulysses_degree": 2.0}, InputError, "ulysses_degree=2.0 is no number of ranks"),
        ({"seq_len": -1}, InputError, "seq_len=-1"),
        ({"seq_dim": 2}, InputError, "seq_dim=2 and head_dim=2 .* two different dims of 0, 1, 2"),
        ({"seq_dim": -3}, InputError, "seq_dim=-3 and head_dim=2"),
        ({"head_dim": 3}, InputError, "seq_dim=1 and head_dim=3"),
    ],
)
def test_options_that_no_call_can_use_make_no_style(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        ContextParallel(**{"seq_dim": 1, "head_dim": 2, **options})


@pytest.mark.parametrize("given", [{}, {"seq_dim": 1}, {"head_dim": 2}], ids=str)
def test_a_style_without_dims_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="required keyword-only argument"):
        ContextParallel(**given)


def test_dims_by_position_are_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        ContextParallel(1, 2)  # type: ignore[call-arg]


def test_a_call_without_tensors_of_four_dims_is_refused() -> None:
    def call(rank: int, module: nn.Module) -> list[str]:
        x, texts = torch.zeros(1, 4, 2, 8), []
        for given in ((x, x, None), (x, x[0], x), ("q", x, x)):
            with pytest.raises(InputError) as info:
                module(*given)
            texts.append(str(info.value))
        return texts

    said = [
        "v must be a tensor, got None",
        "attention takes 4-D tensors whose last dim is the head size, got k of shape (4, 2, 8)",
        "q must be a tensor, got 'q'",
    ]
    for degree in (None, 1):

        def style(door: SimulatedCollectives, degree: int | None = degree) -> ContextParallel:
            return ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, collectives=door)

        assert simulated(2, style, call) == [said] * 2


@pytest.mark.parametrize("name", ["flex", "varlen", "cudnn", "efficient"])
def test_a_backend_without_kernels_for_the_meshs_devices_is_refused_when_applied(
    ranks: Any, name: str
) -> None:
    for error in ranks(2).run(refused_when_applied, {"backend": name, "ulysses_degree": 1}):
        assert error is not None
        assert f"backend '{name}' computes nothing on cpu, the device of the mesh" in error


def test_a_backend_is_refused_where_the_modules_own_forward_runs(ranks: Any) -> None:
    for error in ranks(2).run(refused_when_applied, {"backend": "sdpa"}):
        assert error is not None
        assert "backend='sdpa' would not be used where the module's own forward runs" in error
    assert ranks(2).run(refused_when_applied, {"backend": "auto"}) == [None, None]


def refused_when_applied(rank: int, options: dict[str, Any]) -> str | None:
    try:
        ContextParallel(seq_dim=1, head_dim=2, **options).apply(Core(), cp_mesh(2))
    except BackendError as error:
        return str(error)
    return None


class Decides(nn.Module):
    """Causal or not as it likes, where it is not told."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: None = None, is_causal: bool | None = None
    ) -> Tensor:
        """Return q."""
        return q


def refused_calls(module_of: type[nn.Module], calls: list[tuple[Any, ...]]) -> list[str]:
    """Return what calls with further arguments raise, the same on every rank, which is silent."""
    records = []

    def style(door: SimulatedCollectives) -> ContextParallel:
        records.append(RecordingCollectives(door))
        return ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, collectives=records[-1])

    def call(rank: int, module: nn.Module) -> list[str]:
        x, texts = torch.zeros(1, 2, 4, 8), []
        for *args, options in calls:
            with pytest.raises(InputError) as info:
                module(x, x, x, *args, **options)
            texts.append(str(info.value))
        return texts

    first, second = simulated(2, style, call, module_of)
    assert first == second
    assert [record.by_axis for record in records] == [{}, {}]
    texts: list[str] = first
    return texts


@pytest.mark.parametrize("module_of", [PassingOn, PassingRest])
def test_calls_that_hand_on_what_cannot_be_served_raise_on_every_rank(
    module_of: type[nn.Module],
) -> None:
    mask = torch.ones(8, 8, dtype=torch.bool)
    texts = refused_calls(
        module_of,
        [
            ({},),
            (None, 0.0, {}),
            (mask, 0.0, True, {}),
            (None, 0.1, True, {}),
            (None, 0.0, 1, {}),
            (None, 0.0, True, 0.3, {}),
            ({"is_causal": True, "window": 3},),
            ({"is_causal": None},),
        ],
    )
    said = [
        "does not say whether it is causal",
        "does not say whether it is causal",
        "attn_mask is a dense mask",
        "dropout_p=0.1 is not supported",
        "is_causal=1 is no bool",
        "arguments ['6'] have no meaning",
        "arguments ['window'] have no meaning",
        "is_causal=None is no bool",
    ]
    for text, part in zip(texts, said, strict=True):
        assert part in text


def test_a_module_that_decides_by_itself_is_refused_where_it_is_not_told() -> None:
    calls: list[tuple[Any, ...]] = [({},), (None, None, {}), (None, torch.ones(2), {})]
    said = ["is_causal=None is no bool"] * 2 + ["is_causal=an object of type Tensor is no bool"]
    for text, part in zip(refused_calls(Decides, calls), said, strict=True):
        assert part in text


def test_a_module_that_decides_by_itself_is_served_where_it_is_told() -> None:
    q, k, v, _ = inputs(2, 2, 12)
    outs = simulated(
        2,
        lambda door: ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, collectives=door),
        lambda r, m: m(*(x.chunk(2, 2)[r] for x in (q, k, v)), None, True),
        Decides,
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=0, atol=1e-13)


class TrueByDefault(nn.Module):
    """Causal where it is not told."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        """Return q."""
        return q


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("module_of", "causal", "args", "options", "said"),
    [
        (Core, False, (), {"is_causal": True}, "is_causal=True"),
        (Core, True, (), {"is_causal": False}, "is_causal=False"),
        (PassingOn, True, (None, 0.0, False), {}, "is_causal=False"),
        (PassingRest, False, (), {"is_causal": True}, "is_causal=True"),
        (TrueByDefault, False, (), {}, "is_causal=True"),
    ],
)
def test_a_call_that_contradicts_the_styles_mask_is_refused(
    module_of: type[nn.Module],
    causal: bool,
    args: tuple[Any, ...],
    options: dict[str, Any],
    said: str,
    n: int,
) -> None:
    records = []

    def style(door: SimulatedCollectives) -> ContextParallel:
        records.append(RecordingCollectives(door))
        return ContextParallel(
            seq_dim=1,
            head_dim=2,
            mask=MaskSpec(causal=causal, window=3),
            collectives=records[-1],
        )

    def call(rank: int, module: nn.Module) -> str:
        local = [x.chunk(n, 1)[rank] for x in TENSORS[:3]]
        module(*local, *args[:2], is_causal=causal)
        with pytest.raises(InputError) as info:
            module(*local, *args, **options)
        return str(info.value)

    for text in simulated(n, style, call, module_of):
        assert f"{said}, but the style has a mask of causal={causal}" in text


class Gated(nn.Module):
    """Attention and more."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8).double()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return the gated attention."""
        out: Tensor = self.gate(Core()(q, k, v, is_causal=is_causal))
        return out


@pytest.mark.parametrize(
    "options",
    [{"layout": Zigzag()}, {"ulysses_degree": 1}, {"mask": MaskSpec(causal=True)}],
    ids=str,
)
def test_a_module_with_parameters_is_not_replaced_and_runs_where_its_own_forward_does(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    gated = Gated()

    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        mesh, module = door.mesh((2,), ("cp",)), Gated()
        module.load_state_dict(gated.state_dict())
        with pytest.raises(InputError, match=r"has parameters, \['gate.weight', 'gate.bias'\]"):
            ContextParallel(seq_dim=1, head_dim=2, collectives=door, **options).apply(module, mesh)
        ContextParallel(seq_dim=1, head_dim=2, collectives=door).apply(module, mesh)
        out: Tensor = module(*(x.chunk(2, 1)[rank] for x in TENSORS[:3]), is_causal=True)
        return out

    out = torch.cat(SimulatedWorld(2).run(rank), 1)
    torch.testing.assert_close(out, gated(*TENSORS[:3], is_causal=True), rtol=0, atol=1e-12)
