"""Random meshes, shapes and layouts."""

from typing import NamedTuple

import hypothesis.strategies as st

from hp_dtensor import Layout, Partial, Replicate, Shard

MESHES = [(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 1, 3), (2, 2, 2)]


class Case(NamedTuple):
    """Two layouts on one mesh and the shape of a tensor that goes from one to the other."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """Return the mesh's ranks."""
        return range(self.source.size)


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
