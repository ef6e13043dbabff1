"""How many bytes each dispatcher is expected to move, from numbers alone."""

from dataclasses import dataclass
from math import ceil, comb
from typing import Literal, get_args

from .._errors import ExpertConfigError
from .._sizes import check_choices, check_factors, check_sizes

Kind = Literal["local", "all_to_all", "dedup", "hierarchical"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

SLOT_BYTES = 8  # row and weight of a choice, where tokens go once per rank
SAVING = 1.3  # bytes saved must pay for the second sum and the slots' own exchange


def expected_groups(num_experts: int, num_groups: int, top_k: int) -> float:
    """Return how many of ``num_groups`` equal blocks of experts a token needs, on average.

    Its ``top_k`` distinct experts are drawn evenly: a block of ``n`` is missed with probability
    ``C(E - n, k) / C(E, k)``.
    """
    block = num_experts // num_groups
    missed = comb(num_experts - block, top_k) / comb(num_experts, top_k)
    return num_groups * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Expected bytes that one token's forward sends to other ranks, there and back."""

    off_node: float
    in_node: float

    @property
    def total(self) -> float:
        """Return both together."""
        return self.off_node + self.in_node


def expected_bytes(
    kind: Kind,
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    row_bytes: int,
    node_size: int | None = None,
) -> Bytes:
    """Return what a token's forward is expected to send where every expert is as likely.

    ``node_size`` ranks make a node, by default all of them. `ExpertConfigError` for an unknown
    ``kind``, for numbers that make no layer, and where ranks do not divide experts, or nodes ranks.
    """
    if kind not in _KINDS:
        raise ExpertConfigError(f"kind={kind!r} is not one of {list(_KINDS)}")
    check_sizes({"num_ranks": num_ranks, "num_experts": num_experts, "row_bytes": row_bytes})
    check_choices(top_k, num_experts)
    if node_size is not None:
        check_sizes({"node_size": node_size})
    node_size = node_size or num_ranks
    if num_experts % num_ranks or num_ranks % node_size:
        raise ExpertConfigError(
            f"num_ranks={num_ranks} must divide num_experts={num_experts}, and "
            f"node_size={node_size} must divide num_ranks"
        )
    nodes = num_ranks // node_size
    abroad, beside = 1 - node_size / num_ranks, (node_size - 1) / num_ranks
    if kind == "local":
        return Bytes(off_node=0, in_node=0)
    if kind == "all_to_all":
        each = 2.0 * top_k * row_bytes
        return Bytes(off_node=each * abroad, in_node=each * beside)
    if kind == "dedup":
        each = 2 * expected_groups(num_experts, num_ranks, top_k) * row_bytes + top_k * SLOT_BYTES
        return Bytes(off_node=each * abroad, in_node=each * beside)
    # Inside a node all that came to it is spread: its own tokens', and others' after the first hop.
    first = 2 * expected_groups(num_experts, nodes, top_k) * row_bytes + top_k * SLOT_BYTES
    second = 2 * expected_groups(num_experts, num_ranks, top_k) * row_bytes + top_k * SLOT_BYTES
    return Bytes(off_node=first * abroad, in_node=second * (node_size - 1) / node_size)


def choose_dispatcher(
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    row_bytes: int,
    node_size: int | None = None,
) -> Kind:
    """Return the dispatcher with the fewest expected bytes that is worth its bookkeeping.

    A simpler one stays unless the next saves more than a factor of `SAVING`: in all bytes for
    ``dedup`` over ``all_to_all``, in bytes between nodes for ``hierarchical`` over both. A router
    that keeps a token's experts on few groups sends less than expected here: give the style a
    `Dedup` or `Hierarchical` of your own then.
    `ExpertConfigError` as `expected_bytes`.
    """
    sizes = dict(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, row_bytes=row_bytes)
    _, flat, dedup, hierarchical = (expected_bytes(k, **sizes, node_size=node_size) for k in _KINDS)
    if num_ranks == 1:
        return "local"
    best: Kind = "all_to_all"
    bytes_between = flat.off_node
    if flat.total > SAVING * dedup.total:
        best, bytes_between = "dedup", dedup.off_node
    if node_size and 1 < node_size < num_ranks and bytes_between > SAVING * hierarchical.off_node:
        best = "hierarchical"
    return best


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
