"""A backend is an object that a caller can bring along."""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_cp import (
    AttentionBackend,
    BackendError,
    ContextParallel,
    Layout,
    MaskSpec,
    ScoreOptions,
    Zigzag,
    _attention,
    context_parallel_attention,
    register_backend,
)
from hp_cp._ranges import Kernel
from hp_cp.kernels._choose import choose_backend
from hp_cp.kernels._flex import FlexBackend, recomputed_gradients
from hp_cp.kernels._sdpa import SDPA
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import (
    UnrealMesh,
    all_layouts,
    dense_attention,
    inputs,
    leaves,
    masked,
    single,
    with_gradients,
)
from .test_first_calls import Listed

CAUSAL = MaskSpec(causal=True)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the generation of CUDA devices unknown, also where one is here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


class PlainBackend:
    """Attention by its definition, and the gradients of softmax by hand."""

    name = "plain"

    def __init__(self, kinds: tuple[Kernel, ...] = ("full", "causal")) -> None:
        self.kinds = kinds
        self.calls = 0

    def supports(
        self,
        kind: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        options: ScoreOptions,
    ) -> str | None:
        """Refuse kinds that are not in the list."""
        if kind not in self.kinds:
            return f"it computes {self.kinds} only"
        return options.lack("scale")

    def scores(self, q: Tensor, k: Tensor, causal: bool, options: ScoreOptions) -> Tensor:
        """Return scaled and masked scores."""
        scores = q @ k.transpose(-1, -2) * options.scale_of(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf) if causal else scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        self.calls += 1
        scores = self.scores(q, k, causal, options)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv from the global out and lse."""
        weights = (self.scores(q, k, causal, options) - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        dscores = weights * (grad @ v.transpose(-1, -2) - delta)
        dscores *= options.scale_of(q.shape[-1])
        return dscores @ k, dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def test_a_backend_of_ones_own_computes_the_blocks() -> None:
    q, k, v, grad = inputs(2, 2, 12)
    backend: AttentionBackend = PlainBackend()

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        mine = list(Zigzag().indices(2, 12)[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            layout=Zigzag(),
            backend=backend,
            collectives=door,
        )
        return with_gradients(out, local, grad[:, :, mine])

    whole = leaves(q, k, v)
    expected = with_gradients(dense_attention(*whole, CAUSAL), whole, grad)
    for i, results in enumerate(SimulatedWorld(2).run(rank)):
        for result, reference in zip(results, expected, strict=True):
            right = reference[:, :, list(Zigzag().indices(2, 12)[i])]
            torch.testing.assert_close(result, right, rtol=0, atol=1e-13)
    assert isinstance(backend, PlainBackend)
    assert backend.calls == 4


@pytest.mark.parametrize(("kinds", "lacking"), [(("full",), "causal"), (("causal",), "full")])
def test_a_backend_that_lacks_a_kind_of_block_is_refused(
    kinds: tuple[Kernel, ...], lacking: str
) -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    q, k, v, _ = inputs(2, 2, 12)
    with pytest.raises(BackendError, match=f"'plain' cannot compute {lacking} attention .* only"):
        context_parallel_attention(
            q,
            k,
            v,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            backend=PlainBackend(kinds),
            collectives=door,
        )


class BackendOfScale(PlainBackend):
    """A backend for the protocol as it was when the scale was an argument of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Any:  # type: ignore[override]
        """Not called."""
        raise AssertionError


def test_a_backend_that_takes_no_options_is_refused() -> None:
    door = SimulatedCollectives(SimulatedWorld(2), 0)
    q, k, v, _ = inputs(2, 2, 12)
    backend: Any = BackendOfScale()
    said = "'plain' takes no options in forward, so that it would not know of a softcap"
    with pytest.raises(BackendError, match=said):
        context_parallel_attention(
            q,
            k,
            v,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            backend=backend,
            collectives=door,
        )


def test_a_backend_lacks_every_option_that_it_does_not_list() -> None:
    given = ScoreOptions(scale=0.5, softcap=3.0)
    assert given.lack("scale", "softcap") is None
    assert given.lack("scale") == "it has no softcap, got 3.0"
    assert given.lack("softcap") == "it has no scale, got 0.5"
    assert ScoreOptions().lack() is None


