"""Flat tensors with memory that can be freed and allocated again while views stay valid."""

import torch
from torch import Tensor


class ResizableBuffer:
    """A flat tensor with memory that can be freed and allocated again, while views stay valid.

    The constructor allocates the memory, because torch creates views of allocated memory only.

    A collective that uses the memory sets ``in_use`` before it starts, and clears it after its
    ``wait`` has returned. While ``in_use`` is set, `free` is a no-op, and `allocate` replaces
    ``tensor`` and ``writable`` by tensors with other memory. The previous memory is freed when the
    collective drops its references.

    Attributes:
        tensor: The flat tensor ``[numel]``.
        writable: A tensor over the same memory with its own version counter. All-gathers write to
            it, so that autograd does not consider saved views of ``tensor`` as modified.
        in_use: Whether a collective may still use the memory.
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
        """Allocate the memory, uninitialized.

        If a collective may still use the current memory, other memory is allocated instead.
        """
        if self.in_use:
            with torch.inference_mode(False):
                self._new_memory()
        else:
            self._storage.resize_(self._bytes)

    def free(self) -> None:
        """Free the memory, so that views become unreadable. A no-op if ``in_use`` is True."""
        # The memory returns to the allocator pool of its stream. That stream is the current stream,
        # or a side stream that waits for the current one before each use. So reads that are already
        # enqueued finish before the memory is written again.
        if not self.in_use:
            self._storage.resize_(0)


# Dtypes that NCCL does not support.
_UNSUPPORTED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def as_sent(flat: Tensor) -> Tensor:
    """Return a view of ``flat`` for collectives: as uint8 if backends may not support its dtype."""
    return flat.view(torch.uint8) if flat.dtype in _UNSUPPORTED else as_bytes(flat)


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view of ``flat`` as uint8 if its elements have one byte, otherwise ``flat``.

    gloo and some copy kernels do not support float8.
    """
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat


def in_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous view, with a storage of exactly these bytes.

    The result has its own version counter, and keeps the buffer alive. A plain view has two
    disadvantages:

    - ``torch.save`` would write the whole storage of the buffer.
    - A DTensor copies the storage offset of its local tensor. If the offset is not 0,
      ``torch.save`` and ``deepcopy`` fail, because the DTensor has no memory at this offset.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(storage, 0, view.shape, view.stride())
