"""The room that a dispatcher of fixed sizes needs, from numbers alone."""

from math import ceil

from .._errors import ExpertConfigError
from .._sizes import check_choices, check_factors, check_sizes


def choose_capacity(factor: float, *, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the capacity of `Padded` that is ``factor`` times an even load, rounded up.

    ``num_tokens`` is the most that a rank gives in one call, so that all ranks take the same: with
    as many tokens, a rank's rows are ``factor * num_tokens * top_k`` where that divides evenly
    (GShard, arXiv 2006.16668, section 2.2). At 1 nothing is dropped of an even load.
    `ExpertConfigError` for numbers that make no capacity.
    """
    check_sizes({"num_tokens": num_tokens, "num_experts": num_experts})
    check_choices(top_k, num_experts)
    check_factors({"factor": factor})
    if not factor:
        raise ExpertConfigError("factor=0 leaves room for no row; use a number above 0")
    # 1.1 * 10 is a little above 11, which one more row would not help.
    return ceil(round(factor * num_tokens * top_k / num_experts, 6)) or 1
