"""The steps that plans are made of, what each receives and holds, and walks of one-axis steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ._layout import Layout, volume
from ._placements import Placement, Replicate, Shard
from ._transfer import plan_transfer

Kind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of layout: a local slice, or one collective over the mesh axes ``axes``.

    ``all_gather`` and ``all_to_all`` move equal parts over one axis; ``direct`` sends every rank
    exactly what it lacks, over any axes and with any sizes.
    """

    kind: Kind
    axes: tuple[int, ...]
    source: Layout
    target: Layout

    def received(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return how many bytes ``rank`` receives from others; an all-reduce as bandwidth-optimal.

        The count is that of `RecordingCollectives`.
        """
        if self.kind == "slice" or 0 in shape:
            return 0
        if self.kind == "direct":
            moved = plan_transfer(self.source, self.target, shape, rank)
            return sum(volume(box) for _, box in moved.recvs) * itemsize
        held = math.prod(self.source.local_shape(shape, rank)) * itemsize
        others = self.ranks - 1
        if self.kind == "all_gather":
            return others * held
        if self.kind == "reduce_scatter":
            return others * math.prod(self.target.local_shape(shape, rank)) * itemsize
        if self.kind == "all_reduce":
            return 2 * held * others // self.ranks
        return held * others // self.ranks

    def peak(self, shape: Sequence[int], rank: int) -> int:
        """Return how many elements are alive at once: input, output and buffers between them."""
        held = math.prod(self.source.local_shape(shape, rank))
        result = math.prod(self.target.local_shape(shape, rank))
        if self.kind in ("slice", "all_reduce"):
            return held + result
        if self.kind == "direct":
            return 2 * (held + result)
        return held + result + max(held, result)

    @property
    def ranks(self) -> int:
        """Return how many ranks take part in the step's collective."""
        return math.prod(self.target.mesh_shape[axis] for axis in self.axes)

    def __str__(self) -> str:
        over = f" over axes {self.axes}" if self.axes else ""
        return f"{self.kind}{over}: {self.source} -> {self.target}"


def direct_step(src: Layout, dst: Layout, ndim: int) -> Step:
    """Return the one step that moves every missing element straight to where it is needed."""
    return Step(kind="direct", axes=moving_axes(src, dst, ndim), source=src, target=dst)


def moving_axes(src: Layout, dst: Layout, ndim: int) -> tuple[int, ...]:
    """Return the axes on which senders and receivers of `plan_transfer` can differ."""
    still = set()
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        kept = not isinstance(old, Shard) and old == new
        near = isinstance(old, Replicate) and isinstance(new, Shard) and not src.chain(new.dim)
        if kept or near or src.mesh_shape[axis] == 1:
            still.add(axis)
    for dim in range(ndim):
        still.update(_common(src.chain(dim), dst.chain(dim)))
    return tuple(a for a in range(len(src.mesh_shape)) if a not in still)


def is_local(src: Layout, dst: Layout, ndim: int) -> bool:
    """Return whether every rank holds all that it needs, whatever the shape."""
    return all(dst.chain(dim)[: len(src.chain(dim))] == src.chain(dim) for dim in range(ndim))


def single_axis_steps(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[Step]:
    """Return steps over one axis each that end in ``dst``.

    Slice as soon as possible, move an axis to its place where it is next in turn, gather it
    otherwise. Partial axes stay as they are.
    """
    steps: list[Step] = []
    here = src
    while True:
        step = _slice(here, dst, shape) or _move(here, dst, shape) or _gather(here, dst, shape)
        if step is None:
            return steps
        steps.append(step)
        here = step.target


def reduce_step(src: Layout, axis: int, dim: int | None) -> Step:
    """Return the step that reduces a partial axis, onto shards of ``dim`` or onto every rank."""
    if dim is None:
        placements: list[Placement] = list(src.placements)
        placements[axis] = Replicate()
        target = Layout(src.mesh_shape, tuple(placements), src.shard_order, src.ranks)
        return Step(kind="all_reduce", axes=(axis,), source=src, target=target)
    target = _extended(src, dim, axis)
    return Step(kind="reduce_scatter", axes=(axis,), source=src, target=target)


def slice_step(src: Layout, dim: int, axis: int) -> Step:
    """Return the step that keeps this coordinate's chunk of ``dim`` on a replicated axis."""
    return Step(kind="slice", axes=(), source=src, target=_extended(src, dim, axis))


def merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps with each run of slices made one."""
    result: list[Step] = []
    for step in steps:
        if result and step.kind == "slice" == result[-1].kind:
            step = Step(kind="slice", axes=(), source=result.pop().source, target=step.target)
        result.append(step)
    return tuple(result)


def replicated(layout: Layout) -> Layout:
    """Return the layout with axes of degree one, which mean nothing, replicated."""
    if 1 not in layout.mesh_shape:
        return layout
    placements = tuple(
        Replicate() if degree == 1 else placement
        for degree, placement in zip(layout.mesh_shape, layout.placements, strict=True)
    )
    dims = {p.dim for p in placements if isinstance(p, Shard)}
    order = {
        dim: [axis for axis in layout.chain(dim) if layout.mesh_shape[axis] > 1] for dim in dims
    }
    return Layout(layout.mesh_shape, placements, order, layout.ranks)


def _slice(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have, want = here.chain(dim), dst.chain(dim)
        if want[: len(have)] == have and len(want) > len(have):
            axis = want[len(have)]
            if isinstance(here.placements[axis], Replicate):
                return slice_step(here, dim, axis)
    return None


def _move(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have = here.chain(dim)
        if len(_common(have, dst.chain(dim))) == len(have):
            continue
        axis = have[-1]
        new = dst.placements[axis]
        if not isinstance(new, Shard) or new.dim == dim:
            continue
        want, there = dst.chain(new.dim), here.chain(new.dim)
        if want[: len(there)] == there and want[len(there) : len(there) + 1] == (axis,):
            target = _extended(_shortened(here, dim), new.dim, axis)
            even = here.is_even(shape) and target.is_even(shape)
            return Step(
                kind="all_to_all" if even else "direct", axes=(axis,), source=here, target=target
            )
    return None


def _gather(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have = here.chain(dim)
        if len(_common(have, dst.chain(dim))) < len(have):
            kind: Kind = "all_gather" if here.is_even(shape) else "direct"
            return Step(kind=kind, axes=(have[-1],), source=here, target=_shortened(here, dim))
    return None


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]


def _chains(layout: Layout) -> dict[int, tuple[int, ...]]:
    dims = {p.dim for p in layout.placements if isinstance(p, Shard)}
    return {dim: layout.chain(dim) for dim in dims}


def _extended(layout: Layout, dim: int, axis: int) -> Layout:
    chains = _chains(layout)
    chains[dim] = (*chains.get(dim, ()), axis)
    return layout.with_chains(chains)


def _shortened(layout: Layout, dim: int) -> Layout:
    chains = _chains(layout)
    chains[dim] = chains[dim][:-1]
    return layout.with_chains(chains)
