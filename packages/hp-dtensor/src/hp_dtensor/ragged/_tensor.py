"""Tensors whose ranks hold contiguous runs of unequal lengths, also in distributed checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .._boxes import Box, ravel
from .._convert import AnyPlacement, to_layout, to_torch
from .._errors import LayoutError, MeshError
from .._execute import LocalView
from .._layout import Layout, with_placement
from .._placements import RaggedShard, Replicate, StridedShard, in_tuple
from .._torch import CHECKPOINT_HOOKS, disabled_torch_function, wrap_full_states, wrapper_tensor
from ..collectives._interface import Collectives
from ._ops import BINARY, check_all, described, mean, norm, run, total

C = TypeVar("C", bound=type)
R = TypeVar("R", bound="type[RaggedTensor]")
# What works on a tensor's memory, of which a ragged tensor has none besides its part: torch would
# read and write at address 0, or name its own reasons.
_ON_MEMORY = (
    *("untyped_storage", "storage", "share_memory_", "is_shared", "apply_", "map_", "map2_"),
    *("__dlpack__", "__array__", "numpy", "tolist"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedSpec:
    """A mesh, a layout over it with one ragged axis, and a global shape.

    ``placements`` are torch's, with ours on the ragged axis. Raises `LayoutError` unless the layout
    has such an axis, fits the shape, and replicates or shards on the other axes.
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
                f"a ragged tensor divides frames of one box each, got {layout}; use Shard(dim) for "
                "StridedShard on the other axes"
            )
        axis, runs = found
        torchs = to_torch(with_placement(layout, axis, Replicate()))
        object.__setattr__(self, "placements", (*torchs[:axis], runs, *torchs[axis + 1 :]))

    def on(self, mesh: DeviceMesh | None) -> "RaggedSpec":
        """Return the same on an equal mesh; on None it is of use for another `on` alone."""
        made = object.__new__(RaggedSpec)
        for name in ("layout", "shape", "placements"):
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

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return self.layout.local_shape(self.shape, self.position)

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes that this rank holds, none of them empty."""
        return self.layout.boxes(self.shape, self.position)

    def view(self, part: Tensor, corner: Sequence[int]) -> Tensor:
        """Return the view, in this rank's part, of the box of `boxes` that starts at ``corner``."""
        box = next(box for box in self.boxes() if [lo for lo, _ in box] == list(corner))
        return LocalView(self.layout, self.shape, self.coordinate).view(box)(part)


