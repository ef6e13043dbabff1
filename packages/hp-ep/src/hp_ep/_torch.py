"""Names of torch that are not public, resolved once.

``grouped_mm`` is public in ``torch.nn.functional`` from torch 2.10; it has no public way to ask
what it takes. `can_group` states what its kernels check in 2.11 to 2.13: a floating dtype of at
most 32 bits, and rows that start at multiples of 16 bytes. `has_grouped_kernel` states where there
is one (``aten/src/ATen/native/cuda/GroupedBlas.cpp``): elsewhere the product runs one expert after
the other and copies the offsets to the host for that, three times in forward and six in backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hp_dtensor import torch_compat

from ._errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes
_MOST_GROUPS = 1023  # of the kernel for GPUs

_grouped_mm: Callable[..., Tensor] = functional.grouped_mm


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What decides on a device's kernels: ``cuda``, ``hip`` or its type, and its capability."""

    kind: str
    version: tuple[int, int] = (0, 0)


def capability_of(device: torch.device) -> Capability:
    """Return the capability of ``device``."""
    if device.type != "cuda":
        return Capability(kind=device.type)
    kind = "cuda" if torch.version.hip is None else "hip"
    return Capability(kind=kind, version=torch.cuda.get_device_capability(device))


def has_grouped_kernel(capability: Capability, dtype: torch.dtype, num_groups: int) -> bool:
    """Return whether a grouped product leaves its offsets where they are.

    On the CPU they are on the host anyway. On the meta device no dtype but bfloat16 is known.
    """
    if capability.kind == "cpu":
        return dtype in _GROUPED_DTYPES
    if dtype != torch.bfloat16 or num_groups > _MOST_GROUPS:
        return False
    if capability.kind == "cuda":
        return capability.version[0] in (9, 10)
    if capability.kind == "hip":
        return capability.version in ((9, 4), (9, 5))
    return capability.kind == "meta"


def can_group(rows: Tensor, *weights: Tensor) -> bool:
    """Return whether `grouped_mm` takes ``rows [n, in]`` and ``weights [experts, out, in]``.

    And does so without waiting for the device. The gradient's grouped products run over ``out``
    too, so both lengths must be aligned.
    """
    if rows.dtype not in _GROUPED_DTYPES or any(w.dtype != rows.dtype for w in weights):
        return False
    if not has_grouped_kernel(capability_of(rows.device), rows.dtype, weights[0].shape[0]):
        return False
    lengths = [length for w in weights for length in w.shape[1:]]
    offsets = [w.storage_offset() for w in weights] + [rows.storage_offset()]
    return all(w.is_contiguous() for w in weights) and all(
        n * rows.element_size() % _ALIGNMENT == 0 for n in lengths + offsets
    )


def can_group_float8(rows: Tensor) -> bool:
    """Return whether `scaled_grouped_mm` takes rows on the device of ``rows``.

    Its kernel is for CUDA devices of compute capability 9.0 (2.11 to 2.13).
    """
    capability = capability_of(rows.device)
    return capability.kind == "cuda" and capability.version == (9, 0)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return torch's grouped product; ``ends [groups]`` int32, the last of them the rows."""
    return _grouped_mm(a, b, offs=ends)


def scaled_grouped_mm(
    rows: Tensor,
    weight: Tensor,
    scales: Tensor,
    weight_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``rows[i] @ weight[group of i].T`` of float8 numbers with scales, in ``dtype``.

    ``rows [n, in]`` with ``scales [n]``, ``weight [groups, out, in]`` with ``weight_scales
    [groups, out]``. The kernel gives bfloat16.
    """
    product: Tensor = torch._scaled_grouped_mm(
        rows,
        weight.transpose(-2, -1),
        scales,
        weight_scales,
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product.to(dtype)


def unscaled_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of float8 matrices, in float32.

    ``_scaled_mm`` has no public name, and takes scales of rows on the CPU from 2.13 on only.
    """
    one = torch.ones((), device=a.device)
    product: Tensor = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product


def dense(x: Tensor) -> Tensor:
    """Return ``x``, contiguous also by the strides of dimensions without elements."""
    # Tensors without elements count as contiguous whatever their strides, which are checked too.
    if x.is_contiguous() and x.numel():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def fenced(function: F) -> F:
    """Return ``function``, which a compiled graph leaves: what communicates is no part of it."""
    result: F = torch.compiler.disable(function)
    return result


def graph_op(
    name: str,
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    *,
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    save: Callable[..., None] | None = None,
) -> Callable[..., Tensor]:
    """Return ``run`` as one operator of compiled graphs; ``fake`` makes what it returns.

    ``name`` is a dotted path, so that copies of the package have operators of their own.
    """
    path, _, last = name.rpartition(".")
    op = torch.library.custom_op(f"{path.replace('.', '_')}::{last}", run, mutates_args=())
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    return cast(Callable[..., Tensor], op)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of ``x`` are computed: autocast's, if it is on."""
    dtype = torch_compat.autocast_dtype(x.device)
    return x.dtype if dtype is None or x.dtype not in _GROUPED_DTYPES else dtype


def as_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's dtype where that is on for its device; as torch, not float64."""
    return x.to(autocast_dtype(x))


def is_saved(value: object) -> bool:
    """Return whether ``value`` is of a checkpoint: torch fills in an entry that one lacks."""
    return type(value).__module__ != "torch.distributed.checkpoint.state_dict"


def before_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Let ``hook(module, state_dict, prefix, ...)`` see what ``module`` is about to load."""
    module.register_load_state_dict_pre_hook(hook)


class KeepsDtype(nn.Module):
    """A module whose own buffers keep their dtype where the rest of it is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self.get_buffer(name)
            if now.dtype != buffer.dtype:
                setattr(self, name, buffer.to(now.device))
        return self


def name_in_state(model: nn.Module, name: str) -> str:
    """Return what ``get_model_state_dict`` calls a parameter: without the names of wrappers."""
    # Here, as it brings all of torch's sharding with it, which computing does not need.
    from torch.distributed.checkpoint.state_dict import _get_fqns

    (found,) = _get_fqns(model, name)
    return found


def first_order(backward: F) -> F:
    """Make the backward of an autograd function raise an error if ``create_graph`` is True."""
    return torch_compat.first_order(
        backward,
        UnsupportedError,
        "a backward with create_graph=True through a mixture of experts is not supported: "
        "its gradients have no graph, and second derivatives would lack terms; leave "
        "create_graph out, or take second derivatives of the other layers alone",
    )


def run_function(function: type[torch.autograd.Function], *args: object) -> Tensor:
    """Return ``function.apply(*args)``, which torch leaves without types, as the tensor it is."""
    result: Tensor = function.apply(*args)
    return result


def run_several(function: type[torch.autograd.Function], *args: object) -> tuple[Tensor, ...]:
    """Return ``function.apply(*args)`` of a function with any number of results."""
    results: tuple[Tensor, ...] = function.apply(*args)
    return results
