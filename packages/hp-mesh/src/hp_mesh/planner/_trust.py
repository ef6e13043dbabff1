"""How far to trust an estimate: which published runs a configuration resembles."""

from collections.abc import Iterator
from typing import NamedTuple

from ._cluster import Cluster
from ._configuration import Degrees
from ._model import ModelShape
from ._result import Setting, TimeSplit, Trust
from ._train import TrainSpec


class Published(NamedTuple):
    """A class of published runs; ``error`` is cross-validated by ``benchmarks/calibrate.py``."""

    name: str
    runs: int
    error: float
    largest: int


# The families of accelerators by what their kernels have in common.
AMPERE = ("A100-40", "A100-80")
HOPPER = ("H100", "H100-96", "H800", "H200")
CLASSES = {
    ("ampere", "bf16", False): Published("dense bf16 on A100", 13, 0.05, 2520),
    ("hopper", "bf16", False): Published("dense bf16 on H100", 22, 0.06, 16384),
    ("hopper", "fp8", False): Published("dense fp8 on H100", 31, 0.10, 1024),
    ("hopper", "bf16", True): Published("experts in bf16 on H100", 5, 0.14, 1024),
}


def trust_of(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    degrees: Degrees,
    setting: Setting,
    time: TimeSplit,
) -> Trust:
    """Return the published runs that a configuration resembles, and what sets it apart."""
    chip = cluster.device.name
    family = "ampere" if chip in AMPERE else "hopper" if chip in HOPPER else chip
    precision = "fp8" if train.float8 else "bf16"
    published = CLASSES.get((family, precision, model.experts > 0))
    if published is None:
        experts = "with experts" if model.experts else "without experts"
        return Trust(
            resembles="", runs=0, error=None, differs=(f"{precision} {experts} on {chip}",)
        )
    differs = tuple(_differences(published, cluster, train, degrees, setting, time))
    error = published.error if len(differs) < 2 else None
    name = published.name if error is not None else ""
    return Trust(resembles=name, runs=published.runs if name else 0, error=error, differs=differs)


def _differences(
    published: Published,
    cluster: Cluster,
    train: TrainSpec,
    degrees: Degrees,
    setting: Setting,
    time: TimeSplit,
) -> Iterator[str]:
    """Yield in what no published run of a class is like the configuration."""
    if cluster.world_size > 2 * published.largest:
        yield f"{cluster.world_size} devices; the largest published run has {published.largest}"
    if degrees.tp > cluster.ranks_per_node:
        yield f"tp={degrees.tp} leaves the node"
    if degrees.cp > 8:
        yield f"cp={degrees.cp}; the published runs have 8 at most"
    if degrees.ulysses_degree > 1 or (degrees.cp > 1 and train.context == "all-gather"):
        yield "parts of a sequence meet in another way than in a ring"
    if train.seq_len > 262144:
        yield f"seq_len={train.seq_len}; the published runs have 262144 at most"
    if setting.schedule in ("zero-bubble", "dualpipe"):
        yield f"schedule {setting.schedule}"
    if time.compute < time.total / 2:
        yield "less than half of the step is computing"
