"""Accelerators, clusters with their links, and the estimated time of collectives.

A group is a set of ranks that communicate with one another. One `AxisGroup` describes all groups
along one mesh axis, such as all ``tp`` groups.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from .._errors import Violation, join_words, number_violation, raise_errors
from .._layout import AxisGroup, RankLayout
from .._rules import division_violations
from ._fields import check_fields, optional

NODE = 8  # default number of devices per node


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Memory, memory bandwidth and peak rates of one accelerator, from its data sheet.

    Args:
        name: Name of the device.
        memory_gib: Memory in GiB that the driver reports.
        tflops: Peak of dense bf16 matrix products, in TFLOP/s.
        tflops_fp8: Peak of dense fp8 matrix products, in TFLOP/s; 0 if the device has no fp8.
        hbm_gbs: Memory bandwidth in GB/s.

    Raises:
        ParallelDimsError: A value is invalid. The error lists all of them.

    Examples:
        >>> chip = Accelerator(name="Chip", memory_gib=96, tflops=500, hbm_gbs=3000)
        >>> Cluster(world_size=16, accelerator=chip, intra_gbs=200, inter_gbs=25).device.tflops
        500
    """

    name: str
    memory_gib: float
    tflops: float
    tflops_fp8: float = 0
    hbm_gbs: float

    def __post_init__(self) -> None:
        wrong = check_fields(self)
        if not isinstance(name := cast(object, self.name), str) or not name:
            wrong.append(number_violation("name", name, "a word"))
        raise_errors(wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bandwidth and latency of the links inside a node, or of the links between nodes.

    Attributes:
        bandwidth: Bytes per second that one device sends in one direction.
        latency: Latency of one hop, in seconds.
    """

    bandwidth: float
    latency: float


# Rates are for dense matrices, from the makers' data sheets. The driver reports the memory.
# H100-96 has HBM2e memory and 500 W; torchtitan's published runs used it. The authors of these runs
# say that its peak is between the peaks of the SXM and the NVL board. The table has the peak of the
# NVL board. Source of the TPUs: cloud.google.com/tpu/docs.
_CHIPS = (
    # Name, GiB, bf16 TFLOP/s, fp8 TFLOP/s, memory GB/s, and GB/s per device and direction inside a
    # node (NVLink, Infinity Fabric, inter-chip interconnect) and between nodes (network card).
    ("A100-40", 39.6, 312, 0, 1555, 300, 25),
    ("A100-80", 80.0, 312, 0, 2039, 300, 25),
    ("H100", 79.6, 989, 1979, 3350, 450, 50),
    ("H100-96", 95.0, 835, 1671, 2400, 450, 50),
    ("H800", 79.6, 989, 1979, 3350, 200, 50),
    ("H20", 95.6, 148, 296, 4000, 450, 50),
    ("H200", 140.4, 989, 1979, 4800, 450, 50),
    ("B200", 179.1, 2250, 4500, 8000, 900, 50),
    ("GB200", 184.0, 2500, 5000, 8000, 900, 50),
    ("B300", 268.0, 2250, 4500, 8000, 900, 100),
    ("MI300X", 192.0, 1307, 2615, 5300, 448, 50),
    ("TPU-v5p", 95.0, 459, 0, 2765, 600, 25),
    ("TPU-v6e", 31.2, 918, 0, 1640, 400, 25),
)
ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        name: Accelerator(
            name=name, memory_gib=memory, tflops=half, tflops_fp8=quarter, hbm_gbs=bandwidth
        )
        for name, memory, half, quarter, bandwidth, _, _ in _CHIPS
    }
)
"""Known accelerators. A key is the name of an accelerator, such as ``"H100"``."""
# Bandwidths inside a node and between nodes, in GB/s.
_LINKS: Mapping[Accelerator, tuple[float, float]] = {
    ACCELERATORS[chip[0]]: (chip[5], chip[6]) for chip in _CHIPS
}
# Accelerators by name in upper case. The name of a family, such as A100, is an alias of its most
# common member.
_NAMED = {name.upper(): chip for name, chip in ACCELERATORS.items()}
_NAMED |= {"A100": _NAMED["A100-80"], "H100-80": _NAMED["H100"]}


def name_of(chip: Accelerator) -> str:
    """Return the name of an accelerator.

    The result is ``"a modified NAME"`` if the accelerator with this name in `ACCELERATORS` has
    other field values.
    """
    known = ACCELERATORS.get(chip.name, chip)
    return chip.name if chip == known else f"a modified {chip.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in nodes, with fast links inside a node and slow links between nodes.

    Args:
        world_size: Number of devices.
        accelerator: An `Accelerator`, or a key of `ACCELERATORS` in upper or lower case. ``"A100"``
            means A100-80.
        ranks_per_node: Number of devices that the fast links connect: 8 for an HGX board, 72 for an
            NVL72 rack. It must divide ``world_size``, or be at least as large. With the default,
            the last node may have fewer devices.
        intra_gbs: Bandwidth of each device in one direction inside a node, in GB/s. Defaults to the
            usual bandwidth of the accelerator. Required if the accelerator is not in
            `ACCELERATORS`.
        inter_gbs: Bandwidth of each device in one direction between nodes, in GB/s. Defaults to the
            usual bandwidth of the accelerator. Required if the accelerator is not in
            `ACCELERATORS`.
        intra_us: Latency of one hop inside a node, in microseconds.
        inter_us: Latency of one hop between nodes, in microseconds.
        memory_fraction: Share of a device's memory that a plan may use. Defaults to
            ``memory_fraction`` of the `TrainSpec`.

    Raises:
        ParallelDimsError: A value is invalid. The error lists all of them.

    Examples:
        >>> Cluster(world_size=256, accelerator="H100", inter_gbs=25).device.memory_gib
        79.6
    """

    world_size: int
    accelerator: Accelerator | str
    ranks_per_node: int = NODE
    intra_gbs: float | None = optional(
        None, "bandwidth per device and direction inside a node (default: data sheet)", unit="GB/s"
    )
    inter_gbs: float | None = optional(
        None, "bandwidth per device and direction between nodes (default: data sheet)", unit="GB/s"
    )
    intra_us: float = optional(
        2.0, "latency of one hop inside a node", unit="microseconds", zero=True
    )
    inter_us: float = optional(
        20.0, "latency of one hop between nodes", unit="microseconds", zero=True
    )
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.accelerator, str):
            chip = _NAMED.get(self.accelerator.upper(), self.accelerator)
            object.__setattr__(self, "accelerator", chip)
        raise_errors([*check_fields(self), *_device_violations(self)])
        world, node = self.world_size, self.ranks_per_node
        if node < world and node != NODE:
            raise_errors(
                division_violations("topology", "world_size", world, {"ranks_per_node": node})
            )

    @property
    def device(self) -> Accelerator:
        """The `Accelerator`, also if the constructor received its name."""
        return cast(Accelerator, self.accelerator)  # `__post_init__` replaced the name

    @property
    def fast(self) -> Link:
        """`Link` inside a node. Uses the accelerator's usual bandwidth if ``intra_gbs`` is None."""
        bandwidth = self.intra_gbs or _LINKS[self.device][0]
        return Link(bandwidth=bandwidth * 1e9, latency=self.intra_us * 1e-6)

    @property
    def slow(self) -> Link:
        """`Link` between nodes. Uses the accelerator's usual bandwidth if ``inter_gbs`` is None."""
        bandwidth = self.inter_gbs or _LINKS[self.device][1]
        return Link(bandwidth=bandwidth * 1e9, latency=self.inter_us * 1e-6)


