"""The kernels of ``scaled_dot_product_attention`` by device, and what they need of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ranges import Kernel
from .._torch import (
    BackwardInputs,
    Gradients,
    cudnn_cuda,
    cudnn_cuda_backward,
    efficient_cuda,
    efficient_cuda_backward,
    flash_cpu,
    flash_cpu_backward,
    flash_cuda,
    flash_cuda_backward,
)
from ._interface import ScoreOptions

Capability = tuple[int, int]

_CUDNN_SINCE = 91500  # before, sequences that 128 does not divide came out wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device's compute capability, the version of cuDNN, and who computes flash attention.

    Attributes:
        capability: Major and minor compute capability; ``None`` where it is unknown, as on devices
            of other makers, where nothing is ruled out.
        cudnn: Version number of cuDNN, 0 without it.
        flash: Implementation that replaces torch's own flash kernels (``"FA3"``), if any.
    """

    capability: Capability | None = None
    cudnn: int = 0
    flash: str | None = None

    @property
    def prefers_cudnn(self) -> bool:
        """Return whether cuDNN is the fastest, as torch's own choice has it: Hopper, Blackwell."""
        if self.capability is None or self.flash is not None:
            return False
        major, minor = self.capability
        return major in (9, 10) and minor in (0, 3) and self.cudnn > _CUDNN_SINCE


_UNKNOWN = Hardware()


def hardware_of(device: torch.device) -> Hardware:
    """Return what is known of a device; equal devices on all ranks give equal answers."""
    # A build for another maker's devices calls them cuda, too.
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.device_count() == 0:
        return _UNKNOWN
    return Hardware(
        capability=torch.cuda.get_device_capability(device),
        cudnn=torch.backends.cudnn.version() or 0,
        flash=torch.nn.attention.current_flash_attention_impl(),
    )


