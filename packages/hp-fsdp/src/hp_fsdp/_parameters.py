"""One parameter's two faces: the sharded DTensor, and the tensor that modules compute with."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_dtensor import Axis, Collectives, concatenate_meshes

from ._errors import MeshError, ParameterError
from ._torch import like, local_of, set_local, strided_shard


@dataclass(frozen=True, slots=True)
class Owner:
    """A place where a parameter is registered; a tied parameter has several."""

    module: nn.Module
    name: str

    def set(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here, past the checks of ``Module.__setattr__``."""
        self.module._parameters[self.name] = parameter

    def get(self) -> nn.Parameter | None:
        """Return what is registered here now."""
        return self.module._parameters[self.name]


class ShardedParameter:
    """A parameter of a group. ``sharded`` keeps its identity for life: optimizers hold it."""

    def __init__(self, original: nn.Parameter, owners: Sequence[Owner], name: str) -> None:
        self.name = name
        self.owners = tuple(owners)
        self.original = weakref.ref(original)
        self._own: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
        if isinstance(original, DTensor):
            self._own = (original.device_mesh, tuple(original.placements))
        self._requires_grad = original.requires_grad
        self.shape = torch.Size(original.shape)
        self.stride = original.stride()
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    @torch.no_grad()
    def build_sharded(self, local: Tensor, mesh: DeviceMesh) -> None:
        """Create the sharded face over ``local``, this rank's rows, and register it."""
        placements = data_placements(mesh)
        if self._own is not None:
            own_mesh, own_placements = self._own
            splits = 1
            for size, placement in zip(own_mesh.shape, own_placements, strict=True):
                splits *= size if placement.is_shard(0) else 1
            if splits > 1:
                placements[-1] = strided_shard(0, splits)
            placements += own_placements
            mesh = joint_mesh(mesh, own_mesh, self.name)
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=self.shape, stride=self.stride
        )
        self.sharded = nn.Parameter(whole, requires_grad=self._requires_grad)
        # from_local makes a view of the view; optimizers must write to the flat shard itself.
        set_local(cast(DTensor, self.sharded), local)
        self.install_sharded()

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

    def take_replacement(self) -> None:
        """Accept a parameter that something else registered in place of the sharded face."""
        registered = [owner.get() for owner in self.owners]
        replaced = [p for p in registered if p is not None and p is not self.sharded]
        if replaced:
            if not isinstance(replaced[0], DTensor) or replaced[0].shape != self.shape:
                raise ParameterError(
                    f"{self.name} was replaced by {type(replaced[0]).__name__} of shape "
                    f"{tuple(replaced[0].shape)}; only a DTensor of shape {tuple(self.shape)}, "
                    "placed as before, can take a sharded parameter's place"
                )
            self.sharded = replaced[0]
            self.install_sharded()

    def local(self) -> Tensor:
        """Return this rank's rows: a view of the group's flat shard."""
        return local_of(cast(DTensor, self.sharded))

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
            return own_layout(cast(DTensor, gradient), self._own[1], collectives).contiguous()
        return gradient.contiguous()

    def add_gradient(self, local: Tensor) -> None:
        """Make ``local`` the sharded gradient, or add it to the one that is there."""
        present = self.sharded.grad
        if present is None:
            self.sharded.grad = like(cast(DTensor, self.sharded), local)
        else:
            local_of(cast(DTensor, present)).add_(local)


def data_placements(mesh: DeviceMesh) -> list[Placement]:
    """Return the placements over FSDP's axes: sharded over the last, replicated over the first."""
    return [Replicate()] * (mesh.ndim - 1) + [Shard(0)]


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


def own_layout(
    gradient: DTensor, placements: Sequence[Placement], collectives: Collectives
) -> Tensor:
    """Return the local part of ``gradient`` in ``placements``, with sums through ``collectives``.

    One all-reduce for every axis that is Partial(sum) in the gradient and Replicate in the target;
    what else differs is left to torch's redistribute.
    """
    mesh, now, local = gradient.device_mesh, list(gradient.placements), local_of(gradient)
    for position, (present, target) in enumerate(zip(now, placements, strict=True)):
        partial = isinstance(present, Partial) and present.reduce_op == "sum"
        if partial and isinstance(target, Replicate):
            (local,) = collectives.all_reduce(Axis.of(mesh, position), [local.clone()]).wait()
            now[position] = target
    if now == list(placements):
        return local
    summed = DTensor.from_local(
        local, mesh, now, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )
    return local_of(summed.redistribute(placements=list(placements)))
