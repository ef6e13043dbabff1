"""What ranks, heads and lengths allow, checked before anything is communicated."""

from .._errors import DegreeError, InputError, LayoutError, described
from .._layouts import Contiguous, Layout


def check_degree(ulysses_degree: int, n: int) -> None:
    """Raise `DegreeError` unless ``n`` ranks can run at ``ulysses_degree``."""
    given = ulysses_degree
    if type(given) is not int or not 1 <= given <= n or n % given:
        legal = [u for u in range(1, n + 1) if n % u == 0]
        where = "one context parallel rank" if n == 1 else f"{n} context parallel ranks"
        raise DegreeError(
            f"ulysses_degree={ulysses_degree!r} does not divide {where}; use {_listed(legal)}"
        )


def check_heads(q_heads: int, kv_heads: int, ulysses_degree: int) -> None:
    """Raise `DegreeError` unless the heads group, and every Ulysses rank gets one."""
    if type(q_heads) is not int or type(kv_heads) is not int:
        raise DegreeError(
            f"numbers of heads are ints, got q_heads={q_heads!r} and kv_heads={kv_heads!r}"
        )
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise DegreeError(
            f"{q_heads} query heads do not form equal groups over {kv_heads} kv heads; the number "
            f"of query heads must be a multiple of the number of kv heads"
        )
    if q_heads < ulysses_degree:
        raise DegreeError(
            f"{q_heads} query heads and {kv_heads} kv heads cannot give each of {ulysses_degree} "
            f"Ulysses ranks a head; use ulysses_degree <= {q_heads} or combine with ring"
        )


def check_sizes(*, batch: int, head_size: int, itemsize: int) -> None:
    """Raise `InputError` unless these can be the sizes of a tensor, which may be empty."""
    least = {"batch": (batch, 0), "head_size": (head_size, 0), "itemsize": (itemsize, 1)}
    for name, (value, lowest) in least.items():
        if type(value) is not int or value < lowest:
            raise InputError(f"{name}={described(value)} is no size; use an int from {lowest} on")


def check_flags(*, keep_kv: object, load_balance: object) -> None:
    """Raise `InputError` for flags that are neither True nor False; ``keep_kv`` may be None."""
    if keep_kv is not None and type(keep_kv) is not bool:
        raise InputError(f"keep_kv is {described(keep_kv)}; use True, False or None")
    if type(load_balance) is not bool:
        raise InputError(f"load_balance is {described(load_balance)}; use True or False")


def check_rank(rank: int, n: int) -> None:
    """Raise `InputError` unless ``rank`` is one of ``n``."""
    if type(rank) is not int or not 0 <= rank < n:
        raise InputError(f"a plan of {n} ranks has no rank {rank!r}; use 0 to {n - 1}")


def check_balance(
    layout: Layout, n: int, seq_len: int, ulysses_degree: int, schedule: object
) -> None:
    """Raise unless every rank can swap half of its queries under ``load_balance``."""
    if ulysses_degree != 1 or schedule != "gather":
        raise DegreeError(
            f"load_balance swaps queries around gathered keys, got ulysses_degree="
            f"{ulysses_degree} and schedule={schedule!r}; use ulysses_degree=1 and "
            f"schedule='gather', or layout=Zigzag() without load_balance"
        )
    if not isinstance(layout, Contiguous):
        raise LayoutError(
            f"load_balance is for sequences that lie Contiguous, got {layout!r}; leave it out"
        )
    if seq_len % (2 * n):
        raise LayoutError(
            f"load_balance halves equal local lengths, but {seq_len} positions on {n} ranks do not "
            f"give each an even number; pad to a multiple of {2 * n}, or use layout=Zigzag()"
        )


def _listed(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
