"""Flat memory that comes and goes under views that stay, and who gives it."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ._errors import ShardingError, StateError, is_int, shown


class Buffer(Protocol):
    """A flat buffer whose views outlive its memory.

    ``writable`` is the same memory with a version counter of its own, so that gathering the same
    values again does not look to autograd like a change of what it saved. A buffer begins
    allocated, because torch makes views of existing memory only.

    Memory belongs to the collectives that use it. While it is ``lent``, which is set before one is
    started and taken back when waiting for it returned, it is never freed, resized or given to
    anyone else: `free` leaves it to the collective, whose own references keep it alive, and the
    next `allocate` gets new memory, with a new ``tensor`` and ``writable``.
    """

    tensor: Tensor
    writable: Tensor
    lent: bool

    @property
    def available(self) -> bool:
        """Return whether `allocate` can succeed now."""
        ...

    def allocate(self) -> None:
        """Get memory; the contents are arbitrary. New memory if the last is still lent."""
        ...

    def free(self) -> None:
        """Give the memory back, unless it is lent; views become unreadable."""
        ...


@runtime_checkable
class Buffers(Protocol):
    """Who gives memory to gathered parameters and packed gradients."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Return a buffer for what one group gathers."""
        ...

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return flat memory for packed gradients; the contents are arbitrary."""
        ...

    def give(self, flat: Tensor) -> None:
        """Take back what `take` returned."""
        ...


class Resize:
    """Allocates memory for each all-gather and each reduction, and frees it after use.

    This is the default for the argument ``buffers`` of `fully_shard`.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8), buffers=Resize())
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Return a buffer for unsharded parameters that share one all-gather.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the memory.

        Returns:
            A buffer that allocates and frees its memory in place.
        """
        return ResizeBuffer(numel, dtype, device)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor for packed gradients, with arbitrary contents.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the memory.

        Returns:
            A new tensor ``[numel]``.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, flat: Tensor) -> None:
        """Take back a tensor from `take`. A no-op: its last reference frees the memory.

        Args:
            flat: The tensor.
        """


class ResizeBuffer:
    """A flat buffer whose memory is allocated and freed in place."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> None:
        self._make: Callable[[], Tensor] = partial(
            torch.empty, numel, dtype=dtype, device=device, pin_memory=pinned
        )
        self.tensor: Tensor = self._make()
        self.writable: Tensor = self.tensor.data
        self._storage = self.tensor.untyped_storage()
        self._bytes = numel * self.tensor.element_size()
        self.lent = False
        self.available = True  # there is always more memory

    def allocate(self) -> None:
        """Get memory; the contents are arbitrary. New memory if the last is still lent."""
        if self.lent:
            self._replace()
        else:
            self._storage.resize_(self._bytes)

    def _replace(self) -> None:
        with torch.inference_mode(False):
            tensor = self._make()
            self.tensor, self.writable, self.lent = tensor, tensor.data, False
            self._storage = tensor.untyped_storage()

    def free(self) -> None:
        """Give the memory back, unless it is lent; views become unreadable."""
        # It goes to the pool of the stream that it was got on: the current one, or one that waits
        # for it, so that what reads it comes before anything that the pool lends it to.
        if not self.lent:
            self._storage.resize_(0)


