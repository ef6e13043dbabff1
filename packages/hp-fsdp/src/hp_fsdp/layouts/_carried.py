"""What a collective carries in place of values that it may not know."""

import torch
from torch import Tensor


def carried(flat: Tensor) -> Tensor:
    """Return a view to gather: plain bytes where elements have eight bits.

    Gathering only moves them, and gloo knows no floating-point numbers of eight bits.
    """
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