def find_spec(
    mesh: DeviceMesh, placements: Sequence[AnyPlacement], shape: Sequence[int]
) -> RaggedSpec:
    """Return the spec of a tensor of a global ``shape``; ``placements`` may be ours or torch's.

    Raises what a `RaggedSpec` and a `Layout` raise that do not fit the mesh or the shape.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"a ragged tensor is on a DeviceMesh, got {mesh!r}; make one with init_device_mesh"
        )
    layout = to_layout(in_tuple(placements), tuple(mesh.shape), len(shape))
    return RaggedSpec(mesh=mesh, layout=layout, shape=tuple(shape))


def refuse_by_name(cls: R) -> R:
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


def checkpointed(
    boxes: Callable[[Any], Sequence[Box]], view: Callable[[Any, Sequence[int]], Tensor]
) -> Callable[[C], C]:
    """Return a class decorator that lets a distributed checkpoint save and load objects in pieces.

    ``boxes(x)`` are the boxes that this rank holds of ``x``, of which none is empty unless all of
    ``x`` is; ``view(x, start)`` is the data of the box that starts there, which a load overwrites.
    Objects have a global ``shape`` and a ``dtype``. A checkpoint keeps boxes and no layout, so that
    what was saved in one layout loads into any other. Communicates nothing.
    """

    def chunks(x: Any) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([lo for lo, _ in box]),
                sizes=torch.Size([hi - lo for lo, hi in box]),
            )
            for box in boxes(x)
        ]

    def items(x: Any, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=x.dtype)
        size = torch.Size(x.shape)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in chunks(x)
        ]

    def data(x: Any, index: MetadataIndex) -> Tensor:
        return view(x, index.offset or ())

    def decorate(cls: C) -> C:
        for name, hook in zip(CHECKPOINT_HOOKS, (items, chunks, data), strict=True):
            setattr(cls, name, hook)
        return cls

    return decorate


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
    """A distributed tensor that a `RaggedShard` splits unevenly over one mesh axis.

    `redistribute`, `distribute_tensor` and `RaggedTensor.from_local` create such tensors. ``shape``
    is the global shape. The local tensor of the rank with coordinate ``i`` on the ragged axis has
    the shape ``[sizes[i], ...]`` and can be empty. Other axes can shard the later dims.

    - Elementwise operators run on the local tensors and communicate nothing. Operands have to be
      ragged tensors of the same layout, numbers or plain scalar tensors. Optimizers with
      elementwise updates therefore work.
    - Random fills draw different values on each rank.
    - `sum`, `mean` and `norm` reduce all elements to one number.
    - All other operators raise TypeError.
    - A distributed checkpoint can save a ragged tensor, and load it in another layout.

    Args:
        local: Local tensor of this rank.
        spec: Mesh, placements and global shape.

    Examples:
        On 2 ranks:

        >>> mesh = init_device_mesh("cpu", (2,))
        >>> x = distribute_tensor(torch.ones(8, 4), mesh, [RaggedShard((0,), (3, 5))])
        >>> x.shape, x.sum()
        (torch.Size([8, 4]), tensor(32.))
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
        """Create a ragged tensor from the local tensors of all ranks. Communicates nothing.

        In backward, the gradient of ``local`` is this rank's part of the ragged tensor's gradient.

        Args:
            local: Local tensor of this rank, ``[sizes[i], ...]``. ``sizes`` is the field of the
                `RaggedShard`; ``i`` is this rank's coordinate on the axis of the `RaggedShard`.
            mesh: Device mesh.
            placements: One placement for each mesh axis: `RaggedShard` on one axis, `Replicate` or
                `Shard` on the others.
            shape: Global shape.

        Returns:
            The ragged tensor. It shares memory with ``local``.

        Raises:
            LayoutError: ``mesh`` is not a device mesh; ``placements`` has no `RaggedShard`, or a
                placement other than these; or a tensor of this shape cannot have these placements.
                Raised on every rank. If ``local`` has a wrong shape, only this rank raises.
            MeshError: This rank is not in the mesh.

        Examples:
            On 2 ranks:

            >>> mesh = init_device_mesh("cpu", (2,))
            >>> part = torch.ones((3, 5)[mesh.get_rank()], 4)
            >>> RaggedTensor.from_local(part, mesh, [RaggedShard((0,), (3, 5))], shape=(8, 4)).shape
            torch.Size([8, 4])
        """
        spec = find_spec(mesh, placements, shape)
        return _tensor_of(local, spec, spec.local_shape())

    def like(self, local: Tensor) -> "RaggedTensor":
        """Create a ragged tensor with the layout of this one. Communicates nothing.

        This method is faster than `from_local`, because the layout is not checked again.

        Args:
            local: Local tensor of the new ragged tensor, with the same shape as the local tensor of
                this one. The dtype may differ.

        Returns:
            The ragged tensor. It shares memory with ``local``.

        Raises:
            LayoutError: ``local`` has a wrong shape. Raised on this rank only.
        """
        return _tensor_of(local, self._spec, self._local.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Device mesh of the tensor."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement | RaggedShard, ...]:
        """One placement for each mesh axis: one `RaggedShard`; all others are of torch."""
        return self._spec.placements

    @property
    def data(self) -> Tensor:
        """The tensor without autograd history. An assignment replaces the local tensor.

        Raises:
            TypeError: The assigned value is not a `RaggedTensor` of the same layout.
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

    # No function of Python: what holds many asks all of them in every step.
    local: ClassVar[Any] = property(
        attrgetter("_local"), doc="This rank's part itself, without autograd; to read only."
    )

    def to_local(self) -> Tensor:
        """Return the local tensor of this rank without a copy. Communicates nothing.

        In backward, the gradient of the result is taken as this rank's part of the ragged tensor's
        gradient. Ranks that hold the same part have to compute the same gradient.

        Returns:
            A plain tensor, ``[sizes[i], ...]``. ``sizes`` is the field of the `RaggedShard`; ``i``
            is this rank's coordinate on the axis of the `RaggedShard`.
        """
        if not torch.is_grad_enabled():
            return self._local
        if not self.requires_grad:
            return self._local.detach()
        local: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
        return local

    def full_tensor(self, *, collectives: Collectives | None = None) -> Tensor:
        """Return the whole tensor on every rank.

        Communicates like `redistribute` to `Replicate` on all axes. In backward, all ranks have to
        compute the same gradient of the result. Each rank keeps its part of this gradient.

        Args:
            collectives: `Collectives` that communicate. Defaults to `TorchCollectives`.

        Returns:
            A plain tensor with the global shape.
        """
        # It makes ragged tensors too, so that it is imported where it is needed.
        from .._redistribute import redistribute

        return redistribute(self, collectives=collectives).to_local()

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the sum of all elements. Differentiable.

        Communicates one all-reduce of one number over each mesh axis that splits the tensor.

        Args:
            dim: None, or all dims.
            keepdim: Has to be False.
            dtype: Dtype of the sum. Defaults to the dtype of the tensor.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The sum is over some dims only, or ``keepdim`` is True.
        """
        check_all(self, "sum", dim, keepdim)
        return total(self, self.to_local(), dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the mean of all elements. Differentiable.

        Args:
            dim: None, or all dims.
            keepdim: Has to be False.
            dtype: Dtype of the mean. Defaults to the dtype of the tensor.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The mean is over some dims only, or ``keepdim`` is True.
        """
        check_all(self, "mean", dim, keepdim)
        return mean(self, self.to_local(), dtype)

    def norm(
        self, p: Any = 2.0, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Tensor:
        """Return the norm of all elements. Differentiable.

        Args:
            p: Order of the norm: a number above 0, ``inf``, or ``"fro"`` for 2.
            dim: None, or all dims.
            keepdim: Has to be False.
            dtype: Dtype of the norm. Defaults to the dtype of the tensor.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The norm is over some dims only, or ``keepdim`` is True.
        """
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
        placements = [
            (p.dims, p.sizes) if isinstance(p, RaggedShard) else p for p in spec.placements
        ]
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


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's gathering of a state dict that takes ragged tensors too, one at a time.

    Every rank that it is called on gathers every tensor, and keeps it where torch keeps what it
    gathers: on all ranks, or on those in ``ranks_only``.
    """

    def gathered(state: Any, options: dict[str, Any]) -> Any:
        if isinstance(state, RaggedTensor):
            # Made whole, so that torch moves it, or leaves it out, as it would a DTensor.
            with torch.no_grad():
                full = state.full_tensor()
            return gather({"whole": full}, **options).get("whole")
        if not _has_ragged(state):
            return gather({"rest": state}, **options).get("rest")
        if isinstance(state, dict):
            found: Any = {key: gathered(value, options) for key, value in state.items()}
        else:
            found = type(state)(gathered(value, options) for value in state)
        only = options.get("ranks_only", ())
        if only and dist.get_rank(options.get("pg")) not in only:
            return {} if isinstance(found, dict) else None
        return found

    @wraps(gather)
    def whole(state_dict: Any, **options: Any) -> Any:
        if not _has_ragged(state_dict):
            return gather(state_dict, **options)
        return gathered(state_dict, options)

    return whole


def _scattering(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's loading of a full state dict that cuts whole tensors into ragged ones too.

    Communicates nothing besides what torch does, whose broadcasts are complete only at its end.
    Until then each rank holds the whole tensors that it received.
    """

    @wraps(scatter)
    def cut(full: Any, local: dict[str, Any], *args: Any, **options: Any) -> Any:
        ragged = {name: held for name, held in local.items() if isinstance(held, RaggedTensor)}
        result = scatter(full, local, *args, **options)
        for name, held in ragged.items():
            found = local.get(name)
            if isinstance(found, Tensor) and not isinstance(found, RaggedTensor):
                local[name] = _cut(name, found, held)
        return result

    return cut


def _cut(name: str, full: Tensor, like: RaggedTensor) -> RaggedTensor:
    """Return this rank's part of a whole tensor, in memory of its own, laid as ``like``."""
    if full.shape != like.shape:
        raise LayoutError(
            f"the full state dict has {name} of shape {list(full.shape)}, which loads into a "
            f"ragged tensor of shape {list(like.shape)}; load a tensor of that shape"
        )
    spec = like._spec
    with torch.no_grad():
        part = full.new_empty(like._local.shape)
        for box in spec.boxes():
            view = spec.view(part, [lo for lo, _ in box])
            view.copy_(full[tuple(slice(lo, hi) for lo, hi in box)])
    return type(like)(part, spec)


def _has_ragged(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_ragged, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_has_ragged, state))
    return isinstance(state, RaggedTensor)


wrap_full_states(_gathering, _scattering)
