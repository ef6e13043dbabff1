"""What a dispatcher reads on the host, on a device that holds no values.

Any read of a value on the meta device fails, but for the ones that are counted here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hp_dtensor import Axis, Collectives, ReduceOp, SimulatedWorld, Work
from hp_ep import AllToAll, Dedup, Hierarchical, Padded, TokenDispatcher


class _Reads(TorchFunctionMode):
    """Answers ``tolist`` with zeros and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and args[0].is_meta:
            self.number += 1
            return torch.zeros(args[0].shape, dtype=torch.int64).tolist()
        return func(*args, **(kwargs or {}))


class _Shapes:
    """`Collectives` of the meta device: shapes and nothing else."""

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        rows = input.shape[0] if receive_splits is None else sum(receive_splits)
        return _Done([input.new_empty(rows, *input.shape[1:])])

    def all_gather(self, axis: Axis, inputs: Any, outputs: Any = None) -> Work:
        raise AssertionError

    def reduce_scatter(
        self, axis: Axis, inputs: Any, outputs: Any = None, op: ReduceOp = "sum"
    ) -> Work:
        raise AssertionError

    def all_reduce(self, axis: Axis, tensors: Any, op: ReduceOp = "sum") -> Work:
        raise AssertionError

    def exchange(
        self, axis: Axis, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Work:
        raise AssertionError

    def broadcast(self, axis: Axis, tensors: Any, source: int = 0) -> Work:
        raise AssertionError


class _Done:
    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def wait(self) -> list[Tensor]:
        return self._outputs


def _dispatcher(name: str, door: Collectives) -> TokenDispatcher:
    def make(me: int, simulated: Any) -> TokenDispatcher:
        if name == "Hierarchical":
            return Hierarchical(simulated.mesh((2, 2), ("node", "inside")), 8, door)
        mesh = simulated.mesh((4,), ("ep",))
        if name == "Padded":
            return Padded(mesh, 8, door, capacity=3)
        return Dedup(mesh, 8, door) if name == "Dedup" else AllToAll(mesh, 8, door)

    return SimulatedWorld(4).run(make)[1]


@pytest.mark.parametrize(
    ("name", "reads"), [("AllToAll", 1), ("Dedup", 1), ("Hierarchical", 1), ("Padded", 0)]
)
def test_a_step_reads_this_often_on_the_host(name: str, reads: int) -> None:
    dispatcher = _dispatcher(name, _Shapes())
    x = torch.empty(0 if reads else 5, 3, device="meta", requires_grad=True)
    w = torch.empty(x.shape[0], 2, device="meta", requires_grad=True)
    ids = torch.empty(w.shape, dtype=torch.int64, device="meta")
    with _Reads() as counted:
        rows, _, state = dispatcher.dispatch(x, w, ids)
        dispatcher.combine(rows * 2, state).sum().backward()
    assert counted.number == reads
    assert x.grad is not None
    assert x.grad.shape == x.shape
