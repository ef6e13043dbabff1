"""The class `RaggedTensor`: a distributed tensor that one mesh axis splits unevenly."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._boxes import Box
from .._convert import AnyPlacement
from .._execute import bind, start
from .._groups import group_for, spanned_axes
from .._layout import Layout
from .._placements import RaggedShard, Replicate
from .._planner import make_plan
from .._torch import disabled_torch_function, local_part, make_wrapper, wrapper_tensor
from ..collectives._c10d import checked_collectives
from ..collectives._interface import Collectives
from ._checkpoint import checkpointed
from ._ops import (
    BINARY_METHODS,
    REDUCTIONS,
    UNSCALE,
    check_arguments,
    elementwise_form,
    operator_traits,
)
from ._reductions import fill_at_random, reduce_all, unscale
from ._spec import RaggedSpec, box_views, find_spec

# Methods that use the memory of a tensor. A ragged tensor has no memory; only its local tensor has.
# torch's methods would read and write at address 0, or raise an error that does not explain this.
_MEMORY_METHODS = (
    *("untyped_storage", "storage", "share_memory_", "is_shared", "apply_", "map_", "map2_"),
    *("__dlpack__", "__array__", "numpy", "tolist"),
)


def _pieces(x: "RaggedTensor") -> Iterable[tuple[Box, Tensor]]:
    if x.numel() == 0:
        # No rank has elements. An empty box stores the name of the tensor, which a load requires.
        return [(tuple((0, length) for length in x.shape), x._local.new_empty(x.shape))]
    spec = x._spec
    return box_views(spec.layout, spec.shape, spec.coordinate, x._local)


_kind_of = attrgetter("dtype", "device", "layout", "requires_grad")
_shape_of = attrgetter("shape")
_local_shape_of = attrgetter("_local.shape")


@checkpointed(_pieces)
class RaggedTensor(Tensor):
    """A distributed tensor that a `RaggedShard` splits unevenly over one mesh axis.

    `redistribute`, `distribute_tensor` and `RaggedTensor.from_local` create such tensors. The
    attribute ``shape`` is the global shape. With ``RaggedShard(dims, sizes)`` on an axis, the local
    tensor of the rank with coordinate ``i`` on this axis has the shape ``[sizes[i], ...]``. It can
    be empty. The other mesh axes can replicate the tensor or shard it with ``Shard``.

    - Elementwise operators run on the local tensors and communicate nothing. Operands have to be
      ragged tensors of the same layout, numbers or plain scalar tensors.
    - Optimizers with elementwise updates, such as Adam, work.
    - Random fills such as ``normal_`` draw different values on ranks that hold different elements,
      and equal values on replicas.
    - `sum`, `mean` and `norm` reduce all elements to one number.
    - Operators that are not listed here raise TypeError.
    - ``torch.distributed.checkpoint`` can save a ragged tensor and load it in another layout.

    Args:
        local: Local tensor of this rank. The shape is not checked. To create a ragged tensor with a
            check, use `from_local` or `like`.
        spec: Mesh, layout and global shape.

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
        """Create a ragged tensor without autograd history and without checks.

        The arguments are described in the docstring of the class.
        """
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
                `Shard` on the other axes.
            shape: Global shape.

        Returns:
            The ragged tensor. It shares memory with ``local``.

        Raises:
            LayoutError: Raised on every rank in these cases:

                - ``mesh`` is not a device mesh.
                - ``placements`` has no `RaggedShard`, or a placement that is not allowed.
                - A tensor of this shape cannot have these placements.

                Raised on this rank only, if ``local`` has a wrong shape.
            MeshError: This rank is not in the mesh.

        Examples:
            On 2 ranks:

            >>> mesh = init_device_mesh("cpu", (2,))
            >>> part = torch.ones((3, 5)[mesh.get_rank()], 4)
            >>> RaggedTensor.from_local(part, mesh, [RaggedShard((0,), (3, 5))], shape=(8, 4)).shape
            torch.Size([8, 4])
        """
        spec = find_spec(mesh, placements, shape)
        return _from_local(local, spec, spec.local_shape())

    def like(self, local: Tensor) -> "RaggedTensor":
        """Create a ragged tensor with the mesh, layout and shape of ``self``. Communicates nothing.

        This method is faster than `from_local`, because the layout is not checked again.

        Args:
            local: Local tensor of the new ragged tensor, with the same shape as ``self.local``. The
                dtype may differ.

        Returns:
            The ragged tensor. It shares memory with ``local``.

        Raises:
            LayoutError: ``local`` has a wrong shape. Raised on this rank only.
        """
        return _from_local(local, self._spec, self._local.shape)

    @staticmethod
    def like_each(
        tensors: "Sequence[RaggedTensor]", locals_: Sequence[Tensor]
    ) -> "list[RaggedTensor]":
        """Create one ragged tensor for each pair, as `like` does. Communicates nothing.

        One call for many tensors takes less host time than many calls of `like`.

        Args:
            tensors: Ragged tensors with the meshes, layouts and shapes of the results.
            locals_: Local tensors of the results, one for each of ``tensors``.

        Returns:
            The ragged tensors. They share memory with ``locals_``.

        Raises:
            LayoutError: A local tensor has a wrong shape. Raised on this rank only.

        Examples:
            On 2 ranks:

            >>> mesh = init_device_mesh("cpu", (2,))
            >>> x = distribute_tensor(torch.ones(8, 4), mesh, [RaggedShard((0,), (3, 5))])
            >>> (y,) = RaggedTensor.like_each([x], [x.local * 2])
            >>> y.sum()
            tensor(64.)
        """
        if not tensors:
            return []
        pairs = list(zip(tensors, locals_, strict=True))
        # `map` and the comparison of lists run in C, without a Python call for each tensor.
        (dtype, device, layout, requires_grad), *others = set(map(_kind_of, locals_))
        same = list(map(_local_shape_of, tensors)) == list(map(_shape_of, locals_))
        if not same or requires_grad or others:
            return [each.like(own) for each, own in pairs]
        make = partial(make_wrapper, RaggedTensor, dtype=dtype, device=device, layout=layout)
        made: list[RaggedTensor] = list(map(make, map(_shape_of, tensors)))
        for result, (tensor, local) in zip(made, pairs, strict=True):
            result._local, result._spec = local, tensor._spec
        return made

    @property
    def device_mesh(self) -> DeviceMesh:
        """Device mesh of the tensor."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement | RaggedShard, ...]:
        """One placement for each mesh axis.

        One of them is a `RaggedShard`. The others are torch's ``Replicate`` and ``Shard``.
        """
        return self._spec.placements

    @property
    def data(self) -> Tensor:
        """This tensor without autograd history.

        ``x.data = y`` replaces the local tensor of ``x`` by the local tensor of ``y``.

        Raises:
            TypeError: The assigned value is not a `RaggedTensor` with the same mesh, layout and
                shape.
        """
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RaggedTensor) or value._spec != self._spec:
            raise TypeError(
                f"data of {self!r} set to {value!r}; set it to a RaggedTensor of the same layout, "
                "or use copy_"
            )
        # torch's setter does not replace the attribute with the local tensor.
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local = value._local

    # The getter is implemented in C, because hp-fsdp reads this property of all parameters in every
    # training step.
    local: ClassVar[Any] = property(
        attrgetter("_local"), doc="Local tensor of this rank, without autograd. Read-only."
    )

    def to_local(self) -> Tensor:
        """Return the local tensor of this rank without a copy. Communicates nothing.

        In backward, the gradient of the result becomes this rank's part of the ragged tensor's
        gradient. Ranks that hold the same elements have to compute the same gradient.

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

        Communicates like `redistribute` to `Replicate` on all mesh axes. Backward communicates
        nothing: each rank keeps its part of the gradient of the result. All ranks therefore have to
        compute the same gradient of the result.

        Args:
            collectives: `Collectives` that communicate. Defaults to `TorchCollectives`.

        Returns:
            A plain tensor with the global shape.

        Raises:
            LayoutError: ``collectives`` does not have the methods of `Collectives`. Also raised, on
                this rank only, if the local tensor has a wrong shape.
            MeshError: A required process group does not exist, or this rank is not in the mesh.
        """
        spec, local = self._spec, self.to_local()
        spec.check_local(local, spec.local_shape())
        collectives = checked_collectives(collectives)
        full: Tensor = _AllGather.apply(local, spec, collectives)  # type: ignore[no-untyped-call]
        return full

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the sum of all elements. Differentiable.

        Communicates an all-reduce of one number over the mesh axes that shard the tensor. If no
        process group spans all of these axes, there is one all-reduce for each axis.

        Args:
            dim: Dims to reduce. It has to be None or name all dims.
            keepdim: Has to be False.
            dtype: Dtype of the sum. Defaults to the dtype of the tensor. For integers and bools,
                the default is int64, as in torch.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The sum is over some dims only, or ``keepdim`` is True.
            IndexError: A dim does not exist.
        """
        return reduce_all(self.to_local(), self._spec, "sum", dim, keepdim, dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        """Return the mean of all elements. Differentiable. Communicates like `sum`.

        Args:
            dim: Dims to reduce. It has to be None or name all dims.
            keepdim: Has to be False.
            dtype: Dtype of the mean. Defaults to the dtype of the tensor.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The mean is over some dims only, ``keepdim`` is True, or the dtype is neither
                floating nor complex.
            IndexError: A dim does not exist.
        """
        return reduce_all(self.to_local(), self._spec, "mean", dim, keepdim, dtype)

    def norm(
        self, p: Any = 2.0, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Tensor:
        """Return the norm of all elements. Differentiable.

        Communicates like `sum`. If the order is ``inf``, there are two all-reduces instead of one.

        Args:
            p: Order of the norm: a number above 0, ``inf``, or ``"fro"`` for 2.
            dim: Dims to reduce. It has to be None or name all dims.
            keepdim: Has to be False.
            dtype: Dtype of the norm. Defaults to the dtype of the tensor.

        Returns:
            A plain scalar tensor, the same on every rank.

        Raises:
            TypeError: The norm is over some dims only, ``keepdim`` is True, the order is invalid,
                or the dtype is neither floating nor complex.
            IndexError: A dim does not exist.
        """
        order = 2.0 if p == "fro" else p
        return reduce_all(self.to_local(), self._spec, "norm", dim, keepdim, dtype, order)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run_operator(func, tuple(args), kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RaggedTensor({self._local}, shape={list(self.shape)}, layout={self._spec.layout})"

    def __reduce_ex__(self, protocol: object) -> Any:
        spec = self._spec
        placements = [
            (p.dims, p.sizes) if isinstance(p, RaggedShard) else p for p in spec.placements
        ]
        trained = self.requires_grad, isinstance(self, nn.Parameter)
        return _rebuild, (self._local, spec.mesh, placements, spec.shape, *trained)


def _from_local(local: Tensor, spec: RaggedSpec, shape: Sequence[int]) -> RaggedTensor:
    """Return a ragged tensor with the given local tensor. Differentiable.

    Raises `LayoutError` if ``local`` does not have the shape ``shape``.
    """
    spec.check_local(local, shape)
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


# This lets ``torch.load(weights_only=True)`` call `_rebuild`. That is safe: `_rebuild` checks the
# layout, and all of its arguments have types that torch can load safely.
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
        # The result is a view, because torch raises an error if a view that a custom function
        # returned is modified in place. The autograd graph of x would not record such a write.
        return x._local.view_as(x._local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        grad: RaggedTensor = _FromLocal.apply(grads[0].contiguous(), ctx.spec)  # type: ignore[no-untyped-call]
        return grad


def local_tensor_of(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor or `RaggedTensor`. A plain tensor is returned itself.

    Waits for a pending collective of a DTensor. The local tensor has no autograd history.
    """
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else x


