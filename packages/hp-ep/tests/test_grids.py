"""Eight ranks that split tokens in several ways: losses, masks and means of one process."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, GroupedExperts, MoE, TopKRouter

from .reference import assert_close, grads

GRIDS = [(8, 1, 1), (4, 2, 1), (1, 1, 8), (2, 1, 4), (2, 2, 2)]
"""Degrees of tp (which cuts the sequence), ep and cp."""
LOSSES = {"balance": dict(load_balance_loss=0.7), "z": dict(z_loss=0.3)}


def _build(options: dict[str, Any]) -> MoE:
    router = TopKRouter(4, 8, 2, dtype=torch.float64, **options)
    layer = MoE(4, 6, 8, 2, router=router, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def _spread(layer: MoE, me: int, door: SimulatedCollectives, grid: tuple[int, int, int]) -> MoE:
    mesh = door.mesh(grid, ("tp", "ep", "cp"))
    ep = mesh["ep"]
    index, size = ep.get_local_rank(), ep.size()
    local = GroupedExperts(4, 6, 8 // size, dtype=torch.float64)
    with torch.no_grad():
        for mine, every in zip(local.parameters(), layer.experts.parameters(), strict=True):
            mine.copy_(every.chunk(size)[index])
    layer.experts = local
    layer.dispatcher = AllToAll(ep, 8, door)
    layer.router.split_tokens_over(mesh, door)
    return layer


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 16, 4, generator=generator, dtype=torch.float64)
    valid = torch.rand(3, 16, generator=generator) < 0.6
    valid[:, 4:6] = False  # nothing at all on one rank
    return x, valid


def _step(layer: MoE, x: Tensor, valid: Tensor | None, scale: float) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf) if valid is None else layer(leaf, valid)
    (scale * (y**2).sum()).backward()
    gx, router, w1 = grads([leaf, layer.router.weight, layer.experts.gate_up_proj])
    return dict(y=y.detach(), x=gx, router=router, w1=w1, load=layer.router.load.clone())


@pytest.mark.parametrize(
    ("kind", "masked", "scale"), list(product(sorted(LOSSES), [False, True], [0.0, 1.0]))
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_of_a_grid_has_its_slice_of_one_process_gradient(
    grid: tuple[int, int, int], kind: str, masked: bool, scale: float
) -> None:
    x, valid = _batch()
    mask = valid if masked else None
    expected = _step(_build(LOSSES[kind]), x, mask, scale)
    assert expected["router"].abs().max() > 1e-3  # the loss is there without the main one

    def rank(me: int, door: SimulatedCollectives) -> dict[str, Tensor]:
        layer = _spread(_build(LOSSES[kind]), me, door, grid)
        part = None if mask is None else mask.chunk(8, 1)[me]
        return _step(layer, x.chunk(8, 1)[me], part, scale)

    results = SimulatedWorld(8).run(rank)
    for name in ("x", "y"):
        assert_close(torch.cat([r[name] for r in results], 1), expected[name])
    for name in ("router", "load"):
        assert_close(torch.stack([r[name] for r in results]).sum(0), expected[name])
    tp, ep, cp = grid
    by_place = [r["w1"] for r in results]
    blocks = [
        torch.stack([by_place[(t * ep + e) * cp + c] for t in range(tp) for c in range(cp)]).sum(0)
        for e in range(ep)
    ]
    assert_close(torch.cat(blocks), expected["w1"])


def test_valid_tokens_are_routed_as_if_the_others_were_not_there() -> None:
    x, valid = _batch()
    layer, seen = _build(LOSSES["balance"]), []
    layer.router.register_forward_hook(lambda _m, _x, out: seen.append(out))
    masked = layer(x, valid)
    alone = layer(x[valid])
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(masked[valid], alone)
    assert masked[~valid].count_nonzero() == 0
    masked.sum().backward()
    assert int(layer.router.load.sum()) == 2 * int(valid.sum())


def test_evaluation_adds_nothing_to_the_loads() -> None:
    layer = _build(LOSSES["balance"]).eval()
    x, _ = _batch()
    layer(x.requires_grad_()).sum().backward()
    assert layer.router.load.count_nonzero() == 0
    with torch.no_grad():
        layer.train()(x)
    assert layer.router.load.count_nonzero() == 0
