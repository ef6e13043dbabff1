"""Published runs by class, and the class that a configuration resembles."""

from collections.abc import Iterator
from typing import NamedTuple

from ._cluster import Cluster, name_of
from ._result import Point, TimeSplit, Trust
from ._shape import ModelShape
from ._train import TrainSpec


class Published(NamedTuple):
    """A class of published runs.

    Attributes:
        name: Name of the class.
        runs: Number of runs.
        error: Mean error of their step times, cross-validated by ``benchmarks/calibrate.py``.
        largest: Largest number of devices.
    """

    name: str
    runs: int
    error: float
    largest: int


# Accelerators with the same kernels.
AMPERE_RUNS = "dense bf16 on A100"
DEEPSPEED_RUNS = "ZeRO stage 3 of DeepSpeed on A100"
STAGE_3 = "ZeRO stage 3"
AMPERE = ("A100-40", "A100-80")
HOPPER = ("H100", "H100-96", "H800", "H200")
# For each class: runs without pipeline stages (""), runs with each schedule, and runs with ZeRO
# stage 3. FSDP counts as no ZeRO stage. No constant is fitted to the runs with ZeRO stage 3, but
# its term was chosen on them: their error is not cross-validated, and there is no second source.
CLASSES = {
    ("ampere", "bf16", False): {
        "": Published(AMPERE_RUNS, 6, 0.04, 128),
        STAGE_3: Published(DEEPSPEED_RUNS, 6, 0.18, 2240),
        "1f1b": Published(AMPERE_RUNS, 3, 0.04, 2520),
        "interleaved": Published(AMPERE_RUNS, 4, 0.06, 280),
    },
    ("hopper", "bf16", False): {
        "": Published("dense bf16 on H100", 9, 0.09, 1024),
        "interleaved": Published("dense bf16 on H100", 13, 0.05, 16384),
    },
    ("hopper", "fp8", False): {
        "": Published("dense fp8 on H100", 13, 0.10, 1024),
        "1f1b": Published("dense fp8 on H100", 5, 0.17, 512),
        "interleaved": Published("dense fp8 on H100", 13, 0.07, 1024),
    },
    ("hopper", "bf16", True): {
        "": Published("experts in bf16 on H100", 2, 0.11, 512),
        "1f1b": Published("experts in bf16 on H100", 1, 0.17, 1024),
        "interleaved": Published("experts in bf16 on H100", 2, 0.10, 1024),
    },
}


def trust_of(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    point: Point,
    time: TimeSplit,
) -> Trust:
    """Return the published runs that a configuration resembles, and the differences to them."""
    degrees, setting, chip = point.degrees, point.setting, name_of(cluster.device)
    family = "ampere" if chip in AMPERE else "hopper" if chip in HOPPER else ""
    precision = "fp8" if train.float8 else "bf16"
    kinds = CLASSES.get((family, precision, model.experts > 0), {})
    schedule = setting.schedule if degrees.pp > 1 else ""
    stage_3 = setting.zero == 3 and degrees.fsdp > 1 and not schedule
    published = kinds.get(STAGE_3 if stage_3 else schedule)
    if setting.zero == 0 and schedule:
        feature = "ZeRO stage 0 with pipeline stages, which stalls in ways that are not explained"
        return Trust(resembles="", runs=0, error=None, differs=(feature,))
    if published is None:
        feature = f"{precision} {'with' if model.experts else 'without'} experts on {chip}"
        if kinds:
            feature += f" with {STAGE_3}" if stage_3 else f" with {schedule} pipelines"
        return Trust(resembles="", runs=0, error=None, differs=(feature,))
    differs = tuple(_differences(published, cluster, train, point, time))
    error = published.error if len(differs) < 2 else None
    name = published.name if error is not None else ""
    name += f" with {schedule} pipelines" if name and schedule else ""
    return Trust(resembles=name, runs=published.runs if name else 0, error=error, differs=differs)


def _differences(
    published: Published, cluster: Cluster, train: TrainSpec, point: Point, time: TimeSplit
) -> Iterator[str]:
    """Yield features of the configuration that no published run of the class has."""
    degrees, setting = point.degrees, point.setting
    if setting.zero == 0 and degrees.fsdp > 1:
        yield "ZeRO stage 0"
    if setting.zero in (2, 3) and degrees.pp > 1:
        yield f"ZeRO stage {setting.zero} with pipeline stages"
    if cluster.world_size > 2 * published.largest:
        yield f"{cluster.world_size} devices; the largest published run has {published.largest}"
    if degrees.tp > cluster.ranks_per_node:
        yield f"tp={degrees.tp} leaves the node"
    if degrees.cp > 8:
        yield f"cp={degrees.cp}; the published runs have 8 at most"
    if degrees.ulysses_degree > 1 or (degrees.cp > 1 and train.context == "all-gather"):
        yield "Ulysses or an all-gather over cp; the published runs use a ring"
    if train.fused == "attention":
        yield "eager elementwise kernels"
    if train.fused is False and published.name not in (AMPERE_RUNS, DEEPSPEED_RUNS):
        yield "attention that stores its scores"
    if train.seq_len > 262144:
        yield f"seq_len={train.seq_len}; the published runs have 262144 at most"
    if time.compute < time.total / 2:
        yield "less than half of the step is computing"
