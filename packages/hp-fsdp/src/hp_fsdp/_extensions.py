"""Tensor classes with all-gather hooks: ``fsdp_pre_all_gather``, ``fsdp_post_all_gather``."""

import copy
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_dtensor import Axis, Collectives
from hp_dtensor.torch_compat import inside_backward, writes_into

from ._buffers import Buffer
from ._errors import (
    DisagreementError,
    InvalidParameterError,
    MeshError,
    ParameterError,
    StateError,
    shown,
)
from ._group import ParameterGroup
from ._layout import Layout
from ._layout_exact import ExactPlan, plan_group
from ._mesh import MeshInfo
from ._param import Owner, RaggedParameter, ShardedParameter
from ._states import ParameterState
from ._streams import Streams, Waitable
from ._torch import is_extended, preserved_versions


class ExtendedLayout(Layout):
    """The shards of one group, tensors on their own, and what is gathered.

    The inputs are set anew before every gather; all of them travel as bytes, in one all-gather.
    There are no full views before the first: `received` has what arrived. ``shard`` is empty: it
    only tells dtype and device. The plan is that of gradients, which are plain numbers.
    """

    def __init__(
        self, locals_: Sequence[Tensor], plan: ExactPlan, axis: Axis, *, dtype: torch.dtype
    ) -> None:
        """Take this rank's parts as they are."""
        first = locals_[0]
        self.plan, self._index = plan, axis.index
        self.specs, self.spans = plan.specs, plan.spans(axis.index)
        self.shard = torch.empty(0, dtype=first.dtype, device=first.device)
        self.shards = list(locals_)
        self.fulls = [torch.empty(spec.shape, dtype=dtype, device="meta") for spec in plan.specs]
        self._inputs = []
        self._shapes: list[list[torch.Size]] = []
        self._gathered: list[Buffer] = []
        self.renewed = False  # what arrives is in other memory than full tensors were made of
        self._inner: list[tuple[UntypedStorage, int]] = []
        self._block = []
        self.tags = None  # what tensors gather by themselves has no tag

    def set_inputs(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Take what to gather of each parameter: of the same dtypes and sizes every time."""
        self._shapes = [[tensor.shape for tensor in each] for each in inputs]
        flats = [tensor.reshape(-1) for each in inputs for tensor in each]
        self._inputs = [flat.view(torch.uint8) for flat in flats]
        if not self._gathered:
            self._gathered = [
                Buffer(self.plan.degree * flat.numel(), flat.dtype, flat.device) for flat in flats
            ]

    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Start the group's one all-gather over ``axis``; None where there is nothing to send."""
        if not self._inputs:
            return None
        return collectives.all_gather(axis, self._inputs, self._lent())

    def _lent(self) -> list[Tensor]:
        if any(output.lent for output in self._gathered):
            self._inner, self.renewed = [], True
        for output in self._gathered:
            output.allocate()
        flats = [output.writable.view(torch.uint8) for output in self._gathered]
        for output in self._gathered:
            output.lent = True
        return flats

    def wait(self, work: Waitable) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        for output in self._gathered:
            output.lent = False
        self._inputs = []

    def finish_gather(self, work: Waitable | None) -> None:
        """Get memory for the tensors inside of full ones, after `wait`."""
        for storage, size in self._inner:
            if storage.nbytes() != size:  # some are views of what was gathered
                storage.resize_(size)

    def received(self) -> list[list[Tensor]]:
        """Return what arrived of each parameter, one after the other along the first dimension."""
        outputs = iter(self._gathered)
        return [
            [next(outputs).tensor.view(self._stacked(shape)) for shape in each]
            for each in self._shapes
        ]

    def _stacked(self, shape: torch.Size) -> tuple[int, ...]:
        return (self.plan.degree * shape[0], *shape[1:]) if shape else (self.plan.degree,)

    def hold(self, inner: Iterable[Tensor]) -> None:
        """Allocate and free the memory of these tensors too from now on."""
        for storage in (tensor.untyped_storage() for tensor in inner):
            self._inner.append((storage, storage.nbytes()))

    def save_block(self, size: int) -> None:
        """Copy what ``size`` neighbours hold together of what arrived."""
        self._block = [
            output.tensor.view(torch.uint8).view(size, -1)[self._index % size].clone()
            for output in self._gathered
        ]

    def gather_block(self, axis: Axis, collectives: Collectives) -> Waitable | None:
        """Start an all-gather over a smaller axis of what `save_block` copied."""
        if not self._block:
            return None
        return collectives.all_gather(axis, self._block, self._lent())

    def free(self) -> None:
        """Give back the memory of what arrived, and of the tensors inside of full ones.

        Leave it to a collective that may still use it; some of the tensors are views of it.
        """
        if any(output.lent for output in self._gathered):
            return
        for output in self._gathered:
            output.free()
        for storage, _ in self._inner:
            storage.resize_(0)


_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class ExtendedParameter(ShardedParameter):
    """A parameter of a tensor class with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    The unsharded parameter is what the second of them makes of the first gather. Later gathers
    write into it, because autograd may have saved it or a view of it.
    """

    def __init__(
        self, original: nn.Parameter, owners: Sequence[Owner], name: str, mesh_info: MeshInfo
    ) -> None:
        """Work out the parameter's mesh; raises `ParameterError` for other signatures."""
        super().__init__(original, owners, name, mesh_info)
        self.read_hooks(original)

    def read_hooks(self, tensor: Tensor) -> None:
        """Work out how to call the hooks of ``tensor``; raises `ParameterError` as above."""
        self._takes_all = _takes_all(tensor, self.name)
        self._shard_mesh = _shard_mesh(self._mesh, self.name)
        self._metadata: Any = None
        self._received = False

    def build_unsharded(self, view: Tensor) -> None:
        """Create an unsharded parameter that the next gather replaces."""
        self._received = False
        super().build_unsharded(view)

    def gather_inputs(self, policy: MixedPrecisionPolicy) -> list[Tensor]:
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
        """Make the unsharded parameter of what was gathered, or write it into the present one.

        Return the tensors whose memory a new one has; None where it is not new.
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
        """Make the unsharded parameter anew when the next gather arrives.

        What was saved for a backward from the one before must not be used any more: autograd then
        raises, as after a change in place.
        """
        increment_version(self.unsharded)
        self._received = False

    def no_gradient(self) -> Tensor:
        """Return plain zeros in place of an unsharded gradient."""
        unsharded = self.unsharded
        return torch.zeros(self.shape, dtype=unsharded.dtype, device=unsharded.device)

    def refusal(self) -> str | None:
        """Return why what is registered cannot be the sharded parameter; None if it can."""
        found = self._registered()
        if self.fits(found) and not is_extended(self.part(found)):
            kind = type(self.part(self.sharded)).__name__
            return (
                f"{self.name} was replaced by a plain tensor; only a {kind} can take its place, "
                f"with {_PRE}, so load it without assign=True"
            )
        return super().refusal()


def on_own_mesh(local: Tensor, name: str) -> str:
    """Return what is wrong with a DTensor of a tensor that gathers itself."""
    return (
        f"{name} is a DTensor of {type(local).__name__}, which gathers itself ({_PRE}); only "
        "without a mesh of their own can such be sharded, so unwrap it before, or ignore it"
    )


def check_extension(original: Tensor, name: str, dim: int | None, ragged: bool) -> None:
    """Raise `ParameterError` where a parameter with hooks cannot be sharded as asked for."""
    if ragged or dim != 0:
        asked = (
            "in the ragged layout" if ragged else "kept whole" if dim is None else f"cut at {dim}"
        )
        raise ParameterError(
            f"{name} is of type {type(original).__name__}, which gathers itself ({_PRE}), and is "
            f"to be {asked}; only layout='exact' and Shard(0) are legal for it"
        )


def check_local(local: Tensor, name: str) -> None:
    """Raise `ParameterError` if this rank's rows have lost the class with the hooks."""
    if not is_extended(local):
        raise ParameterError(
            f"this rank's rows of {name} are a {type(local).__name__} without {_PRE}; slices, "
            "new_zeros and copy_ must keep the class"
        )


def _takes_all(given: Tensor, name: str) -> bool:
    """Return whether the hook before gathering takes five arguments, not the mesh alone."""
    tensor: Any = given
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


Kinds = list[list[tuple[torch.dtype, torch.Size]]]


class ExtendedGroup(ParameterGroup):
    """Parameters of tensor classes with all-gather hooks; gradients are plain and go as usual."""

    layout: ExtendedLayout
    flat = False

    def _own_parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        _check_on_device(self, [parameter.name for parameter in self.parameters])
        # The operations that torch's fully_shard asks of such classes, and no others.
        parts = [part.new_zeros(part.shape).copy_(part) for part in super()._own_parts(wholes)]
        for parameter, part in zip(self.parameters, parts, strict=True):
            check_local(part, parameter.name)
        return parts

    def _layout_of(self, locals_: Sequence[Tensor], compute: torch.dtype) -> ExtendedLayout:
        self._kinds: Kinds | None = None  # what the hooks before gathering returned at first
        self._unsharded_new = False
        degree, itemsize = self.axes.shard.size, locals_[0].element_size()
        plan = plan_group(self._specs, degree, itemsize, math.inf)
        return ExtendedLayout(locals_, plan, self.axes.shard, dtype=compute)

    def _hook_gradients(self) -> None:
        """Leave gradients to be packed at the end: unsharded parameters come late."""

    def gather(self) -> None:
        """Start the all-gather unless it was started or has arrived.

        The hooks run before anything is noted, so that after an exception in one nothing happened.
        """
        if self.state is ParameterState.SHARDED and not self.layout.shard.is_meta:
            self._set_inputs()
        super().gather()

    @torch.no_grad()
    def _set_inputs(self) -> None:
        parameters = cast("list[ExtendedParameter]", self.parameters)
        inputs = [parameter.gather_inputs(self.config.precision) for parameter in parameters]
        kinds = [[(tensor.dtype, tensor.shape) for tensor in each] for each in inputs]
        if self._kinds is None:
            self._check_sizes(inputs)
            self._kinds = kinds
        for parameter, before, now in zip(parameters, self._kinds, kinds, strict=True):
            if before != now:
                raise StateError(
                    f"fsdp_pre_all_gather of {parameter.name} returned {_shown(now)}, and before "
                    f"{_shown(before)}; dtypes and shapes must stay what they are at first"
                )
        self.layout.set_inputs(inputs)

    def _check_sizes(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Compare once, with one small all-gather, how many bytes each rank sends."""
        own = [sum(tensor.nbytes for tensor in each) for each in inputs]
        axis = self.axes.shard
        if axis.size == 1:
            return
        table = torch.tensor(own, dtype=torch.int64, device=self.config.device)
        (table,) = self.collectives.all_gather(axis, [table]).wait()
        sent = table.view(axis.size, -1).t().tolist()
        unlike = [
            f"{parameter.name} {each}"
            for parameter, each in zip(self.parameters, sent, strict=True)
            if len(set(each)) > 1
        ]
        if unlike:
            raise DisagreementError(
                f"fsdp_pre_all_gather gives, in bytes on the ranks of {axis.name}: "
                f"{', '.join(unlike)}; it must give the same everywhere, so pad uneven rows in it"
            )

    @torch.no_grad()
    def _show_unsharded(self) -> None:
        self.layout.finish_gather(self._work)
        parameters = cast("list[ExtendedParameter]", self.parameters)
        if self.layout.renewed:
            for parameter in parameters:
                parameter.renew()
            self.layout.renewed = False
        for parameter, outputs in zip(parameters, self.layout.received(), strict=True):
            inner = parameter.receive(outputs, self.dtypes.compute)
            if inner is not None:
                self._unsharded_new = True  # stays if a later hook raises
                self.layout.hold(inner)
        if self._unsharded_new:
            self._list_parameters()
            self._unsharded_new = False
        self.train_as_sharded(inside_backward())
        self.table.show_unsharded()

    def _writes(self) -> int:
        return sum(writes_into(p.sharded, p.part(p.sharded)) for p in self.parameters)


def _check_on_device(group: ParameterGroup, names: Sequence[str]) -> None:
    if group.config.rest != group.config.device:
        raise ParameterError(
            f"{names} gather themselves ({_PRE}) on the device; CPUOffloadPolicy() is not legal "
            "for them"
        )


def attached(group: ParameterGroup) -> list[int]:
    """Return which parameters of a group got all-gather hooks on their shards since it was made.

    Raises `ParameterError` where they cannot be sharded as they are, `StateError` where gradients
    wait for a reduction.
    """
    late = [
        position
        for position, parameter in enumerate(group.parameters)
        if not isinstance(parameter, ExtendedParameter)
        if is_extended(parameter.part(parameter.sharded))
    ]
    for parameter in (group.parameters[i] for i in late):
        local = parameter.part(parameter.sharded)
        if not parameter.is_plain:
            raise ParameterError(on_own_mesh(local, parameter.name))
        check_extension(
            local, parameter.name, parameter.dim, isinstance(parameter, RaggedParameter)
        )
        _takes_all(local, parameter.name)
        _shard_mesh(parameter._mesh, parameter.name)
    if late:
        names = [group.parameters[i].name for i in late]
        _check_on_device(group, names)
        if group.config.grads != "copy":
            raise ParameterError(
                f"{names} got {_PRE} after fully_shard, with grads={group.config.grads!r}; only "
                "grads='copy' is legal for hooks that are not the tensor's class's"
            )
        if group.gradients_wait:
            raise StateError(
                f"{names} got {_PRE} while gradients wait for a reduction; reduce them before"
            )
    return late


def split_attached(group: ParameterGroup) -> list[ParameterGroup]:
    """Return the group without the parameters that are `attached`, and one of these.

    The parameters stay the same objects, as do their shards: hooks are on them. The group is
    sharded.
    """
    late = attached(group)
    if not late:
        return [group]
    for parameter in (group.parameters[i] for i in late):
        local = parameter.part(parameter.sharded)
        local.data = local.detach().clone()  # alone, and not in memory of the others
        parameter.__class__ = ExtendedParameter
        cast(ExtendedParameter, parameter).read_hooks(local)
    made = copy.copy(group)
    made.__class__ = ExtendedGroup
    made.keep(late)
    rest = [i for i in range(len(group.parameters)) if i not in late]
    if not rest:
        return [made]
    group.keep(rest)
    return [group, made]


def _shown(kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[str]:
    return [f"{dtype} {list(shape)}" for dtype, shape in kinds]
