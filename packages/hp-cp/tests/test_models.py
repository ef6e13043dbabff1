"""What the attention of models has beside a mask, over all ranks as in one process."""

import itertools
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hp_cp import (
    Auto,
    BackendError,
    ContextParallel,
    Contiguous,
    DoubleRing,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    ScoreOptions,
    Zigzag,
    _blockwise,
    context_parallel_attention,
    plan_attention,
)
from hp_cp._attention import AttentionOptions, dropout_of, sharded_attention
from hp_cp.kernels._eager import EagerBackend
from hp_dtensor import AxisMesh, Collectives, RecordingCollectives, TorchCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import all_layouts, cp_mesh, leaves, masked, visible, with_gradients
from .test_refusals import refused


@dataclass(frozen=True)
class Case:
    """One attention: sizes, who holds what, and the options of scores."""

    n: int
    degree: int
    heads: tuple[int, int]
    sizes: tuple[int, int]
    mask: MaskSpec
    seq_len: int
    layout: Layout
    schedule: Any = "direct"
    keep_kv: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    return_lse: bool = False
    swapped: bool = False

    @property
    def indices(self) -> list[list[int]]:
        """Return each rank's positions."""
        return [list(held) for held in self.layout.indices(self.n, self.seq_len, self.mask)]

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return q, k, v and a gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(len(repr(self)))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        (q_heads, kv_heads), (size, value_size) = self.heads, self.sizes
        tensors = {
            "q": random(2, q_heads, self.seq_len, size),
            "k": random(2, kv_heads, self.seq_len, size),
            "v": random(2, kv_heads, self.seq_len, value_size),
            "grad": random(2, q_heads, self.seq_len, value_size),
        }
        return {**tensors, "sinks": random(q_heads)} if self.sinks else tensors


def kept(case: Case) -> Tensor:
    """Return which weights ``[batch, heads, rows, keys]`` one process keeps, seen from outside."""
    zeros = torch.zeros(2, case.heads[0], case.seq_len, 1)
    keys = torch.eye(case.seq_len).expand(2, case.heads[0], -1, -1)
    door = SimulatedCollectives(SimulatedWorld(1), 0)
    given: Any = {name: case.options[name] for name in ("dropout_p", "dropout_seed")}
    weights: Tensor = context_parallel_attention(
        zeros,
        zeros,
        keys,
        door.mesh((1,), ("cp",)),
        mask=MaskSpec(causal=False),
        collectives=door,
        **given,
    )
    return weights != 0