class RecomputingBackend(PlainBackend):
    """The plain backend with gradients as `FlexBackend` has them: from autograd, run again."""

    name = "recomputing"

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv."""

        def attention(
            q: Tensor, k: Tensor, v: Tensor, causal: bool, options: ScoreOptions
        ) -> tuple[Tensor, Tensor]:
            return self.forward(q, k, v, causal=causal, options=options)

        return recomputed_gradients(attention, grad, q, k, v, out, lse, causal, options)


@settings(deadline=None, max_examples=30)
@given(masked(20, 1), all_layouts, st.sampled_from([1, 2, 3]))
def test_gradients_by_running_again_are_those_of_all_keys(
    case: tuple[MaskSpec, int], layout: Layout, n: int
) -> None:
    mask, seq_len = case
    q, k, v, grad = inputs(2, 2, seq_len)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        mine = list(layout.indices(n, seq_len, mask)[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh((n,), ("cp",)),
            mask=mask,
            layout=layout,
            seq_len=seq_len,
            backend=RecomputingBackend(),
            collectives=door,
        )
        return with_gradients(out, local, grad[:, :, mine])

    expected = single((q, k, v, grad), mask, dense_attention)
    indices = layout.indices(n, seq_len, mask)
    for held, results in zip(indices, SimulatedWorld(n).run(rank), strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, list(held)], rtol=0, atol=1e-13)


def test_flex_attention_gives_the_output_and_log_sum_exp_of_a_block() -> None:
    q, k, v, _ = inputs(4, 2, 16, dtype=torch.float32)
    for causal in (True, False):
        expected = SDPA.forward(q, k, v, causal=causal, options=ScoreOptions(scale=0.3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where it is not compiled
            result = FlexBackend().forward(q, k, v, causal=causal, options=ScoreOptions(scale=0.3))
        for mine, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "said"),
    [
        ("flex", "cpu", torch.float32, "it has no backward on cpu; use 'sdpa'"),
        ("sdpa", "cuda", torch.float32, "take torch.bfloat16, torch.float16, .* use 'efficient'"),
        ("efficient", "cuda", torch.float64, "take torch.float32, .*, not .*64; use 'flex'"),
        ("cudnn", "cpu", torch.bfloat16, "for cuda, not for cpu; use 'sdpa'"),
        ("varlen", "cpu", torch.bfloat16, "for cuda, not for cpu; use 'sdpa'"),
        ("sdpa", "mps", torch.float32, "for cpu and cuda, not for mps; use 'eager'"),
        ("sdpa", "mps", torch.int32, "for cpu and cuda, not for mps; pass backend= an Attention"),
        ("auto", "mps", torch.int32, "'sdpa' cannot compute causal attention"),
        ("eager", "cpu", torch.complex64, "it takes torch.float64, .*, not torch.complex64"),
        ("flex", "cuda", torch.complex64, "it takes floating dtypes, not torch.complex64"),
    ],
)
def test_what_a_backend_cannot_do_is_said_with_the_one_that_can(
    backend: str, device: str, dtype: torch.dtype, said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        choose_backend(backend, ("causal", "full"), torch.device(device), dtype, 64)


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.float64, "sdpa"),
        ("cuda", torch.bfloat16, "sdpa"),
        ("cuda", torch.float32, "efficient"),
        ("cuda", torch.float64, "flex"),
        ("mps", torch.float32, "eager"),
    ],
)
def test_auto_is_the_first_backend_that_can(device: str, dtype: torch.dtype, name: str) -> None:
    assert choose_backend("auto", ("full",), torch.device(device), dtype, 64).name == name


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float64), ("cuda", torch.bfloat16), ("cuda", torch.float64)],
)
def test_auto_is_eager_for_scores_that_are_more_than_scaled(
    device: str, dtype: torch.dtype
) -> None:
    where = torch.device(device)
    for options, others in ((ScoreOptions(scale=0.3), True), (ScoreOptions(softcap=3.0), False)):
        chosen = choose_backend("auto", ("causal",), where, dtype, 64, 64, options)
        assert (chosen.name != "eager") is others


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        (
            "sdpa",
            "cpu",
            "cannot compute full attention .*: it has no softcap, got 3.0; use 'eager'",
        ),
        ("efficient", "cuda", "it has no softcap, got 3.0; use 'eager'"),
        (PlainBackend(), "cpu", "'plain' .* it has no softcap, got 3.0; use 'eager'"),
    ],
)
def test_an_option_that_a_backend_does_not_know_is_refused(
    backend: Any, device: str, said: str
) -> None:
    options, where = ScoreOptions(softcap=3.0), torch.device(device)
    with pytest.raises(BackendError, match=said):
        choose_backend(backend, ("full",), where, torch.float32, 64, 64, options)


@pytest.mark.parametrize(
    ("backend", "dtype", "head_size", "said"),
    [
        ("sdpa", torch.bfloat16, 12, "head sizes of .* in steps of 8, not 12; use 'flex'"),
        ("sdpa", torch.bfloat16, 264, "head sizes up to 256, not 264; use 'efficient'"),
        ("cudnn", torch.float16, 136, "head sizes up to 128, not 136; use 'sdpa'"),
        ("efficient", torch.float32, 6, "head sizes of .* in steps of 4, not 6; use 'flex'"),
        ("varlen", torch.float16, 4, "head sizes of .* in steps of 8, not 4; use 'flex'"),
    ],
)
def test_head_sizes_that_a_kernel_does_not_take_are_refused(
    backend: str, dtype: torch.dtype, head_size: int, said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        choose_backend(backend, ("full",), torch.device("cuda"), dtype, head_size)


@pytest.mark.parametrize(
    ("backend", "sizes", "said"),
    [
        ("sdpa", (192, 128), None),
        ("sdpa", (128, 264), "head sizes up to 256, not 264; use 'efficient'"),
        ("cudnn", (192, 128), "head sizes up to 128, not 192; use 'sdpa'"),
        ("efficient", (192, 128), None),
        ("efficient", (64, 68), "head sizes of .* in steps of 8, not 68; use 'flex'"),
        ("efficient", (68, 64), "head sizes of .* in steps of 8, not 68; use 'flex'"),
        ("sdpa", (64, 68), "head sizes of .* in steps of 8, not 68; use 'flex'"),
        ("flex", (68, 64), None),
    ],
)
def test_values_of_another_head_size_are_refused_where_a_kernel_does_not_take_them(
    backend: str, sizes: tuple[int, int], said: str | None
) -> None:
    asked: Any = ("full",), torch.device("cuda"), torch.bfloat16, *sizes
    if said is None:
        assert choose_backend(backend, *asked).name == backend
    else:
        with pytest.raises(BackendError, match=said):
            choose_backend(backend, *asked)


def test_a_registered_backend_is_found_by_its_name() -> None:
    backend = PlainBackend()
    backend.name = "plain for this test"
    with pytest.raises(BackendError, match=r"no backend .*; use one of \['auto', 'sdpa', "):
        choose_backend(backend.name, ("full",), torch.device("cpu"), torch.float32, 64)
    register_backend(backend)
    register_backend(backend)
    found = choose_backend(backend.name, ("full",), torch.device("cpu"), torch.float32, 64)
    assert found is backend
    assert choose_backend("auto", ("full",), torch.device("cpu"), torch.float32, 64).name == "sdpa"


@pytest.mark.parametrize("name", ["auto", "sdpa", "efficient", "cudnn", "varlen", "flex", "eager"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    backend = PlainBackend()
    backend.name = name
    with pytest.raises(BackendError, match=f"the name '{name}' is taken"):
        register_backend(backend)


@pytest.mark.parametrize("backend", [PlainBackend, 3, None])
def test_what_is_no_backend_is_refused(backend: Any) -> None:
    with pytest.raises(BackendError, match="a backend is a name or an AttentionBackend object"):
        register_backend(backend)


class Device:
    """A CUDA device that is not here, as torch would describe it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability, self.cudnn = (8, 0), 91900
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: self.cudnn)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "name"),
    [
        ((7, 0), HALF, 64, "efficient"),
        ((7, 5), HALF, 128, "efficient"),
        ((7, 5), BRAIN, 64, "flex"),
        ((8, 6), BRAIN, 208, "efficient"),
        ((12, 0), BRAIN, 224, "efficient"),
        ((9, 0), BRAIN, 128, "cudnn"),
        ((9, 0), HALF, 64, "cudnn"),
        ((10, 0), BRAIN, 64, "cudnn"),
        ((10, 3), BRAIN, 64, "cudnn"),
    ],
)
def test_auto_is_the_kernel_of_the_devices_generation(
    device: Device, capability: tuple[int, int], dtype: torch.dtype, head_size: int, name: str
) -> None:
    device.capability = capability
    chosen = choose_backend("auto", ("causal",), torch.device("cuda", 0), dtype, head_size)
    assert chosen.name == name


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "name"),
    [
        ((7, 5), SINGLE, 64, "efficient"),
        ((8, 0), BRAIN, 64, "sdpa"),
        ((8, 0), BRAIN, 208, "sdpa"),
        ((8, 9), BRAIN, 256, "sdpa"),
        ((9, 0), BRAIN, 192, "sdpa"),
        ((9, 0), SINGLE, 64, "efficient"),
        ((12, 0), BRAIN, 64, "sdpa"),
    ],
)
def test_auto_is_flash_where_a_generation_has_no_other(
    device: Device, capability: tuple[int, int], dtype: torch.dtype, head_size: int, name: str
) -> None:
    device.capability = capability
    chosen = choose_backend("auto", ("causal",), torch.device("cuda", 0), dtype, head_size)
    assert chosen.name == name


