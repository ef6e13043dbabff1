"""Estimates of memory and time for all valid configurations of a run. Needs no torch."""

from ._calibration import CONSTANTS, Calibration
from ._cluster import ACCELERATORS, Accelerator, Cluster
from ._hints import Hint, hints
from ._result import Candidate, Comparison, MemorySplit, Plan, Rejection, Setting, TimeSplit, Trust
from ._search import compare, estimate, plan, smallest_world
from ._shape import MODELS, ModelShape
from ._train import TrainSpec

__all__ = [
    "ACCELERATORS",
    "CONSTANTS",
    "MODELS",
    "Accelerator",
    "Calibration",
    "Candidate",
    "Cluster",
    "Comparison",
    "Hint",
    "MemorySplit",
    "ModelShape",
    "Plan",
    "Rejection",
    "Setting",
    "TimeSplit",
    "TrainSpec",
    "Trust",
    "compare",
    "estimate",
    "hints",
    "plan",
    "smallest_world",
]
