"""The kernels behind ``torch.nn.functional.scaled_dot_product_attention``."""

import torch
from torch import Tensor

from .._plan import Kind
from .._torch import flash_cpu, flash_cpu_backward

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class SdpaBackend:
    """The flash kernel on CPU (Dao, arXiv 2307.08691); grouped heads without copies."""

    name = "sdpa"

    def supports(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None for floating dtypes on CPU, else the reason."""
        if device.type != "cpu":
            return f"it has a kernel with log-sum-exp for cpu, not for {device.type}"
        if dtype not in _DTYPES:
            return f"its kernels take {', '.join(map(str, _DTYPES))}, not {dtype}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        return flash_cpu(q, k, v, causal, scale)

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
        return flash_cpu_backward(grad, q, k, v, out, lse, causal, scale)
