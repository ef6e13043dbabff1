"""The number of a unit, encoded in what ranks gather and reduce.

Every rank adds the tag of the unit for which it communicates. The result shows whether all ranks
meant the same unit. Pure functions of integers.
"""

from collections.abc import Sequence
from functools import cache

# Tags hold the number of a unit modulo 2**TAG_BITS in gathers, and 2**FLAG_BITS in reductions.
TAG_BITS = 16
FLAG_BITS = 12
TAG_FLAGS = 2 * FLAG_BITS


def tag_base(itemsize: int) -> int:
    """Return the base in which gathers encode unit numbers.

    Each digit is exact in every floating-point dtype of ``itemsize`` bytes: float8_e5m2 has 3
    significant bits, bfloat16 has 8, float32 has 24.
    """
    return {1: 8, 2: 256}.get(itemsize, 2**24)


def tag_width(itemsize: int) -> int:
    """Return the number of digits of a tag in a gather."""
    return next(n for n in range(1, TAG_BITS + 1) if tag_base(itemsize) ** n >= 2**TAG_BITS)


def tag_digits(number: int, itemsize: int) -> list[int]:
    """Return the tag of a unit in gathers: the digits of its number, lowest digit first."""
    base, number = tag_base(itemsize), number % 2**TAG_BITS
    return [number // base**place % base for place in range(tag_width(itemsize))]


def number_of(digits: Sequence[float], itemsize: int) -> int:
    """Return the unit number, modulo 2**TAG_BITS, that `tag_digits` encoded."""
    base = tag_base(itemsize)
    return sum(int(digit.real) * base**place for place, digit in enumerate(digits))


@cache
def tag_flags(number: int) -> tuple[bool, ...]:
    """Return the tag of a unit in reductions: the bits of its number, then the inverted bits.

    In the sum over ranks, exactly half of these flags are zero if all ranks have the same number,
    and fewer if not. That holds in every dtype and for averages, because only zero counts.
    """
    bits = [bool(number >> place & 1) for place in range(FLAG_BITS)]
    return (*bits, *(not bit for bit in bits))


def flags_agree(values: list[float]) -> bool:
    """Return whether reduced flags are the tag of a single unit."""
    return values.count(0.0) == FLAG_BITS
