"""Products and layers on CUDA tensors without values: shapes, and no waiting of the host."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_pool.fake_cuda import ShapeCollectives, fake_cuda, recorded_functions
from torch import Tensor

from hp_dtensor import Work
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import GroupedExperts, MoE
from hp_ep._experts import _DownProduct
from hp_ep._products import Blocks, blocks_of, gather_bias, grouped_linear
from hp_ep.dispatch import _exchange

from .dispatching import NAMES, make_dispatcher

SHAPES: Any = ShapeCollectives()
Nodes = Any
TOKENS, EXPERTS, RANKS, TOP_K = 8, 8, 4, 2
# By the width of a table: experts here, or on this node, and rows from each rank for each of them.
KINDS = {6: (2, 2), 9: (2, 4), 10: (4, 2)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a GPU with kernels for grouped products."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def check_backward(nodes: Nodes) -> None:
    """Call the backward functions, and compare shapes of gradients and inputs."""
    for node in reversed(nodes):
        if node.function is _DownProduct:
            continue  # whose backward calls autograd
        for given, grad in zip(node.args, node.backward(), strict=True):
            if isinstance(given, Tensor) and grad is not None:
                assert (grad.shape, grad.dtype, grad.device) == (
                    given.shape,
                    given.dtype,
                    given.device,
                )


@pytest.mark.parametrize("float8", [False, True])
def test_products_leave_the_counts_on_the_device(float8: bool) -> None:
    with fake_cuda() as cuda, recorded_functions() as nodes:
        rows, weight, bias = (
            torch.empty(size, dtype=torch.bfloat16, device=cuda)
            for size in ((12, 32), (4, 16, 32), (4, 16))
        )
        counts = torch.empty(4, dtype=torch.int64, device=cuda)
        blocks: Blocks = blocks_of(counts, rows, [weight], float8=float8)
        assert blocks.sizes is None
        out = grouped_linear(rows, weight, blocks) + gather_bias(bias, blocks, 12)
        assert (out.shape, out.dtype, out.device) == ((12, 16), torch.bfloat16, cuda)
        assert len(nodes) == 2
        if not float8:  # whose gradient by rows has no shapes in torch without a GPU
            check_backward(nodes)


class Counts:
    """A side stream that knows what the host would read: as many rows for all experts."""

    def __init__(self) -> None:
        self.reads = 0

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        """Count a read, and answer it."""
        (received,) = work.wait()
        numbers = []
        for rows, columns in [x.shape for x in (*others, received)]:
            experts, each = KINDS[columns]
            numbers += [4, *[each] * experts, *[0] * (columns - 1 - experts)] * rows

        def wait() -> list[int]:
            self.reads += 1
            return numbers

        return received, wait

    def mark(self) -> object:
        """Return nothing."""

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        """Communicate."""
        return call()

    def adopt(self, tensor: Tensor) -> None:
        """Do nothing."""


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_reads_its_counts_at_most_once_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Counts()
    monkeypatch.setattr(_exchange, "side_of", lambda device: side)
    door = SimulatedCollectives(SimulatedWorld(RANKS), 1)
    dispatcher = make_dispatcher(name, door.mesh, RANKS, EXPERTS, SHAPES)
    with fake_cuda() as cuda, recorded_functions() as nodes:
        kind: Any = dict(device=cuda, dtype=torch.bfloat16)
        layer = MoE(16, 32, EXPERTS, TOP_K, num_shared_experts=1, load_balance_loss=0.1, **kind)
        layer.dispatcher = dispatcher
        layer.experts = GroupedExperts(16, 32, EXPERTS if name == "Local" else 2, **kind)
        x = torch.empty(TOKENS, 16, **kind)
        y = layer(x)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, cuda)
        check_backward(nodes)
    assert side.reads == int(name in ("AllToAll", "Dedup", "Hierarchical"))


def test_a_layer_that_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a grouped kernel each product reads the counts.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(RuntimeError, match=r"tolist|_local_scalar_dense"):
        test_a_layer_reads_its_counts_at_most_once_and_nothing_else("Local", monkeypatch)
