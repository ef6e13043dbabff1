"""Estimate memory and time of all valid configurations of a training run, and rank them.

The package does not need torch.
"""

from ._calibration import CONSTANTS, Calibration, Trust
from ._cluster import ACCELERATORS, Accelerator, Cluster
from ._configuration import Rejection, Setting
from ._result import Candidate, Comparison, Hint, MemorySplit, Plan, TimeSplit
from ._search import compare, estimate, hints, plan, smallest_world
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
