"""Random meshes, shapes and layouts."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import hypothesis.strategies as st

from hp_dtensor import Layout, Partial, RaggedShard, Replicate, Shard, StridedShard

MESHES = [(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 1, 3), (2, 2, 2)]


class Case(NamedTuple):
    """Two layouts on one mesh and the shape of a tensor that goes from one to the other."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of both meshes, ascending."""
        both = (self.source, self.target)
        return sorted({rank for layout in both for rank in layout.ranks or range(layout.size)})


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn, mesh_shape: tuple[int, ...], ndim: int, ops: tuple[str, ...] = ()
) -> Layout:
    """Draw a layout, nested shards in any order; with ``ops`` some axes may be partial."""
    kinds: list[Replicate | Shard | Partial] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    kinds += [Partial(op) for op in ops]  # type: ignore[arg-type]
    placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh_shape)
    order = {}
    for dim in range(ndim):
        axes = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
        order[dim] = tuple(draw(st.permutations(axes)))
    return Layout(mesh_shape, placements, order)


@st.composite
def cases(draw: st.DrawFn, partial: bool = False, mesh: tuple[int, ...] | None = None) -> Case:
    """Draw a pair of layouts; with ``partial`` the source may be partial, the target keep it."""
    mesh_shape = draw(st.sampled_from(MESHES)) if mesh is None else mesh
    shape = draw(shapes)
    ops = (draw(st.sampled_from(["sum", "avg", "max", "min", "prod"])),) if partial else ()
    source = draw(layouts(mesh_shape, len(shape), ops))
    target = draw(layouts(mesh_shape, len(shape)))
    placements = list(target.placements)
    for axis, placement in enumerate(source.placements):
        if isinstance(placement, Partial) and draw(st.booleans()):
            placements[axis] = placement
    if placements != list(target.placements):
        target = Layout(mesh_shape, tuple(placements))
    return Case(source, target, shape)


@st.composite
def free_layouts(
    draw: st.DrawFn,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    ranks: Sequence[int] | None = None,
) -> Layout:
    """Draw a layout of any kind without partial values: strided, ragged, any order, any ranks."""
    ndim = len(shape)
    placements: list[Replicate | Shard | StridedShard | RaggedShard | Partial] = []
    for _ in mesh_shape:
        dim = draw(st.integers(-1, ndim - 1))
        if dim < 0:
            placements.append(Replicate())
        elif draw(st.integers(0, 3)):
            placements.append(Shard(dim))
        else:
            placements.append(StridedShard(dim, draw(st.integers(1, 5))))
    order = {}
    for dim in range(ndim):
        axes = [
            axis
            for axis, p in enumerate(placements)
            if isinstance(p, Shard | StridedShard) and p.dim == dim
        ]
        if draw(st.booleans()):
            order[dim] = tuple(draw(st.permutations(axes)))
    layout = Layout(mesh_shape, tuple(placements), order, ranks)
    if not ndim or draw(st.integers(0, 2)):
        return layout
    return draw(made_ragged(layout, shape))


@st.composite
def made_ragged(draw: st.DrawFn, layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Draw ragged runs on one axis. Other axes do not shard the runs' dims unevenly."""
    axis = draw(st.integers(0, len(layout.mesh_shape) - 1))
    dims = tuple(range(draw(st.integers(1, len(shape)))))
    placements = list(layout.placements)
    placements[axis] = Replicate()
    for other, p in enumerate(placements):
        if isinstance(p, Shard | StridedShard) and p.dim in dims:
            even = shape[p.dim] % math.prod(layout.degrees(p.dim)) == 0
            placements[other] = Shard(p.dim) if even else Replicate()
    count = math.prod(shape[dim] for dim in dims)
    for p, degree in zip(placements, layout.mesh_shape, strict=True):
        if isinstance(p, Shard) and p.dim in dims:
            count //= degree
    cuts = sorted(
        draw(
            st.lists(
                st.integers(0, count),
                min_size=layout.mesh_shape[axis] - 1,
                max_size=layout.mesh_shape[axis] - 1,
            )
        )
    )
    sizes = [hi - lo for lo, hi in pairwise([0, *cuts, count])]
    placements[axis] = RaggedShard(dims, tuple(sizes))
    return Layout(layout.mesh_shape, tuple(placements), None, layout.ranks)


@st.composite
def free_cases(draw: st.DrawFn, world: int = 10, one_mesh: bool = False) -> Case:
    """Draw a pair of layouts of any kind, on one mesh or on two of a world's ranks."""
    shape = draw(shapes)
    layouts: list[Layout] = []
    for side in range(2):
        if side and (one_mesh or not draw(st.integers(0, 3))):
            mesh, ranks = layouts[0].mesh_shape, layouts[0].ranks
        else:
            mesh = draw(st.sampled_from([m for m in MESHES if math.prod(m) <= world]))
            ranks = None
            if not one_mesh and draw(st.booleans()):
                ranks = tuple(draw(st.permutations(range(world)))[: math.prod(mesh)])
        layouts.append(draw(free_layouts(mesh, shape, ranks)))
    return Case(layouts[0], layouts[1], shape)
