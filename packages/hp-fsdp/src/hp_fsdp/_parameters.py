"""One parameter's two faces: the sharded DTensor, and the tensor that modules compute with."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_dtensor import Collectives, concatenate_meshes, redistribute

from ._errors import MeshError
from ._torch import like, local_of, set_local, strided_shard

SHARDED_ATTRIBUTE = "_fully_shard_became"


@dataclass(frozen=True, slots=True)
class Owner:
    """A place where a parameter is registered; a tied parameter has several."""

    registry: dict[str, nn.Parameter | None]
    name: str

    def set(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here."""
        self.registry[self.name] = parameter

    def get(self) -> nn.Parameter | None:
        """Return what is registered here now."""
        return self.registry[self.name]


class ShardedParameter:
    """A parameter of a group. ``sharded`` keeps its identity for life: optimizers hold it."""

    def __init__(
        self, original: nn.Parameter, owners: Sequence[Owner], name: str, mesh: DeviceMesh
    ) -> None:
        """Work out where the parameter will lie; raises `MeshError` where it cannot."""
        self.name = name
        self.owners = tuple(owners)
        self.original = weakref.ref(original)
        self._own: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
        if isinstance(original, DTensor):
            self._own = (original.device_mesh, tuple(original.placements))
        self._mesh, self._placements = joint_layout(mesh, self._own, name)
        self._requires_grad = original.requires_grad
        self.shape = torch.Size(original.shape)
        self.stride = original.stride()
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    def note_original(self) -> None:
        """Note on the original that it was sharded: modules outside the unit may still have it."""
        original = self.original()
        if original is not None:
            vars(original)[SHARDED_ATTRIBUTE] = weakref.ref(self)

    @torch.no_grad()
    def build_sharded(self, local: Tensor) -> None:
        """Create the sharded face over ``local``, this rank's rows."""
        whole = DTensor.from_local(
            local,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
        self.sharded = nn.Parameter(whole, requires_grad=self._requires_grad)
        # from_local makes a view of the view; optimizers must write to the flat shard itself.
        set_local(cast(DTensor, self.sharded), local)

    @torch.no_grad()
    def build_unsharded(self, view: Tensor) -> None:
        """Create the unsharded face over ``view`` of the gathered output."""
        if self._own is not None:
            mesh, placements = self._own
            view = DTensor.from_local(
                view, mesh, placements, run_check=False, shape=self.shape, stride=self.stride
            )
        self.unsharded = nn.Parameter(view, requires_grad=self._requires_grad)

    def install_sharded(self) -> None:
        """Register the sharded face with the modules."""
        for owner in self.owners:
            owner.set(self.sharded)

    def install_unsharded(self) -> None:
        """Register the unsharded face with the modules."""
        if self.unsharded.requires_grad != self.sharded.requires_grad:
            self.unsharded.requires_grad_(self.sharded.requires_grad)
        for owner in self.owners:
            owner.set(self.unsharded)

    def _registered(self) -> nn.Parameter:
        """Return the sharded face, or what something else registered in its place."""
        for owner in self.owners:
            present = owner.get()
            if present is not None and present is not self.sharded:
                return present
        return self.sharded

    def in_place(self, view: Tensor) -> bool:
        """Return whether the sharded face is registered and its memory is ``view``."""
        face: Any = self.sharded
        for owner in self.owners:  # no generator: it runs for every parameter in every gather
            if owner.registry[owner.name] is not face:
                return False
        return local_of(face) is view

    def refusal(self) -> str | None:
        """Return why what is registered cannot be the sharded face; None if it can."""
        found: object = self._registered()
        if found is self.sharded:
            return None
        if not isinstance(found, DTensor):
            what = f"a plain tensor of shape {tuple(cast(Tensor, found).shape)}"
        elif (
            found.shape != self.shape
            or found.device_mesh != self._mesh
            or tuple(found.placements) != self._placements
        ):
            what = (
                f"a DTensor of shape {tuple(found.shape)}, placed {found.placements} on "
                f"{found.device_mesh}"
            )
        else:
            return None
        return (
            f"{self.name} was replaced by {what}; only a DTensor of shape {tuple(self.shape)}, "
            f"placed {self._placements} on {self._mesh}, can take its place"
        )

    def take_replacement(self) -> None:
        """Accept a parameter that something else registered in place of the sharded face."""
        self.sharded = self._registered()
        self.install_sharded()

    def local(self) -> Tensor:
        """Return this rank's rows of what is registered, where nothing is refused."""
        return local_of(cast(DTensor, self._registered()))

    def take_gradient(self, collectives: Collectives) -> Tensor:
        """Remove and return the unsharded gradient as a plain tensor; zeros where there is none.

        A DTensor is brought to the parameter's own placements first: a sum over the axes of its own
        mesh on which it is Partial, a redistribution where it is sharded otherwise.
        """
        gradient, self.unsharded.grad = self.unsharded.grad, None
        if gradient is None:
            face = self.unsharded
            return torch.zeros_like(local_of(face) if isinstance(face, DTensor) else face)
        if self._own is not None:
            laid_out = redistribute(cast(DTensor, gradient), self._own[1], collectives=collectives)
            return local_of(laid_out).contiguous()
        return gradient.contiguous()

    def add_gradient(self, local: Tensor) -> None:
        """Make ``local`` the sharded gradient, or add it to the one that is there."""
        present = self.sharded.grad
        if present is None:
            self.sharded.grad = like(cast(DTensor, self.sharded), local)
        else:
            local_of(cast(DTensor, present)).add_(local)


def sharded_from(candidate: nn.Parameter) -> ShardedParameter | None:
    """Return what ``candidate`` became when a unit that still lives was made of it."""
    noted = vars(candidate).get(SHARDED_ATTRIBUTE)
    return None if noted is None else cast("ShardedParameter | None", noted())


def joint_layout(
    data: DeviceMesh, own: tuple[DeviceMesh, tuple[Placement, ...]] | None, name: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return where a sharded parameter lies: data axes first, the last of them sharded over.

    ``own`` is the layout that it has already, if any; dim 0 is then cut by its axes first.
    """
    placements: list[Placement] = [Replicate()] * (data.ndim - 1) + [Shard(0)]
    if own is None:
        return data, tuple(placements)
    mesh, own_placements = own
    splits = 1
    for size, placement in zip(mesh.shape, own_placements, strict=True):
        splits *= size if placement.is_shard(0) else 1
    if splits > 1:
        placements[-1] = strided_shard(0, splits)
    return joint_mesh(data, mesh, name), (*placements, *own_placements)


def joint_mesh(data: DeviceMesh, own: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of a sharded parameter that lies on ``own`` already: data axes first."""
    data_names, own_names = data.mesh_dim_names, own.mesh_dim_names
    if not data_names or not own_names:
        raise MeshError(
            f"{name} is a DTensor on mesh {own}, to be sharded over {data}: both meshes need axis "
            "names, as submeshes of one root mesh have"
        )
    shared = sorted(set(data_names) & set(own_names))
    if shared:
        raise MeshError(
            f"{name} is a DTensor on a mesh with axes {list(own_names)}, which share {shared} with "
            f"the axes {list(data_names)} to shard over; place it on the other axes only"
        )
    try:
        return concatenate_meshes([data, own])
    except RuntimeError as error:
        raise MeshError(
            f"{name} lies on axes {list(own_names)}, which cannot be joined with "
            f"{list(data_names)}: both must be slices of one root mesh that do not overlap"
        ) from error
