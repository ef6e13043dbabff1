"""All-gather extensions: tensors with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``."""

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_dtensor import Axis, Collectives

from ._errors import (
    DisagreementError,
    InvalidParameterError,
    MeshError,
    ParameterError,
    StateError,
    shown,
)
from ._options import GroupConfig
from ._streams import Streams, Waitable
from ._torch import POST_ALL_GATHER, PRE_ALL_GATHER, is_extended, preserved_versions
from .layout import FlatBuffer, FlatPlan, GatherPlan, ShardSpec, plan_exact, plan_uneven

# Dtype and shape of each tensor that ``fsdp_pre_all_gather`` returns for one parameter.
Kinds = list[tuple[torch.dtype, torch.Size]]


class Extension:
    """Calls the all-gather extension of one parameter.

    Args:
        original: The parameter before `fully_shard`.
        name: Name of the parameter, for messages.
        module: Module that registers the parameter.
        mesh: Mesh of the sharded parameter. Its last axis shards the parameter.

    Raises:
        InvalidParameterError: The parameter has only one of the two methods, or
            ``fsdp_pre_all_gather`` has a signature that torch does not support.
        MeshError: ``mesh`` has two or more axes without names.
    """

    def __init__(self, original: Tensor, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        given: Any = original
        if not (hasattr(given, PRE_ALL_GATHER) and hasattr(given, POST_ALL_GATHER)):
            raise InvalidParameterError(
                f"{name} defines only one of {PRE_ALL_GATHER} and {POST_ALL_GATHER}; define both "
                "or none"
            )
        signature = inspect.signature(given.fsdp_pre_all_gather)
        if len(signature.parameters) not in (1, 5):
            raise InvalidParameterError(
                f"{PRE_ALL_GATHER} of {name} has the signature {signature}; allowed: (mesh) and "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and not names:
            raise MeshError(
                f"{name} has an all-gather extension, which needs axis names; the mesh {mesh} "
                "has none"
            )
        self.name = name
        self.shape, self.stride = original.shape, original.stride()
        self._takes_all = len(signature.parameters) == 5
        self._mesh = mesh[names[-1]] if mesh.ndim > 1 else mesh
        self._module = module
        self._metadata: Any = None

    def inputs(self, local: Tensor, policy: MixedPrecisionPolicy) -> list[Tensor]:
        """Return the tensors to all-gather, by calling ``fsdp_pre_all_gather``.

        ``local`` is this rank's shard of the parameter. The metadata that the call returns is
        stored for ``fsdp_post_all_gather``.
        """
        given: tuple[Any, ...] = (self._mesh,)
        if self._takes_all:
            given = (*given, self.shape, self.stride, self._module, policy)
        inputs, self._metadata = cast(Any, local).fsdp_pre_all_gather(*given)
        if not isinstance(inputs, tuple | list) or not all(isinstance(t, Tensor) for t in inputs):
            raise StateError(
                f"{PRE_ALL_GATHER} of {self.name} returned {shown(inputs)}; allowed: a tuple of "
                "tensors and metadata"
            )
        return list(inputs)

    def make(
        self, local: Tensor, outputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Call ``fsdp_post_all_gather`` for the first time.

        Args:
            local: This rank's shard of the parameter.
            outputs: The all-gathered tensors.
            dtype: Dtype of the computation.

        Returns:
            The unsharded tensor, without padding, and its inner tensors.
        """
        whole, inner = cast(Any, local).fsdp_post_all_gather(outputs, self._metadata, dtype)
        if whole.shape != self.shape and whole.shape[1:] == self.shape[1:]:
            whole = whole[: self.shape[0]]  # the last rows are padding
        elif whole.shape != self.shape:
            whole = whole.reshape(-1)[: self.shape.numel()].view(self.shape)
        return whole, tuple(inner)

    def write(
        self, local: Tensor, outputs: tuple[Tensor, ...], dtype: torch.dtype, unsharded: Tensor
    ) -> None:
        """Call ``fsdp_post_all_gather`` with ``out=unsharded``, the unsharded parameter.

        The version counter of ``unsharded`` is preserved, because autograd may have saved the
        parameter and would consider it as modified.
        """
        with preserved_versions(unsharded):
            cast(Any, local).fsdp_post_all_gather(outputs, self._metadata, dtype, out=unsharded)


class ExtendedFlatBuffer(FlatBuffer):
    """The shards of parameters with all-gather extensions, and the all-gather of their inputs.

    Each shard is a separate tensor, and ``shard`` is empty. ``fsdp_pre_all_gather`` returns the
    inputs of the all-gather. The inputs of all parameters are copied to one buffer of bytes, which
    is all-gathered into another buffer of bytes. The offsets in these buffers are planned in the
    first all-gather. ``plan`` is used for gradients only.

    - Before the first all-gather, the ``unsharded`` tensors are on the meta device.
    - At the end of the first all-gather, `finish_gather` replaces them by the results of
      ``fsdp_post_all_gather``. The group then creates the unsharded parameters from these results.
    - Later all-gathers write to the same unsharded parameters, because autograd may have saved
      them.

    Args:
        extensions: One for each parameter.
        parts: This rank's shard of each parameter. The shards are copied.
        plan: Plan of the parameters as if they had no extensions.
        axis: Mesh axis that shards the parameters.
        dtype: Dtype of the computation.
        config: Device, mixed precision and ``direct_bytes``.
        collectives: Exchanges the sizes of the inputs between ranks, in the first all-gather.

    Raises:
        ParameterError: A shard is not an instance of the class with the extension.

    Attributes:
        parameters: The unsharded parameters that the group created from ``unsharded``, or None
            before the group has set them.
    """

    parameters: Sequence[Tensor] | None = None

    def __init__(
        self,
        extensions: Sequence[Extension],
        parts: Sequence[Tensor],
        plan: FlatPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        config: GroupConfig,
        collectives: Collectives,
    ) -> None:
        self.plan, self._rank = plan, axis.index
        self.shard_ranges = plan.shard_ranges(axis.index)
        # This uses only operations that torch's fully_shard needs from such classes, too.
        self.shards = [part.new_zeros(part.shape).copy_(part) for part in parts]
        for extension, part in zip(extensions, self.shards, strict=True):
            if not is_extended(part):
                raise ParameterError(
                    f"this rank's rows of {extension.name} are a {type(part).__name__} without "
                    f"{PRE_ALL_GATHER}; slices, new_zeros and copy_ must keep the class"
                )
        self.shard = torch.empty(0, dtype=parts[0].dtype, device=parts[0].device)
        self.unsharded = [
            torch.empty(spec.shape, dtype=dtype, device="meta") for spec in plan.specs
        ]
        self._extensions, self._axis, self._dtype = list(extensions), axis, dtype
        self._config, self._collectives = config, collectives
        self._kinds: list[Kinds] = []  # of each parameter, in the first all-gather
        self._sent: list[Tensor] = []  # the inputs of the all-gather in flight, as bytes
        self._inner: list[tuple[UntypedStorage, int]] = []  # inner tensors' storages and sizes

    @torch.inference_mode(False)  # training uses the same buffers later
    @torch.no_grad()
    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Call ``fsdp_pre_all_gather`` of each parameter, and start one all-gather of all results.

        Returns:
            The all-gather in flight, to pass to `wait`, or None if there is nothing to wait for.
        """
        pairs = zip(self._extensions, self.shards, strict=True)
        inputs = [each.inputs(shard, self._config.precision) for each, shard in pairs]
        self._check_inputs(inputs)
        self._sent = [t.reshape(-1).view(torch.uint8) for each in inputs for t in each]
        return super().gather(axis, collectives, streams)

    def _check_inputs(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Plan the all-gather at the first call.

        At later calls, raise `StateError` if the inputs have other dtypes or shapes than at first.
        """
        kinds = [[(tensor.dtype, tensor.shape) for tensor in each] for each in inputs]
        if not self._kinds:
            self._plan_bytes(inputs)
            self._kinds = kinds  # set last, so that the next all-gather plans after an exception
        for extension, before, now in zip(self._extensions, self._kinds, kinds, strict=True):
            if before != now:
                raise StateError(
                    f"{PRE_ALL_GATHER} of {extension.name} returned {_described(now)}, and before "
                    f"{_described(before)}; dtypes and shapes must stay what they are at first"
                )

    def _plan_bytes(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Plan the all-gather of bytes from the sizes of the inputs on all ranks."""
        names = [extension.name for extension in self._extensions]
        self._exchange(names, [len(each) for each in inputs], "tensors", even=True)
        names = [name for name, each in zip(names, inputs, strict=True) for _ in each]
        own = [tensor.nbytes for each in inputs for tensor in each]
        sizes = self._exchange(names, own, "bytes", even=self.plan.kind == "exact")
        degree, device = self.plan.degree, self._config.device
        plan: GatherPlan
        if sizes == [(size,) * degree for size in own]:
            specs = [ShardSpec(shape=(degree * size,), dim=0, degree=degree) for size in own]
            plan = plan_exact(specs, degree, 1, self._config.direct_bytes, tagged=False)
        else:
            plan = plan_uneven(sizes)
        self._byte_ranges = plan.shard_ranges(self._rank)
        self._connect(plan, torch.uint8, device, output=True, copied=True)

    def _exchange(
        self, names: Sequence[str], own: Sequence[int], unit: str, even: bool
    ) -> list[tuple[int, ...]]:
        """Exchange one number per name between the ranks.

        Args:
            names: Names of parameters, for error messages.
            own: This rank's number for each name.
            unit: Unit of the numbers, for error messages, such as "bytes".
            even: Whether all ranks must have the same number for a name.

        Returns:
            For each name, the numbers of all ranks.

        Raises:
            DisagreementError: ``even`` is True and ranks have different numbers for a name. Raised
                on all ranks.
        """
        axis = self._axis
        if axis.size == 1 or not own:
            return [(number,) for number in own]
        table = torch.tensor(own, dtype=torch.int64, device=self._config.device)
        (table,) = self._collectives.all_gather(axis, [table]).wait()
        found = [tuple(row) for row in table.view(axis.size, -1).t().tolist()]
        pairs = zip(names, found, strict=True)
        differing = [f"{name} {list(row)}" for name, row in pairs if len(set(row)) > 1]
        if even and differing:
            raise DisagreementError(
                f"{PRE_ALL_GATHER} returns, in {unit} on the ranks of {axis.name}: "
                f"{', '.join(differing)}; allowed: equal numbers on all ranks, so pad uneven rows "
                "in it; with layout='ragged' the bytes may differ"
            )
        return found

    def _copy_in(self, target: Tensor) -> None:
        for (start, end), flat in zip(self._byte_ranges, self._sent, strict=True):
            target[start:end].copy_(flat, non_blocking=True)

    def _view_output(self, memory: Tensor) -> None:
        self._received = self._gather_plan.unsharded(memory)
        # The parameters and inner tensors may be views of the previous memory.
        self.parameters, self._inner = None, []
        self._memory = memory

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish_gather(self, work: Waitable | None) -> None:
        """Call ``fsdp_post_all_gather`` of each parameter. Call this method after `wait`."""
        super().finish_gather(work)
        self._sent = []
        received, degree = iter(self._received), self.plan.degree
        outputs = [
            tuple(_stacked(next(received), dtype, shape, degree) for dtype, shape in kinds)
            for kinds in self._kinds
        ]
        each = list(zip(self._extensions, self.shards, outputs, strict=True))
        if self.parameters is None:
            made = [ext.make(shard, given, self._dtype) for ext, shard, given in each]
            storages = [tensor.untyped_storage() for _, inner in made for tensor in inner]
            self._inner = [(storage, storage.nbytes()) for storage in storages]
            self.unsharded = [unsharded for unsharded, _ in made]
            return
        for storage, size in self._inner:
            if storage.nbytes() != size:  # not so if the tensor is a view of the gathered bytes
                storage.resize_(size)
        for (ext, shard, given), parameter in zip(each, self.parameters, strict=True):
            ext.write(shard, given, self._dtype, parameter)

    def free(self) -> None:
        """Free the gathered bytes and the inner tensors, unless a collective may still use them."""
        super().free()
        self._sent = []
        if self._output is not None and not self._output.in_use:
            for storage, _ in self._inner:
                storage.resize_(0)


def _stacked(flat: Tensor, dtype: torch.dtype, shape: torch.Size, degree: int) -> Tensor:
    """Return the inputs of all ranks, concatenated along dim 0, as a view of gathered bytes.

    Args:
        flat: The gathered bytes, uint8.
        dtype: Dtype of the inputs.
        shape: Shape of this rank's input.
        degree: Number of ranks.
    """
    row = math.prod(shape[1:]) * dtype.itemsize
    rows = len(flat) // row if row else degree * shape[0]
    return flat.view(dtype).view(rows, *shape[1:])


def _described(kinds: Kinds) -> list[str]:
    return [f"{dtype} {list(shape)}" for dtype, shape in kinds]
