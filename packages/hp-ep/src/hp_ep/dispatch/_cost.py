"""What each dispatcher is expected to move and to cost, from numbers alone."""

from dataclasses import dataclass
from math import ceil, comb
from typing import Literal, get_args

from hp_dtensor import AlphaBeta

from .._errors import ExpertConfigError
from .._sizes import check_choices, check_factors, check_sizes

Kind = Literal["local", "all_to_all", "dedup", "hierarchical"]
_KINDS: tuple[Kind, ...] = get_args(Kind)

ASSIGNMENT_BYTES = 8  # expert and weight of a choice, where tokens go once per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a dispatch, its combine and their backward start, whatever the number of tokens."""

    operators: int
    exchanges: int
    """All-to-alls over each axis."""


WORK: dict[Kind, Started] = {
    "local": Started(operators=23, exchanges=0),
    "all_to_all": Started(operators=39, exchanges=5),
    "dedup": Started(operators=61, exchanges=7),
    "hierarchical": Started(operators=109, exchanges=7),
}
"""Counted: tests/test_operators.py and tests/test_overlap_order.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What calls, bytes, operators and copies cost."""

    links: AlphaBeta
    """Seconds a call and a byte between nodes, and inside one."""
    operator_seconds: float
    """Host time of an operator."""
    memory_bytes_per_second: float


# An operator's 5 us are an order of magnitude; benchmarks/gpu.py prints that of a machine.
MACHINES = {
    # Latencies are NCCL's own for its simple protocol, 8.4 us and 14.0 us for a network or 3.4 us
    # for NVLink (baseLat and hwLat of its src/graph/tuning.cc). Bandwidths: a 400 Gb/s adapter for
    # each GPU (NVIDIA ConnectX-7 data sheet); NVLink 4, 900 GB/s both ways together, and memory
    # (NVIDIA H100 SXM data sheet).
    "cuda": Machine(
        links=AlphaBeta(alpha=(22.4e-6, 11.8e-6), beta=(1 / 50e9, 1 / 450e9)),
        operator_seconds=5e-6,
        memory_bytes_per_second=3.35e12,
    ),
    # Ethernet of 10 Gb/s (IEEE 802.3ae); inside, two copies through one channel of memory; eight
    # channels of DDR4-3200, 25.6 GB/s each (JESD79-4). Latencies of TCP: an order of magnitude.
    "cpu": Machine(
        links=AlphaBeta(alpha=(50e-6, 20e-6), beta=(1 / 1.25e9, 4 / 25.6e9)),
        operator_seconds=5e-6,
        memory_bytes_per_second=8 * 25.6e9,
    ),
}
"""By device type; all but the CPU are taken for GPUs."""
NUM_TOKENS = 8192
"""Tokens of a rank in one call by default: a sequence of Llama 3 (arXiv 2407.21783, section 3)."""
MARGIN = 1.1
"""What a simpler dispatcher may cost more: prices are no better than that."""


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
    nodes, choices = num_ranks // node_size, top_k * ASSIGNMENT_BYTES
    abroad, beside = 1 - node_size / num_ranks, (node_size - 1) / num_ranks
    if kind == "local":
        return Bytes(off_node=0, in_node=0)
    if kind == "all_to_all":
        each = 2.0 * top_k * row_bytes
        return Bytes(off_node=each * abroad, in_node=each * beside)
    second = 2 * expected_groups(num_experts, num_ranks, top_k) * row_bytes + choices
    if kind == "dedup":
        return Bytes(off_node=second * abroad, in_node=second * beside)
    # Inside a node all that came to it is spread: its own tokens', and those of other nodes.
    first = 2 * expected_groups(num_experts, nodes, top_k) * row_bytes + choices
    return Bytes(off_node=first * abroad, in_node=second * (node_size - 1) / node_size)