def test_auto_leaves_cudnn_where_it_is_old_or_results_must_be_repeatable(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.capability, device.cudnn = (9, 0), 91002
    chosen = [choose_backend("auto", ("causal",), torch.device("cuda", 0), BRAIN, 64)]
    device.cudnn = 91900
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    chosen += [choose_backend("auto", ("causal",), torch.device("cuda", 0), BRAIN, 64)]
    assert [backend.name for backend in chosen] == ["sdpa", "sdpa"]


def test_auto_is_sdpa_where_flash_attention_3_stands_behind_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.capability = (9, 0)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    chosen = choose_backend("auto", ("causal",), torch.device("cuda", 0), BRAIN, 64)
    assert chosen.name == "sdpa"


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "said"),
    [
        ("sdpa", (7, 5), HALF, "capability 8.0 or later, not 7.5; use 'efficient'"),
        ("varlen", (7, 0), HALF, "capability 8.0 or later, not 7.0; use 'efficient'"),
        ("cudnn", (7, 5), HALF, "capability 8.0 or later, not 7.5; use 'efficient'"),
        (
            "efficient",
            (7, 5),
            BRAIN,
            "bfloat16 from compute capability 8.0 on, not 7.5; use 'flex'",
        ),
        ("efficient", (3, 7), SINGLE, "capability 5.0 or later, not 3.7; use 'flex'"),
    ],
)
def test_a_kernel_that_a_generation_lacks_is_refused_before_communication(
    device: Device, backend: str, capability: tuple[int, int], dtype: torch.dtype, said: str
) -> None:
    device.capability = capability
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, 64, dtype=dtype, device="cuda")
    records = [RecordingCollectives(SimulatedCollectives(SimulatedWorld(2), r)) for r in range(2)]
    for rank, record in enumerate(records):
        mesh = SimulatedCollectives(SimulatedWorld(2), rank).mesh((2,), ("cp",))
        with pytest.raises(BackendError, match=said):
            context_parallel_attention(
                q, q, q, mesh, mask=CAUSAL, backend=backend, collectives=record
            )
    assert [record.by_axis for record in records] == [{}, {}]


