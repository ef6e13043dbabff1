"""The style's modes: hybrids, two axes, swapped halves; and its schedules, masks and layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hp_cp import (
    BackendError,
    ContextParallel,
    Contiguous,
    DoubleRing,
    Greedy,
    InputError,
    MaskSpec,
    PerDocument,
    ScoreOptions,
    Zigzag,
    plan_attention,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, dense_attention, inputs, leaves, single, with_gradients
from .test_style import Core, Model, rows, simulated

CAUSAL = MaskSpec(causal=True)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("outer", "ulysses") if len(shape) == 2 else ("cp",)
    return cached(
        f"cp{shape}",
        lambda: init_device_mesh("cpu", shape, mesh_dim_names=names),
    )


def parallelized(
    rank: int, shape: tuple[int, ...], options: dict[str, Any], tensors: tuple[Tensor, ...]
) -> tuple[list[Tensor], dict[str, int], list[str]]:
    """Return results, bytes received by axis, and what the module holds after the calls."""
    record = RecordingCollectives()
    model = Model()
    n, seq_len = torch.Size(shape).numel(), tensors[0].shape[1]
    options = {"seq_len": seq_len, **options}
    style = ContextParallel(seq_dim=1, head_dim=2, collectives=record, **options)
    parallelize_module(model, mesh_of(shape), {"core": style})
    layout, mask = style.options.layout or Contiguous(), style.mask
    mine = list(layout.indices(n, seq_len, mask)[rank])
    q, k, v, grad = (x[:, mine] for x in tensors)
    local = leaves(q, k, v)
    before = sorted(vars(model.core))
    results = with_gradients(model(*local), local, grad)
    left = sorted(set(vars(model.core)) - set(before))
    return results, {axis: t.bytes for axis, t in record.by_axis.items()}, left


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4,), {"ulysses_degree": 2}),
        ((4,), {"ulysses_degree": 2, "schedule": "ring", "layout": Zigzag()}),
        ((4,), {"ulysses_degree": 1, "schedule": "direct", "layout": Zigzag()}),
        ((4,), {"ulysses_degree": 1, "load_balance": True}),
        ((2, 2), {}),
        ((2, 2), {"ulysses_degree": 2, "layout": Zigzag()}),
        ((4, 1), {"ulysses_degree": 1, "load_balance": True}),
        ((1, 4), {}),
    ],
)
def test_every_mode_gives_the_single_process_result_and_receives_the_planned_bytes(
    ranks: Any, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(8, 4, 16))
    answers = ranks(4).run(parallelized, shape, options, tensors)
    whole = leaves(*tensors[:3])
    expected = with_gradients(Model()(*whole), whole, tensors[3])
    degree = options.get("ulysses_degree") or shape[-1]
    plan = plan_attention(
        CAUSAL,
        options.get("layout"),
        4,
        16,
        schedule=options.get("schedule", "gather"),
        ulysses_degree=degree,
        load_balance=options.get("load_balance", False),
        batch=2,
        q_heads=8,
        kv_heads=4,
        head_size=8,
        itemsize=8,
    )
    indices = plan.layout.indices(4, 16)
    for rank, (results, received, left) in enumerate(answers):
        for result, reference in zip(results, expected, strict=True):
            right = reference[:, list(indices[rank])]
            torch.testing.assert_close(result, right, rtol=0, atol=1e-13)
        assert sum(received.values()) == plan.bytes_received(rank)
        assert left == []
        if len(shape) == 2:
            assert set(received) == {
                n for n, s in zip(("outer", "ulysses"), shape, strict=True) if s > 1
            }


@pytest.mark.nccl
@pytest.mark.parametrize("layout", [PerDocument(), Greedy(2), Zigzag()], ids=repr)
@pytest.mark.parametrize("degree", [None, 1, 2])
def test_packed_documents_go_through_the_style(ranks: Any, degree: int | None, layout: Any) -> None:
    mask = MaskSpec(causal=True, window=9, cu_seqlens=(0, 3, 16, 17, 30))
    tensors = inputs(8, 4, 30)
    options = {"ulysses_degree": degree, "layout": layout, "mask": mask, "seq_len": 30}
    packed = tuple(rows(x).contiguous() for x in tensors)
    answers = ranks(4).run(parallelized, (4,), options, packed)
    q, k, v, grad = tensors
    # the model's scale is 0.3: scale q to what the definition divides by
    stretched = (q * 0.3 * 8**0.5, k, v, grad)
    out, dq, dk, dv = single(stretched, mask, dense_attention)
    expected = [rows(x) for x in (out, dq * 0.3 * 8**0.5, dk, dv)]
    for held, (results, _, _) in zip(layout.indices(4, 30, mask), answers, strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, list(held)], rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_swapped_halves_serve_odd_worlds_and_their_middle_rank(n: int) -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 4 * n))

    def rank(rank: int, door: SimulatedCollectives) -> tuple[list[Tensor], int]:
        record = RecordingCollectives(door)
        module = Core()
        style = ContextParallel(
            seq_dim=1,
            head_dim=2,
            ulysses_degree=1,
            load_balance=True,
            seq_len=4 * n,
            collectives=record,
        )
        style.apply(module, door.mesh((n,), ("cp",)))
        q, k, v, grad = (x.chunk(n, 1)[rank] for x in tensors)
        local = leaves(q, k, v)
        results = with_gradients(module(*local, is_causal=True), local, grad)
        return results, sum(traffic.bytes for traffic in record.by_axis.values())

    whole = leaves(*tensors[:3])
    expected = with_gradients(Core()(*whole, is_causal=True), whole, tensors[3])
    plan = plan_attention(
        CAUSAL, None, n, 4 * n, schedule="gather", load_balance=True, batch=2, q_heads=4,
        kv_heads=2, head_size=8, itemsize=8,
    )  # fmt: skip
    for i, (results, received) in enumerate(SimulatedWorld(n).run(rank)):
        assert received == plan.bytes_received(i)
        for result, reference in zip(results, expected, strict=True):
            right = reference.chunk(n, 1)[i]
            torch.testing.assert_close(result, right, rtol=0, atol=1e-13)


def test_swapped_halves_under_a_full_mask_give_the_same_numbers() -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(4, 2, 12))

    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        module = Core()
        style = ContextParallel(
            seq_dim=1, head_dim=2, ulysses_degree=1, load_balance=True, collectives=door
        )
        style.apply(module, door.mesh((3,), ("cp",)))
        out: Tensor = module(*(x.chunk(3, 1)[rank] for x in tensors[:3]))
        return out

    together = torch.cat(SimulatedWorld(3).run(rank), 1)
    torch.testing.assert_close(together, Core()(*tensors[:3]), rtol=0, atol=1e-13)


def test_uneven_heads_reach_the_modules_own_forward() -> None:
    tensors = tuple(rows(x).contiguous() for x in inputs(6, 3, 12))

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        module = Core()
        ContextParallel(seq_dim=1, head_dim=2, collectives=door).apply(
            module, door.mesh((4,), ("cp",))
        )
        q, k, v, grad = (x.chunk(4, 1)[rank] for x in tensors)
        local = leaves(q, k, v)
        return with_gradients(module(*local, is_causal=True), local, grad)

    whole = leaves(*tensors[:3])
    expected = with_gradients(Core()(*whole, is_causal=True), whole, tensors[3])
    for parts, reference in zip(
        zip(*SimulatedWorld(4).run(rank), strict=True), expected, strict=True
    ):
        torch.testing.assert_close(torch.cat(parts, 1), reference, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ulysses_degree": 1},
        {"ulysses_degree": 4},
        {"ulysses_degree": 2, "schedule": "ring"},
        {"ulysses_degree": 1, "schedule": DoubleRing(2)},
        {"ulysses_degree": 1, "load_balance": True},
    ],
    ids=str,
)
def test_the_options_of_many_ranks_serve_one_rank_with_every_mask(options: dict[str, Any]) -> None:
    tensors = inputs(4, 2, 7)
    for mask in (None, CAUSAL, MaskSpec(causal=False, window=2, cu_seqlens=(0, 4, 7))):
        module = Core()
        ContextParallel(seq_dim=1, head_dim=2, mask=mask, **options).apply(
            module, simulated_mesh((1,))
        )
        local = leaves(*tensors[:3])
        out = rows(module(*map(rows, local), is_causal=mask is None or mask.causal))
        expected = single(tensors, mask or CAUSAL, dense_attention)
        for result, reference in zip(with_gradients(out, local, tensors[3]), expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"ulysses_degree": 1, "softcap": 2.0}, {}),
        ({"mask": CAUSAL, "softcap": 2.0}, {}),
        ({"layout": Zigzag()}, {"sinks": torch.arange(4.0, dtype=torch.float64)}),
        ({"layout": Zigzag()}, {"dropout_p": 0.5, "dropout_seed": 3}),
        ({"ulysses_degree": 1}, {"scale": 0.7}),
        ({"ulysses_degree": 1, "backend": "eager"}, {}),
    ],
    ids=str,
)
def test_an_option_gives_on_one_rank_what_it_gives_on_two(
    options: dict[str, Any], call: dict[str, Any]
) -> None:
    tensors = tuple(rows(x) for x in inputs(4, 2, 12)[:3])

    def outputs(n: int) -> Tensor:
        indices = (options.get("layout") or Contiguous()).indices(n, 12)

        def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
            style = ContextParallel(seq_dim=1, head_dim=2, collectives=collectives, **options)
            core = style.apply(Core(), collectives.mesh((n,), ("cp",)))
            mine = (x[:, list(indices[rank])] for x in tensors)
            out: Tensor = core(*mine, is_causal=True, **call)
            return out

        found = torch.cat(SimulatedWorld(n).run(rank), 1)
        order = torch.tensor([i for chunk in indices for i in chunk])
        return torch.empty_like(found).index_copy(1, order, found)

    torch.testing.assert_close(outputs(1), outputs(2), rtol=0, atol=1e-13)


def test_the_body_of_a_forward_is_lost_on_one_rank_as_on_two() -> None:
    class Doubled(Core):
        def forward(self, *args: Any, is_causal: bool = False, **options: Any) -> Tensor:
            return 2 * super().forward(*args, is_causal=is_causal, **options)

    q, k, v, _ = inputs(4, 2, 12)
    for n in (1, 2):
        outs = simulated(
            n,
            lambda door: ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=1, collectives=door),
            lambda r, m, n=n: m(*(rows(x).chunk(n, 1)[r] for x in (q, k, v)), is_causal=True),
            Doubled,
        )
        expected = rows(dense_attention(q, k, v, CAUSAL))
        torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"backend": "eager"}], ids=str)
def test_an_option_that_the_own_forward_would_not_use_is_refused_on_any_number_of_ranks(
    option: dict[str, Any], n: int
) -> None:
    style = ContextParallel(seq_dim=1, head_dim=2, **option)
    with pytest.raises(
        (InputError, BackendError), match="would not be used where the module's own"
    ):
        style.apply(Core(), simulated_mesh((n,)))


def test_scores_of_the_style_reach_the_attention_whole_or_are_refused() -> None:
    tensors = inputs(4, 2, 12)
    collectives = SimulatedCollectives(SimulatedWorld(1), 0)
    mesh = collectives.mesh((1,), ("cp",))
    style = ContextParallel(seq_dim=1, head_dim=2, mask=CAUSAL, collectives=collectives)
    # Stands for any option of kernels that the style may get: `Core` has no argument for it.
    scores = ScoreOptions(mask_mod=lambda b, h, i, j: (i - j) % 2 == 0)
    style.options = style.options._replace(scores=scores)
    style.options = style.options._replace(backend="eager")
    out = rows(style.apply(Core(), mesh)(*map(rows, tensors[:3]), is_causal=True))
    expected = dense_attention(*tensors[:3], replace(CAUSAL, mask_mod=scores.mask_mod))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    own = ContextParallel(seq_dim=1, head_dim=2, collectives=collectives)
    own.options = own.options._replace(scores=ScoreOptions(window=(3, 0)))
    with pytest.raises(InputError, match=r"window=\(3, 0\) would not be used where the module's"):
        own.apply(Core(), mesh)


@pytest.mark.parametrize("degree", [None, 1, 2])
def test_an_empty_batch_goes_through(degree: int | None) -> None:
    def call(rank: int, module: nn.Module) -> list[Tensor]:
        local = leaves(*(torch.zeros(0, 3, 4, 8) for _ in range(3)))
        return with_gradients(module(*local, is_causal=True), local, torch.zeros(0, 3, 4, 8))

    for layout in LAYOUTS:
        answers = simulated(
            4,
            lambda door, layout=layout: ContextParallel(
                seq_dim=1, head_dim=2, ulysses_degree=degree, layout=layout, collectives=door
            ),
            call,
        )
        assert [[x.shape for x in results] for results in answers] == [[(0, 3, 4, 8)] * 4] * 4


def simulated_mesh(shape: tuple[int, ...]) -> Any:
    names = ("outer", "ulysses") if len(shape) == 2 else ("cp",)
    return SimulatedCollectives(SimulatedWorld(torch.Size(shape).numel()), 0).mesh(shape, names)


@pytest.mark.parametrize("degree", [None, 2, 4])
def test_swapped_halves_with_ulysses_are_refused_when_applied(degree: int | None) -> None:
    with pytest.raises(InputError, match="swaps queries around gathered keys, got ulysses_degree"):
        ContextParallel(seq_dim=1, head_dim=2, ulysses_degree=degree, load_balance=True).apply(
            Core(), simulated_mesh((4,))
        )


def test_swapped_halves_of_another_layout_or_schedule_are_refused_when_applied() -> None:
    mesh = simulated_mesh((4,))
    with pytest.raises(InputError, match=r"Contiguous sequences, got Zigzag\(\)"):
        ContextParallel(
            seq_dim=1, head_dim=2, ulysses_degree=1, load_balance=True, layout=Zigzag()
        ).apply(Core(), mesh)
    with pytest.raises(InputError, match="schedule='direct'"):
        ContextParallel(
            seq_dim=1, head_dim=2, ulysses_degree=1, load_balance=True, schedule="direct"
        ).apply(Core(), mesh)


def test_swapped_halves_of_an_odd_length_are_refused_on_every_rank() -> None:
    records = []

    def rank(rank: int, door: SimulatedCollectives) -> str:
        records.append(RecordingCollectives(door))
        module: nn.Module = Core()
        style = ContextParallel(
            seq_dim=1,
            head_dim=2,
            ulysses_degree=1,
            load_balance=True,
            seq_len=14,
            collectives=records[-1],
        )
        style.apply(module, door.mesh((2,), ("cp",)))
        q, k, v = (torch.zeros(1, 7, 2, 8) for _ in range(3))
        with pytest.raises(InputError) as caught:
            module(q, k, v, is_causal=True)
        return str(caught.value)

    said = (
        "load_balance halves equal local lengths, but 14 positions on 2 ranks do not give each an "
        "even number; pad to a multiple of 4, or use layout=Zigzag()"
    )
    assert SimulatedWorld(2).run(rank) == [said] * 2
    assert [record.by_axis for record in records] == [{}, {}]


def test_an_unknown_schedule_makes_no_style() -> None:
    with pytest.raises(InputError, match="no schedule 'x'"):
        ContextParallel(seq_dim=1, head_dim=2, schedule="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["ring", "gather", DoubleRing(2)], ids=repr)
@pytest.mark.parametrize(("shape", "degree"), [((4,), None), ((4,), 4), ((1, 4), None)], ids=str)
def test_a_schedule_that_would_not_run_is_refused(
    shape: tuple[int, ...], degree: int | None, schedule: Any
) -> None:
    style = ContextParallel(
        seq_dim=1, head_dim=2, ulysses_degree=degree, schedule=schedule, layout=Zigzag()
    )
    with pytest.raises(
        InputError, match=r"would not be used where all 4 ranks .* use ulysses_degr"
    ):
        style.apply(Core(), simulated_mesh(shape))
