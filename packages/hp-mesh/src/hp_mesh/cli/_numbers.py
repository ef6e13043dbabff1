"""Numbers of the command line, as text in and as integers out."""

from .._errors import ParallelDimsError
from ._problems import refusal

MOST = 2**32  # of anything that can be counted here
MOST_RANKS = 2**18  # so that the groups of any order are listed in seconds
MOST_DIGITS = 10  # of either


def read_count(option: str, text: str | None, most: int = MOST) -> int | None:
    """Return an integer from 1 to ``most``, or None where the option was not given.

    Raises `ParallelDimsError` for any other text.
    """
    if text is None:
        return None
    number = whole_number(text)
    if number is None or number < 1:
        raise _refused(option, text, "a positive integer")
    if number > most:
        raise _refused(option, text, f"at most {most}")
    return number


def read_rank(option: str, text: str | None) -> int | None:
    """Return an integer from 0, or None where the option was not given."""
    if text is None:
        return None
    number = whole_number(text)
    if number is None:
        raise _refused(option, text, "an integer from 0")
    return number


def whole_number(text: str) -> int | None:
    """Return what decimal digits spell, None for other text; very long numbers are cut short."""
    if not (text.isascii() and text.isdecimal()):
        return None
    # Python refuses to read thousands of digits, and no limit here needs them.
    return int(text) if len(text) <= MOST_DIGITS else 10**MOST_DIGITS


def _refused(option: str, text: str, legal: str) -> ParallelDimsError:
    return refusal("number", f"{option} {text!r} is not {legal}", {option: text})
