"""What can be wrong with a layout or a pair of layouts; all are found before any communication."""


class LayoutError(ValueError):
    """A layout, or a pair of layouts, that cannot be; the base of this package's layout errors."""


class PlacementCountError(LayoutError):
    """There is not one placement for each mesh axis."""


class PlacementTypeError(LayoutError):
    """Something given as a placement, layout or DTensor that is none, or none that is known."""


class ShardDimError(LayoutError):
    """A placement shards a dim that the tensor does not have."""


class ShardOrderError(LayoutError):
    """A shard order does not list exactly the axes that shard a dim."""


class MixedPartialError(LayoutError):
    """Partial values of several axes whose reductions do not commute."""


class PartialTargetError(LayoutError):
    """A target asks for partial values that the source does not hold."""


class PartialSourceError(LayoutError):
    """A transfer would have to reduce partial values; it only moves data."""


class RankNotInMesh(LayoutError):
    """A rank that holds no part of the layout."""


class CrossMeshError(LayoutError):
    """Source and target lie on different meshes."""


class LocalShapeMismatch(LayoutError):
    """A rank's local tensor has another shape than its layout says."""


class RaggedSizesError(LayoutError):
    """The sizes of a ragged shard do not fit the mesh axis or the tensor."""


class MissingGroup(LayoutError):
    """A change needs a process group that does not exist, and there is no way without it."""


class CostModelError(LayoutError):
    """What was given as a cost model is none, or its prices do not fit the mesh."""


class PartialDtypeError(LayoutError):
    """Partial values would have to be reduced in a way that their dtype does not have."""


class RanksDisagree(LayoutError):
    """Ranks call for a change of mesh with different tensors, targets or limits."""


class RaggedOpError(TypeError):
    """An operator that ragged tensors do not have, or operands of it that lie differently."""


class NoPlan(LayoutError):
    """Every way to the target needs more memory than allowed.

    ``max_bytes`` is the limit that was given, ``best_peak`` the least that some way needs.
    """

    def __init__(self, message: str, *, max_bytes: int, best_peak: int) -> None:
        super().__init__(message)
        self.max_bytes = max_bytes
        self.best_peak = best_peak

    def __reduce__(self) -> tuple[object, ...]:
        return _no_plan, (str(self), self.max_bytes, self.best_peak)


def _no_plan(message: str, max_bytes: int, best_peak: int) -> NoPlan:
    return NoPlan(message, max_bytes=max_bytes, best_peak=best_peak)