def _device_violations(cluster: Cluster) -> Iterator[Violation]:
    chip = cluster.accelerator
    if not isinstance(chip, Accelerator):
        legal = f"{join_words(ACCELERATORS)}, or an Accelerator"
        yield number_violation("accelerator", chip, legal)
    elif chip not in _LINKS:
        for speed in ("intra_gbs", "inter_gbs"):
            if getattr(cluster, speed) is None:
                legal = f"GB/s; the usual bandwidth of {name_of(chip)} is not known"
                yield number_violation(speed, None, legal)


def groups_of(layout: RankLayout, *, replicated: bool = False) -> dict[str, AxisGroup]:
    """Return the groups over which dense layers communicate, as one `AxisGroup` per key.

    | key | group |
    |---|---|
    | ``tp``, ``cp``, ``fsdp``, ``dp_replicate``, ``pp`` | ranks along the axis of this name |
    | ``dense`` | ranks that sum the gradients of a dense parameter |
    | ``ring`` | ranks of ``cp`` that exchange keys and values |
    | ``ulysses`` | ranks of ``cp`` that exchange heads |

    Args:
        layout: Ranks of all axes.
        replicated: True for ZeRO stage 0. Then the value of ``dense`` is the group of the axis
            ``loss``, which has all ranks of ``dp_replicate`` and ``fsdp``. Otherwise it is the
            group of the axis ``fsdp``.
    """
    axes = ("tp", "cp", "fsdp", "dp_replicate", "pp")
    groups = {name: layout.axis_group(name) for name in axes}
    groups["dense"] = layout.axis_group("loss") if replicated else groups["fsdp"]
    if "ulysses" in layout.names:
        parts = {"ring": layout.axis_group("cp_outer"), "ulysses": layout.axis_group("ulysses")}
    else:
        parts = {"ring": groups["cp"], "ulysses": AxisGroup(1, ())}
    return groups | parts


