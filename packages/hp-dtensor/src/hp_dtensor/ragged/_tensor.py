"""Tensors whose ranks hold contiguous runs of unequal lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .._boxes import Box
from .._convert import AnyPlacement
from .._errors import LayoutError
from .._placements import RaggedShard
from .._torch import disabled_torch_function, wrap_full_states, wrapper_tensor
from ..collectives._interface import Collectives
from ._checkpoint import checkpointed, gathering, scattering
from ._ops import BINARY, check_all, described, mean, norm, run, total
from ._spec import RaggedSpec, find_spec

C = TypeVar("C", bound="type[RaggedTensor]")
# What works on a tensor's memory, of which a ragged tensor has none besides its part: torch would
# read and write at address 0, or name its own reasons.
_ON_MEMORY = (
    *("untyped_storage", "storage", "share_memory_", "is_shared", "apply_", "map_", "map2_"),
    *("__dlpack__", "__array__", "numpy", "tolist"),
)


def refuse_by_name(cls: C) -> C:
    """Let a tensor class without memory of its own tell what is wrong; return the class.

    torch takes a TypeError in an infix operator for an operand that is not its own, and Python then
    says no more than that there is no such operator.
    """
    for name in BINARY:
        setattr(cls, name, _explained(cls, name, getattr(Tensor, name)))
    for name in _ON_MEMORY:
        setattr(cls, name, _refusing(cls, name))
    return cls


def _explained(
    kind: "type[RaggedTensor]", name: str, method: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        result = method(self, other)
        if result is NotImplemented and isinstance(other, Tensor | int | float | complex):
            raise TypeError(
                f"{name} of {described(self, kind)} and {described(other, kind)}: ragged "
                "tensors have operators that act on each element alone, on operands of one "
                "layout, numbers and 0-dim tensors; redistribute to Replicate() or Shard(dim) "
                "first, or work on to_local()"
            )
        return result

    operate.__name__ = name
    return operate


def _refusing(kind: "type[RaggedTensor]", name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: object, **named: object) -> NoReturn:
        raise TypeError(
            f"{name} of {described(self, kind)}, which has no memory of its own; use that of "
            "to_local(), or full_tensor() for the whole tensor"
        )

    refuse.__name__ = name
    return refuse


def _boxes(x: "RaggedTensor") -> tuple[Box, ...]:
    if x.numel() == 0:
        # Nobody holds a box, but the tensor has a name that a load looks for.
        return (tuple((0, length) for length in x.shape),)
    return x._spec.boxes()


def _view(x: "RaggedTensor", corner: Sequence[int]) -> Tensor:
    return x._local.new_empty(x.shape) if x.numel() == 0 else x._spec.view(x._local, corner)


@refuse_by_name
@checkpointed(_boxes, _view)
class RaggedTensor(Tensor):
    """A tensor of which each coordinate of one mesh axis holds a run of its own length.

    Its shape is global; a rank's part is ``[sizes[i], ...]``, the later dims as other axes shard
    them, and may be empty. Operators that act on every element alone run on the parts and
    communicate nothing; their operands have one layout, or are numbers and plain 0-dim tensors.
    Random fills draw other values for every part, and `sum`, `mean` and `norm` reduce all elements
    to a number, so that modules reset their parameters. All others raise `TypeError`. So optimizers
    that update elements alone work, as does `clip_grad_norm_` of this package. Distributed
    checkpoints save and load it, also into other layouts.
    """

    _local: Tensor
    _spec: RaggedSpec
    __torch_function__ = disabled_torch_function()

    @staticmethod
    def __new__(cls, local: Tensor, spec: RaggedSpec) -> "RaggedTensor":
        """Return ``local`` as the part of this rank, without autograd; see `from_local`."""
        x = wrapper_tensor(cls, spec.shape, local)
        x._local = local
        x._spec = spec
        return x

    def __init__(self, local: Tensor, spec: RaggedSpec) -> None:
        super().__init__()

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        mesh: DeviceMesh,
        placements: Sequence[AnyPlacement],
        *,
        shape: Sequence[int],
    ) -> "RaggedTensor":
        """Return the tensor of which ``local`` is this rank's part, not copied.

        The gradient of ``local`` is this rank's part of the gradient. Communicates nothing.

        Args:
            local: This rank's part, ``[sizes[i], ...]``.
            mesh: Where the tensor is.
            placements: `RaggedShard` on one axis, ours or torch's `Replicate` or `Shard` on the
                others.
            shape: The global shape.

        Raises:
            LayoutError: Placements or sizes that do not fit, on every rank; a part of another
                shape, on this rank alone.
            MeshError: A rank that is not in the mesh.

        Example:
            >>> RaggedTensor.from_local(part, mesh, [RaggedShard((0,), (3, 5))], shape=(8, 4))
        """
        spec = find_spec(mesh, placements, shape)
        return _tensor_of(local, spec, spec.local_shape())

    def like(self, local: Tensor) -> "RaggedTensor":
        """Return the tensor in the layout of this one of which ``local`` is this rank's part.

        It is what `from_local` makes, ``local`` not copied and with its gradient, for a small part
        of the time: the layout is not checked again. Its dtype is that of ``local``. Communicates
        nothing. Raises `LayoutError` on a rank whose part has another shape.
        """
        return _tensor_of(local, self._spec, self._local.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh."""
        return self._spec.mesh

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement | RaggedShard, ...]:
        """Return a placement for each mesh axis: torch's, and ours where the tensor is ragged."""
        return self._spec.placements

    @property
    def data(self) -> Tensor:
        """Return the tensor without autograd; setting it replaces this rank's part.

        Raises `TypeError` for a tensor in another layout.
        """
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RaggedTensor) or value._spec != self._spec:
            raise TypeError(
                f"data of {self!r} set to {value!r}; set it to a RaggedTensor of the same layout, "
                "or use copy_"
            )
        # torch's setter replaces what it knows of, which is all but the part.
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local = value._local

    def to_local(self) -> Tensor:
        """Return this rank's part, not copied.

        Its gradient is this rank's part of the tensor's, the same on ranks that hold the same part.
        Communicates nothing.
        """
        if not torch.is_grad_enabled():
            return self._local
        if not self.requires_grad:
            return self._local.detach()
        local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, collectives: Collectives | None = None) -> Tensor:
        """Return the whole tensor on every rank of the mesh.

        Its gradient is the same on all ranks; each takes its part. Communicates what `redistribute`
        to `Replicate()` on all axes does.
        """
        # It makes ragged tensors too, so that it is imported where it is needed.
        from .._redistribute import redistribute

        return redistribute(self, collectives=collectives).to_local()

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the sum of all elements on every rank of the mesh, a plain 0-dim tensor.

        One all-reduce of a number over each set of ranks that divide the tensor; with a gradient.
        Raises `TypeError` for a sum over some dims.
        """
        check_all(self, "sum", dim, keepdim)
        return total(self, self.to_local(), dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the mean of all elements, as `sum`."""
        check_all(self, "mean", dim, keepdim)
        return mean(self, self.to_local(), dtype)

    def norm(
        self, p: Any = 2.0, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Tensor:
        """Return the norm of all elements, of an order above 0 or inf, as `sum`."""
        check_all(self, "norm", dim, keepdim)
        return norm(self, self.to_local(), 2.0 if p == "fro" else p, dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an elementwise operator on this rank's parts."""
        return run(RaggedTensor, func, tuple(args), kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RaggedTensor({self._local}, shape={list(self.shape)}, layout={self._spec.layout})"

    def __reduce_ex__(self, protocol: object) -> Any:
        spec = self._spec
        placements = [(p.dims, p.sizes) if p is spec.runs else p for p in spec.placements]
        trained = self.requires_grad, isinstance(self, nn.Parameter)
        return _rebuild, (self._local, spec.mesh, placements, spec.shape, *trained)


def _tensor_of(local: Tensor, spec: RaggedSpec, shape: Sequence[int]) -> RaggedTensor:
    if local.shape != shape:
        raise LayoutError(
            f"the local tensor has shape {list(local.shape)} where {spec.layout} of "
            f"{list(spec.shape)} on mesh {list(spec.mesh.shape)} gives rank {spec.position} of the "
            f"mesh {list(shape)}"
        )
    if not local.requires_grad:
        return RaggedTensor(local.detach(), spec)
    x: RaggedTensor = _FromLocal.apply(local, spec)  # type: ignore[no-untyped-call]
    return x


def _rebuild(
    local: Tensor,
    mesh: DeviceMesh,
    written: Sequence[Placement | tuple[tuple[int, ...], tuple[int, ...]]],
    shape: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
) -> RaggedTensor:
    placements = [RaggedShard(*p) if isinstance(p, tuple) else p for p in written]
    x = RaggedTensor(local, find_spec(mesh, placements, shape))
    if is_parameter:
        return cast(RaggedTensor, nn.Parameter(x, requires_grad))
    return cast(RaggedTensor, x.requires_grad_(requires_grad))


# A file that is not trusted may call it: it is given torch's own values, and checks the layout.
torch.serialization.add_safe_globals([_rebuild])


wrap_full_states(gathering(RaggedTensor), scattering(RaggedTensor))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: RaggedSpec) -> RaggedTensor:
        return RaggedTensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, *grads: RaggedTensor) -> tuple[Tensor, None]:
        return grads[0].to_local(), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: RaggedTensor) -> Tensor:
        ctx.spec = x._spec
        # As a view it cannot be written to, which the graph of x would not see.
        return x._local.view_as(x._local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        grad: RaggedTensor = _FromLocal.apply(grads[0].contiguous(), ctx.spec)  # type: ignore[no-untyped-call]
        return grad
