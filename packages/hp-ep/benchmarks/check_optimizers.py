"""Which optimizers of torch take the parameters of a model whose experts are spread over ranks.

``python benchmarks/check_optimizers.py`` takes three steps on two ranks with a matrix and the
weights of experts, a DTensor. The matrix is a plain tensor, or a DTensor on another mesh, as FSDP
makes it. Prints the largest error relative to one process, or the error that was raised.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peers import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

NAMES = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "Adafactor", "Muon", "LBFGS"),
)
OPTIONS: tuple[dict[str, bool], ...] = ({}, {"foreach": False}, {"foreach": True}, {"fused": True})


def step(name: str, values: Sequence[Tensor], grads: Sequence[Tensor], **options: Any) -> Any:
    """Return the parameters after three steps."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **momentum, **options)
    for _ in range(3):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step((lambda: torch.tensor(1.0)) if name == "LBFGS" else None)
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def compare(rank: int, mesh: DeviceMesh) -> list[str]:
    """Return a line for each optimizer, its options and the two kinds of lists."""
    other, found = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), []
    for beside in ("plain tensors", "another mesh"):
        for name in NAMES:
            generator = torch.Generator().manual_seed(0)
            shapes = (4, 4), ((4, 6) if name == "Muon" else (4, 3, 2))  # Muon takes matrices alone
            values, grads = ([torch.randn(s, generator=generator) for s in shapes] for _ in "vg")
            expected = step(name, values, grads)
            for options in OPTIONS[: 1 if name in ("Muon", "LBFGS") else None]:
                if "fused" in options and name not in ("Adam", "AdamW", "SGD", "Adagrad"):
                    continue
                try:
                    spread = [
                        [
                            dense if beside == "plain tensors" else _shard(dense, other),
                            _shard(experts, mesh),
                        ]
                        for dense, experts in (values, grads)
                    ]
                    results = step(name, *spread, **options)
                    pairs = zip(results, expected, strict=True)
                    text = f"{max(float((a - b).norm() / b.norm()) for a, b in pairs):.0e}"
                except (RuntimeError, NotImplementedError) as error:
                    text = f"{type(error).__name__}: {error}".partition("\n")[0][:110]
                found.append(f"{beside:14} {name:10} {options or 'defaults'!s:18} {text}")
    return found


def _shard(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(0)])


if __name__ == "__main__":
    print("\n".join(run_ranks(compare, 2)[0]))
