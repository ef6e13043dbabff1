"""The layout of a ragged tensor, and what this rank holds of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .._boxes import Box, extent, place_in, ravel
from .._convert import AnyPlacement, to_layout, to_torch
from .._errors import LayoutError, MeshError
from .._layout import Layout
from .._placements import RaggedShard, Replicate, StridedShard, in_tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSpec:
    """A mesh, a layout over it whose axis ``axis`` holds the runs ``runs``, and a global shape.

    The frame is what the coordinates of that axis hold together: one box.
    """

    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...]
    axis: int
    runs: RaggedShard
    # The layout of the frames, which replicates on the ragged axis; its placements with the runs.
    frame: Layout = field(init=False, repr=False, compare=False)
    placements: tuple[Placement | RaggedShard, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ours, at = self.layout.placements, self.axis
        frame = replace(self.layout, placements=(*ours[:at], Replicate(), *ours[at + 1 :]))
        object.__setattr__(self, "frame", frame)
        torchs = to_torch(frame)
        object.__setattr__(self, "placements", (*torchs[:at], self.runs, *torchs[at + 1 :]))

    def on(self, mesh: DeviceMesh | None) -> "RaggedSpec":
        """Return the same on an equal mesh; on None it is of use for another `on` alone."""
        made = object.__new__(RaggedSpec)
        for name in ("layout", "shape", "axis", "runs", "frame", "placements"):
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "mesh", mesh)
        return made

    def __deepcopy__(self, memo: object) -> "RaggedSpec":
        # A mesh stands for running processes: a copied tensor is on the same one.
        return self

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Return this rank's coordinate; raises `MeshError`."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(
                f"this rank is not in {self.mesh}, so it holds nothing of the tensor; its ranks: "
                f"{self.mesh.mesh.flatten().tolist()}; a NonMember stands for the tensor here"
            )
        return tuple(coordinate)

    @property
    def position(self) -> int:
        """Return this rank's row-major position in the mesh."""
        return ravel(self.coordinate, self.layout.mesh_shape)

    @property
    def frame_box(self) -> Box:
        """Return the box of this rank's frame."""
        return self.frame.box_at(self.shape, self.coordinate)

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return self.layout.local_shape(self.shape, self.position)

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes that this rank holds, none of them empty."""
        return self.layout.boxes(self.shape, self.position)

    def view(self, part: Tensor, corner: Sequence[int]) -> Tensor:
        """Return the view, in this rank's part, of the box of `boxes` that starts at ``corner``."""
        box = next(box for box in self.boxes() if [lo for lo, _ in box] == list(corner))
        count = len(self.runs.dims)
        start, _ = self.layout.run_at(self.coordinate)
        first = place_in(self.frame_box[:count], corner[:count]) - start
        lengths = extent(box)
        return part[first : first + math.prod(lengths[:count])].view(lengths)


def find_spec(
    mesh: DeviceMesh, placements: Sequence[AnyPlacement], shape: Sequence[int]
) -> RaggedSpec:
    """Return the spec of a tensor of a global ``shape``; ``placements`` may be ours or torch's.

    Raises `LayoutError` unless one axis is ragged and the others replicate or shard, and
    what a `Layout` raises that does not fit the mesh or the shape.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"a ragged tensor is on a DeviceMesh, got {mesh!r}; make one with init_device_mesh"
        )
    layout = to_layout(in_tuple(placements), tuple(mesh.shape), len(shape))
    found = layout.ragged
    if found is None or layout.has_partial:
        raise LayoutError(
            f"a ragged tensor has RaggedShard(dims, sizes) on one mesh axis and Replicate() or "
            f"Shard(dim) on the others, got {layout}; make other tensors with DTensor.from_local"
        )
    axis, runs = found
    layout.check_shape(shape)
    if any(isinstance(placement, StridedShard) for placement in layout.placements):
        raise LayoutError(
            f"a ragged tensor divides frames of one box each, got {layout}; use Shard(dim) for "
            "StridedShard on the other axes"
        )
    return RaggedSpec(mesh=mesh, layout=layout, shape=tuple(shape), axis=axis, runs=runs)
