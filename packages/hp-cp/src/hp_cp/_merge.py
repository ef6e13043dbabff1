"""Join attention over disjoint sets of keys."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold attention over further keys into ``out`` and ``lse``, in place.

    ``out`` is ``[..., rows, head_size]``, ``lse`` the log-sum-exp of the scores ``[..., rows]``.
    Rows without keys have ``lse = -inf`` and leave the other side as it is. The weight
    is that of online softmax (Milakov and Gimelshein, arXiv 1805.02867, section 3).
    """
    other_lse = other_lse.to(lse.dtype)
    # A gap after the rows of each head: kernels round the last few elements of a stretch in another
    # way than the others, so that a row's bits would depend on how many heads lie beside it.
    apart = lse.new_empty((*lse.shape[:-1], lse.shape[-1] + 1))[..., :-1]
    weight = torch.sub(other_lse, lse, out=apart).sigmoid_()
    weight.masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, other_lse, out=apart))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of ``dtype`` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
