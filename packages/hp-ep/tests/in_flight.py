"""Layers on the ranks of a simulated world, several calls of which are under way at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Axis
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import GroupedExperts, MoE, Placement
from hp_ep.dispatch._wrappers import Placed, Summed
from hp_ep.placement._replicas import ReplicaSum

from .dispatching import make_dispatcher
from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads

Run = Callable[[MoE, list[Tensor]], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dispatcher, on how many ranks, with replicas or with experts that two ranks cut."""

    name: str
    size: int = 2
    placement: Placement | None = None
    cut: int = 1

    def layer(self, me: int, door: SimulatedCollectives, chunks: int) -> MoE:
        """Return the layer of one rank, with its part of the experts' weights."""
        mesh = door.mesh((self.size, self.cut), ("ep", "tp"))
        axes = [Axis.of(mesh, i) for i in range(2)]
        layer = build_moe(7, shared=1, balance=0.2)
        whole: list[Tensor] = [*layer.experts.parameters()]
        meshes = door.mesh if self.cut == 1 else lambda *_: mesh
        slots = 4 if self.placement is None else len(self.placement.experts)
        layer.dispatcher = make_dispatcher(self.name, meshes, self.size, slots, door)
        if self.placement is not None:
            layer.dispatcher = Placed(layer.dispatcher, self.placement, me)
        if self.cut > 1:
            layer.dispatcher = Summed(layer.dispatcher, axes[1], door)
        local = self.parts(whole)[me]
        layer.experts = GroupedExperts(4, local[1].shape[2], len(local[0]), dtype=torch.float64)
        with torch.no_grad():
            for mine, part in zip(layer.experts.parameters(), local, strict=True):
                mine.copy_(part)
        if self.placement is not None:
            layer.experts.replicas = ReplicaSum(axes[0], self.placement, door)
        layer.router.split_tokens_over(axes[:1], door)
        layer.num_chunks = chunks
        return layer

    def parts(self, whole: list[Tensor]) -> list[list[Tensor]]:
        """Return what each rank holds of the weights of all experts."""
        if self.name == "Local":
            return [whole] * self.size
        found = []
        for rank in range(self.size * self.cut):
            block, index = divmod(rank, self.cut)
            here = [w.chunk(self.size)[block] for w in whole]
            if self.placement is not None:
                here = [w[list(self.placement.on_rank(block))] for w in whole]
            found.append([w.chunk(self.cut, 2)[index] for w in here])
        return found


def _all_then_back(layer: MoE, xs: list[Tensor]) -> list[Tensor]:
    ys = [layer(x) for x in xs]
    for i in (1, 2, 0):
        (ys[i] ** 2).sum().backward()
    return ys


def _as_a_pipeline_does(layer: MoE, xs: list[Tensor]) -> list[Tensor]:
    first, second = layer(xs[0]), layer(xs[1])
    (first**2).sum().backward()
    third = layer(xs[2])
    (second**2).sum().backward()
    (third**2).sum().backward()
    return [first, second, third]


def _recomputed(layer: MoE, xs: list[Tensor]) -> list[Tensor]:
    ys = [checkpoint(layer, x, use_reentrant=False) for x in xs]
    for y in ys:
        (y**2).sum().backward()
    return ys


def _recomputed_in_a_pipeline(layer: MoE, xs: list[Tensor]) -> list[Tensor]:
    first: Tensor = checkpoint(layer, xs[0], use_reentrant=False)
    second: Tensor = layer(xs[1])
    (first**2).sum().backward()
    third: Tensor = checkpoint(layer, xs[2], use_reentrant=True)
    (third**2).sum().backward()
    (second**2).sum().backward()
    return [first, second, third]


MODES: list[Run] = [_all_then_back, _as_a_pipeline_does, _recomputed, _recomputed_in_a_pipeline]
COUNTS = ([3, 5, 0, 2], [2, 0, 4, 1], [6, 1, 1, 0])


def _tokens(size: int) -> list[list[Tensor]]:
    """Return the tokens of three microbatches on each rank."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in counts[:size]]
        for counts in COUNTS
    ]


def check_in_flight(case: Case, chunks: int, run: Run) -> None:
    """Compare a layer on all ranks with one process: outputs, tokens' and weights' gradients."""
    tokens = _tokens(case.size)

    def rank(me: int, door: SimulatedCollectives) -> list[list[Tensor]]:
        layer = case.layer(me, door, chunks)
        xs = [batch[me // case.cut].clone().requires_grad_() for batch in tokens]
        ys = run(layer, xs)
        return [
            [y.detach() for y in ys],
            grads(xs),
            grads([*layer.experts.parameters()]),
            grads([layer.router.weight]),
        ]

    results = SimulatedWorld(case.size * case.cut).run(rank)
    layer = build_moe(7, shared=1, balance=0.2)
    for i, batch in enumerate(tokens):
        x = torch.cat(batch).requires_grad_()
        y = dense_moe(layer, x)
        ((y**2).sum() + dense_balance_loss(layer, x)).backward()
        for first in range(case.cut):  # ranks that share experts have the same tokens
            assert_close(torch.cat([r[0][i] for r in results[first :: case.cut]]), y)
            assert_close(torch.cat([r[1][i] for r in results[first :: case.cut]]), x.grad)
    router = torch.stack([r[3][0] for r in results[:: case.cut]]).sum(0)
    assert_close(router, layer.router.weight.grad)
    whole = grads([*layer.experts.parameters()])
    if case.name == "Local":
        for i, expected in enumerate(whole):
            assert_close(torch.stack([r[2][i] for r in results]).sum(0), expected)
        return
    for r, parts in zip(results, case.parts(whole), strict=True):
        for found, expected in zip(r[2], parts, strict=True):
            assert_close(found, expected)
