"""Accelerators, and how fast they reach each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .._errors import Violation, join_words, raise_errors
from ._numbers import amount_violations, integer_violations, number_violation, take_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device by its data sheet: GiB of memory, dense bf16 and fp8 TFLOP/s, GB/s of memory.

    ``tflops_fp8`` is 0 where there is no fp8. Raises `ParallelDimsError` with every wrong number.
    """

    name: str
    memory_gib: float
    tflops: float
    tflops_fp8: float = 0
    hbm_gbs: float

    def __post_init__(self) -> None:
        values = {n: getattr(self, n) for n in ("memory_gib", "tflops", "hbm_gbs")}
        wrong = [*amount_violations(values)]
        raise_errors([*wrong, *amount_violations({"tflops_fp8": self.tflops_fp8}, zero=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of connection: bytes per second of each device in one direction, seconds per hop."""

    bandwidth: float
    latency: float


# The makers' data sheets; memory as the driver reports it. H100-96 is the HBM2e model at 500 W that
# the runs published for torchtitan used: their authors place its peak between those of the SXM and
# the NVL board, whose figure this is.
ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Accelerator(name="A100-80", memory_gib=80.0, tflops=312, hbm_gbs=2039),
            Accelerator(name="H100", memory_gib=79.6, tflops=989, tflops_fp8=1979, hbm_gbs=3350),
            Accelerator(name="H100-96", memory_gib=95.0, tflops=835, tflops_fp8=1671, hbm_gbs=2400),
            Accelerator(name="H200", memory_gib=140.4, tflops=989, tflops_fp8=1979, hbm_gbs=4800),
            Accelerator(name="B200", memory_gib=179.1, tflops=2250, tflops_fp8=4500, hbm_gbs=8000),
        )
    }
)
# GB/s of each device in one direction: NVLink inside a node, one network card for each outside.
_LINKS = {
    "A100-80": (300.0, 25.0),
    "H100": (450.0, 50.0),
    "H100-96": (450.0, 50.0),
    "H200": (450.0, 50.0),
    "B200": (900.0, 50.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in nodes, a fast link inside a node and a slow one between nodes.

    ``accelerator`` may be a name of `ACCELERATORS`, in any case. ``intra_gbs`` and ``inter_gbs``
    are GB/s of each device in one direction, ``intra_us`` and ``inter_us`` microseconds of one hop.
    None takes what nodes with this accelerator usually have; for an accelerator that is not in the
    table both bandwidths must be given. Raises `ParallelDimsError` with every wrong number.
    """

    world_size: int
    accelerator: Accelerator | str
    ranks_per_node: int = 8
    intra_gbs: float | None = None
    inter_gbs: float | None = None
    intra_us: float = 2.0
    inter_us: float = 5.0

    def __post_init__(self) -> None:
        if isinstance(self.accelerator, str):
            chip = ACCELERATORS.get(self.accelerator.upper(), self.accelerator)
            object.__setattr__(self, "accelerator", chip)
        take_integers(self, ("world_size", "ranks_per_node"))
        raise_errors(_violations(self))
        intra, inter = _LINKS.get(self.device.name, (self.intra_gbs, self.inter_gbs))
        if self.intra_gbs is None:
            object.__setattr__(self, "intra_gbs", intra)
        if self.inter_gbs is None:
            object.__setattr__(self, "inter_gbs", inter)

    @property
    def device(self) -> Accelerator:
        """Return the accelerator, also where it was given by name."""
        if isinstance(self.accelerator, str):  # only before the names have been looked up
            return ACCELERATORS[self.accelerator]
        return self.accelerator

    @property
    def fast(self) -> Link:
        """Return the link inside a node."""
        return Link(bandwidth=(self.intra_gbs or 0) * 1e9, latency=self.intra_us * 1e-6)

    @property
    def slow(self) -> Link:
        """Return the link between nodes."""
        return Link(bandwidth=(self.inter_gbs or 0) * 1e9, latency=self.inter_us * 1e-6)


def _violations(cluster: Cluster) -> Iterator[Violation]:
    sizes = {"world_size": cluster.world_size, "ranks_per_node": cluster.ranks_per_node}
    yield from integer_violations(sizes)
    latencies = {"intra_us": cluster.intra_us, "inter_us": cluster.inter_us}
    yield from amount_violations(latencies, zero=True)
    speeds = {"intra_gbs": cluster.intra_gbs, "inter_gbs": cluster.inter_gbs}
    yield from amount_violations({n: v for n, v in speeds.items() if v is not None})
    chip = cluster.accelerator
    name = chip.name if isinstance(chip, Accelerator) else chip
    if not isinstance(chip, Accelerator):
        legal = f"{join_words(ACCELERATORS)}, or an Accelerator"
        yield number_violation("accelerator", chip, legal)
    elif name not in _LINKS:
        for speed, value in speeds.items():
            if value is None:
                legal = f"GB/s, which are not known for accelerator {name!r}"
                yield number_violation(speed, None, legal)
