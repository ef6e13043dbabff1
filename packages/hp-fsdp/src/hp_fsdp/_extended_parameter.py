"""A parameter that says itself what is gathered of it, and what to make of that."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._errors import InvalidParameterError, MeshError, ParameterError, StateError, shown
from ._parameters import Owner, ShardedParameter
from ._place import Place
from ._torch import is_extended, preserved_versions

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class ExtendedParameter(ShardedParameter):
    """A parameter of a tensor class with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    The unsharded face is what the second of them makes of the first gather. Later gathers write
    into it, because autograd may have saved it or a view of it.
    """

    def __init__(
        self, original: nn.Parameter, owners: Sequence[Owner], name: str, place: Place
    ) -> None:
        """Work out where the parameter will lie; raises `ParameterError` for other signatures."""
        super().__init__(original, owners, name, place)
        self._takes_all = _takes_all(original, name)
        self._shard_mesh = _shard_mesh(place.mesh, name)
        self._metadata: Any = None
        self._received = False

    def build_unsharded(self, view: Tensor) -> None:
        """Create an unsharded face that the next gather replaces."""
        self._received = False
        super().build_unsharded(view)

    def offer(self, policy: MixedPrecisionPolicy) -> list[Tensor]:
        """Return what to gather of this rank's rows; nothing is communicated."""
        given: tuple[Any, ...] = (self._shard_mesh,)
        if self._takes_all:
            given = (*given, self.shape, self.stride, self.owners[0].module, policy)
        inputs, self._metadata = cast(Any, self.part(self.sharded)).fsdp_pre_all_gather(*given)
        if not isinstance(inputs, tuple | list) or not all(isinstance(t, Tensor) for t in inputs):
            raise StateError(
                f"{_PRE} of {self.name} returned {shown(inputs)}; legal is a tuple of tensors and "
                "metadata"
            )
        return list(inputs)

    def receive(self, outputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor] | None:
        """Make the unsharded face of what was gathered, or write it into the one that is there.

        Return the tensors that a new face lies in; None where it is not new.
        """
        make = cast(Any, self.part(self.sharded)).fsdp_post_all_gather
        if self._received:
            with preserved_versions(self.unsharded):
                make(tuple(outputs), self._metadata, dtype, out=self.unsharded)
            return None
        whole, inner = make(tuple(outputs), self._metadata, dtype)
        before = self.unsharded
        super().build_unsharded(torch.as_strided(whole, self.shape, self.stride, 0))
        self.unsharded.grad = before.grad
        self._received = True
        return tuple(inner)

    def renew(self) -> None:
        """Make the unsharded face anew when the next gather arrives.

        What was saved for a backward from the face before must not be used any more: autograd then
        raises, as after a change in place.
        """
        increment_version(self.unsharded)
        self._received = False

    def no_gradient(self) -> Tensor:
        """Return plain zeros in place of an unsharded gradient."""
        face = self.unsharded
        return torch.zeros(self.shape, dtype=face.dtype, device=face.device)

    def refusal(self) -> str | None:
        """Return why what is registered cannot be the sharded face; None if it can."""
        found = self._registered()
        if self.fits(found) and not is_extended(self.part(found)):
            kind = type(self.part(self.sharded)).__name__
            return (
                f"{self.name} was replaced by a plain tensor; only a {kind} can take its place, so "
                "load it without assign=True"
            )
        return super().refusal()


def check_extension(original: nn.Parameter, name: str, dim: int | None, ragged: bool) -> None:
    """Raise `ParameterError` where a parameter that gathers itself cannot be cut as asked for."""
    if ragged or dim != 0:
        asked = (
            "in the ragged layout" if ragged else "kept whole" if dim is None else f"cut at {dim}"
        )
        raise ParameterError(
            f"{name} is of type {type(original).__name__}, which gathers itself ({_PRE}), and is "
            f"to be {asked}; only layout='exact' and Shard(0) are legal for it"
        )


def check_local(local: Tensor, name: str) -> None:
    """Raise `ParameterError` if this rank's rows have lost the class that gathers them."""
    if not is_extended(local):
        raise ParameterError(
            f"this rank's rows of {name} are a {type(local).__name__} without {_PRE}; slices, "
            "new_zeros and copy_ must keep the class"
        )


def _takes_all(original: nn.Parameter, name: str) -> bool:
    """Return whether the hook before gathering takes five arguments, not the mesh alone."""
    tensor: Any = original
    if not (hasattr(tensor, _PRE) and hasattr(tensor, _POST)):
        raise InvalidParameterError(f"{name} has one of {_PRE} and {_POST}; define both or none")
    signature = inspect.signature(tensor.fsdp_pre_all_gather)
    count = len(signature.parameters)
    if count not in (1, 5):
        raise InvalidParameterError(
            f"{_PRE} of {name} has the signature {signature}; legal are (mesh) and (mesh, "
            "outer_size, outer_stride, module, mp_policy)"
        )
    return count == 5


def _shard_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is None:
        raise MeshError(
            f"{name} gathers itself over the last axis of {mesh}, which needs axis names for that"
        )
    return mesh[names[-1]]
