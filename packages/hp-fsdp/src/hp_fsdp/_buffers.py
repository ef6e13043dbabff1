"""Flat memory that comes and goes under views that stay."""

import torch
from torch import Tensor


class Resize:
    """A flat buffer whose memory is allocated and freed in place.

    It begins allocated, because torch makes views of existing memory only; they outlive `free` and
    are readable again after `allocate`. `writable` is the same memory with a version counter of its
    own, so that gathering the same values again does not look to autograd like a change of what it
    saved.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self.writable: Tensor = self.tensor.data
        self._bytes = numel * self.tensor.element_size()

    def allocate(self) -> None:
        """Get memory; the contents are arbitrary."""
        self.tensor.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Give the memory back; views become unreadable."""
        self.tensor.untyped_storage().resize_(0)
