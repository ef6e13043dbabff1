"""Where each parameter of a group lies in the flat buffers: pure functions of integers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ALIGNMENT = 16  # bytes; what vectorised kernels and network transports like a start to be
DIRECT_BYTES = 64 * 1024  # smaller parts of a rank share one segment: each has a fixed cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter, in elements.

    Every rank has ``rows`` rows of ``row_numel`` elements at ``shard_offset`` of its flat shard,
    the last ranks fewer or none (``torch.chunk``). The unsharded parameter lies at ``full_offset``
    of the flat output. ``direct``: the all-gather puts it there; otherwise a copy does.
    """

    shape: tuple[int, ...]
    rows: int
    row_numel: int
    shard_offset: int
    full_offset: int
    direct: bool

    @property
    def shard_numel(self) -> int:
        """Return the elements per rank, padding included."""
        return self.rows * self.row_numel

    @property
    def numel(self) -> int:
        """Return the elements of the whole parameter."""
        return math.prod(self.shape)

    def held_rows(self, index: int) -> int:
        """Return how many rows the rank at ``index`` holds."""
        return max(0, min(self.rows, self.shape[0] - index * self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group's flat buffers: per rank ``shard_numel`` elements, gathered ``full_numel``.

    ``segments`` are the ``(start, length)`` pieces of the shard that the all-gather sends; piece
    ``(s, n)`` arrives at ``[degree * s, degree * (s + n))`` of the output. The packed piece, the
    last ``packed_numel`` elements before padding, is copied from there to its parameters' places.
    """

    degree: int
    itemsize: int
    slots: tuple[Slot, ...]
    segments: tuple[tuple[int, int], ...]
    shard_numel: int
    packed_offset: int
    packed_numel: int
    full_numel: int

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters themselves."""
        return sum(slot.numel for slot in self.slots) * self.itemsize

    @property
    def gather_bytes(self) -> int:
        """Return the bytes of one gathered output, padding included."""
        return self.degree * sum(length for _, length in self.segments) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of every gather that no parameter needs."""
        return self.gather_bytes - self.parameter_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """The rank-major gradient buffer ``[degree, shard_numel]``, its rows ending in ``padding``.

    Before the padding come as many columns of flags as `plan_gradients` was asked for.
    """

    shard_numel: int
    padding: int


def plan_group(
    shapes: Sequence[tuple[int, ...]],
    degree: int,
    itemsize: int,
    direct_bytes: float | None = None,
    rearranged: Collection[int] = (),
) -> GroupPlan:
    """Return the plan for parameters of these shapes (at least 1-D), split over ``degree`` ranks.

    A parameter is direct if its per-rank part has at least ``direct_bytes`` (64 KiB) and is a
    multiple of 16 bytes; every direct parameter then starts at a multiple of 16 bytes. With one
    rank all are direct: shard and output are the same buffer. The parameters at the positions
    ``rearranged`` are never direct: what arrives is not in their order; they are packed last.
    """
    unit = max(1, ALIGNMENT // itemsize)
    rows = [-(-shape[0] // degree) for shape in shapes]
    row_numel = [math.prod(shape[1:]) for shape in shapes]
    held = [r * n for r, n in zip(rows, row_numel, strict=True)]

    def is_direct(i: int) -> bool:
        if degree == 1:
            return True
        if i in rearranged:
            return False
        return held[i] % unit == 0 and is_large(held[i], itemsize, direct_bytes)

    direct = [i for i in range(len(shapes)) if is_direct(i)]
    packed = [i for i in range(len(shapes)) if not is_direct(i)]
    packed.sort(key=lambda i: i in rearranged)  # a stable sort: otherwise in order
    shard_offset, full_offset = [0] * len(shapes), [0] * len(shapes)
    end = 0
    for i in direct:
        shard_offset[i], full_offset[i] = end, degree * end
        end = _round_up(end + held[i], unit)
    segments = [(shard_offset[i], held[i]) for i in direct if held[i]]
    packed_offset = end
    for i in packed:
        shard_offset[i] = end
        end += held[i]
    packed_numel = end - packed_offset
    if packed_numel:
        segments.append((packed_offset, packed_numel))
    shard_numel = _round_up(end, unit)
    full_end = degree * shard_numel
    for i in packed:
        full_offset[i] = full_end
        full_end = _round_up(full_end + degree * held[i], unit)
    slots = tuple(
        Slot(
            shape=tuple(shapes[i]),
            rows=rows[i],
            row_numel=row_numel[i],
            shard_offset=shard_offset[i],
            full_offset=full_offset[i],
            direct=is_direct(i),
        )
        for i in range(len(shapes))
    )
    return GroupPlan(
        degree=degree,
        itemsize=itemsize,
        slots=slots,
        segments=tuple(segments),
        shard_numel=shard_numel,
        packed_offset=packed_offset,
        packed_numel=packed_numel,
        full_numel=full_end,
    )


def is_large(numel: int, itemsize: int, direct_bytes: float | None = None) -> bool:
    """Return whether a rank's part has at least ``direct_bytes`` (64 KiB)."""
    return numel * itemsize >= (DIRECT_BYTES if direct_bytes is None else direct_bytes)


def plan_gradients(slots: Sequence[Slot], itemsize: int, flags: int = 0) -> GradientPlan:
    """Return the rows in which the gradients of ``slots`` lie, densely and in order, then flags.

    The row ends in up to 15 bytes of padding, so that every row starts at a multiple of 16 bytes.
    """
    unit = max(1, ALIGNMENT // itemsize)
    end = sum(slot.shard_numel for slot in slots) + flags
    row = _round_up(end, unit)
    return GradientPlan(shard_numel=row, padding=row - end)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
