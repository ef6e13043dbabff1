"""What no implementation can leave out of a step, by hand: how far from it the others are.

Nothing is checked, learned or named, and no case is handled but that of the benchmarks: blocks in a
row, each used once, whose parameters all train and, in `host_step`, divide over the ranks.
"""

import copy
from functools import partial
from typing import cast

import torch
from arms import Net, Step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_dtensor import Axis, TorchCollectives
from hp_fsdp._torch import pack_rank_major


class Block:
    """One block: gathered for forward and for backward, its gradients reduced in one go.

    Gathers and reductions are one collective each; what arrives is brought to its place by one
    indexed copy. DTensors, views and hooks that can be are made once.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        axis, carrier = Axis.of(mesh, 0), TorchCollectives()
        self._owners = [(m._parameters, n) for m in module.modules() for n in m._parameters]
        wholes = [cast(Tensor, registry[name]).detach() for registry, name in self._owners]
        parts = [whole.chunk(axis.size)[axis.index] for whole in wholes]
        numels = [part.numel() for part in parts]
        self.module, self._degree = module, axis.size
        flat = torch.cat([part.flatten() for part in parts])
        numel = axis.size * len(flat)
        self._arrived, self._rows = torch.empty(numel), torch.empty(numel)
        self._packed = self._rows.view(axis.size, -1)
        self._place, self._reduced = torch.empty(numel), torch.empty_like(flat)
        numbers = torch.arange(numel, dtype=torch.int32).view(axis.size, -1).split(numels, 1)
        self._order = torch.cat([part.flatten() for part in numbers])
        self._start_gather = carrier.prepare_all_gather(axis, flat, self._arrived)
        self._scatter = carrier.prepare_reduce_scatter(axis, "sum")
        places = self._place.split([whole.numel() for whole in wholes])
        self._unsharded = [
            nn.Parameter(p.view(w.shape)) for p, w in zip(places, wholes, strict=True)
        ]
        self.sharded = [nn.Parameter(each) for each in _dtensors(flat, parts, mesh)]
        self._gradients = _dtensors(self._reduced, parts, mesh)
        self.hide()

    def start(self) -> None:
        """Start the gather."""
        self._place.untyped_storage().resize_(4 * self._order.numel())
        self._work = self._start_gather()

    def show(self) -> None:
        """Give the module what arrived."""
        self._work.wait()
        with torch.no_grad():
            torch.index_select(self._arrived, 0, self._order, out=self._place.data)
        for (registry, name), parameter in zip(self._owners, self._unsharded, strict=True):
            registry[name] = parameter

    def hide(self) -> None:
        """Give the module its shards, and free what was gathered."""
        for (registry, name), parameter in zip(self._owners, self.sharded, strict=True):
            registry[name] = parameter
        self._place.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Reduce the gradients and give them to the sharded parameters."""
        gradients = [cast(Tensor, parameter.grad) for parameter in self._unsharded]
        for parameter in self._unsharded:
            parameter.grad = None
        self.hide()
        with torch.no_grad():
            pack_rank_major(gradients, dim=0, num_chunks=self._degree, out=self._packed)
            self._scatter(self._reduced, self._rows).wait()
            self._reduced.div_(self._degree)
        for parameter, gradient in zip(self.sharded, self._gradients, strict=True):
            parameter.grad = gradient


def _dtensors(flat: Tensor, like: list[Tensor], mesh: DeviceMesh) -> list[DTensor]:
    parts = zip(flat.split([each.numel() for each in like]), like, strict=True)
    return [
        DTensor.from_local(p.view(x.shape), mesh, [Shard(0)], run_check=False) for p, x in parts
    ]


def host_step(base: Net, mesh: DeviceMesh, batch: Tensor) -> Step:
    """Return forward and backward of a model, which clears the gradients at its end."""
    blocks = [Block(module, mesh) for module in copy.deepcopy(base).blocks]

    def reached(position: int, gradient: Tensor) -> None:
        if position + 1 < len(blocks):
            blocks[position + 1].reduce()
        if position:
            blocks[position - 1].start()
        if position + 1 < len(blocks):
            blocks[position].show()

    def step() -> None:
        x = batch
        blocks[0].start()
        for position, block in enumerate(blocks):
            block.show()
            if position + 1 < len(blocks):
                blocks[position + 1].start()
            x = block.module(x)
            x.register_hook(partial(reached, position))
            if position + 1 < len(blocks):
                block.hide()
        x.pow(2).mean().backward()
        blocks[0].reduce()
        for block in blocks:
            for parameter in block.sharded:
                parameter.grad = None

    return step


def apart(base: Net, mesh: DeviceMesh, batch: Tensor) -> Step:
    """Return a step whose parts do not overlap: it computes, then communicates, then steps AdamW.

    Every block is gathered twice and reduced once, by one collective each, and the optimizer has
    this rank's share in one tensor. Where ranks keep all processors busy nothing is faster.
    """
    model, axis, carrier = copy.deepcopy(base), Axis.of(mesh, 0), TorchCollectives()
    totals = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    numel = totals[0] // axis.size
    shard, whole = torch.zeros(numel), torch.zeros(axis.size * numel)
    gather = carrier.prepare_all_gather(axis, shard, whole)
    scatter = carrier.prepare_reduce_scatter(axis, "sum")
    flat = nn.Parameter(torch.zeros(len(totals) * numel))
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.AdamW([flat], lr=1e-4, foreach=True)

    def step() -> None:
        model(batch).pow(2).mean().backward()
        model.zero_grad()
        for _ in totals:
            for _ in range(2):
                gather().wait()
            scatter(shard, whole).wait()
        optimizer.step()

    return step