def mesh_and_placements(x: Tensor) -> tuple[DeviceMesh, tuple[Placement | RaggedShard, ...]] | None:
    """Return ``(mesh, placements)`` of a DTensor or `RaggedTensor`, or None for a plain tensor."""
    return (x.device_mesh, x.placements) if isinstance(x, DTensor | RaggedTensor) else None


class _AllGather(torch.autograd.Function):
    """Gathers the whole tensor from the local tensors of all ranks.

    Backward is `_KeepPart`, so it communicates nothing.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: RaggedSpec, collectives: Collectives) -> Tensor:
        ctx.saved = spec, collectives
        layout, mesh = spec.layout, spec.mesh
        plan = make_plan(
            layout,
            Layout(layout.mesh_shape, (Replicate(),) * mesh.ndim),
            spec.shape,
            spec.position,
            local.itemsize,
            groups=spanned_axes(mesh),
        )
        steps = plan.steps if math.prod(spec.shape) else ()
        groups = {step: group_for(step, mesh) for step in steps if step.kind != "slice"}
        full = start(bind(plan, groups), local, collectives)()
        # On a mesh of one rank, the result shares memory with the local tensor. It has to be a view
        # for the reason that `_ToLocal` gives.
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        part: Tensor = _KeepPart.apply(grads[0], *ctx.saved)  # type: ignore[no-untyped-call]
        return part, None, None


class _KeepPart(torch.autograd.Function):
    """Copies this rank's part of a whole tensor to a new local tensor. Backward is `_AllGather`."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, spec: RaggedSpec, collectives: Collectives) -> Tensor:
        ctx.saved = spec, collectives
        return spec.local_part(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        full: Tensor = _AllGather.apply(grads[0], *ctx.saved)  # type: ignore[no-untyped-call]
        return full, None, None


def _run_operator(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a torch operator on the local tensors of its ragged operands.

    Operands have to be ragged tensors of one layout, numbers or plain scalar tensors. A reduction
    returns a plain scalar tensor. All other operators return ragged tensors of the same layout.

    Raises:
        TypeError: The operator or the operands are not supported. Raised on every rank.
    """
    op, args = elementwise_form(op, args)
    traits = operator_traits(op)
    if traits.special:
        return _run_special(op, traits.special, args, kwargs)
    check_arguments(op, traits, args, kwargs)
    operands = (*args, *kwargs.values()) if kwargs else args
    written = [args[at] if isinstance(at, int) else kwargs[at] for at in traits.writes]
    locals_ = [_locals_of(value) for value in args]
    named = {name: _locals_of(value) for name, value in kwargs.items()}
    if traits.on_lists:
        specs = _common_specs(op, operands)
        result = op(*locals_, **named)
        if not written:
            pairs = zip(result, specs, strict=True)
            return [x if spec is None else RaggedTensor(x, spec) for x, spec in pairs]
    else:
        spec = _common_spec(op, operands, written)
        result = op(*locals_, **named)
        if not written:
            if isinstance(result, Tensor):
                return RaggedTensor(result, spec)
            return type(result)(RaggedTensor(x, spec) for x in result)
    _count_writes(written)
    if result is None:
        return None
    return written[0] if isinstance(result, Tensor) else type(result)(written)


def _run_special(op: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a reduction, a random fill, or the operator of ``torch.amp.GradScaler``.

    ``name`` is the name of the operator, from `OperatorTraits.special`.
    """
    if name == UNSCALE:
        grads, found_inf, scale = args
        meshes = [x.device_mesh for x in grads if isinstance(x, RaggedTensor)]
        unscale(meshes, _locals_of(grads), found_inf, scale)
        _count_writes([grads])
        return None
    x, *rest = args
    if name not in REDUCTIONS:
        fill_at_random(op, x._local, x._spec, rest, kwargs)
        _count_writes([x])
        return x
    name = name.removeprefix("linalg_vector_")
    if torch.is_grad_enabled() and x.requires_grad:
        raise TypeError(
            f"torch.{name} of a ragged tensor that requires a gradient is not differentiable; use "
            f"x.{name}(), or torch.no_grad()"
        )
    # The signature is linalg_vector_norm(x, ord, dim, keepdim, *, dtype). The other reductions have
    # no argument ord.
    names = ["ord", "dim", "keepdim"] if name == "norm" else ["dim", "keepdim"]
    given = {**kwargs, **dict(zip(names, rest, strict=False))}
    order = given.pop("ord", None)
    return reduce_all(x._local, x._spec, name, order=order, **given)


def _locals_of(value: Any) -> Any:
    """Return an operand with each ragged tensor replaced by its local tensor.

    The operand is a tensor, a list or tuple of tensors, or any other value, which is returned
    unchanged.
    """
    if isinstance(value, RaggedTensor):
        return value._local
    if _is_tensor_list(value):
        return [x._local if isinstance(x, RaggedTensor) else x for x in value]
    return value


def _count_writes(written: list[Any]) -> None:
    """Increment the autograd version counters of tensors that an operator modified in place.

    Autograd uses these counters to detect that a saved tensor was modified.

    Args:
        written: Arguments that the operator modified: tensors, or lists of tensors.
    """
    # For an operator on one tensor, torch increments only the counter of the ragged tensor. The
    # counter of the local tensor is incremented here. For an operator on lists, torch increments no
    # counters, so both are incremented here.
    tensors: list[Tensor] = []
    for value in written:
        if _is_tensor_list(value):
            tensors += value
            tensors += [x._local for x in value if isinstance(x, RaggedTensor)]
        elif isinstance(value, RaggedTensor):
            tensors.append(value._local)
    increment_version(tensors)


def _common_spec(use: object, operands: Sequence[object], written: Sequence[object]) -> RaggedSpec:
    """Return the common `RaggedSpec` of the ragged operands of an operator.

    Args:
        use: Operator, for the error message.
        operands: Arguments of the operator. At least one of them is a ragged tensor.
        written: Operands that the operator modifies in place.

    Raises:
        TypeError: Two ragged operands differ in mesh, layout or shape. Or a tensor that is not
            ragged has dims, is a DTensor, or is modified in place.
    """
    first = next(x for x in operands if isinstance(x, RaggedTensor))
    spec = first._spec
    for x in operands:
        if isinstance(x, RaggedTensor):
            fits = x._spec is spec or x._spec == spec
        elif isinstance(x, Tensor):
            fits = _is_scalar(x) and not any(x is target for target in written)
        else:
            continue
        if not fits:
            raise TypeError(
                f"{use} of {_described(first)} and {_described(x)}, whose layouts differ; use "
                "operands of one layout, numbers or 0-dim tensors that are not written to, or "
                "redistribute one first"
            )
    return spec


def _common_specs(use: object, operands: Sequence[object]) -> Sequence[RaggedSpec | None]:
    """Return one `RaggedSpec` for each position in the lists of a ``_foreach_`` operator.

    A ``_foreach_`` operator takes lists of tensors, and combines the tensors at the same position
    of all lists. These tensors need a common spec; see `_common_spec`. If none of them is a ragged
    tensor, the result has None at this position.

    Args:
        use: Operator, for the error message.
        operands: Arguments of the operator: lists of tensors, and other arguments.
    """
    columns = [value for value in operands if _is_tensor_list(value)]
    others = [value for value in operands if isinstance(value, Tensor)]
    specs = [[x._spec if isinstance(x, RaggedTensor) else None for x in xs] for xs in columns]
    ragged = [each for each in specs if any(each)]
    plain = [xs for xs, each in zip(columns, specs, strict=True) if not any(each)]
    # Fast path: in optimizer steps, all lists have equal specs, so comparing whole lists suffices.
    if (
        all(each == ragged[0] for each in ragged)
        and all(map(all, ragged[:1]))
        and all(map(_is_scalar, (*others, *chain(*plain))))
    ):
        return ragged[0]
    rows = [(*row, *others) for row in zip_longest(*columns)]
    return [
        _common_spec(use, row, ()) if any(isinstance(x, RaggedTensor) for x in row) else None
        for row in rows
    ]


def _is_tensor_list(value: object) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def _is_scalar(x: Tensor) -> bool:
    return x.ndim == 0 and not isinstance(x, DTensor)


def _described(x: Any) -> str:
    """Return a description of an operand for an error message, the same text on every rank."""
    if isinstance(x, RaggedTensor):
        mesh = tuple(x.device_mesh.shape)
        return f"a {list(x.shape)} tensor as {x._spec.layout} on a mesh of shape {mesh}"
    return f"a {list(x.shape)} {type(x).__name__}" if isinstance(x, Tensor) else repr(x)


def _explaining(name: str) -> Callable[[Any, Any], Any]:
    """Return a replacement of a binary method such as ``__add__``, with a better error message.

    The message describes the operands, and says which operands ragged tensors support.
    """
    # If the operator raises TypeError, torch's method returns NotImplemented. Python then raises a
    # TypeError that only names the two types.
    method = getattr(Tensor, name)

    def operate(self: RaggedTensor, other: Any) -> Any:
        result = method(self, other)
        if result is NotImplemented and isinstance(other, Tensor | int | float | complex):
            raise TypeError(
                f"{name} of {_described(self)} and {_described(other)}: ragged tensors support "
                "elementwise operators on operands of one layout, numbers and 0-dim tensors; "
                "redistribute to Replicate() or Shard(dim) first, or work on to_local()"
            )
        return result

    operate.__name__ = name
    return operate


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RaggedTensor, *args: object, **named: object) -> NoReturn:
        raise TypeError(
            f"{name} of {_described(self)}, which has no memory of its own; use the memory of "
            "to_local(), or full_tensor() for the whole tensor"
        )

    refuse.__name__ = name
    return refuse


for _name in BINARY_METHODS:
    setattr(RaggedTensor, _name, _explaining(_name))
for _name in _MEMORY_METHODS:
    setattr(RaggedTensor, _name, _refusing(_name))