def test_a_head_size_whose_backward_a_generation_lacks_is_refused(device: Device) -> None:
    device.capability = (8, 9)
    with pytest.raises(
        BackendError, match=r"head sizes above 192 and up to 224 .* 8\.9; use 'effi"
    ):
        choose_backend("sdpa", ("full",), torch.device("cuda", 0), BRAIN, 200)


Shape = tuple[int, ...]


def launched(
    masks: list[MaskSpec], seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, frozenset[Shape]]]:
    """Return which backend serves a batch of each mask, and the shapes that it would be given."""
    served: list[tuple[str, frozenset[Shape]]] = []

    def attended(
        q: Tensor, k: Tensor, v: Tensor, _: Any, schedule: Any, *given: Any, **o: Any
    ) -> Any:
        plan, kernel = schedule.plan, schedule.kernel.backend
        blocks = [block for rank in range(plan.n) for block in plan.blocks(rank)]
        shapes = [(b.tiles, len(b.queries) // b.tiles, len(b.keys) // b.tiles) for b in blocks]
        served.append((kernel.name, frozenset(shapes)))
        return q, None

    monkeypatch.setattr(_attention, "attend", attended)
    mesh = UnrealMesh((2,), 0)
    with FakeTensorMode():
        q = torch.empty(1, 2, seq_len // 2, 64, dtype=BRAIN, device="cuda")
        for mask in masks:
            context_parallel_attention(
                q, q, q, mesh, mask=mask, layout=Zigzag(), collectives=Listed()
            )
    return served


def test_cudnn_gets_the_same_shapes_in_every_batch_and_flash_those_of_packed_documents(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.capability = (9, 0)
    repeated = launched([CAUSAL] * 4, 1024, monkeypatch)
    assert [name for name, _ in repeated] == ["cudnn"] * 4
    assert len(frozenset.union(*(shapes for _, shapes in repeated))) == 3
    cuts = [(0, 300 + 7 * i, 800 - 3 * i, 1024) for i in range(4)]
    masks = [MaskSpec(causal=True, cu_seqlens=cut) for cut in cuts]
    packed = launched(masks, 1024, monkeypatch)
    assert [name for name, _ in packed] == ["sdpa"] * 4
    for (_, shapes), (_, others) in pairwise(packed):  # cudnn would build most graphs again
        assert len(shapes - others) > len(shapes) // 2
    windowed = launched([MaskSpec(causal=True, window=100)], 1024, monkeypatch)
    assert [name for name, _ in windowed] == ["sdpa"]


def test_chunks_too_short_for_cudnn_go_to_flash(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.capability = (9, 0)
    names = [launched([CAUSAL], length, monkeypatch)[0][0] for length in (512, 508, 16)]
    assert names == ["cudnn", "sdpa", "sdpa"]


@dataclass
class WithoutHash(PlainBackend):
    """A backend of the user's own, as a plain dataclass."""

    kinds: tuple[Kernel, ...] = ("full", "causal")
    calls: int = 0


def test_a_backend_without_a_hash_is_refused_where_it_is_given() -> None:
    backend: Any = WithoutHash()
    x, mesh = (
        torch.zeros(1, 2, 6, 4),
        SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",)),
    )
    said = r"has no hash, by which plans for it are kept; make its class @dataclass\(frozen=True\)"
    with pytest.raises(BackendError, match=said):
        context_parallel_attention(x, x, x, mesh, mask=CAUSAL, backend=backend)
    with pytest.raises(BackendError, match=said):
        ContextParallel(seq_dim=2, head_dim=1, layout=Zigzag(), backend=backend)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-50, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_scale_of_any_sign_gives_what_the_definition_gives(
    scale: float, dtype: torch.dtype
) -> None:
    q, k, v, grad = inputs(2, 2, 32, dtype=dtype)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        local = leaves(*(x.chunk(2, 2)[rank] for x in (q, k, v)))
        mesh = door.mesh((2,), ("cp",))
        out = context_parallel_attention(*local, mesh, mask=CAUSAL, scale=scale, collectives=door)
        return with_gradients(out, local, grad.chunk(2, 2)[rank])

    whole = leaves(q, k, v)
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
    scores = (whole[0] @ whole[1].transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    expected = with_gradients(scores.softmax(-1) @ whole[2], whole, grad)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for parts, right in zip(zip(*SimulatedWorld(2).run(rank), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right, rtol=bound, atol=bound)


def test_a_kernel_that_masks_before_it_scales_is_refused_by_name() -> None:
    x, mesh = (
        torch.zeros(1, 2, 6, 4),
        SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",)),
    )
    with pytest.raises(BackendError, match=r"take no scale -0.3; use 'eager'"):
        context_parallel_attention(x, x, x, mesh, mask=CAUSAL, scale=-0.3, backend="sdpa")
