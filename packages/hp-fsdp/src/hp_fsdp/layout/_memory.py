"""Flat memory that is freed and allocated again under the same views."""

import torch
from torch import Tensor


class ResizableBuffer:
    """A flat tensor whose memory can be freed and allocated again, while views of it stay valid.

    The buffer begins allocated, because torch creates views of allocated memory only.

    A collective that uses the memory sets ``in_use`` before it starts, and clears it after its
    ``wait`` has returned. While ``in_use`` is set, the memory is neither freed nor reused: `free`
    does nothing, and `allocate` creates new memory with a new ``tensor`` and ``writable``. The old
    memory is freed when the collective drops its references.

    Attributes:
        tensor: The flat tensor ``[numel]``.
        writable: The same memory with its own version counter, so that autograd does not take a
            repeated all-gather of the same values for a change of saved tensors.
        in_use: Whether a collective may use the memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._new_memory()

    def _new_memory(self) -> None:
        tensor = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self.tensor: Tensor = tensor
        self.writable: Tensor = tensor.data
        self._storage = tensor.untyped_storage()
        self._bytes = tensor.nbytes
        self.in_use = False

    def allocate(self) -> None:
        """Allocate memory with arbitrary contents, at a new address if a collective may use it."""
        if self.in_use:
            with torch.inference_mode(False):
                self._new_memory()
        else:
            self._storage.resize_(self._bytes)

    def free(self) -> None:
        """Free the memory, unless a collective may use it. Views become unreadable."""
        # The memory returns to the allocator pool of its stream. That is the current stream, or a
        # side stream that waits for the current one before each use. So reads that were enqueued
        # before finish before the memory is written again.
        if not self.in_use:
            self._storage.resize_(0)


# Dtypes that NCCL does not support.
_UNSUPPORTED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def as_sent(flat: Tensor) -> Tensor:
    """Return a view to all-gather: as bytes if a backend may not support the dtype."""
    return flat.view(torch.uint8) if flat.dtype in _UNSUPPORTED else as_bytes(flat)


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view to copy or send: as bytes if an element has one byte.

    Neither gloo nor all copy kernels support float8.
    """
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat


def in_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous view, with a storage of exactly these bytes.

    The result has its own version counter and keeps the buffer alive. ``torch.save`` would write
    the whole storage of a plain view. A DTensor also copies the storage offset of its local tensor,
    and ``torch.save`` and ``deepcopy`` fail because a DTensor itself has no memory at this offset.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(storage, 0, view.shape, view.stride())
