"""What the attention of models has beside a mask, over all ranks as in one process."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    Auto,
    Contiguous,
    DoubleRing,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_dtensor import AxisMesh, Collectives, RecordingCollectives, TorchCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import all_layouts, cp_mesh, masked, visible


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
        return {
            "q": random(2, q_heads, self.seq_len, size),
            "k": random(2, kv_heads, self.seq_len, size),
            "v": random(2, kv_heads, self.seq_len, value_size),
            "grad": random(2, q_heads, self.seq_len, value_size),
        }


def defined(case: Case) -> list[Tensor]:
    """Return output and gradients of the definition, in one process."""
    given = case.tensors()
    grad = given.pop("grad")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    group = case.heads[0] // case.heads[1]
    k, v = (leaves[name].repeat_interleave(group, 1) for name in ("k", "v"))
    scale = case.options.get("scale")
    scores = leaves["q"] @ k.mT * (case.sizes[0] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible(case.mask, case.seq_len), -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


def on_rank(case: Case, rank: int, mesh: AxisMesh, collectives: Collectives) -> list[Tensor]:
    """Return output and gradients of this rank's rows."""
    mine = case.indices[rank]
    given = {name: x[:, :, mine] for name, x in case.tensors().items()}
    grad = given.pop("grad")
    leaves: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = context_parallel_attention(
        **leaves,
        mesh=mesh,
        mask=case.mask,
        layout=case.layout,
        ulysses_degree=case.degree,
        schedule=case.schedule,
        keep_kv=case.keep_kv,
        seq_len=case.seq_len,
        collectives=collectives,
        **case.options,
    )
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)]


def check(case: Case, per_rank: list[list[Tensor]]) -> None:
    """Compare all ranks' rows with the definition."""
    expected = defined(case)
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
    )


options = st.fixed_dictionaries(
    {"backend": st.sampled_from(["auto", "eager"]), "scale": st.sampled_from([None, 0.4])}
)


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
    assert received == [plan.bytes_received(i) for i in range(case.n)]


SCHEDULES = ("gather", "direct", "ring", "double_ring")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"backend": "eager"})
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
    cases = []
    for schedule, degree, options in itertools.product(SCHEDULES, degrees, OPTIONS):
        for _ in range(3):
            layout, mask, heads, sizes = next(rest)
            cases.append(Case(n, degree, heads, sizes, mask, 37, layout, schedule, None, options))
            for _ in range(6):
                next(rest)
    return cases


def real(rank: int, cases: list[Case]) -> list[list[Tensor]]:
    return [on_rank(case, rank, cp_mesh(case.n), TorchCollectives()) for case in cases]


@pytest.mark.parametrize("n", [2, 4])
def test_real_ranks_equal_the_definition(ranks: Any, n: int) -> None:
    cases = real_cases(n)
    per_rank = ranks(n).run(real, cases)
    for case, *results in zip(cases, *per_rank, strict=True):
        check(case, results)
