"""Which configuration of a run to try first: memory and time of every valid one, without torch."""

from ._catalogue import MODELS as MODELS
from ._cluster import ACCELERATORS as ACCELERATORS
from ._cluster import Accelerator as Accelerator
from ._cluster import Cluster as Cluster
from ._constants import CONSTANTS as CONSTANTS
from ._plan import Plan as Plan
from ._result import Candidate as Candidate
from ._result import MemorySplit as MemorySplit
from ._result import Rejection as Rejection
from ._result import TimeSplit as TimeSplit
from ._search import estimate as estimate
from ._search import plan as plan
from ._shape import ModelShape as ModelShape
from ._train import TrainSpec as TrainSpec

__all__ = [
    "ACCELERATORS",
    "CONSTANTS",
    "MODELS",
    "Accelerator",
    "Candidate",
    "Cluster",
    "MemorySplit",
    "ModelShape",
    "Plan",
    "Rejection",
    "TimeSplit",
    "TrainSpec",
    "estimate",
    "plan",
]
