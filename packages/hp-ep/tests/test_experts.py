"""Many experts at once equal each on its own, on both paths."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_ep import (
    ExpertConfigError,
    GroupedExperts,
    RoutingError,
    _experts,
    _permutation,
    _torch,
)
from hp_ep._torch import can_group

from .reference import assert_close, dense_experts, grads


def _run(
    dtype: torch.dtype, counts: list[int], dim: int, hidden: int
) -> tuple[GroupedExperts, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    experts = GroupedExperts(dim, hidden, len(counts), dtype=dtype)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    rows = torch.randn(sum(counts), dim, generator=generator).to(dtype).requires_grad_()
    result = experts(rows, torch.tensor(counts))
    result.sum().backward()
    return experts, rows, result


LOADS = [[2, 0, 4], [0, 0, 0], [0, 5, 0], [1, 2, 3]]


@pytest.mark.parametrize("counts", LOADS)
@pytest.mark.parametrize(
    ("dtype", "dim", "hidden", "grouped", "tolerance"),
    [
        (torch.float32, 8, 16, True, 1e-5),
        (torch.float32, 3, 5, False, 1e-5),
        (torch.float64, 8, 16, False, 1e-12),
        (torch.bfloat16, 8, 16, True, 3e-2),
        (torch.bfloat16, 4, 16, False, 3e-2),
    ],
)
def test_each_expert_computes_its_own_rows(
    counts: list[int], dtype: torch.dtype, dim: int, hidden: int, grouped: bool, tolerance: float
) -> None:
    experts, rows, result = _run(dtype, counts, dim, hidden)
    assert can_group(rows, experts.gate_up_proj.flatten(1, 2), experts.down_proj) is grouped
    assert result.dtype == dtype
    leaves = [t.detach().double().requires_grad_() for t in (rows, *experts.parameters())]
    every = dense_experts(*leaves)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expected = every[owner, torch.arange(sum(counts))]
    expected.sum().backward()
    assert_close(result.double(), expected, tolerance)
    for mine, reference in zip(grads([rows, *experts.parameters()]), grads(leaves), strict=True):
        assert_close(mine.double(), reference, tolerance)


def test_grouped_products_are_used_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.mm

    def product(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(torch, "mm", product)
    _run(torch.float32, [2, 3], 8, 16)
    assert not calls
    _run(torch.float64, [2, 3], 8, 16)
    assert len(calls) == 2 * (2 + 4)  # experts, each with two products and four in backward


def test_weights_off_the_alignment_take_the_other_path() -> None:
    rows, whole = torch.zeros(2, 8), torch.zeros(1 + 3 * 16 * 8)
    assert can_group(rows, whole[:-1].view(3, 16, 8))
    assert not can_group(rows, whole[1:].view(3, 16, 8))
    assert not can_group(rows, torch.zeros(3, 16, 8, dtype=torch.float64))
    assert not can_group(rows, torch.zeros(3, 8, 16).transpose(1, 2))


def test_uninitialised_memory_never_reaches_a_result_or_a_gradient(
    nan_in_new_memory: None,
) -> None:
    assert torch.empty(3).isnan().all()  # the fixture does what the test needs
    for counts in LOADS:
        for dtype, dim in ((torch.float32, 8), (torch.float64, 8)):
            experts, rows, result = _run(dtype, counts, dim, 16)
            for tensor in (result, *grads([rows, *experts.parameters()])):
                assert tensor.isfinite().all()


def test_a_frozen_weight_gets_no_gradient_and_the_others_do() -> None:
    experts = GroupedExperts(8, 16, 2)
    experts.gate_up_proj.requires_grad_(False)
    experts(torch.randn(3, 8), torch.tensor([1, 2])).sum().backward()
    assert experts.gate_up_proj.grad is None
    assert experts.down_proj.grad is not None


def test_geglu_gates_with_gelu() -> None:
    experts = GroupedExperts(2, 3, 1, activation="geglu", dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    gate, up = (x @ half.t() for half in experts.gate_up_proj[0])
    expected = (torch.nn.functional.gelu(gate) * up) @ experts.down_proj[0].t()
    assert_close(experts(x, torch.tensor([4])), expected)


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [4, -1]])
def test_counts_that_do_not_split_the_rows_are_refused(counts: list[int]) -> None:
    with pytest.raises(RoutingError, match=r"sum to the 3 rows"):
        GroupedExperts(8, 16, 2)(torch.zeros(3, 8), torch.tensor(counts))


def test_counts_for_another_number_of_experts_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"counts \(3,\) .* \(2,\)"):
        GroupedExperts(8, 16, 2)(torch.zeros(3, 8), torch.tensor([1, 1, 1]))


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ExpertConfigError, match=r"'relu' is not one of \['clamped_swiglu', 'geglu', 'swiglu'\]"
    ):
        GroupedExperts(8, 16, 2, activation="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -3, 2.0, "2", True, None])
@pytest.mark.parametrize("name", ["dim", "hidden_dim", "num_experts"])
def test_sizes_that_are_no_positive_integers_are_refused(name: str, size: Any) -> None:
    sizes: dict[str, Any] = {"dim": 8, "hidden_dim": 16, "num_experts": 2, name: size}
    with pytest.raises(ExpertConfigError, match=f"^{name}={size!r} must be a positive integer"):
        GroupedExperts(**sizes)


def test_printing_experts_shows_their_sizes() -> None:
    shown = "GroupedExperts(dim=8, hidden_dim=16, num_experts=2, activation='swiglu')"
    assert repr(GroupedExperts(8, 16, 2)) == shown


def test_experts_can_be_made_without_memory_and_filled_later() -> None:
    experts = GroupedExperts(8, 16, 2, device="meta").to_empty(device="cpu")
    experts.reset_parameters()
    assert all(0 < p.abs().max() <= 1 / p.shape[-1] ** 0.5 for p in experts.parameters())


def test_experts_that_lie_one_by_one_stack_and_come_apart_again() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (
                nn.Linear(*sizes, bias=False, dtype=torch.float64)
                for sizes in ((4, 6), (4, 6), (6, 4))
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
            return y

    alone = nn.ModuleList(One() for _ in range(3))
    each = {
        name: torch.stack([alone.get_parameter(f"{e}.{name}.weight") for e in range(3)])
        for name in ("gate", "up", "down")
    }
    state = {
        "gate_up_proj": torch.stack([each["gate"], each["up"]], 1),
        "down_proj": each["down"],
    }
    grouped = GroupedExperts(4, 6, 3, dtype=torch.float64)
    grouped.load_state_dict(state)
    rows = torch.randn(7, 4, dtype=torch.float64)
    expected = [one(part) for one, part in zip(alone, rows.split([2, 0, 5]), strict=True)]
    assert_close(grouped(rows, torch.tensor([2, 0, 5])), torch.cat(expected))
    back = {
        f"{e}.{name}.weight": weight
        for name, stacked in zip(
            ("gate", "up", "down"),
            (*grouped.gate_up_proj.unbind(1), grouped.down_proj),
            strict=True,
        )
        for e, weight in enumerate(stacked.unbind())
    }
    assert back.keys() == alone.state_dict().keys()
    for name, weight in alone.state_dict().items():
        assert torch.equal(back[name], weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_grouped_product_is_launched_for_no_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Kernels differ in what they make of no rows: some leave gradients of weights unwritten."""
    calls = []
    real = torch.ops.aten._grouped_mm.default

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if func is real:
                calls.append(func)
            return func(*args, **(kw or {}))

    with Products(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
        experts, rows, result = _run(dtype, [0, 0, 0], 8, 16)
        assert not calls
        _run(dtype, [0, 1, 0], 8, 16)
        assert calls
    assert result.shape == rows.shape == (0, 8)
    for p, grad in zip(experts.parameters(), grads(list(experts.parameters())), strict=True):
        assert torch.equal(grad, torch.zeros_like(p))


DEVICES = {
    "cpu": ("cpu", (0, 0), {torch.float32, torch.float16, torch.bfloat16}),
    "sm90": ("cuda", (9, 0), {torch.bfloat16}),
    "sm100": ("cuda", (10, 0), {torch.bfloat16}),
    "sm80": ("cuda", (8, 0), set()),
    "sm120": ("cuda", (12, 0), set()),
    "gfx942": ("hip", (9, 4), {torch.bfloat16}),
    "gfx90a": ("hip", (9, 0), set()),
    "other": ("xpu", (0, 0), set()),
}
"""Kind and capability of a device, and the dtypes whose grouped products read no offsets there."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DEVICES)
def test_the_host_reads_counts_once_where_no_kernel_leaves_them_on_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    kind, version, grouped = DEVICES[name]
    found = _torch.Capability(kind=kind, version=version)
    monkeypatch.setattr(_torch, "capability_of", lambda device: found)
    calls: list[str] = []
    real: Any = Tensor.tolist
    monkeypatch.setattr(_experts, "_check_split", lambda *_: None)  # what a CPU looks at

    def tolist(x: Tensor) -> Any:
        calls.append("read")
        return real(x)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if func is torch.ops.aten._grouped_mm.default:
                calls.append("product")
            return func(*args, **(kw or {}))

    generator = torch.Generator().manual_seed(0)
    experts = GroupedExperts(8, 16, 3, dtype=dtype)
    rows = torch.randn(6, 8, generator=generator).to(dtype).requires_grad_()
    counts = torch.tensor([2, 0, 4])
    monkeypatch.setattr(Tensor, "tolist", tolist)
    with Products(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
        experts(rows, counts).sum().backward()
    assert calls == (["product"] * 6 if dtype in grouped else ["read"])


def test_a_thousand_experts_on_a_gpu_are_more_than_its_kernel_takes() -> None:
    capability = _torch.Capability(kind="cuda", version=(9, 0))
    assert _torch.has_grouped_kernel(capability, torch.bfloat16, 1023)
    assert not _torch.has_grouped_kernel(capability, torch.bfloat16, 1024)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", lambda gate, up: up])
def test_rows_that_are_computed_in_blocks_give_what_all_at_once_give(
    monkeypatch: pytest.MonkeyPatch, activation: Any, weighted: bool
) -> None:
    experts = GroupedExperts(4, 6, 3, activation=activation, bias=True, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(11, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(11, 4, generator=generator, dtype=torch.float64)
    leaves = [rows, *experts.parameters(), *([weights] if weighted else [])]
    found = []
    for size in (_permutation._BLOCK, 3 * 12):  # blocks of 3, 3, 3 and 2 rows
        monkeypatch.setattr(_permutation, "_BLOCK", size)
        y = experts(rows, torch.tensor([5, 0, 6]), weights if weighted else None)
        kept = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        found += [(y, *kept), (y, *torch.autograd.grad(y, leaves, grad))]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