def expert_groups_of(layout: RankLayout, *, replicated: bool = False) -> dict[str, AxisGroup]:
    """Return the groups over which experts communicate, as one `AxisGroup` per key.

    | key | group |
    |---|---|
    | ``ep`` | ranks that send tokens to the experts of one another |
    | ``efsdp`` | ranks that sum the gradients of an expert |

    Args:
        layout: Ranks of all axes.
        replicated: True for ZeRO stage 0. Then all ranks with a copy of the expert sum its
            gradients: the value of the key ``efsdp`` is the group of the axis ``ep_replicate``,
            which has all ranks of ``dp_replicate`` and ``efsdp``. Otherwise it is the group of the
            axis ``efsdp``.
    """
    shared = layout.axis_group("ep_replicate" if replicated else "efsdp")
    return {"ep": layout.axis_group("ep"), "efsdp": shared}


class Links:
    """Estimates the time of collectives over the links of a cluster.

    The time is the latency plus the number of transferred bytes divided by the bandwidth. Sizes are
    in bytes, and times are in seconds.

    - All-gather and reduce-scatter use a ring of ranks (Thakur et al., Optimization of Collective
      Communication Operations in MPICH).
    - If a group has several ranks in each node, the traffic between nodes is split over the network
      cards of these ranks.

    Args:
        cluster: Devices and links.
        efficiency: Share of the bandwidth that collectives reach, from 0 to 1.
    """

    __slots__ = ("_fast", "_node", "_shared", "_slow", "_world")

    def __init__(self, cluster: Cluster, efficiency: float) -> None:
        self._node, self._world = cluster.ranks_per_node, cluster.world_size
        self._shared: dict[AxisGroup, int] = {}
        self._fast = cluster.fast.bandwidth * efficiency, cluster.fast.latency
        self._slow = cluster.slow.bandwidth * efficiency, cluster.slow.latency

    def ranks_on_node(self, group: AxisGroup) -> int:
        """Return the smallest number of ranks that a group has on one node.

        Nodes without a rank of the group do not count.
        """
        if group not in self._shared:
            self._shared[group] = group.on_one_node(self._node, self._world)
        return self._shared[group]

    def crosses(self, group: AxisGroup) -> bool:
        """Return True if the ranks of a group are on several nodes."""
        return self.ranks_on_node(group) < group.size

    def gather(self, group: AxisGroup, size: float) -> float:
        """Return the time of an all-gather or a reduce-scatter, in seconds.

        ``size`` is the number of bytes of the whole, unsharded tensor.
        """
        return self.latency(group) + self.transfer(group, size)

    def latency(self, group: AxisGroup) -> float:
        """Return the latency of an all-gather or a reduce-scatter, in seconds.

        A ring of ``n`` ranks takes ``n - 1`` steps. Each step takes the latency of the slowest hop.
        """
        _, latency = self._slow if self.crosses(group) else self._fast
        return (group.size - 1) * latency

    def transfer(self, group: AxisGroup, size: float) -> float:
        """Return the transfer time of an all-gather or a reduce-scatter, in seconds.

        The result does not include the latency. ``size`` is the number of bytes of the whole,
        unsharded tensor.
        """
        if group.size == 1:
            return 0.0
        bandwidth, _ = self._fast
        members = self.ranks_on_node(group)
        if members < group.size:
            bandwidth = min(bandwidth, self._slow[0] * members)
        return size * (group.size - 1) / group.size / bandwidth

    def all_reduce(self, group: AxisGroup, size: float) -> float:
        """Return the time of an all-reduce, in seconds. Each rank has ``size`` bytes."""
        return 2 * self.gather(group, size)

    def all_to_all(self, group: AxisGroup, size: float) -> float:
        """Return the time of an all-to-all, in seconds.

        ``size`` is the number of bytes that one rank sends to all ranks of the group together.
        """
        if group.size == 1:
            return 0.0
        fast, latency = self._fast
        members = self.ranks_on_node(group)
        inside = size * (members - 1) / group.size / fast
        if members == group.size:
            return (group.size - 1) * latency + inside
        slow, slow_latency = self._slow
        outside = size * (group.size - members) / group.size / slow
        return (group.size - members) * slow_latency + max(inside, outside)

    def dispatch(self, group: AxisGroup, size: float, inside: float, outside: float) -> float:
        """Return the time in which all ranks send their tokens to the experts, in seconds.

        All messages start at the same time, so the latency of each kind of link counts once.
        Transfers inside a node overlap with transfers between nodes.

        Args:
            group: Ranks that have the experts.
            size: Number of bytes of the tokens of one rank, with each token counted once.
            inside: Mean number of transfers of one token over links inside nodes.
            outside: Mean number of transfers of one token over links between nodes.
        """
        if group.size == 1:
            return 0.0
        fast, latency = self._fast
        if not outside:
            return latency + inside * size / fast
        slow, slow_latency = self._slow
        return slow_latency + latency + max(inside * size / fast, outside * size / slow)

    def send(self, group: AxisGroup, size: float) -> float:
        """Return the time of sending ``size`` bytes to the next rank of the group, in seconds."""
        if group.size == 1:
            return 0.0
        bandwidth, latency = self._slow if self.crosses(group) else self._fast
        return latency + size / bandwidth
