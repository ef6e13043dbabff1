"""The kernels behind ``torch.nn.functional.scaled_dot_product_attention``."""

import torch
from torch import Tensor

from .._bands import Kernel
from .._torch import flash_cpu, flash_cpu_backward, flash_cuda, flash_cuda_backward

_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}


class SdpaBackend:
    """The flash kernels on CPU and CUDA (Dao, arXiv 2307.08691); grouped heads without copies."""

    name = "sdpa"

    def supports(self, kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None for the dtypes of the device's kernel, else the reason."""
        if device.type not in _DTYPES:
            return f"it has kernels with log-sum-exp for cpu and cuda, not for {device.type}"
        if dtype not in _DTYPES[device.type]:
            return (
                f"its kernels there take {', '.join(map(str, _DTYPES[device.type]))}, not {dtype}"
            )
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        kernel = flash_cuda if q.is_cuda else flash_cpu
        return kernel(q, k, v, causal, scale)

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
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv."""
        kernel = flash_cuda_backward if q.is_cuda else flash_cpu_backward
        return kernel(grad, q, k, v, out, lse, causal, scale)
