"""`RaggedSpec`: the mesh, layout and global shape of a `RaggedTensor`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .._boxes import Box, ravel
from .._convert import AnyPlacement, to_layout, to_torch
from .._errors import LayoutError, MeshError
from .._execute import LocalView
from .._layout import Layout, with_placement
from .._placements import RaggedShard, Replicate, StridedShard, in_tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSpec:
    """Mesh, layout and global shape of a `RaggedTensor`.

    Attributes:
        mesh: Device mesh of the tensor.
        layout: Layout with a `RaggedShard` on one mesh axis, and `Replicate` or `Shard` on the
            other axes.
        shape: Global shape.
        placements: One placement for each mesh axis: the `RaggedShard`, and torch's ``Replicate``
            or ``Shard`` on the other axes. Computed from ``layout``.

    Raises:
        LayoutError: ``layout`` has no `RaggedShard`. Or it has another placement than
            `RaggedShard`, `Replicate` and `Shard`. Or a tensor of this shape cannot have this
            layout.
    """

    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...]
    placements: tuple[Placement | RaggedShard, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout, found = self.layout, self.layout.ragged
        if found is None or layout.has_partial:
            raise LayoutError(
                "a ragged tensor has RaggedShard(dims, sizes) on one mesh axis and Replicate() or "
                f"Shard(dim) on the others, got {layout}; make other tensors with "
                "DTensor.from_local"
            )
        layout.check_shape(self.shape)
        if any(isinstance(placement, StridedShard) for placement in layout.placements):
            raise LayoutError(
                "the other axes of a ragged tensor must leave one box to each rank, got "
                f"{layout}; use Shard(dim) instead of StridedShard"
            )
        axis, runs = found
        others = to_torch(with_placement(layout, axis, Replicate()))
        object.__setattr__(self, "placements", (*others[:axis], runs, *others[axis + 1 :]))

    def on(self, mesh: DeviceMesh | None) -> "RaggedSpec":
        """Return a copy of this spec with another mesh object.

        Args:
            mesh: A mesh equal to the mesh of this spec. Equality is not checked. If it is None, the
                copy has no mesh, so that a cache can store it without keeping a mesh alive. Before
                such a copy is used, call `on` again with a mesh.
        """
        made = object.__new__(RaggedSpec)
        for name in ("layout", "shape", "placements"):
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "mesh", mesh)
        return made

    def __deepcopy__(self, memo: object) -> "RaggedSpec":
        # A mesh has process groups, which cannot be copied, so copies of a tensor share the mesh.
        return self

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Coordinate of this rank on each mesh axis.

        Raises:
            MeshError: This rank is not in the mesh.
        """
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(
                f"this rank is not in {self.mesh}, so it has no part of the tensor; its ranks: "
                f"{self.mesh.mesh.flatten().tolist()}; use a NonMember on this rank"
            )
        return tuple(coordinate)

    @property
    def position(self) -> int:
        """Row-major position of this rank in the mesh, from 0."""
        return ravel(self.coordinate, self.layout.mesh_shape)

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's local tensor."""
        return self.layout.local_shape(self.shape, self.position)

    def check_local(self, local: Tensor, shape: Sequence[int]) -> None:
        """Raise `LayoutError` if ``local`` does not have the expected local shape, ``shape``."""
        if local.shape != shape:
            raise LayoutError(
                f"the local tensor has shape {list(local.shape)} where {self.layout} of "
                f"{list(self.shape)} on mesh {list(self.mesh.shape)} gives rank {self.position} of "
                f"the mesh {list(shape)}"
            )

    def local_part(self, full: Tensor) -> Tensor:
        """Return a new local tensor: a copy of this rank's part of the whole tensor ``full``."""
        local = full.new_empty(self.local_shape())
        for box, view in box_views(self.layout, self.shape, self.coordinate, local):
            view.copy_(full[tuple(slice(lo, hi) for lo, hi in box)])
        return local


def find_spec(
    mesh: DeviceMesh, placements: Sequence[AnyPlacement], shape: Sequence[int]
) -> RaggedSpec:
    """Return the `RaggedSpec` for placements on a mesh.

    Args:
        mesh: Device mesh.
        placements: One placement for each mesh axis. The placements may be classes of this package
            or of torch.
        shape: Global shape.

    Raises:
        LayoutError: ``mesh`` is not a DeviceMesh. Or the number of placements is not the number of
            mesh axes. Or a ragged tensor of this shape cannot have these placements.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"a ragged tensor is on a DeviceMesh, got {mesh!r}; make one with init_device_mesh"
        )
    layout = to_layout(in_tuple(placements), tuple(mesh.shape), len(shape))
    return RaggedSpec(mesh=mesh, layout=layout, shape=tuple(shape))


def box_views(
    layout: Layout, shape: Sequence[int], coordinate: Sequence[int], local: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box that a rank holds, with a view of the elements in the box.

    A box is a rectangular region of the tensor: one half-open range ``(lo, hi)`` of global indices
    for each dim.

    Args:
        layout: Layout of the tensor.
        shape: Global shape.
        coordinate: Coordinate of the rank in the mesh.
        local: Local tensor of the rank.

    Yields:
        Pairs ``(box, view)``. The box has at least one element. ``view`` is a view of ``local``
        with the shape of the box.
    """
    views = LocalView(layout, shape, coordinate)
    for box in layout.boxes_at(shape, coordinate):
        if all(lo < hi for lo, hi in box):
            yield box, views.view(box)(local)
