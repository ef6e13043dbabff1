"""Tags: the number of a unit, encoded in the elements of all-gathers and reductions.

Every rank adds the tag of its unit to the data that it sends. The received tags show whether all
ranks communicated for the same unit. This module has pure functions of integers only.
"""

from collections.abc import Sequence
from functools import cache

# A tag is the number of a unit modulo 2**TAG_BITS in all-gathers, and modulo 2**FLAG_BITS in
# reductions.
TAG_BITS = 16
FLAG_BITS = 12
TAG_FLAGS = 2 * FLAG_BITS


def tag_base(itemsize: int) -> int:
    """Return the base in which all-gathers encode unit numbers, for example 256 for bfloat16.

    All digits are exact in every floating-point dtype of ``itemsize`` bytes: float8_e5m2 has 3
    significant bits, bfloat16 has 8, float32 has 24.
    """
    return {1: 8, 2: 256}.get(itemsize, 2**24)


def tag_width(itemsize: int) -> int:
    """Return the number of elements of ``itemsize`` bytes that a tag needs in an all-gather."""
    return next(n for n in range(1, TAG_BITS + 1) if tag_base(itemsize) ** n >= 2**TAG_BITS)


def tag_digits(number: int, itemsize: int) -> list[int]:
    """Return the tag of a unit in all-gathers: the digits of its number, lowest digit first.

    For example ``[44, 1]`` for the number 300 if ``itemsize`` is 2, because the base is 256.
    """
    base, number = tag_base(itemsize), number % 2**TAG_BITS
    return [number // base**place % base for place in range(tag_width(itemsize))]


def number_of(digits: Sequence[float], itemsize: int) -> int:
    """Return the unit number, modulo 2**TAG_BITS, from the ``digits`` of `tag_digits`."""
    base = tag_base(itemsize)
    return sum(int(digit.real) * base**place for place, digit in enumerate(digits))


@cache
def tag_flags(number: int) -> tuple[bool, ...]:
    """Return the tag of a unit in reductions: the bits of its number, then the inverted bits.

    If all ranks have the same number, exactly half of the flags are zero in the sum over ranks. If
    not, fewer flags are zero. This test works in every dtype and also for averages.
    """
    bits = [bool(number >> place & 1) for place in range(FLAG_BITS)]
    return (*bits, *(not bit for bit in bits))


def flags_agree(values: list[float]) -> bool:
    """Return whether all ranks had the same unit number. ``values`` are the reduced flags."""
    return values.count(0.0) == FLAG_BITS