def expected_seconds(
    kind: Kind,
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    row_bytes: int,
    node_size: int | None = None,
    num_tokens: int = NUM_TOKENS,
    links: AlphaBeta | None = None,
    device_type: str = "cuda",
) -> float:
    """Return the expected seconds of a dispatch, its combine and their backward on one rank.

    The sum of what is started (`WORK`, each operator and each call on a link), of the
    bytes on the links, and of the rows that are copied in memory. A flat all-to-all uses both kinds
    of links at once and costs what the slower does; the two of ``hierarchical`` follow each other.
    Numbers are those of `choose_dispatcher`.
    """
    sizes = dict(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, row_bytes=row_bytes)
    moved = expected_bytes(kind, **sizes, node_size=node_size)
    check_sizes({"num_tokens": num_tokens})
    node_size = node_size or num_ranks
    machine = MACHINES["cpu" if device_type == "cpu" else "cuda"]
    links = _checked(machine.links if links is None else links)
    between, inside = node_size < num_ranks, node_size > 1
    # Backward moves what forward does.
    travels = [
        links.seconds((axis,), num_ranks, 2 * num_tokens * moved_bytes) - _latency(links, axis)
        for axis, moved_bytes in enumerate((moved.off_node, moved.in_node))
    ]
    latencies = [between * _latency(links, 0), inside * _latency(links, 1)]
    whole = sum if kind == "hierarchical" else max
    started = WORK[kind]
    rows = _rows_copied(kind, num_ranks, num_ranks // node_size, num_experts, top_k)
    copied = 2 * num_tokens * rows * row_bytes
    return (
        started.operators * machine.operator_seconds
        + started.exchanges * whole(latencies)
        + whole(travels)
        + copied / machine.memory_bytes_per_second
    )


def _checked(links: object) -> AlphaBeta:
    if not isinstance(links, AlphaBeta) or any(
        isinstance(given, tuple) and len(given) != 2 for given in (links.alpha, links.beta)
    ):
        raise ExpertConfigError(
            f"links={links!r} must be an AlphaBeta whose alpha and beta are one number each, or "
            "pairs: between nodes, and inside one"
        )
    return links


def _latency(links: AlphaBeta, axis: int) -> float:
    return links.seconds((axis,), 1, 0)


def _rows_copied(kind: Kind, ranks: int, nodes: int, num_experts: int, top_k: int) -> float:
    """Return how many rows a token's forward reads and writes: gathers, orders and sums."""
    if kind == "local":
        return 3 * top_k + 1
    if kind == "all_to_all":
        return 7 * top_k + 1
    each, node = (expected_groups(num_experts, n, top_k) for n in (ranks, nodes))
    copied = 4 * each + 3 * top_k + 1
    return copied if kind == "dedup" else copied + 4 * node


def choose_dispatcher(
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    row_bytes: int,
    node_size: int | None = None,
    num_tokens: int = NUM_TOKENS,
    links: AlphaBeta | None = None,
    device_type: str = "cuda",
) -> Kind:
    """Return the name of the dispatcher with the lowest estimated time of a forward and backward.

    The estimate includes latency, bytes on each link, operators and copied rows. A more complex
    dispatcher is chosen only if a simpler one takes more than 1.1 times as long. The estimate
    assumes that tokens choose all experts equally often. If a router limits the groups of a token
    (``topk_group``), `Dedup` and `Hierarchical` send less than estimated; in that case, pass one of
    them to the style.

    Args:
        num_ranks: Number of ranks that split the experts.
        num_experts: Number of experts of all ranks; with a `Placement`, the number of its slots.
        top_k: Number of experts per token.
        row_bytes: Bytes of one token.
        node_size: Number of ranks per node. ``"hierarchical"`` needs several nodes with several
            ranks each. Defaults to None: all ranks are on one node.
        num_tokens: Number of tokens of a rank in one call. Defaults to 8,192.
        links: Latency and seconds per byte, as an ``AlphaBeta`` of hp-dtensor. Each is one number
            for all links, or a pair ``(between nodes, inside a node)``. Defaults to None: built-in
            values for ``device_type``.
        device_type: ``"cuda"`` or ``"cpu"``. Defaults to ``"cuda"``.

    Returns:
        ``"local"``, ``"all_to_all"``, ``"dedup"`` or ``"hierarchical"``.

    Raises:
        ExpertConfigError: A number is invalid, ``num_ranks`` does not divide ``num_experts``, or
            ``node_size`` does not divide ``num_ranks``.

    Examples:
        >>> choose_dispatcher(num_ranks=64, num_experts=256, top_k=8, row_bytes=14336, node_size=8)
        'hierarchical'
    """
    sizes = dict(num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, row_bytes=row_bytes)

    def price(kind: Kind) -> float:
        return expected_seconds(
            kind,
            **sizes,
            node_size=node_size,
            num_tokens=num_tokens,
            links=links,
            device_type=device_type,
        )

    best: Kind = "all_to_all"
    cost = price(best)
    if num_ranks == 1:
        return "local"
    if cost > MARGIN * price("dedup"):
        best, cost = "dedup", price("dedup")
    several = node_size is not None and 1 < node_size < num_ranks
    return "hierarchical" if several and cost > MARGIN * price("hierarchical") else best


def choose_capacity(factor: float, *, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the ``capacity`` of `Padded` for a capacity factor.

    The result is ``factor * num_tokens * top_k / num_experts``, rounded up (GShard, arXiv
    2006.16668, section 2.2).

    Args:
        factor: Capacity divided by the number of rows that each expert gets if all experts get
            equally many. With 1, no row is lost in this case.
        num_tokens: Largest number of tokens of a rank in one call, the same on all ranks.
        top_k: Number of experts per token.
        num_experts: Number of experts of all ranks.

    Returns:
        Number of rows from each rank for each expert, at least 1.

    Raises:
        ExpertConfigError: A number is invalid, or ``factor`` is 0.

    Examples:
        >>> choose_capacity(1.25, num_tokens=4096, top_k=8, num_experts=64)
        640
    """
    check_sizes({"num_tokens": num_tokens, "num_experts": num_experts})
    check_choices(top_k, num_experts)
    check_factors({"factor": factor})
    if not factor:
        raise ExpertConfigError("factor=0 leaves room for no row; use a number above 0")
    # 1.1 * 10 is a little above 11, which one more row would not help.
    return ceil(round(factor * num_tokens * top_k / num_experts, 6)) or 1