def defined(case: Case) -> list[Tensor]:
    """Return output and gradients of the definition, in one process."""
    given = case.tensors()
    grad = given.pop("grad")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    softcap = case.options.get("softcap")
    group = case.heads[0] // case.heads[1]
    k, v = (leaves[name].repeat_interleave(group, 1) for name in ("k", "v"))
    scale = case.options.get("scale")
    scores = leaves["q"] @ k.mT * (case.sizes[0] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(case.mask, case.seq_len, 2, case.heads[0])
    scores = scores.masked_fill(~seen, -torch.inf)
    if case.sinks:
        beside = leaves["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], -1)
    alone = (scores == -torch.inf).all(-1, keepdim=True)  # rows without keys
    weights = scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
    weights = weights[..., : case.seq_len]
    if rate := case.options.get("dropout_p"):
        weights = weights * kept(case) / (1 - rate)
    out = weights @ v
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return [out.detach(), scores.logsumexp(-1).detach(), *gradients]


def swapped(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    """Return what the style computes under ``load_balance``."""
    rate, seed = given.pop("dropout_p", 0.0), given.pop("dropout_seed", None)
    scores = ScoreOptions(
        scale=given.pop("scale", None),
        softcap=given.pop("softcap", None),
        dropout=dropout_of(rate, seed),
    )
    mesh, sinks = given.pop("mesh"), given.pop("sinks", None)
    options = AttentionOptions(
        **{"backend": "auto", **given}, scores=scores, seq_dim=2, head_dim=1, load_balance=True
    )
    out, lse = sharded_attention(q, k, v, mesh, options, sinks)
    return (out, lse) if options.return_lse else out


def on_rank(case: Case, rank: int, mesh: AxisMesh, collectives: Collectives) -> list[Tensor]:
    """Return output and gradients of this rank's rows."""
    mine = case.indices[rank]
    given = {name: x if name == "sinks" else x[:, :, mine] for name, x in case.tensors().items()}
    grad = given.pop("grad")
    leaves: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in given.items()}
    attention: Any = swapped if case.swapped else context_parallel_attention
    result = attention(
        **leaves,
        mesh=mesh,
        mask=case.mask,
        layout=case.layout,
        ulysses_degree=case.degree,
        schedule=case.schedule,
        keep_kv=case.keep_kv,
        seq_len=case.seq_len,
        collectives=collectives,
        return_lse=case.return_lse,
        **case.options,
    )
    out, *lse = result if case.return_lse else (result,)
    assert not any(x.requires_grad for x in lse)
    return [out.detach(), *lse, *torch.autograd.grad(out, list(leaves.values()), grad)]


def check(case: Case, per_rank: list[list[Tensor]]) -> None:
    """Compare all ranks' rows with the definition, and the sum of shares for sinks."""
    expected = defined(case)
    if not case.return_lse:
        del expected[1]
    if case.sinks:
        shares = [results.pop() for results in per_rank]
        whole = torch.stack(shares).sum(0)
        torch.testing.assert_close(whole, expected.pop(), rtol=0, atol=1e-12)
    for mine, results in zip(case.indices, per_rank, strict=True):
        for found, right in zip(results, expected, strict=True):
            torch.testing.assert_close(found, right[:, :, mine], rtol=0, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw worlds, masks, layouts, schedules, heads and head sizes."""
    n = draw(st.sampled_from([1, 2, 3, 4, 6]))
    degree = draw(st.sampled_from([u for u in range(1, n + 1) if n % u == 0]))
    kv_heads = draw(st.integers(1, 4))
    fewest = -(-degree // kv_heads)
    mask, seq_len = draw(masked(24, 1))
    return Case(
        n=n,
        degree=degree,
        heads=(kv_heads * draw(st.integers(fewest, fewest + 2)), kv_heads),
        sizes=(draw(st.integers(1, 12)), draw(st.integers(1, 12))),
        mask=mask,
        seq_len=seq_len,
        layout=draw(all_layouts),
        schedule=draw(st.sampled_from(["gather", "direct", "ring", "double_ring", DoubleRing(1)])),
        keep_kv=draw(st.sampled_from([None, True, False])),
        options=draw(options),
        sinks=draw(st.booleans()),
        return_lse=draw(st.booleans()),
    )


options = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["auto", "eager"]),
        "scale": st.sampled_from([None, 0.4]),
        "softcap": st.sampled_from([None, 1.5]),
        "dropout_p": st.sampled_from([0.0, 0.0, 0.2, 0.7]),
        "dropout_seed": st.integers(0, 2**63 - 1),
    }
)


def bytes_of_lse(case: Case, rank: int) -> int:
    """Return the bytes of the log-sum-exp that Ulysses brings: its own rows of others' heads."""
    place = rank % case.degree
    heads = case.heads[0] // case.degree + (place < case.heads[0] % case.degree)
    return 2 * 8 * len(case.indices[rank]) * (case.heads[0] - heads)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(case=cases(), two_axes=st.booleans())
def test_simulated_ranks_equal_the_definition_with_the_planned_bytes(
    case: Case, two_axes: bool
) -> None:
    shape = (case.n // case.degree, case.degree) if two_axes else (case.n,)
    received = [0] * case.n

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        record = RecordingCollectives(door)
        mesh = door.mesh(shape, ("cp", "ulysses")[: len(shape)])
        results = on_rank(case, rank, mesh, record)
        received[rank] = sum(traffic.bytes for traffic in record.by_axis.values())
        return results

    check(case, SimulatedWorld(case.n).run(rank))
    plan = plan_attention(
        case.mask,
        case.layout,
        case.n,
        case.seq_len,
        schedule=case.schedule,
        ulysses_degree=case.degree,
        keep_kv=case.keep_kv,
        batch=2,
        q_heads=case.heads[0],
        kv_heads=case.heads[1],
        head_size=case.sizes[0],
        value_size=case.sizes[1],
        itemsize=8,
    )
    lse = [bytes_of_lse(case, i) if case.return_lse else 0 for i in range(case.n)]
    assert received == [plan.bytes_received(i) + lse[i] for i in range(case.n)]


@settings(deadline=None, max_examples=40)
@given(case=cases(), n=st.sampled_from([1, 2, 3, 4]), quarter=st.integers(1, 3))
def test_simulated_ranks_that_swap_halves_equal_the_definition(
    case: Case, n: int, quarter: int
) -> None:
    seq_len = 2 * n * quarter
    mask = replace(case.mask, cu_seqlens=(0, n, seq_len) if case.mask.cu_seqlens else None)
    case = replace(case, n=n, degree=1, mask=mask, seq_len=seq_len, swapped=True)
    case = replace(case, layout=Contiguous(), schedule="gather")

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        return on_rank(case, rank, door.mesh((n,), ("cp",)), door)

    check(case, SimulatedWorld(n).run(rank))


SCHEDULES = ("gather", "direct", "ring", "double_ring")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"backend": "eager"},
    {"softcap": 1.5},
    {"dropout_p": 0.3, "dropout_seed": 5},
)
MASKS = (
    MaskSpec(causal=True),
    MaskSpec(causal=False, window=7),
    MaskSpec(causal=True, cu_seqlens=(0, 5, 6, 19, 30, 37)),
)
LAYOUTS = (Contiguous(), Zigzag(), PerDocument(), Greedy(3), Auto())


def real_cases(n: int) -> list[Case]:
    """Return every schedule, degree and option, with masks, layouts, heads and sizes in turn."""
    degrees = [u for u in (1, 2, 4) if n % u == 0]
    rest = itertools.cycle(
        itertools.product(LAYOUTS, MASKS, ((4, 4), (4, 1), (6, 3)), ((12, 8), (5, 9)))
    )
    cases: list[Case] = []
    for schedule, degree, options in itertools.product(SCHEDULES, degrees, OPTIONS):
        for _ in range(3):
            layout, mask, heads, sizes = next(rest)
            both = len(cases) % 2 == 0, len(cases) % 3 == 0
            given = n, degree, heads, sizes, mask, 37, layout, schedule, None, options
            cases.append(Case(*given, *both))
            for _ in range(6):
                next(rest)
    return cases


def real(rank: int, cases: list[Case]) -> list[list[Tensor]]:
    return [on_rank(case, rank, cp_mesh(case.n), TorchCollectives()) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_real_ranks_equal_the_definition(ranks: Any, n: int) -> None:
    cases = real_cases(n)
    per_rank = ranks(n).run(real, cases)
    for case, *results in zip(cases, *per_rank, strict=True):
        check(case, results)


CAUSAL = MaskSpec(causal=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sinks": torch.zeros(2)}, r"sinks \(2,\) .* for each of the 4 query heads on cpu"),
        ({"sinks": torch.zeros(1, 4)}, r"sinks \(1, 4\) .* of shape \(4,\) there"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "torch.int64 on cpu are not one floating"),
        ({"sinks": torch.zeros(4, device="meta")}, "on meta are not one floating"),
        ({"sinks": [0.0] * 4}, "sinks must be a plain tensor .*, got an object of type list"),
        ({"softcap": -1.0}, "softcap=-1.0 is no finite number above 0"),
        ({"softcap": torch.ones(())}, "softcap=an object of type Tensor is no finite number"),
        ({"return_lse": 1}, "return_lse is 1; use True or False"),
        ({"dropout_p": 0.1}, "dropout_p=0.1 needs a seed .*, got dropout_seed=None; pass an int"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "got dropout_seed=-1"),
        ({"dropout_p": 0.1, "dropout_seed": True}, "got dropout_seed=True"),
        ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p=1.0 is no probability below 1"),
        ({"dropout_p": -0.1, "dropout_seed": 1}, "dropout_p=-0.1 is no probability"),
        ({"dropout_p": float("nan"), "dropout_seed": 1}, "dropout_p=nan is no probability"),
        ({"dropout_p": None, "dropout_seed": 1}, "dropout_p=None is no probability"),
    ],
)
def test_what_is_no_option_of_scores_is_refused_on_every_rank(
    options: dict[str, Any], said: str
) -> None:
    q, k, v = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 6)

    def call(mesh: AxisMesh, record: Any) -> None:
        context_parallel_attention(q, k, v, mesh, mask=CAUSAL, collectives=record, **options)

    kind, message = refused(2, call)
    assert kind is InputError
    assert re.search(said, message)


@pytest.mark.parametrize(("seq_dim", "head_dim"), [(2, 1), (1, 2), (0, 2), (0, 1)])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_log_sum_exp_has_the_dims_of_the_output(
    degree: int, seq_dim: int, head_dim: int
) -> None:
    case = Case(2, degree, (4, 2), (8, 6), CAUSAL, 10, Contiguous(), sinks=True)
    right = defined(case)[1]
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    back = [order.index(dim) for dim in range(4)]

    def rank(rank: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        given = case.tensors(torch.float32)
        q, k, v = (given[x].chunk(2, 2)[rank].permute(back) for x in ("q", "k", "v"))
        return context_parallel_attention(
            q,
            k,
            v,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            ulysses_degree=degree,
            sinks=given["sinks"],
            return_lse=True,
            seq_dim=seq_dim,
            head_dim=head_dim,
            collectives=door,
        )

    for part, (out, lse) in zip(right.chunk(2, 2), SimulatedWorld(2).run(rank), strict=True):
        assert (lse.dtype, lse.shape) == (torch.float32, out.shape[:3])
        found = lse.unsqueeze(3).permute(order).squeeze(3).double()
        torch.testing.assert_close(found, part, rtol=0, atol=2e-5)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_ranks_gradient_of_sinks_is_that_of_its_rows_and_heads(degree: int) -> None:
    case = Case(4, degree, (6, 2), (8, 8), CAUSAL, 12, Contiguous(), sinks=True)

    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        return on_rank(case, rank, door.mesh((4,), ("cp",)), door)[-1]

    for i, share in enumerate(SimulatedWorld(4).run(rank)):
        heads = plan_attention(
            CAUSAL, Contiguous(), 4, 12, ulysses_degree=degree, q_heads=6, kv_heads=2
        ).heads[i % degree]
        assert [h for h in range(6) if share[h] != 0] == list(heads.q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks_of_a_low_precision_are_as_exact_as_their_dtype(dtype: torch.dtype) -> None:
    case = Case(2, 1, (4, 2), (8, 8), CAUSAL, 32, Zigzag(), sinks=True)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        given = case.tensors(dtype)
        mine = case.indices[rank]
        q, k, v = (given[x][:, :, mine].requires_grad_() for x in ("q", "k", "v"))
        sinks = given["sinks"].requires_grad_()
        out = context_parallel_attention(
            q,
            k,
            v,
            door.mesh((2,), ("cp",)),
            mask=CAUSAL,
            layout=Zigzag(),
            sinks=sinks,
            collectives=door,
        )
        out.backward(given["grad"][:, :, mine])
        assert (out.dtype, sinks.grad is not None) == (dtype, True)
        return [out.detach(), sinks.grad if sinks.grad is not None else sinks]

    expected = defined(case)
    results = SimulatedWorld(2).run(rank)
    atol = 32 * torch.finfo(dtype).eps
    for mine, (out, _) in zip(case.indices, results, strict=True):
        torch.testing.assert_close(out.double(), expected[0][:, :, mine], rtol=0, atol=atol)
    total = sum(share.double() for _, share in results)
    torch.testing.assert_close(total, expected[-1], rtol=0, atol=atol * 4)


DROPPED: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": 11}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_the_same_weights_are_dropped_on_any_number_of_ranks(
    mask: MaskSpec, degree: int, schedule: Any
) -> None:
    case = Case(4, degree, (4, 2), (1, 37), mask, 37, Zigzag(), schedule, options=DROPPED)
    keys = torch.eye(37).expand(2, 2, -1, -1)

    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        mine = case.indices[rank]
        weights: Tensor = context_parallel_attention(
            torch.zeros(2, 4, len(mine), 1),
            torch.zeros(2, 2, len(mine), 1),
            keys[:, :, mine],
            door.mesh((4,), ("cp",)),
            mask=mask,
            layout=Zigzag(),
            seq_len=37,
            ulysses_degree=degree,
            schedule=schedule,
            collectives=door,
            **DROPPED,
        )
        return weights != 0

    right = kept(case) & visible(mask, 37)
    for mine, found in zip(case.indices, SimulatedWorld(4).run(rank), strict=True):
        assert torch.equal(found, right[:, :, mine])


def test_dropped_weights_are_as_many_as_asked_for_wherever_one_looks() -> None:
    base = Case(1, 1, (8, 8), (1, 1), MASKS[1], 256, Contiguous(), options=DROPPED)
    one, other = (
        kept(replace(base, options={**DROPPED, "dropout_seed": seed})).double()
        for seed in (11, 11 + 2**40)
    )
    # The standard deviation of a mean of m of them is sqrt(0.24 / m); bounds are five of it.
    for dims in itertools.combinations(range(4), 2):
        mean = one.mean(dims)
        many = one.numel() / mean.numel()
        assert (mean - 0.6).abs().max() < 5 * (0.24 / many) ** 0.5
    for x, y in [
        (one, other),
        (one[:, :, 1:], one[:, :, :-1]),
        (one[..., 1:], one[..., :-1]),
        (one[:, 1:], one[:, :-1]),
        (one[1:], one[:-1]),
        (one[:, :, 1:, 1:], one[:, :, :-1, :-1]),
        (one, one.mT),
    ]:
        alike = ((x - 0.6) * (y - 0.6)).mean().abs()
        assert alike < 5 * 0.24 / x.numel() ** 0.5


@pytest.mark.parametrize("window", [1, 2, 3])
def test_weights_are_dropped_alike_where_a_block_is_several_launches(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = MaskSpec(causal=True, window=window)
    case = Case(2, 1, (2, 1), (4, 4), mask, 24, Contiguous(), options=DROPPED)
    plan = plan_attention(mask, Contiguous(), 2, 24)
    assert max(block.tiles for rank in range(2) for block in plan.blocks(rank)) > 3
    monkeypatch.setattr(_blockwise, "GRID", 3)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        return on_rank(case, rank, door.mesh((2,), ("cp",)), door)

    check(case, SimulatedWorld(2).run(rank))


class PackedEager(EagerBackend):
    """The eager backend, which also says that it packs blocks."""

    name = "packed eager"

    def forward_packed(self, *given: Any, **options: Any) -> Any:
        """Not called: stretches have no places."""
        raise AssertionError

    backward_packed = forward_packed


def test_blocks_with_places_are_not_packed() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=(0, 2, 5, 9, 12))
    options = {**DROPPED, "backend": PackedEager()}
    case = Case(2, 1, (2, 2), (4, 4), mask, 12, Zigzag(), options=options)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        return on_rank(case, rank, door.mesh((2,), ("cp",)), door)

    check(case, SimulatedWorld(2).run(rank))


@pytest.mark.parametrize("options", [DROPPED, {"softcap": 3.0}])
def test_a_kernel_without_an_option_is_refused_on_every_rank(options: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 4, 8)

    def call(mesh: AxisMesh, record: Any) -> None:
        context_parallel_attention(
            q, q, q, mesh, mask=CAUSAL, backend="sdpa", collectives=record, **options
        )

    kind, message = refused(2, call)
    assert kind is BackendError
    assert re.search("'sdpa' cannot .*: it has no (softcap|dropout), got .*; use 'eager'", message)


class Core(nn.Module):
    """A core attention without weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
        """Return the attention."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize(
    "given",
    [
        {"ulysses_degree": 1, "load_balance": True, "softcap": 1.5},
        {"ulysses_degree": 2, "mask": CAUSAL, "softcap": 1.5},
        {"ulysses_degree": 1, "schedule": "ring"},
        {"ulysses_degree": 2},
    ],
)
def test_the_style_bounds_scores_and_takes_values_of_another_size(given: dict[str, Any]) -> None:
    options = {"softcap": given.get("softcap")}
    case = Case(2, 1, (4, 2), (8, 6), CAUSAL, 12, Contiguous(), options=options)
    right, _, *gradients = defined(case)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        style = ContextParallel(seq_dim=2, head_dim=1, collectives=door, **given)
        core = style.apply(Core(), door.mesh((2,), ("cp",)))
        q, k, v, grad = (x.chunk(2, 2)[rank].clone() for x in case.tensors().values())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = core(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for i, results in enumerate(SimulatedWorld(2).run(rank)):
        for found, whole in zip(results, (right, *gradients), strict=True):
            torch.testing.assert_close(found, whole.chunk(2, 2)[i], rtol=0, atol=1e-12)


def test_a_softcap_that_the_modules_own_forward_would_not_use_is_refused() -> None:
    style = ContextParallel(seq_dim=2, head_dim=1, softcap=30.0)
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    with pytest.raises(InputError, match=r"softcap=30.0 would not be used where the module's own"):
        style.apply(Core(), mesh)
    with pytest.raises(InputError, match="softcap=0 is no finite number above 0"):
        ContextParallel(seq_dim=2, head_dim=1, softcap=0)


class InPlace(Core):
    """A core attention that changes what it gets."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
        """Return the attention of twice each of q, k and v."""
        return super().forward(q.mul_(2), k.mul_(2), v.mul_(2), is_causal=is_causal)


def test_a_modules_own_forward_may_change_values_of_another_size_in_place() -> None:
    case = Case(2, 1, (4, 2), (8, 6), CAUSAL, 12, Contiguous(), options={"scale": 4 * 8**-0.5})
    right, _, *gradients = defined(case)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        style = ContextParallel(seq_dim=2, head_dim=1, collectives=door)
        core = style.apply(InPlace(), door.mesh((2,), ("cp",)))
        q, k, v, grad = (x.chunk(2, 2)[rank].clone() for x in case.tensors().values())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = core(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for i, (out, *found) in enumerate(SimulatedWorld(2).run(rank)):
        torch.testing.assert_close(out, 2 * right.chunk(2, 2)[i], rtol=0, atol=1e-12)
        for mine, whole in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, 2 * whole.chunk(2, 2)[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 0), (8, 0), (0, 8), (0, 12)], ids=str)
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
@pytest.mark.parametrize("degree", [1, 2])
def test_heads_of_no_size_give_what_the_definition_gives(
    sizes: tuple[int, int], layout: Any, degree: int
) -> None:
    q, k, v = (
        torch.randn(2, heads, 9, size, dtype=torch.float64)
        for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    )
    grad = torch.randn(2, 4, 9, sizes[1], dtype=torch.float64)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        mine = list(layout.indices(2, 9)[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh((2,), ("cp",)),
            mask=MaskSpec(causal=True),
            layout=layout,
            ulysses_degree=degree,
            seq_len=9,
            collectives=door,
        )
        return with_gradients(out, local, grad[:, :, mine])

    whole = leaves(q, k, v)
    keys, values = (x.repeat_interleave(2, 1) for x in whole[1:])
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    scores = (whole[0] @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
    if sizes[0]:
        scores = scores * sizes[0] ** -0.5
    expected = with_gradients(scores.softmax(-1) @ values, whole, grad)
    for i, results in enumerate(SimulatedWorld(2).run(rank)):
        mine = list(layout.indices(2, 9)[i])
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right[:, :, mine], rtol=0, atol=1e-12)