class Ring:
    """Reuses a fixed number of memory blocks for the unsharded parameters of many units.

    Pass the same ring to `fully_shard` for units that run one after another, such as the layers of
    a model. A memory block of the ring is called a slot. The calls of `fully_shard` assign slots in
    turn: with 2 slots, layers 0, 2, 4, ... use the first slot and layers 1, 3, 5, ... the second.
    A unit with parameters of several dtypes gets one slot per dtype. A slot is as large as the
    largest all-gather that uses it. Packed gradients reuse memory of the ring, too.

    - Two units with the same slot cannot be unsharded at the same time. If a unit needs a slot that
      another unit still uses, `StateError` is raised.
    - A prefetch is skipped while its slot is in use. A prefetched unit that does not run yet loses
      the slot if another unit needs it.
    - Do not pass the ring for units that stay unsharded after forward, such as the root.
    - Do not pass it for units that stay unsharded until the end of backward: units inside reentrant
      activation checkpointing, and units whose outputs cannot have a gradient hook.

    Args:
        slots: Number of slots, at least 2, so that communication overlaps with computation.

    Raises:
        ShardingError: ``slots`` is not an integer of at least 2.

    Examples:
        On 4 ranks:

        >>> ring, model = Ring(2), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> for layer in model:
        ...     _ = fully_shard(layer, buffers=ring)
        >>> fully_shard(model)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, slots: int) -> None:
        """Make a ring; raises `ShardingError` for fewer than 2 slots, which could not overlap."""
        given: object = slots
        if not is_int(given) or given < 2:
            raise ShardingError(f"a ring of {shown(given)} slots; legal are 2, 3, ...")
        self._count = slots
        self._made = 0
        self._slots: dict[tuple[int, torch.device], _Slot] = {}
        self._free: list[Tensor] = []

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Return a buffer in the next slot, for unsharded parameters that share one all-gather.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the memory.

        Returns:
            A buffer that uses the memory of the slot.
        """
        position = self._made % self._count
        self._made += 1
        if (position, device) not in self._slots:
            self._slots[position, device] = _Slot(device, self._count)
        return RingBuffer(self._slots[position, device], numel, dtype)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor for packed gradients, with arbitrary contents.

        Args:
            numel: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the memory.

        Returns:
            A tensor ``[numel]``. It reuses memory passed to `give` if that memory is large enough.
        """
        size = numel * dtype.itemsize
        fits = [(flat.numel(), i) for i, flat in enumerate(self._free) if flat.device == device]
        chosen = min((each for each in fits if each[0] >= size), default=None)
        if chosen is None:
            return torch.empty(size, dtype=torch.uint8, device=device).view(dtype)
        return self._free.pop(chosen[1])[:size].view(dtype)

    def give(self, flat: Tensor) -> None:
        """Take back a tensor from `take`, so that a later reduction can reuse its memory.

        Args:
            flat: The tensor.
        """
        # The current stream waited for the reduce-scatter that read it, and packs the next one.
        storage = flat.untyped_storage()
        empty = torch.empty(0, dtype=torch.uint8, device=flat.device)
        self._free.append(empty.set_(storage, 0, (storage.nbytes(),), (1,)))


class _Slot:
    """Memory that several groups use, one at a time.

    On an accelerator the next group's gather begins after all that the current stream was given,
    the last reads of the group before included, so that a slot passes on at once on the host.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.count = count
        self.owner: RingBuffer | None = None
        self.lent = False

    def grow(self, size: int) -> None:
        storage = self.memory.untyped_storage()
        if storage.nbytes() >= size:
            return
        if self.lent:
            self._replace(size)
        else:
            storage.resize_(size)

    def renew(self) -> None:
        """Leave memory that is still lent to the collective, and get as much anew."""
        if self.lent:
            self._replace(self.memory.untyped_storage().nbytes())

    def _replace(self, size: int) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(size, dtype=torch.uint8, device=self.memory.device)
        self.lent = False


class RingBuffer:
    """One group's view of a slot."""

    def __init__(self, slot: _Slot, numel: int, dtype: torch.dtype) -> None:
        slot.grow(numel * dtype.itemsize)
        self._slot = slot
        self._numel, self._dtype = numel, dtype
        self.tensor: Tensor
        self.writable: Tensor
        self._view()

    def _view(self) -> None:
        memory = self._slot.memory
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=self._dtype, device=memory.device)
            tensor = empty.set_(memory.untyped_storage(), 0, (self._numel,), (1,))
            self.tensor, self.writable, self._memory = tensor, tensor.data, memory

    @property
    def available(self) -> bool:
        """Return whether no other group has the slot."""
        return self._slot.owner in (None, self)

    def allocate(self) -> None:
        """Claim the slot; raises `StateError` if another group has it."""
        if not self.available:
            raise StateError(
                f"a ring of {self._slot.count} slots, and two groups of one slot are needed at "
                "once; use more slots, or give units that stay gathered memory of their own"
            )
        self._slot.renew()
        if self._memory is not self._slot.memory:
            self._view()
        self._slot.owner = self

    @property
    def lent(self) -> bool:
        """Return whether a collective uses the slot's memory."""
        return self._slot.lent

    @lent.setter
    def lent(self, lent: bool) -> None:
        if self._memory is self._slot.memory:  # not another one by now
            self._slot.lent = lent

    def free(self) -> None:
        """Release the slot; its memory stays with a collective that it is lent to."""
        if self._slot.owner is self:
            self._slot.owner = None


# Kinds of numbers that NCCL knows nothing of.
_UNKNOWN = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def as_sent(flat: Tensor) -> Tensor:
    """Return a view to gather: plain bytes where a backend may not know the numbers."""
    return flat.view(torch.uint8) if flat.dtype in _UNKNOWN else as_bytes(flat)


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view to move: plain bytes where elements have eight bits.

    Neither gloo nor all copies know floating-point numbers of eight bits.
    """
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat


def in_own_storage(view: Tensor) -> Tensor:
    """Return a contiguous view of a flat buffer as a tensor whose storage is these bytes alone.

    It is the same memory, with a version counter of its own, and keeps the buffer alive. A plain
    view has the storage of the whole buffer, all of which ``torch.save`` writes, and an offset in
    it, which a DTensor takes over: ``torch.save`` and ``deepcopy`` look for memory behind that
    offset, where a DTensor has none.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    empty = torch.empty(0, dtype=view.dtype, device=view.device)
    return empty.set_(storage, 0, view.shape, view.stride())
