"""Estimates of memory and time for all valid configurations of a run. Needs no torch."""

from ._calibration import CONSTANTS as CONSTANTS
from ._calibration import Calibration as Calibration
from ._cluster import ACCELERATORS as ACCELERATORS
from ._cluster import Accelerator as Accelerator
from ._cluster import Cluster as Cluster
from ._hints import Hint as Hint
from ._hints import hints as hints
from ._result import Candidate as Candidate
from ._result import Comparison as Comparison
from ._result import MemorySplit as MemorySplit
from ._result import Plan as Plan
from ._result import Rejection as Rejection
from ._result import Setting as Setting
from ._result import TimeSplit as TimeSplit
from ._result import Trust as Trust
from ._search import compare as compare
from ._search import estimate as estimate
from ._search import plan as plan
from ._search import smallest_world as smallest_world
from ._shape import MODELS as MODELS
from ._shape import ModelShape as ModelShape
from ._train import TrainSpec as TrainSpec

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
