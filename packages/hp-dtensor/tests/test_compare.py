"""The comparison with one process names the differences and the usual cause of each factor."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor.testing import Comparison, compare_with_one_process, keep_float64

Pools = Callable[[int], RankPool]


def _mesh(size: int) -> DeviceMesh:
    return cached(
        ("loss", size), lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("loss",))
    )


class Model(nn.Module):
    """Two layers, the first of which casts to float32 as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per row."""
        scale = torch.ones(5, dtype=torch.float32)
        hidden: Tensor = (self.first(x).tanh().float() * scale).to(torch.float32)
        out: Tensor = self.second(hidden).to(dtype=torch.float32)
        return out


def _batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()


def _whole_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(_batch()).square().sum() / 8
    return loss


def _share(model: nn.Module, count: int = 8, microbatches: int = 1) -> Tensor:
    rows, total = _batch().chunk(dist.get_world_size())[dist.get_rank()], torch.zeros(())
    for part in rows.chunk(microbatches):
        loss = model(part).square().sum() / count
        loss.backward()
        total = total + loss.detach()
    return total


def _sum_gradients(model: nn.Module, mean: tuple[str, ...] = ()) -> None:
    def reduced(factor: float, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad * factor

    for name, p in model.named_parameters():
        averaged = bool(mean) and name.startswith(mean)
        p.register_hook(partial(reduced, 1 / dist.get_world_size() if averaged else 1.0))


def _compared(rank: int, size: int, what: str) -> Comparison | str:
    model = Model()
    if what == "other values":
        with torch.no_grad():
            model.first.weight += rank

    def in_float32(model: nn.Module) -> Tensor:
        loss: Tensor = model(_batch().float()).square().sum() / 8
        return loss

    def freeze_second(model: nn.Module) -> None:
        _sum_gradients(model)
        model.get_submodule("second").requires_grad_(False)

    changed: dict[str, dict[str, Any]] = {
        "mean": {"parallelize": partial(_sum_gradients, mean=("second",))},
        "count": {"share": partial(_share, count=4)},
        "microbatches": {"share": partial(_share, microbatches=2)},
        "no reduction": {"parallelize": lambda model: None},
        "no gradient": {"parallelize": freeze_second},
        "names": {"parallelize": lambda model: nn.Sequential(model)},
        "nan": {"share": lambda model: _share(model) * torch.nan},
        "float32": {
            "loss": in_float32,
            "share": lambda model: in_float32(model) / size,
            "dtype": torch.float32,
            "rtol": 1e-4,
        },
    }
    given = {"parallelize": _sum_gradients, "loss": _whole_loss, "share": _share}
    try:
        return compare_with_one_process(
            model, loss_mesh=_mesh(size), **{**given, **changed.get(what, {})}
        )
    except AssertionError as error:
        return str(error)


def _on_ranks(ranks: Pools, what: str, size: int = 2) -> Comparison | str:
    found = ranks(size).run(_compared, size, what)
    assert found == [found[0]] * size  # equal on all ranks
    return found[0]


def test_equal_runs_return_the_losses_and_the_largest_error(ranks: Pools) -> None:
    found = _on_ranks(ranks, "equal")
    assert isinstance(found, Comparison), found
    assert found.parameters == 4
    assert found.loss == pytest.approx(found.expected_loss, rel=1e-12)
    assert found.largest_error < 1e-13  # casts to float32 keep float64


def test_functions_may_run_the_backward_of_microbatches(ranks: Pools) -> None:
    found = _on_ranks(ranks, "microbatches")
    assert isinstance(found, Comparison), found
    assert found.largest_error < 1e-13


@pytest.mark.parametrize(
    ("what", "size", "phrases"),
    [
        (
            "mean",
            4,
            [
                "2 of 4 gradients differ from one process (torch.float64, rtol=1e-10):",
                "\n  second.weight: 0.25 times\n  second.bias: 0.25 times\n",
                "1/4 times: a mean over 4 ranks or microbatches where a sum is needed",
            ],
        ),
        (
            "count",
            2,
            [
                "4 of 4 gradients and the loss differ",
                "  the loss: 2 times, ",
                "  first.weight: 2 times",
                "2 times: labels are counted for one of 2 microbatches or ranks only",
            ],
        ),
        ("no reduction", 2, ["4 of 4 gradients differ", "no common factor: ranks compute with"]),
        ("no gradient", 2, ["2 of 4 gradients", "second.bias: 0 times", "no gradient arrives"]),
        ("nan", 2, ["0 of 4 gradients and the loss", "the loss: relative error inf, not finite"]),
        (
            "other values",
            2,
            ["the loss of one process is ", "other numbers on ranks 1; give equal models"],
        ),
        ("names", 2, ["parameters have other names than in one process: 0.first.bias, "]),
    ],
)
def test_differences_are_named_with_factor_and_cause(
    ranks: Pools, what: str, size: int, phrases: list[str]
) -> None:
    found = _on_ranks(ranks, what, size)
    assert isinstance(found, str)
    for phrase in phrases:
        assert phrase in found


def test_another_dtype_can_be_compared(ranks: Pools) -> None:
    found = _on_ranks(ranks, "float32")
    assert isinstance(found, Comparison), found
    assert found.largest_error < 1e-4


def _of_dtensors(rank: int) -> float:
    """Return the largest error of a column-parallel layer with a replicated bias."""
    mesh = _mesh(2)
    torch.manual_seed(0)
    x = torch.randn(3, 4)

    def parallelize(model: nn.Module) -> nn.Module:
        def shard(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, placement in (("weight", Shard(1)), ("bias", Replicate())):
                value = getattr(module, name).detach()
                made = distribute_tensor(value, mesh, [placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(made))

        return distribute_module(model, mesh, shard)

    def share(model: nn.Module) -> Tensor:
        whole = distribute_tensor(x.double(), mesh, [Replicate()], src_data_rank=None)
        loss = model(whole).square().mean()
        loss.backward()
        value: Tensor = loss.full_tensor().detach() / 2  # each rank has the whole loss
        return value

    return compare_with_one_process(
        nn.Linear(4, 6), parallelize, lambda model: model(x.double()).square().mean(), share, mesh
    ).largest_error


def test_gradients_that_are_dtensors_are_compared_whole(ranks: Pools) -> None:
    assert max(ranks(2).run(_of_dtensors)) < 1e-14


def test_one_process_without_a_process_group_gets_a_type_error_for_a_wrong_loss() -> None:
    mesh: Any = None
    with pytest.raises(TypeError, match="must return a tensor of one element, got float"):
        compare_with_one_process(
            nn.Linear(2, 1),
            lambda model: None,
            lambda model: 1.0,  # type: ignore[arg-type, return-value]
            lambda model: torch.ones(()),
            mesh,
        )


def test_recomputed_layers_keep_float64_too() -> None:
    layer, x = nn.Linear(3, 3).double(), torch.ones(2, 3, dtype=torch.float64)
    with keep_float64():
        found = checkpoint(lambda y: layer(y).float().to(torch.float32), x, use_reentrant=False)
        found.sum().backward()
    assert found.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_devices_of_new_tensors_are_kept_in_and_after_the_block() -> None:
    """In a new process, because torch memoizes its functions at the first use of a device."""
    program = (
        "import torch\n"
        "from hp_dtensor.testing import keep_float64\n"
        "def kind():\n"
        "    with torch.device('meta'):\n"
        "        return torch.arange(3.0).device.type\n"
        "with keep_float64():\n"
        "    inside = kind()\n"
        "print(inside, kind())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta", "meta"]


def _fails_on_rank_1(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")


def _uses_less_on_rank_1(model: Any) -> Tensor:
    rows = _batch().chunk(dist.get_world_size())[dist.get_rank()]
    hidden = model.first(rows) if dist.get_rank() == 1 else model.second(model.first(rows).tanh())
    loss: Tensor = hidden.square().sum() / 8
    return loss


def _faults_of_one_rank(rank: int) -> list[str]:
    messages = []
    for parallelize, share in ((_fails_on_rank_1, _share), (lambda _: None, _uses_less_on_rank_1)):
        with pytest.raises((AssertionError, ValueError)) as caught:
            compare_with_one_process(Model(), parallelize, _whole_loss, share, _mesh(2))
        messages.append(str(caught.value))
    return messages


def test_faults_of_one_rank_raise_on_all(ranks: Pools) -> None:
    first, second = ranks(2).run(_faults_of_one_rank)
    assert first[0] == "parallelize failed on rank 1: ValueError: no such layer"
    assert second[0] == "no such layer"
    for message in (first[1], second[1]):
        assert "has a gradient on ranks 0 only" in message