Forward = Callable[..., tuple[Tensor, Tensor]]  # of q, k, v, causal, scale, and a window
Backward = Callable[[BackwardInputs], Gradients]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """A device's kernels, forward and backward, and the tensors that they take.

    A row of a head must be a multiple of ``alignment`` bytes, and no longer than ``longest`` of
    elements. They are compiled for compute capabilities from ``since`` on, for some dtypes later;
    on those of ``narrow`` (first and last) the backward has no head sizes from 193 to 224. Without
    ``two_sizes``, values of another head size than queries and keys are padded to one size.
    ``windows`` are taken as a further argument.
    """

    forward: Forward
    backward: Backward
    dtypes: tuple[torch.dtype, ...]
    alignment: int = 1
    longest: int | None = None
    since: Capability = (0, 0)
    dtypes_since: Mapping[torch.dtype, Capability] = field(default_factory=dict)
    narrow: tuple[tuple[Capability, Capability], ...] = ()
    two_sizes: bool = False
    windows: bool = False

    def lack(
        self,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        capability: Capability | None = None,
    ) -> str | None:
        """Return why such heads cannot be computed, or None; unknown capabilities have all."""
        if head_size == value_size:
            return self._lack_of_size(dtype, head_size, capability)
        if not self.two_sizes:
            return self._lack_of_size(dtype, max(head_size, value_size), capability)
        lacks = (self._lack_of_size(dtype, x, capability) for x in (head_size, value_size))
        return next(filter(None, lacks), None)

    def _lack_of_size(
        self, dtype: torch.dtype, head_size: int, capability: Capability | None
    ) -> str | None:
        if dtype not in self.dtypes:
            return f"its kernels there take {', '.join(map(str, self.dtypes))}, not {dtype}"
        step = max(1, self.alignment // dtype.itemsize)
        if head_size % step:
            return (
                f"its kernels there take head sizes of {dtype} in steps of {step}, not {head_size}"
            )
        if self.longest is not None and head_size > self.longest:
            return f"its kernels there take head sizes up to {self.longest}, not {head_size}"
        return None if capability is None else self._lack_of_device(dtype, head_size, capability)

    def _lack_of_device(
        self, dtype: torch.dtype, head_size: int, capability: Capability
    ) -> str | None:
        if capability < self.since:
            return (
                f"its kernels need a device of compute capability {_dotted(self.since)} or later, "
                f"not {_dotted(capability)}"
            )
        since = self.dtypes_since.get(dtype, self.since)
        if capability < since:
            return (
                f"its kernels take {dtype} from compute capability {_dotted(since)} on, not "
                f"{_dotted(capability)}"
            )
        if 192 < head_size <= 224 and any(a <= capability <= b for a, b in self.narrow):
            return (
                f"its backward takes no head sizes above 192 and up to 224 (got {head_size}) on "
                f"compute capability {_dotted(capability)}"
            )
        return None


@dataclass(frozen=True, slots=True)
class FusedBackend:
    """Kernels of torch by device type; they take grouped heads."""

    name: str
    kernels: Mapping[str, Kernels]

    def supports(
        self,
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        options: ScoreOptions,
    ) -> str | None:
        """Return None for what the device's kernels take, else the reason."""
        if device.type not in self.kernels:
            known = " and ".join(self.kernels)
            return f"it has kernels with log-sum-exp for {known}, not for {device.type}"
        capability = hardware_of(device).capability
        kernels = self.kernels[device.type]
        lack = kernels.lack(dtype, head_size, value_size, capability)
        if options.scale is not None and options.scale < _LEAST_SCALE:
            lack = lack or f"its kernels mask before they scale, and take no scale {options.scale}"
        return lack or options.lack("scale", *(("window",) if kernels.windows else ()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        kernels = self.kernels[q.device.type]
        size, value_size = q.shape[3], v.shape[3]
        window = () if options.window is None else (options.window,)
        if size == value_size or kernels.two_sizes:
            return kernels.forward(q, k, v, causal, options.scale, *window)
        wide = max(size, value_size)
        q, k, v = (pad_heads(x, wide) for x in (q, k, v))
        out, lse = kernels.forward(q, k, v, causal, options.scale_of(size), *window)
        return cut_heads(out, value_size), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv."""
        kernels = self.kernels[q.device.type]
        size, value_size = q.shape[3], v.shape[3]
        if size == value_size or kernels.two_sizes:
            rest = causal, options.scale, options.window
            return kernels.backward(BackwardInputs(grad, q, k, v, out, lse, *rest))
        wide = max(size, value_size)
        grad, q, k, v, out = (pad_heads(x, wide) for x in (grad, q, k, v, out))
        rest = causal, options.scale_of(size), options.window
        dq, dk, dv = kernels.backward(BackwardInputs(grad, q, k, v, out, lse, *rest))
        return cut_heads(dq, size), cut_heads(dk, size), cut_heads(dv, value_size)


_LEAST_SCALE = 2.0**-126  # the least normal number of float32, in which kernels hold it


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Return heads of a greater size; the zeros add nothing to scores, and give outputs of zero."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def cut_heads(x: Tensor, size: int) -> Tensor:
    """Return the heads that were padded, without memory of what is left out."""
    return x if x.shape[-1] == size else x.narrow_copy(-1, 0, size)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


HALVES = (torch.bfloat16, torch.float16)
# What sdp_utils.cpp of torch 2.11 to 2.13 asks of devices before it calls a kernel; the kernels
# themselves are called here, past those checks.
_AMPERE = (8, 0)
# Dao, arXiv 2307.08691.
SDPA = FusedBackend(
    "sdpa",
    {
        "cpu": Kernels(
            forward=flash_cpu,
            backward=flash_cpu_backward,
            dtypes=(torch.float64, torch.float32, *HALVES),
        ),
        "cuda": Kernels(
            forward=flash_cuda,
            backward=flash_cuda_backward,
            dtypes=HALVES,
            alignment=16,
            longest=256,
            since=_AMPERE,
            narrow=(((8, 6), (8, 9)), ((12, 0), (12, 1))),
            windows=True,
        ),
    },
)
# Rabe and Staats, arXiv 2112.05682.
EFFICIENT = FusedBackend(
    "efficient",
    {
        "cuda": Kernels(
            forward=efficient_cuda,
            backward=efficient_cuda_backward,
            dtypes=(torch.float32, *HALVES),
            alignment=16,
            since=(5, 0),
            two_sizes=True,
            dtypes_since={torch.bfloat16: _AMPERE},
        )
    },
)
CUDNN = FusedBackend(
    "cudnn",
    {
        "cuda": Kernels(
            forward=cudnn_cuda,
            backward=cudnn_cuda_backward,
            dtypes=HALVES,
            alignment=16,
            longest=128,
            since=_AMPERE,
        )
    },
)
